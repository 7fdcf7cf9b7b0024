"""Which cards are closest to each other.

Links are whole numbers per pair of cards (`Node.links`), larger is closer, 0 is no link. Nobody needs to know what the
numbers mean: HAMi's pair scores and vgpu-manager's link types both serve.
"""

from collections.abc import Callable, Sequence
from itertools import combinations
from math import comb

Link = Callable[[int, int], int]  # by card position

EXHAUSTIVE = 2000
"""Up to so many sets are all looked at; beyond, cards are added one by one to the set they are closest to."""


LINKS_PER_STEP = 300
"""Looks at a link that take as long as one step of a search."""


def closeness(chosen: Sequence[int], link: Link) -> int:
    """The sum of links inside a set of cards."""
    return sum(link(one, other) for one, other in combinations(chosen, 2))


def all_linked(chosen: Sequence[int], link: Link) -> bool:
    return all(link(one, other) > 0 for one, other in combinations(chosen, 2))


def closest(fixed: Sequence[int], candidates: Sequence[int], more: int, link: Link) -> list[int]:
    """`fixed` and `more` of the candidates, as closely linked as can be; the first best in their order."""
    if comb(len(candidates), more) <= EXHAUSTIVE:
        sets = ([*fixed, *chosen] for chosen in combinations(candidates, more))
        return max(sets, key=lambda chosen: closeness(chosen, link))
    starts = [[*fixed, start] for start in candidates] if not fixed else [list(fixed)]
    grown = [_grow(start, candidates, len(fixed) + more, link) for start in starts]
    return max(grown, key=lambda chosen: closeness(chosen, link))


def cost_of_closest(candidates: int, wanted: int) -> int:
    """About what `closest` costs, in steps of a search."""
    sets = comb(candidates, wanted)
    return (sets * wanted * wanted if sets <= EXHAUSTIVE else candidates**2 * wanted) // LINKS_PER_STEP


def _grow(chosen: list[int], candidates: Sequence[int], size: int, link: Link) -> list[int]:
    while len(chosen) < size:
        rest = [card for card in candidates if card not in chosen]
        chosen = [*chosen, max(rest, key=lambda card: sum(link(card, other) for other in chosen))]
    return chosen


def largest_linked(candidates: Sequence[int], most: int, link: Link) -> int:
    """The size, at most `most`, of the largest set of which all cards are linked; a lower bound on huge nodes.

    Depth first, with a stack of our own: how deep it goes, the cards of the node decide.
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
            stack.pop()  # all that may join would make it no larger than one that was found
        else:
            break
    return best
