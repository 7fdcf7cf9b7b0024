"""The ledger, transition by transition. `test_promises` plays them in any order."""

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


def ledger(*events: Event) -> Ledger:
    made = Ledger(LedgerSettings(reserve_ttl=2, assume_ttl=30))
    made.handle(NodeSeen(node("n1", cpu="8").cards(2, size=16).node()))
    for event in events:
        made.handle(event)
        made.check()
    return made


def free(made: Ledger, card: int = 0) -> int:
    return made.fleet.view("n1").free_by_card[card].memory


ASSUMED, CONFIRMED, RESERVED = AllocationState.ASSUMED, AllocationState.CONFIRMED, AllocationState.RESERVED
PENCIL, ASSUME, CONFIRM = Reserved(holds("a", 10), 0), Assumed(holds("a", 10), 0), Confirmed(holds("a", 10))


@pytest.mark.parametrize(
    ("before", "event", "state", "told", "left"),
    [
        pytest.param([], PENCIL, RESERVED, [], 6, id="a-pencil-holds"),
        pytest.param([PENCIL], Unreserved("a"), None, [Freed("n1")], 16, id="a-pencil-is-rubbed-out"),
        pytest.param([PENCIL], Reserved(holds("a", 4), 1), RESERVED, [], 12, id="a-new-filter-rubs-it-out"),
        pytest.param([PENCIL], Tick(2), None, [Freed("n1")], 16, id="a-pencil-ends-in-time"),
        pytest.param([PENCIL], Tick(1.9), RESERVED, [], 6, id="but-not-before"),
        pytest.param([PENCIL], ASSUME, ASSUMED, [], 6, id="bind-follows-filter"),
        pytest.param([], ASSUME, ASSUMED, [], 6, id="bind-without-filter"),
        pytest.param([ASSUME], Unreserved("a"), ASSUMED, [], 6, id="rubbing-does-not-undo-a-bind"),
        pytest.param([ASSUME], ASSUME, ASSUMED, [], 6, id="a-repeated-bind-changes-nothing"),
        pytest.param([ASSUME], Assumed(holds("a", 4), 0), ASSUMED, [Denied("a", "the pod is assumed on n1")], 6,
                     id="a-different-bind-is-denied"),
        pytest.param([ASSUME], PENCIL, ASSUMED, [Denied("a", "the pod is assumed on n1")], 6,
                     id="a-bound-pod-is-not-pencilled"),
        pytest.param([ASSUME], Tick(30), ASSUMED, [VerifyBind("a")], 6, id="an-old-bind-is-looked-up-not-dropped"),
        pytest.param([ASSUME], Forgotten("a"), None, [Freed("n1")], 16, id="a-refused-bind-frees"),
        pytest.param([ASSUME], CONFIRM, CONFIRMED, [], 6, id="the-watch-confirms"),
        pytest.param([ASSUME], Confirmed(holds("a", 4)), CONFIRMED, [Freed("n1")], 12, id="the-truth-wins"),
        pytest.param([CONFIRM], Forgotten("a"), CONFIRMED, [], 6, id="a-late-error-does-not-undo-the-truth"),
        pytest.param([CONFIRM], CONFIRM, CONFIRMED, [], 6, id="seen-twice-is-held-once"),
        pytest.param([CONFIRM], Corrected("a", grant("a", 3)), CONFIRMED, [Freed("n1")], 13, id="a-correction"),
        pytest.param([CONFIRM], PodGone("a"), None, [Freed("n1")], 16, id="gone-is-free"),
        pytest.param([CONFIRM], PodsListed(()), None, [Freed("n1")], 16, id="what-a-list-lacks-is-gone"),
        pytest.param([ASSUME], PodsListed(()), ASSUMED, [], 6, id="a-bind-in-flight-may-be-newer-than-the-list"),
        pytest.param([], PodsListed((holds("a", 5),)), CONFIRMED, [], 11, id="what-a-list-shows-is-held"),
        pytest.param([Confirmed(holds("b", 10))], PENCIL, None, [Denied("a", "no room on GPU-n1-0 of node n1")], 6,
                     id="a-sold-tile-is-not-sold-again"),
        pytest.param([], Corrected("a", grant("a", 3)), None, [], 16, id="nothing-to-correct"),
        pytest.param([], PodGone("a"), None, [], 16, id="a-stranger-leaves"),
    ],
)  # fmt: skip
def test_transitions(
    before: list[Event], event: Event, state: AllocationState | None, told: list[Instruction], left: int
) -> None:
    made = ledger(*before)
    assert made.handle(event) == told
    made.check()
    entry = made.entry("a")
    assert (entry.state if entry else None) == state
    assert free(made) == left


def test_a_pod_that_came_around_us_pushes_a_pencil_off_its_card() -> None:
    made = ledger(PENCIL)
    assert made.handle(Confirmed(holds("b", 10))) == []
    assert made.entry("a") is None
    made.check()


def test_what_the_cluster_oversells_is_reported_once_and_can_be_lived_with() -> None:
    made = ledger(CONFIRM)
    assert made.handle(Confirmed(holds("b", 10))) == [Conflict("b", "n1", ("GPU-n1-0",))]
    assert made.handle(Confirmed(holds("b", 10))) == []
    assert free(made) == -4
    made.check()
    assert made.handle(Reserved(holds("c", 1), 0)) == [Denied("c", "no room on GPU-n1-0 of node n1")]
    made.handle(PodGone("a"))
    made.check()
    assert free(made) == 6


def test_pods_that_changed_places_are_no_conflict() -> None:
    made = ledger(Confirmed(holds("a", 10, card=0)))
    assert made.handle(PodsListed((holds("b", 10, card=0), holds("a", 10, card=1)))) == [Freed("n1")]
    made.check()


def test_a_mended_dispute_is_over_and_the_audit_is_strict_again() -> None:
    made = ledger(CONFIRM, Confirmed(holds("b", 10)), PodGone("a"))
    made.fleet.hold("n1", grant("x", 9).uses())
    with pytest.raises(Overcommitted):
        made.check()


def test_a_card_whose_cores_are_sold_out_takes_nobody() -> None:
    whole = Grant(pod="w", node="n1", dialect="hami", containers=(ContainerGrant("m", (Tile("GPU-n1-0", 0, 3, 100),)),))
    made = ledger(Confirmed(Allocation(pod="w", node="n1", grant=whole)))
    assert made.handle(Assumed(holds("a", 1), 0)) == [Denied("a", "no room on GPU-n1-0 of node n1")]


def test_a_card_that_comes_back_smaller_is_reported_with_the_pod_that_came_last() -> None:
    made = ledger(Confirmed(holds("a", 6, started=1)), Confirmed(holds("b", 6, started=2)))
    told = made.handle(NodeSeen(node("n1", cpu="8").cards(2, size=8).node()))
    assert told == [Conflict("b", "n1", ("GPU-n1-0",), shrunk=True), Freed("n1")]
    made.check()


def test_a_node_may_go_and_come_back_with_its_pods_still_in_the_book() -> None:
    made = ledger(CONFIRM, Reserved(holds("b", 2), 0))
    made.handle(NodeGone("n1"))
    assert "n1" not in made.fleet
    assert made.entry("b") is None
    made.handle(NodeSeen(node("n1", cpu="8").cards(2, size=16).node()))
    assert free(made) == 6
    made.check()


def test_a_card_that_falls_ill_keeps_its_holders_for_when_it_recovers() -> None:
    made = ledger(CONFIRM)
    made.handle(NodeSeen(node("n1", cpu="8").cards(2, size=16, healthy=False).node()))
    assert made.fleet.best(wants(ask(1))) == []
    made.handle(NodeSeen(node("n1", cpu="8").cards(2, size=16).node()))
    assert free(made) == 6
    assert made.handle(NodeSeen(node("n1", cpu="8").cards(2, size=16).node())) == []


class TestPromises:
    """Room that is being made for a pod."""

    PROMISE = Nominated(holds("a", 10), until=20)

    def test_others_do_not_get_the_room(self) -> None:
        made = ledger(Confirmed(holds("victim", 16)), self.PROMISE, PodGone("victim"))
        assert made.handle(Reserved(holds("b", 10), 0)) == [Denied("b", "no room on GPU-n1-0 of node n1")]
        assert made.handle(Reserved(holds("b", 6), 0)) == []

    def test_while_the_victims_leave_the_card_is_more_than_full_and_nobody_is_alarmed(self) -> None:
        made = ledger(Confirmed(holds("victim", 16)), self.PROMISE)
        assert free(made) == -10

    def test_its_own_promise_and_pencil_do_not_stand_in_its_way(self) -> None:
        made = ledger(self.PROMISE)
        with made.without_claims_of("a") as fleet:
            assert fleet.view("n1").free_by_card[0].memory == 16
        assert free(made) == 6
        assert made.handle(Assumed(holds("a", 10), 0)) == []
        with made.without_claims_of("b") as fleet:
            assert fleet.view("n1").free_by_card[0].memory == 6

    def test_a_refused_bind_falls_back_on_the_promise(self) -> None:
        made = ledger(self.PROMISE, ASSUME, Forgotten("a"))
        assert free(made) == 6
        assert made.nomination("a") is not None

    def test_it_ends_in_time_or_when_the_pod_runs_or_goes(self) -> None:
        assert free(ledger(self.PROMISE, Tick(20))) == 16
        assert free(ledger(self.PROMISE, PodGone("a"))) == 16
        made = ledger(self.PROMISE, CONFIRM)
        assert free(made) == 6
        assert made.nomination("a") is None

    def test_it_can_be_withdrawn(self) -> None:
        made = ledger(self.PROMISE)
        assert made.handle(Withdrawn("a")) == [Freed("n1")]
        assert (free(made), made.nominations()) == (16, [])
        assert made.handle(Withdrawn("a")) == []

    def test_only_those_who_are_more_important_may_take_the_room(self) -> None:
        made = ledger(Nominated(holds("a", 10, priority=5), until=20))
        for priority, seen in ((5, 6), (6, 16)):
            with made.without_claims_of("b", priority) as fleet:
                assert fleet.view("n1").free_by_card[0].memory == seen
        assert made.handle(Reserved(holds("b", 10, priority=5), 0)) != []
        assert made.handle(Reserved(holds("b", 10, priority=6), 0)) == []
        made.check()

    def test_one_open_plan_per_pod(self) -> None:
        made = ledger(self.PROMISE, Nominated(holds("a", 4, card=1), until=30))
        assert (free(made), free(made, 1)) == (16, 12)

    def test_a_bound_pod_needs_none(self) -> None:
        assert ledger(CONFIRM).handle(self.PROMISE) == [Denied("a", "the pod is confirmed on n1")]


def test_the_lowest_priority_is_that_of_pods_with_cards() -> None:
    made = ledger(Confirmed(Allocation(pod="cpu", node="n1", priority=-7)))
    assert made.lowest_priority() is None
    for event in (Reserved(holds("a", 1, priority=3), 0), Confirmed(holds("b", 1, priority=9))):
        made.handle(event)
    assert made.lowest_priority() == 3
    made.handle(PodGone("a"))
    assert made.lowest_priority() == 9


def test_the_audit_tells_the_story_of_a_lost_count() -> None:
    made = ledger(CONFIRM)
    made.fleet.hold("n1", grant("x", 1).uses())
    with pytest.raises(Overcommitted, match=r"(?s)GPU-n1-0 of n1 .* Story:\n.*\n  Confirmed\(.*ns/a"):
        made.check()


def test_holders_are_the_pods_on_the_node_for_preemption() -> None:
    made = ledger(
        Confirmed(holds("a", 3, priority=7, started=5)), Confirmed(Allocation(pod="cpu", node="n1", cpu=2000))
    )
    found = made.holders("n1")
    assert [(h.pod, h.priority, h.cpu, len(h.uses)) for h in found] == [("a", 7, 0, 1), ("cpu", 0, 2000, 0)]
    assert made.holders("elsewhere") == []
    assert made.fleet.view("n1").cpu == 6000


def test_pencils_are_counted() -> None:
    made = ledger(PENCIL, Assumed(holds("b", 1), 0))
    assert made.reservations() == 1
    assert {e.allocation.pod for e in made.entries()} == {"a", "b"}
