"""What a card bears beside what it holds already: the sums that the ledger does card by card."""

from gputile.engine.fleet.fleet import Fleet
from gputile.model.allocations import Allocation
from gputile.model.cards import FreeCapacity
from gputile.model.grants import Use

NOTHING = Use(0, 0, 0)


def cards_short(fleet: Fleet, allocation: Allocation, *, taken: bool = False) -> list[str]:
    """The cards that lack room for the holding; with `taken`, those that lack it although it is already off."""
    uses = allocation.uses()
    if allocation.node not in fleet:
        return sorted(uses) or [allocation.node]
    return [
        uuid for uuid, use in uses.items() if not _bears(fleet.room(allocation.node, uuid), NOTHING if taken else use)
    ]


def _bears(room: FreeCapacity | None, use: Use) -> bool:
    """Whether the card takes this too; one whose cores are sold out takes nobody (but what is on it already stays)."""
    if room is None:
        return False
    free_cores = room.cores >= max(use.cores, 1 if use != NOTHING else 0)
    return room.memory >= use.memory and free_cores and (not use.slots or room.slots >= use.slots)


def capacity_left(room: FreeCapacity, uses: list[Use]) -> FreeCapacity:
    return FreeCapacity(
        room.memory - sum(use.memory for use in uses),
        room.cores - sum(use.cores for use in uses),
        room.slots - sum(use.slots for use in uses),
        room.tenants + len(uses),
    )
