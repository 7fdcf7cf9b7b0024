"""Victims of preemption. The property test compares with all subsets of the pods on small nodes.

Deliberate bugs that it caught: without `_of_lowest_priority` (a more important pod was evicted), without the stage of
the disruption budgets, with `latest started` reversed, with victims of other cards counted as free capacity.
"""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputile.engine.placement.place import fits
from gputile.engine.victims import RequestAfterEviction, Victim, cost, victims, without
from gputile.model.cards import NodeView, Use
from gputile.model.requests import PodRequest, QuotaAllowance
from gputile.testing.builders import ask, node, wants
from tests.effort import examples


def holder(name: str, card: int, memory: int, **rest: int) -> Victim:
    return Victim(pod=name, name=name, uses={f"GPU-n1-{card}": Use(memory, 0, 1)}, **rest)


def held(view: NodeView, holders: list[Victim]) -> NodeView:
    """The view with these pods on it: `without`, backwards."""
    turned = [
        Victim(
            pod=h.pod,
            uses={uuid: Use(-use.memory, -use.cores, -use.slots) for uuid, use in h.uses.items()},
            cpu=-h.cpu,
        )
        for h in holders
    ]
    less = without(view, turned)
    free_by_card = tuple(
        type(free)(free.memory, free.cores, free.slots, sum(card.uuid in h.uses for h in holders))
        for card, free in zip(view.node.cards, less.free_by_card, strict=True)
    )
    return NodeView(node=view.node, free_by_card=free_by_card, cpu=less.cpu, memory=less.memory)


EMPTY = node("n1").cards(2, size=16).view()


@pytest.mark.parametrize(
    ("pods", "want"),
    [
        pytest.param([holder("a", 0, 10), holder("b", 0, 6), holder("c", 1, 16)], ["c"], id="the-fewest-on-one-card"),
        pytest.param([holder("a", 0, 16), holder("b", 1, 16, priority=5)], ["a"], id="the-least-important"),
        pytest.param([holder("a", 0, 16, priority=5), holder("b", 1, 8), holder("c", 1, 8)], ["b", "c"],
                     id="two-unimportant-pods-rather-than-one-important"),
        pytest.param([holder("a", 0, 16, budget_cost=1), holder("b", 1, 16, priority=5)], ["b"],
                     id="a-budget-weighs-more-than-priority"),
        pytest.param([holder("a", 0, 16, started=1), holder("b", 1, 16, started=2)], ["b"], id="the-latest-started"),
        pytest.param([holder("a", 0, 4), holder("b", 1, 16)], ["a"], id="only-as-much-as-is-needed"),
        pytest.param([holder("a", 0, 16, priority=10), holder("b", 1, 16, priority=10)], None,
                     id="no-pod-of-equal-priority"),
        pytest.param([holder("a", 0, 2)], [], id="no-pod-when-it-fits-already"),
    ],
)  # fmt: skip
def test_the_victims(pods: list[Victim], want: list[str] | None) -> None:
    chosen = victims(wants(ask(14)), held(EMPTY, pods), pods, priority=10)
    assert (None if chosen is None else [h.pod for h in chosen]) == want


@pytest.mark.parametrize(
    ("pods", "want"),
    [
        pytest.param([holder("mine", 0, 2), holder("theirs", 1, 2)], ["mine"], id="its-own-although-cards-are-free"),
        pytest.param([holder("mine", 0, 16), holder("theirs", 1, 16)], ["mine"], id="its-own-frees-the-card-too"),
        pytest.param([holder("mine", 0, 2), holder("rock", 0, 14, priority=10), holder("theirs", 1, 16)],
                     ["mine", "theirs"], id="its-own-for-quota-and-another-for-the-card"),
        pytest.param([holder("mine", 0, 2), holder("a", 0, 7), holder("b", 0, 7), holder("c", 1, 16)], ["c", "mine"],
                     id="the-fewest-on-whatever-card"),
        pytest.param([holder("theirs", 0, 16), holder("others", 1, 16)], None, id="other-quotas-do-not-help"),
        pytest.param([holder("mine", 0, 16, priority=10), holder("theirs", 1, 16)], None,
                     id="no-pod-is-evicted-in-vain"),
    ],
)  # fmt: skip
def test_the_victims_for_a_pod_whose_quota_is_used_up(pods: list[Victim], want: list[str] | None) -> None:
    request = wants(ask(14))
    after: RequestAfterEviction = lambda evicted: under_quota(request, "mine" in {h.pod for h in evicted})  # noqa: E731
    chosen = victims(request, held(EMPTY, pods), pods, priority=10, after=after)
    assert (None if chosen is None else [h.pod for h in chosen]) == want


def test_eviction_does_not_help_against_another_model() -> None:
    pods = [holder("a", 0, 16)]
    assert victims(wants(ask(99)), held(EMPTY, pods), pods, priority=10) is None


def test_cpu_is_freed_too() -> None:
    pods = [Victim(pod="a", cpu=60_000), Victim(pod="b", cpu=4_000)]
    chosen = victims(wants(ask(1), cpu=8_000), held(EMPTY, pods), pods, priority=10)
    assert chosen is not None
    assert [h.pod for h in chosen] == ["a"]


@pytest.mark.parametrize(("cards", "tenants", "wanted", "most"), [(8, 7, 1, 7), (8, 2, 4, 8)])
def test_budgets_on_a_crowded_node_do_not_evict_all_pods(cards: int, tenants: int, wanted: int, most: int) -> None:
    view = node("n1").cards(cards, size=100).view()
    pods = [holder(f"p{n:02}", n % cards, 9, budget_cost=1) for n in range(cards * tenants)]
    chosen = victims(wants(ask(whole=True, cards=wanted)), held(view, pods), pods, priority=10)
    assert chosen is not None
    assert len(chosen) == most


def test_a_crowded_node_gives_a_small_set_quickly() -> None:
    view = node("n1").cards(8, size=100).view()
    pods = [holder(f"p{n:02}", n % 8, 9) for n in range(80)]
    chosen = victims(wants(ask(55, cards=4)), held(view, pods), pods, priority=10)
    assert chosen is not None
    assert fits(wants(ask(55, cards=4)), without(held(view, pods), chosen))
    assert len(chosen) <= 24


@st.composite
def victim_lists(draw: st.DrawFn) -> list[Victim]:
    pods = []
    for n in range(draw(st.integers(0, 5))):
        cards = draw(st.sets(st.integers(0, 1), min_size=1, max_size=2))
        use = Use(draw(st.sampled_from([3, 5, 8, 12])), draw(st.sampled_from([0, 30])), 1)
        pods.append(
            Victim(
                pod=f"p{n}",
                priority=draw(st.integers(0, 3)),
                started=draw(st.integers(0, 3)),
                budget_cost=draw(st.sampled_from([0, 0, 1])),
                uses={f"GPU-n1-{card}": use for card in cards},
                cpu=draw(st.sampled_from([0, 20_000])),
            )
        )
    return pods


REQUESTS = st.sampled_from(
    [
        wants(ask(10)),
        wants(ask(14, cores=80)),
        wants(ask(9, cards=2)),
        wants(ask(whole=True)),
        wants(ask(12, name="a"), ask(9, name="b")),
        wants(ask(2), cpu=50_000),
    ]
)


@examples(80)
@given(victim_lists(), REQUESTS)
def test_no_cheaper_set_exists(pods: list[Victim], request: PodRequest) -> None:
    assert_cheapest(pods, request, lambda evicted: request)


@examples(80)
@given(victim_lists(), REQUESTS, st.sets(st.sampled_from([f"p{n}" for n in range(5)])), st.integers(0, 2))
def test_no_cheaper_set_exists_where_pods_must_give_quota_back(
    pods: list[Victim], request: PodRequest, own: set[str], needed: int
) -> None:
    """Pods of its own namespace, on any card. It failed with sets of one card only."""
    assert_cheapest(pods, request, lambda evicted: under_quota(request, len(own & {h.pod for h in evicted}) >= needed))


MAKE = frozenset({("A100", 16)})


def under_quota(request: PodRequest, may: bool) -> PodRequest:
    return request if may else request.allowed(QuotaAllowance(frozenset(), MAKE, MAKE, frozenset()))


def assert_cheapest(pods: list[Victim], request: PodRequest, after: RequestAfterEviction) -> None:
    view = held(EMPTY, pods)
    lesser = [h for h in pods if h.priority < 3]
    sets = [list(chosen) for size in range(len(lesser) + 1) for chosen in combinations(lesser, size)]
    enough = [chosen for chosen in sets if fits(after(chosen), without(view, chosen))]
    chosen = victims(request, view, pods, priority=3, after=after)
    if chosen is None:
        assert not enough
    else:
        assert fits(after(chosen), without(view, chosen))
        assert cost(chosen) == min(cost(chosen) for chosen in enough)
