"""Untrusted YAML: read as PyYAML reads it, but bounded, and without surprises."""

import io
import math
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gputile.text.documents import MANIFESTS, SETTINGS, DocumentLimits, NotYaml, content, read_all, read_one
from tests.effort import examples


def doubled(times: int, line: str, first: str) -> str:
    """Each line repeats the line before it several times: twenty such lines expand beyond any memory."""
    return first + "".join(line.format(name=f"a{n + 1}", before=f"a{n}") for n in range(times))


LAUGHS = doubled(30, "{name}: &{name} [*{before}, *{before}, *{before}, *{before}]\n", "a0: &a0 [x, x, x, x]\n")
MERGES = doubled(30, "{name}: &{name} {{<<: [*{before}, *{before}, *{before}]}}\n", "a0: &a0 {k: v}\n")
NESTS = doubled(200, "{name}: &{name} [*{before}]\n", "a0: &a0 [x]\n")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param(LAUGHS, "aliases repeat more than", id="aliases-that-double"),
        pytest.param(MERGES, "aliases repeat more than", id="merge-keys-that-double"),
        pytest.param(NESTS, "nested deeper than 100 levels", id="aliases-that-nest"),
        pytest.param("a: &a [*a]", "`*a` refers to itself", id="a-list-that-contains-itself"),
        pytest.param("a: &a {b: *a}", "`*a` refers to itself", id="a-mapping-that-contains-itself"),
        pytest.param("a: &a {<<: *a}", "`*a` refers to itself", id="a-mapping-that-merges-itself"),
        pytest.param("a: &a [{b: [*a]}]", "`*a` refers to itself", id="a-list-that-contains-itself-further-down"),
        pytest.param("a: *b\nb: &b 1", "`*b` has no anchor before it", id="an-alias-before-its-anchor"),
        pytest.param("&a 1\n--- *a", "has no anchor", id="an-alias-from-another-document"),
        pytest.param("[" * 100_000, "nested deeper than 100 levels", id="brackets"),
        pytest.param("- " * 100_000, "nested deeper than 100 levels", id="dashes"),
        pytest.param("{a: " * 100_000, "nested deeper than 100 levels", id="braces"),
        pytest.param("a: " + "9" * 5000, "is not a number", id="a-number-of-5000-digits"),
        pytest.param("a: 0x" + "f" * 5000, "is not a number", id="a-hexadecimal-number-of-5000-digits"),
        pytest.param("a: 1." + "9" * 5000, "is not a number", id="a-fraction-of-5000-digits"),
        pytest.param("a: !!int ''", "is not a number", id="an-invalid-int"),
        pytest.param("a: !!float x", "is not a number", id="an-invalid-float"),
        pytest.param("a: !!bool x", "neither true nor false", id="an-invalid-bool"),
        pytest.param("a: 0x_", "is not a number", id="a-hexadecimal-number-without-digits"),
        pytest.param("!!python/object:os.system {}", "tag", id="an-object-of-python"),
        pytest.param("a: !!python/name:os.system ''", "tag", id="a-name-of-python"),
        pytest.param("!!set {a, b}", "tag", id="a-set"),
        pytest.param("a: !mine 1", "unknown tag '!mine'", id="an-application-tag"),
        pytest.param("{[1]: 2}", "a key must be a string", id="a-list-as-key"),
        pytest.param("? {a: 1}\n: 2", "a key must be a string", id="a-mapping-as-key"),
        pytest.param("a: &a [1]\n*a : 2", "a key must be a string", id="an-alias-of-a-list-as-key"),
        pytest.param("a: {<<: 7}", "`<<` needs a mapping", id="a-number-merged"),
        pytest.param("a: {<<: [{}, 7]}", "`<<` needs a mapping", id="a-number-among-the-merged"),
        pytest.param("a: [", "a value is missing", id="half-a-list"),
        pytest.param("a: [1, 2\nb: 3", "lacks a comma or its `]`", id="a-list-without-end"),
        pytest.param("a: {b: 1\nc: 2", "lacks a comma or its `}`", id="a-mapping-without-end"),
        pytest.param("a: b: c", "quote the text, or check the indentation", id="two-colons"),
        pytest.param("a:\n  - x\n - y", "check the indentation", id="two-indentations"),
        pytest.param("\ta: 1", "use spaces, or quote the value", id="a-tab"),
        pytest.param("a: 'b", "no closing quote", id="half-a-quoted-text"),
        pytest.param("a: !x!y z", "unknown tag", id="a-tag-handle"),
        pytest.param("%YAML 9.9\n---\na: 1", "the syntax is invalid", id="a-problem-that-we-do-not-know"),
        pytest.param("\x00", "it has a control character", id="a-zero"),
        pytest.param(b"\xff\xfe\xff", "not valid UTF-8", id="invalid-utf8"),
        pytest.param("\ud800", "UTF-8", id="half-a-character"),
    ],
)
def test_what_is_rejected(text: str | bytes, says: str) -> None:
    with pytest.raises(NotYaml) as error:
        read_all(text)
    assert says in error.value.problem
    assert len(error.value.problem) < 300


def test_the_error_names_the_line() -> None:
    with pytest.raises(NotYaml) as error:
        read_all("a: 1\nb: [\n  !x 1]\n")
    assert error.value.line == 3


@pytest.mark.parametrize(
    ("text", "want"),
    [
        pytest.param("", [], id="nothing"),
        pytest.param("---\n---\n", [None, None], id="empty-documents"),
        pytest.param("a: 1\n---\nb: 2", [{"a": 1}, {"b": 2}], id="two-documents"),
        pytest.param("[yes, No, on, TRUE, y]", [[True, False, True, True, "y"]], id="booleans"),
        pytest.param("[~, null, NULL, {a: }, 'null']", [[None, None, None, {"a": None}, "null"]], id="nulls"),
        pytest.param("[1, -2, +3, 0, 1_000]", [[1, -2, 3, 0, 1000]], id="whole-numbers"),
        pytest.param("[0x1F, 012, 0b11, -0x10]", [[31, 10, 3, -16]], id="numbers-of-other-bases"),
        pytest.param("[1.5, .5, 1.5e+3, -1.0, 1e3]", [[1.5, 0.5, 1500.0, -1.0, "1e3"]], id="fractions-of-pyyaml"),
        pytest.param("[.inf, -.INF]", [[math.inf, -math.inf]], id="infinities"),
        pytest.param("['1', \"2\", !!str 3, ! 4]", [["1", "2", "3", "4"]], id="text-that-looks-like-numbers"),
        pytest.param("[!!int '7', !!float 7, !!bool no, !!null x]", [[7, 7.0, False, None]], id="tags"),
        pytest.param("[2026-01-01, 12:30, 1:30.5, !!timestamp 2026-01-01]",
                     [["2026-01-01", "12:30", "1:30.5", "2026-01-01"]], id="dates-and-base-60-stay-text"),
        pytest.param("{1: a, true: b, ~: c, 2026-01-01: d}", [{"1": "a", "true": "b", "~": "c", "2026-01-01": "d"}],
                     id="keys-are-always-text"),
        pytest.param("a: &x {k: 1}\nb: *x", [{"a": {"k": 1}, "b": {"k": 1}}], id="an-alias"),
        pytest.param("a: &x 7\n*x : 1", NotYaml, id="an-alias-of-a-number-is-not-a-key"),
        pytest.param("a: &x k\n*x : 1", [{"a": "k", "k": 1}], id="an-alias-of-text-is-a-key"),
        pytest.param("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}", [{"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}],
                     id="own-keys-win-over-merged-keys"),
        pytest.param("a: {y: 3, <<: {x: 1, y: 2}}", [{"a": {"x": 1, "y": 3}}], id="own-keys-win-in-any-order"),
        pytest.param("a: {<<: [{x: 1}, {x: 2, z: 3}]}", [{"a": {"x": 1, "z": 3}}], id="the-first-merged-wins"),
        pytest.param("a: {'<<': {x: 1}}", [{"a": {"<<": {"x": 1}}}], id="a-quoted-merge-key-is-a-key"),
        pytest.param("a: &a 1\na2: &a 2\nb: *a", [{"a": 1, "a2": 2, "b": 2}], id="an-anchor-may-be-redefined"),
        pytest.param('{"kind": "Pod", "a": [1, 2.5, null, true, "\\u00e9"]}',
                     [{"kind": "Pod", "a": [1, 2.5, None, True, "é"]}], id="json"),
    ],
)  # fmt: skip
def test_what_is_read(text: str, want: Any) -> None:
    if want is NotYaml:
        with pytest.raises(NotYaml):
            read_all(text)
    else:
        assert read_all(text) == want


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@given(VALUES, st.booleans())
@examples(100)
def test_what_pyyaml_writes_is_read_back(value: Any, twice: bool) -> None:
    """With aliases, which PyYAML writes for a repeated value."""
    value = [value, value] if twice else value
    assert read_one(yaml.safe_dump(value)) == value


@given(st.text("ab: -[]{}&*<!|>'\"\n#,?.0x1", max_size=40))
@examples(300)
def test_any_text_is_a_value_or_an_error(text: str) -> None:
    try:
        documents = read_all(text)
    except NotYaml:
        return
    msgspec.to_builtins(documents)  # terminates: no value contains itself


# ---- bounds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "text", "says"),
    [
        pytest.param(DocumentLimits(size=10), "a" * 11, "more than 10 bytes", id="bytes"),
        pytest.param(DocumentLimits(values=5), "[1, 2, 3, 4, 5]", "more than 5 values", id="values"),
        pytest.param(
            DocumentLimits(values=5), "1\n---\n2\n---\n3\n---\n4\n---\n5\n---\n6", "more than 5", id="documents"
        ),
        pytest.param(DocumentLimits(depth=2), "[[[]]]", "deeper than 2", id="depth"),
        pytest.param(DocumentLimits(depth=3), "[&a [[]], [[*a]]]", "deeper than 3", id="depth-by-an-alias"),
        pytest.param(DocumentLimits(from_aliases=3), "[&a [1, 2], *a, *a]", "repeat more than 3", id="repeated-values"),
        pytest.param(
            DocumentLimits(from_aliases=0),
            "[&a 1, *a]",
            "alias `*a` is not allowed here; write its value",
            id="no-aliases",
        ),
        pytest.param(DocumentLimits(unique=True), "a: 1\nb: {a: 1}\na: 2", "duplicate key `a`", id="a-duplicate-key"),
    ],
)
def test_bounds(limits: DocumentLimits, text: str, says: str) -> None:
    with pytest.raises(NotYaml, match=says.replace("*", r"\*")):
        read_all(text, limits)
    assert read_all("[[1, 2]]" if limits.depth < 100 else "1", limits)


def test_read_one_accepts_at_most_one_document() -> None:
    assert read_one("") is None
    assert read_one("7") == 7
    with pytest.raises(NotYaml, match="more than one"):
        read_one("1\n---\n2")


def test_an_endless_file_is_rejected() -> None:
    assert content(io.BytesIO(b"abc"), DocumentLimits(size=3)) == b"abc"
    with open("/dev/zero", "rb") as endless, pytest.raises(NotYaml, match="more than 1000 bytes"):
        content(endless, DocumentLimits(size=1000))
    assert SETTINGS.size < MANIFESTS.size
