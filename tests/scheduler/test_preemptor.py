"""Room for those who are more important: who goes, who is told, what is kept for whom, and what if it fails."""

from typing import Any

import msgspec
import pytest

from gputile.dialects.gputile import PROMISE, read_nomination
from gputile.dialects.kube_objects import Pod
from gputile.kube.api import OutcomeUnknown
from gputile.ledger.events import Tick
from gputile.model.refusals import SENTENCE, NodeReason
from gputile.scheduler.extender_api import OfferedVictims, PreemptArgs
from gputile.scheduler.pending.pending_pods import reason
from gputile.scheduler.settings import PreemptSettings
from gputile.testing.builders import node
from tests.scheduler.crowds import (
    HIGH,
    LOW,
    MIDDLE,
    arrive,
    crowded,
    gone,
    guard,
    heir_of,
    nominated,
    notes,
    planned,
    settle,
    wish,
)
from tests.scheduler.rig import Lands, Rig, refused
from tests.scheduler.test_filter import gpushare_node


class TestOwn:
    async def test_the_least_important_goes_and_both_sides_are_told(self) -> None:
        rig = await crowded()
        await planned(rig)
        assert rig.api.evicted == ["default/low"]
        assert nominated(rig) == "n1"
        assert read_nomination(msgspec.convert(rig.live("wanted"), Pod)) is not None
        assert rig.api.calls.count("patch_pod") == 1, "nomination and promise in one write"
        assert notes(rig, "low") == [
            ("Preempted", "evicted to make room for default/wanted (priority 1000) on node n1")
        ]
        [(told, why)] = notes(rig, "wanted")
        assert told == "Preempting"
        assert "evicting default/low; it is kept for this pod for 39 s" in why

    async def test_the_room_is_kept_until_it_is_bound(self) -> None:
        rig = await crowded()
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

    async def test_while_room_is_made_no_other_node_is_offered_for_eviction(self) -> None:
        rig = await crowded()
        await planned(rig)
        answer = rig.filter("wanted")
        assert answer.unresolvable == {"n2": SENTENCE[NodeReason.NOMINATED]}
        assert answer.failed == {"n1": SENTENCE[NodeReason.MEMORY]}
        live = msgspec.convert(rig.live("wanted"), Pod)
        assert rig.preemptor.answer(PreemptArgs(pod=live, offers={"n1": OfferedVictims(("uid-low",))})) == {}

    async def test_the_room_may_be_taken_by_somebody_more_important(self) -> None:
        rig = await crowded()
        await planned(rig)
        gone(rig, "low")
        arrive(rig, "king", 10, HIGH + 1)
        assert rig.filter("king").names == ["n1"]
        assert await rig.bind("king", "n1") == ""
        rig.catch_up()
        assert rig.filter("wanted").names == []
        rig.ledger.check()

    async def test_room_elsewhere_is_taken_while_the_promised_is_not_there_yet(self) -> None:
        rig = await crowded()
        await planned(rig)
        rig.api.add_node(node("n3").card(size=16).manifest())
        rig.catch_up()
        assert rig.filter("wanted").names == ["n3"]

    async def test_once_it_is_there_the_promised_room_comes_first(self) -> None:
        rig = await crowded()
        await planned(rig)
        rig.api.add_node(node("n3").card(size=16).manifest())
        gone(rig, "low")
        assert rig.filter("wanted").names == ["n1"]

    async def test_the_fewest_on_one_card_for_a_whole_one(self) -> None:
        rig = Rig(node("n1").cards(2, size=16))
        for name in ("a1", "a2"):
            await settle(rig, name, 8, LOW)
        for name in ("b1", "b2", "b3", "b4"):
            await settle(rig, name, 4, LOW)
        await planned(rig, size=16)
        assert sorted(rig.api.evicted) == ["default/a1", "default/a2"]

    async def test_of_all_nodes_the_one_with_the_least_important_victim(self) -> None:
        rig = Rig(node("n1").card(size=16), node("n2").card(size=16))
        await settle(rig, "middle", 10, MIDDLE)
        await settle(rig, "low", 10, LOW)
        await planned(rig)
        assert rig.api.evicted == ["default/low"]

    async def test_the_room_is_kept_for_the_longest_grace_period_and_the_margin(self) -> None:
        rig = Rig(node("n1").card(size=16), preempt=PreemptSettings(margin=7.0))
        await settle(rig, "a", 8, LOW, spec={"terminationGracePeriodSeconds": 100})
        await settle(rig, "b", 8, LOW)
        await planned(rig, size=16)
        assert [nominated.until - rig.clock.now for nominated in rig.ledger.nominations()] == [107.0]

    async def test_several_wishes_do_not_count_on_the_same_room(self) -> None:
        rig = await crowded()
        arrive(rig, "second", 10, HIGH - 1)
        rig.filter("second")
        await planned(rig)
        assert sorted(rig.api.evicted) == ["default/low", "default/middle"], "one each, the more important pod first"
        nodes = {nominated.allocation.name: set(nominated.allocation.uses()) for nominated in rig.ledger.nominations()}
        assert nodes["default/wanted"].isdisjoint(nodes["default/second"])

    async def test_what_its_event_says_while_room_is_made(self) -> None:
        rig = await crowded()
        await planned(rig)
        arrive(rig, "late", 10, LOW)
        rig.filter("late")
        waiting = rig.cluster_state.pending["uid-late"]
        assert "room on node n1 is kept for default/wanted" in reason(waiting.request, rig.ledger)
        rig.filter("wanted")
        await rig.pending_pods.round()
        assert "room is being made for it on node n1" in dict(notes(rig, "wanted"))["NoFittingGPU"]


class TestNobodyGoes:
    @pytest.mark.parametrize(
        ("size", "priority", "rest"),
        [
            pytest.param(10, HIGH, {"spec": {"preemptionPolicy": "Never"}}, id="it-may-not-preempt"),
            pytest.param(10, LOW, {}, id="nobody-is-less-important"),
            pytest.param(10, HIGH, {"annotations": {"gputile.io/model": "H100"}}, id="no-card-of-its-model"),
            pytest.param(17, HIGH, {}, id="no-card-is-large-enough"),
        ],
    )
    async def test_where_eviction_is_not_allowed_or_does_not_help(
        self, size: int, priority: int, rest: dict[str, Any]
    ) -> None:
        rig = await crowded()
        await planned(rig, size=size, priority=priority, **rest)
        assert rig.api.evicted == []
        assert rig.ledger.nominations() == []

    async def test_when_the_setting_is_off(self) -> None:
        rig = await crowded(preempt=PreemptSettings(own=False))
        await planned(rig)
        assert rig.api.evicted == []

    async def test_by_a_replica_that_does_not_lead(self) -> None:
        rig = await crowded()
        rig.leading = False
        await planned(rig)
        assert rig.api.evicted == []

    async def test_while_kube_scheduler_preempts_by_itself(self) -> None:
        rig = await crowded()
        live = arrive(rig, "wanted", 10, HIGH)
        rig.filter("wanted")
        assert rig.preemptor.answer(PreemptArgs(pod=live, offers={"n1": OfferedVictims(("uid-low",))}))
        rig.clock.now += 5
        await rig.preemptor.round()
        assert rig.api.evicted == []

    async def test_when_somebody_is_leaving_anyway(self) -> None:
        rig = await crowded()
        rig.change("middle", metadata={**rig.live("middle")["metadata"], "deletionTimestamp": "2023-11-14T22:13:50Z"})
        rig.catch_up()
        await planned(rig)
        assert rig.api.evicted == []
        [(_, why)] = notes(rig, "wanted")
        assert "default/middle will soon have left node n1; the room is kept for this pod" in why

    async def test_but_not_for_one_that_should_have_left_long_ago(self) -> None:
        rig = await crowded()
        rig.change("middle", metadata={**rig.live("middle")["metadata"], "deletionTimestamp": "2023-11-14T22:00:00Z"})
        rig.catch_up()
        await planned(rig)
        assert rig.api.evicted == ["default/low"]

    async def test_that_is_only_pencilled(self) -> None:
        """It is on no node yet, so it cannot be evicted."""
        rig = Rig(node("n1").card(size=16))
        await settle(rig, "small", 6, LOW)
        arrive(rig, "pencilled", 10, LOW)
        assert rig.filter("pencilled").names == ["n1"]
        await planned(rig)
        assert rig.api.evicted == []

    async def test_on_a_node_whose_agent_takes_one_pod_at_a_time(self) -> None:
        rig = Rig(gpushare_node("n1"))
        limits = {"aliyun.com/gpu-mem": 15}
        rig.api.add_pod(wish("first", limits, LOW))
        rig.catch_up()
        assert await rig.bind("first", rig.filter("first").names[0]) == ""
        rig.catch_up()
        rig.api.add_pod(wish("wanted", limits, HIGH))
        rig.catch_up()
        rig.filter("wanted")
        rig.clock.now += 1
        await rig.preemptor.round()
        assert rig.api.evicted == []

    async def test_when_room_has_appeared_meanwhile(self) -> None:
        rig = await crowded()
        arrive(rig, "wanted", 10, HIGH)
        rig.filter("wanted")
        gone(rig, "middle")
        rig.clock.now += 1
        await rig.preemptor.round()
        assert rig.api.evicted == []

    async def test_on_nodes_that_kube_scheduler_did_not_ask_about(self) -> None:
        """Taints and affinity are its business: what it did not name is out of question."""
        rig = await crowded()
        arrive(rig, "wanted", 10, HIGH)
        rig.filter("wanted", ["n2"])
        rig.clock.now += 1
        await rig.preemptor.round()
        assert rig.api.evicted == []

    async def test_a_question_about_the_nominated_node_alone_leaves_the_others_in_question(self) -> None:
        rig = await crowded()
        arrive(rig, "wanted", 10, HIGH)
        rig.filter("wanted")
        rig.change("wanted", status={"nominatedNodeName": "n2"})
        rig.filter("wanted", ["n2"])
        rig.change("wanted", status={"nominatedNodeName": None})
        rig.catch_up()
        rig.clock.now += 1
        await rig.preemptor.round()
        assert rig.api.evicted == ["default/low"]


class TestBudgets:
    async def test_whom_a_budget_protects_is_spared_for_somebody_more_important(self) -> None:
        rig = Rig(node("n1").cards(2, size=16))
        await settle(rig, "middle", 10, MIDDLE)
        await settle(rig, "low", 10, LOW, labels={"app": "db"})
        rig.api.guards = [guard(0, matchLabels={"app": "db"})]
        await planned(rig)
        assert rig.api.evicted == ["default/middle"]

    async def test_when_budgets_protect_everybody_the_pod_is_told_which(self) -> None:
        rig = await crowded()
        rig.api.guards = [guard(0)]
        await planned(rig)
        assert rig.api.evicted == []
        assert rig.ledger.nominations() == []
        [(told, why)] = notes(rig, "wanted")
        assert told == "PreemptionBlocked"
        assert "on node n1 would make room, but PodDisruptionBudget default/guard forbids it now" in why
        rig.clock.now += 5
        await rig.preemptor.round()
        assert len(notes(rig, "wanted")) == 1, "said once"

    async def test_a_budget_that_allows_one_does_not_allow_two(self) -> None:
        rig = Rig(node("n1").card(size=16))
        await settle(rig, "a", 8, LOW)
        await settle(rig, "b", 8, LOW)
        rig.api.guards = [guard(1)]
        await planned(rig, size=16)
        assert rig.api.evicted == []
        assert notes(rig, "wanted")[0][0] == "PreemptionBlocked"

    async def test_those_under_a_budget_are_asked_first(self) -> None:
        """If one of them may not go after all, nobody has gone for nothing."""
        rig = Rig(node("n1").card(size=16))
        await settle(rig, "a", 8, LOW)
        await settle(rig, "b", 8, LOW, labels={"app": "db"})
        rig.api.guards = [guard(1, matchLabels={"app": "db"})]
        await planned(rig, size=16)
        assert rig.api.evicted == ["default/b", "default/a"]

    async def test_budgets_that_cannot_be_read_stop_it(self) -> None:
        rig = await crowded()
        rig.api.script["budgets"] = [refused(403)] * 100
        await planned(rig)
        assert rig.api.evicted == []
        assert "disruption budgets cannot be read" in notes(rig, "wanted")[0][1]
        rig.api.script.clear()
        rig.clock.now += 5
        await rig.preemptor.round()
        assert rig.api.evicted == ["default/low"]

    async def test_asked_by_kube_scheduler_the_unprotected_are_named_first(self) -> None:
        rig = Rig(node("n1").cards(2, size=16))
        await settle(rig, "middle", 10, MIDDLE)
        await settle(rig, "low", 10, LOW, labels={"app": "db"})
        rig.api.guards = [guard(0, matchLabels={"app": "db"})]
        await planned(rig)
        live = arrive(rig, "other", 16, HIGH)
        found = rig.preemptor.answer(PreemptArgs(pod=live, offers={"n1": OfferedVictims(("uid-low",), 1)}))
        assert found == {"n1": OfferedVictims(("uid-low",), 1)}, "the other card is promised to `wanted`"


class TestWhenItFails:
    async def test_nobody_goes_before_the_promise_is_on_the_pod(self) -> None:
        rig = await crowded()
        rig.api.script["patch_pod"] = [OutcomeUnknown("no answer"), None]
        await planned(rig)
        assert rig.api.evicted == []
        rig.clock.now += 5
        await rig.preemptor.round()
        assert rig.api.evicted == ["default/low"]

    async def test_an_eviction_that_a_budget_forbids_after_all_gives_the_room_back(self) -> None:
        rig = await crowded()
        rig.api.script["evict"] = [refused(429)]
        await planned(rig)
        assert rig.ledger.nominations() == []
        assert nominated(rig) is None
        assert PROMISE not in rig.live("wanted")["metadata"]["annotations"]
        assert notes(rig, "wanted")[-1] == (
            "PreemptionBlocked",
            "default/low may not be evicted: the server said 429",
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
        assert rig.api.evicted == [], "each time it waits twice as long"
        rig.clock.now += 1
        await rig.preemptor.round()
        assert rig.api.evicted == ["default/low"]

    async def test_half_of_the_evictions_done_the_rest_is_tried_again(self) -> None:
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
    async def test_a_victim_that_went_by_itself_need_not_be_evicted(self, status: int) -> None:
        rig = await crowded()
        rig.api.script["evict"] = [refused(status)]
        await planned(rig)
        assert len(rig.ledger.nominations()) == 1
        rig.clock.now += 5
        await rig.preemptor.round()
        assert rig.api.calls.count("evict") == 1

    async def test_an_eviction_whose_answer_got_lost_is_asked_for_again(self) -> None:
        rig = await crowded()
        rig.api.script["evict"] = [Lands()]
        await planned(rig)
        rig.clock.now += 5
        await rig.preemptor.round()
        assert rig.api.evicted == ["default/low", "default/low"]

    async def test_room_that_was_not_taken_in_time_is_given_back(self) -> None:
        rig = await crowded()
        await planned(rig)
        rig.clock.now += 41
        rig.apply(rig.ledger.handle(Tick(rig.clock.now)))
        await rig.preemptor.round()
        assert notes(rig, "wanted")[-1][0] == "NominationExpired"
        assert nominated(rig) is None
        assert rig.count("preemptions_total", outcome="expired") == 1
        arrive(rig, "late", 6, LOW)
        assert rig.filter("late").names == ["n1"]

    async def test_a_replica_that_lost_its_lease_in_between_evicts_nobody(self) -> None:
        rig = await crowded()

        def lose() -> None:
            rig.leading = False

        rig.api.script["patch_pod"] = [lose]
        await planned(rig)
        assert rig.api.evicted == []

    async def test_a_pod_that_is_deleted_leaves_its_promise(self) -> None:
        rig = await crowded()
        await planned(rig)
        gone(rig, "wanted")
        await rig.preemptor.round()
        assert rig.ledger.nominations() == []
        assert rig.count("preemptions_total", outcome="withdrawn") == 1


class TestANewLeader:
    async def test_keeps_what_was_promised(self) -> None:
        rig = await crowded()
        await planned(rig)
        gone(rig, "low")
        heir = heir_of(rig)
        assert heir.ledger.nominations()[0].allocation == rig.ledger.nominations()[0].allocation
        arrive(heir, "late", 10, LOW)
        assert heir.filter("late").names == []
        assert heir.filter("wanted").names == ["n1"]

    async def test_evicts_nobody_twice(self) -> None:
        rig = await crowded()
        await planned(rig)
        heir = heir_of(rig)
        await heir.preemptor.round()
        assert heir.api.evicted == []

    async def test_finishes_the_evictions(self) -> None:
        rig = await crowded()
        rig.api.script["evict"] = [OutcomeUnknown("the process died here")]
        await planned(rig)
        heir = heir_of(rig)
        await heir.preemptor.round()
        assert heir.api.evicted == ["default/low"]

    async def test_does_not_believe_a_promise_that_is_over_or_another_pods(self) -> None:
        rig = await crowded()
        await planned(rig)
        said = rig.live("wanted")["metadata"]["annotations"][PROMISE]
        newer = said.replace('{"version":1', '{"version":2', 1)
        for told in (
            said.replace('"until":17', '"until":16'),
            said.replace("uid-wanted", "uid-other"),
            newer,
            "{",
            "[]",
        ):
            rig.live("wanted")["metadata"]["annotations"][PROMISE] = told
            assert heir_of(rig).ledger.nominations() == []

    async def test_a_nomination_that_outlived_its_promise_is_no_obstacle(self) -> None:
        rig = await crowded()
        await planned(rig)
        annotations = rig.live("wanted")["metadata"]["annotations"]
        annotations[PROMISE] = annotations[PROMISE].replace('"until":17', '"until":16')
        rig.live("low")["metadata"].pop("deletionTimestamp")
        heir = heir_of(rig)
        heir.filter("wanted")
        heir.clock.now += 1
        await heir.preemptor.round()
        assert heir.api.evicted == ["default/low"]


class TestAsked:
    async def test_the_room_that_kube_scheduler_chose_is_kept_too(self) -> None:
        rig = await crowded()
        live = arrive(rig, "wanted", 10, HIGH)
        rig.filter("wanted")
        found = rig.preemptor.answer(PreemptArgs(pod=live, offers={"n1": OfferedVictims(("uid-middle",))}))
        assert found == {"n1": OfferedVictims(("uid-low",))}
        rig.change("wanted", status={"nominatedNodeName": "n1"})
        rig.catch_up()
        gone(rig, "low")
        arrive(rig, "late", 10, LOW)
        assert rig.filter("late").names == []
        assert rig.filter("wanted").names == ["n1"]
        assert rig.api.evicted == [], "kube-scheduler does that itself"

    async def test_a_node_that_was_not_in_our_answer_is_not_kept(self) -> None:
        rig = await crowded()
        arrive(rig, "wanted", 10, HIGH)
        rig.change("wanted", status={"nominatedNodeName": "n1"})
        rig.catch_up()
        assert rig.ledger.nominations() == []

    async def test_one_that_is_leaving_is_counted_on_before_others(self) -> None:
        rig = await crowded()
        rig.change("middle", metadata={**rig.live("middle")["metadata"], "deletionTimestamp": "2023-11-14T22:13:50Z"})
        rig.catch_up()
        live = arrive(rig, "wanted", 10, HIGH)
        found = rig.preemptor.answer(PreemptArgs(pod=live, offers={"n1": OfferedVictims(("uid-low",))}))
        assert found == {"n1": OfferedVictims(("uid-middle",))}
