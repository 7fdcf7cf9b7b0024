"""Measures the speed of the scheduling core, as ratios against baselines of the same run.

    make bench        filter and score at 100 to 15,000 nodes x 8 GPUs; repeated rejections; the ledger; start-up

The copy is a plain copy of the arrays that a filter reads: the minimum cost of reading all GPUs. The loop is
the same decision in Python without arrays. Absolute times depend on the machine, ratios hardly.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import click
import msgspec
import numpy as np

from gputile.dialects.kube_objects import NodeObject, Pod
from gputile.engine.fleet.fleet import Fleet
from gputile.ledger.events import Unreserved
from gputile.ledger.ledger import Ledger
from gputile.model.cards import NodeView, Use
from gputile.model.requests import PodRequest
from gputile.scheduler.extender.filter import FilterService
from gputile.scheduler.extender_api import read_filter, write_filter
from gputile.scheduler.settings import Settings
from gputile.scheduler.state.cluster_state import ClusterState
from gputile.scheduler.state.node_availability import NodeAvailability
from gputile.scheduler.state.pod_requests import PodRequests
from gputile.telemetry.metrics import Metrics
from gputile.testing.builders import ask, node, pod, wants

SIZES = (100, 1_000, 5_000, 15_000)
CASES: dict[str, PodRequest] = {
    "one tile": wants(ask("10Gi", cores=20), cpu=1000),
    "two containers": wants(ask("10Gi", cores=20, name="a"), ask("20Gi", name="b"), cpu=1000),
    "4 whole GPUs": wants(ask(whole=True, cards=4), cpu=1000),
}
GOALS = {"one tile": 12.0, "two containers": 60.0, "4 whole GPUs": 60.0}  # times the copy, at 5,000 nodes
LOOP_UP_TO = 1_000


@click.command()
def main() -> None:
    """Measure the speed of the scheduling core, as ratios against baselines of the same run."""
    print(f"filter + score, nodes x 8 GPUs, median of many; NumPy {np.__version__}\n")
    print(f"{'nodes':>7}  {'case':<15}{'time':>10}{'copy':>10}{'ratio':>8}{'loop':>11}{'ratio':>8}")
    times: dict[tuple[int, str], float] = {}
    copies: dict[int, float] = {}
    for nodes in SIZES:
        fleet = half_full_fleet(nodes)
        copies[nodes] = clock(partial(copy_of, fleet))
        for case, request in CASES.items():
            times[nodes, case] = clock(partial(fleet.best, request, "binpack"))
            loop = clock(partial(naive_loop, fleet, request), 0.3) if nodes <= LOOP_UP_TO else None
            print_line(nodes, case, times[nodes, case], copies[nodes], loop)
    print()
    for case, goal in GOALS.items():
        print_goal(f"{case} at 5,000 nodes, times the copy", times[5_000, case] / copies[5_000], goal)
        print_goal(f"{case}, 15,000 nodes against 5,000", times[15_000, case] / times[5_000, case], 4.0)
    learnt_policies(copies[5_000])
    repeated_rejections()
    ledger_cost()
    command_start()


def half_full_fleet(nodes: int) -> Fleet:
    """Every other GPU has one or two allocations of a few sizes; the same fleet every time."""
    fleet, rng = Fleet(), np.random.default_rng(7)
    for number in range(nodes):
        built = node(f"node-{number}", cpu="128").cards(8, "A100", "80Gi").node()
        fleet.set_node(built)
        for card in built.cards:
            for _ in range(int(rng.integers(0, 3))):
                fleet.hold(built.name, {card.uuid: Use(int(rng.choice([4096, 20480, 32768])), 20, 1)}, 2000)
    return fleet


def clock(work: Callable[[], object], seconds: float = 0.6) -> float:
    """Median seconds of one call, after a warm-up."""
    for _ in range(3):
        work()
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples) < 5:
        start = time.perf_counter()
        work()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def copy_of(fleet: Fleet) -> object:
    grid = fleet.grid()
    return [a.copy() for a in (grid.size, grid.memory, grid.cores, grid.slots, grid.tenants, grid.cpu, grid.host)]


def naive_loop(fleet: Fleet, request: PodRequest) -> str | None:
    """The same decision, node by node and GPU by GPU; first fit for each container."""
    best: tuple[float, str] | None = None
    for view in views(fleet):
        if view.cpu < request.cpu:
            continue
        free = [[card.memory, card.cores, card.slots, card.tenants] for card in view.free_by_card]
        if all(naive_container(a.cards, a.memory_of(81920), a.cores, a.exclusive, free) for a in request.asks):
            left = view.cpu / 128_000 + sum(card[0] / 81920 for card in free) / 8
            best = min(best or (left, view.node.name), (left, view.node.name))
    return best[1] if best else None


def naive_container(cards: int, memory: int, cores: int, exclusive: bool, free: list[list[int]]) -> bool:
    fitting = [
        card
        for card in free
        if card[0] >= memory and card[1] >= max(1, cores) and card[2] >= 1 and not (exclusive and card[3])
    ]
    for card in fitting[:cards]:
        card[0], card[1], card[2] = card[0] - memory, card[1] - cores, card[2] - 1
    return len(fitting) >= cards


_VIEWS: dict[int, list[NodeView]] = {}


def views(fleet: Fleet) -> Iterator[NodeView]:
    """Built once: the loop should measure the decision, not the unpacking of arrays."""
    if id(fleet) not in _VIEWS:
        _VIEWS[id(fleet)] = [fleet.view(name) for name in fleet.names()]
    return iter(_VIEWS[id(fleet)])


def learnt_policies(copy: float) -> None:
    """Warm: a pod of a known kind, after one node changed. And the first pod of its kind."""
    for policy in ("fragmentation", "tiling"):
        fleet = half_full_fleet(5_000)
        for request in CASES.values():
            fleet.scorer.observe(request)
        for case, request in CASES.items():
            start = time.perf_counter()
            fleet.best(request, policy)
            first = time.perf_counter() - start
            samples = []
            for number in range(200):
                fleet.hold(f"node-{number}", {f"GPU-node-{number}-0": Use(1024, 1, 1)})
                start = time.perf_counter()
                fleet.best(request, policy)
                samples.append(time.perf_counter() - start)
            print_goal(
                f"{policy}, {case} at 5,000 nodes, warm, times the copy", statistics.median(samples) / copy, 60.0
            )
            print(f"      {first * 1e3:>6.1f}  ms for the first pod of its kind after a refresh")
        each = clock(partial(hold_and_release, fleet, f"node-{77}"))
        print_goal(f"{policy}: allocating with its cache, us", each / 2 * 1e6, 100.0)


def hold_and_release(fleet: Fleet, name: str) -> None:
    uses = {f"GPU-{name}-{card}": Use(4096, 10, 1) for card in range(2)}
    fleet.hold(name, uses, 1000, 1024)
    fleet.release(name, uses, 1000, 1024)


def repeated_rejections() -> None:
    """One filter call from body to response: of a pod that fits, of a pod that fits nowhere, and of that pod again."""
    for nodes in (1_000, 5_000):
        calls = FilterCalls(nodes)
        accepted, rejected, repeated = (clock(work) for work in (calls.accept, calls.reject_first, calls.reject_again))
        print(
            f"      {accepted * 1e6:>6.0f} us an accepted pod, {rejected * 1e6:.0f} us a first rejection, "
            f"{repeated * 1e6:.0f} us a repeated one"
        )
        print_goal(f"a repeated rejection at {nodes:,} nodes, times an accepted pod", repeated / accepted, 0.5)


class FilterCalls:
    """A scheduler on a cluster with an allocation on every GPU; one pod requests a tile, another a whole GPU."""

    def __init__(self, nodes: int) -> None:
        self.ledger, settings = Ledger(), Settings(policy="tiling")
        cluster_state = ClusterState(self.ledger, settings.dialects)
        requests, availability = PodRequests(cluster_state), NodeAvailability(cluster_state, settings.other_agents)
        self.filter_service = FilterService(
            cluster_state, requests, availability, settings=settings, metrics=Metrics(), clock=time.monotonic
        )
        self.names = [f"node-{number}" for number in range(nodes)]
        for name in self.names:
            cluster_state.node_changed(msgspec.convert(node(name).cards(8, "A100", "80Gi").manifest(), NodeObject))
            for card in range(8):
                self.ledger.fleet.hold(name, {f"GPU-{name}-{card}": Use(8192, 10, 1)})
        self.bodies = {uid: self.body(cluster_state, uid, size) for uid, size in (("small", 4096), ("large", 81920))}

    def body(self, cluster_state: ClusterState, uid: str, size: int) -> bytes:
        manifest = pod({"gputile.io/gpu": 1, "gputile.io/memory": size}, name=uid, uid=uid)
        cluster_state.pod_changed(msgspec.convert(manifest, Pod))
        return msgspec.json.encode({"Pod": manifest, "NodeNames": self.names})

    def call(self, uid: str) -> None:
        args = read_filter(self.bodies[uid])
        write_filter(self.filter_service.filter(args), args)

    def accept(self) -> None:
        self.call("small")
        self.ledger.handle(Unreserved("small"))

    def reject_again(self) -> None:
        self.call("large")

    def reject_first(self) -> None:
        hold_and_release(self.ledger.fleet, "node-7")  # capacity changed
        self.call("large")


def ledger_cost() -> None:
    fleet = half_full_fleet(5_000)
    each = clock(partial(hold_and_release, fleet, "node-77")) / 2
    print_goal("allocating or releasing a grant of two tiles, us", each * 1e6, 20.0)


def command_start() -> None:
    """Both in turns, so that a busy moment affects both."""
    help_ = "import sys; sys.argv = ['gputile', '--help']; from gputile.cli.main import main; main()"
    took: dict[str, list[float]] = {help_: [], "pass": []}
    for _ in range(25):
        for script, samples in took.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", script], stdout=subprocess.DEVNULL, check=True)
            samples.append(time.perf_counter() - start)
    ratio = statistics.median(took[help_]) / statistics.median(took["pass"])
    print_goal("`gputile --help`, times `python -c pass`", ratio, 6.0)


def print_line(nodes: int, case: str, took: float, copy: float, loop: float | None) -> None:
    against_loop = f"{loop * 1e6:>8.0f} us{loop / took:>7.0f}x" if loop else f"{'-':>11}{'-':>8}"
    print(f"{nodes:>7,}  {case:<15}{took * 1e6:>7.0f} us{copy * 1e6:>7.0f} us{took / copy:>7.1f}x{against_loop}")


def print_goal(title: str, value: float, most: float) -> None:
    print(f"{'ok  ' if value <= most else 'OVER'}  {value:>6.1f}  (at most {most:g})  {title}")


if __name__ == "__main__":
    main()
