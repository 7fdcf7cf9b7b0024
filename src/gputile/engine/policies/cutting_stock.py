"""The worth of fractions of a card: the dual prices of the cutting-stock problem for the fractions that pods request.

The linear programme: the fewest cards that hold so many pieces of each size. A small dense simplex on NumPy solves it;
a knapsack finds new patterns (column generation), so the list of patterns is never written out. Sizes are whole percent
of a card.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

WHOLE = 100  # percent

Floats = NDArray[np.float64]

_PIVOTS = 2000  # far beyond what a hundred sizes need; a guard against rounding, not a tuning knob
_EPSILON = 1e-9
LEAVE = -1  # marks a percent of the card that is left over


def prices(demand: Mapping[int, float]) -> dict[int, float]:
    """By size: the part of a card that one piece of it is worth, when all the demand is packed optimally."""
    sizes = sorted(size for size, count in demand.items() if 0 < size <= WHOLE and count > 0)
    if not sizes:
        return {}
    counts = np.array([demand[size] for size in sizes])
    # A small perturbation, so that no two bases are equally good and the simplex cannot cycle.
    duals, _ = solve(np.array(sizes), counts / counts.sum() + 1e-7 * np.arange(1, len(sizes) + 1))
    return {size: max(0.0, float(price)) for size, price in zip(sizes, duals, strict=True)}


def values(worth: Mapping[int, float]) -> Floats:
    """V(r) for r = 0..100 percent: the best-paying set of pieces that fits into a remainder r. V(100) is 1."""
    table = np.zeros(WHOLE + 1)
    for space in range(1, WHOLE + 1):
        fitting = [table[space - size] + price for size, price in worth.items() if size <= space]
        table[space] = max([table[space - 1], *fitting])
    return np.minimum(table / table[WHOLE], 1.0) if table[WHOLE] > 0 else np.arange(WHOLE + 1) / WHOLE


def solve(sizes: NDArray[np.int64], counts: Floats) -> tuple[Floats, float]:
    """The prices and the number of cards. Primal simplex over patterns, from cards cut into one size only."""
    basis: Floats = np.diag((WHOLE // sizes).astype(np.float64))  # a pattern is a column: pieces of each size per card
    for _ in range(_PIVOTS):
        inverse = np.linalg.inv(basis)
        duals: Floats = inverse.sum(axis=0)  # every pattern costs one card
        pattern, worth = _best_pattern(sizes, duals)
        if worth <= 1.0 + _EPSILON:
            break
        cards, step = inverse @ counts, inverse @ pattern
        ratios = np.where(step > _EPSILON, cards / np.where(step > _EPSILON, step, 1.0), np.inf)
        basis[:, int(ratios.argmin())] = pattern
    return duals, float((inverse @ counts).sum())


def _best_pattern(sizes: NDArray[np.int64], duals: Floats) -> tuple[Floats, float]:
    """The best-paying way to cut one card (an unbounded knapsack in percent)."""
    best = np.zeros(WHOLE + 1)
    last = np.full(WHOLE + 1, LEAVE)
    for space in range(1, WHOLE + 1):
        fitting = int(np.searchsorted(sizes, space, side="right"))  # sizes are sorted
        best[space] = best[space - 1]
        if fitting:
            worth = best[space - sizes[:fitting]] + duals[:fitting]
            number = int(worth.argmax())
            if worth[number] > best[space] + _EPSILON:
                best[space], last[space] = worth[number], number
    pattern = np.zeros(len(sizes))
    space = WHOLE
    while space > 0:
        number = int(last[space])
        if number == LEAVE:
            space -= 1
        else:
            pattern[number] += 1
            space -= int(sizes[number])
    return pattern, float(best[WHOLE])
