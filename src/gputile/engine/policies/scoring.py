"""Scores of the policies that learn, cached by request and updated only for nodes that changed.

`Scorer.scores` scores all nodes, `Scorer.card_scores_on` the cards of one node. `observe` and `refresh` learn the
workload. It reads the arrays of the fleet and never changes them.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from gputile.engine.fleet.feasibility import Rows
from gputile.engine.fleet.free_arrays import Ints, Mask
from gputile.engine.fleet.score_cache import kind_of
from gputile.engine.placement.shares import CARD, ask_share
from gputile.engine.placement.units import PlacementUnit, split
from gputile.engine.policies import tiling
from gputile.engine.policies.fragmentation import Floats, Fragments, NodeArrays
from gputile.engine.policies.workload_model import (
    PRICE_EVERY,
    LearntModel,
    Supply,
    TrainingData,
    WorkloadModel,
    WorkloadTables,
    cpu_asked_per_card,
    model_prices,
    tables,
    task_of,
)
from gputile.model.requests import PodRequest, Role

MOST_CACHED = 256  # requests
MOST_UNITS = 4  # placement units of one pod that are scored; the hardest ones
SCORED = 4096  # units times nodes, for a pod with more units than that: about 30 ms


class FleetView(Protocol):
    """What the scorer reads of the fleet."""

    def node_arrays(self, rows: Rows) -> NodeArrays: ...
    def tile_share(self, unit: PlacementUnit, rows: Rows) -> Ints: ...
    def cards_for(self, unit: PlacementUnit, request: PodRequest, rows: Rows) -> Mask: ...
    def touched_since(self, generation: int) -> Rows: ...
    def generation(self) -> int: ...
    def supply(self) -> Supply: ...
    def average_card(self) -> int: ...
    def node_prices(self, by_model: Floats) -> Floats: ...
    def card_prices(self, unit: PlacementUnit, row: int, by_model: Floats) -> Floats: ...
    def fullest(self, rows: Rows, most: int) -> Rows: ...
    def shape(self) -> tuple[int, int]: ...
    def model_count(self) -> int: ...


class RequestScores(msgspec.Struct):
    """Scores of a request on some nodes; for a single unit also by card, 0 where all cards are equal."""

    nodes: Floats
    cards: Floats  # card x node
    size: Floats = msgspec.field(default_factory=lambda: np.zeros(0))  # by node: the cards that the unit takes


class CachedScores(msgspec.Struct):
    """Scores of one request on all nodes, valid at this generation of the fleet."""

    nodes: Floats
    cards: NDArray[np.float32]
    generation: int = -1


class Scorer:
    """Learns the workload of a fleet and scores nodes and cards with it."""

    def __init__(self, fleet: FleetView) -> None:
        self._fleet = fleet
        self._learner = WorkloadModel()
        self._tables: WorkloadTables | None = None
        self._prices: Floats = np.ones(1)
        self._fixed = False  # the workload was given by `learn_all`, and is not learnt
        self._priced_at = 0  # arrivals
        self._starved = False
        self._learnt_count = 0
        self._cached: OrderedDict[tuple[object, ...], CachedScores] = OrderedDict()

    def over(self, fleet: FleetView) -> "Scorer":
        """The same with what was learnt so far, for a copy of this fleet or of a part of it."""
        self.tables()  # before the copy, so that it learns nothing of its own
        scorer = copy.copy(self)
        scorer._fleet, scorer._cached = fleet, OrderedDict()
        return scorer

    # ---- learning ---------------------------------------------------------------------------------------------------

    def observe(self, request: PodRequest) -> None:
        """Count a pod that arrived. Cheap; `refresh` does the expensive part when it is due."""
        if self._fixed:
            self._learner.arrivals += 1  # prices follow the cluster even when the workload is given
        else:
            self._learner.observe(task_of(request, self._fleet.average_card()))

    def refresh(self) -> None:
        """Update what is due: prices every hundred pods, tables at 100, 200, 400, ... pods."""
        if self.is_due():
            self.adopt(self.prepare())
        self.refresh_prices()

    def is_due(self) -> bool:
        """Whether new tables are due."""
        return self._tables is None or (self._learner.due() and not self._fixed)

    def refresh_prices(self) -> None:
        if self._learner.arrivals >= self._priced_at + PRICE_EVERY:
            self._price()

    def lesson(self) -> TrainingData:
        """The data that `refresh` would learn from, to be studied elsewhere and adopted later."""
        self._learner.begin()
        return TrainingData(dict(self._learner.asked()), self._fleet.supply())

    def lesson_from(self, requests: Iterable[PodRequest]) -> TrainingData:
        """The same from these pods only; earlier counts are ignored."""
        return TrainingData({}, self._fleet.supply(), tuple(requests), self._fleet.average_card())

    def prepare(self) -> WorkloadTables:
        """New tables beside the old ones; may be made elsewhere and adopted later."""
        return self._learner.prepare(self._fleet.supply())

    def adopt(self, new: WorkloadTables | LearntModel) -> None:
        if isinstance(new, LearntModel):
            self._learner = new.learner or self._learner
            new = new.tables
        self._tables = new
        self._cached.clear()
        self._price()

    def relearn(self, requests: Iterable[PodRequest]) -> None:
        self.adopt(self.lesson_from(requests).study())

    def learn_all(self, requests: list[PodRequest]) -> None:
        """Take the workload from a whole list at once, as the literature does, and stop learning."""
        counts = WorkloadModel(prior=0.0)
        for request in requests:
            counts.observe(task_of(request, self._fleet.average_card()))
        self._learner, self._fixed = counts, True
        self.adopt(tables(counts.asked(), self._fleet.supply()))

    def _price(self) -> None:
        supply = self._fleet.supply()
        self._learnt_count += 1
        self._priced_at = self._learner.arrivals
        self._prices = model_prices(self._learner.asked(), supply)
        asked = cpu_asked_per_card(self._learner.asked())
        self._starved = asked > supply.free_cpu / max(sum(supply.free), 1e-9)

    def tables(self) -> WorkloadTables:
        """The current tables; new ones if the fleet has a model that they lack."""
        accepts = None if self._tables is None else self._tables.accepts
        if self._tables is None or (accepts is not None and accepts.shape[1] < self._fleet.model_count()):
            value = (
                None if self._tables is None else self._tables.value
            )  # the worth of remainders does not depend on models
            self.adopt(self._learner.prepare(self._fleet.supply(), value))
        assert self._tables is not None
        return self._tables

    # ---- scores ----------------------------------------------------------------------------------------------------

    def lessons(self) -> int:
        """Counts the updates of what was learnt: while it is the same, unchanged nodes keep their scores."""
        self.tables()
        return self._learnt_count

    def scores(self, request: PodRequest, policy: str, rows: Rows | None = None) -> Floats:
        """By row (of these rows, or of all): the node's score; undefined where the pod does not fit."""
        selected = slice(None) if rows is None else rows
        known = self._up_to_date(request, policy).nodes[selected]
        scarcity = self._scarcity(request, policy, selected)
        return known if scarcity is None else known - scarcity

    def _scarcity(self, request: PodRequest, policy: str, rows: Rows | slice) -> Floats | None:
        """By row: the penalty for scarce cards; None where it does not apply."""
        average = self._fleet.average_card()
        main = [ask for ask in request.asks if ask.role is not Role.INIT]
        size = sum(ask.cards * ask_share(ask, average) for ask in main) / CARD
        if policy != "tiling" or not size:
            return None
        return np.asarray(tiling.SCARCITY * size * self._fleet.node_prices(self._prices)[rows])

    def scores_where(self, fitting: Mask, request: PodRequest, policy: str) -> Floats:
        """By row: the score where the pod fits, minus infinity elsewhere.

        A pod of many containers is hardly ever like another pod, so its scores are not cached. It is scored only on the
        fullest nodes that fit, because scoring all would delay other pods; the other nodes rank after them.
        """
        units = split(request)
        if len(units) <= MOST_UNITS:
            return np.where(fitting, self.scores(request, policy)[: len(fitting)], -np.inf)
        rows = np.flatnonzero(fitting)
        closely = self._fleet.fullest(rows, SCORED // MOST_UNITS)
        answer = np.full(len(fitting), -np.inf)
        current = self.tables()
        scores = RULES[policy](request, self._fleet, closely, current, self._starved).nodes
        scarcity = self._scarcity(request, policy, closely)
        scores = scores if scarcity is None else scores - scarcity
        answer[rows] = scores.min() - 1.0
        answer[closely] = scores
        return answer

    def card_scores_on(self, request: PodRequest, row: int, policy: str) -> Callable[[PlacementUnit], list[float]]:
        """By unit: its scores by card of one node, larger is better."""
        units = split(request)
        if len(units) == 1:
            known: Floats = self._up_to_date(request, policy).cards[:, row].astype(np.float64)
            return lambda unit: self._priced(known, unit, row, policy)
        rows = np.array([row])
        fragments = Fragments(self._fleet.node_arrays(rows), self.tables())

        def scores(unit: PlacementUnit) -> list[float]:
            scored = _unit_scores(unit, request, self._fleet, rows, fragments, self.tables(), policy, request.cpu)
            return self._priced(scored.cards[:, 0], unit, row, policy)

        return scores

    def _priced(self, scores: Floats, unit: PlacementUnit, row: int, policy: str) -> list[float]:
        if policy == "tiling":
            scores = scores - tiling.SCARCITY * self._fleet.card_prices(unit, row, self._prices)
        return [float(score) for score in scores]

    def _up_to_date(self, request: PodRequest, policy: str) -> CachedScores:
        current = self.tables()  # before the key: new tables clear the cached scores
        key = _key(request, policy, self._starved)
        known = self._cached.get(key)
        shape = self._fleet.shape()
        if known is None or known.cards.shape != shape:
            known = self._cached[key] = CachedScores(np.zeros(shape[1]), np.zeros(shape, dtype=np.float32))
            if len(self._cached) > MOST_CACHED:
                self._cached.popitem(last=False)
        if known.generation != self._fleet.generation() and len(rows := self._fleet.touched_since(known.generation)):
            fresh = RULES[policy](request, self._fleet, rows, current, self._starved)
            known.nodes[rows], known.cards[:, rows] = fresh.nodes, fresh.cards
            known.generation = self._fleet.generation()
        self._cached.move_to_end(key)
        return known


def _key(request: PodRequest, policy: str, starved: bool) -> tuple[object, ...]:
    return (policy, starved, kind_of(request))


# ---- the rules: scores of some nodes --------------------------------------------------------------------------------

Rule = Callable[[PodRequest, FleetView, Rows, WorkloadTables, bool], RequestScores]


def _scored(units: Sequence[PlacementUnit]) -> list[PlacementUnit]:
    """The units that decide the score, in the pod's order."""
    hardest = sorted(range(len(units)), key=lambda number: units[number].hardness(), reverse=True)[:MOST_UNITS]
    return [units[number] for number in sorted(hardest)]


def _tiling(request: PodRequest, fleet: FleetView, rows: Rows, current: WorkloadTables, starved: bool) -> RequestScores:
    arrays, units = fleet.node_arrays(rows), _scored(split(request))
    fragments = Fragments(arrays, current)
    if not units:
        return RequestScores(
            tiling.cpu_pod_scores(arrays, request.cpu, current, fragments, starved=starved),
            np.zeros(arrays.share.shape),
        )
    parts = [  # the CPU of the pod counts once
        _unit_scores(unit, request, fleet, rows, fragments, current, "tiling", 0 if number else request.cpu)
        for number, unit in enumerate(units)
    ]
    size = sum((part.size for unit, part in zip(units, parts, strict=True) if 0 in unit.phases()), np.zeros(len(rows)))
    nodes = tiling.node_scores(arrays, size, request.cpu, current)
    return RequestScores(sum((part.nodes for part in parts), nodes), parts[0].cards)


def _fragmentation(
    request: PodRequest, fleet: FleetView, rows: Rows, current: WorkloadTables, starved: bool
) -> RequestScores:
    """FGD as published; of several containers the one with the most cards decides."""
    arrays, units = fleet.node_arrays(rows), split(request)
    fragments = Fragments(arrays, current)
    if not units:
        return RequestScores(_logistic(fragments.gain_of_cpu(request.cpu)), np.zeros(arrays.share.shape))
    unit = max(units, key=lambda unit: unit.cards)
    return _unit_scores(unit, request, fleet, rows, fragments, current, "fragmentation", request.cpu)


def _unit_scores(
    unit: PlacementUnit,
    request: PodRequest,
    fleet: FleetView,
    rows: Rows,
    fragments: Fragments,
    current: WorkloadTables,
    policy: str,
    cpu: int,
) -> RequestScores:
    """One unit by itself: by card, and by node the sum over the best cards that fit."""
    arrays = fragments.arrays
    if unit.exclusive:
        gain = fragments.gain_of_whole_cards(unit.cards, cpu)
        nodes = tiling.GAIN * gain if policy == "tiling" else _logistic(gain)
        return RequestScores(nodes, np.zeros(arrays.share.shape), np.full(len(rows), float(unit.cards)))
    tile, fitting = fleet.tile_share(unit, rows), fleet.cards_for(unit, request, rows)
    gain = fragments.gain_of_tiles(tile, cpu)
    cards = tiling.tile_scores(arrays, tile, current, gain) if policy == "tiling" else _logistic(gain)
    size = unit.cards * np.where(fitting, tile, 0).max(axis=0) / CARD  # the largest share on a card that fits
    return RequestScores(_best_cards(cards, fitting, unit.cards), cards, size)


def _logistic(gain: Floats) -> Floats:
    """Whole percent of a logistic curve, so that many nodes tie."""
    return np.floor(100.0 / (1.0 + np.exp(-gain)))


def _best_cards(scores: Floats, fitting: Mask, count: int) -> Floats:
    """Node: the sum over the best cards that fit."""
    masked = np.where(fitting, scores, -1e6)
    if count == 1:
        return np.asarray(masked.max(axis=0))
    return np.asarray(np.sort(masked, axis=0)[-count:].sum(axis=0))


RULES: dict[str, Rule] = {"fragmentation": _fragmentation, "tiling": _tiling}
"""The policies that learn, by name."""
