"""The scheduler process: it builds all parts, runs their loops side by side, and starts and stops them in order.

The loops here are small and endless. A failure of one object is logged and the loop continues; no scheduling decision
is made in this module.
"""

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import Any, TypeVar

from gputile.background.failure_isolation import FailureIsolation
from gputile.background.garbage_collection import collect_periodically
from gputile.background.time_slices import SearchLane, TimeSlices
from gputile.dialects.kube_objects import NodeObject, Pod
from gputile.engine.policies.workload_model import TrainingData
from gputile.kube.api import (
    AgentLease,
    Api,
    ApiRejected,
    Bookmark,
    Change,
    OutcomeUnknown,
    Snapshot,
    Undecodable,
    WatchFailed,
    WatchUpdate,
)
from gputile.ledger.events import Compared, Freed, Instruction, Reserved, Tick
from gputile.ledger.ledger import AllocationState, Ledger
from gputile.metrics_api.app import AggregatedApi, MetricsApi
from gputile.model.errors import InputError, Overcommitted
from gputile.scheduler.binding.binder import Binder
from gputile.scheduler.binding.reconciler import Reconciler
from gputile.scheduler.extender.cpu_pods import CpuPodSteering
from gputile.scheduler.extender.filter import FilterService
from gputile.scheduler.extender.server import ExtenderServer
from gputile.scheduler.leadership import Leadership, SingleReplica
from gputile.scheduler.pending.pending_pods import PendingPods
from gputile.scheduler.preemption.preemptor import Preemptor
from gputile.scheduler.quota_watcher import QuotaWatcher
from gputile.scheduler.settings import Settings
from gputile.scheduler.state.cluster_state import ClusterState
from gputile.scheduler.state.node_availability import NodeAvailability
from gputile.scheduler.state.pod_requests import PodRequests
from gputile.scheduler.state.unschedulable import UnschedulablePod
from gputile.telemetry.logs import fields
from gputile.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

T = TypeVar("T")

TICK = 0.25  # seconds
DRAIN_PERIOD = 30.0  # seconds after losing leadership, in which another replica acquires the lease
STALE = 30.0  # seconds of a broken watch after which this replica reports not ready
VOLUMES = 600.0  # seconds that a reservation is kept while kube-scheduler prepares volumes on the nominated node
NODES_PER_TICK = 50  # of the audit
MANY = 1000  # new pods in one list, after which the garbage collector's heap is frozen again
CERTIFICATES = 60.0  # seconds between two checks of the certificate files


class SchedulerApp:
    """One replica of the scheduler: its state, its loops and its servers."""

    def __init__(
        self,
        api: Api,
        settings: Settings,
        metrics: Metrics,
        leadership: Leadership | None = None,
        aggregated: AggregatedApi | None = None,
    ) -> None:
        """`aggregated`: API server calls of the metrics API; required when `metrics_api.listen` is set."""
        self.api, self.settings, self.metrics = api, settings, metrics
        self.leadership: Leadership = leadership or SingleReplica()
        self.ledger = Ledger(settings.ledger)
        self.cluster_state = ClusterState(self.ledger, settings.dialects, settings.agents)
        self._seen_at: dict[str, float] = {}  # by kind: when the API server last sent anything
        self._broken_since: dict[str, float] = {}  # by kind: since when its watch is broken
        self._list_again = asyncio.Event()
        self._stream = self._listed_stream = 0  # number of the pod watch, and of the last one that delivered a list
        self._listed = {"nodes": asyncio.Event(), "pods": asyncio.Event()}
        self._undecodable: dict[str, set[str]] = {
            "nodes": set(),
            "pods": set(),
        }  # by kind: undecodable objects of the last list
        self._reserved_at: dict[str, float] = {}  # by pod: when filter first chose its node, for volumes
        self._stopping = False
        self._led, self._drain_until = False, 0.0
        self._learning: asyncio.Task[None] | None = None
        clock, wall, leads = time.monotonic, time.time_ns, self.may_write
        self.isolation = isolation = FailureIsolation(metrics, clock)
        self._lane = lane = SearchLane()
        requests, self.availability = (
            PodRequests(self.cluster_state),
            NodeAvailability(self.cluster_state, settings.other_agents),
        )
        self.filter_service = FilterService(
            self.cluster_state, requests, self.availability, settings=settings, metrics=metrics, clock=clock
        )
        self.binder = Binder(
            api, requests, self.availability, self.cluster_state, settings, metrics, leads=leads, clock=clock, wall=wall
        )
        self.reconciler = Reconciler(
            api, self.cluster_state, settings, metrics, leads=leads, clock=clock, wall=wall, isolation=isolation
        )
        self.pending_pods = PendingPods(
            api,
            self.cluster_state,
            settings,
            metrics,
            leads=leads,
            clock=clock,
            wall=wall,
            isolation=isolation,
            lane=lane,
        )
        self.preemptor = Preemptor(
            api,
            requests,
            self.availability,
            self.cluster_state,
            settings,
            metrics,
            leads=leads,
            clock=clock,
            wall=wall,
            on_freed=self.apply,
            isolation=isolation,
            lane=lane,
        )
        self.quota_watcher = QuotaWatcher(
            api,
            self.ledger,
            settings.quota,
            metrics,
            leads=leads,
            clock=clock,
            apply=self.apply,
            isolation=isolation,
        )
        self._listed["quotas"] = self.quota_watcher.known  # no pod is placed before the quotas are known
        self.binder.on_freed = self.apply
        self.filter_service.on_unschedulable = self._on_unschedulable
        self.binder.look_up, self.binder.on_bound = self.reconciler.look_up, self.reconciler.unconfirmed_binds.add
        self.reconciler.is_busy = self.binder.is_busy
        self.steering = CpuPodSteering(self.cluster_state, settings, leads=leads, clock=clock)
        self.server = ExtenderServer(
            self.filter_service,
            self.preemptor,
            self.steering,
            self.binder,
            self.cluster_state,
            settings=settings,
            metrics=metrics,
            state=self,
            leads=leads,
            isolation=isolation,
            lane=lane,
        )
        self.metrics_api = self._metrics_api(aggregated)

    def _metrics_api(self, aggregated: AggregatedApi | None) -> MetricsApi | None:
        if not self.settings.metrics_api.listen:
            return None
        if aggregated is None:
            raise InputError("setting `metrics_api.listen`: it needs an API server in front; leave it empty here")
        return MetricsApi(
            aggregated,
            self.cluster_state,
            self.server.verb,
            settings=self.settings.metrics_api,
            body_limit=self.settings.body_limit,
            metrics=self.metrics,
            is_synced=self.is_synced,
            leads=self.may_write,
            isolation=self.isolation,
        )

    def _on_unschedulable(self, unschedulable: UnschedulablePod) -> None:
        self.pending_pods.refused(unschedulable)
        self.preemptor.refused(unschedulable)

    # ---- status -----------------------------------------------------------------------------------------------------

    def may_write(self) -> bool:
        return self.is_synced() and self.leadership.may_write()

    def is_synced(self) -> bool:
        return all(event.is_set() for event in self._listed.values())

    def why_not_ready(self) -> str:
        if self._stopping:
            return "stopping"
        missing = [kind for kind, event in self._listed.items() if not event.is_set()]
        if missing:
            return f"not synced: the list of {' and '.join(missing)} is incomplete"
        stale = [kind for kind, since in self._broken_since.items() if time.monotonic() - since > STALE]
        return f"the watch of {' and '.join(stale)} is broken" if stale else ""

    # ---- start and stop ---------------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set; then finish the binds in flight and release the lease."""
        try:
            await self.server.start()
        except InputError:
            await self.api.close()
            raise
        loops: dict[str, Callable[[], Awaitable[None]]] = {
            "watch nodes": self._watch_nodes,
            "watch pods": self._watch_pods,
            "quotas": self.quota_watcher.run,
            "tick": self._tick,
            "audit": self._audit,
            "certificates": self._renew_certificates,
            "garbage": partial(collect_periodically, asyncio.sleep),
        }
        if self.settings.agents.namespace:
            loops["watch leases"] = self._watch_leases
        tasks = [asyncio.create_task(self._keep_running(name, loop)) for name, loop in loops.items()]
        if self.metrics_api is not None:
            tasks.append(asyncio.create_task(self.metrics_api.run()))
        writing: dict[str, Callable[[], Awaitable[None]]] = {
            "grants": self.reconciler.run,
            "pending pods": self.pending_pods.run,
            "preemption": self.preemptor.run,
            "leadership": self.leadership.run,
        }
        writers = [asyncio.create_task(self._keep_running(name, loop)) for name, loop in writing.items()]
        stopped = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait([*tasks, *writers, stopped], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopped}:
                task.result()  # a loop ends only by a bug: raise it
        finally:
            await self._stop(writers, [*tasks, stopped])

    def _keep_running(self, name: str, loop: Callable[[], Awaitable[None]]) -> Coroutine[Any, Any, None]:
        return self.isolation.keep_running(name, loop, asyncio.sleep)

    async def _stop(self, writers: list[asyncio.Task[Any]], others: list[asyncio.Task[Any]]) -> None:
        """The writers first, then the lease; the watch continues until it has shown the last bind."""
        self._stopping = True
        log.info("stopping", extra=fields(reservations=self.ledger.reservations()))
        await self.server.stop()
        if self.metrics_api is not None:
            await self.metrics_api.stop()
        await self.binder.finish()
        await _cancel(writers)
        settled = await self._wait_until_settled()
        try:
            async with asyncio.timeout(3.0):
                await self.leadership.step_down(release=settled)
        except (ApiRejected, OutcomeUnknown, TimeoutError) as error:
            log.warning("the leader lease could not be released", extra=fields(why=str(error)))
        await _cancel([*others, *([self._learning] if self._learning is not None else [])])
        await self.api.close()
        log.info("stopped", extra=fields(settled=settled))

    async def _wait_until_settled(self) -> bool:
        """Whether the watch has shown every bind of ours. If not, the next leader must wait out the lease, because a
        bind may still take effect."""
        for _ in range(40):
            if not any(entry.state is AllocationState.ASSUMED for entry in self.ledger.in_flight()):
                return True
            await asyncio.sleep(0.05)
        return False

    # ---- watching the cluster ---------------------------------------------------------------------------------------

    async def _watch(
        self,
        kind: str,
        feed: Callable[[], AsyncIterator[WatchUpdate[T]]],
        listed: Callable[[tuple[T, ...]], Awaitable[None]],
        changed: Callable[[T, bool], list[Instruction]],
    ) -> None:
        undecodable: set[str] = set()  # since the last list
        async for update in feed():
            match update:
                case WatchFailed(why):
                    self._broken_since.setdefault(kind, time.monotonic())
                    self.metrics.watch_failures.labels(kind).inc()
                    log.warning("watch failed; reconnecting", extra=fields(kind=kind, why=why))
                    continue
                case Undecodable(name, why):
                    self.metrics.undecodable.inc()
                    undecodable.add(name.rpartition(" ")[2])
                    log.warning("ignoring an undecodable object", extra=fields(what=name, why=why))
                    continue
                case Snapshot(items):
                    self._undecodable[kind], undecodable = undecodable, set()
                    await listed(items)
                    self._listed[kind].set()
                    self._listed_stream = self._stream if kind == "pods" else self._listed_stream
                    log.info("listed", extra=fields(kind=kind, count=len(items)))
                    del update, items  # a list is large: free it before the next update arrives
                case Change(how, item):
                    self._handle_object(kind, item, partial(changed, item, how == "DELETED"))
                case Bookmark():
                    pass
            self._broken_since.pop(kind, None)
            self._seen_at[kind] = time.monotonic()

    def _handle_object(self, kind: str, item: object, work: Callable[[], list[Instruction]]) -> None:
        """Apply one object of the watch. If that fails, the state stays as it was. The node of a pod that was never
        counted accepts no further pod, because it is unknown which of its cards are allocated."""
        pod = item if isinstance(item, Pod) else None
        name = pod.key if pod is not None else getattr(item, "name", "")
        instructions = self.isolation.step(f"watch {kind}", name, work, pod)
        if pod is not None:
            self.cluster_state.uncounted_unless(instructions is not None, pod)
        self.apply(instructions or ())

    async def _watch_nodes(self) -> None:
        await self._watch("nodes", self.api.follow_nodes, self._nodes_listed, self._node_changed)

    async def _nodes_listed(self, nodes: tuple[NodeObject, ...]) -> None:
        slices = self._slices()
        for name in self.cluster_state.nodes_except({node.name for node in nodes}):
            self.isolation.step("watch nodes", name, partial(self._remove_node, name))
        for node in nodes:
            await slices.turn()
            self._handle_object("nodes", node, partial(self._node_changed, node, False))
        if self.metrics_api is not None:
            self.metrics_api.projection.all_changed()

    def _remove_node(self, name: str) -> None:
        self.apply(self.cluster_state.node_gone(name))

    def _node_changed(self, node: NodeObject, deleted: bool) -> list[Instruction]:
        instructions = self.cluster_state.node_changed(node, deleted=deleted)
        if self.metrics_api is not None:
            work = partial(self.metrics_api.projection.node_changed, node, deleted=deleted)
            self.isolation.step("metrics API", node.name, work)
        return instructions

    async def _pods_listed(self, pods: tuple[Pod, ...]) -> None:
        """In time slices: first the listed pods, then the deleted ones, then overlaps (see `ClusterState.pods_listed`).

        The watch waits meanwhile, so no later change is applied before the list.
        """
        first = not self._listed["pods"].is_set()
        gc.disable()  # thousands of new long-lived objects: each collection over them took 0.2 s
        try:
            moved = await self._handle_pod_list(pods)
            if first:  # a restarted scheduler learns the workload from the pods that exist
                await self._learn_from_list()
        finally:
            gc.enable()
        if first or moved > MANY:
            gc.freeze()  # later collections skip these objects
        self.preemptor.listed()
        if self.metrics_api is not None:
            self.metrics_api.projection.all_changed(is_last=True)

    async def _handle_pod_list(self, pods: tuple[Pod, ...]) -> int:
        slices, cluster_state = self._slices(), self.cluster_state
        missing = cluster_state.unlisted({pod.uid for pod in pods}, self._undecodable["pods"])
        for pod in pods:
            await slices.turn()
            self._handle_object("pods", pod, partial(cluster_state.relisted, pod))
        for uid in missing:
            await slices.turn()
            self.isolation.step("watch pods", uid, partial(self._remove_pod, uid))
        moved = cluster_state.take_changed()
        for uid in moved:
            await slices.turn()
            self.isolation.step("watch pods", uid, partial(self._compare, uid))
        return len(moved)

    def _remove_pod(self, uid: str) -> None:
        self.cluster_state.uncounted.pop(uid, None)
        self.apply(self.cluster_state.remove_unlisted(uid))

    def _compare(self, uid: str) -> None:
        self.apply(self.ledger.handle(Compared(uid)))

    def _slices(self) -> TimeSlices:
        return TimeSlices(time.monotonic, asyncio.sleep)

    def _pod_changed(self, pod: Pod, deleted: bool) -> list[Instruction]:
        instructions = self.cluster_state.pod_changed(pod, deleted=deleted)
        self.isolation.step("preemption", pod.key, partial(self.preemptor.pod_seen, pod), pod)
        if self.metrics_api is not None:
            self.isolation.step("metrics API", pod.key, partial(self.metrics_api.projection.pod_changed, pod))
        return instructions

    async def resync(self) -> None:
        """List all pods again, as a new leader must before it allocates anything.

        Restarts the watch itself, so that the list and later changes arrive in the right order.
        """
        await asyncio.gather(*(event.wait() for event in self._listed.values()))
        next_stream = self._stream + 1
        self._list_again.set()
        while self._listed_stream < next_stream:
            await asyncio.sleep(0.02)
        self.reconciler.on_elected()
        self.preemptor.on_elected()

    async def _watch_pods(self) -> None:
        """Starts after the nodes: many grants name cards by index, which needs the node's inventory."""
        await self._listed["nodes"].wait()
        while True:
            self._list_again.clear()
            self._stream += 1
            stream = asyncio.create_task(
                self._watch("pods", self.api.follow_pods, self._pods_listed, self._pod_changed)
            )
            again = asyncio.create_task(self._list_again.wait())
            try:
                await asyncio.wait([stream, again], return_when=asyncio.FIRST_COMPLETED)
                if stream.done():
                    stream.result()
            finally:
                await _cancel([stream, again])

    async def _watch_leases(self) -> None:
        """Readiness does not depend on this watch: a cluster without gputile agents has no such Leases."""
        cluster_state, last_failure = self.cluster_state, ""
        async for update in self.api.follow_leases(self.settings.agents.namespace):
            match update:
                case WatchFailed(why):
                    cluster_state.agents.watch_failed()
                    self.metrics.watch_failures.labels("leases").inc()
                    if why != last_failure:
                        last_failure = why
                        log.warning("watch of the agents' leases failed; reconnecting", extra=fields(why=why))
                    continue
                case Undecodable(name, why):
                    self.metrics.undecodable.inc()
                    log.warning("ignoring an undecodable object", extra=fields(what=name, why=why))
                    continue
                case Snapshot(leases):
                    self._leases_listed(leases)
                case Change(how, lease):
                    work = partial(self._lease_changed, lease, how)
                    self.isolation.step("watch leases", lease.name, work)
                case Bookmark():
                    cluster_state.agents.watch_alive()
            self._seen_at["leases"] = time.monotonic()

    def _leases_listed(self, leases: tuple[AgentLease, ...]) -> None:
        """All in one step; one by one if that step fails, so that one bad Lease affects only its own node."""
        nodes = self.isolation.step("watch leases", "", partial(self.cluster_state.agents.listed, leases))
        self._update_agents(nodes or [])
        for lease in leases if nodes is None else ():
            self.isolation.step("watch leases", lease.name, partial(self._lease_changed, lease, "ADDED"))

    def _lease_changed(self, lease: AgentLease, how: str) -> None:
        for node in self.cluster_state.agents.changed(lease, deleted=how == "DELETED"):
            log.info("the agent's liveness changed", extra=fields(node=node, how=how))
            self._update_agents([node])

    def apply(self, instructions: Iterable[Instruction]) -> None:
        instructions = list(instructions)
        freed = [instruction.node for instruction in instructions if isinstance(instruction, Freed)]
        if freed:
            self.pending_pods.capacity_freed()
        if freed and self.metrics_api is not None:
            self.metrics_api.projection.touched(freed)
        self.reconciler.apply(instructions)

    # ---- time -------------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            self.tick(time.monotonic())
            await asyncio.sleep(TICK)

    def tick(self, now: float) -> None:
        """Every part is isolated: a failure in one does not stop the others."""
        parts: dict[str, Callable[[], None]] = {
            "leadership": partial(self._drain_after_leadership, now),
            "volumes": partial(self._keep_reservations_for_volumes, now),
            "agents": self._check_agents,
            "ledger": partial(self._tick_ledger, now),
            "learning": self._learn,
            "forgetting": self._prune,
            "metrics": partial(self._update_metrics, now),
        }
        for name, part in parts.items():
            self.isolation.step("tick", name, part)

    def _tick_ledger(self, now: float) -> None:
        reserved = {
            entry.allocation.pod: entry.allocation.node
            for entry in self.ledger.in_flight()
            if entry.state is AllocationState.RESERVED
        }
        self.apply(self.ledger.handle(Tick(now)))
        for pod, node in reserved.items():
            if self.ledger.entry(pod) is None:
                self.availability.deprioritize(pod, node)
                self.metrics.reservations.labels("expired").inc()

    def _prune(self) -> None:
        self.availability.prune()
        self.steering.prune()
        self.reconciler.prune()
        self.isolation.prune()

    # ---- learning ---------------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Count the requests that arrived. The model is computed in a thread, because that takes a while."""
        fleet = self.ledger.fleet
        arrivals = self.cluster_state.take_arrivals() if self.is_synced() else ()  # the first list is learnt as a whole
        for request in arrivals:
            self.isolation.step("learning", "", partial(fleet.scorer.observe, request))
        fleet.scorer.refresh_prices()
        if fleet.scorer.is_due() and (self._learning is None or self._learning.done()):
            self._learning = asyncio.create_task(self._train(fleet.scorer.lesson()))

    async def _learn_from_list(self) -> None:
        """Train on all pods of the first list."""
        training_data = self.ledger.fleet.scorer.lesson_from(self.cluster_state.take_arrivals())
        await self._train(training_data)

    async def _train(self, training_data: TrainingData) -> None:
        """The thread gets values and returns a model; only the event loop touches the fleet."""
        model = await self.isolation.attempt(
            "learning", "", lambda: asyncio.to_thread(training_data.study), always=True
        )
        if model is not None:
            self.isolation.step("learning", "", partial(self.ledger.fleet.scorer.adopt, model))

    def _drain_after_leadership(self, now: float) -> None:
        """After losing leadership: open connections stay with this replica although the Service routes to another one.
        This replica may even be cut off from the API server and have only stale data. So clients are disconnected
        again and again, until the Service has a new leader to route to."""
        led, self._led = self._led, self.may_write()
        if led and not self._led:
            self._drain_until = now + DRAIN_PERIOD
            self.server.drain()
        if not self._led and now < self._drain_until and self.metrics_api is not None:
            self.metrics_api.drain()

    def _check_agents(self) -> None:
        stale = self.cluster_state.agents.check()
        for node in stale:
            log.warning("the agent's lease is stale", extra=fields(node=node))
        self._update_agents(stale)
        for uid in self.cluster_state.orphans.kept():
            self.isolation.step("deleted pods", uid, partial(self._check_deleted_pod, uid))

    def _check_deleted_pod(self, uid: str) -> None:
        self.apply(self.cluster_state.orphans.check(uid, is_disconnected=bool(self._broken_since)))

    def _update_agents(self, nodes: list[str]) -> None:
        """The liveness of these nodes' agents changed."""
        for node in nodes:
            self.isolation.step("agents", node, partial(self._update_agent, node))

    def _update_agent(self, node: str) -> None:
        self.apply(self.cluster_state.agents_changed([node]))
        if self.metrics_api is not None:
            self.metrics_api.projection.touched([node])

    def _keep_reservations_for_volumes(self, now: float) -> None:
        """kube-scheduler nominates the node while it prepares volumes there; bind comes when it is done."""
        reservations = {
            entry.allocation.pod: entry for entry in self.ledger.in_flight() if entry.state is AllocationState.RESERVED
        }
        self._reserved_at = {pod: self._reserved_at.get(pod, now) for pod in reservations}
        for pod, entry in reservations.items():
            waiting = self.cluster_state.pending.get(pod)
            nominated = waiting.pod.status.nominated_node_name if waiting and waiting.pod.status else None
            is_young = now - self._reserved_at[pod] < VOLUMES
            if (
                nominated == entry.allocation.node
                and is_young
                and entry.deadline - now < self.settings.ledger.reserve_ttl / 2
            ):
                self.apply(self.ledger.handle(Reserved(entry.allocation, now)))

    def _update_metrics(self, now: float) -> None:
        metrics = self.metrics
        states = dict.fromkeys(AllocationState, 0)
        for entry in self.ledger.in_flight():
            states[entry.state] += 1
        states[AllocationState.CONFIRMED] = len(self.ledger) - sum(states.values())
        for state, count in states.items():
            metrics.ledger_pods.labels(state).set(count)
        metrics.ledger_pods.labels("pending").set(len(self.cluster_state.pending))
        metrics.nodes.set(len(self.ledger.fleet))
        metrics.cards.set(self.ledger.fleet.card_count())
        for agent_state, count in self.cluster_state.agents.counts().items():
            metrics.agents.labels(agent_state).set(count)
        metrics.orphans.set(len(self.cluster_state.orphans))
        metrics.synced.set(int(self.is_synced()))
        metrics.leads.set(int(self.may_write()))
        for kind, at in self._seen_at.items():
            metrics.lag.labels(kind).set(now - at)

    async def _audit(self) -> None:
        """Verify continuously, a few nodes at a time, that the ledger overcommits no card."""
        while True:
            await asyncio.sleep(self.settings.audit)
            slices = TimeSlices(time.monotonic, asyncio.sleep, self._lane)
            for number, name in enumerate(self.ledger.fleet.names(), start=1):
                await slices.turn()
                self.isolation.step("audit", name, partial(self._check_node, name))
                if number % NODES_PER_TICK == 0:
                    await asyncio.sleep(TICK)

    def _check_node(self, name: str) -> None:
        try:
            if name in self.ledger.fleet:
                self.ledger.check_node(name)
        except Overcommitted as error:
            self.metrics.conflicts.inc()
            log.error("ledger inconsistent: a GPU is overcommitted", extra=fields(story=str(error)))

    async def _renew_certificates(self) -> None:
        while True:
            await asyncio.sleep(CERTIFICATES)
            try:
                self.server.renew_certificate()
            except InputError as error:  # half-written files: the old certificate stays in use
                log.warning("the certificate cannot be read; keeping the old one", extra=fields(why=str(error)))


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
