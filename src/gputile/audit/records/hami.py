"""HAMi: `hami.io/vgpu-devices-allocated`.

    <uuid>,<type>,<MiB>,<cores>:...;<next container>;

Each container has a place that ends with `;`, empty for one without GPUs. Since 2.9 init containers have places too,
before the others; the number of places tells. A dynamic MIG device is `<uuid>[<template>-<place>]`, a part of that GPU.
"""

from gputile.audit.fields import digits, shown
from gputile.audit.objects import Pod
from gputile.audit.records.record import NO_CONTAINER, Disbelief, Record, Tile
from gputile.audit.sizes import Gpus

FAMILY = "hami"
ALLOCATED, NODE = "hami.io/vgpu-devices-allocated", "hami.io/vgpu-node"


def has_record(pod: Pod) -> bool:
    return ALLOCATED in pod.annotations


def read(pod: Pod, gpus: Gpus) -> Record | Disbelief | None:
    said = pod.annotations.get(ALLOCATED, "").strip()
    places = said.removesuffix(";").split(";") if said else []
    first, step = _first_place(pod, len(places))
    tiles: list[Tile] = []
    for number, place in enumerate(places):
        for device in place.split(":"):
            if not device.strip():
                continue
            tile = _tile(device, first + number * step)
            if tile is None:
                return Disbelief(FAMILY, f"`{ALLOCATED}` has a device {shown(device)!r}")
            tiles.append(tile)
    if not tiles:
        return None
    return Record(family=FAMILY, tiles=tuple(tiles), node=pod.annotations.get(NODE), takes_slots=True)


def _first_place(pod: Pod, places: int) -> tuple[int, int]:
    """The container of the first place, and the step to the next: with a number of places that is neither of the two,
    nobody knows which container is meant, and all of them add up."""
    if places == len(pod.containers) - pod.inits:
        return pod.inits, 1
    return (0, 1) if places == len(pod.containers) else (NO_CONTAINER, 0)


def _tile(device: str, container: int) -> Tile | None:
    parts = device.split(",")
    if len(parts) < 4:
        return None
    memory, cores = digits(parts[2]), digits(parts[3])
    uuid = parts[0].strip().partition("[")[0]
    return Tile(container, uuid, memory, cores) if uuid and memory is not None and cores is not None else None
