"""Which agents are alive, judged by our own clock; and what that means for their nodes and for pending pods.

Deliberate bugs that these were seen to catch, each alone:
  1. `_update` takes any change of the Lease for a renewal.
  2. `check` marks agents stale while the watch is broken, or right after this process was suspended.
  3. `check` marks many agents stale that stop at once.
  4. `_update` leaves an agent stale that renews again.
  5. `ClusterState.node_changed` forgets that the agent is stale.
"""

from typing import Any

import pytest

from gputile.dialects.gputile import INVENTORY, NUDGED
from gputile.kube.api import AgentLease, Json, LeaseAnnotations, LeaseMetadata, LeaseRenewal
from gputile.ledger.events import Freed
from gputile.model.refusals import SENTENCE, NodeReason, about_one_node
from gputile.scheduler.state.agent_liveness import DEFAULT_DURATION, SUSPENDED, AgentLiveness
from gputile.testing.builders import node
from tests.dialects.shortcuts import raw_node
from tests.scheduler.rig import Clock, Rig, tile

STALE = SENTENCE[NodeReason.AGENT_SILENT]


def lease(name: str, renewed: str, duration: int | None = 10, holder: str | None = None, use: str = "") -> AgentLease:
    metadata = LeaseMetadata(name, LeaseAnnotations(use) if use else None)
    return AgentLease(metadata, LeaseRenewal(name if holder is None else holder, duration, renewed))


class AgentsRig:
    """Agents, a clock, and a check once a second."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.agents = AgentLiveness(self.clock)
        self.beats = 0

    def renew(self, *names: str, duration: int | None = 10) -> list[str]:
        """They renew their Leases; returns the nodes to evaluate again."""
        self.beats += 1
        return [node for name in names for node in self.agents.changed(lease(name, str(self.beats), duration))]

    def wait(self, seconds: float, *alive: str) -> list[str]:
        """The agents that become stale while these continue to renew."""
        fallen: list[str] = []
        for _ in range(int(seconds)):
            self.clock.now += 1.0
            self.renew(*alive)
            fallen += self.agents.check()
        return fallen

    def stale(self, *names: str) -> list[str]:
        return [name for name in names if self.agents.is_stale(name)]


class TestWhichAgentsAreStale:
    def test_after_the_lease_duration_and_not_sooner(self) -> None:
        rig = AgentsRig()
        rig.renew("n1", duration=7)
        assert rig.wait(6) == []
        assert rig.wait(1) == ["n1"]
        assert rig.stale("n1") == ["n1"]
        assert rig.wait(20) == [], "it is returned once"

    def test_each_by_its_own_duration(self) -> None:
        rig = AgentsRig()
        rig.renew("n1", duration=5)
        rig.renew("n2", duration=9)
        assert (rig.wait(5), rig.wait(3), rig.wait(1)) == (["n1"], [], ["n2"])

    @pytest.mark.parametrize("duration", [None, 0, -1])
    def test_a_lease_without_a_duration(self, duration: int | None) -> None:
        rig = AgentsRig()
        rig.renew("n1", duration=duration)
        assert (rig.wait(DEFAULT_DURATION - 1), rig.wait(1)) == ([], ["n1"])

    def test_an_agent_that_renews_is_not_stale(self) -> None:
        rig = AgentsRig()
        assert rig.renew("n1") == ["n1"]
        assert rig.wait(60, "n1") == []

    def test_a_renewal_evaluates_no_node_again(self) -> None:
        rig = AgentsRig()
        rig.renew("n1")
        assert rig.renew("n1") == []

    def test_it_is_alive_again_with_the_next_renewal(self) -> None:
        rig = AgentsRig()
        rig.renew("n1")
        rig.wait(11)
        assert rig.renew("n1") == ["n1"]
        assert rig.stale("n1") == []
        assert rig.wait(10) == ["n1"], "and may become stale again"

    def test_a_lease_that_another_client_changed_was_not_renewed(self) -> None:
        rig = AgentsRig()
        rig.agents.changed(lease("n1", "1"))
        rig.wait(6)
        assert rig.agents.changed(lease("n1", "1")) == []
        assert rig.wait(4) == ["n1"]

    @pytest.mark.parametrize("renewed", ["1970-01-01T00:00:00.000000Z", "2999-01-01T00:00:00.000000Z", "yesterday"])
    def test_the_agents_clock_is_not_trusted(self, renewed: str) -> None:
        rig = AgentsRig()
        rig.agents.changed(lease("n1", renewed))
        assert (rig.wait(9), rig.wait(1)) == ([], ["n1"])

    def test_a_node_without_a_lease_is_never_stale(self) -> None:
        rig = AgentsRig()
        assert rig.wait(100) == []
        assert rig.stale("n1") == []
        assert "n1" not in rig.agents


class TestRelease:
    @pytest.mark.parametrize("beat", [LeaseRenewal("", 10, "2"), LeaseRenewal(None, 10, "2"), LeaseRenewal("", 1, "1")])
    def test_an_agent_that_releases_its_lease_is_stale_at_once(self, beat: LeaseRenewal) -> None:
        rig = AgentsRig()
        rig.renew("n1")
        assert rig.agents.changed(AgentLease(LeaseMetadata("n1"), beat)) == ["n1"]
        assert rig.stale("n1") == ["n1"]
        assert rig.renew("n1") == ["n1"]
        assert rig.stale("n1") == []

    def test_a_lease_that_was_never_held(self) -> None:
        rig = AgentsRig()
        assert rig.agents.changed(AgentLease(LeaseMetadata("n1"))) == ["n1"]
        assert rig.stale("n1") == ["n1"]

    def test_without_its_lease_a_node_is_not_stale(self) -> None:
        rig = AgentsRig()
        rig.renew("n1")
        rig.wait(10)
        assert rig.agents.changed(lease("n1", "9"), deleted=True) == ["n1"]
        assert rig.stale("n1") == []
        assert rig.agents.changed(lease("n1", "9"), deleted=True) == []


class TestLists:
    def test_a_list_shows_all_leases(self) -> None:
        rig = AgentsRig()
        rig.renew("n1", "n2")
        assert sorted(rig.agents.listed([lease("n2", "1"), lease("n3", "1")])) == ["n1", "n3"]
        assert [name in rig.agents for name in ("n1", "n2", "n3")] == [False, True, True]

    def test_a_list_is_no_renewal(self) -> None:
        rig = AgentsRig()
        rig.agents.listed([lease("n1", "1")])
        rig.wait(6)
        assert rig.agents.listed([lease("n1", "1")]) == []
        assert rig.wait(4) == ["n1"]

    def test_an_agent_that_renewed_between_two_lists_is_alive(self) -> None:
        rig = AgentsRig()
        rig.agents.listed([lease("n1", "1")])
        rig.wait(10)
        assert rig.agents.listed([lease("n1", "2")]) == ["n1"]
        assert rig.stale("n1") == []


class TestWhenOurWatchIsDisconnected:
    def test_while_the_watch_is_broken_no_agent_becomes_stale_and_then_all_durations_restart(self) -> None:
        rig = AgentsRig()
        rig.renew("n1")
        rig.wait(8)
        rig.agents.watch_failed()
        assert rig.wait(60) == []
        disconnected = [rig.agents.is_disconnected]
        rig.agents.watch_alive()
        assert [*disconnected, rig.agents.is_disconnected] == [True, False]
        assert (rig.wait(9), rig.wait(1)) == ([], ["n1"])

    def test_an_agent_that_was_stale_before_stays_stale(self) -> None:
        rig = AgentsRig()
        rig.renew("n1")
        rig.wait(10)
        rig.agents.watch_failed()
        rig.agents.watch_alive()
        assert rig.stale("n1") == ["n1"]

    def test_the_time_in_which_this_process_was_suspended_does_not_count(self) -> None:
        rig = AgentsRig()
        rig.renew("n1")
        rig.wait(5)
        rig.clock.now += 3600.0
        assert rig.agents.check() == []
        assert rig.agents.is_disconnected
        assert (rig.wait(9), rig.wait(1)) == ([], ["n1"])

    def test_a_short_pause_counts(self) -> None:
        rig = AgentsRig()
        rig.renew("n1")
        rig.wait(9)
        rig.clock.now += SUSPENDED
        assert rig.agents.check() == ["n1"]

    def test_when_many_stop_at_once_the_watch_counts_as_disconnected_until_the_server_sends(self) -> None:
        rig = AgentsRig()
        names = ("n1", "n2", "n3", "n4")
        rig.wait(5, *names)
        assert rig.wait(40) == []
        rig.agents.watch_alive()  # a bookmark
        assert sorted(rig.wait(1)) == sorted(names)

    def test_one_of_many_becomes_stale_because_others_renew(self) -> None:
        rig = AgentsRig()
        rig.wait(5, "n1", "n2", "n3", "n4")
        assert rig.wait(9, "n1", "n2", "n3") == []
        assert rig.wait(2, "n1", "n2", "n3") == ["n4"]

    def test_two_agents_are_not_many(self) -> None:
        rig = AgentsRig()
        rig.wait(5, "n1", "n2")
        assert sorted(rig.wait(10)) == ["n1", "n2"]


def test_agents_are_counted_by_state() -> None:
    rig = AgentsRig()
    rig.renew("n1", "n2", duration=5)
    rig.wait(6, "n2")
    assert rig.agents.counts() == {"alive": 1, "stale": 1}


# ---- what it means for the node -------------------------------------------------------------------------------------


class Cluster(Rig):
    """Two nodes with an agent each; `beat` renews their Leases."""

    def __init__(self, *nodes: Any, **rest: Any) -> None:
        super().__init__(*(nodes or (node("n1").cards(1, size=16), node("n2").cards(1, size=16))), **rest)
        self.beats = 0
        self.beat(*self.api.nodes)

    def beat(self, *names: str, **spec: Any) -> list[Any]:
        self.beats += 1
        for name in names:
            lease_spec: Json = {
                "holderIdentity": name,
                "leaseDurationSeconds": 10,
                "renewTime": str(self.beats),
                **spec,
            }
            self.api.add_lease(name, **lease_spec)
        return self.catch_up()

    def fault(self, name: str = "n1") -> str:
        known = self.ledger.fleet.node(name)
        assert known is not None
        return known.fault


def test_a_node_with_a_stale_agent_is_refused_until_the_agent_renews() -> None:
    rig = Cluster()
    rig.arrive(tile(8))
    rig.wait(11)
    assert rig.filter().unresolvable == {"n1": STALE, "n2": STALE}
    assert rig.count("refusals_total", code="AgentStale") == 2
    assert Freed("n2") in rig.beat("n2")
    answer = rig.filter()
    assert (answer.names, answer.unresolvable) == (["n2"], {})


async def test_pending_pods_are_nudged_when_an_agent_is_back() -> None:
    rig = Cluster(node("n1").cards(1, size=16))
    rig.arrive(tile(8))
    rig.wait(11)
    assert not rig.filter().names
    rig.clock.now += 1.0
    await rig.pending_pods.round()
    assert not rig.api.patches
    rig.beat("n1")
    await rig.pending_pods.round()
    assert [list(annotations) for _, annotations, _ in rig.api.patches] == [[NUDGED]]


async def test_the_pod_gets_an_event_with_the_reason() -> None:
    rig = Cluster(node("n1").cards(1, size=16))
    rig.arrive(tile(8))
    rig.wait(11)
    rig.filter()
    await rig.pending_pods.round()
    (note,) = rig.api.notes
    assert STALE in note.message


def test_a_node_whose_agent_has_stopped_is_refused_at_once() -> None:
    rig = Cluster()
    rig.arrive(tile(8))
    rig.beat("n1", holderIdentity="")
    assert rig.filter().names == ["n2"]
    assert rig.fault() == NodeReason.AGENT_SILENT


async def test_no_bind_to_a_node_whose_agent_became_stale_after_filter() -> None:
    rig = Cluster(node("n1").cards(1, size=16))
    rig.arrive(tile(8))
    assert rig.filter().names == ["n1"]
    rig.beat("n1", holderIdentity="")
    assert await rig.bind() == f"the pod no longer fits on node n1: it {about_one_node(NodeReason.AGENT_SILENT)}"
    rig.beat("n1")
    assert await rig.bind() == ""


def test_pods_on_a_node_with_a_stale_agent_keep_their_allocation() -> None:
    rig = Cluster(node("n1").cards(1, size=16))
    rig.arrive(tile(8))
    rig.filter()
    assert rig.free() == [8]
    rig.wait(11)
    assert rig.free() == [8]
    rig.ledger.check()


def test_a_renewal_changes_nothing() -> None:
    """There are a thousand a second at 5,000 nodes."""
    rig = Cluster()
    before = rig.ledger.fleet.generation(), rig.ledger.fleet.capacity_generation()
    for _ in range(20):
        assert rig.beat("n1", "n2") == []
        rig.wait(1)
    assert (rig.ledger.fleet.generation(), rig.ledger.fleet.capacity_generation()) == before


def test_a_node_that_changes_while_its_agent_is_stale_stays_faulty() -> None:
    rig = Cluster()
    rig.wait(11)
    rig.api.add_node(node("n1").cards(2, size=16).manifest())
    rig.catch_up()
    assert rig.fault() == NodeReason.AGENT_SILENT
    rig.beat("n1")
    assert (rig.fault(), rig.free()) == ("", [16, 16])


def test_a_node_that_is_added_after_its_lease() -> None:
    rig = Cluster()
    rig.beat("n9", holderIdentity="")
    rig.api.add_node(node("n9").cards(1, size=16).manifest())
    rig.catch_up()
    assert rig.fault("n9") == NodeReason.AGENT_SILENT


def test_a_fault_of_the_node_itself_takes_precedence() -> None:
    rig = Cluster()
    rig.wait(11)
    broken = node("n1").cards(1, size=16).manifest()
    broken["metadata"]["annotations"][INVENTORY] = "{"
    rig.api.add_node(broken)
    rig.catch_up()
    assert rig.fault() == NodeReason.BAD_INVENTORY
    rig.beat("n1")
    assert rig.fault() == NodeReason.BAD_INVENTORY, "the renewal of its agent does not repair it"
    rig.wait(11)
    rig.api.add_node(node("n1").cards(1, size=16).manifest())
    rig.catch_up()
    assert rig.fault() == NodeReason.AGENT_SILENT


def test_a_leftover_lease_does_not_make_the_node_of_another_system_stale() -> None:
    theirs = raw_node({"aliyun.com/gpu-mem": 32, "aliyun.com/gpu-count": 2})
    rig = Cluster(theirs)
    rig.beat("n1", holderIdentity="")
    assert rig.fault() == ""


class TestReportedUsage:
    """Usage is known only while it is fresh: a stale value is unknown."""

    def rig(self) -> AgentsRig:
        rig = AgentsRig()
        rig.agents.changed(lease("n1", "1", use="old"))
        rig.agents.changed(lease("n1", "2", use="new"))
        return rig

    def test_the_last_report_counts(self) -> None:
        assert self.rig().agents.use("n1") == "new"

    def test_a_lease_that_was_not_seen_renewed_may_be_old(self) -> None:
        rig = AgentsRig()
        rig.agents.listed([lease("n1", "1", use="old")])
        assert rig.agents.use("n1") == ""

    def test_a_lease_that_another_client_changed_reports_nothing_new(self) -> None:
        rig = self.rig()
        rig.agents.changed(lease("n1", "2", use="forged"))
        assert rig.agents.use("n1") == "new"

    def test_an_agent_that_stops_reporting(self) -> None:
        rig = self.rig()
        rig.renew("n1")
        assert rig.agents.use("n1") == ""

    def test_it_expires_with_the_lease_duration_also_while_our_watch_is_broken(self) -> None:
        rig = self.rig()
        rig.agents.watch_failed()
        rig.clock.now += 10
        assert rig.agents.use("n1") == "new"
        rig.clock.now += 1
        assert rig.agents.use("n1") == ""

    @pytest.mark.parametrize("deleted", [True, False], ids=["the-lease-is-gone", "the-agent-withdrew"])
    def test_it_ends_with_the_agent(self, deleted: bool) -> None:
        rig = self.rig()
        rig.agents.changed(lease("n1", "3", holder="", use="new"), deleted=deleted)
        assert rig.agents.use("n1") == ""

    def test_a_node_without_a_lease(self) -> None:
        assert self.rig().agents.use("n2") == ""
