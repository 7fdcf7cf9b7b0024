"""A request cut into pieces: what goes onto the same cards together, and when it is there."""

from collections.abc import Iterable
from functools import lru_cache

import msgspec

from gputile.model.cards import Room
from gputile.model.requests import Ask, PodRequest, Role, phases
from gputile.model.units import MiB, Percent


class Need(msgspec.Struct, frozen=True):
    """What a piece takes of each of its cards in one phase of the pod's life."""

    phase: int
    memory: MiB
    cores: Percent
    slots: int

    def fits(self, room: Room) -> bool:
        return self.fits_memory(room) and self.fits_cores(room) and self.fits_slots(room)

    def fits_memory(self, room: Room) -> bool:
        return room.memory >= self.memory

    def fits_cores(self, room: Room) -> bool:
        # A card whose cores are all sold takes nobody, not even a tile that reserves none.
        return room.cores >= max(self.cores, 1)

    def fits_slots(self, room: Room) -> bool:
        return not self.slots or room.slots >= self.slots  # who takes none does not mind that none is left

    def fits_beside(self, left: Room) -> bool:
        """Whether it fits what containers of the same pod leave; for them the card is not sold out."""
        return left.memory >= self.memory and left.cores >= self.cores and self.fits_slots(left)

    def off(self, room: Room) -> Room:
        """What is left of the room."""
        return Room(room.memory - self.memory, room.cores - self.cores, room.slots - self.slots, room.tenants)


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """One container's ask, or those of all containers when they share their cards."""

    asks: tuple[Ask, ...]
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
        return sorted({phase for mine in self.alive for phase in mine})

    def asks_in(self, phase: int) -> list[Ask]:
        return [ask for ask, mine in zip(self.asks, self.alive, strict=True) if phase in mine]

    def needs(self, card_memory: MiB) -> tuple[Need, ...]:
        """By phase, on a card of that size."""
        return tuple(_need(phase, self.asks_in(phase), card_memory, self.slots) for phase in self.phases())

    def peak(self, card_memory: MiB) -> Need:
        """The most it takes of a card at any time; a card that bears this bears the piece alone."""
        needs = self.needs(card_memory)
        if len(needs) == 1:
            return needs[0]
        return Need(0, max(n.memory for n in needs), max(n.cores for n in needs), max(n.slots for n in needs))

    def hardness(self) -> tuple[int, ...]:
        """Larger is harder to place: whole cards first, then many cards, then large tiles."""
        tile = max((ask.memory or 0, ask.memory_percent or 0, ask.cores) for ask in self.asks)
        return (int(not self.is_init), int(self.exclusive), self.cards, *tile)


def _need(phase: int, asks: Iterable[Ask], card_memory: MiB, slots: int) -> Need:
    asks = list(asks)
    return Need(
        phase,
        sum(ask.memory_of(card_memory) for ask in asks),
        sum(ask.cores for ask in asks),
        slots * len(asks),
    )


@lru_cache(1024)
def cut(request: PodRequest) -> tuple[Piece, ...]:
    """The pieces of a request, in the pod's order. Remembered: it is asked at every turn, and most pods are alike."""
    alive = phases([ask.role for ask in request.asks])
    wanting = [(ask, mine) for ask, mine in zip(request.asks, alive, strict=True) if ask.cards]
    if request.together and wanting:
        asks, lives = zip(*wanting, strict=True)
        return (Piece(asks=asks, alive=lives, slots=request.slots),)
    return tuple(Piece(asks=(ask,), alive=(mine,), slots=request.slots) for ask, mine in wanting)


def phase_count(pieces: Iterable[Piece]) -> int:
    return 1 + max((phase for piece in pieces for phase in piece.phases()), default=0)
