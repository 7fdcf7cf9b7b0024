"""HAMi: `hami.io/vgpu-devices-allocated`.

    <uuid>,<type>,<MiB>,<cores>:...;<next container>;

Each container has a place that ends with `;`, empty for one without GPUs. Since 2.9 init containers have places too,
before the others; the number of places tells. A dynamic MIG device is `<uuid>[<template>-<place>]`, a part of that GPU.
"""

from gputile.audit.fields import digits, shown
from gputile.audit.objects import AuditedPod
from gputile.audit.records.record import NO_CONTAINER, InvalidRecord, Record, RecordedTile
from gputile.audit.sizes import NodeGpus

FAMILY = "hami"
ALLOCATED, NODE = "hami.io/vgpu-devices-allocated", "hami.io/vgpu-node"


def has_record(pod: AuditedPod) -> bool:
    return ALLOCATED in pod.annotations


def read(pod: AuditedPod, gpus: NodeGpus) -> Record | InvalidRecord | None:
    said = pod.annotations.get(ALLOCATED, "").strip()
    places = said.removesuffix(";").split(";") if said else []
    first = _first_place(pod, len(places))
    tiles: list[RecordedTile] = []
    for number, place in enumerate(places):
        for device in place.split(":"):
            if not device.strip():
                continue
            tile = _tile(device, NO_CONTAINER if first is None else first + number)
            if tile is None:
                return InvalidRecord(FAMILY, f"`{ALLOCATED}` has a device {shown(device)!r}")
            tiles.append(tile)
    if not tiles:
        return None
    node = pod.annotations.get(NODE)
    return Record(family=FAMILY, tiles=tuple(tiles), node=node, takes_slots=True, is_nameless=first is None)


def _first_place(pod: AuditedPod, places: int) -> int | None:
    """The container of the first place. None: the number of places is neither of the two, nobody knows which container
    holds what, and all of it adds up."""
    if places == len(pod.containers) - pod.inits:
        return pod.inits
    return 0 if places == len(pod.containers) else None


def _tile(device: str, container: int) -> RecordedTile | None:
    parts = device.split(",")
    if len(parts) < 4:
        return None
    memory, cores = digits(parts[2]), digits(parts[3])
    uuid, mig, _ = parts[0].strip().partition("[")
    if not uuid or memory is None or cores is None:
        return None
    return RecordedTile(container, uuid, memory, cores, is_exact=bool(mig))
