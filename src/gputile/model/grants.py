"""What a pod was given.

Room:  `Grant` and its parts; `take` defines the tile that an ask cuts out of a card.
Door:  `Grant.uses()` says what the grant holds of each card, init containers and sidecars counted as they run.
"""

from collections.abc import Mapping

import msgspec

from gputile.model.cards import Card
from gputile.model.requests import SLOT_DIALECTS, Ask, Role, phases
from gputile.model.units import MiB, Percent


class Tile(msgspec.Struct, frozen=True):
    """A share of one card. A whole card is a tile too."""

    uuid: str
    index: int
    memory: MiB
    cores: Percent


def take(ask: Ask, card: Card) -> Tile:
    """The tile that `ask` cuts out of `card`."""
    return Tile(card.uuid, card.index, ask.memory_of(card.memory), ask.cores)


class ContainerGrant(msgspec.Struct, frozen=True):
    """The tiles of one container, in the order its devices are numbered."""

    container: str
    tiles: tuple[Tile, ...]
    role: Role = Role.APP


class Use(msgspec.Struct, frozen=True):
    """What one pod holds of one card."""

    memory: MiB
    cores: Percent
    slots: int


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """What one pod was given on one node. It names the pod's UID and node, so that a copy of it is worth nothing."""

    pod: str  # UID
    node: str
    dialect: str
    containers: tuple[ContainerGrant, ...]  # only those that hold tiles, in the pod's order
    unplaced: int = 0  # GPUs that the pod holds besides, where it is unknown which of the node they are

    def uses(self) -> Mapping[str, Use]:
        """By card UUID: the most this pod ever holds at one time."""
        slots = int(self.dialect in SLOT_DIALECTS)
        if len(self.containers) == 1:
            uses = {tile.uuid: Use(tile.memory, tile.cores, slots) for tile in self.containers[0].tiles}
            if len(uses) == len(self.containers[0].tiles):
                return uses
        sums: dict[str, dict[int, Use]] = {}
        for held, alive in zip(self.containers, phases([c.role for c in self.containers]), strict=True):
            for tile in held.tiles:
                by_phase = sums.setdefault(tile.uuid, {})
                for phase in alive:
                    before = by_phase.get(phase, Use(0, 0, 0))
                    by_phase[phase] = Use(before.memory + tile.memory, before.cores + tile.cores, before.slots + slots)
        return {uuid: _most(list(by_phase.values())) for uuid, by_phase in sums.items()}


def _most(uses: list[Use]) -> Use:
    return Use(max(u.memory for u in uses), max(u.cores for u in uses), max(u.slots for u in uses))
