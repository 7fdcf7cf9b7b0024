"""Why nodes do not fit, for all nodes at once: the rules of `placing`, in its order, as masks over all cards.

Each rule narrows the cards that are left; the first that leaves a node with too few is that node's reason.
"""

from typing import Any

import msgspec
import numpy as np

from gputile.engine.fleet.feasibility import Question, by_numa, cards_that_fit, enough, memory_needed
from gputile.engine.fleet.free_arrays import Grid, Mask, count
from gputile.engine.placement.units import Piece
from gputile.model.refusals import NodeCode
from gputile.model.requests import PodRequest, Wish

CODES = tuple(NodeCode)
_NUMBER = {code: number for number, code in enumerate(CODES)}


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What is true of the cards, whoever is on them."""

    exists: Mask
    rules: tuple[tuple[NodeCode, Mask], ...]  # model, UUID, mode, health, cordon: where each is satisfied
    empty: Grid  # the cluster with nobody on it
    quota: tuple[tuple[NodeCode, Mask], ...] = ()  # pool, model, amount: where the namespace's quota lets the pod be


class Verdict:
    """Per node the first miss; later ones do not count."""

    def __init__(self, nodes: int) -> None:
        self.codes = np.zeros(nodes, dtype=np.int8)  # positions in CODES
        self.wanted = np.zeros(nodes, dtype=np.int64)
        self.found = np.zeros(nodes, dtype=np.int64)
        self.open = np.ones(nodes, dtype=np.bool_)

    def set_few(self, left: Mask, code: NodeCode, wanted: int) -> None:
        number = count(left)
        self.set_where(number < wanted, code, wanted, number)

    def set_where(self, mask: Mask, code: NodeCode, wanted: int, found: Any) -> None:
        new = mask & self.open
        self.codes[new], self.wanted[new] = _NUMBER[code], wanted
        self.found[new] = found if np.isscalar(found) else found[new]
        self.open &= ~new

    def set_row(self, row: int, code: NodeCode, wanted: int, found: int) -> None:
        self.codes[row], self.wanted[row], self.found[row] = _NUMBER[code], wanted, found
        self.open[row] = False


def add_misses(verdict: Verdict, request: PodRequest, question: Question, facts: Facts, borne: Mask) -> None:
    """Fill in the reason of every node that is still open and does not fit. `borne`: where the cards bear the pod."""
    for piece in question.pieces:
        _add_piece_misses(verdict, piece, question, facts)
    grid = question.grid
    verdict.set_where(~borne & _unsearched(question, len(borne)), NodeCode.SEARCH, len(question.pieces), 0)
    verdict.set_where(~borne, NodeCode.TOGETHER, len(question.pieces), 0)
    if request.cpu:
        verdict.set_where(grid.cpu < request.cpu, NodeCode.CPU, request.cpu, grid.cpu)
    if request.memory:
        verdict.set_where(grid.host < request.memory, NodeCode.HOST_MEMORY, request.memory, grid.host)


def _add_piece_misses(verdict: Verdict, piece: Piece, question: Question, facts: Facts) -> None:
    alone = cards_that_fit(piece, question.grid, question.eligible, question.rule.idle)
    if not (verdict.open & ~enough(piece, alone, question)).any():
        return  # it fits alone wherever it matters, and each rule would cost as much as this
    left = facts.exists.copy()
    verdict.set_few(left, NodeCode.TOO_FEW_CARDS, piece.cards)
    for code, mask in (*facts.rules, *_room_rules(piece, question, facts)):
        left &= mask
        verdict.set_few(left, code, piece.cards)
    _add_set_misses(verdict, piece, left, question)


def _add_set_misses(verdict: Verdict, piece: Piece, left: Mask, question: Question) -> None:
    """Where there are cards enough, and they are too far from each other."""
    far = verdict.open & ~enough(piece, left, question)
    if not far.any():
        return
    groups = [left & far]
    if question.rule.numa is Wish.REQUIRE:
        groups = list(by_numa(left & far, question))
        most = np.maximum.reduce([count(group) for group in groups])
        verdict.set_where(far & (most < piece.cards), NodeCode.NUMA, piece.cards, most)
    if question.rule.links is Wish.REQUIRE:
        linked = np.maximum.reduce([question.linked(group, piece.cards) for group in groups])
        known = far & ~_unsearched(question, len(far))
        verdict.set_where(known & (linked < piece.cards), NodeCode.LINKS, piece.cards, linked)


def _unsearched(question: Question, nodes: int) -> Mask:
    answer = np.zeros(nodes, dtype=np.bool_)
    answer[list(question.inquiry.unsearched)] = True
    return answer


def _room_rules(piece: Piece, question: Question, facts: Facts) -> list[tuple[NodeCode, Mask]]:
    grid = question.grid
    needs = piece.demands()
    wants_idle = piece.exclusive or question.rule.idle
    memory = [grid.memory >= memory_needed(asks, grid.size) for asks in needs]
    cores = [grid.cores >= max(1, sum(ask.cores for ask in asks)) for asks in needs]
    slots = [(grid.slots >= piece.slots * len(asks)) | (not piece.slots) for asks in needs]
    return [
        (NodeCode.TOO_SMALL, cards_that_fit(piece, facts.empty, facts.exists, False)),
        *facts.quota,
        (NodeCode.NOT_IDLE, (grid.tenants == 0) | (not wants_idle)),
        (NodeCode.MEMORY, np.logical_and.reduce(memory)),
        (NodeCode.CORES, np.logical_and.reduce(cores)),
        (NodeCode.SLOTS, np.logical_and.reduce(slots)),
    ]
