"""Caches of the fleet: scores, chosen cards and search results by request, kept for as long as they are valid.

`ScoreCache` has the scores of all nodes by request; only nodes that changed are scored again. Nodes of one kind in one
state are alike, and most states were seen before, so scores and chosen cards are also kept by state. `SearchCache` has
search results by the state of the cards. Decisions are made in `feasibility`, `policies` and `placement`.
"""

from collections import OrderedDict
from collections.abc import Hashable

import msgspec
import numpy as np

from gputile.engine.policies.table import Scores
from gputile.model.requests import PodRequest

REQUESTS = 64  # requests whose scores are kept; one number per node each
STATES = 5_000  # states of nodes, for one request
CHOICES = 20_000
SEARCHES = 32  # requests with search results
SEARCHED = 2_000  # states of cards, for one request

State = tuple[int, bytes]
"""Everything that an answer about a node depends on, except names."""


class NodeScores(msgspec.Struct):
    """By row: the score of the node for one request, minus infinity where it does not fit; valid at this generation."""

    scores: Scores
    generation: int = -1
    states: dict[State, float] = msgspec.field(default_factory=dict)

    def keep(self, state: State, score: float) -> None:
        if len(self.states) >= STATES:
            self.states.clear()
        self.states[state] = score


class ScoreCache:
    """The scores of all nodes by request and policy, in order of last use."""

    def __init__(self) -> None:
        self._basis: Hashable = None
        self._known: OrderedDict[Hashable, NodeScores] = OrderedDict()

    def of(self, request: PodRequest, policy: str, basis: Hashable, nodes: int) -> NodeScores:
        """`basis`: what all scores depend on besides the nodes; when it changes, all scores are invalid."""
        if basis != self._basis:
            self._basis = basis
            self._known.clear()
        key = (policy, kind_of(request))
        known = self._known.get(key)
        if known is None or len(known.scores) != nodes:
            known = self._known[key] = NodeScores(np.full(nodes, -np.inf))
            if len(self._known) > REQUESTS:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return known


class CardChoiceCache:
    """The position of the chosen card by request, policy and state of the node."""

    def __init__(self) -> None:
        self._basis: Hashable = None
        self._known: dict[Hashable, int] = {}

    def get(self, key: Hashable, basis: Hashable) -> int | None:
        if basis != self._basis:
            self._basis = basis
            self._known.clear()
        return self._known.get(key)

    def keep(self, key: Hashable, card: int) -> None:
        if len(self._known) >= CHOICES:
            self._known.clear()
        self._known[key] = card


SearchResults = dict[Hashable, bool | None]
"""By the state of a node's cards: whether the pod fits on them; None: there are too many ways to search."""


class SearchCache:
    """Search results by request, in order of last use. They depend on the cards only and never become invalid, so a
    second query about the same pod continues the search instead of repeating it."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, SearchResults] = OrderedDict()

    def of(self, request: Hashable) -> SearchResults:
        results = self._known.setdefault(request, {})
        if len(results) > SEARCHED:
            results.clear()
        self._known.move_to_end(request)
        if len(self._known) > SEARCHES:
            self._known.popitem(last=False)
        return results


def kind_of(request: PodRequest) -> Hashable:
    """Equal for requests that differ only in names and in fields without influence on the decision."""
    asks = tuple((a.role, a.cards, a.memory, a.memory_percent, a.cores, a.exclusive) for a in request.asks)
    rule = request.constraints
    facts = (rule.models, rule.not_models, rule.uuids, rule.not_uuids, rule.modes, rule.idle, rule.allowance)
    return (request.slots, request.together, request.cpu, request.memory, asks, facts)
