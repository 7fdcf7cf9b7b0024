"""Measures how long kube-scheduler binds nothing after the leading replica was killed, cut off, frozen or stopped.

Two replicas behind a Service, a kube-scheduler in front of it, and pods that arrive at a steady rate. In each trial the
leader is lost in one way. The tables show the time to the next leader and to the first bind by it, and how late pods
were bound: from the moment at which they could have been bound (they exist, and there is a leader) to their binding.
"""

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
import msgspec
from tests.e2e.chaos.campaign import Scene
from tests.e2e.chaos.storm import retry
from tests.e2e.control_plane import ControlPlane
from tests.e2e.pods import node_of, pod
from tests.e2e.processes import wait_until
from tests.e2e.programs import programs
from tests.e2e.watching import Event, watch

from bench.harness import delete_pods, progress

SPACE = "failover"
WARM_UP = 3.0  # seconds of load before the leader is lost
SETTLE = 3.0  # seconds of load after the first bind of the new leader
FROZEN_GOAL, LATE_GOAL = 20.0, 2.0  # seconds


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One failover; seconds from the loss of the leader, and of each pod that arrived."""

    elected: float
    bound: float
    late: tuple[float, ...]


class Load:
    """Creates small pods at a steady rate until the `with` ends; knows when each was created and bound."""

    def __init__(self, scene: Scene, rate: float) -> None:
        self._scene, self._rate = scene, rate
        self.created: dict[str, float] = {}
        self.bound: dict[str, float] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._create, name="load", daemon=True)

    def __enter__(self) -> "Load":
        self._watch = watch(self._scene.kube, "Pod", SPACE)
        self._watch.each(self._record)
        self._watch.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._watch.close()

    def stop(self) -> None:
        self._done.set()
        self._thread.join(10)

    def _record(self, event: Event) -> None:
        name = event.object["metadata"]["name"]
        if node_of(event.object):
            self.bound.setdefault(name, event.at)

    def _create(self) -> None:
        number = 0
        while not self._done.wait(1 / self._rate):
            number += 1
            name = f"p{number:05}"
            manifest = pod(name, {"gputile.io/gpu": 1, "gputile.io/memory": 16})
            retry(lambda manifest=manifest: self._scene.kube.create(manifest, SPACE), f"creating {name}")  # type: ignore[misc]
            self.created[name] = time.monotonic()

    def first_bound_after(self, moment: float) -> float | None:
        return min((at for at in self.bound.values() if at > moment), default=None)

    def wait_for_all(self, seconds: float) -> None:
        wait_until(lambda: self.created.keys() <= self.bound.keys(), seconds, "every pod is bound")


# ---- ways to lose the leader ----------------------------------------------------------------------------------------

Lose = Callable[[Scene, str], None]


class Way(msgspec.Struct, frozen=True):
    """How the leader is lost, and how it comes back."""

    lose: Lose
    heal: Lose


def _stop(scene: Scene, name: str) -> None:
    """SIGTERM, as in a rolling update: it finishes its calls and releases the Lease."""
    scene.probes[name].down()
    scene.replicas[name].child.stop()


WAYS = {
    "killed": Way(Scene.kill, Scene.start),
    "cut off": Way(Scene.black_out, Scene.heal),
    "frozen": Way(Scene.freeze, Scene.thaw),
    "stopped": Way(_stop, Scene.start),
}


def trial(scene: Scene, way: Way, rate: float) -> Trial:
    leader = scene.leader()
    (other,) = (name for name in scene.replicas if name != leader)
    wait_until(scene.probes[other].is_ready, 60, f"{other} is ready to take over")
    with Load(scene, rate) as load:
        time.sleep(WARM_UP)
        began = time.monotonic()
        way.lose(scene, leader)
        wait_until(scene.replicas[other].is_leader, 30, f"{other} is the leader", every=0.02)
        elected = time.monotonic()
        wait_until(lambda: load.first_bound_after(elected), 90, "the new leader binds a pod", every=0.02)
        time.sleep(SETTLE)
        load.stop()
        load.wait_for_all(90)
        way.heal(scene, leader)
        bound = load.first_bound_after(elected) or elected
        late = _late(load, began, elected)
    delete_pods(scene.kube, SPACE)
    return Trial(elected=elected - began, bound=bound - began, late=late)


def _late(load: Load, lost: float, elected: float) -> tuple[float, ...]:
    """By pod: seconds to its binding from the moment at which it existed and there was a leader."""
    late = []
    for name, created in load.created.items():
        possible = max(created, elected) if load.bound[name] > lost else created
        late.append(max(0.0, load.bound[name] - possible))
    return tuple(late)


# ---- results --------------------------------------------------------------------------------------------------------


def lines(by_way: dict[str, list[Trial]]) -> Iterator[str]:
    heads = f"{'leader':<9}{'trials':>7}{'new leader after':>19}{'first bind after':>19}{'pods':>7}{'late > 2 s':>12}"
    yield f"{heads}   seconds: median (max)"
    for name, trials in by_way.items():
        late = [seconds for one in trials for seconds in one.late]
        elected, bound = ([getattr(one, field) for one in trials] for field in ("elected", "bound"))
        yield (
            f"{name:<9}{len(trials):>7}{_median_and_max(elected):>19}{_median_and_max(bound):>19}{len(late):>7}"
            f"{sum(seconds > LATE_GOAL for seconds in late):>12}   latest {max(late):.1f}"
        )
    if frozen := by_way.get("frozen"):
        median = statistics.median(one.bound for one in frozen)
        yield _verdict(median, FROZEN_GOAL, "seconds from a frozen leader to the next bind, median")
    if over := [seconds for trials in by_way.values() for one in trials for seconds in one.late]:
        yield _verdict(max(over), LATE_GOAL, "seconds that a pod was bound late, worst")


def _median_and_max(samples: list[float]) -> str:
    return f"{statistics.median(samples):.1f} ({max(samples):.1f})"


def _verdict(measured: float, goal: float, what: str) -> str:
    return f"{'ok   ' if measured <= goal else 'OVER '} {measured:.1f}  (at most {goal:g})  {what}"


@contextmanager
def scene() -> Iterator[Scene]:
    with ControlPlane(programs()) as plane, Scene(plane, seed=7) as made:
        plane.namespace(SPACE)
        yield made


@click.command(help=__doc__)
@click.option("--ways", default="killed,cut off,frozen,stopped", show_default=True, help="How the leader is lost.")
@click.option("--trials", default=10, show_default=True, help="Of each way.")
@click.option("--rate", default=20.0, show_default=True, help="Pods per second.")
def main(ways: str, trials: int, rate: float) -> None:
    by_way: dict[str, list[Trial]] = {}
    with scene() as made:
        for name in ways.split(","):
            for number in range(trials):
                one = trial(made, WAYS[name], rate)
                by_way.setdefault(name, []).append(one)
                progress(
                    f"{name}, trial {number + 1} of {trials}: new leader after {one.elected:.1f} s, first bind after "
                    f"{one.bound:.1f} s, latest pod {max(one.late):.1f} s late"
                )
    print("\n".join(lines(by_way)))


if __name__ == "__main__":
    main()
