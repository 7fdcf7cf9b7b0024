"""The command `gputile`: its list of subcommands, and errors as sentences instead of tracebacks.

The list is printed without importing anything else, so that a command that people type often answers at once.
"""

import errno
import gc
import os
import sys
from collections.abc import Callable

from gputile import __version__

GROUPS = {
    "Look at a cluster": {
        "top": "Show allocated and free GPU capacity; -w follows the cluster.",
        "inspect": "List the pods on every GPU and the share that each holds.",
        "explain": "Explain why a pod is pending, or why it is on its node.",
        "quota": "Show the GPU quota of namespaces and how much is in use.",
        "audit": "Verify that no GPU is double-allocated.",
        "doctor": "Check the installation for known mistakes; name the fix.",
    },
    "Before you apply, before you buy": {
        "read": "Show which GPUs the pods of a manifest request.",
        "simulate": "Replay a list of pods under one or more policies.",
        "demo": "Schedule the example pods on an in-memory cluster.",
    },
    "Processes": {
        "scheduler": "Run the scheduler extender: choose GPUs, bind pods.",
        "agent": "Run the node agent: the device plugin of a GPU node.",
    },
    "Other": {
        "completion": "Print the completion script for your shell.",
        "version": "Show the versions of gputile, the scheduler and Kubernetes.",
    },
}
"""By heading: name and one line of help; the command itself is `gputile.cli.commands.<name>.command`."""

COMMANDS = {name: line for group in GROUPS.values() for name, line in group.items()}


def program() -> str:
    """The name under which the user runs this program: as a kubectl plugin, or directly."""
    return "kubectl gputile" if sys.argv[0].rpartition("/")[2].startswith("kubectl-gputile") else "gputile"


def help_text() -> str:
    """The help of `gputile` itself, at most 80 columns wide."""
    width = max(map(len, COMMANDS)) + 2
    groups = []
    for heading, commands in GROUPS.items():
        lines = "\n".join(f"  {name.ljust(width)}{line}" for name, line in commands.items())
        groups.append(f"{heading}:\n{lines}")
    command_list = "\n\n".join(groups)
    return f"""\
Usage: {program()} COMMAND [ARGS]...

  gputile schedules GPUs on Kubernetes: whole GPUs, or tiles (shares of a GPU).

{command_list}

Examples:
  {program()} top                        how much GPU capacity is free?
  {program()} explain web-0 -n team-a    why is this pod pending?
  {program()} read -f pod.yaml           what does my manifest request?

Options:
  -V, --version  Show the version and exit.
  -h, --help     Show this message and exit. Every command has its own.

docs/cli.md shows the output, the exit codes and the RBAC rights."""


CLOSED_PIPE = 141  # the exit code that a shell reports for a program that SIGPIPE ended
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
COMPLETION = "_GPUTILE_COMPLETE"
"""Set by a shell that asks for completions."""


def main() -> None:
    handle_output_errors(_main)


def handle_output_errors(command: Callable[[], None]) -> None:
    """Run the command. Standard output may close before the end (`| head`), or be on a disk that is full."""
    try:
        command()
        sys.stdout.flush()
    except SystemExit as end:
        if end.code == CLOSED_PIPE:
            _discard_output(CLOSED_PIPE)
        raise
    except BrokenPipeError:
        sys.exit(_discard_output(CLOSED_PIPE))
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        message = f"standard output: cannot be written: {error.strerror}; free disk space, or write elsewhere"
        print(f"gputile: {message}", file=sys.stderr)
        sys.exit(_discard_output(2))


def _discard_output(code: int) -> int:
    """Send what is still in the buffer to /dev/null: Python would flush it again at exit, and print an error."""
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
    gc.disable()  # imports make no garbage, and collecting costs a tenth of the start; `group` enables it again
    from gputile.cli.group import run

    run()
