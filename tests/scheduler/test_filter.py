"""The answers of filter, filter-dryrun, prioritize and preempt, and the reservations that filter makes."""

from typing import Any

import msgspec
import pytest

from gputile.dialects.kube_objects import NodeObject, Pod
from gputile.kube.api import Json
from gputile.ledger.events import Freed
from gputile.ledger.ledger import AllocationState
from gputile.model.refusals import SENTENCE, NodeReason, about_one_node
from gputile.scheduler.extender_api import FilterAnswer, OfferedVictims, PreemptArgs, read_filter
from gputile.scheduler.settings import FilterSettings
from gputile.testing.builders import NodeBuilder, node, pod
from tests.dialects.shortcuts import raw_node
from tests.scheduler.rig import GPU, MEMORY, Rig, tile

UNKNOWN = SENTENCE[NodeReason.UNKNOWN_NODE]
BUSY, OTHER = SENTENCE[NodeReason.AGENT_BUSY], SENTENCE[NodeReason.OTHER_AGENT]


def twins(count: int, **rest: Any) -> list[NodeBuilder]:
    return [node(f"n{n + 1}").cards(2, size=16, **rest) for n in range(count)]


def gpushare_node(name: str, cards: int = 2, size: int = 16) -> Json:
    """A node with gpushare's agent, which guesses the pod of an allocation."""
    manifest = raw_node(
        {"aliyun.com/gpu-mem": cards * size, "aliyun.com/gpu-count": cards, "cpu": "64", "memory": "64Gi"}
    )
    manifest["metadata"]["name"] = name
    return manifest


class TestPodsThatAreNotPlaced:
    @pytest.mark.parametrize("whole", [False, True], ids=["by-name", "as-whole-nodes"])
    def test_a_pod_without_gpus_passes_with_all_nodes_also_unknown_ones(self, whole: bool) -> None:
        rig = Rig(*twins(2))
        rig.api.add_node(node("stranger").manifest())
        rig.arrive({"cpu": 1})
        args = rig.args(whole=whole)
        assert rig.filter_service.filter(args) == FilterAnswer(names=["n1", "n2", "stranger"])
        assert rig.filter_service.dry_run(args) == FilterAnswer(names=["n1", "n2", "stranger"])
        assert rig.state() is None

    def test_an_invalid_request_is_rejected_on_every_node_with_its_reason(self) -> None:
        rig = Rig(*twins(2))
        rig.arrive({MEMORY: 8})
        answer = rig.filter()
        assert set(answer.unresolvable) == {"n1", "n2"}
        (sentence,) = set(answer.unresolvable.values())
        assert f"add `{GPU}: 1`" in sentence
        assert (answer.names, answer.failed, answer.error) == ([], {}, "")
        assert rig.count("bad_requests_total", code="NoDeviceResource") == 1


class TestTheBestAndItsTies:
    def test_equally_good_nodes_are_all_returned(self) -> None:
        rig = Rig(*twins(3), node("small").card(size=4))
        rig.arrive(tile(8))
        assert rig.filter().names == ["n1", "n2", "n3"]
        assert rig.filter().failed == rig.filter().unresolvable == {}, "no reasons while something fits"

    @pytest.mark.parametrize(("keep", "want"), [(1, ["n1"]), (2, ["n1", "n2"]), (16, ["n1", "n2", "n3"])])
    def test_at_most_filter_keep_nodes_are_returned(self, keep: int, want: list[str]) -> None:
        rig = Rig(*twins(3), filter=FilterSettings(keep=keep))
        rig.arrive(tile(8))
        assert rig.filter().names == want

    def test_a_worse_node_is_not_returned_unless_slack_allows_it(self) -> None:
        for slack, want in ((0.0, ["n2"]), (1e9, ["n2", "n1", "n3"])):
            rig = Rig(*twins(3), filter=FilterSettings(slack=slack))
            rig.arrive(tile(8), name="old")
            rig.filter("old", ["n2"])
            rig.cluster_state.granted(rig.arrive(tile(8), name="old", on="n2"), _granted(rig, "old"))
            rig.arrive(tile(8))
            assert rig.filter().names == want

    def test_only_candidate_nodes_are_returned(self) -> None:
        rig = Rig(*twins(3))
        rig.arrive(tile(8))
        assert rig.filter(nodes=["n3"]).names == ["n3"]

    def test_the_policy_of_the_settings_decides(self) -> None:
        for policy, want in (("binpack", "n1"), ("spread", "n2")):
            rig = Rig(*twins(2), policy=policy)
            rig.arrive(tile(8), name="old")
            rig.filter("old", ["n1"])
            rig.arrive(tile(8))
            assert rig.filter().names == [want]

    def test_no_candidate_nodes_give_no_nodes(self) -> None:
        rig = Rig(*twins(1))
        rig.arrive(tile(8))
        assert rig.filter(nodes=[]) == FilterAnswer()


def _granted(rig: Rig, name: str) -> Any:
    entry = rig.ledger.entry(f"uid-{name}")
    assert entry is not None
    return entry.allocation.grant


class TestReservations:
    def test_the_first_pod_is_reserved_on_the_best_node(self) -> None:
        rig = Rig(*twins(2))
        rig.arrive(tile(8))
        rig.filter()
        assert (rig.state(), rig.node_of(), rig.free("n1")) == (AllocationState.RESERVED, "n1", [8, 16])

    def test_while_another_reservation_is_open_one_node_is_returned(self) -> None:
        rig = Rig(*twins(3), policy="spread")
        rig.arrive(tile(8), name="a")
        rig.arrive(tile(8), name="b")
        assert len(rig.filter("a").names) == 3
        assert rig.filter("b").names == [rig.node_of("b")]
        assert rig.node_of("b") != rig.node_of("a")

    def test_a_pod_that_our_watch_has_not_shown_is_not_reserved(self) -> None:
        rig = Rig(*twins(2))
        rig.arrive(tile(8), seen=False)
        assert rig.filter().names == ["n1", "n2"]
        assert rig.state() is None
        assert len(rig.ledger) == 0

    def test_two_pods_do_not_get_the_same_last_tile(self) -> None:
        rig = Rig(node("n1").card(size=16))
        rig.arrive(tile(10), name="a")
        rig.arrive(tile(10), name="b")
        assert rig.filter("a").names == ["n1"]
        assert rig.filter("b").failed == {"n1": SENTENCE[NodeReason.MEMORY]}

    def test_a_new_filter_call_unreserves_the_pod_and_ranks_its_node_last(self) -> None:
        rig = Rig(*twins(2))
        rig.arrive(tile(8))
        assert rig.filter().names == ["n1", "n2"]
        assert rig.filter().names == ["n2"], "the attempt on n1 failed"
        assert rig.free("n1") == [16, 16]
        assert rig.count("reservations_total", outcome="replaced") == 1
        assert rig.filter().names == ["n1", "n2"], "nothing else is left"
        assert rig.filter(nodes=["n1"]).names == ["n1"]

    def test_a_deprioritized_node_is_forgotten_when_the_pod_is_no_longer_pending(self) -> None:
        rig = Rig(*twins(2))
        rig.arrive(tile(8))
        rig.availability.deprioritize("uid-web-0", "n1")
        rig.availability.prune()
        assert rig.filter().names == ["n2"]
        rig.api.delete_pod("default/web-0")
        rig.catch_up()
        rig.availability.prune()
        rig.arrive(tile(8))
        assert rig.filter().names == ["n1", "n2"]

    def test_its_own_reservation_does_not_count_against_the_pod(self) -> None:
        rig = Rig(node("n1").card(size=16))
        rig.arrive(tile(16))
        assert [rig.filter().names for _ in range(3)] == [["n1"]] * 3
        assert rig.free() == [0]

    def test_deletion_of_the_pod_unreserves_it(self) -> None:
        rig = Rig(*twins(1))
        rig.arrive(tile(8))
        rig.filter()
        rig.api.delete_pod("default/web-0")
        rig.catch_up()
        assert rig.free() == [16, 16]


class TestABindInFlight:
    async def test_only_the_node_of_the_bind_is_returned(self) -> None:
        rig = Rig(*twins(2))
        rig.arrive(tile(8))
        await rig.bind(node="n2")
        assert rig.state() is AllocationState.ASSUMED
        assert rig.filter().names == ["n2"]
        assert rig.state() is AllocationState.ASSUMED

    async def test_if_that_node_is_no_candidate_the_pod_must_be_retried(self) -> None:
        rig = Rig(*twins(2))
        rig.arrive(tile(8))
        await rig.bind(node="n2")
        answer = rig.filter(nodes=["n1"])
        assert answer.error == "the pod is being bound to node n2; try again"
        assert answer.names == []


class TestRejections:
    def test_resolvable_and_unresolvable_refusals_are_separated(self) -> None:
        rig = Rig(
            node("full").card(size=16),
            node("small").card(size=4),
            node("bare"),
            node("wrong").card("T4", 16),
            node("sick").card(size=16, healthy=False),
        )
        rig.arrive(tile(16), name="old")
        rig.filter("old", ["full"])
        rig.arrive(tile(10), annotations={"gputile.io/model": "A100"})
        answer = rig.filter(nodes=[*rig.api.nodes, "stranger"])
        assert answer.failed == {"full": SENTENCE[NodeReason.MEMORY]}
        assert answer.unresolvable == {
            "small": SENTENCE[NodeReason.TOO_SMALL],
            "bare": SENTENCE[NodeReason.NO_CARDS],
            "wrong": SENTENCE[NodeReason.MODEL],
            "sick": SENTENCE[NodeReason.UNHEALTHY],
            "stranger": UNKNOWN,
        }
        assert answer.names == []
        assert rig.count("refusals_total", code="InsufficientCardMemory") == 1
        assert rig.count("refusals_total") == 6

    def test_a_rejection_is_reported_to_on_unschedulable(self) -> None:
        rig = Rig(node("n1").card(size=4))
        rig.arrive(tile(8))
        rig.filter()
        rig.arrive({MEMORY: 8}, name="bad")
        rig.filter("bad")
        assert [(pod.pod.name, pod.names) for pod in rig.unschedulable] == [("web-0", ["n1"]), ("bad", ["n1"])]


class TestTheRequest:
    def test_the_pod_that_was_sent_counts_if_it_is_newer_than_what_our_watch_showed(self) -> None:
        rig = Rig(node("n1").card(size=16))
        rig.arrive(tile(32))
        rig.api.pods["default/web-0"] = pod(tile(8), uid="uid-web-0")
        assert rig.filter().names == ["n1"]

    def test_also_when_only_a_label_changed(self) -> None:
        """gpushare's `gpu-count` is a label."""
        rig = Rig(gpushare_node("n1", cards=2, size=8))
        rig.arrive({"aliyun.com/gpu-mem": 16})
        assert rig.filter().names == []
        rig.api.pods["default/web-0"]["metadata"]["labels"] = {"aliyun.com/gpu-count": "2"}
        assert rig.filter().names == ["n1"]


class TestOtherAgents:
    def test_one_pod_at_a_time_until_the_kubelet_has_admitted_it(self) -> None:
        rig = Rig(gpushare_node("n1"))
        for name in ("a", "b"):
            rig.arrive({"aliyun.com/gpu-mem": 4}, name=name)
        assert rig.filter("a").names == ["n1"]
        assert rig.filter("b").unresolvable == {"n1": BUSY}, "a is reserved there"

    async def test_a_pod_pending_for_that_is_nudged_after_admission(self) -> None:
        """kube-scheduler itself retries no pod because another pod has started."""
        rig = Rig(gpushare_node("n1"))
        rig.arrive({"aliyun.com/gpu-mem": 4}, name="a")
        assert await rig.bind("a") == ""
        rig.catch_up()
        rig.change("a", status={"phase": "Running"})
        assert Freed("n1") in rig.catch_up()
        rig.change("a", status={"phase": "Running", "message": "still"})
        assert Freed("n1") not in rig.catch_up()

    async def test_also_between_bind_and_start(self) -> None:
        rig = Rig(gpushare_node("n1"))
        for name in ("a", "b"):
            rig.arrive({"aliyun.com/gpu-mem": 4}, name=name)
        assert await rig.bind("a") == ""
        assert rig.filter("b").unresolvable == {"n1": BUSY}, "a is assumed"
        rig.catch_up()
        assert rig.state("a") is AllocationState.CONFIRMED
        assert rig.filter("b").unresolvable == {"n1": BUSY}, "a is bound and not admitted"
        assert await rig.bind("b") == f"node n1 {about_one_node(NodeReason.AGENT_BUSY)}"
        assert rig.count("binds_total", outcome="conflict") == 1
        rig.change("a", status={"phase": "Pending", "startTime": "2026-01-01T00:00:00Z"})
        rig.catch_up()
        assert rig.filter("b").names == ["n1"]
        assert await rig.bind("b") == ""

    def test_other_nodes_stay_available(self) -> None:
        rig = Rig(gpushare_node("n1"), node("n2").cards(2, size=16))
        for name in ("a", "b"):
            rig.arrive({"aliyun.com/gpu-mem": 4}, name=name)
        rig.filter("a", ["n1"])
        rig.api.nodes["n2"] = node("n2").cards(2, size=16384).manifest()
        rig.cluster_state.nodes_listed(_nodes(rig))
        assert rig.filter("b").names == ["n2"]

    def test_the_setting_can_reject_every_pod_there(self) -> None:
        rig = Rig(gpushare_node("n1"), node("n2").card(size=16384), other_agents="refuse")
        rig.arrive({"aliyun.com/gpu-mem": 4})
        assert rig.filter().names == ["n2"]
        assert rig.filter(nodes=["n1"]).unresolvable == {"n1": OTHER}
        assert rig.filter_service.dry_run(rig.args()).unresolvable == {"n1": OTHER}

    async def test_bind_rejects_too(self) -> None:
        rig = Rig(gpushare_node("n1"), other_agents="refuse")
        rig.arrive({"aliyun.com/gpu-mem": 4})
        assert await rig.bind() == f"node n1 {about_one_node(NodeReason.OTHER_AGENT)}"
        assert rig.api.bindings == []

    def test_a_dry_run_on_a_future_node_rejects_as_filter_would(self) -> None:
        rig = Rig(other_agents="refuse")
        rig.api.add_node(gpushare_node("n1"))
        rig.arrive({"aliyun.com/gpu-mem": 4}, seen=False)
        assert rig.filter_service.dry_run(rig.args(whole=True)).unresolvable == {"n1": OTHER}


def _nodes(rig: Rig) -> list[NodeObject]:
    return [msgspec.convert(item, NodeObject) for item in rig.api.nodes.values()]


class TestDryRun:
    def test_all_feasible_nodes_are_returned_and_the_others_have_reasons(self) -> None:
        rig = Rig(*twins(3), node("small").card(size=4), node("full").card(size=16), filter=FilterSettings(keep=1))
        rig.arrive(tile(16), name="old")
        rig.filter("old", ["full"])
        rig.arrive(tile(8))
        answer = rig.filter_service.dry_run(rig.args())
        assert answer.names == ["n1", "n2", "n3"]
        assert answer.failed == {"full": SENTENCE[NodeReason.MEMORY]}
        assert answer.unresolvable == {"small": SENTENCE[NodeReason.TOO_SMALL]}

    @pytest.mark.parametrize("limits", [tile(8), tile(32), {MEMORY: 1}], ids=["fits", "does-not", "cannot-be-read"])
    def test_it_has_no_side_effects(self, limits: Json) -> None:
        rig = Rig(*twins(2))
        rig.arrive(limits)
        before, scraped = rig.ledger.fleet.view("n1"), rig.metrics.text()
        rig.filter_service.dry_run(rig.args())
        assert rig.unschedulable == []
        assert rig.state() is None
        assert rig.ledger.fleet.view("n1") == before
        assert rig.metrics.text() == scraped
        rig.ledger.check()

    def test_it_keeps_the_pods_own_reservation(self) -> None:
        rig = Rig(*twins(2))
        rig.arrive(tile(16))
        rig.filter()
        assert rig.filter_service.dry_run(rig.args()).names == ["n1", "n2"]
        assert (rig.state(), rig.free("n1")) == (AllocationState.RESERVED, [0, 16])
        rig.ledger.check()

    def test_a_node_object_that_is_not_in_the_cluster_counts_as_an_empty_node(self) -> None:
        rig = Rig(*twins(1))
        rig.arrive(tile(30))
        rig.api.add_node(node("big").card(size=32).manifest())
        rig.api.add_node(node("small").card(size=4).manifest())
        answer = rig.filter_service.dry_run(rig.args(whole=True))
        assert answer.names == ["big"]
        assert set(answer.unresolvable) == {"n1", "small"}
        assert "big" not in rig.ledger.fleet

    def test_the_name_alone_of_such_a_node_is_unknown(self) -> None:
        rig = Rig(*twins(1))
        rig.arrive(tile(8))
        assert rig.filter_service.dry_run(rig.args(nodes=["n1", "new"])).unresolvable == {"new": UNKNOWN}

    def test_an_undecodable_node_object_is_unknown(self) -> None:
        rig = Rig(*twins(1))
        rig.arrive(tile(8))
        rig.api.nodes["odd"] = {"metadata": {"name": "odd", "annotations": 7}}
        assert rig.filter_service.dry_run(rig.args(whole=True)).unresolvable == {"odd": UNKNOWN}


class TestPrioritize:
    def test_the_best_is_10_the_worst_that_fits_0_and_the_rest_0(self) -> None:
        rig = Rig(*twins(3), node("small").card(size=4))
        for name, where, size in (("a", "n2", 16), ("b", "n3", 8)):
            rig.arrive(tile(size), name=name)
            rig.filter(name, [where])
        rig.arrive(tile(8))
        scores = rig.filter_service.prioritize(rig.args(nodes=["small", "n1", "n2", "n3", "stranger"]))
        assert list(scores) == ["small", "n1", "n2", "n3", "stranger"], "in the order of the candidates"
        assert (scores["n2"], scores["n1"], scores["small"], scores["stranger"]) == (10, 0, 0, 0)
        assert 0 < scores["n3"] < 10

    @pytest.mark.parametrize(
        ("limits", "want"),
        [
            pytest.param(tile(8), {"n1": 10, "n2": 10}, id="equally-good-nodes-are-all-10"),
            pytest.param(tile(32), {"n1": 0, "n2": 0}, id="nothing-fits"),
            pytest.param({"cpu": 1}, {"n1": 0, "n2": 0}, id="a-pod-without-gpus"),
            pytest.param({MEMORY: 1}, {"n1": 0, "n2": 0}, id="a-pod-with-an-invalid-request"),
        ],
    )
    def test_edges(self, limits: Json, want: dict[str, int]) -> None:
        rig = Rig(*twins(2))
        rig.arrive(limits)
        assert rig.filter_service.prioritize(rig.args()) == want
        assert rig.state() is None


class TestPreempt:
    def rig(self) -> Rig:
        """One node of two cards: on the first a pod of priority 5, on the second two small ones of 1."""
        rig = Rig(node("n1").cards(2, size=16), node("bare"))
        for name, size, priority in (("big", 16, 5), ("s1", 8, 1), ("s2", 8, 1)):
            self.arrive(rig, tile(size), name=name, priority=priority)
            rig.filter(name, ["n1"])
            entry = rig.ledger.entry(f"uid-{name}")
            assert entry is not None
            assert entry.allocation.grant is not None
            bound = pod(tile(size), name=name, uid=f"uid-{name}", on="n1")
            bound["spec"]["priority"] = priority
            rig.cluster_state.granted(rig.api.add_pod(bound), entry.allocation.grant)
        return rig

    @staticmethod
    def arrive(rig: Rig, limits: Json, name: str, priority: int) -> Pod:
        manifest = pod(limits, name=name, uid=f"uid-{name}")
        manifest["spec"]["priority"] = priority
        added = rig.api.add_pod(manifest)
        rig.catch_up()
        return added

    def preempt(self, rig: Rig, limits: Json, priority: int, **offers: OfferedVictims) -> dict[str, OfferedVictims]:
        preemptor = self.arrive(rig, limits, "new", priority)
        return rig.preemptor.answer(PreemptArgs(pod=preemptor, offers=offers))

    def test_the_fewest_pods_of_lowest_priority_that_free_enough_are_named(self) -> None:
        """kube-scheduler offers the wrong victim, because it only knows sums per node."""
        answer = self.preempt(self.rig(), tile(8), 9, n1=OfferedVictims(("uid-big",), 3))
        assert answer == {"n1": OfferedVictims(("uid-s1",), 3)} or answer == {"n1": OfferedVictims(("uid-s2",), 3)}

    def test_pods_that_were_not_offered_may_be_named(self) -> None:
        answer = self.preempt(self.rig(), tile(16), 3, n1=OfferedVictims(("uid-s1",)))
        assert answer == {"n1": OfferedVictims(("uid-s1", "uid-s2"))}

    @pytest.mark.parametrize(
        ("limits", "priority", "node_name"),
        [
            pytest.param(tile(16), 1, "n1", id="no-pod-there-has-lower-priority"),
            pytest.param(tile(32), 9, "n1", id="no-card-is-large-enough"),
            pytest.param(tile(8), 9, "bare", id="no-card-at-all"),
            pytest.param(tile(8), 9, "stranger", id="an-unknown-node"),
            pytest.param({MEMORY: 8}, 9, "n1", id="a-pod-with-an-invalid-request"),
        ],
    )
    def test_no_node_where_eviction_does_not_help(self, limits: Json, priority: int, node_name: str) -> None:
        assert self.preempt(self.rig(), limits, priority, **{node_name: OfferedVictims(("uid-s1",))}) == {}

    def test_for_a_pod_without_gpus_the_offer_is_returned(self) -> None:
        offers = {"n1": OfferedVictims(("uid-s1",), 1), "stranger": OfferedVictims(("x",))}
        assert self.preempt(self.rig(), {"cpu": 1}, 9, **offers) == offers

    def test_where_the_cards_suffice_the_offer_is_returned(self) -> None:
        rig = Rig(node("n1").card(size=16))
        assert self.preempt(rig, tile(8), 9, n1=OfferedVictims(("uid-cpu-hog",))) == {
            "n1": OfferedVictims(("uid-cpu-hog",))
        }

    def test_not_on_a_node_whose_agent_is_busy(self) -> None:
        rig = Rig(gpushare_node("n1"))
        rig.arrive({"aliyun.com/gpu-mem": 16}, name="a")
        rig.filter("a")
        assert self.preempt(rig, {"aliyun.com/gpu-mem": 16}, 9, n1=OfferedVictims(("x",))) == {}

    def test_a_pod_that_is_only_reserved_is_no_victim(self) -> None:
        """kube-scheduler fails the whole preemption when a victim is not on the node."""
        rig = Rig(node("n1").card(size=16))
        self.arrive(rig, tile(16), "reserved", 1)
        rig.filter("reserved")
        answer = self.preempt(rig, tile(16), 9, n1=OfferedVictims(("uid-x",)))
        assert "uid-reserved" not in answer.get("n1", OfferedVictims(())).pods


def test_the_same_request_gets_the_same_answer() -> None:
    answers = []
    for _ in range(2):
        rig = Rig(*twins(8), policy="random")
        rig.arrive(tile(8))
        answers.append(rig.filter().names)
    assert answers[0] == answers[1]


def test_a_pod_without_a_uid_is_answered_and_not_reserved() -> None:
    rig = Rig(*twins(2))
    rig.arrive(tile(8))
    nameless = read_filter(rig.body().replace(b'"uid-web-0"', b"null"))
    assert rig.filter_service.filter(nameless).names == ["n1", "n2"]
    assert len(rig.ledger) == 0
