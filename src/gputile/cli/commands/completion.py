"""`gputile completion`: a script for the shell; and `kubectl_complete-gputile`, which kubectl's completion runs.

click knows the commands and options; names of nodes and pods come from the cluster. kubectl completes a plugin with a
program of this name: it passes the words typed so far, and expects one proposal per line and a number that tells the
shell what to do (4: offer no files).
"""

import sys

import click

from gputile.cli.main import COMPLETION
from gputile.cli.output import say, say_text

EPILOG = """\b
Examples:
  gputile completion bash > /etc/bash_completion.d/gputile     or: source <(gputile completion bash)
  gputile completion zsh > "${fpath[1]}/_gputile"
  gputile completion fish > ~/.config/fish/completions/gputile.fish

\b
`kubectl gputile <TAB>` works with kubectl's own completion: kubectl_complete-gputile is installed beside this program.
Exit codes: 0 printed, 2 wrong usage.
"""

NO_FILES, FILES = 4, 0  # the directives of kubectl's completion
TAKES_A_FILE = ("-f", "--file", "--objects", "--kubeconfig", "--config", "--scheduler-config", "--nodes", "--pods")


@click.command("completion", epilog=EPILOG)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the completion script for your shell: commands, options, names of nodes and pods."""
    from click.shell_completion import get_completion_class

    from gputile.cli.group import cli

    kind = get_completion_class(shell)
    assert kind is not None, shell
    say_text(kind(cli, {}, "gputile", COMPLETION).source())


def main() -> None:
    """`kubectl_complete-gputile WORD...`: the last word is being typed, and may be empty."""
    *before, prefix = sys.argv[1:] or [""]
    for line in proposals(before, prefix):
        say(line)


def proposals(before: list[str], prefix: str) -> list[str]:
    """The proposals as kubectl's completion reads them."""
    from click.shell_completion import ShellComplete

    from gputile.cli.group import cli

    if before and before[-1] in TAKES_A_FILE:
        return [f":{FILES}"]
    completions = ShellComplete(cli, {}, "gputile", COMPLETION).get_completions(before, prefix)
    plain = [item for item in completions if item.type == "plain"]
    return [*(f"{item.value}\t{item.help}" if item.help else str(item.value) for item in plain), f":{NO_FILES}"]
