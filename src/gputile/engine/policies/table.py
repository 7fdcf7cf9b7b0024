"""Placement policies: how to choose among nodes and cards that fit. A policy is one row of `POLICIES`; one that learns
also names the functions that score with the learnt tables. Its name is in `model.policies`.

Node scores: larger is better. `binpack` (BestFit) leaves the least and `spread` (least allocated) the most, of CPU and
GPU in equal parts, as the literature compares them; `topology` is binpack among the nodes with the best-linked cards.
Card ranks: smaller comes first; ties go to the better-linked set, then to the lower index.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from gputile.engine.fleet.free_arrays import Ints
from gputile.engine.placement.shares import CARD, free_capacity_share
from gputile.engine.placement.units import PlacementUnit
from gputile.engine.policies import fragmentation, tiling
from gputile.engine.policies.fragmentation import Floats, Fragments
from gputile.model.cards import Card, FreeCapacity
from gputile.model.errors import InputError
from gputile.model.policies import DEFAULT_POLICY
from gputile.model.units import Millicores

Scores: TypeAlias = NDArray[np.floating[Any]]
Rank: TypeAlias = tuple[float, ...]

LARGE_NODE_CPU = 128_000  # millicores
LARGE_NODE_CARDS = 8 * CARD
MOST_UNITS = 4  # placement units of one pod that are scored; the hardest ones


class RemainingCapacity(msgspec.Struct, frozen=True):
    """By node: what would be left after the pod is placed, as arrays over the fleet."""

    cpu_left: Scores  # millicores
    share_left: Scores  # in shares.CARD
    closeness: Scores | None  # of the best-linked set of cards; None when the policy ignores links


NodeScore: TypeAlias = Callable[[RemainingCapacity, int], Scores]
CardRank: TypeAlias = Callable[[Card, FreeCapacity, int, int], Rank]


def hardest(units: Sequence[PlacementUnit]) -> list[PlacementUnit]:
    """The few units that are hardest to place, in the pod's order."""
    ranked = sorted(range(len(units)), key=lambda number: units[number].hardness(), reverse=True)[:MOST_UNITS]
    return [units[number] for number in sorted(ranked)]


def most_cards(units: Sequence[PlacementUnit]) -> list[PlacementUnit]:
    """The unit that requests most cards, alone."""
    return [max(units, key=lambda unit: unit.cards)] if units else []


def _nothing(fragments: Fragments, size: Floats, cpu: Millicores) -> Floats:
    return np.zeros(len(size))


class LearntScores(msgspec.Struct, frozen=True, kw_only=True):
    """How a policy scores some nodes with what was learnt. `scoring` adds the scores up and caches them."""

    tiles: Callable[[Fragments, Ints, Floats], Floats]  # card x node: a tile with this share of the card and this gain
    whole_cards: Callable[[Floats], Floats]  # by node: whole cards with this gain
    cpu_pod: Callable[[Fragments, Millicores, bool], Floats]  # by node: a pod without GPU; whether CPU is short
    pod: Callable[[Fragments, Floats, Millicores], Floats] = _nothing  # by node: what counts once per pod of this size
    units: Callable[[Sequence[PlacementUnit]], list[PlacementUnit]] = hardest  # those that are scored
    scarcity: float = 0.0  # the weight of the prices of the models


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """One way to choose nodes and cards. The same `seed` gives the same random choice."""

    score_nodes: NodeScore  # (sums, seed)
    rank_card: CardRank  # (card, what is free on it, its links to the other idle cards, seed)
    learnt: LearntScores | None = None  # then the two functions above are for callers without a fleet
    by_links: bool = False  # several cards of one container: the best-linked set first
    chosen: str = "best"  # what the chosen node is among the feasible ones, for people


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
    "binpack": Policy(score_nodes=_best_fit, rank_card=_tightest, chosen="fullest"),
    "spread": Policy(score_nodes=_most_left, rank_card=_emptiest, chosen="emptiest"),
    "random": Policy(score_nodes=_chance, rank_card=_any_card, chosen="random choice"),
    "topology": Policy(score_nodes=_linked, rank_card=_least_linked, by_links=True, chosen="best linked"),
    "fragmentation": Policy(
        score_nodes=_best_fit,
        rank_card=_tightest,
        learnt=LearntScores(
            tiles=fragmentation.tile_scores,
            whole_cards=fragmentation.logistic,
            cpu_pod=fragmentation.cpu_pod_scores,
            units=most_cards,
        ),
        chosen="least fragmented",
    ),
    "tiling": Policy(
        score_nodes=_best_fit,
        rank_card=_tightest,
        learnt=LearntScores(
            tiles=tiling.tile_scores,
            whole_cards=tiling.whole_card_scores,
            cpu_pod=tiling.cpu_pod_scores,
            pod=tiling.node_scores,
            scarcity=tiling.SCARCITY,
        ),
    ),
}


def first_named(*names: str | None) -> str:
    """The first policy that is named, or the default."""
    name = next((name for name in names if name), DEFAULT_POLICY)
    if name not in POLICIES:
        raise InputError(f"policy {name!r}: does not exist; use one of {', '.join(POLICIES)}")
    return name
