"""Scores of the policies that learn, cached by request and updated only for nodes that changed.

`Scorer.scores` scores all nodes, `Scorer.card_scores_on` the cards of one node. `observe` and `refresh` learn the
workload. It reads the arrays of the fleet and never changes them.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec
import numpy as np

from gputile.engine.fleet.feasibility import Rows, is_simple
from gputile.engine.fleet.free_arrays import Ints, Mask
from gputile.engine.fleet.score_cache import CachedScores, ScoreCache, State, ignores_names, kind_of
from gputile.engine.placement.shares import CARD, ask_share
from gputile.engine.placement.units import PlacementUnit, split
from gputile.engine.policies.fragmentation import Floats, Fragments, NodeArrays
from gputile.engine.policies.table import MOST_UNITS, POLICIES, LearntScores
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

SCORED = 4096  # units times nodes, for a pod with more units than that: about 30 ms
FEW = 4  # up to so many changed nodes are looked up by state, which is then cheaper than scoring them all


class FleetView(Protocol):
    """What the scorer reads of the fleet."""

    def node_arrays(self, rows: Rows) -> NodeArrays: ...
    def tile_share(self, unit: PlacementUnit, rows: Rows) -> Ints: ...
    def cards_for(self, unit: PlacementUnit, request: PodRequest, rows: Rows) -> Mask: ...
    def fits_on(self, request: PodRequest, rows: Rows) -> Mask: ...
    def state(self, row: int) -> State: ...
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
        self._cache = ScoreCache()

    def over(self, fleet: FleetView) -> "Scorer":
        """The same with what was learnt so far, for a copy of this fleet or of a part of it."""
        self.tables()  # before the copy, so that it learns nothing of its own
        scorer = copy.copy(self)
        scorer._fleet, scorer._cache = fleet, ScoreCache(self._cache)
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
        """The data that `refresh` would learn from: study it in a thread and `adopt` the result here."""
        self._learner.begin()
        return TrainingData(dict(self._learner.asked()), self._fleet.supply())

    def lesson_from(self, requests: Iterable[PodRequest]) -> TrainingData:
        """The same from these pods only; earlier counts are ignored."""
        return TrainingData({}, self._fleet.supply(), tuple(requests), self._fleet.average_card())

    def prepare(self) -> WorkloadTables:
        """New tables beside those in use; pass them to `adopt` later."""
        return self._learner.prepare(self._fleet.supply())

    def adopt(self, new: WorkloadTables | LearntModel) -> None:
        if isinstance(new, LearntModel):
            self._learner = new.learner or self._learner
            new = new.tables
        self._tables = new
        self._cache.clear()
        self._price()

    def relearn(self, requests: Iterable[PodRequest]) -> None:
        """After a restart: forget everything, and learn from the pods of the cluster."""
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
        self._cache.drop_choices()
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

    def scores(self, request: PodRequest, policy: str) -> Floats:
        """By row: the node's score. Where the pod does not fit it is minus infinity for a request that `is_simple`, and
        undefined for others."""
        known = self._up_to_date(request, policy).nodes
        scarcity = self._scarcity(request, policy, slice(None))
        return known if scarcity is None else known - scarcity

    def _scarcity(self, request: PodRequest, policy: str, rows: Rows | slice) -> Floats | None:
        """By row: the penalty for scarce cards; None where it does not apply."""
        weight, average = _learnt(policy).scarcity, self._fleet.average_card()
        main = [ask for ask in request.asks if ask.role is not Role.INIT] if weight else []
        size = sum(ask.cards * ask_share(ask, average) for ask in main) / CARD
        return np.asarray(weight * size * self._fleet.node_prices(self._prices)[rows]) if size else None

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
        scores = self._pod_on(request, policy, closely).scores(self._starved).nodes
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
        pod = self._pod_on(request, policy, np.array([row]))
        return lambda unit: self._priced(pod.unit_scores(unit, request.cpu).cards[:, 0], unit, row, policy)

    def _priced(self, scores: Floats, unit: PlacementUnit, row: int, policy: str) -> list[float]:
        weight = _learnt(policy).scarcity
        if weight:
            scores = scores - weight * self._fleet.card_prices(unit, row, self._prices)
        return [float(score) for score in scores]

    def choices(self, request: PodRequest, policy: str) -> dict[State, int]:
        """By state of a node: the position of the card that was chosen there, at the present prices."""
        return self._cached(request, policy).choices

    def _up_to_date(self, request: PodRequest, policy: str) -> CachedScores:
        known = self._cached(request, policy)
        if known.generation != self._fleet.generation():
            self._update(known, request, policy)
            known.generation = self._fleet.generation()
        return known

    def _cached(self, request: PodRequest, policy: str) -> CachedScores:
        self.tables()  # new tables empty the cache
        simple = is_simple(split(request), request.constraints)
        return self._cache.of((policy, self._starved, simple, kind_of(request)), self._fleet.shape())

    def _update(self, known: CachedScores, request: PodRequest, policy: str) -> None:
        """Score the nodes that changed. If they are few, states that were scored before are not scored again."""
        rows = self._fleet.touched_since(known.generation)
        if len(rows) > FEW or not ignores_names(request.constraints):
            known.nodes[rows], known.cards[:, rows] = self._scored(request, policy, rows)
            return
        state_of = {row: self._fleet.state(row) for row in rows.tolist()}
        new = [row for row, state in state_of.items() if state not in known.states]
        if new:
            nodes, cards = self._scored(request, policy, np.array(new))
            for column, row in enumerate(new):
                known.states[state_of[row]] = float(nodes[column]), cards[:, column].astype(np.float32)
        for row, state in state_of.items():
            known.nodes[row], known.cards[:, row] = known.states[state]

    def _scored(self, request: PodRequest, policy: str, rows: Rows) -> tuple[Floats, Floats]:
        fresh = self._pod_on(request, policy, rows).scores(self._starved)
        if not is_simple(split(request), request.constraints):
            return fresh.nodes, fresh.cards
        return np.where(self._fleet.fits_on(request, rows), fresh.nodes, -np.inf), fresh.cards

    def _pod_on(self, request: PodRequest, policy: str, rows: Rows) -> "_PodOnNodes":
        return _PodOnNodes(request, _learnt(policy), self._fleet, rows, self.tables())


def _learnt(policy: str) -> LearntScores:
    learnt = POLICIES[policy].learnt
    assert learnt is not None, "the policy does not learn"
    return learnt


# ---- scores of some nodes -------------------------------------------------------------------------------------------


class _PodOnNodes:
    """One pod and the nodes that it is scored on, under one policy."""

    def __init__(
        self, request: PodRequest, policy: LearntScores, fleet: FleetView, rows: Rows, current: WorkloadTables
    ) -> None:
        self._request, self._policy, self._fleet, self._rows = request, policy, fleet, rows
        self._fragments = Fragments(fleet.node_arrays(rows), current)
        self._no_cards = np.zeros(self._fragments.arrays.share.shape)

    def scores(self, starved: bool) -> RequestScores:
        """The whole pod: the sum over its units, and what counts once. `starved`: the cluster is short of CPU."""
        policy, cpu = self._policy, self._request.cpu
        units = policy.units(split(self._request))
        if not units:
            return RequestScores(policy.cpu_pod(self._fragments, cpu, starved), self._no_cards)
        parts = [self.unit_scores(unit, 0 if number else cpu) for number, unit in enumerate(units)]  # CPU counts once
        main = [part.size for unit, part in zip(units, parts, strict=True) if 0 in unit.phases()]
        once = policy.pod(self._fragments, sum(main, np.zeros(len(self._rows))), cpu)
        return RequestScores(sum((part.nodes for part in parts), once), parts[0].cards)

    def unit_scores(self, unit: PlacementUnit, cpu: int) -> RequestScores:
        """One unit by itself: by card, and by node the sum over the best cards that fit."""
        policy, fragments, rows = self._policy, self._fragments, self._rows
        if unit.exclusive:
            nodes = policy.whole_cards(fragments.gain_of_whole_cards(unit.cards, cpu))
            return RequestScores(nodes, self._no_cards, np.full(len(rows), float(unit.cards)))
        tile, fitting = self._fleet.tile_share(unit, rows), self._fleet.cards_for(unit, self._request, rows)
        cards = policy.tiles(fragments, tile, fragments.gain_of_tiles(tile, cpu))
        size = unit.cards * np.where(fitting, tile, 0).max(axis=0) / CARD  # the largest share on a card that fits
        return RequestScores(_best_cards(cards, fitting, unit.cards), cards, size)


def _best_cards(scores: Floats, fitting: Mask, count: int) -> Floats:
    """Node: the sum over the best cards that fit."""
    masked = np.where(fitting, scores, -1e6)
    if count == 1:
        return np.asarray(masked.max(axis=0))
    return np.asarray(np.sort(masked, axis=0)[-count:].sum(axis=0))
