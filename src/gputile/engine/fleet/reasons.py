"""Why nodes do not fit, for all nodes at once: the rules of `placing`, in its order, as masks over all cards.

Each rule narrows the cards that are left; the first that leaves a node with too few is that node's reason.
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
    """What is true of the cards, whoever is on them."""

    exists: Mask
    rules: tuple[tuple[NodeReason, Mask], ...]  # model, UUID, mode, health, cordon: where each is satisfied
    empty: FreeArrays  # the cluster with nobody on it
    quota: tuple[tuple[NodeReason, Mask], ...] = ()  # pool, model, amount: where the namespace's quota lets the pod be


class FirstMisses:
    """Per node the first miss; later ones do not count."""

    def __init__(self, nodes: int) -> None:
        self.codes = np.zeros(nodes, dtype=np.int8)  # positions in CODES
        self.wanted = np.zeros(nodes, dtype=np.int64)
        self.found = np.zeros(nodes, dtype=np.int64)
        self.open = np.ones(nodes, dtype=np.bool_)

    def set_few(self, left: Mask, code: NodeReason, wanted: int) -> None:
        number = count(left)
        self.set_where(number < wanted, code, wanted, number)

    def set_where(self, mask: Mask, code: NodeReason, wanted: int, found: Any) -> None:
        new = mask & self.open
        self.codes[new], self.wanted[new] = _NUMBER[code], wanted
        self.found[new] = found if np.isscalar(found) else found[new]
        self.open &= ~new

    def set_row(self, row: int, code: NodeReason, wanted: int, found: int) -> None:
        self.codes[row], self.wanted[row], self.found[row] = _NUMBER[code], wanted, found
        self.open[row] = False


def add_misses(
    verdict: FirstMisses, request: PodRequest, question: FeasibilityQuery, facts: CardFacts, borne: Mask
) -> None:
    """Fill in the reason of every node that is still open and does not fit. `borne`: where the cards bear the pod."""
    for unit in question.units:
        _add_unit_misses(verdict, unit, question, facts)
    grid = question.grid
    verdict.set_where(~borne & _unsearched(question, len(borne)), NodeReason.SEARCH, len(question.units), 0)
    verdict.set_where(~borne, NodeReason.TOGETHER, len(question.units), 0)
    if request.cpu:
        verdict.set_where(grid.cpu < request.cpu, NodeReason.CPU, request.cpu, grid.cpu)
    if request.memory:
        verdict.set_where(grid.host < request.memory, NodeReason.HOST_MEMORY, request.memory, grid.host)


def _add_unit_misses(verdict: FirstMisses, unit: PlacementUnit, question: FeasibilityQuery, facts: CardFacts) -> None:
    alone = cards_that_fit(unit, question.grid, question.eligible, question.rule.idle)
    if not (verdict.open & ~enough(unit, alone, question)).any():
        return  # it fits alone wherever it matters, and each rule would cost as much as this
    left = facts.exists.copy()
    verdict.set_few(left, NodeReason.TOO_FEW_CARDS, unit.cards)
    for code, mask in (*facts.rules, *_room_rules(unit, question, facts)):
        left &= mask
        verdict.set_few(left, code, unit.cards)
    _add_set_misses(verdict, unit, left, question)


def _add_set_misses(verdict: FirstMisses, unit: PlacementUnit, left: Mask, question: FeasibilityQuery) -> None:
    """Where there are cards enough, and they are too far from each other."""
    far = verdict.open & ~enough(unit, left, question)
    if not far.any():
        return
    groups = [left & far]
    if question.rule.numa is Strength.REQUIRE:
        groups = list(by_numa(left & far, question))
        most = np.maximum.reduce([count(group) for group in groups])
        verdict.set_where(far & (most < unit.cards), NodeReason.NUMA, unit.cards, most)
    if question.rule.links is Strength.REQUIRE:
        linked = np.maximum.reduce([question.linked(group, unit.cards) for group in groups])
        known = far & ~_unsearched(question, len(far))
        verdict.set_where(known & (linked < unit.cards), NodeReason.LINKS, unit.cards, linked)


def _unsearched(question: FeasibilityQuery, nodes: int) -> Mask:
    answer = np.zeros(nodes, dtype=np.bool_)
    answer[list(question.inquiry.unsearched)] = True
    return answer


def _room_rules(unit: PlacementUnit, question: FeasibilityQuery, facts: CardFacts) -> list[tuple[NodeReason, Mask]]:
    grid = question.grid
    needs = unit.demands()
    wants_idle = unit.exclusive or question.rule.idle
    memory = [grid.memory >= memory_needed(asks, grid.size) for asks in needs]
    cores = [grid.cores >= max(1, sum(ask.cores for ask in asks)) for asks in needs]
    slots = [(grid.slots >= unit.slots * len(asks)) | (not unit.slots) for asks in needs]
    return [
        (NodeReason.TOO_SMALL, cards_that_fit(unit, facts.empty, facts.exists, False)),
        *facts.quota,
        (NodeReason.NOT_IDLE, (grid.tenants == 0) | (not wants_idle)),
        (NodeReason.MEMORY, np.logical_and.reduce(memory)),
        (NodeReason.CORES, np.logical_and.reduce(cores)),
        (NodeReason.SLOTS, np.logical_and.reduce(slots)),
    ]
