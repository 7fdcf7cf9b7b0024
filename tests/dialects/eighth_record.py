"""The audit's reader for the eighth dialect's record; it shares no code with the dialect."""

from gputile.audit.fields import decoded, digits, items, mapping, shown, whole
from gputile.audit.objects import AuditedPod
from gputile.audit.records.record import NO_CONTAINER, InvalidRecord, Record, RecordedTile, missing
from gputile.audit.sizes import NodeGpus

FAMILY = "tenths"
TAKES_SLOTS = False
RECORD, NODE = "tenths.io/gpus", "tenths.io/node"


def has_record(pod: AuditedPod) -> bool:
    return RECORD in pod.annotations


def read(pod: AuditedPod, gpus: NodeGpus) -> Record | InvalidRecord | None:
    if not has_record(pod):
        return None
    places = {container.name: at for at, container in enumerate(pod.containers)}
    tiles = []
    for name, shares in mapping(decoded(pod.annotations[RECORD])).items():
        for key, amounts in mapping(shares).items():
            index, (memory, cores) = digits(key), (*map(whole, items(amounts)), None, None)[:2]
            if index is None or memory is None or cores is None:
                return InvalidRecord(FAMILY, f"`{RECORD}` has {shown(key)!r}, which is no share of a GPU")
            if index not in gpus.by_index:
                return missing(FAMILY, index, pod)
            tiles.append(RecordedTile(places.get(name, NO_CONTAINER), gpus.by_index[index].uuid, memory, cores))
    return Record(family=FAMILY, tiles=tuple(tiles), node=pod.annotations.get(NODE))
