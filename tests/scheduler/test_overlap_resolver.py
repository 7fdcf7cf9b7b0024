"""A card that the cluster shows sold twice: who goes, who is told, and when nobody does."""

from typing import Any

import pytest

from gputile.kube.api import OutcomeUnknown
from gputile.scheduler.binding.overlap_resolver import RECENT, RETRY
from gputile.scheduler.binding.reconciler import ROUND
from gputile.testing.builders import node
from tests.scheduler.rig import Lands, Rig, refused, tile
from tests.scheduler.test_cluster_state import grant

NOW = 1_700_000_000_000_000_000  # where the rig's wall clock begins
CARD = "GPU-n1-0"


def rig(**settings: Any) -> Rig:
    made = Rig(node("n1").cards(2, size=16), **settings)
    made.api.at_once = True
    return made


def sold(r: Rig, name: str, *, at: int = NOW, memory: int = 10, started: str = "", index: int = 0) -> None:
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


# ---- who goes -------------------------------------------------------------------------------------------------------


async def test_the_pod_that_came_last_is_told_and_then_evicted() -> None:
    r = rig()
    sold(r, "first", at=NOW - 2)
    sold(r, "last", at=NOW - 1)
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
    sold(r, "first", at=NOW - 2)
    sold(r, "last", at=NOW - 1)
    await rounds(r)
    r.catch_up()
    await rounds(r, 3, RETRY)
    assert r.api.calls.count("evict") == 1
    r.ledger.check()
    assert r.free() == [6, 16]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param({"at": NOW - 1}, {"at": NOW - 2}, id="of-two-that-wait-the-later-grant"),
        pytest.param({"at": NOW - 2}, {"at": NOW - 1, "started": "2026-01-01T00:00:00Z"}, id="who-has-started-stays"),
        pytest.param(
            {"at": NOW - 2, "started": "2026-01-01T00:00:09Z"},
            {"at": NOW - 1, "started": "2026-01-01T00:00:08Z"},
            id="of-two-that-run-who-started-later: an old leader's bind that landed late",
        ),
        pytest.param(
            {"at": NOW - 1, "started": "2026-01-01T00:00:08Z"},
            {"at": NOW - 2, "started": "2026-01-01T00:00:08Z"},
            id="of-two-that-started-in-one-second-the-later-grant",
        ),
    ],
)
@pytest.mark.parametrize("order", [1, -1], ids=["seen-first", "seen-last"])
async def test_who_came_last(one: dict[str, Any], other: dict[str, Any], order: int) -> None:
    r = rig()
    for name, facts in [("goes", one), ("stays", other)][::order]:
        sold(r, name, **facts)
    await rounds(r)
    assert there(r) == ["stays"]


async def test_only_as_many_go_as_must() -> None:
    r = rig()
    for number in range(4):
        sold(r, f"p{number}", at=NOW - 10 + number, memory=6)
    await rounds(r)
    assert there(r) == ["p0", "p1", "p2"], "the next goes when the watch has shown what became of the first"
    for _ in range(3):
        r.catch_up()
        await rounds(r, 1, RETRY)
    assert there(r) == ["p0", "p1"]


async def test_a_pod_that_holds_nothing_of_what_is_short_stays() -> None:
    r = rig()
    sold(r, "first", at=NOW - 3)
    sold(r, "second", at=NOW - 2)
    sold(r, "cores-only", at=NOW - 1, memory=0)
    await rounds(r)
    assert there(r) == ["cores-only", "first"]


async def test_a_pod_on_two_cards_goes_once_and_frees_both() -> None:
    """Also the second card, where a still later pod is: with this one gone that fits."""
    r = rig()
    sold(r, "first", at=NOW - 3)
    sold(r, "later", at=NOW - 1, index=1)
    tiles = [{"uuid": f"GPU-n1-{index}", "index": index, "memory": 10, "cores": 0} for index in (0, 1)]
    record = grant(name="both", at=NOW - 2, containers=[{"name": "c0", "tiles": tiles}])
    r.arrive(tile(10, cards=2), name="both", annotations=record, on="n1")
    await rounds(r)
    assert there(r) == ["first", "later"]


# ---- when nobody goes -----------------------------------------------------------------------------------------------


async def nobody_goes(r: Rig, caplog: pytest.LogCaptureFixture, why: str) -> None:
    before = there(r)
    await rounds(r, 3, RETRY)
    assert there(r) == before
    assert r.api.notes == []
    kept = [rec for rec in caplog.records if rec.message == "GPU overcommitted; no pod is evicted"]
    assert len(kept) == 1
    assert why in str(kept[0].__dict__)


async def test_nobody_goes_where_a_pod_carries_another_systems_record(caplog: pytest.LogCaptureFixture) -> None:
    """Other systems oversell on purpose."""
    r = rig()
    theirs = {"hami.io/vgpu-node": "n1", "hami.io/vgpu-devices-allocated": f"{CARD},NVIDIA,10,0:;"}
    r.arrive({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 10}, name="theirs", annotations=theirs, on="n1")
    sold(r, "ours", at=NOW - 1)
    assert r.free()[0] == -4
    await nobody_goes(r, caplog, "not every pod on the GPU carries a grant of gputile")


async def test_nobody_goes_where_the_card_became_smaller(caplog: pytest.LogCaptureFixture) -> None:
    r = rig()
    sold(r, "a", at=NOW - 2, memory=8)
    sold(r, "b", at=NOW - 1, memory=8)
    r.api.add_node(node("n1").cards(2, size=12).manifest())
    r.catch_up()
    await nobody_goes(r, caplog, "became smaller")


async def test_nobody_goes_for_an_overlap_older_than_this_process(caplog: pytest.LogCaptureFixture) -> None:
    """It cannot be told from a card that became smaller while we were away."""
    r = rig()
    sold(r, "a", at=NOW - RECENT - 2)
    sold(r, "b", at=NOW - RECENT - 1)
    await nobody_goes(r, caplog, "grants on the GPU are old")


async def test_a_setting_turns_it_off(caplog: pytest.LogCaptureFixture) -> None:
    r = rig(evict_overlaps=False)
    sold(r, "a", at=NOW - 2)
    sold(r, "b", at=NOW - 1)
    await nobody_goes(r, caplog, "evict_overlaps")


async def test_nobody_goes_while_somebody_is_going_anyway() -> None:
    r = rig()
    sold(r, "a", at=NOW - 2)
    sold(r, "b", at=NOW - 1)
    r.change("a", metadata={**r.live("a")["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"})
    r.catch_up()
    await rounds(r, 3, RETRY)
    assert there(r) == ["a", "b"]
    assert r.api.notes == []


async def test_nobody_goes_when_a_live_look_shows_that_the_other_is_gone() -> None:
    r = rig()
    sold(r, "a", at=NOW - 2)
    sold(r, "b", at=NOW - 1)
    r.api.delete_pod("default/a")  # and our watch has not said so yet
    await rounds(r)
    assert there(r) == ["b"]
    r.catch_up()
    await rounds(r, 3, RETRY)
    assert there(r) == ["b"]
    assert r.api.notes == []


async def test_a_bind_in_flight_is_nobody_to_evict_for_and_stops_nobody() -> None:
    """Only what the cluster shows counts: the bind may never land."""
    r = rig()
    r.arrive(tile(10), name="assumed")
    r.api.script["bind"] = [OutcomeUnknown("reset")] * 20
    assert "no answer from the API server" in await r.bind("assumed")
    assert r.free() == [6, 16]
    sold(r, "first", at=NOW - 2)
    await rounds(r)
    assert there(r) == ["assumed", "first"]
    sold(r, "last", at=NOW - 1)
    await rounds(r)
    assert there(r) == ["assumed", "first"]


# ---- who leads, and what fails --------------------------------------------------------------------------------------


async def test_who_follows_evicts_nobody_and_settles_it_once_it_leads() -> None:
    r = rig()
    r.leading = False
    sold(r, "first", at=NOW - 2)
    sold(r, "last", at=NOW - 1)
    await rounds(r, 2)
    assert there(r) == ["first", "last"]
    r.leading = True
    await rounds(r)
    assert there(r) == ["first"]


async def test_who_ceases_to_lead_in_the_middle_evicts_nobody() -> None:
    r = rig()
    sold(r, "first", at=NOW - 2)
    sold(r, "last", at=NOW - 1)
    r.api.script["note"] = [lambda: setattr(r, "leading", False)]
    await rounds(r)
    assert there(r) == ["first", "last"]


@pytest.mark.parametrize("no", [refused(429), refused(500), OutcomeUnknown("reset")], ids=["budget", "refused", "lost"])
async def test_what_fails_is_tried_again_and_told_only_once(no: Exception) -> None:
    r = rig()
    sold(r, "first", at=NOW - 2)
    sold(r, "last", at=NOW - 1)
    r.api.script["evict"] = [no, no]
    await rounds(r, 2)  # not at once
    assert r.api.calls.count("evict") == 1
    await rounds(r, 2, RETRY)
    assert there(r) == ["first", "last"]
    await rounds(r, 1, RETRY)
    assert there(r) == ["first"]
    assert len(r.api.notes) == 1


async def test_the_servers_word_on_when_to_come_again_is_kept() -> None:
    r = rig()
    sold(r, "first", at=NOW - 2)
    sold(r, "last", at=NOW - 1)
    r.api.script["evict"] = [refused(429, retry_after=60.0)]
    await rounds(r, 10, RETRY)
    assert r.api.calls.count("evict") == 1
    await rounds(r, 4, RETRY)
    assert there(r) == ["first"]


async def test_a_budget_that_holds_for_long_does_not_make_the_overlap_old() -> None:
    r = rig()
    sold(r, "first", at=NOW - RECENT + 1000)
    sold(r, "last", at=NOW - RECENT + 1001)
    r.api.script["evict"] = [refused(429)]
    await rounds(r, 1, RETRY)
    for _ in range(2000):
        r.reconciler._wall()  # the rig's wall clock goes on by one at each look
    await rounds(r, 1, RETRY)
    assert there(r) == ["first"]


async def test_an_eviction_whose_answer_got_lost_is_not_counted_and_ends_well() -> None:
    r = rig()
    sold(r, "first", at=NOW - 2)
    sold(r, "last", at=NOW - 1)
    r.api.script["evict"] = [Lands()]
    await rounds(r)
    assert there(r) == ["first"]
    r.catch_up()
    await rounds(r, 2, RETRY)
    assert r.api.calls.count("evict") == 1
