"""Measures the time from a freed tile to the binding of a pending pod, with backoff, watch and nudge."""

import random
import threading
import time

import msgspec
from tests.e2e.control_plane import ControlPlane
from tests.e2e.nodes import gpu_node, join
from tests.e2e.pods import node_of
from tests.e2e.processes import TookTooLong
from tests.e2e.watching import Event, watch

from bench.harness import CARD, CARDS, MeasuredReplica, configuration, delete_pods, one_tile, progress, quantile

NAMESPACE = "freed"
GOAL = 2.0  # seconds
PENDING = 50
PAUSE = 3.0  # seconds between two trials at most


class Freed(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from a freed tile to the next binding, and the number of nudges."""

    seconds: tuple[float, ...]  # by trial
    nudges: float

    def lines(self) -> list[str]:
        p50, p90, worst = quantile(self.seconds, 0.5), quantile(self.seconds, 0.9), max(self.seconds)
        return [
            f"{len(self.seconds)} trials: p50 {p50:.3f} s, p90 {p90:.3f} s, max {worst:.3f} s; "
            f"{self.nudges:.0f} nudges",
            f"{'ok   ' if worst < GOAL else 'OVER '} {worst:.2f}  (below {GOAL:g})  seconds from a freed tile to the "
            "binding of a pending pod, worst",
        ]


def freed(plane: ControlPlane, nodes: int = 20, trials: int = 60) -> Freed:
    """A full cluster, with 50 more pending pods than trials. A pod is deleted, and the time runs from its DELETED event
    to the next binding. Trials start at random times, so that the backoff of the pending pods is in every state."""
    plane.namespace(NAMESPACE)
    join(plane.kube, [gpu_node(f"node-{n:03}", CARDS, CARD) for n in range(nodes)], 8)
    full, rng = nodes * CARDS * 2, random.Random(7)  # two halves per card
    with (
        MeasuredReplica(plane) as replica,
        plane.start_scheduler(config=configuration(replica, 100)),
        watch(plane.kube, "Pod", NAMESPACE) as pods,
    ):
        events = PodEvents()
        pods.each(events.record)
        manifests = [one_tile(f"p{n:05}", CARD // 2) for n in range(full + PENDING + trials)]
        plane.kube.create_many(manifests, NAMESPACE, threads=8)
        events.wait_for_bound(full, 120)
        progress(f"{full} bound, {len(manifests) - full} pending")
        seconds = []
        for number in range(trials):
            time.sleep(rng.uniform(0.0, PAUSE))
            seconds.append(_trial(plane, events, rng.choice(sorted(events.bound))))
            if number % 20 == 19:
                progress(f"trial {number + 1} of {trials}: so far at most {max(seconds):.2f} s")
        nudges = replica.count("gputile_nudges_total")
    delete_pods(plane.kube, NAMESPACE)
    return Freed(seconds=tuple(seconds), nudges=nudges)


def _trial(plane: ControlPlane, events: "PodEvents", victim: str) -> float:
    full = len(events.bound)
    plane.kube.delete("Pod", victim, NAMESPACE, grace=0)
    events.wait_for_bound(full, 30, after=victim)
    return events.last_bound - events.deleted_at[victim]


class PodEvents:
    """Records which pods are bound, the time of the last binding, and of each deletion."""

    def __init__(self) -> None:
        self.bound: set[str] = set()
        self.deleted_at: dict[str, float] = {}
        self.last_bound = 0.0
        self._changed = threading.Condition()

    def record(self, event: Event) -> None:
        name = event.object["metadata"]["name"]
        with self._changed:
            if event.type == "DELETED":
                self.bound.discard(name)
                self.deleted_at[name] = event.at
            elif node_of(event.object) and name not in self.bound:
                self.bound.add(name)
                self.last_bound = event.at
            self._changed.notify_all()

    def wait_for_bound(self, count: int, timeout: float, after: str = "") -> None:
        """Wait until `count` pods are bound, and `after` is deleted."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: len(self.bound) == count and (not after or after in self.deleted_at), timeout
            ):
                raise TookTooLong(f"{len(self.bound)} of {count} pods were bound within {timeout:g} s")
