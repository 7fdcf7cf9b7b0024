"""The scheduler process: it builds all parts, runs their loops side by side, and starts and stops them in order.

The loops here are small and endless. A failure of one object is logged and the loop continues; no scheduling decision
is made in this module.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import Any

from gputile.background.failure_isolation import FailureIsolation
from gputile.background.garbage_collection import collect_periodically
from gputile.concurrency.tasks import cancel_all
from gputile.concurrency.time_slices import SearchLane, TimeSlices
from gputile.kube.api import Api, ApiRejected, OutcomeUnknown
from gputile.ledger.events import Freed, Instruction, Reserved, Tick
from gputile.ledger.ledger import AllocationState, Ledger
from gputile.metrics_api.app import AggregatedApi, MetricsApi
from gputile.model.errors import InputError, Overcommitted
from gputile.scheduler.binding.binder import Binder
from gputile.scheduler.binding.open_binds import OpenBinds
from gputile.scheduler.binding.reconciler import Reconciler
from gputile.scheduler.cluster_follower import ClusterFollower
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
from gputile.scheduler.workload_learner import WorkloadLearner
from gputile.telemetry.logs import fields
from gputile.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

TICK = 0.25  # seconds
DRAIN_PERIOD = 30.0  # seconds after losing leadership, in which another replica acquires the lease
VOLUMES = 600.0  # seconds that a reservation is kept while kube-scheduler prepares volumes on the nominated node
NODES_PER_TICK = 50  # of the audit
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
        clock, wall, leads = time.monotonic, time.time_ns, self.may_write
        # 1. What all parts share.
        self.api, self.settings, self.metrics = api, settings, metrics
        self.leadership: Leadership = leadership or SingleReplica()
        self.ledger = Ledger(settings.ledger)
        self.cluster_state = state = ClusterState(self.ledger, settings.dialects, settings.agents)
        self.isolation = isolation = FailureIsolation(metrics, clock)
        self._lane = lane = SearchLane()
        requests, binds = PodRequests(state), OpenBinds()
        self.availability = available = NodeAvailability(state, settings.other_agents)
        # 2. The work of the leader in the background.
        self.reconciler = Reconciler(
            api, state, settings, metrics, binds, leads=leads, clock=clock, wall=wall, isolation=isolation
        )
        self.pending_pods = PendingPods(
            api, state, settings, metrics, leads=leads, clock=clock, wall=wall, isolation=isolation, lane=lane
        )
        self.preemptor = Preemptor(
            api,
            requests,
            available,
            state,
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
            api, self.ledger, settings.quota, metrics, leads=leads, clock=clock, apply=self.apply, isolation=isolation
        )
        # 3. The verbs of kube-scheduler.
        self.filter_service = FilterService(
            state,
            requests,
            available,
            settings=settings,
            metrics=metrics,
            clock=clock,
            on_unschedulable=self._on_unschedulable,
        )
        self.binder = Binder(
            api,
            requests,
            available,
            state,
            settings,
            metrics,
            binds,
            on_freed=self.apply,
            leads=leads,
            clock=clock,
            wall=wall,
        )
        self.steering = CpuPodSteering(state, settings, leads=leads, clock=clock)
        self.server = ExtenderServer(
            self.filter_service,
            self.preemptor,
            self.steering,
            self.binder,
            state,
            settings=settings,
            metrics=metrics,
            state=self,
            leads=leads,
            isolation=isolation,
            lane=lane,
        )
        self.metrics_api = self._metrics_api(aggregated)
        # 4. The watches.
        self.learner = WorkloadLearner(state, isolation)
        self.follower = ClusterFollower(
            api,
            state,
            self.preemptor,
            self.learner,
            self.metrics_api.projection if self.metrics_api is not None else None,
            metrics,
            isolation,
            lease_namespace=settings.agents.namespace,
            apply=self.apply,
            clock=clock,
        )
        self._known = {  # no pod is placed before all of these are
            "nodes": self.follower.nodes.listed,
            "pods": self.follower.pods.listed,
            "quotas": self.quota_watcher.known,
        }
        self._reserved_at: dict[str, float] = {}  # by pod: when filter first chose its node, for volumes
        self._stopping = False
        self._led, self._drain_until = False, 0.0

    def _metrics_api(self, aggregated: AggregatedApi | None) -> MetricsApi | None:
        settings = self.settings.metrics_api
        if not settings.listen:
            return None
        if aggregated is None:
            raise InputError("setting `metrics_api.listen`: it needs an API server in front; leave it empty here")
        return MetricsApi(
            aggregated,
            self.cluster_state,
            self.server.verb,
            settings=settings,
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
        return all(event.is_set() for event in self._known.values())

    def why_not_ready(self) -> str:
        if self._stopping:
            return "stopping"
        missing = [kind for kind, event in self._known.items() if not event.is_set()]
        if missing:
            return f"not synced: the list of {' and '.join(missing)} is incomplete"
        stale = self.follower.stale()
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
            "watch nodes": self.follower.nodes.run,
            "watch pods": self.follower.follow_pods,
            "quotas": self.quota_watcher.run,
            "tick": self._tick,
            "audit": self._audit,
            "certificates": self._renew_certificates,
            "garbage": partial(collect_periodically, asyncio.sleep),
        }
        if self.settings.agents.namespace:
            loops["watch leases"] = self.follower.leases.run
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
        await cancel_all(writers)
        settled = await self._wait_until_settled()
        try:
            async with asyncio.timeout(3.0):
                await self.leadership.step_down(release=settled)
        except (ApiRejected, OutcomeUnknown, TimeoutError) as error:
            log.warning("the leader lease could not be released", extra=fields(why=str(error)))
        await cancel_all(others)
        await self.learner.stop()
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

    async def resync(self) -> None:
        """List all pods again, as a new leader must before it allocates anything."""
        await asyncio.gather(*(event.wait() for event in self._known.values()))
        await self.follower.pods.relist()
        self.reconciler.on_elected()
        self.preemptor.on_elected()

    def apply(self, instructions: Iterable[Instruction]) -> None:
        """Carry out the ledger's instructions."""
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
            "agents": self.follower.check_agents,
            "ledger": partial(self._tick_ledger, now),
            "learning": lambda: self.learner.learn(is_synced=self.is_synced()),
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
        self.follower.update_metrics(now)

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
