"""What a pod was given.

Room:  `Grant` and its parts; `take` defines the tile that an ask cuts out of a card.
Door:  `Grant.uses()` says what the grant holds of each card, init containers and sidecars counted as they run.
"""

from collections.abc import Mapping

import msgspec

from gputile.model.cards import Card
from gputile.model.requests import SLOT_DIALECTS, Ask, Role
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
        most: dict[str, _Most] = {}
        for held in self.containers:
            for uuid, use in _of(held, slots).items():
                most.setdefault(uuid, _Most()).add(held.role, use)
        return {uuid: one.use for uuid, one in most.items()}


NOTHING = Use(0, 0, 0)


def _of(held: ContainerGrant, slots: int) -> Mapping[str, Use]:
    """What one container holds of each card."""
    found: dict[str, Use] = {}
    for tile in held.tiles:
        found[tile.uuid] = _sum(found.get(tile.uuid, NOTHING), Use(tile.memory, tile.cores, slots))
    return found


class _Most:
    """The most that containers hold of one card at one time, told in the order in which they start: what `phases` of
    `requests` define, in one pass, for a pod may have thousands of init containers and sidecars."""

    def __init__(self) -> None:
        self._apps = self._sidecars = self._inits = NOTHING

    def add(self, role: Role, use: Use) -> None:
        if role is Role.INIT:
            self._inits = _larger(self._inits, _sum(self._sidecars, use))
        elif role is Role.SIDECAR:
            self._sidecars = _sum(self._sidecars, use)
        else:
            self._apps = _sum(self._apps, use)

    @property
    def use(self) -> Use:
        return _larger(self._inits, _sum(self._sidecars, self._apps))


def _sum(one: Use, other: Use) -> Use:
    return Use(one.memory + other.memory, one.cores + other.cores, one.slots + other.slots)


def _larger(one: Use, other: Use) -> Use:
    return Use(max(one.memory, other.memory), max(one.cores, other.cores), max(one.slots, other.slots))
