"""Topology: which cards of a node are closest to each other.

Links are integers per pair of cards (`Node.links`); larger is closer, 0 is no link. Their scale does not matter: HAMi's
pair scores and vgpu-manager's link types both work.
"""

from collections.abc import Callable, Sequence
from itertools import combinations
from math import comb

Link = Callable[[int, int], int]  # by card position

EXHAUSTIVE = 2000
"""Up to this many sets are all compared; beyond it, the set grows greedily by the closest card."""


LINKS_PER_STEP = 300
"""How many links can be read in the time of one search step."""


def closeness(chosen: Sequence[int], link: Link) -> int:
    """The sum of links inside a set of cards."""
    return sum(link(card, other) for card, other in combinations(chosen, 2))


def all_linked(chosen: Sequence[int], link: Link) -> bool:
    return all(link(card, other) > 0 for card, other in combinations(chosen, 2))


def closest(fixed: Sequence[int], candidates: Sequence[int], more: int, link: Link) -> list[int]:
    """`fixed` and `more` of the candidates, as closely linked as possible; the first of equal sets."""
    if comb(len(candidates), more) <= EXHAUSTIVE:
        sets = ([*fixed, *chosen] for chosen in combinations(candidates, more))
        return max(sets, key=lambda chosen: closeness(chosen, link))
    starts = [[*fixed, start] for start in candidates] if not fixed else [list(fixed)]
    grown = [_grow(start, candidates, len(fixed) + more, link) for start in starts]
    return max(grown, key=lambda chosen: closeness(chosen, link))


def cost_of_closest(candidates: int, requested: int) -> int:
    """The approximate cost of `closest`, in search steps."""
    sets = comb(candidates, requested)
    return (sets * requested**2 if sets <= EXHAUSTIVE else candidates**2 * requested) // LINKS_PER_STEP


def _grow(chosen: list[int], candidates: Sequence[int], size: int, link: Link) -> list[int]:
    while len(chosen) < size:
        rest = [card for card in candidates if card not in chosen]
        chosen = [*chosen, max(rest, key=lambda card: sum(link(card, other) for other in chosen))]
    return chosen


def largest_linked(candidates: Sequence[int], most: int, link: Link) -> int:
    """The size, at most `most`, of the largest set whose cards are all linked; a lower bound on huge nodes.

    Depth first, with an explicit stack: the number of cards of the node decides how deep it goes.
    """
    best = 0
    stack = [list(candidates)]  # by size of the set: the cards that may still join it, the next one first
    for _ in range(EXHAUSTIVE * 20):
        rest, size = stack[-1], len(stack) - 1
        best = max(best, size)
        if best >= most:
            break
        if size + len(rest) > best:
            card = rest.pop(0)
            stack.append([other for other in rest if link(card, other) > 0])
        elif size:
            stack.pop()  # even with all of the rest it would not be larger than the best
        else:
            break
    return best
