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


def real(manifest: Manifest, node: str = "", says: str = "") -> Manifest:
    """The same pod (or Deployment, or any kind with a pod template), such that a real machine can run it.

    Its image is ours, there is no ServiceAccount token to wait for, and it ends within a second of its deletion.
    `node`: bound there at once, without a scheduler. `says`: what each container runs before it idles, in place of
    its own command; an init container ends after that. One without command just idles, or ends.
    """
    made = deepcopy(manifest)
    spec = made["spec"]["template"]["spec"] if "template" in made["spec"] else made["spec"]
    for one in (*spec.get("initContainers", []), *spec["containers"]):
        ends = one in spec.get("initContainers", []) and one.get("restartPolicy") != "Always"
        one.update(image=IMAGE, imagePullPolicy="Never")
        if says or "command" not in one:
            one["command"] = ["/bin/sh", "-c", f"{says}\n{'' if ends else IDLE}"]
    spec.update(automountServiceAccountToken=False, enableServiceLinks=False, terminationGracePeriodSeconds=1)
    return {**made, "spec": {**made["spec"], "nodeName": node}} if node else made


def node_of(found: Manifest | None) -> str | None:
    return found["spec"].get("nodeName") if found else None


def all_bound(count: int) -> Any:
    """For `Watch.wait_for`."""
    return lambda pods: sum(bool(node_of(found)) for found in pods.values()) == count


def first_with_node(watch: Watch, name: str) -> Manifest:
    """The pod in the very event that first showed its node."""
    return next(e.object for e in watch.events if e.object["metadata"]["name"] == name and node_of(e.object))


def events_of(kube: Kube, namespace: str, name: str, reason: str = "") -> list[Manifest]:
    found = kube.list("Event", namespace, fields=f"involvedObject.name={name}")
    return [event for event in found if reason in ("", event["reason"])]
