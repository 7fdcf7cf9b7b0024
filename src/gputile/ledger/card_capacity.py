"""What a card bears beside what it holds already: the sums that the ledger does card by card."""

from gputile.engine.fleet.fleet import Fleet
from gputile.model.allocations import Holding
from gputile.model.cards import Room
from gputile.model.grants import Use

NOTHING = Use(0, 0, 0)


def cards_short(fleet: Fleet, holding: Holding, *, taken: bool = False) -> list[str]:
    """The cards that lack room for the holding; with `taken`, those that lack it although it is already off."""
    uses = holding.uses()
    if holding.node not in fleet:
        return sorted(uses) or [holding.node]
    return [uuid for uuid, use in uses.items() if not _bears(fleet.room(holding.node, uuid), NOTHING if taken else use)]


def _bears(room: Room | None, use: Use) -> bool:
    """Whether the card takes this too; one whose cores are sold out takes nobody (but what is on it already stays)."""
    if room is None:
        return False
    free_cores = room.cores >= max(use.cores, 1 if use != NOTHING else 0)
    return room.memory >= use.memory and free_cores and (not use.slots or room.slots >= use.slots)


def room_left(room: Room, uses: list[Use]) -> Room:
    return Room(
        room.memory - sum(use.memory for use in uses),
        room.cores - sum(use.cores for use in uses),
        room.slots - sum(use.slots for use in uses),
        room.tenants + len(uses),
    )
