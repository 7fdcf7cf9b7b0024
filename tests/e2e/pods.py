"""Pods for the end-to-end tests, and helpers to read their state."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from tests.e2e.api import Kube, Manifest
from tests.e2e.images import IDLE, IMAGE
from tests.e2e.watching import Watch


def pod(
    name: str,
    limits: Mapping[str, Any],
    *,
    annotations: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    **spec: Any,
) -> Manifest:
    """One container `main` with these limits; `spec` adds to or replaces the pod's spec."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": dict(annotations or {}), "labels": dict(labels or {})},
        "spec": {"containers": [container("main", limits)], **spec},
    }


def container(name: str, limits: Mapping[str, Any] | None = None, **more: Any) -> Manifest:
    amounts = {resource: str(amount) for resource, amount in (limits or {}).items()}
    return {"name": name, "image": "busybox", "resources": {"limits": amounts}, **more}


def tile(name: str, memory: int, cards: int = 1, **more: Any) -> Manifest:
    """A pod in gputile's own dialect."""
    return pod(name, {"gputile.io/gpu": cards, "gputile.io/memory": memory}, **more)


def real(manifest: Manifest, node: str = "", script: str = "") -> Manifest:
    """The same pod (or Deployment, or any kind with a pod template), changed so that a real machine can run it.

    Its image is that of the tests, it mounts no ServiceAccount token, and it terminates within a second of its
    deletion. `node`: bound there at once, without a scheduler. `script`: replaces the command of each container, which
    idles afterwards; an init container exits instead. A container without command idles, or exits.
    """
    copy = deepcopy(manifest)
    spec = copy["spec"]["template"]["spec"] if "template" in copy["spec"] else copy["spec"]
    for entry in (*spec.get("initContainers", []), *spec["containers"]):
        exits = entry in spec.get("initContainers", []) and entry.get("restartPolicy") != "Always"
        entry.update(image=IMAGE, imagePullPolicy="Never")
        if script or "command" not in entry:
            entry["command"] = ["/bin/sh", "-c", f"{script}\n{'' if exits else IDLE}"]
    spec.update(automountServiceAccountToken=False, enableServiceLinks=False, terminationGracePeriodSeconds=1)
    return {**copy, "spec": {**copy["spec"], "nodeName": node}} if node else copy


def node_of(pod: Manifest | None) -> str | None:
    return pod["spec"].get("nodeName") if pod else None


def all_bound(count: int) -> Any:
    """A condition for `Watch.wait_for`: exactly this many pods are bound."""
    return lambda pods: sum(bool(node_of(pod)) for pod in pods.values()) == count


def first_with_node(watch: Watch, name: str) -> Manifest:
    """The pod in the very event that first showed its node."""
    return next(e.object for e in watch.events if e.object["metadata"]["name"] == name and node_of(e.object))


def events_of(kube: Kube, namespace: str, name: str, reason: str = "") -> list[Manifest]:
    events = kube.list("Event", namespace, fields=f"involvedObject.name={name}")
    return [event for event in events if reason in ("", event["reason"])]
