"""Room for those who are more important: on cards, with budgets kept, and everybody told."""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.e2e.api import Kube, Manifest
from tests.e2e.audit import audit, tiles
from tests.e2e.control_plane import ControlPlane
from tests.e2e.gputile import Replica, rights
from tests.e2e.kubelets import FakeKubelets
from tests.e2e.nodes import gpu_node, join
from tests.e2e.pods import all_bound, events_of, node_of, tile
from tests.e2e.processes import wait_until
from tests.e2e.watching import Watch, watch

T4, CARD = "Tesla T4", 16000
CLASSES = {"low": 5, "middle": 10, "high": 1000, "polite": 1000}


@pytest.fixture
def classes(kube: Kube) -> None:
    for name, value in CLASSES.items():
        kube.apply(
            {
                "apiVersion": "scheduling.k8s.io/v1",
                "kind": "PriorityClass",
                "metadata": {"name": name},
                "value": value,
                "preemptionPolicy": "Never" if name == "polite" else "PreemptLowerPriority",
            }
        )


@pytest.fixture
def gputile(plane: ControlPlane, classes: None) -> Iterator[Replica]:
    rights(plane)
    join(plane.kube, [gpu_node("n1", cards=2, memory=CARD, model=T4)])
    with Replica(plane) as replica, plane.start_scheduler(config=replica.config()):
        yield replica


def ranked(name: str, memory: int, rank: str, **more: Any) -> Manifest:
    return tile(name, memory, priorityClassName=rank, **more)


def fill(kube: Kube, space: str, pods: Watch, *wanted: Manifest) -> dict[str, str]:
    """Bind them one after the other; the card of each."""
    for number, one in enumerate(wanted, start=1):
        kube.create(one, space)
        pods.wait_for(all_bound(number), 20, f"{number} bound")
    return {one["metadata"]["name"]: card_of(pods, space, one["metadata"]["name"]) for one in wanted}


def card_of(pods: Watch, space: str, name: str) -> str:
    found = pods.get(space, name)
    assert found is not None
    [held] = tiles(found)
    return str(held["uuid"])


def is_bound(space: str, name: str) -> Any:
    return lambda pods: node_of(pods.get((space, name)))


def asked_to_go(pods: Watch) -> set[str]:
    """Everybody whose deletion was ever asked for, or who is gone."""
    return {
        event.object["metadata"]["name"]
        for event in pods.events
        if event.type == "DELETED" or event.object["metadata"].get("deletionTimestamp")
    }


def stays_so(kube: Kube, space: str, waiting: list[str], seconds: float = 4.0) -> None:
    """They have been refused and told so, and a while has passed in which something could have been done."""
    for name in waiting:
        wait_until(partial(events_of, kube, space, name, "NoFittingGPU"), 20, f"{name} was told why")
    time.sleep(seconds)


# ---- (a) kube-scheduler asks ----------------------------------------------------------------------------------------


def test_asked_the_fewest_on_one_card_go_although_kube_scheduler_offered_another(
    plane: ControlPlane, kube: Kube, classes: None
) -> None:
    """Two slots per card, all taken. kube-scheduler misses one slot and offers `tiny`, which shares its card with
    `rock`, whom nobody may evict."""
    rights(plane)
    join(kube, [gpu_node("n1", cards=2, memory=CARD, model=T4, slots=2)])
    space = plane.namespace("asked")
    first, second = {"gputile.io/uuid": "GPU-n1-0"}, {"gputile.io/uuid": "GPU-n1-1"}
    with (
        Replica(plane) as gputile,
        plane.start_scheduler(config=gputile.config()),
        watch(kube, "Pod", space) as pods,
        FakeKubelets(kube, stop_after=2.0),
    ):
        fill(
            kube,
            space,
            pods,
            ranked("rock", CARD // 2, "high", annotations=first),
            ranked("tiny", 1000, "low", annotations=first),
            ranked("b1", CARD // 2, "middle", annotations=second),
            ranked("b2", CARD // 2, "middle", annotations=second),
        )
        kube.create(ranked("whole", CARD, "high"), space)
        pods.wait_for(lambda _: len(asked_to_go(pods)) == 2, 20, "two are asked to go")
        kube.create(ranked("late", CARD // 2, "low"), space)
        pods.wait_for(is_bound(space, "whole"), 40, "bound where room was made")
        assert asked_to_go(pods) == {"b1", "b2"}
        assert card_of(pods, space, "whole") == "GPU-n1-1"
        assert gputile.count("gputile_evictions_total") == 0, "kube-scheduler evicted them"
        assert gputile.count("gputile_verbs_total", verb="preempt", result="accepted") >= 1
        assert node_of(pods.get(space, "late")) is None
        audit(kube)


# ---- (b) nobody asks ------------------------------------------------------------------------------------------------


def test_where_the_sums_suffice_and_no_card_does_room_is_made_and_kept(
    plane: ControlPlane, kube: Kube, gputile: Replica
) -> None:
    space = plane.namespace("unasked")
    with watch(kube, "Pod", space) as pods, FakeKubelets(kube, stop_after=3.0):
        cards = fill(kube, space, pods, ranked("old", 10000, "middle"), ranked("new", 10000, "low"))
        kube.create(ranked("wanted", 10000, "high"), space)
        pods.wait_for(lambda _: asked_to_go(pods), 20, "somebody is asked to go")
        kube.create(ranked("late", 10000, "low"), space)  # would fit as soon as the victim is gone
        pods.wait_for(is_bound(space, "wanted"), 40, "bound where room was made")
        assert asked_to_go(pods) == {"new"}, "the least important, and nobody else"
        assert card_of(pods, space, "wanted") == cards["new"]
        [told] = events_of(kube, space, "new", "Preempted")
        assert f"{space}/wanted" in told["message"]
        [why] = events_of(kube, space, "wanted", "Preempting")
        assert f"{space}/new" in why["message"]
        seen = [event.object for event in pods.events if event.object["metadata"]["name"] == "wanted"]
        announced = [one for one in seen if "gputile.io/nomination" in one["metadata"].get("annotations", {})]
        assert announced[0]["status"]["nominatedNodeName"] == "n1", "in the same write"
        stays_so(kube, space, ["late"], 0.5)
        late = pods.get(space, "late")
        assert node_of(late) is None
        assert gputile.count("gputile_evictions_total") == 1
        assert gputile.count("gputile_nominations") == 0
        audit(kube)


def test_a_promise_outlives_the_process_that_made_it(plane: ControlPlane, kube: Kube, classes: None) -> None:
    rights(plane)
    join(kube, [gpu_node("n1", cards=2, memory=CARD, model=T4)])
    space = plane.namespace("outlives")
    with watch(kube, "Pod", space) as pods, FakeKubelets(kube) as kubelets, Replica(plane) as first:
        with plane.start_scheduler(config=first.config()):
            fill(kube, space, pods, ranked("old", 10000, "middle"), ranked("new", 10000, "low"))
            kubelets.hold("new", space)
            kube.create(ranked("wanted", 10000, "high"), space)
            pods.wait_for(lambda _: asked_to_go(pods), 20, "somebody is asked to go")
            first.child.kill()
        with Replica(plane, "gputile-1") as second, plane.start_scheduler(config=second.config()):
            kube.create(ranked("late", 10000, "low"), space)
            wait_until(lambda: second.count("gputile_nominations") == 1, 20, "the promise was found on the pod")
            kubelets.release("new", space)
            pods.wait_for(is_bound(space, "wanted"), 40, "bound where room was made")
            stays_so(kube, space, ["late"], 0.5)
            assert node_of(pods.get(space, "late")) is None
            assert asked_to_go(pods) == {"new"}


# ---- (c) budgets ----------------------------------------------------------------------------------------------------


def test_a_budget_that_forbids_it_is_respected_and_named(plane: ControlPlane, kube: Kube, gputile: Replica) -> None:
    space = plane.namespace("budget")
    controllers = plane.start_controllers("disruption-controller")
    guarded = {"labels": {"app": "guarded"}}
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "all-of-them", "namespace": space},
        "spec": {"minAvailable": 2, "selector": {"matchLabels": {"app": "guarded"}}},
    }
    try:
        with watch(kube, "Pod", space) as pods, FakeKubelets(kube):
            fill(kube, space, pods, ranked("old", 10000, "low", **guarded), ranked("new", 10000, "low", **guarded))
            kube.create(budget, space)
            wait_until(lambda: healthy(kube, space) == 2, 30, "the budget knows its pods")
            kube.create(ranked("wanted", 10000, "high"), space)
            [why] = wait_until(lambda: events_of(kube, space, "wanted", "PreemptionBlocked"), 20, "it is told why not")
            assert f"PodDisruptionBudget {space}/all-of-them" in why["message"]
            stays_so(kube, space, ["wanted"], 1.0)
            assert asked_to_go(pods) == set()
            kube.delete("PodDisruptionBudget", "all-of-them", space)
            pods.wait_for(is_bound(space, "wanted"), 60, "bound once nothing forbids it")
            assert len(asked_to_go(pods)) == 1
    finally:
        controllers.stop()


def healthy(kube: Kube, space: str) -> int:
    return int(kube.get("PodDisruptionBudget", "all-of-them", space).get("status", {}).get("currentHealthy", 0))


# ---- (d) nobody is evicted ------------------------------------------------------------------------------------------


def test_nobody_goes_for_those_who_may_not_preempt_or_whom_it_would_not_help(
    plane: ControlPlane, kube: Kube, gputile: Replica
) -> None:
    space = plane.namespace("spared")
    with watch(kube, "Pod", space) as pods, FakeKubelets(kube):
        fill(kube, space, pods, ranked("old", 10000, "middle"), ranked("new", 10000, "middle"))
        kube.create(ranked("polite", 10000, "polite"), space)
        kube.create(ranked("equal", 10000, "middle"), space)
        kube.create(ranked("wrong", 10000, "high", annotations={"gputile.io/model": "A100"}), space)
        kube.create(ranked("too-large", CARD + 1, "high"), space)
        stays_so(kube, space, ["polite", "equal", "wrong", "too-large"])
        assert asked_to_go(pods) == set()
        assert gputile.count("gputile_evictions_total") == 0


def test_a_setting_turns_our_own_preemption_off(plane: ControlPlane, kube: Kube, classes: None) -> None:
    rights(plane)
    join(kube, [gpu_node("n1", cards=2, memory=CARD, model=T4)])
    space = plane.namespace("off")
    with (
        Replica(plane, preempt__own="false") as replica,
        plane.start_scheduler(config=replica.config()),
        watch(kube, "Pod", space) as pods,
        FakeKubelets(kube),
    ):
        fill(kube, space, pods, ranked("old", 10000, "low"), ranked("new", 10000, "low"))
        kube.create(ranked("wanted", 10000, "high"), space)
        stays_so(kube, space, ["wanted"])
        assert asked_to_go(pods) == set()
