"""The subcommands as a click group; each is imported only when it runs. Errors become sentences and exit codes."""

import gc
import io
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from gputile import __version__
from gputile.cli.main import CLOSED_PIPE, COMMANDS, COMPLETION, help_text, program
from gputile.cli.output import say
from gputile.model.errors import GputileError, InputError

EXTRAS = ("agent", "scheduler")
"""Commands with dependencies of their own: extras of the same name."""

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class LazyGroup(click.Group):
    """A click group that imports a command only when it runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        try:
            command: click.Command = import_module(f"gputile.cli.commands.{cmd_name}").command
        except ModuleNotFoundError as error:
            raise _missing_extra(cmd_name, error) from error
        gc.enable()
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not ctx.resilient_parsing:
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS, n=1)
            if near:
                ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list["CompletionItem"]:
        """From the list alone: a shell that completes must not import every command first."""
        from click.shell_completion import CompletionItem

        return [CompletionItem(name, help=line) for name, line in COMMANDS.items() if name.startswith(incomplete)]

    def invoke(self, ctx: click.Context) -> Any:
        """^C is how some commands end, and no error; shells expect 130. For a closed pipe click would exit with 1,
        which here means that the cluster has a problem."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            say(err=True)
            ctx.exit(130)
        except BrokenPipeError:
            ctx.exit(CLOSED_PIPE)

    def get_help(self, ctx: click.Context) -> str:
        return help_text()


def _missing_extra(command: str, error: ModuleNotFoundError) -> Exception:
    """`pip install gputile` has what a person's commands need; the two processes need more."""
    package = (error.name or "").partition(".")[0]
    if command not in EXTRAS or package == "gputile":
        return error
    return InputError(f"`gputile {command}` needs the Python package {package}; run: pip install 'gputile[{command}]'")


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="gputile")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Schedule GPUs on Kubernetes. The help text itself is `help_text`."""
    ctx.color = wants_colour()


def wants_colour() -> bool | None:
    """None leaves it to click: colours on a terminal, none in a pipe."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return True if os.environ.get("FORCE_COLOR") else None


def replace_unprintable() -> None:
    """A terminal that cannot show a character prints a question mark for it, instead of a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def run() -> None:
    """Run the command line. An expected error is printed as one sentence, without a traceback, and exits with 2."""
    replace_unprintable()
    try:
        cli(prog_name=program(), complete_var=COMPLETION)
    except GputileError as error:
        say(f"gputile: {error}", err=True)
        sys.exit(2)
