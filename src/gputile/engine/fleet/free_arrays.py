"""The free capacity of all cards of the cluster as arrays: one column per node, one line per card position.

A structure of arrays, so that one comparison covers every card of the cluster. Only `fleet` writes to it, `feasibility`
reads it. Entries beyond the cards of a node are never eligible, so readers need not know how many cards a node has.
"""

from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]  # wide enough for a card that is overcommitted a thousand times
Longs: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]


class FreeArrays(msgspec.Struct, frozen=True, kw_only=True):
    """What is free at one moment: by card and node, and by node."""

    size: Ints  # memory of the card, MiB
    memory: Ints  # free
    cores: Ints
    slots: Ints
    tenants: Ints
    cpu: Longs
    host: Longs  # host memory, MiB

    def columns(self, rows: NDArray[np.intp]) -> "FreeArrays":
        """A copy with only some of the nodes."""
        return FreeArrays(
            size=self.size[:, rows],
            memory=self.memory[:, rows],
            cores=self.cores[:, rows],
            slots=self.slots[:, rows],
            tenants=self.tenants[:, rows],
            cpu=self.cpu[rows],
            host=self.host[rows],
        )


def count(mask: Mask) -> NDArray[np.uint16]:
    """True entries per node."""
    number: NDArray[np.uint16] = np.add.reduce(mask.view(np.uint8), axis=0, dtype=np.uint16)
    return number


def anywhere(mask: Mask) -> Mask:
    """Nodes with at least one True entry."""
    some: Mask = np.logical_or.reduce(mask, axis=0)
    return some
