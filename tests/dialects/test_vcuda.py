"""tencent.com/vcuda-* of gpu-admission and gpu-manager, and nvidia.com/vcuda-* of the fork."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gputile.dialects import gputile, records, registry, vcuda
from gputile.model.cards import Card
from gputile.model.grants import ContainerGrant, Grant
from gputile.model.refusals import NodeReason, RequestError
from gputile.model.requests import Match, ModelRule, Role
from gputile.testing.builders import ask, node, pod
from tests.dialects.shortcuts import (
    AT,
    Manifest,
    Rejected,
    Want,
    assert_round_trip,
    constraints,
    expect,
    grant_context,
    held,
    no_request,
    node_of,
    object_of,
    pods,
    raw_node,
    read,
    tile,
)

CORE, MEMORY = "tencent.com/vcuda-core", "tencent.com/vcuda-memory"
FORK_CORE, FORK_MEMORY = "nvidia.com/vcuda-core", "nvidia.com/vcuda-memory"


@pytest.mark.parametrize(
    ("limits", "want"),
    [
        pytest.param({CORE: 30, MEMORY: 4}, ask(1024, 30, name="c0"), id="tencent-memory-is-blocks-of-256-MiB"),
        pytest.param({FORK_CORE: 30, FORK_MEMORY: 1024}, ask(1024, 30, name="c0"), id="fork-memory-is-MiB"),
        pytest.param({CORE: 99, MEMORY: 1}, ask(256, 99, name="c0"), id="99-cores-are-a-share"),
        pytest.param(
            {CORE: 100, MEMORY: 1}, ask(whole=True, name="c0"), id="100-cores-are-a-whole-card-memory-ignored"
        ),
        pytest.param({CORE: 200}, ask(whole=True, cards=2, name="c0"), id="200-cores-are-two-whole-cards"),
        pytest.param(
            {CORE: 150},
            Rejected(RequestError.OUT_OF_RANGE, "or 100 or 200 for whole GPUs"),
            id="150-cores-are-refused-and-100-or-200-offered",
        ),
        pytest.param(
            {FORK_CORE: 250}, Rejected(RequestError.OUT_OF_RANGE, "or 200 or 300 for whole GPUs"), id="in-the-fork-too"
        ),
        pytest.param(
            {CORE: 30},
            ask(percent=30, cores=30, name="c0"),
            id="cores-without-memory-get-the-same-part-of-the-memory",
        ),
        pytest.param(
            {MEMORY: 4},
            Rejected(RequestError.NO_DEVICE_RESOURCE, "add `tencent.com/vcuda-core: 10`"),
            id="memory-alone-allocates-no-card",
        ),
        pytest.param(
            {FORK_MEMORY: 4},
            Rejected(RequestError.NO_DEVICE_RESOURCE, "add `nvidia.com/vcuda-core: 10`"),
            id="fork-memory-alone-allocates-no-card",
        ),
        pytest.param({CORE: 0, MEMORY: 0}, None, id="nothing-of-both-is-no-gpu"),
        pytest.param(
            {CORE: 10, FORK_CORE: 10},
            Rejected(RequestError.MIXED_DIALECTS, "use one of them"),
            id="both-names-are-refused",
        ),
        pytest.param(
            {CORE: 10, MEMORY: 5000}, Rejected(RequestError.OUT_OF_RANGE, "256 MiB"), id="blocks-beyond-any-card"
        ),
    ],
)
def test_one_container(limits: dict[str, Any], want: Want) -> None:
    expect(pod(limits), "vcuda", want)


def test_each_container_has_its_own_request() -> None:
    manifest = pod({CORE: 20, MEMORY: 4}, {}, {CORE: 30, MEMORY: 8}, init=({CORE: 10, MEMORY: 1},))
    want = (
        ask(256, 10, name="init-0", role=Role.INIT),
        ask(1024, 20, name="c0"),
        no_request("c1"),
        ask(2048, 30, name="c2"),
    )
    expect(manifest, "vcuda", want)
    assert read(manifest).together is False


def test_cores_without_memory_are_a_warning() -> None:
    (warning,) = read(pod({CORE: 30})).warnings
    assert "it gets 30 % of the GPU's memory" in warning


def test_the_two_container_pod_with_use_gputype() -> None:
    manifest = pod(
        {FORK_CORE: 20, FORK_MEMORY: 1024},
        {FORK_CORE: 30, FORK_MEMORY: 2048},
        annotations={"nvidia.com/use-gputype": "t4,V100", "nvidia.com/nouse-gputype": "P40"},
    )
    parsed_constraints = constraints(manifest)
    assert parsed_constraints.models == (ModelRule(("t4", "V100"), Match.SUBSTRING),)
    assert parsed_constraints.not_models == (ModelRule(("P40",), Match.SUBSTRING),)
    assert [
        model for model in ("Tesla T4", "tesla v100-sxm2", "Tesla P40") if parsed_constraints.accepts_model(model)
    ] == [
        "Tesla T4",
        "tesla v100-sxm2",
    ]


@pytest.mark.parametrize(
    ("prefix", "limits", "value", "want"),
    [
        pytest.param(
            "tencent.com", {CORE: 30, MEMORY: 1}, "60", ask(256, 30, name="c0"), id="a-ceiling-is-not-a-share"
        ),
        pytest.param(
            "tencent.com",
            {CORE: 30, MEMORY: 1},
            "most",
            Rejected(RequestError.BAD_ANNOTATION, 'write a percentage such as "60"'),
            id="words-are-refused",
        ),
        pytest.param(
            "nvidia.com",
            {FORK_CORE: 30, FORK_MEMORY: 1},
            "-1",
            Rejected(RequestError.BAD_ANNOTATION, "write a percentage"),
            id="negative-is-refused",
        ),
        pytest.param(
            "nvidia.com", {CORE: 30, MEMORY: 1}, "most", ask(256, 30, name="c0"), id="the-other-names-are-not-looked-at"
        ),
    ],
)
def test_vcuda_core_limit(prefix: str, limits: dict[str, Any], value: str, want: Want) -> None:
    expect(pod(limits, annotations={f"{prefix}/vcuda-core-limit": value}), "vcuda", want)


# ---- grants ---------------------------------------------------------------------------------------------------------

CARDS = node().cards(3, "V100", "32Gi").node()


@pytest.mark.parametrize(
    ("manifest", "containers", "annotations", "labels"),
    [
        pytest.param(
            pod({CORE: 20, MEMORY: 4}),
            [held("c0", tile(2, 1024, 20))],
            {
                "tencent.com/predicate-gpu-idx-0": "2",
                "tencent.com/predicate-node": "n1",
                "tencent.com/predicate-time": str(AT),
                "tencent.com/gpu-assigned": "false",
            },
            {},
            id="tencent",
        ),
        pytest.param(
            pod({}, {FORK_CORE: 200}),
            [held("c1", tile(0, 32768, 100), tile(1, 32768, 100))],
            {
                "nvidia.com/predicate-gpu-idx-1": "0,1",
                "nvidia.com/predicate-node": "n1",
                "nvidia.com/predicate-time": str(AT),
                "nvidia.com/gpu-assigned": "false",
            },
            {"tydic.io/bind-time": str(AT), "tydic.io/bind-phase": "allocating"},
            id="fork-joins-indices-and-labels-the-bind-phase",
        ),
        pytest.param(
            pod({CORE: 20, MEMORY: 4}, init=({CORE: 10, MEMORY: 1},)),
            [held("init-0", tile(0, 256, 10), role=Role.INIT), held("c0", tile(0, 1024, 20))],
            {
                "tencent.com/predicate-gpu-idx-0": "0",
                "tencent.com/predicate-gpu-idx-1": "0",
                "tencent.com/predicate-node": "n1",
                "tencent.com/predicate-time": str(AT),
                "tencent.com/gpu-assigned": "false",
            },
            {},
            id="the-number-is-the-position-among-spec-containers-and-init-containers-follow",
        ),
    ],
)
def test_written_grant(
    manifest: Manifest, containers: list[ContainerGrant], annotations: dict[str, str], labels: dict[str, str]
) -> None:
    context = grant_context(manifest, CARDS, *containers)
    written = vcuda.write_grant(context)
    assert (written.annotations, written.labels) == (annotations, labels)
    assert written.env == {
        entry.container: {"NVIDIA_VISIBLE_DEVICES": ",".join(t.uuid for t in entry.tiles)} for entry in containers
    }
    both = registry.write_grant(context)
    assert both.annotations == annotations | gputile.write_grant(context).annotations
    assert (both.labels, both.env) == (written.labels, written.env)


@pytest.mark.parametrize(
    ("limits", "annotations", "want"),
    [
        pytest.param(
            {CORE: 20, MEMORY: 4},
            {"tencent.com/predicate-gpu-idx-0": "1", "tencent.com/gpu-assigned": "true"},
            (held("c0", tile(1, 1024, 20)),),
            id="a-share",
        ),
        pytest.param(
            {CORE: 200},
            {"tencent.com/predicate-gpu-idx-0": "1,2"},
            (held("c0", tile(1, 32768, 100), tile(2, 32768, 100)),),
            id="whole-cards-hold-all-memory-and-100-cores-of-each",
        ),
        pytest.param(
            {CORE: 200},
            {"tencent.com/predicate-gpu-idx-0": "1"},
            (held("c0", tile(1, 32768, 100)),),
            id="too-few-indices-count-as-far-as-they-go",
        ),
        pytest.param(
            {CORE: 20, MEMORY: 4},
            {"nvidia.com/predicate-gpu-idx-0": "1"},
            (held("c0", tile(1, 1024, 20)),),
            id="the-other-prefix",
        ),
        pytest.param({CORE: 20, MEMORY: 4}, {}, None, id="no-record"),
    ],
)
def test_records_of_the_original_are_read(
    limits: dict[str, Any], annotations: dict[str, str], want: tuple[ContainerGrant, ...] | None
) -> None:
    parsed_grant = records.read_grant(object_of(pod(limits, annotations=annotations, on="n1")), CARDS)
    grant = None if want is None else Grant(pod="uid-1", node="n1", dialect="vcuda", containers=want, slots=0)
    assert parsed_grant == grant


CORES = st.one_of(st.integers(1, 40), st.sampled_from([100, 200]))
EDITIONS = st.sampled_from(
    [
        st.fixed_dictionaries({CORE: CORES}, optional={MEMORY: st.integers(0, 20)}),
        st.fixed_dictionaries({FORK_CORE: CORES}, optional={FORK_MEMORY: st.integers(0, 5000)}),
    ]
)


@settings(max_examples=50)
@given(EDITIONS.flatmap(pods))
def test_a_written_grant_is_read_back(manifest: Manifest) -> None:
    assert_round_trip(vcuda, manifest)


# ---- nodes ----------------------------------------------------------------------------------------------------------


def averages(count: int, memory: int, model: str = "") -> tuple[Card, ...]:
    return tuple(Card(index=n, uuid=f"n1#{n}", memory=memory, model=model) for n in range(count))


@pytest.mark.parametrize(
    ("capacity", "labels", "want"),
    [
        pytest.param({CORE: 200, MEMORY: 120}, {}, averages(2, 15360), id="blocks-of-256-MiB-divided-by-the-cards"),
        pytest.param({CORE: 200, MEMORY: 119}, {}, averages(2, 15232), id="blocks-are-counted-over-the-whole-node"),
        pytest.param({FORK_CORE: 200, FORK_MEMORY: 30218}, {}, averages(2, 15109), id="the-fork-counts-MiB"),
        pytest.param({CORE: 99, MEMORY: 120}, {}, (), id="less-than-100-cores-are-no-card-and-no-crash"),
        pytest.param(
            {CORE: 100, MEMORY: 60},
            {"gaia.tencent.com/gpu-model": "P40"},
            averages(1, 15360, "P40"),
            id="the-model-label-names-the-cards",
        ),
        pytest.param(
            {CORE: 100, MEMORY: 60},
            {"tkestack.io/gpu-model": "P40"},
            averages(1, 15360, "P40"),
            id="the-documented-model-label-too",
        ),
        pytest.param(
            {FORK_CORE: 100, FORK_MEMORY: 15360},
            {"gaia.nvidia.com/gpu-model": "Tesla-P40"},
            averages(1, 15360, "Tesla-P40"),
            id="the-forks-model-label-too",
        ),
    ],
)
def test_bare_capacities(capacity: dict[str, Any], labels: dict[str, str], want: tuple[Card, ...]) -> None:
    parsed_node = node_of(raw_node(capacity, labels=labels))
    assert (parsed_node.cards, parsed_node.fault) == (want, "")


def register(*cards: dict[str, Any]) -> dict[str, str]:
    return {"tydic.io/nvidia-device-register": msgspec.json.encode(list(cards)).decode()}


T4 = {"id": "GPU-a", "core": 100, "memory": 15109, "type": "Tesla T4", "isMig": False, "capability": 75, "health": True}


@pytest.mark.parametrize(
    ("annotations", "want"),
    [
        pytest.param(
            register(T4, T4 | {"id": "GPU-b", "memory": 32768, "type": "Tesla V100"}),
            (
                Card(index=0, uuid="GPU-a", memory=15109, model="Tesla T4"),
                Card(index=1, uuid="GPU-b", memory=32768, model="Tesla V100"),
            ),
            id="the-position-in-the-array-is-the-index-and-sizes-may-differ",
        ),
        pytest.param(
            register(T4 | {"health": False}),
            (Card(index=0, uuid="GPU-a", memory=15109, model="Tesla T4", healthy=False),),
            id="an-unhealthy-card-is-kept-as-such",
        ),
        pytest.param(
            register(T4 | {"isMig": True}),
            (Card(index=0, uuid="GPU-a", memory=15109, model="Tesla T4", mode="mig"),),
            id="a-card-in-MIG-mode-is-marked",
        ),
    ],
)
def test_the_forks_register(annotations: dict[str, str], want: tuple[Card, ...]) -> None:
    parsed_node = node_of(raw_node({FORK_CORE: 200, FORK_MEMORY: 99}, annotations=annotations))
    assert (parsed_node.cards, parsed_node.fault) == (want, "")


@pytest.mark.parametrize(
    "annotations",
    [
        pytest.param({"tydic.io/nvidia-device-register": "x"}, id="no-json"),
        pytest.param({"tydic.io/nvidia-device-register": "{}"}, id="another-shape"),
        pytest.param(register({"core": 100}), id="a-card-without-id"),
        pytest.param(register(T4, T4), id="a-uuid-twice"),
    ],
)
def test_a_broken_register_puts_the_node_out_of_use(annotations: dict[str, str]) -> None:
    assert node_of(raw_node({FORK_CORE: 200}, annotations=annotations)).fault == NodeReason.BAD_INVENTORY


@pytest.mark.parametrize(
    "label",
    [
        pytest.param("gaia.tencent.com/gpu-pool", id="shipped"),
        pytest.param("tkestack.io/gpu-pool", id="documented"),
    ],
)
def test_the_pool_label_is_the_nodes_pool(label: str) -> None:
    assert node_of(raw_node({CORE: 100}, labels={label: "research"})).pool == "research"
