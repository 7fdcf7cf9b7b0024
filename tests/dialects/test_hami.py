"""nvidia.com/gpu with gpumem, gpumem-percentage or gpucores beside it."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gputile.dialects import gputile, hami, records, registry
from gputile.dialects.settings import DEFAULTS, DialectSettings
from gputile.model.cards import Card
from gputile.model.grants import ContainerGrant, Grant
from gputile.model.refusals import NodeReason, RequestError
from gputile.model.requests import ContainerRequest, Role
from gputile.testing.builders import node, pod
from tests.dialects.shortcuts import (
    Manifest,
    Rejected,
    Want,
    assert_round_trip,
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

GPU, MEM, PERCENT = "nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpumem-percentage"
CORES, PRIORITY = "nvidia.com/gpucores", "nvidia.com/priority"
TENFOLD = DialectSettings(hami_memory_factor=10)


def c0(cards: int = 1, *, mem: int | None = None, percent: int | None = None, cores: int = 0) -> ContainerRequest:
    """A container's ask; in HAMi all cores are exclusive."""
    return ContainerRequest(
        container="c0", cards=cards, memory=mem, memory_percent=percent, cores=cores, exclusive=cores == 100
    )


@pytest.mark.parametrize(
    ("limits", "want"),
    [
        pytest.param({GPU: 1, MEM: 3000}, c0(mem=3000), id="gpumem-is-MiB-and-reserves-no-cores"),
        pytest.param({GPU: 2, MEM: 3000, CORES: 30}, c0(2, mem=3000, cores=30), id="memory-and-cores-are-per-card"),
        pytest.param({GPU: 1, PERCENT: 50}, c0(percent=50), id="a-percentage-is-of-the-chosen-card"),
        pytest.param({GPU: 1, PERCENT: 1}, c0(percent=1), id="one-percent-is-the-least"),
        pytest.param({GPU: 1, MEM: 3000, PERCENT: 50}, c0(mem=3000), id="percentages-are-ignored-when-gpumem-is-set"),
        pytest.param({GPU: 1, MEM: 0, PERCENT: 50}, c0(percent=50), id="zero-gpumem-leaves-it-to-the-percentage"),
        pytest.param({GPU: 1, MEM: 3000, PERCENT: 0}, c0(mem=3000), id="zero-percent-is-unset"),
        pytest.param(
            {GPU: 1, PERCENT: 100}, c0(percent=100, cores=100), id="all-memory-without-cores-is-an-exclusive-card"
        ),
        pytest.param({GPU: 1, PERCENT: 0, CORES: 30}, c0(percent=100, cores=30), id="no-memory-is-all-of-it"),
        pytest.param({GPU: 1, CORES: 30}, c0(percent=100, cores=30), id="cores-alone-take-all-memory"),
        pytest.param(
            {GPU: 1, MEM: 3000, CORES: 100}, c0(mem=3000, cores=100), id="100-gpucores-make-the-card-exclusive"
        ),
        pytest.param({GPU: 1, MEM: 3000, CORES: 150}, c0(mem=3000, cores=100), id="150-gpucores-are-clamped-to-100"),
        pytest.param({GPU: 1, MEM: 3000, CORES: 0}, c0(mem=3000), id="zero-gpucores-beside-memory-reserve-none"),
        pytest.param({GPU: 1, PERCENT: 100, CORES: 0}, c0(percent=100), id="zero-gpucores-written-down-are-not-absent"),
        pytest.param({GPU: 1, CORES: 0}, c0(percent=100), id="gpucores-of-zero-beside-a-gpu-are-hami-too"),
        pytest.param({GPU: 1, PRIORITY: 1}, c0(percent=100, cores=100), id="a-priority-is-hami"),
        pytest.param({GPU: 1, PRIORITY: 0}, c0(percent=100, cores=100), id="priority-0-is-high-and-is-hami-too"),
        pytest.param({GPU: "2", MEM: "3k"}, c0(2, mem=3000), id="quantities-may-be-strings-with-a-suffix"),
        pytest.param(
            {GPU: 1, PERCENT: 101}, Rejected(RequestError.OUT_OF_RANGE, "write 1 to 100"), id="101-percent-are-refused"
        ),
        pytest.param(
            {GPU: 1, PERCENT: -1},
            Rejected(RequestError.NEGATIVE, "write 0 or more"),
            id="a-negative-percentage-is-refused",
        ),
        pytest.param(
            {GPU: 1, MEM: 2**31},
            Rejected(RequestError.OUT_OF_RANGE, "write a plain number without Gi or Mi"),
            id="gpumem-must-fit-int32",
        ),
        pytest.param(
            {GPU: 1, MEM: "4Gi"},
            Rejected(RequestError.OUT_OF_RANGE, "write a plain number without Gi or Mi"),
            id="4Gi-of-MiB-are-a-mistake-in-the-unit",
        ),
        pytest.param(
            {MEM: 3000},
            Rejected(RequestError.NO_DEVICE_RESOURCE, "add `nvidia.com/gpu: 1`"),
            id="gpumem-alone-has-no-card",
        ),
        pytest.param(
            {PERCENT: 50},
            Rejected(RequestError.NO_DEVICE_RESOURCE, "add `nvidia.com/gpu: 1`"),
            id="nor-has-a-percentage",
        ),
        pytest.param(
            {CORES: 30}, Rejected(RequestError.NO_DEVICE_RESOURCE, "add `nvidia.com/gpu: 1`"), id="nor-have-cores"
        ),
        pytest.param({PRIORITY: 1}, None, id="a-priority-alone-requests-nothing"),
    ],
)
def test_one_container(limits: dict[str, Any], want: Want) -> None:
    expect(pod(limits), "hami", want)


@pytest.mark.parametrize(
    ("limits", "requests", "want"),
    [
        pytest.param({GPU: 1, MEM: 1000}, {GPU: 2, MEM: 2000}, c0(mem=1000), id="limits-win-over-requests"),
        pytest.param({}, {GPU: 2, MEM: 2000}, c0(2, mem=2000), id="requests-count-where-limits-lack-the-resource"),
        pytest.param({GPU: 1}, {MEM: 2000}, c0(mem=2000), id="each-resource-is-looked-up-by-itself"),
        pytest.param({GPU: 1, MEM: 1000, CORES: 0}, {CORES: 50}, c0(mem=1000), id="a-limit-of-zero-wins-too"),
    ],
)
def test_limits_else_requests(limits: dict[str, Any], requests: dict[str, Any], want: Want) -> None:
    manifest = pod(limits)
    manifest["spec"]["containers"][0]["resources"]["requests"] = requests
    expect(manifest, "hami", want)


def test_the_memory_factor_multiplies_gpumem() -> None:
    expect(pod({GPU: 1, MEM: 300}), "hami", c0(mem=3000), TENFOLD)


def test_clamped_cores_are_a_warning() -> None:
    (warning,) = read(pod({GPU: 1, MEM: 3000, CORES: 150})).warnings
    assert "150" in warning
    assert "gputile uses 100, the whole GPU" in warning


def test_one_share_makes_the_whole_pod_a_hami_pod() -> None:
    alone = ContainerRequest(container="c0", cards=1, memory_percent=100, cores=100, exclusive=True)
    share = ContainerRequest(container="c2", cards=1, memory=3000)
    expect(pod({GPU: 1}, {}, {GPU: 1, MEM: 3000}), "hami", (alone, no_request("c1"), share))


@pytest.mark.parametrize(
    ("value", "want"),
    [
        pytest.param("1,2,3", c0(mem=1), id="three-numbers"),
        pytest.param("slot=1, core=0, memory=0", c0(mem=1), id="with-their-names"),
        pytest.param("1,2", Rejected(RequestError.BAD_ANNOTATION, "write three numbers"), id="two-are-too-few"),
        pytest.param("1,2,3,4", Rejected(RequestError.BAD_ANNOTATION, "write three numbers"), id="four-are-too-many"),
        pytest.param("0,0,0", Rejected(RequestError.BAD_ANNOTATION, "one of them above 0"), id="one-must-be-positive"),
        pytest.param("1,-2,3", Rejected(RequestError.BAD_ANNOTATION, "write three numbers"), id="none-may-be-negative"),
    ],
)
def test_device_scoring_weights(value: str, want: Want) -> None:
    expect(pod({GPU: 1, MEM: 1}, annotations={"hami.io/device-scoring-weights": value}), "hami", want)


# ---- grants ---------------------------------------------------------------------------------------------------------

CARDS = node().cards(2, "V100", "32Gi").node()


def marks(record: str) -> dict[str, str]:
    return {
        "hami.io/vgpu-devices-allocated": record,
        "hami.io/vgpu-devices-to-allocate": record,
        "hami.io/vgpu-node": "n1",
        "hami.io/vgpu-time": "1700000000",
        "hami.io/bind-phase": "allocating",
        "hami.io/bind-time": "1700000000",
    }


@pytest.mark.parametrize(
    ("manifest", "containers", "record", "env"),
    [
        pytest.param(
            pod({GPU: 2, MEM: 3000, CORES: 30}),
            [held("c0", tile(0, 3000, 30), tile(1, 3000, 30))],
            "GPU-n1-0,NVIDIA,3000,30:GPU-n1-1,NVIDIA,3000,30:;",
            {
                "c0": {
                    "NVIDIA_VISIBLE_DEVICES": "GPU-n1-0,GPU-n1-1",
                    "CUDA_DEVICE_MEMORY_LIMIT_0": "3000m",
                    "CUDA_DEVICE_MEMORY_LIMIT_1": "3000m",
                    "CUDA_DEVICE_SM_LIMIT": "30",
                }
            },
            id="a-device-ends-with-a-colon-and-a-container-with-a-semicolon",
        ),
        pytest.param(
            pod({}, {GPU: 1, MEM: 3000, PRIORITY: 1}, init=({GPU: 1, MEM: 10},)),
            [held("init-0", tile(0, 10), role=Role.INIT), held("c1", tile(1, 3000))],
            "GPU-n1-0,NVIDIA,10,0:;;GPU-n1-1,NVIDIA,3000,0:;",
            {
                "init-0": {
                    "NVIDIA_VISIBLE_DEVICES": "GPU-n1-0",
                    "CUDA_DEVICE_MEMORY_LIMIT_0": "10m",
                    "CUDA_DEVICE_SM_LIMIT": "0",
                },
                "c1": {
                    "NVIDIA_VISIBLE_DEVICES": "GPU-n1-1",
                    "CUDA_DEVICE_MEMORY_LIMIT_0": "3000m",
                    "CUDA_DEVICE_SM_LIMIT": "0",
                    "CUDA_TASK_PRIORITY": "1",
                },
            },
            id="init-first-and-a-container-without-cards-keeps-its-empty-entry",
        ),
        pytest.param(
            pod({GPU: 1, MEM: 3000, PRIORITY: 0}),
            [held("c0", tile(0, 3000))],
            "GPU-n1-0,NVIDIA,3000,0:;",
            {
                "c0": {
                    "NVIDIA_VISIBLE_DEVICES": "GPU-n1-0",
                    "CUDA_DEVICE_MEMORY_LIMIT_0": "3000m",
                    "CUDA_DEVICE_SM_LIMIT": "0",
                    "CUDA_TASK_PRIORITY": "0",
                }
            },
            id="priority-0-is-passed-on",
        ),
    ],
)
def test_written_grant(
    manifest: Manifest, containers: list[ContainerGrant], record: str, env: dict[str, dict[str, str]]
) -> None:
    context = grant_context(manifest, CARDS, *containers)
    written = hami.write_grant(context)
    assert written.annotations == marks(record)
    assert written.labels == {"hami.io/vgpu-node": "n1"}
    assert written.env == env
    both = registry.write_grant(context)
    assert both.annotations == written.annotations | gputile.write_grant(context).annotations
    assert (both.labels, both.env) == (written.labels, written.env)


@pytest.mark.parametrize(
    ("record", "want"),
    [
        pytest.param(
            "GPU-n1-1,NVIDIA,3000,30:;", (held("c0", tile(1, 3000, 30)),), id="the-record-has-memory-and-cores"
        ),
        pytest.param(
            ";GPU-n1-0,NVIDIA,5,0:;", (held("c1", tile(0, 5)),), id="an-empty-entry-is-a-container-without-cards"
        ),
        pytest.param(";;", None, id="an-empty-record-is-no-grant"),
    ],
)
def test_records_of_the_original_are_read(record: str, want: tuple[ContainerGrant, ...] | None) -> None:
    manifest = pod({GPU: 1, MEM: 1}, {}, annotations={"hami.io/vgpu-devices-allocated": record}, on="n1")
    grant = None if want is None else Grant(pod="uid-1", node="n1", dialect="hami", containers=want)
    assert records.read_grant(object_of(manifest), CARDS) == grant


@pytest.mark.parametrize(
    "record",
    [
        pytest.param("GPU-n1-1,NVIDIA,3000:;", id="too-few-fields"),
        pytest.param("GPU-n1-1,NVIDIA,much,30:;", id="memory-in-words"),
        pytest.param("GPU-n1-1,NVIDIA,-3,30:;", id="negative-memory"),
    ],
)
def test_a_broken_record_does_not_count(record: str) -> None:
    manifest = pod({GPU: 1, MEM: 1}, annotations={"hami.io/vgpu-devices-allocated": record}, on="n1")
    assert records.read_grant(object_of(manifest), CARDS) is None


SHARE = st.fixed_dictionaries(
    {GPU: st.integers(1, 2), MEM: st.integers(1, 900)}, optional={CORES: st.sampled_from([0, 1, 20, 30, 100, 150])}
)
PART = st.fixed_dictionaries(
    {GPU: st.integers(1, 2), PERCENT: st.integers(1, 40)}, optional={CORES: st.integers(0, 30)}
)


@settings(max_examples=50)
@given(st.one_of(pods(SHARE), pods(PART)), st.sampled_from([DEFAULTS, TENFOLD]))
def test_a_written_grant_is_read_back(manifest: Manifest, factor: DialectSettings) -> None:
    assert_round_trip(hami, manifest, factor)


# ---- nodes ----------------------------------------------------------------------------------------------------------

REGISTER = "hami.io/node-nvidia-register"


def register(*cards: dict[str, Any]) -> dict[str, str]:
    return {REGISTER: msgspec.json.encode(list(cards)).decode()}


FULL = {
    "id": "GPU-b",
    "index": 1,
    "count": 10,
    "devmem": 32768,
    "devcore": 100,
    "type": "NVIDIA-Tesla V100",
    "numa": 1,
    "mode": "hami-core",
    "health": True,
}
SECOND = Card(index=1, uuid="GPU-b", memory=32768, model="NVIDIA-Tesla V100", numa=1, mode="hami-core")


@pytest.mark.parametrize(
    ("annotations", "want"),
    [
        pytest.param(register(FULL), (SECOND,), id="json-with-every-field"),
        pytest.param(
            register({"id": "GPU-a", "count": 10, "devmem": 15109, "devcore": 100, "type": "T4", "health": True}, FULL),
            (Card(index=0, uuid="GPU-a", memory=15109, model="T4", numa=0), SECOND),
            id="json-omits-index-0-and-numa-0",
        ),
        pytest.param(
            register({"id": "GPU-a", "count": 10, "devmem": 15109, "devcore": 100}),
            (Card(index=0, uuid="GPU-a", memory=15109, numa=0, healthy=False),),
            id="json-omits-health-when-it-is-false",
        ),
        pytest.param(
            register(FULL | {"mode": "mig", "migProfiles": [{"name": "1g.5gb", "memoryMB": 4864}]}),
            (Card(index=1, uuid="GPU-b", memory=32768, model="NVIDIA-Tesla V100", numa=1, mode="mig"),),
            id="json-with-mig-profiles",
        ),
        pytest.param(
            {REGISTER: "GPU-a,10,15109,100,NVIDIA-T4,0,true:GPU-b,5,32768,100,NVIDIA-V100,1,false:"},
            (
                Card(index=0, uuid="GPU-a", memory=15109, model="NVIDIA-T4", numa=0, slots=10),
                Card(index=1, uuid="GPU-b", memory=32768, model="NVIDIA-V100", numa=1, slots=5, healthy=False),
            ),
            id="old-text-of-7-fields-has-the-position-as-index",
        ),
        pytest.param(
            {REGISTER: "GPU-a,10,15109,100,NVIDIA-T4,0,true,1,mps:GPU-b,10,32768,100,NVIDIA-V100,0,true,0,hami-core:"},
            (
                Card(index=1, uuid="GPU-a", memory=15109, model="NVIDIA-T4", numa=0, mode="mps"),
                Card(index=0, uuid="GPU-b", memory=32768, model="NVIDIA-V100", numa=0, mode="hami-core"),
            ),
            id="old-text-of-9-fields-has-index-and-mode",
        ),
        pytest.param(
            register(FULL) | {"hami.io/device-cordon": "GPU-x, GPU-b"},
            (msgspec.structs.replace(SECOND, cordoned=True),),
            id="a-card-named-in-the-cordon-is-cordoned",
        ),
        pytest.param({REGISTER: "[]"}, (), id="an-empty-register"),
        pytest.param({REGISTER: ""}, (), id="no-register"),
    ],
)
def test_read_node(annotations: dict[str, str], want: tuple[Card, ...]) -> None:
    parsed_node = node_of(raw_node({GPU: 0}, annotations=annotations))
    assert (parsed_node.cards, parsed_node.fault) == (want, "")


@pytest.mark.parametrize(
    "annotations",
    [
        pytest.param({REGISTER: "[{]"}, id="half-json"),
        pytest.param({REGISTER: "[1]"}, id="json-of-another-shape"),
        pytest.param(register({"index": 1}), id="json-without-id"),
        pytest.param({REGISTER: "GPU-a,10,15109,100,T4,0,true,1:"}, id="text-of-8-fields"),
        pytest.param({REGISTER: "GPU-a,ten,15109,100,T4,0,true:"}, id="text-with-a-word-for-a-number"),
        pytest.param(register(FULL, FULL | {"index": 2}), id="a-uuid-twice"),
        pytest.param(register(FULL, FULL | {"id": "GPU-c"}), id="an-index-twice"),
    ],
)
def test_a_broken_register_puts_the_node_out_of_use(annotations: dict[str, str]) -> None:
    assert node_of(raw_node({GPU: 8}, annotations=annotations)).fault == NodeReason.BAD_INVENTORY


@pytest.mark.parametrize(
    ("scores", "links"),
    [
        pytest.param(
            '[{"uuid":"GPU-a","score":{"GPU-b":90}},{"uuid":"GPU-b","score":{"GPU-a":90}}]',
            ((0, 90), (90, 0)),
            id="pair-scores-are-links",
        ),
        pytest.param('[{"uuid":"GPU-z","score":{"GPU-b":90}}]', ((0, 0), (0, 0)), id="unknown-cards-are-ignored"),
        pytest.param("{", (), id="unreadable-scores-only-cost-the-preference"),
    ],
)
def test_scores(scores: str, links: tuple[tuple[int, ...], ...]) -> None:
    cards = register({"id": "GPU-a", "devmem": 1}, FULL)
    parsed_node = node_of(raw_node(annotations=cards | {"hami.io/node-nvidia-score": scores}))
    assert (parsed_node.links, parsed_node.fault) == (links, "")
