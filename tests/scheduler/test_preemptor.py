"""Preemption: which pods are evicted, which Events are written, what capacity is kept, and what happens on failures."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from gputile.dialects.gputile import NOMINATION, read_nomination
from gputile.dialects.kube_objects import Pod
from gputile.engine.search_budget import SearchBudget
from gputile.kube.api import OutcomeUnknown
from gputile.ledger.events import Tick
from gputile.model.refusals import SENTENCE, NodeReason
from gputile.scheduler.extender_api import OfferedVictims, PreemptArgs
from gputile.scheduler.pending.pending_pods import reason
from gputile.scheduler.preemption.preemptor import PreemptingPod
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
    new_leader_of,
    nominated,
    notes,
    planned,
    prioritized_pod,
    settle,
    stamp,
)
from tests.scheduler.rig import LostResponse, Rig, refused
from tests.scheduler.test_filter import gpushare_node


class TestOwnPreemption:
    async def test_the_pod_of_lowest_priority_is_evicted_and_both_pods_get_events(self) -> None:
        rig = await full_cluster()
        await planned(rig)
        assert rig.api.evicted == ["default/low"]
        assert nominated(rig) == "n1"
        assert read_nomination(msgspec.convert(rig.live("wanted"), Pod)) is not None
        assert rig.api.calls.count("patch_pod") == 1, "nominated node and nomination in one write"
        assert notes(rig, "low") == [("Preempted", "preempted by default/wanted (priority 1000) on node n1")]
        [(event, why)] = notes(rig, "wanted")
        assert event == "Preempting"
        assert "evicting default/low from node n1; its capacity is kept for this pod for 39 s" in why

    async def test_the_capacity_is_kept_until_the_pod_is_bound(self) -> None:
        rig = await full_cluster()
        await planned(rig)
        gone(rig, "low")
        arrive(rig, "late", 10, LOW)
        assert rig.filter("late").names == []
        assert rig.filter("wanted").names == ["n1"]
        assert await rig.bind("wanted", "n1") == ""
        rig.catch_up()
        await rig.preemptor.round()
        assert rig.ledger.nominations() == []
        assert rig.count("preemptions_total", outcome="bound") == 1
        rig.ledger.check()

    async def test_while_victims_terminate_no_other_node_is_offered_for_eviction(self) -> None:
        rig = await full_cluster()
        await planned(rig)
        answer = rig.filter("wanted")
        assert answer.unresolvable == {"n2": SENTENCE[NodeReason.NOMINATED]}
        assert answer.failed == {"n1": SENTENCE[NodeReason.MEMORY]}
        live = msgspec.convert(rig.live("wanted"), Pod)
        assert rig.preemptor.answer(PreemptArgs(pod=live, offers={"n1": OfferedVictims(("uid-low",))})) == {}

    async def test_the_capacity_may_be_taken_by_a_pod_of_higher_priority(self) -> None:
        rig = await full_cluster()
        await planned(rig)
        gone(rig, "low")
        arrive(rig, "king", 10, HIGH + 1)
        assert rig.filter("king").names == ["n1"]
        assert await rig.bind("king", "n1") == ""
        rig.catch_up()
        assert rig.filter("wanted").names == []
        rig.ledger.check()

    async def test_another_node_is_used_while_the_nominated_one_is_not_free_yet(self) -> None:
        rig = await full_cluster()
        await planned(rig)
        rig.api.add_node(node("n3").card(size=16).manifest())
        rig.catch_up()
        assert rig.filter("wanted").names == ["n3"]

    async def test_once_it_is_free_the_nominated_node_comes_first(self) -> None:
        rig = await full_cluster()
        await planned(rig)
        rig.api.add_node(node("n3").card(size=16).manifest())
        gone(rig, "low")
        assert rig.filter("wanted").names == ["n1"]

    async def test_the_fewest_victims_on_one_card_for_a_whole_card(self) -> None:
        rig = Rig(node("n1").cards(2, size=16))
        for name in ("a1", "a2"):
            await settle(rig, name, 8, LOW)
        for name in ("b1", "b2", "b3", "b4"):
            await settle(rig, name, 4, LOW)
        await planned(rig, size=16)
        assert sorted(rig.api.evicted) == ["default/a1", "default/a2"]

    async def test_the_node_with_the_victim_of_lowest_priority_is_chosen(self) -> None:
        rig = Rig(node("n1").card(size=16), node("n2").card(size=16))
        await settle(rig, "middle", 10, MIDDLE)
        await settle(rig, "low", 10, LOW)
        await planned(rig)
        assert rig.api.evicted == ["default/low"]

    async def test_the_nomination_lasts_for_the_longest_grace_period_and_the_margin(self) -> None:
        rig = Rig(node("n1").card(size=16), preempt=PreemptSettings(margin=7.0))
        await settle(rig, "a", 8, LOW, spec={"terminationGracePeriodSeconds": 100})
        await settle(rig, "b", 8, LOW)
        await planned(rig, size=16)
        assert [nominated.until - rig.clock.now for nominated in rig.ledger.nominations()] == [107.0]

    async def test_two_candidates_do_not_count_on_the_same_capacity(self) -> None:
        rig = await full_cluster()
        arrive(rig, "second", 10, HIGH - 1)
        rig.filter("second")
        await planned(rig)
        assert sorted(rig.api.evicted) == ["default/low", "default/middle"], (
            "one each, the pod of higher priority first"
        )
        nodes = {nominated.allocation.name: set(nominated.allocation.uses()) for nominated in rig.ledger.nominations()}
        assert nodes["default/wanted"].isdisjoint(nodes["default/second"])

    async def test_the_events_while_victims_terminate(self) -> None:
        rig = await full_cluster()
        await planned(rig)
        arrive(rig, "late", 10, LOW)
        rig.filter("late")
        waiting = rig.cluster_state.pending["uid-late"]
        assert "capacity on node n1 is kept for default/wanted" in reason(waiting.request, rig.ledger)
        rig.filter("wanted")
        await rig.pending_pods.round()
        assert (
            "nominated for node n1: waiting for preempted pods to terminate"
            in dict(notes(rig, "wanted"))["NoFittingGPU"]
        )


class TestNoEviction:
    @pytest.mark.parametrize(
        ("size", "priority", "rest"),
        [
            pytest.param(10, HIGH, {"spec": {"preemptionPolicy": "Never"}}, id="it-may-not-preempt"),
            pytest.param(10, LOW, {}, id="no-pod-has-a-lower-priority"),
            pytest.param(10, HIGH, {"annotations": {"gputile.io/model": "H100"}}, id="no-card-of-its-model"),
            pytest.param(17, HIGH, {}, id="no-card-is-large-enough"),
        ],
    )
    async def test_where_eviction_is_not_allowed_or_does_not_help(
        self, size: int, priority: int, rest: dict[str, Any]
    ) -> None:
        rig = await full_cluster()
        await planned(rig, size=size, priority=priority, **rest)
        assert rig.api.evicted == []
        assert rig.ledger.nominations() == []

    async def test_when_the_setting_is_off(self) -> None:
        rig = await full_cluster(preempt=PreemptSettings(own=False))
        await planned(rig)
        assert rig.api.evicted == []

    async def test_on_a_replica_that_is_not_the_leader(self) -> None:
        rig = await full_cluster()
        rig.leading = False
        await planned(rig)
        assert rig.api.evicted == []

    async def test_while_kube_scheduler_preempts_by_itself(self) -> None:
        rig = await full_cluster()
        live = arrive(rig, "wanted", 10, HIGH)
        rig.filter("wanted")
        assert rig.preemptor.answer(PreemptArgs(pod=live, offers={"n1": OfferedVictims(("uid-low",))}))
        rig.clock.now += 5
        await rig.preemptor.round()
        assert rig.api.evicted == []

    async def test_when_a_pod_is_terminating_already(self) -> None:
        rig = await full_cluster()
        rig.change("middle", metadata={**rig.live("middle")["metadata"], "deletionTimestamp": "2023-11-14T22:13:50Z"})
        rig.catch_up()
        await planned(rig)
        assert rig.api.evicted == []
        [(_, why)] = notes(rig, "wanted")
        assert "waiting for default/middle to terminate on node n1; its capacity is kept for this pod" in why

    async def test_but_a_pod_stuck_in_termination_does_not_count(self) -> None:
        rig = await full_cluster()
        rig.change("middle", metadata={**rig.live("middle")["metadata"], "deletionTimestamp": "2023-11-14T22:00:00Z"})
        rig.catch_up()
        await planned(rig)
        assert rig.api.evicted == ["default/low"]

    async def test_of_a_pod_that_is_only_reserved(self) -> None:
        """It is on no node yet, so it cannot be evicted."""
        rig = Rig(node("n1").card(size=16))
        await settle(rig, "small", 6, LOW)
        arrive(rig, "reserved", 10, LOW)
        assert rig.filter("reserved").names == ["n1"]
        await planned(rig)
        assert rig.api.evicted == []

    async def test_on_a_node_whose_agent_starts_one_pod_at_a_time(self) -> None:
        rig = Rig(gpushare_node("n1"))
        limits = {"aliyun.com/gpu-mem": 15}
        rig.api.add_pod(prioritized_pod("first", limits, LOW))
        rig.catch_up()
        assert await rig.bind("first", rig.filter("first").names[0]) == ""
        rig.catch_up()
        rig.api.add_pod(prioritized_pod("wanted", limits, HIGH))
        rig.catch_up()
        rig.filter("wanted")
        rig.clock.now += 1
        await rig.preemptor.round()
        assert rig.api.evicted == []

    async def test_when_capacity_was_freed_meanwhile(self) -> None:
        rig = await full_cluster()
        arrive(rig, "wanted", 10, HIGH)
        rig.filter("wanted")
        gone(rig, "middle")
        rig.clock.now += 1
        await rig.preemptor.round()
        assert rig.api.evicted == []

    async def test_on_nodes_that_were_not_in_the_filter_call(self) -> None:
        """kube-scheduler checks taints and affinity: nodes that it did not name are excluded."""
        rig = await full_cluster()
        arrive(rig, "wanted", 10, HIGH)
        rig.filter("wanted", ["n2"])
        rig.clock.now += 1
        await rig.preemptor.round()
        assert rig.api.evicted == []

    async def test_a_filter_call_about_the_nominated_node_alone_does_not_exclude_the_others(self) -> None:
        rig = await full_cluster()
        arrive(rig, "wanted", 10, HIGH)
        rig.filter("wanted")
        rig.change("wanted", status={"nominatedNodeName": "n2"})
        rig.filter("wanted", ["n2"])
        rig.change("wanted", status={"nominatedNodeName": None})
        rig.catch_up()
        rig.clock.now += 1
        await rig.preemptor.round()
        assert rig.api.evicted == ["default/low"]


def nominated_by_kube_scheduler(rig: Rig) -> None:
    rig.change("wanted", status={"nominatedNodeName": "n1"})
    rig.catch_up()


def offered_to_kube_scheduler(rig: Rig) -> None:
    ask(rig, "wanted", n1=OfferedVictims(("uid-low",)))


def terminating(rig: Rig) -> None:
    stamp(rig, "wanted", "2026-11-16T09:00:00Z")


def leadership_lost(rig: Rig) -> None:
    rig.leading = False


INELIGIBLE = [
    pytest.param(nominated_by_kube_scheduler, id="kube-scheduler-has-nominated-a-node"),
    pytest.param(offered_to_kube_scheduler, id="kube-scheduler-has-just-been-told-the-victims"),
    pytest.param(terminating, id="the-pod-is-terminating"),
]


class TestEligibility:
    """Which pods are searched for, and what may change while the search runs in time slices."""

    async def due(self, *names: str, size: int = 10) -> Rig:
        rig = await full_cluster()
        for name in names:
            arrive(rig, name, size, HIGH)
            rig.filter(name)
        rig.clock.now += 1.0
        return rig

    def searched(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        find, names = rig.preemptor._find_candidates, list[str]()

        def recorded(preemptor: PreemptingPod, budget: SearchBudget) -> list[str]:
            names.append(preemptor.pod.name)
            return find(preemptor, budget)

        monkeypatch.setattr(rig.preemptor, "_find_candidates", recorded)
        return names

    async def test_a_nominated_pod_is_not_searched_for_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rig = await self.due("wanted")
        searched = self.searched(rig, monkeypatch)
        for _ in range(3):
            await rig.preemptor.round()
            rig.clock.now += 1.0
        assert searched == ["wanted"]

    @pytest.mark.parametrize("change", INELIGIBLE)
    async def test_an_ineligible_pod_is_not_searched_for(
        self, change: Callable[[Rig], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rig = await self.due("wanted")
        searched = self.searched(rig, monkeypatch)
        change(rig)
        await rig.preemptor.round()
        assert searched == []

    @pytest.mark.parametrize("change", [*INELIGIBLE, pytest.param(leadership_lost, id="another-replica-is-the-leader")])
    async def test_nothing_is_nominated_if_that_happens_during_the_search(
        self, change: Callable[[Rig], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rig = await self.due("wanted")
        select = rig.preemptor._select_candidate

        async def interrupted(*args: Any) -> Any:
            selected = await select(*args)
            change(rig)
            return selected

        monkeypatch.setattr(rig.preemptor, "_select_candidate", interrupted)
        await rig.preemptor.round()
        assert (rig.ledger.nominations(), rig.api.evicted) == ([], [])

    async def test_equal_pods_that_no_eviction_helps_are_searched_for_once(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rig = await self.due("a", "b", size=17)  # larger than any card
        searched = self.searched(rig, monkeypatch)
        await rig.preemptor.round()
        assert searched == ["a"]

    async def test_a_pod_that_no_eviction_helps_is_searched_for_less_and_less(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rig = await self.due("a", size=17)
        searched = self.searched(rig, monkeypatch)
        for _ in range(20):
            await rig.preemptor.round()
            rig.clock.now += 1.0
        assert len(searched) == 3, "at once, after 5 seconds, and after 10 more"


class TestBudgets:
    async def test_a_protected_pod_is_spared_for_a_pod_of_higher_priority(self) -> None:
        rig = Rig(node("n1").cards(2, size=16))
        await settle(rig, "middle", 10, MIDDLE)
        await settle(rig, "low", 10, LOW, labels={"app": "db"})
        rig.api.guards = [guard(0, matchLabels={"app": "db"})]
        await planned(rig)
        assert rig.api.evicted == ["default/middle"]

    async def test_when_budgets_protect_all_pods_the_event_names_the_budget(self) -> None:
        rig = await full_cluster()
        rig.api.guards = [guard(0)]
        await planned(rig)
        assert rig.api.evicted == []
        assert rig.ledger.nominations() == []
        [(event, why)] = notes(rig, "wanted")
        assert event == "PreemptionBlocked"
        assert "from node n1 would help, but PodDisruptionBudget default/guard forbids it now" in why
        rig.clock.now += 5
        await rig.preemptor.round()
        assert len(notes(rig, "wanted")) == 1, "one event"

    async def test_a_budget_that_allows_one_does_not_allow_two(self) -> None:
        rig = Rig(node("n1").card(size=16))
        await settle(rig, "a", 8, LOW)
        await settle(rig, "b", 8, LOW)
        rig.api.guards = [guard(1)]
        await planned(rig, size=16)
        assert rig.api.evicted == []
        assert notes(rig, "wanted")[0][0] == "PreemptionBlocked"

    async def test_protected_pods_are_evicted_first(self) -> None:
        """If the eviction of one of them is refused, no other pod was evicted in vain."""
        rig = Rig(node("n1").card(size=16))
        await settle(rig, "a", 8, LOW)
        await settle(rig, "b", 8, LOW, labels={"app": "db"})
        rig.api.guards = [guard(1, matchLabels={"app": "db"})]
        await planned(rig, size=16)
        assert rig.api.evicted == ["default/b", "default/a"]

    async def test_budgets_that_cannot_be_read_stop_it(self) -> None:
        rig = await full_cluster()
        rig.api.script["budgets"] = [refused(403)] * 100
        await planned(rig)
        assert rig.api.evicted == []
        assert "disruption budgets cannot be read" in notes(rig, "wanted")[0][1]
        rig.api.script.clear()
        rig.clock.now += 5
        await rig.preemptor.round()
        assert rig.api.evicted == ["default/low"]

    async def test_the_preempt_verb_names_unprotected_pods_first(self) -> None:
        rig = Rig(node("n1").cards(2, size=16))
        await settle(rig, "middle", 10, MIDDLE)
        await settle(rig, "low", 10, LOW, labels={"app": "db"})
        rig.api.guards = [guard(0, matchLabels={"app": "db"})]
        await planned(rig)
        live = arrive(rig, "other", 16, HIGH)
        answer = rig.preemptor.answer(PreemptArgs(pod=live, offers={"n1": OfferedVictims(("uid-low",), 1)}))
        assert answer == {"n1": OfferedVictims(("uid-low",), 1)}, "the other card is kept for `wanted`"


class TestFailures:
    async def test_no_pod_is_evicted_before_the_nomination_is_on_the_pod(self) -> None:
        rig = await full_cluster()
        rig.api.script["patch_pod"] = [OutcomeUnknown("no answer"), None]
        await planned(rig)
        assert rig.api.evicted == []
        rig.clock.now += 5
        await rig.preemptor.round()
        assert rig.api.evicted == ["default/low"]

    async def test_an_eviction_that_a_budget_forbids_frees_the_capacity(self) -> None:
        rig = await full_cluster()
        rig.api.script["evict"] = [refused(429)]
        await planned(rig)
        assert rig.ledger.nominations() == []
        assert nominated(rig) is None
        assert NOMINATION not in rig.live("wanted")["metadata"]["annotations"]
        assert notes(rig, "wanted")[-1] == (
            "PreemptionBlocked",
            "default/low may not be evicted: the server returned 429",
        )
        rig.clock.now += 29
        await rig.preemptor.round()
        assert rig.api.evicted == []
        rig.clock.now += 1
        rig.catch_up()
        rig.api.script["evict"] = [refused(429)]
        await rig.preemptor.round()
        rig.clock.now += 59
        rig.catch_up()
        await rig.preemptor.round()
        assert rig.api.evicted == [], "the backoff doubles"
        rig.clock.now += 1
        await rig.preemptor.round()
        assert rig.api.evicted == ["default/low"]

    async def test_after_half_of_the_evictions_the_rest_is_retried(self) -> None:
        rig = Rig(node("n1").card(size=16))
        await settle(rig, "a", 8, LOW)
        await settle(rig, "b", 8, LOW)
        rig.api.script["evict"] = [None, refused(429), OutcomeUnknown("reset"), None]
        await planned(rig, size=16)
        assert len(rig.api.evicted) == 1
        assert notes(rig, "wanted")[-1][0] == "PreemptionBlocked"
        for _ in range(2):
            rig.clock.now += 5
            await rig.preemptor.round()
        assert sorted(rig.api.evicted) == ["default/a", "default/b"]

    @pytest.mark.parametrize("status", [pytest.param(404, id="gone"), pytest.param(409, id="another-of-the-same-name")])
    async def test_a_victim_that_is_gone_already_is_not_evicted(self, status: int) -> None:
        rig = await full_cluster()
        rig.api.script["evict"] = [refused(status)]
        await planned(rig)
        assert len(rig.ledger.nominations()) == 1
        rig.clock.now += 5
        await rig.preemptor.round()
        assert rig.api.calls.count("evict") == 1

    async def test_an_eviction_with_a_lost_answer_is_retried(self) -> None:
        rig = await full_cluster()
        rig.api.script["evict"] = [LostResponse()]
        await planned(rig)
        rig.clock.now += 5
        await rig.preemptor.round()
        assert rig.api.evicted == ["default/low", "default/low"]

    async def test_an_expired_nomination_frees_the_capacity(self) -> None:
        rig = await full_cluster()
        await planned(rig)
        rig.clock.now += 41
        rig.apply(rig.ledger.handle(Tick(rig.clock.now)))
        await rig.preemptor.round()
        assert notes(rig, "wanted")[-1][0] == "NominationExpired"
        assert nominated(rig) is None
        assert rig.count("preemptions_total", outcome="expired") == 1
        arrive(rig, "late", 6, LOW)
        assert rig.filter("late").names == ["n1"]

    async def test_a_replica_that_lost_its_lease_in_between_evicts_no_pod(self) -> None:
        rig = await full_cluster()

        def lose() -> None:
            rig.leading = False

        rig.api.script["patch_pod"] = [lose]
        await planned(rig)
        assert rig.api.evicted == []

    async def test_the_nomination_of_a_deleted_pod_is_withdrawn(self) -> None:
        rig = await full_cluster()
        await planned(rig)
        gone(rig, "wanted")
        await rig.preemptor.round()
        assert rig.ledger.nominations() == []
        assert rig.count("preemptions_total", outcome="withdrawn") == 1


class TestNewLeader:
    async def test_keeps_the_nominations(self) -> None:
        rig = await full_cluster()
        await planned(rig)
        gone(rig, "low")
        new_leader = new_leader_of(rig)
        assert new_leader.ledger.nominations()[0].allocation == rig.ledger.nominations()[0].allocation
        arrive(new_leader, "late", 10, LOW)
        assert new_leader.filter("late").names == []
        assert new_leader.filter("wanted").names == ["n1"]

    async def test_evicts_no_pod_twice(self) -> None:
        rig = await full_cluster()
        await planned(rig)
        new_leader = new_leader_of(rig)
        await new_leader.preemptor.round()
        assert new_leader.api.evicted == []

    async def test_finishes_the_evictions(self) -> None:
        rig = await full_cluster()
        rig.api.script["evict"] = [OutcomeUnknown("the process died here")]
        await planned(rig)
        new_leader = new_leader_of(rig)
        await new_leader.preemptor.round()
        assert new_leader.api.evicted == ["default/low"]

    async def test_ignores_a_nomination_that_expired_or_is_another_pods(self) -> None:
        rig = await full_cluster()
        await planned(rig)
        written = rig.live("wanted")["metadata"]["annotations"][NOMINATION]
        newer = written.replace('{"version":1', '{"version":2', 1)
        for annotation in (
            written.replace('"until":17', '"until":16'),
            written.replace("uid-wanted", "uid-other"),
            newer,
            "{",
            "[]",
        ):
            rig.live("wanted")["metadata"]["annotations"][NOMINATION] = annotation
            assert new_leader_of(rig).ledger.nominations() == []

    async def test_a_nominated_node_name_that_outlived_its_nomination_does_not_block(self) -> None:
        rig = await full_cluster()
        await planned(rig)
        annotations = rig.live("wanted")["metadata"]["annotations"]
        annotations[NOMINATION] = annotations[NOMINATION].replace('"until":17', '"until":16')
        rig.live("low")["metadata"].pop("deletionTimestamp")
        new_leader = new_leader_of(rig)
        new_leader.filter("wanted")
        new_leader.clock.now += 1
        await new_leader.preemptor.round()
        assert new_leader.api.evicted == ["default/low"]


class TestPreemptVerb:
    async def test_the_capacity_of_the_node_that_kube_scheduler_nominated_is_kept_too(self) -> None:
        rig = await full_cluster()
        live = arrive(rig, "wanted", 10, HIGH)
        rig.filter("wanted")
        answer = rig.preemptor.answer(PreemptArgs(pod=live, offers={"n1": OfferedVictims(("uid-middle",))}))
        assert answer == {"n1": OfferedVictims(("uid-low",))}
        rig.change("wanted", status={"nominatedNodeName": "n1"})
        rig.catch_up()
        gone(rig, "low")
        arrive(rig, "late", 10, LOW)
        assert rig.filter("late").names == []
        assert rig.filter("wanted").names == ["n1"]
        assert rig.api.evicted == [], "kube-scheduler does that itself"

    async def test_a_nominated_node_that_was_not_in_our_answer_is_not_kept(self) -> None:
        rig = await full_cluster()
        arrive(rig, "wanted", 10, HIGH)
        rig.change("wanted", status={"nominatedNodeName": "n1"})
        rig.catch_up()
        assert rig.ledger.nominations() == []

    async def test_a_terminating_pod_is_named_before_others(self) -> None:
        rig = await full_cluster()
        rig.change("middle", metadata={**rig.live("middle")["metadata"], "deletionTimestamp": "2023-11-14T22:13:50Z"})
        rig.catch_up()
        live = arrive(rig, "wanted", 10, HIGH)
        answer = rig.preemptor.answer(PreemptArgs(pod=live, offers={"n1": OfferedVictims(("uid-low",))}))
        assert answer == {"n1": OfferedVictims(("uid-middle",))}
