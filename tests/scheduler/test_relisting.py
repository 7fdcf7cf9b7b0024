"""A list of all pods, processed in slices: in between, the ledger holds too much and never too little.

Seen to fail: with missing pods removed before all listed pods are added; with overlaps compared pod by pod; with pods
of the list freed in between (`PodsListed` of the part that is added); with undecodable pods removed.
"""

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputile.concurrency import time_slices
from gputile.dialects.kube_objects import Pod
from gputile.kube.api import Json
from gputile.ledger.events import Conflict, Instruction, Relisted
from gputile.ledger.ledger import AllocationState
from gputile.testing.builders import node, pod
from tests.effort import examples
from tests.scheduler.rig import Rig, tile
from tests.scheduler.test_app import cluster, running
from tests.scheduler.test_cluster_state import grant

SIZE = 16


def on_card(name: str, card: int, size: int = SIZE, where: str = "n1") -> Json:
    """A pod that holds this much of one card."""
    annotations = grant(size, card, name=name, on=where)
    return pod(tile(size), name=name, uid=f"uid-{name}", on=where, annotations=annotations)


def as_pod(manifest: Json) -> Pod:
    return msgspec.convert(manifest, Pod)


def rig_with(*pods: Json) -> Rig:
    return Rig(node("n1").cards(4, size=SIZE), pods=pods)


def held_cards(rig: Rig) -> dict[str, set[str]]:
    return {entry.allocation.pod: set(entry.allocation.uses()) for entry in rig.ledger.entries()}


NAMES = ("a", "b", "c", "d")
PLACES = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 3), max_size=4)


@examples(100)
@given(PLACES, PLACES)
def test_between_two_slices_all_listed_and_not_yet_removed_pods_are_held(
    before: dict[str, int], after: dict[str, int]
) -> None:
    rig = rig_with(*(on_card(name, card) for name, card in before.items()))
    listed = [as_pod(on_card(name, card)) for name, card in after.items()]
    cluster_state = rig.cluster_state
    missing = cluster_state.unlisted({pod.uid for pod in listed})
    assert set(missing) == {f"uid-{name}" for name in before.keys() - after.keys()}
    known = held_cards(rig)
    for number, added in enumerate(listed, start=1):
        cluster_state.relisted(added)
        now = held_cards(rig)
        assert known.keys() <= now.keys(), "no pod is freed while the list is processed"
        for earlier in listed[:number]:
            assert now[earlier.uid], "what was listed is held from then on"
    for uid in missing:
        cluster_state.remove_unlisted(uid)
    assert held_cards(rig).keys() == {pod.uid for pod in listed}
    at_once = rig_with(*(on_card(name, card) for name, card in before.items()))
    at_once.cluster_state.pods_listed(listed)
    assert held_cards(at_once) == held_cards(rig)


def conflicts(done: list[Instruction]) -> list[Conflict]:
    return [instruction for instruction in done if isinstance(instruction, Conflict)]


def test_a_pod_on_the_card_of_a_deleted_pod_is_no_overlap_and_on_that_of_a_listed_pod_is() -> None:
    rig = rig_with(on_card("a", 0), on_card("gone", 2))
    listed_pods = [as_pod(on_card("a", 0)), as_pod(on_card("new", 2))]
    assert conflicts([done for item in listed_pods for done in rig.cluster_state.relisted(item)]) == []
    rig = rig_with(on_card("a", 0), on_card("gone", 2))
    assert conflicts(rig.cluster_state.pods_listed(listed_pods)) == []
    rig.ledger.check()
    twice = [*listed_pods, as_pod(on_card("late", 2))]
    assert [conflict.pod for conflict in conflicts(rig.cluster_state.pods_listed(twice))] == ["uid-late"]


def test_a_bind_that_is_newer_than_the_list_stays() -> None:
    rig = rig_with(on_card("a", 0))
    rig.arrive(tile(SIZE), name="mine")
    rig.filter("mine")
    assert rig.state("mine") is AllocationState.RESERVED
    rig.cluster_state.pods_listed([as_pod(on_card("a", 0)), as_pod(rig.live("mine"))])
    assert rig.state("mine") is AllocationState.RESERVED


def test_a_pod_that_is_undecodable_in_this_list_keeps_its_allocation() -> None:
    rig = rig_with(on_card("a", 0), on_card("b", 1))
    rig.cluster_state.pods_listed([as_pod(on_card("a", 0))], {"default/b"})
    assert held_cards(rig).keys() == {"uid-a", "uid-b"}


def test_the_same_list_again_changes_nothing_in_the_ledger() -> None:
    rig = rig_with(on_card("a", 0), on_card("b", 1))
    rig.ledger._history.clear()
    rig.cluster_state.pods_listed([as_pod(on_card("a", 0)), as_pod(on_card("b", 1))])
    assert [event for event in rig.ledger._history if isinstance(event, Relisted)] == []


async def test_while_a_list_is_processed_verbs_are_answered_and_allocate_nothing_that_it_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new pod of the list has the card of a deleted pod: the card is never free in between."""
    before = [on_card(f"p{n}", n) for n in range(4)]
    after = [on_card(f"q{n}", n) for n in range(4)]
    api = cluster(node("n1").cards(4, size=SIZE), pods=(*before, pod(tile(SIZE), name="wants", uid="uid-wants")))
    async with running(api) as replica:
        process = replica.process
        await replica.until(lambda: process.is_synced() and len(process.ledger) == 4)
        monkeypatch.setattr(time_slices, "SLICE", -1.0)
        many = [as_pod(pod({"cpu": 1}, name=f"plain-{n}", uid=f"uid-plain-{n}")) for n in range(500)]
        listed = (*many, *(as_pod(item) for item in after), as_pod(api.pods["default/wants"]))
        reading = asyncio.create_task(process.follower._pods_listed(listed))
        body = {"Pod": api.pods["default/wants"], "Nodes": None, "NodeNames": ["n1"]}
        answers: list[Any] = []
        while not reading.done():
            answers.append((await replica.ask("/gputile/filter", body))[1]["NodeNames"])
            await asyncio.sleep(0)
        assert len(answers) > 1
        assert answers == [[]] * len(answers)
        assert {entry.allocation.pod for entry in process.ledger.entries()} == {f"uid-q{n}" for n in range(4)}
        process.ledger.check()
