"""What may reach a terminal: our own colours, and of everybody else's text nothing that a terminal obeys.

Names, messages and annotations come from files and clusters. Escape sequences in them would move the cursor, rewrite
the lines above or the window's title; signs that turn the direction of writing would show another name than there is.
A colour of ours is marked with a sign that no text can hold (half a character), and becomes an escape only here.
"""

import re

MARK = "\ud81b"  # in place of ESC in our own colours: no JSON, no YAML and no argument can bring it
SPOILS = re.compile(
    "\ud81b(\\[[0-9;]*m)"
    "|[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u070f\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e0fff\ud800-\udfff]"
)
COLOUR = re.compile("\ud81b\\[[0-9;]*m")


def shown(text: str) -> str:
    """With every sign that a terminal obeys written out as `\\u001b`; line ends and tabs stay, and our colours do."""
    return SPOILS.sub(lambda found: found[0] if found[1] else _written(found[0]), text)


def painted(text: str) -> str:
    """The same as it goes to the terminal: our colours are escape sequences now."""
    return SPOILS.sub(lambda found: f"\x1b{found[1]}" if found[1] else _written(found[0]), text)


def one_line(text: str) -> str:
    """The same of a name in a line, which has no line ends of its own."""
    return shown(text).replace("\n", "\\n")


def bare(text: str) -> str:
    """Without our colours."""
    return COLOUR.sub("", text) if MARK in text else text


def escaped(json: str) -> str:
    """JSON, which may hold such signs only inside its strings, where they can be written out."""
    return json if json.isascii() and "\x7f" not in json else SPOILS.sub(lambda found: _written(found[0]), json)


def _written(sign: str) -> str:
    """As JSON has it, which knows four digits only."""
    return "".join(f"\\u{unit:04x}" for unit in _units(ord(sign[0]))) + sign[1:]


def _units(code: int) -> list[int]:
    return [code] if code < 0x10000 else [0xD7C0 + (code >> 10), 0xDC00 + (code & 0x3FF)]
