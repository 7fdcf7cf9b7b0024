"""Double allocations: which pod is evicted, which gets an Event, and when no pod is evicted."""

from typing import Any

import pytest

from gputile.kube.api import OutcomeUnknown
from gputile.scheduler.binding.overlap_resolver import RECENT, RETRY
from gputile.scheduler.binding.reconciler import ROUND
from gputile.testing.builders import node
from tests.scheduler.rig import LostResponse, Rig, refused, tile
from tests.scheduler.test_cluster_state import grant

NOW = 1_700_000_000_000_000_000  # where the rig's wall clock begins
CARD = "GPU-n1-0"


def rig(**settings: Any) -> Rig:
    running = Rig(node("n1").cards(2, size=16), **settings)
    running.api.at_once = True
    return running


def allocated(r: Rig, name: str, *, at: int = NOW, memory: int = 10, started: str = "", index: int = 0) -> None:
    """A pod that a leader of ours bound."""
    record = grant(memory, index, name=name, at=at)
    status = {"phase": "Running", "startTime": started} if started else {"phase": "Pending"}
    r.arrive(tile(memory), name=name, annotations=record, on="n1", seen=False)
    r.change(name, status=status)
    r.catch_up()


async def rounds(r: Rig, count: int = 1, apart: float = ROUND) -> None:
    for _ in range(count):
        await r.reconciler.round()
        r.clock.now += apart


def there(r: Rig) -> list[str]:
    return sorted(name.partition("/")[2] for name in r.api.pods)


# ---- which pod is evicted -------------------------------------------------------------------------------------------


async def test_the_newer_pod_gets_an_event_and_is_then_evicted() -> None:
    r = rig()
    allocated(r, "first", at=NOW - 2)
    allocated(r, "last", at=NOW - 1)
    await rounds(r)
    (note,) = r.api.notes
    assert (note.pod, note.uid, note.reason) == ("last", "uid-last", "GPUDoubleAllocated")
    assert CARD in note.message
    assert "default/first (10 MiB, 0 %)" in note.message
    assert r.api.calls.index("note") < r.api.calls.index("evict")
    assert there(r) == ["first"]
    assert r.count("overlap_evictions_total") == 1


async def test_it_is_done_once_and_then_forgotten() -> None:
    r = rig()
    allocated(r, "first", at=NOW - 2)
    allocated(r, "last", at=NOW - 1)
    await rounds(r)
    r.catch_up()
    await rounds(r, 3, RETRY)
    assert r.api.calls.count("evict") == 1
    r.ledger.check()
    assert r.free() == [6, 16]


@pytest.mark.parametrize(
    ("newer", "older"),
    [
        pytest.param({"at": NOW - 1}, {"at": NOW - 2}, id="of-two-pending-pods-the-later-grant"),
        pytest.param({"at": NOW - 2}, {"at": NOW - 1, "started": "2026-01-01T00:00:00Z"}, id="the-started-pod-stays"),
        pytest.param(
            {"at": NOW - 2, "started": "2026-01-01T00:00:09Z"},
            {"at": NOW - 1, "started": "2026-01-01T00:00:08Z"},
            id="of-two-running-pods-the-later-start: an old leader's bind that was written late",
        ),
        pytest.param(
            {"at": NOW - 1, "started": "2026-01-01T00:00:08Z"},
            {"at": NOW - 2, "started": "2026-01-01T00:00:08Z"},
            id="of-two-pods-started-in-one-second-the-later-grant",
        ),
    ],
)
@pytest.mark.parametrize("order", [1, -1], ids=["seen-first", "seen-last"])
async def test_which_pod_is_newer(newer: dict[str, Any], older: dict[str, Any], order: int) -> None:
    r = rig()
    for name, facts in [("goes", newer), ("stays", older)][::order]:
        allocated(r, name, **facts)
    await rounds(r)
    assert there(r) == ["stays"]


async def test_only_as_many_pods_as_necessary_are_evicted() -> None:
    r = rig()
    for number in range(4):
        allocated(r, f"p{number}", at=NOW - 10 + number, memory=6)
    await rounds(r)
    assert there(r) == ["p0", "p1", "p2"], "the next goes when the watch has shown what became of the first"
    for _ in range(3):
        r.catch_up()
        await rounds(r, 1, RETRY)
    assert there(r) == ["p0", "p1"]


async def test_a_pod_that_holds_nothing_of_the_overcommitted_resource_stays() -> None:
    r = rig()
    allocated(r, "first", at=NOW - 3)
    allocated(r, "second", at=NOW - 2)
    allocated(r, "cores-only", at=NOW - 1, memory=0)
    await rounds(r)
    assert there(r) == ["cores-only", "first"]


async def test_a_pod_on_two_cards_is_evicted_once_and_frees_both() -> None:
    """Also the second card, which has a still newer pod: after this eviction it fits."""
    r = rig()
    allocated(r, "first", at=NOW - 3)
    allocated(r, "later", at=NOW - 1, index=1)
    tiles = [{"uuid": f"GPU-n1-{index}", "index": index, "memory": 10, "cores": 0} for index in (0, 1)]
    record = grant(name="both", at=NOW - 2, containers=[{"name": "c0", "tiles": tiles}])
    r.arrive(tile(10, cards=2), name="both", annotations=record, on="n1")
    await rounds(r)
    assert there(r) == ["first", "later"]


# ---- when no pod is evicted -----------------------------------------------------------------------------------------


async def no_pod_is_evicted(r: Rig, caplog: pytest.LogCaptureFixture, why: str) -> None:
    before = there(r)
    await rounds(r, 3, RETRY)
    assert there(r) == before
    assert r.api.notes == []
    kept = [rec for rec in caplog.records if rec.message == "GPU overcommitted; no pod is evicted"]
    assert len(kept) == 1
    assert why in str(kept[0].__dict__)


async def test_no_pod_is_evicted_where_a_pod_carries_the_record_of_another_system(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Other systems overcommit on purpose."""
    r = rig()
    theirs = {"hami.io/vgpu-node": "n1", "hami.io/vgpu-devices-allocated": f"{CARD},NVIDIA,10,0:;"}
    r.arrive({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 10}, name="theirs", annotations=theirs, on="n1")
    allocated(r, "ours", at=NOW - 1)
    assert r.free()[0] == -4
    await no_pod_is_evicted(r, caplog, "not every pod on the GPU carries a grant of gputile")


async def test_no_pod_is_evicted_where_the_card_became_smaller(caplog: pytest.LogCaptureFixture) -> None:
    r = rig()
    allocated(r, "a", at=NOW - 2, memory=8)
    allocated(r, "b", at=NOW - 1, memory=8)
    r.api.add_node(node("n1").cards(2, size=12).manifest())
    r.catch_up()
    await no_pod_is_evicted(r, caplog, "became smaller")


async def test_no_pod_is_evicted_for_an_overlap_older_than_this_process(caplog: pytest.LogCaptureFixture) -> None:
    """It looks the same as a card that became smaller while no scheduler ran."""
    r = rig()
    allocated(r, "a", at=NOW - RECENT - 2)
    allocated(r, "b", at=NOW - RECENT - 1)
    await no_pod_is_evicted(r, caplog, "grants on the GPU are old")


async def test_a_setting_turns_it_off(caplog: pytest.LogCaptureFixture) -> None:
    r = rig(evict_overlaps=False)
    allocated(r, "a", at=NOW - 2)
    allocated(r, "b", at=NOW - 1)
    await no_pod_is_evicted(r, caplog, "evict_overlaps")


async def test_no_pod_is_evicted_while_another_is_terminating_anyway() -> None:
    r = rig()
    allocated(r, "a", at=NOW - 2)
    allocated(r, "b", at=NOW - 1)
    r.change("a", metadata={**r.live("a")["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"})
    r.catch_up()
    await rounds(r, 3, RETRY)
    assert there(r) == ["a", "b"]
    assert r.api.notes == []


async def test_no_pod_is_evicted_when_a_live_lookup_shows_that_the_other_is_gone() -> None:
    r = rig()
    allocated(r, "a", at=NOW - 2)
    allocated(r, "b", at=NOW - 1)
    r.api.delete_pod("default/a")  # and our watch has not shown it yet
    await rounds(r)
    assert there(r) == ["b"]
    r.catch_up()
    await rounds(r, 3, RETRY)
    assert there(r) == ["b"]
    assert r.api.notes == []


async def test_a_bind_in_flight_neither_causes_nor_stops_an_eviction() -> None:
    """Only what the cluster shows counts: the bind may never be written."""
    r = rig()
    r.arrive(tile(10), name="assumed")
    r.api.script["bind"] = [OutcomeUnknown("reset")] * 20
    assert "no answer from the API server" in await r.bind("assumed")
    assert r.free() == [6, 16]
    allocated(r, "first", at=NOW - 2)
    await rounds(r)
    assert there(r) == ["assumed", "first"]
    allocated(r, "last", at=NOW - 1)
    await rounds(r)
    assert there(r) == ["assumed", "first"]


# ---- leadership and failures ----------------------------------------------------------------------------------------


async def test_a_follower_evicts_no_pod_and_resolves_it_once_it_is_the_leader() -> None:
    r = rig()
    r.leading = False
    allocated(r, "first", at=NOW - 2)
    allocated(r, "last", at=NOW - 1)
    await rounds(r, 2)
    assert there(r) == ["first", "last"]
    r.leading = True
    await rounds(r)
    assert there(r) == ["first"]


async def test_a_replica_that_loses_leadership_in_between_evicts_no_pod() -> None:
    r = rig()
    allocated(r, "first", at=NOW - 2)
    allocated(r, "last", at=NOW - 1)
    r.api.script["note"] = [lambda: setattr(r, "leading", False)]
    await rounds(r)
    assert there(r) == ["first", "last"]


@pytest.mark.parametrize(
    "error", [refused(429), refused(500), OutcomeUnknown("reset")], ids=["budget", "rejected", "lost"]
)
async def test_a_failed_eviction_is_retried_with_only_one_event(error: Exception) -> None:
    r = rig()
    allocated(r, "first", at=NOW - 2)
    allocated(r, "last", at=NOW - 1)
    r.api.script["evict"] = [error, error]
    await rounds(r, 2)  # not at once
    assert r.api.calls.count("evict") == 1
    await rounds(r, 2, RETRY)
    assert there(r) == ["first", "last"]
    await rounds(r, 1, RETRY)
    assert there(r) == ["first"]
    assert len(r.api.notes) == 1


async def test_retry_after_of_the_server_is_respected() -> None:
    r = rig()
    allocated(r, "first", at=NOW - 2)
    allocated(r, "last", at=NOW - 1)
    r.api.script["evict"] = [refused(429, retry_after=60.0)]
    await rounds(r, 10, RETRY)
    assert r.api.calls.count("evict") == 1
    await rounds(r, 4, RETRY)
    assert there(r) == ["first"]


async def test_a_budget_that_blocks_for_long_does_not_make_the_overlap_old() -> None:
    r = rig()
    allocated(r, "first", at=NOW - RECENT + 1000)
    allocated(r, "last", at=NOW - RECENT + 1001)
    r.api.script["evict"] = [refused(429)]
    await rounds(r, 1, RETRY)
    for _ in range(2000):
        r.reconciler._wall()  # the rig's wall clock advances by one at each call
    await rounds(r, 1, RETRY)
    assert there(r) == ["first"]


async def test_an_eviction_with_a_lost_answer_is_not_counted_and_resolves_it() -> None:
    r = rig()
    allocated(r, "first", at=NOW - 2)
    allocated(r, "last", at=NOW - 1)
    r.api.script["evict"] = [LostResponse()]
    await rounds(r)
    assert there(r) == ["first"]
    r.catch_up()
    await rounds(r, 2, RETRY)
    assert r.api.calls.count("evict") == 1
