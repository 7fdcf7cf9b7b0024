"""Placement units: the parts of a request that are placed as a whole, and the phases of the pod in which they run."""

from collections.abc import Iterable
from functools import lru_cache

import msgspec

from gputile.model.cards import Use
from gputile.model.requests import ContainerRequest, PodRequest, Role, phases
from gputile.model.units import MiB


class Demand(Use, frozen=True):
    """What a unit needs of each of its cards in one phase of the pod."""

    phase: int = 0


class PlacementUnit(msgspec.Struct, frozen=True, kw_only=True):
    """The request of one container, or of all containers when they share their cards."""

    asks: tuple[ContainerRequest, ...]
    phases_of: tuple[tuple[int, ...], ...]  # by ask: the phases in which it runs
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
        if len(self.phases_of) == 1:
            return list(self.phases_of[0])
        return sorted({phase for own_phases in self.phases_of for phase in own_phases})

    def asks_in(self, phase: int) -> list[ContainerRequest]:
        return [ask for ask, own_phases in zip(self.asks, self.phases_of, strict=True) if phase in own_phases]

    def demands(self) -> list[list[ContainerRequest]]:
        """The sets of asks that run at the same time; a single ask is the same in all its phases."""
        if len(self.asks) == 1:
            return [list(self.asks)]
        by_phase: dict[int, list[ContainerRequest]] = {}
        for ask, own_phases in zip(self.asks, self.phases_of, strict=True):
            for phase in own_phases:
                by_phase.setdefault(phase, []).append(ask)
        return [by_phase[phase] for phase in sorted(by_phase)]

    def needs(self, card_memory: MiB) -> tuple[Demand, ...]:
        """By phase, on a card of this size."""
        demands = self.demands()
        if len(demands) == 1:
            once = _need(0, demands[0], card_memory, self.slots)
            return tuple(Demand(once.memory, once.cores, once.slots, phase) for phase in self.phases())
        pairs = zip(self.phases(), demands, strict=True)
        return tuple(_need(phase, asks, card_memory, self.slots) for phase, asks in pairs)

    def peak(self, card_memory: MiB) -> Demand:
        """The most that it needs of a card at any time: the unit alone fits on a card that has this free."""
        needs = [_need(0, asks, card_memory, self.slots) for asks in self.demands()]
        if len(needs) == 1:
            return needs[0]
        return Demand(max(n.memory for n in needs), max(n.cores for n in needs), max(n.slots for n in needs))

    def hardness(self) -> tuple[int, ...]:
        """Larger is harder to place: whole cards first, then many cards, then large tiles."""
        tile = max((ask.memory or 0, ask.memory_percent or 0, ask.cores) for ask in self.asks)
        return (int(not self.is_init), int(self.exclusive), self.cards, *tile)


def _need(phase: int, asks: Iterable[ContainerRequest], card_memory: MiB, slots: int) -> Demand:
    asks = list(asks)
    return Demand(
        sum(ask.memory_of(card_memory) for ask in asks),
        sum(ask.cores for ask in asks),
        slots * len(asks),
        phase,
    )


@lru_cache(1024)
def split(request: PodRequest) -> tuple[PlacementUnit, ...]:
    """The units of a request, in the pod's order. Cached: it is called often, and most pods are alike."""
    asking = [ask for ask in request.asks if ask.cards]  # a container without cards needs nothing
    pairs = list(zip(asking, phases([ask.role for ask in asking]), strict=True))
    if request.together and pairs:
        asks, phase_sets = zip(*pairs, strict=True)
        return (PlacementUnit(asks=asks, phases_of=phase_sets, slots=request.slots),)
    return tuple(PlacementUnit(asks=(ask,), phases_of=(own_phases,), slots=request.slots) for ask, own_phases in pairs)


def phase_count(units: Iterable[PlacementUnit]) -> int:
    return 1 + max((phase for unit in units for phase in unit.phases()), default=0)
