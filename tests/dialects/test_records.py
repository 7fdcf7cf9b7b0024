"""What bound pods hold on migrated clusters: which record counts, even on_node gputile would reject the request."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputile.dialects import records
from gputile.dialects.kube_objects import Pod
from gputile.dialects.parsing import convert_pod
from gputile.dialects.registry import read_node, read_pod
from gputile.dialects.settings import DialectSettings
from gputile.model.cards import Node
from gputile.model.grants import Grant
from gputile.model.refusals import BadRequest
from gputile.testing.builders import node, pod

HAMI = "hami.io/vgpu-devices-allocated"
HAMI_NODE = "hami.io/vgpu-node"
VGPU, VGPU_NODE = "nvidia.com/real-allocated", "nvidia.com/predicate-node"
SHARE = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 6000, "nvidia.com/gpucores": 10}
SINCE = "2026-06-01T00:00:00Z"

Held = dict[int, tuple[int, int]]  # by card index: MiB and cores


def under(agent: str, **facts: Any) -> Node:
    """A node n1 of two cards of 8192 MiB that this family's agent serves."""
    return node("n1").cards(2, "T4", 8192).facts(agent=agent, **facts).node()


def bound(*containers: dict[str, Any], started: str = "2026-01-01T00:00:00Z", **rest: Any) -> Pod:
    manifest = pod(*containers, on="n1", **rest) | {"status": {"phase": "Running", "startTime": started}}
    parsed_pod = convert_pod(manifest)
    assert isinstance(parsed_pod, Pod)
    return parsed_pod


def held(bound_pod: Pod, on_node: Node, settings: DialectSettings | None = None) -> Held:
    grant = records.read_held(bound_pod, on_node, settings or DialectSettings()).grant
    index = {card.uuid: card.index for card in on_node.cards}
    return {index[uuid]: (use.memory, use.cores) for uuid, use in (grant.uses() if grant else {}).items()}


# ---- odd requests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "annotations"),
    [
        pytest.param(SHARE, {"nvidia.com/numa-bind": "notabool"}, id="numa-bind-is-no-boolean"),
        pytest.param(SHARE, {"hami.io/gpu-scheduler-policy": "foo"}, id="a-card-policy-that-does-not-exist"),
        pytest.param(SHARE, {"hami.io/node-scheduler-policy": "foo"}, id="a-node-policy-that-does-not-exist"),
        pytest.param(
            {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 6000},
            {"nvidia.com/gpucores": "30"},
            id="a-resource-written-as-an-annotation",
        ),
        pytest.param(
            {"nvidia.com/gpu": 1, "nvidia.com/gpumem-percentage": 150}, {}, id="a-percentage-that-older-hami-clamped"
        ),
        pytest.param({"hami.io/gpu": 1, "hami.io/gpumem": 6000}, {}, id="renamed-resources"),
        pytest.param(SHARE | {"aliyun.com/gpu-mem": 3}, {}, id="two-dialects"),
        pytest.param(SHARE | {"gputile.io/gpus": 1}, {}, id="a-resource-that-does-not-exist"),
        pytest.param({"nvidia.com/gpu": "many"}, {}, id="an-amount-in-words"),
    ],
)
@pytest.mark.parametrize("agent", ["hami", "vgpu", "nvidia", "gputile"])
def test_a_record_counts_whatever_the_request_is(
    limits: dict[str, Any], annotations: dict[str, str], agent: str
) -> None:
    record = {HAMI: "GPU-n1-1,NVIDIA,6000,10:;", HAMI_NODE: "n1"}
    assert held(bound(limits, annotations=annotations | record), under(agent)) == {1: (6000, 10)}


# ---- formats --------------------------------------------------------------------------------------------------------

THREE_GIB = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000, "nvidia.com/gpucores": 10}
ON_0 = "GPU-n1-0,NVIDIA,3000,10:;"


@pytest.mark.parametrize(
    ("record", "init", "want"),
    [
        pytest.param(ON_0 * 2, ({},), {0: (6000, 20)}, id="two-entries-for-one-init-and-two-apps-are-the-apps"),
        pytest.param(";" + ON_0 * 2, ({},), {0: (6000, 20)}, id="three-entries-are-all-three"),
        pytest.param(ON_0 * 3, (THREE_GIB,), {0: (6000, 20)}, id="an-init-container-runs-before-the-apps"),
        pytest.param(ON_0 * 2, ({}, {}), {0: (6000, 20)}, id="two-entries-for-two-inits-and-two-apps-are-the-apps"),
        pytest.param(ON_0 * 3, (), {0: (8192, 30)}, id="entries-of-another-number-add-up"),
        pytest.param(ON_0 * 3, ({}, {}), {0: (8192, 30)}, id="entries-between-the-two-numbers-add-up"),
        pytest.param(ON_0 + ON_0[:-1], (), {0: (6000, 20)}, id="without-the-last-semicolon"),
    ],
)
def test_entries_of_hami_records(record: str, init: tuple[dict[str, Any], ...], want: Held) -> None:
    result = bound(THREE_GIB, THREE_GIB, init=init, annotations={HAMI: record})
    got = held(result, under("hami"))
    assert {index: (min(memory, 8192), cores) for index, (memory, cores) in got.items()} == want


@pytest.mark.parametrize(
    ("annotations", "want"),
    [
        pytest.param(
            {HAMI: "GPU-n1-0[2-1],NVIDIA,5120,14:;"}, {0: (5120, 14)}, id="a-dynamic-mig-slice-belongs-to-its-card"
        ),
        pytest.param({HAMI: ON_0, HAMI_NODE: "n2"}, {}, id="a-record-for-another-node-was-copied"),
        pytest.param({HAMI: "GPU-other,NVIDIA,1,1:;"}, {}, id="a-card-of-another-node"),
        pytest.param({HAMI: "GPU-n1-0,NVIDIA,8193,1:;"}, {}, id="more-memory-than-the-card-has"),
        pytest.param({HAMI: "GPU-n1-0,NVIDIA,1,101:;"}, {}, id="more-cores-than-the-card-has"),
        pytest.param({VGPU: "c0[1_GPU-n1-1_30_2000]", VGPU_NODE: "n1"}, {1: (2000, 30)}, id="vgpu-manager"),
        pytest.param({VGPU: "c0[1_GPU-n1-1_30_2000]", VGPU_NODE: "n2"}, {}, id="vgpu-manager-for-another-node"),
        pytest.param({"tencent.com/predicate-gpu-idx-0": "1"}, {}, id="vcuda-for-a-container-that-requests-nothing"),
        pytest.param(
            {"tencent.com/predicate-gpu-idx-0": "1", "tencent.com/predicate-node": "n2"}, {}, id="vcuda-elsewhere"
        ),
        pytest.param(
            {"nano-gpu/assume": "true", "nano-gpu/container-c0": "0"}, {}, id="nano-for-one-that-requests-nothing"
        ),
        pytest.param({"scheduler.framework.gpushare.allocation": '{"0":{"1":3}}'}, {1: (3072, 0)}, id="gpushare-2.0"),
        pytest.param(
            {"scheduler.framework.gpushare.allocation": '{"0":{"0":2,"1":3}}'},
            {0: (2048, 0), 1: (3072, 0)},
            id="gpushare-2.0-on-two-cards",
        ),
        pytest.param({"scheduler.framework.gpushare.allocation": '{"0":{"7":3}}'}, {}, id="gpushare-on-no-such-card"),
        pytest.param({"ALIYUN_COM_GPU_MEM_IDX": "1", "ALIYUN_COM_GPU_MEM_POD": "4"}, {1: (4096, 0)}, id="gpushare-sum"),
        pytest.param({"ALIYUN_COM_GPU_MEM_IDX": "1"}, {1: (8192, 100)}, id="gpushare-without-an-amount-is-whole"),
        pytest.param(
            {HAMI: ON_0, VGPU: "c0[1_GPU-n1-1_30_2000]"}, {0: (3000, 10)}, id="the-nodes-own-family-comes-first"
        ),
        pytest.param(
            {HAMI: "nonsense", VGPU: "c0[1_GPU-n1-1_30_2000]"}, {1: (2000, 30)}, id="another-family-where-it-is-broken"
        ),
    ],
)
def test_records_of_pods_without_a_readable_request(annotations: dict[str, str], want: Held) -> None:
    assert held(bound({}, annotations=annotations), under("hami")) == want


@pytest.mark.parametrize(
    ("limits", "annotations", "want"),
    [
        pytest.param(
            {"tencent.com/vcuda-core": "many"}, {"tencent.com/predicate-gpu-idx-0": "1"}, {1: (8192, 100)}, id="vcuda"
        ),
        pytest.param(
            {"nano-gpu/gpu-percent": "many"},
            {"nano-gpu/assume": "true", "nano-gpu/container-c0": "0"},
            {0: (8192, 100)},
            id="nano",
        ),
        pytest.param({"aliyun.com/gpu-mem": "much"}, {"ALIYUN_COM_GPU_MEM_IDX": "1"}, {1: (8192, 100)}, id="gpushare"),
    ],
)
def test_an_unreadable_amount_takes_the_whole_card_that_the_record_names(
    limits: dict[str, Any], annotations: dict[str, str], want: Held
) -> None:
    assert held(bound(limits, annotations=annotations), under("hami")) == want


def test_the_mark_of_elastic_gpu_may_be_a_label() -> None:
    result = bound(
        {"elasticgpu.io/gpu-core": 20, "elasticgpu.io/gpu-memory": 256},
        annotations={"elasticgpu.io/container-c0": "1"},
        labels={"elasticgpu.io/assumed": "true"},
    )
    assert held(result, under("nano")) == {1: (256, 20)}


def test_gpushares_sum_is_the_least_that_a_pod_holds() -> None:
    record = {"ALIYUN_COM_GPU_MEM_IDX": "1", "ALIYUN_COM_GPU_MEM_POD": "4"}
    assert held(bound({"aliyun.com/gpu-mem": 3}, annotations=record), under("gpushare")) == {1: (4096, 0)}


def test_an_init_container_without_an_entry_is_on_the_cards_of_its_pod() -> None:
    large = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 5000}
    result = bound(THREE_GIB, init=(large,), annotations={HAMI: ON_0})
    assert held(result, under("hami")) == {0: (5000, 10)}
    grant = records.read_held(result, under("hami")).grant
    assert grant is not None
    assert grant.unplaced == 0


def test_a_mig_slice_holds_what_the_record_says() -> None:
    on_node = node("n1").cards(2, "A100", 8192, mode="mig").facts(agent="hami").node()
    assert held(bound(SHARE, annotations={HAMI: "GPU-n1-0[2-1],NVIDIA,5120,14:;"}), on_node) == {0: (5120, 14)}


def test_a_card_of_unknown_memory_bounds_no_record() -> None:
    on_node = node("n1").cards(1, "", 0).facts(agent="nano").node()
    assert held(bound({}, annotations={HAMI: "GPU-n1-0,NVIDIA,3000,10:;"}), on_node) == {0: (3000, 10)}


def test_a_memory_only_elastic_gpu_pod_holds_its_memory() -> None:
    record = {"elasticgpu.io/assumed": "true", "elasticgpu.io/container-c0": "1"}
    assert held(bound({"elasticgpu.io/gpu-memory": 256}, annotations=record), under("nano")) == {1: (256, 0)}


@pytest.mark.parametrize("unit", ["GiB", "MiB", "auto"])
@pytest.mark.parametrize(
    "annotations",
    [
        pytest.param({"ALIYUN_COM_GPU_MEM_IDX": "1"}, id="by-index"),
        pytest.param({"scheduler.framework.gpushare.allocation": '{"0":{"1":8138}}'}, id="by-allocation"),
    ],
)
def test_a_bound_pods_amount_is_read_in_its_nodes_unit(unit: Any, annotations: dict[str, str]) -> None:
    settings = DialectSettings(gpushare_unit=unit)
    amounts = {"aliyun.com/gpu-mem": "16276", "aliyun.com/gpu-count": "2"}
    on_node = read_node({"metadata": {"name": "n1"}, "status": {"capacity": amounts, "allocatable": amounts}}, settings)
    assert isinstance(on_node, Node)
    assert [card.memory for card in on_node.cards] == [8138, 8138]
    assert held(bound({"aliyun.com/gpu-mem": 8138}, annotations=annotations), on_node, settings) == {1: (8138, 0)}


# ---- the larger of record and request -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("agent", "want"),
    [
        pytest.param("hami", {0: (6000, 10)}, id="under-its-own-agent"),
        pytest.param("nvidia", {0: (6000, 10)}, id="under-another"),
        pytest.param("gputile", {0: (1000, 5)}, id="under-ours-the-record-alone"),
    ],
)
def test_a_record_smaller_than_the_request(agent: str, want: Held) -> None:
    assert held(bound(SHARE, annotations={HAMI: "GPU-n1-0,NVIDIA,1000,5:;"}), under(agent)) == want


def test_a_request_larger_than_the_card_takes_the_card() -> None:
    result = bound({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 9999}, annotations={HAMI: "GPU-n1-0,NVIDIA,1000,5:;"})
    assert held(result, under("hami")) == {0: (8192, 5)}


def test_gpus_that_the_record_does_not_name_are_unplaced() -> None:
    result = bound({"nvidia.com/gpu": 2, "nvidia.com/gpumem": 1000}, annotations={HAMI: "GPU-n1-0,NVIDIA,1000,0:;"})
    grant = records.read_held(result, under("hami")).grant
    assert grant is not None
    assert grant.unplaced == 1


# ---- our own agent --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("since", "started", "want"),
    [
        pytest.param("", "2026-07-01T00:00:00Z", {0: (3000, 10)}, id="since-when-is-unknown: it counts"),
        pytest.param(SINCE, "2026-05-31T23:59:59Z", {0: (3000, 10)}, id="it started before: it counts"),
        pytest.param(SINCE, SINCE, {}, id="it started when our agent did: it must have our grant"),
        pytest.param(SINCE, "2026-07-01T00:00:00Z", {}, id="it started later"),
        pytest.param(SINCE, "", {}, id="it has not started"),
        pytest.param("yesterday", "2026-07-01T00:00:00Z", {0: (3000, 10)}, id="a since that is no time"),
    ],
)
def test_records_under_our_own_agent(since: str, started: str, want: Held) -> None:
    result = bound(THREE_GIB, started=started, annotations={HAMI: ON_0})
    assert held(result, under("gputile", since=since)) == want


def test_our_grant_counts_before_any_record() -> None:
    grant = '{"version":1,"pod":"uid-1","node":"n1","dialect":"hami","containers":[{"name":"c0","tiles":[{"uuid":'
    grant += '"GPU-n1-1","index":1,"memory":7,"cores":1}]}]}'
    result = bound(THREE_GIB, annotations={HAMI: ON_0, "gputile.io/grant": grant})
    assert held(result, under("hami")) == {1: (7, 1)}


def test_a_copied_grant_is_reported_and_the_record_counts() -> None:
    grant = '{"version":1,"pod":"another","node":"n1","dialect":"hami","containers":[]}'
    result = records.read_held(bound(THREE_GIB, annotations={HAMI: ON_0, "gputile.io/grant": grant}), under("hami"))
    assert result.bad is not None
    assert result.grant is not None
    assert set(result.grant.uses()) == {"GPU-n1-0"}


def test_a_grant_can_be_read_before_its_node_is_known_and_a_record_cannot() -> None:
    assert records.read_held(bound(THREE_GIB, annotations={HAMI: ON_0}), None) == records.BoundPodHolding()


# ---- by number ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("containers", "init", "want"),
    [
        pytest.param(({"nvidia.com/gpu": 2},), (), 2, id="whole-gpus"),
        pytest.param(({"nvidia.com/gpu": 1, "nvidia.com/gpumem-percentage": 150},), (), 1, id="an-unreadable-share"),
        pytest.param(({"nvidia.com/gpu": "many"},), (), 1, id="an-amount-in-words-is-at-least-one"),
        pytest.param(({"tencent.com/vcuda-core": 200},), (), 2, id="cores-count-in-hundreds"),
        pytest.param(({"tencent.com/vcuda-core": 150},), (), 2, id="begun-hundreds-count"),
        pytest.param(({"elasticgpu.io/gpu-memory": 256},), (), 1, id="memory-alone-is-a-share-of-one"),
        pytest.param(({"nvidia.com/gpu": 1}, {"nvidia.com/gpu": 1}), (), 2, id="containers-add-up"),
        pytest.param(({"nvidia.com/gpu": 1},), ({"nvidia.com/gpu": 3},), 3, id="an-init-container-runs-before"),
        pytest.param(({"nvidia.com/gpu": 1},), ({"nvidia.com/gpu": 3, "sidecar": True},), 4, id="a-sidecar-beside"),
        pytest.param(({"cpu": 1},), (), 0, id="none"),
    ],
)
def test_gpus_by_number(containers: tuple[dict[str, Any], ...], init: tuple[dict[str, Any], ...], want: int) -> None:
    assert records.requested_gpus(bound(*containers, init=init)) == want


@pytest.mark.parametrize(
    ("on_node", "started", "want"),
    [
        pytest.param(under("hami"), "", 1, id="another-systems-agent"),
        pytest.param(under("nvidia"), "", 1, id="nvidias-plugin"),
        pytest.param(under("gputile"), "", None, id="our-agent-starts-nothing-without-a-grant"),
        pytest.param(under("gputile", since=SINCE), "2026-01-01T00:00:00Z", 1, id="it-started-before-our-agent"),
        pytest.param(under("gputile", since=SINCE), "2026-07-01T00:00:00Z", None, id="it-started-after"),
        pytest.param(None, "", None, id="the-node-is-unknown"),
    ],
)
def test_which_pods_are_counted_by_number(on_node: Node | None, started: str, want: int | None) -> None:
    grant = records.unplaced_grant(bound({"nvidia.com/gpu": 1}, started=started), on_node)
    assert (grant.unplaced if grant is not None else None) == want


# ---- property -------------------------------------------------------------------------------------------------------

TILES = st.tuples(st.sampled_from(["GPU-n1-0", "GPU-n1-1", "GPU-unknown"]), st.integers(0, 9000), st.integers(0, 110))
REQUESTS = st.sampled_from(
    [
        {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 4000},
        {"nvidia.com/gpu": 2},
        {"nvidia.com/gpu": 1, "nvidia.com/gpumem-percentage": 150},
        {"nvidia.com/vgpu-number": 1, "nvidia.com/vgpu-memory": 500},
        {"hami.io/gpu": 1},
        {},
    ]
)


def hami_record(tiles: list[tuple[str, int, int]]) -> str:
    return "".join(f"{uuid},NVIDIA,{memory},{cores}:" for uuid, memory, cores in tiles) + ";"


def vgpu_record(tiles: list[tuple[str, int, int]]) -> str:
    return "c0[" + ",".join(f"0_{uuid}_{cores}_{memory}" for uuid, memory, cores in tiles) + "]"


def is_valid(tiles: list[tuple[str, int, int]], record_node: str) -> bool:
    return (
        bool(tiles) and record_node == "n1" and all(u != "GPU-unknown" and m <= 8192 and c <= 100 for u, m, c in tiles)
    )


@given(
    request=REQUESTS,
    hami=st.lists(TILES, max_size=2, unique_by=lambda tile: tile[0]),
    vgpu=st.lists(TILES, max_size=2, unique_by=lambda tile: tile[0]),
    hami_node=st.sampled_from(["n1", "n1", "n2"]),
    agent=st.sampled_from(["hami", "vgpu", "nvidia"]),
    odd=st.booleans(),
)
def test_a_pod_under_another_agent_never_holds_less_than_its_record_or_its_request(
    request: dict[str, Any],
    hami: list[tuple[str, int, int]],
    vgpu: list[tuple[str, int, int]],
    hami_node: str,
    agent: str,
    odd: bool,
) -> None:
    """Copied records, two families' records on one pod, records smaller than the request, odd requests."""
    annotations = {HAMI: hami_record(hami), HAMI_NODE: hami_node, VGPU: vgpu_record(vgpu)}
    annotations |= {"nvidia.com/numa-bind": "notabool"} if odd else {}
    bound_pod, on_node = bound(request, annotations=annotations), under(agent)
    grant = records.read_held(bound_pod, on_node).grant or records.unplaced_grant(bound_pod, on_node)
    order = [("vgpu", vgpu, "n1"), ("hami", hami, hami_node)]
    order.sort(key=lambda entry: (entry[0] != agent, entry[0] != "hami"))
    record = next((tiles for _, tiles, record_node in order if is_valid(tiles, record_node)), [])
    uses = grant.uses() if grant is not None else {}
    assert set(uses) == {uuid for uuid, _, _ in record}
    for uuid, memory, cores in record:
        assert uses[uuid].memory >= memory
        assert uses[uuid].cores >= cores
    pod_request = read_pod(bound_pod)
    if not isinstance(pod_request, BadRequest) and pod_request is not None:
        ask = pod_request.asks[0]
        assert all(use.memory >= ask.memory_of(8192) and use.cores >= ask.cores for use in uses.values())
    wanted = records.requested_gpus(bound_pod)
    assert isinstance(grant, Grant) or (not record and not wanted)
    if record == [] and wanted and grant is not None:
        assert grant.unplaced == wanted
