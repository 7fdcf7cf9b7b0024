"""Failures of nominations: pods that must not be evicted, when capacity must not be kept any longer, and the Events.

Found by the same bug hunt as `test_preemptor_failures`; each failed once.
"""

import asyncio

from gputile.dialects.gputile import NOMINATION, NUDGED
from gputile.kube.api import Json, OutcomeUnknown
from gputile.scheduler.extender_api import OfferedVictims
from gputile.scheduler.settings import PreemptSettings
from gputile.testing.builders import node
from tests.scheduler.preemption_helpers import (
    HIGH,
    LOW,
    MIDDLE,
    arrive,
    ask,
    full_cluster,
    gone,
    guard,
    later,
    new_leader_of,
    notes,
    planned,
    prioritized_pod,
    settle,
    stamp,
)
from tests.scheduler.rig import LostResponse, Rig, refused, tile


class TestNoEviction:
    async def test_a_new_leader_does_not_evict_pods_of_higher_priority(self) -> None:
        rig = Rig(node("n1").cards(2, size=16))
        await settle(rig, "king", 10, HIGH + 1)
        await settle(rig, "low", 10, LOW)
        await planned(rig)
        annotations = rig.live("wanted")["metadata"]["annotations"]
        annotations[NOMINATION] = annotations[NOMINATION].replace("uid-low", "uid-king")  # by its owner
        new_leader = new_leader_of(rig)
        await new_leader.preemptor.round()
        assert new_leader.api.evicted == []

    async def test_budgets_count_for_the_first_preempt_call_too(self) -> None:
        """kube-scheduler deletes what we name; it does not ask the Eviction API."""
        rig = Rig(node("n1").cards(2, size=16))
        await settle(rig, "middle", 10, MIDDLE)
        await settle(rig, "low", 10, LOW, labels={"app": "db"})
        rig.api.guards = [guard(0, matchLabels={"app": "db"})]
        await rig.preemptor.round()
        arrive(rig, "wanted", 10, HIGH)
        rig.filter("wanted")
        assert ask(rig, "wanted", n1=OfferedVictims(("uid-low",), 1)) == {"n1": OfferedVictims(("uid-middle",), 0)}

    async def test_a_preempt_call_with_budgets_of_an_hour_ago(self) -> None:
        rig = await full_cluster()
        rig.api.guards = [guard(0)]
        await planned(rig)
        gone(rig, "wanted")
        rig.api.guards = []
        for _ in range(10):
            later(rig, 360)
            await rig.preemptor.round()
        arrive(rig, "other", 10, HIGH)
        rig.filter("other")
        assert ask(rig, "other", n1=OfferedVictims(("uid-low",), 0)) == {"n1": OfferedVictims(("uid-low",), 0)}


class TestNominations:
    async def test_end_when_their_pod_was_deleted_during_a_watch_outage(self) -> None:
        rig = await full_cluster()
        await planned(rig)
        rig.api.delete_pod("default/wanted")
        rig.relist()  # the watch broke, and the list shows the pod no more
        await rig.preemptor.round()
        assert rig.ledger.nominations() == []

    async def test_are_not_made_of_old_answers(self) -> None:
        rig = await full_cluster()
        arrive(rig, "wanted", 10, HIGH)
        rig.filter("wanted")
        ask(rig, "wanted", n1=OfferedVictims(("uid-low",)))
        later(rig, 3600)
        await rig.preemptor.round()
        rig.preemptor._preemptors.clear()
        rig.change("wanted", status={"nominatedNodeName": "n1"})  # 1.35: also while volumes are prepared
        rig.catch_up()
        assert rig.ledger.nominations() == []

    async def test_end_when_the_capacity_was_taken_by_a_pod_of_higher_priority(self) -> None:
        rig = await full_cluster()
        await planned(rig)
        gone(rig, "low")
        arrive(rig, "king", 10, HIGH + 1)
        rig.filter("king")
        assert await rig.bind("king", "n1") == ""
        rig.catch_up()
        await rig.preemptor.round()
        assert rig.count("preemptions_total", outcome="withdrawn") == 1
        assert rig.api.evicted == ["default/low", "default/middle"], "and a new plan is made, without a rest"

    async def test_end_with_their_node(self) -> None:
        rig = await full_cluster()
        await planned(rig)
        rig.api.delete_node("n1")
        rig.catch_up()
        await rig.preemptor.round()
        assert rig.ledger.nominations() == []

    async def test_last_as_long_as_terminating_pods_need(self) -> None:
        rig = Rig(node("n1").card(size=16))
        await settle(rig, "g", 8, LOW)
        await settle(rig, "a", 8, LOW)
        stamp(rig, "g", "2023-11-14T22:23:20Z")  # `kubectl delete --grace-period=600`
        await planned(rig, size=16)
        later(rig, 590)
        assert rig.api.evicted == [] or rig.ledger.nominations() != []

    async def test_are_not_called_expired_while_the_bind_is_under_way(self) -> None:
        rig = await full_cluster()
        await planned(rig)
        gone(rig, "low")
        later(rig, 39)
        rig.filter("wanted")
        rig.api.script["bind"] = [LostResponse()]
        await rig.bind("wanted", "n1")  # written; the watch has not shown it yet
        later(rig, 1.5)
        await rig.preemptor.round()
        assert "NominationExpired" not in dict(notes(rig, "wanted"))

    async def test_are_no_longer_than_an_hour(self) -> None:
        rig = Rig(node("n1").card(size=16))
        await settle(rig, "low", 10, LOW, spec={"terminationGracePeriodSeconds": 10**7})
        await planned(rig)
        later(rig, 3601)
        assert rig.ledger.nominations() == []

    async def test_a_withdrawn_nomination_nudges_pods_that_fit_then(self) -> None:
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
        assert rig.filter("small").names == [], "kept"
        gate.set()
        await plan
        rig.clock.now += 1
        await rig.pending_pods.round()
        assert NUDGED in rig.live("small")["metadata"]["annotations"]

    async def test_a_pod_of_higher_priority_binds_there_also_without_a_reservation(self) -> None:
        rig = await full_cluster()
        await planned(rig)
        gone(rig, "low")
        arrive(rig, "king", 10, HIGH + 1)
        assert rig.filter("king").names == ["n1"]
        later(rig, 3)  # its reservation has expired
        assert await rig.bind("king", "n1") == ""


class TestEvents:
    async def test_the_same_event_is_written_once_for_any_order_of_nodes(self) -> None:
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
            manifest: Json = prioritized_pod(
                name, {"cpu": "2"}, priority, labels=labels, spec={"terminationGracePeriodSeconds": 300}
            )
            manifest["spec"]["nodeName"] = "n1"
            rig.api.add_pod(manifest)
        rig.catch_up()
        return rig

    async def test_their_grace_counts(self) -> None:
        rig = await self.full()
        rig.api.add_pod(prioritized_pod("wanted", {**tile(10), "cpu": "2"}, HIGH))
        rig.catch_up()
        rig.filter("wanted")
        assert ask(rig, "wanted", n1=OfferedVictims(("uid-web",))) == {"n1": OfferedVictims(("uid-web",))}
        rig.change("wanted", status={"nominatedNodeName": "n1"})
        rig.catch_up()
        assert rig.ledger.nominations()[0].until - rig.clock.now >= 300

    async def test_we_leave_them_to_kube_scheduler(self) -> None:
        """It counts CPU itself, so it asks where that is short; and of such pods we know too little."""
        rig = await self.full()
        await settle(rig, "tenant", 2, LOW)
        rig.api.add_pod(prioritized_pod("wanted", {**tile(10), "cpu": "2"}, HIGH))
        rig.catch_up()
        rig.filter("wanted")
        rig.clock.now += 1
        await rig.preemptor.round()
        assert rig.api.evicted == []


class TestRestoredNominations:
    async def test_a_nomination_that_a_list_shows_keeps_the_capacity_too(self) -> None:
        rig = await full_cluster()
        arrive(rig, "wanted", 10, HIGH)
        rig.filter("wanted")
        assert ask(rig, "wanted", n1=OfferedVictims(("uid-low",))) == {"n1": OfferedVictims(("uid-low",))}
        rig.change("wanted", status={"nominatedNodeName": "n1"})
        rig.relist()  # the watch broke in between
        assert rig.ledger.nominations() != []

    async def test_the_setting_holds_for_what_an_earlier_leader_began(self) -> None:
        rig = await full_cluster()
        rig.api.script["evict"] = [OutcomeUnknown("the process died here")]
        await planned(rig)
        off = PreemptSettings(own=False)
        new_leader = Rig(
            *rig.api.nodes.values(), pods=[{**manifest} for manifest in rig.api.pods.values()], preempt=off
        )
        new_leader.preemptor.on_elected()
        await new_leader.preemptor.round()
        assert new_leader.api.evicted == []

    async def test_a_new_term_forgets_nominations_that_another_leader_withdrew(self) -> None:
        rig = await full_cluster()
        await planned(rig)
        rig.catch_up()
        rig.leading = False
        rig.change(
            "wanted",  # by the other leader
            metadata={**rig.live("wanted")["metadata"], "annotations": {}},
            status={"nominatedNodeName": None},
        )
        rig.relist()
        rig.preemptor.on_elected()
        assert rig.ledger.nominations() == [], "the nominations on the pods are the true ones"

    async def test_capacity_of_terminating_pods_is_kept(self) -> None:
        rig = await full_cluster()
        stamp(rig, "middle", "2023-11-14T22:13:50Z")
        await planned(rig)
        assert rig.api.evicted == []
        gone(rig, "middle")
        arrive(rig, "late", 10, LOW)
        assert rig.filter("late").names == [], "else a pod must be evicted after all"

    async def test_two_candidates_do_not_count_on_the_same_terminating_pod(self) -> None:
        rig = await full_cluster()
        stamp(rig, "middle", "2023-11-14T22:13:50Z")
        arrive(rig, "second", 10, HIGH)
        rig.filter("second")
        await planned(rig)
        assert rig.api.evicted == ["default/low"], "one gets the capacity of `middle`, the other needs that of `low`"

    async def test_in_the_preempt_verb_two_evictions_violate_a_budget_that_allows_one(self) -> None:
        rig = Rig(node("n1").card(size=16))
        await settle(rig, "a", 8, LOW)
        await settle(rig, "b", 8, LOW)
        rig.api.guards = [guard(1)]
        await planned(rig, size=16)  # blocked; budgets are known now
        arrive(rig, "other", 16, HIGH)
        rig.filter("other")
        assert ask(rig, "other", n1=OfferedVictims(("uid-a", "uid-b"), 1)) == {
            "n1": OfferedVictims(("uid-a", "uid-b"), 1)
        }
