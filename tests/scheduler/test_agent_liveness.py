"""Whose agent is alive, judged by our own clock; and what that means for its node and for the pods that wait.

Deliberate bugs that these were seen to catch, each alone:
  1. `_seen` takes any change of the Lease for a renewal.
  2. `look` judges while the watch is broken, or right after a sleep of our own.
  3. `look` believes a whole crowd that stops at once.
  4. `_seen` forgets to bring back who speaks again.
  5. `Mirror.node_changed` forgets that the agent is silent.
"""

from typing import Any

import pytest

from gputile.dialects.gputile import INVENTORY, NUDGED
from gputile.kube.api import AgentLease, Json, LeaseAnnotations, LeaseMetadata, LeaseRenewal
from gputile.ledger.events import Freed
from gputile.model.refusals import SENTENCE, NodeReason
from gputile.scheduler.state.agent_liveness import DEFAULT_DURATION, SUSPENDED, AgentLiveness
from gputile.testing.builders import node
from tests.dialects.shortcuts import raw_node
from tests.scheduler.rig import Clock, Rig, tile

SILENT = SENTENCE[NodeReason.AGENT_SILENT]


def lease(name: str, renewed: str, lasts: int | None = 10, holder: str | None = None, use: str = "") -> AgentLease:
    metadata = LeaseMetadata(name, LeaseAnnotations(use) if use else None)
    return AgentLease(metadata, LeaseRenewal(name if holder is None else holder, lasts, renewed))


class Ward:
    """Agents, a clock, and somebody who looks once a second."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.agents = AgentLiveness(self.clock)
        self.beats = 0

    def renew(self, *names: str, lasts: int | None = 10) -> list[str]:
        """They renew their Leases; says whose node is to be judged anew."""
        self.beats += 1
        return [one for name in names for one in self.agents.changed(lease(name, str(self.beats), lasts))]

    def wait(self, seconds: float, *alive: str) -> list[str]:
        """Who falls silent while these go on renewing."""
        fallen: list[str] = []
        for _ in range(int(seconds)):
            self.clock.now += 1.0
            self.renew(*alive)
            fallen += self.agents.check()
        return fallen

    def silent(self, *names: str) -> list[str]:
        return [name for name in names if self.agents.is_stale(name)]


class TestWhoIsSilent:
    def test_after_the_leases_own_time_and_not_sooner(self) -> None:
        ward = Ward()
        ward.renew("n1", lasts=7)
        assert ward.wait(6) == []
        assert ward.wait(1) == ["n1"]
        assert ward.silent("n1") == ["n1"]
        assert ward.wait(20) == [], "it is said once"

    def test_each_by_its_own_time(self) -> None:
        ward = Ward()
        ward.renew("n1", lasts=5)
        ward.renew("n2", lasts=9)
        assert (ward.wait(5), ward.wait(3), ward.wait(1)) == (["n1"], [], ["n2"])

    @pytest.mark.parametrize("lasts", [None, 0, -1])
    def test_a_lease_that_does_not_say_how_long_it_holds(self, lasts: int | None) -> None:
        ward = Ward()
        ward.renew("n1", lasts=lasts)
        assert (ward.wait(DEFAULT_DURATION - 1), ward.wait(1)) == ([], ["n1"])

    def test_who_renews_is_not_silent(self) -> None:
        ward = Ward()
        assert ward.renew("n1") == ["n1"]
        assert ward.wait(60, "n1") == []

    def test_a_renewal_is_no_reason_to_judge_anything_anew(self) -> None:
        ward = Ward()
        ward.renew("n1")
        assert ward.renew("n1") == []

    def test_it_comes_back_with_the_next_renewal(self) -> None:
        ward = Ward()
        ward.renew("n1")
        ward.wait(11)
        assert ward.renew("n1") == ["n1"]
        assert ward.silent("n1") == []
        assert ward.wait(10) == ["n1"], "and may fall silent again"

    def test_a_lease_that_somebody_else_touched_was_not_renewed(self) -> None:
        ward = Ward()
        ward.agents.changed(lease("n1", "1"))
        ward.wait(6)
        assert ward.agents.changed(lease("n1", "1")) == []
        assert ward.wait(4) == ["n1"]

    @pytest.mark.parametrize("renewed", ["1970-01-01T00:00:00.000000Z", "2999-01-01T00:00:00.000000Z", "yesterday"])
    def test_the_agents_clock_is_not_believed(self, renewed: str) -> None:
        ward = Ward()
        ward.agents.changed(lease("n1", renewed))
        assert (ward.wait(9), ward.wait(1)) == ([], ["n1"])

    def test_a_node_without_a_lease_is_never_silent(self) -> None:
        ward = Ward()
        assert ward.wait(100) == []
        assert ward.silent("n1") == []
        assert "n1" not in ward.agents


class TestWithdrawal:
    @pytest.mark.parametrize("beat", [LeaseRenewal("", 10, "2"), LeaseRenewal(None, 10, "2"), LeaseRenewal("", 1, "1")])
    def test_an_agent_that_lets_go_of_its_lease_is_silent_at_once(self, beat: LeaseRenewal) -> None:
        ward = Ward()
        ward.renew("n1")
        assert ward.agents.changed(AgentLease(LeaseMetadata("n1"), beat)) == ["n1"]
        assert ward.silent("n1") == ["n1"]
        assert ward.renew("n1") == ["n1"]
        assert ward.silent("n1") == []

    def test_a_lease_that_was_never_held(self) -> None:
        ward = Ward()
        assert ward.agents.changed(AgentLease(LeaseMetadata("n1"))) == ["n1"]
        assert ward.silent("n1") == ["n1"]

    def test_without_its_lease_a_node_is_like_any_other(self) -> None:
        ward = Ward()
        ward.renew("n1")
        ward.wait(10)
        assert ward.agents.changed(lease("n1", "9"), deleted=True) == ["n1"]
        assert ward.silent("n1") == []
        assert ward.agents.changed(lease("n1", "9"), deleted=True) == []


class TestLists:
    def test_a_list_shows_all_there_are(self) -> None:
        ward = Ward()
        ward.renew("n1", "n2")
        assert sorted(ward.agents.listed([lease("n2", "1"), lease("n3", "1")])) == ["n1", "n3"]
        assert [name in ward.agents for name in ("n1", "n2", "n3")] == [False, True, True]

    def test_to_be_listed_is_no_sign_of_life(self) -> None:
        ward = Ward()
        ward.agents.listed([lease("n1", "1")])
        ward.wait(6)
        assert ward.agents.listed([lease("n1", "1")]) == []
        assert ward.wait(4) == ["n1"]

    def test_who_has_renewed_between_two_lists_is_alive(self) -> None:
        ward = Ward()
        ward.agents.listed([lease("n1", "1")])
        ward.wait(10)
        assert ward.agents.listed([lease("n1", "2")]) == ["n1"]
        assert ward.silent("n1") == []


class TestWhatWeCannotSee:
    def test_while_the_watch_is_broken_nobody_falls_silent_and_then_all_begin_anew(self) -> None:
        ward = Ward()
        ward.renew("n1")
        ward.wait(8)
        ward.agents.watch_failed()
        assert ward.wait(60) == []
        blind = [ward.agents.is_disconnected]
        ward.agents.watch_alive()
        assert [*blind, ward.agents.is_disconnected] == [True, False]
        assert (ward.wait(9), ward.wait(1)) == ([], ["n1"])

    def test_who_was_silent_before_stays_so(self) -> None:
        ward = Ward()
        ward.renew("n1")
        ward.wait(10)
        ward.agents.watch_failed()
        ward.agents.watch_alive()
        assert ward.silent("n1") == ["n1"]

    def test_the_time_in_which_we_were_asleep_counts_for_nobody(self) -> None:
        ward = Ward()
        ward.renew("n1")
        ward.wait(5)
        ward.clock.now += 3600.0
        assert ward.agents.check() == []
        assert ward.agents.is_disconnected
        assert (ward.wait(9), ward.wait(1)) == ([], ["n1"])

    def test_a_short_pause_is_no_sleep(self) -> None:
        ward = Ward()
        ward.renew("n1")
        ward.wait(9)
        ward.clock.now += SUSPENDED
        assert ward.agents.check() == ["n1"]

    def test_when_a_crowd_stops_at_once_we_are_deaf_until_the_server_speaks(self) -> None:
        ward = Ward()
        crowd = ("n1", "n2", "n3", "n4")
        ward.wait(5, *crowd)
        assert ward.wait(40) == []
        ward.agents.watch_alive()  # a bookmark
        assert sorted(ward.wait(1)) == sorted(crowd)

    def test_one_of_a_crowd_is_believed_because_others_are_heard(self) -> None:
        ward = Ward()
        ward.wait(5, "n1", "n2", "n3", "n4")
        assert ward.wait(9, "n1", "n2", "n3") == []
        assert ward.wait(2, "n1", "n2", "n3") == ["n4"]

    def test_two_are_no_crowd(self) -> None:
        ward = Ward()
        ward.wait(5, "n1", "n2")
        assert sorted(ward.wait(10)) == ["n1", "n2"]


def test_they_are_counted() -> None:
    ward = Ward()
    ward.renew("n1", "n2", lasts=5)
    ward.wait(6, "n2")
    assert ward.agents.counts() == {"alive": 1, "stale": 1}


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
            said: Json = {"holderIdentity": name, "leaseDurationSeconds": 10, "renewTime": str(self.beats), **spec}
            self.api.add_lease(name, **said)
        return self.catch_up()

    def fault(self, name: str = "n1") -> str:
        found = self.ledger.fleet.node(name)
        assert found is not None
        return found.fault


def test_a_node_whose_agent_is_silent_is_refused_until_it_speaks() -> None:
    rig = Cluster()
    rig.arrive(tile(8))
    rig.wait(11)
    assert rig.filter().unresolvable == {"n1": SILENT, "n2": SILENT}
    assert rig.count("refusals_total", code="AgentStale") == 2
    assert Freed("n2") in rig.beat("n2")
    answer = rig.filter()
    assert (answer.names, answer.unresolvable) == (["n2"], {})


async def test_pods_that_wait_are_tried_again_when_an_agent_is_back() -> None:
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


async def test_the_reason_is_told_to_the_pod() -> None:
    rig = Cluster(node("n1").cards(1, size=16))
    rig.arrive(tile(8))
    rig.wait(11)
    rig.filter()
    await rig.pending_pods.round()
    (note,) = rig.api.notes
    assert SILENT in note.message


def test_a_node_whose_agent_has_stopped_is_refused_at_once() -> None:
    rig = Cluster()
    rig.arrive(tile(8))
    rig.beat("n1", holderIdentity="")
    assert rig.filter().names == ["n2"]
    assert rig.fault() == NodeReason.AGENT_SILENT


async def test_no_bind_goes_to_a_node_that_fell_silent_after_filter() -> None:
    rig = Cluster(node("n1").cards(1, size=16))
    rig.arrive(tile(8))
    assert rig.filter().names == ["n1"]
    rig.beat("n1", holderIdentity="")
    assert await rig.bind() == f"the pod no longer fits on node n1: {SILENT}"
    rig.beat("n1")
    assert await rig.bind() == ""


def test_pods_on_a_silent_node_keep_what_they_hold() -> None:
    rig = Cluster(node("n1").cards(1, size=16))
    rig.arrive(tile(8))
    rig.filter()
    assert rig.free() == [8]
    rig.wait(11)
    assert rig.free() == [8]
    rig.ledger.check()


def test_a_renewal_touches_nothing() -> None:
    """There are a thousand of them a second at 5,000 nodes."""
    rig = Cluster()
    before = rig.ledger.fleet.moment(), rig.ledger.fleet.capacity_generation()
    for _ in range(20):
        assert rig.beat("n1", "n2") == []
        rig.wait(1)
    assert (rig.ledger.fleet.moment(), rig.ledger.fleet.capacity_generation()) == before


def test_a_node_that_changes_while_its_agent_is_silent_stays_out_of_use() -> None:
    rig = Cluster()
    rig.wait(11)
    rig.api.add_node(node("n1").cards(2, size=16).manifest())
    rig.catch_up()
    assert rig.fault() == NodeReason.AGENT_SILENT
    rig.beat("n1")
    assert (rig.fault(), rig.free()) == ("", [16, 16])


def test_a_node_that_joins_after_its_lease() -> None:
    rig = Cluster()
    rig.beat("n9", holderIdentity="")
    rig.api.add_node(node("n9").cards(1, size=16).manifest())
    rig.catch_up()
    assert rig.fault("n9") == NodeReason.AGENT_SILENT


def test_what_is_wrong_with_the_node_itself_counts_first() -> None:
    rig = Cluster()
    rig.wait(11)
    broken = node("n1").cards(1, size=16).manifest()
    broken["metadata"]["annotations"][INVENTORY] = "{"
    rig.api.add_node(broken)
    rig.catch_up()
    assert rig.fault() == NodeReason.BAD_INVENTORY
    rig.beat("n1")
    assert rig.fault() == NodeReason.BAD_INVENTORY, "that its agent speaks does not mend it"
    rig.wait(11)
    rig.api.add_node(node("n1").cards(1, size=16).manifest())
    rig.catch_up()
    assert rig.fault() == NodeReason.AGENT_SILENT


def test_another_systems_node_is_not_judged_by_a_lease_that_was_left_behind() -> None:
    theirs = raw_node({"aliyun.com/gpu-mem": 32, "aliyun.com/gpu-count": 2})
    rig = Cluster(theirs)
    rig.beat("n1", holderIdentity="")
    assert rig.fault() == ""


class TestWhatTheySayOfUse:
    """Known only while it is fresh: what is old is not known."""

    def ward(self) -> Ward:
        ward = Ward()
        ward.agents.changed(lease("n1", "1", use="old"))
        ward.agents.changed(lease("n1", "2", use="new"))
        return ward

    def test_the_last_word_counts(self) -> None:
        assert self.ward().agents.use("n1") == "new"

    def test_a_lease_that_was_not_seen_renewed_may_be_old(self) -> None:
        ward = Ward()
        ward.agents.listed([lease("n1", "1", use="old")])
        assert ward.agents.use("n1") == ""

    def test_a_lease_that_somebody_else_touched_says_nothing_new(self) -> None:
        ward = self.ward()
        ward.agents.changed(lease("n1", "2", use="forged"))
        assert ward.agents.use("n1") == "new"

    def test_an_agent_that_says_nothing_any_more(self) -> None:
        ward = self.ward()
        ward.renew("n1")
        assert ward.agents.use("n1") == ""

    def test_it_is_forgotten_with_the_leases_own_time_also_while_our_watch_is_broken(self) -> None:
        ward = self.ward()
        ward.agents.watch_failed()
        ward.clock.now += 10
        assert ward.agents.use("n1") == "new"
        ward.clock.now += 1
        assert ward.agents.use("n1") == ""

    @pytest.mark.parametrize("deleted", [True, False], ids=["the-lease-is-gone", "the-agent-withdrew"])
    def test_it_ends_with_the_agent(self, deleted: bool) -> None:
        ward = self.ward()
        ward.agents.changed(lease("n1", "3", holder="", use="new"), deleted=deleted)
        assert ward.agents.use("n1") == ""

    def test_a_node_without_a_lease(self) -> None:
        assert self.ward().agents.use("n2") == ""
