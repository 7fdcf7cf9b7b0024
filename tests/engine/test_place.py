"""What fits on one node, rule by rule."""

from typing import Any

import pytest

from gputile.engine.placement.place import Placement, place
from gputile.model.cards import NodeView
from gputile.model.refusals import NodeReason, Refusal
from gputile.model.requests import ModelRule, PodRequest, Role, Strength
from gputile.testing.builders import NodeBuilder, ask, node, wants

FOUR = ((0, 9, 1, 1), (9, 0, 1, 1), (1, 1, 0, 9), (1, 1, 9, 0))  # two close pairs


def cards_of(answer: Placement | Refusal) -> dict[str, list[int]]:
    assert isinstance(answer, Placement), answer
    return {held.container: [tile.index for tile in held.tiles] for held in answer.containers}


def two(**facts: Any) -> NodeBuilder:
    return node().cards(2, "A100", 16, **facts)


@pytest.mark.parametrize(
    ("request_", "view", "want"),
    [
        pytest.param(wants(ask(10)), two().taken(0, 5).view(), {"main": [0]}, id="binpack-takes-the-fullest-card"),
        pytest.param(wants(ask(12)), two().taken(0, 5).view(), {"main": [1]}, id="a-card-with-too-little-is-left-out"),
        pytest.param(wants(ask(4, cards=2)), two().view(), {"main": [0, 1]}, id="several-cards-are-distinct"),
        pytest.param(wants(ask(whole=True)), two().taken(0, 0, 1).view(), {"main": [1]}, id="a-whole-card-is-idle"),
        pytest.param(wants(ask(percent=50)), node().card(size=8).card(size=16).taken(0, 5).view(), {"main": [1]},
                     id="a-percentage-is-of-the-chosen-card"),
        pytest.param(wants(ask(9, name="a"), ask(9, name="b")), two().view(), {"a": [0], "b": [1]},
                     id="containers-go-to-different-cards-when-they-must"),
        pytest.param(wants(ask(5, name="a"), ask(5, name="b")), two().view(), {"a": [0], "b": [0]},
                     id="and-to-the-same-card-when-that-packs"),
        pytest.param(wants(ask(9, name="a"), ask(7, name="b"), together=True), two().taken(0, 1).view(),
                     {"a": [1], "b": [1]}, id="together-means-the-same-card"),
        pytest.param(wants(ask(4, cards=2, name="a"), ask(2, cards=2, name="b"), together=True),
                     two().card(size=16).taken(1, 14).view(), {"a": [0, 2], "b": [0, 2]},
                     id="together-on-several-cards-means-the-same-cards"),
        pytest.param(wants(ask(9, name="i", role=Role.INIT), ask(3, name="a")), two().taken(1, 10).view(),
                     {"i": [0], "a": [1]}, id="an-init-container-goes-elsewhere-if-it-must"),
        pytest.param(wants(ask(9, name="i", role=Role.INIT), ask(3, name="a")), two().view(), {"i": [0], "a": [0]},
                     id="an-init-container-goes-where-its-pod-is-and-reuses-the-capacity"),
        pytest.param(wants(ask(9, name="s", role=Role.SIDECAR), ask(9, name="i", role=Role.INIT), ask(1, name="a")),
                     two().view(), {"s": [0], "i": [1], "a": [0]}, id="a-sidecar-is-there-while-later-inits-run"),
        pytest.param(wants(ask(9, name="i", role=Role.INIT), ask(9, name="s", role=Role.SIDECAR), ask(1, name="a")),
                     node().card(size=16).view(), {"i": [0], "s": [0], "a": [0]}, id="but-not-while-earlier-inits-run"),
        pytest.param(wants(ask(4, name="a"), ask(3, name="b"), ask(3, name="c"), ask(3, name="d")),
                     node().cards(2, size=8).taken(0, 1).taken(1, 2).view(),
                     {"a": [0], "b": [0], "c": [1], "d": [1]}, id="the-search-goes-back-when-the-tightest-was-wrong"),
        pytest.param(wants(ask(2), models=(ModelRule(("t4",)),)), node().card("A100", 8).card("Tesla T4", 8).view(),
                     {"main": [1]}, id="a-model-is-chosen-among-mixed-cards"),
        pytest.param(wants(ask(2, cards=2), numa=Strength.REQUIRE),
                     node().card(size=8, numa=0).card(size=8, numa=1).card(size=8, numa=1).view(), {"main": [1, 2]},
                     id="one-NUMA-node-is-found"),
        pytest.param(wants(ask(2, cards=2), numa=Strength.PREFER),
                     node().card(size=8, numa=0).card(size=8, numa=1).view(), {"main": [0, 1]},
                     id="a-preferred-NUMA-node-is-given-up-when-there-is-none"),
        pytest.param(wants(ask(2, cards=2)), node().cards(4, size=8).taken(0, 2).linked(*FOUR).view(), {"main": [0, 1]},
                     id="links-decide-among-equals"),
        pytest.param(wants(ask(whole=True, cards=2)), node().cards(4, size=8).taken(0, 2).linked(*FOUR).view(),
                     {"main": [2, 3]}, id="whole-cards-come-linked"),
        pytest.param(wants(ask(2)), node().card(size=8, slots=1).taken(0, 2).card(size=16, slots=1).view(),
                     {"main": [1]}, id="a-card-without-a-slot-is-left-out"),
        pytest.param(wants(ask(2), dialect="gpushare"), node().card(size=8, slots=1).taken(0, 2).view(), {"main": [0]},
                     id="dialects-that-count-memory-need-no-slot"),
    ],
)  # fmt: skip
def test_where_it_goes(request_: PodRequest, view: NodeView, want: dict[str, list[int]]) -> None:
    assert cards_of(place(request_, view)) == want


@pytest.mark.parametrize(
    ("policy", "want"),
    [
        pytest.param("binpack", [0], id="binpack-takes-the-tightest"),
        pytest.param("spread", [3], id="spread-takes-the-emptiest"),
        pytest.param("topology", [2], id="topology-takes-a-single-card-with-few-links"),
    ],
)
def test_card_policies(policy: str, want: list[int]) -> None:
    links = ((0, 9, 0, 9), (9, 0, 0, 9), (0, 0, 0, 0), (9, 9, 0, 0))
    view = node().cards(4, size=16).taken(0, 9).taken(1, 5).taken(2, 2).linked(*links).view()
    assert cards_of(place(wants(ask(4)), view, policy)) == {"main": want}


def test_topology_takes_the_best_linked_set_even_if_it_is_emptier() -> None:
    view = node().cards(4, size=16).taken(0, 4).taken(2, 4).linked(*FOUR).view()
    assert cards_of(place(wants(ask(4, cards=2)), view, "binpack")) == {"main": [0, 2]}
    assert cards_of(place(wants(ask(4, cards=2)), view, "topology")) == {"main": [0, 1]}


def test_random_is_repeatable_and_not_always_the_same() -> None:
    view = node().cards(8, size=16).view()
    drawn = [cards_of(place(wants(ask(4)), view, "random", seed))["main"][0] for seed in range(40)]
    assert drawn == [cards_of(place(wants(ask(4)), view, "random", seed))["main"][0] for seed in range(40)]
    assert len(set(drawn)) > 4


def test_the_pods_policy_wins_over_the_nodes_and_that_over_the_clusters() -> None:
    built = node().cards(2, size=16).taken(0, 4)
    assert cards_of(place(wants(ask(4)), built.view(), "spread")) == {"main": [1]}
    assert cards_of(place(wants(ask(4)), built.facts(card_policy="binpack").view(), "spread")) == {"main": [0]}
    assert cards_of(place(wants(ask(4), card_policy="spread"), built.view(), "binpack")) == {"main": [1]}


@pytest.mark.parametrize(
    ("request_", "view", "code", "requested", "found", "resolvable"),
    [
        pytest.param(wants(ask(1)), node().view(), NodeReason.NO_CARDS, 1, 0, False, id="no-card"),
        pytest.param(wants(ask(1)), two().facts(fault="AgentStale").view(), NodeReason.AGENT_SILENT, 1, 0, False,
                     id="a-node-out-of-use"),
        pytest.param(wants(ask(1, cards=3)), two().view(), NodeReason.TOO_FEW_CARDS, 3, 2, False, id="too-few-cards"),
        pytest.param(wants(ask(1), models=(ModelRule(("T4",)),)), two().view(), NodeReason.MODEL, 1, 0, False,
                     id="another-model"),
        pytest.param(wants(ask(1), uuids=frozenset({"x"})), two().view(), NodeReason.UUID, 1, 0, False,
                     id="another-uuid"),
        pytest.param(wants(ask(1)), two(mode="mig").view(), NodeReason.MODE, 1, 0, False, id="cards-in-MIG-mode"),
        pytest.param(wants(ask(1)), two(healthy=False).view(), NodeReason.UNHEALTHY, 1, 0, False, id="unhealthy"),
        pytest.param(wants(ask(1)), two(cordoned=True).view(), NodeReason.CORDONED, 1, 0, False, id="cordoned"),
        pytest.param(wants(ask(20)), two().view(), NodeReason.TOO_SMALL, 1, 0, False, id="more-than-any-card-has"),
        pytest.param(wants(ask(whole=True, cards=2)), two().taken(0, 1).view(), NodeReason.NOT_IDLE, 2, 1, True,
                     id="not-enough-idle-cards"),
        pytest.param(wants(ask(10)), two().taken(0, 9).taken(1, 9).view(), NodeReason.MEMORY, 1, 0, True,
                     id="enough-in-sum-but-not-on-one-card"),
        pytest.param(wants(ask(1, 60)), two().taken(0, 0, 50).taken(1, 0, 50).view(), NodeReason.CORES, 1, 0, True,
                     id="too-few-cores"),
        pytest.param(wants(ask(1)), two().taken(0, 0, 100).taken(1, 0, 100).view(), NodeReason.CORES, 1, 0, True,
                     id="a-card-without-free-cores-takes-no-pod"),
        pytest.param(wants(ask(1)), two(slots=1).taken(0).taken(1).view(), NodeReason.SLOTS, 1, 0, True, id="no-slot"),
        pytest.param(wants(ask(1, cards=2), numa=Strength.REQUIRE), node().card(numa=0).card(numa=1).view(),
                     NodeReason.NUMA, 2, 1, False, id="no-NUMA-node-has-enough"),
        pytest.param(wants(ask(1, cards=2), links=Strength.REQUIRE), two().linked((0, 0), (0, 0)).view(),
                     NodeReason.LINKS, 2, 1, False, id="no-linked-pair"),
        pytest.param(wants(ask(9, name="a"), ask(9, name="b")), two().taken(0, 10).view(),
                     NodeReason.TOGETHER, 2, 0, True, id="each-container-fits-but-not-both"),
        pytest.param(wants(ask(1), cpu=99_000), two().view(), NodeReason.CPU, 99_000, 64_000, False,
                     id="too-little-CPU"),
        pytest.param(wants(ask(1), host=600_000), two().view(), NodeReason.HOST_MEMORY, 600_000, 524_288, False,
                     id="too-little-host-memory"),
    ],
)  # fmt: skip
def test_why_not(
    request_: PodRequest, view: NodeView, code: NodeReason, requested: int, found: int, resolvable: bool
) -> None:
    assert place(request_, view) == Refusal(view.node.name, code, requested, found, resolvable)


def test_a_hostile_pod_is_given_up_in_bounded_time() -> None:
    view = node().cards(16, size=1000).view()
    awkward = [ask(334 + n, name=f"c{n}") for n in range(33)]  # two on a card, though in sum there is enough
    answer = place(wants(*awkward, dialect="vcuda"), view)
    assert isinstance(answer, Refusal)
    assert answer.code is NodeReason.SEARCH


def test_equal_sets_of_cards_are_tried_once() -> None:
    """Two containers of 14 whole cards on 24: there are two million sets, and none of them helps."""
    view = node().cards(24, size=16).view()
    answer = place(wants(ask(whole=True, cards=14, name="a"), ask(whole=True, cards=14, name="b")), view)
    assert isinstance(answer, Refusal)
    assert answer.code is NodeReason.TOGETHER


def test_a_pod_without_cpu_request_fits_where_cpu_is_overcommitted() -> None:
    view = NodeView(node=two().node(), free_by_card=two().view().free_by_card, cpu=-1000, memory=-5)
    assert isinstance(place(wants(ask(1)), view), Placement)
    assert isinstance(place(wants(ask(1), cpu=1), view), Refusal)


def test_a_dialect_without_slots_ignores_overcommitted_slots() -> None:
    view = node().card(size=16, slots=1).taken(0, 2).taken(0, 2).view()
    assert isinstance(place(wants(ask(2), dialect="nano"), view), Placement)
    assert isinstance(place(wants(ask(2)), view), Refusal)
