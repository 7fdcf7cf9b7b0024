"""A cluster in memory: objects as Kubernetes stores them, scheduled by the production core.

It acts as API server and kube-scheduler for one pod at a time: filter, reserve, bind with the grant in the same write,
and the watch event that confirms it.
"""

import copy
from typing import Any

import msgspec

from gputile.dialects import gpushare, registry
from gputile.dialects.allocations import allocation_of
from gputile.dialects.kube_objects import GrantContext, NodeObject, Pod
from gputile.dialects.parsing import convert_node, convert_pod
from gputile.dialects.settings import DEFAULTS, DialectSettings
from gputile.engine.explanation import Explanation, explain
from gputile.engine.placement.place import Placement
from gputile.ledger.events import Assumed, Confirmed, NodeSeen, PodGone, Reserved
from gputile.ledger.ledger import Ledger
from gputile.model.cards import Node
from gputile.model.errors import InputError
from gputile.model.grants import Grant
from gputile.model.policies import DEFAULT_POLICY
from gputile.model.refusals import BadRequest
from gputile.model.requests import PodRequest
from gputile.sim.manifests import Workload


class SubmitOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of scheduling one pod."""

    pod: str  # namespace/name
    asked: PodRequest | BadRequest | None
    grant: Grant | None = None
    policy: str = ""
    fitting: int = 0  # number of feasible nodes
    explanation: Explanation | None = None  # why it is pending


class MemoryCluster:
    """The nodes and pods of a simulated cluster, by name; `submit` schedules."""

    def __init__(self, policy: str = DEFAULT_POLICY, settings: DialectSettings = DEFAULTS) -> None:
        self.ledger = Ledger()
        self.policy, self.settings = policy, settings
        self.nodes: dict[str, dict[str, Any]] = {}
        self.pods: dict[str, dict[str, Any]] = {}
        self._clock = 0.0  # advances by one second per pod; a simulation needs no real time

    def add_node(self, manifest: dict[str, Any]) -> Node:
        node = registry.read_node(manifest, self.settings)
        if isinstance(node, BadRequest):
            raise InputError(node.message)
        self.nodes[node.name] = manifest
        self.ledger.handle(NodeSeen(node))
        return node

    def submit(self, workload: Workload) -> list[SubmitOutcome]:
        """Create and schedule the pods of a workload, one after the other."""
        return [self.schedule(self.create(workload, number)) for number in range(workload.replicas)]

    def create(self, workload: Workload, number: int) -> str:
        """One pod of the workload, as its controller would name it; returns namespace/name."""
        pod = copy.deepcopy(workload.pod)
        alone = workload.kind == "Pod"
        name = workload.name if alone else f"{workload.name}-{number}"
        key = f"{workload.namespace}/{name}"
        if key in self.pods:
            raise InputError(f"pod {key}: defined twice; rename one of the two")
        metadata = {**(pod.get("metadata") or {}), "name": name, "namespace": workload.namespace, "uid": f"uid-{key}"}
        self.pods[key] = {**pod, "apiVersion": "v1", "kind": "Pod", "metadata": metadata}
        return key

    def schedule(self, key: str) -> SubmitOutcome:
        self._clock += 1.0
        pod = convert_pod(self.pods[key])
        asked = registry.read_pod(pod, self._settings_now()) if isinstance(pod, Pod) else pod
        if not isinstance(asked, PodRequest) or isinstance(pod, BadRequest):
            return SubmitOutcome(pod=key, asked=asked)
        self.ledger.fleet.scorer.observe(asked)
        self.ledger.fleet.scorer.refresh()
        fleet, seed = self.ledger.fleet_for(pod.uid), int(self._clock)
        best = fleet.best(asked, self.policy, seed=seed)
        fitting = int(fleet.fits(asked).sum())
        placement = fleet.place(asked, best[0], self.policy, seed) if best else None
        if not isinstance(placement, Placement):
            holders = {name: self.ledger.holders(name) for name in self.nodes}
            return SubmitOutcome(pod=key, asked=asked, explanation=explain(asked, self.ledger.fleet, holders))
        policy = asked.constraints.node_policy or self.policy
        return SubmitOutcome(
            pod=key, asked=asked, grant=self._bind(key, pod, asked, placement), policy=policy, fitting=fitting
        )

    def delete(self, key: str) -> None:
        self.ledger.handle(PodGone(self.pods.pop(key)["metadata"]["uid"]))

    def _bind(self, key: str, pod: Pod, asked: PodRequest, placement: Placement) -> Grant:
        grant = placement.grant(pod.uid, asked)
        allocation = msgspec.structs.replace(allocation_of(pod, asked, grant), started=self._clock)
        for event in (Reserved(allocation, self._clock), Assumed(allocation, self._clock)):
            denied = self.ledger.handle(event)
            assert not denied, denied
        cards, at = self.ledger.fleet.view(placement.node).node.cards, int(self._clock * 10**9)
        settings = self._settings_now()
        self._write(key, GrantContext(grant=grant, pod=pod, asked=asked, cards=cards, at=at, settings=settings))
        self.ledger.handle(Confirmed(allocation))
        return grant

    def _write(self, key: str, context: GrantContext) -> None:
        """The binding: node, annotations and labels in one write."""
        written = registry.write_grant(context)
        metadata = self.pods[key]["metadata"]
        metadata["annotations"] = {**(metadata.get("annotations") or {}), **written.annotations}
        metadata["labels"] = {**(metadata.get("labels") or {}), **written.labels}
        self.pods[key]["spec"]["nodeName"] = context.grant.node

    def _settings_now(self) -> DialectSettings:
        """The settings, with gpushare's unit guessed from the nodes if the setting asks for that."""
        nodes = [convert_node(manifest) for manifest in self.nodes.values()]
        return gpushare.resolved(self.settings, [node for node in nodes if isinstance(node, NodeObject)])
