"""Failures of preemption that a bug hunt revealed, and the behaviour that must hold instead.

Each of these failed once: on loops that ended when a pod was deleted at the wrong moment, on capacity nominated twice,
on pods evicted in vain, on nominations that outlived their reason.
"""

from gputile.dialects.gputile import NOMINATION, NUDGED
from gputile.kube.api import OutcomeUnknown
from gputile.scheduler.extender_api import OfferedVictims
from gputile.scheduler.preemption.executor import PlanBackoff
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
    nominated,
    planned,
    settle,
    stamp,
)
from tests.scheduler.rig import Rig, refused


class TestTheLoopContinues:
    async def test_a_second_candidate_is_gone_while_the_first_is_handled(self) -> None:
        rig = await full_cluster()
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
        rig.api.script["patch_pod"] = [OutcomeUnknown("reset"), OutcomeUnknown("reset")]
        await rig.preemptor.round()
        assert len(rig.preemptor._executor._open) == 2
        rig.clock.now += 5
        rig.api.script["patch_pod"] = [rig.preemptor.on_elected]  # a resync for a new term of leadership
        await rig.preemptor.round()

    async def test_a_new_term_while_an_expired_nomination_is_removed(self) -> None:
        rig = await full_cluster()
        await planned(rig)
        later(rig, 41)
        rig.api.script["patch_pod"] = [rig.preemptor.on_elected]
        rig.change("wanted", metadata={**rig.live("wanted")["metadata"], "annotations": {}})  # (the rig's wall stands)
        rig.catch_up()
        await rig.preemptor.round()

    async def test_a_new_term_while_an_eviction_is_refused(self) -> None:
        rig = await full_cluster()

        def term() -> None:
            rig.leading = True
            rig.preemptor._executor._open.clear()  # as on_elected() does; the watch shows no nomination yet
            raise refused(429)

        rig.api.script["evict"] = [term]
        await planned(rig)

    async def test_an_unreadable_deletion_timestamp(self) -> None:
        rig = await full_cluster()
        stamp(rig, "middle", "soon")
        await planned(rig)

    async def test_a_nomination_that_lasts_too_long(self) -> None:
        rig = await full_cluster()
        await planned(rig)
        annotations = rig.live("wanted")["metadata"]["annotations"]
        head, _, tail = annotations[NOMINATION].partition('"until":')
        annotations[NOMINATION] = f'{head}"until":{"9" * 400},{tail.partition(",")[2]}'
        new_leader_of(rig)

    async def test_the_thousandth_failure(self) -> None:
        rig = await full_cluster()
        rig.api.script["evict"] = [refused(429)]
        arrive(rig, "wanted", 10, HIGH)
        rig.filter("wanted")
        rig.preemptor._executor._backoffs["uid-wanted"] = PlanBackoff(0.0, 1024)
        rig.clock.now += 1
        await rig.preemptor.round()


async def test_names_are_looked_up_once_for_each_list() -> None:
    """A thousand pods may be pending, each with thousands of names, and there are four rounds per second."""
    rig = await full_cluster()
    arrive(rig, "wanted", 17, HIGH)  # too large for any card
    rig.filter("wanted")
    await rig.preemptor.round()
    shared = rig.preemptor._preemptors["uid-wanted"].names
    await rig.preemptor.round()
    assert rig.preemptor._preemptors["uid-wanted"].names is shared
    assert shared == ("n1", "n2")


class TestNeverBinds:
    async def test_the_nominated_pod_is_nudged_when_it_fits(self) -> None:
        rig = await full_cluster()
        await planned(rig)
        rig.catch_up()
        rig.clock.now += 30
        rig.api.delete_pod("default/low")  # kube-scheduler's watch is quicker than ours
        assert rig.filter("wanted").names == []
        rig.catch_up()
        rig.clock.now += 1
        await rig.pending_pods.round()
        assert NUDGED in rig.live("wanted")["metadata"]["annotations"]

    async def test_two_pods_that_kube_scheduler_nominates_for_the_same_capacity(self) -> None:
        rig = await full_cluster()
        for name in ("a", "b"):
            arrive(rig, name, 10, HIGH)
            rig.filter(name)
            assert ask(rig, name, n1=OfferedVictims(("uid-low",))) != {}
        for name in ("a", "b"):
            rig.change(name, status={"nominatedNodeName": "n1"})
        rig.catch_up()
        gone(rig, "low")
        assert rig.filter("a").names or rig.filter("b").names, "one of them fits"

    async def test_the_same_capacity_nominated_by_both_ways(self) -> None:
        rig = await full_cluster()
        arrive(rig, "theirs", 10, HIGH)
        arrive(rig, "ours", 10, HIGH)
        rig.filter("theirs"), rig.filter("ours")
        assert ask(rig, "theirs", n1=OfferedVictims(("uid-low",))) == {"n1": OfferedVictims(("uid-low",))}
        rig.clock.now += 1
        await rig.preemptor.round()  # for "ours": evicts low too
        rig.change("theirs", status={"nominatedNodeName": "n1"})
        rig.catch_up()
        gone(rig, "low")
        assert rig.filter("theirs").names or rig.filter("ours").names

    async def test_a_stuck_pod_is_not_chosen_as_victim(self) -> None:
        rig = await full_cluster()
        stamp(rig, "low", "2023-11-14T22:00:00Z")  # a finalizer, a dead kubelet: should have left long ago
        await planned(rig)
        assert rig.api.evicted == ["default/middle"]

    async def test_a_pod_under_two_budgets_cannot_be_evicted_at_all(self) -> None:
        """Eviction API: 500, "This pod has more than one PodDisruptionBudget, which ... does not support"."""
        rig = Rig(node("n1").cards(2, size=16))
        await settle(rig, "middle", 10, MIDDLE)
        await settle(rig, "low", 10, LOW, labels={"app": "db"})
        first, second = guard(1, matchLabels={"app": "db"}), guard(1, matchLabels={"app": "db"})
        second["metadata"]["name"] = "other"
        rig.api.guards = [first, second]
        await planned(rig)
        assert rig.api.evicted == ["default/middle"]

    async def test_a_victim_that_is_refused_for_good_is_not_chosen_again(self) -> None:
        rig = await full_cluster()
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

    async def test_a_set_within_budgets_is_found_where_there_is_one(self) -> None:
        rig = Rig(node("n1").card(size=16))
        await settle(rig, "a", 7, LOW, labels={"app": "db"})
        await settle(rig, "b", 5, LOW, labels={"app": "db"})
        await settle(rig, "c", 4, MIDDLE)
        rig.api.guards = [guard(1, matchLabels={"app": "db"})]
        await planned(rig, size=11)
        assert sorted(rig.api.evicted) == ["default/a", "default/c"]

    async def test_more_than_a_hundred_candidates_do_not_starve_each_other(self) -> None:
        rig = await full_cluster()
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

    async def test_a_hundred_hopeless_candidates_do_not_starve_the_others(self) -> None:
        rig = await full_cluster()
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


class TestNeedlessEvictions:
    async def test_a_terminating_pod_of_higher_priority_frees_capacity_too(self) -> None:
        rig = Rig(node("n1").cards(2, size=16))
        await settle(rig, "king", 10, HIGH + 1)
        await settle(rig, "low", 10, LOW)
        stamp(rig, "king", "2023-11-14T22:13:50Z")
        await planned(rig)
        assert rig.api.evicted == []

    async def test_no_pod_is_evicted_for_a_terminating_pod(self) -> None:
        rig = await full_cluster()
        arrive(rig, "wanted", 10, HIGH)
        rig.filter("wanted")
        stamp(rig, "wanted", "2023-11-14T22:13:50Z")  # a finalizer keeps it
        rig.clock.now += 1
        await rig.preemptor.round()
        assert rig.api.evicted == []

    async def test_kube_scheduler_acts_during_our_search(self) -> None:
        rig = await full_cluster()
        arrive(rig, "wanted", 10, HIGH)
        rig.filter("wanted")

        def theirs() -> None:
            assert ask(rig, "wanted", n1=OfferedVictims(("uid-low",))) == {"n1": OfferedVictims(("uid-low",))}
            rig.change("wanted", status={"nominatedNodeName": "n1"})
            rig.catch_up()

        rig.api.script["budgets"] = [theirs]
        rig.clock.now += 1
        await rig.preemptor.round()
        assert rig.api.evicted == []

    async def test_a_retry_checks_whether_it_is_still_needed(self) -> None:
        rig = await full_cluster()
        rig.api.script["evict"] = [OutcomeUnknown("reset")]
        await planned(rig)
        gone(rig, "middle")  # it fits now
        assert rig.filter("wanted").names == ["n1"]
        rig.clock.now += 5
        await rig.preemptor.round()
        assert rig.api.evicted == []

    async def test_a_pod_that_is_being_bound_elsewhere_needs_no_victims(self) -> None:
        rig = await full_cluster()
        rig.api.script["evict"] = [OutcomeUnknown("reset")]
        await planned(rig)
        rig.api.add_node(node("n3").card(size=16).manifest())
        rig.catch_up()
        assert rig.filter("wanted").names == ["n3"]
        assert await rig.bind("wanted", "n3") == ""  # our watch has not shown it yet
        rig.clock.now += 5
        await rig.preemptor.round()
        assert rig.api.evicted == []

    async def test_no_pod_is_evicted_for_a_nomination_that_expires_before_the_victim_is_gone(self) -> None:
        rig = await full_cluster()
        rig.api.script["evict"] = [OutcomeUnknown("reset")] * 7
        await planned(rig)
        for _ in range(7):
            later(rig, 5)
            await rig.preemptor.round()
        if rig.api.evicted:  # he has 30 s
            later(rig, 29)
            assert rig.ledger.nominations() != []

    async def test_backoff_also_when_the_end_cannot_be_written(self) -> None:
        rig = await full_cluster()
        await planned(rig)
        gone(rig, "low")
        arrive(rig, "king", 10, HIGH + 1)
        assert await rig.bind("king", rig.filter("king").names[0]) == ""
        rig.catch_up()
        later(rig, 41)
        rig.api.script["patch_pod"] = [OutcomeUnknown("reset")]
        await rig.preemptor.round()
        assert rig.api.evicted == ["default/low"], "it should rest for 30 s"

    async def test_a_withdrawn_plan_is_not_restored(self) -> None:
        rig = await full_cluster()
        rig.api.script["evict"] = [refused(429)]
        rig.api.script["patch_pod"] = [None, OutcomeUnknown("reset")]
        await planned(rig)
        assert rig.ledger.nominations() == []
        rig.relist()  # the watch broke
        await rig.preemptor.round()
        assert rig.api.evicted == [], "it should rest for 30 s"

    async def test_what_a_withdrawal_could_not_write_is_written_later(self) -> None:
        rig = await full_cluster()
        rig.api.script["evict"] = [refused(429)]
        rig.api.script["note"] = [None, OutcomeUnknown("reset")]
        await planned(rig)
        for _ in range(4):
            later(rig, 5)
            await rig.preemptor.round()
        assert nominated(rig) is None
        assert NOMINATION not in rig.live("wanted")["metadata"]["annotations"]

    async def test_backoff_is_not_forgotten_when_many_pods_are_pending(self) -> None:
        rig = await full_cluster()
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

    async def test_terminating_pods_do_not_count_as_victims(self) -> None:
        rig = Rig(node("n1").cards(2, size=16))
        for name, size in (("g1", 4), ("g2", 4), ("a", 8), ("b", 8), ("c", 8)):
            await settle(rig, name, size, LOW)
        for name in ("g1", "g2"):
            stamp(rig, name, "2023-11-14T22:13:50Z")
        await planned(rig, size=16)
        assert rig.api.evicted == ["default/a"], "one is enough"

    async def test_two_plans_of_one_round_do_not_violate_a_budget(self) -> None:
        rig = await full_cluster()
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
        rig.api.script["evict"] = [None, OutcomeUnknown("the process died here")]
        await planned(rig, size=16)
        new_leader = new_leader_of(rig)
        new_leader.api.script["evict"] = [refused(429)]
        await new_leader.preemptor.round()
        assert new_leader.ledger.nominations() != [], "a pod was evicted for it already"

    async def test_events_that_are_refused_do_not_slow_evictions_down(self) -> None:
        rig = Rig(node("n1").card(size=20, slots=20))
        for i in range(10):
            await settle(rig, f"low{i}", 2, LOW)
        rig.api.script["note"] = [refused(403)] * 100  # their namespace is being terminated
        await planned(rig, size=20)
        for _ in range(8):
            later(rig, 5)
            await rig.preemptor.round()
        assert len(rig.api.evicted) in (0, 10), "all or none, before the timeout"

    async def test_nodes_of_a_filter_call_of_long_ago(self) -> None:
        """kube-scheduler does not call at all when its own filters leave no node: cordoned, tainted."""
        rig = await full_cluster()
        rig.api.guards = [guard(0)]
        await planned(rig)
        later(rig, 3600)
        rig.api.guards = []
        await rig.preemptor.round()
        assert rig.api.evicted == []
