"""Hostile pods and nodes: what a tenant may write, and what only a broken client would write.

Each is a Kubernetes object as JSON. `TENANT` and `bound` have pods that a real API server accepts from every user with
the right to create pods (annotations of at most 256 KiB, objects of at most 1.5 MiB, valid names). `MISSHAPEN` has pods
that it would reject, `NODES` has nodes that it accepts only from the node's own account. Tests, benches and e2e tests
share them.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from gputile.dialects import gpushare, gputile, hami
from gputile.dialects.gputile import CORES, GPU, GRANT, INVENTORY, MEMORY, NOMINATION, ORPHANED
from gputile.testing.builders import container, pod

Json = dict[str, Any]
MakePod = Callable[[str], Json]
"""Builds a pod with this name."""

ANNOTATIONS = 256 * 1024  # bytes of all annotations of an object: the limit of the API server
MANY = 1300  # containers
IMPORTANT = 1_000_000  # a priority above that of all other pods
ESCAPES = "\x1b[2J\x1b]0;owned\x07\r\n\x00\u202e"
DEEP = 100_000  # levels of JSON
TILE = {GPU: 1, MEMORY: 1}


# ---- containers -----------------------------------------------------------------------------------------------------


def many(limits: Mapping[str, Any] = TILE, count: int = MANY, kind: str = "app") -> MakePod:
    """A pod with so many equal containers: `app`, `init` or `sidecar`."""
    return lambda name: _pod(name, [limits] * count, kind)


def uneven(name: str, big: int, count: int, cards: int, containers: int, **spec: Any) -> Json:
    """No two of `count` big containers fit on one card, and there are more of them than cards. So the pod does not fit,
    and only a search over all assignments proves it. All sizes differ, so that no two assignments are alike."""
    assert count > cards
    sizes = [big + n for n in range(count)] + [big // 20 + n for n in range(containers - count)]
    manifest = _pod(name, [{GPU: 1, MEMORY: size} for size in sizes], "app")
    manifest["spec"] |= spec
    return manifest


def _pod(name: str, limits: list[Mapping[str, Any]], kind: str, **annotations: str) -> Json:
    apps = limits if kind == "app" else [{"cpu": "1m"}]
    marks = {"sidecar": True} if kind == "sidecar" else {}
    inits = [] if kind == "app" else [{**amounts, **marks} for amounts in limits]
    manifest = pod(*apps, name=name, uid=f"uid-{name}", init=tuple(inits), annotations=annotations)
    for each in (*manifest["spec"]["containers"], *manifest["spec"]["initContainers"]):
        each["image"] = "none"
    return manifest


def annotated(limits: Mapping[str, Any] = TILE, **annotations: str) -> MakePod:
    """A pod of one container with these annotations."""
    return noted(annotations, limits)


def noted(annotations: Mapping[str, str], limits: Mapping[str, Any] = TILE) -> MakePod:
    """The same, with annotations whose names are no Python names."""

    def make(name: str) -> Json:
        manifest = _pod(name, [limits], "app")
        manifest["metadata"]["annotations"] = dict(annotations)
        return manifest

    return make


# ---- annotations ----------------------------------------------------------------------------------------------------


def keys(prefix: str = "gputile.io/", count: int = 17_000) -> dict[str, str]:
    """This many unknown keys."""
    return {f"{prefix}{n:04x}": "" for n in range(count)}


@cache
def listed(item: str = "{:05x}", count: int = 45_000, most: int = ANNOTATIONS - 64) -> str:
    """A list with commas, cut at the limit of the API server."""
    return ",".join(item.format(n) for n in range(count))[:most].rpartition(",")[0]


def deep(open_: str = '{"a":', close: str = "", levels: int = DEEP, most: int = ANNOTATIONS - 64) -> str:
    levels = min(levels, most // (len(open_) + len(close)))
    return open_ * levels + close * levels


def digits(count: int = 5000) -> str:
    """More digits than Python converts to an integer by default."""
    return "9" * count


def grant(uid: str, node: str, **changes: Any) -> str:
    """A grant as the scheduler writes it, with changes that make it invalid."""
    tile = {"uuid": f"GPU-{node}-0", "index": 0, "memory": 1, "cores": 0}
    containers = [{"name": "c0", "tiles": [tile], "role": "app"}]
    record = {"version": 1, "pod": uid, "node": node, "dialect": "gputile", "containers": containers, "at": 1}
    return json.dumps({**record, **changes})


RECORDS: dict[str, tuple[Json, tuple[str, ...]]] = {
    "gputile": (TILE, (GRANT, NOMINATION)),
    "gpushare": (
        {gpushare.MEM: 1},
        (gpushare.INDEX, gpushare.ALLOCATION, gpushare.TOTAL, gpushare.CARD_SIZE, gpushare.ASSUME_TIME),
    ),
    "nano": ({"nano-gpu.io/gpu-core": 10, "nano-gpu.io/gpu-memory": 1}, ("nano-gpu.io/gpu-c0",)),
    "nano-2": ({"nano-gpu/gpu-percent": 10}, ("nano-gpu/container-c0",)),
    "elastic": ({"elasticgpu.io/gpu-core": 10, "elasticgpu.io/gpu-memory": 1}, ("elasticgpu.io/container-c0",)),
    "vcuda": (
        {"tencent.com/vcuda-core": 10, "tencent.com/vcuda-memory": 1},
        ("tencent.com/predicate-gpu-idx-0", "tencent.com/predicate-node", "tencent.com/predicate-time"),
    ),
    "fork": (
        {"nvidia.com/vcuda-core": 10, "nvidia.com/vcuda-memory": 1},
        ("nvidia.com/predicate-gpu-idx-0", "tydic.io/bind-phase"),
    ),
    "hami": (
        {hami.GPU: 1, hami.MEMORY: 1},
        (hami.ALLOCATED, hami.TO_ALLOCATE, "hami.io/vgpu-node", "hami.io/bind-time", "hami.io/bind-phase"),
    ),
    "nvidia": ({hami.GPU: 1}, (hami.ALLOCATED,)),
    "vgpu": (
        {"nvidia.com/vgpu-number": 1, "nvidia.com/vgpu-memory": 1},
        ("nvidia.com/pre-allocated", "nvidia.com/real-allocated", "nvidia.com/predicate-node"),
    ),
}
"""By dialect: what a container requests, and the annotations that record what it was given."""

ASSUMED = ("nano-gpu.io/gpu", "nano-gpu/assume", "elasticgpu.io/assumed")
SELECTING = (
    *gputile.SELECTIONS,
    *("nvidia.com/use-gputype", "nvidia.com/nouse-gputype", "nvidia.com/use-gpuuuid", "nvidia.com/nouse-gpuuuid"),
    *("nvidia.com/gpu.model", "nvidia-gpu-scheduler/gpu.model", "nvidia.com/numa-bind", "nvidia.com/vgpu-mode"),
    *("hami.io/gpu-scheduler-policy", "hami.io/node-scheduler-policy", hami.WEIGHTS),
    *("nvidia.com/include-gpu-uuid", "nvidia.com/exclude-gpu-type", "nvidia.com/device-topology-mode"),
)
"""Annotations with which a pod selects its GPUs."""

GARBAGE: dict[str, str] = {
    "nothing": "",
    "deep objects": deep(),
    "deep lists": deep("["),
    "deep and closed": deep("[", "]"),
    "digits": digits(),
    "digits in a list": f"0,{digits()},1",
    "a negative number": "-1",
    "signs that are digits elsewhere": "٣,¹",
    "empty places": ";" * 200_000,
    "empty devices": ":" * 200_000,
    "commas": "," * 200_000,
    "a huge device": f"GPU-n1-0,NVIDIA,{digits()},{digits()}:;",
    "a device beyond its card": "GPU-n1-0,NVIDIA,999999999,999999999:;",
    "many devices": "GPU-n1-0,NVIDIA,1,1:" * 12_000,
    "brackets": "c0[0_GPU-n1-0_999999999_999999999];" * 5000,
    "half a bracket": "c0[" * 50_000,
    "nulls": '{"version":1,"pod":null,"node":null,"containers":null}',
    "a map of maps": json.dumps({"c0": {"0": 10**18, "GPU-n1-0": -1, "": None}}),
    "NaN": '{"version":NaN,"at":1e999}',
    "an unknown version": '{"version":99}',
    "terminal escapes": ESCAPES,
    "a long word": "x" * 200_000,
    "true": "true",
}
"""Invalid values for annotations, by name."""


def records(annotations: Mapping[str, str]) -> Iterator[tuple[str, MakePod]]:
    """Pods of every dialect, with this garbage in all their records at once."""
    for family, (limits, names) in RECORDS.items():
        for problem, value in annotations.items():
            short = value[: ANNOTATIONS // len(names) - 100]
            records = {**dict.fromkeys(names, short), **dict.fromkeys(ASSUMED, "true")}
            yield f"{family} record: {problem}", noted(records, limits)


# ---- pods -----------------------------------------------------------------------------------------------------------

LONG = "a" * 63

TENANT: dict[str, MakePod] = {
    "1,300 containers": many(),
    "1,300 containers that want a whole GPU each": many({GPU: 1}),
    "1,300 init containers": many(kind="init"),
    "1,300 sidecars": many(kind="sidecar"),
    "1,300 containers of HAMi": many({hami.GPU: 1, hami.MEMORY: 1}),
    "1,300 containers of gpushare": many({gpushare.MEM: 1}),
    "64 containers that fit nowhere": lambda name: uneven(name, 45_000, 9, 8, 64),
    "24 containers that fit nowhere": lambda name: uneven(name, 45_000, 9, 8, 24),
    "24 containers that fit nowhere, and are important": lambda name: uneven(
        name, 45_000, 9, 8, 24, priority=IMPORTANT
    ),
    "24 containers that fit an empty node only": lambda name: uneven(name, 5_500, 17, 8, 24),
    "24 containers of 4 GPUs each": many({GPU: 4, MEMORY: 30_001, CORES: 3}, 24),
    "all the GPUs there could be": many({GPU: 2**31 - 1}, 1),
    "more GPUs than there are numbers": many({GPU: str(2**63 - 1)}, 1),
    "more memory than there are numbers": many({GPU: 1, MEMORY: str(2**63 - 1)}, 1),
    "CPU without end": many({**TILE, "cpu": str(2**63 - 1)}, 1),
    "17,000 keys of ours": noted(keys()),
    "17,000 keys of HAMi": noted(keys("hami.io/v", 16_000), {hami.GPU: 1, hami.MEMORY: 1}),
    "17,000 keys, and no GPU": noted(keys(), {"cpu": "1"}),
    "45,000 UUIDs": noted({"gputile.io/uuid": listed()}),
    "45,000 UUIDs that are not wanted": noted({"gputile.io/not-uuid": listed()}),
    "45,000 models": noted({"gputile.io/model": listed()}),
    "45,000 models that are not wanted": noted({"gputile.io/not-model": listed()}),
    "45,000 types of HAMi": noted({"nvidia.com/use-gputype": listed()}, {hami.GPU: 1, hami.MEMORY: 1}),
    "45,000 UUIDs of vgpu-manager": noted(
        {"nvidia.com/include-gpu-uuid": listed()}, {"nvidia.com/vgpu-number": 1, "nvidia.com/vgpu-memory": 1}
    ),
    "45,000 policies": noted({"hami.io/gpu-scheduler-policy": listed("spread", 40_000)}, {hami.GPU: 1, hami.MEMORY: 1}),
    "a policy of 200,000 letters": noted({"gputile.io/policy": "x" * 200_000}),
    "a deep grant": noted({GRANT: deep()}),
    "a deep nomination": noted({NOMINATION: deep()}),
    "a nomination with 20,000 victims": lambda name: noted(
        {
            NOMINATION: json.dumps(
                {
                    "version": 1,
                    "grant": json.loads(grant(f"uid-{name}", "n1")),
                    "until": 2**61,
                    "victims": [f"{n:05x}" for n in range(20_000)],
                }
            )
        }
    )(name),
    "terminal escapes everywhere": noted(dict.fromkeys((*SELECTING, "note"), ESCAPES)),
    "the longest names": lambda name: _renamed(_pod(name, [TILE] * 3, "app"), name.ljust(63, "x")),
    "words instead of numbers": many({GPU: "1", MEMORY: "1k", CORES: "1"}, 2),
    **{f"selecting: {key}": noted({key: listed("{:x}", 9_000)}, {hami.GPU: 1}) for key in SELECTING},
}
"""Pending pods that any tenant may create."""


def _renamed(manifest: Json, long: str) -> Json:
    for number, each in enumerate(manifest["spec"]["containers"]):
        each["name"] = f"{long[:60]}{number}"
    manifest["metadata"]["labels"] = {f"{LONG}.{LONG}.{LONG}/{LONG}": LONG}
    return manifest


def on(make: MakePod, node: str) -> MakePod:
    """The same pod, bound to the node by its creator."""

    def make_bound(name: str) -> Json:
        manifest = make(name)
        manifest["spec"]["nodeName"] = node
        return manifest

    return make_bound


def bound(node: str) -> dict[str, MakePod]:
    """Pods that their creator bound to the node without a scheduler."""
    return {
        **{name: on(make, node) for name, make in TENANT.items()},
        "1,200 init containers": on(many(count=1200, kind="init"), node),
        "on a node that is not there": on(many(count=2), "nowhere"),
        "a copied grant": on(noted({GRANT: grant("uid-of-another", node)}), node),
        "the grant of another node": lambda name: on(noted({GRANT: grant(f"uid-{name}", "elsewhere")}), node)(name),
        "a grant of an unknown version": lambda name: _granted(name, node, version=99),
        "a grant of version 0": lambda name: _granted(name, node, version=0),
        "a grant without tiles": lambda name: _granted(name, node, containers=[{"name": "c0", "tiles": []}]),
        "a grant without containers": lambda name: _granted(name, node, containers=[]),
        "a grant of more than the GPU has": lambda name: _granted(name, node, tiles=[(f"GPU-{node}-0", 2**31 - 1)]),
        "a grant of a GPU that is not there": lambda name: _granted(name, node, tiles=[("GPU-of-nobody", 1)]),
        "a grant of 3,000 tiles": lambda name: _granted(name, node, tiles=[(f"GPU-{node}-0", 1)] * 3000),
        "a grant for 2,000 containers": lambda name: _granted(
            name, node, containers=[{"name": f"c{n}", "tiles": []} for n in range(2000)]
        ),
        "a grant of an unknown dialect": lambda name: _granted(name, node, dialect=ESCAPES),
        "a grant made in the year 20,000,000": lambda name: _granted(name, node, at=2**63),
        **{name: on(make, node) for name, make in records(GARBAGE)},
    }


def _granted(name: str, node: str, tiles: list[tuple[str, int]] | None = None, **changes: Any) -> Json:
    if tiles is not None:
        held = [{"uuid": uuid, "index": 0, "memory": memory, "cores": 0} for uuid, memory in tiles]
        changes["containers"] = [{"name": "c0", "tiles": held}]
    return on(noted({GRANT: grant(f"uid-{name}", node, **changes)}), node)(name)


def fractions(count: int = 100, name: str = "fraction") -> list[Json]:
    """Pods that all request different shares of a GPU."""
    return [_pod(f"{name}-{n}", [{GPU: 1, MEMORY: 1009 + 701 * n, CORES: 1 + n % 97}], "app") for n in range(count)]


# ---- what an API server would reject --------------------------------------------------------------------------------


def _changed(part: str, **fields: Any) -> MakePod:
    def make(name: str) -> Json:
        manifest = _pod(name, [TILE], "app")
        manifest[part] = {**(manifest.get(part) or {}), **fields}
        return manifest

    return make


MISSHAPEN: dict[str, MakePod] = {
    "no spec": lambda name: {"metadata": {"name": name, "uid": f"uid-{name}"}},
    "a spec that is a list": lambda name: {"metadata": {"name": name, "uid": f"uid-{name}"}, "spec": []},
    "containers that are none": _changed("spec", containers=[None, 7, "c", {}]),
    "containers that are a map": _changed("spec", containers={"c0": {}}),
    "containers without names": _changed("spec", containers=[container(TILE, ""), container(TILE, "")]),
    "two containers of one name": _changed("spec", containers=[container(TILE, "c0")] * 2),
    "limits that are a list": _changed("spec", containers=[{"name": "c0", "resources": {"limits": [1]}}]),
    "limits of every kind": _changed(
        "spec", containers=[container({GPU: value}, f"c{n}") for n, value in enumerate((True, 0.5, "", " ", "1e9", -1))]
    ),
    "a limit of 5,000 digits": _changed("spec", containers=[container({GPU: digits()}, "c0")]),
    "a limit that is infinite": _changed("spec", containers=[container({GPU: float("inf")}, "c0")]),
    "a limit that is no number": _changed("spec", containers=[container({GPU: float("nan")}, "c0")]),
    "a limit with a huge exponent": _changed("spec", containers=[container({GPU: "1e999999999"}, "c0")]),
    "a priority beyond all numbers": _changed("spec", priority=2**70),
    "a node name that is a list": _changed("spec", nodeName=["n1"]),
    "a node name of escapes": _changed("spec", nodeName=ESCAPES),
    "overhead of every kind": _changed("spec", overhead={"cpu": digits(), "memory": "-1Gi", GPU: None}),
    "grace without end": _changed("spec", terminationGracePeriodSeconds=2**61),
    "annotations of every kind": _changed("metadata", annotations={GRANT: 7, NOMINATION: True, "gputile.io/uuid": 0.5}),
    "annotations that are a list": _changed("metadata", annotations=["a"]),
    "an annotation that is a map": _changed("metadata", annotations={GRANT: {"version": 1}}),
    "labels of every kind": _changed("metadata", labels={gpushare.COUNT: True, "a": None, "": 7}),
    "no UID": _changed("metadata", uid=""),
    "a UID that is a number": _changed("metadata", uid=7),
    "a namespace of escapes": _changed("metadata", namespace=ESCAPES),
    "a name of a megabyte": _changed("metadata", generateName="x" * 2**20),
    "times that are none": _changed("metadata", creationTimestamp="99999-99-99", deletionTimestamp=ESCAPES),
    "a deletion before the beginning": _changed("metadata", deletionTimestamp="0000-00-00T00:00:00Z"),
    "a phase that is none": _changed("status", phase=ESCAPES, startTime="never", nominatedNodeName="nowhere"),
    "rejected for a megabyte of reasons": _changed("status", phase="Failed", reason="OutOf" + "x" * 2**20),
    "a status that is a list": lambda name: {**_pod(name, [TILE], "app"), "status": []},
}
"""Pods that a validating API server would reject, although they are valid JSON."""


# ---- nodes ----------------------------------------------------------------------------------------------------------


def node(name: str, annotations: Mapping[str, Any] | None = None, amounts: Mapping[str, Any] | None = None) -> Json:
    """A node with these annotations and amounts."""
    resources = {"cpu": "64", "memory": "512Gi", **(amounts or {})}
    return {
        "metadata": {"name": name, "annotations": dict(annotations or {})},
        "status": {"allocatable": resources, "capacity": resources},
    }


def inventory(cards: list[Json], version: Any = 1, **more: Any) -> dict[str, str]:
    return {INVENTORY: json.dumps({"version": version, "cards": cards, **more})}


def card(index: Any = 0, **changes: Any) -> Json:
    return {"index": index, "uuid": f"GPU-hostile-{index}", "memory": 1000, **changes}


def orphaned(node_name: str, count: int) -> str:
    return json.dumps({"version": 1, "grants": [json.loads(grant(f"gone-{n}", node_name)) for n in range(count)]})


NODES: dict[str, Json] = {
    "a deep inventory": node("hostile", {INVENTORY: deep()}),
    "an inventory that is a list": node("hostile", {INVENTORY: "[]"}),
    "an inventory of an unknown version": node("hostile", inventory([], version=99)),
    "4,000 GPUs": node("hostile", inventory([card(n) for n in range(4000)])),
    "4,000 GPUs and a link": node("hostile", inventory([card(n, links={"1": 1}) for n in range(4000)])),
    "GPUs of impossible sizes": node("hostile", inventory([card(n, memory=2**31 - 1, cores=32767) for n in range(8)])),
    "GPUs of no number": node("hostile", inventory([card(0, memory=10**300), card(1, cores=-5)])),
    "two GPUs of one name": node("hostile", inventory([card(0), card(0)])),
    "a GPU of escapes": node("hostile", inventory([card(0, uuid=ESCAPES, model=ESCAPES)])),
    "a model of a quarter of a megabyte": node("hostile", inventory([card(0, model="x" * 200_000)])),
    "HAMi's register of 3,000 GPUs": node(
        "hostile",
        {
            hami.REGISTER: ":".join(f"g{n},10,1000,100,T4,0,true,{n},hami-core" for n in range(3000)),
            hami.SCORE: "[]",
        },
    ),
    "HAMi's register of digits": node("hostile", {hami.REGISTER: f"g,{digits()},{digits()},100,T4,0,true:"}),
    "a deep register": node(
        "hostile",
        dict.fromkeys((hami.REGISTER, "tydic.io/nvidia-device-register", "nvidia.com/node-device-register"), deep("[")),
    ),
    "a million GPUs by number": node("hostile", amounts={hami.GPU: 10**6}),
    "more GPUs than there are numbers": node("hostile", amounts={hami.GPU: str(2**63 - 1)}),
    "sums of every kind": node(
        "hostile", amounts={gpushare.MEM: digits(), gpushare.COUNT: 0.5, "nano-gpu.io/gpu-core": True}
    ),
    "gpushare without memory": node("hostile", amounts={gpushare.MEM: 1, gpushare.COUNT: 10**9}),
    "an orphan of garbage": node("hostile", {**inventory([card(0)]), ORPHANED: deep()}),
    "1,000 orphans": node("hostile", {**inventory([card(0)]), ORPHANED: orphaned("hostile", 1000)}),
    "no status": {"metadata": {"name": "hostile"}},
    "no metadata": {"metadata": {"name": "hostile", "annotations": None, "labels": None}, "status": None},
    "a status that is a list": {"metadata": {"name": "hostile"}, "status": []},
    "labels of every kind": {
        "metadata": {"name": "hostile", "labels": {gputile.POOL: ESCAPES, "nvidia.com/gpu.count": digits(), "a": True}},
        "status": {"capacity": {hami.GPU: 4}},
    },
}
"""Nodes called `hostile`, as the account of a node or a broken client might write them."""

USES: dict[str, str] = {
    "nothing": "",
    "deep": deep(),
    "not ours": '{"version":99,"cards":{}}',
    "of every kind": '{"version":1,"cards":{"GPU-n1-0":{"uid":{"c0":[2147483648,-1]}}}}',
    "of 5,000 pods": json.dumps(
        {"version": 1, "cards": {"GPU-n1-0": {f"uid-{n}": {"c0": [1, 1]} for n in range(5000)}}}
    ),
}
"""What the Lease of a node's agent may contain as usage."""
