"""What a pod was given.

Room:  `Grant` and its parts; `take` defines the tile that an ask cuts out of a card.
Door:  `Grant.uses()` says what the grant holds of each card, init containers and sidecars counted as they run.
"""

from collections.abc import Mapping
from functools import cached_property

import msgspec

from gputile.model.cards import Card
from gputile.model.requests import SLOT_DIALECTS, Amounts, ContainerRequest, Role, most_at_once
from gputile.model.units import MiB, Percent


class Tile(msgspec.Struct, frozen=True):
    """A share of one card. A whole card is a tile too."""

    uuid: str
    index: int
    memory: MiB
    cores: Percent


def take(ask: ContainerRequest, card: Card) -> Tile:
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


class Grant(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What one pod was given on one node. It names the pod's UID and node, so that a copy of it is worth nothing."""

    pod: str  # UID
    node: str
    dialect: str
    containers: tuple[ContainerGrant, ...]  # only those that hold tiles, in the pod's order
    unplaced: int = 0  # GPUs that the pod holds besides, where it is unknown which of the node they are

    def uses(self) -> Mapping[str, Use]:
        """By card UUID: the most this pod ever holds at one time."""
        if len(self.containers) != 1:
            return self._uses  # asked again and again, and there may be thousands of containers
        tiles = self.containers[0].tiles
        uses = {tile.uuid: Use(tile.memory, tile.cores, self._slots) for tile in tiles}
        return uses if len(uses) == len(tiles) else self._uses

    @property
    def _slots(self) -> int:
        return int(self.dialect in SLOT_DIALECTS)

    @cached_property
    def _uses(self) -> Mapping[str, Use]:
        by_card: dict[str, list[tuple[Role, Amounts]]] = {}
        for held in self.containers:
            for uuid, amounts in self._held_by(held).items():
                by_card.setdefault(uuid, []).append((held.role, amounts))
        return {uuid: Use(*most_at_once(parts, 3)) for uuid, parts in by_card.items()}

    def _held_by(self, held: ContainerGrant) -> dict[str, Amounts]:
        """By card; a record may name a card twice."""
        sums: dict[str, Amounts] = {}
        for tile in held.tiles:
            memory, cores, slots = sums.get(tile.uuid, (0, 0, 0))
            sums[tile.uuid] = (memory + tile.memory, cores + tile.cores, slots + self._slots)
        return sums
