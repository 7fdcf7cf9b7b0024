"""The command `gputile`: its list of subcommands, and errors as sentences instead of tracebacks."""

import sys
from importlib import import_module

import click

from gputile import __version__
from gputile.model.errors import GputileError

COMMANDS = {
    "demo": "The main job on an embedded in-memory cluster; ends by itself.",
    "read": "Show how gputile understands the pods of a manifest.",
    "simulate": "Replay a list of pods under one or more policies, before you buy.",
}
"""Name and one line of help; the command itself is `gputile.cli.<name>.command`."""


class LazyGroup(click.Group):
    """A group that imports a command only when it is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        found: click.Command = import_module(f"gputile.cli.{cmd_name}").command
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version")
def cli() -> None:
    """gputile hands out GPUs on Kubernetes: whole cards, or tiles of a card.

    Start with `gputile demo`, or ask how your own manifests are understood: `gputile read -f pod.yaml`.
    """


def main() -> None:
    try:
        cli()
    except GputileError as wrong:
        click.echo(f"gputile: {wrong}", err=True)
        sys.exit(2)
