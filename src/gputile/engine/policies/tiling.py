"""The tiling policy: place a pod where the cluster loses the least worth.

A card is cut into tiles. The *worth* of the remainder is what future pods can use of it: 35 % of a card may be worth a
third of a card, or nothing, depending on what pods request. Likewise an idle card is worth nothing on a node without
CPU to serve it, and a card of a model that other pods require is expensive. The pod goes to the feasible node and cards
with the highest

    score = - [V(r) - V(r - d)]              the worth the card loses (r its free share, d the tile's)
            - 0.2  x [S(after) - S(before)]  S = idle cards that this node's CPU can no longer serve: it strands them
            - 0.03 x size x price[model]     how scarce the model is
            + 0.1  x gain                    idle GPU made usable, as `fragmentation` counts it
            - 0.005 x CPU left / 128 cores - 0.01 x cards left / 8       best fit, only to break ties

V, the price and the tasks behind the gain are learnt from the pods so far (`workload_model`). For a pod without GPU the
gain counts in full, CPU left counts 0.055, and stranding is left out while the cluster is short of CPU.

How a request becomes shares: a tile's share of a card is the larger of its memory over that card's memory and its
cores, card by card, so cards of different memory on one node differ. A container with several
cards gets the best cards, each scored by itself; several containers are scored one by one and their scores are added. A
node that is added or removed, and a pod that ends, change only that node's shares; the learnt tables stay.
"""

import numpy as np
from numpy.typing import NDArray

from gputile.engine.fleet.free_arrays import Ints, Longs
from gputile.engine.placement.shares import CARD
from gputile.engine.policies.fragmentation import Floats, Fragments, NodeArrays
from gputile.engine.policies.workload_model import WorkloadTables

STRANDING, SCARCITY, GAIN = 0.2, 0.03, 0.1
CPU_LEFT, CARDS_LEFT = 0.005 / 128_000, 0.01 / 8
GAIN_OF_CPU_POD, CPU_LEFT_OF_CPU_POD = 1.0, 0.055 / 128_000
SERVED = 0.85  # of the CPU per card that pods request: pods that need less compensate


def worth_lost(arrays: NodeArrays, tile: Ints, tables: WorkloadTables) -> Floats:
    """Card x node: V(r) - V(r - d)."""
    before, after = _percent(arrays.share), _percent(arrays.share - tile)
    lost: Floats = tables.value[before] - tables.value[after]
    return lost


def _percent(share: Ints) -> NDArray[np.int64]:
    """Whole percent, rounded down, so that the worth is never overestimated."""
    return np.clip(share * 100 // CARD, 0, 100).astype(np.int64)


def stranded(idle: Floats, cpu: Longs, tables: WorkloadTables) -> Floats:
    """Node: the idle cards that the node's CPU can no longer serve."""
    if not tables.rho:
        return np.zeros(len(idle))
    return np.maximum(0.0, idle - cpu / (SERVED * tables.rho))


def tile_scores(fragments: Fragments, tile: Ints, gain: Floats) -> Floats:
    """Card x node: what a tile on that card is worth, but for what is the same on all cards of the node."""
    return GAIN * gain - worth_lost(fragments.arrays, tile, fragments.tables)


def whole_card_scores(gain: Floats) -> Floats:
    """Node: what whole cards are worth there, but for what counts once per pod."""
    return GAIN * gain


def node_scores(fragments: Fragments, size: Floats, cpu: int) -> Floats:
    """Node: stranding and best fit, for a pod that takes so many cards and so much CPU."""
    arrays, tables = fragments.arrays, fragments.tables
    idle = arrays.share.sum(axis=0) / CARD
    left = arrays.cpu - cpu
    strands = stranded(idle - size, left, tables) - stranded(idle, arrays.cpu, tables)
    return np.asarray(-STRANDING * strands - CPU_LEFT * left - CARDS_LEFT * (idle - size))


def cpu_pod_scores(fragments: Fragments, cpu: int, starved: bool) -> Floats:
    """Node: the score of a pod without GPU. `starved`: the cluster is short of CPU."""
    arrays, tables = fragments.arrays, fragments.tables
    idle = arrays.share.sum(axis=0) / CARD
    left = arrays.cpu - cpu
    score = GAIN_OF_CPU_POD * fragments.gain_of_cpu(cpu) - CPU_LEFT_OF_CPU_POD * left - CARDS_LEFT * idle
    if not starved:
        score = score - STRANDING * (stranded(idle, left, tables) - stranded(idle, arrays.cpu, tables))
    return np.asarray(score)
