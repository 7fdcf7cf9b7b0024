"""The events that the ledger handles, and the instructions that it returns. Values only; `ledger` defines their
meaning."""

from typing import TypeAlias

import msgspec

from gputile.model.allocations import Allocation
from gputile.model.cards import Node
from gputile.model.grants import Grant
from gputile.quota.limits import Quotas


class NodeSeen(msgspec.Struct, frozen=True):
    """A node was added or has changed: cards, health, size."""

    node: Node


class NodeGone(msgspec.Struct, frozen=True):
    """The node was deleted."""

    name: str


class Reserved(msgspec.Struct, frozen=True):
    """Filter chose a node for the pod and reserves the tiles until bind."""

    allocation: Allocation
    at: float


class Unreserved(msgspec.Struct, frozen=True):
    """The reservation is no longer needed."""

    pod: str


class Assumed(msgspec.Struct, frozen=True):
    """Bind is about to write the binding to the API server."""

    allocation: Allocation
    at: float


class Forgotten(msgspec.Struct, frozen=True):
    """The API server definitely rejected the binding."""

    pod: str


class Confirmed(msgspec.Struct, frozen=True):
    """The cluster shows the pod on its node with its grant. This is the truth, whichever scheduler bound the pod."""

    allocation: Allocation


class Relisted(msgspec.Struct, frozen=True):
    """One pod of a list that is being processed. Later pods of the list may have left or joined its cards, so overlaps
    are checked at the end of the list (`Compared`)."""

    allocation: Allocation


class Compared(msgspec.Struct, frozen=True):
    """A list is complete: check whether this pod of it overcommits a card."""

    pod: str


class Corrected(msgspec.Struct, frozen=True):
    """The grant of a confirmed pod was corrected."""

    pod: str
    grant: Grant


class PodGone(msgspec.Struct, frozen=True):
    """The pod's containers are gone."""

    pod: str


class Nominated(msgspec.Struct, frozen=True):
    """Pods are being evicted for this pod; the capacity is kept for it meanwhile."""

    allocation: Allocation
    until: float


class Withdrawn(msgspec.Struct, frozen=True):
    """The nomination is withdrawn: the capacity will not be freed."""

    pod: str


class PodsListed(msgspec.Struct, frozen=True):
    """All pods that are bound to nodes, from one list of the cluster. Pods that are missing in it are gone."""

    allocations: tuple[Allocation, ...]


class QuotasSet(msgspec.Struct, frozen=True):
    """The quotas of the namespaces from now on."""

    quotas: Quotas


class Tick(msgspec.Struct, frozen=True):
    """Time has passed: deadlines are checked."""

    now: float


Event: TypeAlias = (
    NodeSeen
    | NodeGone
    | Reserved
    | Unreserved
    | Assumed
    | Forgotten
    | Confirmed
    | Relisted
    | Compared
    | Corrected
    | PodGone
    | Nominated
    | Withdrawn
    | PodsListed
    | QuotasSet
    | Tick
)


class Denied(msgspec.Struct, frozen=True):
    """The tile is not free, or no longer free: place the pod again."""

    pod: str
    why: str
    beyond_quota: bool = False  # the tile may be free, but the namespace's quota forbids it


class VerifyBind(msgspec.Struct, frozen=True):
    """An assumed bind is old: read the live pod, and send `Confirmed`, `Forgotten` or `PodGone` to the ledger."""

    pod: str


class Conflict(msgspec.Struct, frozen=True):
    """The cluster shows more on a card than it has. The pod is the newest of those on it."""

    pod: str
    node: str
    cards: tuple[str, ...]
    shrunk: bool = False  # no pod was added: the node now reports less


class Freed(msgspec.Struct, frozen=True):
    """Capacity was freed on a node: pending pods may fit now."""

    node: str  # "": any node, because quotas changed


Instruction: TypeAlias = Denied | VerifyBind | Conflict | Freed
