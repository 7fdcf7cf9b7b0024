"""What fits on one node: the definition that all other code must agree with.

`place` is scalar and pure. It finds an assignment of containers to cards whenever one exists: it tries the policy's
first choice and backtracks when that fails. Otherwise it returns the rule that left too few cards. A *unit*
(`units.py`) is a part of the request that is placed as a whole.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

import msgspec

from gputile.engine.placement.topology import all_linked, closest, cost_of_closest, largest_linked
from gputile.engine.placement.units import Demand, PlacementUnit, phase_count, split
from gputile.engine.policies.table import POLICIES, Rank, first_named
from gputile.engine.search_budget import SearchBudget
from gputile.model.cards import Card, FreeCapacity, Node, NodeView
from gputile.model.grants import ContainerGrant, Grant, Tile, take
from gputile.model.refusals import NodeReason, Refusal
from gputile.model.requests import CardKind, Constraints, PodRequest, QuotaAllowance, Strength

SEARCH_STEPS = 5000
"""How many sets of cards of one node are tried before giving up. Real pods need a handful."""

LEAST_STEPS = 10
"""The fixed cost of a search, in steps."""


Prefer = Callable[[PlacementUnit], list[float]]
"""The scores of a unit by card of the node; larger is better."""


class Placement(msgspec.Struct, frozen=True):
    """Where each container's tiles are on one node."""

    node: str
    containers: tuple[ContainerGrant, ...]

    def grant(self, pod: str, request: PodRequest) -> Grant:
        return Grant(pod=pod, node=self.node, dialect=request.dialect, containers=self.containers, slots=request.slots)


def place(
    request: PodRequest,
    view: NodeView,
    policy: str | None = None,
    seed: int = 0,
    prefer: Prefer | None = None,
    budget: SearchBudget | None = None,
) -> Placement | Refusal:
    """Assign cards of the node to every container of `request`, or return why the node does not fit.

    `prefer` has the scores by card where a policy has learnt them (`Fleet.place`); otherwise the policy ranks the
    cards.
    """
    budget = budget or SearchBudget(3 * SEARCH_STEPS)  # it also pays for the check whether eviction could help
    units = split(request)
    fault = _node_fault(view, units)
    if fault is not None:
        return fault
    state = _SearchState(request, view, policy, seed, phase_count(units), prefer, budget.part(SEARCH_STEPS))
    cards = _assign(request, units, view, state)
    miss = _card_miss(units, request, view, state) if cards is None else _host_miss(request, view)
    if cards is not None and miss is None:
        return Placement(view.node.name, _grants(request, view.node, cards))
    assert miss is not None, "cards were rejected without a reason"
    empty = NodeView.empty(view.node)
    alone = request.with_unused_quota
    changes = view != empty or alone is not request
    return Refusal(view.node.name, *miss, resolvable=changes and fits(alone, empty, budget))


def placed(request: PodRequest, node: Node, card: int) -> Placement:
    """All of the pod on one card, which is known to fit."""
    cards = {ask.container: (card,) for ask in request.asks}
    return Placement(node.name, _grants(request, node, cards))


def fits(request: PodRequest, view: NodeView, budget: SearchBudget | None = None) -> bool:
    """Whether the pod fits on the node; False also when the budget ran out."""
    return _host_miss(request, view) is None and bool(searched(request, view, budget))


def searched(request: PodRequest, view: NodeView, budget: SearchBudget | None = None) -> bool | None:
    """Whether the pod fits on the cards of the node, CPU and host memory aside; None: the search was cut short."""
    units = split(request)
    budget = (budget or SearchBudget(SEARCH_STEPS)).part(SEARCH_STEPS)
    if not budget.spend(LEAST_STEPS + len(units)):
        return None
    if _node_fault(view, units) is not None:
        return False
    state = _SearchState(request, view, None, 0, phase_count(units), None, budget)
    cards = _assign(request, units, view, state)
    return None if state.gave_up else cards is not None


# ---- which cards may serve ------------------------------------------------------------------------------------------


class Candidate(msgspec.Struct, frozen=True):
    """One unit on one card, without the other units of the pod."""

    need: Demand  # the most that the unit needs of the card at any time
    idle: bool  # it requires a card without pods
    constraints: Constraints
    card: Card
    free: FreeCapacity
    pool: str  # of the node


def candidates(unit: PlacementUnit, constraints: Constraints, view: NodeView) -> list[Candidate]:
    """The unit on each card of the node."""
    needs = {size: unit.peak(size) for size in {card.memory for card in view.node.cards}}
    idle = unit.exclusive or constraints.idle
    return [
        Candidate(needs[card.memory], idle, constraints, card, free, view.node.pool)
        for card, free in zip(view.node.cards, view.free_by_card, strict=True)
    ]


class Rule(msgspec.Struct, frozen=True):
    """A rule that a card must pass, and the reason when too few cards pass it and the rules before it."""

    code: NodeReason
    passes: Callable[[Candidate], bool]


FACTS = (
    Rule(NodeReason.MODEL, lambda c: c.constraints.accepts_model(c.card.model)),
    Rule(NodeReason.UUID, lambda c: c.constraints.accepts_uuid(c.card.uuid)),
    Rule(NodeReason.MODE, lambda c: c.constraints.accepts_mode(c.card.mode) and not c.card.in_mig_mode),
    Rule(NodeReason.UNHEALTHY, lambda c: c.card.healthy),
    Rule(NodeReason.CORDONED, lambda c: not c.card.cordoned),
    Rule(NodeReason.TOO_SMALL, lambda c: c.need.fits(FreeCapacity.of(c.card))),
)
"""Rules about the card itself; eviction does not change them."""

CAPACITY = (
    Rule(NodeReason.NOT_IDLE, lambda c: not (c.idle and c.free.tenants)),
    Rule(NodeReason.MEMORY, lambda c: c.need.fits_memory(c.free)),
    Rule(NodeReason.CORES, lambda c: c.need.fits_cores(c.free)),
    Rule(NodeReason.SLOTS, lambda c: c.need.fits_slots(c.free)),
)
"""Rules about what is free on the card now."""


def _allows_kind(candidate: Candidate, of: Callable[[QuotaAllowance], frozenset[CardKind]]) -> bool:
    allowance = candidate.constraints.allowance
    return allowance is None or (candidate.card.model, candidate.card.memory) in of(allowance)


QUOTA = (
    Rule(
        NodeReason.QUOTA_POOL, lambda c: c.constraints.allowance is None or c.constraints.allowance.admits_pool(c.pool)
    ),
    Rule(NodeReason.QUOTA_MODEL, lambda c: _allows_kind(c, lambda allowance: allowance.listed)),
    Rule(NodeReason.QUOTA, lambda c: _allows_kind(c, lambda allowance: allowance.affordable)),
)
"""Rules about the quota of the pod's namespace. They come before free capacity: without quota it does not help."""

ABOUT_DEMAND = frozenset({NodeReason.TOO_SMALL, *(rule.code for rule in CAPACITY)})
"""Rules that depend on what a unit needs of a card."""

RULES = (*FACTS, *CAPACITY)
RULES_UNDER_QUOTA = (*FACTS, *QUOTA, *CAPACITY)


def rules_of(constraints: Constraints) -> tuple[Rule, ...]:
    return RULES if constraints.allowance is None else RULES_UNDER_QUOTA


def _open_cards(constraints: Constraints, view: NodeView) -> list[bool]:
    """Which cards pass the rules that are the same for every unit of the pod."""
    common = [rule for rule in rules_of(constraints) if rule.code not in ABOUT_DEMAND]
    nothing = Demand(0, 0, 0, 0)
    return [
        all(rule.passes(Candidate(nothing, False, constraints, card, free, view.node.pool)) for rule in common)
        for card, free in zip(view.node.cards, view.free_by_card, strict=True)
    ]


def _more_than_all(units: Sequence[PlacementUnit], view: NodeView) -> bool:
    """Whether the pod requests more than all cards have free in sum, so that no search can succeed."""
    asks = [(ask, unit) for unit in units for ask in unit.asks_in(0)]
    free_by_card = view.free_by_card
    return (
        sum(unit.cards * (ask.memory or 0) for ask, unit in asks) > sum(max(free.memory, 0) for free in free_by_card)
        or sum(unit.cards * ask.cores for ask, unit in asks) > sum(max(free.cores, 0) for free in free_by_card)
        or sum(unit.cards * unit.slots for _, unit in asks) > sum(max(free.slots, 0) for free in free_by_card)
    )


# ---- the search -----------------------------------------------------------------------------------------------------


def _hardest_first(units: Sequence[PlacementUnit]) -> list[PlacementUnit]:
    return sorted(units, key=PlacementUnit.hardness, reverse=True)


class _UnitDemand:
    """A unit to be placed: what it needs of each card; None where it does not fit even alone."""

    def __init__(self, unit: PlacementUnit, view: NodeView, constraints: Constraints, open_cards: list[bool]) -> None:
        self.scores: list[float] | None = None  # by card, where a policy has learnt them
        self.unit, self.phases, self.is_init = unit, unit.phases(), unit.is_init
        self.exclusive, wants_idle = unit.exclusive, unit.exclusive or constraints.idle
        sizes = {card.memory for card in view.node.cards}
        needs, peaks = {size: unit.needs(size) for size in sizes}, {size: unit.peak(size) for size in sizes}
        self.needs = [
            needs[card.memory]
            if is_open and not (wants_idle and free.tenants) and peaks[card.memory].fits(free)
            else None
            for card, free, is_open in zip(view.node.cards, view.free_by_card, open_cards, strict=True)
        ]


def _assign(
    request: PodRequest, units: tuple[PlacementUnit, ...], view: NodeView, state: "_SearchState"
) -> dict[str, Sequence[int]] | None:
    if _more_than_all(units, view):
        return None
    constraints = request.constraints
    open_cards = _open_cards(constraints, view)
    return _search([_UnitDemand(unit, view, constraints, open_cards) for unit in _hardest_first(units)], state)


NOTHING = FreeCapacity(-1, -1, -1)  # what an exclusive container leaves to the other containers of its pod


class _SearchState:
    """The cards of one node during a search: what is left of each card in each phase of the pod."""

    def __init__(
        self,
        request: PodRequest,
        view: NodeView,
        policy: str | None,
        seed: int,
        phases: int,
        prefer: Prefer | None,
        budget: SearchBudget,
    ) -> None:
        self.request, self.view, self.seed = request, view, seed
        self.policy = POLICIES[first_named(request.constraints.card_policy, view.node.card_policy, policy)]
        self.prefer = prefer
        self.left = [[free] * phases for free in view.free_by_card]
        self.held = [0] * len(view.free_by_card)  # units of this pod on the card
        self.gave_up, self._budget = False, budget

    def choices(self, demand: _UnitDemand) -> Iterator[Sequence[int]]:
        """Sets of cards for the unit, the policy's first choice first; equivalent sets come once."""
        rank = {card: self._rank(demand, card) for card, _ in enumerate(self.left) if self._admits(demand, card)}
        fitting = sorted(rank, key=lambda card: (rank[card], card))
        for group in self._groups(fitting, demand.unit.cards):
            if not self._spend(self._cost_of_first_choice(group, demand.unit.cards)):
                return
            seen = set()
            for chosen in chain(
                [self._first_choice(group, rank, demand.unit.cards)], self._sets(group, demand.unit.cards)
            ):
                if not self._spend():  # also for sets that are skipped: there may be very many
                    return
                if frozenset(chosen) not in seen and self._allowed(chosen):
                    seen.add(frozenset(chosen))
                    yield chosen

    def _spend(self, steps: int = 1) -> bool:
        self.gave_up = self.gave_up or bool(steps and not self._budget.spend(steps))
        return not self.gave_up

    def _cost_of_first_choice(self, group: list[int], count: int) -> int:
        """In steps: finding the best-linked of many sets may cost more than the rest of the search."""
        return 0 if count == 1 or not self.view.node.links else cost_of_closest(len(group), count)

    def _sets(self, group: list[int], count: int) -> Iterator[Sequence[int]]:
        """All sets of so many cards; for equal cards only their number in the set counts."""
        alike: dict[object, list[int]] = {}
        for card in group:
            alike.setdefault(self._likeness(card), []).append(card)
        yield from _pick(list(alike.values()), count)

    def put(self, demand: _UnitDemand, chosen: Sequence[int]) -> list[list[FreeCapacity]]:
        """Subtract the needs of the unit from the cards; returns the state before, for `take_back`."""
        before = [self.left[card] for card in chosen]
        for card in chosen:
            self.held[card] += 1
            left = list(self.left[card])
            for need in demand.needs[card] or ():
                left[need.phase] = NOTHING if demand.exclusive else left[need.phase] - need
            self.left[card] = left
        return before

    def take_back(self, chosen: Sequence[int], before: list[list[FreeCapacity]]) -> None:
        for card, left in zip(chosen, before, strict=True):
            self.held[card] -= 1
            self.left[card] = left

    def _card(self, card: int) -> Card:
        return self.view.node.cards[card]

    def _admits(self, demand: _UnitDemand, card: int) -> bool:
        needs, left, free = demand.needs[card], self.left[card], self.view.free_by_card[card]
        if needs is None:
            return False
        if demand.exclusive:
            return all(left[phase] is free for phase in demand.phases)
        return all(need.fits_beside(left[need.phase]) for need in needs)

    def _rank(self, demand: _UnitDemand, card: int) -> Rank:
        """Init containers prefer the cards of their pod: the kubelet gives them the same devices."""
        is_new = int(demand.is_init and not self.held[card])
        if self.prefer is not None:
            if demand.scores is None:
                demand.scores = self.prefer(demand.unit)
            return (is_new, -demand.scores[card])
        left = self.left[card][demand.phases[0]]
        return (is_new, *self.policy.rank_card(self._card(card), left, self._links(card), self.seed))

    def _links(self, card: int) -> int:
        """How closely the card is linked with the idle cards."""
        node = self.view.node
        if not node.links:
            return 0
        return sum(node.link(card, peer) for peer, free in enumerate(self.view.free_by_card) if not free.tenants)

    def _groups(self, fitting: list[int], count: int) -> list[list[int]]:
        """The cards to choose among: all cards, or the cards of one NUMA node after the other."""
        strength = self.request.constraints.numa
        groups = [] if strength is Strength.REQUIRE else [fitting]
        if strength is not Strength.NO:
            by_numa: dict[int, list[int]] = {}
            for card in fitting:
                by_numa.setdefault(self._card(card).numa, []).append(card)
            groups = [*by_numa.values(), *groups]
        return [group for group in groups if len(group) >= count]

    def _first_choice(self, group: list[int], rank: dict[int, Rank], count: int) -> list[int]:
        """The first cards by rank. Among equal cards, and among all if links come first, the best-linked set."""
        if count == 1 or not self.view.node.links:
            return group[:count]
        if self.policy.by_links or self.request.constraints.links is not Strength.NO:
            return closest([], group, count, self.view.node.link)
        last = rank[group[count - 1]]
        better = [card for card in group if rank[card] < last]
        equal = [card for card in group if rank[card] == last]
        return closest(better, equal, count - len(better), self.view.node.link)

    def _allowed(self, chosen: Sequence[int]) -> bool:
        return self.request.constraints.links is not Strength.REQUIRE or all_linked(chosen, self.view.node.link)

    def _likeness(self, card: int) -> tuple[object, ...]:
        """Equal for cards that are equally good for every further unit."""
        free_by_card = tuple((free.memory, free.cores, free.slots, free.tenants) for free in self.left[card])
        constraints = self.request.constraints
        its_own = card if (constraints.numa, constraints.links) != (Strength.NO, Strength.NO) else -1
        return (free_by_card, self._card(card).memory, self._card(card).cores, self._card(card).slots, its_own)


def _pick(kinds: list[list[int]], count: int) -> Iterator[list[int]]:
    """Every way to take so many cards from lists of equal cards; the first lists are used up first."""
    sizes = [len(kind) for kind in kinds]
    counts = _filled([0] * len(sizes), sizes, 0, count)
    while sum(counts) == count:
        yield [card for kind, number in zip(kinds, counts, strict=True) for card in kind[:number]]
        last = _last_reducible(counts, sizes)
        if last is None:
            return
        rest = sum(counts[last + 1 :]) + 1
        counts[last] -= 1
        counts = _filled(counts, sizes, last + 1, rest)


def _filled(counts: list[int], sizes: list[int], start: int, count: int) -> list[int]:
    """The counts up to `start`, and then so many cards from the earliest lists."""
    counts = counts[:start]
    for size in sizes[start:]:
        counts.append(min(size, count))
        count -= counts[-1]
    return counts


def _last_reducible(counts: list[int], sizes: list[int]) -> int | None:
    """The last list that can give up a card because a later list has one to spare."""
    spare = 0
    for place in range(len(counts) - 1, -1, -1):
        if counts[place] and spare:
            return place
        spare += sizes[place] - counts[place]
    return None


def _search(demands: list[_UnitDemand], state: _SearchState) -> dict[str, Sequence[int]] | None:
    """Cards by container for all units, or None. Depth first, hardest unit first.

    It backtracks with a list instead of recursion: the author of the pod chooses how many units there are.
    """
    done: list[tuple[Sequence[int], list[list[FreeCapacity]]]] = []  # by unit: the cards, and their state before
    choices = [state.choices(demand) for demand in demands[:1]]
    while len(done) < len(demands):
        chosen = next(choices[-1], None)
        if chosen is not None:
            done.append((chosen, state.put(demands[len(done)], chosen)))
            choices += [state.choices(demand) for demand in demands[len(done) : len(done) + 1]]
        elif done:
            choices.pop()
            state.take_back(*done.pop())
        else:
            return None
    pairs = zip(demands, done, strict=True)
    return {ask.container: chosen for demand, (chosen, _) in pairs for ask in demand.unit.asks}


def _grants(request: PodRequest, node: Node, cards: Mapping[str, Sequence[int]]) -> tuple[ContainerGrant, ...]:
    grants = []
    for ask in request.asks:
        if ask.cards:
            tiles: list[Tile] = [take(ask, node.cards[card]) for card in sorted(cards[ask.container])]
            grants.append(ContainerGrant(ask.container, tuple(tiles), ask.role))
    return tuple(grants)


# ---- why not --------------------------------------------------------------------------------------------------------


def _node_fault(view: NodeView, units: tuple[PlacementUnit, ...]) -> Refusal | None:
    node = view.node
    if node.fault:
        return Refusal(node.name, NodeReason(node.fault), 1, 0, False)
    if not node.cards and units:
        return Refusal(node.name, NodeReason.NO_CARDS, 1, 0, False)
    return None


def _host_miss(request: PodRequest, view: NodeView) -> tuple[NodeReason, int, int] | None:
    if request.cpu and request.cpu > view.cpu:
        return NodeReason.CPU, request.cpu, view.cpu
    if request.memory and request.memory > view.memory:
        return NodeReason.HOST_MEMORY, request.memory, view.memory
    return None


def _card_miss(
    units: tuple[PlacementUnit, ...], request: PodRequest, view: NodeView, state: _SearchState
) -> tuple[NodeReason, int, int]:
    """The first rule that leaves too few cards; if every unit fits alone: that they do not fit together."""
    for unit in units:
        miss = unit_miss(unit, request.constraints, view)
        if miss is not None:
            return miss[0], unit.cards, miss[1]
    return (NodeReason.SEARCH if state.gave_up else NodeReason.TOGETHER), len(units), 0


def unit_miss(unit: PlacementUnit, constraints: Constraints, view: NodeView) -> tuple[NodeReason, int] | None:
    """The first rule at which this unit alone finds too few cards, and how many it finds."""
    if len(view.free_by_card) < unit.cards:
        return NodeReason.TOO_FEW_CARDS, len(view.free_by_card)
    all_candidates = candidates(unit, constraints, view)
    left = list(range(len(view.free_by_card)))
    for rule in rules_of(constraints):
        left = [card for card in left if rule.passes(all_candidates[card])]
        if len(left) < unit.cards:
            return rule.code, len(left)
    if constraints.numa is Strength.REQUIRE:
        numa = [view.node.cards[card].numa for card in left]
        most = max(numa.count(number) for number in numa)
        if most < unit.cards:
            return NodeReason.NUMA, most
    if constraints.links is Strength.REQUIRE:
        most = _most_linked(left, unit.cards, constraints, view)
        if most < unit.cards:
            return NodeReason.LINKS, most
    return None


def _most_linked(cards: list[int], count: int, constraints: Constraints, view: NodeView) -> int:
    """The size of the largest linked set, inside one NUMA node if that is required too."""
    if constraints.numa is not Strength.REQUIRE:
        return largest_linked(cards, count, view.node.link)
    numas = {view.node.cards[card].numa for card in cards}
    return max(
        largest_linked([card for card in cards if view.node.cards[card].numa == numa], count, view.node.link)
        for numa in numas
    )
