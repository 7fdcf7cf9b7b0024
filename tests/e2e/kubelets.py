"""Fake kubelets of the fake nodes: they start bound pods, terminate deleted pods and report finished pods.

They are level-based: each step reads the pod from the watch's cache and writes with its resourceVersion. A step on a
stale pod is rejected with a conflict, and the next event triggers the next step.

bound --start_after--> Running, Ready --finish--> Succeeded or Failed
  any of them --deletionTimestamp, stop_after--> containers terminated --> object gone
"""

import heapq
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from http.client import HTTPException

from tests.e2e.api import ApiError, Kube, Manifest
from tests.e2e.watching import Event, Key, Watch, watch

FINAL = ("Succeeded", "Failed")
GONE = ("NotFound", "Conflict")  # the pod changed or was deleted meanwhile; its next event triggers the next step
RETRY = 0.2

Choose = Callable[[Manifest], bool]


class FakeKubelets:
    """Threads that act as the kubelet of every bound pod that `mine` accepts."""

    def __init__(
        self,
        kube: Kube,
        start_after: float = 0.0,
        stop_after: float = 0.0,
        mine: Choose = lambda pod: True,
        threads: int = 2,
    ) -> None:
        self.start_after, self.stop_after = start_after, stop_after
        self._kube, self._mine = kube, mine
        self._pods: Watch = watch(kube, "Pod")
        self._agenda = Agenda()
        self._held: set[Key] = set()
        self._due: dict[tuple[str, str], float] = {}  # uid, step: when it may happen
        self._threads = [threading.Thread(target=self._work, name=f"kubelets-{n}", daemon=True) for n in range(threads)]

    def __enter__(self) -> "FakeKubelets":
        self._pods.__enter__()
        self._pods.each(self._handle)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._agenda.close()
        self._pods.close()
        for thread in self._threads:
            thread.join(10)

    @property
    def pods(self) -> Watch:
        """The watch of all pods; tests may read it too."""
        return self._pods

    def hold(self, name: str, namespace: str = "default") -> None:
        """Keep a pod from starting and from terminating, as a slow node or a stuck container does."""
        self._held.add((namespace, name))

    def release(self, name: str, namespace: str = "default") -> None:
        self._held.discard((namespace, name))
        self._agenda.add((namespace, name), time.monotonic())

    def finish(self, name: str, namespace: str = "default", phase: str = "Succeeded") -> None:
        """Let the containers of a pod exit; the object stays."""
        pod = self._kube.get("Pod", name, namespace)
        self._patch(pod, ended(pod, phase))

    # --- in the threads

    def _handle(self, event: Event) -> None:
        metadata = event.object["metadata"]
        if event.type == "DELETED":
            for step in ("start", "stop"):
                self._due.pop((metadata["uid"], step), None)
        else:
            self._agenda.add((metadata["namespace"], metadata["name"]), time.monotonic())

    def _work(self) -> None:
        while (key := self._agenda.take()) is not None:
            try:
                self._step(key)
            except ApiError as error:
                if error.reason not in GONE:
                    self._agenda.add(key, time.monotonic() + RETRY)
            except (OSError, HTTPException):  # the API server is away
                self._agenda.add(key, time.monotonic() + RETRY)

    def _step(self, key: Key) -> None:
        pod = self._pods.get(*key)
        if pod is None or key in self._held or not pod["spec"].get("nodeName") or not self._mine(pod):
            return
        phase = pod["status"].get("phase", "Pending")
        if "deletionTimestamp" in pod["metadata"]:
            if self._may(key, pod, "stop", self.stop_after):
                self._end(pod)
        elif phase == "Pending" and self._may(key, pod, "start", self.start_after):
            self._patch(pod, running(pod), pod["metadata"]["resourceVersion"])

    def _may(self, key: Key, pod: Manifest, step: str, after: float) -> bool:
        """Whether this step is due; if not, it is put on the agenda."""
        due = self._due.setdefault((pod["metadata"]["uid"], step), time.monotonic() + after)
        if due > time.monotonic():
            self._agenda.add(key, due)
            return False
        return True

    def _end(self, pod: Manifest) -> None:
        """As a kubelet does: first report that the containers have terminated, then delete the object."""
        metadata = pod["metadata"]
        if pod["status"].get("phase") not in FINAL:
            self._patch(pod, ended(pod, "Failed"), metadata["resourceVersion"])
            return
        self._kube.delete("Pod", metadata["name"], metadata["namespace"], grace=0, only={"uid": metadata["uid"]})

    def _patch(self, pod: Manifest, status: Manifest, version: str = "") -> None:
        metadata = pod["metadata"]
        same = {"uid": metadata["uid"], **({"resourceVersion": version} if version else {})}
        body = {"metadata": same, "status": status}
        self._kube.patch("Pod", metadata["name"], body, metadata["namespace"], "status", "strategic")


class Agenda:
    """A queue of keys with due times; `take` blocks until the next key is due."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, Key]] = []
        self._changed, self._closed = threading.Condition(), False

    def add(self, key: Key, due: float) -> None:
        with self._changed:
            heapq.heappush(self._heap, (due, key))
            self._changed.notify()

    def take(self) -> Key | None:
        """The next key that is due; None after `close`."""
        with self._changed:
            while not self._closed:
                wait = self._heap[0][0] - time.monotonic() if self._heap else None
                if wait is not None and wait <= 0:
                    return heapq.heappop(self._heap)[1]
                self._changed.wait(wait)
        return None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def running(pod: Manifest) -> Manifest:
    """The status of a pod whose containers have all started."""
    at, spec = _now(), pod["spec"]
    up = {"running": {"startedAt": at}}
    first = spec.get("initContainers", [])
    return {
        "phase": "Running",
        "startTime": at,
        "conditions": _conditions("True", at),
        "initContainerStatuses": [_container(c, up if _sidecar(c) else _ended(at, "Completed", 0)) for c in first],
        "containerStatuses": [_container(c, up) for c in spec["containers"]],
    }


def ended(pod: Manifest, phase: str) -> Manifest:
    """The status of a pod whose containers have terminated."""
    at, spec = _now(), pod["spec"]
    state = _ended(at, "Completed", 0) if phase == "Succeeded" else _ended(at, "Error", 137)
    return {
        "phase": phase,
        "conditions": _conditions("False", at),
        "initContainerStatuses": [_container(c, state) for c in spec.get("initContainers", [])],
        "containerStatuses": [_container(c, state) for c in spec["containers"]],
    }


def _conditions(ready: str, at: str) -> list[Manifest]:
    statuses = {"Initialized": "True", "Ready": ready, "ContainersReady": ready}
    return [{"type": name, "status": value, "lastTransitionTime": at} for name, value in statuses.items()]


def _container(container: Manifest, state: Manifest) -> Manifest:
    up = "running" in state
    return {
        "name": container["name"],
        "image": container.get("image", ""),
        "imageID": "",
        "containerID": f"fake://{container['name']}",
        "restartCount": 0,
        "started": up,
        "ready": up or state["terminated"]["exitCode"] == 0,
        "state": state,
    }


def _ended(at: str, reason: str, code: int) -> Manifest:
    return {"terminated": {"exitCode": code, "reason": reason, "startedAt": at, "finishedAt": at}}


def _sidecar(container: Manifest) -> bool:
    return container.get("restartPolicy") == "Always"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
