"""The command `gputile`: its list of subcommands, and errors as sentences instead of tracebacks.

The list is printed without loading anything else, because a command that people type often should answer at once.
"""

import errno
import gc
import os
import sys
from collections.abc import Callable

from gputile import __version__

GROUPS = {
    "Look at a cluster": {
        "top": "How full the cluster, its nodes and its cards are; live with -w.",
        "inspect": "Who holds which part of which card, node by node.",
        "explain": "Why a pod waits and what would help, or why it is where it is.",
        "quota": "What namespaces may hold of which GPU model, and hold now.",
        "audit": "Prove that no GPU is double-allocated, or say which one is.",
        "doctor": "Check the installation for known traps, each with its fix.",
    },
    "Before you apply, before you buy": {
        "read": "Show how gputile understands the pods of a manifest.",
        "simulate": "Replay a list of pods under one or more policies.",
        "demo": "The main job on an embedded in-memory cluster; ends by itself.",
    },
    "Processes": {
        "scheduler": "The process beside kube-scheduler: chooses cards, and binds.",
        "agent": "The process on each GPU node: gives containers their cards.",
    },
    "Other": {
        "completion": "Print a script that completes commands in your shell.",
        "version": "The versions of this program, the scheduler and the cluster.",
    },
}
"""By heading: name and one line of help; the command itself is `gputile.cli.commands.<name>.command`."""

COMMANDS = {name: line for group in GROUPS.values() for name, line in group.items()}


def program() -> str:
    """How a person calls us: as a plugin of kubectl, or by our own name."""
    return "kubectl gputile" if sys.argv[0].rpartition("/")[2].startswith("kubectl-gputile") else "gputile"


def help_text() -> str:
    width = max(map(len, COMMANDS)) + 2
    groups = []
    for heading, commands in GROUPS.items():
        lines = "\n".join(f"  {name.ljust(width)}{line}" for name, line in commands.items())
        groups.append(f"{heading}:\n{lines}")
    listed = "\n\n".join(groups)
    return f"""\
Usage: {program()} COMMAND [ARGS]...

  gputile hands out GPUs on Kubernetes: whole cards, or tiles of a card.

{listed}

Examples:
  {program()} top                        what is free?
  {program()} explain web-0 -n team-a    why does it wait?
  {program()} read -f pod.yaml           how is my manifest understood?

Options:
  -V, --version  Show the version and exit.
  -h, --help     Show this message and exit. Every command has its own.

docs/cli.md has pictures, the exit codes and the rights that it needs."""


CLOSED_PIPE = 141  # what a shell sees of a program that SIGPIPE ended
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
COMPLETION = "_GPUTILE_COMPLETE"
"""Set by a shell that wants to know how a command could go on."""


def main() -> None:
    answering(_main)


def answering(command: Callable[[], None]) -> None:
    """Standard output may end before the answer does: by `| head`, or on a disk that is full."""
    try:
        command()
        sys.stdout.flush()
    except SystemExit as ended:
        if ended.code == CLOSED_PIPE:
            _silenced(CLOSED_PIPE)
        raise
    except BrokenPipeError:
        sys.exit(_silenced(CLOSED_PIPE))
    except OSError as wrong:
        if wrong.errno not in UNWRITABLE:
            raise
        said = f"the answer cannot be written: {wrong.strerror}; make room, or write it elsewhere"
        print(f"gputile: {said}", file=sys.stderr)
        sys.exit(_silenced(2))


def _silenced(code: int) -> int:
    """What is still in the buffer has nowhere to go; Python would try once more as it ends, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return code


def _main() -> None:
    arguments = sys.argv[1:]
    if arguments in ([], ["-h"], ["--help"]) and COMPLETION not in os.environ:
        print(help_text())
        return
    if arguments in (["-V"], ["--version"]):
        print(f"gputile {__version__}")
        return
    gc.disable()  # what is imported is no garbage, and looking for some takes a tenth of the start; `group` ends this
    from gputile.cli.group import run

    run()
