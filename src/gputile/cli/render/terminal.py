"""Output for terminals and programs: JSON and YAML, tables and bars that know the width of the terminal.

Text and colours only; nothing is decided here. Colours are for terminals: click removes them in a pipe, and `NO_COLOR`
removes them everywhere (`group` does so once).
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
TAIL = 5  # characters at the end of a name that stay when it is cut: names of one kind differ there
LEAST = 12  # columns that a name keeps
NARROWEST = 60  # columns; text is never wrapped earlier. Tables are made for 80, and may run over below


def output_option() -> Callable[[F], F]:
    """The flag `-o`, the same for every command. A command without further columns prints `wide` as `text`."""
    return click.option(
        "-o", "--output", type=click.Choice(FORMS), default="text", show_default=True, help="Output format."
    )


def emit(document: Any, output: str) -> None:
    """Print JSON or YAML. Control characters, which a terminal would obey, are escaped as both formats allow."""
    say_text(encoded(document, output))


def encoded(document: Any, output: str) -> str:
    """The document as JSON or YAML."""
    plain = msgspec.to_builtins(document, str_keys=True)
    if output == "yaml":
        import yaml

        text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True).rstrip()
        if shown(text) != text:  # so that PyYAML quotes it: plain scalars have no escapes
            text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=False).rstrip()
        return text
    return msgspec.json.format(msgspec.json.encode(plain), indent=2).decode()


class Terminal(msgspec.Struct, frozen=True):
    """Standard output: a terminal of some size, or a pipe that takes lines of any length."""

    columns: int = 0  # 0: no limit
    lines: int = 0
    blocks: bool = True  # whether it can show more than ASCII


def terminal() -> Terminal:
    """Standard output, as it is now. $COLUMNS counts in a pipe too."""
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    blocks = encoding.startswith("utf")
    if not sys.stdout.isatty() and not os.environ.get("COLUMNS", "").isdecimal():
        return Terminal(blocks=blocks)
    columns, lines = _size()
    return Terminal(max(columns, NARROWEST), lines if sys.stdout.isatty() else 0, blocks)


def _size() -> tuple[int, int]:
    """$COLUMNS and $LINES, else the terminal's size; as in `shutil`, whose import takes too long."""
    given = [int(value) if (value := os.environ.get(name, "")).isdecimal() else 0 for name in ("COLUMNS", "LINES")]
    try:
        real = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):
        real = os.terminal_size((80, 24))
    return given[0] or real.columns or 80, given[1] or real.lines or 24


# ---- tables ---------------------------------------------------------------------------------------------------------


def width(text: str) -> int:
    return len(bare(text))


def padded(text: str, wide: int, right: bool = False) -> str:
    fill = " " * (wide - width(text))
    return fill + text if right else text + fill


def shortened(text: str, wide: int, end: int = 0) -> str:
    """Cut to the width, with a mark where text is left out; `end` characters of its end stay."""
    if len(text) <= wide:
        return text
    return f"{text[: wide - 1 - end]}…{text[len(text) - end :]}"


def wrapped(text: str, wide: int, hanging: str = "") -> list[str]:
    """Running text in lines. Names with dashes and paths stay whole, so that they can be copied."""
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
    """Lines of aligned cells, two spaces apart. A table that is too wide shortens the columns in `shrink` (plain text),
    in that order; the value is the number of characters that stay at the end."""
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
    return "  ".join(padded(cell, wide[n], n in right) for n, cell in enumerate(cells)).rstrip()


# ---- bars -----------------------------------------------------------------------------------------------------------


def bar(share: float, wide: int, blocks: bool = True) -> str:
    """A share of 0 to 1 as a bar, coloured by how full it is. A share above 1 is drawn full, and red."""
    inside = min(max(share, 0.0), 1.0)
    if not blocks:
        full = round(inside * wide)
        return f"[{'#' * full}{'.' * (wide - full)}]"
    eighths = round(inside * wide * 8)
    if share > 0 and not eighths:
        eighths = 1  # a small share is still visible
    whole, rest = divmod(eighths, 8)
    text = "█" * whole + (EIGHTHS[rest] if rest else "")
    return style(text, fg=colour(share)) + style("·" * (wide - len(text)), dim=True)


def level(share: float, blocks: bool = True) -> str:
    """One card as one character: how much of it is allocated."""
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
