"""What an audit found. Values only; `checking` fills them in and `cli.audit` prints them.

A finding is something sold twice or wrong. A remark is something that a person may want to know and that is right, or
about to be right by itself.
"""

from enum import StrEnum

import msgspec

from gputile.dialects.wire import Pod, PodStatus
from gputile.model.cards import Card
from gputile.model.units import MiB, Percent


class Condition(msgspec.Struct, frozen=True, rename="camel"):
    type: str | None = None
    status: str | None = None
    message: str | None = None
    last_transition_time: str | None = None


class SeenStatus(PodStatus, frozen=True, rename="camel"):
    conditions: tuple[Condition, ...] | None = None


class SeenPod(Pod, frozen=True):
    """A pod with all that an audit wants to know of it; the scheduler itself does without conditions."""

    status: SeenStatus | None = None

    @property
    def bound_at(self) -> str:
        """When the API server bound it, as it writes times; "" when it does not say."""
        said = (self.status and self.status.conditions) or ()
        return next((c.last_transition_time or "" for c in said if c.type == "PodScheduled"), "")


class Code(StrEnum):
    """Stable words for scripts."""

    OVERSOLD = "oversold"
    NOT_ITS_GRANT = "not-its-grant"
    UNREADABLE_GRANT = "unreadable-grant"
    NO_SUCH_CARD = "no-such-card"
    NO_SUCH_CONTAINER = "no-such-container"
    CARD_ON_TWO_NODES = "card-on-two-nodes"
    UNREADABLE_NODE = "unreadable-node"
    NO_GRANT = "no-grant"
    NODE_GONE = "node-gone"
    NOT_AS_ASKED = "not-as-asked"
    OUT_OF_USE = "card-out-of-use"
    COULD_GO = "could-go"
    LINGERING = "lingering"


class Held(msgspec.Struct, frozen=True):
    """What one pod holds of one card."""

    pod: str  # namespace/name
    uid: str
    memory: MiB
    cores: Percent
    slots: int
    by: str  # whose record says so: "gputile", or the dialect
    granted: str = ""  # when, as Kubernetes writes times; "" when the record does not say
    bound: str = ""
    phase: str = ""
    going: bool = False  # its deletion was asked for


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """One finding or remark, with its story."""

    code: Code
    what: str  # a sentence
    todo: str = ""  # what to do next
    node: str = ""
    pod: str = ""  # namespace/name
    card: Card | None = None
    holders: tuple[Held, ...] = ()  # of the card, who came first first


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was looked at, and what was found."""

    nodes: int  # with cards
    cards: int
    pods: int  # that hold a part of a card
    waiting: int  # that ask for cards and have no node
    memory_sold: MiB
    memory: MiB
    findings: tuple[Notice, ...] = ()
    remarks: tuple[Notice, ...] = ()
    sold: dict[str, tuple[Held, ...]] = {}  # by card, for those who look closer

    @property
    def is_right(self) -> bool:
        return not self.findings
