"""Our own grant on a pod, and the agent's list of orphaned pods, which are deleted while their containers still run.

    gputile.io/grant: {"version": 1, "pod": "<UID>", "node": "n1", "dialect": "hami", "at": <ns since 1970>,
        "containers": [{"name": "main", "role": "app", "tiles": [{"uuid": "GPU-...", "memory": 3000, "cores": 30}]}]}

A grant names the UID and node of its pod, so that a copy of it on another pod is detected.
"""

from collections.abc import Sequence

import msgspec

from gputile.audit.fields import Json, decoded, items, mapping, shown, whole
from gputile.audit.objects import AuditedNode, UnreadableObject
from gputile.audit.sizes import NodeGpus
from gputile.model.requests import Role
from gputile.model.units import MiB, Percent

GRANT, ORPHANED = "gputile.io/grant", "gputile.io/orphaned"
VERSION = 1


class GrantRecordTile(msgspec.Struct, frozen=True):
    """A tile of a grant."""

    uuid: str  # the UUID that the node publishes now, if the node has the GPU
    memory: MiB
    cores: Percent


class GrantRecordContainer(msgspec.Struct, frozen=True):
    """The tiles of one container of a grant."""

    name: str
    role: str
    tiles: tuple[GrantRecordTile, ...]


class GrantRecord(msgspec.Struct, frozen=True):
    """A grant, as the audit reads it."""

    pod: str
    node: str
    dialect: str
    at: int
    containers: tuple[GrantRecordContainer, ...]


def read_grant(value: str, gpus: NodeGpus) -> GrantRecord:
    """Raises `UnreadableObject`. The caller compares the grant with its pod."""
    record = decoded(value)
    if not isinstance(record, dict):
        raise UnreadableObject(f"annotation `{GRANT}` cannot be read: it is not a JSON object")
    return _grant(record, GRANT, gpus)


def read_orphaned_pods(node: AuditedNode, gpus: NodeGpus) -> tuple[GrantRecord, ...]:
    """Grants of pods that are deleted from the API server. Raises `UnreadableObject`."""
    value = node.annotations.get(ORPHANED)
    if value is None:
        return ()
    record = mapping(decoded(value))
    _check_version(record, ORPHANED)
    if not isinstance(record.get("grants"), list | tuple):
        raise UnreadableObject(f"annotation `{ORPHANED}` cannot be read: it has no list of grants")
    grants = tuple(_grant(mapping(entry), ORPHANED, gpus) for entry in items(record["grants"]))
    uids = {grant.pod for grant in grants}
    if "" in uids or len(uids) != len(grants) or any(grant.node != node.name for grant in grants):
        raise UnreadableObject(f"annotation `{ORPHANED}` names a pod twice, without a UID, or of another node")
    return grants


def _grant(record: Json, key: str, gpus: NodeGpus) -> GrantRecord:
    _check_version(record, key)
    return GrantRecord(
        pod=_text(record, "pod", key),
        node=_text(record, "node", key),
        dialect=_text(record, "dialect", key),
        at=_moment(record.get("at", 0)),
        containers=tuple(_container(entry, key, gpus) for entry in _list(record, "containers", key)),
    )


def _check_version(record: Json, key: str) -> None:
    version = whole(record.get("version"))
    if version is None:
        raise UnreadableObject(f"annotation `{key}` cannot be read: it has no version")
    if version > VERSION:
        raise UnreadableObject(f"annotation `{key}` has version {version}; update gputile to read it")


def _container(record: Json, key: str, gpus: NodeGpus) -> GrantRecordContainer:
    role = record.get("role", Role.APP.value)
    if not isinstance(role, str) or role not in set(Role):
        raise UnreadableObject(f"annotation `{key}` cannot be read: a container has the role {shown(role)!r}")
    tiles = tuple(_tile(entry, key, gpus) for entry in _list(record, "tiles", key))
    return GrantRecordContainer(_text(record, "name", key), role, tiles)


def _tile(record: Json, key: str, gpus: NodeGpus) -> GrantRecordTile:
    uuid = _text(record, "uuid", key)
    memory, cores = whole(record.get("memory")), whole(record.get("cores"))
    if memory is None or cores is None:
        raise UnreadableObject(f"annotation `{key}` cannot be read: a tile has no memory or cores")
    gpu = gpus.named(uuid)
    return GrantRecordTile(uuid if gpu is None else gpu.uuid, memory, cores)


def _list(record: Json, field: str, key: str) -> Sequence[Json]:
    listed = record.get(field)
    if not isinstance(listed, list | tuple) or not all(isinstance(entry, dict) for entry in listed):
        raise UnreadableObject(f"annotation `{key}` cannot be read: `{field}` is not a list of objects")
    return listed


def _text(record: Json, word: str, key: str) -> str:
    value = record.get(word)
    if not isinstance(value, str):
        raise UnreadableObject(f"annotation `{key}` cannot be read: `{word}` is no text")
    return value


def _moment(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else 0
