"""The readers of other systems' records, one per family."""

from typing import Protocol

from gputile.audit.objects import AuditedPod
from gputile.audit.records import gpushare, hami, nano, vcuda, vgpu_manager
from gputile.audit.records.record import InvalidRecord, Record
from gputile.audit.sizes import NodeGpus

SLOTS_WITHOUT_RECORD = frozenset({"gputile", "nvidia"})
"""Families whose tiles take slots, and which write no record besides our grant."""


class RecordReader(Protocol):
    """The interface of a reader's module."""

    FAMILY: str
    TAKES_SLOTS: bool
    """Whether a tile of this family takes a slot of its GPU."""

    def has_record(self, pod: AuditedPod) -> bool: ...
    def read(self, pod: AuditedPod, gpus: NodeGpus) -> Record | InvalidRecord | None: ...


# In the order in which their records count.
READERS: tuple[RecordReader, ...] = (hami, vgpu_manager, vcuda, gpushare, nano)


def takes_slots(family: str) -> bool:
    """Whether a tile of this family takes a slot of its GPU; a family that we do not know takes none."""
    slotted = (reader.FAMILY for reader in READERS if reader.TAKES_SLOTS)
    return family in SLOTS_WITHOUT_RECORD or family in slotted
