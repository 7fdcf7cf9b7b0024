"""Physical GPUs and the nodes that hold them, as facts; and what is free of them at one moment."""

import msgspec

from gputile.model.units import ALL, MiB, Millicores, Percent

DEFAULT_SLOTS = 10
"""How many tiles a card takes at most from the dialects that count slots (`requests.SLOT_DIALECTS`)."""

NO_NUMA = -1

NodeFault = str
"""Why a whole node is out of use; one of `refusals.NodeCode`, or "" when it is in use."""


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """One physical GPU. Index and UUID are both kept: tools name cards by either."""

    index: int
    uuid: str
    memory: MiB
    cores: Percent = ALL
    slots: int = DEFAULT_SLOTS
    model: str = ""  # as the driver names it, "" when nobody said
    numa: int = NO_NUMA
    pci: str = ""
    mode: str = ""  # how it is shared: "hami-core", "mps", "mig"; "" when nobody said
    healthy: bool = True
    reason: str = ""  # why it is not healthy
    cordoned: bool = False

    @property
    def in_mig_mode(self) -> bool:
        return self.mode == "mig"


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node's facts: what it has, not what is taken of it."""

    name: str
    cards: tuple[Card, ...] = ()
    cpu: Millicores = 0  # allocatable
    memory: MiB = 0  # allocatable main memory
    links: tuple[tuple[int, ...], ...] = ()  # by card position; larger is closer, 0 is no link; () is unknown
    agent: str = ""  # the dialect whose agent says what cards it has; "" when none does
    pool: str = ""  # for quota
    one_at_a_time: bool = False  # its agent, though ours, cannot tell whose devices it gives out: its runtime lacks CDI
    since: str = ""  # when an agent of ours first served it, as Kubernetes writes times; "" when that is unknown
    gpushare_unit: MiB = 0  # MiB per `aliyun.com/gpu-mem` where gpushare's agent runs; 0: as the settings say
    card_policy: str = ""  # a node may prefer its own order of cards (gpushare's placement label)
    fault: NodeFault = ""

    def link(self, one: int, other: int) -> int:
        """How closely two cards (by position) are linked; 0 when nobody said."""
        return self.links[one][other] if self.links else 0


class FreeCapacity(msgspec.Struct, frozen=True):
    """What is free of one card. Negative numbers are possible (a card oversold by others) and mean none."""

    memory: MiB
    cores: Percent
    slots: int
    tenants: int = 0  # pods that hold a tile of it

    @classmethod
    def of(cls, card: Card) -> "FreeCapacity":
        return cls(card.memory, card.cores, card.slots)


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node at one moment: its facts, and what is free of each card and of the host."""

    node: Node
    free_by_card: tuple[FreeCapacity, ...]
    cpu: Millicores
    memory: MiB

    @classmethod
    def empty(cls, node: Node) -> "NodeView":
        """The node with nobody on it."""
        return cls(node=node, free_by_card=tuple(map(FreeCapacity.of, node.cards)), cpu=node.cpu, memory=node.memory)
