"""Unplaced GPUs: counted by number, and never allocated to another pod."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gputile.engine.placement.place import Placement
from gputile.ledger.events import Confirmed, Conflict, Event, Freed, NodeGone, NodeSeen, PodGone, PodsListed, Reserved
from gputile.ledger.ledger import Ledger
from gputile.model.allocations import Allocation
from gputile.model.grants import ContainerGrant, Grant, Tile
from gputile.testing.builders import ask, node, wants

NODE = node("n1").cards(4, "T4", 8192).facts(agent="hami").node()


def ledger_after(*events: Event) -> Ledger:
    ledger = Ledger()
    for event in (NodeSeen(NODE), *events):
        ledger.handle(event)
        ledger.check()
    return ledger


def unplaced(pod: str, count: int, where: str = "n1") -> Allocation:
    return Allocation(pod=pod, node=where, grant=Grant(pod=pod, node=where, dialect="", containers=(), unplaced=count))


def on(pod: str, card: int, memory: int = 8192, cores: int = 100) -> Allocation:
    tile = Tile(NODE.cards[card].uuid, card, memory, cores)
    grant = Grant(pod=pod, node="n1", dialect="hami", containers=(ContainerGrant("c0", (tile,)),))
    return Allocation(pod=pod, node="n1", grant=grant)


def whole_gpus_free(ledger: Ledger) -> int:
    """The largest number of whole GPUs that a new pod would get."""
    fits = [n for n in range(1, 5) if isinstance(ledger.fleet.place(wants(ask(whole=True, cards=n)), "n1"), Placement)]
    return max(fits, default=0)


def test_as_many_gpus_are_withheld_from_new_pods_as_are_held_unplaced() -> None:
    assert whole_gpus_free(ledger_after(Confirmed(unplaced("a", 3)))) == 1


def test_they_differ_from_gpus_that_other_pods_hold() -> None:
    assert whole_gpus_free(ledger_after(Confirmed(unplaced("a", 2)), Confirmed(on("b", 0)))) == 1


def test_a_pod_that_shows_up_on_a_kept_gpu_is_no_conflict() -> None:
    ledger = ledger_after(Confirmed(unplaced("a", 1)))
    kept = next(card.index for card in NODE.cards if ledger.fleet.view("n1").free_by_card[card.index].tenants)
    assert not [done for done in ledger.handle(Confirmed(on("b", kept))) if isinstance(done, Conflict)]
    ledger.check()
    assert whole_gpus_free(ledger) == 2


def test_where_no_gpu_is_idle_the_rest_of_a_shared_one_is_kept() -> None:
    ledger = ledger_after(*(Confirmed(on(str(card), card, 1000, 10)) for card in range(4)), Confirmed(unplaced("a", 4)))
    assert not isinstance(ledger.fleet.place(wants(ask(1)), "n1"), Placement)


def test_a_small_idle_gpu_is_kept_before_the_rest_of_a_large_shared_one() -> None:
    mixed = node("n1").card("A100", 80000).card("T4", 16000).facts(agent="hami").node()
    ledger = ledger_after(NodeSeen(mixed), Confirmed(on("b", 0, 1000, 10)), Confirmed(unplaced("a", 1)))
    assert [free.memory for free in ledger.fleet.view("n1").free_by_card] == [79000, 0]


def test_a_node_that_changes_has_them_kept_again() -> None:
    other = node("n1").cards(3, "T4", 8192).facts(agent="hami").node()
    assert whole_gpus_free(ledger_after(Confirmed(unplaced("a", 1)), NodeSeen(other))) == 2


def test_more_unplaced_gpus_than_the_node_has_fill_it() -> None:
    assert whole_gpus_free(ledger_after(Confirmed(unplaced("a", 9)))) == 0


def test_they_are_free_again_when_their_pod_is_gone() -> None:
    ledger = ledger_after(Confirmed(unplaced("a", 3)))
    assert ledger.handle(PodGone("a")) == [Freed("n1")]
    ledger.check()
    assert whole_gpus_free(ledger) == 4


def test_a_grant_that_names_the_gpus_takes_their_place() -> None:
    ledger = ledger_after(Confirmed(unplaced("a", 3)))
    ledger.handle(Confirmed(on("a", 2)))
    ledger.check()
    assert whole_gpus_free(ledger) == 3


def test_its_own_unplaced_gpus_do_not_block_a_pod() -> None:
    ledger = ledger_after(Confirmed(unplaced("a", 4)))
    capacity_generation = ledger.fleet.capacity_generation()
    assert isinstance(ledger.fleet_for("a").place(wants(ask(whole=True, cards=4)), "n1"), Placement)
    ledger.check()
    assert whole_gpus_free(ledger) == 0
    assert ledger.fleet.capacity_generation() == capacity_generation


def test_unplaced_gpus_of_other_pods_still_block_it() -> None:
    fleet = ledger_after(Confirmed(unplaced("a", 2)), Confirmed(unplaced("b", 1))).fleet_for("a")
    fits = [isinstance(fleet.place(wants(ask(whole=True, cards=count)), "n1"), Placement) for count in (3, 4)]
    assert fits == [True, False]


def test_a_node_that_comes_back_has_them_kept_again() -> None:
    assert whole_gpus_free(ledger_after(Confirmed(unplaced("a", 3)), NodeGone("n1"), NodeSeen(NODE))) == 1


def test_a_list_that_no_longer_shows_the_pod_frees_them() -> None:
    assert whole_gpus_free(ledger_after(Confirmed(unplaced("a", 3)), PodsListed((on("b", 0),)))) == 3


PODS = st.sampled_from("abcdef")
EVENTS = st.one_of(
    st.builds(unplaced, PODS, st.integers(1, 5)).map(Confirmed),
    st.builds(on, PODS, st.integers(0, 3), st.sampled_from([1000, 4000]), st.sampled_from([10, 40])).map(Confirmed),
    st.builds(on, PODS, st.integers(0, 3), st.sampled_from([1000, 4000])).map(
        lambda allocation: Reserved(allocation, 0.0)
    ),
    PODS.map(PodGone),
    st.lists(st.builds(unplaced, PODS, st.integers(1, 3)), max_size=2, unique_by=lambda allocation: allocation.pod).map(
        lambda allocations: PodsListed(tuple(allocations))
    ),
    st.just(NodeGone("n1")),
    st.just(NodeSeen(NODE)),
    st.just(NodeSeen(msgspec.structs.replace(NODE, pool="other"))),
)


@given(events=st.lists(EVENTS, max_size=30))
def test_in_any_order_of_events_the_ledger_is_consistent_and_new_pods_get_no_more_than_is_left(
    events: list[Event],
) -> None:
    ledger = Ledger()
    ledger.handle(NodeSeen(NODE))
    for event in events:
        ledger.handle(event)
        ledger.check()
    if "n1" in ledger.fleet:
        entries = ledger.on_node("n1")
        placed = {uuid for entry in entries for uuid in entry.allocation.uses()}
        number = sum(entry.allocation.unplaced for entry in entries)
        assert whole_gpus_free(ledger) == max(0, 4 - len(placed) - number)
