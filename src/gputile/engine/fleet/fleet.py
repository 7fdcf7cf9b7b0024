"""All nodes at once: which fit, which are best, and why the others do not.

Room:  the arrays of `columns`, and the questions asked of them; one thread, no I/O.
Door:  `Fleet.best` answers a filter call, `Fleet.place` chooses the cards, `Fleet.refusals` says why not; `hold` and
       `release` keep it up to date, `learn` tells it what arrives.
"""

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from gputile.engine.fleet.arrays import FleetArrays
from gputile.engine.fleet.feasibility import (
    FeasibilityQuery,
    Rows,
    SearchContext,
    cards_that_fit,
    is_simple,
    memory_needed,
    nodes_that_fit,
)
from gputile.engine.fleet.free_arrays import FreeArrays, Ints, Mask
from gputile.engine.fleet.reasons import CODES, CardFacts, FirstMisses, add_misses
from gputile.engine.fleet.score_cache import CardChoiceCache, NodeScores, ScoreCache, SearchCache
from gputile.engine.placement.place import Placement, place, placed, searched
from gputile.engine.placement.shares import CARD, ask_share
from gputile.engine.placement.topology import closeness, closest, cost_of_closest, largest_linked
from gputile.engine.placement.units import PlacementUnit, split
from gputile.engine.policies.fragmentation import Fragments, NodeArrays
from gputile.engine.policies.scoring import Scorer
from gputile.engine.policies.table import POLICIES, RemainingCapacity, Scores, first_named, mixed
from gputile.engine.policies.workload_model import (
    LearntModel,
    Supply,
    TrainingData,
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
"""Sets of cards looked at for one question about all nodes, where whoever asks says nothing else."""

NODE_STEPS = 500
"""Of them for one node, so that one on which there are too many ways does not stand for all others."""

LOOKS_PER_STEP = 8
"""Nodes that are looked up among those that were searched before, for one step."""

LINKED_STEPS = 16
"""What it costs to find out how many cards of one node are linked with each other."""

FEW = 4
"""Names that are looked up in a list one by one: all of them together cost as much as some five. Nodes that are scored
one by one likewise."""

KEEP = 16
"""How many equally good nodes are named at most."""


class Fleet(FleetArrays):
    """The cluster, as questions are asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self._judge = Scorer(self)
        self._standings, self._choices, self._searches = ScoreCache(), CardChoiceCache(), SearchCache()
        self._last: tuple[int, PodRequest, SearchContext, Mask] | None = None  # moment, request, and what was found

    # ---- asking -----------------------------------------------------------------------------------------------------

    def fits(self, request: PodRequest, budget: SearchBudget | None = None) -> Mask:
        """By row: whether the node takes the pod now; `budget` bounds the search where arrays cannot tell."""
        question, borne = self._borne_now(request, _inquiry(budget))
        return self._in_all(request, question.grid, borne)

    def _borne_now(self, request: PodRequest, inquiry: SearchContext) -> tuple[FeasibilityQuery, Mask]:
        """Where the cards bear the pod now. Whoever hears that nothing fits asks next why: the last answer is kept."""
        question = self._question(request, split(request), self.grid(), empty=False, inquiry=inquiry)
        if self._last is not None and self._last[:2] == (self._moment, request):
            inquiry.unsearched |= self._last[2].unsearched
            return question, self._last[3]
        borne = nodes_that_fit(question)
        self._last = (self._moment, request, inquiry, borne) if len(question.units) > 2 else None
        return question, borne

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
        if chosen.learns:
            return self._judge.scores_where(fitting, request, name)
        n = len(self._nodes)
        sums = RemainingCapacity(
            cpu_left=(self._cpu[:n] - request.cpu).astype(np.float64),
            share_left=self._share[:n] - self._share_wanted(units),
            closeness=self._closeness(request, units, fitting, _inquiry(budget)) if chosen.by_links else None,
        )
        return np.where(fitting, chosen.score_nodes(sums, seed), -np.inf)

    def scores_of(
        self,
        names: Sequence[str],
        request: PodRequest,
        policy: str | None = None,
        seed: int = 0,
        budget: SearchBudget | None = None,
    ) -> Scores:
        """The scores of these nodes, in their order; -inf also for strangers."""
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
        """The best node and those as good as it (within `slack`), best first; nothing if none fits.

        Ties come in the order in which nodes were added, or shuffled by the seed.
        """
        scores = self._standing(request, policy, seed, budget)
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

    def _standing(self, request: PodRequest, policy: str | None, seed: int, budget: SearchBudget | None) -> Scores:
        """By row: the score, -inf where the pod does not fit. To be read only: it may be what is remembered."""
        name = first_named(request.constraints.node_policy, policy)
        if not (POLICIES[name].learns and is_simple(split(request), request.constraints)):
            return self.scores(request, self.fits(request, budget), policy, seed, budget)
        known = self._standings.of(request, name, self._basis(), len(self._nodes))
        if known.moment != self._moment:
            self._mend(known, request, name)
            known.moment = self._moment
        return known.scores

    def _mend(self, known: NodeScores, request: PodRequest, policy: str) -> None:
        """Score the nodes that were touched; those that are few and in a state that was scored before are known."""
        rows = self.touched_since(known.moment)
        if len(rows) > FEW or not _is_same_for_alike(request.constraints):
            known.scores[rows] = self._scored(request, policy, rows)
            return
        for row in rows.tolist():
            state = self.state(row)
            score = known.states.get(state)
            if score is None:
                score = float(self._scored(request, policy, np.array([row]))[0])
                known.keep(state, score)
            known.scores[row] = score

    def _scored(self, request: PodRequest, policy: str, rows: Rows) -> Scores:
        fitting = self._fits(request, self.grid().columns(rows), rows)
        return np.where(fitting, self._judge.scores(request, policy, rows), -np.inf)

    def _basis(self) -> tuple[int, int]:
        """What scores rest on beside the node itself: what was learnt, and the average card, by which sizes count."""
        return self._judge.lessons(), self.average_card()

    def _are_named(self, rows: Rows, among: Collection[str]) -> bool:
        """Whether they are among these names: looked up one by one if they are few, which saves looking all names up.

        The best node nearly always is.
        """
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
        if not POLICIES[chosen].learns:
            return place(request, self._view(row), policy, seed, budget=budget)
        alike = (chosen, request, self.state(row)) if _wants_any_one_card(request) else None
        card = self._choices.get(alike, self._basis()) if alike else None
        if card is not None:
            return placed(request, node, card)
        learnt = self._judge.card_scores_on(request, row, chosen)
        answer = place(request, self._view(row), policy, seed, learnt, budget)
        if alike and isinstance(answer, Placement):
            self._choices.keep(alike, self._places[row][answer.containers[0].tiles[0].uuid])
        return answer

    def refusals(
        self, request: PodRequest, among: Iterable[str] | None = None, budget: SearchBudget | None = None
    ) -> list[Refusal]:
        """Why each node that does not fit does not, as `place` would say one by one (but for `SearchTooLong`)."""
        names = list(self._rows) if among is None else list(among)
        whole = _inquiry(budget).budget
        question, borne = self._borne_now(request, SearchContext(whole.half()))
        fitting = self._in_all(request, question.grid, borne)
        miss = self._misses(request, question, borne)
        resolvable = self._fits(request.if_nobody_held, self.empty_grid(), empty=True, inquiry=SearchContext(whole))
        refusals = []
        for name in names:
            row = self._rows.get(name)
            if row is None:
                refusals.append(Refusal(name, NodeReason.UNKNOWN_NODE, 1, 0, False))
            elif not fitting[row]:
                code, wanted, found = CODES[miss.codes[row]], int(miss.wanted[row]), int(miss.found[row])
                refusals.append(Refusal(name, code, wanted, found, bool(resolvable[row])))
        return refusals

    # ---- learning ---------------------------------------------------------------------------------------------------

    def learn(self, request: PodRequest) -> None:
        """Count a pod that arrived. Cheap; what follows from it is `refresh`ed off the hot path."""
        self._judge.observe(request)

    def refresh(self) -> None:
        """Renew what was learnt, if that is due."""
        self._judge.refresh()

    def prepare(self) -> WorkloadTables:
        """What `refresh` would learn, made beside what is in use; hand it to `adopt` at a quiet moment."""
        return self._judge.prepare()

    def adopt(self, learnt: WorkloadTables | LearntModel) -> None:
        self._judge.adopt(learnt)

    def is_lesson_due(self) -> bool:
        return self._judge.is_due()

    def lesson(self) -> TrainingData:
        """What `refresh` would learn from: to be studied in a thread, and the result to be adopted here."""
        return self._judge.lesson()

    def lesson_from(self, requests: Iterable[PodRequest]) -> TrainingData:
        """The same from these pods alone, as `relearn` does."""
        return self._judge.lesson_from(requests)

    def refresh_prices(self) -> None:
        self._judge.refresh_prices()

    def relearn(self, requests: Iterable[PodRequest]) -> None:
        """After a restart: forget all, and learn from the pods of the cluster."""
        self._judge.relearn(requests)

    def learn_all(self, requests: list[PodRequest]) -> None:
        """Take the mix of a whole list, as the literature does, and learn no more."""
        self._judge.learn_all(requests)

    def free_cards(self) -> float:
        """The free shares of all usable cards, added up."""
        return float(self._share[: len(self._nodes)].sum()) / CARD

    def fragmentation(self) -> float:
        """Idle GPU that the learnt workload could not use, in cards."""
        return self._fragment(self._judge.tables())

    def fragments(self, names: Sequence[str]) -> list[float]:
        """The same for these nodes, each of which must be here, in their order."""
        rows = np.array([self._rows[name] for name in names], dtype=np.intp)
        found: list[float] = Fragments(self.look(rows), self._judge.tables()).now.tolist()
        return found

    def fragment_meter(self, requests: list[PodRequest]) -> Callable[[], float]:
        """The same for a given workload: call what it returns at any time."""
        counts = WorkloadModel(prior=0.0)
        for request in requests:
            counts.observe(task_of(request, self.average_card()))
        mix = tables(counts.asked(), self.supply())
        return lambda: self._fragment(mix)

    def _fragment(self, mix: WorkloadTables) -> float:
        return float(Fragments(self.look(np.arange(len(self._nodes))), mix).now.sum())

    # ---- how it is done: fitting ------------------------------------------------------------------------------------

    def _fits(
        self,
        request: PodRequest,
        grid: FreeArrays,
        rows: Rows | None = None,
        *,
        empty: bool = False,
        inquiry: SearchContext | None = None,
    ) -> Mask:
        """`rows`: those that the grid has, if not all; only for what `is_simple`."""
        inquiry = inquiry or _inquiry(None)
        question = self._question(request, split(request), grid, rows, empty=empty, inquiry=inquiry)
        return self._in_all(request, grid, nodes_that_fit(question), rows)

    def _in_all(self, request: PodRequest, grid: FreeArrays, borne: Mask, rows: Rows | None = None) -> Mask:
        """Where the host bears the pod as well. What asks for none of it fits even where others took too much, as in
        Kubernetes."""
        answer = borne & self._in_use[self._columns(rows)]
        if request.cpu:
            answer &= grid.cpu >= request.cpu
        if request.memory:
            answer &= grid.host >= request.memory
        return answer

    def _columns(self, rows: Rows | None) -> Rows | slice:
        return slice(len(self._nodes)) if rows is None else rows

    def _question(
        self,
        request: PodRequest,
        units: tuple[PlacementUnit, ...],
        grid: FreeArrays,
        rows: Rows | None = None,
        *,
        empty: bool,
        inquiry: SearchContext,
    ) -> FeasibilityQuery:
        eligible = self._eligible_cards(request.constraints)
        return FeasibilityQuery(
            units=units,
            rule=request.constraints,
            grid=grid,
            eligible=eligible if rows is None else eligible[:, rows],
            numa=self._numa[:, self._columns(rows)],
            linked=lambda mask, wanted: self._linked(mask, wanted, inquiry),
            search=lambda rows: self._search(request, rows, empty=empty, inquiry=inquiry),
            inquiry=inquiry,
        )

    def _search(self, request: PodRequest, rows: Rows, *, empty: bool, inquiry: SearchContext) -> Mask:
        """The scalar search, on the emptiest nodes first; nodes whose cards are alike are searched once.

        All nodes together have one budget: a pod of many awkward containers must not hold up everybody else's.
        """
        answers = np.zeros(len(rows), dtype=np.bool_)
        cards_only, eligible = _without_host(request), self._eligible_cards(request.constraints)
        known = self._searches.of(cards_only)
        order = np.argsort(-self._share[rows], kind="stable").tolist()
        for number, position in enumerate(order):
            if number % LOOKS_PER_STEP == 0 and not inquiry.budget.spend():
                inquiry.unsearched.update(rows[order[number:]].tolist())
                break
            row = int(rows[position])
            likeness = (*self.cards_state(row, empty=empty), eligible[:, row].tobytes())
            if likeness not in known and not inquiry.budget.is_spent:
                view = NodeView.empty(self._known(row)) if empty else self._view(row)
                part = inquiry.budget.part(NODE_STEPS)
                found = searched(cards_only, view, part)
                if found is not None or not inquiry.budget.is_spent:
                    known[likeness] = found
            answers[position] = known.get(likeness) or False
            if known.get(likeness) is None:
                inquiry.unsearched.add(row)
        return answers

    def _linked(self, mask: Mask, most: int, inquiry: SearchContext) -> Ints:
        """By node: how many cards of the mask are all linked with each other, counted up to `most`."""
        answer = np.zeros(mask.shape[1], dtype=np.int64)
        known: dict[tuple[int, tuple[int, ...]], int] = {}
        for row, cards in self._card_sets(mask):
            key = (int(self._link[row]), tuple(cards))
            if key not in known:
                if not inquiry.budget.spend(LINKED_STEPS):
                    inquiry.unsearched.add(row)
                    continue
                known[key] = largest_linked(cards, most, self._known(row).link)
            answer[row] = known[key]
        return answer

    def _card_sets(self, mask: Mask) -> list[tuple[int, list[int]]]:
        return [(int(row), np.flatnonzero(mask[:, row]).tolist()) for row in np.flatnonzero(mask.any(axis=0))]

    # ---- how it is done: scoring ------------------------------------------------------------------------------------

    def _share_wanted(self, units: tuple[PlacementUnit, ...]) -> Scores:
        """By row: the share of cards that the pod would take, on cards of the node's average size."""
        wanted = np.zeros(len(self._nodes))
        for unit in units:
            for ask in unit.asks_in(0):
                if ask.memory is None:
                    wanted += unit.cards * ask_share(ask, 1.0)
                else:
                    by_memory = ask.memory * self._per_mebibyte[: len(wanted)]
                    wanted += unit.cards * np.maximum(by_memory, ask.cores * (CARD / 100))
        return wanted

    def _closeness(
        self, request: PodRequest, units: tuple[PlacementUnit, ...], fitting: Mask, inquiry: SearchContext
    ) -> Scores:
        """By row: how close the best set of cards is for the piece that wants most of them."""
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
                and inquiry.budget.spend(1 + cost_of_closest(len(cards), unit.cards))
            ):
                known[key] = closeness(closest([], cards, unit.cards, node.link), node.link)
            answer[row] = known.get(key, 0)
        return answer

    # ---- how it is done: why not ------------------------------------------------------------------------------------

    def _misses(self, request: PodRequest, question: FeasibilityQuery, borne: Mask) -> FirstMisses:
        """By row: the first rule that is not met, and what was wanted and found."""
        verdict, units = FirstMisses(len(self._nodes)), question.units
        for row, node in enumerate(self._nodes):
            if node is None or node.fault:
                verdict.set_row(row, NodeReason(node.fault) if node else NodeReason.UNKNOWN_NODE, 1, 0)
            elif not node.cards and units:
                verdict.set_row(row, NodeReason.NO_CARDS, 1, 0)
        add_misses(verdict, request, question, self._facts(request.constraints), borne)
        return verdict

    def _facts(self, rule: Constraints) -> CardFacts:
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
            (NodeReason.QUOTA_MODEL, self._make_mask(allowance.listed)),
            (NodeReason.QUOTA, self._make_mask(allowance.affordable)),
        )

    # ---- what it lends to the judge ---------------------------------------------------------------------------------

    def look(self, rows: Rows) -> NodeArrays:
        return NodeArrays(share=self._card_share[:, rows], model=self._model[:, rows], cpu=self._cpu[rows])

    def tile_share(self, unit: PlacementUnit, rows: Rows) -> Ints:
        """Card x node: the share of each card that one tile of the piece takes."""
        asks = unit.asks_in(unit.phases()[0])
        size = self._size[:, rows]
        needed = -(-memory_needed(asks, size) * CARD // np.maximum(size, 1))
        by_memory = np.where(size > 0, needed, 0)  # also where there is no card at all
        by_cores = np.where(self._exists[:, rows], sum(ask.cores for ask in asks) * (CARD // 100), 0)
        return np.asarray(np.maximum(by_memory, by_cores))

    def cards_for(self, unit: PlacementUnit, request: PodRequest, rows: Rows) -> Mask:
        eligible = self._eligible_cards(request.constraints)[:, rows]
        return cards_that_fit(unit, self.grid().columns(rows), eligible, request.constraints.idle)

    def moment(self) -> int:
        """Counts the changes: the same number, the same fleet."""
        return self._moment

    def capacity_generation(self) -> int:
        """Counts the changes that may have made room. While it stands, room only shrinks."""
        return self._capacity_generation

    def touched_since(self, moment: int) -> Rows:
        return np.flatnonzero(self._touched[: len(self._nodes)] > moment)

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
        """By row: the mean price of the node's cards; made anew when prices or nodes change."""
        if self._node_prices is None or self._node_prices[0] is not by_model:
            n = len(self._nodes)
            exists = self._exists[:, :n]
            known = np.append(by_model, np.ones(len(self._models)))  # a model that came after the prices costs 1
            prices = np.where(exists, known[self._model[:, :n]], 0.0).sum(axis=0)
            self._node_prices = by_model, np.asarray(prices / np.maximum(exists.sum(axis=0), 1))
        return self._node_prices[1]

    def card_prices(self, unit: PlacementUnit, row: int, by_model: NDArray[np.float64]) -> NDArray[np.float64]:
        """By card of one node: the price of the share that a tile takes."""
        known = np.append(by_model, np.ones(len(self._models)))
        tile = self.tile_share(unit, np.array([row]))[:, 0]
        return np.asarray(tile / CARD * known[self._model[:, row]])

    def fullest(self, rows: Rows, most: int) -> Rows:
        """Of these rows so many, those with the least free cards."""
        if len(rows) <= most:
            return rows
        return np.sort(rows[np.argsort(self._share[rows], kind="stable")[:most]])

    def model_count(self) -> int:
        return len(self._models)

    def shape(self) -> tuple[int, int]:
        return len(self._size), len(self._nodes)


def _inquiry(budget: SearchBudget | None) -> SearchContext:
    return SearchContext(budget if budget is not None else SearchBudget(SEARCH_BUDGET))


def _wants_any_one_card(request: PodRequest) -> bool:
    """One tile, whichever card it is on: its neighbours, links and names do not matter."""
    rule, units = request.constraints, split(request)
    free = _is_same_for_alike(rule) and (rule.numa, rule.links) == (Strength.NO, Strength.NO)
    return free and len(units) == 1 and units[0].cards == 1


def _is_same_for_alike(rule: Constraints) -> bool:
    """Whether nodes that differ in names only are all the same to it."""
    return not (rule.uuids or rule.not_uuids)


def _without_host(request: PodRequest) -> PodRequest:
    return PodRequest(
        dialect=request.dialect, asks=request.asks, together=request.together, constraints=request.constraints
    )
