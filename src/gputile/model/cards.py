"""Physical GPUs and their nodes, and the capacity that is free on them at one moment."""

import msgspec

from gputile.model.units import ALL, MiB, Millicores, Percent

DEFAULT_SLOTS = 10
"""The most tiles on one card, for the dialects that count slots (`PodRequest.slots`)."""

NO_NUMA = -1

NodeFault = str
"""Why no pod may use the node: one of `refusals.NodeReason`, or "" when the node is usable."""


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """One physical GPU. It has both index and UUID, because tools name GPUs by either."""

    index: int
    uuid: str
    memory: MiB
    cores: Percent = ALL
    slots: int = DEFAULT_SLOTS
    model: str = ""  # as the driver names it; "" is unknown
    numa: int = NO_NUMA
    pci: str = ""
    mode: str = ""  # sharing mode: "hami-core", "mps", "mig"; "" is unknown
    healthy: bool = True
    reason: str = ""  # why it is unhealthy
    cordoned: bool = False

    @property
    def in_mig_mode(self) -> bool:
        return self.mode == "mig"


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """What a node has: its cards, CPU and memory, whether allocated or free."""

    name: str
    cards: tuple[Card, ...] = ()
    cpu: Millicores = 0  # allocatable
    memory: MiB = 0  # allocatable host memory
    links: tuple[tuple[int, ...], ...] = ()  # by card position; larger is closer, 0: no link; (): unknown
    agent: str = ""  # the dialect whose agent reports the cards; "" when there is no agent
    pool: str = ""  # node pool, for quota
    one_at_a_time: bool = False  # our agent starts one pod at a time, because the container runtime lacks CDI
    since: str = ""  # RFC 3339 time at which our agent first served the node; "" is unknown
    gpushare_unit: MiB = 0  # MiB per `aliyun.com/gpu-mem` where gpushare's agent runs; 0: use the setting
    card_policy: str = ""  # the node's own card policy (gpushare's placement label)
    fault: NodeFault = ""

    def link(self, card: int, other: int) -> int:
        """How closely two cards (by position) are linked; 0 when that is unknown."""
        return self.links[card][other] if self.links else 0


class FreeCapacity(msgspec.Struct, frozen=True):
    """What is free on one card. A card overcommitted by other schedulers has negative numbers, which mean none.

    `free - use` is what is left when one more pod holds `use`, `free + use` what is free after that pod has gone.
    """

    memory: MiB
    cores: Percent
    slots: int
    tenants: int = 0  # pods that hold a tile of the card

    def __sub__(self, use: "Use") -> "FreeCapacity":
        return FreeCapacity(self.memory - use.memory, self.cores - use.cores, self.slots - use.slots, self.tenants + 1)

    def __add__(self, use: "Use") -> "FreeCapacity":
        return FreeCapacity(self.memory + use.memory, self.cores + use.cores, self.slots + use.slots, self.tenants - 1)

    @classmethod
    def of(cls, card: Card) -> "FreeCapacity":
        """The whole card, with no pod on it."""
        return cls(card.memory, card.cores, card.slots)


class Use(msgspec.Struct, frozen=True):
    """What one pod, or several together, hold or need of one card."""

    memory: MiB
    cores: Percent
    slots: int

    def __add__(self, other: "Use") -> "Use":
        return Use(self.memory + other.memory, self.cores + other.cores, self.slots + other.slots)

    def fits(self, free: FreeCapacity) -> bool:
        return self.fits_memory(free) and self.fits_cores(free) and self.fits_slots(free)

    def fits_memory(self, free: FreeCapacity) -> bool:
        return free.memory >= self.memory

    def fits_cores(self, free: FreeCapacity) -> bool:
        # A card whose cores are all allocated takes no tile, not even one without cores.
        return free.cores >= max(self.cores, 1)

    def fits_slots(self, free: FreeCapacity) -> bool:
        return not self.slots or free.slots >= self.slots  # dialects without slots ignore them

    def fits_beside(self, left: FreeCapacity) -> bool:
        """Whether it fits beside other containers of the same pod, for which a card without free cores is not full."""
        return left.memory >= self.memory and left.cores >= self.cores and self.fits_slots(left)


NOTHING = Use(0, 0, 0)


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node at one moment: what it has, and what is free on each card and on the host."""

    node: Node
    free_by_card: tuple[FreeCapacity, ...]
    cpu: Millicores
    memory: MiB

    @classmethod
    def empty(cls, node: Node) -> "NodeView":
        """The node with no pods on it."""
        return cls(node=node, free_by_card=tuple(map(FreeCapacity.of, node.cards)), cpu=node.cpu, memory=node.memory)
