"""Victims: which pods to evict so that a pod fits on the cards of a node.

kube-scheduler knows only the sums of a node, and a node may have enough in sum while no single card does. `victims`
works card by card. Of all sets of pods whose eviction makes the pod fit it chooses the one with the fewest violated
PodDisruptionBudgets, then the lowest priority (of its most important pod), then the fewest pods, then the latest
started. A search that is cut short returns no victims rather than too many.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import reduce
from itertools import chain, combinations, islice
from operator import add

import msgspec

from gputile.engine.placement.place import fits
from gputile.engine.placement.units import split
from gputile.engine.search_budget import SearchBudget
from gputile.model.allocations import Allocation
from gputile.model.cards import FreeCapacity, NodeView, Use
from gputile.model.requests import PodRequest
from gputile.model.units import MiB, Millicores

TRIES = 250
"""How many sets are tried for the smallest. A node with more sets gets a small set instead of the smallest."""

LOOKS = 2000
"""How many sets of one size are compared by size on one card, before the likely ones are tried."""

LOOKS_PER_STEP = 16

TRY_STEPS = 500
"""What one trial may cost: whether the pod fits after an eviction."""

STEPS = 40_000
"""What the search on one node may cost, where the caller passes no budget."""

MayEvict = Callable[[Collection["Victim"]], bool]
"""Whether the disruption budgets allow evicting all of these pods at once."""


RequestAfterEviction = Callable[[Collection["Victim"]], PodRequest]
"""What the pod may request after these evictions: pods of its own namespace give quota back."""


class Victim(msgspec.Struct, frozen=True, kw_only=True):
    """A pod on the node that might be evicted."""

    pod: str  # UID
    name: str = ""
    priority: int = 0
    started: float = 0.0  # seconds since 1970
    budget_cost: int = 0  # disruption budgets that its eviction would violate
    uses: Mapping[str, Use] = msgspec.field(default_factory=dict)  # by card UUID
    cpu: Millicores = 0
    memory: MiB = 0

    @classmethod
    def of(cls, allocation: Allocation) -> "Victim":
        """The pod that holds this allocation."""
        return cls(
            pod=allocation.pod,
            name=allocation.name,
            priority=allocation.priority,
            started=allocation.started,
            uses=allocation.uses(),
            cpu=allocation.cpu,
            memory=allocation.memory,
        )


def without(view: NodeView, evicted: Collection[Victim]) -> NodeView:
    """The node after the eviction of these pods."""
    free_by_card = [
        reduce(add, (holder.uses[card.uuid] for holder in evicted if card.uuid in holder.uses), free)
        for card, free in zip(view.node.cards, view.free_by_card, strict=True)
    ]
    return NodeView(
        node=view.node,
        free_by_card=tuple(free_by_card),
        cpu=view.cpu + sum(holder.cpu for holder in evicted),
        memory=view.memory + sum(holder.memory for holder in evicted),
    )


Cost = tuple[int, int, int, tuple[float, ...], tuple[str, ...]]


def cost(evicted: Collection[Victim]) -> Cost:
    """Smaller is better; the UIDs at the end only make the answer repeatable."""
    return (
        sum(holder.budget_cost for holder in evicted),
        max((holder.priority for holder in evicted), default=-(2**31)),
        len(evicted),
        tuple(-start for start in sorted(holder.started for holder in evicted)),
        tuple(sorted(holder.pod for holder in evicted)),
    )


def victims(
    request: PodRequest,
    view: NodeView,
    holders: Iterable[Victim],
    priority: int,
    may_evict: MayEvict | None = None,
    after: RequestAfterEviction | None = None,
    budget: SearchBudget | None = None,
) -> tuple[Victim, ...] | None:
    """The cheapest set of lower-priority pods whose eviction makes the pod fit.

    () if the pod fits without eviction. None if no eviction helps, or if `budget` ran out before that was known. With
    `may_evict` only sets that it allows, and no pod whose eviction violates a disruption budget. With `after` the pod
    must also fit into the quota of its namespace.
    """
    lower = [holder for holder in holders if holder.priority < priority]
    trials = _EvictionTrials(request, view, after, budget or SearchBudget(STEPS))
    if trials.fits_without(()):
        return ()
    if not trials.fits_without(lower):
        return None
    # Evicting more pods never takes capacity away, so each rule narrows the candidates for the next one.
    safe = [holder for holder in lower if not holder.budget_cost]
    chosen = _of_lowest_priority(safe, trials, may_evict or _always) if trials.fits_without(safe) else None
    if chosen is None and may_evict is None and not trials.budget.is_spent:
        chosen = _cheapest(lower, trials)
    return None if chosen is None else tuple(sorted(chosen, key=lambda holder: holder.pod))


def _always(evicted: Collection[Victim]) -> bool:
    return True


class _EvictionTrials:
    """Tries whether the pod fits after an eviction, and caches the result; once the budget is spent, nothing fits."""

    def __init__(
        self, request: PodRequest, view: NodeView, after: RequestAfterEviction | None, budget: SearchBudget
    ) -> None:
        self.request, self.view, self._after, self.budget = request, view, after, budget
        self.is_about_cards = after is None or after(()).constraints.allowance is None  # and not about quota as well
        self._results: dict[frozenset[str], bool] = {}
        self._unsure: set[frozenset[str]] = set()

    def fits_without(self, evicted: Collection[Victim], budget: SearchBudget | None = None) -> bool:
        key = frozenset(holder.pod for holder in evicted)
        budget = budget or self.budget
        if key not in self._results:
            if not budget.spend():
                return False
            request = self.request if self._after is None else self._after(evicted)
            part = budget.part(TRY_STEPS)
            self._results[key] = fits(request, without(self.view, evicted), part)
            if part.ran_out:
                self._unsure.add(key)
        return self._results[key]

    def is_unsure_of(self, evicted: Collection[Victim]) -> bool:
        """Whether the result is unknown, because the trial would cost too much."""
        key = frozenset(holder.pod for holder in evicted)
        return key in self._unsure or key not in self._results


def _of_lowest_priority(pods: list[Victim], trials: _EvictionTrials, may_evict: MayEvict) -> list[Victim] | None:
    """A set of pods of the lowest possible priority."""
    for highest in sorted({holder.priority for holder in pods}):
        lower = [holder for holder in pods if holder.priority <= highest]
        if trials.fits_without(lower) and (smallest := _smallest(lower, trials, may_evict)) is not None:
            return smallest
    return None


def _smallest(pods: list[Victim], trials: _EvictionTrials, may_evict: MayEvict) -> list[Victim] | None:
    """The fewest, then the latest started pods; beyond `TRIES` sets, a set from which no pod can be spared."""
    tried, tries = 0, trials.budget.half()
    for size in range(1, len(pods) + 1):
        best: list[Victim] | None = None
        for chosen in _sets_of(size, pods, trials, tries):
            tried += 1
            if tried > TRIES or tries.is_spent:
                return best or _spared(pods, trials, may_evict)
            if (best is None or cost(chosen) < cost(best)) and may_evict(chosen) and trials.fits_without(chosen, tries):
                best = list(chosen)
        if best is not None:
            return best
    return _spared(pods, trials, may_evict)


def _spared(pods: list[Victim], trials: _EvictionTrials, may_evict: MayEvict) -> list[Victim] | None:
    chosen = _spare(pods, trials)
    return chosen if chosen is not None and may_evict(chosen) else None


def _cheapest(pods: list[Victim], trials: _EvictionTrials) -> list[Victim] | None:
    """Where budgets must be violated: the cheapest set; beyond `TRIES` sets, a set from which no pod can be spared."""
    tries = trials.budget.half()
    sets = chain.from_iterable(_sets_of(size, pods, trials, tries) for size in range(1, len(pods) + 1))
    tried = list(islice(sets, TRIES + 1))
    enough: list[tuple[Victim, ...]] = []
    if len(tried) <= TRIES:
        enough = [chosen for chosen in tried if trials.fits_without(chosen, tries)]
    if not enough or tries.is_spent:
        return _spare(pods, trials)
    cheapest: tuple[Victim, ...] = min(enough, key=cost)
    return list(cheapest)


def _sets_of(
    size: int, pods: list[Victim], trials: _EvictionTrials, tries: SearchBudget
) -> Iterator[tuple[Victim, ...]]:
    """Sets worth trying. For a single tile: only pods of one card that would free enough of that card."""
    request, view = trials.request, trials.view
    units = split(request)
    one_card = len(units) == 1 and units[0].cards == 1 and trials.is_about_cards
    if not one_card or request.cpu > view.cpu or request.memory > view.memory:
        yield from combinations(pods, size)
        return
    seen: set[tuple[str, ...]] = set()
    for card, free in zip(view.node.cards, view.free_by_card, strict=True):
        need = units[0].peak(card.memory)
        there = [holder for holder in pods if card.uuid in holder.uses]
        if not need.fits(_at_best(size, free, [holder.uses[card.uuid] for holder in there])):
            continue
        for number, chosen in enumerate(islice(combinations(there, size), LOOKS)):
            if number % LOOKS_PER_STEP == 0 and not tries.spend():
                return
            key = tuple(holder.pod for holder in chosen)
            if key not in seen and need.fits(reduce(add, (holder.uses[card.uuid] for holder in chosen), free)):
                seen.add(key)
                yield chosen


def _at_best(size: int, free: FreeCapacity, uses: list[Use]) -> FreeCapacity:
    """An upper bound of what evicting so many of them frees: the sum of the largest amounts of each kind."""
    most = (sorted(amounts, reverse=True)[:size] for amounts in zip(*map(msgspec.structs.astuple, uses), strict=True))
    memory, cores, slots = (sum(amounts) for amounts in most) if uses else (0, 0, 0)
    return FreeCapacity(free.memory + memory, free.cores + cores, free.slots + slots, free.tenants)


def _spare(pods: list[Victim], trials: _EvictionTrials) -> list[Victim] | None:
    """Start with all pods and spare them one by one: first the most budget violations, then the highest priority, then
    the longest running. None where a trial is unknown: that pod might be evicted for nothing."""
    evicted = list(pods)
    for holder in sorted(pods, key=lambda holder: (-holder.budget_cost, -holder.priority, holder.started)):
        fewer = [other for other in evicted if other is not holder]
        if trials.fits_without(fewer):
            evicted = fewer
        elif trials.is_unsure_of(fewer):
            return None
    return evicted
