"""gputile.io/gpu, memory, cores; the grant and the inventory that are written for all dialects."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gputile.dialects import gputile, records, registry
from gputile.dialects.kube_objects import NodeInventory
from gputile.dialects.settings import DEFAULTS
from gputile.model.cards import Card
from gputile.model.grants import Grant
from gputile.model.refusals import BadRequest, NodeReason, RequestError
from gputile.model.requests import ContainerRequest, Role
from gputile.testing.builders import ask, node, pod
from tests.dialects.shortcuts import (
    AT,
    Manifest,
    Rejected,
    Want,
    assert_round_trip,
    bound,
    expect,
    grant_context,
    held,
    no_request,
    node_of,
    object_of,
    pods,
    raw_node,
    tile,
)

GPU, MEMORY, CORES = "gputile.io/gpu", "gputile.io/memory", "gputile.io/cores"


@pytest.mark.parametrize(
    ("limits", "want"),
    [
        pytest.param({GPU: 1}, ask(whole=True, name="c0"), id="a-gpu-alone-is-a-whole-card-of-its-own"),
        pytest.param({GPU: "4"}, ask(whole=True, cards=4, name="c0"), id="four-gpus-are-four-whole-cards"),
        pytest.param({GPU: 1, MEMORY: 3072}, ask(3072, name="c0"), id="memory-is-MiB-and-reserves-no-cores"),
        pytest.param({GPU: 4, MEMORY: 3072}, ask("3Gi", cards=4, name="c0"), id="memory-is-per-card-not-the-sum"),
        pytest.param({GPU: 2, CORES: 30}, ask(percent=100, cores=30, cards=2, name="c0"), id="cores-take-all-memory"),
        pytest.param({GPU: 1, MEMORY: 1, CORES: 1}, ask(1, 1, name="c0"), id="one-MiB-and-one-percent-is-a-tile"),
        pytest.param({GPU: 1, MEMORY: "2k"}, ask(2000, name="c0"), id="a-quantity-suffix-multiplies-the-number"),
        pytest.param({GPU: 1, MEMORY: 0, CORES: 0}, ask(whole=True, name="c0"), id="zero-is-the-same-as-left-out"),
        pytest.param(
            {GPU: 1, MEMORY: 1024, CORES: 100}, ask(1024, 100, name="c0"), id="100-cores-are-the-most-of-a-card"
        ),
        pytest.param({GPU: 0}, None, id="zero-gpus-are-ignored"),
        pytest.param({"cpu": 4}, None, id="a-pod-without-gpus-is-ignored"),
        pytest.param(
            {GPU: 1, CORES: 150},
            Rejected(RequestError.OUT_OF_RANGE, "at most 100, and request more GPUs with `gputile.io/gpu`"),
            id="150-cores-are-refused-and-more-cards-offered",
        ),
        pytest.param(
            {MEMORY: 1024},
            Rejected(RequestError.NO_DEVICE_RESOURCE, "add `gputile.io/gpu: 1`"),
            id="memory-alone-has-no-card",
        ),
        pytest.param(
            {CORES: 10},
            Rejected(RequestError.NO_DEVICE_RESOURCE, "add `gputile.io/gpu: 1`"),
            id="cores-alone-have-no-card",
        ),
        pytest.param(
            {GPU: 1, MEMORY: "3Gi"},
            Rejected(RequestError.OUT_OF_RANGE, "write a plain number without Gi or Mi"),
            id="3Gi-are-too-many-MiB-and-the-unit-is-explained",
        ),
        pytest.param(
            {GPU: 1, MEMORY: 1024 * 1024 + 1},
            Rejected(RequestError.OUT_OF_RANGE, "1048577 MiB per GPU, more memory than any GPU has"),
            id="more-than-a-TiB-is-more-than-any-card",
        ),
    ],
)
def test_one_container(limits: dict[str, Any], want: Want) -> None:
    expect(pod(limits), "gputile", want)


@pytest.mark.parametrize(
    ("manifest", "want"),
    [
        pytest.param(
            pod({GPU: 1, MEMORY: 1024}, {}, {GPU: 2}),
            (ask(1024, name="c0"), no_request("c1"), ask(whole=True, cards=2, name="c2")),
            id="each-container-has-its-own-request-or-none",
        ),
        pytest.param(
            pod({GPU: 1}, init=({GPU: 1, MEMORY: 9}, {GPU: 1, MEMORY: 8, "sidecar": True})),
            (
                ask(9, name="init-0", role=Role.INIT),
                ask(8, name="init-1", role=Role.SIDECAR),
                ask(whole=True, name="c0"),
            ),
            id="init-containers-come-first-and-restartPolicy-Always-makes-a-sidecar",
        ),
        pytest.param(
            pod({}, init=({GPU: 1, MEMORY: 9},)),
            (ask(9, name="init-0", role=Role.INIT), no_request("c0")),
            id="an-init-container-alone-is-a-request",
        ),
    ],
)
def test_several_containers(manifest: Manifest, want: tuple[ContainerRequest, ...]) -> None:
    expect(manifest, "gputile", want)


@pytest.mark.parametrize(
    ("manifest", "annotations", "env"),
    [
        pytest.param(
            pod({GPU: 2, MEMORY: 3072, CORES: 30}),
            {
                "version": 1,
                "pod": "uid-1",
                "node": "n1",
                "dialect": "gputile",
                "containers": [
                    {
                        "name": "c0",
                        "tiles": [
                            {"uuid": "GPU-n1-0", "index": 0, "memory": 3072, "cores": 30},
                            {"uuid": "GPU-n1-1", "index": 1, "memory": 3072, "cores": 30},
                        ],
                        "role": "app",
                    }
                ],
                "at": AT,
                "phase": "granted",
            },
            {
                "c0": {
                    "NVIDIA_VISIBLE_DEVICES": "GPU-n1-0,GPU-n1-1",
                    "GPUTILE_MEMORY_MIB": "3072,3072",
                    "GPUTILE_CORES": "30,30",
                }
            },
            id="the-grant-names-pod-node-tiles-time-and-phase",
        ),
    ],
)
def test_written_grant(manifest: Manifest, annotations: dict[str, Any], env: dict[str, dict[str, str]]) -> None:
    context = grant_context(manifest, node().cards(2).node(), held("c0", tile(0, 3072, 30), tile(1, 3072, 30)))
    for written in (gputile.write_grant(context), registry.write_grant(context)):
        assert {key: msgspec.json.decode(text) for key, text in written.annotations.items()} == {
            "gputile.io/grant": annotations
        }
        assert written.labels == {}
        assert written.env == env


TILE = {"uuid": "GPU-n1-0", "index": 0, "memory": 4096, "cores": 10}
NOTHING = {"memory": 0, "cores": 0}


def grant_text(**changed: Any) -> str:
    containers = [{"name": "c0", "tiles": [TILE]}]
    record = {"version": 1, "pod": "uid-1", "node": "n1", "dialect": "gputile", "containers": containers}
    return json.dumps(record | changed)


def granting(*tiles: list[dict[str, Any]], names: list[str] | None = None, **changed: Any) -> str:
    """A grant of these tiles to one container after the other."""
    tiles = tiles * len(names) if names else tiles
    called = names or [f"c{n}" for n in range(len(tiles))]
    containers = [{"name": name, "tiles": held} for name, held in zip(called, tiles, strict=True)]
    return grant_text(containers=containers, **changed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(grant_text(pod="uid-2"), "belongs to pod uid-2", id="a-copy-from-another-pod-is-rejected"),
        pytest.param(grant_text(node="n2"), "on node n2", id="a-copy-from-another-node-is-rejected"),
        pytest.param("{", "cannot be read", id="half-a-record"),
        pytest.param("[]", "cannot be read", id="another-shape"),
        pytest.param(granting([{}]), "cannot be read", id="an-empty-tile"),
        pytest.param(grant_text(containers=[]), "no GPU to a container", id="a-grant-of-nothing"),
        pytest.param(granting([]), "no GPU to a container", id="a-container-without-tiles"),
        pytest.param(granting([TILE], []), "no GPU to a container", id="one-of-two-containers-without-tiles"),
        pytest.param(granting([TILE | NOTHING]), "a GPU share of no memory and no cores", id="a-tile-of-nothing"),
        pytest.param(
            granting([TILE, TILE | NOTHING]), "a GPU share of no memory", id="a-tile-of-nothing-beside-a-good-one"
        ),
        pytest.param(granting([TILE], names=["c0", "c0"]), "twice", id="a-container-that-is-named-twice"),
        pytest.param(granting([TILE], version=0), "version 0", id="version-zero"),
        pytest.param(granting([TILE], version=2), "version 2", id="a-version-that-we-do-not-know"),
        pytest.param(granting([TILE], version=-1), "version -1", id="a-version-below-zero"),
        pytest.param(granting([TILE], at=-1), "cannot be read", id="a-time-before-1970"),
        pytest.param(granting([TILE], at=10**30), "cannot be read", id="a-time-out-of-range"),
    ],
)
def test_a_grant_that_we_cannot_have_written_for_this_pod_is_rejected(text: str, message: str) -> None:
    granted_node = node().card("T4", "16Gi").node()
    parsed_grant = records.read_grant(
        object_of(pod({GPU: 1}, annotations={"gputile.io/grant": text}, on="n1")), granted_node
    )
    assert isinstance(parsed_grant, BadRequest)
    assert parsed_grant.code is RequestError.BAD_ANNOTATION
    assert message in parsed_grant.message


def test_unknown_keys_of_a_newer_grant_are_ignored() -> None:
    text = grant_text(later=[{"version": 2}])
    parsed_grant = records.read_grant(object_of(pod({GPU: 1}, annotations={"gputile.io/grant": text}, on="n1")), None)
    assert parsed_grant == Grant(pod="uid-1", node="n1", dialect="gputile", containers=(held("c0", tile(0, 4096, 10)),))


@pytest.mark.parametrize(
    ("tiles", "cards"),
    [
        pytest.param([[TILE | {"memory": 16384, "cores": 100}]], 1, id="all-of-the-gpu"),
        pytest.param([[TILE | {"memory": 0}]], 1, id="cores-alone"),
        pytest.param([[TILE | {"cores": 0}]], 1, id="memory-alone"),
        pytest.param([[TILE | {"memory": 99999}]], 0, id="on-a-node-whose-gpus-are-not-known-yet"),
    ],
)
def test_a_grant_that_we_may_have_written_is_valid(tiles: list[list[dict[str, Any]]], cards: int) -> None:
    text = granting(*tiles)
    granted_node = node().cards(cards, "T4", "16Gi").node()
    parsed_grant = records.read_grant(
        object_of(pod({GPU: 1}, annotations={"gputile.io/grant": text}, on="n1")), granted_node
    )
    assert isinstance(parsed_grant, Grant)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(granting([TILE | {"memory": 16385}]), "16385 MiB", id="more-memory-than-the-gpu-has"),
        pytest.param(granting([TILE | {"cores": 101}]), "101 %", id="more-cores-than-the-gpu-has"),
        pytest.param(
            granting([TILE | {"memory": 9000}], [TILE | {"memory": 9000}]),
            "18000 MiB",
            id="in-sum-more-than-the-gpu-has",
        ),
        pytest.param(granting([TILE]), "", id="no-more-than-it-has"),
    ],
)
def test_a_grant_of_more_than_its_gpu_is_counted_and_starts_nothing(text: str, message: str) -> None:
    granted_node = node().card("T4", "16Gi").node()
    parsed_grant = records.read_grant(
        object_of(pod({GPU: 1}, annotations={"gputile.io/grant": text}, on="n1")), granted_node
    )
    assert isinstance(parsed_grant, Grant)
    fault = gputile.beyond_its_cards(parsed_grant, {card.uuid: card for card in granted_node.cards})
    assert message in fault
    assert bool(message) == bool(fault)


def test_our_grant_wins_over_another_record() -> None:
    manifest = pod({"aliyun.com/gpu-mem": 3})
    context = grant_context(manifest, node().cards(2, size="15Gi").node(), held("c0", tile(1, 3072)))
    written = registry.write_grant(context)
    written.annotations["ALIYUN_COM_GPU_MEM_IDX"] = "0"
    written.annotations["scheduler.framework.gpushare.allocation"] = '{"0":{"0":3}}'
    assert records.read_grant(bound(manifest, written), None) == context.grant


CONTAINERS = st.fixed_dictionaries(
    {GPU: st.integers(1, 2)}, optional={MEMORY: st.integers(0, 9000), CORES: st.integers(0, 40)}
)


@settings(max_examples=50)
@given(pods(CONTAINERS))
def test_a_written_grant_is_read_back(manifest: Manifest) -> None:
    assert_round_trip(gputile, manifest)


# ---- inventory ------------------------------------------------------------------------------------------------------


def inventory(*cards: dict[str, Any], **rest: Any) -> dict[str, str]:
    return {"gputile.io/inventory": msgspec.json.encode({"version": 1, "cards": list(cards), **rest}).decode()}


@pytest.mark.parametrize(
    ("annotations", "want"),
    [
        pytest.param(
            inventory({"index": 0, "uuid": "a", "memory": 24576}),
            (Card(index=0, uuid="a", memory=24576, cores=100, slots=10, numa=-1, healthy=True),),
            id="index-uuid-and-memory-are-enough-and-the-card-is-healthy",
        ),
        pytest.param(
            inventory(
                {
                    "index": 3,
                    "uuid": "a",
                    "memory": 81920,
                    "model": "A100",
                    "cores": 90,
                    "slots": 4,
                    "numa": 1,
                    "pci": "0000:3b:00.0",
                    "mode": "mps",
                    "healthy": False,
                    "reason": "Xid 79",
                },
                driver="570.1",
                cuda="12.8",
                later=1,
            ),
            (
                Card(
                    index=3,
                    uuid="a",
                    memory=81920,
                    model="A100",
                    cores=90,
                    slots=4,
                    numa=1,
                    pci="0000:3b:00.0",
                    mode="mps",
                    healthy=False,
                    reason="Xid 79",
                ),
            ),
            id="every-fact-of-a-card-is-read-and-unknown-keys-are-ignored",
        ),
        pytest.param(
            inventory({"index": 0, "uuid": "a", "memory": 1}, {"index": 1, "uuid": "b", "memory": 2})
            | {"gputile.io/cordon": " b , c"},
            (Card(index=0, uuid="a", memory=1), Card(index=1, uuid="b", memory=2, cordoned=True)),
            id="a-card-named-in-the-cordon-is-cordoned",
        ),
        pytest.param(inventory(), (), id="an-inventory-without-cards-is-a-node-without-cards"),
    ],
)
def test_read_inventory(annotations: dict[str, str], want: tuple[Card, ...]) -> None:
    parsed_node = node_of(raw_node(annotations=annotations))
    assert parsed_node.cards == want
    assert parsed_node.fault == ""


@pytest.mark.parametrize(
    "annotations",
    [
        pytest.param({"gputile.io/inventory": "{"}, id="no-json"),
        pytest.param({"gputile.io/inventory": "[]"}, id="another-shape"),
        pytest.param(inventory({"index": 0, "uuid": "a"}), id="a-card-without-memory"),
        pytest.param(
            inventory({"index": 0, "uuid": "a", "memory": 1}, {"index": 1, "uuid": "a", "memory": 1}), id="a-uuid-twice"
        ),
        pytest.param(
            inventory({"index": 0, "uuid": "a", "memory": 1}, {"index": 0, "uuid": "b", "memory": 1}),
            id="an-index-twice",
        ),
        pytest.param(inventory({"index": 0, "uuid": "", "memory": 1}), id="a-card-without-a-name"),
        pytest.param(inventory({"index": 0, "uuid": "a", "memory": -1}), id="negative-memory"),
        pytest.param(inventory({"index": 0, "uuid": "a", "memory": 2**31}), id="memory-beyond-any-card"),
        pytest.param(inventory({"index": -1, "uuid": "a", "memory": 1}), id="a-negative-index"),
        pytest.param(
            inventory({"index": 0, "uuid": "a", "memory": 1, "numa": 2**40}), id="a-numa-node-beyond-counting"
        ),
    ],
)
def test_a_broken_inventory_puts_the_node_out_of_use(annotations: dict[str, str]) -> None:
    parsed_node = node_of(raw_node({"aliyun.com/gpu-mem": 30, "aliyun.com/gpu-count": 2}, annotations=annotations))
    assert parsed_node.fault == NodeReason.BAD_INVENTORY
    assert parsed_node.cards == ()


ONE = {"index": 0, "uuid": "a", "memory": 16}


@pytest.mark.parametrize(
    ("allocatable", "cards", "fault"),
    [
        pytest.param({GPU: "0"}, [ONE], NodeReason.PLUGIN_GONE, id="the-kubelet-has-lost-the-plugin"),
        pytest.param({GPU: 0}, [ONE], NodeReason.PLUGIN_GONE, id="zero-as-a-number"),
        pytest.param({GPU: "10"}, [ONE], "", id="the-kubelet-has-devices"),
        pytest.param({}, [ONE], "", id="a-node-that-does-not-name-the-resource-is-accepted"),
        pytest.param({"nvidia.com/gpu": "0"}, [ONE], "", id="other-resources-are-left-to-kube-scheduler"),
        pytest.param({GPU: "some"}, [ONE], "", id="no-number-at-all"),
        pytest.param({GPU: "0"}, [], "", id="no-cards-no-devices"),
        pytest.param({GPU: "0"}, [ONE | {"healthy": False}], "", id="no-healthy-card-no-devices"),
        pytest.param({GPU: "0"}, [ONE | {"mode": "mig"}], "", id="no-card-to-share-no-devices"),
        pytest.param(
            {GPU: "0"},
            [ONE | {"healthy": False}, ONE | {"index": 1, "uuid": "b"}],
            NodeReason.PLUGIN_GONE,
            id="one-healthy-card-is-enough-to-miss-the-plugin",
        ),
    ],
)
def test_a_kubelet_without_our_plugin_puts_the_node_out_of_use(
    allocatable: dict[str, Any], cards: list[dict[str, Any]], fault: str
) -> None:
    parsed_node = node_of(raw_node(allocatable=allocatable, annotations=inventory(*cards)))
    assert parsed_node.fault == fault
    assert len(parsed_node.cards) == len(cards), "what is held of them is still counted"


def test_another_systems_node_may_have_zero() -> None:
    theirs = {"aliyun.com/gpu-mem": 30, "aliyun.com/gpu-count": 2}
    assert node_of(raw_node(theirs, allocatable={**theirs, GPU: "0"})).fault == ""


CARDS = st.builds(
    Card,
    index=st.integers(0, 99),
    uuid=st.text("abcGPU-_/0123", min_size=1, max_size=8),
    memory=st.integers(0, 2**31 - 1),
    cores=st.integers(0, 100),
    slots=st.integers(0, 100),
    model=st.text(max_size=8),
    numa=st.integers(-1, 7),
    pci=st.text(max_size=8),
    mode=st.sampled_from(["", "mig", "mps", "hami-core"]),
    healthy=st.booleans(),
    reason=st.text(max_size=8),
)


@settings(max_examples=50)
@given(
    st.lists(CARDS, max_size=4, unique_by=(lambda card: card.uuid, lambda card: card.index)),
    st.lists(st.integers(0, 3), min_size=16, max_size=16),
    st.booleans(),
)
def test_a_written_inventory_is_read_back(cards: list[Card], weights: list[int], linked: bool) -> None:
    size = range(len(cards))
    links = tuple(tuple(weights[4 * a + b] for b in size) for a in size) if linked else ()
    written = NodeInventory(tuple(cards), links if any(map(any, links)) else ())
    text = gputile.write_inventory(written)
    parsed_node = node_of(raw_node(annotations={"gputile.io/inventory": text}), DEFAULTS)
    assert (parsed_node.cards, parsed_node.links, parsed_node.fault) == (written.cards, written.links, "")
