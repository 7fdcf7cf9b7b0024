"""A cluster without a server: objects in a dict, followed and bound like real ones.

For trying the verbs with curl, for replaying a snapshot of a cluster offline, and for tests of the scheduler process.
It keeps the promises that the scheduler rests on: a Binding writes node, annotations and labels at once, checks the
UID, and a second one gets 409.
"""

import asyncio
import copy
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Literal, TypeVar

import msgspec

from gputile.dialects.kube_objects import NodeObject, Pod
from gputile.kube.api import (
    AgentLease,
    ApiRejected,
    Binding,
    Change,
    Json,
    KubeEvent,
    Snapshot,
    Undecodable,
    WatchUpdate,
)
from gputile.kube.disruption_budgets import DisruptionBudget
from gputile.kube.quota_config_maps import QuotaConfigMap

T = TypeVar("T")


class MemoryApi:
    """Pods by namespace/name, nodes by name, Leases (of one namespace) by name, and the queues of those who follow."""

    def __init__(self, nodes: Iterable[Json] = (), pods: Iterable[Json] = ()) -> None:
        self.nodes: dict[str, Json] = {str(node["metadata"]["name"]): node for node in nodes}
        self.pods: dict[str, Json] = {}
        self.leases: dict[str, Json] = {}
        self.config_maps: dict[str, Json] = {}  # by namespace/name
        self.notes: list[KubeEvent] = []
        self._version = 0
        self._made: dict[str, int] = {}  # by key: how many pods of that name there were
        self._followers: dict[str, list[asyncio.Queue[tuple[str, Json]]]] = {
            "Pod": [],
            "Node": [],
            "Lease": [],
            "ConfigMap": [],
        }
        for pod in pods:
            self.add_pod(pod)

    # ---- what a test or a person does -------------------------------------------------------------------------------

    def add_pod(self, pod: Json) -> Pod:
        """Create or replace a pod; it gets a UID if it has none."""
        made = copy.deepcopy(pod)
        metadata = made.setdefault("metadata", {})
        key = f"{metadata.setdefault('namespace', 'default')}/{metadata['name']}"
        if "uid" not in metadata:
            self._made[key] = self._made.get(key, 0) + (key not in self.pods)
            metadata["uid"] = f"uid-{key}" if self._made[key] == 1 else f"uid-{key}-{self._made[key]}"
        self._tell("Pod", "MODIFIED" if key in self.pods else "ADDED", made)
        self.pods[key] = made
        return msgspec.convert(made, Pod)

    def delete_pod(self, key: str) -> None:
        self._tell("Pod", "DELETED", self.pods.pop(key))

    def add_node(self, node: Json) -> None:
        name = str(node["metadata"]["name"])
        self._tell("Node", "MODIFIED" if name in self.nodes else "ADDED", node)
        self.nodes[name] = copy.deepcopy(node)

    def delete_node(self, name: str) -> None:
        self._tell("Node", "DELETED", self.nodes.pop(name))

    def add_lease(self, name: str, annotations: Mapping[str, str] | None = None, **spec: Any) -> None:
        """Create or renew a Lease; `spec` as Kubernetes has it."""
        metadata: Json = {"name": name, **({"annotations": dict(annotations)} if annotations else {})}
        lease: Json = {"metadata": metadata, "spec": {**self.leases.get(name, {}).get("spec", {}), **spec}}
        self._tell("Lease", "MODIFIED" if name in self.leases else "ADDED", lease)
        self.leases[name] = lease

    def delete_lease(self, name: str) -> None:
        self._tell("Lease", "DELETED", self.leases.pop(name))

    def add_config_map(self, namespace: str, name: str, data: dict[str, str]) -> None:
        """Create or replace a ConfigMap."""
        key = f"{namespace}/{name}"
        metadata = {"name": name, "namespace": namespace, "uid": f"uid-{key}"}
        made: Json = {"metadata": metadata, "data": data}
        self._tell("ConfigMap", "MODIFIED" if key in self.config_maps else "ADDED", made)
        self.config_maps[key] = made

    def delete_config_map(self, namespace: str, name: str) -> None:
        self._tell("ConfigMap", "DELETED", self.config_maps.pop(f"{namespace}/{name}"))

    # ---- what the scheduler does ------------------------------------------------------------------------------------

    def follow_pods(self) -> AsyncIterator[WatchUpdate[Pod]]:
        return self._follow("Pod", self.pods, Pod)

    def follow_nodes(self) -> AsyncIterator[WatchUpdate[NodeObject]]:
        return self._follow("Node", self.nodes, NodeObject)

    def follow_leases(self, namespace: str) -> AsyncIterator[WatchUpdate[AgentLease]]:
        return self._follow("Lease", self.leases, AgentLease)

    async def follow_config_map(self, namespace: str, name: str) -> AsyncIterator[WatchUpdate[QuotaConfigMap]]:
        key = f"{namespace}/{name}"
        now = {key: self.config_maps[key]} if key in self.config_maps else {}
        async for seen in self._follow("ConfigMap", now, QuotaConfigMap):
            if not isinstance(seen, Change) or seen.item.title == f"ConfigMap {key}":
                yield seen

    async def pod(self, namespace: str, name: str) -> Pod | None:
        found = self.pods.get(f"{namespace}/{name}")
        return None if found is None else msgspec.convert(found, Pod)

    async def list_pods(self) -> tuple[Pod, ...]:
        return tuple(pod for found in self.pods.values() if isinstance(pod := _converted(found, Pod), Pod))

    async def bind(self, binding: Binding, timeout: float) -> None:
        pod = self._the_pod(binding.namespace, binding.name, binding.uid)
        if pod.get("spec", {}).get("nodeName"):
            said = f"pod {binding.name} is already assigned to node {pod['spec']['nodeName']}"
            raise ApiRejected(409, "Conflict", said)
        self._edit(pod, {**binding.annotations}, {**binding.labels})
        pod.setdefault("spec", {})["nodeName"] = binding.node
        self._tell("Pod", "MODIFIED", pod)

    async def patch_pod(
        self,
        namespace: str,
        name: str,
        uid: str,
        annotations: dict[str, str | None],
        labels: dict[str, str | None],
        *,
        version: str | None = None,
        nominate: str | None = None,
        timeout: float | None = None,
    ) -> None:
        pod = self._the_pod(namespace, name, uid)
        if version not in (None, pod["metadata"].get("resourceVersion")):
            raise ApiRejected(409, "Conflict", f"pod {name} has been changed since it was read")
        self._edit(pod, annotations, labels)
        if nominate is not None:
            pod["status"] = {**(pod.get("status") or {}), "nominatedNodeName": nominate or None}
        self._tell("Pod", "MODIFIED", pod)

    async def evict(self, namespace: str, name: str, uid: str, *, timeout: float | None = None) -> None:
        self._the_pod(namespace, name, uid)
        self.delete_pod(f"{namespace}/{name}")

    async def annotate_config_map(self, namespace: str, name: str, uid: str, annotations: dict[str, str]) -> None:
        found = self.config_maps.get(f"{namespace}/{name}")
        if found is None or found["metadata"]["uid"] != uid:
            raise ApiRejected(
                404 if found is None else 409, "NotFound", f"there is no such ConfigMap {namespace}/{name}"
            )
        found["metadata"]["annotations"] = {**found["metadata"].get("annotations", {}), **annotations}
        self._tell("ConfigMap", "MODIFIED", found)

    async def budgets(self) -> tuple[DisruptionBudget, ...]:
        return ()

    async def note(self, note: KubeEvent) -> None:
        self.notes.append(note)

    async def close(self) -> None:
        return None

    # ---- how --------------------------------------------------------------------------------------------------------

    def _the_pod(self, namespace: str, name: str, uid: str) -> Json:
        pod = self.pods.get(f"{namespace}/{name}")
        if pod is None:
            raise ApiRejected(404, "NotFound", f'pods "{name}" not found')
        if pod["metadata"]["uid"] != uid:
            raise ApiRejected(409, "Conflict", f"the UID of pod {name} is {pod['metadata']['uid']}, not {uid}")
        return pod

    @staticmethod
    def _edit(pod: Json, annotations: dict[str, str | None], labels: dict[str, str | None]) -> None:
        for field, changes in (("annotations", annotations), ("labels", labels)):
            now = {**(pod["metadata"].get(field) or {}), **changes}
            pod["metadata"][field] = {key: value for key, value in now.items() if value is not None}

    def _tell(self, of: str, kind: str, item: Json) -> None:
        self._version += 1
        item.setdefault("metadata", {})["resourceVersion"] = str(self._version)
        for queue in self._followers[of]:
            queue.put_nowait((kind, copy.deepcopy(item)))

    async def _follow(self, of: str, now: dict[str, Json], kind: type[T]) -> AsyncIterator[WatchUpdate[T]]:
        queue: asyncio.Queue[tuple[Literal["ADDED", "MODIFIED", "DELETED"], Json]] = asyncio.Queue()
        self._followers[of].append(queue)  # type: ignore[arg-type]
        seen = [_converted(item, kind) for item in now.values()]
        for one in seen:
            if isinstance(one, Undecodable):
                yield one
        yield Snapshot(tuple(one for one in seen if not isinstance(one, Undecodable)))
        while True:
            change, item = await queue.get()
            found = _converted(item, kind)
            yield found if isinstance(found, Undecodable) else Change(change, found)


def _converted(item: Json, kind: type[T]) -> T | Undecodable:
    try:
        return msgspec.convert(item, kind)
    except msgspec.ValidationError as wrong:
        return Undecodable(f"{kind.__name__} {item.get('metadata', {}).get('name')}", str(wrong))
