"""What the node says of itself on the API server: inventory, labels, sums, condition. Written only when it changes.

Room:  level-based: what should stand there is compared with what our watch of the node shows, so that a kubelet that
       drops a number, or a person who edits an annotation, is set right at the next look.
Door:  `NodeReporter.seen(node)`, `NodeReporter.want(...)`, `NodeReporter.step()`.
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
AGAIN = 10.0  # seconds after which the same is written again, if our watch has not shown it yet


class DesiredNodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What should stand on the node."""

    annotations: dict[str, str | None] = msgspec.field(default_factory=dict)
    labels: dict[str, str | None] = msgspec.field(default_factory=dict)
    resources: dict[str, int] = msgspec.field(default_factory=dict)
    is_well: bool = True
    reason: str = "Serving"  # one word, stable
    message: str = ""


class NodeReporter:
    """See the module's text."""

    def __init__(self, client: NodeClient, metrics: AgentMetrics) -> None:
        self._client, self._metrics = client, metrics
        self._node: NodeObject | None = None
        self._said: tuple[bool, str, str] | None = None  # the condition as last written
        self._sums: set[str] = set()  # resources that we put on the node
        self._written: tuple[NodeObject, DesiredNodeStatus, str | None] | None = (
            None  # what was last written, and on which node
        )
        self._written_at = 0.0
        self._lingers: str | None = None  # who has no pod any more and runs on, as it should stand on the node
        self.wanted: DesiredNodeStatus | None = None

    def seen(self, node: NodeObject) -> None:
        self._node = node

    def gone(self) -> None:
        """The node was deleted: one that comes by the same name has none of our words."""
        self._said = None

    def inventory_before(self) -> NodeInventory | None:
        """The inventory as an agent before us last wrote it."""
        try:
            return gputile.read_cards(self._node, DEFAULTS) if self._node is not None else None
        except UnreadableValue:
            return None

    def cordoned(self) -> frozenset[str]:
        """Cards that a person took out of use, by annotation of the node."""
        return frozenset(names(self._node.annotations.get(gputile.CORDON))) if self._node is not None else frozenset()

    def offers(self, resource: str) -> bool:
        """Whether the node has devices of the resource to give, as the kubelet last said."""
        return self._node is not None and str(self._node.allocatable.get(resource) or "0") != "0"

    def named_before(self) -> tuple[Grant, ...]:
        """Who lingered when an agent before us last looked."""
        try:
            return gputile.read_orphaned_pods(self._node, ()) if self._node is not None else ()
        except UnreadableValue:
            return ()

    def lingers(self, grants: tuple[Grant, ...]) -> None:
        self._lingers = gputile.write_orphaned_pods(grants) if grants else None

    async def step(self, now: float) -> None:
        """Write what differs; raises what the API server says."""
        node, wanted = self._node, self.wanted
        if node is None or wanted is None:
            return
        if self._written == (node, wanted, self._lingers) and now - self._written_at < AGAIN:
            return  # written, and our watch is late
        self._written = None
        annotations = _differing(node.annotations, {**wanted.annotations, gputile.ORPHANED: self._lingers})
        labels = _differing(node.labels, wanted.labels)
        if annotations or labels:
            await self._client.patch(annotations, labels)
            self._metrics.writes.labels("inventory").inc()
        resources = self._differing_sums(node, wanted)
        condition = (wanted.is_well, wanted.reason, wanted.message)
        if resources or condition != self._said:
            said = [] if condition == self._said else [self._condition(wanted, now)]
            await self._client.patch_status(resources, said)
            self._said = condition
            self._metrics.writes.labels("status").inc()
        if annotations or labels or resources:
            self._written, self._written_at = (node, wanted, self._lingers), now

    def _differing_sums(self, node: NodeObject, wanted: DesiredNodeStatus) -> dict[str, int | None]:
        """Compared as amounts: the API server writes 1000 as 1k. What we said and no longer say is taken away."""
        there = node.allocatable
        self._sums |= {name for name in there if name.startswith(OURS)} | set(wanted.resources)
        self._sums.discard(gputile.GPU)  # the kubelet's word
        found: dict[str, int | None] = {
            name: amount for name, amount in wanted.resources.items() if quantity(there.get(name)) != amount
        }
        return found | {name: None for name in self._sums if name not in wanted.resources and name in there}

    def _condition(self, wanted: DesiredNodeStatus, now: float) -> Json:
        at = kubernetes_time(now)
        turned = self._said is None or self._said[0] is not wanted.is_well
        return {
            "type": CONDITION,
            "status": "True" if wanted.is_well else "False",
            "reason": wanted.reason,
            "message": wanted.message,
            "lastHeartbeatTime": at,
            **({"lastTransitionTime": at} if turned else {}),
        }


def kubernetes_time(now: float) -> str:
    """Seconds since 1970 as Kubernetes writes times."""
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _differing(now: Mapping[str, object], wanted: Mapping[str, str | None]) -> dict[str, str | None]:
    return {key: value for key, value in wanted.items() if now.get(key) != value}
