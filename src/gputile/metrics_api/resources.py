"""The table of served kinds: group, names, object format, and the event format of the older systems.

Both groups show the same two collections. There are only pure functions here.
"""

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from gputile.metrics_api.objects import GROUP, UNKNOWN, VERSION
from gputile.metrics_api.watch_cache import Key

Json = dict[str, Any]

OLD_GROUP, OLD_VERSION = "nvidia-gpu-scheduler", "v1"
VERBS = ("get", "list", "watch")
DELETED_KEYS = ("pod_name", "pod_namespace", "device_node")


class Resource(msgspec.Struct, frozen=True, kw_only=True):
    """One served kind: its names, and how its objects and old events are built."""

    group: str
    version: str
    plural: str
    singular: str
    kind: str
    namespaced: bool
    of: Literal["nodes", "pods"]
    short: tuple[str, ...] = ()
    shape: Callable[[Json], Json]
    key: Callable[[str, str], Key | None]  # requested namespace and name, to the key in the collection
    old_event: Callable[[str, Json], Json]  # SYNCED or DELETED and the object, to a line of the old watch
    is_old: bool = False  # its watch has the old format unless the request has `events=standard`

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}"


# ---- v0.1: metrics.nvidia.com/v1alpha1 ------------------------------------------------------------------------------


def _as_it_is(body: Json) -> Json:
    return body


def _plain_key(namespace: str, name: str) -> Key:
    return namespace, name


def old_object(body: Json) -> Json:
    """The object as v0.1 wrote it: with an apiVersion without its group."""
    return {**body, "apiVersion": VERSION}


def _old_event(how: str, body: Json) -> Json:
    if how == "DELETED":  # name and namespace only
        spec = {key: body["spec"][key] for key in DELETED_KEYS if key in body["spec"]}
        body = {"kind": body["kind"], "apiVersion": VERSION, "spec": spec, "status": {}}
    return {"Type": how, "Object": old_object(body)}


# ---- v0.2: nvidia-gpu-scheduler/v1 ----------------------------------------------------------------------------------


def _renamed(body: Json, kind: str, name: str, labels: Json) -> Json:
    metadata = {**body["metadata"], "name": name, "labels": {**(body["metadata"].get("labels") or {}), **labels}}
    return {**body, "kind": kind, "apiVersion": f"{OLD_GROUP}/{OLD_VERSION}", "metadata": metadata}


def _gpu_node(body: Json) -> Json:
    name, status = body["metadata"]["name"], body["status"]
    health = status["node_health"]
    old_status = {
        "node": name,
        "health": health if health != UNKNOWN else "False",
        "message": status.get("fault", "") or ("no gputile agent on the node" if health == UNKNOWN else ""),
        "last_health_time": status.get("node_last_health_time", UNKNOWN),
        "last_transition_time": status["node_last_transition_time"],
    }
    return {**_renamed(body, "GpuNode", name, {}), "status": {**status, **old_status}}


def _gpu_pod(body: Json) -> Json:
    spec = body["spec"]
    name = f"{spec['pod_namespace']}-{spec['pod_name']}"
    return _renamed(body, "GpuPod", name, {"nvidia-gpu-scheduler.node": spec["node_name"]})


def _gpu_pod_key(namespace: str, name: str) -> Key | None:
    """The name is `<namespace>-<pod>`, and only the requested namespace shows where the pod's name begins."""
    return (namespace, name.removeprefix(f"{namespace}-")) if namespace and name.startswith(f"{namespace}-") else None


RESOURCES = (
    Resource(
        group=GROUP,
        version=VERSION,
        plural="gpuinfos",
        singular="gpuinfo",
        kind="GpuInfo",
        namespaced=False,
        of="nodes",
        short=("gpui",),
        shape=_as_it_is,
        key=_plain_key,
        old_event=_old_event,
    ),
    Resource(
        group=GROUP,
        version=VERSION,
        plural="podresources",
        singular="podresource",
        kind="PodResource",
        namespaced=True,
        of="pods",
        short=("podres",),
        shape=_as_it_is,
        key=_plain_key,
        old_event=_old_event,
    ),
    Resource(
        group=OLD_GROUP,
        version=OLD_VERSION,
        plural="gpunodes",
        singular="gpunode",
        kind="GpuNode",
        namespaced=False,
        of="nodes",
        shape=_gpu_node,
        key=_plain_key,
        old_event=lambda how, body: {"GpuNode": body, "Type": how},
        is_old=True,
    ),
    Resource(
        group=OLD_GROUP,
        version=OLD_VERSION,
        plural="gpupods",
        singular="gpupod",
        kind="GpuPod",
        namespaced=True,
        of="pods",
        shape=_gpu_pod,
        key=_gpu_pod_key,
        old_event=lambda how, body: {"GpuPod": body, "Type": how},
        is_old=True,
    ),
)

GROUPS = {GROUP: VERSION, OLD_GROUP: OLD_VERSION}
API_SERVICES = tuple(f"{version}.{group}" for group, version in GROUPS.items())


def resource(group: str, version: str, plural: str) -> Resource | None:
    matching = (kind for kind in RESOURCES if (kind.group, kind.version, kind.plural) == (group, version, plural))
    return next(matching, None)
