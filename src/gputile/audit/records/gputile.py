"""Our own grant on a pod, and what the agent says of pods that are gone while their containers still run.

    gputile.io/grant: {"version": 1, "pod": "<UID>", "node": "n1", "dialect": "hami", "at": <ns since 1970>,
        "containers": [{"name": "main", "role": "app", "tiles": [{"uuid": "GPU-...", "memory": 3000, "cores": 30}]}]}

A grant names the UID and node of its pod, so that a copy of it on another pod is found out.
"""

from collections.abc import Sequence

import msgspec

from gputile.audit.fields import Json, decoded, items, mapping, shown, whole
from gputile.audit.objects import AuditedNode, UnreadableObject
from gputile.audit.sizes import NodeGpus
from gputile.model.requests import SLOT_DIALECTS, Role
from gputile.model.units import MiB, Percent

GRANT, LINGERING = "gputile.io/grant", "gputile.io/orphaned"
VERSION = 1


class GrantRecordTile(msgspec.Struct, frozen=True):
    uuid: str  # the name that the node gives it now, if the node has it
    memory: MiB
    cores: Percent


class GrantRecordContainer(msgspec.Struct, frozen=True):
    name: str
    role: str
    tiles: tuple[GrantRecordTile, ...]


class GrantRecord(msgspec.Struct, frozen=True):
    pod: str
    node: str
    dialect: str
    at: int
    containers: tuple[GrantRecordContainer, ...]

    @property
    def takes_slots(self) -> bool:
        return self.dialect in SLOT_DIALECTS


def read_grant(said: str, gpus: NodeGpus) -> GrantRecord:
    """Raises `UnreadableObject`. Whose grant it is, the caller compares."""
    found = decoded(said)
    if not isinstance(found, dict):
        raise UnreadableObject(f"annotation `{GRANT}` cannot be read: it is no JSON object")
    return _grant(found, GRANT, gpus)


def read_lingering(node: AuditedNode, gpus: NodeGpus) -> tuple[GrantRecord, ...]:
    """Grants of pods that the API server shows no more. Raises `UnreadableObject`."""
    said = node.annotations.get(LINGERING)
    if said is None:
        return ()
    found = mapping(decoded(said))
    _check_version(found, LINGERING)
    if not isinstance(found.get("grants"), list | tuple):
        raise UnreadableObject(f"annotation `{LINGERING}` cannot be read: it has no list of grants")
    grants = tuple(_grant(mapping(one), LINGERING, gpus) for one in items(found["grants"]))
    uids = {grant.pod for grant in grants}
    if "" in uids or len(uids) != len(grants) or any(grant.node != node.name for grant in grants):
        raise UnreadableObject(f"annotation `{LINGERING}` names a pod twice, one without a UID, or one of another node")
    return grants


def _grant(found: Json, key: str, gpus: NodeGpus) -> GrantRecord:
    _check_version(found, key)
    return GrantRecord(
        pod=_text(found, "pod", key),
        node=_text(found, "node", key),
        dialect=_text(found, "dialect", key),
        at=_moment(found.get("at", 0)),
        containers=tuple(_container(one, key, gpus) for one in _list(found, "containers", key)),
    )


def _check_version(found: Json, key: str) -> None:
    version = whole(found.get("version"))
    if version is None:
        raise UnreadableObject(f"annotation `{key}` cannot be read: it has no version")
    if version > VERSION:
        raise UnreadableObject(f"annotation `{key}` has version {version}; update gputile to read it")


def _container(found: Json, key: str, gpus: NodeGpus) -> GrantRecordContainer:
    role = found.get("role", Role.APP.value)
    if not isinstance(role, str) or role not in set(Role):
        raise UnreadableObject(f"annotation `{key}` cannot be read: a container has the role {shown(role)!r}")
    tiles = tuple(_tile(one, key, gpus) for one in _list(found, "tiles", key))
    return GrantRecordContainer(_text(found, "name", key), role, tiles)


def _tile(found: Json, key: str, gpus: NodeGpus) -> GrantRecordTile:
    uuid = _text(found, "uuid", key)
    memory, cores = whole(found.get("memory")), whole(found.get("cores"))
    if memory is None or cores is None:
        raise UnreadableObject(f"annotation `{key}` cannot be read: a tile has no memory or cores")
    gpu = gpus.named(uuid)
    return GrantRecordTile(uuid if gpu is None else gpu.uuid, memory, cores)


def _list(found: Json, word: str, key: str) -> Sequence[Json]:
    listed = found.get(word)
    if not isinstance(listed, list | tuple) or not all(isinstance(one, dict) for one in listed):
        raise UnreadableObject(f"annotation `{key}` cannot be read: `{word}` is no list of objects")
    return listed


def _text(found: Json, word: str, key: str) -> str:
    value = found.get(word)
    if not isinstance(value, str):
        raise UnreadableObject(f"annotation `{key}` cannot be read: `{word}` is no text")
    return value


def _moment(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else 0
