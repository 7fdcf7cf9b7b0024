"""The ledger, transition by transition. `test_ledger_invariants` runs them in any order."""

import pytest

from gputile.ledger.events import (
    Assumed,
    Confirmed,
    Conflict,
    Corrected,
    Denied,
    Event,
    Forgotten,
    Freed,
    Instruction,
    NodeGone,
    NodeSeen,
    Nominated,
    PodGone,
    PodsListed,
    Reserved,
    Tick,
    Unreserved,
    VerifyBind,
    Withdrawn,
)
from gputile.ledger.ledger import AllocationState, Ledger, LedgerSettings
from gputile.model.allocations import Allocation
from gputile.model.errors import Overcommitted
from gputile.model.grants import ContainerGrant, Grant, Tile
from gputile.testing.builders import ask, node, wants


def grant(pod: str, memory: int, card: int = 0, name: str = "n1") -> Grant:
    tile = Tile(f"GPU-{name}-{card}", card, memory, 0)
    return Grant(pod=pod, node=name, dialect="gputile", containers=(ContainerGrant("main", (tile,)),))


def holds(pod: str, memory: int, card: int = 0, **rest: float) -> Allocation:
    return Allocation(pod=pod, name=f"ns/{pod}", node="n1", grant=grant(pod, memory, card), **rest)  # type: ignore[arg-type]


def ledger_after(*events: Event) -> Ledger:
    ledger = Ledger(LedgerSettings(reserve_ttl=2, assume_ttl=30))
    ledger.handle(NodeSeen(node("n1", cpu="8").cards(2, size=16).node()))
    for event in events:
        ledger.handle(event)
        ledger.check()
    return ledger


def free(ledger: Ledger, card: int = 0) -> int:
    return ledger.fleet.view("n1").free_by_card[card].memory


ASSUMED, CONFIRMED, RESERVED = AllocationState.ASSUMED, AllocationState.CONFIRMED, AllocationState.RESERVED
RESERVE, ASSUME, CONFIRM = Reserved(holds("a", 10), 0), Assumed(holds("a", 10), 0), Confirmed(holds("a", 10))
NO_CAPACITY = "too little free capacity on GPU-n1-0 of node n1"


@pytest.mark.parametrize(
    ("before", "event", "state", "instructions", "left"),
    [
        pytest.param([], RESERVE, RESERVED, [], 6, id="a-reservation-holds"),
        pytest.param([RESERVE], Unreserved("a"), None, [Freed("n1")], 16, id="a-reservation-is-removed"),
        pytest.param([RESERVE], Reserved(holds("a", 4), 1), RESERVED, [], 12, id="a-new-filter-call-replaces-it"),
        pytest.param([RESERVE], Tick(2), None, [Freed("n1")], 16, id="a-reservation-expires"),
        pytest.param([RESERVE], Tick(1.9), RESERVED, [], 6, id="but-not-before-its-deadline"),
        pytest.param([RESERVE], ASSUME, ASSUMED, [], 6, id="bind-follows-filter"),
        pytest.param([], ASSUME, ASSUMED, [], 6, id="bind-without-filter"),
        pytest.param([ASSUME], Unreserved("a"), ASSUMED, [], 6, id="unreserve-does-not-undo-a-bind"),
        pytest.param([ASSUME], ASSUME, ASSUMED, [], 6, id="a-repeated-bind-changes-nothing"),
        pytest.param([ASSUME], Assumed(holds("a", 4), 0), ASSUMED, [Denied("a", "the pod is assumed on n1")], 6,
                     id="a-different-bind-is-denied"),
        pytest.param([ASSUME], RESERVE, ASSUMED, [Denied("a", "the pod is assumed on n1")], 6,
                     id="a-bound-pod-is-not-reserved"),
        pytest.param([ASSUME], Tick(30), ASSUMED, [VerifyBind("a")], 6, id="an-old-bind-is-looked-up-not-dropped"),
        pytest.param([ASSUME], Forgotten("a"), None, [Freed("n1")], 16, id="a-rejected-bind-frees"),
        pytest.param([ASSUME], CONFIRM, CONFIRMED, [], 6, id="the-watch-confirms"),
        pytest.param([ASSUME], Confirmed(holds("a", 4)), CONFIRMED, [Freed("n1")], 12, id="the-cluster-state-wins"),
        pytest.param([CONFIRM], Forgotten("a"), CONFIRMED, [], 6, id="a-late-error-does-not-undo-a-confirmed-bind"),
        pytest.param([CONFIRM], CONFIRM, CONFIRMED, [], 6, id="confirmed-twice-is-held-once"),
        pytest.param([CONFIRM], Corrected("a", grant("a", 3)), CONFIRMED, [Freed("n1")], 13, id="a-correction"),
        pytest.param([CONFIRM], PodGone("a"), None, [Freed("n1")], 16, id="a-pod-that-is-gone-frees"),
        pytest.param([CONFIRM], PodsListed(()), None, [Freed("n1")], 16, id="a-pod-missing-in-a-list-is-gone"),
        pytest.param([ASSUME], PodsListed(()), ASSUMED, [], 6, id="a-bind-in-flight-may-be-newer-than-the-list"),
        pytest.param([], PodsListed((holds("a", 5),)), CONFIRMED, [], 11, id="a-listed-pod-is-held"),
        pytest.param([Confirmed(holds("b", 10))], RESERVE, None, [Denied("a", NO_CAPACITY)], 6,
                     id="an-allocated-tile-is-not-allocated-again"),
        pytest.param([], Corrected("a", grant("a", 3)), None, [], 16, id="nothing-to-correct"),
        pytest.param([], PodGone("a"), None, [], 16, id="an-unknown-pod-is-gone"),
    ],
)  # fmt: skip
def test_transitions(
    before: list[Event], event: Event, state: AllocationState | None, instructions: list[Instruction], left: int
) -> None:
    ledger = ledger_after(*before)
    assert ledger.handle(event) == instructions
    ledger.check()
    entry = ledger.entry("a")
    assert (entry.state if entry else None) == state
    assert free(ledger) == left


def test_a_pod_bound_by_another_scheduler_removes_a_reservation_from_its_card() -> None:
    ledger = ledger_after(RESERVE)
    assert ledger.handle(Confirmed(holds("b", 10))) == []
    assert ledger.entry("a") is None
    ledger.check()


def test_a_card_overcommitted_by_the_cluster_is_reported_once() -> None:
    ledger = ledger_after(CONFIRM)
    assert ledger.handle(Confirmed(holds("b", 10))) == [Conflict("b", "n1", ("GPU-n1-0",))]
    assert ledger.handle(Confirmed(holds("b", 10))) == []
    assert free(ledger) == -4
    ledger.check()
    assert ledger.handle(Reserved(holds("c", 1), 0)) == [Denied("c", NO_CAPACITY)]
    ledger.handle(PodGone("a"))
    ledger.check()
    assert free(ledger) == 6


def test_pods_that_changed_places_do_not_conflict() -> None:
    ledger = ledger_after(Confirmed(holds("a", 10, card=0)))
    assert ledger.handle(PodsListed((holds("b", 10, card=0), holds("a", 10, card=1)))) == [Freed("n1")]
    ledger.check()


def test_after_a_resolved_conflict_the_audit_is_strict_again() -> None:
    ledger = ledger_after(CONFIRM, Confirmed(holds("b", 10)), PodGone("a"))
    ledger.fleet.hold("n1", grant("x", 9).uses())
    with pytest.raises(Overcommitted):
        ledger.check()


def test_a_card_without_free_cores_takes_no_pod() -> None:
    whole = Grant(pod="w", node="n1", dialect="hami", containers=(ContainerGrant("m", (Tile("GPU-n1-0", 0, 3, 100),)),))
    ledger = ledger_after(Confirmed(Allocation(pod="w", node="n1", grant=whole)))
    assert ledger.handle(Assumed(holds("a", 1), 0)) == [Denied("a", NO_CAPACITY)]


def test_a_card_that_shrank_is_reported_with_the_newest_pod() -> None:
    ledger = ledger_after(Confirmed(holds("a", 6, started=1)), Confirmed(holds("b", 6, started=2)))
    instructions = ledger.handle(NodeSeen(node("n1", cpu="8").cards(2, size=8).node()))
    assert instructions == [Conflict("b", "n1", ("GPU-n1-0",), shrunk=True), Freed("n1")]
    ledger.check()


def test_a_node_may_go_and_come_back_with_its_pods_still_in_the_ledger() -> None:
    ledger = ledger_after(CONFIRM, Reserved(holds("b", 2), 0))
    ledger.handle(NodeGone("n1"))
    assert "n1" not in ledger.fleet
    assert ledger.entry("b") is None
    ledger.handle(NodeSeen(node("n1", cpu="8").cards(2, size=16).node()))
    assert free(ledger) == 6
    ledger.check()


def test_an_unhealthy_card_keeps_its_pods_until_it_recovers() -> None:
    ledger = ledger_after(CONFIRM)
    ledger.handle(NodeSeen(node("n1", cpu="8").cards(2, size=16, healthy=False).node()))
    assert ledger.fleet.best(wants(ask(1))) == []
    ledger.handle(NodeSeen(node("n1", cpu="8").cards(2, size=16).node()))
    assert free(ledger) == 6
    assert ledger.handle(NodeSeen(node("n1", cpu="8").cards(2, size=16).node())) == []


class TestNominations:
    """Capacity that is kept for a pod that preempted others."""

    NOMINATE = Nominated(holds("a", 10), until=20)

    def test_other_pods_do_not_get_the_capacity(self) -> None:
        ledger = ledger_after(Confirmed(holds("victim", 16)), self.NOMINATE, PodGone("victim"))
        assert ledger.handle(Reserved(holds("b", 10), 0)) == [Denied("b", NO_CAPACITY)]
        assert ledger.handle(Reserved(holds("b", 6), 0)) == []

    def test_while_the_victims_terminate_the_card_is_overcommitted_without_an_alarm(self) -> None:
        ledger = ledger_after(Confirmed(holds("victim", 16)), self.NOMINATE)
        assert free(ledger) == -10
        assert ledger.overcommitted("victim") == []

    def test_its_own_nomination_and_reservation_do_not_block_it(self) -> None:
        ledger = ledger_after(self.NOMINATE)
        assert ledger.fleet_for("a").view("n1").free_by_card[0].memory == 16
        assert free(ledger) == 6
        assert ledger.handle(Assumed(holds("a", 10), 0)) == []
        assert ledger.fleet_for("b").view("n1").free_by_card[0].memory == 6

    def test_a_rejected_bind_falls_back_on_the_nomination(self) -> None:
        ledger = ledger_after(self.NOMINATE, ASSUME, Forgotten("a"))
        assert free(ledger) == 6
        assert ledger.nomination("a") is not None

    def test_it_ends_at_its_deadline_or_when_the_pod_runs_or_is_gone(self) -> None:
        assert free(ledger_after(self.NOMINATE, Tick(20))) == 16
        assert free(ledger_after(self.NOMINATE, PodGone("a"))) == 16
        ledger = ledger_after(self.NOMINATE, CONFIRM)
        assert free(ledger) == 6
        assert ledger.nomination("a") is None

    def test_it_can_be_withdrawn(self) -> None:
        ledger = ledger_after(self.NOMINATE)
        assert ledger.handle(Withdrawn("a")) == [Freed("n1")]
        assert (free(ledger), ledger.nominations()) == (16, [])
        assert ledger.handle(Withdrawn("a")) == []

    def test_only_pods_of_higher_priority_may_take_the_capacity(self) -> None:
        ledger = ledger_after(Nominated(holds("a", 10, priority=5), until=20))
        for priority, seen in ((5, 6), (6, 16)):
            assert ledger.fleet_for("b", priority).view("n1").free_by_card[0].memory == seen
        assert ledger.handle(Reserved(holds("b", 10, priority=5), 0)) != []
        assert ledger.handle(Reserved(holds("b", 10, priority=6), 0)) == []
        ledger.check()

    def test_a_pod_has_one_nomination(self) -> None:
        ledger = ledger_after(self.NOMINATE, Nominated(holds("a", 4, card=1), until=30))
        assert (free(ledger), free(ledger, 1)) == (16, 12)

    def test_a_bound_pod_gets_no_nomination(self) -> None:
        assert ledger_after(CONFIRM).handle(self.NOMINATE) == [Denied("a", "the pod is confirmed on n1")]


def test_the_lowest_priority_is_that_of_pods_with_cards() -> None:
    ledger = ledger_after(Confirmed(Allocation(pod="cpu", node="n1", priority=-7)))
    assert ledger.lowest_priority() is None
    for event in (Reserved(holds("a", 1, priority=3), 0), Confirmed(holds("b", 1, priority=9))):
        ledger.handle(event)
    assert ledger.lowest_priority() == 3
    ledger.handle(PodGone("a"))
    assert ledger.lowest_priority() == 9


def test_the_audit_shows_the_history_of_a_wrong_sum() -> None:
    ledger = ledger_after(CONFIRM)
    ledger.fleet.hold("n1", grant("x", 1).uses())
    with pytest.raises(Overcommitted, match=r"(?s)GPU-n1-0 of n1: .* History:\n.*\n  Confirmed\(.*ns/a"):
        ledger.check()


def test_holders_are_the_pods_on_the_node_for_preemption() -> None:
    ledger = ledger_after(
        Confirmed(holds("a", 3, priority=7, started=5)), Confirmed(Allocation(pod="cpu", node="n1", cpu=2000))
    )
    holders = ledger.holders("n1")
    assert [(h.pod, h.priority, h.cpu, len(h.uses)) for h in holders] == [("a", 7, 0, 1), ("cpu", 0, 2000, 0)]
    assert ledger.holders("elsewhere") == []
    assert ledger.fleet.view("n1").cpu == 6000


def test_reservations_are_counted() -> None:
    ledger = ledger_after(RESERVE, Assumed(holds("b", 1), 0))
    assert ledger.reservations() == 1
    assert {e.allocation.pod for e in ledger.entries()} == {"a", "b"}
