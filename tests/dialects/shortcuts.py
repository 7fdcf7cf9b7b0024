"""Helpers for the tests of every dialect: read a pod and compare, write a grant and read it back."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec
from hypothesis import assume
from hypothesis import strategies as st

from gputile.dialects import nvidia, records, registry
from gputile.dialects.dialect import Dialect
from gputile.dialects.kube_objects import GrantContext, Pod, PodRecord
from gputile.dialects.parsing import convert_pod
from gputile.dialects.settings import DEFAULTS, DialectSettings
from gputile.engine.placement.place import Placement, place
from gputile.model.cards import Card, Node, NodeView
from gputile.model.grants import ContainerGrant, Grant, Tile
from gputile.model.refusals import BadRequest, RequestError
from gputile.model.requests import Constraints, ContainerRequest, PodRequest, Role
from gputile.testing.builders import pod

Manifest: TypeAlias = dict[str, Any]
AT = 1_700_000_000_123_456_789  # nanoseconds: the time of the grants in the tables


class Rejected(msgspec.Struct, frozen=True):
    """An expected rejection: its code, and a part of its message."""

    code: RequestError
    text: str


Want: TypeAlias = ContainerRequest | tuple[ContainerRequest, ...] | Rejected | None


def expect(manifest: Manifest, dialect: str, want: Want, settings: DialectSettings = DEFAULTS) -> None:
    """The pod, read through `registry.read_pod`, is parsed as `want`."""
    parsed = registry.read_pod(manifest, settings)
    if want is None:
        assert parsed is None
    elif isinstance(want, Rejected):
        assert isinstance(parsed, BadRequest), parsed
        assert parsed.code is want.code, parsed.message
        assert want.text in parsed.message, (want.text, parsed.message)
    else:
        assert isinstance(parsed, PodRequest), parsed
        assert parsed.asks == (want if isinstance(want, tuple) else (want,))
        assert parsed.dialect == dialect


def read(manifest: Manifest, settings: DialectSettings = DEFAULTS) -> PodRequest:
    """The request of a valid pod."""
    parsed = registry.read_pod(manifest, settings)
    assert isinstance(parsed, PodRequest), parsed
    return parsed


def constraints(manifest: Manifest, settings: DialectSettings = DEFAULTS) -> Constraints:
    return read(manifest, settings).constraints


def object_of(manifest: Manifest) -> Pod:
    parsed_pod = convert_pod(manifest)
    assert isinstance(parsed_pod, Pod), parsed_pod
    return parsed_pod


def no_request(name: str, role: Role = Role.APP) -> ContainerRequest:
    """A container that requests no card."""
    return ContainerRequest(container=name, role=role)


# ---- grants ---------------------------------------------------------------------------------------------------------


def tile(index: int, memory: int, cores: int = 0, node: str = "n1") -> Tile:
    """A tile of a card of the builders."""
    return Tile(f"GPU-{node}-{index}", index, memory, cores)


def held(container: str, *tiles: Tile, role: Role = Role.APP) -> ContainerGrant:
    return ContainerGrant(container, tiles, role)


def grant_context(
    manifest: Manifest, node: Node, *containers: ContainerGrant, settings: DialectSettings = DEFAULTS
) -> GrantContext:
    """These tiles for this pod on this node."""
    request = read(manifest, settings)
    grant = Grant(pod="uid-1", node=node.name, dialect=request.dialect, containers=containers, slots=request.slots)
    return GrantContext(grant=grant, pod=object_of(manifest), asked=request, cards=node.cards, at=AT, settings=settings)


def bound(manifest: Manifest, written: PodRecord, node: str = "n1") -> Pod:
    """The pod as the API server shows it after the bind: on its node, with what was written."""
    metadata = manifest["metadata"]
    return object_of(
        manifest
        | {
            "metadata": metadata
            | {
                "annotations": metadata["annotations"] | written.annotations,
                "labels": metadata["labels"] | written.labels,
            },
            "spec": manifest["spec"] | {"nodeName": node},
        }
    )


SHELF = Node(
    name="n1",
    cards=tuple(
        Card(index=7 - position, uuid=f"GPU-{position}_{'abcdefgh'[position]}", memory=memory)
        for position, memory in enumerate([15109, 16384, 24258, 24576, 40537, 40960, 81559, 81920])
    ),
    cpu=64000,
    memory=524288,
)
"""Cards of eight sizes, round and not, whose index is not their position in the list."""


def assert_round_trip(dialect: Dialect, manifest: Manifest, settings: DialectSettings = DEFAULTS) -> None:
    """read(write(grant)) == grant, by the dialect's own record alone and by ours."""
    request = read(manifest, settings)
    assert request.dialect == dialect.NAME
    placement = place(request, NodeView.empty(SHELF))
    assume(isinstance(placement, Placement))
    assert isinstance(placement, Placement)
    grant = placement.grant("uid-1", request)
    context = GrantContext(
        grant=grant, pod=object_of(manifest), asked=request, cards=SHELF.cards, at=AT, settings=settings
    )
    with_record = bound(manifest, dialect.write_grant(context))
    if dialect.NAME != nvidia.NAME:  # writes nothing of its own
        by_dialect = dialect.read_grant(with_record, SHELF.cards, settings)
        assert by_dialect is not None
        assert registry.with_slots(by_dialect) == grant
        assert records.read_grant(with_record, SHELF, settings) == grant
    assert records.read_grant(bound(manifest, registry.write_grant(context)), SHELF, settings) == grant


def pods(container: st.SearchStrategy[dict[str, Any]], **rest: Any) -> st.SearchStrategy[Manifest]:
    """Pods of one to three containers, the first of which requests GPUs; some with init containers and sidecars."""
    some = st.one_of(container, container, st.just(dict[str, Any]()))
    first = st.tuples(some, st.booleans()).map(lambda pair: pair[0] | {"sidecar": pair[1]})
    return st.builds(
        lambda first_app, more, init: pod(first_app, *more, init=tuple(init), **rest),
        container,
        st.lists(some, max_size=2),
        st.one_of(st.just([]), st.lists(first, max_size=2)),
    )


# ---- nodes ----------------------------------------------------------------------------------------------------------


def raw_node(
    capacity: Mapping[str, Any] | None = None,
    *,
    allocatable: Mapping[str, Any] | None = None,
    annotations: Mapping[str, Any] | None = None,
    labels: Mapping[str, Any] | None = None,
) -> Manifest:
    """A node as an agent describes it; allocatable defaults to the capacity."""
    return {
        "metadata": {"name": "n1", "annotations": dict(annotations or {}), "labels": dict(labels or {})},
        "status": {
            "capacity": dict(capacity or {}),
            "allocatable": dict(capacity or {} if allocatable is None else allocatable),
        },
    }


def node_of(manifest: Manifest, settings: DialectSettings = DEFAULTS) -> Node:
    parsed_node = registry.read_node(manifest, settings)
    assert isinstance(parsed_node, Node), parsed_node
    return parsed_node
