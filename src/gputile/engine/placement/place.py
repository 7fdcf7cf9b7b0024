"""What fits on one node: the definition that everything else must agree with.

`place` is scalar and pure. It finds an assignment of containers to cards whenever one exists (it tries the policy's
favourite first and goes back when that leads nowhere), and otherwise says which rule left too few cards.
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
"""How many sets of cards of one node are looked at before giving up. Real pods need a handful."""

LEAST_STEPS = 10
"""What a search costs before it begins, in steps."""


Prefer = Callable[[PlacementUnit], list[float]]
"""By card of the node, larger is better: where a piece should go."""


class Placement(msgspec.Struct, frozen=True):
    """Where each container's tiles are on one node."""

    node: str
    containers: tuple[ContainerGrant, ...]

    def grant(self, pod: str, dialect: str) -> Grant:
        return Grant(pod=pod, node=self.node, dialect=dialect, containers=self.containers)


def place(
    request: PodRequest,
    view: NodeView,
    policy: str | None = None,
    seed: int = 0,
    prefer: Prefer | None = None,
    budget: SearchBudget | None = None,
) -> Placement | Refusal:
    """Put every container of `request` on cards of the node, or say why not.

    `prefer` gives scores by card where a policy has learnt them (`Fleet.place`); else the policy's own order counts.
    """
    budget = budget or SearchBudget(3 * SEARCH_STEPS)  # also for whether eviction could help
    units = split(request)
    fault = _node_fault(view, units)
    if fault is not None:
        return fault
    board = _Board(request, view, policy, seed, phase_count(units), prefer, budget.part(SEARCH_STEPS))
    found = _found(request, units, view, board)
    miss = _card_miss(units, request, view, board) if found is None else _host_miss(request, view)
    if found is not None and miss is None:
        return Placement(view.node.name, _grants(request, view.node, found))
    assert miss is not None, "cards were refused without a reason"
    empty = NodeView.empty(view.node)
    alone = request.if_nobody_held
    changes = view != empty or alone is not request
    return Refusal(view.node.name, *miss, resolvable=changes and fits(alone, empty, budget))


def placed(request: PodRequest, node: Node, card: int) -> Placement:
    """All of the pod on one card, which is known to bear it."""
    found = {ask.container: (card,) for ask in request.asks}
    return Placement(node.name, _grants(request, node, found))


def fits(request: PodRequest, view: NodeView, budget: SearchBudget | None = None) -> bool:
    """Whether the node takes the pod; out of budget means no."""
    return _host_miss(request, view) is None and bool(searched(request, view, budget))


def searched(request: PodRequest, view: NodeView, budget: SearchBudget | None = None) -> bool | None:
    """Whether the node's cards take the pod, CPU and main memory aside; None: the search was cut short."""
    units = split(request)
    budget = (budget or SearchBudget(SEARCH_STEPS)).part(SEARCH_STEPS)
    if not budget.spend(LEAST_STEPS + len(units)):
        return None
    if _node_fault(view, units) is not None:
        return False
    board = _Board(request, view, None, 0, phase_count(units), None, budget)
    found = _found(request, units, view, board)
    return None if board.gave_up else found is not None


# ---- which cards may serve ------------------------------------------------------------------------------------------


class Candidate(msgspec.Struct, frozen=True):
    """One piece on one card, by itself."""

    need: Demand  # the most it takes of the card at any time
    idle: bool  # it wants a card that nobody holds
    rule: Constraints
    card: Card
    room: FreeCapacity
    pool: str  # of the node


def cases(unit: PlacementUnit, rule: Constraints, view: NodeView) -> list[Candidate]:
    """The piece on each card of the node."""
    needs = {size: unit.peak(size) for size in {card.memory for card in view.node.cards}}
    idle = unit.exclusive or rule.idle
    return [
        Candidate(needs[card.memory], idle, rule, card, room, view.node.pool)
        for card, room in zip(view.node.cards, view.free_by_card, strict=True)
    ]


class Rule(msgspec.Struct, frozen=True):
    """A rule that a card must pass, and the reason when too few pass it and those before."""

    code: NodeReason
    passes: Callable[[Candidate], bool]


FACTS = (
    Rule(NodeReason.MODEL, lambda case: case.rule.accepts_model(case.card.model)),
    Rule(NodeReason.UUID, lambda case: case.rule.accepts_uuid(case.card.uuid)),
    Rule(NodeReason.MODE, lambda case: case.rule.accepts_mode(case.card.mode) and not case.card.in_mig_mode),
    Rule(NodeReason.UNHEALTHY, lambda case: case.card.healthy),
    Rule(NodeReason.CORDONED, lambda case: not case.card.cordoned),
    Rule(NodeReason.TOO_SMALL, lambda case: case.need.fits(FreeCapacity.of(case.card))),
)
"""Rules about the card itself; nobody's leaving changes them."""

MOMENT = (
    Rule(NodeReason.NOT_IDLE, lambda case: not (case.idle and case.room.tenants)),
    Rule(NodeReason.MEMORY, lambda case: case.need.fits_memory(case.room)),
    Rule(NodeReason.CORES, lambda case: case.need.fits_cores(case.room)),
    Rule(NodeReason.SLOTS, lambda case: case.need.fits_slots(case.room)),
)
"""Rules about what is free of it now."""


def _makes(case: Candidate, of: Callable[[QuotaAllowance], frozenset[CardKind]]) -> bool:
    allowance = case.rule.allowance
    return allowance is None or (case.card.model, case.card.memory) in of(allowance)


QUOTA = (
    Rule(NodeReason.QUOTA_POOL, lambda case: case.rule.allowance is None or case.rule.allowance.admits_pool(case.pool)),
    Rule(NodeReason.QUOTA_MODEL, lambda case: _makes(case, lambda allowance: allowance.listed)),
    Rule(NodeReason.QUOTA, lambda case: _makes(case, lambda allowance: allowance.affordable)),
)
"""Rules about the pod's namespace: before what is free, for no room helps a pod that may not have it."""

ABOUT_NEEDS = frozenset({NodeReason.TOO_SMALL, *(stage.code for stage in MOMENT)})
"""Rules about what a piece takes of a card."""

RULES = (*FACTS, *MOMENT)
RULES_UNDER_QUOTA = (*FACTS, *QUOTA, *MOMENT)


def rules_of(rule: Constraints) -> tuple[Rule, ...]:
    return RULES if rule.allowance is None else RULES_UNDER_QUOTA


def _open_cards(rule: Constraints, view: NodeView) -> list[bool]:
    """Which cards pass the rules that are the same for every piece of the pod."""
    everybodys = [stage for stage in rules_of(rule) if stage.code not in ABOUT_NEEDS]
    nothing = Demand(0, 0, 0, 0)
    return [
        all(stage.passes(Candidate(nothing, False, rule, card, room, view.node.pool)) for stage in everybodys)
        for card, room in zip(view.node.cards, view.free_by_card, strict=True)
    ]


def _more_than_all(units: Sequence[PlacementUnit], view: NodeView) -> bool:
    """Whether the pod wants more than all cards have left together: no search could find that."""
    wanted = [(ask, unit) for unit in units for ask in unit.asks_in(0)]
    free_by_card = view.free_by_card
    return (
        sum(unit.cards * (ask.memory or 0) for ask, unit in wanted) > sum(max(room.memory, 0) for room in free_by_card)
        or sum(unit.cards * ask.cores for ask, unit in wanted) > sum(max(room.cores, 0) for room in free_by_card)
        or sum(unit.cards * unit.slots for _, unit in wanted) > sum(max(room.slots, 0) for room in free_by_card)
    )


# ---- the search -----------------------------------------------------------------------------------------------------


def _hardest_first(units: Sequence[PlacementUnit]) -> list[PlacementUnit]:
    return sorted(units, key=PlacementUnit.hardness, reverse=True)


class _Move:
    """A piece that waits for its cards: what it needs of each, None where it could not go even alone."""

    def __init__(self, unit: PlacementUnit, view: NodeView, rule: Constraints, open_cards: list[bool]) -> None:
        self.scores: list[float] | None = None  # by card, where a policy has learnt them
        self.unit, self.phases, self.is_init = unit, unit.phases(), unit.is_init
        self.exclusive, wants_idle = unit.exclusive, unit.exclusive or rule.idle
        sizes = {card.memory for card in view.node.cards}
        needs, peaks = {size: unit.needs(size) for size in sizes}, {size: unit.peak(size) for size in sizes}
        self.needs = [
            needs[card.memory]
            if is_open and not (wants_idle and room.tenants) and peaks[card.memory].fits(room)
            else None
            for card, room, is_open in zip(view.node.cards, view.free_by_card, open_cards, strict=True)
        ]


def _found(
    request: PodRequest, units: tuple[PlacementUnit, ...], view: NodeView, board: "_Board"
) -> dict[str, Sequence[int]] | None:
    if _more_than_all(units, view):
        return None
    rule = request.constraints
    open_cards = _open_cards(rule, view)
    return _search([_Move(unit, view, rule, open_cards) for unit in _hardest_first(units)], board)


NOTHING = FreeCapacity(-1, -1, -1)  # what an exclusive container leaves to the others of its pod


class _Board:
    """The cards of one node while a placement is searched: what is left of each, in each phase of the pod."""

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
        self.left = [[room] * phases for room in view.free_by_card]
        self.held = [0] * len(view.free_by_card)  # pieces of this pod on the card
        self.gave_up, self._budget = False, budget

    def choices(self, move: _Move) -> Iterator[Sequence[int]]:
        """Sets of cards for the piece, the policy's favourite first; sets that differ in name only come once."""
        rank = {card: self._rank(move, card) for card, _ in enumerate(self.left) if self._admits(move, card)}
        fitting = sorted(rank, key=lambda card: (rank[card], card))
        for group in self._groups(fitting, move.unit.cards):
            if not self._may_go_on(self._cost_of_favourite(group, move.unit.cards)):
                return
            seen = set()
            for chosen in chain([self._favourite(group, rank, move.unit.cards)], self._sets(group, move.unit.cards)):
                if not self._may_go_on():  # also for sets that are passed over: there may be a great many
                    return
                if frozenset(chosen) not in seen and self._allowed(chosen):
                    seen.add(frozenset(chosen))
                    yield chosen

    def _may_go_on(self, steps: int = 1) -> bool:
        self.gave_up = self.gave_up or bool(steps and not self._budget.spend(steps))
        return not self.gave_up

    def _cost_of_favourite(self, group: list[int], wanted: int) -> int:
        """In steps: to find the best-linked of many sets may cost more than everything else."""
        return 0 if wanted == 1 or not self.view.node.links else cost_of_closest(len(group), wanted)

    def _sets(self, group: list[int], wanted: int) -> Iterator[Sequence[int]]:
        """All sets of so many cards; of cards that are alike only how many are taken counts."""
        alike: dict[object, list[int]] = {}
        for card in group:
            alike.setdefault(self._likeness(card), []).append(card)
        yield from _pick(list(alike.values()), wanted)

    def put(self, move: _Move, chosen: Sequence[int]) -> list[list[FreeCapacity]]:
        """Take the piece's needs off its cards; returns what was there, for `take_back`."""
        before = [self.left[card] for card in chosen]
        for card in chosen:
            self.held[card] += 1
            left = list(self.left[card])
            for need in move.needs[card] or ():
                left[need.phase] = NOTHING if move.exclusive else need.off(left[need.phase])
            self.left[card] = left
        return before

    def take_back(self, chosen: Sequence[int], before: list[list[FreeCapacity]]) -> None:
        for card, left in zip(chosen, before, strict=True):
            self.held[card] -= 1
            self.left[card] = left

    def _card(self, card: int) -> Card:
        return self.view.node.cards[card]

    def _admits(self, move: _Move, card: int) -> bool:
        needs, left, room = move.needs[card], self.left[card], self.view.free_by_card[card]
        if needs is None:
            return False
        if move.exclusive:
            return all(left[phase] is room for phase in move.phases)
        return all(need.fits_beside(left[need.phase]) for need in needs)

    def _rank(self, move: _Move, card: int) -> Rank:
        """Init containers go where their pod is anyway: the kubelet gives them those devices."""
        stranger = int(move.is_init and not self.held[card])
        if self.prefer is not None:
            if move.scores is None:
                move.scores = self.prefer(move.unit)
            return (stranger, -move.scores[card])
        left = self.left[card][move.phases[0]]
        return (stranger, *self.policy.rank_card(self._card(card), left, self._links(card), self.seed))

    def _links(self, card: int) -> int:
        """How closely the card is linked with those that are idle."""
        node = self.view.node
        if not node.links:
            return 0
        return sum(node.link(card, peer) for peer, room in enumerate(self.view.free_by_card) if not room.tenants)

    def _groups(self, fitting: list[int], wanted: int) -> list[list[int]]:
        """The cards to choose among: all, or those of one NUMA node after the other."""
        wish = self.request.constraints.numa
        groups = [] if wish is Strength.REQUIRE else [fitting]
        if wish is not Strength.NO:
            by_numa: dict[int, list[int]] = {}
            for card in fitting:
                by_numa.setdefault(self._card(card).numa, []).append(card)
            groups = [*by_numa.values(), *groups]
        return [group for group in groups if len(group) >= wanted]

    def _favourite(self, group: list[int], rank: dict[int, Rank], wanted: int) -> list[int]:
        """The first by rank; among equals, and when links come first among all, the best-linked set."""
        if wanted == 1 or not self.view.node.links:
            return group[:wanted]
        if self.policy.by_links or self.request.constraints.links is not Strength.NO:
            return closest([], group, wanted, self.view.node.link)
        last = rank[group[wanted - 1]]
        better = [card for card in group if rank[card] < last]
        equal = [card for card in group if rank[card] == last]
        return closest(better, equal, wanted - len(better), self.view.node.link)

    def _allowed(self, chosen: Sequence[int]) -> bool:
        return self.request.constraints.links is not Strength.REQUIRE or all_linked(chosen, self.view.node.link)

    def _likeness(self, card: int) -> tuple[object, ...]:
        """Equal for cards that any further piece would find equally good."""
        free_by_card = tuple((room.memory, room.cores, room.slots, room.tenants) for room in self.left[card])
        rule = self.request.constraints
        its_own = card if (rule.numa, rule.links) != (Strength.NO, Strength.NO) else -1
        return (free_by_card, self._card(card).memory, self._card(card).cores, self._card(card).slots, its_own)


def _pick(kinds: list[list[int]], wanted: int) -> Iterator[list[int]]:
    """Every way to take so many cards from lists of cards that are alike; the first lists are used up first."""
    sizes = [len(kind) for kind in kinds]
    counts = _filled([0] * len(sizes), sizes, 0, wanted)
    while sum(counts) == wanted:
        yield [card for kind, count in zip(kinds, counts, strict=True) for card in kind[:count]]
        last = _last_that_can_give(counts, sizes)
        if last is None:
            return
        rest = sum(counts[last + 1 :]) + 1
        counts[last] -= 1
        counts = _filled(counts, sizes, last + 1, rest)


def _filled(counts: list[int], sizes: list[int], start: int, wanted: int) -> list[int]:
    """The counts up to `start`, and from there on so many cards, as early as they go."""
    counts = counts[:start]
    for size in sizes[start:]:
        counts.append(min(size, wanted))
        wanted -= counts[-1]
    return counts


def _last_that_can_give(counts: list[int], sizes: list[int]) -> int | None:
    """The last list of which a card is taken although one more could be had from those behind it."""
    spare = 0
    for place in range(len(counts) - 1, -1, -1):
        if counts[place] and spare:
            return place
        spare += sizes[place] - counts[place]
    return None


def _search(moves: list[_Move], board: _Board) -> dict[str, Sequence[int]] | None:
    """Cards by container for all pieces, or None. Depth first, hardest piece first.

    The way back is a list and not the call stack: whoever writes the pod decides how many pieces there are.
    """
    done: list[tuple[Sequence[int], list[list[FreeCapacity]]]] = []  # by move: the cards, and what was there before
    choices = [board.choices(move) for move in moves[:1]]
    while len(done) < len(moves):
        chosen = next(choices[-1], None)
        if chosen is not None:
            done.append((chosen, board.put(moves[len(done)], chosen)))
            choices += [board.choices(move) for move in moves[len(done) : len(done) + 1]]
        elif done:
            choices.pop()
            board.take_back(*done.pop())
        else:
            return None
    found = zip(moves, done, strict=True)
    return {ask.container: chosen for move, (chosen, _) in found for ask in move.unit.asks}


def _grants(request: PodRequest, node: Node, found: Mapping[str, Sequence[int]]) -> tuple[ContainerGrant, ...]:
    grants = []
    for ask in request.asks:
        if ask.cards:
            tiles: list[Tile] = [take(ask, node.cards[card]) for card in sorted(found[ask.container])]
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
    units: tuple[PlacementUnit, ...], request: PodRequest, view: NodeView, board: _Board
) -> tuple[NodeReason, int, int]:
    """The first rule that leaves too few cards; if every piece fits alone, then that they do not fit together."""
    for unit in units:
        miss = unit_miss(unit, request.constraints, view)
        if miss is not None:
            return miss[0], unit.cards, miss[1]
    return (NodeReason.SEARCH if board.gave_up else NodeReason.TOGETHER), len(units), 0


def unit_miss(unit: PlacementUnit, rule: Constraints, view: NodeView) -> tuple[NodeReason, int] | None:
    """The first rule at which this piece alone finds too few cards, and how many it found."""
    if len(view.free_by_card) < unit.cards:
        return NodeReason.TOO_FEW_CARDS, len(view.free_by_card)
    all_cases = cases(unit, rule, view)
    left = list(range(len(view.free_by_card)))
    for stage in rules_of(rule):
        left = [card for card in left if stage.passes(all_cases[card])]
        if len(left) < unit.cards:
            return stage.code, len(left)
    if rule.numa is Strength.REQUIRE:
        numa = [view.node.cards[card].numa for card in left]
        most = max(numa.count(one) for one in numa)
        if most < unit.cards:
            return NodeReason.NUMA, most
    if rule.links is Strength.REQUIRE:
        most = _most_linked(left, unit.cards, rule, view)
        if most < unit.cards:
            return NodeReason.LINKS, most
    return None


def _most_linked(cards: list[int], wanted: int, rule: Constraints, view: NodeView) -> int:
    """The largest linked set, inside one NUMA node if that is required too."""
    if rule.numa is not Strength.REQUIRE:
        return largest_linked(cards, wanted, view.node.link)
    numas = {view.node.cards[card].numa for card in cards}
    return max(
        largest_linked([card for card in cards if view.node.cards[card].numa == numa], wanted, view.node.link)
        for numa in numas
    )
