"""Pods of high and low priority on full cards, for the tests of preemption."""

from typing import Any

import msgspec

from gputile.dialects.kube_objects import Pod
from gputile.kube.api import Json
from gputile.ledger.events import Tick
from gputile.scheduler.extender_api import OfferedVictims, PreemptArgs
from gputile.testing.builders import node, pod
from tests.scheduler.rig import Rig, tile

LOW, MIDDLE, HIGH = 5, 10, 1000


def prioritized_pod(name: str, limits: Json, priority: int, **rest: Any) -> Json:
    spec = rest.pop("spec", {})
    manifest = pod(limits, name=name, uid=f"uid-{name}", **rest)
    manifest["spec"] |= {"priority": priority, **spec}
    return manifest


async def settle(rig: Rig, name: str, size: int, priority: int, **rest: Any) -> None:
    """A pod that is bound and runs."""
    rig.api.add_pod(prioritized_pod(name, tile(size), priority, **rest))
    rig.catch_up()
    assert await rig.bind(name, rig.filter(name).names[0]) == ""
    rig.catch_up()


def arrive(rig: Rig, name: str, size: int, priority: int, **rest: Any) -> Pod:
    added = rig.api.add_pod(prioritized_pod(name, tile(size), priority, **rest))
    rig.catch_up()
    return added


def gone(rig: Rig, name: str) -> None:
    rig.api.delete_pod(f"default/{name}")
    rig.catch_up()


async def full_cluster(**settings: Any) -> Rig:
    """Two cards of 16, each with 10 allocated: enough in sum for another 10, which fits on no single card."""
    rig = Rig(node("n1").cards(2, size=16), node("n2").card(size=4), **settings)
    await settle(rig, "middle", 10, MIDDLE)
    await settle(rig, "low", 10, LOW)
    return rig


async def planned(rig: Rig, name: str = "wanted", size: int = 10, priority: int = HIGH, **rest: Any) -> None:
    """A pod is rejected, and `preempt.patience` has passed."""
    arrive(rig, name, size, priority, **rest)
    assert rig.filter(name).names == []
    await rig.preemptor.round()
    assert rig.api.evicted == []
    rig.clock.now += 1.0
    await rig.preemptor.round()


def notes(rig: Rig, name: str) -> list[tuple[str, str]]:
    return [(note.reason, note.message) for note in rig.api.notes if note.pod == name]


def nominated(rig: Rig, name: str = "wanted") -> str | None:
    return (rig.live(name).get("status") or {}).get("nominatedNodeName")


def guard(allowed: int, **selector: Any) -> Json:
    return {
        "metadata": {"name": "guard", "namespace": "default", "generation": 1},
        "spec": {"selector": selector},
        "status": {"disruptionsAllowed": allowed, "observedGeneration": 1},
    }


def new_leader_of(rig: Rig) -> Rig:
    """Another process that sees the same cluster and has become the leader."""
    new_leader = Rig(*rig.api.nodes.values(), pods=[{**item} for item in rig.api.pods.values()])
    new_leader.preemptor.on_elected()
    return new_leader


def later(rig: Rig, seconds: float) -> None:
    rig.clock.now += seconds
    rig.apply(rig.ledger.handle(Tick(rig.clock.now)))


def stamp(rig: Rig, name: str, when: str) -> None:
    rig.change(name, metadata={**rig.live(name)["metadata"], "deletionTimestamp": when})
    rig.catch_up()


def ask(rig: Rig, name: str, **offers: Any) -> dict[str, OfferedVictims]:
    live = msgspec.convert(rig.live(name), Pod)
    return rig.preemptor.answer(PreemptArgs(pod=live, offers=offers))
