"""The command `gputile`: its list of subcommands, and errors as sentences instead of tracebacks.

The list is printed without loading anything else, because a command that people type often should answer at once.
"""

import sys

from gputile import __version__

COMMANDS = {
    "agent": "The process on each GPU node: gives containers their cards.",
    "audit": "Prove that no card is sold twice, or tell what is wrong.",
    "demo": "The main job on an embedded in-memory cluster; ends by itself.",
    "quota": "What namespaces may hold, and what they hold.",
    "read": "Show how gputile understands the pods of a manifest.",
    "scheduler": "The process beside kube-scheduler: chooses cards, and binds.",
    "simulate": "Replay a list of pods under one or more policies, before you buy.",
}
"""Name and one line of help; the command itself is `gputile.cli.<name>.command`."""


def help_text() -> str:
    width = max(map(len, COMMANDS)) + 2
    commands = "\n".join(f"  {name.ljust(width)}{line}" for name, line in sorted(COMMANDS.items()))
    return f"""\
Usage: gputile [OPTIONS] COMMAND [ARGS]...

  gputile hands out GPUs on Kubernetes: whole cards, or tiles of a card.

  Start with `gputile demo`, or ask how your own manifests are understood:
  `gputile read -f pod.yaml`. Every command has a --help of its own.

Options:
  -V, --version  Show the version and exit.
  -h, --help     Show this message and exit.

Commands:
{commands}"""


def main() -> None:
    arguments = sys.argv[1:]
    if arguments in ([], ["-h"], ["--help"]):
        print(help_text())
        return
    if arguments in (["-V"], ["--version"]):
        print(f"gputile {__version__}")
        return
    from gputile.cli.group import run

    run()
