"""Preemption in trouble: what a bug hunt found, and what must hold instead.

Each of these failed once: on loops that died when a pod left at the wrong moment, on rooms promised twice, on pods
evicted for nothing, on promises that outlived their reason.
"""

import asyncio
from typing import Any

import msgspec

from gputile.book.events import Tick
from gputile.dialects.gputile import NUDGED, PROMISE
from gputile.dialects.wire import Pod
from gputile.kube.values import Json, Unclear
from gputile.scheduler.promising import Rest
from gputile.scheduler.wire import Offer, PreemptArgs
from gputile.testing.builders import node
from tests.scheduler.rig import Lands, Rig, refused, tile
from tests.scheduler.test_preempting import (
    HIGH,
    LOW,
    MIDDLE,
    TestANewLeader,
    arrive,
    crowded,
    gone,
    guard,
    nominated,
    notes,
    planned,
    settle,
    wish,
)

heir_of = TestANewLeader.heir
del TestANewLeader


def later(rig: Rig, seconds: float) -> None:
    rig.clock.now += seconds
    rig.carry_out(rig.ledger.handle(Tick(rig.clock.now)))


def stamp(rig: Rig, name: str, when: str) -> None:
    rig.change(name, metadata={**rig.live(name)["metadata"], "deletionTimestamp": when})
    rig.catch_up()


def ask(rig: Rig, name: str, **offers: Any) -> dict[str, Offer]:
    live = msgspec.convert(rig.live(name), Pod)
    return rig.preemptor.answer(PreemptArgs(pod=live, offers=offers))


class TestTheLoopDies:
    async def test_a_second_wish_leaves_while_the_first_is_attended_to(self) -> None:
        rig = await crowded()
        arrive(rig, "first", 10, HIGH)
        arrive(rig, "second", 10, HIGH - 1)
        rig.filter("first"), rig.filter("second")
        rig.clock.now += 1
        rig.api.script["budgets"] = [lambda: gone(rig, "second")]  # deleted (or bound) while budgets are read
        await rig.preemptor.round()

    async def test_a_new_term_between_two_open_plans(self) -> None:
        rig = Rig(*(node(f"n{i}").card(size=16) for i in (1, 2)))
        for i in (1, 2):
            await settle(rig, f"low{i}", 10, LOW)
        for i in (1, 2):
            arrive(rig, f"wanted{i}", 10, HIGH)
            rig.filter(f"wanted{i}")
        rig.clock.now += 1
        rig.api.script["patch_pod"] = [Unclear("reset"), Unclear("reset")]
        await rig.preemptor.round()
        assert len(rig.preemptor._promiser._open) == 2
        rig.clock.now += 5
        rig.api.script["patch_pod"] = [rig.preemptor.new_term]  # take_stock() of a new term of our own
        await rig.preemptor.round()

    async def test_a_new_term_while_an_expired_promise_is_taken_back(self) -> None:
        rig = await crowded()
        await planned(rig)
        later(rig, 41)
        rig.api.script["patch_pod"] = [rig.preemptor.new_term]
        rig.change("wanted", metadata={**rig.live("wanted")["metadata"], "annotations": {}})  # (the rig's wall stands)
        rig.catch_up()
        await rig.preemptor.round()

    async def test_a_new_term_while_an_eviction_is_refused(self) -> None:
        rig = await crowded()

        def term() -> None:
            rig.leading = True
            rig.preemptor._promiser._open.clear()  # what new_term() does; our watch shows no promise yet
            raise refused(429)

        rig.api.script["evict"] = [term]
        await planned(rig)

    async def test_a_deletion_timestamp_that_nobody_can_read(self) -> None:
        rig = await crowded()
        stamp(rig, "middle", "soon")
        await planned(rig)

    async def test_a_promise_that_runs_too_long(self) -> None:
        rig = await crowded()
        await planned(rig)
        annotations = rig.live("wanted")["metadata"]["annotations"]
        head, _, tail = annotations[PROMISE].partition('"until":')
        annotations[PROMISE] = f'{head}"until":{"9" * 400},{tail.partition(",")[2]}'
        heir_of(rig)

    async def test_the_thousandth_failure(self) -> None:
        rig = await crowded()
        rig.api.script["evict"] = [refused(429)]
        arrive(rig, "wanted", 10, HIGH)
        rig.filter("wanted")
        rig.preemptor._promiser._rests["uid-wanted"] = Rest(0.0, 1024)
        rig.clock.now += 1
        await rig.preemptor.round()


class TestNeverBinds:
    async def test_the_promised_pod_is_nudged_when_its_room_is_there(self) -> None:
        rig = await crowded()
        await planned(rig)
        rig.catch_up()
        rig.clock.now += 30
        rig.api.delete_pod("default/low")  # kube-scheduler's watch is quicker than ours
        assert rig.filter("wanted").names == []
        rig.catch_up()
        rig.clock.now += 1
        await rig.teller.round()
        assert NUDGED in rig.live("wanted")["metadata"]["annotations"]

    async def test_two_that_kube_scheduler_nominates_to_one_room(self) -> None:
        rig = await crowded()
        for name in ("a", "b"):
            arrive(rig, name, 10, HIGH)
            rig.filter(name)
            assert ask(rig, name, n1=Offer(("uid-low",))) != {}
        for name in ("a", "b"):
            rig.change(name, status={"nominatedNodeName": "n1"})
        rig.catch_up()
        gone(rig, "low")
        assert rig.filter("a").names or rig.filter("b").names, "one of them fits"

    async def test_one_room_promised_by_both_halves(self) -> None:
        rig = await crowded()
        arrive(rig, "theirs", 10, HIGH)
        arrive(rig, "ours", 10, HIGH)
        rig.filter("theirs"), rig.filter("ours")
        assert ask(rig, "theirs", n1=Offer(("uid-low",))) == {"n1": Offer(("uid-low",))}
        rig.clock.now += 1
        await rig.preemptor.round()  # for "ours": evicts low too
        rig.change("theirs", status={"nominatedNodeName": "n1"})
        rig.catch_up()
        gone(rig, "low")
        assert rig.filter("theirs").names or rig.filter("ours").names

    async def test_a_stuck_pod_is_not_chosen_as_victim(self) -> None:
        rig = await crowded()
        stamp(rig, "low", "2023-11-14T22:00:00Z")  # a finalizer, a dead kubelet: should have left long ago
        await planned(rig)
        assert rig.api.evicted == ["default/middle"]

    async def test_a_pod_under_two_budgets_cannot_be_evicted_at_all(self) -> None:
        """Eviction API: 500, "This pod has more than one PodDisruptionBudget, which ... does not support"."""
        rig = Rig(node("n1").cards(2, size=16))
        await settle(rig, "middle", 10, MIDDLE)
        await settle(rig, "low", 10, LOW, labels={"app": "db"})
        one, two = guard(1, matchLabels={"app": "db"}), guard(1, matchLabels={"app": "db"})
        two["metadata"]["name"] = "other"
        rig.api.guards = [one, two]
        await planned(rig)
        assert rig.api.evicted == ["default/middle"]

    async def test_a_victim_that_is_refused_for_good_is_not_chosen_again(self) -> None:
        rig = await crowded()
        rig.api.script["evict"] = [refused(403)] * 100  # an admission webhook protects `low`
        real = rig.api.evict

        async def evict(namespace: str, name: str, uid: str, *, timeout: float | None = None) -> None:
            if name == "low":
                raise refused(403)
            rig.api.script["evict"] = []
            await real(namespace, name, uid)

        rig.api.evict = evict  # type: ignore[method-assign]
        await planned(rig)
        for _ in range(2000):
            later(rig, 5)
            rig.catch_up()
            await rig.preemptor.round()
        assert rig.api.evicted == ["default/middle"], "after almost three hours"

    async def test_a_lawful_set_is_found_where_there_is_one(self) -> None:
        rig = Rig(node("n1").card(size=16))
        await settle(rig, "a", 7, LOW, labels={"app": "db"})
        await settle(rig, "b", 5, LOW, labels={"app": "db"})
        await settle(rig, "c", 4, MIDDLE)
        rig.api.guards = [guard(1, matchLabels={"app": "db"})]
        await planned(rig, size=11)
        assert sorted(rig.api.evicted) == ["default/a", "default/c"]

    async def test_more_than_a_hundred_wishes_do_not_starve_each_other(self) -> None:
        rig = await crowded()
        names = [f"w{i}" for i in range(120)]
        for name in names:
            arrive(rig, name, 10, HIGH)
        for _ in range(10):
            for number, name in enumerate(names):
                rig.filter(name)
                rig.clock.now += 1 / 120
                if number % 30 == 29:
                    await rig.preemptor.round()
        assert rig.api.evicted != []

    async def test_a_hundred_hopeless_wishes_do_not_starve_the_others(self) -> None:
        rig = await crowded()
        for i in range(100):
            arrive(rig, f"w{i}", 10, HIGH + 1, annotations={"gputile.io/model": "H100"})  # no eviction cures that
        arrive(rig, "wanted", 10, HIGH)
        for _ in range(20):
            for i in range(100):
                rig.filter(f"w{i}")
            rig.filter("wanted")
            rig.clock.now += 2
            await rig.preemptor.round()
        assert rig.api.evicted == ["default/low"]

    async def test_the_lowest_of_all_priorities_can_be_evicted(self) -> None:
        rig = Rig(node("n1").card(size=16))
        await settle(rig, "low", 10, -(2**31))
        await planned(rig)
        assert rig.api.evicted == ["default/low"]


class TestNeedless:
    async def test_a_more_important_pod_that_leaves_anyway_makes_room_too(self) -> None:
        rig = Rig(node("n1").cards(2, size=16))
        await settle(rig, "king", 10, HIGH + 1)
        await settle(rig, "low", 10, LOW)
        stamp(rig, "king", "2023-11-14T22:13:50Z")
        await planned(rig)
        assert rig.api.evicted == []

    async def test_nobody_goes_for_a_pod_that_is_being_deleted(self) -> None:
        rig = await crowded()
        arrive(rig, "wanted", 10, HIGH)
        rig.filter("wanted")
        stamp(rig, "wanted", "2023-11-14T22:13:50Z")  # a finalizer keeps it
        rig.clock.now += 1
        await rig.preemptor.round()
        assert rig.api.evicted == []

    async def test_kube_scheduler_acts_while_we_look(self) -> None:
        rig = await crowded()
        arrive(rig, "wanted", 10, HIGH)
        rig.filter("wanted")

        def theirs() -> None:
            assert ask(rig, "wanted", n1=Offer(("uid-low",))) == {"n1": Offer(("uid-low",))}
            rig.change("wanted", status={"nominatedNodeName": "n1"})
            rig.catch_up()

        rig.api.script["budgets"] = [theirs]
        rig.clock.now += 1
        await rig.preemptor.round()
        assert rig.api.evicted == []

    async def test_a_retry_looks_whether_it_is_still_needed(self) -> None:
        rig = await crowded()
        rig.api.script["evict"] = [Unclear("reset")]
        await planned(rig)
        gone(rig, "middle")  # there is room now
        assert rig.filter("wanted").names == ["n1"]
        rig.clock.now += 5
        await rig.preemptor.round()
        assert rig.api.evicted == []

    async def test_a_pod_that_is_being_bound_elsewhere_needs_no_victims(self) -> None:
        rig = await crowded()
        rig.api.script["evict"] = [Unclear("reset")]
        await planned(rig)
        rig.api.add_node(node("n3").card(size=16).manifest())
        rig.catch_up()
        assert rig.filter("wanted").names == ["n3"]
        assert await rig.bind("wanted", "n3") == ""  # our watch has not shown it yet
        rig.clock.now += 5
        await rig.preemptor.round()
        assert rig.api.evicted == []

    async def test_nobody_is_evicted_for_a_promise_that_ends_before_he_is_gone(self) -> None:
        rig = await crowded()
        rig.api.script["evict"] = [Unclear("reset")] * 7
        await planned(rig)
        for _ in range(7):
            later(rig, 5)
            await rig.preemptor.round()
        if rig.api.evicted:  # he has 30 s
            later(rig, 29)
            assert rig.ledger.promises() != []

    async def test_rest_also_when_the_end_cannot_be_written(self) -> None:
        rig = await crowded()
        await planned(rig)
        gone(rig, "low")
        arrive(rig, "king", 10, HIGH + 1)
        assert await rig.bind("king", rig.filter("king").names[0]) == ""
        rig.catch_up()
        later(rig, 41)
        rig.api.script["patch_pod"] = [Unclear("reset")]
        await rig.preemptor.round()
        assert rig.api.evicted == ["default/low"], "it should rest for 30 s"

    async def test_a_withdrawn_plan_is_not_recalled(self) -> None:
        rig = await crowded()
        rig.api.script["evict"] = [refused(429)]
        rig.api.script["patch_pod"] = [None, Unclear("reset")]
        await planned(rig)
        assert rig.ledger.promises() == []
        rig.relist()  # the watch broke
        await rig.preemptor.round()
        assert rig.api.evicted == [], "it should rest for 30 s"

    async def test_what_a_withdrawal_could_not_write_is_written_later(self) -> None:
        rig = await crowded()
        rig.api.script["evict"] = [refused(429)]
        rig.api.script["note"] = [None, Unclear("reset")]
        await planned(rig)
        for _ in range(4):
            later(rig, 5)
            await rig.preemptor.round()
        assert nominated(rig) is None
        assert PROMISE not in rig.live("wanted")["metadata"]["annotations"]

    async def test_rest_is_not_forgotten_when_many_wait(self) -> None:
        rig = await crowded()
        rig.api.script["evict"] = [refused(429)]
        await planned(rig)
        for i in range(100):
            arrive(rig, f"w{i}", 17, HIGH + 1)  # too large for any card: nothing can be done for them
            rig.filter(f"w{i}")
        rig.catch_up()
        for i in range(1, 101):
            gone(rig, f"w{i - 1}")
        await rig.preemptor.round()
        rig.filter("wanted")
        rig.clock.now += 1.5
        await rig.preemptor.round()
        assert rig.api.evicted == [], "it should rest for 30 s"

    async def test_those_who_leave_anyway_do_not_count_as_victims(self) -> None:
        rig = Rig(node("n1").cards(2, size=16))
        for name, size in (("g1", 4), ("g2", 4), ("a", 8), ("b", 8), ("c", 8)):
            await settle(rig, name, size, LOW)
        for name in ("g1", "g2"):
            stamp(rig, name, "2023-11-14T22:13:50Z")
        await planned(rig, size=16)
        assert rig.api.evicted == ["default/a"], "one is enough"

    async def test_two_plans_of_one_round_do_not_overdraw_a_budget(self) -> None:
        rig = await crowded()
        rig.api.guards = [guard(1)]
        rig.api.script["evict"] = [lambda: rig.api.guards.__setitem__(0, guard(0))]  # the API server charges it at once
        arrive(rig, "second", 10, HIGH - 1)
        rig.filter("second")
        await planned(rig)
        assert rig.api.evicted == ["default/low"]

    async def test_a_new_leader_keeps_a_half_done_plan_when_the_rest_is_refused(self) -> None:
        rig = Rig(node("n1").card(size=16))
        await settle(rig, "a", 8, LOW)
        await settle(rig, "b", 8, LOW)
        rig.api.script["evict"] = [None, Unclear("the process died here")]
        await planned(rig, size=16)
        heir = heir_of(rig)
        heir.api.script["evict"] = [refused(429)]
        await heir.preemptor.round()
        assert heir.ledger.promises() != [], "somebody has gone for it already"

    async def test_events_that_are_refused_do_not_slow_evictions_down(self) -> None:
        rig = Rig(node("n1").card(size=20, slots=20))
        for i in range(10):
            await settle(rig, f"low{i}", 2, LOW)
        rig.api.script["note"] = [refused(403)] * 100  # their namespace is being terminated
        await planned(rig, size=20)
        for _ in range(8):
            later(rig, 5)
            await rig.preemptor.round()
        assert len(rig.api.evicted) in (0, 10), "all or nobody, before the time is up"

    async def test_nodes_of_a_filter_call_of_long_ago(self) -> None:
        """kube-scheduler does not call at all when its own filters leave no node: cordoned, tainted."""
        rig = await crowded()
        rig.api.guards = [guard(0)]
        await planned(rig)
        later(rig, 3600)
        rig.api.guards = []
        await rig.preemptor.round()
        assert rig.api.evicted == []


class TestMustNot:
    async def test_a_new_leader_does_not_evict_the_more_important(self) -> None:
        rig = Rig(node("n1").cards(2, size=16))
        await settle(rig, "king", 10, HIGH + 1)
        await settle(rig, "low", 10, LOW)
        await planned(rig)
        annotations = rig.live("wanted")["metadata"]["annotations"]
        annotations[PROMISE] = annotations[PROMISE].replace("uid-low", "uid-king")  # by its owner
        heir = heir_of(rig)
        await heir.preemptor.round()
        assert heir.api.evicted == []

    async def test_asked_first_of_all_budgets_count_too(self) -> None:
        """kube-scheduler deletes what we name; it does not ask the Eviction API."""
        rig = Rig(node("n1").cards(2, size=16))
        await settle(rig, "middle", 10, MIDDLE)
        await settle(rig, "low", 10, LOW, labels={"app": "db"})
        rig.api.guards = [guard(0, matchLabels={"app": "db"})]
        await rig.preemptor.round()
        arrive(rig, "wanted", 10, HIGH)
        rig.filter("wanted")
        assert ask(rig, "wanted", n1=Offer(("uid-low",), 1)) == {"n1": Offer(("uid-middle",), 0)}

    async def test_asked_with_budgets_of_an_hour_ago(self) -> None:
        rig = await crowded()
        rig.api.guards = [guard(0)]
        await planned(rig)
        gone(rig, "wanted")
        rig.api.guards = []
        for _ in range(10):
            later(rig, 360)
            await rig.preemptor.round()
        arrive(rig, "other", 10, HIGH)
        rig.filter("other")
        assert ask(rig, "other", n1=Offer(("uid-low",), 0)) == {"n1": Offer(("uid-low",), 0)}


class TestPromises:
    async def test_end_when_their_pod_was_deleted_behind_our_back(self) -> None:
        rig = await crowded()
        await planned(rig)
        rig.api.delete_pod("default/wanted")
        rig.relist()  # the watch broke, and the list shows the pod no more
        await rig.preemptor.round()
        assert rig.ledger.promises() == []

    async def test_are_not_made_of_old_answers(self) -> None:
        rig = await crowded()
        arrive(rig, "wanted", 10, HIGH)
        rig.filter("wanted")
        ask(rig, "wanted", n1=Offer(("uid-low",)))
        later(rig, 3600)
        await rig.preemptor.round()
        rig.preemptor._wishes.clear()
        rig.change("wanted", status={"nominatedNodeName": "n1"})  # 1.35: also while volumes are prepared
        rig.catch_up()
        assert rig.ledger.promises() == []

    async def test_end_when_the_room_was_taken_by_somebody_more_important(self) -> None:
        rig = await crowded()
        await planned(rig)
        gone(rig, "low")
        arrive(rig, "king", 10, HIGH + 1)
        rig.filter("king")
        assert await rig.bind("king", "n1") == ""
        rig.catch_up()
        await rig.preemptor.round()
        assert rig.count("preemptions_total", end="withdrawn") == 1
        assert rig.api.evicted == ["default/low", "default/middle"], "and a new plan is made, without a rest"

    async def test_end_with_their_node(self) -> None:
        rig = await crowded()
        await planned(rig)
        rig.api.delete_node("n1")
        rig.catch_up()
        await rig.preemptor.round()
        assert rig.ledger.promises() == []

    async def test_last_as_long_as_those_who_leave_anyway_need(self) -> None:
        rig = Rig(node("n1").card(size=16))
        await settle(rig, "g", 8, LOW)
        await settle(rig, "a", 8, LOW)
        stamp(rig, "g", "2023-11-14T22:23:20Z")  # `kubectl delete --grace-period=600`
        await planned(rig, size=16)
        later(rig, 590)
        assert rig.api.evicted == [] or rig.ledger.promises() != []

    async def test_are_not_called_expired_while_the_bind_is_under_way(self) -> None:
        rig = await crowded()
        await planned(rig)
        gone(rig, "low")
        later(rig, 39)
        rig.filter("wanted")
        rig.api.script["bind"] = [Lands()]
        await rig.bind("wanted", "n1")  # landed; our watch has not shown it yet
        later(rig, 1.5)
        await rig.preemptor.round()
        assert "PromiseExpired" not in dict(notes(rig, "wanted"))

    async def test_are_no_longer_than_an_hour(self) -> None:
        rig = Rig(node("n1").card(size=16))
        await settle(rig, "low", 10, LOW, spec={"terminationGracePeriodSeconds": 10**7})
        await planned(rig)
        later(rig, 3601)
        assert rig.ledger.promises() == []

    async def test_a_withdrawn_room_wakes_those_who_wait_for_it(self) -> None:
        rig = Rig(node("n1").card(size=16))
        await settle(rig, "low", 10, LOW)
        rig.api.script["evict"] = [refused(429)]
        gate = rig.api.gates["evict"] = asyncio.Event()
        arrive(rig, "wanted", 10, HIGH)
        rig.filter("wanted")
        rig.clock.now += 1
        plan = asyncio.create_task(rig.preemptor.round())
        await asyncio.sleep(0.01)
        arrive(rig, "small", 6, LOW)
        assert rig.filter("small").names == [], "promised"
        gate.set()
        await plan
        rig.clock.now += 1
        await rig.teller.round()
        assert NUDGED in rig.live("small")["metadata"]["annotations"]

    async def test_the_more_important_binds_there_also_without_a_pencil(self) -> None:
        rig = await crowded()
        await planned(rig)
        gone(rig, "low")
        arrive(rig, "king", 10, HIGH + 1)
        assert rig.filter("king").names == ["n1"]
        later(rig, 3)  # its pencil is gone
        assert await rig.bind("king", "n1") == ""


class TestWords:
    async def test_the_same_is_said_once_whatever_order_nodes_are_named_in(self) -> None:
        rig = Rig(*(node(f"n{i}").card(size=16) for i in (1, 2)))
        for i in (1, 2):
            await settle(rig, f"low{i}", 10, LOW)
        rig.api.guards = [guard(0)]
        arrive(rig, "wanted", 10, HIGH)
        for turn in range(10):
            rig.filter("wanted", ["n1", "n2"] if turn % 2 else ["n2", "n1"])  # begins elsewhere each time
            rig.clock.now += 5
            await rig.preemptor.round()
        assert len(notes(rig, "wanted")) <= 2


class TestHostOnly:
    """Pods that ask for no cards but hold the CPU."""

    @staticmethod
    async def full() -> Rig:
        made = node("n1").card(size=16).manifest()
        made["status"] = {
            **made.get("status", {}),
            "allocatable": {**made["status"].get("allocatable", {}), "cpu": "4"},
        }
        rig = Rig(made)
        for name, priority, labels in (("web", LOW, {"app": "web"}), ("batch", MIDDLE, {})):
            one: Json = wish(name, {"cpu": "2"}, priority, labels=labels, spec={"terminationGracePeriodSeconds": 300})
            one["spec"]["nodeName"] = "n1"
            rig.api.add_pod(one)
        rig.catch_up()
        return rig

    async def test_their_grace_counts(self) -> None:
        rig = await self.full()
        rig.api.add_pod(wish("wanted", {**tile(10), "cpu": "2"}, HIGH))
        rig.catch_up()
        rig.filter("wanted")
        assert ask(rig, "wanted", n1=Offer(("uid-web",))) == {"n1": Offer(("uid-web",))}
        rig.change("wanted", status={"nominatedNodeName": "n1"})
        rig.catch_up()
        assert rig.ledger.promises()[0].until - rig.clock.now >= 300

    async def test_we_leave_them_to_kube_scheduler(self) -> None:
        """It counts CPU itself, so it asks where that is short; and of such pods we know too little."""
        rig = await self.full()
        await settle(rig, "tenant", 2, LOW)
        rig.api.add_pod(wish("wanted", {**tile(10), "cpu": "2"}, HIGH))
        rig.catch_up()
        rig.filter("wanted")
        rig.clock.now += 1
        await rig.preemptor.round()
        assert rig.api.evicted == []


class TestMore:
    async def test_a_nomination_that_a_list_shows_keeps_the_room_too(self) -> None:
        rig = await crowded()
        arrive(rig, "wanted", 10, HIGH)
        rig.filter("wanted")
        assert ask(rig, "wanted", n1=Offer(("uid-low",))) == {"n1": Offer(("uid-low",))}
        rig.change("wanted", status={"nominatedNodeName": "n1"})
        rig.relist()  # the watch broke in between
        assert rig.ledger.promises() != []

    async def test_the_setting_holds_for_what_an_earlier_leader_began(self) -> None:
        rig = await crowded()
        rig.api.script["evict"] = [Unclear("the process died here")]
        await planned(rig)
        off = msgspec.convert({"own": False}, type(rig.settings.preempt))
        heir = Rig(*rig.api.nodes.values(), pods=[{**one} for one in rig.api.pods.values()], preempt=off)
        heir.preemptor.new_term()
        await heir.preemptor.round()
        assert heir.api.evicted == []

    async def test_a_new_term_forgets_what_another_leader_took_back(self) -> None:
        rig = await crowded()
        await planned(rig)
        rig.catch_up()
        rig.leading = False
        rig.change(
            "wanted",  # by the other leader
            metadata={**rig.live("wanted")["metadata"], "annotations": {}},
            status={"nominatedNodeName": None},
        )
        rig.relist()
        rig.preemptor.new_term()
        assert rig.ledger.promises() == [], "what is promised is what pods carry"

    async def test_room_of_those_who_leave_anyway_is_kept(self) -> None:
        rig = await crowded()
        stamp(rig, "middle", "2023-11-14T22:13:50Z")
        await planned(rig)
        assert rig.api.evicted == []
        gone(rig, "middle")
        arrive(rig, "late", 10, LOW)
        assert rig.filter("late").names == [], "else somebody must be evicted after all"

    async def test_two_do_not_count_on_one_who_leaves_anyway(self) -> None:
        rig = await crowded()
        stamp(rig, "middle", "2023-11-14T22:13:50Z")
        arrive(rig, "second", 10, HIGH)
        rig.filter("second")
        await planned(rig)
        assert rig.api.evicted == ["default/low"], "one gets the room of `middle`, the other needs that of `low`"

    async def test_asked_a_budget_that_allows_one_is_broken_by_two(self) -> None:
        rig = Rig(node("n1").card(size=16))
        await settle(rig, "a", 8, LOW)
        await settle(rig, "b", 8, LOW)
        rig.api.guards = [guard(1)]
        await planned(rig, size=16)  # blocked; budgets are known now
        arrive(rig, "other", 16, HIGH)
        rig.filter("other")
        assert ask(rig, "other", n1=Offer(("uid-a", "uid-b"), 1)) == {"n1": Offer(("uid-a", "uid-b"), 1)}
