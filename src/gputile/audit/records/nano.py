"""nano-gpu and elastic-gpu: a GPU index per container, in three generations of names. Amounts are in the request."""

from gputile.audit.fields import indices, shown
from gputile.audit.objects import AuditedPod
from gputile.audit.records.record import InvalidRecord, Record, RecordedTile, missing
from gputile.audit.sizes import NodeGpus

FAMILY = "nano"
TAKES_SLOTS = False
GENERATIONS = (  # the mark that the scheduler has decided, and the prefix of the annotation of each container
    ("elasticgpu.io/assumed", "elasticgpu.io/container-"),
    ("nano-gpu/assume", "nano-gpu/container-"),
    ("nano-gpu.io/gpu", "nano-gpu.io/gpu-"),
)
NO_GPU = "-1"


def has_record(pod: AuditedPod) -> bool:
    return any(_is_marked(pod, mark) for mark, _ in GENERATIONS)


def read(pod: AuditedPod, gpus: NodeGpus) -> Record | InvalidRecord | None:
    for mark, prefix in GENERATIONS:
        record = _of_generation(pod, gpus, prefix) if _is_marked(pod, mark) else None
        if record is not None:
            return record
    return None


def _is_marked(pod: AuditedPod, mark: str) -> bool:
    """Annotation and label are written together; either of them counts."""
    return "true" in (pod.annotations.get(mark, "").lower(), pod.labels.get(mark, "").lower())


def _of_generation(pod: AuditedPod, gpus: NodeGpus, prefix: str) -> Record | InvalidRecord | None:
    tiles: list[RecordedTile] = []
    for at, container in enumerate(pod.containers):
        value = pod.annotations.get(prefix + container.name)
        if value is None or value.strip() == NO_GPU:
            continue
        gpu_indices = indices(value)
        if gpu_indices is None:
            return InvalidRecord(FAMILY, f"`{shown(prefix + container.name)}` is not a GPU index")
        for index in gpu_indices:
            if index not in gpus.by_index:
                return missing(FAMILY, index, pod)
            tiles.append(RecordedTile(at, gpus.by_index[index].uuid))
    return Record(family=FAMILY, tiles=tuple(tiles)) if tiles else None
