"""How full a card is, as one number.

A card has memory and cores; policies compare cards and nodes by the share that is still free, which is the smaller of
the two: a card without free memory is full, however many cores are left.
"""

from gputile.model.cards import Card, FreeCapacity
from gputile.model.requests import ContainerRequest
from gputile.model.units import ALL, MiB, Percent

CARD = 10_000
"""One whole card. Whole numbers, so that what is added and taken away again sums to nothing."""


def free_share(memory: MiB, cores: Percent, of_memory: MiB, of_cores: Percent) -> int:
    """The free share of a card with so much free, out of so much."""
    by_memory = memory * CARD // of_memory if of_memory else CARD
    by_cores = cores * CARD // of_cores if of_cores else 0
    return max(0, min(by_memory, by_cores))


def free_capacity_share(card: Card, room: FreeCapacity) -> int:
    return free_share(room.memory, room.cores, card.memory, card.cores)


def ask_share(ask: ContainerRequest, card_memory: float) -> float:
    """The share of a card of that size which one tile of `ask` takes."""
    if ask.memory is None:
        by_memory = CARD * (ask.memory_percent or 0) / ALL  # in this order: 0.81 x 10000 is not 8100
    else:
        by_memory = CARD * ask.memory / card_memory if card_memory else 0.0
    return max(by_memory, CARD * ask.cores / ALL)
