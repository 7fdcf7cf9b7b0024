"""Quota in filter and bind, in cached rejections, in Events and nudges, and in preemption.

Seen to fail, each alone: `_choose` without `_allowed`, `_reserve` without `beyond_quota`, a second `allowed` in
`_refusals`, `_choose` that ignores `Denied.beyond_quota`, the nudge with the request instead of what the quota allows,
a `RequestAfterEviction` that frees the quota of every namespace, or none; `gputile explain` without `allow`.
"""

import asyncio
from typing import Any

import msgspec
import pytest

from gputile.cli.explain_model import explain_pod
from gputile.cli.pod_conditions import PodWithConditions
from gputile.dialects.gputile import NUDGED
from gputile.kube.api import Json
from gputile.ledger.events import QuotasSet, Tick
from gputile.ledger.ledger import AllocationState
from gputile.model.refusals import SENTENCE, NodeReason
from gputile.quota.limits import Limit, Quota
from gputile.quota.usage import QuotaUsage
from gputile.scheduler.extender_api import FilterAnswer, FilterArgs, OfferedVictims
from gputile.scheduler.settings import PreemptSettings
from gputile.testing.builders import NodeBuilder, node, pod
from tests.scheduler.preemption_helpers import (
    HIGH,
    LOW,
    MIDDLE,
    arrive,
    ask,
    gone,
    notes,
    planned,
    prioritized_pod,
    settle,
)
from tests.scheduler.rig import Rig, bind_args, refused, tile
from tests.scheduler.test_pending_pods import nudged, rounds

USED_UP, NOT_LISTED = SENTENCE[NodeReason.QUOTA], SENTENCE[NodeReason.QUOTA_MODEL]
HERE = "ConfigMap kube-system/gputile-quota"


def quota(*limits: Limit, pools: tuple[str, ...] = ()) -> Quota:
    return Quota(limits, pools, HERE)


def cards(number: int, model: str = "A100") -> Quota:
    return quota(Limit(model=model, cards=100 * number))


def set_quotas(rig: Rig, **namespaces: Quota) -> None:
    rig.apply(rig.ledger.handle(QuotasSet(namespaces)))


def rig_with_quotas(*nodes: NodeBuilder, default: Quota, **settings: Any) -> Rig:
    rig = Rig(*(nodes or (node("n1").cards(4, size=16), node("n2").cards(4, "T4", 8))), **settings)
    set_quotas(rig, default=default)
    return rig


def other_filter(rig: Rig, name: str, namespace: str = "team-b") -> FilterAnswer:
    made = rig.api.add_pod(pod(tile(16), name=name, namespace=namespace, uid=f"uid-{name}"))
    rig.catch_up()
    return rig.filter_service.filter(FilterArgs(pod=made, names=list(rig.api.nodes)))


class TestFilter:
    def test_a_reservation_counts_for_the_next_pod(self) -> None:
        rig = rig_with_quotas(default=cards(2))
        for name in ("a", "b", "c"):
            rig.arrive(tile(16), name=name)
        assert (rig.filter("a").names, rig.filter("b").names) == (["n1"], ["n1"])
        assert rig.filter("c") == FilterAnswer(
            failed={"n1": USED_UP}, unresolvable={"n2": SENTENCE[NodeReason.TOO_SMALL]}
        )
        assert rig.count("refusals_total", code="QuotaExceeded") == 1

    def test_other_namespaces_are_not_affected(self) -> None:
        rig = rig_with_quotas(default=cards(0))
        rig.arrive(tile(16))
        assert rig.filter().names == []
        assert other_filter(rig, "theirs").names == ["n1"]

    def test_where_the_best_node_would_exceed_the_quota_the_next_is_used(self) -> None:
        """On n1 the two containers fit on two cards only, for 1.2 in sum; on n2 they share one, for 0.7."""
        rig = rig_with_quotas(node("n1").cards(2, size=100), node("n2").cards(1, size=100), default=cards(1, "*"))
        for name, limits in (("x", tile(35, 85)), ("y", tile(85, 35))):
            made = rig.api.add_pod(pod(limits, name=name, namespace="team-b", uid=f"uid-{name}"))
            rig.catch_up()
            assert rig.filter_service.filter(FilterArgs(pod=made, names=["n1"])).names == ["n1"]
        both = rig.api.add_pod(pod(tile(60, 10), tile(10, 60), name="both", uid="uid-both"))
        rig.catch_up()
        assert rig.filter_service.filter(FilterArgs(pod=both, names=["n1", "n2"])).names == ["n2"]
        assert rig.filter_service.filter(FilterArgs(pod=both, names=["n1"])) == FilterAnswer(failed={"n1": USED_UP})

    def test_a_million_cards_are_refused_at_once(self) -> None:
        rig = rig_with_quotas(default=cards(2))
        rig.arrive(tile(1, cards=1_000_000), name="greedy")
        assert rig.filter("greedy").names == []

    def test_a_model_that_is_not_listed_is_not_offered(self) -> None:
        rig = rig_with_quotas(default=cards(1, "T4"))
        rig.arrive(tile(8))
        assert rig.filter().names == ["n2"]
        rig.arrive(tile(16), name="large")
        assert rig.filter("large").unresolvable == {"n1": NOT_LISTED, "n2": SENTENCE[NodeReason.TOO_SMALL]}

    def test_nor_is_a_node_of_another_pool(self) -> None:
        blue = node("n1").cards(4, size=16).manifest()
        blue["metadata"]["labels"] = {"gputile.io/pool": "blue"}
        rig = Rig(blue, node("n2").cards(4, size=16))
        set_quotas(rig, default=quota(Limit(model="*"), pools=("red",)))
        rig.arrive(tile(8))
        assert rig.filter().unresolvable == dict.fromkeys(("n1", "n2"), SENTENCE[NodeReason.QUOTA_POOL])
        set_quotas(rig, default=quota(Limit(model="*"), pools=("blue",)))
        assert rig.filter().names == ["n1"]

    def test_the_other_model_is_taken_when_one_is_used_up(self) -> None:
        rig = rig_with_quotas(default=quota(Limit(model="A100", cards=50), Limit(model="T4", cards=100)))
        for name in ("a", "b", "c"):
            rig.arrive(tile(8), name=name)
        assert {rig.filter("a").names[0], rig.filter("b").names[0]} == {"n1", "n2"}
        assert rig.filter("c").names == []

    def test_a_request_above_the_limit_is_unresolvable(self) -> None:
        rig = rig_with_quotas(default=cards(1))
        rig.arrive(tile(16, cards=2))
        assert rig.filter().unresolvable["n1"] == USED_UP

    def test_a_dry_run_gives_the_same_answer_also_for_nodes_that_do_not_exist_yet(self) -> None:
        rig = rig_with_quotas(default=cards(1))
        rig.arrive(tile(16), name="a")
        rig.filter("a")
        rig.arrive(tile(16), name="b")
        rig.api.nodes["new"] = node("new").cards(8, "A100", 16).manifest()
        answer = rig.filter_service.dry_run(rig.args("b", whole=True))
        assert answer.names == []
        assert {answer.failed["n1"], answer.unresolvable["new"]} == {USED_UP}
        set_quotas(rig, default=cards(2))
        assert rig.filter_service.dry_run(rig.args("b", whole=True)).names == ["n1", "new"]

    def test_prioritize_scores_only_nodes_that_the_quota_allows(self) -> None:
        rig = rig_with_quotas(default=cards(1, "T4"))
        rig.arrive(tile(8))
        assert rig.filter_service.prioritize(rig.args()) == {"n1": 0, "n2": 10}

    def test_containers_that_cost_more_apart_are_not_placed_beyond_the_quota(self) -> None:
        rig = rig_where_two_containers_need_two_cards()
        rig.arrive(tile(9, cores=5), tile(1, cores=55))
        assert rig.filter() == FilterAnswer(failed={"n1": USED_UP})
        assert rig.state() is None

    @pytest.mark.parametrize(
        ("number", "filtered", "want"),
        [
            pytest.param(2, ("a",), ["allowed", "objection"], id="a-pod-that-fits-is-checked-once-more-when-reserved"),
            pytest.param(0, ("a",), ["allowed"], id="a-rejection-asks-once"),
            pytest.param(0, ("a", "a"), ["allowed"] * 2, id="a-cached-rejection-asks-once"),
        ],
    )
    def test_a_filter_call_asks_quota_once(
        self, number: int, filtered: tuple[str, ...], want: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rig = rig_with_quotas(default=cards(number))
        rig.arrive(tile(16), name="a")
        asked: list[str] = []
        for query in ("allowed", "objection"):
            _record_calls(monkeypatch, query, asked)
        for name in filtered:
            rig.filter(name)
        assert asked == want

    def test_neither_are_those_of_a_pod_that_the_watch_has_not_shown(self) -> None:
        rig = rig_where_two_containers_need_two_cards()
        rig.arrive(tile(9, cores=5), tile(1, cores=55), seen=False)
        assert rig.filter() == FilterAnswer(failed={"n1": USED_UP})
        assert rig.state() is None


def rig_where_two_containers_need_two_cards() -> Rig:
    """Alone on a card both fit; here memory is free on one card and cores on another, so they cost two shares."""
    rig = Rig(node("n1").cards(2, size=16), policy="binpack")
    set_quotas(rig, **{"default": quota(Limit(model="A100", cards=70)), "team-b": quota(Limit(model="*"))})
    for index, limits in enumerate((tile(2, cores=50), tile(10, cores=10))):
        made = rig.api.add_pod(pod(limits, name=f"b{index}", namespace="team-b", uid=f"uid-b{index}",
                                   annotations={"gputile.io/uuid": f"GPU-n1-{index}"}))  # fmt: skip
        rig.catch_up()
        rig.filter_service.filter(FilterArgs(pod=made, names=["n1"]))
    return rig


def _record_calls(monkeypatch: pytest.MonkeyPatch, name: str, calls: list[str]) -> None:
    query = getattr(QuotaUsage, name)

    def recorded(*args: Any, **named: Any) -> Any:
        calls.append(name)
        return query(*args, **named)

    monkeypatch.setattr(QuotaUsage, name, recorded)


class TestBind:
    async def test_a_quota_exceeded_between_filter_and_bind_is_rejected_with_a_message(self) -> None:
        rig = rig_with_quotas(default=cards(2))
        for name in ("a", "b"):
            rig.arrive(tile(16), name=name)
            rig.filter(name)
        assert await rig.bind("a") == ""
        set_quotas(rig, default=cards(1))
        assert await rig.bind("b") == (
            "default holds 1 of 1 A100; this pod needs 1 more; wait until a pod of default ends, or raise its quota "
            f"in {HERE}"
        )
        assert rig.count("binds_total", outcome="conflict") == 1

    async def test_pods_without_reservations_cannot_exceed_the_quota_together(self) -> None:
        """kube-scheduler was faster than our watch: nothing was reserved, and both binds arrive at once."""
        rig = rig_with_quotas(default=cards(1))
        for name in ("a", "b"):
            rig.arrive(tile(16), name=name, seen=False)
            assert rig.filter(name).names == ["n1"]
        answers = await asyncio.gather(rig.bind("a"), rig.bind("b"))
        assert sorted(answers)[0] == ""
        assert sorted(answers)[1].startswith(
            "the pod no longer fits on node n1: it has GPUs for which the namespace's quota is used up"
        )
        assert len(rig.api.bindings) == 1

    async def test_a_rejected_bind_frees_its_quota_and_nudges_others(self) -> None:
        rig = rig_with_quotas(default=cards(1))
        rig.arrive(tile(16), name="a")
        rig.filter("a")
        rig.arrive(tile(16), name="b")
        assert rig.filter("b").names == []
        rig.api.script["bind"] = [refused(422)]
        assert "the server returned 422" in await rig.bind("a")
        rig.clock.now += 1.0
        await rounds(rig, 0.5)
        assert nudged(rig) == ["default/b"]
        assert rig.filter("b").names == ["n1"]

    async def test_a_restarted_process_counts_existing_pods(self) -> None:
        rig = rig_with_quotas(default=cards(1))
        rig.arrive(tile(16), name="a")
        assert await rig.bind("a", rig.filter("a").names[0]) == ""
        new_leader = Rig(*rig.api.nodes.values(), pods=[{**manifest} for manifest in rig.api.pods.values()])
        set_quotas(new_leader, default=cards(1))
        new_leader.arrive(tile(16), name="b")
        assert new_leader.filter("b").failed == {"n1": USED_UP}
        assert new_leader.filter("b").names == []


class TestPending:
    def full(self, **settings: Any) -> Rig:
        rig = rig_with_quotas(default=cards(1), **settings)
        rig.arrive(tile(16), name="old", annotations=_grant("old"), on="n1")
        rig.arrive(tile(16))
        assert rig.filter().names == []
        return rig

    async def test_the_event_of_a_pending_pod_names_the_usage_and_what_to_do(self) -> None:
        rig = self.full()
        await rounds(rig, 0.25)
        [(_, message)] = notes(rig, "web-0")
        used_up = "1 node(s) have GPUs for which the namespace's quota is used up"
        assert message.startswith(f"0/2 nodes are available: {used_up}, 1 node(s) have GPUs smaller than requested. ")
        assert "would fit: as it is, once default/old ends on n1" in message
        assert "default holds 1 of 1 A100; this pod needs 1 more; wait until a pod of default ends" in message
        assert HERE in message
        assert "add a node" not in message
        assert "on n2" not in message.partition("would fit")[2], "no suggestion names a model that the quota forbids"

    @pytest.mark.parametrize(
        ("limits", "changes"),
        [
            pytest.param(
                [Limit(model="A100", cards=100), Limit(model="T4", cards=100)],
                {"model T4, on n2", "as it is, once default/old ends on n1"},
                id="another-model-that-quota-leaves-is-suggested",
            ),
            pytest.param(
                [Limit(model="A100", cards=200), Limit(model="T4", cards=0)],
                {"as it is, once default/old ends on n1"},
                id="another-model-that-quota-forbids-is-not-suggested",
            ),
        ],
    )
    async def test_explain_suggests_what_the_event_suggests(self, limits: list[Limit], changes: set[str]) -> None:
        rig = rig_with_quotas(node("n1").cards(1, size=16), node("n2").cards(1, "T4", 16), default=quota(*limits))
        rig.arrive(tile(16), name="old", annotations=_grant("old"), on="n1")
        rig.arrive(tile(16), annotations={"gputile.io/model": "A100"})
        assert rig.filter().names == []
        await rounds(rig, 0.25)
        [(_, message)] = notes(rig, "web-0")
        in_event = {text.removeprefix("would fit: ") for text in message.split("; ") if text.startswith("would fit: ")}
        explained = explain_pod(msgspec.convert(rig.live(), PodWithConditions), rig.cluster_state, [], "binpack")
        assert in_event == {change.text for change in explained.changes} == changes

    async def test_equal_requests_of_two_namespaces_have_their_own_reasons(self) -> None:
        rig = self.full()
        set_quotas(rig, **{"default": cards(1), "team-b": cards(0)})
        other_filter(rig, "theirs")
        await rounds(rig, 0.25)
        assert "default holds 1 of 1" in notes(rig, "web-0")[0][1]
        assert "team-b holds 0 of 0" in notes(rig, "theirs")[0][1]

    async def test_a_cached_rejection_ends_when_quota_is_freed(self) -> None:
        rig = self.full()
        rig.filter()
        assert rig.count("cached_rejections_total") == 1
        gone(rig, "old")
        assert rig.filter().names == ["n1"]

    async def test_or_when_it_is_raised(self) -> None:
        rig = self.full()
        rig.filter()
        set_quotas(rig, default=cards(2))
        assert rig.filter().names == ["n1"]

    async def test_and_does_not_apply_to_other_namespaces(self) -> None:
        rig = self.full()
        assert other_filter(rig, "theirs").names == ["n1"]

    async def test_it_is_nudged_when_a_pod_of_its_own_namespace_ends(self) -> None:
        rig = self.full()
        rig.clock.now += 1.0
        gone(rig, "old")
        await rounds(rig, 0.5)
        assert nudged(rig) == ["default/web-0"]

    async def test_or_when_its_quota_is_raised(self) -> None:
        rig = self.full()
        rig.clock.now += 1.0
        await rounds(rig, 0.5)
        assert nudged(rig) == []
        set_quotas(rig, default=cards(2))
        await rounds(rig, 0.5)
        assert nudged(rig) == ["default/web-0"]

    async def test_but_not_when_others_leave(self) -> None:
        rig = self.full()
        rig.api.add_pod(pod(tile(16), name="theirs", namespace="team-b", uid="uid-theirs", on="n1",
                            annotations=_grant("theirs", 1)))  # fmt: skip
        rig.catch_up()
        rig.clock.now += 1.0
        rig.api.delete_pod("team-b/theirs")
        rig.catch_up()
        await rounds(rig, 0.5)
        assert nudged(rig) == []
        assert NUDGED not in rig.live()["metadata"]["annotations"]

    async def test_an_expired_reservation_frees_quota_too(self) -> None:
        rig = rig_with_quotas(default=cards(1))
        for name in ("a", "b"):
            rig.arrive(tile(16), name=name)
            rig.filter(name)
        assert rig.state("a") is AllocationState.RESERVED
        rig.clock.now += 3.0
        rig.apply(rig.ledger.handle(Tick(rig.clock())))
        await rounds(rig, 0.5)
        assert sorted(nudged(rig)) == ["default/b"]


def _grant(name: str, index: int = 0) -> dict[str, str]:
    grant = {
        "version": 1,
        "pod": f"uid-{name}",
        "node": "n1",
        "dialect": "gputile",
        "containers": [
            {"name": "c0", "tiles": [{"uuid": f"GPU-n1-{index}", "index": index, "memory": 16, "cores": 0}]}
        ],
    }
    return {"gputile.io/grant": msgspec.json.encode(grant).decode()}


async def theirs(rig: Rig, name: str, size: int, priority: int) -> None:
    """A pod of another namespace that runs."""
    made = rig.api.add_pod(prioritized_pod(name, tile(size), priority, namespace="team-b"))
    rig.catch_up()
    [on, *_] = rig.filter_service.filter(FilterArgs(pod=made, names=list(rig.api.nodes))).names
    args = msgspec.structs.replace(bind_args(name, on), namespace="team-b")
    assert await rig.binder.bind(args) == ""
    rig.catch_up()


class TestPreemption:
    async def test_a_pod_of_its_namespace_is_evicted_although_cards_are_free(self) -> None:
        rig = rig_with_quotas(node("n1").cards(2, size=16), node("n2").cards(2, size=16), default=cards(1))
        await settle(rig, "mine", 16, LOW)
        await theirs(rig, "theirs", 16, LOW)
        await planned(rig, size=16)
        assert rig.api.evicted == ["default/mine"]
        assert rig.ledger.nominations() != []
        arrive(rig, "late", 16, LOW)
        gone(rig, "mine")
        assert rig.filter("late").names == [], "the quota is kept for the pod too"
        assert rig.filter("wanted").names == ["n1"]
        assert await rig.bind("wanted") == ""
        rig.catch_up()
        rig.ledger.check()

    async def test_no_pod_of_another_namespace_is_evicted_when_the_quota_is_used_up(self) -> None:
        rig = rig_with_quotas(node("n1").cards(2, size=16), default=cards(1))
        set_quotas(rig, **{"default": cards(1), "team-b": cards(9)})
        await settle(rig, "mine", 16, HIGH)
        await theirs(rig, "theirs", 16, LOW)
        await planned(rig, size=16)
        assert rig.api.evicted == []
        assert ask(rig, "wanted", n1=OfferedVictims(("uid-theirs",))) == {}

    async def test_the_preempt_verb_names_pods_of_its_namespace_and_pods_in_the_way(self) -> None:
        """One card for quota, two to fit: the pod of its namespace frees quota, the other pod the second card."""
        rig = rig_with_quotas(node("n1").cards(3, size=16), default=cards(2), preempt=PreemptSettings(own=False))
        await settle(rig, "mine", 16, LOW)
        await theirs(rig, "rock", 16, HIGH)
        await theirs(rig, "theirs", 16, LOW)
        rig.api.add_pod(prioritized_pod("wanted", tile(16, cards=2), HIGH))
        rig.catch_up()
        assert rig.filter("wanted").failed == {"n1": USED_UP}
        answer = ask(rig, "wanted", n1=OfferedVictims(("uid-theirs",)))
        assert answer == {"n1": OfferedVictims(("uid-mine", "uid-theirs"))}

    async def test_terminating_pods_on_any_node_count_as_gone(self) -> None:
        rig = rig_with_quotas(node("n1").card(size=16), node("n2").card(size=16), default=cards(2))
        await settle(rig, "going", 16, LOW)
        await settle(rig, "mine", 16, LOW)
        metadata = {**rig.live("going")["metadata"], "deletionTimestamp": "2023-11-14T22:13:50Z"}
        rig.change("going", metadata=metadata)
        rig.catch_up()
        await planned(rig, size=16)
        assert rig.api.evicted == []

    async def test_of_its_namespace_the_pod_of_lowest_priority_is_evicted(self) -> None:
        rig = rig_with_quotas(node("n1").cards(4, size=16), default=cards(2))
        await settle(rig, "middle", 16, MIDDLE)
        await settle(rig, "low", 16, LOW)
        await planned(rig, size=16)
        assert rig.api.evicted == ["default/low"]


class TestBoundByAnotherScheduler:
    def bound(self, rig: Rig, **status: Any) -> Json:
        made = pod(tile(16), name="around", uid="uid-around", on="n1")
        rig.api.add_pod({**made, "status": status})
        rig.catch_up()
        return made

    async def test_a_pod_bound_by_another_scheduler_gets_no_card_beyond_its_quota(self) -> None:
        rig = rig_with_quotas(default=cards(0))
        self.bound(rig, phase="Pending", startTime="2023-11-14T22:13:50Z")
        await rig.reconciler.round()
        assert rig.written("around") is None
        [(reason, why)] = notes(rig, "around")
        assert reason == "NoFittingGPU"
        assert why.startswith("bound to n1 by another scheduler, beyond its quota: default holds 0 of 0 A100; ")
        set_quotas(rig, default=cards(1))
        await rig.reconciler.round()
        assert rig.written("around") is not None

    async def test_a_running_pod_is_in_the_ledger_all_the_same(self) -> None:
        rig = rig_with_quotas(default=cards(0))
        self.bound(rig, phase="Running")
        await rig.reconciler.round()
        assert rig.written("around") is not None, "else its card would be allocated again"
        assert rig.ledger.quota_usage.held("default")["A100"].cards == 100


@pytest.mark.parametrize("seed", range(3))
async def test_no_order_of_filters_and_binds_exceeds_the_quota(seed: int) -> None:
    """Forty pods of which the quota allows ten; filters and binds in any order, some answers lost, some pods ending."""
    rig = rig_with_quotas(node("n1").cards(8, size=16), node("n2").cards(8, size=16), default=cards(5))
    names = [f"p{n}" for n in range(40)]
    for name in names:
        rig.arrive(tile(8), name=name, seen=hash((seed, name)) % 7 != 0)
    for turn in range(3):
        chosen = {name: nodes for name in names if (nodes := rig.filter(name).names)}
        await asyncio.gather(*(rig.bind(name, on[0]) for name, on in chosen.items()))
        rig.catch_up()
        held = [manifest for manifest in rig.api.pods.values() if manifest["spec"].get("nodeName")]
        assert len(held) <= 10
        assert rig.ledger.quota_usage.held("default")["A100"].cards == 50 * len(held)
        for manifest in held[: turn + 1]:
            gone(rig, manifest["metadata"]["name"])
            names.remove(manifest["metadata"]["name"])
        rig.ledger.check()
