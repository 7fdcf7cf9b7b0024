"""Control characters in untrusted text are escaped, and our own colours are not."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputile.cli.output import style
from gputile.text.terminal import MARK, bare, escaped, one_line, painted, shown

CONTROL_TEXTS = [
    pytest.param("\x1b[31m", id="a-colour"),
    pytest.param("\x1b[2J\x1b[H", id="a-cleared-screen"),
    pytest.param("\x1b]0;title\x07", id="a-title"),
    pytest.param("\x9b31m", id="a-colour-in-one-byte"),
    pytest.param("\x90q\x9c", id="a-device-string"),
    pytest.param("a\rb", id="a-return"),
    pytest.param("a\x08b", id="a-backspace"),
    pytest.param("\x00", id="a-zero"),
    pytest.param("\x7f", id="a-delete"),
    pytest.param("\x85", id="a-next-line"),
    pytest.param("\u202egnp.exe", id="text-that-runs-backwards"),
    pytest.param("\u2066a\u2069", id="isolated-text"),
    pytest.param("\u200e\u200f\u061c", id="marks-of-direction"),
    pytest.param("a\u200bb", id="a-blank-without-width"),
    pytest.param("\u2028", id="a-line-separator"),
    pytest.param("\ufeff", id="a-byte-order-mark"),
    pytest.param("\U000e0041", id="an-invisible-letter"),
    pytest.param("\ud800", id="half-a-character"),
]


@pytest.mark.parametrize("text", CONTROL_TEXTS)
def test_control_characters_are_escaped(text: str) -> None:
    for output in (shown(text), painted(text), one_line(text)):
        assert output.replace("\n", "").isprintable()
        assert "\\u" in output


@pytest.mark.parametrize("text", ["plain", "Ünïcödé 漢字 🙂", "a\n\tb", "█▏·…\u00a0"])
def test_other_text_stays_as_it_is(text: str) -> None:
    assert shown(text) == painted(text) == text


@given(st.text())
def test_any_text_is_safe(text: str) -> None:
    assert "\x1b" not in painted(text)
    assert bare(shown(text)) == shown(text), "no text can contain a colour of ours"
    assert shown(shown(text)) == shown(text)
    assert "\n" not in one_line(text)


def test_our_colours_are_escape_sequences_without_width() -> None:
    red = style("web-0", fg="red")
    assert painted(red) == "\x1b[31mweb-0\x1b[0m"
    assert (bare(red), shown(red)) == ("web-0", red)
    assert painted(style(f"a {red} b", bold=True)).count("\x1b[") == 4


def test_a_colour_in_a_name_is_escaped() -> None:
    assert painted(style("\x1b[5mweb-0", fg="red")) == "\x1b[31m\\u001b[5mweb-0\x1b[0m"
    assert painted(f"{MARK}web-0") == "\\ud81bweb-0"


@pytest.mark.parametrize("text", CONTROL_TEXTS[:-1])
def test_escaped_json_has_the_same_value(text: str) -> None:
    output = escaped(json.dumps({"name": text}, ensure_ascii=False))
    assert json.loads(output) == {"name": text}
    assert output.isprintable()


def test_neither_json_nor_yaml_can_contain_the_mark() -> None:
    import msgspec

    from gputile.text.documents import NotYaml, read_one

    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode('"\\ud81b"')
    with pytest.raises(NotYaml):
        read_one('"\\ud81b"')
