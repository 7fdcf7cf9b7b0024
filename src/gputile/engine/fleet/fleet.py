"""The fleet: which nodes fit, which are best, and why the others do not fit, for all nodes at once.

`Fleet.best` answers a filter call, `Fleet.place` chooses the cards, `Fleet.refusals` gives the reasons. `hold` and
`release` keep the arrays up to date, `Fleet.scorer` learns from the pods that arrive. It runs in one thread and does no
I/O.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from gputile.engine.fleet.arrays import FleetArrays
from gputile.engine.fleet.feasibility import (
    FeasibilityQuery,
    Rows,
    SearchCache,
    SearchContext,
    cards_that_fit,
    is_simple,
    memory_needed,
    nodes_that_fit,
)
from gputile.engine.fleet.free_arrays import FreeArrays, Ints, Mask
from gputile.engine.fleet.reasons import CODES, CardFacts, FirstMisses, add_misses
from gputile.engine.fleet.score_cache import ignores_names
from gputile.engine.placement.place import Placement, place, placed, searched
from gputile.engine.placement.shares import CARD, ask_share
from gputile.engine.placement.topology import closeness, closest, cost_of_closest, largest_linked
from gputile.engine.placement.units import PlacementUnit, split
from gputile.engine.policies.fragmentation import Fragments, NodeArrays
from gputile.engine.policies.scoring import Scorer
from gputile.engine.policies.table import POLICIES, RemainingCapacity, Scores, first_named, mixed
from gputile.engine.policies.workload_model import (
    Supply,
    WorkloadModel,
    WorkloadTables,
    tables,
    task_of,
)
from gputile.engine.search_budget import SearchBudget
from gputile.model.cards import NodeView
from gputile.model.refusals import NodeReason, Refusal
from gputile.model.requests import Constraints, PodRequest, Strength

SEARCH_BUDGET = 2000
"""Sets of cards tried for one query about all nodes, where the caller passes no budget."""

NODE_STEPS = 500
"""Of these for one node, so that one node with too many ways does not spend the budget of all others."""

LOOKS_PER_STEP = 8
"""How many nodes are looked up in the search cache for one step."""

LINKED_STEPS = 16
"""The cost of counting the linked cards of one node, in steps."""

FEW = 4
"""Up to this many names are looked up one by one; a mask of all names costs as much as about five."""

KEEP = 16
"""How many equally good nodes `best` returns at most."""


class Fleet(FleetArrays):
    """The cards of the cluster, and the queries about them."""

    def __init__(self) -> None:
        super().__init__()
        self.scorer = Scorer(self)
        self._search_cache = SearchCache()
        self._last: tuple[int, PodRequest, SearchContext, Mask] | None = None  # generation, request, context, result

    def part(self, names: Iterable[str]) -> Self:
        part = super().part(names)
        part.scorer, part._last = self.scorer.over(part), None
        return part

    # ---- queries ----------------------------------------------------------------------------------------------------

    def fits(self, request: PodRequest, budget: SearchBudget | None = None) -> Mask:
        """By row: whether the pod fits on the node now. `budget` bounds the scalar search where the arrays do not
        suffice."""
        query, cards_fit = self._cards_fit_now(request, _context(budget))
        return self._with_host(request, query.grid, cards_fit)

    def _cards_fit_now(self, request: PodRequest, context: SearchContext) -> tuple[FeasibilityQuery, Mask]:
        """The nodes on whose cards the pod fits now. The last answer is kept, because `refusals` often follows
        `fits`."""
        query = self._query(request, split(request), self.grid(), empty=False, context=context)
        if self._last is not None and self._last[:2] == (self._generation, request):
            context.unsearched |= self._last[2].unsearched
            return query, self._last[3]
        cards_fit = nodes_that_fit(query)
        self._last = (self._generation, request, context, cards_fit) if len(query.units) > 2 else None
        return query, cards_fit

    def scores(
        self,
        request: PodRequest,
        fitting: Mask,
        policy: str | None = None,
        seed: int = 0,
        budget: SearchBudget | None = None,
    ) -> Scores:
        """By row: how good the node is under the policy; -inf where the pod does not fit."""
        name = first_named(request.constraints.node_policy, policy)
        chosen, units = POLICIES[name], split(request)
        if not fitting.any():
            return np.full(len(fitting), -np.inf)
        if chosen.learnt:
            return self._learnt_scores(fitting, request, name)
        n = len(self._nodes)
        sums = RemainingCapacity(
            cpu_left=(self._cpu[:n] - request.cpu).astype(np.float64),
            share_left=self._share[:n] - self._requested_share(units),
            closeness=self._closeness(request, units, fitting, _context(budget)) if chosen.by_links else None,
        )
        return np.where(fitting, chosen.score_nodes(sums, seed), -np.inf)

    def _learnt_scores(self, fitting: Mask, request: PodRequest, policy: str) -> Scores:
        return self.scorer.scores_where(fitting, request, policy)

    def scores_of(
        self,
        names: Sequence[str],
        request: PodRequest,
        policy: str | None = None,
        seed: int = 0,
        budget: SearchBudget | None = None,
    ) -> Scores:
        """The scores of these nodes, in their order; -inf also for unknown nodes."""
        scores = np.append(self.scores(request, self.fits(request, budget), policy, seed, budget), -np.inf)
        return np.asarray(scores[[self._rows.get(name, -1) for name in names]])

    def best(
        self,
        request: PodRequest,
        policy: str | None = None,
        *,
        seed: int = 0,
        among: Collection[str] | None = None,
        keep: int = KEEP,
        slack: float = 0.0,
        shuffle: bool = False,
        budget: SearchBudget | None = None,
    ) -> list[str]:
        """The best node and those as good as it (within `slack`), best first; empty if none fits.

        Ties come in the order in which nodes were added, or shuffled by the seed.
        """
        scores = self._scores_now(request, policy, seed, budget)
        top = scores.max(initial=-np.inf)
        if top == -np.inf:
            return []
        ties = np.flatnonzero(scores >= top - slack)
        if among is not None and not self._are_named(ties, among):
            scores = np.where(self.named(among), scores, -np.inf)
            ties = np.flatnonzero((scores >= scores.max() - slack) & np.isfinite(scores))
        if shuffle:
            ties = ties[np.argsort(mixed(ties.astype(np.uint64), seed))]
        ties = ties[np.argsort(-scores[ties], kind="stable")]
        return [self._name(row) for row in ties[:keep].tolist()]

    def _scores_now(self, request: PodRequest, policy: str | None, seed: int, budget: SearchBudget | None) -> Scores:
        """By row: the score, -inf where the pod does not fit. Read-only: it may be the cached array."""
        name = first_named(request.constraints.node_policy, policy)
        if POLICIES[name].learnt and is_simple(split(request), request.constraints):
            return self._simple_scores(request, name)
        return self.scores(request, self.fits(request, budget), policy, seed, budget)

    def _simple_scores(self, request: PodRequest, policy: str) -> Scores:
        """The same for a request that `is_simple`, under a policy that learns."""
        return self.scorer.scores(request, policy)

    def _are_named(self, rows: Rows, among: Collection[str]) -> bool:
        """Whether these nodes are among the names: a few are looked up one by one, which is cheaper than a mask of all
        names. The best node nearly always is among them."""
        return len(rows) <= FEW and all(self._name(row) in among for row in rows.tolist())

    def place(
        self,
        request: PodRequest,
        name: str,
        policy: str | None = None,
        seed: int = 0,
        budget: SearchBudget | None = None,
    ) -> Placement | Refusal:
        """Choose the cards on one node, with what the policy has learnt."""
        row = self._rows[name]
        node = self._known(row)
        chosen = first_named(request.constraints.card_policy, node.card_policy, policy)
        if not POLICIES[chosen].learnt:
            return place(request, self._view(row), policy, seed, budget=budget)
        choices = self.scorer.choices(request, chosen) if _requests_any_one_card(request) else None
        state = self.state(row)
        if choices is not None and state in choices:
            return placed(request, node, choices[state])
        learnt = self.scorer.card_scores_on(request, row, chosen)
        answer = place(request, self._view(row), policy, seed, learnt, budget)
        if choices is not None and isinstance(answer, Placement):
            choices[state] = self._places[row][answer.containers[0].tiles[0].uuid]
        return answer

    def refusals(
        self, request: PodRequest, among: Iterable[str] | None = None, budget: SearchBudget | None = None
    ) -> list[Refusal]:
        """Why each other node does not fit: the same reasons as `place` gives one by one (except for
        `SearchTooLong`)."""
        names = list(self._rows) if among is None else list(among)
        fitting, resolvable, miss = self._judge(request, _context(budget).budget)
        refusals = []
        for name in names:
            row = self._rows.get(name)
            if row is None:
                refusals.append(Refusal(name, NodeReason.UNKNOWN_NODE, 1, 0, False))
            elif not fitting[row]:
                code, requested, found = CODES[miss.codes[row]], int(miss.requested[row]), int(miss.found[row])
                refusals.append(Refusal(name, code, requested, found, bool(resolvable[row])))
        return refusals

    def _judge(self, request: PodRequest, budget: SearchBudget) -> tuple[Mask, Mask, FirstMisses]:
        """By row: whether the pod fits, whether it would fit on the empty node, and the first rule that it misses."""
        query, cards_fit = self._cards_fit_now(request, SearchContext(budget.half()))
        fitting = self._with_host(request, query.grid, cards_fit)
        miss = self._misses(request, query, cards_fit)
        resolvable = self._fits(request.with_unused_quota, self.empty_grid(), empty=True, context=SearchContext(budget))
        return fitting, resolvable, miss

    # ---- what is free -----------------------------------------------------------------------------------------------

    def free_cards(self) -> float:
        """The sum of the free shares of all usable cards."""
        return float(self._share[: len(self._nodes)].sum()) / CARD

    def fragmentation(self) -> float:
        """Idle GPU that the learnt workload could not use, in cards."""
        return self._fragment(self.scorer.tables())

    def fragments(self, names: Sequence[str]) -> list[float]:
        """The same for these nodes, which must all be known, in their order."""
        rows = np.array([self._rows[name] for name in names], dtype=np.intp)
        fragments: list[float] = Fragments(self.node_arrays(rows), self.scorer.tables()).now.tolist()
        return fragments

    def fragment_meter(self, requests: list[PodRequest]) -> Callable[[], float]:
        """A function that measures the same for a given workload."""
        counts = WorkloadModel(prior=0.0)
        for request in requests:
            counts.observe(task_of(request, self.average_card()))
        mix = tables(counts.asked(), self.supply())
        return lambda: self._fragment(mix)

    def _fragment(self, mix: WorkloadTables) -> float:
        return float(Fragments(self.node_arrays(np.arange(len(self._nodes))), mix).now.sum())

    # ---- which nodes fit -------------------------------------------------------------------------------------------

    def _fits(
        self,
        request: PodRequest,
        grid: FreeArrays,
        rows: Rows | None = None,
        *,
        empty: bool = False,
        context: SearchContext | None = None,
    ) -> Mask:
        """`rows`: the rows of the grid, if not all; only for requests that are `is_simple`."""
        context = context or _context(None)
        query = self._query(request, split(request), grid, rows, empty=empty, context=context)
        return self._with_host(request, grid, nodes_that_fit(query), rows)

    def _with_host(self, request: PodRequest, grid: FreeArrays, cards_fit: Mask, rows: Rows | None = None) -> Mask:
        """The nodes on whose host the pod fits as well. As in Kubernetes, a pod without a CPU request fits even where
        CPU is overcommitted."""
        answer = cards_fit & self._in_use[self._columns(rows)]
        if request.cpu:
            answer &= grid.cpu >= request.cpu
        if request.memory:
            answer &= grid.host >= request.memory
        return answer

    def _columns(self, rows: Rows | None) -> Rows | slice:
        return slice(len(self._nodes)) if rows is None else rows

    def _query(
        self,
        request: PodRequest,
        units: tuple[PlacementUnit, ...],
        grid: FreeArrays,
        rows: Rows | None = None,
        *,
        empty: bool,
        context: SearchContext,
    ) -> FeasibilityQuery:
        eligible = self._eligible_cards(request.constraints)
        return FeasibilityQuery(
            units=units,
            rule=request.constraints,
            grid=grid,
            eligible=eligible if rows is None else eligible[:, rows],
            numa=self._numa[:, self._columns(rows)],
            linked=lambda mask, most: self._linked(mask, most, context),
            search=lambda rows: self._search(request, rows, empty=empty, context=context),
            context=context,
        )

    def _search(self, request: PodRequest, rows: Rows, *, empty: bool, context: SearchContext) -> Mask:
        """The scalar search, on the emptiest nodes first; nodes with equal cards are searched once.

        All nodes together have one budget: a pod of many awkward containers must not delay other pods.
        """
        answers = np.zeros(len(rows), dtype=np.bool_)
        cards_only, eligible = _without_host(request), self._eligible_cards(request.constraints)
        known = self._search_cache.of(cards_only)
        order = np.argsort(-self._share[rows], kind="stable").tolist()
        for number, position in enumerate(order):
            if number % LOOKS_PER_STEP == 0 and not context.budget.spend():
                context.unsearched.update(rows[order[number:]].tolist())
                break
            row = int(rows[position])
            likeness = (*self.cards_state(row, empty=empty), eligible[:, row].tobytes())
            if likeness not in known and not context.budget.is_spent:
                view = NodeView.empty(self._known(row)) if empty else self._view(row)
                part = context.budget.part(NODE_STEPS)
                result = searched(cards_only, view, part)
                if result is not None or not context.budget.is_spent:
                    known[likeness] = result
            answers[position] = known.get(likeness) or False
            if known.get(likeness) is None:
                context.unsearched.add(row)
        return answers

    def _linked(self, mask: Mask, most: int, context: SearchContext) -> Ints:
        """By node: the number of cards of the mask that are all linked with each other, at most `most`."""
        answer = np.zeros(mask.shape[1], dtype=np.int64)
        known: dict[tuple[int, tuple[int, ...]], int] = {}
        for row, cards in self._card_sets(mask):
            key = (int(self._link[row]), tuple(cards))
            if key not in known:
                if not context.budget.spend(LINKED_STEPS):
                    context.unsearched.add(row)
                    continue
                known[key] = largest_linked(cards, most, self._known(row).link)
            answer[row] = known[key]
        return answer

    def _card_sets(self, mask: Mask) -> list[tuple[int, list[int]]]:
        return [(int(row), np.flatnonzero(mask[:, row]).tolist()) for row in np.flatnonzero(mask.any(axis=0))]

    # ---- scores ----------------------------------------------------------------------------------------------------

    def _requested_share(self, units: tuple[PlacementUnit, ...]) -> Scores:
        """By row: the share of cards that the pod requests, on cards of the node's average size."""
        share = np.zeros(len(self._nodes))
        for unit in units:
            for ask in unit.asks_in(0):
                if ask.memory is None:
                    share += unit.cards * ask_share(ask, 1.0)
                else:
                    by_memory = ask.memory * self._per_mebibyte[: len(share)]
                    share += unit.cards * np.maximum(by_memory, ask.cores * (CARD / 100))
        return share

    def _closeness(
        self, request: PodRequest, units: tuple[PlacementUnit, ...], fitting: Mask, context: SearchContext
    ) -> Scores:
        """By row: how close the best set of cards is for the unit that requests most cards."""
        answer = np.zeros(len(self._nodes))
        unit = max(units, key=lambda unit: unit.cards, default=None)
        if unit is None or unit.cards < 2:
            return answer
        mask = cards_that_fit(unit, self.grid(), self._eligible_cards(request.constraints), request.constraints.idle)
        known: dict[tuple[int, tuple[int, ...]], int] = {}
        for row, cards in self._card_sets(mask & fitting):
            node = self._known(row)
            key = (int(self._link[row]), tuple(cards))
            if (
                node.links
                and key not in known
                and len(cards) >= unit.cards
                and context.budget.spend(1 + cost_of_closest(len(cards), unit.cards))
            ):
                known[key] = closeness(closest([], cards, unit.cards, node.link), node.link)
            answer[row] = known.get(key, 0)
        return answer

    # ---- reasons ---------------------------------------------------------------------------------------------------

    def _misses(self, request: PodRequest, query: FeasibilityQuery, cards_fit: Mask) -> FirstMisses:
        """By row: the first rule that the node misses, and the amounts requested and found."""
        misses, units = FirstMisses(len(self._nodes)), query.units
        for row, node in enumerate(self._nodes):
            if node is None or node.fault:
                misses.set_row(row, NodeReason(node.fault) if node else NodeReason.UNKNOWN_NODE, 1, 0)
            elif not node.cards and units:
                misses.set_row(row, NodeReason.NO_CARDS, 1, 0)
        add_misses(misses, request, query, self._card_facts(request.constraints), cards_fit)
        return misses

    def _card_facts(self, rule: Constraints) -> CardFacts:
        n = len(self._nodes)
        rules = (
            (NodeReason.MODEL, self._model_mask(rule)),
            (NodeReason.UUID, self._uuid_mask(rule)),
            (NodeReason.MODE, self._mode_mask(rule)),
            (NodeReason.UNHEALTHY, self._healthy[:, :n]),
            (NodeReason.CORDONED, ~self._cordoned[:, :n]),
        )
        return CardFacts(
            exists=self._exists[:, :n], rules=rules, empty=self.empty_grid(), quota=self._quota_rules(rule)
        )

    def _quota_rules(self, rule: Constraints) -> tuple[tuple[NodeReason, Mask], ...]:
        allowance = rule.allowance
        if allowance is None:
            return ()
        return (
            (NodeReason.QUOTA_POOL, self._pool_mask(allowance)),
            (NodeReason.QUOTA_MODEL, self._card_kind_mask(allowance.listed)),
            (NodeReason.QUOTA, self._card_kind_mask(allowance.affordable)),
        )

    # ---- arrays for the scorer --------------------------------------------------------------------------------------

    def fits_on(self, request: PodRequest, rows: Rows) -> Mask:
        """The same as `fits` for these rows, for a request that `is_simple`."""
        return self._fits(request, self.grid().columns(rows), rows)

    def node_arrays(self, rows: Rows) -> NodeArrays:
        return NodeArrays(share=self._card_share[:, rows], model=self._model[:, rows], cpu=self._cpu[rows])

    def tile_share(self, unit: PlacementUnit, rows: Rows) -> Ints:
        """Card x node: the share of each card that one tile of the unit takes."""
        asks = unit.asks_in(unit.phases()[0])
        size = self._size[:, rows]
        needed = -(-memory_needed(asks, size) * CARD // np.maximum(size, 1))
        by_memory = np.where(size > 0, needed, 0)  # also where there is no card at all
        by_cores = np.where(self._exists[:, rows], sum(ask.cores for ask in asks) * (CARD // 100), 0)
        return np.asarray(np.maximum(by_memory, by_cores))

    def cards_for(self, unit: PlacementUnit, request: PodRequest, rows: Rows) -> Mask:
        eligible = self._eligible_cards(request.constraints)[:, rows]
        return cards_that_fit(unit, self.grid().columns(rows), eligible, request.constraints.idle)

    def generation(self) -> int:
        """Counts the changes: while it is the same, the fleet is the same."""
        return self._generation

    def capacity_generation(self) -> int:
        """Counts the changes that may have freed capacity. While it is the same, free capacity only shrinks."""
        return self._capacity_generation

    def touched_since(self, generation: int) -> Rows:
        return np.flatnonzero(self._touched[: len(self._nodes)] > generation)

    def supply(self) -> Supply:
        n = len(self._nodes)
        free = np.bincount(
            self._model[:, :n].ravel(), weights=self._card_share[:, :n].ravel(), minlength=len(self._models)
        )
        cards = max(1, int(self._usable[:, :n].sum()))
        return Supply(
            models=tuple(self._models),
            free=tuple((free / CARD).tolist()),
            free_cpu=float(self._cpu[:n].sum()),
            cpu_per_card=float(self._cpu_size[:n].sum()) / cards,
        )

    def node_prices(self, by_model: NDArray[np.float64]) -> NDArray[np.float64]:
        """By row: the mean price of the node's cards; recomputed when prices or nodes change."""
        if self._node_prices is None or self._node_prices[0] is not by_model:
            n = len(self._nodes)
            exists = self._exists[:, :n]
            known = np.append(by_model, np.ones(len(self._models)))  # a model that is newer than the prices costs 1
            prices = np.where(exists, known[self._model[:, :n]], 0.0).sum(axis=0)
            self._node_prices = by_model, np.asarray(prices / np.maximum(exists.sum(axis=0), 1))
        return self._node_prices[1]

    def card_prices(self, unit: PlacementUnit, row: int, by_model: NDArray[np.float64]) -> NDArray[np.float64]:
        """By card of one node: the price of the share that a tile takes."""
        known = np.append(by_model, np.ones(len(self._models)))
        tile = self.tile_share(unit, np.array([row]))[:, 0]
        return np.asarray(tile / CARD * known[self._model[:, row]])

    def fullest(self, rows: Rows, most: int) -> Rows:
        """At most this many of the rows, those with the smallest free share."""
        if len(rows) <= most:
            return rows
        return np.sort(rows[np.argsort(self._share[rows], kind="stable")[:most]])

    def model_count(self) -> int:
        return len(self._models)

    def shape(self) -> tuple[int, int]:
        return len(self._size), len(self._nodes)


def _context(budget: SearchBudget | None) -> SearchContext:
    return SearchContext(budget if budget is not None else SearchBudget(SEARCH_BUDGET))


def _requests_any_one_card(request: PodRequest) -> bool:
    """Whether it requests one tile on any card, so that neighbours, links and names do not matter."""
    rule, units = request.constraints, split(request)
    any_card = ignores_names(rule) and (rule.numa, rule.links) == (Strength.NO, Strength.NO)
    return any_card and len(units) == 1 and units[0].cards == 1


def _without_host(request: PodRequest) -> PodRequest:
    return PodRequest(
        dialect=request.dialect,
        asks=request.asks,
        together=request.together,
        constraints=request.constraints,
        slots=request.slots,
    )
