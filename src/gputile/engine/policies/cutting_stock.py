"""What pieces of a card are worth: the dual prices of cutting cards into the fractions that pods ask for.

The linear programme: the fewest cards that hold so many pieces of each size (cutting stock). A small dense simplex on
NumPy solves it; new patterns are found by a knapsack, so the list of patterns is never written out. Sizes are whole
percent of a card.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

WHOLE = 100  # percent

Floats = NDArray[np.float64]

_PIVOTS = 2000  # far beyond what a hundred sizes need; a guard against rounding, not a tuning knob
_EPSILON = 1e-9
LEAVE = -1  # this percent of the card is left over


def prices(demand: Mapping[int, float]) -> dict[int, float]:
    """By size: the part of a card that one piece of it is worth, when all the demand is packed as well as can be."""
    sizes = sorted(size for size, wanted in demand.items() if 0 < size <= WHOLE and wanted > 0)
    if not sizes:
        return {}
    wanted = np.array([demand[size] for size in sizes])
    # A trace of a perturbation, so that no two bases are exactly as good and the simplex cannot turn in circles.
    duals, _ = solve(np.array(sizes), wanted / wanted.sum() + 1e-7 * np.arange(1, len(sizes) + 1))
    return {size: max(0.0, float(price)) for size, price in zip(sizes, duals, strict=True)}


def values(worth: Mapping[int, float]) -> Floats:
    """V(r) for r = 0..100 percent: the best-paying set of pieces that fits into a remainder r. V(100) is 1."""
    table = np.zeros(WHOLE + 1)
    for room in range(1, WHOLE + 1):
        fitting = [table[room - size] + price for size, price in worth.items() if size <= room]
        table[room] = max([table[room - 1], *fitting])
    return np.minimum(table / table[WHOLE], 1.0) if table[WHOLE] > 0 else np.arange(WHOLE + 1) / WHOLE


def solve(sizes: NDArray[np.int64], wanted: Floats) -> tuple[Floats, float]:
    """The prices and the number of cards. Primal simplex over patterns, from cards cut into one size only."""
    basis: Floats = np.diag((WHOLE // sizes).astype(np.float64))  # a pattern is a column: pieces of each size per card
    for _ in range(_PIVOTS):
        inverse = np.linalg.inv(basis)
        duals: Floats = inverse.sum(axis=0)  # every pattern costs one card
        pattern, worth = _best_pattern(sizes, duals)
        if worth <= 1.0 + _EPSILON:
            break
        cards, step = inverse @ wanted, inverse @ pattern
        ratios = np.where(step > _EPSILON, cards / np.where(step > _EPSILON, step, 1.0), np.inf)
        basis[:, int(ratios.argmin())] = pattern
    return duals, float((inverse @ wanted).sum())


def _best_pattern(sizes: NDArray[np.int64], duals: Floats) -> tuple[Floats, float]:
    """The best-paying way to cut one card (an unbounded knapsack in percent)."""
    best = np.zeros(WHOLE + 1)
    last = np.full(WHOLE + 1, LEAVE)
    for room in range(1, WHOLE + 1):
        fitting = int(np.searchsorted(sizes, room, side="right"))  # sizes are sorted
        best[room] = best[room - 1]
        if fitting:
            worth = best[room - sizes[:fitting]] + duals[:fitting]
            number = int(worth.argmax())
            if worth[number] > best[room] + _EPSILON:
                best[room], last[room] = worth[number], number
    pattern = np.zeros(len(sizes))
    room = WHOLE
    while room > 0:
        number = int(last[room])
        if number == LEAVE:
            room -= 1
        else:
            pattern[number] += 1
            room -= int(sizes[number])
    return pattern, float(best[WHOLE])
