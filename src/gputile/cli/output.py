"""Printing to a terminal or a pipe: `say` prints lines, `style` colours them.

Everything in a line may come from a file or a cluster, and must not move the cursor, begin a line of its own or hide a
name: see `text.terminal`. A test keeps every other module of the command line from printing by itself.
"""

from typing import Any

import click

from gputile.text.terminal import MARK, one_line, painted, shown


def say(*lines: object, err: bool = False, nl: bool = True) -> None:
    """Print each object as one line; click removes the colours in a pipe."""
    click.echo("\n".join(painted(one_line(str(line))) for line in lines), err=err, nl=nl)


def say_text(text: str, *, nl: bool = True) -> None:
    """Print text that has lines of its own: JSON, settings, a script, a table that was cleaned when it was made."""
    click.echo(painted(text), nl=nl)


def style(text: str, **attributes: Any) -> str:
    """Coloured, bold or dim text; styled text inside it keeps its own colours."""
    return click.style(shown(text), **attributes).replace("\x1b", MARK)
