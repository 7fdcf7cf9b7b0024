"""The one way of commands to a terminal or a pipe: `say` what is to be read, in colours made by `style`.

Whatever else is in a line came from a file or a cluster, and nothing of it moves the cursor or hides a name: see
`text.terminal`. A test keeps every other module of the command line from printing by itself.
"""

from typing import Any

import click

from gputile.text.terminal import MARK, painted, shown


def say(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print it; click takes the colours out of a pipe."""
    click.echo(painted(str(text)), err=err, nl=nl)


def style(text: str, **how: Any) -> str:
    """Coloured, bold or dim; what is inside it keeps its own colours."""
    return click.style(shown(text), **how).replace("\x1b", MARK)
