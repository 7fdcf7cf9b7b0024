"""What an audit found. Values only; `checking` fills them in and `cli.audit` prints them.

A finding is a double allocation, or something that makes the proof impossible. A remark is something that a person may
want to know and that is right, or about to be right by itself.
"""

from enum import StrEnum

import msgspec

from gputile.model.cards import Card
from gputile.model.units import MiB, Percent


class FindingCode(StrEnum):
    """Stable words for scripts."""

    OVERSOLD = "oversold"
    NODE_OVERCOMMITTED = "node-overcommitted"
    NOT_ITS_GRANT = "not-its-grant"
    UNREADABLE_GRANT = "unreadable-grant"
    NO_SUCH_CARD = "no-such-card"
    NO_SUCH_CONTAINER = "no-such-container"
    CARD_ON_TWO_NODES = "card-on-two-nodes"
    UNREADABLE_NODE = "unreadable-node"
    UNREADABLE_POD = "unreadable-pod"
    NO_GRANT = "no-grant"
    NOT_COUNTED = "not-counted"
    RECORD_NOT_BELIEVED = "record-not-believed"
    BY_NUMBER = "by-number"
    NODE_GONE = "node-gone"
    NOT_AS_ASKED = "not-as-asked"
    OUT_OF_USE = "card-out-of-use"
    LINGERING = "lingering"


class GpuHolder(msgspec.Struct, frozen=True):
    """What one pod holds of one GPU."""

    pod: str  # namespace/name
    uid: str
    memory: MiB
    cores: Percent
    slots: int
    by: str  # whose record says so: "gputile", or the family
    granted: str = ""  # when, as Kubernetes writes times; "" when the record does not say
    bound: str = ""
    phase: str = ""
    going: bool = False  # its deletion was asked for


class UnplacedGpus(msgspec.Struct, frozen=True, kw_only=True):
    """What one pod holds on GPUs of its node that no record names."""

    node: str
    pod: str
    uid: str
    gpus: int  # for the pod alone
    shares: int  # of GPUs that others may share
    memory: MiB  # of the shares together
    cores: Percent
    slots: int


class AuditedGpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU, and who holds what of it."""

    node: str
    index: int
    uuid: str
    memory: MiB
    memory_allocated: MiB
    cores: Percent
    cores_allocated: Percent
    slots: int
    slots_allocated: int
    holders: tuple[GpuHolder, ...] = ()


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """One finding or remark, with its story."""

    code: FindingCode
    what: str  # a sentence
    todo: str = ""  # what to do next
    node: str = ""
    pod: str = ""  # namespace/name
    card: Card | None = None
    holders: tuple[GpuHolder, ...] = ()  # of the GPU, in the order in which they came


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was looked at, and what was found."""

    nodes: int  # with GPUs
    cards: int
    pods: int  # that hold a part of a GPU
    waiting: int  # that ask for GPUs and have no node
    memory_sold: MiB
    memory: MiB
    findings: tuple[Notice, ...] = ()
    remarks: tuple[Notice, ...] = ()
    gpus: tuple[AuditedGpu, ...] = ()
    unplaced: tuple[UnplacedGpus, ...] = ()

    @property
    def is_right(self) -> bool:
        return not self.findings

    @property
    def sold(self) -> dict[str, tuple[GpuHolder, ...]]:
        """By UUID: who holds what of the GPU."""
        return {gpu.uuid: gpu.holders for gpu in self.gpus if gpu.holders}
