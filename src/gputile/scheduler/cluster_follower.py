"""Follows the cluster: applies what the watches of nodes, pods and agents' Leases show to the cluster state.

A list is applied in time slices, so that probes and extender calls are answered in between. An unexpected error about
one object leaves the other objects unaffected. No scheduling decision is made here.
"""

import asyncio
import gc
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from gputile.background.failure_isolation import FailureIsolation
from gputile.concurrency.time_slices import TimeSlices
from gputile.dialects.kube_objects import NodeObject, Pod
from gputile.kube.api import AgentLease, Api, Undecodable, WatchFailed
from gputile.kube.informer import Feed, Informer, OnChange, OnList
from gputile.ledger.events import Compared, Instruction
from gputile.metrics_api.projection import Projection
from gputile.scheduler.preemption.preemptor import Preemptor
from gputile.scheduler.state.cluster_state import ClusterState
from gputile.scheduler.workload_learner import WorkloadLearner
from gputile.telemetry.logs import fields
from gputile.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

STALE = 30.0  # seconds of a broken watch after which this replica reports not ready
MANY = 1000  # new pods in one list, after which the garbage collector's heap is frozen again

T = TypeVar("T")


class ClusterFollower:
    """The watches of nodes, pods and agents' Leases, and how their updates reach the rest of the scheduler."""

    def __init__(
        self,
        api: Api,
        cluster_state: ClusterState,
        preemptor: Preemptor,
        learner: WorkloadLearner,
        projection: Projection | None,
        metrics: Metrics,
        isolation: FailureIsolation,
        *,
        lease_namespace: str,
        apply: Callable[[Iterable[Instruction]], None],
        clock: Callable[[], float],
    ) -> None:
        """`apply` carries out the ledger's instructions."""
        self._cluster_state, self._preemptor, self._learner = cluster_state, preemptor, learner
        self._projection, self._metrics, self._isolation = projection, metrics, isolation
        self._apply, self._clock = apply, clock
        self.nodes = self._informer("nodes", api.follow_nodes, self._nodes_listed, self._node_changed)
        self.pods = self._informer("pods", api.follow_pods, self._pods_listed, self._pod_changed)
        self.leases = Informer(
            partial(api.follow_leases, lease_namespace),
            self._leases_listed,
            self._lease_changed,
            on_failure=self._lease_watch_failed,
            on_undecodable=self._count_undecodable,
            on_alive=cluster_state.agents.watch_alive,
            clock=clock,
            message="watch of the agents' leases failed; reconnecting",
        )
        self._needed: dict[str, Informer[Any]] = {"nodes": self.nodes, "pods": self.pods}  # to be ready

    def _informer(self, kind: str, feed: Feed[T], on_list: OnList[T], on_change: OnChange[T]) -> Informer[T]:
        return Informer(
            feed,
            on_list,
            on_change,
            on_failure=lambda failed: self._metrics.watch_failures.labels(kind).inc(),
            on_undecodable=self._count_undecodable,
            clock=self._clock,
            message="watch failed; reconnecting",
            log_fields={"kind": kind},
            log_repeats=True,
        )

    def _count_undecodable(self, undecodable: Undecodable) -> None:
        self._metrics.undecodable.inc()

    def stale(self) -> list[str]:
        """The watches that have been broken for long. A cluster without agents has no Leases."""
        return [kind for kind, informer in self._needed.items() if informer.broken_for() > STALE]

    def update_metrics(self, now: float) -> None:
        for kind, informer in {**self._needed, "leases": self.leases}.items():
            if informer.seen_at is not None:
                self._metrics.lag.labels(kind).set(now - informer.seen_at)

    def _step(self, loop: str, name: str, work: Callable[[], list[Instruction]], about: Pod | None = None) -> bool:
        """Work on one object and carry out the ledger's instructions; returns whether that succeeded."""

        def work_and_apply() -> bool:
            self._apply(work())
            return True

        return self._isolation.step(loop, name, work_and_apply, about) is not None

    def _slices(self) -> TimeSlices:
        return TimeSlices(self._clock, asyncio.sleep)

    # ---- nodes ------------------------------------------------------------------------------------------------------

    async def _nodes_listed(self, nodes: tuple[NodeObject, ...]) -> None:
        slices = self._slices()
        for name in self._cluster_state.nodes_except({node.name for node in nodes}):
            self._step("watch nodes", name, partial(self._cluster_state.node_gone, name))
        for node in nodes:
            await slices.turn()
            await self._node_changed(node, False)
        if self._projection is not None:
            self._projection.all_changed()
        log.info("listed", extra=fields(kind="nodes", count=len(nodes)))

    async def _node_changed(self, node: NodeObject, deleted: bool) -> None:
        self._step("watch nodes", node.name, partial(self._apply_node, node, deleted))

    def _apply_node(self, node: NodeObject, deleted: bool) -> list[Instruction]:
        instructions = self._cluster_state.node_changed(node, deleted=deleted)
        if self._projection is not None:
            work = partial(self._projection.node_changed, node, deleted=deleted)
            self._isolation.step("metrics API", node.name, work)
        return instructions

    # ---- pods -------------------------------------------------------------------------------------------------------

    async def follow_pods(self) -> None:
        """Starts after the nodes: many grants name cards by index, which needs the node's inventory."""
        await self.nodes.listed.wait()
        await self.pods.run()

    async def _pods_listed(self, pods: tuple[Pod, ...]) -> None:
        """In time slices: first the listed pods, then the deleted ones, then overlaps (see `ClusterState.pods_listed`).

        The watch waits meanwhile, so no later change is applied before the list.
        """
        first = not self.pods.listed.is_set()
        gc.disable()  # thousands of new long-lived objects: each collection over them took 0.2 s
        try:
            moved = await self._apply_pod_list(pods)
            if first:  # a restarted scheduler learns the workload from the pods that exist
                await self._learner.learn_from_list()
        finally:
            gc.enable()
        if first or moved > MANY:
            gc.freeze()  # later collections skip these objects
        self._preemptor.listed()
        if self._projection is not None:
            self._projection.all_changed(is_last=True)
        log.info("listed", extra=fields(kind="pods", count=len(pods)))

    async def _apply_pod_list(self, pods: tuple[Pod, ...]) -> int:
        slices, cluster_state = self._slices(), self._cluster_state
        missing = cluster_state.unlisted({pod.uid for pod in pods}, self.pods.undecodable)
        for pod in pods:
            await slices.turn()
            self._step_pod(pod, partial(cluster_state.relisted, pod))
        for uid in missing:
            await slices.turn()
            self._step("watch pods", uid, partial(cluster_state.remove_unlisted, uid))
        moved = cluster_state.take_changed()
        for uid in moved:
            await slices.turn()
            self._step("watch pods", uid, partial(cluster_state.ledger.handle, Compared(uid)))
        return len(moved)

    async def _pod_changed(self, pod: Pod, deleted: bool) -> None:
        self._step_pod(pod, partial(self._apply_pod, pod, deleted))

    def _apply_pod(self, pod: Pod, deleted: bool) -> list[Instruction]:
        instructions = self._cluster_state.pod_changed(pod, deleted=deleted)
        self._isolation.step("preemption", pod.key, partial(self._preemptor.pod_seen, pod), pod)
        if self._projection is not None:
            self._isolation.step("metrics API", pod.key, partial(self._projection.pod_changed, pod))
        return instructions

    def _step_pod(self, pod: Pod, work: Callable[[], list[Instruction]]) -> None:
        """If the work fails, the state stays as it was, and the node of a pod that was never counted accepts no further
        pod, because it is unknown which of its cards are allocated."""
        counted = self._step("watch pods", pod.key, work, pod)
        self._cluster_state.uncounted_unless(counted, pod)

    # ---- agents -----------------------------------------------------------------------------------------------------

    def _lease_watch_failed(self, failed: WatchFailed) -> None:
        self._cluster_state.agents.watch_failed()
        self._metrics.watch_failures.labels("leases").inc()

    async def _leases_listed(self, leases: tuple[AgentLease, ...]) -> None:
        """All in one step; one by one if that step fails, so that one bad Lease affects only its own node."""
        nodes = self._isolation.step("watch leases", "", partial(self._cluster_state.agents.listed, leases))
        self.update_agents(nodes or [])
        for lease in leases if nodes is None else ():
            await self._lease_changed(lease, False)

    async def _lease_changed(self, lease: AgentLease, deleted: bool) -> None:
        work = partial(self._cluster_state.agents.changed, lease, deleted=deleted)
        for node in self._isolation.step("watch leases", lease.name, work) or ():
            log.info("the agent's liveness changed", extra=fields(node=node, deleted=deleted))
            self.update_agents([node])

    def check_agents(self) -> None:
        """Find agents that became stale, and deleted pods whose containers are gone by now."""
        stale = self._cluster_state.agents.check()
        for node in stale:
            log.warning("the agent's lease is stale", extra=fields(node=node))
        self.update_agents(stale)
        orphans = self._cluster_state.orphans
        is_disconnected = any(informer.broken_since is not None for informer in self._needed.values())
        for uid in orphans.kept():
            self._step("deleted pods", uid, partial(orphans.check, uid, is_disconnected=is_disconnected))

    def update_agents(self, nodes: list[str]) -> None:
        """The liveness of these nodes' agents changed."""
        for node in nodes:
            self._step("agents", node, partial(self._cluster_state.agents_changed, [node]))
            if self._projection is not None:
                self._projection.touched([node])
