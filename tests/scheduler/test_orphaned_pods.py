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


class Ward(Rig):
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
        ward = Ward()
        ward.run_pod()
        ward.force()
        assert (ward.free(), ward.state()) == ([8], AllocationState.CONFIRMED)
        ward.pass_time(GRACE)
        assert ward.free() == [8]
        assert Freed("n1") in ward.pass_time(3 + SETTLE)
        assert (ward.free(), ward.state()) == ([16], None)
        ward.ledger.check()

    @pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
    def test_a_pod_with_a_terminal_phase_is_gone_at_once(self, phase: str) -> None:
        """A kubelet removes a pod so: first a terminal phase, then the object."""
        ward = Ward()
        ward.run_pod()
        ward.change("web-0", status={"phase": phase})
        ward.catch_up()
        assert ward.free() == [16]
        assert ward.force() == []
        assert (ward.free(), ward.state()) == ([16], None)

    def test_the_terminal_phase_may_be_shown_with_the_deletion_itself(self) -> None:
        ward = Ward()
        ward.run_pod()
        ward.change("web-0", status={"phase": "Failed"})
        ward.api.events.clear()
        ward.force()
        assert ward.free() == [16]

    @pytest.mark.parametrize("phase", ["Pending", "Running", "Unknown", None])
    def test_any_other_phase_proves_nothing(self, phase: str | None) -> None:
        ward = Ward()
        ward.run_pod(phase=phase)
        ward.force()
        assert ward.free() == [8]

    def test_a_pod_that_was_never_bound_holds_nothing(self) -> None:
        ward = Ward()
        ward.arrive(tile(8))
        assert ward.filter(nodes=["n1"]).names == ["n1"]
        ward.force()
        assert (ward.free(), len(ward.cluster_state.orphans)) == ([16], 0)

    def test_on_a_node_without_an_agent_the_tile_is_free_at_once(self) -> None:
        ward = Ward()
        ward.run_pod("n2")
        ward.force()
        assert ward.free("n2") == [16]

    def test_on_a_node_of_another_system_a_leftover_lease_keeps_nothing(self) -> None:
        ward = Ward()
        ward.api.add_lease("n2", holderIdentity="", renewTime="1")
        theirs = ward.manifest("n2")
        theirs["metadata"]["annotations"] = {
            "hami.io/node-nvidia-register": "GPU-n2-0,10,16,100,NVIDIA-T4,0,true:",
        }
        ward.api.add_node(theirs)
        ward.catch_up()
        known = ward.ledger.fleet.node("n2")
        assert known is not None
        assert known.agent == "hami"
        ward.run_pod("n2")
        assert ward.free("n2") == [8]
        ward.force()
        assert ward.free("n2") == [16]

    def test_a_pod_without_gpus_frees_its_cpu(self) -> None:
        ward = Ward()
        ward.arrive({"cpu": "2"}, on="n1")
        ward.force()
        assert ward.state() is None

    def test_an_undecodable_deletion_proves_nothing_about_containers(self) -> None:
        ward = Ward()
        ward.run_pod()
        named = Metadata(name="web-0", namespace="default", uid="uid-web-0")
        ward.cluster_state.pod_changed(Pod(metadata=named), deleted=True)
        assert ward.free() == [8]

    def test_a_kept_tile_holds_no_cpu_and_cannot_be_preempted(self) -> None:
        ward = Ward()
        ward.run_pod()
        assert ward.ledger.fleet.view("n1").cpu == 62000
        assert Freed("n1") in ward.force()
        assert ward.ledger.fleet.view("n1").cpu == 64000
        (entry,) = ward.ledger.on_node("n1")
        assert (entry.allocation.priority, entry.allocation.name) == (NEVER_PREEMPTED, "default/web-0")
        ward.ledger.check()

    def test_it_is_counted(self) -> None:
        ward = Ward()
        ward.run_pod()
        ward.force()
        assert len(ward.cluster_state.orphans) == 1
        ward.pass_time(WORST)
        assert len(ward.cluster_state.orphans) == 0


class TestWhichAgentsProveTheEnd:
    def test_a_dead_agent_proves_nothing_however_long(self) -> None:
        ward = Ward()
        ward.run_pod()
        ward.alive = False
        ward.force()
        ward.pass_time(600)
        assert ward.free() == [8]
        ward.alive = True
        ward.pass_time(SETTLE + 2)
        assert ward.free() == [16]

    def test_nor_does_an_agent_whose_lease_is_longer_than_the_grace(self) -> None:
        """It is not stale yet, and yet it is dead."""
        ward = Ward()
        ward.run_pod()
        ward.beat(leaseDurationSeconds=3600)
        ward.alive = False
        ward.force()
        ward.pass_time(100)
        assert not ward.cluster_state.agents.is_stale("n1")
        assert ward.free() == [8]

    def test_nor_an_agent_that_dies_before_the_grace_is_over(self) -> None:
        ward = Ward()
        ward.run_pod()
        ward.force()
        ward.pass_time(GRACE - 2)
        ward.alive = False
        ward.pass_time(100)
        assert ward.free() == [8]

    def test_nor_an_agent_that_stops_gracefully(self) -> None:
        ward = Ward()
        ward.run_pod()
        ward.force()
        ward.alive = False
        ward.pass_time(GRACE)
        ward.beat(holderIdentity="")
        ward.pass_time(100)
        assert ward.free() == [8]

    def test_an_agent_that_comes_back_and_reports_at_once_keeps_the_tile(self) -> None:
        """Its renewal may overtake its earlier report: they arrive over two watches."""
        ward = Ward()
        ward.run_pod()
        ward.alive = False
        ward.force()
        ward.pass_time(60)
        ward.beat()
        ward.cluster_state.orphans.tick()
        assert ward.free() == [8]
        ward.reports(held())
        ward.alive = True
        ward.pass_time(60)
        assert ward.free() == [8]

    def test_while_our_watch_is_broken_the_grace_restarts(self) -> None:
        ward = Ward()
        ward.run_pod()
        ward.force()
        ward.pass_time(60, is_disconnected=True)
        assert ward.free() == [8]
        ward.pass_time(GRACE)
        assert ward.free() == [8]
        ward.pass_time(3 + SETTLE)
        assert ward.free() == [16]

    def test_also_the_watch_of_the_leases(self) -> None:
        ward = Ward()
        ward.run_pod()
        ward.force()
        ward.alive = False
        ward.cluster_state.agents.watch_failed()
        ward.pass_time(60)
        ward.beat()  # connected again; when the renewal was sent is unknown
        ward.pass_time(5)
        assert ward.free() == [8]

    def test_when_the_lease_itself_is_deleted_only_the_grace_counts(self) -> None:
        ward = Ward()
        ward.run_pod()
        ward.force()
        ward.alive = False
        ward.api.delete_lease("n1")
        ward.catch_up()
        ward.pass_time(GRACE - 1)
        assert ward.free() == [8]
        ward.pass_time(1)
        assert ward.free() == [16]


# ---- reports of the agent -------------------------------------------------------------------------------------------


class TestReported:
    def test_a_reported_tile_is_kept_until_it_is_no_longer_reported(self) -> None:
        ward = Ward()
        ward.run_pod()
        ward.force()
        ward.pass_time(5)
        ward.reports(held())
        ward.pass_time(600)
        assert ward.free() == [8]
        assert Freed("n1") in ward.reports()
        assert (ward.free(), ward.state()) == ([16], None)

    def test_the_report_may_come_before_the_deletion(self) -> None:
        ward = Ward()
        ward.run_pod()
        ward.reports(held())
        assert ward.free() == [8]
        ward.force()
        ward.pass_time(600)
        assert ward.free() == [8]
        ward.reports()
        assert ward.free() == [16]

    def test_an_existing_pod_counts_by_itself_whatever_the_agent_reports(self) -> None:
        ward = Ward()
        ward.run_pod()
        ward.reports(held())
        ward.reports()
        assert (ward.free(), ward.state()) == ([8], AllocationState.CONFIRMED)

    def test_reported_and_dropped_before_the_deletion_is_shown(self) -> None:
        ward = Ward()
        ward.run_pod()
        ward.reports(held())
        ward.reports()
        ward.force()
        assert ward.free() == [8]
        ward.pass_time(WORST)
        assert ward.free() == [16]

    def test_a_terminal_phase_does_not_overrule_the_report(self) -> None:
        """Other clients than the kubelet write phases too."""
        ward = Ward()
        ward.run_pod()
        ward.reports(held())
        ward.change("web-0", status={"phase": "Failed"})
        ward.catch_up()
        assert ward.free() == [8]
        ward.relist()
        assert ward.free() == [8]
        ward.reports()
        assert ward.free() == [16]

    def test_a_restarted_scheduler_reads_the_report_from_the_node(self) -> None:
        ward = Ward(named=(held(),))
        assert ward.free() == [8]
        (entry,) = ward.ledger.on_node("n1")
        assert (entry.state, entry.allocation.priority) == (AllocationState.CONFIRMED, NEVER_PREEMPTED)
        ward.relist()
        ward.pass_time(60)
        assert ward.free() == [8]
        ward.reports()
        assert ward.free() == [16]

    def test_the_grant_of_an_existing_pod_overrules_the_report(self) -> None:
        running = Ward()
        running.run_pod()
        ward = Ward(running.live(), named=(held(memory=4),))
        (entry,) = ward.ledger.on_node("n1")
        assert (ward.free(), entry.allocation.priority, entry.allocation.cpu) == ([8], 0, 2000)
        assert len(ward.cluster_state.orphans) == 0

    def test_it_is_freed_with_the_node(self) -> None:
        ward = Ward(named=(held(),))
        ward.api.delete_node("n1")
        ward.catch_up()
        assert ward.state() is None
        ward.api.add_node(ward.manifest("n1"))
        ward.catch_up()
        assert ward.free() == [16]

    def test_a_report_about_a_pending_pod_is_ignored(self) -> None:
        ward = Ward()
        ward.arrive(tile(8))
        ward.reports(held())
        assert (ward.state(), ward.free()) == (None, [16])
        assert ward.filter().names

    def test_a_pod_that_is_pending_after_all_has_no_containers(self) -> None:
        ward = Ward(named=(held(),))
        ward.arrive(tile(8))
        assert (ward.state(), ward.free()) == (None, [16])

    @pytest.mark.parametrize("text", ["{", "[]", '{"version":2,"grants":[]}'])
    def test_an_undecodable_report_changes_nothing_and_is_logged(
        self, text: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        ward = Ward(named=(held(),))
        ward.reports(text=text)
        assert ward.free() == [8]
        assert "ignoring invalid agent annotation" in caplog.text
        ward.reports()
        assert ward.free() == [16]

    def test_another_node_cannot_report_it(self) -> None:
        ward = Ward(named=(held(),))
        ward.api.add_node(ward.manifest("n2", (held(on="n2"),)))
        ward.catch_up()
        assert (ward.free("n1"), ward.free("n2")) == ([8], [16])
        ward.ledger.check()

    def test_two_orphaned_pods(self) -> None:
        ward = Ward(named=(held("uid-a", 4), held("uid-b", 8)))
        assert ward.free() == [4]
        ward.reports(held("uid-b", 8))
        assert ward.free() == [8]


# ---- lists and looks ------------------------------------------------------------------------------------------------


class TestGaps:
    def test_a_pod_that_is_missing_in_a_list_may_have_been_force_deleted(self) -> None:
        ward = Ward()
        ward.run_pod()
        ward.api.delete_pod("default/web-0")
        ward.relist()
        assert ward.free() == [8]
        ward.relist()
        ward.pass_time(GRACE)
        assert ward.free() == [8]
        ward.pass_time(3 + SETTLE)
        assert ward.free() == [16]

    def test_a_pod_that_a_list_shows_in_a_terminal_phase_has_ended(self) -> None:
        ward = Ward()
        ward.run_pod()
        ward.change("web-0", status={"phase": "Succeeded"})
        ward.relist()
        assert ward.free() == [16]

    def test_an_undecodable_pod_is_not_gone(self) -> None:
        ward = Ward()
        ward.run_pod()
        ward.cluster_state.pods_listed([], {"default/web-0"})
        assert (ward.free(), len(ward.cluster_state.orphans)) == ([8], 0)

    def test_a_pod_that_is_shown_again_counts_by_itself(self) -> None:
        ward = Ward()
        ward.run_pod()
        live = ward.live()
        ward.force()
        ward.cluster_state.pod_changed(msgspec.convert(live, Pod))
        assert len(ward.cluster_state.orphans) == 0
        ward.pass_time(60)
        assert ward.free() == [8]

    async def test_a_bind_that_may_have_been_written_for_a_deleted_pod(self) -> None:
        """The watch is late; a live lookup finds no pod, and perhaps a container runs."""
        ward = Ward()
        ward.arrive(tile(8))
        ward.filter(nodes=["n1"])
        ward.api.script["bind"] = [OutcomeUnknown("reset")] * 9
        assert "until the outcome is known" in await ward.bind()
        ward.api.pods.clear()
        ward.reconciler.look_up("uid-web-0")
        await ward.reconciler.round()
        assert (ward.free(), ward.state()) == ([8], AllocationState.CONFIRMED)
        ward.pass_time(WORST)
        assert ward.free() == [16]

    def test_a_replacement_stays_pending_until_the_tile_is_free(self) -> None:
        ward = Ward()
        ward.run_pod()
        ward.force()
        ward.arrive(tile(16), name="next")
        assert ward.filter("next", ["n1"]).names == []
        ward.pass_time(WORST)
        assert ward.filter("next", ["n1"]).names == ["n1"]


def test_allocations_in_other_states_are_ignored() -> None:
    ward = Ward()
    assert ward.cluster_state.vanished("uid-unknown") == []
    assert ward.cluster_state.orphans.allocations() == list[Allocation]()
