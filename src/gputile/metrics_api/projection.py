"""What the mirror shows, as objects that can be listed and watched.

Room:  two collections, and which nodes and pods have to be looked at again. It changes nothing and decides nothing.
Door:  `pod_changed`, `node_changed`, `touched`, `all_changed` when something happened; `run` looks again, within a
       tenth of a second.

Heartbeats come every few seconds from every node, and so does what containers use. They are told fresh to whoever
lists or gets, and with every event that there is; they make no events of their own, for nobody could read so many.
"""

import asyncio
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import partial
from typing import Protocol

from gputile.background.failure_isolation import FailureIsolation
from gputile.dialects.kube_objects import NodeObject, Pod
from gputile.ledger.ledger import AllocationState, Ledger
from gputile.metrics_api import objects
from gputile.metrics_api.objects import NodeFacts
from gputile.metrics_api.watch_cache import CachedObject, Json, Key, WatchCache
from gputile.model.usage import PodUsage
from gputile.telemetry.metrics import Metrics

LOOP = "metrics API"  # in logs and metrics
SOON = 0.05  # seconds in which changes are gathered
AT_ONCE = 50  # objects that are looked at in one go: some 5 ms

Wall = Callable[[], float]


class AgentLeases(Protocol):
    """Whether the agents of nodes are alive, by their Leases."""

    def __contains__(self, node: str) -> bool: ...

    def is_stale(self, node: str) -> bool: ...

    def renew_time(self, node: str) -> str | None: ...


class ClusterView(Protocol):
    """What the scheduler knows of the cluster; the metrics API only reads it."""

    @property
    def ledger(self) -> Ledger: ...

    @property
    def agents(self) -> AgentLeases: ...

    def pod(self, uid: str) -> Pod | None: ...

    def bound(self) -> Iterable[str]: ...

    def bound_to(self, node: str) -> Iterable[str]: ...

    def used_by(self, uid: str) -> PodUsage | None: ...


class Projection:
    """See the module's text."""

    def __init__(
        self, view: ClusterView, history: int, wall: Wall, mark: int, isolation: FailureIsolation | None = None
    ) -> None:
        """`mark`: a number by chance that tells our resourceVersions from those of other replicas."""
        self._view, self._wall = view, wall
        self._isolation = isolation or FailureIsolation(Metrics(), wall)
        born = int(wall() * 1000)
        self.nodes, self.pods = WatchCache(history, born, mark), WatchCache(history, born, mark)
        self._facts: dict[str, NodeFacts] = {}
        self._keys: dict[str, Key] = {}  # by UID: the pods that are shown
        self._dirty_nodes: set[str] = set()
        self._dirty_pods: set[str] = set()
        self._woken = asyncio.Event()
        self._is_listed = False  # nodes and pods
        self.is_whole = False
        """Whether all that was there at our start is shown."""

    def send_home(self) -> None:
        self.nodes.send_home()
        self.pods.send_home()

    # ---- what happened ----------------------------------------------------------------------------------------------

    def pod_changed(self, pod: Pod) -> None:
        if pod.uid in self._keys or self._view.pod(pod.uid) is not None:
            self._dirty_pods.add(pod.uid)
            self.touched([pod.node_name] if pod.node_name else [])

    def node_changed(self, node: NodeObject, *, deleted: bool = False) -> None:
        if deleted:
            self._facts.pop(node.name, None)
        else:
            meta, labels = node.metadata, {key: str(value) for key, value in node.labels.items()}
            uid, created = (meta.uid or "", meta.creation_timestamp) if meta else ("", None)
            self._facts[node.name] = NodeFacts(uid=uid, created=created, labels=labels)
        self.touched([node.name])

    def touched(self, nodes: Iterable[str]) -> None:
        """Something about these nodes, or who holds what there."""
        self._dirty_nodes.update(nodes)
        self._woken.set()

    def all_changed(self, *, is_last: bool = False) -> None:
        """After a list: what happened in between, nobody told. `is_last`: now nodes and pods are known."""
        self._is_listed = self._is_listed or is_last
        self._dirty_pods.update(self._keys, self._view.bound())
        self.touched([*self._view.ledger.fleet.names(), *self.nodes.names()])

    # ---- looking again ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        while True:
            await self._woken.wait()
            await asyncio.sleep(SOON)
            await self.refresh()

    async def refresh(self) -> None:
        """All that was touched; verbs are answered in between."""
        self._woken.clear()
        is_whole = self._is_listed  # before we look: a list that comes meanwhile is looked at next time
        nodes, self._dirty_nodes = self._dirty_nodes, set()
        pods, self._dirty_pods = self._dirty_pods, set()
        for node in nodes:  # a pod tells of its cards, and they may just have become known
            pods.update(self._view.bound_to(node))
        for number, uid in enumerate(sorted(pods), start=1):
            self._isolation.step(LOOP, uid, partial(self._look_at_pod, uid))
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
        for number, name in enumerate(sorted(nodes), start=1):
            self._isolation.step(LOOP, name, partial(self._look_at_node, name))
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
        self.is_whole = self.is_whole or is_whole

    def _look_at_pod(self, uid: str) -> None:
        pod, entry = self._view.pod(uid), self._view.ledger.entry(uid)
        grant = entry.allocation.grant if entry is not None and entry.state is AllocationState.CONFIRMED else None
        if pod is None or grant is None:
            key = self._keys.pop(uid, None)
            shown = self.pods.find(key) if key is not None else None
            if key is not None and shown is not None and shown.uid == uid:
                self.pods.drop(key)
            return
        key = self._keys[uid] = (pod.namespace, pod.name)
        body = objects.pod_resource(pod, grant, self._view.ledger.fleet.node(grant.node))
        self._put(self.pods, key, uid, body, "last_changed_time")

    def _look_at_node(self, name: str) -> None:
        ledger, key = self._view.ledger, ("", name)
        node = ledger.fleet.node(name)
        if node is None or not node.cards:
            self.nodes.drop(key)
            return
        facts = self._facts.get(name, NodeFacts())
        entries = [entry for entry in ledger.on_node(name) if entry.state is AllocationState.CONFIRMED]
        body = objects.gpu_info(node, entries, facts, health=self._health(name, node.fault))
        before = self.nodes.find(key)
        was = before.body["status"] if before is not None else {}
        if was.get("node_health") == body["status"]["node_health"]:
            body["status"]["node_last_transition_time"] = was["node_last_transition_time"]
        else:
            body["status"]["node_last_transition_time"] = self._now()
        self._put(self.nodes, key, facts.uid or name, body, "report_time")

    def _put(self, collection: WatchCache, key: Key, uid: str, body: Json, stamp: str) -> None:
        """With the time of its last change, which itself is none."""
        part = body["spec" if stamp == "report_time" else "status"]
        before = collection.find(key)
        if before is not None and before.uid == uid:
            part[stamp] = before.body["spec" if stamp == "report_time" else "status"][stamp]
            if body == before.body:
                return
        part[stamp] = self._now()
        collection.put(key, uid, body)

    def _health(self, node: str, fault: str) -> str:
        if fault or self._view.agents.is_stale(node):
            return "False"
        return "True" if node in self._view.agents else objects.UNKNOWN

    def _now(self) -> str:
        return datetime.fromtimestamp(self._wall(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    # ---- showing ----------------------------------------------------------------------------------------------------

    def node_as_of_now(self, item: CachedObject) -> Json:
        return objects.with_heartbeat(item.body, self._view.agents.renew_time(item.key[1]))

    def pod_as_of_now(self, item: CachedObject) -> Json:
        return objects.with_use(item.body, self._view.used_by(item.uid))
