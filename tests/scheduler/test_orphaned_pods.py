"""Deleted pods whose containers may still run: which tiles are kept, for how long, and which report frees them."""

from typing import Any

import msgspec
import pytest

from gputile.dialects.gputile import ORPHANED, write_orphaned_pods
from gputile.dialects.kube_objects import Metadata, Pod
from gputile.kube.api import Json, OutcomeUnknown
from gputile.ledger.events import Freed
from gputile.ledger.ledger import AllocationState
from gputile.model.allocations import Allocation
from gputile.model.grants import ContainerGrant, Grant, Tile
from gputile.scheduler.state.agent_liveness import AgentLivenessSettings
from gputile.scheduler.state.orphaned_pods import NEVER_PREEMPTED, SETTLE
from gputile.testing.builders import node
from tests.scheduler.rig import Rig, tile
from tests.scheduler.test_cluster_state import grant

GRACE = AgentLivenessSettings().orphan_grace
WORST = GRACE + 3 + SETTLE  # the grace, the next renewal of an agent that renews every other second, and its delay


def held(uid: str = "uid-web-0", memory: int = 8, on: str = "n1") -> Grant:
    """An agent's report of an orphaned pod."""
    tiles = (Tile(f"GPU-{on}-0", 0, memory, 0),)
    return Grant(pod=uid, node=on, dialect="gputile", containers=(ContainerGrant("c0", tiles),))


class AgentRig(Rig):
    """n1 has one card and an agent, which renews its Lease as long as it is alive. n2 has no agent."""

    def __init__(self, *pods: Json, named: tuple[Grant, ...] = ()) -> None:
        super().__init__(self.manifest("n1", named), self.manifest("n2"), pods=pods)
        self.alive, self.beats = True, 0
        self.beat()

    @staticmethod
    def manifest(name: str, named: tuple[Grant, ...] = (), text: str | None = None) -> Json:
        manifest = node(name).cards(1, size=16).manifest()
        if named or text is not None:
            manifest["metadata"]["annotations"][ORPHANED] = write_orphaned_pods(named) if text is None else text
        return manifest

    def beat(self, **spec: Any) -> None:
        self.beats += 1
        lease: Json = {"holderIdentity": "n1", "leaseDurationSeconds": 10, "renewTime": str(self.beats), **spec}
        self.api.add_lease("n1", **lease)
        self.catch_up()

    def reports(self, *named: Grant, text: str | None = None) -> list[Any]:
        """The agent of n1 reports what still runs."""
        self.api.add_node(self.manifest("n1", named, text))
        return self.catch_up()

    def pass_time(self, seconds: float, **how: Any) -> list[Any]:
        done = []
        for second in range(int(seconds)):
            if self.alive and second % 2 == 0:
                self.beat()
            done += self.wait(1.0, **how)
        return done

    def run_pod(self, on: str = "n1", name: str = "web-0", **status: Any) -> None:
        """A pod of ours that runs on the node."""
        self.arrive(tile(8, cpu="2"), name=name, annotations=grant(name=name, on=on), on=on)
        self.change(name, status={"phase": "Running", **status})
        self.catch_up()

    def force(self, name: str = "web-0") -> list[Any]:
        """kubectl delete --force: only the object is gone."""
        self.api.delete_pod(f"default/{name}")
        return self.catch_up()


# ---- the moment after the deletion ----------------------------------------------------------------------------------


class TestKept:
    def test_a_tile_is_kept_until_the_agent_could_report_and_then_freed(self) -> None:
        rig = AgentRig()
        rig.run_pod()
        rig.force()
        assert (rig.free(), rig.state()) == ([8], AllocationState.CONFIRMED)
        rig.pass_time(GRACE)
        assert rig.free() == [8]
        assert Freed("n1") in rig.pass_time(3 + SETTLE)
        assert (rig.free(), rig.state()) == ([16], None)
        rig.ledger.check()

    @pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
    def test_a_pod_with_a_terminal_phase_is_gone_at_once(self, phase: str) -> None:
        """A kubelet removes a pod so: first a terminal phase, then the object."""
        rig = AgentRig()
        rig.run_pod()
        rig.change("web-0", status={"phase": phase})
        rig.catch_up()
        assert rig.free() == [16]
        assert rig.force() == []
        assert (rig.free(), rig.state()) == ([16], None)

    def test_the_terminal_phase_may_be_shown_with_the_deletion_itself(self) -> None:
        rig = AgentRig()
        rig.run_pod()
        rig.change("web-0", status={"phase": "Failed"})
        rig.api.events.clear()
        rig.force()
        assert rig.free() == [16]

    @pytest.mark.parametrize("phase", ["Pending", "Running", "Unknown", None])
    def test_any_other_phase_proves_nothing(self, phase: str | None) -> None:
        rig = AgentRig()
        rig.run_pod(phase=phase)
        rig.force()
        assert rig.free() == [8]

    def test_a_pod_that_was_never_bound_holds_nothing(self) -> None:
        rig = AgentRig()
        rig.arrive(tile(8))
        assert rig.filter(nodes=["n1"]).names == ["n1"]
        rig.force()
        assert (rig.free(), len(rig.cluster_state.orphans)) == ([16], 0)

    def test_on_a_node_without_an_agent_the_tile_is_free_at_once(self) -> None:
        rig = AgentRig()
        rig.run_pod("n2")
        rig.force()
        assert rig.free("n2") == [16]

    def test_on_a_node_of_another_system_a_leftover_lease_keeps_nothing(self) -> None:
        rig = AgentRig()
        rig.api.add_lease("n2", holderIdentity="", renewTime="1")
        theirs = rig.manifest("n2")
        theirs["metadata"]["annotations"] = {
            "hami.io/node-nvidia-register": "GPU-n2-0,10,16,100,NVIDIA-T4,0,true:",
        }
        rig.api.add_node(theirs)
        rig.catch_up()
        known = rig.ledger.fleet.node("n2")
        assert known is not None
        assert known.agent == "hami"
        rig.run_pod("n2")
        assert rig.free("n2") == [8]
        rig.force()
        assert rig.free("n2") == [16]

    def test_a_pod_without_gpus_frees_its_cpu(self) -> None:
        rig = AgentRig()
        rig.arrive({"cpu": "2"}, on="n1")
        rig.force()
        assert rig.state() is None

    def test_an_undecodable_deletion_proves_nothing_about_containers(self) -> None:
        rig = AgentRig()
        rig.run_pod()
        named = Metadata(name="web-0", namespace="default", uid="uid-web-0")
        rig.cluster_state.pod_changed(Pod(metadata=named), deleted=True)
        assert rig.free() == [8]

    def test_a_kept_tile_holds_no_cpu_and_cannot_be_preempted(self) -> None:
        rig = AgentRig()
        rig.run_pod()
        assert rig.ledger.fleet.view("n1").cpu == 62000
        assert Freed("n1") in rig.force()
        assert rig.ledger.fleet.view("n1").cpu == 64000
        (entry,) = rig.ledger.on_node("n1")
        assert (entry.allocation.priority, entry.allocation.name) == (NEVER_PREEMPTED, "default/web-0")
        rig.ledger.check()

    def test_it_is_counted(self) -> None:
        rig = AgentRig()
        rig.run_pod()
        rig.force()
        assert len(rig.cluster_state.orphans) == 1
        rig.pass_time(WORST)
        assert len(rig.cluster_state.orphans) == 0


class TestWhichAgentsProveTheEnd:
    def test_a_dead_agent_proves_nothing_however_long(self) -> None:
        rig = AgentRig()
        rig.run_pod()
        rig.alive = False
        rig.force()
        rig.pass_time(600)
        assert rig.free() == [8]
        rig.alive = True
        rig.pass_time(SETTLE + 2)
        assert rig.free() == [16]

    def test_nor_does_an_agent_whose_lease_is_longer_than_the_grace(self) -> None:
        """It is not stale yet, and yet it is dead."""
        rig = AgentRig()
        rig.run_pod()
        rig.beat(leaseDurationSeconds=3600)
        rig.alive = False
        rig.force()
        rig.pass_time(100)
        assert not rig.cluster_state.agents.is_stale("n1")
        assert rig.free() == [8]

    def test_nor_an_agent_that_dies_before_the_grace_is_over(self) -> None:
        rig = AgentRig()
        rig.run_pod()
        rig.force()
        rig.pass_time(GRACE - 2)
        rig.alive = False
        rig.pass_time(100)
        assert rig.free() == [8]

    def test_nor_an_agent_that_stops_gracefully(self) -> None:
        rig = AgentRig()
        rig.run_pod()
        rig.force()
        rig.alive = False
        rig.pass_time(GRACE)
        rig.beat(holderIdentity="")
        rig.pass_time(100)
        assert rig.free() == [8]

    def test_an_agent_that_comes_back_and_reports_at_once_keeps_the_tile(self) -> None:
        """Its renewal may overtake its earlier report: they arrive over two watches."""
        rig = AgentRig()
        rig.run_pod()
        rig.alive = False
        rig.force()
        rig.pass_time(60)
        rig.beat()
        rig.cluster_state.orphans.tick()
        assert rig.free() == [8]
        rig.reports(held())
        rig.alive = True
        rig.pass_time(60)
        assert rig.free() == [8]

    def test_while_our_watch_is_broken_the_grace_restarts(self) -> None:
        rig = AgentRig()
        rig.run_pod()
        rig.force()
        rig.pass_time(60, is_disconnected=True)
        assert rig.free() == [8]
        rig.pass_time(GRACE)
        assert rig.free() == [8]
        rig.pass_time(3 + SETTLE)
        assert rig.free() == [16]

    def test_also_the_watch_of_the_leases(self) -> None:
        rig = AgentRig()
        rig.run_pod()
        rig.force()
        rig.alive = False
        rig.cluster_state.agents.watch_failed()
        rig.pass_time(60)
        rig.beat()  # connected again; when the renewal was sent is unknown
        rig.pass_time(5)
        assert rig.free() == [8]

    def test_when_the_lease_itself_is_deleted_only_the_grace_counts(self) -> None:
        rig = AgentRig()
        rig.run_pod()
        rig.force()
        rig.alive = False
        rig.api.delete_lease("n1")
        rig.catch_up()
        rig.pass_time(GRACE - 1)
        assert rig.free() == [8]
        rig.pass_time(1)
        assert rig.free() == [16]


# ---- reports of the agent -------------------------------------------------------------------------------------------


class TestReported:
    def test_a_reported_tile_is_kept_until_it_is_no_longer_reported(self) -> None:
        rig = AgentRig()
        rig.run_pod()
        rig.force()
        rig.pass_time(5)
        rig.reports(held())
        rig.pass_time(600)
        assert rig.free() == [8]
        assert Freed("n1") in rig.reports()
        assert (rig.free(), rig.state()) == ([16], None)

    def test_the_report_may_come_before_the_deletion(self) -> None:
        rig = AgentRig()
        rig.run_pod()
        rig.reports(held())
        assert rig.free() == [8]
        rig.force()
        rig.pass_time(600)
        assert rig.free() == [8]
        rig.reports()
        assert rig.free() == [16]

    def test_an_existing_pod_counts_by_itself_whatever_the_agent_reports(self) -> None:
        rig = AgentRig()
        rig.run_pod()
        rig.reports(held())
        rig.reports()
        assert (rig.free(), rig.state()) == ([8], AllocationState.CONFIRMED)

    def test_reported_and_dropped_before_the_deletion_is_shown(self) -> None:
        rig = AgentRig()
        rig.run_pod()
        rig.reports(held())
        rig.reports()
        rig.force()
        assert rig.free() == [8]
        rig.pass_time(WORST)
        assert rig.free() == [16]

    def test_a_terminal_phase_does_not_overrule_the_report(self) -> None:
        """Other clients than the kubelet write phases too."""
        rig = AgentRig()
        rig.run_pod()
        rig.reports(held())
        rig.change("web-0", status={"phase": "Failed"})
        rig.catch_up()
        assert rig.free() == [8]
        rig.relist()
        assert rig.free() == [8]
        rig.reports()
        assert rig.free() == [16]

    def test_a_restarted_scheduler_reads_the_report_from_the_node(self) -> None:
        rig = AgentRig(named=(held(),))
        assert rig.free() == [8]
        (entry,) = rig.ledger.on_node("n1")
        assert (entry.state, entry.allocation.priority) == (AllocationState.CONFIRMED, NEVER_PREEMPTED)
        rig.relist()
        rig.pass_time(60)
        assert rig.free() == [8]
        rig.reports()
        assert rig.free() == [16]

    def test_the_grant_of_an_existing_pod_overrules_the_report(self) -> None:
        running = AgentRig()
        running.run_pod()
        rig = AgentRig(running.live(), named=(held(memory=4),))
        (entry,) = rig.ledger.on_node("n1")
        assert (rig.free(), entry.allocation.priority, entry.allocation.cpu) == ([8], 0, 2000)
        assert len(rig.cluster_state.orphans) == 0

    def test_it_is_freed_with_the_node(self) -> None:
        rig = AgentRig(named=(held(),))
        rig.api.delete_node("n1")
        rig.catch_up()
        assert rig.state() is None
        rig.api.add_node(rig.manifest("n1"))
        rig.catch_up()
        assert rig.free() == [16]

    def test_a_report_about_a_pending_pod_is_ignored(self) -> None:
        rig = AgentRig()
        rig.arrive(tile(8))
        rig.reports(held())
        assert (rig.state(), rig.free()) == (None, [16])
        assert rig.filter().names

    def test_a_pod_that_is_pending_after_all_has_no_containers(self) -> None:
        rig = AgentRig(named=(held(),))
        rig.arrive(tile(8))
        assert (rig.state(), rig.free()) == (None, [16])

    @pytest.mark.parametrize("text", ["{", "[]", '{"version":2,"grants":[]}'])
    def test_an_undecodable_report_changes_nothing_and_is_logged(
        self, text: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        rig = AgentRig(named=(held(),))
        rig.reports(text=text)
        assert rig.free() == [8]
        assert "ignoring invalid agent annotation" in caplog.text
        rig.reports()
        assert rig.free() == [16]

    def test_another_node_cannot_report_it(self) -> None:
        rig = AgentRig(named=(held(),))
        rig.api.add_node(rig.manifest("n2", (held(on="n2"),)))
        rig.catch_up()
        assert (rig.free("n1"), rig.free("n2")) == ([8], [16])
        rig.ledger.check()

    def test_two_orphaned_pods(self) -> None:
        rig = AgentRig(named=(held("uid-a", 4), held("uid-b", 8)))
        assert rig.free() == [4]
        rig.reports(held("uid-b", 8))
        assert rig.free() == [8]


# ---- lists and looks ------------------------------------------------------------------------------------------------


class TestGaps:
    def test_a_pod_that_is_missing_in_a_list_may_have_been_force_deleted(self) -> None:
        rig = AgentRig()
        rig.run_pod()
        rig.api.delete_pod("default/web-0")
        rig.relist()
        assert rig.free() == [8]
        rig.relist()
        rig.pass_time(GRACE)
        assert rig.free() == [8]
        rig.pass_time(3 + SETTLE)
        assert rig.free() == [16]

    def test_a_pod_that_a_list_shows_in_a_terminal_phase_has_ended(self) -> None:
        rig = AgentRig()
        rig.run_pod()
        rig.change("web-0", status={"phase": "Succeeded"})
        rig.relist()
        assert rig.free() == [16]

    def test_an_undecodable_pod_is_not_gone(self) -> None:
        rig = AgentRig()
        rig.run_pod()
        rig.cluster_state.pods_listed([], {"default/web-0"})
        assert (rig.free(), len(rig.cluster_state.orphans)) == ([8], 0)

    def test_a_pod_that_is_shown_again_counts_by_itself(self) -> None:
        rig = AgentRig()
        rig.run_pod()
        live = rig.live()
        rig.force()
        rig.cluster_state.pod_changed(msgspec.convert(live, Pod))
        assert len(rig.cluster_state.orphans) == 0
        rig.pass_time(60)
        assert rig.free() == [8]

    async def test_a_bind_that_may_have_been_written_for_a_deleted_pod(self) -> None:
        """The watch is late; a live lookup finds no pod, and perhaps a container runs."""
        rig = AgentRig()
        rig.arrive(tile(8))
        rig.filter(nodes=["n1"])
        rig.api.script["bind"] = [OutcomeUnknown("reset")] * 9
        assert "until the outcome is known" in await rig.bind()
        rig.api.pods.clear()
        rig.binds.unknown.add("uid-web-0")
        await rig.reconciler.round()
        assert (rig.free(), rig.state()) == ([8], AllocationState.CONFIRMED)
        rig.pass_time(WORST)
        assert rig.free() == [16]

    def test_a_replacement_stays_pending_until_the_tile_is_free(self) -> None:
        rig = AgentRig()
        rig.run_pod()
        rig.force()
        rig.arrive(tile(16), name="next")
        assert rig.filter("next", ["n1"]).names == []
        rig.pass_time(WORST)
        assert rig.filter("next", ["n1"]).names == ["n1"]


def test_allocations_in_other_states_are_ignored() -> None:
    rig = AgentRig()
    assert rig.cluster_state.vanished("uid-unknown") == []
    assert rig.cluster_state.orphans.allocations() == list[Allocation]()
