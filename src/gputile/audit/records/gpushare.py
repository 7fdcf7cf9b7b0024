"""gpushare: which GPUs and how much memory, in the unit of the node.

scheduler.framework.gpushare.allocation: {"<container>": {"<GPU index>": <units>}}    by the newer scheduler
ALIYUN_COM_GPU_MEM_IDX and ..._POD: one GPU index, and the units of the whole pod      by the older one
"""

from gputile.audit.fields import amount, decoded, digits, indices, mapping
from gputile.audit.objects import AuditedPod
from gputile.audit.records.record import NO_CONTAINER, InvalidRecord, Record, RecordedTile, missing
from gputile.audit.requests import mebibytes
from gputile.audit.sizes import NodeGpus

FAMILY = "gpushare"
ALLOCATION, INDEX, TOTAL = "scheduler.framework.gpushare.allocation", "ALIYUN_COM_GPU_MEM_IDX", "ALIYUN_COM_GPU_MEM_POD"


def has_record(pod: AuditedPod) -> bool:
    return ALLOCATION in pod.annotations or INDEX in pod.annotations


def read(pod: AuditedPod, gpus: NodeGpus) -> Record | InvalidRecord | None:
    found = _allocation(pod, gpus) if ALLOCATION in pod.annotations else None
    if INDEX in pod.annotations and not isinstance(found, Record):
        found = _index(pod, gpus) or found
    return found


def _allocation(pod: AuditedPod, gpus: NodeGpus) -> Record | InvalidRecord | None:
    tiles: list[RecordedTile] = []
    by_container = decoded(pod.annotations[ALLOCATION])
    if not isinstance(by_container, dict):
        return InvalidRecord(FAMILY, f"`{ALLOCATION}` is no JSON object")
    for container, by_index in by_container.items():
        number = digits(container)
        at = None if number is None else pod.position(number)
        for key, said in mapping(by_index).items():
            index, units = digits(key), amount(said)
            if index is None or units is None:
                return InvalidRecord(FAMILY, f"`{ALLOCATION}` has no number where one should be")
            if index not in gpus.by_index:
                return missing(FAMILY, index, pod)
            place = NO_CONTAINER if at is None else at
            tiles.append(RecordedTile(place, gpus.by_index[index].uuid, mebibytes(units, gpus), 0))
    return Record(family=FAMILY, tiles=tuple(tiles), together=True) if tiles else None


def _index(pod: AuditedPod, gpus: NodeGpus) -> Record | InvalidRecord | None:
    """The amount is the pod's; which container holds how much of it, its request tells."""
    said = pod.annotations[INDEX]
    if said.strip() in ("", "-1"):
        return None
    found = indices(said)
    if found is None:
        return InvalidRecord(FAMILY, f"`{INDEX}` is no GPU index")
    for index in found:
        if index not in gpus.by_index:
            return missing(FAMILY, index, pod)
    total = digits(pod.annotations.get(TOTAL))
    uuids = tuple(gpus.by_index[index].uuid for index in dict.fromkeys(found))
    floors = {uuid: mebibytes(-(-total // len(uuids)), gpus) for uuid in uuids} if total else {}
    return Record(family=FAMILY, tiles=(), shared=uuids, floors=floors, together=True)
