"""Keeps the node object up to date: inventory annotation, labels, resources in the status, condition.

It is level-based: the desired status is compared with the node of our watch, and only differences are written. A
resource that the kubelet dropped, or an annotation that a person edited, is restored by the next step.
"""

from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec

from gputile.dialects import gputile
from gputile.dialects.kube_objects import NodeInventory, NodeObject
from gputile.dialects.parsing import UnreadableValue, names
from gputile.dialects.settings import DEFAULTS
from gputile.kube.api import Json
from gputile.kube.node_client import NodeClient
from gputile.model.grants import Grant
from gputile.model.units import quantity
from gputile.telemetry.agent_metrics import AgentMetrics

CONDITION = "GputileAgent"
OURS = "gputile.io/"
REWRITE_AFTER = 10.0  # seconds after which the same is written again, if our watch has not shown it yet


class DesiredNodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the node object should have."""

    annotations: dict[str, str | None] = msgspec.field(default_factory=dict)
    labels: dict[str, str | None] = msgspec.field(default_factory=dict)
    resources: dict[str, int] = msgspec.field(default_factory=dict)
    is_well: bool = True
    reason: str = "Serving"  # of the condition; CamelCase and stable
    message: str = ""


class NodeReporter:
    """Compares the node object with its desired status, and writes what differs."""

    def __init__(self, client: NodeClient, metrics: AgentMetrics) -> None:
        self._client, self._metrics = client, metrics
        self._node: NodeObject | None = None
        self._condition: tuple[bool, str, str] | None = None  # as last written
        self._resources: set[str] = set()  # that we wrote to the node's status
        self._written: tuple[NodeObject, DesiredNodeStatus, str | None] | None = None  # the last write, and its node
        self._written_at = 0.0
        self._orphans: str | None = None  # the desired annotation of orphaned pods
        self.desired: DesiredNodeStatus | None = None

    def seen(self, node: NodeObject) -> None:
        self._node = node

    def gone(self) -> None:
        """The node was deleted; a new node with the same name does not have our condition."""
        self._condition = None

    def previous_inventory(self) -> NodeInventory | None:
        """The inventory as an earlier agent last wrote it."""
        try:
            return gputile.read_cards(self._node, DEFAULTS) if self._node is not None else None
        except UnreadableValue:
            return None

    def cordoned(self) -> frozenset[str]:
        """The cards in the node's cordon annotation, by UUID."""
        return frozenset(names(self._node.annotations.get(gputile.CORDON))) if self._node is not None else frozenset()

    def offers(self, resource: str) -> bool:
        """Whether the node has allocatable devices of the resource, as the kubelet last wrote."""
        return self._node is not None and str(self._node.allocatable.get(resource) or "0") != "0"

    def previous_orphans(self) -> tuple[Grant, ...]:
        """The grants of orphaned pods as an earlier agent last wrote them."""
        try:
            return gputile.read_orphaned_pods(self._node, ()) if self._node is not None else ()
        except UnreadableValue:
            return ()

    def set_orphans(self, grants: tuple[Grant, ...]) -> None:
        self._orphans = gputile.write_orphaned_pods(grants) if grants else None

    async def step(self, now: float) -> None:
        """Write what differs. Raises `ApiRejected` or `OutcomeUnknown`."""
        node, desired = self._node, self.desired
        if node is None or desired is None:
            return
        if self._written == (node, desired, self._orphans) and now - self._written_at < REWRITE_AFTER:
            return  # written; our watch has not shown it yet
        self._written = None
        annotations = _differing(node.annotations, {**desired.annotations, gputile.ORPHANED: self._orphans})
        labels = _differing(node.labels, desired.labels)
        if annotations or labels:
            await self._client.patch(annotations, labels)
            self._metrics.writes.labels("inventory").inc()
        resources = self._differing_resources(node, desired)
        condition = (desired.is_well, desired.reason, desired.message)
        if resources or condition != self._condition:
            conditions = [] if condition == self._condition else [self._render_condition(desired, now)]
            await self._client.patch_status(resources, conditions)
            self._condition = condition
            self._metrics.writes.labels("status").inc()
        if annotations or labels or resources:
            self._written, self._written_at = (node, desired, self._orphans), now

    def _differing_resources(self, node: NodeObject, desired: DesiredNodeStatus) -> dict[str, int | None]:
        """Compared as quantities: the API server writes 1000 as 1k. Resources that we no longer offer are removed."""
        allocatable = node.allocatable
        self._resources |= {name for name in allocatable if name.startswith(OURS)} | set(desired.resources)
        self._resources.discard(gputile.GPU)  # written by the kubelet
        differing: dict[str, int | None] = {
            name: amount for name, amount in desired.resources.items() if quantity(allocatable.get(name)) != amount
        }
        removed = {name for name in self._resources if name not in desired.resources and name in allocatable}
        return differing | dict.fromkeys(removed)

    def _render_condition(self, desired: DesiredNodeStatus, now: float) -> Json:
        at = kubernetes_time(now)
        changed = self._condition is None or self._condition[0] is not desired.is_well
        return {
            "type": CONDITION,
            "status": "True" if desired.is_well else "False",
            "reason": desired.reason,
            "message": desired.message,
            "lastHeartbeatTime": at,
            **({"lastTransitionTime": at} if changed else {}),
        }


def kubernetes_time(now: float) -> str:
    """Seconds since 1970 as Kubernetes writes times (RFC 3339)."""
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _differing(actual: Mapping[str, object], desired: Mapping[str, str | None]) -> dict[str, str | None]:
    return {key: value for key, value in desired.items() if actual.get(key) != value}
