"""nvidia.com/vgpu-number, vgpu-memory, vgpu-cores of vgpu-manager; the prefix is a setting."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gputile.dialects import gputile, records, registry, vgpu
from gputile.dialects.settings import DEFAULTS, DialectSettings
from gputile.model.cards import Card
from gputile.model.grants import ContainerGrant, Grant
from gputile.model.refusals import NodeReason, RequestError
from gputile.model.requests import Constraints, Match, ModelRule, Role, Strength
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

NUMBER, MEMORY, CORES, OLD_CORES = (
    "nvidia.com/vgpu-number",
    "nvidia.com/vgpu-memory",
    "nvidia.com/vgpu-cores",
    "nvidia.com/vgpu-core",
)
TENFOLD = DialectSettings(vgpu_memory_factor=10)
ELSEWHERE = DialectSettings(vgpu_domain="example.com")


@pytest.mark.parametrize(
    ("limits", "want"),
    [
        pytest.param({NUMBER: 1}, ask(whole=True, name="c0"), id="a-number-alone-is-a-whole-card-with-100-cores"),
        pytest.param({NUMBER: 1, MEMORY: 0, CORES: 0}, ask(whole=True, name="c0"), id="zero-of-both-is-a-whole-card"),
        pytest.param({NUMBER: 2, MEMORY: 3000}, ask(3000, cards=2, name="c0"), id="memory-is-MiB-of-each-card"),
        pytest.param({NUMBER: 1, MEMORY: 3000, CORES: 0}, ask(3000, name="c0"), id="cores-0-with-memory-reserve-none"),
        pytest.param(
            {NUMBER: 2, CORES: 30}, ask(percent=100, cores=30, cards=2, name="c0"), id="no-memory-is-all-of-it"
        ),
        pytest.param({NUMBER: 1, MEMORY: 9, OLD_CORES: 30}, ask(9, 30, name="c0"), id="version-0.1-spelled-vgpu-core"),
        pytest.param({NUMBER: 1, MEMORY: 9, CORES: 100}, ask(9, 100, name="c0"), id="100-cores-are-the-most"),
        pytest.param({NUMBER: 0}, None, id="zero-is-no-request"),
        pytest.param(
            {NUMBER: 1, CORES: 101},
            Rejected(RequestError.OUT_OF_RANGE, "at most 100, and request more GPUs with `nvidia.com/vgpu-number`"),
            id="more-than-100-cores-per-card-are-refused",
        ),
        pytest.param(
            {MEMORY: 3000},
            Rejected(RequestError.NO_DEVICE_RESOURCE, "add `nvidia.com/vgpu-number: 1`"),
            id="memory-alone-allocates-no-card",
        ),
        pytest.param(
            {CORES: 30},
            Rejected(RequestError.NO_DEVICE_RESOURCE, "add `nvidia.com/vgpu-number: 1`"),
            id="cores-alone-allocate-no-card",
        ),
    ],
)
def test_one_container(limits: dict[str, Any], want: Want) -> None:
    expect(pod(limits), "vgpu", want)


def test_the_memory_factor_multiplies_vgpu_memory() -> None:
    expect(pod({NUMBER: 1, MEMORY: 300}), "vgpu", ask(3000, name="c0"), TENFOLD)


def test_the_domain_is_a_setting() -> None:
    expect(pod({"example.com/vgpu-number": 1, "example.com/vgpu-memory": 5}), "vgpu", ask(5, name="c0"), ELSEWHERE)
    expect(pod({NUMBER: 1}), "vgpu", None, ELSEWHERE)


def test_each_container_has_its_own_request() -> None:
    manifest = pod({NUMBER: 1, MEMORY: 5}, {}, init=({NUMBER: 1, MEMORY: 6},))
    expect(manifest, "vgpu", (ask(6, name="init-0", role=Role.INIT), ask(5, name="c0"), no_request("c1")))


@pytest.mark.parametrize(
    ("annotations", "want"),
    [
        pytest.param({}, Constraints(), id="nothing-set"),
        pytest.param(
            {"include-gpu-type": "a100, T4", "exclude-gpu-type": "80GB"},
            Constraints(
                models=(ModelRule(("a100", "T4"), Match.SUBSTRING),),
                not_models=(ModelRule(("80GB",), Match.SUBSTRING),),
            ),
            id="types-are-substring-lists-and-both-apply",
        ),
        pytest.param(
            {"include-gpu-uuid": "GPU-a,GPU-b", "exclude-gpu-uuid": "GPU-b"},
            Constraints(uuids=frozenset({"GPU-a", "GPU-b"}), not_uuids=frozenset({"GPU-b"})),
            id="uuid-lists",
        ),
        pytest.param(
            {"node-scheduler-policy": "binpack", "device-scheduler-policy": "spread"},
            Constraints(node_policy="binpack", card_policy="spread"),
            id="policies-of-node-and-device",
        ),
        pytest.param({"node-scheduler-policy": "none"}, Constraints(), id="policy-none-leaves-it-to-the-cluster"),
        pytest.param({"device-topology-mode": "none"}, Constraints(), id="topology-none"),
        pytest.param({"device-topology-mode": "numa"}, Constraints(numa=Strength.PREFER), id="numa-is-a-preference"),
        pytest.param({"device-topology-mode": "numa-strict"}, Constraints(numa=Strength.REQUIRE), id="numa-strict"),
        pytest.param({"device-topology-mode": "link"}, Constraints(links=Strength.PREFER), id="link-is-a-preference"),
        pytest.param({"device-topology-mode": "link-strict"}, Constraints(links=Strength.REQUIRE), id="link-strict"),
    ],
)
def test_annotations(annotations: dict[str, str], want: Constraints) -> None:
    keys = {f"nvidia.com/{key}": value for key, value in annotations.items()}
    assert constraints(pod({NUMBER: 1}, annotations=keys)) == want
    elsewhere = {f"example.com/{key}": value for key, value in annotations.items()}
    assert constraints(pod({"example.com/vgpu-number": 1}, annotations=elsewhere), ELSEWHERE) == want


@pytest.mark.parametrize(
    ("key", "value", "code", "message"),
    [
        pytest.param("node-scheduler-policy", "tight", RequestError.UNKNOWN_POLICY, "binpack, none, spread", id="node"),
        pytest.param("device-scheduler-policy", "x", RequestError.UNKNOWN_POLICY, "binpack, none, spread", id="device"),
        pytest.param("memory-scheduler-policy", "x", RequestError.UNKNOWN_POLICY, "physical, virtual", id="memory"),
        pytest.param("device-topology-mode", "x", RequestError.BAD_ANNOTATION, "link-strict", id="topology"),
    ],
)
def test_unknown_values_are_rejected_with_the_known_ones(
    key: str, value: str, code: RequestError, message: str
) -> None:
    expect(pod({NUMBER: 1}, annotations={f"nvidia.com/{key}": value}), "vgpu", Rejected(code, message))


def test_virtual_memory_is_a_warning() -> None:
    (warning,) = read(pod({NUMBER: 1}, annotations={"nvidia.com/memory-scheduler-policy": "virtual"})).warnings
    assert "ignored by gputile" in warning
    assert read(pod({NUMBER: 1}, annotations={"nvidia.com/memory-scheduler-policy": "physical"})).warnings == ()


# ---- grants ---------------------------------------------------------------------------------------------------------

CARDS = node().cards(2, "V100", "32Gi").node()


def common(container: str, uuids: str) -> dict[str, str]:
    return {
        "NVIDIA_VISIBLE_DEVICES": uuids,
        "MANAGER_VISIBLE_DEVICES": uuids,
        "VGPU_POD_NAME": "web-0",
        "VGPU_POD_NAMESPACE": "default",
        "VGPU_POD_UID": "uid-1",
        "VGPU_CONTAINER_NAME": container,
    }


@pytest.mark.parametrize(
    ("manifest", "containers", "record", "env"),
    [
        pytest.param(
            pod({NUMBER: 2, MEMORY: 3000, CORES: 30}),
            [held("c0", tile(0, 3000, 30), tile(1, 3000, 30))],
            "c0[0_GPU-n1-0_30_3000,1_GPU-n1-1_30_3000]",
            {
                "c0": common("c0", "GPU-n1-0,GPU-n1-1")
                | {
                    "CUDA_MEM_LIMIT_0": "3000m",
                    "CUDA_CORE_LIMIT_0": "30",
                    "CUDA_MEM_LIMIT_1": "3000m",
                    "CUDA_CORE_LIMIT_1": "30",
                }
            },
            id="a-tile-of-each-of-two-cards",
        ),
        pytest.param(
            pod({NUMBER: 1, MEMORY: 5}, {}, {NUMBER: 1}),
            [held("c0", tile(0, 5)), held("c2", tile(1, 32768, 100))],
            "c0[0_GPU-n1-0_0_5];c2[1_GPU-n1-1_100_32768]",
            {
                "c0": common("c0", "GPU-n1-0") | {"CUDA_MEM_LIMIT_0": "5m", "CUDA_CORE_LIMIT_0": "0"},
                "c2": common("c2", "GPU-n1-1") | {"CUDA_MEM_LIMIT_0": "32768m", "CUDA_CORE_LIMIT_0": "100"},
            },
            id="containers-by-name-joined-by-semicolons-those-without-cards-left-out",
        ),
    ],
)
def test_written_grant(
    manifest: Manifest, containers: list[ContainerGrant], record: str, env: dict[str, dict[str, str]]
) -> None:
    context = grant_context(manifest, CARDS, *containers)
    written = vgpu.write_grant(context)
    assert written.annotations == {
        "nvidia.com/pre-allocated": record,
        "nvidia.com/predicate-node": "n1",
        "nvidia.com/predicate-time": str(AT),
    }
    assert written.labels == {"nvidia.com/assigned-phase": "allocating", "nvidia.com/metrics-node": "n1"}
    assert written.env == env
    both = registry.write_grant(context)
    assert both.annotations == written.annotations | gputile.write_grant(context).annotations
    assert (both.labels, both.env) == (written.labels, written.env)


def test_the_domain_prefixes_what_is_written() -> None:
    manifest = pod({"example.com/vgpu-number": 1, "example.com/vgpu-memory": 5})
    written = vgpu.write_grant(grant_context(manifest, CARDS, held("c0", tile(0, 5)), settings=ELSEWHERE))
    assert set(written.annotations) == {
        f"example.com/{k}" for k in ("pre-allocated", "predicate-node", "predicate-time")
    }
    assert set(written.labels) == {"example.com/assigned-phase", "example.com/metrics-node"}


PRE, REAL = "nvidia.com/pre-allocated", "nvidia.com/real-allocated"


@pytest.mark.parametrize(
    ("annotations", "want"),
    [
        pytest.param({PRE: "c0[1_GPU-n1-1_30_9]"}, (held("c0", tile(1, 9, 30)),), id="the-plan"),
        pytest.param({REAL: "c0[1_GPU-n1-1_30_9]"}, (held("c0", tile(1, 9, 30)),), id="what-was-really-allocated"),
        pytest.param(
            {PRE: "c0[1_GPU-n1-1_30_9];c1[1_GPU-n1-1_1_1]", REAL: "c0[0_GPU-n1-0_30_9]"},
            (held("c0", tile(0, 9, 30)), held("c1", tile(1, 1, 1))),
            id="what-was-really-allocated-wins-container-by-container",
        ),
        pytest.param(
            {PRE: "stranger[1_GPU-n1-1_30_9]"},
            (held("stranger", tile(1, 9, 30)),),
            id="a-container-that-the-pod-lacks-counts-as-one-that-runs-all-the-time",
        ),
        pytest.param({PRE: ""}, None, id="an-empty-record"),
        pytest.param({}, None, id="no-record"),
    ],
)
def test_records_of_the_original_are_read(annotations: dict[str, str], want: tuple[ContainerGrant, ...] | None) -> None:
    manifest = pod({NUMBER: 1, MEMORY: 9}, {NUMBER: 1, MEMORY: 1}, annotations=annotations, on="n1")
    grant = None if want is None else Grant(pod="uid-1", node="n1", dialect="vgpu", containers=want)
    assert records.read_grant(object_of(manifest), CARDS) == grant


@pytest.mark.parametrize(
    "record",
    [
        pytest.param("c0", id="no-bracket"),
        pytest.param("c0[0_GPU-n1-0_30_9", id="an-open-bracket"),
        pytest.param("c0[0_GPU-n1-0_30]", id="too-few-parts"),
        pytest.param("c0[x_GPU-n1-0_30_9]", id="an-index-in-words"),
    ],
)
def test_a_broken_record_does_not_count(record: str) -> None:
    manifest = pod({NUMBER: 1, MEMORY: 9}, annotations={PRE: record}, on="n1")
    assert records.read_grant(object_of(manifest), CARDS) is None


CONTAINERS = st.fixed_dictionaries(
    {NUMBER: st.integers(1, 2)}, optional={MEMORY: st.integers(0, 900), CORES: st.integers(0, 40)}
)


@settings(max_examples=50)
@given(pods(CONTAINERS))
def test_a_written_grant_is_read_back(manifest: Manifest) -> None:
    assert_round_trip(vgpu, manifest)


@settings(max_examples=25)
@given(pods(CONTAINERS))
def test_a_written_grant_is_read_back_with_a_memory_factor(manifest: Manifest) -> None:
    assert_round_trip(vgpu, manifest, TENFOLD)


# ---- nodes ----------------------------------------------------------------------------------------------------------

REGISTER, CONFIG, TOPOLOGY = (
    f"nvidia.com/node-{name}" for name in ("device-register", "config-info", "device-topology")
)
V100 = {
    "id": 0,
    "type": "Tesla V100",
    "uuid": "GPU-a",
    "core": 100,
    "memory": 32768,
    "number": 10,
    "numa": 0,
    "mig": False,
    "busId": "0000:3b:00.0",
    "capability": 7.0,
    "healthy": True,
}
FIRST = Card(index=0, uuid="GPU-a", memory=32768, model="Tesla V100", numa=0, pci="0000:3b:00.0")
SPLIT = '{"deviceSplit":4,"coresScaling":1,"memoryFactor":1,"memoryScaling":1}'


def register(*cards: dict[str, Any]) -> dict[str, str]:
    return {REGISTER: msgspec.json.encode(list(cards)).decode()}


@pytest.mark.parametrize(
    ("annotations", "want"),
    [
        pytest.param(register(V100) | {CONFIG: SPLIT}, (FIRST,), id="every-field-and-the-cards-own-number-of-slots"),
        pytest.param(
            register(V100 | {"number": 0}) | {CONFIG: SPLIT},
            (msgspec.structs.replace(FIRST, slots=4),),
            id="the-nodes-split-where-the-card-has-no-number",
        ),
        pytest.param(
            register(V100 | {"number": 0}), (FIRST,), id="the-setting-where-neither-has-it-and-no-config-is-fine"
        ),
        pytest.param(
            register(V100 | {"healthy": False, "mig": True, "id": 3}),
            (msgspec.structs.replace(FIRST, index=3, healthy=False, mode="mig"),),
            id="health-mig-and-index",
        ),
    ],
)
def test_read_node(annotations: dict[str, str], want: tuple[Card, ...]) -> None:
    parsed_node = node_of(raw_node({NUMBER: 10}, annotations=annotations))
    assert (parsed_node.cards, parsed_node.links, parsed_node.fault) == (want, (), "")


def test_the_register_is_under_the_domain() -> None:
    assert node_of(raw_node(annotations=register(V100)), ELSEWHERE).cards == ()
    elsewhere = {"example.com/node-device-register": register(V100)[REGISTER]}
    assert node_of(raw_node(annotations=elsewhere), ELSEWHERE).cards == (FIRST,)


@pytest.mark.parametrize(
    "annotations",
    [
        pytest.param({REGISTER: "x"}, id="no-json"),
        pytest.param({REGISTER: "null"}, id="null"),
        pytest.param(register({"id": 0}), id="a-card-without-uuid"),
        pytest.param(register(V100) | {CONFIG: "x"}, id="a-broken-config"),
        pytest.param(register(V100, V100 | {"id": 1}), id="a-uuid-twice"),
        pytest.param(register(V100, V100 | {"uuid": "GPU-b"}), id="an-index-twice"),
    ],
)
def test_a_broken_register_puts_the_node_out_of_use(annotations: dict[str, str]) -> None:
    assert node_of(raw_node({NUMBER: 10}, annotations=annotations)).fault == NodeReason.BAD_INVENTORY


@pytest.mark.parametrize(
    ("topology", "links"),
    [
        pytest.param(
            '[{"index":0,"links":{"1":[2,5]}},{"index":1,"links":{"0":[5]}}]',
            ((0, 5), (5, 0)),
            id="the-closest-link-of-a-pair-counts",
        ),
        pytest.param('[{"index":0,"links":{"9":[2]}}]', ((0, 0), (0, 0)), id="unknown-cards-are-ignored"),
        pytest.param('[{"index":0,"links":{"1":[]}}]', ((0, 0), (0, 0)), id="a-pair-without-links"),
        pytest.param("{", (), id="an-unreadable-table-only-disables-the-preference"),
    ],
)
def test_topology(topology: str, links: tuple[tuple[int, ...], ...]) -> None:
    cards = register(V100, V100 | {"id": 1, "uuid": "GPU-b"})
    parsed_node = node_of(raw_node(annotations=cards | {TOPOLOGY: topology}), DEFAULTS)
    assert (parsed_node.links, parsed_node.fault) == (links, "")
