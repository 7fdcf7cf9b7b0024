"""Which nodes fit, for all nodes at once. It must agree with `placing.place`, and a property test says it does.

One piece is a matter of counting cards. Two single-card pieces fit if one card bears both, or if each finds a card that
the other can do without. Anything harder is tried greedily on all nodes together; the few nodes where that fails
although each piece alone would fit are given to the scalar search.
"""

from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from gputile.engine.fleet.free_arrays import FreeArrays, Ints, Mask, anywhere, count
from gputile.engine.placement.units import PlacementUnit
from gputile.engine.search_budget import SearchBudget
from gputile.model.requests import Constraints, ContainerRequest, Strength

Rows = NDArray[np.intp]


class SearchContext:
    """What one question about many nodes may cost, and the nodes (rows) of which it found out nothing for that."""

    def __init__(self, budget: SearchBudget) -> None:
        self.budget = budget
        self.unsearched: set[int] = set()


class FeasibilityQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A request cut into pieces, with what is needed to answer it."""

    units: tuple[PlacementUnit, ...]
    rule: Constraints
    grid: FreeArrays
    eligible: Mask  # cards that satisfy the constraints and are in use
    numa: Ints
    linked: Callable[[Mask, int], Ints]  # (cards, at most): by node how many of them are all linked
    search: Callable[[Rows], Mask]  # the scalar search on these nodes
    inquiry: SearchContext


def nodes_that_fit(question: FeasibilityQuery) -> Mask:
    """Cards only; CPU and memory of the host are the caller's to check."""
    if not question.units:  # a pod without GPU: the host decides
        return np.ones(question.eligible.shape[1], dtype=np.bool_)
    groups = _independent(question.units)
    answer = _group_fits(groups[0], question)
    for group in groups[1:]:
        answer &= _group_fits(group, question)
    return answer


def is_simple(units: Sequence[PlacementUnit], rule: Constraints) -> bool:
    """Whether counting answers it, node by node: no search, and no set of cards that must be near each other."""
    return not _wants_sets(rule) and (len(units) < 2 or (len(units) == 2 and _simple(tuple(units), rule)))


def _independent(units: Sequence[PlacementUnit]) -> list[tuple[PlacementUnit, ...]]:
    """Groups that never run at the same time. A sidecar that outlives an init container ties all together."""
    if any(len(unit.phases()) > 1 for unit in units):
        return [tuple(units)]
    by_phase: dict[int, list[PlacementUnit]] = {}
    for unit in units:
        by_phase.setdefault(unit.phases()[0], []).append(unit)
    return [tuple(group) for group in by_phase.values()]


def _group_fits(units: tuple[PlacementUnit, ...], question: FeasibilityQuery) -> Mask:
    masks = [cards_that_fit(unit, question.grid, question.eligible, question.rule.idle) for unit in units]
    if len(units) == 1:
        return enough(units[0], masks[0], question)
    if len(units) == 2 and _simple(units, question.rule):
        return _pair_fits(units[0], units[1], masks, question)
    needed: Mask = np.logical_and.reduce([enough(p, m, question) for p, m in zip(units, masks, strict=True)])
    needed &= _sums_suffice(units, question)
    rows = np.flatnonzero(needed)
    unsure = rows if _wants_sets(question.rule) else rows[~_greedy(units, rows, question)]
    needed[unsure] = question.search(unsure)
    return needed


def _sums_suffice(units: Sequence[PlacementUnit], question: FeasibilityQuery) -> Mask:
    """Where the cards have as much left in sum as the pieces of one phase want; nothing else needs to be searched."""
    phase = min(unit.phases()[0] for unit in units)
    wanted = [(ask, unit) for unit in units for ask in unit.asks_in(phase)]
    grid, eligible = question.grid, question.eligible
    sums = (
        (grid.memory, sum(unit.cards * (ask.memory or 0) for ask, unit in wanted)),
        (grid.cores, sum(unit.cards * ask.cores for ask, unit in wanted)),
        (grid.slots, sum(unit.cards * unit.slots for _, unit in wanted)),
    )
    enough_of: list[Mask] = [(np.maximum(free, 0) * eligible).sum(axis=0) >= much for free, much in sums if much]
    return np.logical_and.reduce(enough_of) if enough_of else np.ones(eligible.shape[1], dtype=np.bool_)


def _simple(units: tuple[PlacementUnit, ...], rule: Constraints) -> bool:
    return all(unit.cards == 1 and unit.phases() == [0] for unit in units) and not _wants_sets(rule)


def _wants_sets(rule: Constraints) -> bool:
    return Strength.REQUIRE in (rule.numa, rule.links)


# ---- one piece ------------------------------------------------------------------------------------------------------


def cards_that_fit(unit: PlacementUnit, grid: FreeArrays, eligible: Mask, idle: bool) -> Mask:
    """The cards that could take this piece, if it came alone."""
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
    """Per card, where a percentage is asked for; else one number."""
    fixed = sum(ask.memory for ask in asks if ask.memory is not None)
    percents = [ask.memory_percent or 0 for ask in asks if ask.memory is None]
    if not percents:
        return fixed
    parts = [size if percent == 100 else _part(size, percent) for percent in percents]
    return sum(parts[1:], parts[0] + fixed if fixed else parts[0])


def _part(size: Ints, percent: int) -> Ints:
    return size * percent // 100


def enough(unit: PlacementUnit, mask: Mask, question: FeasibilityQuery) -> Mask:
    """Nodes with as many fitting cards as the piece wants, near enough to each other if that is required."""
    rule = question.rule
    if unit.cards == 1 and not _wants_sets(rule):
        return anywhere(mask)
    if rule.numa is Strength.REQUIRE:
        return _enough_on_one_numa(unit.cards, mask, question)
    plenty: Mask = count(mask) >= unit.cards
    if rule.links is Strength.REQUIRE:
        plenty &= question.linked(mask & plenty, unit.cards) >= unit.cards
    return plenty


def _enough_on_one_numa(wanted: int, mask: Mask, question: FeasibilityQuery) -> Mask:
    answer = np.zeros(mask.shape[1], dtype=np.bool_)
    for here in by_numa(mask, question):
        plenty = count(here) >= wanted
        if question.rule.links is Strength.REQUIRE:
            plenty &= question.linked(here & plenty, wanted) >= wanted
        answer |= plenty
    return answer


def by_numa(mask: Mask, question: FeasibilityQuery) -> Iterator[Mask]:
    """The cards of each NUMA node."""
    for numa in np.unique(question.numa[mask]):
        yield mask & (question.numa == numa)


# ---- several pieces -------------------------------------------------------------------------------------------------


def _pair_fits(one: PlacementUnit, other: PlacementUnit, masks: list[Mask], question: FeasibilityQuery) -> Mask:
    """Exact: on one card together, or on two different ones."""
    first, second = count(masks[0]), count(masks[1])
    contested = (first == 1) & (second == 1) & anywhere(masks[0] & masks[1])
    apart: Mask = (first >= 1) & (second >= 1) & ~contested
    if one.exclusive or other.exclusive:
        return apart
    both = msgspec.structs.replace(one, asks=one.asks + other.asks, alive=one.alive + other.alive)
    mask = cards_that_fit(both, question.grid, question.eligible, question.rule.idle)
    return apart | anywhere(mask)


def _greedy(units: tuple[PlacementUnit, ...], rows: Rows, question: FeasibilityQuery) -> Mask:
    """Hardest piece first, each onto the fullest cards that bear it, as if all ran at once. Success is proof."""
    grid, eligible = question.grid.columns(rows), question.eligible[:, rows]
    done = np.ones(len(rows), dtype=np.bool_)
    every = np.arange(len(rows))
    for unit in sorted(units, key=PlacementUnit.hardness, reverse=True):
        mask = cards_that_fit(unit, grid, eligible, question.rule.idle)
        done &= count(mask) >= unit.cards
        memory = memory_needed(unit.asks, grid.size)
        for chosen in _fullest(np.where(mask, grid.memory, np.iinfo(np.int64).max), unit.cards):
            grid.tenants[chosen, every] += 1  # an exclusive piece may not follow
            if unit.exclusive:
                grid.memory[chosen, every] = -1
                continue
            grid.memory[chosen, every] -= memory if isinstance(memory, int) else memory[chosen, every]
            grid.cores[chosen, every] -= sum(ask.cores for ask in unit.asks)
            grid.slots[chosen, every] -= unit.slots * len(unit.asks)
    return done


def _fullest(memory: Ints, wanted: int) -> Ints:
    """By node the positions of so many cards, those with the least memory first. The usual single one needs no sort."""
    if wanted == 1:
        return np.asarray(memory.argmin(axis=0)[None])
    return np.asarray(np.argsort(memory, axis=0, kind="stable")[:wanted])
