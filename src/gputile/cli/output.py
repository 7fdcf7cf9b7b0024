"""The one way of commands to a terminal or a pipe: `say` lines, in colours made by `style`.

Whatever else is in a line came from a file or a cluster, and nothing of it moves the cursor, begins a line of its own
or hides a name: see `text.terminal`. A test keeps every other module of the command line from printing by itself.
"""

from typing import Any

import click

from gputile.text.terminal import MARK, one_line, painted, shown


def say(*lines: object, err: bool = False, nl: bool = True) -> None:
    """Print each of them as one line; click takes the colours out of a pipe."""
    click.echo("\n".join(painted(one_line(str(line))) for line in lines), err=err, nl=nl)


def say_text(text: str, *, nl: bool = True) -> None:
    """The same of text whose lines are its own: JSON, settings, a script, a table that was cleaned as it was made."""
    click.echo(painted(text), nl=nl)


def style(text: str, **how: Any) -> str:
    """Coloured, bold or dim; what is inside it keeps its own colours."""
    return click.style(shown(text), **how).replace("\x1b", MARK)
