"""Preemption by GPU: for pods of higher priority, with PodDisruptionBudgets kept, and with events on every pod."""

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


def ranked(name: str, memory: int, priority: str, **more: Any) -> Manifest:
    return tile(name, memory, priorityClassName=priority, **more)


def fill(kube: Kube, space: str, pods: Watch, *manifests: Manifest) -> dict[str, str]:
    """Create the pods one after the other, each when the last is bound; return the card of each."""
    for number, manifest in enumerate(manifests, start=1):
        kube.create(manifest, space)
        pods.wait_for(all_bound(number), 20, f"{number} pods are bound")
    return {it["metadata"]["name"]: card_of(pods, space, it["metadata"]["name"]) for it in manifests}


def card_of(pods: Watch, space: str, name: str) -> str:
    pod = pods.get(space, name)
    assert pod is not None
    [held] = tiles(pod)
    return str(held["uuid"])


def is_bound(space: str, name: str) -> Any:
    return lambda pods: node_of(pods.get((space, name)))


def evicted(pods: Watch) -> set[str]:
    """The names of all pods that were ever terminating or deleted."""
    return {
        event.object["metadata"]["name"]
        for event in pods.events
        if event.type == "DELETED" or event.object["metadata"].get("deletionTimestamp")
    }


def wait_for_rejections(kube: Kube, space: str, pending: list[str], seconds: float = 4.0) -> None:
    """Wait until each pod has its event, and then for some seconds in which a preemption could happen."""
    for name in pending:
        wait_until(partial(events_of, kube, space, name, "NoFittingGPU"), 20, f"an event on {name}")
    time.sleep(seconds)


# ---- (a) kube-scheduler calls preempt -------------------------------------------------------------------------------


def test_preempt_replaces_kube_schedulers_victim_by_the_fewest_victims_on_one_card(
    plane: ControlPlane, kube: Kube, classes: None
) -> None:
    """Two slots per card, all allocated. kube-scheduler lacks one slot and proposes `tiny`, which shares its card with
    `rock`, which has too high a priority to be evicted."""
    rights(plane)
    join(kube, [gpu_node("n1", cards=2, memory=CARD, model=T4, slots=2)])
    space = plane.namespace("victims")
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
        pods.wait_for(lambda _: len(evicted(pods)) == 2, 20, "two pods are evicted")
        kube.create(ranked("late", CARD // 2, "low"), space)
        pods.wait_for(is_bound(space, "whole"), 40, "the preemptor is bound")
        assert evicted(pods) == {"b1", "b2"}
        assert card_of(pods, space, "whole") == "GPU-n1-1"
        assert gputile.count("gputile_evictions_total") == 0, "kube-scheduler evicted them"
        assert gputile.count("gputile_verbs_total", verb="preempt", result="accepted") >= 1
        assert node_of(pods.get(space, "late")) is None
        audit(kube)


# ---- (b) gputile preempts by itself ---------------------------------------------------------------------------------


def test_where_the_sums_fit_and_no_card_does_gputile_preempts_and_keeps_the_capacity(
    plane: ControlPlane, kube: Kube, gputile: Replica
) -> None:
    space = plane.namespace("own")
    with watch(kube, "Pod", space) as pods, FakeKubelets(kube, stop_after=3.0):
        cards = fill(kube, space, pods, ranked("old", 10000, "middle"), ranked("new", 10000, "low"))
        kube.create(ranked("wanted", 10000, "high"), space)
        pods.wait_for(lambda _: evicted(pods), 20, "a pod is evicted")
        kube.create(ranked("late", 10000, "low"), space)  # fits as soon as the victim is gone
        pods.wait_for(is_bound(space, "wanted"), 40, "the preemptor is bound")
        assert evicted(pods) == {"new"}, "only the pod of the lowest priority"
        assert card_of(pods, space, "wanted") == cards["new"]
        [preempted] = events_of(kube, space, "new", "Preempted")
        assert f"{space}/wanted" in preempted["message"]
        [preempting] = events_of(kube, space, "wanted", "Preempting")
        assert f"{space}/new" in preempting["message"]
        seen = [event.object for event in pods.events if event.object["metadata"]["name"] == "wanted"]
        nominated = [it for it in seen if "gputile.io/nomination" in it["metadata"].get("annotations", {})]
        assert nominated[0]["status"]["nominatedNodeName"] == "n1", "in the same write"
        wait_for_rejections(kube, space, ["late"], 0.5)
        late = pods.get(space, "late")
        assert node_of(late) is None
        assert gputile.count("gputile_evictions_total") == 1
        assert gputile.count("gputile_nominations") == 0
        audit(kube)


def test_a_nomination_outlives_the_process_that_wrote_it(plane: ControlPlane, kube: Kube, classes: None) -> None:
    rights(plane)
    join(kube, [gpu_node("n1", cards=2, memory=CARD, model=T4)])
    space = plane.namespace("outlives")
    with watch(kube, "Pod", space) as pods, FakeKubelets(kube) as kubelets, Replica(plane) as first:
        with plane.start_scheduler(config=first.config()):
            fill(kube, space, pods, ranked("old", 10000, "middle"), ranked("new", 10000, "low"))
            kubelets.hold("new", space)
            kube.create(ranked("wanted", 10000, "high"), space)
            pods.wait_for(lambda _: evicted(pods), 20, "a pod is evicted")
            first.child.kill()
        with Replica(plane, "gputile-1") as second, plane.start_scheduler(config=second.config()):
            kube.create(ranked("late", 10000, "low"), space)
            wait_until(lambda: second.count("gputile_nominations") == 1, 20, "the nomination was read from the pod")
            kubelets.release("new", space)
            pods.wait_for(is_bound(space, "wanted"), 40, "the preemptor is bound")
            wait_for_rejections(kube, space, ["late"], 0.5)
            assert node_of(pods.get(space, "late")) is None
            assert evicted(pods) == {"new"}


# ---- (c) budgets ----------------------------------------------------------------------------------------------------


def test_a_budget_that_forbids_an_eviction_is_kept_and_named(plane: ControlPlane, kube: Kube, gputile: Replica) -> None:
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
            wait_until(lambda: healthy(kube, space) == 2, 30, "the budget counts its pods")
            kube.create(ranked("wanted", 10000, "high"), space)
            [blocked] = wait_until(
                lambda: events_of(kube, space, "wanted", "PreemptionBlocked"), 20, "an event with the reason"
            )
            assert f"PodDisruptionBudget {space}/all-of-them" in blocked["message"]
            wait_for_rejections(kube, space, ["wanted"], 1.0)
            assert evicted(pods) == set()
            kube.delete("PodDisruptionBudget", "all-of-them", space)
            pods.wait_for(is_bound(space, "wanted"), 60, "the preemptor is bound without the budget")
            assert len(evicted(pods)) == 1
    finally:
        controllers.stop()


def healthy(kube: Kube, space: str) -> int:
    return int(kube.get("PodDisruptionBudget", "all-of-them", space).get("status", {}).get("currentHealthy", 0))


# ---- (d) no pod is evicted ------------------------------------------------------------------------------------------


def test_no_pod_is_evicted_for_a_pod_that_may_not_preempt_or_would_still_not_fit(
    plane: ControlPlane, kube: Kube, gputile: Replica
) -> None:
    space = plane.namespace("spared")
    with watch(kube, "Pod", space) as pods, FakeKubelets(kube):
        fill(kube, space, pods, ranked("old", 10000, "middle"), ranked("new", 10000, "middle"))
        kube.create(ranked("polite", 10000, "polite"), space)
        kube.create(ranked("equal", 10000, "middle"), space)
        kube.create(ranked("other-model", 10000, "high", annotations={"gputile.io/model": "A100"}), space)
        kube.create(ranked("too-large", CARD + 1, "high"), space)
        wait_for_rejections(kube, space, ["polite", "equal", "other-model", "too-large"])
        assert evicted(pods) == set()
        assert gputile.count("gputile_evictions_total") == 0


def test_a_setting_disables_gputiles_own_preemption(plane: ControlPlane, kube: Kube, classes: None) -> None:
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
        wait_for_rejections(kube, space, ["wanted"])
        assert evicted(pods) == set()
