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

from bench.stage import CARD, CARDS, Tenant, configuration, one_tile, quantile, removed, say

SPACE = "freed"
GOAL = 2.0  # seconds
WAITING = 50
PAUSE = 3.0  # seconds between two trials at most


class Freed(msgspec.Struct, frozen=True, kw_only=True):
    took: tuple[float, ...]  # seconds
    nudges: float

    def lines(self) -> list[str]:
        worst = max(self.took)
        return [
            f"{len(self.took)} trials: p50 {quantile(self.took, 0.5):.3f} s, p90 {quantile(self.took, 0.9):.3f} s, "
            f"max {worst:.3f} s; {self.nudges:.0f} nudges",
            f"{'ok   ' if worst < GOAL else 'OVER '} {worst:.2f}  (below {GOAL:g})  seconds from a freed tile to the "
            "binding of a pending pod, worst",
        ]


def freed(plane: ControlPlane, nodes: int = 20, trials: int = 60) -> Freed:
    """A full cluster, with 50 more pending pods than trials. A pod is deleted, and the time runs from its DELETED event
    to the next binding. Trials start at random times, so that the backoff of the others is in every state."""
    plane.namespace(SPACE)
    join(plane.kube, [gpu_node(f"node-{n:03}", CARDS, CARD) for n in range(nodes)], 8)
    full, dice = nodes * CARDS * 2, random.Random(7)  # two halves per card
    with (
        Tenant(plane) as tenant,
        plane.start_scheduler(config=configuration(tenant, 100)),
        watch(plane.kube, "Pod", SPACE) as pods,
    ):
        ear = Ear()
        pods.each(ear.hear)
        wishes = [one_tile(f"p{n:05}", CARD // 2) for n in range(full + WAITING + trials)]
        plane.kube.create_many(wishes, SPACE, threads=8)
        ear.wait_for_bound(full, 120)
        say(f"{full} bound, {len(wishes) - full} pending")
        took = []
        for number in range(trials):
            time.sleep(dice.uniform(0.0, PAUSE))
            took.append(_trial(plane, ear, dice.choice(sorted(ear.bound))))
            if number % 20 == 19:
                say(f"trial {number + 1} of {trials}: so far at most {max(took):.2f} s")
        nudges = tenant.count("gputile_nudges_total")
    removed(plane.kube, SPACE)
    return Freed(took=tuple(took), nudges=nudges)


def _trial(plane: ControlPlane, ear: "Ear", victim: str) -> float:
    full = len(ear.bound)
    plane.kube.delete("Pod", victim, SPACE, grace=0)
    ear.wait_for_bound(full, 30, after=victim)
    return ear.last_bound - ear.gone[victim]


class Ear:
    """Records which pods are bound, the time of the last binding, and of each deletion."""

    def __init__(self) -> None:
        self.bound: set[str] = set()
        self.gone: dict[str, float] = {}
        self.last_bound = 0.0
        self._news = threading.Condition()

    def hear(self, event: Event) -> None:
        name = event.object["metadata"]["name"]
        with self._news:
            if event.type == "DELETED":
                self.bound.discard(name)
                self.gone[name] = event.at
            elif node_of(event.object) and name not in self.bound:
                self.bound.add(name)
                self.last_bound = event.at
            self._news.notify_all()

    def wait_for_bound(self, count: int, seconds: float, after: str = "") -> None:
        """Wait until `count` pods are bound, and `after` is deleted."""
        with self._news:
            if not self._news.wait_for(lambda: len(self.bound) == count and (not after or after in self.gone), seconds):
                raise TookTooLong(f"{len(self.bound)} of {count} pods were bound within {seconds:g} s")
