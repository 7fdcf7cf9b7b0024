"""Why a pod is pending, and the smallest change that would fit; a suggested change really fits."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputile.engine.explanation import explain
from gputile.engine.fleet.fleet import Fleet
from gputile.engine.victims import Victim
from gputile.model.cards import NodeView, Use
from gputile.model.refusals import NodeReason
from gputile.model.requests import ModelRule, PodRequest
from gputile.testing.builders import NodeBuilder, ask, node, wants
from tests.effort import examples
from tests.engine.strategies import requests, views
from tests.engine.test_agreement import fleet_of


def cluster() -> tuple[Fleet, dict[str, list[Victim]]]:
    """n1: two A100 of 80 GiB, each with 50 GiB taken by one pod; n2: one T4 of 16 GiB, empty."""
    fleet = Fleet()
    fleet.set_node(node("n1", cpu="8").cards(2, "A100", "80Gi").node())
    fleet.set_node(node("n2", cpu="8").card("T4", "16Gi").node())
    pods = [Victim(pod=f"p{n}", name=f"ns/p{n}", uses={f"GPU-n1-{n}": Use(51200, 30, 1)}, started=n) for n in range(2)]
    for pod in pods:
        fleet.hold("n1", pod.uses)
    return fleet, {"n1": pods, "n2": []}


@pytest.mark.parametrize(
    ("request_", "lines"),
    [
        pytest.param(
            wants(ask("40Gi")),
            [
                "0/2 nodes are available: 1 node(s) have too little free memory on a single GPU, "
                "1 node(s) have GPUs smaller than requested.",
                "  nearest: n1: 40 GiB requested on one GPU, the freest has 30 GiB",
                "  nearest: n2: 40 GiB requested on one GPU, the largest has 16 GiB",
                "  would fit: at most 30 GiB per GPU instead of 40 GiB, on n1",
                "  would fit: as it is, once ns/p1 ends on n1",
            ],
            id="too-much-memory",
        ),
        pytest.param(
            wants(ask("1Gi", cores=80), models=(ModelRule(("A100",)),)),
            [
                "0/2 nodes are available: 1 node(s) have too few free cores on a single GPU, "
                "1 node(s) have too few GPUs of the requested model.",
                "  nearest: n1: 80 % of the cores requested on one GPU, the freest has 70 %",
                "  nearest: n2: one GPU of model A100 requested, has T4",
                "  would fit: at most 70 % of the cores instead of 80 %, on n1",
                "  would fit: model T4, on n2",
                "  would fit: as it is, once ns/p1 ends on n1",
            ],
            id="too-many-cores-on-that-model",
        ),
        pytest.param(
            wants(ask(whole=True, cards=2)),
            [
                "0/2 nodes are available: 1 node(s) have too few idle GPUs, 1 node(s) have fewer GPUs than requested.",
                "  nearest: n1: has too few idle GPUs: 2 requested, 0 found",
                "  nearest: n2: has fewer GPUs than requested: 2 requested, 1 found",
                "  would fit: a tile of at most 30 GiB per GPU instead of the whole GPU, on n1",
                "  would fit: 1 GPU per container instead of 2, on n2",
                "  would fit: as it is, once ns/p0, ns/p1 end on n1",
            ],
            id="whole-cards",
        ),
        pytest.param(
            wants(ask("1Gi"), cpu=9_000),
            [
                "0/2 nodes are available: 2 node(s) have too little free CPU.",
                "  nearest: n1: 9 CPU requested, 8 free",
                "  nearest: n2: 9 CPU requested, 8 free",
                "  no smaller request would fit either; add a node with such GPUs",
            ],
            id="CPU",
        ),
    ],
)
def test_the_lines_of_an_explanation(request_: PodRequest, lines: list[str]) -> None:
    fleet, holders = cluster()
    assert explain(request_, fleet, holders).lines() == lines


def test_a_pod_that_fits_has_nothing_to_explain() -> None:
    fleet, holders = cluster()
    explanation = explain(wants(ask("1Gi")), fleet, holders)
    assert (explanation.fitting, explanation.changes) == (2, ())
    assert explanation.summary == "2/2 nodes are available."


def test_reasons_are_counted_with_the_nodes_that_eviction_could_make_fit() -> None:
    fleet, holders = cluster()
    reasons = explain(wants(ask("40Gi")), fleet, holders).reasons
    assert [(r.code, r.nodes, r.resolvable) for r in reasons] == [
        (NodeReason.MEMORY, 1, 1),
        (NodeReason.TOO_SMALL, 1, 0),
    ]


@examples(30)
@given(requests(), st.tuples(*(views(f"n{n}") for n in range(2))))
def test_any_refusal_can_be_explained_and_any_change_names_a_node(
    request: PodRequest, node_views: tuple[NodeView, ...]
) -> None:
    explanation = explain(request, fleet_of(*node_views))
    assert explanation.fitting + sum(reason.nodes for reason in explanation.reasons) == explanation.nodes == 2
    assert {change.node for change in explanation.changes} <= {"n0", "n1"}
    assert all(len(line) < 300 for line in explanation.lines())
    msgspec.json.encode(explanation)


def fleet_with(*builders: NodeBuilder) -> Fleet:
    return fleet_of(*(builder.view() for builder in builders))


@pytest.mark.parametrize(
    ("fleet", "request_", "text"),
    [
        pytest.param(
            fleet_with(node("n").card(size="80Gi").taken(0, 0, 70).card(size="8Gi")),
            wants(ask("10Gi", cores=50)),
            "50 % of the cores requested on one GPU, the freest has 30 %",
            id="cores-are-those-of-cards-with-the-memory",
        ),
        pytest.param(
            fleet_with(node("n").card(size="20Gi").taken(0, "10Gi")),
            wants(ask("1Gi", name="a"), ask("15Gi", name="b")),
            "15 GiB requested on one GPU, the freest has 10 GiB",
            id="of-several-containers-the-one-that-fails",
        ),
        pytest.param(
            fleet_with(node("n").card(size="80Gi").card(size="16Gi")),
            wants(ask("40Gi", cards=2)),
            "40 GiB requested on each of 2 GPUs, one of the 2 largest has 16 GiB",
            id="of-several-cards-the-deciding-one",
        ),
        pytest.param(
            fleet_with(node("n").card("A100", "80Gi").card("T4", "16Gi").taken(1, "1Gi")),
            wants(ask(percent=100), models=(ModelRule(("T4",)),)),
            "16 GiB requested on one GPU, the freest has 15 GiB",
            id="a-percentage-is-of-an-eligible-card",
        ),
    ],
)
def test_the_numbers_are_those_of_the_deciding_card(fleet: Fleet, request_: PodRequest, text: str) -> None:
    assert explain(request_, fleet).misses[0].text == text


def test_less_memory_is_named_in_steps_that_the_dialect_can_write() -> None:
    fleet = fleet_with(node("n").card(size=5000))
    request = msgspec.structs.replace(wants(ask("6Gi"), dialect="gpushare"), block=1024)
    assert explain(request, fleet).changes[0].text == "at most 4 GiB per GPU instead of 6 GiB, on n"


def test_a_requested_percentage_is_shown_as_a_percentage() -> None:
    fleet = fleet_with(node("n").card(size=100).taken(0, 60))
    assert explain(wants(ask(percent=50)), fleet).changes[0].text == "at most 40 MiB per GPU instead of 50 %, on n"
