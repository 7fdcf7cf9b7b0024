"""A record of the GPUs that a pod holds, and when it is valid."""

from collections.abc import Mapping

import msgspec

from gputile.audit.fields import shown
from gputile.audit.objects import AuditedPod
from gputile.audit.sizes import NodeGpus
from gputile.model.cards import Card
from gputile.model.units import MiB, Percent

NO_CONTAINER = -1
"""The position of a tile whose container the pod does not have: it counts as one that runs all the time."""


class RecordedTile(msgspec.Struct, frozen=True):
    """A share of one GPU that a record names. None: the record names the GPU and no amount."""

    container: int  # its position in the pod, or NO_CONTAINER
    gpu: str  # UUID
    memory: MiB | None = None
    cores: Percent | None = None
    is_exact: bool = False  # a partition by the hardware (MIG): it holds this much, whatever was requested


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs and amounts that a family recorded for one pod."""

    family: str
    tiles: tuple[RecordedTile, ...]
    node: str | None = None  # the node it was written for; None: the record does not name it
    shared: tuple[str, ...] = ()  # GPUs that all containers of the pod share, where no tile names a container
    floors: Mapping[str, MiB] = {}  # of these GPUs: the least that the pod holds, whatever its containers request
    together: bool = False  # a container without a tile of its own is on the GPUs of the others
    is_nameless: bool = False  # it names no containers, so the request is not compared with it
    takes_slots: bool = False
    at: int = 0  # nanoseconds since 1970

    @property
    def gpus(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.shared, *(tile.gpu for tile in self.tiles))))


class InvalidRecord(msgspec.Struct, frozen=True):
    """A record that does not count, and why."""

    family: str
    why: str


def validated(record: Record, pod: AuditedPod, gpus: NodeGpus) -> Record | InvalidRecord:
    """The record, if it was written for this node, names GPUs of this node, and no more than each of them has."""
    if record.node and record.node != pod.node:
        return InvalidRecord(
            record.family, f"it was written for node {shown(record.node)}, and the pod runs on {pod.node}"
        )
    for tile in record.tiles:
        gpu = gpus.by_uuid.get(tile.gpu)
        if gpu is None:
            return InvalidRecord(record.family, f"it names GPU {shown(tile.gpu)}, which node {pod.node} does not have")
        if exceeds(tile, gpu):
            return InvalidRecord(record.family, f"it holds more than GPU {shown(gpu.uuid)} has")
    for uuid, memory in record.floors.items():  # of GPUs that the reader looked up by their index
        if 0 < gpus.by_uuid[uuid].memory < memory:
            return InvalidRecord(record.family, f"it holds more than GPU {shown(uuid)} has")
    return record


def exceeds(tile: RecordedTile, gpu: Card) -> bool:
    """A GPU whose agent does not publish the memory has 0, which means unknown."""
    return 0 < gpu.memory < (tile.memory or 0) or (tile.cores or 0) > gpu.cores


def missing(family: str, index: int, pod: AuditedPod) -> InvalidRecord:
    return InvalidRecord(family, f"it names GPU {index}, which node {pod.node} does not have")
