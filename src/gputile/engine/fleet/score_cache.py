"""What was found out about a request, kept for as long as it is true.

Room:  three memories of the fleet. By request: how every node stands, mended only where a node was touched. By request
       and state of a node: how good it is and which card was chosen there, for nodes of one kind in one state are
       alike, and most states were seen before. And what a search has found out about cards in some state.
Door:  `ScoreCache.of`, `CardChoiceCache.get` and `.keep`, `SearchCache.of`. What decides is not here, but in
       `fitting`, `judging` and `placing`.
"""

from collections import OrderedDict
from collections.abc import Hashable

import msgspec
import numpy as np

from gputile.engine.policies.table import Scores
from gputile.model.requests import PodRequest

REQUESTS = 64  # whose standings are kept; one number per node each
STATES = 5_000  # of nodes, for one request
CHOICES = 20_000
SEARCHES = 32  # requests for which something was searched
SEARCHED = 2_000  # states of cards, for one of them

State = tuple[int, bytes]
"""All that an answer about a node rests on, but names."""


class NodeScores(msgspec.Struct):
    """By row: the score of the node for one request, minus infinity where it does not fit; right at that moment."""

    scores: Scores
    moment: int = -1
    states: dict[State, float] = msgspec.field(default_factory=dict)

    def keep(self, state: State, score: float) -> None:
        if len(self.states) >= STATES:
            self.states.clear()
        self.states[state] = score


class ScoreCache:
    """By request and policy, the latest used last."""

    def __init__(self) -> None:
        self._basis: Hashable = None
        self._known: OrderedDict[Hashable, NodeScores] = OrderedDict()

    def of(self, request: PodRequest, policy: str, basis: Hashable, nodes: int) -> NodeScores:
        """`basis`: what all scores rest on beside the nodes themselves; when it changes, nothing is true any more."""
        if basis != self._basis:
            self._basis = basis
            self._known.clear()
        key = (policy, kind_of(request))
        found = self._known.get(key)
        if found is None or len(found.scores) != nodes:
            found = self._known[key] = NodeScores(np.full(nodes, -np.inf))
            if len(self._known) > REQUESTS:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return found


class CardChoiceCache:
    """The position of the card that was chosen, by request, policy and state of the node."""

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


Found = dict[Hashable, bool | None]
"""By the state of a node's cards: whether they bear the pod; None: there are too many ways to tell."""


class SearchCache:
    """What searches have found out, by request, the latest used last. True for ever: it rests on nothing else. So a pod
    that was searched for with one budget, and is asked about again, is searched further, and not again."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, Found] = OrderedDict()

    def of(self, request: Hashable) -> Found:
        found = self._known.setdefault(request, {})
        if len(found) > SEARCHED:
            found.clear()
        self._known.move_to_end(request)
        if len(self._known) > SEARCHES:
            self._known.popitem(last=False)
        return found


def kind_of(request: PodRequest) -> Hashable:
    """Requests that differ only in names, and in what decides nothing, are of one kind."""
    asks = tuple((a.role, a.cards, a.memory, a.memory_percent, a.cores, a.exclusive) for a in request.asks)
    rule = request.constraints
    facts = (rule.models, rule.not_models, rule.uuids, rule.not_uuids, rule.modes, rule.idle, rule.allowance)
    return (request.slots, request.together, request.cpu, request.memory, asks, facts)
