"""Guarantee 1 for force-deleted pods: no tile is allocated again while a container of a deleted pod still uses it.

A hypothesis state machine plays kube-scheduler and API server, a kubelet whose containers outlive their pods, its agent
(which reports them within a few seconds, dies, stops and comes back), and our watches, each of which is late by itself,
or breaks. The oracle knows which containers run, and adds up what they use of each card.

Deliberate bugs it was seen to catch, each alone:
  1. `OrphanTracker.vanished` frees the tile at once.
  2. `OrphanTracker._is_over` frees the tile by time alone, whether the agent is alive or not.
  3. `OrphanTracker.tick` frees tiles while our watch is broken.
  4. `ClusterState.pods_listed` forgets kept tiles.
  5. `ClusterState.pods_listed` takes missing pods for ended pods.
  6. `OrphanTracker.reported` ignores reports about kept tiles: they are freed after a while.
  7. `OrphanTracker.reported` does not free tiles: they leak.
"""

import asyncio
from collections import Counter

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gputile.dialects.gputile import ORPHANED, write_orphaned_pods
from gputile.dialects.kube_objects import NodeObject, Pod
from gputile.kube.api import Json
from gputile.ledger.events import Tick
from gputile.model.grants import Grant
from gputile.testing.builders import node, pod
from tests.effort import EFFORT
from tests.scheduler.rig import Rig, tile

SIZE, CARDS = 8, 2
HASTE = 5  # seconds within which a living agent reports what it finds
DURATION = 10  # seconds; the duration of its Lease
SLOW = st.integers(0, HASTE)


class Cluster(RuleBasedStateMachine):
    """One node with an agent. `running` is what only the node knows."""

    @initialize(duration=st.sampled_from([DURATION, 60]))
    def start(self, duration: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.rig = Rig(node("n1").cards(CARDS, size=SIZE))
        self.duration, self.born, self.beats = duration, 0, 0
        self.running: dict[str, Grant] = {}
        self.reported: set[str] = set()
        self.alive, self.broken, self.slow = True, set[str](), 0
        self.renew()
        self.deliver("Lease")

    # ---- pods -------------------------------------------------------------------------------------------------------

    @rule(memory=st.sampled_from([3, 5, 8]))
    def a_pod_comes_and_starts(self, memory: int) -> None:
        self.deliver("Pod")
        self.born += 1
        name = f"p{self.born}"
        self.rig.api.add_pod(pod(tile(memory), name=name, uid=f"uid-{name}"))
        self.deliver("Pod")
        if self.rig.filter(name).names and self.loop.run_until_complete(self.rig.bind(name)) == "":
            entry = self.rig.ledger.entry(f"uid-{name}")
            assert entry is not None
            assert entry.allocation.grant is not None
            self.running[f"uid-{name}"] = entry.allocation.grant

    def bound(self) -> list[str]:
        return [item["metadata"]["name"] for item in self.rig.api.pods.values() if item["spec"]["nodeName"]]

    @precondition(lambda self: self.bound())
    @rule(data=st.data())
    def a_pod_is_deleted_by_force(self, data: st.DataObject) -> None:
        self.rig.api.delete_pod(f"default/{data.draw(st.sampled_from(self.bound()))}")

    @precondition(lambda self: self.bound())
    @rule(data=st.data(), deleted=st.booleans())
    def a_pod_ends(self, data: st.DataObject, deleted: bool) -> None:
        """As a kubelet does it: first the containers, then the phase, then the object."""
        name = data.draw(st.sampled_from(self.bound()))
        self.running.pop(f"uid-{name}", None)
        self.rig.change(name, status={"phase": "Succeeded"})
        if deleted:
            self.rig.api.delete_pod(f"default/{name}")

    def orphans(self) -> set[str]:
        shown = {item["metadata"]["uid"] for item in self.rig.api.pods.values()}
        return set(self.running) - shown

    @precondition(lambda self: self.orphans())
    @rule(data=st.data())
    def an_orphan_ends(self, data: st.DataObject) -> None:
        del self.running[data.draw(st.sampled_from(sorted(self.orphans())))]

    # ---- the agent --------------------------------------------------------------------------------------------------

    def renew(self, holder: str = "n1") -> None:
        self.beats += 1
        spec: Json = {"holderIdentity": holder, "leaseDurationSeconds": self.duration, "renewTime": str(self.beats)}
        self.rig.api.add_lease("n1", **spec)

    def compare(self) -> None:
        """Report what runs without a pod; also remove entries of pods that are back, or of containers that are gone."""
        orphans = self.orphans()
        if orphans != self.reported:
            self.reported = orphans
            manifest = msgspec.json.decode(msgspec.json.encode(self.rig.api.nodes["n1"]))
            manifest["metadata"]["annotations"][ORPHANED] = write_orphaned_pods(
                self.running[uid] for uid in sorted(orphans)
            )
            self.rig.api.add_node(manifest)

    @precondition(lambda self: self.alive)
    @rule(releases=st.booleans())
    def the_agent_stops(self, releases: bool) -> None:
        self.alive = False
        if releases:
            self.renew(holder="")

    @precondition(lambda self: not self.alive)
    @rule()
    def the_agent_comes_back(self) -> None:
        self.alive = True
        self.compare()
        self.renew()

    # ---- our watches ------------------------------------------------------------------------------------------------

    @rule(kind=st.sampled_from(["Pod", "Node", "Lease"]))
    def a_watch_catches_up(self, kind: str) -> None:
        if kind not in self.broken:
            self.deliver(kind)

    def deliver(self, kind: str) -> None:
        """Deliver the events of one watch; the others wait."""
        events = self.rig.api.events
        rest = [event for event in events if event[0] != kind]
        events[:] = [event for event in events if event[0] == kind]
        self.rig.catch_up()
        events[:] = rest

    @rule(kind=st.sampled_from(["Pod", "Node", "Lease"]))
    def a_watch_breaks(self, kind: str) -> None:
        self.broken.add(kind)
        if kind == "Lease":
            self.rig.cluster_state.agents.watch_failed()

    @precondition(lambda self: self.broken)
    @rule(data=st.data(), lists=st.booleans())
    def a_watch_recovers(self, data: st.DataObject, lists: bool) -> None:
        """It continues where it broke, or with a list, which does not show what happened in between."""
        kind = data.draw(st.sampled_from(sorted(self.broken)))
        self.broken.discard(kind)
        if lists and kind != "Lease":
            self.rig.api.events[:] = [event for event in self.rig.api.events if event[0] != kind]
            self.relist(kind)
        self.deliver(kind)
        if kind == "Lease":
            self.rig.cluster_state.agents.watch_alive()

    def relist(self, kind: str) -> None:
        api, cluster_state = self.rig.api, self.rig.cluster_state
        if kind == "Pod":
            self.rig.apply(cluster_state.pods_listed([msgspec.convert(item, Pod) for item in api.pods.values()]))
        else:
            self.rig.apply(
                cluster_state.nodes_listed([msgspec.convert(item, NodeObject) for item in api.nodes.values()])
            )

    # ---- time -------------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1, 3, 10, 30]), slow=SLOW)
    def time_passes(self, seconds: int, slow: int) -> None:
        """No healthy watch is late by a second. The agent renews every other second, and compares now and then."""
        for second in range(seconds):
            if self.alive:
                self.slow = 0 if self.orphans() == self.reported else self.slow + 1
                if self.slow >= slow:
                    self.compare()
                if second % 2 == 0:
                    self.renew()
            for kind in ("Lease", "Node", "Pod"):
                if kind not in self.broken:
                    self.deliver(kind)
            self.rig.wait(1.0, is_disconnected=bool(self.broken & {"Pod", "Node"}))
        self.rig.apply(self.rig.ledger.handle(Tick(self.rig.clock.now)))
        self.loop.run_until_complete(self.rig.reconciler.round())  # binds that no watch has shown are looked up

    # ---- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def no_container_shares_its_tile(self) -> None:
        used: Counter[str] = Counter()
        for grant in self.running.values():
            for uuid, use in grant.uses().items():
                used[uuid] += use.memory
        assert all(memory <= SIZE for memory in used.values()), f"overcommitted: {used}"

    @invariant()
    def the_ledger_is_consistent(self) -> None:
        self.rig.ledger.check()

    def teardown(self) -> None:
        """When all has ended and all watches have caught up, nothing is held."""
        try:
            self.settle()
            assert self.rig.free() == [SIZE] * CARDS, "a tile leaked"
            assert len(self.rig.cluster_state.orphans) == 0
            self.rig.ledger.check()
        finally:
            self.loop.close()

    def settle(self) -> None:
        for name in self.bound():
            self.rig.api.delete_pod(f"default/{name}")
        self.running.clear()
        self.broken.clear()
        self.alive = True
        for _ in range(5):  # longer than an unconfirmed bind stays assumed, and the grace of orphans after it
            self.time_passes(30, 0)


Cluster.TestCase.settings = settings(max_examples=60 * EFFORT, stateful_step_count=30, deadline=None)
TestForced = Cluster.TestCase
