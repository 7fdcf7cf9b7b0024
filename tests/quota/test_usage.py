"""What namespaces hold of their quotas, under random events: the machine of `test_ledger_invariants`, with quotas.

Bugs that it caught, each alone: `_release` without the refund; `_node_seen` that does not charge again; `_write`
without `beyond_quota`; `objection` that counts the pod's own reservation twice; `QuotasSet` that ignores nominations.
"""

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from gputile.engine.placement.place import Placement
from gputile.engine.victims import Victim
from gputile.ledger.events import (
    Assumed,
    Confirmed,
    Denied,
    Freed,
    Instruction,
    NodeGone,
    NodeSeen,
    Nominated,
    PodGone,
    QuotasSet,
    Reserved,
)
from gputile.ledger.ledger import Ledger
from gputile.model.allocations import Allocation
from gputile.model.refusals import NodeReason
from gputile.model.requests import PodRequest
from gputile.quota.arithmetic import cost_of
from gputile.quota.limits import Amount, Limit, Quota
from gputile.testing.builders import ask, node, wants
from tests.effort import EFFORT
from tests.ledger.test_ledger_invariants import Cluster

LIMITS = st.sampled_from(
    [
        Quota((Limit(model="*", cards=100),)),
        Quota((Limit(model="A100", cards=250, memory=12),)),
        Quota((Limit(model="A100", cores=60), Limit(model="*", memory=20))),
        Quota((Limit(model="T4", cards=800),)),
        Quota(),
    ]
)


class ClusterWithQuotas(Cluster):
    """Two teams whose quotas are edited while everything else happens."""

    def __init__(self) -> None:
        super().__init__()
        self.send(QuotasSet({"team-0": Quota((Limit(model="*", cards=250),))}))

    def allocation(self, pod: str, placement: Placement) -> Allocation:
        allocation = super().allocation(pod, placement)
        return msgspec.structs.replace(allocation, name=f"{team(pod)}/{pod}")

    def choose(self, pod: str) -> Allocation | None:
        request, ledger = self.requests[pod], self.ledger
        fleet, ignored = ledger.fleet_for(pod, int(pod[1:]) % 3), ledger.ignored_by(pod, int(pod[1:]) % 3)
        allowed = ledger.quota_usage.allowed(team(pod), request, ignored)
        best = fleet.best(allowed, "spread", seed=self.born)
        placement = fleet.place(allowed, best[0]) if best else None
        chosen = self.allocation(pod, placement) if isinstance(placement, Placement) else None
        return None if chosen is None or ledger.beyond_quota(chosen) else chosen

    def send(self, event: object) -> list[Instruction]:
        done = super().send(event)
        denied = any(isinstance(instruction, Denied) for instruction in done)
        if isinstance(event, Reserved | Assumed) and not denied:
            self.within(event.allocation)
        return done

    def within(self, allocation: Allocation) -> None:
        """By independent sums: after an accepted pod its team holds no more of its models than the quota allows."""
        namespace = allocation.name.partition("/")[0]
        quota = self.ledger.quota_usage.quotas.get(namespace)
        on_node = self.nodes[allocation.node]
        assert allocation.grant is not None
        took = cost_of(allocation.grant, on_node)
        for limit in quota.limits if quota else ():
            held = sum((self.spent(namespace, limit.model)), Amount())
            if any(limit.covers(model) for model in took):
                assert limit.cards is None or held.cards <= limit.cards
                assert limit.memory is None or held.memory <= limit.memory
                assert limit.cores is None or held.cores <= limit.cores
        assert quota is None or all(any(limit.covers(model) for limit in quota.limits) for model in took)

    def spent(self, namespace: str, model: str) -> list[Amount]:
        allocations = [e.allocation for e in self.ledger.entries() if e.allocation.name.startswith(f"{namespace}/")]
        costs = [cost_of(a.grant, self.nodes[a.node]) for a in allocations if a.grant is not None]
        return [amount for spent in costs for name, amount in spent.items() if Limit(model=model).covers(name)]

    @rule(team=st.sampled_from(["team-0", "team-1"]), quota=LIMITS)
    def quota_is_edited(self, team: str, quota: Quota) -> None:
        done = self.send(QuotasSet({**self.ledger.quota_usage.quotas, team: quota}))
        assert done == [Freed("")], "pending pods may fit now"

    @rule()
    def quotas_are_removed(self) -> None:
        self.send(QuotasSet({}))

    @invariant()
    def the_sums_can_be_rebuilt(self) -> None:
        quota_usage = self.ledger.quota_usage
        before = {name: quota_usage.held(name) for name in quota_usage.namespaces()}
        self.ledger.handle(QuotasSet(quota_usage.quotas))
        assert {name: quota_usage.held(name) for name in quota_usage.namespaces()} == before


def team(pod: str) -> str:
    return f"team-{int(pod[1:]) % 2}"


ClusterWithQuotas.TestCase.settings = settings(max_examples=100 * EFFORT, stateful_step_count=25)
TestRationed = ClusterWithQuotas.TestCase


# ---- one by one -----------------------------------------------------------------------------------------------------

TWO_CARDS = Quota((Limit(model="A100", cards=200),), source="ConfigMap kube-system/gputile-quota")


def ledger_with(quota: Quota = TWO_CARDS, **others: Quota) -> Ledger:
    ledger = Ledger()
    ledger.handle(NodeSeen(node("n1").cards(4, "A100", 1000).node()))
    ledger.handle(NodeSeen(node("n2").cards(4, "T4", 100).facts(pool="blue").node()))
    ledger.handle(QuotasSet({"team-a": quota, **others}))
    return ledger


def whole(ledger: Ledger, pod: str, namespace: str = "team-a", name: str = "n1", card: int = 0) -> Allocation:
    request = wants(ask(whole=True), uuids=frozenset({f"GPU-{name}-{card}"}))
    where = ledger.fleet.place(request, name)
    assert isinstance(where, Placement)
    return Allocation(pod=pod, name=f"{namespace}/{pod}", node=name, grant=where.grant(pod, request))


def test_reserved_assumed_confirmed_and_nominated_pods_are_counted() -> None:
    ledger = ledger_with(Quota((Limit(model="*", cards=400),)))
    ledger.handle(Reserved(whole(ledger, "reserved", card=0), 0.0))
    ledger.handle(Assumed(whole(ledger, "assumed", card=1), 0.0))
    ledger.handle(Confirmed(whole(ledger, "confirmed", card=2)))
    ledger.handle(Nominated(whole(ledger, "nominated", card=3), 10.0))
    assert ledger.quota_usage.held("team-a") == {"A100": Amount(400, 4000, 400)}
    [denied] = ledger.handle(Reserved(whole(ledger, "late", name="n2"), 0.0))
    assert isinstance(denied, Denied)
    assert denied.beyond_quota


def test_a_denial_says_what_the_namespace_holds_and_what_to_do() -> None:
    ledger = ledger_with()
    for n in range(2):
        ledger.handle(Confirmed(whole(ledger, f"p{n}", card=n)))
    [denied] = ledger.handle(Assumed(whole(ledger, "p3", card=2), 0.0))
    assert isinstance(denied, Denied)
    assert denied.why == (
        "team-a holds 2 of 2 A100; this pod needs 1 more; wait until a pod of team-a ends, or raise its quota in "
        "ConfigMap kube-system/gputile-quota"
    )


def test_a_reservation_that_is_assumed_is_counted_once_and_checked_again() -> None:
    ledger = ledger_with(Quota((Limit(model="A100", cards=100),)))
    mine = whole(ledger, "p1")
    assert ledger.handle(Reserved(mine, 0.0)) == []
    assert ledger.handle(Assumed(mine, 0.0)) == []
    other = Quota((Limit(model="A100", cards=200),))
    ledger.handle(QuotasSet({"team-a": other}))
    late = whole(ledger, "p2", card=1)
    assert ledger.handle(Reserved(late, 0.0)) == []
    ledger.handle(QuotasSet({"team-a": Quota((Limit(model="A100", cards=100),))}))
    [denied] = ledger.handle(Assumed(late, 0.0))
    assert isinstance(denied, Denied), "the quota was lowered between filter and bind"


def test_a_pod_of_higher_priority_may_use_nominated_quota() -> None:
    ledger = ledger_with(Quota((Limit(model="A100", cards=100),)))
    ledger.handle(Nominated(whole(ledger, "p1"), 10.0))
    equal, higher = whole(ledger, "p2", card=1), whole(ledger, "p3", card=1)
    assert isinstance(ledger.handle(Reserved(equal, 0.0))[0], Denied)
    assert ledger.handle(Reserved(msgspec.structs.replace(higher, priority=1), 0.0)) == []


def test_other_namespaces_are_not_charged_and_the_default_quota_counts_for_each_separately() -> None:
    ledger = ledger_with(**{"*": Quota((Limit(model="*", cards=100),))})
    ledger.handle(Confirmed(whole(ledger, "p1", "team-b", card=0)))
    ledger.handle(Confirmed(whole(ledger, "p2", "team-c", card=1)))
    assert isinstance(ledger.handle(Reserved(whole(ledger, "p3", "team-b", card=2), 0.0))[0], Denied)
    assert ledger.handle(Reserved(whole(ledger, "p4", "team-a", card=2), 0.0)) == []
    assert ledger.quota_usage.namespaces() == ["team-a", "team-b", "team-c"]


def test_a_pod_on_a_node_that_is_gone_keeps_its_cost_until_it_is_gone_too() -> None:
    ledger = ledger_with()
    ledger.handle(Confirmed(whole(ledger, "p1")))
    ledger.handle(NodeGone("n1"))
    assert ledger.quota_usage.held("team-a") == {"A100": Amount(100, 1000, 100)}
    ledger.handle(PodGone("p1"))
    assert ledger.quota_usage.held("team-a") == {}
    ledger.check()


def test_a_node_that_comes_back_with_other_cards_is_charged_for_those() -> None:
    ledger = ledger_with(Quota((Limit(model="*", cards=400),)))
    request = wants(ask(100))
    where = ledger.fleet.place(request, "n1")
    assert isinstance(where, Placement)
    ledger.handle(Confirmed(Allocation(pod="p1", name="team-a/p1", node="n1", grant=where.grant("p1", request))))
    assert ledger.quota_usage.held("team-a") == {"A100": Amount(10, 100, 0)}
    ledger.handle(NodeSeen(node("n1").cards(4, "A30", 200).node()))
    assert ledger.quota_usage.held("team-a") == {"A30": Amount(50, 100, 0)}


def test_the_pool_is_checked_when_a_pod_is_reserved_too() -> None:
    ledger = ledger_with(Quota((Limit(model="*"),), pools=("blue", "red")))
    assert ledger.handle(Reserved(whole(ledger, "p1", name="n2"), 0.0)) == []
    [denied] = ledger.handle(Assumed(whole(ledger, "p2"), 0.0))
    assert isinstance(denied, Denied)
    assert denied.why.startswith("team-a may use nodes of pools blue, red only, and this node is of no pool; ")


ONE = wants(ask(whole=True))


@pytest.mark.parametrize(
    ("quota", "request_", "want"),
    [
        pytest.param(Quota((Limit(model="*", cards=400),)), ONE, [], id="the-quota-allows-it"),
        pytest.param(Quota((Limit(model="A100", cards=100),)), ONE, ["team-a holds 1 of 1 A100; this pod needs 1 more"],
                     id="the-limit-that-is-used-up-not-the-model-that-is-not-listed"),
        pytest.param(Quota((Limit(model="L4"),)), wants(ask(whole=True), models=()), [
            "team-a has no quota for A100", "team-a has no quota for T4"], id="models-that-are-not-listed"),
        pytest.param(Quota((Limit(model="*", memory=1050),)), wants(ask(60)), [
            "team-a holds 1000 of 1050 MiB of GPUs of any model; this pod needs 60 more"], id="memory"),
    ],
)  # fmt: skip
def test_why_quota_keeps_a_pod_pending(quota: Quota, request_: PodRequest, want: list[str]) -> None:
    ledger = ledger_with(quota)
    ledger.handle(Confirmed(whole(ledger, "p1")))
    advice = ["wait until a pod of team-a ends, or raise its quota"] if want else []
    assert ledger.quota_usage.objections("team-a", request_) == [*want, *advice]


def test_a_request_without_quota_stays_the_same_object() -> None:
    ledger = ledger_with(Quota((Limit(model="*", cards=800),)))
    assert ledger.quota_usage.allowed("team-a", ONE) is ONE
    assert ledger.quota_usage.allowed("team-without-quota", ONE) is ONE
    ledger.handle(QuotasSet({}))
    assert ledger.quota_usage.allowed("team-a", ONE) is ONE


@pytest.mark.parametrize(
    ("quota", "want"),
    [
        pytest.param(Quota((Limit(model="A100", cards=100),)), {"n1": NodeReason.QUOTA, "n2": NodeReason.QUOTA_MODEL},
                     id="used-up-and-not-listed"),
        pytest.param(Quota((Limit(model="*"),), pools=("blue",)), {"n1": NodeReason.QUOTA_POOL}, id="another-pool"),
        pytest.param(Quota((Limit(model="*", cards=150),)), {"n1": NodeReason.QUOTA, "n2": NodeReason.QUOTA},
                     id="all-models"),
    ],
)  # fmt: skip
def test_nodes_are_rejected_for_what_their_cards_would_cost(quota: Quota, want: dict[str, NodeReason]) -> None:
    ledger = ledger_with(quota)
    ledger.handle(Confirmed(whole(ledger, "p1")))
    refusals = ledger.fleet.refusals(ledger.quota_usage.allowed("team-a", ONE))
    assert {refusal.node: refusal.code for refusal in refusals} == want
    assert {refusal.resolvable for refusal in refusals if refusal.code is NodeReason.QUOTA} <= {True}


def test_quota_may_allow_a_small_tile_of_a_large_card_but_not_half_of_a_small_card() -> None:
    ledger = ledger_with(Quota((Limit(model="*", cards=120),)))
    ledger.handle(Confirmed(whole(ledger, "p1")))
    may = ledger.quota_usage.allowed("team-a", wants(ask(50)))
    assert ledger.fleet.best(may) == ["n1"], "5 % of an A100, 50 % of a T4"


def test_only_evictions_in_the_same_namespace_give_quota_back() -> None:
    ledger = ledger_with(Quota((Limit(model="A100", cards=100),)), **{"team-b": TWO_CARDS})
    ledger.handle(Confirmed(whole(ledger, "mine")))
    ledger.handle(Confirmed(whole(ledger, "theirs", "team-b", card=1)))
    after_eviction = ledger.quota_usage.after_eviction("team-a", ONE)
    assert ledger.fleet.best(after_eviction([Victim(pod="theirs")])) == []
    assert ledger.fleet.best(after_eviction([Victim(pod="mine")])) == ["n1"]


class TestUnknownNodesAndCards:
    """A pod on an unknown node or card keeps its cost."""

    @staticmethod
    def spent() -> Ledger:
        ledger = Ledger()
        ledger.handle(NodeSeen(node("n1").cards(2, "A100").node()))
        ledger.handle(QuotasSet({"team-0": Quota((Limit(model="*", cards=200),))}))
        request = wants(ask(cores=100))
        where = ledger.fleet.place(request, "n1")
        assert isinstance(where, Placement)
        ledger.handle(Confirmed(Allocation(pod="a", node="n1", name="team-0/a", grant=where.grant("a", request))))
        assert ledger.quota_usage.held("team-0")["A100"].cards == 100
        return ledger

    def test_when_its_card_is_no_longer_listed(self) -> None:
        ledger = self.spent()
        held = next(iter(ledger.entries())).allocation.uses()
        left = tuple(card for card in node("n1").cards(2, "A100").node().cards if card.uuid not in held)
        ledger.handle(NodeSeen(msgspec.structs.replace(node("n1").node(), cards=left)))
        assert ledger.quota_usage.held("team-0")["A100"].cards == 100
        ledger.handle(NodeSeen(node("n1").cards(2, "A100").node()))
        assert ledger.quota_usage.held("team-0")["A100"].cards == 100
        ledger.check()

    def test_when_its_node_is_gone_and_the_quota_is_edited(self) -> None:
        ledger = self.spent()
        ledger.handle(NodeGone("n1"))
        ledger.handle(QuotasSet({"team-0": Quota((Limit(model="*", cards=300),))}))
        assert ledger.quota_usage.held("team-0")["A100"].cards == 100

    def test_a_namespace_that_no_longer_holds_anything_is_forgotten(self) -> None:
        ledger = self.spent()
        ledger.handle(PodGone("a"))
        assert [ledger.quota_usage._held, ledger.quota_usage._pods, ledger.quota_usage._changes] == [{}, {}, {}]
