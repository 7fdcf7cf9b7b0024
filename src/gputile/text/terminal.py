"""Escaping of control characters in text for a terminal; only the colours of gputile pass as escape sequences.

Names, messages and annotations come from files and clusters. Escape sequences in them would move the cursor, rewrite
the lines above or the window's title; bidirectional control characters would display another name than the real one.
A colour of gputile is marked with a lone surrogate, which no input can contain, and becomes an escape only here.
"""

import re

MARK = "\ud81b"  # in place of ESC in our own colours: no JSON, no YAML and no argument can contain it
UNSAFE = re.compile(
    "\ud81b(\\[[0-9;]*m)"
    "|[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u070f\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e0fff\ud800-\udfff]"
)
COLOUR = re.compile("\ud81b\\[[0-9;]*m")


def shown(text: str) -> str:
    """With every control character escaped as `\\u001b`; line ends, tabs and our colours stay."""
    return UNSAFE.sub(lambda match: match[0] if match[1] else _escape(match[0]), text)


def painted(text: str) -> str:
    """The same for output to the terminal: our colours become escape sequences."""
    return UNSAFE.sub(lambda match: f"\x1b{match[1]}" if match[1] else _escape(match[0]), text)


def one_line(text: str) -> str:
    """The same for a name inside a line: line ends are escaped, too."""
    return shown(text).replace("\n", "\\n")


def bare(text: str) -> str:
    """Without our colours."""
    return COLOUR.sub("", text) if MARK in text else text


def escaped(json: str) -> str:
    """JSON with control characters escaped: it may contain them only inside strings, where an escape is valid."""
    return json if json.isascii() and "\x7f" not in json else UNSAFE.sub(lambda match: _escape(match[0]), json)


def _escape(character: str) -> str:
    """The JSON escape, which has four digits: two escapes beyond the basic plane."""
    return "".join(f"\\u{unit:04x}" for unit in _units(ord(character[0]))) + character[1:]


def _units(code: int) -> list[int]:
    return [code] if code < 0x10000 else [0xD7C0 + (code >> 10), 0xDC00 + (code & 0x3FF)]
