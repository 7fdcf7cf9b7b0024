"""Which nodes fit, for all nodes at once. A property test checks that it agrees with `placement.place`.

A single unit needs counting only. Two units of one card each fit if one card fits both, or if each finds a card that
the other does not need. All other requests are tried greedily on all nodes together; the few nodes where that fails
although each unit alone fits are left to the scalar search.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from gputile.engine.fleet.free_arrays import FreeArrays, Ints, Mask, anywhere, count
from gputile.engine.placement.units import PlacementUnit
from gputile.engine.search_budget import SearchBudget
from gputile.model.requests import Constraints, ContainerRequest, Strength

Rows = NDArray[np.intp]

SEARCHES = 32  # requests with search results
SEARCHED = 2_000  # states of cards, for one request


class SearchContext:
    """The search budget of one query about many nodes, and the nodes (rows) that it did not suffice for."""

    def __init__(self, budget: SearchBudget) -> None:
        self.budget = budget
        self.unsearched: set[int] = set()


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


class FeasibilityQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A request as placement units, and the arrays and functions that answer it."""

    units: tuple[PlacementUnit, ...]
    rule: Constraints
    grid: FreeArrays
    eligible: Mask  # usable cards that satisfy the constraints
    numa: Ints
    linked: Callable[[Mask, int], Ints]  # (cards, at most): by node the number of cards that are all linked
    search: Callable[[Rows], Mask]  # the scalar search on these nodes
    context: SearchContext


def nodes_that_fit(query: FeasibilityQuery) -> Mask:
    """Cards only; the caller checks CPU and memory of the host."""
    if not query.units:  # a pod without GPU: the host decides
        return np.ones(query.eligible.shape[1], dtype=np.bool_)
    groups = _independent(query.units)
    answer = _group_fits(groups[0], query)
    for group in groups[1:]:
        answer &= _group_fits(group, query)
    return answer


def is_simple(units: Sequence[PlacementUnit], rule: Constraints) -> bool:
    """Whether counting answers it node by node: no search, and no set of cards that must be near each other."""
    return not _requires_sets(rule) and (len(units) < 2 or (len(units) == 2 and _simple(tuple(units), rule)))


def _independent(units: Sequence[PlacementUnit]) -> list[tuple[PlacementUnit, ...]]:
    """Groups that never run at the same time. A sidecar that outlives an init container makes one group of all."""
    if any(len(unit.phases()) > 1 for unit in units):
        return [tuple(units)]
    by_phase: dict[int, list[PlacementUnit]] = {}
    for unit in units:
        by_phase.setdefault(unit.phases()[0], []).append(unit)
    return [tuple(group) for group in by_phase.values()]


def _group_fits(units: tuple[PlacementUnit, ...], query: FeasibilityQuery) -> Mask:
    masks = [cards_that_fit(unit, query.grid, query.eligible, query.rule.idle) for unit in units]
    if len(units) == 1:
        return enough(units[0], masks[0], query)
    if len(units) == 2 and _simple(units, query.rule):
        return _pair_fits(units[0], units[1], masks, query)
    needed: Mask = np.logical_and.reduce([enough(p, m, query) for p, m in zip(units, masks, strict=True)])
    needed &= _sums_suffice(units, query)
    rows = np.flatnonzero(needed)
    unsure = rows if _requires_sets(query.rule) else rows[~_greedy(units, rows, query)]
    needed[unsure] = query.search(unsure)
    return needed


def _sums_suffice(units: Sequence[PlacementUnit], query: FeasibilityQuery) -> Mask:
    """Where the cards have in sum what the units of one phase request; other nodes need no search."""
    phase = min(unit.phases()[0] for unit in units)
    asks = [(ask, unit) for unit in units for ask in unit.asks_in(phase)]
    grid, eligible = query.grid, query.eligible
    sums = (
        (grid.memory, sum(unit.cards * (ask.memory or 0) for ask, unit in asks)),
        (grid.cores, sum(unit.cards * ask.cores for ask, unit in asks)),
        (grid.slots, sum(unit.cards * unit.slots for _, unit in asks)),
    )
    enough_of: list[Mask] = [
        (np.maximum(free, 0) * eligible).sum(axis=0) >= requested for free, requested in sums if requested
    ]
    return np.logical_and.reduce(enough_of) if enough_of else np.ones(eligible.shape[1], dtype=np.bool_)


def _simple(units: tuple[PlacementUnit, ...], rule: Constraints) -> bool:
    return all(unit.cards == 1 and unit.phases() == [0] for unit in units) and not _requires_sets(rule)


def _requires_sets(rule: Constraints) -> bool:
    return Strength.REQUIRE in (rule.numa, rule.links)


# ---- one unit -------------------------------------------------------------------------------------------------------


def cards_that_fit(unit: PlacementUnit, grid: FreeArrays, eligible: Mask, idle: bool) -> Mask:
    """The cards on which this unit alone fits."""
    mask = eligible
    if unit.exclusive or idle:
        mask = mask & (grid.tenants == 0)
    for asks in unit.demands():
        mask = mask & (grid.memory >= memory_needed(asks, grid.size))
        mask &= grid.cores >= max(1, sum(ask.cores for ask in asks))
        if unit.slots:
            mask &= grid.slots >= unit.slots * len(asks)
    return mask


def memory_needed(asks: Sequence[ContainerRequest], size: Ints) -> Ints | int:
    """By card where a percentage is requested; otherwise a single number."""
    fixed = sum(ask.memory for ask in asks if ask.memory is not None)
    percents = [ask.memory_percent or 0 for ask in asks if ask.memory is None]
    if not percents:
        return fixed
    parts = [size if percent == 100 else _part(size, percent) for percent in percents]
    return sum(parts[1:], parts[0] + fixed if fixed else parts[0])


def _part(size: Ints, percent: int) -> Ints:
    return size * percent // 100


def enough(unit: PlacementUnit, mask: Mask, query: FeasibilityQuery) -> Mask:
    """Nodes with as many fitting cards as the unit requests, near enough to each other if that is required."""
    rule = query.rule
    if unit.cards == 1 and not _requires_sets(rule):
        return anywhere(mask)
    if rule.numa is Strength.REQUIRE:
        return _enough_on_one_numa(unit.cards, mask, query)
    enough_cards: Mask = count(mask) >= unit.cards
    if rule.links is Strength.REQUIRE:
        enough_cards &= query.linked(mask & enough_cards, unit.cards) >= unit.cards
    return enough_cards


def _enough_on_one_numa(requested: int, mask: Mask, query: FeasibilityQuery) -> Mask:
    answer = np.zeros(mask.shape[1], dtype=np.bool_)
    for cards in by_numa(mask, query):
        enough_cards = count(cards) >= requested
        if query.rule.links is Strength.REQUIRE:
            enough_cards &= query.linked(cards & enough_cards, requested) >= requested
        answer |= enough_cards
    return answer


def by_numa(mask: Mask, query: FeasibilityQuery) -> Iterator[Mask]:
    """The cards of each NUMA node."""
    for numa in np.unique(query.numa[mask]):
        yield mask & (query.numa == numa)


# ---- several units --------------------------------------------------------------------------------------------------


def _pair_fits(
    first_unit: PlacementUnit, second_unit: PlacementUnit, masks: list[Mask], query: FeasibilityQuery
) -> Mask:
    """Exact: both on one card, or on two different cards."""
    first, second = count(masks[0]), count(masks[1])
    contested = (first == 1) & (second == 1) & anywhere(masks[0] & masks[1])
    apart: Mask = (first >= 1) & (second >= 1) & ~contested
    if first_unit.exclusive or second_unit.exclusive:
        return apart
    both = msgspec.structs.replace(
        first_unit, asks=first_unit.asks + second_unit.asks, phases_of=first_unit.phases_of + second_unit.phases_of
    )
    mask = cards_that_fit(both, query.grid, query.eligible, query.rule.idle)
    return apart | anywhere(mask)


def _greedy(units: tuple[PlacementUnit, ...], rows: Rows, query: FeasibilityQuery) -> Mask:
    """Hardest unit first, each on the fullest cards that fit it, as if all ran at once. Success proves that they
    fit."""
    grid, eligible = query.grid.columns(rows), query.eligible[:, rows]
    done = np.ones(len(rows), dtype=np.bool_)
    every = np.arange(len(rows))
    for unit in sorted(units, key=PlacementUnit.hardness, reverse=True):
        mask = cards_that_fit(unit, grid, eligible, query.rule.idle)
        done &= count(mask) >= unit.cards
        memory = memory_needed(unit.asks, grid.size)
        for chosen in _fullest(np.where(mask, grid.memory, np.iinfo(np.int64).max), unit.cards):
            grid.tenants[chosen, every] += 1  # no exclusive unit may follow
            if unit.exclusive:
                grid.memory[chosen, every] = -1
                continue
            grid.memory[chosen, every] -= memory if isinstance(memory, int) else memory[chosen, every]
            grid.cores[chosen, every] -= sum(ask.cores for ask in unit.asks)
            grid.slots[chosen, every] -= unit.slots * len(unit.asks)
    return done


def _fullest(memory: Ints, requested: int) -> Ints:
    """By node the positions of so many cards, least memory first. The usual single card needs no sort."""
    if requested == 1:
        return np.asarray(memory.argmin(axis=0)[None])
    return np.asarray(np.argsort(memory, axis=0, kind="stable")[:requested])
