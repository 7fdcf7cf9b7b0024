"""The cluster state as objects that can be listed and watched: one watch cache for nodes, one for pods.

It only reads the cluster state. The scheduler reports changes (`pod_changed`, `node_changed`, `touched`,
`all_changed`), and `run` refreshes the changed objects within a tenth of a second.

Heartbeats and usage arrive every few seconds from every node. Every get, list and watch event has their present values,
but they cause no watch events of their own, which would be too many.
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
SOON = 0.05  # seconds for which changes are batched
AT_ONCE = 50  # objects that are refreshed without interruption: about 5 ms

Wall = Callable[[], float]


class AgentLeases(Protocol):
    """The liveness of the node agents, by their Leases."""

    def __contains__(self, node: str) -> bool: ...

    def is_stale(self, node: str) -> bool: ...

    def renew_time(self, node: str) -> str | None: ...


class ClusterView(Protocol):
    """The scheduler's cluster state, as far as the metrics API reads it."""

    @property
    def ledger(self) -> Ledger: ...

    @property
    def agents(self) -> AgentLeases: ...

    def pod(self, uid: str) -> Pod | None: ...

    def bound(self) -> Iterable[str]: ...

    def bound_to(self, node: str) -> Iterable[str]: ...

    def used_by(self, uid: str) -> PodUsage | None: ...


class Projection:
    """The objects of the metrics API, kept up to date from the cluster state."""

    def __init__(
        self, view: ClusterView, history: int, wall: Wall, mark: int, isolation: FailureIsolation | None = None
    ) -> None:
        """`mark`: a random number that distinguishes this replica's resourceVersions from those of others."""
        self._view, self._wall = view, wall
        self._isolation = isolation or FailureIsolation(Metrics(), wall)
        born = int(wall() * 1000)
        self.nodes, self.pods = WatchCache(history, born, mark), WatchCache(history, born, mark)
        self._facts: dict[str, NodeFacts] = {}
        self._keys: dict[str, Key] = {}  # by UID: the pods in the cache
        self._dirty_nodes: set[str] = set()
        self._dirty_pods: set[str] = set()
        self._woken = asyncio.Event()
        self._is_listed = False  # nodes and pods
        self.is_complete = False
        """Whether all objects of the first lists are in the caches."""

    def close_watches(self) -> None:
        self.nodes.close_watches()
        self.pods.close_watches()

    # ---- changes of the cluster -------------------------------------------------------------------------------------

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
        """These nodes, or the allocations on them, changed."""
        self._dirty_nodes.update(nodes)
        self._woken.set()

    def all_changed(self, *, is_last: bool = False) -> None:
        """After a list, any object may have changed. `is_last`: nodes and pods have both been listed."""
        self._is_listed = self._is_listed or is_last
        self._dirty_pods.update(self._keys, self._view.bound())
        self.touched([*self._view.ledger.fleet.names(), *self.nodes.names()])

    # ---- refreshing -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        while True:
            await self._woken.wait()
            await asyncio.sleep(SOON)
            await self.refresh()

    async def refresh(self) -> None:
        """Refresh all changed objects; extender calls are answered in between."""
        self._woken.clear()
        is_complete = self._is_listed  # read first: a list that arrives meanwhile is refreshed next time
        nodes, self._dirty_nodes = self._dirty_nodes, set()
        pods, self._dirty_pods = self._dirty_pods, set()
        for node in nodes:  # a pod's object describes its cards, which may have become known just now
            pods.update(self._view.bound_to(node))
        for number, uid in enumerate(sorted(pods), start=1):
            self._isolation.step(LOOP, uid, partial(self._refresh_pod, uid))
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
        for number, name in enumerate(sorted(nodes), start=1):
            self._isolation.step(LOOP, name, partial(self._refresh_node, name))
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
        self.is_complete = self.is_complete or is_complete

    def _refresh_pod(self, uid: str) -> None:
        pod, entry = self._view.pod(uid), self._view.ledger.entry(uid)
        grant = entry.allocation.grant if entry is not None and entry.state is AllocationState.CONFIRMED else None
        if pod is None or grant is None:
            key = self._keys.pop(uid, None)
            cached = self.pods.find(key) if key is not None else None
            if key is not None and cached is not None and cached.uid == uid:
                self.pods.drop(key)
            return
        key = self._keys[uid] = (pod.namespace, pod.name)
        body = objects.pod_resource(pod, grant, self._view.ledger.fleet.node(grant.node))
        self._put(self.pods, key, uid, body, "last_changed_time")

    def _refresh_node(self, name: str) -> None:
        ledger, key = self._view.ledger, ("", name)
        node = ledger.fleet.node(name)
        if node is None or not node.cards:
            self.nodes.drop(key)
            return
        facts = self._facts.get(name, NodeFacts())
        entries = [entry for entry in ledger.on_node(name) if entry.state is AllocationState.CONFIRMED]
        body = objects.gpu_info(node, entries, facts, health=self._health(name, node.fault))
        before = self.nodes.find(key)
        status_before = before.body["status"] if before is not None else {}
        if status_before.get("node_health") == body["status"]["node_health"]:
            body["status"]["node_last_transition_time"] = status_before["node_last_transition_time"]
        else:
            body["status"]["node_last_transition_time"] = self._now()
        self._put(self.nodes, key, facts.uid or name, body, "report_time")

    def _put(self, collection: WatchCache, key: Key, uid: str, body: Json, stamp: str) -> None:
        """Cache the object with the time of its last change; the time alone does not count as a change."""
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

    # ---- reading ----------------------------------------------------------------------------------------------------

    def node_as_of_now(self, item: CachedObject) -> Json:
        return objects.with_heartbeat(item.body, self._view.agents.renew_time(item.key[1]))

    def pod_as_of_now(self, item: CachedObject) -> Json:
        return objects.with_use(item.body, self._view.used_by(item.uid))
