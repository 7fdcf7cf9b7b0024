"""How commands speak: forms of output, tables and bars that know how wide the terminal is.

Room:  text and colours only; it decides nothing. Colours are for terminals: click takes them out of a pipe, and
       `NO_COLOR` takes them out everywhere (`group` says so once).
Door:  `output_option` and `emit` for programs; `Terminal`, `table` and `bar` for people.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click
import msgspec

from gputile.cli.output import say_text, style
from gputile.text.terminal import bare, one_line, shown

F = TypeVar("F", bound=Callable[..., Any])

PROGRAMS = ("json", "yaml")  # forms for programs, whose keys are contracts
FORMS = ("text", "wide", *PROGRAMS)
EIGHTHS = " ▏▎▍▌▋▊▉█"
LEVELS = "▁▂▃▄▅▆▇█"
TAIL = 5  # signs of a name's end that stay when it is cut: names of one kind differ there
LEAST = 12  # columns that a name is left with
NARROWEST = 60  # columns; below, we wrap no earlier. Tables are made for 80, and below may run over


def output_option() -> Callable[[F], F]:
    """`-o`, the same for every command. Where there is nothing more to show, `wide` is `text`."""
    return click.option(
        "-o", "--output", type=click.Choice(FORMS), default="text", show_default=True, help="How to print."
    )


def emit(found: Any, output: str) -> None:
    """JSON or YAML on standard output. What a terminal obeys is written out on the way, as both have it in strings."""
    say_text(encoded(found, output))


def encoded(found: Any, output: str) -> str:
    plain = msgspec.to_builtins(found, str_keys=True)
    if output == "yaml":
        import yaml

        text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True).rstrip()
        if shown(text) != text:  # PyYAML quotes it then: a text without quotes knows no escapes
            text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=False).rstrip()
        return text
    return msgspec.json.format(msgspec.json.encode(plain), indent=2).decode()


class Terminal(msgspec.Struct, frozen=True):
    """What is written on: a terminal of some size, or a pipe that takes lines of any length."""

    columns: int = 0  # 0: no limit
    lines: int = 0
    blocks: bool = True  # whether it can show more than ASCII


def terminal() -> Terminal:
    """Standard output, as it is now. $COLUMNS counts in a pipe too: who sets it wants it."""
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    blocks = encoding.startswith("utf")
    if not sys.stdout.isatty() and not os.environ.get("COLUMNS", "").isdecimal():
        return Terminal(blocks=blocks)
    columns, lines = _size()
    return Terminal(max(columns, NARROWEST), lines if sys.stdout.isatty() else 0, blocks)


def _size() -> tuple[int, int]:
    """$COLUMNS and $LINES, else the terminal's; as `shutil` has it, which takes longer to import than to write."""
    said = [int(word) if (word := os.environ.get(name, "")).isdecimal() else 0 for name in ("COLUMNS", "LINES")]
    try:
        real = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):
        real = os.terminal_size((80, 24))
    return said[0] or real.columns or 80, said[1] or real.lines or 24


# ---- tables ---------------------------------------------------------------------------------------------------------


def width(text: str) -> int:
    return len(bare(text))


def padded(text: str, wide: int, right: bool = False) -> str:
    fill = " " * (wide - width(text))
    return fill + text if right else text + fill


def shortened(text: str, wide: int, end: int = 0) -> str:
    """With a mark where something is left out; so much of the end stays."""
    if len(text) <= wide:
        return text
    return f"{text[: wide - 1 - end]}…{text[len(text) - end :]}"


def wrapped(text: str, wide: int, hanging: str = "") -> list[str]:
    """Running text. Names with dashes and paths stay whole, so that they can be copied."""
    import textwrap

    return textwrap.wrap(text, wide, subsequent_indent=hanging, break_on_hyphens=False, break_long_words=False)


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[int] = (),
    shrink: Mapping[int, int] | None = None,
    columns: int = 0,
    indent: int = 0,
) -> list[str]:
    """Lines of aligned cells, two spaces apart. Where it is too wide, the columns in `shrink` (plain text) give way, in
    that order; of their end so many signs stay as it says."""
    cells = [[one_line(cell) for cell in row] for row in rows]
    wide = [max(width(line[n]) for line in (list(header), *cells)) for n in range(len(header))]
    for column, end in (shrink or {}).items():
        spare = indent + sum(wide) + 2 * (len(wide) - 1) - columns
        if columns and spare > 0 and wide[column] > LEAST:
            wide[column] = max(wide[column] - spare, len(header[column]), LEAST)
            for row in cells:
                row[column] = shortened(row[column], wide[column], end)
    styled = [style(name, bold=True) for name in header]
    return [" " * indent + _line(line, wide, right) for line in (styled, *cells)]


def _line(cells: Sequence[str], wide: Sequence[int], right: Sequence[int]) -> str:
    made = [padded(cell, wide[n], n in right) for n, cell in enumerate(cells)]
    return "  ".join(made).rstrip()


# ---- bars -----------------------------------------------------------------------------------------------------------


def bar(share: float, wide: int, blocks: bool = True) -> str:
    """A share of 0 to 1 as a bar; coloured by how full it is. More than all is drawn full, and red."""
    inside = min(max(share, 0.0), 1.0)
    if not blocks:
        full = round(inside * wide)
        return f"[{'#' * full}{'.' * (wide - full)}]"
    eighths = round(inside * wide * 8)
    if share > 0 and not eighths:
        eighths = 1  # a sliver is not nothing
    whole, rest = divmod(eighths, 8)
    text = "█" * whole + (EIGHTHS[rest] if rest else "")
    return style(text, fg=colour(share)) + style("·" * (wide - len(text)), dim=True)


def level(share: float, blocks: bool = True) -> str:
    """One card as one sign: how much of it is taken."""
    if share <= 0:
        return style("·" if blocks else ".", dim=True)
    if not blocks:
        return "#" if share >= 1 else str(min(9, int(share * 10)))
    return style(LEVELS[7 if share >= 1 else int(share * 7)], fg=colour(share))


def colour(share: float) -> str:
    return "red" if share > 1 else "yellow" if share > 0.85 else "green"


def percent(part: int, whole: int) -> str:
    """Truncated, so that 100 % means all."""
    return f"{100 * part // whole} %" if whole else "-"


def size(mebibytes: int) -> str:
    """Short, for columns: `512Mi`, `79.5Gi`, `5.0Ti`."""
    if mebibytes < 1024:
        return f"{mebibytes}Mi" if mebibytes else "0"
    unit, amount = ("Gi", mebibytes / 1024) if mebibytes < 1024 * 10_000 else ("Ti", mebibytes / 1024**2)
    return f"{amount:.0f}{unit}" if amount == int(amount) else f"{amount:.1f}{unit}"


def since(seconds: float) -> str:
    """An age, much as kubectl shows it."""
    whole = max(0, int(seconds))
    for unit, letter, next_unit in ((86400, "d", 3600), (3600, "h", 60), (60, "m", 1)):
        if whole >= 2 * unit:
            rest = whole % unit // next_unit
            small = {"d": "h", "h": "m", "m": "s"}[letter]
            return f"{whole // unit}{letter}" + (f"{rest}{small}" if rest and whole < 10 * unit else "")
    return f"{whole}s"


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"
