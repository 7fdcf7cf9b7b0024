"""The subcommands as a click group; each is imported only when it is run."""

import sys
from importlib import import_module

import click

from gputile import __version__
from gputile.cli.main import COMMANDS, help_text
from gputile.model.errors import GputileError


class LazyGroup(click.Group):
    """A group that imports a command only when it is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        found: click.Command = import_module(f"gputile.cli.{cmd_name}").command
        return found

    def get_help(self, ctx: click.Context) -> str:
        return help_text()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="gputile")
def cli() -> None:
    """See `help_text`."""


def run() -> None:
    """Run the command that was typed; what a person should read is a sentence, not a traceback."""
    try:
        cli(prog_name="gputile")
    except GputileError as wrong:
        click.echo(f"gputile: {wrong}", err=True)
        sys.exit(2)
