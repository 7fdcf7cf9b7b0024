"""A look at the fleet without some holdings: what it answers, and that it changes nothing.

Deliberate bugs that it caught, each alone: `_with_part` that writes nothing, or into the fleet's own array; `place`,
`view` or `free_capacity` that always ask the fleet; a part that shares the fleet's arrays, its `_eligible` masks or its
`_node_prices`; `over` without the copy, so that a part is scored by rows of the fleet; `_judge` without
`misses.replace`; `_learnt_scores` of many containers put together from both, or without a node that fits.
"""

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputile.engine.fleet.fleet import Fleet
from gputile.engine.fleet.overlay import FleetOverlay
from gputile.engine.policies.table import POLICIES
from gputile.model.cards import Node, Use
from gputile.model.requests import ModelRule, PodRequest
from gputile.testing.builders import ask, node, wants
from tests.effort import examples
from tests.engine.strategies import crowded_requests, nodes, requests

Holding = tuple[str, dict[str, Use], int, int]  # node, uses by card, CPU, memory


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[Node], list[Holding], list[Holding]]:
    """Nodes, the holdings that stay, and those that are left out; cards may be overcommitted."""
    cluster = [draw(nodes(f"n{number}")) for number in range(draw(st.integers(1, 7)))]
    holdings = st.lists(_holdings(cluster), max_size=6)
    return cluster, draw(holdings), draw(holdings)


@st.composite
def _holdings(draw: st.DrawFn, cluster: list[Node]) -> Holding:
    on = draw(st.sampled_from(cluster))
    cards = draw(st.lists(st.sampled_from(on.cards), max_size=2, unique=True)) if on.cards else []
    use = st.builds(Use, st.sampled_from([0, 1, 4, 8, 16]), st.sampled_from([0, 30, 100]), st.integers(0, 2))
    return on.name, {card.uuid: draw(use) for card in cards}, draw(st.sampled_from([0, 1000, 3000])), 100


def fleet_with(cluster: list[Node], holdings: list[Holding]) -> Fleet:
    fleet = Fleet()
    for on in cluster:
        fleet.set_node(on)
    for holding in holdings:
        fleet.hold(*holding)
    return fleet


def without(fleet: Fleet, holdings: list[Holding]) -> FleetOverlay:
    part = fleet.part({holding[0] for holding in holdings})
    for holding in holdings:
        part.release(*holding)
    return FleetOverlay(fleet, part)


def facts(fleet: Fleet) -> dict[str, Any]:
    """Everything in a fleet but its caches, bit for bit."""
    caches = {"scorer", "_search_cache", "_last", "_eligible", "_average"}
    kept = {name: value for name, value in vars(fleet).items() if name not in caches | {"_node_prices"}}
    return {
        name: (value.tobytes(), value.shape) if isinstance(value, np.ndarray) else copy.deepcopy(value)
        for name, value in kept.items()
    }


def answers(fleet: Fleet, request: PodRequest, policy: str) -> dict[str, Any]:
    names = fleet.names()
    return {
        "fits": fleet.fits(request).tolist(),
        "best": fleet.best(request, policy, seed=3),
        "best among": fleet.best(request, policy, seed=3, among=names[1:], keep=1, shuffle=True),
        "scores": fleet.scores_of([*names, "unknown"], request, policy, 3).tolist(),
        "placements": [fleet.place(request, name, policy, 3) for name in names],
        "refusals": fleet.refusals(request),
        "refusals among": fleet.refusals(request, [*reversed(names), "unknown"]),
        "views": [fleet.view(name) for name in names],
        "free cards": [
            [fleet.free_capacity(view.node.name, card.uuid) for card in view.node.cards]
            for view in map(fleet.view, names)
        ],
        "free shares": (fleet.free_shares_of(names), fleet.free_cards()),
        "sizes": (len(fleet), fleet.average_card(), fleet.largest_card(), fleet.card_models()),
    }


def check_part(overlay: FleetOverlay, request: PodRequest, policy: str) -> None:
    """By itself a part answers as the overlay does for its nodes."""
    part, names = overlay._part, overlay._part.names()
    fits = dict(zip(overlay.names(), overlay.fits(request).tolist(), strict=True))
    assert part.fits(request).tolist() == [fits[name] for name in names]
    assert set(part.best(request, policy, slack=1e9)) == {name for name in names if fits[name]}
    assert [part.place(request, name, policy) for name in names] == [
        overlay.place(request, name, policy) for name in names
    ]


PLAIN = st.builds(lambda size, cards: wants(ask(size, cards=cards)), st.integers(1, 4), st.sampled_from([1, 1, 2]))
"""Requests whose scores are cached."""


@given(
    cluster=clusters(),
    request=st.one_of(PLAIN, PLAIN, requests(), requests(most=6), crowded_requests()),
    learnt=st.lists(requests(most=1), max_size=3),
    policy=st.sampled_from([*POLICIES, "tiling", "tiling"]),
    warm=st.booleans(),
)
@examples(100)
def test_an_overlay_answers_as_a_fresh_fleet_without_the_holdings_and_changes_nothing(
    cluster: tuple[list[Node], list[Holding], list[Holding]],
    request: PodRequest,
    learnt: list[PodRequest],
    policy: str,
    warm: bool,
) -> None:
    on, staying, left_out = cluster
    fleet, fresh = fleet_with(on, [*staying, *left_out]), fleet_with(on, staying)
    fleet.scorer.relearn(learnt)
    fresh.scorer = fleet.scorer.over(fresh)  # what was learnt depends on all holdings
    before, own = facts(fleet), answers(fleet, request, policy) if warm else None
    overlay = without(fleet, left_out)
    check_part(overlay, request, policy)
    assert answers(overlay, request, policy) == answers(fresh, request, policy)
    assert facts(fleet) == before
    assert own is None or answers(fleet, request, policy) == own


def test_a_node_that_fits_neither_way_is_refused_for_what_it_would_still_lack() -> None:
    on = node("a").cards(3, size=8).node()
    held: list[Holding] = [("a", {card.uuid: Use(8, 100, 1)}, 0, 0) for card in on.cards[:2]]
    fleet = fleet_with([on], held)
    assert [refusal.found for refusal in fleet.refusals(wants(ask(2, cards=3)))] == [1]
    assert [refusal.found for refusal in without(fleet, held[:1]).refusals(wants(ask(2, cards=3)))] == [2]


def test_a_node_keeps_the_price_of_its_own_cards() -> None:
    on = [node("a").cards(1, "T4", size=8).node(), node("b").cards(1, "A100", size=8).node()]
    held: list[Holding] = [("b", {on[1].cards[0].uuid: Use(4, 50, 1)}, 0, 0)]
    fleet, request = fleet_with(on, held), wants(ask(2))
    only_b = ModelRule(("A100",))
    fleet.scorer.relearn([wants(ask(2), models=(only_b,)), wants(ask(1), models=(only_b,))] * 9)
    own, fresh = fleet.scores_of("ab", request, "tiling"), fleet_with(on, [])
    fresh.scorer = fleet.scorer.over(fresh)
    assert own[0] != own[1], "the models have different prices"
    assert without(fleet, held).best(request, "tiling", slack=1e9) == fresh.best(request, "tiling", slack=1e9)
    assert (
        without(fleet, held).scores_of("ab", request, "tiling").tolist()
        == fresh.scores_of("ab", request, "tiling").tolist()
    )


@pytest.mark.parametrize("policy", list(POLICIES))
def test_after_a_look_the_fleet_finds_the_pod_no_place(policy: str) -> None:
    on = [node(name).cards(1, size=8).node() for name in "ab"]
    held: list[Holding] = [(n.name, {n.cards[0].uuid: Use(8, 100, 1)}, 0, 0) for n in on]
    fleet, request = fleet_with(on, held), wants(ask(2))
    for _ in range(2):
        assert fleet.best(request, policy) == []
        assert without(fleet, held[:1]).best(request, policy) == ["a"]


def test_a_part_shares_no_answers_with_its_fleet() -> None:
    on = [node(name).cards(1, size=8).node() for name in "ab"]
    held: list[Holding] = [(n.name, {n.cards[0].uuid: Use(8, 100, 1)}, 0, 0) for n in on]
    fleet, three = fleet_with(on, held), wants(*(ask(1, name=name) for name in "xyz"))
    assert (fleet.fits(three).tolist(), fleet.part("b").fits(three).tolist()) == ([False, False], [False])
    part = fleet.part("ab")
    for holding in held:
        part.release(*holding)
    assert (part.best(wants(ask(2)), "tiling"), fleet.best(wants(ask(2)), "tiling")) == (["a", "b"], [])


def test_a_part_keeps_the_average_card_of_all_nodes() -> None:
    fleet = fleet_with([node("a").cards(1, size=8).node(), node("b").cards(1, size=16).node()], [])
    assert fleet.part(["b"]).average_card() == fleet.average_card() == 12


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda overlay: overlay.hold("a", {}), id="by holding capacity"),
        pytest.param(lambda overlay: overlay.release("b", {}), id="by releasing capacity"),
        pytest.param(lambda overlay: overlay.set_node(node("c").node()), id="by adding a node"),
        pytest.param(lambda overlay: overlay.remove_node("a"), id="by removing a node"),
    ],
)
def test_an_overlay_cannot_be_changed(change: Any) -> None:
    fleet = fleet_with([node(name).cards(1, size=8).node() for name in "ab"], [])
    overlay, before = FleetOverlay(fleet, fleet.part(["a"])), facts(fleet)
    with pytest.raises(TypeError, match="read-only"):
        change(overlay)
    assert facts(fleet) == before


def test_a_pod_of_many_containers_is_scored_on_the_same_nodes_as_in_a_fresh_fleet() -> None:
    """Only the fullest nodes are scored for such a pod, and which ones these are depends on all nodes."""
    request = wants(*(ask(1, name=f"c{number}") for number in range(6)))
    on = [node(f"n{number}").cards(2, size=16).node() for number in range(1100)]
    staying = [(n.name, {n.cards[0].uuid: Use(1 + number % 9, 0, 1)}, 0, 0) for number, n in enumerate(on)]
    left_out = [(n.name, {n.cards[1].uuid: Use(16, 0, 1)}, 0, 0) for n in on[-3:]]
    fleet, fresh = fleet_with(on, [*staying, *left_out]), fleet_with(on, staying)
    fresh.scorer = fleet.scorer.over(fresh)
    assert without(fleet, left_out).best(request, "tiling", keep=2000, slack=1e9) == fresh.best(
        request, "tiling", keep=2000, slack=1e9
    )
