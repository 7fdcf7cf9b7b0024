"""Fragmentation: how much idle GPU the expected workload could not use (FGD, USENIX ATC 2023).

For one task the fragment of a node is all its idle GPU if the task does not fit there (CPU, number of cards with enough
free share, model) or requests no GPU; otherwise the idle parts of the cards that are too small for it. The fragment of
a node is the mean over the learnt tasks. The *gain* of a placement is the fragment before minus the fragment after, in
cards. As a policy (FGD as published), the gain is a node's score; of several containers the one with the most cards
decides.

All functions work on several nodes at once: cards x nodes, and tasks x nodes.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

from gputile.engine.fleet.free_arrays import Ints, Longs
from gputile.engine.placement.shares import CARD
from gputile.engine.policies.workload_model import WorkloadTables

Floats = NDArray[np.float64]


FEW = 64  # nodes


class NodeArrays(msgspec.Struct, frozen=True, kw_only=True):
    """The free share, model and CPU of some nodes, as the scores need them."""

    share: Ints  # free share of each card, in CARD; 0 where there is none
    model: Ints  # the card's model, as a number
    cpu: Longs  # free millicores


class Fragments:
    """The current fragment of some nodes, and how placements would change it."""

    def __init__(self, arrays: NodeArrays, tables: WorkloadTables) -> None:
        self.arrays, self.tables = arrays, tables
        self._accepted = None if tables.accepts is None else tables.accepts[:, arrays.model]  # task x card x node
        fits = arrays.share[None] >= np.maximum(tables.share, 1)[:, None, None]
        self._fits = fits if self._accepted is None else fits & self._accepted
        self._count = self._fits.sum(axis=1, dtype=np.int32)
        self._idle = arrays.share.sum(axis=0, dtype=np.int64)
        self._small = self._idle - np.where(self._fits, arrays.share[None], 0).sum(axis=1, dtype=np.int64)
        self.now = self._mean(self._count, self._small, self._idle, arrays.cpu)

    def _mean(self, count: NDArray[np.int32], small: Longs, idle: Longs, cpu: Longs) -> Floats:
        """The fragment, in cards, given by task how many cards fit it and what is idle on the others."""
        tables, by_task = self.tables, (slice(None), *(None,) * cpu.ndim)
        lost = (count < tables.cards[by_task]) | (cpu < tables.cpu[by_task]) | (tables.cards == 0)[by_task]
        fragment: Floats = tables.weight @ np.where(lost, idle, small).reshape(len(tables.weight), -1)
        return fragment.reshape(cpu.shape) / CARD

    def gain_of_tiles(self, tile: Ints, cpu: int) -> Floats:
        """Card x node: the gain of placing one tile (a share of that card) there; undefined where it does not fit."""
        left = self.arrays.share - tile
        if left.shape[1] > FEW:
            return np.stack([self._gain_on(slice(card, card + 1), left, tile, cpu)[0] for card in range(len(left))])
        return self._gain_on(slice(None), left, tile, cpu)

    def _gain_on(self, cards: slice, left: Ints, tile: Ints, cpu: int) -> Floats:
        """Card x node, for these cards. On few nodes all cards at once, because the call itself costs more than the
        work."""
        arrays, tables = self.arrays, self.tables
        fits = left[None, cards] >= np.maximum(tables.share, 1)[:, None, None]
        if self._accepted is not None:
            fits &= self._accepted[:, cards]
        fitted = self._fits[:, cards]
        count = self._count[:, None] - fitted + fits
        small = self._small[:, None] - np.where(fitted, 0, arrays.share[cards]) + np.where(fits, 0, left[cards])
        cpu_left = np.broadcast_to(arrays.cpu - cpu, left[cards].shape)
        return self.now - self._mean(count, small, self._idle - tile[cards], cpu_left)

    def gain_of_whole_cards(self, cards: int, cpu: int) -> Floats:
        """Node: the gain of taking idle cards, the first ones. Taken cards leave nothing behind."""
        arrays = self.arrays
        idle = arrays.share == CARD
        taken = idle & (np.cumsum(idle, axis=0) <= cards)
        fewer = (self._fits & taken[None]).sum(axis=1, dtype=np.int32)
        unusable = np.where(taken[None] & ~self._fits, CARD, 0).sum(axis=1, dtype=np.int64)
        after = self._mean(self._count - fewer, self._small - unusable, self._idle - cards * CARD, arrays.cpu - cpu)
        return self.now - after

    def gain_of_cpu(self, cpu: int) -> Floats:
        """Node: the (negative) gain of a pod that takes CPU only."""
        return self.now - self._mean(self._count, self._small, self._idle, self.arrays.cpu - cpu)


# ---- the policy -----------------------------------------------------------------------------------------------------


def tile_scores(fragments: Fragments, tile: Ints, gain: Floats) -> Floats:
    """Card x node: the score of a tile."""
    return logistic(gain)


def cpu_pod_scores(fragments: Fragments, cpu: int, starved: bool) -> Floats:
    """Node: the score of a pod without GPU."""
    return logistic(fragments.gain_of_cpu(cpu))


def logistic(gain: Floats) -> Floats:
    """Whole percent of a logistic curve, so that many nodes tie."""
    return np.floor(100.0 / (1.0 + np.exp(-gain)))
