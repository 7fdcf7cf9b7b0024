"""A request cut into pieces: what goes onto the same cards together, and when it is there."""

from collections.abc import Iterable
from functools import lru_cache

import msgspec

from gputile.model.cards import FreeCapacity
from gputile.model.requests import ContainerRequest, PodRequest, Role, phases
from gputile.model.units import MiB, Percent


class Demand(msgspec.Struct, frozen=True):
    """What a piece takes of each of its cards in one phase of the pod's life."""

    phase: int
    memory: MiB
    cores: Percent
    slots: int

    def fits(self, room: FreeCapacity) -> bool:
        return self.fits_memory(room) and self.fits_cores(room) and self.fits_slots(room)

    def fits_memory(self, room: FreeCapacity) -> bool:
        return room.memory >= self.memory

    def fits_cores(self, room: FreeCapacity) -> bool:
        # A card whose cores are all sold takes nobody, not even a tile that reserves none.
        return room.cores >= max(self.cores, 1)

    def fits_slots(self, room: FreeCapacity) -> bool:
        return not self.slots or room.slots >= self.slots  # who takes none does not mind that none is left

    def fits_beside(self, left: FreeCapacity) -> bool:
        """Whether it fits what containers of the same pod leave; for them the card is not sold out."""
        return left.memory >= self.memory and left.cores >= self.cores and self.fits_slots(left)

    def off(self, room: FreeCapacity) -> FreeCapacity:
        """What is left of the room."""
        return FreeCapacity(room.memory - self.memory, room.cores - self.cores, room.slots - self.slots, room.tenants)


class PlacementUnit(msgspec.Struct, frozen=True, kw_only=True):
    """One container's ask, or those of all containers when they share their cards."""

    asks: tuple[ContainerRequest, ...]
    alive: tuple[tuple[int, ...], ...]  # the phases of each ask
    slots: int  # per tile

    @property
    def cards(self) -> int:
        return self.asks[0].cards

    @property
    def exclusive(self) -> bool:
        return any(ask.exclusive for ask in self.asks)

    @property
    def is_init(self) -> bool:
        return all(ask.role is Role.INIT for ask in self.asks)

    def phases(self) -> list[int]:
        if len(self.alive) == 1:
            return list(self.alive[0])
        return sorted({phase for mine in self.alive for phase in mine})

    def asks_in(self, phase: int) -> list[ContainerRequest]:
        return [ask for ask, mine in zip(self.asks, self.alive, strict=True) if phase in mine]

    def demands(self) -> list[list[ContainerRequest]]:
        """What runs at once, each set of asks named once: a single ask is the same in all its phases."""
        if len(self.asks) == 1:
            return [list(self.asks)]
        by_phase: dict[int, list[ContainerRequest]] = {}
        for ask, mine in zip(self.asks, self.alive, strict=True):
            for phase in mine:
                by_phase.setdefault(phase, []).append(ask)
        return [by_phase[phase] for phase in sorted(by_phase)]

    def needs(self, card_memory: MiB) -> tuple[Demand, ...]:
        """By phase, on a card of that size."""
        demands = self.demands()
        if len(demands) == 1:
            once = _need(0, demands[0], card_memory, self.slots)
            return tuple(Demand(phase, once.memory, once.cores, once.slots) for phase in self.phases())
        pairs = zip(self.phases(), demands, strict=True)
        return tuple(_need(phase, asks, card_memory, self.slots) for phase, asks in pairs)

    def peak(self, card_memory: MiB) -> Demand:
        """The most it takes of a card at any time; a card that bears this bears the piece alone."""
        needs = [_need(0, asks, card_memory, self.slots) for asks in self.demands()]
        if len(needs) == 1:
            return needs[0]
        return Demand(0, max(n.memory for n in needs), max(n.cores for n in needs), max(n.slots for n in needs))

    def hardness(self) -> tuple[int, ...]:
        """Larger is harder to place: whole cards first, then many cards, then large tiles."""
        tile = max((ask.memory or 0, ask.memory_percent or 0, ask.cores) for ask in self.asks)
        return (int(not self.is_init), int(self.exclusive), self.cards, *tile)


def _need(phase: int, asks: Iterable[ContainerRequest], card_memory: MiB, slots: int) -> Demand:
    asks = list(asks)
    return Demand(
        phase,
        sum(ask.memory_of(card_memory) for ask in asks),
        sum(ask.cores for ask in asks),
        slots * len(asks),
    )


@lru_cache(1024)
def split(request: PodRequest) -> tuple[PlacementUnit, ...]:
    """The pieces of a request, in the pod's order. Remembered: it is asked at every turn, and most pods are alike."""
    asking = [ask for ask in request.asks if ask.cards]  # those without cards take nothing, whenever they run
    wanting = list(zip(asking, phases([ask.role for ask in asking]), strict=True))
    if request.together and wanting:
        asks, lives = zip(*wanting, strict=True)
        return (PlacementUnit(asks=asks, alive=lives, slots=request.slots),)
    return tuple(PlacementUnit(asks=(ask,), alive=(mine,), slots=request.slots) for ask, mine in wanting)


def phase_count(units: Iterable[PlacementUnit]) -> int:
    return 1 + max((phase for unit in units for phase in unit.phases()), default=0)
