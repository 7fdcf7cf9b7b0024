"""Why a pod waits, and the smallest change that would fit; a change that is named really fits."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputile.engine.explanation import explain
from gputile.engine.fleet.fleet import Fleet
from gputile.engine.victims import Victim
from gputile.model.cards import NodeView
from gputile.model.grants import Use
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
                "0/2 nodes fit: 1 too little free memory on a single GPU, 1 GPUs smaller than wanted.",
                "  nearest: n1: wants 40 GiB on one GPU, the freest has 30 GiB",
                "  nearest: n2: wants 40 GiB on one GPU, the largest has 16 GiB",
                "  would fit: at most 30720 MiB per card instead of 40960, on n1",
                "  would fit: as it is, once ns/p1 ends on n1",
            ],
            id="too-much-memory",
        ),
        pytest.param(
            wants(ask("1Gi", cores=80), models=(ModelRule(("A100",)),)),
            [
                "0/2 nodes fit: 1 too few free cores on a single GPU, 1 too few GPUs of a wanted model.",
                "  nearest: n1: wants 80 % of the cores on one GPU, the freest has 70 %",
                "  nearest: n2: wants one GPU of another model, has T4",
                "  would fit: at most 70 % of the cores instead of 80, on n1",
                "  would fit: the model T4, on n2",
                "  would fit: as it is, once ns/p1 ends on n1",
            ],
            id="too-many-cores-on-that-model",
        ),
        pytest.param(
            wants(ask(whole=True, cards=2)),
            [
                "0/2 nodes fit: 1 too few idle GPUs, 1 fewer GPUs than wanted.",
                "  nearest: n1: too few idle GPUs: wants 2, found 0",
                "  nearest: n2: fewer GPUs than wanted: wants 2, found 1",
                "  would fit: a tile of at most 30720 MiB per card instead of the whole, on n1",
                "  would fit: 1 card per container instead of 2, on n2",
                "  would fit: as it is, once ns/p0, ns/p1 end on n1",
            ],
            id="whole-cards",
        ),
        pytest.param(
            wants(ask("1Gi"), cpu=9_000),
            [
                "0/2 nodes fit: 2 too little free CPU.",
                "  nearest: n1: wants 9 CPU, 8 free",
                "  nearest: n2: wants 9 CPU, 8 free",
                "  nothing smaller would fit either; add a node that has such cards",
            ],
            id="CPU",
        ),
    ],
)
def test_the_story(request_: PodRequest, lines: list[str]) -> None:
    fleet, holders = cluster()
    assert explain(request_, fleet, holders).lines() == lines


def test_a_pod_that_fits_has_nothing_to_explain() -> None:
    fleet, holders = cluster()
    told = explain(wants(ask("1Gi")), fleet, holders)
    assert (told.fitting, told.changes) == (2, ())
    assert told.summary == "2/2 nodes fit."


def test_reasons_are_counted_with_what_eviction_could_cure() -> None:
    fleet, holders = cluster()
    reasons = explain(wants(ask("40Gi")), fleet, holders).reasons
    assert [(r.code, r.nodes, r.resolvable) for r in reasons] == [
        (NodeReason.MEMORY, 1, 1),
        (NodeReason.TOO_SMALL, 1, 0),
    ]


@examples(30)
@given(requests(), st.tuples(*(views(f"n{n}") for n in range(2))))
def test_any_refusal_can_be_explained_and_any_change_names_a_node(
    request: PodRequest, found: tuple[NodeView, ...]
) -> None:
    told = explain(request, fleet_of(*found))
    assert told.fitting + sum(reason.nodes for reason in told.reasons) == told.nodes == 2
    assert {change.node for change in told.changes} <= {"n0", "n1"}
    assert all(len(line) < 300 for line in told.lines())
    msgspec.json.encode(told)


def one(*builders: NodeBuilder) -> Fleet:
    return fleet_of(*(builder.view() for builder in builders))


@pytest.mark.parametrize(
    ("fleet", "request_", "text"),
    [
        pytest.param(
            one(node("n").card(size="80Gi").taken(0, 0, 70).card(size="8Gi")),
            wants(ask("10Gi", cores=50)),
            "wants 50 % of the cores on one GPU, the freest has 30 %",
            id="cores-are-those-of-cards-with-the-memory",
        ),
        pytest.param(
            one(node("n").card(size="20Gi").taken(0, "10Gi")),
            wants(ask("1Gi", name="a"), ask("15Gi", name="b")),
            "wants 15 GiB on one GPU, the freest has 10 GiB",
            id="of-several-containers-the-one-that-fails",
        ),
        pytest.param(
            one(node("n").card(size="80Gi").card(size="16Gi")),
            wants(ask("40Gi", cards=2)),
            "wants 40 GiB on each of 2 GPUs, the largest has 16 GiB",
            id="of-several-cards-the-one-that-decides",
        ),
        pytest.param(
            one(node("n").card("A100", "80Gi").card("T4", "16Gi").taken(1, "1Gi")),
            wants(ask(percent=100), models=(ModelRule(("T4",)),)),
            "wants 16 GiB on one GPU, the freest has 15 GiB",
            id="a-percentage-is-of-an-eligible-card",
        ),
    ],
)
def test_the_figures_are_those_of_the_card_that_decides(fleet: Fleet, request_: PodRequest, text: str) -> None:
    assert explain(request_, fleet).misses[0].text == text


def test_less_memory_is_named_in_steps_that_the_dialect_can_write() -> None:
    fleet = one(node("n").card(size=5000))
    asked = msgspec.structs.replace(wants(ask("6Gi"), dialect="gpushare"), block=1024)
    assert explain(asked, fleet).changes[0].text == "at most 4096 MiB per card instead of 6144, on n"


def test_a_percentage_is_called_what_it_is() -> None:
    fleet = one(node("n").card(size=100).taken(0, 60))
    assert explain(wants(ask(percent=50)), fleet).changes[0].text == "at most 40 MiB per card instead of 50 %, on n"
