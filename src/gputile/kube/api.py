"""What the scheduler wants of a cluster, as one Protocol; `client` serves it from a real API server, `memory` without.

Errors:

GputileError
├── Refused      the API server said no; nothing was written
└── Unclear      no answer, or one that does not tell: it may have been written
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
    """All there is, from one list. What is not in it is gone."""

    items: tuple[T, ...]


class Change(msgspec.Struct, Generic[T], frozen=True):
    """One object, after what happened to it."""

    kind: Literal["ADDED", "MODIFIED", "DELETED"]
    item: T


class Bookmark(msgspec.Struct, frozen=True):
    """Nothing happened, and we would know: a bookmark came."""


class WatchFailed(msgspec.Struct, frozen=True):
    """The stream broke. What was told stands, and may be old until the next `Snapshot`, `Change` or `Bookmark`."""

    why: str
    forbidden: bool = False  # the server said that we may not; trying again will hardly help


class Undecodable(msgspec.Struct, frozen=True):
    """An object that cannot be read. It is left out of what is told, and named here."""

    what: str  # kind namespace/name, as far as known
    why: str


WatchUpdate: TypeAlias = Snapshot[T] | Change[T] | Bookmark | WatchFailed | Undecodable


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """Node, annotations and labels of a pod, to be written at once."""

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
    """The API server said no; nothing was written."""

    def __init__(self, status: int, reason: str, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message or reason or f"HTTP {status}")
        self.status, self.reason = status, reason
        self.retry_after = retry_after  # seconds, where the server named them


class OutcomeUnknown(GputileError):
    """No answer, or one that does not tell: it may have been written."""


class LeaseRenewal(msgspec.Struct, frozen=True, rename="camel"):
    """What changes in a Lease each time its holder says that it is alive, and how long that holds."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    renew_time: str | None = None


class LeaseAnnotations(msgspec.Struct, frozen=True, rename={"use": USE}):
    use: str | None = None


class LeaseMetadata(msgspec.Struct, frozen=True):
    name: str = ""
    annotations: LeaseAnnotations | None = None


class AgentLease(msgspec.Struct, frozen=True):
    """A Lease, as far as it says whether its holder is alive, and what it has to say. Thousands of these come in a
    minute: no more is read, and what is said is not understood before somebody asks."""

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
        """What the node's containers use, as its agent wrote it; "" when it says nothing."""
        words = self.metadata.annotations
        return (words.use if words is not None else None) or ""


class Api(Protocol):
    """A cluster, as the scheduler uses it. Every call may raise `ApiRejected` or `OutcomeUnknown`."""

    def follow_pods(self) -> AsyncIterator[WatchUpdate[Pod]]: ...

    def follow_nodes(self) -> AsyncIterator[WatchUpdate[NodeObject]]: ...

    def follow_leases(self, namespace: str) -> AsyncIterator[WatchUpdate[AgentLease]]:
        """All Leases of one namespace."""

    def follow_config_map(self, namespace: str, name: str) -> AsyncIterator[WatchUpdate[QuotaConfigMap]]:
        """One ConfigMap, which need not be there."""

    async def pod(self, namespace: str, name: str) -> Pod | None:
        """The pod as it is now, read from the store itself; None when there is none of that name."""

    async def bind(self, binding: Binding, timeout: float) -> None:
        """One attempt, one write."""

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
        """Set (or with None remove) annotations and labels, if the pod is still the one with this UID.

        With `version` (a resourceVersion) also only if nobody has changed it since it was read. In the same write
        `nominate` says on which node room is being made for it; "" takes that back.
        """

    async def evict(self, namespace: str, name: str, uid: str, *, timeout: float | None = None) -> None:
        """Ask for the pod to go, budgets respected."""

    async def budgets(self) -> tuple[DisruptionBudget, ...]:
        """Every PodDisruptionBudget, as it is now."""

    async def note(self, note: KubeEvent) -> None:
        """Write an Event."""

    async def annotate_config_map(self, namespace: str, name: str, uid: str, annotations: dict[str, str]) -> None:
        """Set annotations of a ConfigMap, if it is still the one with this UID."""

    async def close(self) -> None: ...


class LeaseRecord(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """`spec` of a coordination.k8s.io/v1 Lease."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


NO_WORDS: Mapping[str, str] = {}


class Leases(Protocol):
    """Reading and writing one Lease; `version` is its resourceVersion, so that of two writers one loses."""

    async def read(self) -> tuple[LeaseRecord, str] | None: ...

    async def create(self, record: LeaseRecord, annotations: Mapping[str, str] = NO_WORDS) -> str: ...

    async def write(self, record: LeaseRecord, version: str, annotations: Mapping[str, str] = NO_WORDS) -> str:
        """All of it: annotations that are not given are gone."""


Json: TypeAlias = dict[str, Any]
