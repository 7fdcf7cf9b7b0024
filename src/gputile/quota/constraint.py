"""What a quota leaves to a pod, as a constraint that all other questions understand.

Room:  what a pod costs on each make of card, remembered; and which makes its namespace can pay for now.
Door:  `QuotaConstraint.request`: the pod's request under its allowance, or the very same where no quota stands in its
       way; `QuotaConstraint.objections`: which limits do, in words.

What a pod costs depends on the card: half of a small card is a quarter of a large one. So it is placed, in thought, on
an empty node with cards of one make only. On a node of several makes it must be able to pay for each that it is put on.
"""

import msgspec

from gputile.engine.fleet.fleet import Fleet
from gputile.engine.placement.place import Placement, place
from gputile.model.cards import Card, Node, NodeView
from gputile.model.quotas import Amount, Quota
from gputile.model.requests import CardKind, Constraints, PodRequest, QuotaAllowance
from gputile.quota.arithmetic import Overrun, Spent, cost_of, overrun

REQUESTS = 1000  # whose costs are remembered
CLOSEST = "binpack"  # containers of a pod share cards where they can: what it costs at least
MANY_SLOTS = 2**15
MOST_CARDS = 512  # of a pod; no node has as many
NOTHING = Amount()
SAID = 3  # limits that are named, of those in the way


class QuotaConstraint:
    """See the module's text."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._costs: dict[PodRequest, dict[CardKind, Spent]] = {}

    def request(self, asked: PodRequest, quota: Quota, held: Spent) -> PodRequest:
        """`asked`, and nothing that its namespace, which holds so much, may not have."""
        makes = self._makes(asked)
        left = {make: overrun(quota, held, self._cost(asked, make)) for make in makes}
        affordable = frozenset(make for make, over in left.items() if over is None)
        if len(affordable) == len(makes) and not quota.pools:
            return asked  # as if there were no quota, so that it is remembered together with all that ask the same
        listed = frozenset(make for make, over in left.items() if over is None or over.what)
        possible = frozenset(make for make in listed if overrun(quota, {}, self._cost(asked, make)) is None)
        return asked.allowed(QuotaAllowance(frozenset(quota.pools), listed, possible, affordable))

    def objections(self, asked: PodRequest, quota: Quota, held: Spent) -> list[Overrun]:
        """The limits in the way, each once; none if some make that the pod fits on may be had."""
        costs = [self._cost(asked, make) for make in self._makes(asked)]
        found = [overrun(quota, held, spent) for spent in costs if any(amount != NOTHING for amount in spent.values())]
        if None in found:
            return []
        by_limit = {(over.model, over.what): over for over in found if over is not None}
        passed = [over for over in by_limit.values() if over.what]
        return (passed or list(by_limit.values()))[:SAID]

    def _makes(self, asked: PodRequest) -> list[CardKind]:
        """Those that the pod itself would take."""
        return [make for make in self._fleet.makes() if asked.constraints.accepts_model(make[0])]

    def _cost(self, asked: PodRequest, make: CardKind) -> Spent:
        known = self._costs.get(asked)
        if known is None:
            if len(self._costs) >= REQUESTS:
                self._costs.clear()
            known = self._costs[asked] = {}
        if make not in known:
            known[make] = _cost(asked, make)
        return known[make]


def _cost(asked: PodRequest, make: CardKind) -> Spent:
    """What the pod would cost on such cards; nothing where it is too large for them, for which others refuse it."""
    model, memory = make
    number = sum(ask.cards for ask in asked.asks)
    if number > MOST_CARDS:
        return {model: NOTHING}
    cards = [Card(index=n, uuid=str(n), model=model, memory=memory, slots=MANY_SLOTS) for n in range(number)]
    node = Node(name="imagined", cards=tuple(cards), cpu=asked.cpu, memory=asked.memory)
    where = place(msgspec.structs.replace(asked, constraints=Constraints()), NodeView.empty(node), CLOSEST)
    return cost_of(where.grant("", asked.dialect), node) if isinstance(where, Placement) else {model: NOTHING}
