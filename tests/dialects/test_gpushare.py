"""aliyun.com/gpu-mem: memory of one card per pod, or split over several by gpu-count."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gputile.dialects import gpushare, gputile, records, registry
from gputile.dialects.kube_objects import NodeObject
from gputile.dialects.parsing import convert_node
from gputile.dialects.settings import DEFAULTS, DialectSettings
from gputile.model.cards import Card
from gputile.model.grants import ContainerGrant, Grant
from gputile.model.refusals import NodeReason, RequestError
from gputile.model.requests import Role
from gputile.testing.builders import ask, node, pod
from tests.dialects.shortcuts import (
    AT,
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

MEM, COUNT = "aliyun.com/gpu-mem", "aliyun.com/gpu-count"
IN_MIB = DialectSettings(gpushare_unit="MiB")
AUTO = DialectSettings(gpushare_unit="auto")


@pytest.mark.parametrize(
    ("limits", "want"),
    [
        pytest.param({MEM: 3}, ask("3Gi", name="c0"), id="a-gpu-mem-of-3-is-3-GiB-of-one-card"),
        pytest.param({MEM: "3"}, ask("3Gi", name="c0"), id="a-number-may-be-a-string"),
        pytest.param({MEM: 0}, None, id="zero-is-no-request"),
        pytest.param({MEM: 3, COUNT: 1}, ask("3Gi", name="c0"), id="a-gpu-count-of-1-changes-nothing"),
        pytest.param({MEM: 12, COUNT: 4}, ask("3Gi", cards=4, name="c0"), id="gpu-count-as-a-limit-splits-the-memory"),
        pytest.param(
            {COUNT: 2},
            Rejected(RequestError.NO_DEVICE_RESOURCE, "add `aliyun.com/gpu-mem: <memory>`"),
            id="gpu-count-alone-allocates-no-card",
        ),
        pytest.param(
            {MEM: 7, COUNT: 2},
            Rejected(RequestError.UNEVEN_SPLIT, "write 6 or 8, or another `aliyun.com/gpu-count`"),
            id="memory-that-does-not-divide-is-refused-and-its-neighbours-offered",
        ),
        pytest.param(
            {MEM: 1, COUNT: 2},
            Rejected(RequestError.UNEVEN_SPLIT, "write 2, or"),
            id="zero-is-never-offered-as-a-neighbour",
        ),
        pytest.param(
            {MEM: 2048}, Rejected(RequestError.OUT_OF_RANGE, "2048 GiB per GPU"), id="two-TiB-are-a-mistake-in-the-unit"
        ),
        pytest.param(
            {MEM: 4096, COUNT: 2},
            Rejected(RequestError.OUT_OF_RANGE, "2048 GiB per GPU"),
            id="two-TiB-on-each-of-two-cards-are-a-mistake-in-the-unit-too",
        ),
        pytest.param(
            {MEM: 2048, COUNT: 4}, ask("512Gi", cards=4, name="c0"), id="only-the-part-of-one-card-must-fit-a-card"
        ),
    ],
)
def test_one_container(limits: dict[str, Any], want: Want) -> None:
    expect(pod(limits), "gpushare", want)


@pytest.mark.parametrize(
    ("unit", "want"),
    [
        pytest.param(DEFAULTS, ask("500Gi", name="c0"), id="GiB-by-default"),
        pytest.param(IN_MIB, ask(500, name="c0"), id="MiB-by-setting"),
        pytest.param(AUTO, ask("500Gi", name="c0"), id="auto-is-GiB-until-the-nodes-are-known"),
    ],
)
def test_the_memory_unit_is_a_setting(unit: DialectSettings, want: Want) -> None:
    expect(pod({MEM: 500}), "gpushare", want, unit)


@pytest.mark.parametrize(
    ("amounts", "unit"),
    [
        pytest.param([{MEM: 30, COUNT: 2}], "GiB", id="15-units-a-card-are-GiB"),
        pytest.param([{MEM: 200, COUNT: 2}], "GiB", id="100-units-a-card-are-still-GiB"),
        pytest.param([{MEM: 202, COUNT: 2}], "MiB", id="over-100-units-a-card-are-MiB"),
        pytest.param([{}, {MEM: 32000, COUNT: 2}, {MEM: 15, COUNT: 1}], "MiB", id="the-first-node-with-GPUs-decides"),
        pytest.param([{MEM: 30000}], "GiB", id="a-node-without-count-decides-nothing"),
        pytest.param([], "GiB", id="no-node-is-GiB"),
    ],
)
def test_the_unit_is_guessed_as_the_cli_guesses(amounts: list[dict[str, int]], unit: str) -> None:
    nodes = [convert_node(raw_node(allocatable=entry)) for entry in amounts]
    assert gpushare.guess_unit([entry for entry in nodes if isinstance(entry, NodeObject)]) == unit


@pytest.mark.parametrize(
    ("manifest", "want"),
    [
        pytest.param(
            pod({MEM: 12}, labels={COUNT: "4"}),
            ask("3Gi", cards=4, name="c0"),
            id="label-gpu-count-4-takes-a-quarter-from-each-of-4-cards",
        ),
        pytest.param(
            pod({MEM: 12}, annotations={COUNT: "4"}),
            ask("3Gi", cards=4, name="c0"),
            id="gpu-count-may-be-an-annotation",
        ),
        pytest.param(
            pod({MEM: 12, COUNT: 3}, labels={COUNT: "2"}, annotations={COUNT: "4"}),
            ask("6Gi", cards=2, name="c0"),
            id="the-label-wins-over-annotation-and-limit",
        ),
        pytest.param(
            pod({MEM: 12, COUNT: 3}, annotations={COUNT: "4"}),
            ask("3Gi", cards=4, name="c0"),
            id="the-annotation-wins-over-the-limit",
        ),
        pytest.param(
            pod({MEM: 4}, {}, {MEM: 8}, labels={COUNT: "2"}),
            (ask("2Gi", cards=2, name="c0"), no_request("c1"), ask("4Gi", cards=2, name="c2")),
            id="each-container-is-split-over-the-cards",
        ),
        pytest.param(
            pod({MEM: 4}, {MEM: 3}, labels={COUNT: "2"}),
            Rejected(RequestError.UNEVEN_SPLIT, "container `c1`: `aliyun.com/gpu-mem` is 3"),
            id="each-containers-memory-must-divide",
        ),
        pytest.param(
            pod({MEM: 4}, labels={COUNT: "two"}),
            Rejected(RequestError.NOT_A_NUMBER, 'write a number such as "2"'),
            id="a-gpu-count-in-words-is-refused",
        ),
        pytest.param(
            pod({MEM: 4}, labels={COUNT: "0"}),
            Rejected(RequestError.NOT_A_NUMBER, "write a number"),
            id="no-cards-is-refused",
        ),
        pytest.param(
            pod({MEM: 4}, labels={COUNT: "-2"}),
            Rejected(RequestError.NOT_A_NUMBER, "write a number"),
            id="fewer-cards-too",
        ),
        pytest.param(pod({}, labels={COUNT: "4"}), None, id="a-label-alone-requests-nothing"),
        pytest.param(
            pod({MEM: 2}, init=({MEM: 5},)),
            (ask("5Gi", name="init-0", role=Role.INIT), ask("2Gi", name="c0")),
            id="init-containers-are-read-though-the-original-ignores-them",
        ),
    ],
)
def test_gpu_count_and_several_containers(manifest: Manifest, want: Want) -> None:
    expect(manifest, "gpushare", want)


def test_all_containers_of_a_pod_share_their_cards() -> None:
    assert read(pod({MEM: 2}, {MEM: 3})).together is True


# ---- grants ---------------------------------------------------------------------------------------------------------

TWO_CARDS = node().cards(2, "T4", "15Gi").node()
INDEX, TOTAL, CARD_SIZE = "ALIYUN_COM_GPU_MEM_IDX", "ALIYUN_COM_GPU_MEM_POD", "ALIYUN_COM_GPU_MEM_DEV"
ALLOCATION = "scheduler.framework.gpushare.allocation"
ALWAYS = {CARD_SIZE: "15", "ALIYUN_COM_GPU_MEM_ASSIGNED": "false", "ALIYUN_COM_GPU_MEM_ASSUME_TIME": str(AT)}


@pytest.mark.parametrize(
    ("manifest", "containers", "annotations", "env"),
    [
        pytest.param(
            pod({MEM: 3}),
            [held("c0", tile(1, 3072))],
            {INDEX: "1", TOTAL: "3", ALLOCATION: '{"0":{"1":3}}'},
            {
                "c0": {
                    "NVIDIA_VISIBLE_DEVICES": "GPU-n1-1",
                    INDEX: "1",
                    TOTAL: "3",
                    "ALIYUN_COM_GPU_MEM_CONTAINER": "3",
                    CARD_SIZE: "15",
                }
            },
            id="one-card-five-annotations-and-the-allocation-in-units",
        ),
        pytest.param(
            pod({MEM: 6}, labels={COUNT: "2"}),
            [held("c0", tile(0, 3072), tile(1, 3072))],
            {TOTAL: "6", ALLOCATION: '{"0":{"0":3,"1":3}}'},
            {
                "c0": {
                    "NVIDIA_VISIBLE_DEVICES": "GPU-n1-0,GPU-n1-1",
                    INDEX: "0,1",
                    TOTAL: "6",
                    "ALIYUN_COM_GPU_MEM_CONTAINER": "6",
                    CARD_SIZE: "15",
                }
            },
            id="several-cards-write-no-single-index-that-a-reader-could-count-the-sum-on",
        ),
        pytest.param(
            pod({}, {MEM: 2}),
            [held("c1", tile(0, 2048))],
            {INDEX: "0", TOTAL: "2", ALLOCATION: '{"1":{"0":2}}'},
            {
                "c1": {
                    "NVIDIA_VISIBLE_DEVICES": "GPU-n1-0",
                    INDEX: "0",
                    TOTAL: "2",
                    "ALIYUN_COM_GPU_MEM_CONTAINER": "2",
                    CARD_SIZE: "15",
                }
            },
            id="the-allocation-counts-containers-without-memory-too",
        ),
    ],
)
def test_written_grant(
    manifest: Manifest,
    containers: list[ContainerGrant],
    annotations: dict[str, str],
    env: dict[str, dict[str, str]],
) -> None:
    context = grant_context(manifest, TWO_CARDS, *containers)
    written = gpushare.write_grant(context)
    assert written.annotations == ALWAYS | annotations
    assert written.labels == {}
    assert written.env == env
    both = registry.write_grant(context)
    assert both.annotations == written.annotations | gputile.write_grant(context).annotations
    assert (both.labels, both.env) == (written.labels, written.env)


def test_the_pods_total_is_the_sum_over_its_containers() -> None:
    context = grant_context(pod({MEM: 2}, {MEM: 3}), TWO_CARDS, held("c0", tile(0, 2048)), held("c1", tile(0, 3072)))
    assert gpushare.write_grant(context).annotations[TOTAL] == "5"


def test_an_init_container_that_fits_into_the_pods_memory_adds_nothing_to_the_total() -> None:
    context = grant_context(
        pod({MEM: 3}, init=({MEM: 2},)),
        TWO_CARDS,
        held("init-0", tile(0, 2048), role=Role.INIT),
        held("c0", tile(0, 3072)),
    )
    assert gpushare.write_grant(context).annotations[TOTAL] == "3"


def test_the_allocation_counts_from_the_first_app_container_and_init_containers_follow() -> None:
    init, app = held("init-0", tile(0, 2048), role=Role.INIT), held("c0", tile(0, 3072))
    context = grant_context(pod({MEM: 3}, init=({MEM: 2},)), TWO_CARDS, init, app)
    written = gpushare.write_grant(context).annotations
    assert msgspec.json.decode(written[ALLOCATION]) == {"0": {"0": 3}, "1": {"0": 2}}


def test_the_env_of_each_container_has_its_own_memory() -> None:
    context = grant_context(pod({MEM: 2}, {MEM: 3}), TWO_CARDS, held("c0", tile(0, 2048)), held("c1", tile(0, 3072)))
    env = gpushare.write_grant(context).env
    assert {name: entry["ALIYUN_COM_GPU_MEM_CONTAINER"] for name, entry in env.items()} == {"c0": "2", "c1": "3"}


def test_mem_pod_in_the_env_is_the_amount_of_one_allocate_call() -> None:
    """`compat.md` 1.3 and 0.6: the number of device IDs in this Allocate call, and one call serves one container."""
    context = grant_context(pod({MEM: 2}, {MEM: 3}), TWO_CARDS, held("c0", tile(0, 2048)), held("c1", tile(0, 3072)))
    env = gpushare.write_grant(context).env
    assert {name: entry[TOTAL] for name, entry in env.items()} == {"c0": "2", "c1": "3"}


def test_amounts_are_written_in_the_units_of_the_setting() -> None:
    context = grant_context(pod({MEM: 3000}), TWO_CARDS, held("c0", tile(0, 3000)), settings=IN_MIB)
    written = gpushare.write_grant(context).annotations
    assert (written[TOTAL], written[CARD_SIZE], written[ALLOCATION]) == ("3000", "15360", '{"0":{"0":3000}}')


C0_ON_1 = Grant(pod="uid-1", node="n1", dialect="gpushare", containers=(held("c0", tile(1, 3072)),), slots=0)


@pytest.mark.parametrize(
    ("annotations", "want"),
    [
        pytest.param({INDEX: "1", TOTAL: "3"}, C0_ON_1, id="the-originals-index-alone-is-enough"),
        pytest.param({ALLOCATION: '{"0":{"1":3}}'}, C0_ON_1, id="the-newer-allocation-alone-is-enough"),
        pytest.param({INDEX: "0", ALLOCATION: '{"0":{"1":3}}'}, C0_ON_1, id="the-allocation-has-more-detail-and-wins"),
        pytest.param({INDEX: "1", ALLOCATION: "{"}, C0_ON_1, id="an-unreadable-allocation-is-ignored"),
        pytest.param({INDEX: "7"}, None, id="a-card-that-the-node-lacks"),
        pytest.param({INDEX: "-1"}, None, id="index-minus-1-is-pending"),
        pytest.param({INDEX: "one"}, None, id="an-index-in-words-is-pending"),
        pytest.param({}, None, id="no-record-is-no-grant"),
    ],
)
def test_records_of_the_original_are_read(annotations: dict[str, str], want: Grant | None) -> None:
    manifest = pod({MEM: 3}, annotations=annotations, on="n1")
    assert records.read_grant(object_of(manifest), TWO_CARDS) == want


def test_the_index_serves_all_containers_of_the_pod() -> None:
    manifest = pod({MEM: 3}, {MEM: 1}, annotations={INDEX: "1"}, on="n1")
    parsed_grant = records.read_grant(object_of(manifest), TWO_CARDS)
    assert isinstance(parsed_grant, Grant)
    assert parsed_grant.containers == (held("c0", tile(1, 3072)), held("c1", tile(1, 1024)))


@st.composite
def shared_pods(draw: st.DrawFn) -> Manifest:
    count = draw(st.sampled_from([1, 1, 2, 3]))
    place = draw(st.sampled_from(["labels", "annotations"])) if count > 1 else "labels"
    container = st.integers(1, 4).map(lambda share: {MEM: share * count})
    return draw(pods(container, **{place: {COUNT: str(count)}}))


@settings(max_examples=50)
@given(shared_pods(), st.sampled_from([DEFAULTS, IN_MIB]))
def test_a_written_grant_is_read_back(manifest: Manifest, unit: DialectSettings) -> None:
    assert_round_trip(gpushare, manifest, unit)


# ---- nodes ----------------------------------------------------------------------------------------------------------


def averages(count: int, memory: int) -> tuple[Card, ...]:
    return tuple(Card(index=n, uuid=f"n1#{n}", memory=memory) for n in range(count))


@pytest.mark.parametrize(
    ("capacity", "unit", "want"),
    [
        pytest.param({MEM: "30", COUNT: "2"}, DEFAULTS, averages(2, 15360), id="memory-is-divided-by-the-count"),
        pytest.param({MEM: 31, COUNT: 2}, DEFAULTS, averages(2, 15360), id="the-division-is-whole"),
        pytest.param({MEM: 30218, COUNT: 2}, IN_MIB, averages(2, 15109), id="MiB-by-setting"),
        pytest.param({COUNT: 2}, DEFAULTS, (), id="a-count-alone-is-no-shared-node"),
        pytest.param({MEM: 0, COUNT: 0}, DEFAULTS, (), id="nothing-left"),
    ],
)
def test_read_node(capacity: dict[str, Any], unit: DialectSettings, want: tuple[Card, ...]) -> None:
    parsed_node = node_of(raw_node(capacity), unit)
    assert (parsed_node.cards, parsed_node.fault) == (want, "")


def test_capacity_and_not_allocatable_counts() -> None:
    assert node_of(raw_node({MEM: 30, COUNT: 2}, allocatable={MEM: 15, COUNT: 1})).cards == averages(2, 15360)


def test_memory_without_a_count_is_a_broken_inventory() -> None:
    assert node_of(raw_node({MEM: 30})).fault == NodeReason.BAD_INVENTORY


@pytest.mark.parametrize(
    ("label", "policy"),
    [
        pytest.param("spread", "spread", id="spread"),
        pytest.param("binpack", "binpack", id="binpack"),
        pytest.param("other", "", id="an-unknown-value-is-ignored"),
    ],
)
def test_the_placement_label_of_a_node_is_its_card_policy(label: str, policy: str) -> None:
    assert node_of(raw_node({MEM: 30, COUNT: 2}, labels={"ack.node.gpu.placement": label})).card_policy == policy
