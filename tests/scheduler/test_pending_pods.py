"""Pending pods: one Event each with the reason, few per second; nudged when they fit and are not retried."""

import asyncio
from typing import Any

import pytest

from gputile.dialects.gputile import NUDGED
from gputile.engine.cooperative import Cooperative
from gputile.kube.api import Json, OutcomeUnknown
from gputile.scheduler.pending import pending_pods
from gputile.scheduler.pending.pending_pods import (
    MAX_UNSEEN,
    NUDGE_INTERVAL,
    NUDGES,
    PATIENCE,
    REPEAT,
    ROUND,
    SETTLE,
    UNSEEN_TTL,
)
from gputile.scheduler.settings import TellSettings
from gputile.testing.builders import ask, node, wants
from tests.scheduler.rig import GPU, MEMORY, Rig, refused, tile
from tests.scheduler.test_cluster_state import grant
from tests.scheduler.test_refusal_cache import nomination


def rig(**pending: Any) -> Rig:
    return Rig(node("n1").cards(1, size=16), tell=TellSettings(**pending))


def full(r: Rig) -> Rig:
    """Another pod holds the whole card."""
    r.arrive(tile(16), name="old", annotations=grant(16, name="old"), on="n1")
    return r


def leave(r: Rig) -> None:
    r.api.delete_pod("default/old")
    r.catch_up()


async def rounds(r: Rig, seconds: float) -> None:
    for _ in range(round(seconds / ROUND)):
        try:
            await r.pending_pods.round()
        except Exception as error:
            if type(error).__name__ not in ("ApiRejected", "OutcomeUnknown"):
                raise
        r.clock.now += ROUND


def nudged(r: Rig) -> list[str]:
    return [key for key, annotations, _ in r.api.patches if NUDGED in annotations]


class TestEvents:
    async def test_the_event_has_the_reason_with_numbers(self) -> None:
        r = full(rig())
        r.arrive(tile(8))
        r.filter()
        await rounds(r, ROUND)
        (note,) = r.api.notes
        assert (note.namespace, note.pod, note.uid) == ("default", "web-0", "uid-web-0")
        assert (note.reason, note.kind) == ("NoFittingGPU", "Warning")
        assert "n1" in note.message
        assert "\n" not in note.message

    async def test_the_event_of_an_invalid_request_says_what_to_write(self) -> None:
        r = rig()
        r.arrive({MEMORY: 8})
        r.filter()
        await rounds(r, ROUND)
        assert f"add `{GPU}: 1`" in r.api.notes[0].message

    async def test_the_same_event_is_not_written_twice(self) -> None:
        r = full(rig())
        r.arrive(tile(8))
        for _ in range(5):
            r.filter()
            await rounds(r, 2)
            r.clock.now += 65
        assert len(r.api.notes) == 1

    async def test_but_again_before_the_event_expires(self) -> None:
        r = full(rig(every=REPEAT / 2))
        r.arrive(tile(8))
        r.filter()
        await rounds(r, ROUND)
        r.clock.now += REPEAT
        await rounds(r, 1)
        assert len(r.api.notes) == 2

    async def test_another_reason_is_reported_after_the_interval(self) -> None:
        r = full(rig(every=60))
        r.arrive(tile(8))
        r.filter()
        await rounds(r, ROUND)
        r.api.add_node(node("n1").card(size=4).manifest())
        r.catch_up()
        await rounds(r, 59)
        assert len(r.api.notes) == 1
        await rounds(r, 2)
        assert len(r.api.notes) == 2

    async def test_few_per_second_over_all_pods(self) -> None:
        r = full(rig(per_second=2))
        for n in range(20):
            r.arrive(tile(8), name=f"p{n}")
            r.filter(f"p{n}")
        await rounds(r, ROUND)
        assert len(r.api.notes) == 2, "what was saved up"
        await rounds(r, 3)
        assert len(r.api.notes) == 8
        assert len({note.pod for note in r.api.notes}) == 8

    async def test_a_quiet_hour_does_not_save_up_more_than_a_second(self) -> None:
        r = full(rig(per_second=3))
        r.clock.now += 3600
        for n in range(20):
            r.arrive(tile(8), name=f"p{n}")
            r.filter(f"p{n}")
        await rounds(r, ROUND)
        assert len(r.api.notes) == 3

    async def test_a_pod_that_fits_by_now_gets_no_event(self) -> None:
        r = full(rig(nudge=False))
        r.arrive(tile(8))
        r.filter()
        leave(r)
        await rounds(r, 2)
        assert r.api.notes == []

    @pytest.mark.parametrize("end", ["deleted", "bound"])
    async def test_a_pod_that_is_no_longer_pending_gets_no_event(self, end: str) -> None:
        r = full(rig())
        r.arrive(tile(8))
        r.filter()
        if end == "deleted":
            r.api.delete_pod("default/web-0")
        else:
            r.change("web-0", spec={"nodeName": "n1"})
        r.catch_up()
        await rounds(r, 1)
        assert r.api.notes == []

    async def test_a_pod_that_the_watch_shows_late_gets_its_event_then(self) -> None:
        r = full(rig())
        r.arrive(tile(8), seen=False)
        r.filter()
        await rounds(r, 10)
        assert r.api.notes == []
        r.catch_up()
        await rounds(r, 1)
        assert [note.pod for note in r.api.notes] == ["web-0"]

    async def test_a_pod_that_the_watch_never_shows_is_forgotten(self) -> None:
        r = full(rig())
        for number in range(MAX_UNSEEN + 5):
            r.arrive(tile(8), name=f"invented-{number}", seen=False)
            r.filter(f"invented-{number}")
        assert len(r.pending_pods) == MAX_UNSEEN
        await rounds(r, UNSEEN_TTL + 1)
        assert len(r.pending_pods) == 0
        assert r.api.calls == []

    async def test_never_while_not_the_leader(self) -> None:
        r = full(rig())
        r.arrive(tile(8))
        r.filter()
        r.leading = False
        leave(r)
        await rounds(r, 10)
        assert (r.api.calls, r.api.notes) == ([], [])
        r.leading = True
        await rounds(r, 1)
        assert nudged(r) == ["default/web-0"]

    async def test_an_event_that_could_not_be_written_is_written_later(self) -> None:
        r = full(rig())
        r.arrive(tile(8))
        r.filter()
        r.api.script["note"] = [OutcomeUnknown("reset")]
        for _ in range(4):
            await rounds(r, 1)
            r.clock.now += 30
        assert len(r.api.notes) == 1

    async def test_the_reason_is_not_computed_more_often_than_it_may_be_reported(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        requests: list[object] = []

        def counted(request: object, *arguments: object) -> Cooperative[str]:
            requests.append(request)
            yield from ()
            return "because"

        monkeypatch.setattr(pending_pods, "reason_cooperatively", counted)
        r = full(rig(every=60))
        r.arrive(tile(8))
        r.filter()
        await rounds(r, 600)
        assert 1 < len(requests) <= 11


class TestNudging:
    async def rejected_then_freed(self, r: Rig) -> None:
        full(r)
        r.arrive(tile(8))
        r.filter()
        leave(r)

    async def test_when_capacity_was_freed_after_the_rejection_and_no_retry_followed(self) -> None:
        r = rig()
        await self.rejected_then_freed(r)
        await rounds(r, PATIENCE)
        assert nudged(r) == [], "kube-scheduler may retry by itself"
        await rounds(r, 1)
        assert nudged(r) == ["default/web-0"]
        assert r.count("nudges_total") == 1

    async def test_when_it_was_rejected_before_the_watch_showed_it(self) -> None:
        """A broken watch: kube-scheduler sees the new pod and the free tile, and is rejected from an old ledger."""
        r = full(rig())
        r.arrive(tile(8), seen=False)
        r.api.delete_pod("default/old")
        r.filter()
        await rounds(r, 2)
        assert nudged(r) == []
        r.catch_up()
        await rounds(r, 2)
        assert nudged(r) == ["default/web-0"]

    async def test_when_the_reservation_in_its_way_moved_to_another_node(self) -> None:
        r = Rig(node("n1").cards(1, size=16), node("n2").cards(1, size=16))
        for name in ("first", "second"):
            r.arrive(tile(16), name=name)
        assert r.filter("first", nodes=["n1"]).names == ["n1"]
        assert r.filter("second", nodes=["n1"]).names == []
        assert r.filter("first", nodes=["n2"]).names == ["n2"]
        await rounds(r, 2)
        assert nudged(r) == ["default/second"]

    async def test_when_the_bind_in_its_way_was_of_a_pod_that_is_gone(self) -> None:
        """Its answer was lost, and then the pod was deleted: no watch event shows that the tile is free."""
        r = rig()
        for name in ("first", "second"):
            r.arrive(tile(16), name=name)
        r.api.script["bind"] = [OutcomeUnknown("reset"), refused(404)]
        r.api.script["pod"] = [lambda: r.api.delete_pod("default/first")]
        r.filter("first")
        binding = asyncio.create_task(r.bind("first"))
        await asyncio.sleep(0)
        assert r.filter("second").names == []
        assert "the server returned 404" in await binding
        await rounds(r, 2)
        assert nudged(r) == ["default/second"]

    async def test_not_again_within_some_seconds_but_then(self) -> None:
        r = rig()
        await self.rejected_then_freed(r)
        await rounds(r, NUDGE_INTERVAL)
        assert len(nudged(r)) == 1
        await rounds(r, NUDGE_INTERVAL)
        assert len(nudged(r)) == 2
        assert len({annotations[NUDGED] for _, annotations, _ in r.api.patches}) == 2, (
            "a touch that changes nothing is none"
        )

    async def test_not_without_freed_capacity(self) -> None:
        r = full(rig())
        r.arrive(tile(8))
        r.filter()
        await rounds(r, 10)
        assert nudged(r) == []

    async def test_not_when_it_was_rejected_after_capacity_was_freed(self) -> None:
        r = rig()
        await self.rejected_then_freed(r)
        r.filter(nodes=[])
        await rounds(r, 2)
        assert nudged(r) == []

    async def test_not_when_it_still_does_not_fit(self) -> None:
        r = full(rig())
        r.arrive(tile(17))
        r.filter()
        leave(r)
        await rounds(r, 10)
        assert nudged(r) == []

    @pytest.mark.parametrize("how", ["reserved", "assumed"])
    async def test_not_when_it_is_being_bound(self, how: str) -> None:
        r = rig()
        await self.rejected_then_freed(r)
        if how == "reserved":
            assert r.filter().names == ["n1"]
        else:
            assert await r.bind() == ""
        await rounds(r, 10)
        assert nudged(r) == []

    async def test_not_a_pod_with_an_invalid_request(self) -> None:
        r = full(rig())
        r.arrive({MEMORY: 8})
        r.filter()
        leave(r)
        await rounds(r, 10)
        assert nudged(r) == []

    async def test_not_where_the_setting_forbids_it(self) -> None:
        r = rig(nudge=False)
        await self.rejected_then_freed(r)
        await rounds(r, 10)
        assert nudged(r) == []

    async def test_many_pods_are_nudged_a_few_at_a_time(self) -> None:
        r = rig()
        for n in range(NUDGES + 5):
            r.api.add_node(node(f"m{n}").card(size=4).manifest())
            r.arrive(tile(20), name=f"p{n}")
            r.filter(f"p{n}")
        for n in range(NUDGES + 5):
            r.api.add_node(node(f"m{n}").card(size=20).manifest())
        r.catch_up()
        r.clock.now += 1
        await rounds(r, ROUND)
        assert len(nudged(r)) == NUDGES

    async def test_all_that_fit_are_nudged_also_several_on_one_node(self) -> None:
        """One card of 16 was freed: two pods of 8 fit there."""
        r = full(rig())
        for n in range(3):
            r.arrive(tile(8), name=f"p{n}")
            r.filter(f"p{n}")
        leave(r)
        await rounds(r, 1)
        assert r.filter("p0").names == ["n1"]
        await rounds(r, 3)
        assert len(set(nudged(r))) >= 2

    async def test_no_more_pods_are_nudged_at_once_than_there_are_fitting_nodes(self) -> None:
        r = full(rig())
        for n in range(9):
            r.arrive(tile(16), name=f"p{n}")
            r.filter(f"p{n}")
        leave(r)
        r.clock.now += 1
        await rounds(r, ROUND)
        assert len(nudged(r)) == 1

    async def test_an_inherited_pod_that_fits_once(self) -> None:
        """The previous leader rejected it, and kube-scheduler has no reason to try it again."""
        r = rig()
        r.arrive(tile(8))
        r.arrive(tile(17), name="too-large")
        await rounds(r, SETTLE)
        assert nudged(r) == [], "kube-scheduler may retry by itself"
        await rounds(r, 10 * NUDGE_INTERVAL)
        assert nudged(r) == ["default/web-0"], "another scheduler's pod is not to be touched for ever"
        assert r.api.notes == []

    async def test_an_inherited_pod_until_the_api_server_accepts_the_nudge(self) -> None:
        r = rig()
        r.arrive(tile(8))
        r.api.script["patch_pod"] = [OutcomeUnknown("reset"), refused(503)]
        await rounds(r, SETTLE + 10 * NUDGE_INTERVAL)
        assert len(nudged(r)) == 3

    async def test_not_because_the_fleet_was_viewed_without_a_nomination(self) -> None:
        """A look at the fleet frees no capacity."""
        r = Rig(node("n1").cards(1, size=16), node("n2").cards(1, size=16))
        r.arrive(tile(16), name="vip")
        r.arrive(tile(8), name="picky")
        assert r.filter("picky", nodes=[]).names == [], "n2 would do, but it may not go there"
        nomination(r, "vip")
        for _ in range(10):
            assert r.ledger.fleet_for("uid-vip").fits(wants(ask(whole=True))).sum() == 2
            await rounds(r, 1)
        assert nudged(r) == []

    async def test_an_inherited_pod_that_was_retried_as_any_other(self) -> None:
        r = full(rig())
        r.arrive(tile(8))
        await rounds(r, ROUND)
        r.filter()
        await rounds(r, ROUND)
        assert len(r.api.notes) == 1
        leave(r)
        await rounds(r, 2 * NUDGE_INTERVAL)
        assert len(nudged(r)) == 2

    async def test_pods_pending_when_leadership_is_acquired_again(self) -> None:
        r = rig()
        await rounds(r, ROUND)
        r.leading = False
        r.arrive(tile(8))
        await rounds(r, 2 * SETTLE)
        assert nudged(r) == []
        r.leading = True
        await rounds(r, SETTLE + 2)
        assert nudged(r) == ["default/web-0"]

    @pytest.mark.parametrize("failure", [refused(404), OutcomeUnknown("reset")])
    async def test_a_failed_nudge_is_retried_later(self, failure: Any) -> None:
        r = rig()
        await self.rejected_then_freed(r)
        r.api.script["patch_pod"] = [failure]
        await rounds(r, 2 * NUDGE_INTERVAL + 1)
        assert len(nudged(r)) == 2

    async def test_the_nudge_does_not_change_the_pods_request(self) -> None:
        r = rig()
        await self.rejected_then_freed(r)
        await rounds(r, 1)
        r.catch_up()
        assert r.filter().names == ["n1"]


async def test_the_loop_survives_errors_of_the_api_server(caplog: pytest.LogCaptureFixture) -> None:
    r = full(rig())
    r.arrive(tile(8))
    r.filter()
    r.api.script["note"] = [refused(403)]
    loop = asyncio.create_task(r.pending_pods.run())
    for _ in range(50):
        await asyncio.sleep(0)
    assert not loop.done()
    loop.cancel()
    assert "event or nudge of a pending pod failed" in [record.message for record in caplog.records]


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        pytest.param(tile(8), "", id="it-fits"),
        pytest.param(tile(32), "16 MiB", id="too-large-for-any-card-with-the-numbers"),
    ],
)
async def test_reason(limits: Json, text: str) -> None:
    r = rig()
    r.arrive(limits)
    message = pending_pods.reason(r.cluster_state.pending["uid-web-0"].request, r.ledger)
    assert text in message
    assert bool(message) == bool(text)
