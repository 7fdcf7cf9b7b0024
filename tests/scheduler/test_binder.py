"""The bind verb: one write that carries everything, and the tile after a rejection or a lost answer."""

import asyncio
from typing import Any

import pytest

from gputile.dialects.gputile import GRANT
from gputile.kube.api import Json, OutcomeUnknown
from gputile.ledger.ledger import AllocationState
from gputile.scheduler.binding.binder import FIRST_PAUSE, NOT_LEADER
from gputile.scheduler.extender_api import read_filter
from gputile.scheduler.settings import BindSettings
from gputile.scheduler.state.pod_requests import RECENT
from gputile.testing.builders import node, pod
from tests.scheduler.rig import MEMORY, LostResponse, Rig, Step, bind_args, refused, tile
from tests.scheduler.test_cluster_state import grant


def rig(*, pods: Any = (), **settings: Any) -> Rig:
    return Rig(node("n1").cards(2, size=16384), node("n2").cards(2, size=16384), pods=pods, **settings)


async def settle() -> None:
    """Run all tasks as far as they can."""
    for _ in range(10):
        await asyncio.sleep(0)


class TestOneCall:
    async def test_node_uid_annotations_and_labels_go_together(self) -> None:
        r = rig()
        r.arrive({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000, "nvidia.com/gpucores": 30})
        assert await r.bind() == ""
        assert r.api.calls == ["bind"], "no lookup, no patch"
        (binding,) = r.api.bindings
        assert (binding.namespace, binding.name, binding.uid, binding.node) == ("default", "web-0", "uid-web-0", "n1")
        assert binding.labels == {"hami.io/vgpu-node": "n1"}
        assert binding.annotations["hami.io/vgpu-devices-allocated"] == "GPU-n1-0,NVIDIA,3000,30:;"
        assert (r.state(), r.free()) == (AllocationState.ASSUMED, [13384, 16384])
        granted = r.written()
        assert granted is not None
        assert (granted["pod"], granted["node"], granted["dialect"]) == ("uid-web-0", "n1", "hami")
        assert r.live()["spec"]["nodeName"] == "n1"
        r.catch_up()
        assert (r.state(), r.free()) == (AllocationState.CONFIRMED, [13384, 16384])
        assert r.count("binds_total", outcome="bound") == 1
        assert r.count("verb_seconds_count", verb="bind", stage="api") == 1

    async def test_on_the_reserved_node_the_reservation_is_bound(self) -> None:
        r = rig()
        r.arrive(tile(3000))
        r.filter(nodes=["n1"])
        assert await r.bind() == ""
        assert r.free() == [13384, 16384]
        assert r.count("reservations_total", outcome="bound") == 1
        assert r.ledger.reservations() == 0

    async def test_kube_scheduler_may_choose_another_of_the_equally_good_nodes(self) -> None:
        r = rig()
        r.arrive(tile(3000))
        r.filter()
        assert await r.bind(node="n2") == ""
        assert (r.free("n1"), r.free("n2")) == ([16384, 16384], [13384, 16384])
        assert r.count("reservations_total", outcome="replaced") == 1

    async def test_a_pod_without_gpus_is_bound_as_kube_scheduler_would(self) -> None:
        r = rig()
        r.arrive({"cpu": 1})
        assert await r.bind() == ""
        (binding,) = r.api.bindings
        assert (binding.annotations, binding.labels) == ({}, {})
        assert r.state() is None

    async def test_a_pod_that_our_watch_has_not_shown_yet_is_looked_up(self) -> None:
        r = rig()
        r.arrive(tile(3000), seen=False)
        assert await r.bind() == ""
        assert r.api.calls == ["pod", "bind"]
        assert r.state() is AllocationState.ASSUMED

    async def test_unless_filter_was_just_called_for_it(self) -> None:
        r = rig()
        r.arrive(tile(3000), seen=False)
        assert r.filter().names == ["n1", "n2"]
        assert await r.bind() == ""
        assert r.api.calls == ["bind"]
        assert (r.state(), r.free()) == (AllocationState.ASSUMED, [13384, 16384])
        r.catch_up()
        assert (r.state(), r.free()) == (AllocationState.CONFIRMED, [13384, 16384])

    async def test_a_pod_that_was_deleted_between_filter_and_bind_leaves_nothing_behind(self) -> None:
        r = rig()
        r.arrive(tile(3000), seen=False)
        r.filter()
        r.api.delete_pod("default/web-0")
        assert "rejected the bind" in await r.bind()
        assert (r.state(), r.free()) == (None, [16384, 16384])

    def test_the_number_of_remembered_pods_is_limited(self) -> None:
        r = rig()
        r.arrive(tile(3000), seen=False)
        r.filter()
        assert r.requests.recent("uid-web-0") is not None
        body = r.body()
        for n in range(RECENT):
            r.filter_service.filter(read_filter(body.replace(b"uid-web-0", f"uid-{n}".encode())))
        assert r.requests.recent("uid-web-0") is None
        assert len(r.ledger) == 0

    async def test_without_a_uid_the_live_pod_counts(self) -> None:
        r = rig()
        r.arrive(tile(3000))
        assert await r.bind(uid="") == ""
        assert r.api.bindings[0].uid == "uid-web-0"

    async def test_it_is_placed_by_the_current_ledger_and_not_as_filter_saw_it(self) -> None:
        r = rig()
        r.arrive(tile(16384), name="a")
        r.arrive(tile(16384), name="b")
        r.filter("a", ["n1"])
        r.filter("b", ["n1"])
        assert await r.bind("b") == await r.bind("a") == ""
        cards = [r.written(name)["containers"][0]["tiles"][0]["uuid"] for name in ("a", "b")]  # type: ignore[index]
        assert sorted(cards) == ["GPU-n1-0", "GPU-n1-1"]


class TestNotBound:
    async def test_a_pod_of_another_uid_is_another_pod(self) -> None:
        r = rig()
        r.arrive(tile(3000))
        error = await r.bind(uid="uid-old")
        assert error == "pod default/web-0 was recreated: its UID is uid-web-0, not uid-old"
        assert r.api.bindings == []

    async def test_a_pod_that_does_not_exist(self) -> None:
        assert await rig().bind() == "pod default/web-0 not found"

    @pytest.mark.parametrize(
        "change",
        [
            pytest.param({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}, id="terminating"),
            pytest.param({"status": {"phase": "Failed"}}, id="failed"),
        ],
    )
    async def test_a_pod_that_is_terminating_or_has_ended(self, change: Json) -> None:
        r = rig()
        r.arrive(tile(3000))
        r.api.add_pod(
            r.live() | {"metadata": r.live()["metadata"] | change.get("metadata", {}), "status": change.get("status")}
        )
        r.catch_up()
        assert await r.bind() == "the pod is terminating, or has ended"
        assert r.api.bindings == []
        assert r.free() == [16384, 16384]

    async def test_a_pod_with_an_invalid_request(self) -> None:
        r = rig()
        r.arrive({MEMORY: 3000})
        assert "add `gputile.io/gpu: 1`" in await r.bind()
        assert r.api.bindings == []

    async def test_a_pod_that_is_bound_to_another_node(self) -> None:
        r = rig()
        r.arrive(tile(3000), on="n2")
        assert await r.bind() == "the pod is already bound to node n2"

    async def test_a_node_that_does_not_exist(self) -> None:
        r = rig()
        r.arrive(tile(3000))
        assert await r.bind(node="n3") == "node n3 is unknown to gputile; it may have just been deleted"
        assert r.count("binds_total", outcome="rejected") == 1

    async def test_a_node_that_filled_up_is_a_conflict_and_ranks_last_from_now_on(self) -> None:
        r = rig()
        r.arrive(tile(16384, cards=2), name="a")
        r.arrive(tile(3000))
        assert await r.bind("a") == ""
        error = await r.bind()
        assert error == "the pod no longer fits on node n1: it has too little free memory on a single GPU"
        assert r.count("binds_total", outcome="conflict") == 1
        assert len(r.api.bindings) == 1
        r.api.delete_pod("default/a")
        r.catch_up()
        assert r.filter().names == ["n2"]

    async def test_a_pod_whose_lookup_fails(self) -> None:
        r = rig()
        r.api.script["pod"] = [OutcomeUnknown("timed out")]
        assert await r.bind() == "lookup of the pod failed: timed out"


class TestRepeats:
    async def test_of_a_pod_that_another_scheduler_bound_and_an_old_event_shows_unbound(self) -> None:
        r = rig()
        r.arrive(tile(3000))
        old = r.cluster_state.pending["uid-web-0"].pod
        r.change("web-0", spec={"nodeName": "n1"})
        r.catch_up()
        r.cluster_state.pod_changed(old)
        error = await r.bind()
        assert error != ""

    async def test_the_same_bind_at_once_is_one_bind(self) -> None:
        r = rig()
        r.arrive(tile(3000))
        assert await asyncio.gather(*(r.bind() for _ in range(5))) == [""] * 5
        assert len(r.api.bindings) == 1

    async def test_again_after_the_cluster_has_shown_it(self) -> None:
        r = rig()
        r.arrive(tile(3000))
        await r.bind()
        r.catch_up()
        assert await r.bind() == ""
        assert len(r.api.bindings) == 1
        assert r.free() == [13384, 16384]

    async def test_again_before_the_cluster_has_shown_it(self) -> None:
        """Answered by a lookup of the pod: the Binding is rejected with 409, and the pod carries our grant."""
        r = rig()
        r.arrive(tile(3000))
        await r.bind()
        assert await r.bind() == ""
        assert (r.state(), r.free()) == (AllocationState.ASSUMED, [13384, 16384])

    async def test_to_another_node_while_in_flight(self) -> None:
        r = rig()
        r.arrive(tile(3000))
        gate = r.api.gates["bind"] = asyncio.Event()
        first = asyncio.create_task(r.bind())
        await settle()
        assert await r.bind(node="n2") == "the pod is being bound to node n1; try again"
        gate.set()
        assert await first == ""

    async def test_to_another_node_after_a_lost_answer(self) -> None:
        r = rig(bind=BindSettings(timeout=0.1))
        r.arrive(tile(3000))
        r.api.script["bind"] = [OutcomeUnknown("reset")] * 9
        assert "no answer from the API server" in await r.bind()
        assert await r.bind(node="n2") == "the pod is already assumed on node n1"
        assert {binding.node for binding in r.api.bindings} == {"n1"}

    async def test_two_pods_without_a_uid_are_two_pods(self) -> None:
        r = rig()
        r.arrive(tile(3000), name="a")
        r.arrive(tile(3000), name="b")
        assert list(await asyncio.gather(r.bind("a", uid=""), r.bind("b", uid=""))) == ["", ""]
        assert r.live("b")["spec"]["nodeName"] == "n1"


class TestAnswers:
    @pytest.mark.parametrize(
        "steps",
        [
            pytest.param([refused(429)], id="too-many-requests"),
            pytest.param([refused(0)], id="a-connection-that-failed"),
            pytest.param([refused(408)], id="a-timeout-of-the-server"),
            pytest.param([OutcomeUnknown("reset")], id="a-lost-answer"),
            pytest.param([refused(429), OutcomeUnknown("reset"), refused(0)], id="all-of-these-in-turn"),
        ],
    )
    async def test_transient_failures_are_retried_with_the_same_grant(self, steps: list[Step]) -> None:
        r = rig()
        r.arrive(tile(3000))
        count, r.api.script["bind"] = len(steps), list(steps)
        assert await r.bind() == ""
        assert len(r.api.bindings) == count + 1
        assert len({binding.annotations[GRANT] for binding in r.api.bindings}) == 1
        assert r.clock.pauses == [FIRST_PAUSE * 2**n for n in range(count)]
        assert r.state() is AllocationState.ASSUMED

    async def test_retry_after_is_respected(self) -> None:
        r = rig()
        r.arrive(tile(3000))
        r.api.script["bind"] = [refused(429, retry_after=1.0)]
        assert await r.bind() == ""
        assert r.clock.pauses == [1.0]

    async def test_but_not_beyond_the_bind_timeout(self) -> None:
        r = rig()
        r.arrive(tile(3000))
        r.api.script["bind"] = [refused(429, retry_after=60.0)]
        assert await r.bind() == "the API server did not accept the bind: the server returned 429"
        assert sum(r.clock.pauses) <= r.settings.bind.timeout
        assert len(r.api.bindings) == 1
        assert (r.state(), r.free()) == (None, [16384, 16384])

    async def test_no_attempt_may_take_longer_than_what_is_left(self) -> None:
        r = rig(bind=BindSettings(timeout=2.5, attempt=2.0))
        r.arrive(tile(3000))
        r.api.script["bind"] = [refused(429, retry_after=1.0)] * 5
        await r.bind()
        assert r.api.timeouts == [2.0, 1.5]

    @pytest.mark.parametrize("status", [400, 403, 404, 422])
    async def test_a_definite_rejection_forgets_the_tile(self, status: int) -> None:
        r = rig()
        r.arrive(tile(3000))
        r.api.script["bind"] = [refused(status)]
        assert await r.bind() == f"the API server rejected the bind: the server returned {status}"
        assert (r.state(), r.free()) == (None, [16384, 16384])
        assert r.api.calls == ["bind"], "no lookup is needed"
        assert r.filter().names == ["n2"], "and the node ranks last"
        assert r.count("binds_total", outcome="rejected") == 1

    async def test_a_lost_answer_keeps_the_tile(self) -> None:
        r = rig()
        r.arrive(tile(3000))
        r.api.script["bind"] = [LostResponse(), *[OutcomeUnknown("reset")] * 99]
        error = await r.bind()
        assert error == "no answer from the API server (reset); the GPUs stay assumed until the outcome is known"
        assert (r.state(), r.free()) == (AllocationState.ASSUMED, [13384, 16384])
        assert r.count("binds_total", outcome="unknown") == 1
        r.catch_up()
        assert r.state() is AllocationState.CONFIRMED

    async def test_the_next_attempt_sends_the_same_cards(self) -> None:
        r = rig(bind=BindSettings(timeout=0.01))
        r.arrive(tile(3000))
        r.api.script["bind"] = [OutcomeUnknown("reset")]
        assert "no answer from the API server" in await r.bind()
        r.arrive(tile(3000), name="b")
        assert await r.bind("b") == ""
        assert r.filter().names == ["n1"]
        assert await r.bind() == ""
        first, _, last = r.api.bindings
        assert _without_time(first.annotations[GRANT]) == _without_time(last.annotations[GRANT])
        r.catch_up()
        assert r.free() == [10384, 16384]

    async def test_a_written_bind_with_a_lost_answer_is_detected_by_the_next_attempt(self) -> None:
        r = rig()
        r.arrive(tile(3000))
        r.api.script["bind"] = [LostResponse()]
        assert await r.bind() == ""
        assert r.api.calls == ["bind", "bind", "pod"]
        assert r.state() is AllocationState.ASSUMED

    async def test_a_written_bind_with_a_lost_answer_is_detected_by_the_next_bind(self) -> None:
        """kube-scheduler retries a second later, before our watch shows the pod bound."""
        r = rig(bind=BindSettings(timeout=0.01))
        r.arrive(tile(3000))
        r.api.script["bind"] = [LostResponse()]
        assert "no answer from the API server" in await r.bind()
        assert await r.bind() == ""
        assert (r.state(), r.free()) == (AllocationState.ASSUMED, [13384, 16384]), (
            "the pod is bound: its tile is not free"
        )

    async def test_a_written_bind_that_is_repeated_does_not_allocate_its_tile_twice(self) -> None:
        r = Rig(node("n1").card(size=16))
        r.arrive(tile(16), name="a")
        r.arrive(tile(16), name="b")
        assert await r.bind("a") == ""
        await r.bind("a")  # kube-scheduler repeats the call before our watch shows the pod
        assert await r.bind("b") != "", "a runs on that card"
        r.catch_up()
        assert r.count("overcommits_total") == 0

    async def test_a_rejection_after_a_lost_answer_keeps_the_tile_while_the_earlier_attempt_may_succeed(self) -> None:
        r = rig()
        r.arrive(tile(3000))
        r.api.script["bind"] = [OutcomeUnknown("reset"), refused(403)]
        assert "an earlier attempt may still succeed" in await r.bind()
        assert (r.state(), r.free()) == (AllocationState.ASSUMED, [13384, 16384])

    async def test_cards_that_another_pod_has_by_now_are_not_sent_again(self) -> None:
        """The cluster shows another pod on them: the outcome of this pod's bind is looked up first."""
        r = Rig(node("n1").card(size=16), bind=BindSettings(timeout=0.01))
        r.arrive(tile(16))
        r.api.script["bind"] = [OutcomeUnknown("reset")]
        await r.bind()
        r.arrive(tile(16), name="b", annotations=grant(16, name="b"), on="n1")
        assert "went to another pod" in await r.bind()
        assert len(r.api.bindings) == 1
        await r.reconciler.round()
        assert r.state() is None

    async def test_a_pod_that_was_deleted_meanwhile_is_forgotten(self) -> None:
        r = rig()
        r.arrive(tile(3000))
        r.api.script["bind"] = [OutcomeUnknown("reset"), refused(404)]
        r.api.script["pod"] = [lambda: r.api.delete_pod("default/web-0")]
        assert "rejected the bind" in await r.bind()
        assert (r.state(), r.free()) == (None, [16384, 16384])

    async def test_the_bind_of_another_scheduler_to_another_node_wins(self) -> None:
        r = rig()
        r.arrive(tile(3000))
        r.change("web-0", spec={"nodeName": "n2"})
        assert "already assigned to node n2" in await r.bind()
        assert r.state() is None
        r.catch_up()
        assert r.node_of() == "n2"

    async def test_the_bind_of_another_scheduler_to_the_same_node_is_no_success(self) -> None:
        """The pod carries no grant; the leader grants it as soon as the watch shows it."""
        r = rig()
        r.arrive(tile(3000))
        r.change("web-0", spec={"nodeName": "n1"})
        assert "already assigned to node n1" in await r.bind()
        r.catch_up()
        assert list(r.cluster_state.ungranted) == ["uid-web-0"]

    async def test_a_conflict_whose_lookup_fails_keeps_the_tile(self) -> None:
        r = rig()
        r.arrive(tile(3000))
        r.api.script |= {"bind": [refused(409)], "pod": [OutcomeUnknown("timed out")]}
        assert await r.bind() == "the bind may have been written, and the lookup of the pod failed: timed out"
        assert (r.state(), r.free()) == (AllocationState.ASSUMED, [13384, 16384])

    async def test_a_rejected_bind_of_a_pod_without_gpus(self) -> None:
        r = rig()
        r.arrive({"cpu": 1})
        r.api.script["bind"] = [refused(403)]
        assert "rejected the bind" in await r.bind()

    @pytest.mark.parametrize("seen", [True, False], ids=["after-a-conflict", "before-the-bind"])
    async def test_a_lookup_that_hangs_does_not_hang_the_bind(self, seen: bool) -> None:
        """The whole bind stays below kube-scheduler's httpTimeout."""
        r = rig(bind=BindSettings(timeout=0.02, attempt=0.02))
        r.arrive(tile(3000), seen=seen)
        r.api.script["bind"] = [refused(409)]
        r.api.gates["pod"] = asyncio.Event()
        async with asyncio.timeout(0.1):
            assert await r.bind()


def _without_time(grant: str) -> str:
    head, _, tail = grant.partition('"at":')
    return head + tail.partition(",")[2]


class TestLeadership:
    async def test_a_replica_that_is_not_the_leader_makes_no_api_call(self) -> None:
        r = rig()
        r.arrive(tile(3000), seen=False)
        r.leading = False
        assert await r.bind() == NOT_LEADER
        assert r.api.calls == []
        assert r.state() is None

    async def test_a_lease_lost_between_two_attempts_ends_it(self) -> None:
        r = rig()
        r.arrive(tile(3000))

        def lose() -> None:
            r.leading = False
            raise refused(429)

        r.api.script["bind"] = [lose]
        assert NOT_LEADER in await r.bind()
        assert len(r.api.bindings) == 1
        assert (r.state(), r.free()) == (None, [16384, 16384])

    async def test_lost_leadership_after_a_lost_answer_keeps_the_tile(self) -> None:
        r = rig()
        r.arrive(tile(3000))

        def lose() -> None:
            r.leading = False
            raise OutcomeUnknown("reset")

        r.api.script["bind"] = [lose]
        assert "no answer from the API server" in await r.bind()
        assert len(r.api.bindings) == 1
        assert r.state() is AllocationState.ASSUMED

    async def test_a_lease_lost_during_the_lookup_before_the_bind(self) -> None:
        r = rig()
        r.arrive(tile(3000), seen=False)
        r.api.script["pod"] = [lambda: setattr(r, "leading", False)]
        assert NOT_LEADER in await r.bind()
        assert r.api.bindings == []
        assert r.state() is None


class TestInterruptions:
    async def test_a_caller_that_disconnects_does_not_stop_the_bind(self) -> None:
        r = rig()
        r.arrive(tile(3000))
        gate = r.api.gates["bind"] = asyncio.Event()
        caller = asyncio.create_task(r.bind())
        await settle()
        caller.cancel()
        await asyncio.sleep(0)
        assert caller.cancelled()
        gate.set()
        await r.binder.finish()
        assert r.live()["spec"]["nodeName"] == "n1"
        assert r.state() is AllocationState.ASSUMED

    async def test_finish_waits_for_all_binds_in_flight(self) -> None:
        r = rig()
        gate = r.api.gates["bind"] = asyncio.Event()
        for name in ("a", "b"):
            r.arrive(tile(3000), name=name)
        callers = [asyncio.create_task(r.bind(name)) for name in ("a", "b")]
        await settle()
        finishing = asyncio.create_task(r.binder.finish())
        await asyncio.sleep(0)
        assert not finishing.done()
        gate.set()
        await finishing
        assert [await caller for caller in callers] == ["", ""]

    async def test_the_pods_own_end_frees_the_tile_of_a_bind_in_flight(self) -> None:
        r = rig()
        r.arrive(tile(3000))
        gate = r.api.gates["bind"] = asyncio.Event()
        bind = asyncio.create_task(r.bind())
        await settle()
        r.api.delete_pod("default/web-0")
        r.catch_up()
        gate.set()
        assert "rejected the bind" in await bind
        assert r.free() == [16384, 16384]


async def test_concurrent_binds_never_overcommit_a_card() -> None:
    r = rig()
    names = [f"p{n}" for n in range(9)]
    for name in names:
        r.arrive(tile(6000), name=name)
    answers = await asyncio.gather(*(r.bind(name) for name in names))
    assert (
        sorted(answers)
        == [""] * 4 + ["the pod no longer fits on node n1: it has too little free memory on a single GPU"] * 5
    )
    r.ledger.check()
    r.catch_up()
    r.ledger.check()


async def test_a_pod_of_another_namespace_is_looked_up_there() -> None:
    r = rig(pods=[pod(tile(3000), namespace="ml", uid="uid-ml")])
    args = bind_args(uid="uid-ml")
    assert await r.binder.bind(args) == ""
    assert r.api.bindings[0].namespace == "ml"


class TestAReservation:
    async def test_is_bound_as_it_is(self) -> None:
        """The ledger has kept it since filter; another placement would only cost time."""
        rig = Rig(node("n1").cards(2, size=16))
        rig.arrive(tile(8))
        rig.filter()
        reserved = rig.ledger.entry("uid-web-0")
        assert await rig.bind() == ""
        bound = rig.ledger.entry("uid-web-0")
        assert reserved is not None
        assert bound is not None
        assert bound.allocation == reserved.allocation

    async def test_but_not_on_a_card_that_became_unhealthy(self) -> None:
        rig = Rig(node("n1").cards(2, size=16))
        rig.arrive(tile(8))
        rig.filter()
        before = rig.ledger.entry("uid-web-0")
        assert before is not None
        (ill,) = before.allocation.uses()
        cards = [f"GPU-n1-{n}" for n in range(2)]
        sick = node("n1")
        for uuid in cards:
            sick = sick.card(size=16, healthy=uuid != ill)
        rig.api.add_node(sick.manifest())
        rig.catch_up()
        assert await rig.bind() == ""
        after = rig.ledger.entry("uid-web-0")
        assert after is not None
        assert set(after.allocation.uses()) == set(cards) - {ill}
