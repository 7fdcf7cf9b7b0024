"""Measures filter decisions while nominations are open, as ratios against the same cluster without nominations.

    python -m bench.nominations        5,000 nodes x 8 GPUs, ten open nominations

A pod of equal or lower priority sees nominated capacity as held. A pod of higher priority may use it, so its queries
leave the nominations out. Both clusters answer in turns, so that a busy moment affects both.
"""

import statistics
import time
from collections.abc import Callable

import click
import msgspec
import numpy as np

from bench.engine import print_goal
from gputile.dialects.kube_objects import NodeObject, Pod
from gputile.engine.placement.place import Placement
from gputile.ledger.events import Nominated, Unreserved
from gputile.ledger.ledger import Ledger
from gputile.model.allocations import Allocation
from gputile.model.cards import Use
from gputile.scheduler.extender.filter import FilterService
from gputile.scheduler.extender_api import FilterAnswer, FilterArgs
from gputile.scheduler.settings import Settings
from gputile.scheduler.state.cluster_state import ClusterState
from gputile.scheduler.state.node_availability import NodeAvailability
from gputile.scheduler.state.pod_requests import PodRequests
from gputile.telemetry.metrics import Metrics
from gputile.testing.builders import ask, node, pod, wants

CARDS = 8
NOMINATED = 100  # the priority of the pods with a nomination
PRIORITIES = {"lower": 0, "equal": NOMINATED, "higher": 1000}
MOST = {"lower": 1.2, "equal": 1.2, "higher": 6.5}  # times the same pod without nominations, accepted
SMALL, LARGE = 4096, 81920  # MiB: fits on every GPU, and on none
UNTIL = 1e12
WARM_UP = 10


@click.command()
@click.option("--nodes", default=5_000, show_default=True, help="Nodes of 8 GPUs, each with an allocation.")
@click.option("--nominations", default=10, show_default=True, help="Open nominations, each on a node of its own.")
@click.option("--policy", default="tiling", show_default=True, help="Node and card policy.")
@click.option("--samples", default=300, show_default=True, help="Decisions per case and cluster.")
def main(nodes: int, nominations: int, policy: str, samples: int) -> None:
    """Measure filter decisions beside open nominations, as ratios against none in the same run."""
    none, some = Decisions(nodes, 0, policy), Decisions(nodes, nominations, policy)
    print(f"filter decisions at {nodes:,} nodes x {CARDS} GPUs, {nominations} open nominations, {policy}; medians\n")
    for priority, most in MOST.items():
        title = f"an accepted pod of {priority} priority"
        report(title, none.accept(priority), some.accept(priority), samples, most)
    for priority in MOST:
        title = f"a rejected pod of {priority} priority, computed"
        report(title, none.reject_first(priority), some.reject_first(priority), samples, 1.2)
    for priority in ("lower", "equal"):
        title = f"a repeated rejection of {priority} priority, beside accepted pods of higher priority"
        report(title, none.reject_again(priority), some.reject_again(priority), samples, 1.5)


def report(title: str, none: Callable[[], float], some: Callable[[], float], samples: int, most: float) -> None:
    """Sample both clusters in turns and print the ratio of the medians."""
    pairs = [(none(), some()) for _ in range(WARM_UP + samples)][WARM_UP:]
    without, beside = (statistics.median(column) for column in zip(*pairs, strict=True))
    print_goal(f"{title}: {beside * 1e6:.0f} us, {without * 1e6:.0f} without nominations", beside / without, most)


class Decisions:
    """A scheduler on a cluster with an allocation on every GPU, of many sizes; each method returns a function that
    measures one decision."""

    def __init__(self, nodes: int, nominations: int, policy: str) -> None:
        self.ledger, settings = Ledger(), Settings(policy=policy)
        self.cluster_state = ClusterState(self.ledger, settings.dialects)
        requests = PodRequests(self.cluster_state)
        availability = NodeAvailability(self.cluster_state, settings.other_agents)
        self.filter_service = FilterService(
            self.cluster_state, requests, availability, settings=settings, metrics=Metrics(), clock=time.monotonic
        )
        self.names, rng = [f"node-{number}" for number in range(nodes)], np.random.default_rng(7)
        for name in self.names:
            manifest = node(name).cards(CARDS, "A100", "80Gi").manifest()
            self.cluster_state.node_changed(msgspec.convert(manifest, NodeObject))
            for card in range(CARDS):
                use = Use(int(rng.integers(4, 60)) * 1024, 10, 1)
                self.ledger.fleet.hold(name, {f"GPU-{name}-{card}": use}, cpu=2000)
        for number in range(nominations):
            self.nominate(f"nominated-{number}", self.names[number * nodes // nominations])

    def nominate(self, uid: str, name: str) -> None:
        request = wants(ask("10Gi", cards=2), cpu=1000)
        placement = self.ledger.fleet.place(request, name)
        assert isinstance(placement, Placement)
        allocation = Allocation(
            pod=uid, node=name, grant=placement.grant(uid, request), cpu=1000, priority=NOMINATED, name=f"ns/{uid}"
        )
        self.ledger.handle(Nominated(allocation, UNTIL))

    def args(self, priority: str, size: int) -> FilterArgs:
        uid = f"{priority}-{size}"
        manifest = pod({"gputile.io/gpu": 1, "gputile.io/memory": size}, name=uid, uid=uid)
        manifest["spec"]["priority"] = PRIORITIES[priority]
        arrived = msgspec.convert(manifest, Pod)
        self.cluster_state.pod_changed(arrived)
        return FilterArgs(pod=arrived, names=self.names)

    def decide(self, args: FilterArgs) -> tuple[float, FilterAnswer]:
        start = time.perf_counter()
        answer = self.filter_service.filter(args)
        return time.perf_counter() - start, answer

    def accept(self, priority: str) -> Callable[[], float]:
        args = self.args(priority, SMALL)

        def measure() -> float:
            took, answer = self.decide(args)
            assert answer.names
            self.ledger.handle(Unreserved(args.pod.uid))
            return took

        return measure

    def reject_first(self, priority: str) -> Callable[[], float]:
        """Capacity was freed, so that no cached rejection is valid."""
        args = self.args(priority, LARGE)

        def measure() -> float:
            use = {f"GPU-{self.names[7]}-0": Use(1024, 1, 1)}
            self.ledger.fleet.hold(self.names[7], use)
            self.ledger.fleet.release(self.names[7], use)
            took, answer = self.decide(args)
            assert not answer.names
            return took

        return measure

    def reject_again(self, priority: str) -> Callable[[], float]:
        """The pod of higher priority stays reserved while the rejection is repeated: no capacity was freed."""
        higher, args = self.args("higher", SMALL), self.args(priority, LARGE)
        self.filter_service.filter(args)

        def measure() -> float:
            self.ledger.handle(Unreserved(higher.pod.uid))
            self.filter_service.filter(args)
            self.filter_service.filter(higher)
            return self.decide(args)[0]

        return measure


if __name__ == "__main__":
    main()
