"""A record, and when it is believed."""

from collections.abc import Mapping

import msgspec

from gputile.audit.fields import shown
from gputile.audit.objects import AuditedPod
from gputile.audit.sizes import NodeGpus
from gputile.model.cards import Card
from gputile.model.units import MiB, Percent

NO_CONTAINER = -1
"""The place of a tile whose container the pod does not have: it counts as one that runs all the time."""


class RecordedTile(msgspec.Struct, frozen=True):
    """A share of one GPU that a record names. None: the record tells which GPU and not how much."""

    container: int  # its place in the pod, or NO_CONTAINER
    gpu: str  # UUID
    memory: MiB | None = None
    cores: Percent | None = None
    is_exact: bool = False  # a part that the hardware cuts: it holds this much, whatever was asked for


class Record(msgspec.Struct, frozen=True, kw_only=True):
    family: str
    tiles: tuple[RecordedTile, ...]
    node: str | None = None  # which node it speaks of; None: this family does not write it, or did not
    shared: tuple[str, ...] = ()  # GPUs that all containers of the pod share, where no tile says who holds what
    floors: Mapping[str, MiB] = {}  # of these GPUs: at least so much, whatever the containers ask for
    together: bool = False  # a container without a tile of its own is on the GPUs of the others
    is_nameless: bool = False  # it does not tell which containers hold what: the request is not compared with it
    takes_slots: bool = False
    at: int = 0  # nanoseconds since 1970

    @property
    def gpus(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.shared, *(tile.gpu for tile in self.tiles))))


class InvalidRecord(msgspec.Struct, frozen=True):
    """A record that is not believed, and why."""

    family: str
    why: str


def believed(record: Record, pod: AuditedPod, gpus: NodeGpus) -> Record | InvalidRecord:
    """The record, if it is of this node, of GPUs of this node, and of no more than each of them has."""
    if record.node and record.node != pod.node:
        return InvalidRecord(record.family, f"it is of node {shown(record.node)}, the pod runs on {pod.node}")
    for tile in record.tiles:
        gpu = gpus.by_uuid.get(tile.gpu)
        if gpu is None:
            return InvalidRecord(record.family, f"it names GPU {shown(tile.gpu)}, which node {pod.node} does not have")
        if exceeds(tile, gpu):
            return InvalidRecord(record.family, f"it speaks of more than GPU {shown(gpu.uuid)} has")
    for uuid, memory in record.floors.items():  # of GPUs that the reader found by their index
        if 0 < gpus.by_uuid[uuid].memory < memory:
            return InvalidRecord(record.family, f"it speaks of more than GPU {shown(uuid)} has")
    return record


def exceeds(tile: RecordedTile, gpu: Card) -> bool:
    """A GPU of which no agent tells the memory has 0 of it, which is no bound."""
    return 0 < gpu.memory < (tile.memory or 0) or (tile.cores or 0) > gpu.cores


def missing(family: str, index: int, pod: AuditedPod) -> InvalidRecord:
    return InvalidRecord(family, f"it names GPU {index}, which node {pod.node} does not have")
