"""The reconcile loop: lookups of binds, pods bound by another scheduler, labels, and Events."""

import asyncio
from typing import Any

import pytest

from gputile.dialects.gputile import GRANT
from gputile.kube.api import Json, OutcomeUnknown
from gputile.ledger.events import Assumed, Forgotten, Tick
from gputile.ledger.ledger import AllocationState
from gputile.scheduler.binding.reconciler import RETRY, ROUND
from gputile.scheduler.settings import BindSettings
from gputile.testing.builders import node
from tests.scheduler.rig import LostResponse, Rig, refused, tile
from tests.scheduler.test_cluster_state import grant

HAMI = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 8}


def rig(**settings: Any) -> Rig:
    return Rig(node("n1").cards(2, size=16), **settings)


async def rounds(r: Rig, count: int = 1, apart: float = ROUND) -> None:
    for _ in range(count):
        try:
            await r.reconciler.round()
        except Exception as error:
            if type(error).__name__ not in ("ApiRejected", "OutcomeUnknown"):
                raise
        r.clock.now += apart


class TestPodsBoundByAnotherScheduler:
    async def test_placed_confirmed_and_written_once(self) -> None:
        r = rig()
        r.arrive(HAMI, on="n1")
        await rounds(r, 3)
        assert r.free() == [8, 16]
        ((key, annotations, labels),) = r.api.patches
        assert key == "default/web-0"
        assert {GRANT, "hami.io/vgpu-devices-allocated"} <= annotations.keys()
        assert labels == {"hami.io/vgpu-node": "n1"}
        assert r.count("adopted_pods_total") == 1
        r.catch_up()
        assert (r.state(), r.free()) == (AllocationState.CONFIRMED, [8, 16])
        await rounds(r, 3)
        assert len(r.api.patches) == 1

    async def test_confirmed_before_it_is_written(self) -> None:
        r = rig()
        r.arrive(tile(8), on="n1")
        r.api.gates["patch_pod"] = asyncio.Event()
        task = asyncio.create_task(r.reconciler.round())
        for _ in range(5):
            await asyncio.sleep(0)
        assert r.free() == [8, 16]
        r.api.gates["patch_pod"].set()
        await task

    @pytest.mark.parametrize(
        "failure", [refused(429), OutcomeUnknown("reset"), LostResponse()], ids=["rejected", "lost", "written-and-lost"]
    )
    async def test_written_again_after_a_failure_with_the_same_cards(self, failure: Any) -> None:
        r = rig()
        r.arrive(tile(8), on="n1")
        r.api.script["patch_pod"] = [failure]
        await rounds(r, 3)
        assert len(r.api.patches) == 1, "not at once"
        assert r.free() == [8, 16]
        await rounds(r, 1, RETRY)
        await rounds(r)
        assert len(r.api.patches) == 2
        assert r.written() is not None
        r.catch_up()
        assert r.free() == [8, 16]

    async def test_each_gets_its_own_tile(self) -> None:
        r = rig()
        for name in ("a", "b", "c"):
            r.arrive(tile(10), name=name, on="n1")
        await rounds(r, 2)
        assert r.free() == [6, 6]
        r.ledger.check()
        assert sorted(r.cluster_state.ungranted) == ["uid-c"]

    async def test_where_no_gpu_fits_an_event_is_recorded_and_nothing_is_allocated(self) -> None:
        r = rig()
        r.arrive(tile(32), on="n1")
        await rounds(r, 8)
        (note,) = r.api.notes
        assert note.pod == "web-0"
        assert "bound to node n1 by another scheduler, and no GPU fits: the node has GPUs smaller" in note.message
        assert (r.free(), r.api.patches) == ([16, 16], [])

    async def test_granted_as_soon_as_it_fits(self) -> None:
        r = rig()
        r.arrive(tile(16, cards=2), name="old", annotations=_both(), on="n1")
        r.arrive(tile(8), on="n1")
        await rounds(r, 2)
        assert r.written() is None
        r.api.delete_pod("default/old")
        r.catch_up()
        await rounds(r)
        assert r.written() is not None, "Freed: no need to wait for the next regular retry"

    async def test_on_an_unknown_node_it_stays_ungranted(self) -> None:
        r = rig()
        r.arrive(tile(8), on="n2")
        await rounds(r, 2)
        assert (r.api.patches, r.api.notes) == ([], [])
        r.api.add_node(node("n2").card(size=16).manifest())
        r.catch_up()
        await rounds(r)
        assert r.free("n2") == [8]

    async def test_deleted_before_it_was_written(self) -> None:
        r = rig()
        r.arrive(tile(8), on="n1")
        r.api.script["patch_pod"] = [OutcomeUnknown("reset")]
        await rounds(r)
        r.api.delete_pod("default/web-0")
        r.catch_up()
        r.clock.now += RETRY
        await rounds(r)
        assert len(r.api.patches) == 1
        assert r.free() == [16, 16]

    async def test_not_written_over_a_later_change_of_the_pod(self) -> None:
        """For example another leader's grant, which our watch has not shown yet."""
        r = rig()
        r.arrive(tile(8), on="n1")
        r.api.add_pod(r.live() | {"metadata": r.live()["metadata"] | {"annotations": grant(index=1)}})
        await rounds(r, 1, RETRY)
        written = r.written()
        assert written is not None
        assert written["containers"][0]["tiles"][0]["index"] == 1
        r.catch_up()
        await rounds(r, 2, RETRY)
        assert r.free() == [16, 8]

    async def test_a_lease_lost_between_two_writes_ends_them(self) -> None:
        r = rig()
        for name in ("a", "b"):
            r.arrive(tile(8), name=name, on="n1")
        r.api.script["patch_pod"] = [lambda: setattr(r, "leading", False)]
        await rounds(r, 3, RETRY)
        assert len(r.api.patches) == 1

    async def test_a_new_term_decides_unwritten_grants_again(self) -> None:
        r = rig()
        r.arrive(tile(8), on="n1")
        r.api.script["patch_pod"] = [OutcomeUnknown("reset")]
        await rounds(r)
        r.reconciler.on_elected()
        assert list(r.cluster_state.ungranted) == ["uid-web-0"]
        await rounds(r, 2, RETRY)
        assert r.written() is not None
        assert r.free() == [8, 16]

    async def test_only_the_leader_grants(self) -> None:
        r = rig()
        r.leading = False
        r.arrive(tile(8), on="n1")
        r.arrive(tile(8), name="copy", annotations=grant(), on="n1")
        await rounds(r, 3)
        assert (r.api.calls, r.free()) == ([], [16, 16])

    async def test_no_fitting_gpu_is_not_reported_as_an_invalid_grant(self) -> None:
        r = rig()
        r.arrive(tile(32), on="n1")
        await rounds(r)
        assert [note.reason for note in r.api.notes] != ["GrantInvalid"]
        assert r.count("copied_grants_total") == 0


def _both() -> dict[str, str]:
    tiles = [{"uuid": f"GPU-n1-{n}", "index": n, "memory": 16, "cores": 0} for n in range(2)]
    return grant(name="old", containers=[{"name": "c0", "tiles": tiles}])


class TestLabels:
    async def bound(self, r: Rig, labels: Json | None = None, **status: Any) -> None:
        r.arrive(HAMI, name="b", labels=labels)
        assert await r.bind("b") == ""
        live = r.api.pods["default/b"]
        if labels is None:
            live["metadata"]["labels"] = {}  # an API server before 1.35 copies only annotations
        r.api.add_pod(live | {"status": status})
        r.api.events[:] = r.api.events[-1:]
        r.catch_up()

    async def test_labels_that_the_api_server_did_not_copy_are_patched_once(self) -> None:
        r = rig()
        await self.bound(r)
        await rounds(r, 2)
        assert r.api.patches == [("default/b", {}, {"hami.io/vgpu-node": "n1"})]
        r.catch_up()
        await rounds(r, 2)
        assert len(r.api.patches) == 1

    async def test_existing_labels_are_not_changed(self) -> None:
        r = rig()
        await self.bound(r, labels={"hami.io/vgpu-node": "mine"})
        await rounds(r, 2)
        assert r.api.patches == []

    async def test_a_dialect_without_labels_needs_no_patch(self) -> None:
        r = rig()
        r.arrive(tile(8))
        await r.bind()
        r.catch_up()
        await rounds(r)
        assert r.api.patches == []

    async def test_a_running_pod_is_not_patched(self) -> None:
        r = rig()
        await self.bound(r, phase="Running")
        await rounds(r)
        assert r.api.patches == []

    async def test_a_failure_is_retried(self) -> None:
        r = rig()
        await self.bound(r)
        r.api.script["patch_pod"] = [OutcomeUnknown("reset")]
        await rounds(r, 2, RETRY)
        assert r.live("b")["metadata"]["labels"] == {"hami.io/vgpu-node": "n1"}

    async def test_a_failure_of_one_pod_does_not_cost_the_others_their_labels(self) -> None:
        r = rig()
        for name in ("a", "b"):
            r.arrive(HAMI, name=name)
        for name in ("a", "b"):
            assert await r.bind(name) == ""
            r.live(name)["metadata"]["labels"] = {}
        r.api.events.clear()
        for name in ("a", "b"):
            r.api.add_pod(r.live(name))
        r.catch_up()
        r.api.script["patch_pod"] = [OutcomeUnknown("reset")]
        await rounds(r, 2, RETRY)
        assert [r.live(name)["metadata"]["labels"] for name in ("a", "b")] == [{"hami.io/vgpu-node": "n1"}] * 2


class TestLookingUp:
    async def lost(self, r: Rig, *, is_written: bool) -> None:
        """A bind without an answer, and the time after which the ledger wants it looked up."""
        r.arrive(tile(8))
        r.api.script["bind"] = [LostResponse() if is_written else OutcomeUnknown("reset")]
        assert "no answer from the API server" in await r.bind()
        r.clock.now += r.settings.ledger.assume_ttl
        r.apply(r.ledger.handle(Tick(r.clock.now)))
        assert r.count("assumed_expired_total") == 1

    def rig(self) -> Rig:
        return rig(bind=BindSettings(timeout=0.01))

    async def test_a_written_bind_is_confirmed(self) -> None:
        r = self.rig()
        await self.lost(r, is_written=True)
        await rounds(r, 2)
        assert (r.state(), r.free()) == (AllocationState.CONFIRMED, [8, 16])
        assert r.api.calls.count("pod") == 1

    async def test_a_bind_that_was_not_written_is_forgotten(self) -> None:
        r = self.rig()
        await self.lost(r, is_written=False)
        await rounds(r)
        assert (r.state(), r.free()) == (None, [16, 16])

    async def test_a_deleted_pod_is_gone(self) -> None:
        r = self.rig()
        await self.lost(r, is_written=False)
        r.api.delete_pod("default/web-0")
        await rounds(r)
        assert (r.state(), r.free()) == (None, [16, 16])

    async def test_another_pod_of_that_name_is_not_confused_with_it(self) -> None:
        r = self.rig()
        await self.lost(r, is_written=True)
        r.live()["metadata"]["uid"] = "uid-new"
        await rounds(r)
        assert (r.state(), r.free()) == (None, [16, 16])

    async def test_a_lookup_that_fails_keeps_the_tile_and_is_repeated(self) -> None:
        r = self.rig()
        await self.lost(r, is_written=True)
        r.api.script["pod"] = [OutcomeUnknown("timed out")]
        await rounds(r, 1, RETRY)
        assert (r.state(), r.free()) == (AllocationState.ASSUMED, [8, 16])
        await rounds(r)
        assert r.state() is AllocationState.CONFIRMED

    async def test_a_bind_that_the_watch_confirmed_needs_no_lookup(self) -> None:
        r = self.rig()
        await self.lost(r, is_written=True)
        r.catch_up()
        await rounds(r)
        assert "pod" not in r.api.calls

    async def test_what_was_confirmed_during_the_lookup_stays(self) -> None:
        r = self.rig()
        await self.lost(r, is_written=False)
        entry = r.ledger.entry("uid-web-0")
        assert entry is not None

        def again() -> None:
            r.ledger.handle(Forgotten("uid-web-0"))
            r.ledger.handle(Assumed(entry.allocation, r.clock.now))

        r.api.script["pod"] = [again]
        await rounds(r)
        assert (r.state(), r.free()) == (AllocationState.ASSUMED, [8, 16])

    async def test_a_bind_in_flight_during_the_lookup_keeps_its_tile(self) -> None:
        """The repeated bind is sent, the lookup finds the pod unbound, and then the bind is written."""
        r = self.rig()
        await self.lost(r, is_written=False)
        gate = r.api.gates["bind"] = asyncio.Event()
        bind = asyncio.create_task(r.bind())
        for _ in range(5):
            await asyncio.sleep(0)
        await rounds(r)
        gate.set()
        assert await bind == ""
        assert r.live()["spec"]["nodeName"] == "n1"
        assert r.free() == [8, 16], "the pod is bound: its tile is not free"

    async def test_a_new_term_looks_up_every_bind_in_flight(self) -> None:
        r = self.rig()
        r.arrive(tile(8))
        assert await r.bind() == ""
        r.reconciler.on_elected()
        await rounds(r)
        assert r.state() is AllocationState.CONFIRMED

    async def test_a_replica_that_is_not_the_leader_also_looks_up(self) -> None:
        """Its ledger must be correct when it becomes the leader."""
        r = self.rig()
        await self.lost(r, is_written=True)
        r.leading = False
        await rounds(r)
        assert r.state() is AllocationState.CONFIRMED

    async def test_a_bind_that_is_repeated_during_the_lookup_keeps_its_tile(self) -> None:
        """The lookup is sent, the pod is unbound; the repeated bind is written; then the lookup is answered."""
        r = self.rig()
        await self.lost(r, is_written=False)
        seen = await r.api.pod("default", "web-0")
        assert await r.bind() == ""

        async def old_answer(namespace: str, name: str) -> Any:
            return seen

        r.api.pod = old_answer  # type: ignore[method-assign]
        await rounds(r)
        assert r.live()["spec"]["nodeName"] == "n1"
        assert r.free() == [8, 16], "the pod is bound: its tile is not free"


class TestReports:
    async def test_a_copied_grant_gets_one_event(self) -> None:
        r = rig()
        r.arrive(tile(8), annotations=grant(pod="uid-other"), on="n1")
        await rounds(r)
        r.relist()
        r.change("web-0", status={"phase": "Pending"})
        r.catch_up()
        await rounds(r, 3)
        (note,) = r.api.notes
        assert (note.reason, note.uid) == ("GrantInvalid", "uid-web-0")
        assert "belongs to pod uid-other" in note.message
        assert r.count("copied_grants_total") == 1
        written = r.written()
        assert written is not None
        assert written["pod"] == "uid-web-0", "and replaced by its own"

    async def test_the_same_event_is_not_recorded_twice(self) -> None:
        r = rig()
        r.arrive(tile(8), annotations=grant(), on="n1")
        for index in (1, 2, 3):
            r.arrive(tile(8), annotations=grant(index=index), on="n1")
            await rounds(r)
        assert len(r.api.notes) == 1

    async def test_a_replica_that_is_not_the_leader_keeps_no_events_for_later(self) -> None:
        """The leader at that time has recorded them."""
        r = rig()
        r.leading = False
        r.arrive(tile(8), annotations=grant(pod="uid-other"), on="n1")
        await rounds(r)
        r.leading = True
        await rounds(r)
        assert r.api.notes == []

    async def test_an_edited_grant_gets_an_event(self) -> None:
        r = rig()
        r.arrive(tile(8), annotations=grant(), on="n1")
        r.arrive(tile(8), annotations=grant(index=1), on="n1")
        await rounds(r)
        (note,) = r.api.notes
        assert "was changed after the pod was bound" in note.message

    async def test_a_conflict_is_counted_and_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        r = rig()
        for name in ("a", "b"):
            r.arrive(tile(10), name=name, annotations=grant(10, name=name), on="n1")
        await rounds(r, 2)
        assert [record.message for record in caplog.records].count("GPU overcommitted") == 1
        assert r.count("overcommits_total") == 1

    async def test_deleted_pods_are_forgotten(self) -> None:
        r = rig()
        r.arrive(tile(8), annotations=grant(pod="uid-other"), on="n1")
        await rounds(r)
        r.api.delete_pod("default/web-0")
        r.catch_up()
        r.reconciler.prune()
        r.arrive(tile(8), annotations=grant(pod="uid-other"), on="n1")
        await rounds(r)
        assert len(r.api.notes) == 2

    async def test_an_event_that_could_not_be_written_is_written_later(self) -> None:
        r = rig()
        r.arrive(tile(8), annotations=grant(pod="uid-other"), on="n1")
        r.api.script["note"] = [OutcomeUnknown("reset")]
        await rounds(r, 2, RETRY)
        assert len(r.api.notes) == 1


async def test_a_stop_in_the_middle_of_a_write_stops() -> None:
    r = rig()
    r.arrive(tile(8), on="n1")
    loop = asyncio.create_task(r.reconciler.run())
    r.api.script["patch_pod"] = [loop.cancel]
    for _ in range(50):
        await asyncio.sleep(0)
    stopped = loop.done()
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
    assert stopped


async def test_the_loop_survives_errors_of_the_api_server(caplog: pytest.LogCaptureFixture) -> None:
    r = rig()
    r.arrive(tile(8), on="n1")
    r.api.script["patch_pod"] = [refused(403), OutcomeUnknown("reset")]
    loop = asyncio.create_task(r.reconciler.run())
    for _ in range(200):
        await asyncio.sleep(0)
    assert not loop.done()
    loop.cancel()
    assert r.written() is not None
    assert "reconcile failed; retrying" in [record.message for record in caplog.records]


async def test_pods_that_are_deleted_in_the_middle_of_a_round_break_nothing() -> None:
    r = rig()
    for name in ("a", "b"):
        r.arrive(HAMI, name=name)
        assert await r.bind(name) == ""
        r.live(name)["metadata"]["labels"] = {}
    r.api.events.clear()
    for name in ("a", "b"):
        r.api.add_pod(r.live(name))
    r.catch_up()

    def all_go() -> None:
        for key in list(r.api.pods):
            r.api.delete_pod(key)
        r.catch_up()

    r.api.script["patch_pod"] = [all_go]
    await rounds(r, 2)
    assert (r.cluster_state.newly_bound, len(r.ledger)) == ({}, 0)
