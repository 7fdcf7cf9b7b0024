"""`gputile completion`: a script for the shell; and `kubectl_complete-gputile`, which kubectl itself asks.

Room:  click knows the commands and options; names of nodes and pods come from the cluster. kubectl completes a plugin
       with a program of this name: it gives the words typed so far, and wants one proposal per line and a number that
       says what the shell should do (4: offer no files).
Door:  `command`, `main`.
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
`kubectl gputile <TAB>` needs nothing but kubectl's own completion: the program kubectl_complete-gputile is installed
beside this one. Exit codes: 0 printed, 2 wrong usage.
"""

NO_FILES, FILES = 4, 0  # what kubectl's completion calls directives
TAKES_A_FILE = ("-f", "--file", "--objects", "--kubeconfig", "--config", "--scheduler-config", "--nodes", "--pods")


@click.command("completion", epilog=EPILOG)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print a script that completes commands, options, nodes and pods in your shell."""
    from click.shell_completion import get_completion_class

    from gputile.cli.group import cli

    kind = get_completion_class(shell)
    assert kind is not None, shell
    say_text(kind(cli, {}, "gputile", COMPLETION).source())


def main() -> None:
    """`kubectl_complete-gputile WORD...`: the last word is the one that is being typed, and may be empty."""
    *before, begun = sys.argv[1:] or [""]
    for line in proposals(before, begun):
        say(line)


def proposals(before: list[str], begun: str) -> list[str]:
    """Lines as kubectl wants them."""
    from click.shell_completion import ShellComplete

    from gputile.cli.group import cli

    if before and before[-1] in TAKES_A_FILE:
        return [f":{FILES}"]
    found = ShellComplete(cli, {}, "gputile", COMPLETION).get_completions(before, begun)
    plain = [item for item in found if item.type == "plain"]
    return [*(f"{item.value}\t{item.help}" if item.help else str(item.value) for item in plain), f":{NO_FILES}"]
