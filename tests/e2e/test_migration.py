"""Starting on a cluster with pods of other systems, and adopting pods that other schedulers bind."""

import json
from typing import Any

import pytest

from tests.e2e.api import Kube, Manifest
from tests.e2e.audit import grant, tiles
from tests.e2e.control_plane import ControlPlane
from tests.e2e.gputile import Replica, rights
from tests.e2e.kubelets import FakeKubelets
from tests.e2e.nodes import gpu_node, join, plain_node
from tests.e2e.pods import events_of, node_of, pod, tile
from tests.e2e.processes import wait_until
from tests.e2e.watching import watch

HAMI = {"count": 10, "devmem": 16000, "devcore": 100, "type": "NVIDIA-Tesla T4", "health": True}
HAMI_CARDS = [{"id": "GPU-h0", **HAMI}, {"id": "GPU-h1", "index": 1, **HAMI}]
VGPU = {"type": "Tesla T4", "core": 100, "memory": 16000, "number": 10, "healthy": True}
VGPU_CARDS = [{"id": 0, "uuid": "GPU-v0", **VGPU}, {"id": 1, "uuid": "GPU-v1", **VGPU}]
VGPU_CONFIG = {"deviceSplit": 10, "coresScaling": 1, "memoryFactor": 1, "memoryScaling": 1}

# A node with two cards as the family's own agent writes it, a pod on card 0 as its own scheduler and agent write it,
# and one more pod that fits on card 0 only if that record is ignored: it has to be allocated card 1.
FAMILIES: dict[str, tuple[Manifest, Manifest, Manifest]] = {
    "gpushare": (
        plain_node("foreign", {"aliyun.com/gpu-mem": 30, "aliyun.com/gpu-count": 2}),
        pod(
            "old",
            {"aliyun.com/gpu-mem": 10},
            annotations={
                "ALIYUN_COM_GPU_MEM_IDX": "0",
                "ALIYUN_COM_GPU_MEM_POD": "10",
                "ALIYUN_COM_GPU_MEM_DEV": "15",
                "ALIYUN_COM_GPU_MEM_ASSIGNED": "true",
                "ALIYUN_COM_GPU_MEM_ASSUME_TIME": "1763200000000000000",
            },
        ),
        pod("new", {"aliyun.com/gpu-mem": 6}),
    ),
    "nano": (
        plain_node("foreign", {"elasticgpu.io/gpu-core": 200, "elasticgpu.io/gpu-memory": 32000}),
        pod(
            "old",
            {"elasticgpu.io/gpu-core": 60, "elasticgpu.io/gpu-memory": 1000},
            annotations={"elasticgpu.io/assumed": "true", "elasticgpu.io/container-main": "0"},
            labels={"elasticgpu.io/assumed": "true"},
        ),
        pod("new", {"elasticgpu.io/gpu-core": 50, "elasticgpu.io/gpu-memory": 1000}),
    ),
    "vcuda": (
        plain_node("foreign", {"tencent.com/vcuda-core": 200, "tencent.com/vcuda-memory": 124}),
        pod(
            "old",
            {"tencent.com/vcuda-core": 60, "tencent.com/vcuda-memory": 10},
            annotations={
                "tencent.com/predicate-gpu-idx-0": "0",
                "tencent.com/predicate-node": "foreign",
                "tencent.com/predicate-time": "1763200000000000000",
                "tencent.com/gpu-assigned": "true",
            },
        ),
        pod("new", {"tencent.com/vcuda-core": 50, "tencent.com/vcuda-memory": 10}),
    ),
    "vgpu": (
        plain_node(
            "foreign",
            {"nvidia.com/vgpu-number": 20},
            annotations={
                "nvidia.com/node-device-register": json.dumps(VGPU_CARDS),
                "nvidia.com/node-config-info": json.dumps(VGPU_CONFIG),
            },
        ),
        pod(
            "old",
            {"nvidia.com/vgpu-number": 1, "nvidia.com/vgpu-memory": 9000, "nvidia.com/vgpu-cores": 60},
            annotations={
                "nvidia.com/predicate-node": "foreign",
                "nvidia.com/pre-allocated": "main[0_GPU-v0_60_9000]",
                "nvidia.com/real-allocated": "main[0_GPU-v0_60_9000]",
            },
            labels={"nvidia.com/assigned-phase": "succeed"},
        ),
        pod("new", {"nvidia.com/vgpu-number": 1, "nvidia.com/vgpu-memory": 9000}),
    ),
    "hami": (
        plain_node(
            "foreign",
            {"nvidia.com/gpu": 20},
            annotations={"hami.io/node-nvidia-register": json.dumps(HAMI_CARDS)},
        ),
        pod(
            "old",
            {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 9000, "nvidia.com/gpucores": 60},
            annotations={
                "hami.io/vgpu-node": "foreign",
                "hami.io/vgpu-devices-allocated": "GPU-h0,NVIDIA,9000,60:;",
                "hami.io/bind-phase": "success",
            },
        ),
        pod("new", {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 9000}),
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_pods_of_another_system_are_in_the_ledger_after_the_start(plane: ControlPlane, kube: Kube, family: str) -> None:
    node, old, new = FAMILIES[family]
    space = plane.namespace(f"was-{family}")
    join(kube, [node])
    create_before_gputile(plane, kube, space, old)
    rights(plane)
    with (
        FakeKubelets(kube) as kubelets,
        Replica(plane) as gputile,
        plane.start_scheduler(config=gputile.config()),
    ):
        kubelets.pods.wait_for(lambda them: them[space, "old"]["status"]["phase"] == "Running", 10, "the old pod runs")
        kube.create(new, space)
        kubelets.pods.wait_for(lambda them: node_of(them[space, "new"]), 15, "the new pod is bound")
        assert [tile["index"] for tile in tiles(kube.get("Pod", "new", space))] == [1]
        assert gputile.count("gputile_adopted_pods_total") == 0, "the other system's record was read"
        wait_until(
            lambda: gputile.count("gputile_ledger_pods", state="confirmed") == 2, 5, "both pods are in the ledger"
        )


def create_before_gputile(plane: ControlPlane, kube: Kube, space: str, old: Manifest) -> None:
    """Create a pod that is bound and annotated, as before the admission policies were installed."""
    if kube.find("admissionregistration.k8s.io/v1/ValidatingAdmissionPolicyBinding", "gputile-records"):
        kube.delete("admissionregistration.k8s.io/v1/ValidatingAdmissionPolicyBinding", "gputile-records")
    manifest = {**old, "spec": {**old["spec"], "nodeName": "foreign"}}
    wait_until(lambda: created(kube, manifest, space), 10, "the pod of the other system is created")


def created(kube: Kube, manifest: Manifest, space: str) -> bool:
    """False while policies that were just removed are still in force."""
    from tests.e2e.api import ApiError

    try:
        kube.create(manifest, space)
    except ApiError as error:
        if error.status == 403:
            return False
        raise
    return True


# --- bound by another scheduler


@pytest.fixture
def gputile(plane: ControlPlane) -> Any:
    rights(plane)
    with Replica(plane) as replica, plane.start_scheduler(config=replica.config()):
        yield replica


def test_a_pod_bound_by_another_scheduler_is_adopted_and_granted(
    plane: ControlPlane, kube: Kube, gputile: Replica
) -> None:
    space = plane.namespace("adopted")
    join(kube, [gpu_node("n1", cards=1, memory=16000, model="Tesla T4")])
    with watch(kube, "Pod", space) as pods:
        kube.create(tile("adopted", 9000, nodeName="n1"), space)
        took = pods.wait_for(lambda them: tiles(them[space, "adopted"]), 10, "the pod has a grant")
        assert took < 2.0
        kube.create(tile("late", 9000), space)
        wait_until(lambda: events_of(kube, space, "late", "FailedScheduling"), 20, "the next pod is rejected")
        assert node_of(pods.get(space, "late")) is None


def test_a_copied_grant_is_ignored_and_reported(plane: ControlPlane, kube: Kube, gputile: Replica) -> None:
    """A user copies a running pod with all its annotations and its node, on a cluster without the policies."""
    space = plane.namespace("copied")
    join(kube, [gpu_node("n1", cards=2, memory=16000, model="Tesla T4")])
    with watch(kube, "Pod", space) as pods:
        kube.create(tile("first", 9000), space)
        pods.wait_for(lambda them: tiles(them[space, "first"]), 20, "the first pod is bound")
        first = pods.get(space, "first")
        assert first is not None
        copy = tile("copy", 9000, nodeName="n1", annotations=first["metadata"]["annotations"])
        create_without_policies(kube, space, copy)
        pods.wait_for(
            lambda them: grant(them[space, "copy"])["pod"] == them[space, "copy"]["metadata"]["uid"],  # type: ignore[index]
            10,
            "the copy has its own grant",
        )
        copied = pods.get(space, "copy")
        assert copied is not None
        assert tiles(copied)[0]["uuid"] != tiles(first)[0]["uuid"]
        events = wait_until(lambda: events_of(kube, space, "copy", "GrantInvalid"), 10, "an event on the copy")
        assert "belongs to pod" in events[0]["message"]


def create_without_policies(kube: Kube, space: str, manifest: Manifest) -> None:
    kube.delete("admissionregistration.k8s.io/v1/ValidatingAdmissionPolicyBinding", "gputile-records")
    wait_until(lambda: created(kube, manifest, space), 10, "the copy is created")


# --- beside an agent that guesses


def test_on_a_node_of_hamis_agent_pods_are_bound_one_at_a_time(
    plane: ControlPlane, kube: Kube, gputile: Replica
) -> None:
    """HAMi's agent assigns devices to the first pod in phase `allocating`: there must never be two."""
    node, *_ = FAMILIES["hami"]
    space = plane.namespace("one-at-a-time")
    join(kube, [node])
    manifests = [pod(f"p{n}", {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 1000}) for n in range(4)]
    with FakeKubelets(kube, start_after=1.0) as kubelets, watch(kube, "Pod", space) as pods:
        kube.create_many(manifests, space)
        kubelets.pods.wait_for(lambda them: sum(map(runs, them.values())) == 4, 40, "all four run")
        events = pods.events
    starting: set[str] = set()
    for event in events:
        name = event.object["metadata"]["name"]
        (starting.add if node_of(event.object) and not runs(event.object) else starting.discard)(name)
        assert len(starting) <= 1, f"{starting} were starting at once"


def runs(pod_object: Manifest) -> bool:
    return bool(pod_object["status"].get("phase") == "Running")
