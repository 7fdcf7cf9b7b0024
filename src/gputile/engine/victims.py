"""Who would have to go, so that a pod fits on real cards.

kube-scheduler knows only sums; a node may have enough in sum while no single card does. `victims` looks at cards. Of
all sets of pods whose leaving makes room it takes the one with the fewest broken disruption budgets, then the lowest
priority (of its most important pod), then the fewest pods, then the latest started. Whose search is cut short gets no
victims rather than too many.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain, combinations, islice

import msgspec

from gputile.engine.placement.place import fits
from gputile.engine.placement.units import split
from gputile.engine.search_budget import SearchBudget
from gputile.model.allocations import Allocation
from gputile.model.cards import FreeCapacity, NodeView
from gputile.model.grants import Use
from gputile.model.requests import PodRequest
from gputile.model.units import MiB, Millicores

TRIES = 250
"""How many sets are tried for the smallest. A node with so many tenants gets a small set instead of the smallest."""

LOOKS = 2000
"""How many sets of one size are looked at on one card, before those that might do are tried."""

LOOKS_PER_STEP = 16

TRY_STEPS = 500
"""What one try may cost: whether room is there after some have left."""

STEPS = 40_000
"""What one question about one node may cost, where whoever asks says nothing else."""

Lawful = Callable[[Collection["Victim"]], bool]
"""Whether these may all go at once."""


RequestAfterEviction = Callable[[Collection["Victim"]], PodRequest]
"""What the pod may ask for once these have left: those of its own namespace give quota back."""


class Victim(msgspec.Struct, frozen=True, kw_only=True):
    """A pod on the node, as far as eviction cares."""

    pod: str  # UID
    name: str = ""
    priority: int = 0
    started: float = 0.0  # seconds since 1970
    budget_cost: int = 0  # disruption budgets that its eviction would break
    uses: Mapping[str, Use] = msgspec.field(default_factory=dict)  # by card UUID
    cpu: Millicores = 0
    memory: MiB = 0

    @classmethod
    def of(cls, allocation: Allocation) -> "Victim":
        return cls(
            pod=allocation.pod,
            name=allocation.name,
            priority=allocation.priority,
            started=allocation.started,
            uses=allocation.uses(),
            cpu=allocation.cpu,
            memory=allocation.memory,
        )


def without(view: NodeView, gone: Collection[Victim]) -> NodeView:
    """The node as it would be after these pods have left."""
    free_by_card = [
        _freed(room, [holder.uses[card.uuid] for holder in gone if card.uuid in holder.uses])
        for card, room in zip(view.node.cards, view.free_by_card, strict=True)
    ]
    return NodeView(
        node=view.node,
        free_by_card=tuple(free_by_card),
        cpu=view.cpu + sum(holder.cpu for holder in gone),
        memory=view.memory + sum(holder.memory for holder in gone),
    )


def _freed(room: FreeCapacity, uses: list[Use]) -> FreeCapacity:
    return FreeCapacity(
        room.memory + sum(use.memory for use in uses),
        room.cores + sum(use.cores for use in uses),
        room.slots + sum(use.slots for use in uses),
        room.tenants - len(uses),
    )


Cost = tuple[int, int, int, tuple[float, ...], tuple[str, ...]]


def cost(gone: Collection[Victim]) -> Cost:
    """Smaller is better; the names at the end only make the answer repeatable."""
    return (
        sum(holder.budget_cost for holder in gone),
        max((holder.priority for holder in gone), default=-(2**31)),
        len(gone),
        tuple(-start for start in sorted(holder.started for holder in gone)),
        tuple(sorted(holder.pod for holder in gone)),
    )


def victims(
    request: PodRequest,
    view: NodeView,
    holders: Iterable[Victim],
    priority: int,
    lawful: Lawful | None = None,
    after: RequestAfterEviction | None = None,
    budget: SearchBudget | None = None,
) -> tuple[Victim, ...] | None:
    """The cheapest set of less important pods whose leaving makes room; () if there is room, None if none does, or if
    `budget` ran out before that was known.

    With `lawful`, of those sets that it allows; and nobody goes whose eviction would break a budget. With `after`, room
    is only what the quota of the pod's namespace lets it have.
    """
    lesser = [holder for holder in holders if holder.priority < priority]
    room = _Room(request, view, after, budget or SearchBudget(STEPS))
    if room.made_by(()):
        return ()
    if not room.made_by(lesser):
        return None
    # Leaving never takes room away, so each rule narrows the field before the next one looks at it.
    free = [holder for holder in lesser if not holder.budget_cost]
    found = _of_the_least_important(free, room, lawful or _anybody) if room.made_by(free) else None
    if found is None and lawful is None and not room.budget.is_spent:
        found = _cheapest(lesser, room)
    return None if found is None else tuple(sorted(found, key=lambda holder: holder.pod))


def _anybody(gone: Collection[Victim]) -> bool:
    return True


class _Room:
    """Asks whether a set of leavers makes room, and remembers the answer; once the budget is spent, none does."""

    def __init__(
        self, request: PodRequest, view: NodeView, after: RequestAfterEviction | None, budget: SearchBudget
    ) -> None:
        self.request, self.view, self._after, self.budget = request, view, after, budget
        self.is_about_cards = after is None or after(()).constraints.allowance is None  # and not about quota
        self._known: dict[frozenset[str], bool] = {}
        self._unsure: set[frozenset[str]] = set()

    def made_by(self, gone: Collection[Victim], budget: SearchBudget | None = None) -> bool:
        key = frozenset(holder.pod for holder in gone)
        budget = budget or self.budget
        if key not in self._known:
            if not budget.spend():
                return False
            request = self.request if self._after is None else self._after(gone)
            part = budget.part(TRY_STEPS)
            self._known[key] = fits(request, without(self.view, gone), part)
            if part.ran_out:
                self._unsure.add(key)
        return self._known[key]

    def is_unsure_of(self, gone: Collection[Victim]) -> bool:
        """Whether nobody knows, because to find out would cost too much."""
        key = frozenset(holder.pod for holder in gone)
        return key in self._unsure or key not in self._known


def _of_the_least_important(field: list[Victim], room: _Room, lawful: Lawful) -> list[Victim] | None:
    """Of those up to the lowest priority at which a set is found at all."""
    for highest in sorted({holder.priority for holder in field}):
        lower = [holder for holder in field if holder.priority <= highest]
        if room.made_by(lower) and (found := _smallest(lower, room, lawful)) is not None:
            return found
    return None


def _smallest(field: list[Victim], room: _Room, lawful: Lawful) -> list[Victim] | None:
    """The fewest, then latest started, of the field; beyond `TRIES` sets, one from which nobody can be spared."""
    tried, tries = 0, room.budget.half()
    for size in range(1, len(field) + 1):
        best: list[Victim] | None = None
        for chosen in _sets_of(size, field, room, tries):
            tried += 1
            if tried > TRIES or tries.is_spent:
                return best or _spared(field, room, lawful)
            if (best is None or cost(chosen) < cost(best)) and lawful(chosen) and room.made_by(chosen, tries):
                best = list(chosen)
        if best is not None:
            return best
    return _spared(field, room, lawful)


def _spared(field: list[Victim], room: _Room, lawful: Lawful) -> list[Victim] | None:
    found = _spare_whom_we_can(field, room)
    return found if found is not None and lawful(found) else None


def _cheapest(field: list[Victim], room: _Room) -> list[Victim] | None:
    """Where budgets must be broken: the cheapest of all sets; beyond `TRIES`, one from which nobody can be spared."""
    tries = room.budget.half()
    sets = chain.from_iterable(_sets_of(size, field, room, tries) for size in range(1, len(field) + 1))
    tried = list(islice(sets, TRIES + 1))
    enough: list[tuple[Victim, ...]] = []
    if len(tried) <= TRIES:
        enough = [chosen for chosen in tried if room.made_by(chosen, tries)]
    if not enough or tries.is_spent:
        return _spare_whom_we_can(field, room)
    cheapest: tuple[Victim, ...] = min(enough, key=cost)
    return list(cheapest)


def _sets_of(size: int, field: list[Victim], room: _Room, tries: SearchBudget) -> Iterator[tuple[Victim, ...]]:
    """Sets worth trying: for one tile on one card only pods whose leaving that card would bear it, if the host does."""
    request, view = room.request, room.view
    units = split(request)
    one_card = len(units) == 1 and units[0].cards == 1 and room.is_about_cards
    if not one_card or request.cpu > view.cpu or request.memory > view.memory:
        yield from combinations(field, size)
        return
    seen: set[tuple[str, ...]] = set()
    for card, free in zip(view.node.cards, view.free_by_card, strict=True):
        need = units[0].peak(card.memory)
        there = [holder for holder in field if card.uuid in holder.uses]
        if not need.fits(_at_best(size, free, [holder.uses[card.uuid] for holder in there])):
            continue
        for number, chosen in enumerate(islice(combinations(there, size), LOOKS)):
            if number % LOOKS_PER_STEP == 0 and not tries.spend():
                return
            key = tuple(holder.pod for holder in chosen)
            if key not in seen and need.fits(_freed(free, [holder.uses[card.uuid] for holder in chosen])):
                seen.add(key)
                yield chosen


def _at_best(size: int, room: FreeCapacity, uses: list[Use]) -> FreeCapacity:
    """More room than any so many of them can leave: as if each left the most of everything."""
    most = (sorted(amounts, reverse=True)[:size] for amounts in zip(*map(msgspec.structs.astuple, uses), strict=True))
    memory, cores, slots = (sum(amounts) for amounts in most) if uses else (0, 0, 0)
    return FreeCapacity(room.memory + memory, room.cores + cores, room.slots + slots, room.tenants)


def _spare_whom_we_can(field: list[Victim], room: _Room) -> list[Victim] | None:
    """Start with all and put back one by one: costly budgets first, then the important, then the longest running. None
    where that could not be found out of somebody: he might be evicted for nothing."""
    gone = list(field)
    for holder in sorted(field, key=lambda holder: (-holder.budget_cost, -holder.priority, holder.started)):
        fewer = [other for other in gone if other is not holder]
        if room.made_by(fewer):
            gone = fewer
        elif room.is_unsure_of(fewer):
            return None
    return gone
