"""vgpu-manager: `<domain>/pre-allocated` by its scheduler, and over it `<domain>/real-allocated` by its agent.

    <container>[<index>_<uuid>_<cores>_<MiB>,...];<container>[...]

The domain is an option of it; whatever domain has such a key is read.
"""

from collections.abc import Mapping

from gputile.audit.fields import digits, shown
from gputile.audit.objects import AuditedPod
from gputile.audit.records.record import NO_CONTAINER, InvalidRecord, Record, RecordedTile
from gputile.audit.sizes import NodeGpus

FAMILY = "vgpu"
KEYS = ("pre-allocated", "real-allocated")  # the later one wins, container by container
SUFFIXES = tuple(f"/{key}" for key in KEYS)


def domains(pod: AuditedPod) -> list[str]:
    return sorted({key.rpartition("/")[0] for key in pod.annotations if key.endswith(SUFFIXES)})


def has_record(pod: AuditedPod) -> bool:
    return any(key.endswith(SUFFIXES) for key in pod.annotations)


def read(pod: AuditedPod, gpus: NodeGpus) -> Record | InvalidRecord | None:
    """The first domain whose record names a GPU of this node; else what is wrong with the last of them."""
    found: Record | InvalidRecord | None = None
    places = {container.name: at for at, container in enumerate(pod.containers)}
    for domain in domains(pod):
        found = _of_domain(pod, domain, places) or found
        if isinstance(found, Record) and found.tiles[0].gpu in gpus.by_uuid:
            break
    return found


def _of_domain(pod: AuditedPod, domain: str, places: Mapping[str, int]) -> Record | InvalidRecord | None:
    by_container: dict[str, list[RecordedTile]] = {}
    for key in KEYS:
        said = pod.annotations.get(f"{domain}/{key}", "")
        for part in filter(None, said.split(";")):
            name, _, devices = part.strip().partition("[")
            tiles = [_tile(one, places.get(name, NO_CONTAINER)) for one in devices.removesuffix("]").split(",") if one]
            if not devices.endswith("]") or None in tiles:
                return InvalidRecord(FAMILY, f"`{domain}/{key}` has {shown(part)!r}")
            by_container[name] = [tile for tile in tiles if tile is not None]
    tiles_found = tuple(tile for tiles in by_container.values() for tile in tiles)
    node = pod.annotations.get(f"{domain}/predicate-node")
    return Record(family=FAMILY, tiles=tiles_found, node=node, takes_slots=True) if tiles_found else None


def _tile(device: str, container: int) -> RecordedTile | None:
    parts = device.strip().split("_")
    if len(parts) < 4:
        return None
    index, cores, memory = digits(parts[0]), digits(parts[-2]), digits(parts[-1])
    uuid = "_".join(parts[1:-2])
    if index is None or cores is None or memory is None or not uuid:
        return None
    return RecordedTile(container, uuid, memory, cores)
