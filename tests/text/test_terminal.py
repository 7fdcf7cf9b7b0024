"""Nothing of a stranger's text is obeyed by a terminal, and our colours are."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputile.cli.output import style
from gputile.text.terminal import MARK, bare, escaped, one_line, painted, shown

OBEYED = [
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
    pytest.param("\u2066a\u2069", id="text-that-stands-apart"),
    pytest.param("\u200e\u200f\u061c", id="marks-of-direction"),
    pytest.param("a\u200bb", id="a-blank-without-width"),
    pytest.param("\u2028", id="a-line-separator"),
    pytest.param("\ufeff", id="a-byte-order-mark"),
    pytest.param("\U000e0041", id="a-letter-that-nobody-sees"),
    pytest.param("\ud800", id="half-a-character"),
]


@pytest.mark.parametrize("text", OBEYED)
def test_signs_that_a_terminal_obeys_are_written_out(text: str) -> None:
    for said in (shown(text), painted(text), one_line(text)):
        assert said.replace("\n", "").isprintable()
        assert "\\u" in said


@pytest.mark.parametrize("text", ["plain", "Ünïcödé 漢字 🙂", "a\n\tb", "█▏·…\u00a0"])
def test_other_text_stays_as_it_is(text: str) -> None:
    assert shown(text) == painted(text) == text


@given(st.text())
def test_whatever_it_is(text: str) -> None:
    assert "\x1b" not in painted(text)
    assert bare(shown(text)) == shown(text), "no text can make a colour of ours"
    assert shown(shown(text)) == shown(text)
    assert "\n" not in one_line(text)


def test_our_colours_are_escapes_on_the_terminal_and_nothing_in_width() -> None:
    red = style("web-0", fg="red")
    assert painted(red) == "\x1b[31mweb-0\x1b[0m"
    assert (bare(red), shown(red)) == ("web-0", red)
    assert painted(style(f"a {red} b", bold=True)).count("\x1b[") == 4


def test_a_colour_in_a_name_is_no_colour_of_ours() -> None:
    assert painted(style("\x1b[5mweb-0", fg="red")) == "\x1b[31m\\u001b[5mweb-0\x1b[0m"
    assert painted(f"{MARK}web-0") == "\\ud81bweb-0"


@pytest.mark.parametrize("text", OBEYED[:-1])
def test_json_means_the_same_with_them_written_out(text: str) -> None:
    said = escaped(json.dumps({"name": text}, ensure_ascii=False))
    assert json.loads(said) == {"name": text}
    assert said.isprintable()


def test_no_json_and_no_yaml_can_bring_the_mark() -> None:
    import msgspec

    from gputile.text.documents import NotYaml, read_one

    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode('"\\ud81b"')
    with pytest.raises(NotYaml):
        read_one('"\\ud81b"')
