"""nano-gpu and elastic-gpu in three generations."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gputile.dialects import gputile, nano, records, registry
from gputile.dialects.settings import DEFAULTS, DialectSettings
from gputile.model.cards import Card
from gputile.model.grants import ContainerGrant, Grant
from gputile.model.refusals import RequestError
from gputile.testing.builders import ask, node, pod
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

CORE_1, MEMORY_1 = "nano-gpu.io/gpu-core", "nano-gpu.io/gpu-memory"
PERCENT = "nano-gpu/gpu-percent"
CORE_3, MEMORY_3 = "elasticgpu.io/gpu-core", "elasticgpu.io/gpu-memory"
IN_MIB = DialectSettings(nano_unit="MiB")


@pytest.mark.parametrize(
    ("limits", "want"),
    [
        pytest.param({CORE_1: 20, MEMORY_1: 1}, ask("1Gi", 20, name="c0"), id="generation-1-memory-reads-as-GiB"),
        pytest.param({CORE_1: 20}, ask(0, 20, name="c0"), id="generation-1-cores-without-memory-reserve-none"),
        pytest.param({CORE_1: 100, MEMORY_1: 1}, ask(whole=True, name="c0"), id="generation-1-100-is-a-whole-card"),
        pytest.param(
            {PERCENT: 30}, ask(percent=30, cores=30, name="c0"), id="generation-2-percent-is-cores-and-memory"
        ),
        pytest.param({PERCENT: 100}, ask(whole=True, name="c0"), id="generation-2-100-percent-is-a-whole-card"),
        pytest.param({CORE_3: 20, MEMORY_3: 4096}, ask(4096, 20, name="c0"), id="generation-3-memory-is-MiB"),
        pytest.param({CORE_3: 20}, ask(0, 20, name="c0"), id="generation-3-cores-without-memory-reserve-none"),
        pytest.param({CORE_3: 99, MEMORY_3: 1}, ask(1, 99, name="c0"), id="99-cores-are-a-share-of-one-card"),
        pytest.param({CORE_3: 100, MEMORY_3: 1}, ask(whole=True, name="c0"), id="whole-cards-ignore-their-memory"),
        pytest.param({CORE_3: 300}, ask(whole=True, cards=3, name="c0"), id="300-cores-are-three-whole-cards"),
        pytest.param({CORE_3: 150}, ask(whole=True, name="c0"), id="150-cores-are-rounded-down-to-one-card"),
        pytest.param({CORE_3: 0, MEMORY_3: 0}, None, id="nothing-of-both-is-no-gpu"),
        pytest.param(
            {MEMORY_3: 1024},
            Rejected(RequestError.NO_DEVICE_RESOURCE, "add `elasticgpu.io/gpu-core: 1`"),
            id="generation-3-memory-alone-allocates-no-card",
        ),
        pytest.param(
            {MEMORY_1: 1},
            Rejected(RequestError.NO_DEVICE_RESOURCE, "add `nano-gpu.io/gpu-core: 1`"),
            id="generation-1-memory-alone-allocates-no-card",
        ),
        pytest.param(
            {CORE_1: 10, CORE_3: 10},
            Rejected(RequestError.MIXED_DIALECTS, "use one of them"),
            id="two-generations-in-one-pod-are-refused",
        ),
    ],
)
def test_one_container(limits: dict[str, Any], want: Want) -> None:
    expect(pod(limits), "nano", want)


@pytest.mark.parametrize(
    ("limits", "want"),
    [
        pytest.param({CORE_1: 20, MEMORY_1: 512}, ask(512, 20, name="c0"), id="generation-1-follows-the-setting"),
        pytest.param({CORE_3: 20, MEMORY_3: 512}, ask(512, 20, name="c0"), id="generation-3-is-MiB-anyway"),
    ],
)
def test_the_memory_unit_of_generation_1_is_a_setting(limits: dict[str, Any], want: Want) -> None:
    expect(pod(limits), "nano", want, IN_MIB)


def test_generation_3_does_not_follow_the_unit_setting() -> None:
    expect(pod({CORE_3: 20, MEMORY_3: 512}), "nano", ask(512, 20, name="c0"), DialectSettings(nano_unit="GiB"))


def test_rounding_down_is_a_warning() -> None:
    (warning,) = read(pod({CORE_3: 250})).warnings
    assert "250" in warning
    assert "rounded down to 2 whole" in warning


def test_whole_hundreds_need_no_warning() -> None:
    assert read(pod({CORE_3: 200})).warnings == ()


def test_each_container_has_its_own_request() -> None:
    manifest = pod({CORE_3: 20, MEMORY_3: 1024}, {}, {CORE_3: 100})
    expect(manifest, "nano", (ask(1024, 20, name="c0"), no_request("c1"), ask(whole=True, name="c2")))
    assert read(manifest).together is False


# ---- grants ---------------------------------------------------------------------------------------------------------

CARDS = node().cards(3, "V100", "32Gi").node()


@pytest.mark.parametrize(
    ("manifest", "containers", "annotations", "labels"),
    [
        pytest.param(
            pod({CORE_1: 20, MEMORY_1: 1}, {}),
            [held("c0", tile(2, 1024, 20))],
            {"nano-gpu.io/gpu": "true", "nano-gpu.io/gpu-c0": "2"},
            {"nano-gpu.io/gpu": "true"},
            id="generation-1",
        ),
        pytest.param(
            pod({PERCENT: 20}, {}),
            [held("c0", tile(1, 6553, 20))],
            {"nano-gpu/assume": "true", "nano-gpu/container-c0": "1", "nano-gpu/container-c1": "-1"},
            {"nano-gpu/assume": "true"},
            id="generation-2-marks-containers-without-a-card",
        ),
        pytest.param(
            pod({CORE_3: 20, MEMORY_3: 1024}, {CORE_3: 200}, {}),
            [held("c0", tile(0, 1024, 20)), held("c1", tile(1, 32768, 100), tile(2, 32768, 100))],
            {"elasticgpu.io/assumed": "true", "elasticgpu.io/container-c0": "0", "elasticgpu.io/container-c1": "1,2"},
            {"elasticgpu.io/assumed": "true"},
            id="generation-3-joins-the-indices-of-whole-cards",
        ),
    ],
)
def test_written_grant(
    manifest: Manifest, containers: list[ContainerGrant], annotations: dict[str, str], labels: dict[str, str]
) -> None:
    context = grant_context(manifest, CARDS, *containers)
    written = nano.write_grant(context)
    assert (written.annotations, written.labels) == (annotations, labels)
    assert written.env == {
        entry.container: {"NVIDIA_VISIBLE_DEVICES": ",".join(t.uuid for t in entry.tiles)} for entry in containers
    }
    both = registry.write_grant(context)
    assert both.annotations == annotations | gputile.write_grant(context).annotations
    assert (both.labels, both.env) == (written.labels, written.env)


ONE = Grant(pod="uid-1", node="n1", dialect="nano", containers=(held("c0", tile(1, 1024, 20)),), slots=0)


@pytest.mark.parametrize(
    ("limits", "annotations", "want"),
    [
        pytest.param(
            {CORE_1: 20, MEMORY_1: 1},
            {"nano-gpu.io/gpu": "true", "nano-gpu.io/gpu-c0": "1"},
            ONE,
            id="generation-1",
        ),
        pytest.param(
            {CORE_3: 20, MEMORY_3: 1024},
            {"elasticgpu.io/assumed": "true", "elasticgpu.io/container-c0": "1"},
            ONE,
            id="generation-3",
        ),
        pytest.param(
            {CORE_3: 20, MEMORY_3: 1024}, {"elasticgpu.io/container-c0": "1"}, None, id="without-the-marker-no-grant"
        ),
        pytest.param(
            {CORE_3: 20, MEMORY_3: 1024},
            {"nano-gpu.io/gpu": "true", "nano-gpu.io/gpu-c0": "1"},
            ONE,
            id="another-generations-record-counts-with-the-amounts-that-the-pod-requests",
        ),
        pytest.param(
            {CORE_3: 20, MEMORY_3: 1024},
            {"elasticgpu.io/assumed": "true", "elasticgpu.io/container-c0": "-1"},
            None,
            id="minus-1-is-no-card",
        ),
    ],
)
def test_records_of_the_original_are_read(
    limits: dict[str, Any], annotations: dict[str, str], want: Grant | None
) -> None:
    assert records.read_grant(object_of(pod(limits, annotations=annotations, on="n1")), CARDS) == want


CORES = st.one_of(st.integers(1, 40), st.sampled_from([100, 150, 200]))
GENERATIONS = st.sampled_from(
    [
        st.fixed_dictionaries({CORE_1: CORES}, optional={MEMORY_1: st.integers(0, 5)}),
        st.fixed_dictionaries({PERCENT: CORES}),
        st.fixed_dictionaries({CORE_3: CORES}, optional={MEMORY_3: st.integers(0, 5000)}),
    ]
)


@settings(max_examples=75)
@given(GENERATIONS.flatmap(pods), st.sampled_from([DEFAULTS, IN_MIB]))
def test_a_written_grant_is_read_back(manifest: Manifest, unit: DialectSettings) -> None:
    assert_round_trip(nano, manifest, unit)


# ---- nodes ----------------------------------------------------------------------------------------------------------


def averages(count: int, memory: int) -> tuple[Card, ...]:
    return tuple(Card(index=n, uuid=f"n1#{n}", memory=memory) for n in range(count))


@pytest.mark.parametrize(
    ("capacity", "allocatable", "unit", "want"),
    [
        pytest.param({CORE_1: 200, MEMORY_1: 30}, {}, DEFAULTS, averages(2, 15360), id="generation-1-capacity-in-GiB"),
        pytest.param({CORE_1: 200, MEMORY_1: 30000}, {}, IN_MIB, averages(2, 15000), id="generation-1-by-setting"),
        pytest.param({PERCENT: "400"}, {}, DEFAULTS, averages(4, 0), id="generation-2-publishes-no-memory"),
        pytest.param(
            {CORE_3: 400, MEMORY_3: 64000},
            {CORE_3: 200, MEMORY_3: 32000},
            DEFAULTS,
            averages(2, 16000),
            id="generation-3-counts-allocatable",
        ),
        pytest.param({CORE_1: 99, MEMORY_1: 30}, {}, DEFAULTS, (), id="less-than-100-cores-are-no-card"),
    ],
)
def test_read_node(
    capacity: dict[str, Any], allocatable: dict[str, Any], unit: DialectSettings, want: tuple[Card, ...]
) -> None:
    parsed_node = node_of(raw_node(capacity, allocatable=allocatable), unit)
    assert (parsed_node.cards, parsed_node.fault) == (want, "")
