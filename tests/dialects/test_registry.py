"""The registry: the dialect of a pod or node, every bad request in one table, and arbitrary JSON.

Seen to fail, by breaking the code on purpose in a copy: hami's claim on `nvidia.com/gpu` removed, the order of
dialects for nodes reversed, a duplicate UUID accepted, requests before limits, the dialect's own record not written.
"""

from itertools import permutations
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gputile.dialects import gpushare, records, registry
from gputile.dialects.gputile import GPU, MEMORY, NOMINATION, Nomination, write_nomination
from gputile.dialects.kube_objects import Pod
from gputile.dialects.parsing import convert_pod
from gputile.dialects.settings import DEFAULTS, DialectSettings
from gputile.model.cards import Card, Node
from gputile.model.grants import ContainerGrant, Grant, Tile
from gputile.model.refusals import BadRequest, NodeReason, RequestError
from gputile.model.requests import PodRequest
from gputile.model.units import LARGEST_CARD
from gputile.testing.builders import ask, node, pod
from tests.dialects.shortcuts import Manifest, Rejected, expect, node_of, object_of, raw_node, read

# ---- pods -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "dialect"),
    [
        pytest.param({"gputile.io/gpu": 1}, "gputile", id="gputile"),
        pytest.param({"aliyun.com/gpu-mem": 1}, "gpushare", id="gpushare"),
        pytest.param({"nano-gpu.io/gpu-core": 1}, "nano", id="nano-1"),
        pytest.param({"nano-gpu/gpu-percent": 1}, "nano", id="nano-2"),
        pytest.param({"elasticgpu.io/gpu-core": 1}, "nano", id="nano-3"),
        pytest.param({"tencent.com/vcuda-core": 1}, "vcuda", id="vcuda"),
        pytest.param({"nvidia.com/vcuda-core": 1}, "vcuda", id="the-fork-of-vcuda"),
        pytest.param({"nvidia.com/gpu": 1}, "nvidia", id="nvidia.com/gpu-alone-is-nvidia"),
        pytest.param({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 1}, "hami", id="with-gpumem-beside-it-hami"),
        pytest.param({"nvidia.com/gpu": 1, "nvidia.com/gpucores": 1}, "hami", id="with-gpucores-beside-it-hami"),
        pytest.param({"nvidia.com/gpu": 1, "nvidia.com/gpumem-percentage": 1}, "hami", id="with-a-percentage-hami"),
        pytest.param({"nvidia.com/vgpu-number": 1}, "vgpu", id="vgpu"),
        pytest.param({"gputile.io/gpu": 1, "nvidia.com/gpu": 0}, "gputile", id="zero-of-another-dialect-is-no-mixing"),
        pytest.param({"gputile.io/gpu": 1, "nvidia.com/gpu": "0"}, "gputile", id="a-zero-as-a-string-neither"),
    ],
)
def test_resource_names_show_the_dialect(limits: dict[str, Any], dialect: str) -> None:
    assert read(pod(limits)).dialect == dialect


@pytest.mark.parametrize(
    "manifest",
    [
        pytest.param({}, id="an-empty-object"),
        pytest.param({"metadata": None, "spec": None}, id="nulls"),
        pytest.param({"spec": {"containers": None}}, id="no-containers"),
        pytest.param({"spec": {"containers": [{"name": "c0"}]}}, id="a-container-without-resources"),
        pytest.param(pod({"cpu": "1", "memory": "1Gi"}), id="cpu-and-memory-only"),
        pytest.param(pod({"amd.com/gpu": 1}), id="another-makers-gpu"),
        pytest.param(pod({}, labels={"aliyun.com/gpu-count": "2"}), id="a-label-alone"),
        pytest.param(pod({}, annotations={"nvidia.com/use-gputype": "T4"}), id="a-selection-alone"),
    ],
)
def test_a_pod_without_gpus_is_ignored(manifest: Manifest) -> None:
    assert registry.read_pod(manifest) is None


GPUTILE, HAMI = {"gputile.io/gpu": 1}, {"nvidia.com/gpu": 1}
MIXED, NO_DEVICE = RequestError.MIXED_DIALECTS, RequestError.NO_DEVICE_RESOURCE
TOO_MUCH, NAN = RequestError.OUT_OF_RANGE, RequestError.NOT_A_NUMBER
IN_ANNOTATION = RequestError.RESOURCE_IN_ANNOTATION


@pytest.mark.parametrize(
    ("manifest", "want"),
    [
        # mixed dialects
        pytest.param(
            pod(GPUTILE | HAMI), Rejected(MIXED, "use the resources of one"), id="two-dialects-in-one-container"
        ),
        pytest.param(
            pod(GPUTILE, {"aliyun.com/gpu-mem": 3}),
            Rejected(MIXED, "`gputile.io/gpu` of gputile, `aliyun.com/gpu-mem` of gpushare"),
            id="two-dialects-in-two-containers-are-named",
        ),
        pytest.param(
            pod({"nvidia.com/vgpu-number": 1}, init=(HAMI,)),
            Rejected(MIXED, "use the resources of one"),
            id="in-an-init-container",
        ),
        pytest.param(
            pod(HAMI | {"nvidia.com/gpumem": 1, "nvidia.com/vcuda-core": 1}),
            Rejected(MIXED, "use the resources of one"),
            id="hami-with-the-fork-of-vcuda",
        ),
        pytest.param(
            pod({"nano-gpu/gpu-percent": 1, "elasticgpu.io/gpu-core": 1}),
            Rejected(MIXED, "use one of them"),
            id="two-generations-of-nano",
        ),
        pytest.param(
            pod({"tencent.com/vcuda-core": 1, "nvidia.com/vcuda-core": 1}),
            Rejected(MIXED, "use one of them"),
            id="vcuda-and-its-fork",
        ),
        # memory without the resource that carries devices
        pytest.param(
            pod({"gputile.io/memory": 9}), Rejected(NO_DEVICE, "add `gputile.io/gpu: 1`"), id="gputile-memory-alone"
        ),
        pytest.param(
            pod({"aliyun.com/gpu-count": 2}),
            Rejected(NO_DEVICE, "add `aliyun.com/gpu-mem: <memory>`"),
            id="gpu-count-alone",
        ),
        pytest.param(
            pod({"nano-gpu.io/gpu-memory": 9}),
            Rejected(NO_DEVICE, "add `nano-gpu.io/gpu-core: 1`"),
            id="nano-memory-alone",
        ),
        pytest.param(
            pod({"elasticgpu.io/gpu-memory": 9}),
            Rejected(NO_DEVICE, "add `elasticgpu.io/gpu-core: 1`"),
            id="elastic-memory-alone",
        ),
        pytest.param(
            pod({"tencent.com/vcuda-memory": 9}),
            Rejected(NO_DEVICE, "add `tencent.com/vcuda-core: 10`"),
            id="vcuda-memory-alone",
        ),
        pytest.param(
            pod({"nvidia.com/vcuda-memory": 9}),
            Rejected(NO_DEVICE, "add `nvidia.com/vcuda-core: 10`"),
            id="in-the-fork",
        ),
        pytest.param(pod({"nvidia.com/gpumem": 9}), Rejected(NO_DEVICE, "add `nvidia.com/gpu: 1`"), id="gpumem-alone"),
        pytest.param(
            pod({"nvidia.com/vgpu-memory": 9}),
            Rejected(NO_DEVICE, "add `nvidia.com/vgpu-number: 1`"),
            id="vgpu-memory-alone",
        ),
        pytest.param(
            pod(HAMI | {"nvidia.com/gpumem": 9}, {"nvidia.com/gpumem": 9}),
            Rejected(NO_DEVICE, "container `c1`"),
            id="the-container-that-lacks-it-is-named",
        ),
        # 150 cores where the dialect rejects them
        pytest.param(
            pod(GPUTILE | {"gputile.io/cores": 150}), Rejected(TOO_MUCH, "at most 100"), id="150-cores-in-gputile"
        ),
        pytest.param(
            pod({"tencent.com/vcuda-core": 150}), Rejected(TOO_MUCH, "or 100 or 200"), id="150-cores-in-vcuda"
        ),
        pytest.param(
            pod({"nvidia.com/vcuda-core": 150}), Rejected(TOO_MUCH, "or 100 or 200"), id="150-cores-in-the-fork"
        ),
        pytest.param(
            pod({"nvidia.com/vgpu-number": 1, "nvidia.com/vgpu-cores": 150}),
            Rejected(TOO_MUCH, "at most 100, and request more GPUs with `nvidia.com/vgpu-number`"),
            id="150-cores-in-vgpu",
        ),
        # more memory than any card
        pytest.param(
            pod(GPUTILE | {"gputile.io/memory": LARGEST_CARD + 1}),
            Rejected(TOO_MUCH, "write at most"),
            id="a-TiB-in-gputile",
        ),
        pytest.param(
            pod({"aliyun.com/gpu-mem": 16000}),
            Rejected(TOO_MUCH, "16000 GiB per GPU"),
            id="MiB-written-where-GiB-are-meant",
        ),
        pytest.param(
            pod({"nano-gpu.io/gpu-core": 1, "nano-gpu.io/gpu-memory": 16000}),
            Rejected(TOO_MUCH, "16000 GiB per GPU"),
            id="in-nano",
        ),
        pytest.param(
            pod({"tencent.com/vcuda-core": 1, "tencent.com/vcuda-memory": 16000}),
            Rejected(TOO_MUCH, "256 MiB"),
            id="MiB-written-where-blocks-of-256-are-meant",
        ),
        pytest.param(
            pod(HAMI | {"nvidia.com/gpumem": "4Gi"}),
            Rejected(TOO_MUCH, "write a plain number without Gi or Mi"),
            id="a-unit-where-none-belongs",
        ),
        pytest.param(
            pod({"nvidia.com/vgpu-number": 1, "nvidia.com/vgpu-memory": 2 * LARGEST_CARD}),
            Rejected(TOO_MUCH, "write at most"),
            id="two-TiB-in-vgpu",
        ),
        # negative
        *(
            pytest.param(
                pod(limits), Rejected(RequestError.NEGATIVE, "write 0 or more"), id=f"negative-{next(iter(limits))}"
            )
            for limits in (
                {"gputile.io/gpu": -1},
                {"aliyun.com/gpu-mem": "-3"},
                {"nano-gpu/gpu-percent": -30},
                {"tencent.com/vcuda-core": -30},
                {"nvidia.com/gpu": -1},
                {"nvidia.com/gpumem": -1, "nvidia.com/gpu": 1},
                {"nvidia.com/vgpu-number": -1},
            )
        ),
        # not a number
        *(
            pytest.param(
                pod({"nvidia.com/gpu": value}), Rejected(NAN, "write a whole number"), id=f"no-whole-number-{name}"
            )
            for name, value in {
                "a-word": "two",
                "a-fraction": "0.5",
                "a-float": 1.5,
                "millis": "1500m",
                "empty": "",
                "a-unit-alone": "Gi",
                "two-numbers": "1 2",
                "infinity": "inf",
                "hex": "0x10",
                "a-number-of-40-digits": "9" * 40,
            }.items()
        ),
        # unknown policy
        pytest.param(
            pod(GPUTILE, annotations={"gputile.io/policy": "best"}),
            Rejected(RequestError.UNKNOWN_POLICY, "write one of binpack"),
            id="unknown-policy-of-ours",
        ),
        pytest.param(
            pod(HAMI, annotations={"hami.io/gpu-scheduler-policy": "best"}),
            Rejected(RequestError.UNKNOWN_POLICY, "write one or more of binpack"),
            id="unknown-policy-of-hami",
        ),
        pytest.param(
            pod({"nvidia.com/vgpu-number": 1}, annotations={"nvidia.com/device-scheduler-policy": "best"}),
            Rejected(RequestError.UNKNOWN_POLICY, "write one of binpack"),
            id="unknown-policy-of-vgpu",
        ),
        # a resource in an annotation
        pytest.param(
            pod(HAMI, annotations={"nvidia.com/gpumem": "3000"}),
            Rejected(IN_ANNOTATION, "write `nvidia.com/gpumem: 3000` under `resources.limits`"),
            id="gpumem-in-an-annotation",
        ),
        pytest.param(
            pod({}, annotations={"nvidia.com/gpumem": "3000"}),
            Rejected(IN_ANNOTATION, "under `resources.limits`"),
            id="gpumem-in-an-annotation-of-a-pod-without-gpu",
        ),
        pytest.param(
            pod(HAMI | {"nvidia.com/gpumem": 3000}, annotations={"nvidia.com/gpucores": "30"}),
            Rejected(IN_ANNOTATION, "write `nvidia.com/gpucores: 30` under"),
            id="gpucores-in-an-annotation",
        ),
        pytest.param(
            pod(GPUTILE, annotations={"gputile.io/memory": "3072"}),
            Rejected(IN_ANNOTATION, "write `gputile.io/memory: 3072` under"),
            id="our-own-memory-in-an-annotation",
        ),
        # unknown names of ours
        pytest.param(
            pod(GPUTILE | {"gputile.io/mem": 3072}),
            Rejected(RequestError.UNKNOWN_NAME, "write `gputile.io/memory`"),
            id="an-unknown-gputile-resource-and-its-nearest",
        ),
        pytest.param(
            pod({"gputile.io/gpus": 1}),
            Rejected(RequestError.UNKNOWN_NAME, "write `gputile.io/gpu`"),
            id="gpus-for-gpu",
        ),
        # no pod at all
        pytest.param(
            {"spec": {"containers": {}}}, Rejected(RequestError.MALFORMED, "kubectl explain pod"), id="no-pod"
        ),
        pytest.param(
            pod({"nvidia.com/gpu": [1]}),
            Rejected(RequestError.MALFORMED, "kubectl explain pod"),
            id="a-list-as-a-quantity",
        ),
        pytest.param(
            pod({"nvidia.com/gpu": True}),
            Rejected(RequestError.MALFORMED, "kubectl explain pod"),
            id="a-bool-as-a-quantity",
        ),
    ],
)
def test_bad_requests(manifest: Manifest, want: Rejected) -> None:
    expect(manifest, "", want)


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param(dict(order), id="-".join(key.removeprefix("nvidia.com/") for key, _ in order))
        for order in permutations([("nvidia.com/gpu", 1), ("nvidia.com/gpumem", 3000), ("nvidia.com/gpucores", 30)])
    ],
)
def test_an_annotation_that_repeats_a_limit_does_no_harm_in_whatever_order(limits: dict[str, Any]) -> None:
    expect(pod(limits, annotations={"nvidia.com/gpumem": "3000"}), "hami", ask(3000, 30, name="c0"))


# ---- the host's side ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("manifest", "cpu", "memory"),
    [
        pytest.param(pod(GPUTILE), 0, 0, id="nothing-set"),
        pytest.param(pod(GPUTILE | {"cpu": "500m", "memory": "1Gi"}), 500, 1024, id="limits-replace-missing-requests"),
        pytest.param(pod(GPUTILE | {"cpu": 2}, {"cpu": 1, "memory": "1"}), 3000, 1, id="containers-add-up-rounded-up"),
        pytest.param(
            pod(GPUTILE | {"cpu": 1}, {"cpu": 1}, init=({"cpu": 5}, {"cpu": 4})), 5000, 0, id="the-largest-init-counts"
        ),
        pytest.param(
            pod(GPUTILE | {"cpu": 1}, init=({"cpu": 2, "sidecar": True}, {"cpu": 4})),
            6000,
            0,
            id="a-sidecar-runs-beside-later-init-containers",
        ),
        pytest.param(
            pod(GPUTILE | {"cpu": 1}, init=({"cpu": 4}, {"cpu": 2, "sidecar": True})),
            4000,
            0,
            id="but-not-beside-earlier-ones",
        ),
    ],
)
def test_cpu_and_main_memory_as_kubernetes_counts_them(manifest: Manifest, cpu: int, memory: int) -> None:
    result = read(manifest)
    assert (result.cpu, result.memory) == (cpu, memory)


def test_requests_win_over_limits_for_cpu_and_overhead_is_added() -> None:
    manifest = pod(GPUTILE | {"cpu": 4})
    manifest["spec"]["containers"][0]["resources"]["requests"] = {"cpu": "1"}
    manifest["spec"]["overhead"] = {"cpu": "250m", "memory": "64Mi"}
    result = read(manifest)
    assert (result.cpu, result.memory) == (1250, 64)


@pytest.mark.parametrize(
    "limits", [pytest.param({"cpu": "-5"}, id="cpu"), pytest.param({"memory": "-5Gi"}, id="memory")]
)
def test_a_negative_request_never_frees_host_capacity(limits: dict[str, Any]) -> None:
    parsed = registry.read_pod(pod(GPUTILE | limits))
    assert isinstance(parsed, BadRequest) or (isinstance(parsed, PodRequest) and (parsed.cpu, parsed.memory) == (0, 0))


# ---- nodes ----------------------------------------------------------------------------------------------------------

OURS = node("n1").card("A100", "80Gi").manifest()["metadata"]["annotations"]
HAMIS = {"hami.io/node-nvidia-register": '[{"id":"GPU-h","devmem":2,"devcore":100,"count":10,"health":true}]'}
VGPUS = {"nvidia.com/node-device-register": '[{"id":0,"uuid":"GPU-v","memory":3,"number":10,"healthy":true}]'}
FORKS = {"tydic.io/nvidia-device-register": '[{"id":"GPU-f","memory":4,"health":true}]'}
SUMS = {
    "tencent.com/vcuda-core": 100,
    "aliyun.com/gpu-mem": 15,
    "aliyun.com/gpu-count": 1,
    "elasticgpu.io/gpu-core": 200,
    "nvidia.com/gpu": 8,
}


@pytest.mark.parametrize(
    ("annotations", "capacity", "uuids"),
    [
        pytest.param({**OURS, **HAMIS, **VGPUS, **FORKS}, SUMS, ["GPU-n1-0"], id="our-inventory-first"),
        pytest.param({**HAMIS, **FORKS}, SUMS, ["GPU-h"], id="then-hami's-register"),
        pytest.param({**VGPUS, **FORKS}, SUMS, ["GPU-v"], id="then-vgpu's-register"),
        pytest.param(FORKS, SUMS, ["GPU-f"], id="then-the-fork's-register"),
        pytest.param({}, {"aliyun.com/gpu-mem": 15, "aliyun.com/gpu-count": 1}, ["n1#0"], id="then-averages"),
        pytest.param({}, {"nvidia.com/gpu": 2}, ["n1#0", "n1#1"], id="then-labels-and-counts"),
        pytest.param({}, {"cpu": 1}, [], id="else-no-cards"),
    ],
)
def test_registers_come_before_averages(
    annotations: dict[str, str], capacity: dict[str, Any], uuids: list[str]
) -> None:
    parsed_node = node_of(raw_node(capacity, annotations=annotations))
    assert ([card.uuid for card in parsed_node.cards], parsed_node.fault) == (uuids, "")


def test_a_broken_register_is_not_replaced_by_averages() -> None:
    parsed_node = node_of(raw_node(SUMS, annotations={**HAMIS, "gputile.io/inventory": "broken"}))
    assert (parsed_node.cards, parsed_node.fault) == ((), NodeReason.BAD_INVENTORY)


def test_slots_are_a_setting_where_no_agent_publishes_them() -> None:
    parsed_node = node_of(raw_node({"nvidia.com/gpu": 1}), DialectSettings(slots_per_card=3))
    assert parsed_node.cards == (Card(index=0, uuid="n1#0", memory=0, slots=3),)


def test_a_nodes_cpu_and_memory_are_the_allocatable_ones() -> None:
    parsed_node = node_of(raw_node({"cpu": "64", "memory": "512Gi"}, allocatable={"cpu": "63500m", "memory": "500Gi"}))
    assert (parsed_node.name, parsed_node.cpu, parsed_node.memory) == ("n1", 63500, 512000)


def test_a_built_node_reads_as_it_was_built() -> None:
    built = node("n1").cards(2, "A100", "80Gi", numa=1).card("T4", 15109, healthy=False, reason="Xid 79")
    built.linked((0, 2, 0), (2, 0, 0), (0, 0, 0))
    assert node_of(built.manifest()) == built.node()


@pytest.mark.parametrize(
    "manifest",
    [
        pytest.param(None, id="null"),
        pytest.param(1, id="a-number"),
        pytest.param("node", id="a-word"),
        pytest.param([], id="a-list"),
        pytest.param({"status": 1}, id="a-status-of-another-shape"),
    ],
)
def test_an_invalid_node_is_rejected(manifest: Any) -> None:
    parsed_node = registry.read_node(manifest)
    assert isinstance(parsed_node, BadRequest)
    assert parsed_node.code is RequestError.MALFORMED


# ---- whatever JSON may bring ----------------------------------------------------------------------------------------

JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=8,
)
KEYS = sorted(
    {key for dialect in registry.DIALECTS for key in dialect.resources(DEFAULTS)}
    | {"gputile.io/gpus", "cpu", "memory", "nvidia.com/mig-1g.5gb"}
)
POD_ANNOTATIONS = [
    *KEYS,
    *(f"gputile.io/{name}" for name in ("model", "uuid", "policy", "numa", "links", "grant", "nomination", "x")),
    *(f"nvidia.com/{name}" for name in ("use-gputype", "use-gpuuuid", "numa-bind", "vgpu-mode", "gpu.model")),
    *(f"nvidia.com/{name}" for name in ("device-topology-mode", "pre-allocated", "real-allocated", "vcuda-core-limit")),
    *(f"hami.io/{name}" for name in ("gpu-scheduler-policy", "node-scheduler-policy", "device-scoring-weights")),
    *("hami.io/vgpu-devices-allocated", "ALIYUN_COM_GPU_MEM_IDX", "scheduler.framework.gpushare.allocation"),
    *("elasticgpu.io/assumed", "elasticgpu.io/container-c0", "nano-gpu/assume", "nano-gpu/container-c0"),
    *("tencent.com/predicate-gpu-idx-0", "nvidia.com/predicate-gpu-idx-0", "tencent.com/vcuda-core-limit"),
]
NODE_ANNOTATIONS = [
    *("gputile.io/inventory", "gputile.io/cordon", "hami.io/node-nvidia-register", "hami.io/node-nvidia-score"),
    *("hami.io/device-cordon", "tydic.io/nvidia-device-register", "nvidia.com/node-device-register"),
    *("nvidia.com/node-config-info", "nvidia.com/node-device-topology"),
]
NODE_LABELS = [
    *(f"nvidia.com/gpu.{name}" for name in ("count", "memory", "product", "replicas")),
    *("gaia.tencent.com/gpu-model", "gaia.tencent.com/gpu-pool", "ack.node.gpu.placement"),
]
PLAIN = st.sampled_from([1, 2, "1", "2", 10, 30, 100])
ODD: st.SearchStrategy[Any] = st.sampled_from(
    [
        *(0, -1, 150, 200, 2**31 - 1, 2**31, 2**63, -(2**70), 10**400, 1.0, 0.5, -0.0, 1e300, 5e-324),
        *("0", "-3", " 7 ", "1e9", "1e99", "9E", "1.5Gi", "+.5", "", "two", "9" * 5000, "٣", "½", "\x00", "x" * 5000),
        *(True, False, None, [], {}, [1], {"a": {"b": []}}),
    ]
)
WORDS = st.sampled_from(
    [
        *("binpack", "none", "true", "numa-strict", "mutex,spread", "A100,T4", ",", ";", ":", "0", "0,1", "-1", "0,0"),
        *("GPU-n1-0,NVIDIA,5,5:;", "a,b,c,d:;", ",,,:", "c0[0_GPU-n1-0_5_5]", "c0[]", "[", "c0[a_b_c_d]", "1,2,3"),
        *("null", "[]", "{}", "[{}]", "[null]", '{"0":{"0":3}}', '{"-1":{"0":3}}', '{"x":1}', '{"version":1}', "٣,٤"),
        '{"version":1,"pod":"uid-1","node":"n1","dialect":"x","containers":[{"name":"c0","tiles":[]}]}',
        '{"version":1,"cards":[{"index":0,"uuid":"a","memory":1e9}]}',
        '{"version":1,"cards":[{"index":-1,"uuid":"a","memory":1,"links":{"x":1,"-1":2}}]}',
        '[{"id":"a","index":99999999999999999999,"devmem":-1}]',
        '[{"id":0,"uuid":"a","memory":99999999999999999999999}]',
        '[{"id":"a","memory":1.5}]',
        *("a,1,2,3,b,4,true:", "a,1,2,3,b,4,true,x,y:", "a,-1,-2,-3,b,-4,true:", "a" * 5000),
    ]
)
TEXTS = st.one_of(WORDS, ODD, st.text(max_size=10))


def some(keys: list[str], values: st.SearchStrategy[Any], most: int = 3) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(keys), values, max_size=most)


AMOUNTS = some(KEYS, st.one_of(PLAIN, PLAIN, ODD))
CONTAINER = st.fixed_dictionaries(
    {"name": st.sampled_from(["c0", "c1", ""])},
    optional={
        "resources": st.fixed_dictionaries({"limits": AMOUNTS}, optional={"requests": AMOUNTS}),
        "restartPolicy": st.sampled_from(["Always", "", None]),
    },
)
PODS = st.fixed_dictionaries(
    {
        "metadata": st.fixed_dictionaries(
            {
                "uid": st.just("uid-1"),
                "annotations": some(POD_ANNOTATIONS, TEXTS),
                "labels": some(["aliyun.com/gpu-count"], TEXTS),
            }
        ),
        "spec": st.fixed_dictionaries(
            {"containers": st.lists(CONTAINER, min_size=1, max_size=2), "nodeName": st.just("n1")},
            optional={"initContainers": st.lists(CONTAINER, max_size=1), "overhead": some(["cpu"], ODD)},
        ),
    }
)
NODES = st.fixed_dictionaries(
    {
        "metadata": st.fixed_dictionaries(
            {"name": st.just("n1"), "annotations": some(NODE_ANNOTATIONS, TEXTS), "labels": some(NODE_LABELS, TEXTS)}
        ),
        "status": st.fixed_dictionaries({"capacity": AMOUNTS}, optional={"allocatable": AMOUNTS}),
    }
)
CARDS = node("n1").card("A100", "80Gi").card("T4", 15109).node()


def check_answer(entry: PodRequest | BadRequest | None) -> None:
    assert entry is None or isinstance(entry, (PodRequest, BadRequest))
    if isinstance(entry, BadRequest):
        assert entry.message
    if isinstance(entry, PodRequest):
        assert any(wanted.cards for wanted in entry.asks)
        for wanted in entry.asks:
            assert 0 <= wanted.cards < 2**31
            assert 0 <= wanted.cores <= 100
            assert wanted.memory is None or 0 <= wanted.memory <= LARGEST_CARD
            assert wanted.memory_percent is None or 1 <= wanted.memory_percent <= 100
            assert not wanted.cards or (wanted.memory is None) != (wanted.memory_percent is None)


@settings(max_examples=60)
@given(JSON)
def test_any_json_as_a_pod_is_a_request_no_request_or_a_refusal(manifest: Any) -> None:
    check_answer(registry.read_pod(manifest))


@settings(max_examples=200)
@given(PODS)
@example(pod({"aliyun.com/gpu-mem": 2**31 - 2}, labels={"aliyun.com/gpu-count": "2"}))
def test_an_odd_pod_is_a_request_no_request_or_a_refusal(manifest: Manifest) -> None:
    check_answer(registry.read_pod(manifest))


@settings(max_examples=150)
@given(PODS)
def test_an_odd_record_is_a_grant_no_grant_or_a_refusal(manifest: Manifest) -> None:
    parsed_pod = convert_pod(manifest)
    if isinstance(parsed_pod, Pod):
        grant = records.read_grant(parsed_pod, CARDS)
        assert grant is None or isinstance(grant, (Grant, BadRequest))


@settings(max_examples=60)
@given(JSON)
def test_any_json_as_a_node_is_a_node_or_a_refusal(manifest: Any) -> None:
    assert isinstance(registry.read_node(manifest), (Node, BadRequest))


@settings(max_examples=200)
@given(NODES)
def test_an_odd_node_is_a_node_with_possible_cards_or_a_refusal(manifest: Manifest) -> None:
    parsed_node = registry.read_node(manifest)
    assert isinstance(parsed_node, (Node, BadRequest))
    if isinstance(parsed_node, Node):
        assert (
            len({card.uuid for card in parsed_node.cards})
            == len({card.index for card in parsed_node.cards})
            == len(parsed_node.cards)
        )
        assert all(card.index >= 0 and 0 <= card.memory < 2**31 for card in parsed_node.cards)


DEEP = 100_000
NASTY = [
    pytest.param("[" * DEEP, id="deep-brackets"),
    pytest.param('{"x":' * DEEP, id="deep-objects-in-an-unknown-key"),
    pytest.param('{"version":1,"x":' + "[" * DEEP, id="deep-brackets-in-an-unknown-key"),
    pytest.param('[{"id":"a","x":' + "[" * DEEP, id="deep-brackets-in-a-card"),
    pytest.param("\ud800", id="half-a-surrogate-pair"),
    pytest.param('["\ud800"]', id="half-a-surrogate-pair-in-json"),
]


@pytest.mark.parametrize("text", NASTY)
@pytest.mark.parametrize("key", NODE_ANNOTATIONS)
def test_a_nasty_annotation_of_a_node_never_raises(key: str, text: str) -> None:
    beside = HAMIS if key.startswith("hami.io/") else VGPUS if key.startswith("nvidia.com/") else {}
    assert isinstance(registry.read_node(raw_node(annotations={**beside, key: text})), Node)


@pytest.mark.parametrize("text", NASTY)
@pytest.mark.parametrize(
    ("key", "limits"),
    [
        pytest.param("gputile.io/grant", GPUTILE, id="gputile"),
        pytest.param("scheduler.framework.gpushare.allocation", {"aliyun.com/gpu-mem": 1}, id="gpushare"),
        pytest.param("elasticgpu.io/container-c0", {"elasticgpu.io/gpu-core": 1}, id="nano"),
        pytest.param("tencent.com/predicate-gpu-idx-0", {"tencent.com/vcuda-core": 1}, id="vcuda"),
        pytest.param("hami.io/vgpu-devices-allocated", HAMI | {"nvidia.com/gpumem": 1}, id="hami"),
        pytest.param("nvidia.com/pre-allocated", {"nvidia.com/vgpu-number": 1}, id="vgpu"),
    ],
)
def test_a_nasty_record_on_a_pod_never_raises(key: str, limits: dict[str, Any], text: str) -> None:
    parsed_pod = convert_pod(pod(limits, annotations={key: text, "elasticgpu.io/assumed": "true"}, on="n1"))
    assert isinstance(parsed_pod, Pod)
    assert not isinstance(records.read_grant(parsed_pod, CARDS), Grant)


def test_a_number_of_5000_digits_is_refused_and_raises_nothing() -> None:
    """YAML can carry it in hexadecimal; Python refuses to print it."""
    assert isinstance(registry.read_pod(pod({"nvidia.com/gpu": 16**5000})), BadRequest)


class TestWhatWouldHurtLater:
    """Values that parse and would break later code are rejected or capped here."""

    @pytest.mark.parametrize("name", ["", "c0"], ids=["no-name", "the-name-of-another"])
    def test_every_container_has_its_own_name(self, name: str) -> None:
        manifest = pod(GPUTILE, GPUTILE)
        manifest["spec"]["containers"][1]["name"] = name
        parsed = registry.read_pod(manifest)
        assert isinstance(parsed, BadRequest)
        assert parsed.code is RequestError.MALFORMED

    def test_more_cpu_than_any_node_has_is_capped(self) -> None:
        parsed = registry.read_pod(pod(GPUTILE | {"cpu": "100E", "memory": "999E"}))
        assert isinstance(parsed, PodRequest)
        assert max(parsed.cpu, parsed.memory) <= 2**48

    @pytest.mark.parametrize("priority", ["high", "-7"])
    def test_an_invalid_priority_is_rejected_before_the_grant_is_written(self, priority: str) -> None:
        parsed = registry.read_pod(pod({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 1, "nvidia.com/priority": priority}))
        assert isinstance(parsed, BadRequest)

    def test_a_record_of_more_than_any_card_is_rejected(self) -> None:
        record = {"hami.io/vgpu-devices-allocated": "GPU-n1-0,NVIDIA,999999999,1:;"}
        bound = convert_pod(pod({"nvidia.com/gpu": 1}, annotations=record, on="n1"))
        assert not isinstance(bound, BadRequest)
        assert records.read_grant(bound, CARDS) is None


@pytest.mark.parametrize(
    ("limits", "is_too_many"),
    [
        pytest.param([{GPU: 1, MEMORY: 1}] * 64, False, id="64-may-request"),
        pytest.param([{GPU: 1, MEMORY: 1}] * 65, True, id="65-may-not"),
        pytest.param([{GPU: 1, MEMORY: 1}] * 64 + [{"cpu": 1}] * 1000, False, id="others-do-not-count"),
        pytest.param([{GPU: 1, MEMORY: 1}] * 64 + [{GPU: 0}] * 100, False, id="a-request-of-0-does-not-count"),
        pytest.param([{gpushare.MEM: 1}] * 65, True, id="in-every-dialect"),
        pytest.param([{GPU: 1}] * 40 + [{gpushare.MEM: 1}] * 40, True, id="in-several-at-once"),
    ],
)
@pytest.mark.parametrize("kind", ["containers", "initContainers"])
def test_more_than_64_containers_with_gpus_are_too_many(
    limits: list[dict[str, int]], is_too_many: bool, kind: str
) -> None:
    manifest = pod(*limits) if kind == "containers" else pod({"cpu": 1}, init=tuple(limits))
    parsed = registry.read_pod(manifest)
    assert (isinstance(parsed, BadRequest) and parsed.code is RequestError.TOO_MANY_CONTAINERS) == is_too_many


# ---- slots ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dialect", "slots"),
    [
        *(pytest.param(name, 1, id=f"{name}-counts-slots") for name in ("gputile", "nvidia", "hami", "vgpu")),
        *(pytest.param(name, 0, id=f"{name}-does-not") for name in ("gpushare", "nano", "vcuda", "unknown", "")),
    ],
)
def test_slots_of_one_tile(dialect: str, slots: int) -> None:
    assert registry.slots_of(dialect) == slots


def test_a_nomination_counts_the_slots_of_its_dialect() -> None:
    containers = (ContainerGrant("c0", (Tile("GPU-0", 0, 1000, 10),)),)
    grant = Grant(pod="uid-1", node="n1", dialect="vcuda", containers=containers, slots=0)
    nomination = Nomination(grant, until=1, victims=("uid-2",))
    nominated = pod(annotations={NOMINATION: write_nomination(nomination, at=1)})
    assert registry.read_nomination(object_of(nominated)) == nomination
