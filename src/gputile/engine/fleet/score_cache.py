"""The cache of scores: what the policies that learn know about each request.

One rule says what is valid. Scores depend on the node and on the learnt tables: a node that changed since the
`generation` of the scores is scored again, and new tables empty the cache. Prices of models and the size of the average
card are no part of cached scores; `scoring` adds them when it reads. A chosen card does depend on prices, so new prices
drop the choices. The cache decides nothing.
"""

from collections import OrderedDict
from collections.abc import Hashable

import msgspec
import numpy as np
from numpy.typing import NDArray

from gputile.model.requests import Constraints, PodRequest

REQUESTS = 256  # one number per card and node each
STATES = 1_000  # states of nodes, for one request

State = tuple[int, bytes]
"""Everything that an answer about a node depends on, except names."""


class CachedScores(msgspec.Struct):
    """The scores of one request on all nodes at this generation of the fleet. Nodes of one kind in one state are alike,
    and most states recur, so scores and chosen cards are also kept by state."""

    nodes: NDArray[np.float64]  # minus infinity where the pod does not fit, if that can be counted (`is_simple`)
    cards: NDArray[np.float32]  # card x node, for a pod with a single unit
    generation: int = -1
    states: dict[State, tuple[float, NDArray[np.float32]]] = msgspec.field(default_factory=dict)
    choices: dict[State, int] = msgspec.field(default_factory=dict)  # the position of the chosen card


class ScoreCache:
    """The scores by request, in order of last use."""

    def __init__(self, alike: "ScoreCache | None" = None) -> None:
        """`alike`: a cache at the same tables and prices; what it knows by state of a node holds here too."""
        self._known: OrderedDict[Hashable, CachedScores] = OrderedDict()
        self._alike = alike._known if alike is not None else {}

    def of(self, key: Hashable, shape: tuple[int, int]) -> CachedScores:
        """`shape`: how many cards and nodes the fleet has."""
        known = self._known.get(key)
        if known is None or known.cards.shape != shape:
            known = self._known[key] = CachedScores(np.zeros(shape[1]), np.zeros(shape, dtype=np.float32))
            if key in self._alike:
                known.states, known.choices = self._alike[key].states, self._alike[key].choices
            if len(self._known) > REQUESTS:
                self._known.popitem(last=False)
        for by_state in (known.states, known.choices):
            if len(by_state) > STATES:
                by_state.clear()
        self._known.move_to_end(key)
        return known

    def clear(self) -> None:
        """The learnt tables are new."""
        self._known.clear()

    def drop_choices(self) -> None:
        """The prices are new."""
        for known in self._known.values():
            known.choices.clear()


def kind_of(request: PodRequest) -> Hashable:
    """Equal for requests that differ only in names and in fields without influence on the decision."""
    asks = tuple((a.role, a.cards, a.memory, a.memory_percent, a.cores, a.exclusive) for a in request.asks)
    rule = request.constraints
    facts = (rule.models, rule.not_models, rule.uuids, rule.not_uuids, rule.modes, rule.idle, rule.allowance)
    return (request.slots, request.together, request.cpu, request.memory, asks, facts)


def ignores_names(rule: Constraints) -> bool:
    """Whether nodes in one state are equal for these constraints."""
    return not (rule.uuids or rule.not_uuids)
