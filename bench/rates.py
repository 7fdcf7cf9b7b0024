"""Measures pods per second through a real kube-scheduler: without an extender, with gputile, and with a wide gputile.

In each round every variant runs once, in an order that changes from round to round, on the same nodes.
`rates(plane, plan)` measures, `lines(rows)` renders the table.

How a rate is measured. All pods are created while no kube-scheduler runs; then it is started, lists nodes and pods, and
has a full queue. The time is measured from the first binding that a watch shows to the last. So neither the creation of
pods nor the start of the program is included, and no variant runs out of work. Each turn starts with new
processes, and without gputile's process if it is not measured: its watches would use CPU of
the others. Pods are removed after each turn, nodes stay. The result of a variant is the ratio of its median to the
median of `none`; the spread is that of the ratios within a round, because a busy machine is busy for a whole round.

The nodes advertise every resource that the pods request, so that without an extender kube-scheduler's own
NodeResourcesFit counts them, and kube-scheduler binds by itself.
"""

import signal
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
from tests.e2e.control_plane import ControlPlane
from tests.e2e.processes import wait_until

from bench import profiler
from bench.harness import MeasuredReplica, bindings, configuration, delete_pods, one_tile, progress

VARIANTS = ("none", "gputile", "echo")
"""`echo`: filter returns all feasible nodes, and a prioritize call scores them, as most extenders do."""

NAMESPACE = "rates"
GOALS = {(1_000, 100): 0.90, (5_000, 100): 0.95, (1_000, 0): 0.70, (5_000, 0): 0.70}


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What one table of rates measures."""

    nodes: int
    percentage: int = 100  # of nodes to score; 0 is kube-scheduler's default, a falling share
    pods: int = 3_000
    rounds: int = 5
    variants: tuple[str, ...] = VARIANTS
    plain: bool = False  # HTTP instead of HTTPS
    profile: bool = False


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One variant in one round; CPU in milliseconds per pod."""

    variant: str
    rate: float
    gputile: float
    scheduler: float
    api_server: float
    load: float  # of the machine at the start


def rates(plane: ControlPlane, plan: Plan) -> list[list[Turn]]:
    """The turns of each round."""
    plane.namespace(NAMESPACE)
    rounds = []
    for number in range(plan.rounds):
        shift = number % len(plan.variants)
        order = plan.variants[shift:] + plan.variants[:shift]
        rounds.append([run_turn(plane, plan, variant) for variant in order])
        results = ", ".join(f"{turn.variant} {turn.rate:.0f}/s" for turn in rounds[-1])
        progress(f"{plan.nodes:,} nodes, {plan.percentage} %: round {number + 1} of {plan.rounds}: {results}")
    return rounds


def run_turn(plane: ControlPlane, plan: Plan, variant: str) -> Turn:
    kube = plane.kube
    manifests = [one_tile(f"p{n:05}") for n in range(plan.pods)]
    load = float(Path("/proc/loadavg").read_text().split()[0])
    file = plane.folder / "profile.json" if plan.profile and variant != "none" else None
    with ExitStack() as stack:
        replica = None if variant == "none" else stack.enter_context(_replica(plane, plan, variant, file))
        kube.create_many(manifests, NAMESPACE, threads=8)
        if replica is not None:
            wait_until_pending(replica, plan.pods)
            if file:
                replica.child.signal(signal.SIGUSR1)
        changes = {"prioritizeVerb": "prioritize", "weight": 10} if variant == "echo" else {}
        recorded = stack.enter_context(bindings(plane, NAMESPACE, plan.pods))
        stack.enter_context(plane.start_scheduler(config=configuration(replica, plan.percentage, **changes)))
        recorded.wait(600)
    if file:
        print(f"\n{variant} at {plan.nodes:,} nodes:\n{profiler.table(file)}\n")
    delete_pods(kube, NAMESPACE)
    return Turn(
        variant=variant,
        rate=recorded.rate,
        gputile=recorded.spent(replica.name) if replica else 0.0,
        scheduler=recorded.spent("kube-scheduler"),
        api_server=recorded.spent("kube-apiserver"),
        load=load,
    )


def _replica(plane: ControlPlane, plan: Plan, variant: str, file: Path | None) -> MeasuredReplica:
    sets = {"filter__narrow": "false"} if variant == "echo" else {}
    return MeasuredReplica(plane, plain=plan.plain, profile=file, **sets)


def wait_until_pending(replica: MeasuredReplica, pods: int) -> None:
    """Wait until the replica counts the pods as pending. It polls seldom: each request costs a TLS handshake."""
    wait_until(
        lambda: replica.count("gputile_ledger_pods", state="pending") >= pods, 60, f"{pods} pods pending", every=0.5
    )


# ---- results --------------------------------------------------------------------------------------------------------


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A variant over all rounds."""

    nodes: int
    percentage: int
    variant: str
    pods: int
    rounds: int
    rate: float
    rates: tuple[float, ...]
    ratio: float | None  # of medians; None without `none`
    ratios: tuple[float, ...]
    gputile_ms: float
    scheduler_ms: float
    api_server_ms: float
    load: float


def rows(plan: Plan, rounds: Sequence[Sequence[Turn]]) -> list[Row]:
    by_round = [{turn.variant: turn for turn in turns} for turns in rounds]
    return [_row(plan, by_round, variant) for variant in plan.variants]


def _row(plan: Plan, by_round: list[dict[str, Turn]], variant: str) -> Row:
    turns_of_variant = [turns[variant] for turns in by_round]
    base = [turns["none"].rate for turns in by_round if "none" in turns]
    rate = statistics.median(turn.rate for turn in turns_of_variant)
    return Row(
        nodes=plan.nodes,
        percentage=plan.percentage,
        variant=variant,
        pods=plan.pods,
        rounds=len(by_round),
        rate=rate,
        rates=tuple(turn.rate for turn in turns_of_variant),
        ratio=rate / statistics.median(base) if base else None,
        ratios=tuple(turn.rate / none for turn, none in zip(turns_of_variant, base, strict=False)),
        gputile_ms=statistics.median(turn.gputile for turn in turns_of_variant),
        scheduler_ms=statistics.median(turn.scheduler for turn in turns_of_variant),
        api_server_ms=statistics.median(turn.api_server for turn in turns_of_variant),
        load=statistics.median(turn.load for turn in turns_of_variant),
    )


def lines(rows: Sequence[Row]) -> list[str]:
    rendered = [
        f"{'nodes':>6} {'scored':>7}  {'variant':<8}{'pods/s':>7}{'min..max':>12}{'ratio':>7}{'min..max':>12}"
        f"{'gputile':>9}{'kube-sch.':>10}{'API srv.':>9}   CPU ms per pod"
    ]
    for row in rows:
        scored = f"{row.percentage} %" if row.percentage else "default"
        rendered.append(
            f"{row.nodes:>6,} {scored:>7}  {row.variant:<8}{row.rate:>7.0f}{_spread(row.rates, '.0f'):>12}"
            f"{row.ratio or 0:>7.2f}{_spread(row.ratios, '.2f'):>12}"
            f"{row.gputile_ms:>9.2f}{row.scheduler_ms:>10.2f}{row.api_server_ms:>9.2f}"
        )
    return [*rendered, *(line for row in rows for line in _goal(row))]


def _goal(row: Row) -> list[str]:
    least = GOALS.get((row.nodes, row.percentage))
    if row.variant != "gputile" or least is None or row.ratio is None:
        return []
    scored = f"{row.percentage} %" if row.percentage else "the default share"
    return [
        f"{'ok   ' if row.ratio >= least else 'UNDER'} {row.ratio:.2f}  (at least {least:.2f})  gputile against none, "
        f"{row.nodes:,} nodes, {scored} scored"
    ]


def _spread(samples: Sequence[float], form: str) -> str:
    return f"{min(samples):{form}}..{max(samples):{form}}" if samples else "-"
