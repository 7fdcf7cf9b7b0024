"""Arithmetic of free capacity on one card, for the ledger."""

from gputile.engine.fleet.fleet import Fleet
from gputile.model.allocations import Allocation
from gputile.model.cards import FreeCapacity
from gputile.model.grants import Use

NOTHING = Use(0, 0, 0)


def cards_short(fleet: Fleet, allocation: Allocation, *, taken: bool = False) -> list[str]:
    """The cards that lack capacity for the allocation; with `taken`, the cards that are overcommitted although it is
    already subtracted."""
    uses = allocation.uses()
    if allocation.node not in fleet:
        return sorted(uses) or [allocation.node]
    return [
        uuid
        for uuid, use in uses.items()
        if not _fits(fleet.free_capacity(allocation.node, uuid), NOTHING if taken else use)
    ]


def _fits(free: FreeCapacity | None, use: Use) -> bool:
    """Whether this fits on the card too. A card without free cores takes no more tiles; the tiles on it stay."""
    if free is None:
        return False
    free_cores = free.cores >= max(use.cores, 1 if use != NOTHING else 0)
    return free.memory >= use.memory and free_cores and (not use.slots or free.slots >= use.slots)


def capacity_left(free: FreeCapacity, uses: list[Use]) -> FreeCapacity:
    return FreeCapacity(
        free.memory - sum(use.memory for use in uses),
        free.cores - sum(use.cores for use in uses),
        free.slots - sum(use.slots for use in uses),
        free.tenants + len(uses),
    )
