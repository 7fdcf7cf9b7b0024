"""The invariants that must hold after each fault, checked from objects of the API server; it must not write.

For pending pods of one tile, arithmetic of the tests decides whether a GPU fits; for the others, gputile's dry run has
to agree that no node fits.
"""

import json
import threading
import time
from collections.abc import Iterable, Sequence

from gputile.audit import audit
from gputile.audit.advice import finding_lines
from gputile.audit.report import AuditReport, FindingCode, Notice
from gputile.dialects.registry import read_node, read_pod
from gputile.dialects.settings import DEFAULTS
from gputile.model.cards import Node
from gputile.model.requests import PodRequest
from tests.e2e.api import Kube, Manifest
from tests.e2e.chaos.free_capacity import Free, fitting_nodes
from tests.e2e.chaos.storm import Storm
from tests.e2e.gputile import Replica
from tests.e2e.watching import Watch

FINAL = ("Succeeded", "Failed")
EVICTED = "GPUDoubleAllocated"  # the reason of the event


class Cluster:
    """The cluster as the API server shows it at one moment."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        self.pods = {pod["metadata"]["name"]: pod for pod in kube.list("Pod", namespace)}
        self.nodes = kube.list("Node")
        self.report = run_audit(self.nodes, self.pods.values())

    def pending(self) -> list[Manifest]:
        return [p for p in self.pods.values() if not p["spec"].get("nodeName") and not is_terminating(p)]

    def bound(self) -> int:
        phases = (pod["status"].get("phase") for pod in self.pods.values() if pod["spec"].get("nodeName"))
        return sum(phase not in FINAL for phase in phases)


def run_audit(nodes: Sequence[Manifest], pods: Iterable[Manifest]) -> AuditReport:
    return audit.audit(nodes, pods, now=time.time())


def is_terminating(pod: Manifest) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def violations(cluster: Cluster, kube: Kube, namespace: str, storm: Storm, leader: Replica | None) -> list[str]:
    """A sentence for each invariant that does not hold."""
    lines = list(finding_lines(cluster.report.findings))
    lines += [note.what for note in cluster.report.remarks if note.code is FindingCode.NOT_AS_REQUESTED]
    lines += _lost(cluster, kube, namespace, storm)
    lines += _left_over(cluster, storm)
    return lines + (_schedulable(cluster, leader) if leader is not None else ["there is no leader"])


def _lost(cluster: Cluster, kube: Kube, namespace: str, storm: Storm) -> list[str]:
    """Every pod that was created exists, or was deleted by the storm, or was evicted with an event."""
    lines = []
    for name, uid in list(storm.alive.items()):
        pod = cluster.pods.get(name)
        if pod is not None and pod["metadata"]["uid"] == uid and not is_terminating(pod):
            continue
        if has_event(kube, namespace, name, uid):
            storm.evicted[name] = storm.alive.pop(name)
        else:
            lines.append(f"pod {name} ({uid}) is deleted or terminating without an event")
    return lines


def has_event(kube: Kube, namespace: str, name: str, uid: str) -> bool:
    events = kube.list("Event", namespace, fields=f"involvedObject.name={name},reason={EVICTED}")
    return any(event["involvedObject"].get("uid") == uid for event in events)


def _left_over(cluster: Cluster, storm: Storm) -> list[str]:
    extra = sorted(set(cluster.pods) - set(storm.alive))
    return [f"pods that were deleted still exist: {', '.join(extra[:5])}"] if extra else []


def _schedulable(cluster: Cluster, leader: Replica) -> list[str]:
    """Pods that are pending although a node fits."""
    untainted = [manifest for manifest in cluster.nodes if not manifest["spec"].get("taints")]
    nodes = [node for manifest in untainted if isinstance(node := read_node(manifest), Node)]
    free = {node.name: [_free(cluster.report, node, n) for n in range(len(node.cards))] for node in nodes}
    lines = []
    for pod in cluster.pending():
        request = read_pod(pod, DEFAULTS)
        assert isinstance(request, PodRequest), pod
        fitting = fitting_nodes(request, free)
        if fitting is None:
            fitting = dry_run(leader, pod, [node.name for node in nodes])
        if fitting:
            lines.append(f"pod {pod['metadata']['name']} is pending although it fits on {', '.join(fitting[:3])}")
    return lines


def _free(report: AuditReport, node: Node, position: int) -> Free:
    card = node.cards[position]
    holders = report.holders.get(card.uuid, ())
    return Free(
        card,
        card.memory - sum(it.memory for it in holders),
        card.cores - sum(it.cores for it in holders),
        card.slots - sum(it.slots for it in holders),
        len(holders),
    )


def dry_run(leader: Replica, pod: Manifest, nodes: list[str]) -> list[str]:
    """The nodes that gputile's own dry run accepts for the pod."""
    response = json.loads(leader.request("POST", "/gputile/filter-dryrun", {"Pod": pod, "NodeNames": nodes})[1])
    assert not response.get("Error"), response
    return response.get("NodeNames") or []


class OverlapWatcher:
    """Runs the audit twice a second on a watch of the pods, and records every double allocation."""

    def __init__(self, pods: Watch, nodes: list[Manifest]) -> None:
        self._pods, self._nodes = pods, nodes
        self.seen: dict[str, Notice] = {}  # by text
        self.audits = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="overlap watcher", daemon=True)

    def __enter__(self) -> "OverlapWatcher":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(10)

    def take(self) -> list[Notice]:
        """The double allocations since the last call."""
        taken, self.seen = list(self.seen.values()), {}
        return taken

    def _run(self) -> None:
        while not self._done.wait(0.4):
            report = run_audit(self._nodes, self._pods.objects.values())
            self.audits += 1
            for notice in report.findings:
                if notice.code is FindingCode.DOUBLE_ALLOCATED:
                    self.seen.setdefault(notice.what, notice)
