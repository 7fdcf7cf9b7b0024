"""vgpu-manager: `<domain>/pre-allocated` by its scheduler, and over it `<domain>/real-allocated` by its agent.

    <container>[<index>_<uuid>_<cores>_<MiB>,...];<container>[...]

The domain is an option of vgpu-manager; every domain with such a key is read.
"""

from collections.abc import Mapping

from gputile.audit.fields import digits, shown
from gputile.audit.objects import AuditedPod
from gputile.audit.records.record import NO_CONTAINER, InvalidRecord, Record, RecordedTile
from gputile.audit.sizes import NodeGpus

FAMILY = "vgpu"
TAKES_SLOTS = True
KEYS = ("pre-allocated", "real-allocated")  # the later one wins, container by container
SUFFIXES = tuple(f"/{key}" for key in KEYS)


def domains(pod: AuditedPod) -> list[str]:
    return sorted({key.rpartition("/")[0] for key in pod.annotations if key.endswith(SUFFIXES)})


def has_record(pod: AuditedPod) -> bool:
    return any(key.endswith(SUFFIXES) for key in pod.annotations)


def read(pod: AuditedPod, gpus: NodeGpus) -> Record | InvalidRecord | None:
    """The first domain whose record names a GPU of this node; else the record or problem of the last domain."""
    record: Record | InvalidRecord | None = None
    positions = {container.name: at for at, container in enumerate(pod.containers)}
    for domain in domains(pod):
        record = _of_domain(pod, domain, positions) or record
        if isinstance(record, Record) and record.tiles[0].gpu in gpus.by_uuid:
            break
    return record


def _of_domain(pod: AuditedPod, domain: str, positions: Mapping[str, int]) -> Record | InvalidRecord | None:
    by_container: dict[str, list[RecordedTile]] = {}
    for key in KEYS:
        value = pod.annotations.get(f"{domain}/{key}", "")
        for part in filter(None, value.split(";")):
            name, _, devices = part.strip().partition("[")
            tiles = [
                _tile(device, positions.get(name, NO_CONTAINER))
                for device in devices.removesuffix("]").split(",")
                if device
            ]
            if not devices.endswith("]") or None in tiles:
                return InvalidRecord(
                    FAMILY, f"`{domain}/{key}` has {shown(part)!r}, which is not a container with its devices"
                )
            by_container[name] = [tile for tile in tiles if tile is not None]
    all_tiles = tuple(tile for tiles in by_container.values() for tile in tiles)
    node = pod.annotations.get(f"{domain}/predicate-node")
    return Record(family=FAMILY, tiles=all_tiles, node=node, takes_slots=TAKES_SLOTS) if all_tiles else None


def _tile(device: str, container: int) -> RecordedTile | None:
    parts = device.strip().split("_")
    if len(parts) < 4:
        return None
    index, cores, memory = digits(parts[0]), digits(parts[-2]), digits(parts[-1])
    uuid = "_".join(parts[1:-2])
    if index is None or cores is None or memory is None or not uuid:
        return None
    return RecordedTile(container, uuid, memory, cores)
