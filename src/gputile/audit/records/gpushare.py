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
TAKES_SLOTS = False
ALLOCATION, INDEX, TOTAL = "scheduler.framework.gpushare.allocation", "ALIYUN_COM_GPU_MEM_IDX", "ALIYUN_COM_GPU_MEM_POD"


def has_record(pod: AuditedPod) -> bool:
    return ALLOCATION in pod.annotations or INDEX in pod.annotations


def read(pod: AuditedPod, gpus: NodeGpus) -> Record | InvalidRecord | None:
    record = _from_allocation(pod, gpus) if ALLOCATION in pod.annotations else None
    if INDEX in pod.annotations and not isinstance(record, Record):
        record = _from_index(pod, gpus) or record
    return record


def _from_allocation(pod: AuditedPod, gpus: NodeGpus) -> Record | InvalidRecord | None:
    tiles: list[RecordedTile] = []
    by_container = decoded(pod.annotations[ALLOCATION])
    if not isinstance(by_container, dict):
        return InvalidRecord(FAMILY, f"`{ALLOCATION}` is not a JSON object")
    for container, by_index in by_container.items():
        number = digits(container)
        at = None if number is None else pod.position(number)
        for key, value in mapping(by_index).items():
            index, units = digits(key), amount(value)
            if index is None or units is None:
                return InvalidRecord(FAMILY, f"`{ALLOCATION}` has a key or value that is not a number")
            if index not in gpus.by_index:
                return missing(FAMILY, index, pod)
            position = NO_CONTAINER if at is None else at
            tiles.append(RecordedTile(position, gpus.by_index[index].uuid, mebibytes(units, gpus), 0))
    return Record(family=FAMILY, tiles=tuple(tiles), together=True) if tiles else None


def _from_index(pod: AuditedPod, gpus: NodeGpus) -> Record | InvalidRecord | None:
    """The amount is that of the pod; its request shows how much each container holds."""
    value = pod.annotations[INDEX]
    if value.strip() in ("", "-1"):
        return None
    gpu_indices = indices(value)
    if gpu_indices is None:
        return InvalidRecord(FAMILY, f"`{INDEX}` is not a GPU index")
    for index in gpu_indices:
        if index not in gpus.by_index:
            return missing(FAMILY, index, pod)
    total = digits(pod.annotations.get(TOTAL))
    uuids = tuple(gpus.by_index[index].uuid for index in dict.fromkeys(gpu_indices))
    floors = {uuid: mebibytes(-(-total // len(uuids)), gpus) for uuid in uuids} if total else {}
    return Record(family=FAMILY, tiles=(), shared=uuids, floors=floors, together=True)
