"""Placement policies: how to choose among nodes and cards that fit. A policy is one row of `POLICIES`.

Node scores: larger is better. `binpack` (BestFit) leaves the least and `spread` (least allocated) the most, of CPU and
GPU in equal parts, as the literature compares them; `topology` is binpack among the nodes with the best-linked cards.
Card ranks: smaller comes first; ties go to the better-linked set, then to the lower index.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from gputile.engine.placement.shares import CARD, free_capacity_share
from gputile.model.cards import Card, FreeCapacity
from gputile.model.errors import InputError

Scores: TypeAlias = NDArray[np.floating[Any]]
Rank: TypeAlias = tuple[float, ...]

LARGE_NODE_CPU = 128_000  # millicores
LARGE_NODE_CARDS = 8 * CARD


class RemainingCapacity(msgspec.Struct, frozen=True):
    """By node: what would be left after the pod is placed, as arrays over the fleet."""

    cpu_left: Scores  # millicores
    share_left: Scores  # in shares.CARD
    closeness: Scores | None  # of the best-linked set of cards; None when the policy ignores links


NodeScore: TypeAlias = Callable[[RemainingCapacity, int], Scores]
CardRank: TypeAlias = Callable[[Card, FreeCapacity, int, int], Rank]


class Policy(msgspec.Struct, frozen=True):
    """One way to choose nodes and cards. The same `seed` gives the same random choice."""

    score_nodes: NodeScore  # (sums, seed)
    rank_card: CardRank  # (card, what is free on it, its links to the other idle cards, seed)
    learns: bool = False  # scored by `scoring`; the two functions above are for callers without a fleet
    by_links: bool = False  # several cards of one container: the best-linked set first


def _best_fit(sums: RemainingCapacity, seed: int) -> Scores:
    cpu: Scores = sums.cpu_left * (50.0 / LARGE_NODE_CPU)
    cards: Scores = sums.share_left * (50.0 / LARGE_NODE_CARDS)
    return np.subtract(100.0, cpu + cards, dtype=np.float64)


def _most_left(sums: RemainingCapacity, seed: int) -> Scores:
    """In whole percent, so that nodes that are about as empty tie and kube-scheduler's other scores decide."""
    return np.floor(np.subtract(100.0, _best_fit(sums, seed)))


def _chance(sums: RemainingCapacity, seed: int) -> Scores:
    rows = np.arange(len(sums.cpu_left), dtype=np.uint64)
    return (mixed(rows, seed) >> np.uint64(11)) * (100.0 / 2**53)


def _linked(sums: RemainingCapacity, seed: int) -> Scores:
    closeness = np.zeros(len(sums.cpu_left)) if sums.closeness is None else sums.closeness
    return closeness * 1000.0 + _best_fit(sums, seed)


def mixed(numbers: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Integers hashed to 64 bits (the finaliser of splitmix64)."""
    with np.errstate(over="ignore"):
        mixed = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed & 0xFFFFFFFFFFFFFFFF)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(mixed ^ (mixed >> np.uint64(31)))


def _tightest(card: Card, free: FreeCapacity, links: int, seed: int) -> Rank:
    return (free_capacity_share(card, free), free.memory)


def _emptiest(card: Card, free: FreeCapacity, links: int, seed: int) -> Rank:
    return (-free_capacity_share(card, free), -free.memory)


def _any_card(card: Card, free: FreeCapacity, links: int, seed: int) -> Rank:
    return (int(mixed(np.array([card.index + 1], dtype=np.uint64), seed)[0]),)


def _least_linked(card: Card, free: FreeCapacity, links: int, seed: int) -> Rank:
    """A single card leaves the well-linked cards to pods that request several."""
    return (links, *_tightest(card, free, links, seed))


POLICIES: dict[str, Policy] = {
    "binpack": Policy(_best_fit, _tightest),
    "spread": Policy(_most_left, _emptiest),
    "random": Policy(_chance, _any_card),
    "topology": Policy(_linked, _least_linked, by_links=True),
    "fragmentation": Policy(_best_fit, _tightest, learns=True),
    "tiling": Policy(_best_fit, _tightest, learns=True),
}
DEFAULT_POLICY = "tiling"


def first_named(*names: str | None) -> str:
    """The first policy that is named, or the default."""
    name = next((name for name in names if name), DEFAULT_POLICY)
    if name not in POLICIES:
        raise InputError(f"policy {name!r}: does not exist; use one of {', '.join(POLICIES)}")
    return name
