"""What happens to the book, and what it wants done. Values only; `ledger` gives them their meaning."""

from typing import TypeAlias

import msgspec

from gputile.model.allocations import Allocation
from gputile.model.cards import Node
from gputile.model.grants import Grant
from gputile.model.quotas import Quotas


class NodeSeen(msgspec.Struct, frozen=True):
    """A node is there, or has changed: cards, health, size."""

    node: Node


class NodeGone(msgspec.Struct, frozen=True):
    name: str


class Reserved(msgspec.Struct, frozen=True):
    """Filter chose a node for the pod; bind has not come yet."""

    allocation: Allocation
    at: float


class Unreserved(msgspec.Struct, frozen=True):
    """The pencil is not wanted any more."""

    pod: str


class Assumed(msgspec.Struct, frozen=True):
    """Bind is about to tell the API server."""

    allocation: Allocation
    at: float


class Forgotten(msgspec.Struct, frozen=True):
    """The API server said a definite no to the bind."""

    pod: str


class Confirmed(msgspec.Struct, frozen=True):
    """The cluster shows the pod on its node with its grant: the truth, whoever decided it."""

    allocation: Allocation


class Relisted(msgspec.Struct, frozen=True):
    """One pod of a list that is being taken in. Others of the list may have left its cards or come to them: what
    overlaps is looked for when all of it is in (`Compared`)."""

    allocation: Allocation


class Compared(msgspec.Struct, frozen=True):
    """A list is in: look whether this pod of it holds what a card does not have."""

    pod: str


class Corrected(msgspec.Struct, frozen=True):
    """The grant of a confirmed pod was set right."""

    pod: str
    grant: Grant


class PodGone(msgspec.Struct, frozen=True):
    """The pod's containers are gone."""

    pod: str


class Nominated(msgspec.Struct, frozen=True):
    """Room is being made for this pod; others must not take it meanwhile."""

    allocation: Allocation
    until: float


class Withdrawn(msgspec.Struct, frozen=True):
    """The room will not be made after all."""

    pod: str


class PodsListed(msgspec.Struct, frozen=True):
    """Every pod on a node, as one list of the cluster shows them. What is not in it is gone."""

    allocations: tuple[Allocation, ...]


class QuotasSet(msgspec.Struct, frozen=True):
    """What namespaces may hold from now on."""

    quotas: Quotas


class Tick(msgspec.Struct, frozen=True):
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
    """The tile is not free (any more): place the pod again."""

    pod: str
    why: str
    beyond_quota: bool = False  # the tile may be free, but its namespace may not have it


class VerifyBind(msgspec.Struct, frozen=True):
    """An assumption is old: look at the live pod, and tell the book `Confirmed`, `Forgotten` or `PodGone`."""

    pod: str


class Conflict(msgspec.Struct, frozen=True):
    """The cluster shows more on a card than it has. The pod named is the one that came last."""

    pod: str
    node: str
    cards: tuple[str, ...]
    shrunk: bool = False  # nobody came: the node now says that it has less


class Freed(msgspec.Struct, frozen=True):
    """Room appeared on a node: pods that wait may fit now."""

    node: str  # "": anywhere, for quotas changed


Instruction: TypeAlias = Denied | VerifyBind | Conflict | Freed
