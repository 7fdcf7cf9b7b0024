"""The API server as the scheduler uses it: one Protocol, its values and its errors. This module must not do I/O.

`client` implements the Protocol over HTTP, `fake` in memory. Errors:

GputileError
├── ApiRejected      the API server rejected the request; nothing was written
└── OutcomeUnknown   no response, or an inconclusive one: the write may have happened
"""

from collections.abc import AsyncIterator, Mapping
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

import msgspec

from gputile.dialects.kube_objects import NodeObject, Pod
from gputile.dialects.usage_annotation import USE
from gputile.kube.disruption_budgets import DisruptionBudget
from gputile.kube.quota_config_maps import QuotaConfigMap
from gputile.model.errors import GputileError

T = TypeVar("T")


class Snapshot(msgspec.Struct, Generic[T], frozen=True):
    """All objects, from one list. Objects that are not in it are deleted."""

    items: tuple[T, ...]


class Change(msgspec.Struct, Generic[T], frozen=True):
    """One object after a change, from a watch."""

    kind: Literal["ADDED", "MODIFIED", "DELETED"]
    item: T


class Bookmark(msgspec.Struct, frozen=True):
    """Bookmark: no change, the watch is alive."""


class WatchFailed(msgspec.Struct, frozen=True):
    """The list or watch failed. Objects seen before may be stale until the next `Snapshot`, `Change` or `Bookmark`."""

    why: str
    forbidden: bool = False  # HTTP 403: a retry will hardly help


class Undecodable(msgspec.Struct, frozen=True):
    """An object that cannot be decoded. It is left out of `Snapshot` and `Change`, and named here."""

    what: str  # kind namespace/name, as far as known
    why: str


WatchUpdate: TypeAlias = Snapshot[T] | Change[T] | Bookmark | WatchFailed | Undecodable


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """Node, annotations and labels of a pod, written in one API call."""

    namespace: str
    name: str
    uid: str
    node: str
    annotations: dict[str, str] = msgspec.field(default_factory=dict)
    labels: dict[str, str] = msgspec.field(default_factory=dict)


class KubeEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A Kubernetes Event about a pod, or a ConfigMap."""

    namespace: str
    pod: str  # its name
    uid: str
    about: Literal["Pod", "ConfigMap"] = "Pod"
    reason: str  # one CamelCase word, stable
    message: str
    kind: Literal["Normal", "Warning"] = "Warning"


class ApiRejected(GputileError):
    """The API server rejected the request; nothing was written."""

    def __init__(self, status: int, reason: str, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message or reason or f"HTTP {status}")
        self.status, self.reason = status, reason
        self.retry_after = retry_after  # seconds of the Retry-After header, if any


class OutcomeUnknown(GputileError):
    """No response, or an inconclusive one: the write may have happened."""


class LeaseRenewal(msgspec.Struct, frozen=True, rename="camel"):
    """The fields of a Lease that its holder renews, and for how long the renewal is valid."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    renew_time: str | None = None


class LeaseAnnotations(msgspec.Struct, frozen=True, rename={"use": USE}):
    """The annotation of an agent's Lease that gputile reads."""

    use: str | None = None


class LeaseMetadata(msgspec.Struct, frozen=True):
    """The `metadata` of a Lease, as far as gputile reads it."""

    name: str = ""
    annotations: LeaseAnnotations | None = None


class AgentLease(msgspec.Struct, frozen=True):
    """The Lease of a node's agent: its renewal, and the usage annotation. Thousands of these arrive per minute: no
    other field is decoded, and the annotation is parsed only when it is needed."""

    metadata: LeaseMetadata = LeaseMetadata()
    spec: LeaseRenewal | None = None

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def beat(self) -> LeaseRenewal:
        return self.spec or LeaseRenewal()

    @property
    def use(self) -> str:
        """The GPU usage of the node's containers, as its agent wrote it; "" without the annotation."""
        annotations = self.metadata.annotations
        return (annotations.use if annotations is not None else None) or ""


class Api(Protocol):
    """A cluster, as the scheduler uses it. Every call may raise `ApiRejected` or `OutcomeUnknown`."""

    def follow_pods(self) -> AsyncIterator[WatchUpdate[Pod]]: ...

    def follow_nodes(self) -> AsyncIterator[WatchUpdate[NodeObject]]: ...

    def follow_leases(self, namespace: str) -> AsyncIterator[WatchUpdate[AgentLease]]:
        """All Leases of one namespace."""

    def follow_config_map(self, namespace: str, name: str) -> AsyncIterator[WatchUpdate[QuotaConfigMap]]:
        """One ConfigMap, which may not exist."""

    async def pod(self, namespace: str, name: str) -> Pod | None:
        """The current pod, by a quorum read; None if there is no pod of that name."""

    async def bind(self, binding: Binding, timeout: float) -> None:
        """Bind a pod: one attempt, one write."""

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
        """Set (or with None remove) annotations and labels, if the pod still has this UID.

        With `version` (a resourceVersion), only if the pod is unchanged since it was read. The same write sets
        `nominatedNodeName` to `nominate`; "" clears it.
        """

    async def evict(self, namespace: str, name: str, uid: str, *, timeout: float | None = None) -> None:
        """Evict the pod through the Eviction API, which respects disruption budgets."""

    async def budgets(self) -> tuple[DisruptionBudget, ...]:
        """All current PodDisruptionBudgets."""

    async def note(self, note: KubeEvent) -> None:
        """Create an Event."""

    async def annotate_config_map(self, namespace: str, name: str, uid: str, annotations: dict[str, str]) -> None:
        """Set annotations of a ConfigMap, if it still has this UID."""

    async def close(self) -> None: ...


class LeaseRecord(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The `spec` of a coordination.k8s.io/v1 Lease."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


NO_ANNOTATIONS: Mapping[str, str] = {}


class Leases(Protocol):
    """Reads and writes one Lease; `version` is its resourceVersion, so that one of two concurrent writers fails."""

    async def read(self) -> tuple[LeaseRecord, str] | None: ...

    async def create(self, record: LeaseRecord, annotations: Mapping[str, str] = NO_ANNOTATIONS) -> str: ...

    async def write(self, record: LeaseRecord, version: str, annotations: Mapping[str, str] = NO_ANNOTATIONS) -> str:
        """Replace the Lease: annotations that are not given are removed."""


Json: TypeAlias = dict[str, Any]
