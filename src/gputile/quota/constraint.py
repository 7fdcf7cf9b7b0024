"""Quota as a constraint of a request: which kinds of cards a pod may have.

`QuotaConstraint.request` adds the allowance to a request, and returns the same object where no quota applies.
`QuotaConstraint.objections` names the limits in the way.

What a pod costs depends on the card: half of a small card is a quarter of a large one. So the pod is placed on an
imagined empty node with cards of one kind. On a node with several kinds the quota must allow each kind that it gets.
"""

import msgspec

from gputile.engine.fleet.fleet import Fleet
from gputile.engine.placement.place import Placement, place
from gputile.model.cards import Card, Node, NodeView
from gputile.model.requests import CardKind, Constraints, PodRequest, QuotaAllowance
from gputile.quota.arithmetic import Overrun, Spent, cost_of, overrun
from gputile.quota.limits import Amount, Quota

REQUESTS = 1000  # requests whose costs are cached
CLOSEST = "binpack"  # containers of a pod share cards where they can: the least that it costs
MANY_SLOTS = 2**15
MOST_CARDS = 512  # of one pod; no node has more
NOTHING = Amount()
MOST_NAMED = 3  # limits in the way that are named


class QuotaConstraint:
    """Computes what a pod costs on each kind of card, and which kinds a quota allows it."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._costs: dict[PodRequest, dict[CardKind, Spent]] = {}

    def request(self, asked: PodRequest, quota: Quota, held: Spent) -> PodRequest:
        """The request under the allowance of its namespace, which holds so much."""
        kinds = self._kinds(asked)
        left = {kind: overrun(quota, held, self._cost(asked, kind)) for kind in kinds}
        affordable = frozenset(kind for kind, over in left.items() if over is None)
        if len(affordable) == len(kinds) and not quota.pools:
            return asked  # the same object, so that caches treat it like requests without quota
        listed = frozenset(kind for kind, over in left.items() if over is None or over.what)
        possible = frozenset(kind for kind in listed if overrun(quota, {}, self._cost(asked, kind)) is None)
        return asked.allowed(QuotaAllowance(frozenset(quota.pools), listed, possible, affordable))

    def objections(self, asked: PodRequest, quota: Quota, held: Spent) -> list[Overrun]:
        """The limits in the way, each once; none if the quota allows some kind of card that fits the pod."""
        costs = [self._cost(asked, kind) for kind in self._kinds(asked)]
        overruns = [
            overrun(quota, held, spent) for spent in costs if any(amount != NOTHING for amount in spent.values())
        ]
        if None in overruns:
            return []
        by_limit = {(over.model, over.what): over for over in overruns if over is not None}
        exceeded = [over for over in by_limit.values() if over.what]
        return (exceeded or list(by_limit.values()))[:MOST_NAMED]

    def _kinds(self, asked: PodRequest) -> list[CardKind]:
        """The kinds of cards whose model the pod accepts."""
        return [kind for kind in self._fleet.card_kinds() if asked.constraints.accepts_model(kind[0])]

    def _cost(self, asked: PodRequest, kind: CardKind) -> Spent:
        known = self._costs.get(asked)
        if known is None:
            if len(self._costs) >= REQUESTS:
                self._costs.clear()
            known = self._costs[asked] = {}
        if kind not in known:
            known[kind] = _cost(asked, kind)
        return known[kind]


def _cost(asked: PodRequest, kind: CardKind) -> Spent:
    """What the pod would cost on such cards; nothing where it is too large for them, which other rules reject."""
    model, memory = kind
    number = sum(ask.cards for ask in asked.asks)
    if number > MOST_CARDS:
        return {model: NOTHING}
    cards = [Card(index=n, uuid=str(n), model=model, memory=memory, slots=MANY_SLOTS) for n in range(number)]
    node = Node(name="imagined", cards=tuple(cards), cpu=asked.cpu, memory=asked.memory)
    placement = place(msgspec.structs.replace(asked, constraints=Constraints()), NodeView.empty(node), CLOSEST)
    return cost_of(placement.grant("", asked), node) if isinstance(placement, Placement) else {model: NOTHING}
