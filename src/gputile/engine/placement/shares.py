"""The free share of a card as one number.

A card has memory and cores. Policies compare cards and nodes by their free share, which is the smaller of the two: a
card without free memory is full, however many cores are left.
"""

from gputile.model.cards import Card, FreeCapacity
from gputile.model.requests import ContainerRequest
from gputile.model.units import ALL, MiB, Percent

CARD = 10_000
"""One whole card. Integers, so that adding and subtracting the same share gives exactly zero."""


def free_share(memory: MiB, cores: Percent, of_memory: MiB, of_cores: Percent) -> int:
    """The free share of a card of this size."""
    by_memory = memory * CARD // of_memory if of_memory else CARD
    by_cores = cores * CARD // of_cores if of_cores else 0
    return max(0, min(by_memory, by_cores))


def free_capacity_share(card: Card, free: FreeCapacity) -> int:
    return free_share(free.memory, free.cores, card.memory, card.cores)


def ask_share(ask: ContainerRequest, card_memory: float) -> float:
    """The share that one tile of `ask` has of a card of this size."""
    if ask.memory is None:
        by_memory = CARD * (ask.memory_percent or 0) / ALL  # in this order: 0.81 x 10000 is not 8100
    else:
        by_memory = CARD * ask.memory / card_memory if card_memory else 0.0
    return max(by_memory, CARD * ask.cores / ALL)
