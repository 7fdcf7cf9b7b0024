"""A cluster with pods of other systems: filter allocates none of their GPUs, whatever their pods request."""

from typing import Any

import msgspec
import pytest

from gputile.dialects.kube_objects import NodeObject, Pod
from gputile.dialects.settings import DialectSettings
from gputile.engine.placement.place import Placement
from gputile.kube.api import Json
from gputile.ledger.ledger import Ledger
from gputile.scheduler.state.cluster_state import ClusterState
from gputile.testing.builders import ask, pod, wants

RECORD, ITS_NODE = "hami.io/vgpu-devices-allocated", "hami.io/vgpu-node"
SHARE = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 6000}
INVALID = {"nvidia.com/gpu": 1, "nvidia.com/gpumem-percentage": 150}


def hami_node(cards: int = 2, mode: str = "") -> NodeObject:
    register = [
        {"id": f"GPU-{n}", "count": 10, "devmem": 8192, "devcore": 100, "health": True, "index": n, "mode": mode}
        for n in range(cards)
    ]
    return _node({"hami.io/node-nvidia-register": msgspec.json.encode(register).decode()}, {"nvidia.com/gpu": "20"})


def nvidia_node() -> NodeObject:
    return _node({}, {"nvidia.com/gpu": "2"}, {"nvidia.com/gpu.memory": "8192"})


def _node(annotations: Json, amounts: Json, labels: Json | None = None) -> NodeObject:
    amounts = {"cpu": "64", "memory": "512Gi", **amounts}
    metadata = {"name": "n1", "annotations": annotations, "labels": labels or {}}
    return msgspec.convert(
        {"metadata": metadata, "status": {"capacity": amounts, "allocatable": amounts}}, type=NodeObject
    )


def running(limits: Json, name: str = "a", **rest: Any) -> Pod:
    state = pod(limits, name=name, uid=f"uid-{name}", on="n1", **rest)
    return msgspec.convert(state | {"status": {"phase": "Running", "startTime": "2026-01-01T00:00:00Z"}}, type=Pod)


def cluster_state(where: NodeObject, *pods: Pod, settings: DialectSettings | None = None) -> ClusterState:
    state = ClusterState(Ledger(), settings or DialectSettings())
    state.nodes_listed([where])
    state.pods_listed(pods)
    state.ledger.check()
    return state


def whole_gpus_free(state: ClusterState) -> int:
    fleet = state.ledger.fleet
    fits = [n for n in range(1, 9) if isinstance(fleet.place(wants(ask(whole=True, cards=n)), "n1"), Placement)]
    return max(fits, default=0)


@pytest.mark.parametrize(
    ("where", "limits", "annotations", "free"),
    [
        pytest.param(hami_node(), SHARE, {RECORD: "GPU-0,NVIDIA,6000,0:;", "nvidia.com/numa-bind": "no!"}, 1, id="odd"),
        pytest.param(hami_node(), {"hami.io/gpu": 1}, {RECORD: "GPU-0,NVIDIA,6000,0:;"}, 1, id="renamed-resources"),
        pytest.param(hami_node(), INVALID, {}, 1, id="no-record-and-an-invalid-request-count-by-number"),
        pytest.param(hami_node(), SHARE, {}, 1, id="no-record-counts-by-number-until-it-is-granted"),
        pytest.param(hami_node(), SHARE, {RECORD: "GPU-9,NVIDIA,1,0:;"}, 1, id="a-record-of-a-card-that-is-gone"),
        pytest.param(hami_node(), {"cpu": 1}, {}, 2, id="no-gpu"),
        pytest.param(nvidia_node(), {"nvidia.com/gpu": 1}, {}, 1, id="nvidias-own-plugin"),
        pytest.param(nvidia_node(), {"nvidia.com/gpu": 2}, {}, 0, id="nvidias-own-plugin-full"),
    ],
)
def test_running_pods_of_other_systems_are_counted(
    where: NodeObject, limits: Json, annotations: dict[str, str], free: int
) -> None:
    assert whole_gpus_free(cluster_state(where, running(limits, annotations=annotations))) == free


def test_a_record_is_read_again_when_the_node_comes_later() -> None:
    state = ClusterState(Ledger(), DialectSettings())
    state.pod_changed(running({"hami.io/gpu": 1}, annotations={RECORD: "GPU-0,NVIDIA,6000,0:;"}))
    state.node_changed(hami_node())
    assert whole_gpus_free(state) == 1


def test_a_pod_counted_by_number_is_still_ungranted() -> None:
    assert set(cluster_state(hami_node(), running(SHARE)).ungranted) == {"uid-a"}


def test_a_running_pod_whose_record_names_a_card_that_is_gone_keeps_that_record() -> None:
    state = cluster_state(hami_node(), running(SHARE, annotations={RECORD: "GPU-9,NVIDIA,6000,0:;"}))
    assert not state.ungranted, "a grant would name another card than the one it runs on"


def test_a_pod_with_an_invalid_request_is_not_granted() -> None:
    assert not cluster_state(hami_node(), running(INVALID)).ungranted


def test_a_gpu_in_mig_mode_takes_no_new_pod_and_its_pods_count() -> None:
    state = cluster_state(hami_node(mode="mig"), running(SHARE, annotations={RECORD: "GPU-0[2-1],NVIDIA,5120,14:;"}))
    assert state.ledger.fleet.view("n1").free_by_card[0].memory == 8192 - 5120
    assert not isinstance(state.ledger.fleet.place(wants(ask(1)), "n1"), Placement)


def test_gpus_counted_by_number_are_free_when_the_pod_has_ended() -> None:
    state = cluster_state(hami_node(), running(INVALID))
    ended = pod(INVALID, name="a", uid="uid-a", on="n1") | {"status": {"phase": "Succeeded"}}
    state.pod_changed(msgspec.convert(ended, type=Pod))
    state.ledger.check()
    assert whole_gpus_free(state) == 2


def test_a_gpushare_pod_that_counts_in_mib_under_the_default_unit_holds_its_card() -> None:
    where = _node({}, {"aliyun.com/gpu-mem": "16276", "aliyun.com/gpu-count": "2"})
    bound = running({"aliyun.com/gpu-mem": 8138}, annotations={"ALIYUN_COM_GPU_MEM_IDX": "1"})
    assert [free.memory for free in cluster_state(where, bound).ledger.fleet.view("n1").free_by_card] == [8138, 0]
