"""gputile takes over a cluster with pods of other systems, unusual requests included.

The audit, which shares no code with the scheduler, and the scheduler's ledger must agree GPU by GPU, and no new pod may
be allocated a GPU that is held.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.e2e.api import ApiError, Kube, Manifest
from tests.e2e.audit import tiles
from tests.e2e.control_plane import ControlPlane
from tests.e2e.gputile import Replica, rights
from tests.e2e.kubelets import FakeKubelets
from tests.e2e.nodes import join, plain_node
from tests.e2e.pods import container, events_of, node_of, pod
from tests.e2e.processes import wait_until

PROGRAM = Path(sys.executable).with_name("gputile")
POLICIES = "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicyBinding"
Held = dict[int, tuple[int, int]]  # by index: MiB and percent of the cores


class Taken(msgspec.Struct, kw_only=True):
    """A node as its own system wrote it."""

    resources: dict[str, int]
    annotations: dict[str, str] = {}
    labels: dict[str, str] = {}
    pods: list[Manifest]
    held: Held  # the allocated amounts of its GPUs, computed by hand
    unplaced: int = 0  # further allocated GPUs, of unknown index
    gpus: int = 2
    whole: dict[str, int]  # a new pod that needs a GPU for itself


# ---- HAMi -----------------------------------------------------------------------------------------------------------

GPU, MEM, CORES, PERCENT = (f"nvidia.com/{name}" for name in ("gpu", "gpumem", "gpucores", "gpumem-percentage"))
HAMI_GPU = {"count": 10, "devmem": 16000, "devcore": 100, "type": "NVIDIA-Tesla T4", "health": True}


def hami_json(*uuids: str, **facts: Any) -> dict[str, str]:
    listed = [{"id": uuid, "index": at, **HAMI_GPU, **facts} for at, uuid in enumerate(uuids)]
    return {"hami.io/node-nvidia-register": json.dumps(listed)}


def hami_text(*uuids: str) -> dict[str, str]:
    return {"hami.io/node-nvidia-register": "".join(f"{uuid},10,16000,100,NVIDIA-Tesla T4,0,true:" for uuid in uuids)}


def hami_pod(
    name: str, record: str, limits: dict[str, Any], on: str, *, init: int = 0, apps: int = 1, odd: str = ""
) -> Manifest:
    """`init` containers without GPUs before `apps` containers with these limits."""
    record_keys = {"hami.io/vgpu-devices-allocated": record, "hami.io/vgpu-node": on, "hami.io/bind-phase": "success"}
    manifest = pod(name, limits, annotations={**record_keys, **ODD.get(odd, {})})
    manifest["spec"]["containers"] = [container(f"c{n}", limits) for n in range(apps)]
    manifest["spec"]["initContainers"] = [container(f"i{n}") for n in range(init)]
    return manifest


ODD = {
    "numa": {"nvidia.com/numa-bind": "notabool"},
    "policy": {"hami.io/gpu-scheduler-policy": "foo", "hami.io/node-scheduler-policy": "bar"},
    "cores": {"nvidia.com/gpucores": "30"},
}
TILE = {GPU: 1, MEM: 3000, CORES: 10}

HAMI = {
    "hami-json": Taken(
        resources={GPU: 20},
        annotations=hami_json("GPU-j0", "GPU-j1"),
        pods=[
            hami_pod("numa", "GPU-j0,NVIDIA,3000,10:;", TILE, "hami-json", odd="numa"),
            hami_pod("policy", "GPU-j0,NVIDIA,3000,10:;", TILE, "hami-json", odd="policy"),
            hami_pod("cores", "GPU-j0,NVIDIA,3000,10:;", {GPU: 1, MEM: 3000}, "hami-json", odd="cores"),
            hami_pod("places", ";GPU-j0,NVIDIA,3000,10:;GPU-j0,NVIDIA,3000,10:;", TILE, "hami-json", init=1, apps=2),
        ],
        held={0: (15000, 50)},
        whole={GPU: 1, PERCENT: 100},
    ),
    "hami-text": Taken(
        resources={GPU: 20, "hami.io/gpu": 20, "hami.io/gpumem": 32000},
        annotations=hami_text("GPU-t0", "GPU-t1"),
        pods=[
            hami_pod("early", "GPU-t0,NVIDIA,3000,10:;GPU-t0,NVIDIA,3000,10:;", TILE, "hami-text", init=1, apps=2),
            hami_pod("renamed", "GPU-t0,NVIDIA,6000,10:;", {"hami.io/gpu": 1, "hami.io/gpumem": 6000}, "hami-text"),
            hami_pod("clamped", "GPU-t0,NVIDIA,4000,0:;", {GPU: 1, PERCENT: 150}, "hami-text"),
        ],
        held={0: (16000, 30)},
        whole={GPU: 1, PERCENT: 100},
    ),
    "hami-mig": Taken(
        resources={GPU: 20},
        annotations=hami_json("GPU-m0", mode="mig"),
        pods=[hami_pod("mig", "GPU-m0[2-1],NVIDIA,5120,14:;", {GPU: 1, MEM: 5000}, "hami-mig")],
        held={0: (5120, 14)},
        gpus=0,  # a GPU in MIG mode gets no new pod
        whole={GPU: 1, PERCENT: 100},
    ),
}

# ---- the others -----------------------------------------------------------------------------------------------------

VGPU_GPU = {"type": "Tesla T4", "core": 100, "memory": 16000, "number": 10, "healthy": True}
VGPU_CONFIG = {"deviceSplit": 10, "coresScaling": 1, "memoryFactor": 1, "memoryScaling": 1}


def gpushare_pod(name: str, units: int, **annotations: str) -> Manifest:
    return pod(name, {"aliyun.com/gpu-mem": units}, annotations=annotations)


def indexed(index: int, units: int) -> dict[str, str]:
    prefix = "ALIYUN_COM_GPU_MEM_"
    return {f"{prefix}IDX": str(index), f"{prefix}POD": str(units), f"{prefix}ASSIGNED": "true"}


def newer(by_container: dict[str, dict[str, int]]) -> dict[str, str]:
    return {"scheduler.framework.gpushare.allocation": json.dumps(by_container)}


OTHERS = {
    "vgpu": Taken(
        resources={"nvidia.com/vgpu-number": 20},
        annotations={
            "nvidia.com/node-device-register": json.dumps(
                [{"id": at, "uuid": f"GPU-v{at}", **VGPU_GPU} for at in range(2)]
            ),
            "nvidia.com/node-config-info": json.dumps(VGPU_CONFIG),
        },
        pods=[
            pod(
                "topology",
                {"nvidia.com/vgpu-number": 1, "nvidia.com/vgpu-memory": 9000, "nvidia.com/vgpu-cores": 60},
                annotations={
                    "nvidia.com/predicate-node": "vgpu",
                    "nvidia.com/pre-allocated": "main[0_GPU-v0_60_9000]",
                    "nvidia.com/real-allocated": "main[1_GPU-v1_60_9000]",
                    "nvidia.com/device-topology-mode": "moon",
                },
                labels={"nvidia.com/assigned-phase": "succeed"},
            )
        ],
        held={1: (9000, 60)},
        whole={"nvidia.com/vgpu-number": 1},
    ),
    "share-gib": Taken(
        resources={"aliyun.com/gpu-mem": 45, "aliyun.com/gpu-count": 3},
        pods=[gpushare_pod("index", 10, **indexed(0, 10)), gpushare_pod("newer", 5, **newer({"0": {"1": 5}}))],
        held={0: (10240, 0), 1: (5120, 0)},
        gpus=3,
        whole={"aliyun.com/gpu-mem": 15},
    ),
    "share-mib": Taken(
        resources={"aliyun.com/gpu-mem": 65104, "aliyun.com/gpu-count": 8},
        pods=[
            gpushare_pod("index", 8138, **indexed(0, 8138)),
            gpushare_pod("newer", 4069, **newer({"0": {"3": 4069}})),
        ],
        held={0: (8138, 0), 3: (4069, 0)},
        gpus=8,
        whole={},  # a request in MiB needs a setting, which this test does not change
    ),
    "elastic": Taken(
        resources={"elasticgpu.io/gpu-core": 200, "elasticgpu.io/gpu-memory": 32000},
        pods=[
            pod(
                "memory-only",
                {"elasticgpu.io/gpu-memory": 256},
                annotations={"elasticgpu.io/assumed": "true", "elasticgpu.io/container-main": "1"},
                labels={"elasticgpu.io/assumed": "true"},
            )
        ],
        held={1: (256, 0)},
        whole={"elasticgpu.io/gpu-core": 100},
    ),
    "vcuda": Taken(
        resources={"tencent.com/vcuda-core": 300, "tencent.com/vcuda-memory": 186},
        pods=[
            pod(
                f"cores-{index}",
                {"tencent.com/vcuda-core": cores, "tencent.com/vcuda-memory": 10},
                annotations={
                    "tencent.com/predicate-gpu-idx-0": str(index),
                    "tencent.com/predicate-node": "vcuda",
                    "tencent.com/gpu-assigned": "true",
                    "tencent.com/vcuda-core-limit": "no number",
                },
            )
            for index, cores in ((0, 60), (2, 100))
        ],
        held={0: (2560, 60), 2: (15872, 100)},
        gpus=3,
        whole={"tencent.com/vcuda-core": 100},
    ),
}

# Nodes on which some GPUs are known by their number only.
BY_NUMBER = {
    "stock": Taken(
        resources={GPU: 2},
        labels={"nvidia.com/gpu.product": "Tesla-T4", "nvidia.com/gpu.count": "2", "nvidia.com/gpu.memory": "15360"},
        pods=[pod("plain", {GPU: 2})],
        held={},
        unplaced=2,
        whole={GPU: 1},
    ),
    "copied": Taken(
        resources={GPU: 20},
        annotations=hami_json("GPU-c0"),
        pods=[hami_pod("copy", "GPU-j1,NVIDIA,3000,10:;", {GPU: 1, PERCENT: 150}, "hami-json")],
        held={},
        unplaced=1,
        gpus=1,
        whole={GPU: 1, PERCENT: 100},
    ),
}
NODES = {**HAMI, **OTHERS, **BY_NUMBER}


# ---- the cluster ----------------------------------------------------------------------------------------------------


@pytest.fixture
def space(plane: ControlPlane, kube: Kube) -> Iterator[str]:
    """The namespace of a cluster with running pods of other systems, before gputile is installed."""
    space = plane.namespace("takeover")
    for name in ("gputile-records", "gputile-leader"):
        if kube.find(POLICIES, name):
            kube.delete(POLICIES, name)
    join(kube, [plain_node(n, t.resources, annotations=t.annotations, labels=t.labels) for n, t in NODES.items()])
    with FakeKubelets(kube) as kubelets:
        olds = [placed(old, name) for name, taken in NODES.items() for old in taken.pods]
        for old in olds:
            wait_until(partial(created, kube, old, space), 10, "a pod of another system is created")
        kubelets.pods.wait_for(lambda them: sum(map(runs, them.values())) == len(olds), 30, "all pods run")
        yield space


def placed(old: Manifest, node: str) -> Manifest:
    """The pod bound to its node, with a unique name."""
    metadata = {**old["metadata"], "name": f"{node}-{old['metadata']['name']}"}
    return {**old, "metadata": metadata, "spec": {**old["spec"], "nodeName": node}}


def created(kube: Kube, manifest: Manifest, space: str) -> bool:
    """False while policies that were just removed are still in force."""
    try:
        kube.create(manifest, space)
    except ApiError as error:
        if error.status == 403:
            return False
        raise
    return True


def runs(pod_object: Manifest) -> bool:
    return bool(pod_object["status"].get("phase") == "Running")


def audit(plane: ControlPlane) -> dict[str, Any]:
    """`gputile audit -o json`, as an operator calls it."""
    argv = (PROGRAM, "audit", "-o", "json", "--kubeconfig", plane.admin_kubeconfig)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 1), done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def audited(report: dict[str, Any], node: str) -> Held:
    mine = [gpu for gpu in report["gpus"] if gpu["node"] == node and gpu["holders"]]
    return {gpu["index"]: (gpu["memory_allocated"], gpu["cores_allocated"]) for gpu in mine}


def in_ledger(gputile: Replica, node: str) -> Held:
    """The allocated amounts of the ledger, from elastic-gpu's status page, which has memory and cores."""
    page = json.loads(gputile.request("GET", "/scheduler/status")[1])["elasticgpu.io/gpu-core"]
    gpus = json.loads(page)[node]
    taken = {
        at: (gpu["MemoryTotal"] - gpu["MemoryAvailable"], gpu["CoreTotal"] - gpu["CoreAvailable"])
        for at, gpu in enumerate(gpus)
    }
    return {at: amounts for at, amounts in taken.items() if any(amounts)}


# ---- the tests ------------------------------------------------------------------------------------------------------


def test_the_audit_counts_the_amounts_that_were_computed_by_hand(plane: ControlPlane, space: str) -> None:
    report = audit(plane)
    assert {name: audited(report, name) for name in NODES} == {name: taken.held for name, taken in NODES.items()}
    unplaced = {it["node"]: it["gpus"] for it in report["unplaced"]}
    assert unplaced == {name: taken.unplaced for name, taken in NODES.items() if taken.unplaced}
    assert {finding["code"] for finding in report["findings"]} <= {"no-grant"}
    assert not [finding for finding in report["findings"] if "delete" in finding["todo"]]


def test_the_ledger_agrees_with_the_audit_gpu_by_gpu(plane: ControlPlane, space: str) -> None:
    rights(plane)
    with Replica(plane) as gputile:
        seen = {name: in_ledger(gputile, name) for name in NODES if name not in BY_NUMBER}
    report = audit(plane)
    assert seen == {name: audited(report, name) for name in seen}


@pytest.mark.parametrize("node", [name for name, taken in NODES.items() if taken.whole])
def test_a_new_pod_is_never_allocated_a_gpu_that_is_held(
    plane: ControlPlane, kube: Kube, space: str, node: str
) -> None:
    """One pod more than there are free GPUs, each requesting a whole GPU: all but one are bound."""
    taken = NODES[node]
    free = max(0, taken.gpus - len(taken.held) - taken.unplaced)
    manifests = [pod(f"new-{n}", taken.whole, nodeSelector={"kubernetes.io/hostname": node}) for n in range(free + 1)]
    rights(plane)
    with Replica(plane) as gputile, plane.start_scheduler(config=gputile.config()):
        kube.create_many(manifests, space)
        wait_until(lambda: len(bound(kube, space)) == free and rejected(kube, space), 60, "all that fit are bound")
        chosen = [tile["index"] for new in bound(kube, space) for tile in tiles(new)]
        report = audit(plane)
    assert not set(chosen) & set(taken.held)
    assert len(set(chosen)) == free
    assert not [
        finding for finding in report["findings"] if finding["code"] in ("double-allocated", "node-overcommitted")
    ]


def bound(kube: Kube, space: str) -> list[Manifest]:
    return [it for it in kube.list("Pod", space) if it["metadata"]["name"].startswith("new-") and node_of(it)]


def rejected(kube: Kube, space: str) -> bool:
    """Whether every pending pod has an event with the reason."""
    pending = [it["metadata"]["name"] for it in kube.list("Pod", space) if not node_of(it)]
    return all(events_of(kube, space, name, "FailedScheduling") for name in pending)
