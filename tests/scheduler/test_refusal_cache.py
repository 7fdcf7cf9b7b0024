"""A repeated rejection is answered from the cache, and is the same as a new decision.

Seen to fail, by breaking the code on purpose: `FreeArrays` without counting the gain of a change; `RefusalCache.get`
without its rule about containers that do not fit together; `_node_set` as the number of nodes; `_is_cacheable` of the
`FilterService` ignoring nominations, or blocked nodes; `RefusalCache.put` without a limit; requests without what quota
leaves.
"""

import asyncio
import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputile.cli.explain_model import explain_pod
from gputile.cli.pod_conditions import PodWithConditions
from gputile.dialects.allocations import allocation_of
from gputile.engine.placement.place import RULES_UNDER_QUOTA, Placement, candidates, place, unit_miss
from gputile.engine.placement.units import split
from gputile.kube.api import Json
from gputile.ledger.events import NodeSeen, Nominated, QuotasSet, Reserved, Tick
from gputile.model.allocations import Allocation
from gputile.model.cards import NodeView
from gputile.model.refusals import SENTENCE, NodeReason
from gputile.model.requests import PodRequest
from gputile.quota.limits import Limit, Quota
from gputile.scheduler.extender.filter import FilterService
from gputile.scheduler.extender.refusal_cache import MOST
from gputile.scheduler.extender_api import FilterAnswer, read_filter, write_filter
from gputile.scheduler.pending.pending_pods import NUDGE_INTERVAL
from gputile.scheduler.state.cluster_state import ClusterState
from gputile.scheduler.state.unschedulable import UnschedulablePod
from gputile.telemetry.metrics import Metrics
from gputile.testing.builders import node
from tests.effort import examples
from tests.engine.test_overlay import facts
from tests.scheduler.rig import Rig, tile

SIZE = 8
WISHES: list[tuple[Json, ...]] = [
    (tile(5),),
    (tile(7, cores=60),),
    (tile(3, cards=2),),
    ({"gputile.io/gpu": 1},),
    (tile(4), tile(6)),
    (tile(2), tile(4), tile(6)),
]
QUOTAS = [
    None,
    Quota((Limit(model="*", cards=100),)),
    Quota((Limit(model="A100", cards=250, memory=20),)),
    Quota((Limit(model="T4"),)),
]


def cached(rig: Rig) -> float:
    return rig.count("cached_rejections_total")


def nomination(rig: Rig, name: str) -> None:
    """Nominate a pending pod on n1."""
    pod = rig.cluster_state.pending[f"uid-{name}"].pod
    request = rig.requests.of(pod)
    assert isinstance(request, PodRequest)
    placement = rig.ledger.fleet.place(request, "n1")
    assert isinstance(placement, Placement)
    rig.ledger.handle(Nominated(allocation_of(pod, request, placement.grant(pod.uid, request)), 2000.0))


class TestARepeatedRejection:
    def test_is_not_computed_again(self) -> None:
        rig = full()
        first = rig.filter("late")
        again = rig.filter("late")
        assert (first.names, first.failed) == ([], dict.fromkeys(["n1", "n2"], SENTENCE[NodeReason.MEMORY]))
        assert (again.failed, again.unresolvable) == (first.failed, first.unresolvable)
        assert cached(rig) == 1

    def test_is_encoded_once_and_is_the_same(self) -> None:
        rig = full()
        args = rig.args("late")
        first = rig.filter_service.filter(args)
        again = rig.filter_service.filter(args)
        assert (first.encoded, again.encoded) == (b"", write_filter(first, args))

    def test_answers_every_pod_with_the_same_request_whatever_the_order_of_the_nodes(self) -> None:
        rig = full()
        rig.arrive(tile(5), name="later")
        first = rig.filter("late", ["n1", "n2"])
        assert rig.filter("later", ["n2", "n1"]).failed == first.failed
        assert cached(rig) == 1

    def test_is_counted_and_reported_like_the_first(self) -> None:
        rig = full()
        rig.unschedulable.clear()
        rig.filter("late")
        rig.filter("late")
        assert [pod.pod.name for pod in rig.unschedulable] == ["late", "late"]
        assert rig.count("refusals_total", code="InsufficientCardMemory") == 4

    def test_does_not_answer_for_other_nodes(self) -> None:
        rig = full()
        rig.filter("late")
        assert list(rig.filter("late", ["n2"]).failed) == ["n2"]
        assert cached(rig) == 0

    def test_with_a_node_named_twice_is_computed(self) -> None:
        rig = full()
        for _ in range(2):
            rig.filter("late", ["n1", "n1"])
        assert cached(rig) == 0

    def test_for_an_unknown_node_is_valid_until_the_node_is_known(self) -> None:
        rig = full()
        for _ in range(2):
            assert rig.filter("late", ["n1", "n9"]).unresolvable == {"n9": SENTENCE[NodeReason.UNKNOWN_NODE]}
        assert cached(rig) == 1
        rig.ledger.handle(NodeSeen(node("n9").cards(1, size=SIZE).node()))
        assert rig.filter("late", ["n1", "n9"]).names == ["n9"]

    def test_for_node_objects_is_computed_and_answered_with_objects(self) -> None:
        rig = full()
        rig.filter("late")
        args = rig.args("late", whole=True)
        for _ in range(2):
            assert b'"items":[]' in write_filter(rig.filter_service.filter(args), args)
        assert cached(rig) == 0

    def test_with_a_blocked_node_is_computed(self) -> None:
        """A node with a busy agent is refused for that reason, which free capacity does not change."""
        rig = full()
        rig.filter("late")
        rig.cluster_state.guessing.add("n1")
        rig.filter_service._settings = type(rig.settings)(policy="binpack", other_agents="refuse")
        assert rig.filter("late").unresolvable.keys() == {"n1"}
        assert cached(rig) == 0

    def test_for_a_pod_with_a_nomination_is_computed(self) -> None:
        """The nominated capacity is its own, so the answer for other pods does not apply."""
        rig = Rig(node("n1").cards(1, size=SIZE))
        for name in ("mine", "other"):
            rig.arrive(tile(5), name=name)
        nomination(rig, "mine")
        assert rig.filter("other").names == []
        assert rig.filter("mine").names == ["n1"]

    def test_for_a_pod_that_may_use_the_nomination_of_another_is_computed(self) -> None:
        rig = Rig(node("n1").cards(1, size=SIZE))
        for name in ("mine", "equal", "king"):
            rig.arrive(tile(5), name=name)
        rig.change("king", spec={"priority": 9})
        rig.catch_up()
        nomination(rig, "mine")
        assert rig.filter("equal").names == []
        assert rig.filter("king").names == ["n1"]

    def test_because_containers_do_not_fit_together_is_valid_only_while_nothing_changes(self) -> None:
        """With less free capacity a container does not even fit alone."""
        rig = Rig(node("n1").cards(1, size=SIZE))
        rig.arrive(tile(3), tile(5), name="late")
        bind_pod(rig, "first", tile(2))
        for _ in range(2):
            assert rig.filter("late").failed == {"n1": SENTENCE[NodeReason.TOGETHER]}
        assert cached(rig) == 1
        bind_pod(rig, "second", tile(2))
        assert rig.filter("late").failed == {"n1": SENTENCE[NodeReason.MEMORY]}

    def test_does_not_fill_memory(self) -> None:
        rig = full()
        for number in range(2 * MOST + 1):
            rig.arrive(tile(5, cores=number % 101, cards=1 + number // 101), name=f"p{number}")
            rig.filter(f"p{number}")
            assert sum(len(entry.answers) for entry in rig.filter_service._refusal_cache._entries.values()) <= MOST


LOOKS = [
    pytest.param(lambda rig: rig.filter("king"), id="a filter call of a pod of higher priority"),
    pytest.param(lambda rig: rig.filter_service.dry_run(rig.args("vip")), id="a dry run of a pod with a nomination"),
    pytest.param(lambda rig: rig.filter_service.prioritize(rig.args("vip")), id="a prioritize call"),
    pytest.param(lambda rig: asyncio.run(rig.bind("king", "n1")), id="a bind that no longer fits"),
    pytest.param(
        lambda rig: rig.ledger.handle(Reserved(too_much(rig, "king"), 0.0)), id="a reservation that is denied"
    ),
    pytest.param(lambda rig: fits_when_nominated(rig, "vip"), id="pending pods that look for capacity"),
    pytest.param(lambda rig: search_victims(rig, "king"), id="a search for victims"),
    pytest.param(lambda rig: rig.ledger.overcommitted("uid-first-0"), id="a look for overcommitted GPUs"),
    pytest.param(lambda rig: explain(rig, "king"), id="an explanation"),
]


@pytest.mark.parametrize("quotas", [pytest.param(False, id="without quotas"), pytest.param(True, id="with a quota")])
@pytest.mark.parametrize("look", LOOKS)
def test_a_cached_rejection_survives_a_look_while_a_nomination_is_open(
    look: Callable[[Rig], object], quotas: bool
) -> None:
    rig = full()
    for name, size, priority in (("vip", 3, 5), ("king", 7, 9)):
        rig.arrive(tile(size), name=name)
        rig.change(name, spec={"priority": priority})
    rig.catch_up()
    if quotas:
        rig.ledger.handle(QuotasSet({"default": Quota((Limit(model="*", cards=1000),))}))
    nomination(rig, "vip")
    first = rig.filter("late")
    before = facts(rig.ledger.fleet), rig.ledger.quota_usage.held("default")
    look(rig)
    assert (facts(rig.ledger.fleet), rig.ledger.quota_usage.held("default")) == before
    assert (rig.filter("late").failed, cached(rig)) == (first.failed, 1)


def request_of(rig: Rig, name: str) -> PodRequest:
    request = rig.requests.of(rig.cluster_state.pending[f"uid-{name}"].pod)
    assert isinstance(request, PodRequest)
    return request


def too_much(rig: Rig, name: str) -> Allocation:
    """An allocation on n1 beyond what is free, also without the nomination."""
    pod, request = rig.cluster_state.pending[f"uid-{name}"].pod, request_of(rig, name)
    placement = place(request, NodeView.empty(rig.ledger.fleet.view("n1").node))
    assert isinstance(placement, Placement)
    return allocation_of(pod, request, placement.grant(pod.uid, request))


def fits_when_nominated(rig: Rig, name: str) -> None:
    pod = rig.cluster_state.pending[f"uid-{name}"].pod
    rig.pending_pods.refused(UnschedulablePod(pod=pod, request=request_of(rig, name), names=["n1", "n2"]))
    rig.pending_pods.capacity_freed()
    rig.clock.now += 2 * NUDGE_INTERVAL
    asyncio.run(rig.pending_pods.round())
    assert [key for key, *_ in rig.api.patches if key.endswith(name)], "it fits on its own nomination"


def search_victims(rig: Rig, name: str) -> None:
    pod, request = rig.cluster_state.pending[f"uid-{name}"].pod, request_of(rig, name)
    selector = rig.preemptor._victim_selector
    assert not selector.fits_now(pod, request, "n1")
    plan = selector.plan(pod, request, "n1")
    assert plan is not None
    assert [victim.pod for victim in plan.victims] == ["uid-first-0"]


def explain(rig: Rig, name: str) -> None:
    pod = msgspec.convert(rig.live(name), PodWithConditions)
    assert explain_pod(pod, rig.cluster_state, [], "binpack").state == "unschedulable"


class TestFreeCapacity:
    @pytest.mark.parametrize(
        "frees",
        [
            pytest.param(lambda rig: rig.change("first-0", status={"phase": "Succeeded"}), id="a-pod-ends"),
            pytest.param(lambda rig: rig.api.delete_pod("default/first-0"), id="a-pod-is-deleted"),
            pytest.param(
                lambda rig: rig.api.add_node(node("n1").cards(1, size=2 * SIZE).manifest()), id="a-card-grows"
            ),
        ],
    )
    def test_ends_it(self, frees: Callable[[Rig], None]) -> None:
        rig = full()
        assert rig.filter("late").names == []
        frees(rig)
        rig.catch_up()
        assert rig.filter("late").names == ["n1"]

    def test_from_an_expired_reservation_ends_it(self) -> None:
        rig = Rig(node("n1").cards(1, size=SIZE))
        for name in ("first", "late"):
            rig.arrive(tile(5), name=name)
        assert rig.filter("first").names == ["n1"]
        assert rig.filter("late").names == []
        rig.ledger.handle(Tick(rig.clock() + 60))
        assert rig.filter("late").names == ["n1"]


def full() -> Rig:
    """Two nodes of one card each, both fully allocated, and a pending pod."""
    rig = Rig(*(node(name).cards(1, size=SIZE) for name in ("n1", "n2")))
    for number in range(2):
        bind_pod(rig, f"first-{number}", tile(5))
    rig.arrive(tile(5), name="late")
    return rig


def bind_pod(rig: Rig, name: str, limits: Json) -> None:
    """A pod that arrives, is filtered and bound."""
    rig.arrive(limits, name=name)
    rig.filter(name)
    asyncio.run(rig.bind(name, rig.node_of(name) or ""))
    rig.catch_up()


@examples(60)
@given(st.randoms(use_true_random=False))
def test_every_answer_is_that_of_a_new_decision(rng: random.Random) -> None:
    """Pods arrive, are filtered repeatedly, bound, and end; nodes and quotas change; time passes."""
    nodes = [node(f"n{n}").cards(2, size=SIZE) for n in range(3)]
    rig = Rig(*nodes)
    for step in range(40):
        act = rng.choice(["arrive", "filter", "filter", "filter", "filter", "bind", "end", "node", "quota", "tick"])
        names = [item["metadata"]["name"] for item in rig.api.pods.values()]
        waiting = [name for name in names if f"uid-{name}" in rig.cluster_state.pending]
        if act == "arrive":
            rig.arrive(*rng.choice(WISHES), name=f"p{step}")
        elif act == "filter" and waiting:
            check(rig, rng.choice(waiting), rng)
        elif act == "bind" and waiting:
            name = rng.choice(waiting)
            if rig.node_of(name):
                asyncio.run(rig.bind(name, rig.node_of(name) or ""))
                rig.catch_up()
        elif act == "end" and names:
            rig.change(rng.choice(names), status={"phase": "Succeeded"})
            rig.catch_up()
        elif act == "node":
            rig.api.add_node(node(f"n{rng.randrange(3)}").cards(2, size=rng.choice([4, SIZE])).manifest())
            rig.catch_up()
        elif act == "quota":
            rig.ledger.handle(QuotasSet({"default": quota} if (quota := rng.choice(QUOTAS)) else {}))
        elif act == "tick":
            rig.clock.now += 1.5
            rig.apply(rig.ledger.handle(Tick(rig.clock())))


def check(rig: Rig, name: str, rng: random.Random) -> None:
    asked_about = rng.choice([["n0", "n1", "n2"], ["n2", "n0", "n1"], ["n1", "n0"]])
    body = rig.body(name, asked_about)
    again = FilterService(
        rig.cluster_state, rig.requests, rig.availability, settings=rig.settings, metrics=Metrics(), clock=rig.clock
    )
    fresh = again.dry_run(read_filter(body))
    cached = rig.filter_service.filter(read_filter(body))
    if cached.names:
        assert set(cached.names) <= set(fresh.names)
        return
    assert not cached.error
    assert not fresh.names, "free capacity appeared, and the cached rejection was not dropped"
    assert (cached.failed.keys(), cached.unresolvable.keys()) == (fresh.failed.keys(), fresh.unresolvable.keys())
    request = rig.requests.of(rig.cluster_state.pending[f"uid-{name}"].pod)
    assert isinstance(request, PodRequest)
    request = rig.ledger.quota_usage.allowed("default", request)
    for node_name, sentence in {**cached.failed, **cached.unresolvable}.items():
        assert still_true(request, rig.cluster_state, node_name, sentence), (node_name, sentence, fresh)
    if cached.encoded:
        assert cached.encoded == write_filter(
            FilterAnswer(failed=cached.failed, unresolvable=cached.unresolvable), read_filter(body)
        )


def still_true(request: PodRequest, cluster_state: ClusterState, name: str, sentence: str) -> bool:
    """Whether the rules up to that of the sentence leave some container too few cards."""
    view = cluster_state.ledger.fleet.view(name)
    codes = [stage.code for stage in RULES_UNDER_QUOTA]
    code = next(code for code, text in SENTENCE.items() if text == sentence)
    if code is NodeReason.TOGETHER:  # each of them fits
        return all(unit_miss(piece, request.constraints, view) is None for piece in split(request))
    stages = RULES_UNDER_QUOTA[: codes.index(code) + 1]
    left = [
        sum(all(stage.passes(case) for stage in stages) for case in candidates(piece, request.constraints, view))
        < piece.cards
        for piece in split(request)
    ]
    return any(left)
