"""`gputile.io/orphaned` on a node: what is written is read back, and any other value is a bad request."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputile.dialects import gputile, registry
from gputile.dialects.kube_objects import NodeObject
from gputile.dialects.parsing import convert_node
from gputile.model.cards import Card
from gputile.model.grants import ContainerGrant, Grant, Tile
from gputile.model.refusals import BadRequest, RequestError
from gputile.model.requests import Role
from gputile.model.units import LARGEST_CARD
from tests.dialects.shortcuts import raw_node
from tests.effort import examples


def node_with(value: Any) -> NodeObject:
    parsed_node = convert_node(raw_node(annotations={gputile.ORPHANED: value}))
    assert isinstance(parsed_node, NodeObject)
    return parsed_node


def text(*grants: dict[str, Any], **changed: Any) -> str:
    return msgspec.json.encode({"version": 1, "grants": list(grants), **changed}).decode()


def record(pod: str = "uid-1", node: str = "n1", **changed: Any) -> dict[str, Any]:
    tile = {"uuid": "GPU-n1-0", "index": 0, "memory": 8, "cores": 50}
    containers = [{"name": "c0", "tiles": [tile]}]
    return {"version": 1, "pod": pod, "node": node, "dialect": "gputile", "containers": containers, **changed}


TILES = st.builds(
    Tile,
    uuid=st.text(min_size=1, max_size=8),
    index=st.integers(0, 99),
    memory=st.integers(0, LARGEST_CARD),
    cores=st.integers(0, 100),
)
CONTAINERS = st.builds(
    ContainerGrant,
    container=st.text(max_size=8),
    tiles=st.lists(TILES, max_size=3).map(tuple),
    role=st.sampled_from(Role),
)
GRANTS = st.builds(
    Grant,
    pod=st.text(min_size=1, max_size=8),
    node=st.just("n1"),
    dialect=st.text(max_size=8),
    containers=st.lists(CONTAINERS, max_size=3).map(tuple),
).map(registry.with_slots)  # those of the dialect; most are unknown here


@examples(100)
@given(st.lists(GRANTS, max_size=4, unique_by=lambda grant: grant.pod))
def test_a_written_grant_is_read_back(grants: list[Grant]) -> None:
    assert registry.read_orphaned_pods(node_with(gputile.write_orphaned_pods(grants)), ()) == tuple(grants)


def test_the_records_are_those_of_the_pods() -> None:
    """So an agent can write a grant again as it read it from the pod."""
    result = msgspec.json.decode(
        gputile.write_orphaned_pods([Grant(pod="u", node="n1", dialect="hami", containers=())])
    )
    assert result["version"] == 1
    assert result["grants"] == [
        {"version": 1, "pod": "u", "node": "n1", "dialect": "hami", "containers": [], "at": 0, "phase": "granted"}
    ]


def test_a_node_without_the_annotation() -> None:
    parsed_node = convert_node(raw_node())
    assert isinstance(parsed_node, NodeObject)
    assert registry.read_orphaned_pods(parsed_node, ()) == ()


def test_unknown_keys_are_ignored_and_placeholders_become_uuids() -> None:
    value = text(record(later=1, containers=[{"name": "c0", "tiles": [{**TILE, "uuid": "n1#0"}]}]), later=[1])
    grants = registry.read_orphaned_pods(node_with(value), (Card(index=0, uuid="GPU-true", memory=8),))
    assert isinstance(grants, tuple)
    assert [tile.uuid for held in grants[0].containers for tile in held.tiles] == ["GPU-true"]


TILE = {"uuid": "a", "index": 0, "memory": 8, "cores": 0}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        pytest.param("", "cannot be read", id="empty"),
        pytest.param("{", "cannot be read", id="half-a-record"),
        pytest.param("[]", "cannot be read", id="another-shape"),
        pytest.param("\ud800", "cannot be read", id="no-text"),
        pytest.param("[" * 100_000, "cannot be read", id="too-deep"),
        pytest.param(7, "cannot be read", id="a-number"),
        pytest.param(text(version=2), "version 2", id="a-newer-version"),
        pytest.param(text({}), "cannot be read", id="a-grant-of-nothing"),
        pytest.param(text(record(node="n2")), "another node", id="a-grant-of-another-node"),
        pytest.param(text(record(pod="")), "without a UID", id="a-pod-without-a-name"),
        pytest.param(text(record(), record()), "twice", id="a-pod-twice"),
        pytest.param(
            text(record(containers=[{"name": "c0", "tiles": [{**TILE, "memory": 2**30}]}])),
            "more than any GPU has",
            id="memory-that-no-card-has",
        ),
        pytest.param(
            text(record(containers=[{"name": "c0", "tiles": [{**TILE, "cores": -1}]}])),
            "cannot be read",
            id="negative-cores",
        ),
    ],
)
def test_an_annotation_that_no_agent_wrote_is_a_bad_request(value: Any, message: str) -> None:
    grants = registry.read_orphaned_pods(node_with(value), ())
    assert isinstance(grants, BadRequest)
    assert grants.code is RequestError.BAD_ANNOTATION
    assert message in grants.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["version", "grants", "pod", "node", "containers", "tiles"]), inner)
    ),
    max_leaves=10,
)


@examples(100)
@given(st.one_of(JSON.map(lambda value: msgspec.json.encode(value).decode(errors="replace")), st.text(max_size=20)))
def test_no_value_of_the_annotation_raises(value: str) -> None:
    assert isinstance(registry.read_orphaned_pods(node_with(value), ()), tuple | BadRequest)
