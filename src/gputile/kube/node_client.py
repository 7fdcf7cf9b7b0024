"""The API server as a node's agent uses it: one node, its pods, and the node's Lease.

Field selectors limit reads to the node. Writes go to the node, its status and its Lease only; this module must not
write pods.
"""

from collections.abc import AsyncGenerator
from datetime import UTC, datetime

from gputile.dialects.kube_objects import NodeObject, Pod
from gputile.dialects.usage_annotation import USE
from gputile.kube.api import ApiRejected, Json, KubeEvent, LeaseRecord, Leases, WatchUpdate
from gputile.kube.client import MERGE, STRATEGIC, Client, path_of
from gputile.kube.watch import follow


class NodeClient:
    """Reads one node and its pods, and writes the node's metadata and status."""

    def __init__(self, client: Client, name: str) -> None:
        self._client, self.name = client, name
        self._path = path_of("api", "v1", "nodes", name)

    def follow_pods(self) -> AsyncGenerator[WatchUpdate[Pod], None]:
        return follow(self._client.feed("/api/v1/pods", "Pod", Pod, fieldSelector=f"spec.nodeName={self.name}"))

    def follow_node(self) -> AsyncGenerator[WatchUpdate[NodeObject], None]:
        selector = f"metadata.name={self.name}"
        return follow(self._client.feed("/api/v1/nodes", "Node", NodeObject, fieldSelector=selector))

    async def patch(self, annotations: dict[str, str | None], labels: dict[str, str | None]) -> None:
        """Set (or with None remove) annotations and labels of the node."""
        body: Json = {"metadata": {"annotations": annotations, "labels": labels}}
        await self._client.request("PATCH", self._path, body=body, content_type=MERGE)

    async def patch_status(self, resources: dict[str, int | None], conditions: list[Json]) -> None:
        """Set extended resources without devices, in capacity and allocatable, and conditions by their type."""
        amounts = {name: None if amount is None else str(amount) for name, amount in resources.items()}
        status: Json = {"conditions": conditions} if conditions else {}
        if amounts:
            status |= {"capacity": amounts, "allocatable": amounts}
        await self._client.request("PATCH", f"{self._path}/status", body={"status": status}, content_type=STRATEGIC)

    async def note(self, note: KubeEvent) -> None:
        await self._client.note(note)

    async def close(self) -> None:
        await self._client.close()


class NodeLease:
    """The Lease with which a node's agent shows that it is alive."""

    def __init__(self, leases: Leases, node: str, duration: int) -> None:
        self._leases, self._node, self._duration = leases, node, duration
        self._version: str | None = None

    async def beat(self, now: float, use: str = "") -> None:
        """Renew or create the Lease; after a conflict it is read again. `use`: the usage annotation, "" for none."""
        record = LeaseRecord(holder_identity=self._node, lease_duration_seconds=self._duration)
        await self._write(record, now, {USE: use} if use else {})

    async def withdraw(self, now: float) -> None:
        """Clear the holder: the scheduler stops using the node at once."""
        await self._write(LeaseRecord(holder_identity="", lease_duration_seconds=1), now, {})

    async def _write(self, record: LeaseRecord, now: float, annotations: dict[str, str]) -> None:
        renewed = _renewed_at(record, now)
        if self._version is None:
            existing = await self._leases.read()
            self._version = existing[1] if existing is not None else await self._leases.create(renewed, annotations)
        try:
            self._version = await self._leases.write(renewed, self._version, annotations)
        except ApiRejected:
            self._version = None
            raise


def _renewed_at(record: LeaseRecord, now: float) -> LeaseRecord:
    time = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return LeaseRecord(
        holder_identity=record.holder_identity,
        lease_duration_seconds=record.lease_duration_seconds,
        renew_time=time,
    )
