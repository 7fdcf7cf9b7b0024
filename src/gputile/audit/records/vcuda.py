"""vcuda (gpu-admission, gpu-manager, their fork): GPU indices by the number of a container. The request has amounts."""

from gputile.audit.fields import digits, indices, shown
from gputile.audit.objects import AuditedPod
from gputile.audit.records.record import NO_CONTAINER, InvalidRecord, Record, RecordedTile, missing
from gputile.audit.sizes import NodeGpus

FAMILY = "vcuda"
TAKES_SLOTS = False
PREFIXES = ("tencent.com/", "nvidia.com/")
INDEX, NODE = "predicate-gpu-idx-", "predicate-node"
KEYS = tuple(prefix + INDEX for prefix in PREFIXES)


def has_record(pod: AuditedPod) -> bool:
    return any(key.startswith(KEYS) for key in pod.annotations)


def read(pod: AuditedPod, gpus: NodeGpus) -> Record | InvalidRecord | None:
    for prefix in PREFIXES:
        record = _of_edition(pod, gpus, prefix)
        if record is not None:
            return record
    return None


def _of_edition(pod: AuditedPod, gpus: NodeGpus, prefix: str) -> Record | InvalidRecord | None:
    tiles: list[RecordedTile] = []
    for key, value in pod.annotations.items():
        if not key.startswith(prefix + INDEX):
            continue
        number, gpu_indices = digits(key.removeprefix(prefix + INDEX)), indices(value)
        if number is None or gpu_indices is None:
            return InvalidRecord(FAMILY, f"`{shown(key)}` is not a GPU index of a container")
        at = pod.position(number)
        for index in gpu_indices:
            if index not in gpus.by_index:
                return missing(FAMILY, index, pod)
            tiles.append(RecordedTile(NO_CONTAINER if at is None else at, gpus.by_index[index].uuid))
    return Record(family=FAMILY, tiles=tuple(tiles), node=pod.annotations.get(prefix + NODE)) if tiles else None
