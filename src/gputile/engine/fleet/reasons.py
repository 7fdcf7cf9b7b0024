"""Why nodes do not fit, for all nodes at once: the rules of `placement.place`, in its order, as masks over all cards.

Each rule narrows the cards that are left. The first rule that leaves a node with too few cards is the reason of that
node.
"""

from typing import Any

import msgspec
import numpy as np

from gputile.engine.fleet.feasibility import FeasibilityQuery, by_numa, cards_that_fit, enough, memory_needed
from gputile.engine.fleet.free_arrays import FreeArrays, Mask, count
from gputile.engine.placement.units import PlacementUnit
from gputile.model.refusals import NodeReason
from gputile.model.requests import PodRequest, Strength

CODES = tuple(NodeReason)
_NUMBER = {code: number for number, code in enumerate(CODES)}


class CardFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of the cards that do not depend on the pods on them."""

    exists: Mask
    rules: tuple[tuple[NodeReason, Mask], ...]  # model, UUID, mode, health, cordon: which cards satisfy it
    empty: FreeArrays  # the cluster with no pods on it
    quota: tuple[
        tuple[NodeReason, Mask], ...
    ] = ()  # pool, model, amount: which cards the quota of the namespace allows


class FirstMisses:
    """By node the first rule that it misses; later misses are ignored."""

    def __init__(self, nodes: int) -> None:
        self.codes = np.zeros(nodes, dtype=np.int8)  # positions in CODES
        self.requested = np.zeros(nodes, dtype=np.int64)
        self.found = np.zeros(nodes, dtype=np.int64)
        self.open = np.ones(nodes, dtype=np.bool_)

    def set_if_few(self, left: Mask, code: NodeReason, requested: int) -> None:
        number = count(left)
        self.set_where(number < requested, code, requested, number)

    def set_where(self, mask: Mask, code: NodeReason, requested: int, found: Any) -> None:
        new = mask & self.open
        self.codes[new], self.requested[new] = _NUMBER[code], requested
        self.found[new] = found if np.isscalar(found) else found[new]
        self.open &= ~new

    def set_row(self, row: int, code: NodeReason, requested: int, found: int) -> None:
        self.codes[row], self.requested[row], self.found[row] = _NUMBER[code], requested, found
        self.open[row] = False

    def replace(self, rows: Any, other: "FirstMisses") -> None:
        """Take over the misses of these rows from a query about them alone."""
        self.codes[rows], self.requested[rows], self.found[rows] = other.codes, other.requested, other.found


def add_misses(
    misses: FirstMisses, request: PodRequest, query: FeasibilityQuery, facts: CardFacts, cards_fit: Mask
) -> None:
    """Set the reason of every open node that does not fit. `cards_fit`: the nodes on whose cards the pod fits."""
    for unit in query.units:
        _add_unit_misses(misses, unit, query, facts)
    grid = query.grid
    misses.set_where(~cards_fit & _unsearched(query, len(cards_fit)), NodeReason.SEARCH, len(query.units), 0)
    misses.set_where(~cards_fit, NodeReason.TOGETHER, len(query.units), 0)
    if request.cpu:
        misses.set_where(grid.cpu < request.cpu, NodeReason.CPU, request.cpu, grid.cpu)
    if request.memory:
        misses.set_where(grid.host < request.memory, NodeReason.HOST_MEMORY, request.memory, grid.host)


def _add_unit_misses(misses: FirstMisses, unit: PlacementUnit, query: FeasibilityQuery, facts: CardFacts) -> None:
    alone = cards_that_fit(unit, query.grid, query.eligible, query.rule.idle)
    if not (misses.open & ~enough(unit, alone, query)).any():
        return  # it fits alone on all open nodes, and each rule would cost as much as this check
    left = facts.exists.copy()
    misses.set_if_few(left, NodeReason.TOO_FEW_CARDS, unit.cards)
    for code, mask in (*facts.rules, *_capacity_rules(unit, query, facts)):
        left &= mask
        misses.set_if_few(left, code, unit.cards)
    _add_set_misses(misses, unit, left, query)


def _add_set_misses(misses: FirstMisses, unit: PlacementUnit, left: Mask, query: FeasibilityQuery) -> None:
    """Nodes with enough cards that are too far from each other."""
    far = misses.open & ~enough(unit, left, query)
    if not far.any():
        return
    groups = [left & far]
    if query.rule.numa is Strength.REQUIRE:
        groups = list(by_numa(left & far, query))
        most = np.maximum.reduce([count(group) for group in groups])
        misses.set_where(far & (most < unit.cards), NodeReason.NUMA, unit.cards, most)
    if query.rule.links is Strength.REQUIRE:
        linked = np.maximum.reduce([query.linked(group, unit.cards) for group in groups])
        known = far & ~_unsearched(query, len(far))
        misses.set_where(known & (linked < unit.cards), NodeReason.LINKS, unit.cards, linked)


def _unsearched(query: FeasibilityQuery, nodes: int) -> Mask:
    answer = np.zeros(nodes, dtype=np.bool_)
    answer[list(query.context.unsearched)] = True
    return answer


def _capacity_rules(unit: PlacementUnit, query: FeasibilityQuery, facts: CardFacts) -> list[tuple[NodeReason, Mask]]:
    grid = query.grid
    needs = unit.demands()
    requires_idle = unit.exclusive or query.rule.idle
    memory = [grid.memory >= memory_needed(asks, grid.size) for asks in needs]
    cores = [grid.cores >= max(1, sum(ask.cores for ask in asks)) for asks in needs]
    slots = [(grid.slots >= unit.slots * len(asks)) | (not unit.slots) for asks in needs]
    return [
        (NodeReason.TOO_SMALL, cards_that_fit(unit, facts.empty, facts.exists, False)),
        *facts.quota,
        (NodeReason.NOT_IDLE, (grid.tenants == 0) | (not requires_idle)),
        (NodeReason.MEMORY, np.logical_and.reduce(memory)),
        (NodeReason.CORES, np.logical_and.reduce(cores)),
        (NodeReason.SLOTS, np.logical_and.reduce(slots)),
    ]
