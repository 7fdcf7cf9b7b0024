"""Measures how long commands take to start, as ratios against `python -c pass` of the same run.

make bench            prints a table and fails above the limits

The goal for an interactive command is 150 ms where an empty Python takes 20 ms, so 7.5 times that.
CPU time is measured, and the best of several turns counts: on a busy machine the rest is noise.
Python's cache of compiled files is filled first, as in an installed program.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import click

from gputile.testing.builders import node, pod

TURNS = 10
LIMIT = 7.5  # of `python -c pass`
COMMANDS: dict[tuple[str, ...], float | None] = {
    ("gputile", "--help"): LIMIT,
    ("gputile", "version", "--client"): LIMIT,
    ("gputile", "top", "-f", "FILE"): LIMIT,
    ("gputile", "inspect", "-f", "FILE"): LIMIT,
    ("gputile", "audit", "-f", "FILE"): LIMIT,
    ("kubectl-inspect-gpushare", "-f", "FILE"): LIMIT,
    ("gputile", "explain", "--help"): LIMIT,
    ("gputile", "doctor", "-f", "FILE"): LIMIT,
    ("gputile", "explain", "web-0", "-f", "FILE"): None,  # uses NumPy, whose import alone takes as long
}
EMPTY_PYTHON = ("python", "-c", "pass")


@click.command()
def main() -> None:
    """Measure how long commands take to start, as ratios against `python -c pass`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.json"
        nodes = [{**node(name).cards(8).manifest(), "kind": "Node"} for name in ("n1", "n2")]
        pending = {**pod({"gputile.io/gpu": 1, "gputile.io/memory": 10**6}), "kind": "Pod"}
        file.write_text(json.dumps({"kind": "List", "items": [*nodes, pending]}))
        best = measured({command: argv(command, str(file)) for command in (EMPTY_PYTHON, *COMMANDS)})
    print(f"{'command':<36}{'CPU ms':>8}{'x python':>10}{'limit':>8}")
    over = []
    for command, took in best.items():
        ratio, limit = took / best[EMPTY_PYTHON], COMMANDS.get(command)
        print(f"{' '.join(command):<36}{took * 1000:>8.1f}{ratio:>10.1f}{limit or '-':>8}")
        if limit is not None and ratio > limit:
            over.append(" ".join(command))
    if over:
        sys.exit(f"slower to start than {LIMIT} times an empty Python: {', '.join(over)}")


def argv(command: tuple[str, ...], file: str) -> list[str]:
    program = sys.executable if command[0] == "python" else str(Path(sys.executable).with_name(command[0]))
    return [program, *(file if word == "FILE" else word for word in command[1:])]


def measured(commands: dict[tuple[str, ...], list[str]]) -> dict[tuple[str, ...], float]:
    """CPU seconds of each command; in turns, so that a busy moment affects all alike."""
    best: dict[tuple[str, ...], float] = {}
    for turn in range(TURNS + 1):
        for command, arguments in commands.items():
            took = _run(arguments)
            if turn:  # the first fills caches
                best[command] = min(took, best.get(command, took))
    return best


def _run(arguments: list[str]) -> float:
    to_dev_null = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_WRONLY, 0) for number in (1, 2)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    _, _, used = os.wait4(os.posix_spawn(arguments[0], arguments, env, file_actions=to_dev_null), 0)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
