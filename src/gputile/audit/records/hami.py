"""HAMi: `hami.io/vgpu-devices-allocated`.

    <uuid>,<type>,<MiB>,<cores>:...;<next container>;

Each container has an entry that ends with `;`, empty for a container without GPUs. Since 2.9 init containers have
entries too, before the others; their number shows which. A dynamic MIG device is `<uuid>[<template>-<position>]`.
"""

from gputile.audit.fields import digits, shown
from gputile.audit.objects import AuditedPod
from gputile.audit.records.record import NO_CONTAINER, InvalidRecord, Record, RecordedTile
from gputile.audit.sizes import NodeGpus

FAMILY = "hami"
TAKES_SLOTS = True
ALLOCATED, NODE = "hami.io/vgpu-devices-allocated", "hami.io/vgpu-node"


def has_record(pod: AuditedPod) -> bool:
    return ALLOCATED in pod.annotations


def read(pod: AuditedPod, gpus: NodeGpus) -> Record | InvalidRecord | None:
    value = pod.annotations.get(ALLOCATED, "").strip()
    entries = value.removesuffix(";").split(";") if value else []
    first = _first_container(pod, len(entries))
    tiles: list[RecordedTile] = []
    for number, entry in enumerate(entries):
        for device in entry.split(":"):
            if not device.strip():
                continue
            tile = _tile(device, NO_CONTAINER if first is None else first + number)
            if tile is None:
                return InvalidRecord(FAMILY, f"`{ALLOCATED}` has {shown(device)!r}, which is not a device")
            tiles.append(tile)
    if not tiles:
        return None
    node = pod.annotations.get(NODE)
    return Record(family=FAMILY, tiles=tuple(tiles), node=node, takes_slots=TAKES_SLOTS, is_nameless=first is None)


def _first_container(pod: AuditedPod, entries: int) -> int | None:
    """The container of the first entry. None: the number of entries matches neither version, so the containers are
    unknown, and all entries add up."""
    if entries == len(pod.containers) - pod.inits:
        return pod.inits
    return 0 if entries == len(pod.containers) else None


def _tile(device: str, container: int) -> RecordedTile | None:
    parts = device.split(",")
    if len(parts) < 4:
        return None
    memory, cores = digits(parts[2]), digits(parts[3])
    uuid, mig, _ = parts[0].strip().partition("[")
    if not uuid or memory is None or cores is None:
        return None
    return RecordedTile(container, uuid, memory, cores, is_exact=bool(mig))
