"""An in-memory API server: objects in dicts that can be watched, bound and evicted.

It serves to try the extender with curl, to replay a snapshot of a cluster offline, and to test the scheduler process.
It gives the guarantees that the scheduler relies on: a Binding writes node, annotations and labels in one step and
checks the UID, and a second Binding gets 409. It must not be used with a real cluster.
"""

import asyncio
import marshal
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
from gputile.model.decode_errors import decode_problem

T = TypeVar("T")


class MemoryApi:
    """Pods by namespace/name, nodes by name, Leases (of one namespace) by name, and the queues of the watches."""

    def __init__(self, nodes: Iterable[Json] = (), pods: Iterable[Json] = ()) -> None:
        self.nodes: dict[str, Json] = {str(node["metadata"]["name"]): node for node in nodes}
        self.pods: dict[str, Json] = {}
        self.leases: dict[str, Json] = {}
        self.config_maps: dict[str, Json] = {}  # by namespace/name
        self.notes: list[KubeEvent] = []
        self._version = 0
        self._created: dict[str, int] = {}  # by key: how many pods of that name were created
        self._watches: dict[str, list[asyncio.Queue[tuple[str, Json]]]] = {
            "Pod": [],
            "Node": [],
            "Lease": [],
            "ConfigMap": [],
        }
        for pod in pods:
            self.add_pod(pod)

    # ---- calls of a test or a user ----------------------------------------------------------------------------------

    def add_pod(self, pod: Json) -> Pod:
        """Create or replace a pod; it gets a UID if it has none."""
        stored = _copied(pod)
        metadata = stored.setdefault("metadata", {})
        key = f"{metadata.setdefault('namespace', 'default')}/{metadata['name']}"
        if "uid" not in metadata:
            self._created[key] = self._created.get(key, 0) + (key not in self.pods)
            metadata["uid"] = f"uid-{key}" if self._created[key] == 1 else f"uid-{key}-{self._created[key]}"
        self._notify("Pod", "MODIFIED" if key in self.pods else "ADDED", stored)
        self.pods[key] = stored
        return msgspec.convert(stored, Pod)

    def delete_pod(self, key: str) -> None:
        self._notify("Pod", "DELETED", self.pods.pop(key))

    def add_node(self, node: Json) -> None:
        name = str(node["metadata"]["name"])
        self._notify("Node", "MODIFIED" if name in self.nodes else "ADDED", node)
        self.nodes[name] = _copied(node)

    def delete_node(self, name: str) -> None:
        self._notify("Node", "DELETED", self.nodes.pop(name))

    def add_lease(self, name: str, annotations: Mapping[str, str] | None = None, **spec: Any) -> None:
        """Create or renew a Lease; `spec` as Kubernetes has it."""
        metadata: Json = {"name": name, **({"annotations": dict(annotations)} if annotations else {})}
        lease: Json = {"metadata": metadata, "spec": {**self.leases.get(name, {}).get("spec", {}), **spec}}
        self._notify("Lease", "MODIFIED" if name in self.leases else "ADDED", lease)
        self.leases[name] = lease

    def delete_lease(self, name: str) -> None:
        self._notify("Lease", "DELETED", self.leases.pop(name))

    def add_config_map(self, namespace: str, name: str, data: dict[str, str]) -> None:
        """Create or replace a ConfigMap."""
        key = f"{namespace}/{name}"
        metadata = {"name": name, "namespace": namespace, "uid": f"uid-{key}"}
        config_map: Json = {"metadata": metadata, "data": data}
        self._notify("ConfigMap", "MODIFIED" if key in self.config_maps else "ADDED", config_map)
        self.config_maps[key] = config_map

    def delete_config_map(self, namespace: str, name: str) -> None:
        self._notify("ConfigMap", "DELETED", self.config_maps.pop(f"{namespace}/{name}"))

    # ---- Api --------------------------------------------------------------------------------------------------------

    def follow_pods(self) -> AsyncIterator[WatchUpdate[Pod]]:
        return self._follow("Pod", self.pods, Pod)

    def follow_nodes(self) -> AsyncIterator[WatchUpdate[NodeObject]]:
        return self._follow("Node", self.nodes, NodeObject)

    def follow_leases(self, namespace: str) -> AsyncIterator[WatchUpdate[AgentLease]]:
        return self._follow("Lease", self.leases, AgentLease)

    async def follow_config_map(self, namespace: str, name: str) -> AsyncIterator[WatchUpdate[QuotaConfigMap]]:
        key = f"{namespace}/{name}"
        current = {key: self.config_maps[key]} if key in self.config_maps else {}
        async for update in self._follow("ConfigMap", current, QuotaConfigMap):
            if not isinstance(update, Change) or update.item.title == f"ConfigMap {key}":
                yield update

    async def pod(self, namespace: str, name: str) -> Pod | None:
        stored = self.pods.get(f"{namespace}/{name}")
        return None if stored is None else msgspec.convert(stored, Pod)

    async def list_pods(self) -> tuple[Pod, ...]:
        return tuple(pod for stored in self.pods.values() if isinstance(pod := _decoded(stored, Pod), Pod))

    async def bind(self, binding: Binding, timeout: float) -> None:
        pod = self._get_pod(binding.namespace, binding.name, binding.uid)
        if pod.get("spec", {}).get("nodeName"):
            message = f"pod {binding.name} is already assigned to node {pod['spec']['nodeName']}"
            raise ApiRejected(409, "Conflict", message)
        self._edit(pod, {**binding.annotations}, {**binding.labels})
        pod.setdefault("spec", {})["nodeName"] = binding.node
        self._notify("Pod", "MODIFIED", pod)

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
        pod = self._get_pod(namespace, name, uid)
        if version not in (None, pod["metadata"].get("resourceVersion")):
            raise ApiRejected(409, "Conflict", f"pod {name} has been changed since it was read")
        self._edit(pod, annotations, labels)
        if nominate is not None:
            pod["status"] = {**(pod.get("status") or {}), "nominatedNodeName": nominate or None}
        self._notify("Pod", "MODIFIED", pod)

    async def evict(self, namespace: str, name: str, uid: str, *, timeout: float | None = None) -> None:
        self._get_pod(namespace, name, uid)
        self.delete_pod(f"{namespace}/{name}")

    async def annotate_config_map(self, namespace: str, name: str, uid: str, annotations: dict[str, str]) -> None:
        stored = self.config_maps.get(f"{namespace}/{name}")
        if stored is None or stored["metadata"]["uid"] != uid:
            raise ApiRejected(404 if stored is None else 409, "NotFound", f'configmaps "{name}" not found')
        stored["metadata"]["annotations"] = {**stored["metadata"].get("annotations", {}), **annotations}
        self._notify("ConfigMap", "MODIFIED", stored)

    async def budgets(self) -> tuple[DisruptionBudget, ...]:
        return ()

    async def note(self, note: KubeEvent) -> None:
        self.notes.append(note)

    async def close(self) -> None:
        return None

    # ---- storage and watches ----------------------------------------------------------------------------------------

    def _get_pod(self, namespace: str, name: str, uid: str) -> Json:
        pod = self.pods.get(f"{namespace}/{name}")
        if pod is None:
            raise ApiRejected(404, "NotFound", f'pods "{name}" not found')
        if pod["metadata"]["uid"] != uid:
            raise ApiRejected(409, "Conflict", f"the UID of pod {name} is {pod['metadata']['uid']}, not {uid}")
        return pod

    @staticmethod
    def _edit(pod: Json, annotations: dict[str, str | None], labels: dict[str, str | None]) -> None:
        for field, changes in (("annotations", annotations), ("labels", labels)):
            merged = {**(pod["metadata"].get(field) or {}), **changes}
            pod["metadata"][field] = {key: value for key, value in merged.items() if value is not None}

    def _notify(self, kind: str, event: str, item: Json) -> None:
        self._version += 1
        item.setdefault("metadata", {})["resourceVersion"] = str(self._version)
        for queue in self._watches[kind]:
            queue.put_nowait((event, _copied(item)))

    async def _follow(self, kind: str, current: dict[str, Json], item_type: type[T]) -> AsyncIterator[WatchUpdate[T]]:
        queue: asyncio.Queue[tuple[Literal["ADDED", "MODIFIED", "DELETED"], Json]] = asyncio.Queue()
        self._watches[kind].append(queue)  # type: ignore[arg-type]
        decoded = [_decoded(stored, item_type) for stored in current.values()]
        for item in decoded:
            if isinstance(item, Undecodable):
                yield item
        yield Snapshot(tuple(item for item in decoded if not isinstance(item, Undecodable)))
        while True:
            event, stored = await queue.get()
            item = _decoded(stored, item_type)
            yield item if isinstance(item, Undecodable) else Change(event, item)


def _copied(item: Json) -> Json:
    """Several times faster than `copy.deepcopy`."""
    copy: Json = marshal.loads(marshal.dumps(item))
    return copy


def _decoded(item: Json, item_type: type[T]) -> T | Undecodable:
    try:
        return msgspec.convert(item, item_type)
    except msgspec.ValidationError as error:
        return Undecodable(f"{item_type.__name__} {item.get('metadata', {}).get('name')}", str(decode_problem(error)))
