"""Grants: which tiles of which cards a pod was given.

`take` defines the tile that a request gets of a card. `Grant.uses()` sums up what the grant holds of each card,
with init containers and sidecars counted as Kubernetes runs them.
"""

from collections.abc import Mapping
from functools import cached_property

import msgspec

from gputile.model.cards import Card, Use
from gputile.model.requests import Amounts, ContainerRequest, Role, most_at_once
from gputile.model.units import MiB, Percent


class Tile(msgspec.Struct, frozen=True):
    """A share of one GPU. A whole GPU is a tile too."""

    uuid: str
    index: int
    memory: MiB
    cores: Percent


def take(ask: ContainerRequest, card: Card) -> Tile:
    """The tile that a container with this request gets of `card`."""
    return Tile(card.uuid, card.index, ask.memory_of(card.memory), ask.cores)


class ContainerGrant(msgspec.Struct, frozen=True):
    """The tiles of one container, in the order its devices are numbered."""

    container: str
    tiles: tuple[Tile, ...]
    role: Role = Role.APP


class Grant(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What one pod was given on one node. It names the pod's UID and node, so that a copy on another pod is invalid."""

    pod: str  # UID
    node: str
    dialect: str
    containers: tuple[ContainerGrant, ...]  # only containers with tiles, in the pod's order
    slots: int = 1  # that one tile takes of its card; the dialect decides it, and no record names it
    unplaced: int = 0  # more GPUs of the node that the pod holds, where it is unknown which ones

    def uses(self) -> Mapping[str, Use]:
        """By card UUID: the most that this pod holds of the card at any time."""
        tiles = self.containers[0].tiles if len(self.containers) == 1 else ()
        if len(tiles) != 1:
            return self._uses  # cached: called often, and there may be thousands of tiles
        return {tiles[0].uuid: Use(tiles[0].memory, tiles[0].cores, self.slots)}

    @cached_property
    def _uses(self) -> Mapping[str, Use]:
        by_card: dict[str, list[tuple[Role, Amounts]]] = {}
        for container in self.containers:
            for uuid, amounts in self._held_by(container).items():
                by_card.setdefault(uuid, []).append((container.role, amounts))
        return {uuid: Use(*most_at_once(parts, 3)) for uuid, parts in by_card.items()}

    def _held_by(self, container: ContainerGrant) -> dict[str, Amounts]:
        """By card UUID; a record may name a card twice."""
        sums: dict[str, Amounts] = {}
        for tile in container.tiles:
            memory, cores, slots = sums.get(tile.uuid, (0, 0, 0))
            sums[tile.uuid] = (memory + tile.memory, cores + tile.cores, slots + self.slots)
        return sums
