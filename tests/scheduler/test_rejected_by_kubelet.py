"""Pods that their kubelet rejected: freed, counted, logged, and recorded in one Event by the leader."""

from typing import Any

import pytest

from gputile.dialects.kube_objects import Pod, PodStatus
from gputile.kube.api import Json, OutcomeUnknown
from gputile.testing.builders import node, pod
from tests.scheduler.rig import Rig, tile
from tests.scheduler.test_cluster_state import grant

WHY = "Allocate failed due to no healthy devices present; cannot allocate unhealthy devices gputile.io/gpu"
FAILED: Json = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": WHY}


def bound(rig: Rig, name: str = "web-0") -> None:
    rig.arrive(tile(8), name=name, annotations=grant(name=name), on="n1")


def cluster(*pods: Json) -> Rig:
    return Rig(node("n1").cards(1, size=16), pods=pods)


def fail(rig: Rig, name: str = "web-0", **status: Any) -> None:
    rig.change(name, status={**FAILED, **status})
    rig.catch_up()


@pytest.mark.parametrize(
    ("phase", "reason", "rejected"),
    [
        pytest.param("Failed", "UnexpectedAdmissionError", True, id="devices-could-not-be-allocated"),
        pytest.param("Failed", "OutOfgputile.io/gpu", True, id="out-of-a-resource"),
        pytest.param("Failed", "OutOfcpu", True, id="out-of-cpu"),
        pytest.param("Failed", "TopologyAffinityError", True, id="no-numa-node-has-them-all"),
        pytest.param(
            "Failed", "Allocate failed due to requested number of devices", True, id="as-older-kubelets-write-it"
        ),
        pytest.param("Failed", "Evicted", False, id="evicted-later"),
        pytest.param("Failed", None, False, id="failed-by-itself"),
        pytest.param("Running", "UnexpectedAdmissionError", False, id="runs"),
        pytest.param("Pending", "OutOfcpu", False, id="pending"),
        pytest.param(None, None, False, id="no-status"),
    ],
)
def test_which_pods_were_rejected(phase: str | None, reason: str | None, rejected: bool) -> None:
    assert Pod(status=PodStatus(phase=phase, reason=reason)).rejected_by_kubelet is rejected


async def test_its_tile_is_free_and_it_is_counted_with_an_event() -> None:
    rig = cluster()
    bound(rig)
    assert rig.free() == [8]
    fail(rig)
    assert rig.free() == [16]
    await rig.reconciler.round()
    (note,) = rig.api.notes
    assert (note.reason, note.pod, note.uid, note.kind) == ("AdmissionFailed", "web-0", "uid-web-0", "Warning")
    for words in ("kubelet of node n1", "UnexpectedAdmissionError", WHY, "free again", "scheduled again"):
        assert words in note.message
    assert rig.count("admission_failures_total") == 1


async def test_once_per_pod() -> None:
    rig = cluster()
    bound(rig)
    fail(rig)
    for _ in range(2):
        await rig.reconciler.round()
        rig.reconciler.prune()
        fail(rig, startTime="2026-08-01T00:00:00Z")
        rig.relist()
    assert (len(rig.api.notes), rig.count("admission_failures_total")) == (1, 1)


async def test_pods_that_failed_before_this_process_started_are_ignored() -> None:
    over = pod(tile(8), annotations=grant(), uid="uid-web-0", on="n1") | {"status": FAILED}
    rig = cluster(over)
    await rig.reconciler.round()
    assert rig.api.notes == []


async def test_a_pod_that_failed_while_our_watch_was_broken_gets_an_event() -> None:
    rig = cluster()
    rig.arrive(tile(8))
    rig.change("web-0", spec={"nodeName": "n1"}, status=FAILED)
    rig.relist()
    await rig.reconciler.round()
    assert [note.reason for note in rig.api.notes] == ["AdmissionFailed"]


async def test_only_the_leader_records_the_event_and_no_replica_repeats_it_later() -> None:
    rig = cluster()
    bound(rig)
    fail(rig)
    rig.leading = False
    await rig.reconciler.round()
    rig.leading = True
    await rig.reconciler.round()
    assert (rig.api.notes, rig.count("admission_failures_total")) == ([], 0)
    assert rig.free() == [16]


async def test_an_event_that_could_not_be_written_is_written_later() -> None:
    rig = cluster()
    bound(rig)
    fail(rig)
    rig.api.script["note"] = [OutcomeUnknown("reset")]
    await rig.reconciler.round()
    assert rig.count("admission_failures_total") == 0
    rig.clock.now += 10
    await rig.reconciler.round()
    assert (len(rig.api.notes), rig.count("admission_failures_total")) == (1, 1)


@pytest.mark.parametrize("listed", [False, True])
async def test_a_pod_that_was_deleted_meanwhile_gets_no_event(listed: bool) -> None:
    rig = cluster()
    bound(rig)
    fail(rig)
    rig.api.delete_pod("default/web-0")
    if listed:
        rig.relist()
    rig.catch_up()
    await rig.reconciler.round()
    assert rig.api.notes == []


async def test_pods_without_gpus_are_ignored() -> None:
    rig = cluster()
    rig.arrive({"cpu": "1"}, on="n1")
    fail(rig)
    await rig.reconciler.round()
    assert rig.api.notes == []
