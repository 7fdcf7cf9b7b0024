"""`gputile simulate`: replay a list of pods under one or more policies, with the production core."""

import math
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import click
import msgspec

from gputile.cli.output import say
from gputile.cli.render.simulate import report_runs, report_steady
from gputile.cli.render.terminal import output_option
from gputile.engine.policies.table import POLICIES
from gputile.model.cards import Node
from gputile.model.decode_errors import file_problem
from gputile.model.errors import InputError
from gputile.model.policies import DEFAULT_POLICY
from gputile.sim.replay import ReplayPlan, ReplayRun, replay
from gputile.sim.steady_state import SteadyRun, steady
from gputile.sim.traces import Job, load_jobs, load_nodes
from gputile.sim.what_if import change

FIRST_SEED = 42
FILLING, LASTING = 1.3, 0.95  # default load: more than fits, or that of a busy cluster

EXAMPLES = """\b
Examples:
  gputile simulate --nodes nodes.csv --pods pods.csv.gz --policy tiling,binpack
  gputile simulate --nodes nodes.yaml --pods pods.yaml --seeds 1 --what-if +4:L40S:8x48Gi
  gputile simulate --nodes nodes.csv --pods pods.csv --policy tiling --leave
"""


class ReplayTask(msgspec.Struct, frozen=True, kw_only=True):
    """One replay, as it is sent to a worker process."""

    name: str  # of its row in the table
    nodes: Path
    pods: Path
    plan: ReplayPlan
    what_if: str = ""
    leave: bool = False
    arrivals: int | None = None
    longest: float = float("inf")  # seconds


@click.command("simulate", epilog=EXAMPLES)
@click.option(
    "--nodes", required=True, type=click.Path(path_type=Path), help="List of nodes: openb CSV (.csv, .csv.gz) or YAML."
)
@click.option(
    "--pods", required=True, type=click.Path(path_type=Path), help="List of pods: openb CSV (.csv, .csv.gz) or YAML."
)
@click.option("--policy", default=DEFAULT_POLICY, show_default=True, help="One or more policies, joined by commas.")
@click.option(
    "--ratio", type=click.FloatRange(min=0.01), help="GPU demand divided by capacity. [default: 1.3; 0.95 with --leave]"
)
@click.option(
    "--seeds", type=click.IntRange(min=1), default=10, show_default=True, help="How many replays, from seed 42 on."
)
@click.option(
    "--ties",
    type=click.Choice(["fixed", "random"]),
    default="fixed",
    show_default=True,
    help="Tie-break between equal nodes: fixed order or random.",
)
@click.option(
    "--order",
    type=click.Choice(["shuffled", "list"]),
    default="shuffled",
    show_default=True,
    help="Order of nodes: shuffled once per replay, or that of the list.",
)
@click.option(
    "--mix",
    type=click.Choice(["online", "list"]),
    default="online",
    show_default=True,
    help="Pods that policies learn from: those that arrived so far, or the whole list.",
)
@click.option(
    "--what-if",
    "what_ifs",
    multiple=True,
    help="A changed cluster beside the base: +4:L40S:8x48Gi, -NODE, policy=NAME, joined by commas. May be repeated.",
)
@click.option("--leave", is_flag=True, help="Pods also end, after the durations of the list: a steady state.")
@click.option(
    "--arrivals", type=click.IntRange(min=1), help="With --leave: how many pods arrive. [default: as in the list]"
)
@click.option("--longest", type=click.FloatRange(min=0.001), help="With --leave: longest duration of a pod, in hours.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for CSV files and plots.")
@output_option()
@click.option(
    "--jobs", type=click.IntRange(min=1), default=os.cpu_count() or 1, help="Worker processes. [default: all cores]"
)
def command(
    nodes: Path,
    pods: Path,
    policy: str,
    ratio: float | None,
    seeds: int,
    ties: str,
    order: str,
    mix: str,
    what_ifs: tuple[str, ...],
    leave: bool,
    arrivals: int | None,
    longest: float | None,
    out: Path | None,
    output: str,
    jobs: int,
) -> None:
    """Replay a list of pods on a list of nodes, under one or more policies.

    Pods arrive one by one until --ratio times the cluster's GPUs have been requested; a pod that fits nowhere is
    refused. The table shows how much of the cluster each policy allocates. With --leave pods also end, and a pod that
    fits nowhere stays pending. The production core decides.
    """
    base = ReplayPlan(
        policy="",
        ratio=ratio or (LASTING if leave else FILLING),
        random_ties=ties == "random",
        shuffle_nodes=order == "shuffled",
        mix_from_list=mix == "list",
    )
    if not math.isfinite(base.ratio) or not all(what_if.strip() for what_if in what_ifs):
        raise InputError("--ratio must be a number, and --what-if must not be empty")
    tasks = [
        ReplayTask(
            name=f"{name} {what_if}".strip() if what_ifs else name,
            nodes=nodes,
            pods=pods,
            plan=msgspec.structs.replace(base, policy=name, seed=seed),
            what_if=what_if,
            leave=leave,
            arrivals=arrivals,
            longest=3600 * longest if longest else float("inf"),
        )
        for name in _policies(policy)
        for seed in range(FIRST_SEED, FIRST_SEED + seeds)
        for what_if in ("", *dict.fromkeys(what_ifs))
    ]
    _check(tasks)
    if out is not None:
        _make_folder(out)
    runs = _run_all(tasks, jobs)
    if leave:
        report_steady(runs, output, out)
    else:
        report_runs(runs, output, out, compares=bool(what_ifs))


def _policies(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in POLICIES]
    if unknown or not names:
        raise InputError(f"--policy {text}: there is no such policy; write one or more of {', '.join(POLICIES)}")
    return names


def _make_folder(out: Path) -> None:
    """Before the replays, so that an error comes at once."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out}: cannot be created: {file_problem(error)}; name another folder") from error


# ---- running --------------------------------------------------------------------------------------------------------


def _warn_ignored(message: str) -> None:
    say(f"gputile: pod ignored: {message}", err=True)


@lru_cache(maxsize=1)  # workers are forked and find it filled
def _lists(nodes: Path, pods: Path) -> tuple[tuple[Node, ...], tuple[Job, ...]]:
    node_list, jobs = load_nodes(nodes), load_jobs(pods, _warn_ignored)
    if not any(node.cards for node in node_list):
        raise InputError(f"{nodes}: there is no node with GPUs in it; name a list of GPU nodes")
    if not any(ask.cards for job in jobs for ask in job.request.asks):
        raise InputError(f"{pods}: there is no pod that requests GPUs in it; name a list of GPU pods")
    return node_list, jobs


def _check(tasks: list[ReplayTask]) -> None:
    """Report bad files and changes before any replay starts."""
    for task in {task.what_if: task for task in tasks}.values():
        nodes, _ = _lists(task.nodes, task.pods)
        _policies(change(task.what_if, nodes, task.plan)[1].policy)


def _run(task: ReplayTask, report: Callable[[float], None] = lambda part: None) -> ReplayRun | SteadyRun:
    nodes, jobs = _lists(task.nodes, task.pods)
    changed, plan = change(task.what_if, nodes, task.plan)
    if task.leave:
        return steady(changed, jobs, plan, report, base=nodes, pods=task.arrivals, longest=task.longest)
    return replay(changed, jobs, plan, report, base=nodes)


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _run_numbered(numbered: tuple[int, ReplayTask]) -> tuple[int, ReplayRun | SteadyRun]:
    return numbered[0], _run(numbered[1])


def _move_to(bar: Any, number: int, part: float) -> None:
    bar.update(int(100 * (number + part)) - bar.pos)


def _run_all(tasks: list[ReplayTask], workers: int) -> dict[str, list[Any]]:
    """By row of the table, in the order of the tasks. A single task reports its progress, several report their end."""
    results: dict[int, Any] = {}
    with click.progressbar(length=100 * len(tasks), label="replaying", file=sys.stderr) as bar:
        if workers == 1 or len(tasks) == 1:
            for number, task in enumerate(tasks):
                results[number] = _run(task, partial(_move_to, bar, number))
                _move_to(bar, number, 1.0)
        else:
            # Leaving the block ends the workers of the pool, on ^C and on errors too.
            with multiprocessing.Pool(min(workers, len(tasks)), _leave_interrupts_to_the_parent) as pool:
                for number, result in pool.imap_unordered(_run_numbered, enumerate(tasks)):
                    results[number] = result
                    bar.update(100)
    rows: dict[str, list[Any]] = {}
    for number, task in enumerate(tasks):
        rows.setdefault(task.name, []).append(results[number])
    return rows
