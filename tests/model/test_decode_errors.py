"""Errors of decoders and of the operating system, as a user reads them."""

from typing import Any, Literal

import msgspec
import pytest

from gputile.model.decode_errors import decode_problem, file_problem


class Inner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A section with one field of each kind."""

    count: int = 1
    share: float = 1.0
    on: bool = False
    level: Literal["low", "high"] = "low"
    names: tuple[str, ...] = ()
    limits: dict[str, int] = {}
    most: int | None = None


class Outer(msgspec.Struct, frozen=True):
    """A document with a section and a field that it must have."""

    name: str
    inner: Inner = Inner()


def problem(value: Any) -> str:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert({"name": "x", "inner": value}, Outer, strict=False)
    return str(decode_problem(caught.value))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        pytest.param({"count": "x"}, "`inner.count`: expected a whole number, got text", id="text-for-a-whole-number"),
        pytest.param({"share": []}, "`inner.share`: expected a number, got a list", id="a-list-for-a-number"),
        pytest.param({"on": "maybe"}, "`inner.on`: expected true or false, got text", id="text-for-a-switch"),
        pytest.param({"most": "x"}, "`inner.most`: expected a whole number, got text", id="an-optional"),
        pytest.param({"names": [1]}, "`inner.names[0]`: expected text, got a whole number", id="inside-a-list"),
        pytest.param({"limits": {1: 1}}, "`inner.limits`: a key: expected text, got a whole number", id="a-key"),
        pytest.param({"level": "loud"}, "`inner.level`: 'loud' is not an allowed value", id="not-one-of-the-words"),
        pytest.param({"other": 1}, "`inner`: the field `other` does not exist", id="an-unknown-field"),
        pytest.param(5, "`inner`: expected a mapping, got a whole number", id="a-number-for-a-section"),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(value: Any, text: str) -> None:
    assert problem(value) == text


def test_a_missing_field_is_named() -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert({}, Outer)
    assert str(decode_problem(caught.value)) == "the field `name` is missing"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        pytest.param(b"{", "the JSON ends too early", id="truncated"),
        pytest.param(b'{"name": nul}', "invalid JSON at byte", id="malformed"),
        pytest.param(
            b'{"name": "x", "inner": {"count": 1e400}}', "`inner.count`: the number is out of range", id="big"
        ),
        pytest.param(b'{"name":' + b"[" * 100_000, "lists and mappings are nested too deeply", id="deep"),
    ],
)
def test_text_that_is_not_json_is_described(content: bytes, text: str) -> None:
    with pytest.raises((msgspec.DecodeError, RecursionError)) as caught:
        msgspec.json.decode(content, type=Outer if b"count" in content else Any)
    assert str(decode_problem(caught.value)).startswith(text)


def test_a_long_value_is_cut() -> None:
    assert len(problem({"level": "x" * 5000})) < 120


def test_an_error_that_is_not_recognized_never_reaches_a_user() -> None:
    error = msgspec.ValidationError("Something of a later msgspec - at `$.a`")
    assert str(decode_problem(error)) == "`a`: the value has the wrong form"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        pytest.param(FileNotFoundError(2, "No such file or directory", "x"), "no such file or directory", id="os"),
        pytest.param(OSError(), "the file system reports an error", id="os-without-words"),
        pytest.param(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), "it is not UTF-8 text", id="not-utf-8"),
        pytest.param(OverflowError("big"), "it has a value that JSON cannot express", id="yaml-beyond-json"),
    ],
)
def test_why_a_file_cannot_be_read(error: Exception, text: str) -> None:
    assert file_problem(error) == text


def test_control_characters_of_a_document_reach_no_message() -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(b'{"\\u001b[31m": 1}', type=Closed)
    assert str(decode_problem(caught.value)) == r"the field `\x1b[31m` does not exist"


class Closed(msgspec.Struct, forbid_unknown_fields=True):
    """A struct without fields."""
