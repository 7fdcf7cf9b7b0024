"""A cluster with pods of other systems, read twice: the ledger and the independent audit agree GPU by GPU."""

import json
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gputile.audit.audit import audit
from gputile.dialects.kube_objects import NodeObject, Pod
from gputile.dialects.settings import DialectSettings
from gputile.kube.api import Json
from gputile.ledger.ledger import Ledger
from gputile.scheduler.state.cluster_state import ClusterState
from gputile.testing.builders import pod

CARDS, SIZE = 3, 8192


# ---- nodes as each family's agent leaves them ------------------------------------------------------------------------


def node(annotations: Json, amounts: Json, labels: Json | None = None) -> Json:
    amounts = {"cpu": "64", "memory": "512Gi", **amounts}
    metadata = {"name": "n1", "annotations": annotations, "labels": labels or {}}
    return {"kind": "Node", "metadata": metadata, "status": {"capacity": amounts, "allocatable": amounts}}


def register(**names: str) -> list[Json]:
    facts = {"count": 10, "devmem": SIZE, "devcore": 100, "health": True}
    return [{**facts, names["uuid"]: f"GPU-{n}", names["index"]: n} for n in range(CARDS)]


VGPU = {"memory": SIZE, "core": 100, "number": 10, "healthy": True}
OURS = [{"uuid": f"GPU-{n}", "index": n, "memory": SIZE} for n in range(CARDS)]
NODES = {
    "hami": node({"hami.io/node-nvidia-register": json.dumps(register(uuid="id", index="index"))}, {}),
    "vgpu": node(
        {"nvidia.com/node-device-register": json.dumps([{**VGPU, "id": n, "uuid": f"GPU-{n}"} for n in range(CARDS)])},
        {},
    ),
    "gpushare": node({}, {"aliyun.com/gpu-mem": str(8 * CARDS), "aliyun.com/gpu-count": str(CARDS)}),
    "gpushare-mib": node({}, {"aliyun.com/gpu-mem": str(SIZE * CARDS), "aliyun.com/gpu-count": str(CARDS)}),
    "nano": node({}, {"elasticgpu.io/gpu-core": str(100 * CARDS), "elasticgpu.io/gpu-memory": str(SIZE * CARDS)}),
    "vcuda": node({}, {"tencent.com/vcuda-core": str(100 * CARDS), "tencent.com/vcuda-memory": str(32 * CARDS)}),
    "nvidia": node({}, {"nvidia.com/gpu": str(CARDS)}, {"nvidia.com/gpu.memory": str(SIZE)}),
    "ours": node(
        {"gputile.io/inventory": json.dumps({"version": 1, "cards": OURS, "since": "2026-06-01T00:00:00Z"})}, {}
    ),
}


def uuids(agent: str) -> list[str]:
    """The UUIDs of its cards, and of a card that it does not have."""
    named = agent in ("hami", "vgpu", "ours")
    return [*(f"GPU-{n}" if named else f"n1#{n}" for n in range(CARDS)), "GPU-gone"]


# ---- pods, with requests that are odd now and then -------------------------------------------------------------------

ODD: st.SearchStrategy[Json] = st.sampled_from(
    [
        {},
        {},
        {"nvidia.com/numa-bind": "notabool"},
        {"hami.io/gpu-scheduler-policy": "foo"},
        {"nvidia.com/gpucores": "30"},
        {"gputile.io/model": "A100"},
    ]
)
INDEX = st.integers(0, CARDS)  # one beyond the last card
MEMORY, CORES = st.integers(1, SIZE + 100), st.integers(0, 105)


@st.composite
def hami_pods(draw: st.DrawFn, agent: str) -> Json:
    limits: Json = {"nvidia.com/gpu": draw(st.integers(1, 2)), "nvidia.com/gpumem": draw(st.integers(1, 6000))}
    if draw(st.booleans()):
        limits = draw(st.sampled_from([{"nvidia.com/gpu": 1, "nvidia.com/gpumem-percentage": 150}, {"hami.io/gpu": 1}]))
    inits = draw(st.integers(0, 2))
    places = draw(st.sampled_from([1, 1 + inits]))
    record = ";" * (places - 1) + f"{uuids(agent)[draw(INDEX)]},NVIDIA,{draw(MEMORY)},{draw(CORES)}:;"
    its_node = draw(st.sampled_from(["n1", "n1", "n2"]))
    annotations = {"hami.io/vgpu-devices-allocated": record, "hami.io/vgpu-node": its_node}
    return pod(limits, init=({"cpu": 1},) * inits, annotations=annotations | draw(ODD))


@st.composite
def vgpu_pods(draw: st.DrawFn, agent: str) -> Json:
    limits = {"nvidia.com/vgpu-number": draw(st.integers(1, 2)), "nvidia.com/vgpu-memory": draw(st.integers(1, 6000))}
    card = draw(INDEX)
    record = f"c0[{card}_{uuids(agent)[card]}_{draw(CORES)}_{draw(MEMORY)}]"
    key = draw(st.sampled_from(["nvidia.com/pre-allocated", "nvidia.com/real-allocated"]))
    return pod(limits, annotations={key: record, "nvidia.com/predicate-node": "n1"} | draw(ODD))


@st.composite
def gpushare_pods(draw: st.DrawFn, agent: str) -> Json:
    units = draw(st.integers(1, 8)) * (1024 if agent == "gpushare-mib" else 1)
    record = {"ALIYUN_COM_GPU_MEM_IDX": str(draw(INDEX)), "ALIYUN_COM_GPU_MEM_POD": str(units)}
    if draw(st.booleans()):
        record = {"scheduler.framework.gpushare.allocation": json.dumps({"0": {str(draw(INDEX)): units}})}
    return pod({"aliyun.com/gpu-mem": units}, annotations=record | draw(ODD))


@st.composite
def nano_pods(draw: st.DrawFn, agent: str) -> Json:
    limits: Json = draw(
        st.sampled_from(
            [
                {"elasticgpu.io/gpu-core": 30, "elasticgpu.io/gpu-memory": 1000},
                {"elasticgpu.io/gpu-memory": 256},
                {"elasticgpu.io/gpu-core": 100},
                {"elasticgpu.io/gpu-core": "many"},
            ]
        )
    )
    record = {"elasticgpu.io/assumed": "true", "elasticgpu.io/container-c0": str(draw(INDEX))}
    return pod(limits, annotations=record | draw(ODD))


@st.composite
def vcuda_pods(draw: st.DrawFn, agent: str) -> Json:
    limits: Json = draw(
        st.sampled_from(
            [
                {"tencent.com/vcuda-core": 30, "tencent.com/vcuda-memory": 4},
                {"tencent.com/vcuda-core": 100},
                {"tencent.com/vcuda-core": "many"},
            ]
        )
    )
    record = {"tencent.com/predicate-gpu-idx-0": str(draw(INDEX)), "tencent.com/predicate-node": "n1"}
    return pod(limits, annotations=record | draw(ODD))


def plain_pods(agent: str) -> st.SearchStrategy[Json]:
    return st.builds(lambda count: pod({"nvidia.com/gpu": count}), st.integers(1, 2))


KINDS = (hami_pods, vgpu_pods, gpushare_pods, nano_pods, vcuda_pods, plain_pods)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[str, list[Json]]:
    agent = draw(st.sampled_from(sorted(NODES)))
    pods = []
    for number in range(draw(st.integers(1, 4))):
        # NVIDIA's own plugin has no shares: whatever else a pod requests, it gets whole GPUs.
        manifest = draw(plain_pods(agent) if agent == "nvidia" else draw(st.sampled_from(KINDS))(agent))
        manifest["metadata"] |= {"name": f"p{number}", "uid": f"uid-{number}"}
        manifest["spec"]["nodeName"] = "n1"
        started = draw(st.sampled_from(["2026-01-01T00:00:00Z", "2026-07-01T00:00:00Z"]))
        pods.append(manifest | {"status": {"phase": "Running", "startTime": started}})
    return agent, pods


# ---- the two readings ------------------------------------------------------------------------------------------------

Sums = dict[str, tuple[int, int, int]]


def by_the_ledger(where: Json, pods: list[Json]) -> tuple[Sums, set[str]]:
    """By GPU: memory, cores and slots; and the pods that are counted by number."""
    cluster_state = ClusterState(Ledger(), DialectSettings())
    cluster_state.nodes_listed([msgspec.convert(where, NodeObject)])
    cluster_state.pods_listed([msgspec.convert(item, Pod) for item in pods])
    cluster_state.ledger.check()
    sums: Sums = {}
    entries = cluster_state.ledger.on_node("n1")
    for entry in entries:
        for uuid, use in entry.allocation.uses().items():
            before = sums.get(uuid, (0, 0, 0))
            sums[uuid] = (before[0] + use.memory, before[1] + use.cores, before[2] + use.slots)
    return sums, {entry.allocation.pod for entry in entries if entry.allocation.unplaced}


def by_the_audit(where: Json, pods: list[Json]) -> tuple[Sums, set[str]]:
    report = audit([where], pods)
    sums = {
        gpu.uuid: (gpu.memory_allocated, gpu.cores_allocated, gpu.slots_allocated) for gpu in report.gpus if gpu.holders
    }
    return sums, {pod.uid for pod in report.unplaced}


@given(clusters())
def test_ledger_and_audit_agree_gpu_by_gpu(cluster: tuple[str, list[Any]]) -> None:
    agent, pods = cluster
    assert by_the_ledger(NODES[agent], pods) == by_the_audit(NODES[agent], pods)
