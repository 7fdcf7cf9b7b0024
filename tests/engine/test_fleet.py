"""The fleet as a whole: the best node and its equals, changes of nodes, and what a filter call sees."""

import pytest

from gputile.engine.explanation import explain
from gputile.engine.fleet import fleet as fleet_module
from gputile.engine.fleet.fleet import Fleet
from gputile.engine.placement.place import Placement
from gputile.engine.search_budget import SearchBudget
from gputile.model.cards import NodeView, Use
from gputile.model.errors import InputError
from gputile.model.refusals import SENTENCE, NodeReason
from gputile.model.requests import ContainerRequest, PodRequest, Role
from gputile.testing.builders import NodeBuilder, ask, node, wants
from tests.refusal_aliases import HAMI_ALIAS, VGPU_ALIAS


def fleet_with(*builders: NodeBuilder) -> Fleet:
    fleet = Fleet()
    for builder in builders:
        fleet.set_node(builder.node())
    return fleet


def three() -> Fleet:
    """n1 half full, n2 empty, n3 empty."""
    fleet = fleet_with(*(node(name, cpu="8").cards(2, size=16) for name in ("n1", "n2", "n3")))
    fleet.hold("n1", {"GPU-n1-0": Use(16, 0, 1)}, cpu=4000)
    return fleet


@pytest.mark.parametrize(
    ("policy", "want"),
    [
        pytest.param("binpack", ["n1"], id="binpack-fills-the-fullest"),
        pytest.param("spread", ["n2", "n3"], id="spread-takes-the-emptiest-and-its-equals"),
    ],
)
def test_the_best_node_and_its_equals(policy: str, want: list[str]) -> None:
    assert three().best(wants(ask(4)), policy) == want


def test_cpu_counts_in_binpack_and_spread() -> None:
    fleet = fleet_with(*(node(name, cpu="8").cards(2, size=16) for name in ("n1", "n2")))
    fleet.hold("n2", {}, cpu=2000)
    assert fleet.best(wants(ask(4)), "binpack") == ["n2"]
    assert fleet.best(wants(ask(4)), "spread") == ["n1"]


def test_slack_widens_and_keep_narrows_the_answer() -> None:
    fleet = three()
    assert set(fleet.best(wants(ask(4)), "binpack", slack=100.0)) == {"n1", "n2", "n3"}
    assert fleet.best(wants(ask(4)), "binpack", slack=100.0)[0] == "n1"
    assert len(fleet.best(wants(ask(4)), "spread", keep=1)) == 1


def test_only_the_nodes_that_were_asked_for_are_answered() -> None:
    assert three().best(wants(ask(4)), "binpack", among=["n3", "unknown"]) == ["n3"]
    assert [r.code for r in three().refusals(wants(ask(4)), ["n3", "unknown"])] == [NodeReason.UNKNOWN_NODE]


def test_a_pods_own_policy_decides() -> None:
    assert three().best(wants(ask(4), node_policy="spread"), "binpack") == ["n2", "n3"]


def test_topology_prefers_the_node_with_the_better_linked_cards() -> None:
    far, near = ((0, 1), (1, 0)), ((0, 5), (5, 0))
    fleet = fleet_with(node("far").cards(2).linked(*far), node("near").cards(2).linked(*near))
    assert fleet.best(wants(ask(whole=True, cards=2)), "topology") == ["near"]


def test_random_reaches_every_node() -> None:
    fleet = three()
    assert {fleet.best(wants(ask(4)), "random", seed=seed)[0] for seed in range(50)} == {"n1", "n2", "n3"}


def test_a_removed_node_is_gone_and_its_place_is_used_again() -> None:
    fleet = three()
    fleet.remove_node("n2")
    assert "n2" not in fleet
    assert fleet.best(wants(ask(4)), "spread") == ["n3"]
    fleet.set_node(node("n4", cpu="8").cards(1, size=99).node())
    assert fleet.best(wants(ask(50))) == ["n4"]
    assert len(fleet) == 3


def test_it_grows_with_nodes_and_with_cards_per_node() -> None:
    fleet = fleet_with(*(node(f"n{n}").cards(2, size=16) for n in range(100)), node("big").cards(16, size=16))
    fleet.hold("n7", {"GPU-n7-0": Use(3, 0, 1)})
    assert fleet.best(wants(ask(1, cards=16))) == ["big"]
    assert fleet.view("n7").free_by_card[0].memory == 13
    assert int(fleet.fits(wants(ask(16))).sum()) == 101


def test_a_changed_node_comes_back_empty_and_with_its_new_cards() -> None:
    fleet = three()
    fleet.set_node(node("n1", cpu="8").cards(3, size=32).node())
    assert fleet.best(wants(ask(30))) == ["n1"]
    assert fleet.view("n1").free_by_card[0].tenants == 0


def test_holding_on_an_unknown_node_or_card_changes_nothing() -> None:
    fleet = three()
    before = [fleet.view(name) for name in fleet.names()]
    fleet.hold("unknown", {"x": Use(1, 1, 1)})
    fleet.hold("n1", {"x": Use(1, 1, 1)})
    assert [fleet.view(name) for name in fleet.names()] == before


@pytest.mark.parametrize("words", [SENTENCE, HAMI_ALIAS, VGPU_ALIAS], ids=["sentences", "hami", "vgpu-manager"])
def test_every_reason_has_its_sentence_and_aliases(words: dict[NodeReason, str]) -> None:
    assert set(words) == set(NodeReason)


class TestOddClusters:
    """What other systems do to a cluster must not corrupt the arrays."""

    def test_a_card_overcommitted_many_times_takes_no_pod(self) -> None:
        fleet = three()
        for _ in range(3):
            fleet.hold("n2", {"GPU-n2-0": Use(2**31 - 1, 2**31 - 1, 1)})
        assert fleet.view("n2").free_by_card[0].memory < 0
        assert fleet.best(wants(ask(1), uuids=frozenset({"GPU-n2-0"}))) == []

    @pytest.mark.parametrize(("cards", "wanted", "fits"), [(256, 2, True), (255, 300, False), (300, 300, True)])
    def test_nodes_with_hundreds_of_cards_are_counted_right(self, cards: int, wanted: int, fits: bool) -> None:
        fleet = fleet_with(node("big").cards(cards, size=16))
        assert fleet.fits(wants(ask(1, cards=wanted))).tolist() == [fits]
        assert bool(fleet.best(wants(ask(1, cards=wanted)), "topology")) == fits

    def test_a_pod_without_cpu_request_fits_where_cpu_is_overcommitted(self) -> None:
        fleet = fleet_with(node("n", cpu="4").cards(1, size=16))
        fleet.hold("n", {}, cpu=5000)
        assert fleet.best(wants(ask(1))) == ["n"]
        assert [r.code for r in fleet.refusals(wants(ask(1), cpu=1))] == [NodeReason.CPU]

    def test_an_exclusive_init_container_beside_a_sidecar_is_rejected_as_by_place(self) -> None:
        fleet = fleet_with(node("n").card(size=16))
        alone = ContainerRequest(container="i", role=Role.INIT, cards=1, memory=3, cores=100, exclusive=True)
        request = wants(ask(3, name="s", role=Role.SIDECAR), alone)
        assert fleet.fits(request).tolist() == [isinstance(fleet.place(request, "n"), Placement)] == [False]

    def test_a_pod_without_gpu_fits_by_cpu_and_memory_alone(self) -> None:
        fleet = three()
        assert fleet.fits(wants(cpu=5000)).tolist() == [False, True, True]
        fleet.remove_node("n3")
        assert fleet.best(wants(cpu=5000), "spread") == ["n2"]

    def test_an_empty_fleet_answers(self) -> None:
        assert Fleet().best(wants(ask(1))) == []
        assert Fleet().refusals(wants(ask(1)), ["n"])[0].code is NodeReason.UNKNOWN_NODE
        assert explain(wants(ask(1)), Fleet()).lines() == [
            "0/0 nodes are available.",
            "  no node is known yet; add a node with GPUs, or check that its agent is running",
        ]

    def test_an_unknown_policy_is_an_error(self) -> None:
        with pytest.raises(InputError, match="policy 'tetris': does not exist; use one of binpack"):
            three().best(wants(ask(1)), "tetris")

    def test_slack_keeps_the_better_nodes(self) -> None:
        fleet = fleet_with(*(node(f"n{n}", cpu="8").cards(1, size=16) for n in range(20)))
        for n in range(20):
            fleet.hold(f"n{n}", {}, cpu=n * 100)
        assert fleet.best(wants(ask(1)), slack=100.0, keep=3) == ["n19", "n18", "n17"]


def test_a_pod_of_many_awkward_containers_is_searched_for_with_one_budget_for_all_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spent: list[SearchBudget] = []

    def counted(request: PodRequest, view: NodeView, budget: SearchBudget) -> None:
        spent.append(budget)
        while budget.spend():
            pass

    monkeypatch.setattr(fleet_module, "searched", counted)
    fleet = Fleet()
    for number in range(50):  # all different, so that each one is searched
        fleet.set_node(node(f"n{number}").cards(8, size=81000 + number).node())
    awkward = wants(*(ask(27100 + 300 * n, name=f"c{n}") for n in range(17)))  # in sum there is enough
    assert not fleet.fits(awkward).any()
    assert len(spent) == 4, "a node may have a quarter of the budget, which is for all of them"
    assert {refusal.code for refusal in fleet.refusals(awkward)} == {NodeReason.SEARCH}
