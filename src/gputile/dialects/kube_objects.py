"""The fields of Kubernetes objects that gputile reads, and the values that dialects take and return.

This module only holds data: `parsing` turns JSON into these structs and reads numbers and lists out of them.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, TypeAlias

import msgspec

from gputile.dialects.settings import DEFAULTS, DialectSettings
from gputile.model.cards import Card
from gputile.model.grants import Grant
from gputile.model.requests import PodRequest, Role
from gputile.model.units import MiB, Quantity

Number: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**62), lt=2**62)]  # no Kubernetes field needs more digits
Weight: TypeAlias = Annotated[int, msgspec.Meta(gt=-(2**31), lt=2**31)]  # how closely two GPUs are linked
Amounts: TypeAlias = dict[str, str | Number | float | None]
Text: TypeAlias = Mapping[str, str | Number | float | bool | None]
"""Labels or annotations. In a hand-written manifest a value may be a number; the API server rejects it, we read it."""

REJECTION_REASONS = frozenset({"UnexpectedAdmissionError", "TopologyAffinityError"})
"""`status.reason` of a pod that the kubelet rejects. Where a resource is short, the reason is `OutOf<resource>`."""


class Resources(msgspec.Struct, frozen=True, gc=False):
    """The `resources` of a container."""

    limits: Amounts | None = None
    requests: Amounts | None = None


class Container(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """A container or init container of a Pod."""

    name: str = ""
    resources: Resources | None = None
    restart_policy: str | None = None


class Metadata(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """The `metadata` of a Pod or Node."""

    name: str | None = None
    generate_name: str | None = None
    namespace: str | None = None
    uid: str | None = None
    annotations: Text | None = None
    labels: Text | None = None
    resource_version: str | None = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None


class PodSpec(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """The `spec` of a Pod."""

    containers: tuple[Container, ...] | None = None
    init_containers: tuple[Container, ...] | None = None
    node_name: str | None = None
    overhead: Amounts | None = None
    priority: Number | None = None
    preemption_policy: str | None = None
    termination_grace_period_seconds: Number | None = None
    scheduler_name: str | None = None


class PodStatus(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """The `status` of a Pod."""

    phase: str | None = None
    start_time: str | None = None
    nominated_node_name: str | None = None
    reason: str | None = None
    message: str | None = None


class Pod(msgspec.Struct, frozen=True, gc=False):
    """A Pod, as far as gputile reads it."""

    metadata: Metadata | None = None
    spec: PodSpec | None = None
    status: PodStatus | None = None

    @property
    def annotations(self) -> Text:
        return (self.metadata and self.metadata.annotations) or {}

    @property
    def labels(self) -> Text:
        return (self.metadata and self.metadata.labels) or {}

    @property
    def uid(self) -> str:
        return (self.metadata and self.metadata.uid) or ""

    @property
    def name(self) -> str:
        return (self.metadata and (self.metadata.name or self.metadata.generate_name)) or ""

    @property
    def namespace(self) -> str:
        return (self.metadata and self.metadata.namespace) or "default"

    @property
    def node_name(self) -> str:
        return (self.spec and self.spec.node_name) or ""

    @property
    def key(self) -> str:
        """namespace/name, as kubectl prints it."""
        return f"{self.namespace}/{self.name}"

    @property
    def priority(self) -> int:
        return (self.spec and self.spec.priority) or 0

    @property
    def grace(self) -> int:
        """The termination grace period in seconds; Kubernetes defaults it to 30."""
        seconds = self.spec.termination_grace_period_seconds if self.spec else None
        return 30 if seconds is None else max(0, seconds)

    @property
    def nominated(self) -> str:
        """The node where a preemption frees capacity for the pod, or where its volumes are prepared."""
        return (self.status and self.status.nominated_node_name) or ""

    @property
    def is_terminal(self) -> bool:
        """Completed or failed: its containers have ended. A terminating pod still holds its cards."""
        return bool(self.status and self.status.phase in ("Succeeded", "Failed"))

    @property
    def rejected_by_kubelet(self) -> bool:
        """The kubelet did not admit the pod and failed it for good; none of its containers ever ran."""
        reason = (self.status and self.status.reason) or ""
        is_rejection = reason in REJECTION_REASONS or reason.startswith("OutOf") or "Allocate failed" in reason
        return self.is_terminal and is_rejection

    @property
    def is_terminating(self) -> bool:
        """The API server has accepted its deletion."""
        return bool(self.metadata and self.metadata.deletion_timestamp)

    @property
    def is_admitted(self) -> bool:
        """The kubelet has admitted the pod, and so has allocated its devices."""
        return bool(self.status and (self.status.start_time or self.status.phase not in (None, "", "Pending")))

    def containers(self) -> Iterator[tuple[Role, Container]]:
        """Every container in the order it starts: init containers first, sidecars among them."""
        for container in (self.spec and self.spec.init_containers) or ():
            yield (Role.SIDECAR if container.restart_policy == "Always" else Role.INIT), container
        for container in (self.spec and self.spec.containers) or ():
            yield Role.APP, container

    def positions(self) -> dict[str, int]:
        """Containers as gpushare and vcuda number them: from the first app container on, init containers after them."""
        ordered = sorted(self.containers(), key=lambda entry: entry[0] is not Role.APP)
        return {container.name: position for position, (_, container) in enumerate(ordered)}


class NodeStatus(msgspec.Struct, frozen=True):
    """The `status` of a Node."""

    capacity: Amounts | None = None
    allocatable: Amounts | None = None


class NodeObject(msgspec.Struct, frozen=True, gc=False):
    """A Node, as far as gputile reads it. `model.cards.Node` is what is made of it."""

    metadata: Metadata | None = None
    status: NodeStatus | None = None

    @property
    def name(self) -> str:
        return (self.metadata and self.metadata.name) or ""

    @property
    def annotations(self) -> Text:
        return (self.metadata and self.metadata.annotations) or {}

    @property
    def labels(self) -> Text:
        return (self.metadata and self.metadata.labels) or {}

    @property
    def allocatable(self) -> Mapping[str, Quantity]:
        return (self.status and self.status.allocatable) or {}

    @property
    def capacity(self) -> Mapping[str, Quantity]:
        """Capacity, or allocatable where an agent filled only that."""
        return (self.status and (self.status.capacity or self.status.allocatable)) or {}


# ---- values that dialects take and return ---------------------------------------------------------------------------


class PodRecord(msgspec.Struct, kw_only=True):
    """A grant in the pod's own dialect: the annotations, labels and environment variables to write."""

    annotations: dict[str, str] = msgspec.field(default_factory=dict)
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    env: dict[str, dict[str, str]] = msgspec.field(default_factory=dict)  # by container


class GrantContext(msgspec.Struct, frozen=True, kw_only=True):
    """A grant, and everything a dialect needs to write it."""

    grant: Grant
    pod: Pod
    asked: PodRequest
    cards: tuple[Card, ...]  # of the node
    at: int  # time of the grant, in nanoseconds since 1970
    settings: DialectSettings = DEFAULTS

    def card(self, index: int) -> Card | None:
        return next((card for card in self.cards if card.index == index), None)


class NodeInventory(msgspec.Struct, frozen=True):
    """The cards of a node, as the agent of one dialect publishes them."""

    cards: tuple[Card, ...]
    links: tuple[tuple[int, ...], ...] = ()
    driver: str = ""
    cuda: str = ""
    one_at_a_time: bool = False
    since: str = ""  # when gputile's agent first served the node
    gpushare_unit: MiB = 0
