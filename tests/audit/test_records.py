"""What a running pod of each family holds after a migration: one table per family, from the families' own formats."""

import json
from typing import Any

import pytest

from tests.audit.nodes import (
    SIZE,
    Json,
    codes,
    elastic,
    gpushare,
    hami,
    held,
    look,
    node,
    ours,
    pod,
    remarks,
    unplaced,
    vcuda,
    vgpu,
)

ALLOCATED, NODE = "hami.io/vgpu-devices-allocated", "hami.io/vgpu-node"
PERCENT = "nvidia.com/gpumem-percentage"
TILE = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 6000, "nvidia.com/gpucores": 10}
BARE = {"nvidia.com/gpu": 1}


def hami_record(record: str, on: str = "n", **more: Any) -> Json:
    return {ALLOCATED: record, NODE: on, **more}


ONE = "g0,NVIDIA,6000,10:;"


@pytest.mark.parametrize(
    ("manifest", "expected"),
    [
        pytest.param(pod(TILE, notes=hami_record(ONE)), {"g0": (6000, 10)}, id="the record names its GPU and amounts"),
        pytest.param(
            pod(TILE, notes=hami_record(ONE, **{"nvidia.com/numa-bind": "notabool"})),
            {"g0": (6000, 10)},
            id="an invalid boolean annotation changes nothing",
        ),
        pytest.param(
            pod(
                TILE,
                notes=hami_record(ONE, **{"hami.io/gpu-scheduler-policy": "foo", "hami.io/node-scheduler-policy": "x"}),
            ),
            {"g0": (6000, 10)},
            id="unknown policies change nothing",
        ),
        pytest.param(
            pod(TILE, notes=hami_record(ONE, **{"nvidia.com/gpucores": "30"})),
            {"g0": (6000, 10)},
            id="a resource written as an annotation changes nothing",
        ),
        pytest.param(
            pod({**BARE, PERCENT: 150}, notes=hami_record(f"g0,NVIDIA,{SIZE},0:;")),
            {"g0": (SIZE, 0)},
            id="150 percent of an older HAMi count as recorded",
        ),
        pytest.param(
            pod({"hami.io/gpu": 1, "hami.io/gpumem": 6000}, notes=hami_record(ONE)),
            {"g0": (6000, 10)},
            id="renamed resources count as recorded",
        ),
        pytest.param(
            pod({"cpu": 1}, notes=hami_record(ONE)),
            {"g0": (6000, 10)},
            id="a pod without GPU resources counts as recorded",
        ),
        pytest.param(
            pod({**BARE, PERCENT: 50}, notes=hami_record("g1,NVIDIA,8000,0:;")),
            {"g1": (8000, 0)},
            id="a percentage is that of its GPU",
        ),
        pytest.param(
            pod({"nvidia.com/gpu": 1, "nvidia.com/gpumem": "3k"}, notes=hami_record("g0,NVIDIA,3000,0:;")),
            {"g0": (3000, 0)},
            id="3k is how the API server writes 3000",
        ),
        pytest.param(
            pod({**TILE, "nvidia.com/gpu": 2}, notes=hami_record("g0,NVIDIA,6000,10:g1,NVIDIA,6000,10:;")),
            {"g0": (6000, 10), "g1": (6000, 10)},
            id="two GPUs of one container",
        ),
        pytest.param(
            pod(TILE, TILE, init=({},), notes=hami_record("g0,NVIDIA,6000,10:;g0,NVIDIA,6000,10:;")),
            {"g0": (12000, 20)},
            id="before 2.9 the entries are those of the app containers",
        ),
        pytest.param(
            pod(TILE, {}, init=({}, {}), notes=hami_record("g0,NVIDIA,6000,10:;;")),
            {"g0": (6000, 10)},
            id="before 2.9 a container without GPUs has an empty entry",
        ),
        pytest.param(
            pod(TILE, init=(TILE,), notes=hami_record("g0,NVIDIA,9000,10:;g0,NVIDIA,6000,10:;")),
            {"g0": (9000, 10)},
            id="since 2.9 init containers have entries and do not add up",
        ),
        pytest.param(
            pod(TILE, init=({**TILE, "sidecar": True},), notes=hami_record("g0,NVIDIA,6000,10:;g0,NVIDIA,6000,10:;")),
            {"g0": (12000, 20)},
            id="a sidecar runs beside the app container",
        ),
        pytest.param(
            pod(TILE, init=(TILE,), notes=hami_record(ONE)),
            {"g0": (6000, 10)},
            id="before 2.9 an init container that requests GPUs is on those of the record",
        ),
        pytest.param(
            pod(TILE, notes=hami_record("g0,NVIDIA,3000,10:;g0,NVIDIA,4000,10:;g0,NVIDIA,5000,10:;")),
            {"g0": (12000, 30)},
            id="entries that match no number of containers add up",
        ),
        pytest.param(
            pod(TILE, notes=hami_record("g0,NVIDIA,6000,10")),
            {"g0": (6000, 10)},
            id="separators at the end may be missing",
        ),
        pytest.param(
            pod(BARE, notes=hami_record("g0[2-1],NVIDIA,5120,14:;", **{"nvidia.com/vgpu-mode": "mig"})),
            {"g0": (5120, 14)},
            id="a dynamic MIG device belongs to its GPU, and counts as recorded",
        ),
        pytest.param(
            pod(TILE, notes=hami_record("g0,NVIDIA,2000,5:;")),
            {"g0": (6000, 10)},
            id="a record smaller than the request: the request counts",
        ),
        pytest.param(
            pod(TILE, notes={ALLOCATED: ONE}), {"g0": (6000, 10)}, id="a record without the name of a node is valid"
        ),
    ],
)
def test_hami(manifest: Json, expected: dict[str, Any]) -> None:
    report = look(hami("g0", "g1"), manifest)
    assert (held(report), unplaced(report)) == (expected, [])
    assert report.is_right, report.findings


VGPU_TILE = {"nvidia.com/vgpu-number": 1, "nvidia.com/vgpu-memory": 9000, "nvidia.com/vgpu-cores": 60}


def vgpu_record(planned: str, real: str | None = None, on: str = "n", domain: str = "nvidia.com") -> Json:
    annotations = {f"{domain}/pre-allocated": planned, f"{domain}/predicate-node": on}
    return annotations if real is None else {**annotations, f"{domain}/real-allocated": real}


@pytest.mark.parametrize(
    ("node_manifest", "manifest", "expected"),
    [
        pytest.param(
            vgpu("v0", "v1"),
            pod(VGPU_TILE, notes=vgpu_record("c0[1_v1_60_9000]")),
            {"v1": (9000, 60)},
            id="the plan of its scheduler",
        ),
        pytest.param(
            vgpu("v0", "v1"),
            pod(VGPU_TILE, notes=vgpu_record("c0[1_v1_60_9000]", "c0[0_v0_60_9000]")),
            {"v0": (9000, 60)},
            id="what its agent allocated wins over the plan",
        ),
        pytest.param(
            vgpu("v0", "v1"),
            pod(VGPU_TILE, VGPU_TILE, notes=vgpu_record("c0[0_v0_60_9000];c1[1_v1_60_9000]", "c0[1_v1_60_9000]")),
            {"v1": (18000, 120)},
            id="and that container by container",
        ),
        pytest.param(
            vgpu("v0"),
            pod({**VGPU_TILE, "nvidia.com/vgpu-cores": 150}, notes=vgpu_record("c0[0_v0_60_9000]")),
            {"v0": (9000, 60)},
            id="150 cores, which no system serves, change nothing",
        ),
        pytest.param(
            vgpu("v0"),
            pod(VGPU_TILE, notes=vgpu_record("c0[0_v0_60_9000]") | {"nvidia.com/device-topology-mode": "moon"}),
            {"v0": (9000, 60)},
            id="an unknown topology changes nothing",
        ),
        pytest.param(
            vgpu("GPU_with_lines"),
            pod(VGPU_TILE, notes=vgpu_record("c0[0_GPU_with_lines_60_9000]")),
            {"GPU_with_lines": (9000, 60)},
            id="a UUID may contain underscores",
        ),
        pytest.param(
            vgpu("v0", domain="gpu.example"),
            pod({"gpu.example/vgpu-number": 1}, notes=vgpu_record("c0[0_v0_0_500]", domain="gpu.example")),
            {"v0": (SIZE, 100)},
            id="any domain is read, and a whole GPU is larger than the record",
        ),
        pytest.param(
            vgpu("v0", memoryFactor=10),
            pod({"nvidia.com/vgpu-number": 1, "nvidia.com/vgpu-memory": 900}, notes=vgpu_record("c0[0_v0_0_500]")),
            {"v0": (9000, 0)},
            id="the request counts in the node's memory factor",
        ),
        pytest.param(
            vgpu("v0"),
            pod(VGPU_TILE, notes=vgpu_record("c0[0_v0_60_4000];gone[0_v0_10_1000]")),
            {"v0": (10000, 70)},
            id="a container that the pod does not have counts, too",
        ),
    ],
)
def test_vgpu_manager(node_manifest: Json, manifest: Json, expected: dict[str, Any]) -> None:
    assert held(look(node_manifest, manifest)) == expected


ALLOCATION, INDEX, TOTAL = "scheduler.framework.gpushare.allocation", "ALIYUN_COM_GPU_MEM_IDX", "ALIYUN_COM_GPU_MEM_POD"
MEM, COUNT = "aliyun.com/gpu-mem", "aliyun.com/gpu-count"


def allocation(by_container: Any) -> Json:
    return {ALLOCATION: json.dumps(by_container)}


@pytest.mark.parametrize(
    ("node_manifest", "manifest", "expected"),
    [
        pytest.param(
            gpushare(15),
            pod({MEM: 10}, notes={INDEX: "1", TOTAL: "10"}),
            {1: (10240, 0)},
            id="index and amount, in GiB",
        ),
        pytest.param(
            gpushare(15),
            pod({MEM: 10}, notes={INDEX: "1"}),
            {1: (10240, 0)},
            id="without an amount the request has it",
        ),
        pytest.param(
            gpushare(8138, 8),
            pod({MEM: 8138}, notes={INDEX: "0", TOTAL: "8138"}),
            {0: (8138, 0)},
            id="a node whose capacity shows MiB counts in MiB",
        ),
        pytest.param(
            gpushare(180),
            pod({MEM: 90}, notes={INDEX: "0", TOTAL: "90"}),
            {0: (92160, 0)},
            id="180 per GPU are GiB, of a large GPU",
        ),
        pytest.param(
            gpushare(15),
            pod({MEM: 4}, {MEM: 5}, notes={INDEX: "0", TOTAL: "9"}),
            {0: (9216, 0)},
            id="all containers share one GPU",
        ),
        pytest.param(
            gpushare(15),
            pod({MEM: 6}, notes=allocation({"0": {"1": 6}})),
            {1: (6144, 0)},
            id="the newer record alone is a record",
        ),
        pytest.param(
            gpushare(15, 4),
            pod({MEM: 12}, labels={COUNT: "4"}, notes=allocation({"0": {"0": 3, "1": 3, "2": 3, "3": 3}})),
            dict.fromkeys(range(4), (3072, 0)),
            id="a share of each of four GPUs",
        ),
        pytest.param(
            gpushare(15),
            pod({"cpu": 1}, notes=allocation({"0": {"0": 6}})),
            {0: (6144, 0)},
            id="the newer record of a pod without GPU resources",
        ),
        pytest.param(
            gpushare(8138, 8),
            pod({"cpu": 1}, notes=allocation({"0": {"3": 4069}})),
            {3: (4069, 0)},
            id="the newer record in MiB",
        ),
        pytest.param(
            gpushare(15),
            pod({MEM: 6}, notes=allocation({"7": {"0": 6}})),
            {0: (12288, 0)},
            id="a container that the pod does not have counts beside the request",
        ),
        pytest.param(
            gpushare(15),
            pod({MEM: 6}, notes={ALLOCATION: "{", INDEX: "1", TOTAL: "6"}),
            {1: (6144, 0)},
            id="where the newer record is broken the older one counts",
        ),
        pytest.param(
            gpushare(15),
            pod({MEM: 4}, notes={INDEX: "0", TOTAL: "9"}),
            {0: (9216, 0)},
            id="of amount and request the larger",
        ),
        pytest.param(
            gpushare(15),
            pod({MEM: 4}, init=({MEM: 9},), notes={INDEX: "0", TOTAL: "4"}),
            {0: (9216, 0)},
            id="an init container is on the GPU of the pod",
        ),
        pytest.param(
            hami("g0", "g1"),
            pod({MEM: 8138}, notes={INDEX: "1", TOTAL: "8138"}),
            {"g1": (8138, 0)},
            id="where no capacity shows the unit, a unit in which it fits",
        ),
    ],
)
def test_gpushare(node_manifest: Json, manifest: Json, expected: dict[Any, Any]) -> None:
    report = look(node_manifest, manifest)
    assert (held(report), unplaced(report), report.is_right) == (expected, [], True)


@pytest.mark.parametrize(
    ("unit", "per_gpu", "expected"),
    [
        pytest.param("GiB", 8138, 5, id="the capacity wins over an impossible unit"),
        pytest.param("MiB", 15, 5, id="the MiB of the setting where the capacity may be either"),
        pytest.param("GiB", 15, 5120, id="the GiB of the setting"),
        pytest.param("auto", 15, 5120, id="small capacities are GiB"),
    ],
)
def test_the_unit_of_a_node(unit: str, per_gpu: int, expected: int) -> None:
    report = look(gpushare(per_gpu), pod({MEM: 5}, notes={INDEX: "0", TOTAL: "5"}), unit=unit)
    assert held(report) == {0: (expected, 0)}


CORE, MEMORY = "elasticgpu.io/gpu-core", "elasticgpu.io/gpu-memory"


def assumed(**by_container: str) -> Json:
    return {
        "elasticgpu.io/assumed": "true",
        **{f"elasticgpu.io/container-{c}": indices for c, indices in by_container.items()},
    }


NANO1 = node("n", {"nano-gpu.io/gpu-core": 200, "nano-gpu.io/gpu-memory": 24})
NANO2 = node("n", {"nano-gpu/gpu-percent": 200})


@pytest.mark.parametrize(
    ("node_manifest", "manifest", "expected"),
    [
        pytest.param(
            elastic(), pod({CORE: 60, MEMORY: 1000}, notes=assumed(c0="0")), {0: (1000, 60)}, id="cores and memory"
        ),
        pytest.param(elastic(), pod({MEMORY: 256}, notes=assumed(c0="1")), {1: (256, 0)}, id="memory alone"),
        pytest.param(
            elastic(), pod({CORE: 200}, notes=assumed(c0="0,1")), {0: (SIZE, 100), 1: (SIZE, 100)}, id="whole GPUs"
        ),
        pytest.param(
            elastic(),
            pod({CORE: 150, MEMORY: 5}, notes=assumed(c0="1")),
            {1: (SIZE, 100)},
            id="150 are rounded down to one",
        ),
        pytest.param(
            elastic(),
            pod({CORE: 60}, {"cpu": 1}, notes=assumed(c0="0", c1="1")),
            {0: (0, 60)},
            id="a container without a request holds nothing, whatever the record",
        ),
        pytest.param(
            elastic(),
            pod({CORE: 60}, labels={"elasticgpu.io/assumed": "true"}, notes={"elasticgpu.io/container-c0": "0"}),
            {0: (0, 60)},
            id="the mark as a label",
        ),
        pytest.param(
            NANO1,
            pod(
                {"nano-gpu.io/gpu-core": 50, "nano-gpu.io/gpu-memory": 2},
                notes={"nano-gpu.io/gpu": "true", "nano-gpu.io/gpu-c0": "1"},
            ),
            {1: (2048, 50)},
            id="generation 1 in GiB",
        ),
        pytest.param(
            NANO2,
            pod(
                {"nano-gpu/gpu-percent": 30},
                {},
                notes={"nano-gpu/assume": "true", "nano-gpu/container-c0": "1", "nano-gpu/container-c1": "-1"},
            ),
            {1: (0, 30)},
            id="generation 2 marks containers without a GPU",
        ),
    ],
)
def test_nano(node_manifest: Json, manifest: Json, expected: dict[Any, Any]) -> None:
    report = look(node_manifest, manifest)
    assert (held(report), unplaced(report), report.is_right) == (expected, [], True)


V_CORE, V_MEMORY = "tencent.com/vcuda-core", "tencent.com/vcuda-memory"


def predicate(*indices: str, on: str = "n", prefix: str = "tencent.com") -> Json:
    return {f"{prefix}/predicate-gpu-idx-{n}": value for n, value in enumerate(indices)} | {
        f"{prefix}/predicate-node": on
    }


@pytest.mark.parametrize(
    ("node_manifest", "manifest", "expected"),
    [
        pytest.param(
            vcuda(), pod({V_CORE: 60, V_MEMORY: 10}, notes=predicate("0")), {0: (2560, 60)}, id="blocks of 256 MiB"
        ),
        pytest.param(
            vcuda(), pod({V_CORE: 200}, notes=predicate("0,1")), {0: (15872, 100), 1: (15872, 100)}, id="whole GPUs"
        ),
        pytest.param(
            vcuda(),
            pod({V_CORE: 150, V_MEMORY: 1}, notes=predicate("1")),
            {1: (15872, 100)},
            id="150 are one whole GPU",
        ),
        pytest.param(
            vcuda(),
            pod({V_MEMORY: 4}, notes=predicate("1")),
            {1: (15872, 100)},
            id="memory without cores, which no system serves, is a whole GPU",
        ),
        pytest.param(
            vcuda(),
            pod({V_CORE: 50}, notes=predicate("1")),
            {1: (7936, 50)},
            id="cores without memory take their part of it",
        ),
        pytest.param(
            vcuda(),
            pod({V_CORE: 30, V_MEMORY: 1}, {V_CORE: 40, V_MEMORY: 1}, init=({},), notes=predicate("0", "1")),
            {0: (256, 30), 1: (256, 40)},
            id="containers are numbered without init containers",
        ),
        pytest.param(
            node("n", {"nvidia.com/vcuda-core": 100, "nvidia.com/vcuda-memory": 8000}),
            pod(
                {"nvidia.com/vcuda-core": 30, "nvidia.com/vcuda-memory": 1000},
                notes=predicate("0", prefix="nvidia.com"),
            ),
            {0: (1000, 30)},
            id="the fork counts MiB",
        ),
    ],
)
def test_vcuda(node_manifest: Json, manifest: Json, expected: dict[Any, Any]) -> None:
    report = look(node_manifest, manifest)
    assert (held(report), unplaced(report), report.is_right) == (expected, [], True)


def grant(*tiles: tuple[str, int, int], **changes: Any) -> Json:
    entries = [{"uuid": uuid, "index": 0, "memory": memory, "cores": cores} for uuid, memory, cores in tiles]
    record = {
        "version": 1,
        "pod": "uid-p",
        "node": "n",
        "dialect": "gputile",
        "containers": [{"name": "c0", "tiles": entries}],
    }
    return {"gputile.io/grant": json.dumps({**record, **changes})}


OUR_TILE = {"gputile.io/gpu": 1, "gputile.io/memory": 6000}


@pytest.mark.parametrize(
    ("node_manifest", "manifest", "expected"),
    [
        pytest.param(ours("g0", "g1"), pod(OUR_TILE, notes=grant(("g1", 6000, 0))), {"g1": (6000, 0)}, id="our own"),
        pytest.param(
            ours("g0", "g1"),
            pod(OUR_TILE, notes=grant(("n#1", 6000, 0))),
            {"g1": (6000, 0)},
            id="written while the agent published no UUIDs",
        ),
        pytest.param(
            ours("g0"),
            pod(TILE, notes=grant(("g0", 2000, 5), dialect="hami") | hami_record(ONE)),
            {"g0": (2000, 5)},
            id="under our agent our grant wins over another record and over the request",
        ),
        pytest.param(
            hami("g0", "g1"),
            pod(TILE, notes=grant(("g1", 2000, 5), dialect="hami") | hami_record(ONE)),
            {"g1": (6000, 10)},
            id="under another agent it wins over another record, and the larger request counts",
        ),
    ],
)
def test_our_grant(node_manifest: Json, manifest: Json, expected: dict[str, Any]) -> None:
    report = look(node_manifest, manifest)
    assert held(report) == expected
    assert codes(report) == []
    assert set(remarks(report)) <= {"not-as-requested"}
