"""What must hold after each fault, asked of the API server and of nobody else.

Room:  reads only. The auditor's arithmetic says what fits for pods that ask for one tile; for the others gputile's own
       dry run has to agree that no node takes them.
Door:  `wrongs(...)` lists what does not hold (yet); `Watchman` looks for cards sold twice all the time.
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
from tests.e2e.chaos.room import Free, could_take
from tests.e2e.chaos.storm import Storm
from tests.e2e.gputile import Replica
from tests.e2e.watching import Watch

FINAL = ("Succeeded", "Failed")
TOLD = "GPUDoubleAllocated"


class Cluster:
    """The cluster as the API server shows it at one moment."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        self.pods = {pod["metadata"]["name"]: pod for pod in kube.list("Pod", namespace)}
        self.nodes = kube.list("Node")
        self.report = look(self.nodes, self.pods.values())

    def waiting(self) -> list[Manifest]:
        return [p for p in self.pods.values() if not p["spec"].get("nodeName") and not is_terminating(p)]

    def bound(self) -> int:
        phases = (pod["status"].get("phase") for pod in self.pods.values() if pod["spec"].get("nodeName"))
        return sum(phase not in FINAL for phase in phases)


def look(nodes: Sequence[Manifest], pods: Iterable[Manifest]) -> AuditReport:
    return audit.audit(nodes, pods, now=time.time())


def is_terminating(pod: Manifest) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def wrongs(cluster: Cluster, kube: Kube, namespace: str, storm: Storm, leader: Replica | None) -> list[str]:
    """All that is not as it should be, in sentences; empty when all is well."""
    found = list(finding_lines(cluster.report.findings))
    found += [note.what for note in cluster.report.remarks if note.code is FindingCode.NOT_AS_REQUESTED]
    found += _lost(cluster, kube, namespace, storm)
    found += _left_over(cluster, storm)
    return found + (_could_go(cluster, leader) if leader is not None else ["nobody leads"])


def _lost(cluster: Cluster, kube: Kube, namespace: str, storm: Storm) -> list[str]:
    """Every pod that was made is there, or was let go, or was evicted and told."""
    found = []
    for name, uid in list(storm.alive.items()):
        there = cluster.pods.get(name)
        if there is not None and there["metadata"]["uid"] == uid and not is_terminating(there):
            continue
        if was_told(kube, namespace, name, uid):
            storm.evicted[name] = storm.alive.pop(name)
        else:
            found.append(f"pod {name} ({uid}) is gone or going, and nobody was told why")
    return found


def was_told(kube: Kube, namespace: str, name: str, uid: str) -> bool:
    events = kube.list("Event", namespace, fields=f"involvedObject.name={name},reason={TOLD}")
    return any(event["involvedObject"].get("uid") == uid for event in events)


def _left_over(cluster: Cluster, storm: Storm) -> list[str]:
    extra = sorted(set(cluster.pods) - set(storm.alive))
    return [f"pods that were let go are still there: {', '.join(extra[:5])}"] if extra else []


def _could_go(cluster: Cluster, leader: Replica) -> list[str]:
    """Pods that wait though a node would take them."""
    open_to_all = [found for found in cluster.nodes if not found["spec"].get("taints")]
    nodes = [node for found in open_to_all if isinstance(node := read_node(found), Node)]
    free = {node.name: [_free(cluster.report, node, n) for n in range(len(node.cards))] for node in nodes}
    found = []
    for pod in cluster.waiting():
        asked = read_pod(pod, DEFAULTS)
        assert isinstance(asked, PodRequest), pod
        takers = could_take(asked, free)
        if takers is None:
            takers = dry_run(leader, pod, [node.name for node in nodes])
        if takers:
            found.append(f"pod {pod['metadata']['name']} waits though it fits on {', '.join(takers[:3])}")
    return found


def _free(report: AuditReport, node: Node, position: int) -> Free:
    card = node.cards[position]
    held = report.holders.get(card.uuid, ())
    return Free(
        card,
        card.memory - sum(one.memory for one in held),
        card.cores - sum(one.cores for one in held),
        card.slots - sum(one.slots for one in held),
        len(held),
    )


def dry_run(leader: Replica, pod: Manifest, nodes: list[str]) -> list[str]:
    """The nodes that gputile itself would put the pod on."""
    said = json.loads(leader.request("POST", "/gputile/filter-dryrun", {"Pod": pod, "NodeNames": nodes})[1])
    assert not said.get("Error"), said
    return said.get("NodeNames") or []


class Watchman:
    """Looks at every card all the time, from a watch of the pods, and keeps what it saw sold twice."""

    def __init__(self, pods: Watch, nodes: list[Manifest]) -> None:
        self._pods, self._nodes = pods, nodes
        self.seen: dict[str, Notice] = {}  # by sentence
        self.looks = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchman", daemon=True)

    def __enter__(self) -> "Watchman":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(10)

    def take(self) -> list[Notice]:
        """What was seen since the last time."""
        taken, self.seen = list(self.seen.values()), {}
        return taken

    def _run(self) -> None:
        while not self._done.wait(0.4):
            report = look(self._nodes, self._pods.objects.values())
            self.looks += 1
            for notice in report.findings:
                if notice.code is FindingCode.DOUBLE_ALLOCATED:
                    self.seen.setdefault(notice.what, notice)
