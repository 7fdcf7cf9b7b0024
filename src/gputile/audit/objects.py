"""The few fields of pods and nodes that the audit reads, from any JSON.

A value of the wrong type raises `UnreadableObject` where the audit cannot do without it (which node, which
containers), and counts as absent where it can (annotations, times).
"""

from collections.abc import Mapping

import msgspec

from gputile.audit.fields import Json, mapping, shown, text, texts
from gputile.model.requests import Role

OVER = ("Succeeded", "Failed")


class UnreadableObject(Exception):
    """An object or annotation with an invalid field; the message names the field."""


class AuditedContainer(msgspec.Struct, frozen=True):
    """A container of an audited pod."""

    name: str
    role: Role
    asks: Json  # by resource: its limit, else its request


class AuditedPod(msgspec.Struct, frozen=True, kw_only=True):
    """A pod, as far as the audit reads it. Containers are in the order they start, init containers first."""

    name: str
    namespace: str
    uid: str
    node: str  # "" while it is pending
    phase: str
    containers: tuple[AuditedContainer, ...]
    inits: int  # how many of them are init containers or sidecars
    annotations: Mapping[str, str]
    labels: Mapping[str, str]
    created: str
    started: str
    bound: str  # when the API server bound it; "" when no condition shows it
    deleting: bool

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def is_over(self) -> bool:
        """Its containers have ended. A pod that is being deleted still holds its GPUs."""
        return self.phase in OVER

    def position(self, number: int) -> int | None:
        """The place in `containers` of the container that gpushare and vcuda number so: app containers count from 0.

        Numbers beyond them are init containers: gputile writes these, the original systems do not.
        """
        apps = len(self.containers) - self.inits
        if not 0 <= number < len(self.containers):
            return None
        return self.inits + number if number < apps else number - apps


class AuditedNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node, as far as the audit reads it."""

    name: str
    annotations: Mapping[str, str]
    labels: Mapping[str, str]
    capacity: Json  # or allocatable, where an agent filled only that
    allocatable: Json


def label_of(obj: object) -> str:
    """The name of an object that may be unreadable, for messages."""
    metadata = mapping(mapping(obj).get("metadata"))
    namespace, name = text(metadata.get("namespace")), text(metadata.get("name"))
    return shown(f"{namespace}/{name}" if namespace else name or "(without a name)")


def read_node(obj: object) -> AuditedNode:
    whole = _mapping(obj, "node")
    metadata, status = _mapping(whole.get("metadata"), "metadata"), mapping(whole.get("status"))
    allocatable = mapping(status.get("allocatable"))
    return AuditedNode(
        name=_text(metadata.get("name"), "metadata.name"),
        annotations=texts(metadata.get("annotations")),
        labels=texts(metadata.get("labels")),
        capacity=mapping(status.get("capacity")) or allocatable,
        allocatable=allocatable,
    )


def read_pod(obj: object) -> AuditedPod:
    whole = _mapping(obj, "pod")
    metadata, status = _mapping(whole.get("metadata"), "metadata"), mapping(whole.get("status"))
    spec = _mapping(whole.get("spec"), "spec")
    inits = _containers(spec, "initContainers")
    return AuditedPod(
        name=_text(metadata.get("name") or metadata.get("generateName"), "metadata.name"),
        namespace=_text(metadata.get("namespace"), "metadata.namespace") or "default",
        uid=_text(metadata.get("uid"), "metadata.uid"),
        node=_text(spec.get("nodeName"), "spec.nodeName"),
        phase=text(status.get("phase")) or "",
        containers=(*inits, *_containers(spec, "containers")),
        inits=len(inits),
        annotations=texts(metadata.get("annotations")),
        labels=texts(metadata.get("labels")),
        created=text(metadata.get("creationTimestamp")) or "",
        started=text(status.get("startTime")) or "",
        bound=_bound(status.get("conditions")),
        deleting=bool(metadata.get("deletionTimestamp")),
    )


def _containers(spec: Json, key: str) -> list[AuditedContainer]:
    listed = spec.get(key)
    if listed is not None and not isinstance(listed, list | tuple):
        raise UnreadableObject(f"`spec.{key}` is not a list")
    return [_container(_mapping(entry, f"spec.{key}[{at}]"), key) for at, entry in enumerate(listed or ())]


def _container(entry: Json, key: str) -> AuditedContainer:
    resources = mapping(entry.get("resources"))
    role = Role.APP
    if key == "initContainers":
        role = Role.SIDECAR if entry.get("restartPolicy") == "Always" else Role.INIT
    asks = {**mapping(resources.get("requests")), **mapping(resources.get("limits"))}
    return AuditedContainer(_text(entry.get("name"), "the name of a container"), role, asks)


def _bound(conditions: object) -> str:
    listed = [mapping(condition) for condition in conditions] if isinstance(conditions, list | tuple) else []
    times = (text(entry.get("lastTransitionTime")) for entry in listed if entry.get("type") == "PodScheduled")
    return next((time for time in times if time), "")


def _mapping(value: object, field: str) -> Json:
    if not isinstance(value, dict):
        raise UnreadableObject(f"`{field}` is not an object")
    return value


def _text(value: object, field: str) -> str:
    if value is not None and not isinstance(value, str):
        raise UnreadableObject(f"`{field}` is not a string")
    return value or ""
