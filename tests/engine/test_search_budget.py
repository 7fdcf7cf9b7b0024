"""One budget for a whole decision: steps first, a clock second, and "not searched further" where it runs out.

Deliberate bugs that it caught: without `is_spent` in `Fleet._search` (every node is searched), with `NODE_STEPS` as
large as the whole budget, with `TOGETHER` where nothing was searched, with a clock that counts from the first step on,
with victims from a search that was cut short, with a part that does not spend what is its whole's.
"""

import pytest

from gputile.engine.explanation import explain
from gputile.engine.fleet import fleet as fleet_module
from gputile.engine.fleet.fleet import Fleet
from gputile.engine.placement.place import Placement, place, searched
from gputile.engine.search_budget import FREE_STEPS, SearchBudget
from gputile.engine.victims import Victim, victims
from gputile.model.cards import NodeView, Use
from gputile.model.refusals import NodeReason, Refusal
from gputile.model.requests import PodRequest, Strength
from gputile.testing.builders import ask, node, wants

AWKWARD = wants(*(ask(334 + n, name=f"c{n}") for n in range(17)), dialect="vcuda")
"""Two of them on a card of 1000, sixteen on eight cards; in sum there is enough for many more."""


class Seconds:
    """A clock that advances by one at each reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def full(count: int) -> Fleet:
    """Nodes that are all different, so that each one is searched."""
    fleet = Fleet()
    for number in range(count):
        fleet.set_node(node(f"n{number}").cards(8, size=1000).node())
        fleet.hold(f"n{number}", {f"GPU-n{number}-0": Use(number % 97 + 1, 0, 1)})
    return fleet


class TestSpending:
    def test_what_a_part_spends_the_whole_has_spent(self) -> None:
        whole = SearchBudget(10)
        part = whole.part(6)
        assert [part.spend(3), part.spend(3), part.spend()] == [True, True, False]
        assert not whole.is_spent
        assert (part.ran_out, whole.ran_out) == (True, True)
        assert whole.part(99).spend(4)
        assert whole.is_spent

    def test_half_leaves_the_other_half(self) -> None:
        whole = SearchBudget(10)
        half = whole.half()
        assert half.spend(5)
        assert (half.is_spent, whole.is_spent, whole.ran_out) == (True, False, False)

    def test_a_clock_ends_it_too_but_never_before_the_steps_that_any_real_pod_needs(self) -> None:
        late = SearchBudget(10_000, 0.5, Seconds())
        assert late.spend(FREE_STEPS)
        assert late.is_spent
        assert not late.spend()
        assert not SearchBudget(10_000, 1e9, Seconds()).is_spent

    def test_without_a_clock_only_steps_count(self) -> None:
        budget = SearchBudget(FREE_STEPS + 2, 0.0)
        assert budget.spend(FREE_STEPS + 1)
        assert not budget.is_spent


class TestOnAllNodes:
    def test_the_answer_says_which_nodes_were_not_searched(self) -> None:
        refusals = full(50).refusals(AWKWARD, budget=SearchBudget(4000))
        assert len(refusals) == 50
        assert {refusal.code for refusal in refusals} == {NodeReason.SEARCH}
        assert "not searched further" in refusals[0].sentence

    def test_one_node_with_too_many_ways_does_not_spend_the_budget_of_all(self) -> None:
        fleet = full(20)
        fleet.set_node(node("wide").cards(9, size=1000).node())
        for index in range(9):  # it has less free cores than the others, which are therefore searched first
            fleet.hold("wide", {f"GPU-wide-{index}": Use(0, 50, 1)})
        near = wants(
            *AWKWARD.asks, dialect="vcuda", numa=Strength.REQUIRE
        )  # arrays cannot decide: every node is searched
        assert fleet.best(near, budget=SearchBudget(20_000)) == ["wide"]

    def test_a_second_query_continues_the_search(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fleet, views = full(40), list[NodeView]()
        real = searched

        def counted(request: PodRequest, view: NodeView, budget: SearchBudget) -> bool | None:
            views.append(view)
            return real(request, view, budget)

        monkeypatch.setattr(fleet_module, "searched", counted)
        for turn in range(3):
            fleet.fits(AWKWARD, SearchBudget(2000))
            fleet.hold("n39", {"GPU-n39-7": Use(1 + turn, 0, 0)})  # otherwise the last answer would be reused
        names = [view.node.name for view in views]
        assert 6 < len(names) < 20
        assert len(names) - len(set(names)) == 2, "but for the one at which each budget ended"

    def test_steps_alone_decide_without_a_clock_so_a_replay_is_the_same(self) -> None:
        answers = [full(30).refusals(AWKWARD, budget=SearchBudget(3000)) for _ in range(2)]
        assert answers[0] == answers[1]

    def test_without_any_time_a_simple_pod_is_still_placed(self) -> None:
        late = SearchBudget(1000, 0.0, Seconds())
        fleet = full(3)
        assert fleet.best(wants(ask(500, name="a"), ask(400, name="b"), ask(300, name="c")), budget=late)
        assert isinstance(fleet.place(wants(ask(500)), "n1", budget=late), Placement)


def test_place_reports_a_search_that_was_cut_short() -> None:
    answer = place(AWKWARD, node().cards(8, size=1000).view(), budget=SearchBudget(200))
    assert isinstance(answer, Refusal)
    assert answer.sentence == "node(s) were not searched further: too many ways to place the containers"


def test_more_than_all_cards_have_together_needs_no_search() -> None:
    budget = SearchBudget(10_000)
    many = wants(*(ask(334 + n, name=f"c{n}") for n in range(40)), dialect="vcuda")
    answer = place(many, node().cards(8, size=1000).view(), budget=budget)
    assert isinstance(answer, Refusal)
    assert answer.code is NodeReason.TOGETHER
    assert not budget.ran_out


class TestPreemption:
    HOLDERS = tuple(
        Victim(pod=f"h{n}", name=f"default/h{n}", uses={f"GPU-n1-{n % 8}": Use(400, 0, 0)}) for n in range(16)
    )

    def full_node(self) -> NodeView:
        builder = node().cards(8, size=1000)
        for holder in self.HOLDERS:
            index = int(next(iter(holder.uses)).rpartition("-")[2])
            builder.taken(index, 400, slots=0)
        return builder.view()

    def test_a_search_cut_short_gives_no_victims_rather_than_too_many(self) -> None:
        eight = wants(*(ask(900 + n, name=f"c{n}") for n in range(8)), dialect="vcuda")
        enough = SearchBudget(100_000)
        chosen = victims(eight, self.full_node(), self.HOLDERS, 1, budget=enough)
        assert chosen is not None
        assert len(chosen) == 16, "all must go"
        assert not enough.ran_out
        for steps in (1, 50, 200, 400):
            short = SearchBudget(steps)
            assert victims(eight, self.full_node(), self.HOLDERS, 1, budget=short) is None
            assert short.ran_out

    def test_no_pod_is_evicted_if_it_is_too_expensive_to_prove_that_it_must(self) -> None:
        """With fifteen evicted there are too many ways to prove that it does not fit."""
        sixteen = wants(*(ask(334 + n, name=f"c{n}") for n in range(16)), dialect="vcuda")
        budget = SearchBudget(1_000_000)
        assert victims(sixteen, self.full_node(), self.HOLDERS, 1, budget=budget) is None
        assert budget.ran_out

    def test_a_single_tile_needs_no_budget(self) -> None:
        budget = SearchBudget(2000)
        chosen = victims(wants(ask(900), dialect="vcuda"), self.full_node(), self.HOLDERS, 1, budget=budget)
        assert chosen is not None
        assert [holder.pod for holder in chosen] == ["h0", "h8"]
        assert not budget.ran_out


class TestExplaining:
    def test_an_explanation_that_was_cut_short_says_so(self) -> None:
        explanation = explain(AWKWARD, full(30), budget=SearchBudget(300))
        assert explanation.cut_short
        assert explanation.lines()[-1] == "  not searched further: there are too many ways to place its containers"

    def test_a_complete_explanation_does_not(self) -> None:
        explanation = explain(wants(ask(1001)), full(30), budget=SearchBudget(20_000))
        assert not explanation.cut_short
        assert "not searched further" not in "\n".join(explanation.lines())
