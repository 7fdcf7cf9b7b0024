"""The report of an audit. Values only: `audit` fills them in and `cli.commands.audit` prints them.

A finding is a double allocation, or something that makes the proof impossible. A remark is a fact that an operator may
want to know and that is correct, or becomes correct by itself.
"""

from enum import StrEnum

import msgspec

from gputile.model.cards import Card
from gputile.model.units import MiB, Percent


class FindingCode(StrEnum):
    """The code of a finding or remark. Stable: scripts may match on the text."""

    DOUBLE_ALLOCATED = "double-allocated"
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
    INVALID_RECORD = "invalid-record"
    BY_NUMBER = "by-number"
    NODE_GONE = "node-gone"
    NOT_AS_REQUESTED = "not-as-requested"
    OUT_OF_USE = "gpu-out-of-use"
    ORPHANED = "orphaned"


class GpuHolder(msgspec.Struct, frozen=True):
    """What one pod holds of one GPU."""

    pod: str  # namespace/name
    uid: str
    memory: MiB
    cores: Percent
    slots: int
    by: str  # the record that counts: of "gputile", or of the family
    granted: str = ""  # when, as Kubernetes writes times; "" when the record does not say
    bound: str = ""
    phase: str = ""
    going: bool = False  # it is terminating


class UnplacedGpus(msgspec.Struct, frozen=True, kw_only=True):
    """What one pod holds on GPUs of its node that no record names."""

    node: str
    pod: str
    uid: str
    gpus: int  # for the pod alone
    shares: int  # of GPUs that other pods may share
    memory: MiB  # of the shares together
    cores: Percent
    slots: int


class AuditedGpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU, and the pods that hold a part of it."""

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
    """One finding or remark, with the pods that it is about."""

    code: FindingCode
    what: str  # a sentence
    todo: str = ""  # what to do next
    node: str = ""
    pod: str = ""  # namespace/name
    card: Card | None = None
    holders: tuple[GpuHolder, ...] = ()  # of the GPU, the oldest first


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was audited, with findings and remarks."""

    nodes: int  # with GPUs
    cards: int
    pods: int  # pods that hold a part of a GPU
    pending: int  # pods that request GPUs and have no node
    memory_allocated: MiB
    memory: MiB
    findings: tuple[Notice, ...] = ()
    remarks: tuple[Notice, ...] = ()
    gpus: tuple[AuditedGpu, ...] = ()
    unplaced: tuple[UnplacedGpus, ...] = ()

    @property
    def is_right(self) -> bool:
        return not self.findings

    @property
    def holders(self) -> dict[str, tuple[GpuHolder, ...]]:
        """The holders of each GPU that is in use, by its UUID."""
        return {gpu.uuid: gpu.holders for gpu in self.gpus if gpu.holders}
