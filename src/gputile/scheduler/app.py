"""The scheduler process, put together: what runs side by side, in which order it starts and stops.

Room:  the endless loops, each one small. Whatever goes wrong in one thing is said, and the loop goes on.
Door:  `SchedulerApp.run`, until `stop` is set.
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
MAKES_WAY = 30.0  # seconds after the loss of the lead, in which another one takes over
STALE = 30.0  # seconds of a broken watch after which this replica calls itself not ready
VOLUMES = 600.0  # seconds that a pencil is kept while kube-scheduler says that it prepares volumes
NODES_PER_TICK = 50  # of the audit
MANY = 1000  # pods that a list brings and that we did not know
CERTIFICATES = 60.0  # seconds between two looks at the certificate files


class SchedulerApp:
    """One replica."""

    def __init__(
        self,
        api: Api,
        settings: Settings,
        metrics: Metrics,
        leadership: Leadership | None = None,
        aggregated: AggregatedApi | None = None,
    ) -> None:
        """`aggregated`: what serving the aggregated metrics API needs, where `metrics_api.listen` wants it served."""
        self.api, self.settings, self.metrics = api, settings, metrics
        self.leadership: Leadership = leadership or SingleReplica()
        self.ledger = Ledger(settings.ledger)
        self.cluster_state = ClusterState(self.ledger, settings.dialects, settings.agents)
        self._seen_at: dict[str, float] = {}  # by kind: when the API server last said anything
        self._trouble: dict[str, float] = {}  # by kind: since when its watch is broken
        self._list_again = asyncio.Event()
        self._stream = self._listed_stream = 0  # the number of the pods' stream, and of the last that brought a list
        self._listed = {"nodes": asyncio.Event(), "pods": asyncio.Event()}
        self._unreadable: dict[str, set[str]] = {
            "nodes": set(),
            "pods": set(),
        }  # by kind: what the last list held of them
        self._reserved_at: dict[str, float] = {}  # by pod: when filter first chose its node, for volumes
        self._stopping = False
        self._led, self._makes_way_until = False, 0.0
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
        self._listed["quotas"] = self.quota_watcher.known  # a pod must not slip in before we know whether it may
        self.binder.on_freed = self.apply
        self.filter_service.on_unschedulable = self._refused
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
            raise InputError("`metrics_api.listen` needs an API server in front; leave it empty here")
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

    def _refused(self, no: UnschedulablePod) -> None:
        self.pending_pods.refused(no)
        self.preemptor.refused(no)

    # ---- what others ask --------------------------------------------------------------------------------------------

    def may_write(self) -> bool:
        return self.is_synced() and self.leadership.may_write()

    def is_synced(self) -> bool:
        return all(event.is_set() for event in self._listed.values())

    def why_not_ready(self) -> str:
        if self._stopping:
            return "stopping"
        missing = [kind for kind, event in self._listed.items() if not event.is_set()]
        if missing:
            return f"not all {' and '.join(missing)} have been seen yet"
        stale = [kind for kind, since in self._trouble.items() if time.monotonic() - since > STALE]
        return f"the watch of {' and '.join(stale)} is broken" if stale else ""

    # ---- life -------------------------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until told to stop; then finish the binds in flight and let go of the lease."""
        try:
            await self.server.start()
        except InputError:
            await self.api.close()
            raise
        loops: dict[str, Callable[[], Awaitable[None]]] = {
            "watch nodes": self._follow_nodes,
            "watch pods": self._follow_pods,
            "quotas": self.quota_watcher.run,
            "tick": self._tick,
            "audit": self._audit,
            "certificates": self._renew_certificates,
            "garbage": partial(collect_periodically, asyncio.sleep),
        }
        if self.settings.agents.namespace:
            loops["watch leases"] = self._follow_agents
        tasks = [asyncio.create_task(self._kept_running(name, loop)) for name, loop in loops.items()]
        if self.metrics_api is not None:
            tasks.append(asyncio.create_task(self.metrics_api.run()))
        writing: dict[str, Callable[[], Awaitable[None]]] = {
            "grants": self.reconciler.run,
            "pending pods": self.pending_pods.run,
            "preemption": self.preemptor.run,
            "leadership": self.leadership.run,
        }
        writers = [asyncio.create_task(self._kept_running(name, loop)) for name, loop in writing.items()]
        waits = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait([*tasks, *writers, waits], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {waits}:
                task.result()  # a loop ends only by a bug: let it be seen
        finally:
            await self._stop(writers, [*tasks, waits])

    def _kept_running(self, name: str, loop: Callable[[], Awaitable[None]]) -> Coroutine[Any, Any, None]:
        return self.isolation.keep_running(name, loop, asyncio.sleep)

    async def _stop(self, writers: list[asyncio.Task[Any]], others: list[asyncio.Task[Any]]) -> None:
        """First those who write, then the lease; the watch goes on until the last bind has been seen."""
        self._stopping = True
        log.info("stopping", extra=fields(reservations=self.ledger.reservations()))
        await self.server.stop()
        if self.metrics_api is not None:
            await self.metrics_api.stop()
        await self.binder.finish()
        await _end(writers)
        settled = await self._settled()
        try:
            async with asyncio.timeout(3.0):
                await self.leadership.step_down(release=settled)
        except (ApiRejected, OutcomeUnknown, TimeoutError) as wrong:
            log.warning("the lease could not be given back", extra=fields(why=str(wrong)))
        await _end([*others, *([self._learning] if self._learning is not None else [])])
        await self.api.close()
        log.info("stopped", extra=fields(settled=settled))

    async def _settled(self) -> bool:
        """Whether the watch has shown every bind of ours. One that may still land must be waited out by the next."""
        for _ in range(40):
            if not any(entry.state is AllocationState.ASSUMED for entry in self.ledger.in_flight()):
                return True
            await asyncio.sleep(0.05)
        return False

    # ---- following the cluster --------------------------------------------------------------------------------------

    async def _follow(
        self,
        kind: str,
        feed: Callable[[], AsyncIterator[WatchUpdate[T]]],
        listed: Callable[[tuple[T, ...]], Awaitable[None]],
        changed: Callable[[T, bool], list[Instruction]],
    ) -> None:
        spoilt: set[str] = set()  # since the last list
        async for seen in feed():
            match seen:
                case WatchFailed(why):
                    self._trouble.setdefault(kind, time.monotonic())
                    self.metrics.troubles.labels(kind).inc()
                    log.warning("cannot follow the API server; trying again", extra=fields(kind=kind, why=why))
                    continue
                case Undecodable(what, why):
                    self.metrics.spoilt.inc()
                    spoilt.add(what.rpartition(" ")[2])
                    log.warning("an object cannot be read", extra=fields(what=what, why=why))
                    continue
                case Snapshot(items):
                    self._unreadable[kind], spoilt = spoilt, set()
                    await listed(items)
                    self._listed[kind].set()
                    self._listed_stream = self._stream if kind == "pods" else self._listed_stream
                    log.info("listed", extra=fields(kind=kind, count=len(items)))
                    del seen, items  # not to be kept until the next thing happens
                case Change(how, item):
                    self._take_in(kind, item, partial(changed, item, how == "DELETED"))
                case Bookmark():
                    pass
            self._trouble.pop(kind, None)
            self._seen_at[kind] = time.monotonic()

    def _take_in(self, kind: str, item: object, work: Callable[[], list[Instruction]]) -> None:
        """What the API server shows of one object. If that fails, it is as if it had not been shown; and the node of a
        pod of which we know nothing takes no other, for we cannot tell which of its cards are taken."""
        pod = item if isinstance(item, Pod) else None
        name = pod.key if pod is not None else getattr(item, "name", "")
        done = self.isolation.step(f"watch {kind}", name, work, pod)
        if pod is not None:
            self.cluster_state.uncounted_unless(done is not None, pod)
        self.apply(done or ())

    async def _follow_nodes(self) -> None:
        await self._follow("nodes", self.api.follow_nodes, self._nodes_listed, self._node_changed)

    async def _nodes_listed(self, nodes: tuple[NodeObject, ...]) -> None:
        slices = self._slices()
        for name in self.cluster_state.nodes_except({node.name for node in nodes}):
            self.isolation.step("watch nodes", name, partial(self._node_gone, name))
        for node in nodes:
            await slices.turn()
            self._take_in("nodes", node, partial(self._node_changed, node, False))
        if self.metrics_api is not None:
            self.metrics_api.window.all_changed()

    def _node_gone(self, name: str) -> None:
        self.apply(self.cluster_state.node_gone(name))

    def _node_changed(self, node: NodeObject, deleted: bool) -> list[Instruction]:
        done = self.cluster_state.node_changed(node, deleted=deleted)
        if self.metrics_api is not None:
            work = partial(self.metrics_api.window.node_changed, node, deleted=deleted)
            self.isolation.step("metrics API", node.name, work)
        return done

    async def _pods_listed(self, pods: tuple[Pod, ...]) -> None:
        """In slices: first what is there, then what is gone, then what overlaps (see `ClusterState.pods_listed`).

        The stream waits for us, so nothing that happened after the list is heard of before it is in.
        """
        first = not self._listed["pods"].is_set()
        gc.disable()  # thousands of objects come to stay: to look through them again and again took 0.2 s each time
        try:
            moved = await self._take_in_all(pods)
            if first:  # a restarted scheduler knows what its cluster is asked for
                await self._learn_anew()
        finally:
            gc.enable()
        if first or moved > MANY:
            gc.freeze()  # what lives from now on need not be looked at again
        self.preemptor.listed()
        if self.metrics_api is not None:
            self.metrics_api.window.all_changed(is_last=True)

    async def _take_in_all(self, pods: tuple[Pod, ...]) -> int:
        slices, cluster_state = self._slices(), self.cluster_state
        missing = cluster_state.unlisted({pod.uid for pod in pods}, self._unreadable["pods"])
        for pod in pods:
            await slices.turn()
            self._take_in("pods", pod, partial(cluster_state.relisted, pod))
        for uid in missing:
            await slices.turn()
            self.isolation.step("watch pods", uid, partial(self._let_go, uid))
        moved = cluster_state.take_changed()
        for uid in moved:
            await slices.turn()
            self.isolation.step("watch pods", uid, partial(self._compare, uid))
        return len(moved)

    def _let_go(self, uid: str) -> None:
        self.cluster_state.uncounted.pop(uid, None)
        self.apply(self.cluster_state.remove_unlisted(uid))

    def _compare(self, uid: str) -> None:
        self.apply(self.ledger.handle(Compared(uid)))

    def _slices(self) -> TimeSlices:
        return TimeSlices(time.monotonic, asyncio.sleep)

    def _pod_changed(self, pod: Pod, deleted: bool) -> list[Instruction]:
        done = self.cluster_state.pod_changed(pod, deleted=deleted)
        self.isolation.step("preemption", pod.key, partial(self.preemptor.pod_seen, pod), pod)
        if self.metrics_api is not None:
            self.isolation.step("metrics API", pod.key, partial(self.metrics_api.window.pod_changed, pod))
        return done

    async def resync(self) -> None:
        """List all pods anew: what a new leader does before it books anything.

        In the stream itself, so that the list and what is told after it come in their right order.
        """
        await asyncio.gather(*(event.wait() for event in self._listed.values()))
        wanted = self._stream + 1
        self._list_again.set()
        while self._listed_stream < wanted:
            await asyncio.sleep(0.02)
        self.reconciler.on_elected()
        self.preemptor.on_elected()

    async def _follow_pods(self) -> None:
        """What a pod holds is often told by index, and means something only when cards are known: nodes first."""
        await self._listed["nodes"].wait()
        while True:
            self._list_again.clear()
            self._stream += 1
            stream = asyncio.create_task(
                self._follow("pods", self.api.follow_pods, self._pods_listed, self._pod_changed)
            )
            again = asyncio.create_task(self._list_again.wait())
            try:
                await asyncio.wait([stream, again], return_when=asyncio.FIRST_COMPLETED)
                if stream.done():
                    stream.result()
            finally:
                await _end([stream, again])

    async def _follow_agents(self) -> None:
        """Nobody waits for this, and it makes nobody unready: a cluster without agents of ours has no such Leases."""
        cluster_state, said = self.cluster_state, ""
        async for seen in self.api.follow_leases(self.settings.agents.namespace):
            match seen:
                case WatchFailed(why):
                    cluster_state.agents.watch_failed()
                    self.metrics.troubles.labels("leases").inc()
                    if why != said:
                        said = why
                        log.warning("the agents' leases cannot be followed; trying again", extra=fields(why=why))
                    continue
                case Undecodable(what, why):
                    self.metrics.spoilt.inc()
                    log.warning("an object cannot be read", extra=fields(what=what, why=why))
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
        """All at once, or one by one where one of them makes trouble."""
        judged = self.isolation.step("watch leases", "", partial(self.cluster_state.agents.listed, leases))
        self._judge_agents(judged or [])
        for lease in leases if judged is None else ():
            self.isolation.step("watch leases", lease.name, partial(self._lease_changed, lease, "ADDED"))

    def _lease_changed(self, lease: AgentLease, how: str) -> None:
        for node in self.cluster_state.agents.changed(lease, deleted=how == "DELETED"):
            log.info("an agent came, stopped or spoke again", extra=fields(node=node, how=how))
            self._judge_agents([node])

    def apply(self, instructions: Iterable[Instruction]) -> None:
        instructions = list(instructions)
        freed = [one.node for one in instructions if isinstance(one, Freed)]
        if freed:
            self.pending_pods.room_appeared()
        if freed and self.metrics_api is not None:
            self.metrics_api.window.touched(freed)
        self.reconciler.apply(instructions)

    # ---- time -------------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            self.tick(time.monotonic())
            await asyncio.sleep(TICK)

    def tick(self, now: float) -> None:
        """Each part by itself: whatever fails in one, the others are done."""
        parts: dict[str, Callable[[], None]] = {
            "leadership": partial(self._make_way, now),
            "volumes": partial(self._keep_reservations_for_volumes, now),
            "agents": self._look_at_agents,
            "ledger": partial(self._tick_ledger, now),
            "learning": self._learn,
            "forgetting": self._prune,
            "metrics": partial(self._show, now),
        }
        for name, part in parts.items():
            self.isolation.step("tick", name, part)

    def _tick_ledger(self, now: float) -> None:
        before = {
            e.allocation.pod: e.allocation.node for e in self.ledger.in_flight() if e.state is AllocationState.RESERVED
        }
        self.apply(self.ledger.handle(Tick(now)))
        for pod, node in before.items():
            if self.ledger.entry(pod) is None:
                self.availability.deprioritize(pod, node)
                self.metrics.reservations.labels("expired").inc()

    def _prune(self) -> None:
        self.availability.prune()
        self.steering.prune()
        self.reconciler.prune()
        self.isolation.forget()

    # ---- learning ---------------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Count what arrived. What follows from it takes a while, and is worked out beside the loop."""
        fleet = self.ledger.fleet
        for asked in (
            self.cluster_state.take_arrivals() if self.is_synced() else ()
        ):  # the first list is learnt as a whole
            self.isolation.step("learning", "", partial(fleet.learn, asked))
        fleet.refresh_prices()
        if fleet.is_lesson_due() and (self._learning is None or self._learning.done()):
            self._learning = asyncio.create_task(self._study(fleet.lesson()))

    async def _learn_anew(self) -> None:
        """From all pods of the first list."""
        lesson = self.ledger.fleet.lesson_from(self.cluster_state.take_arrivals())
        await self._study(lesson)

    async def _study(self, lesson: TrainingData) -> None:
        """In a thread, which is given values and gives one back; the fleet takes that in here."""
        learnt = await self.isolation.attempt("learning", "", lambda: asyncio.to_thread(lesson.study), always=True)
        if learnt is not None:
            self.isolation.step("learning", "", partial(self.ledger.fleet.adopt, learnt))

    def _make_way(self, now: float) -> None:
        """When we lead no more: connections stay with us when the Service's choice moves on, and whoever holds one goes
        on asking us. We may even be cut off, and have nothing but old news for those who watch: they are sent away
        again and again, until the Service has somebody else to send them to."""
        led, self._led = self._led, self.may_write()
        if led and not self._led:
            self._makes_way_until = now + MAKES_WAY
            self.server.drain()
        if not self._led and now < self._makes_way_until and self.metrics_api is not None:
            self.metrics_api.drain()

    def _look_at_agents(self) -> None:
        fallen = self.cluster_state.agents.check()
        for node in fallen:
            log.warning("the agent of a node has fallen silent", extra=fields(node=node))
        self._judge_agents(fallen)
        for uid in self.cluster_state.orphans.kept():
            self.isolation.step("deleted pods", uid, partial(self._look_at_deleted, uid))

    def _look_at_deleted(self, uid: str) -> None:
        self.apply(self.cluster_state.orphans.check(uid, is_disconnected=bool(self._trouble)))

    def _judge_agents(self, nodes: list[str]) -> None:
        """They have fallen silent, spoken again, come or gone."""
        for node in nodes:
            self.isolation.step("agents", node, partial(self._judge_agent, node))

    def _judge_agent(self, node: str) -> None:
        self.apply(self.cluster_state.agents_changed([node]))
        if self.metrics_api is not None:
            self.metrics_api.window.touched([node])

    def _keep_reservations_for_volumes(self, now: float) -> None:
        """kube-scheduler nominates the node while it prepares volumes there; bind comes when it is done."""
        reservations = {e.allocation.pod: e for e in self.ledger.in_flight() if e.state is AllocationState.RESERVED}
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

    def _show(self, now: float) -> None:
        metrics = self.metrics
        states = dict.fromkeys(AllocationState, 0)
        for entry in self.ledger.in_flight():
            states[entry.state] += 1
        states[AllocationState.CONFIRMED] = len(self.ledger) - sum(states.values())
        for state, count in states.items():
            metrics.book.labels(state).set(count)
        metrics.book.labels("pending").set(len(self.cluster_state.pending))
        metrics.nodes.set(len(self.ledger.fleet))
        metrics.cards.set(self.ledger.fleet.card_count())
        for word, count in self.cluster_state.agents.counts().items():
            metrics.agents.labels(word).set(count)
        metrics.orphans.set(len(self.cluster_state.orphans))
        metrics.synced.set(int(self.is_synced()))
        metrics.leads.set(int(self.may_write()))
        for kind, at in self._seen_at.items():
            metrics.lag.labels(kind).set(now - at)

    async def _audit(self) -> None:
        """Prove all the time, a few nodes at a time, that the book adds up."""
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
        except Overcommitted as wrong:
            self.metrics.conflicts.inc()
            log.error("the book does not add up", extra=fields(story=str(wrong)))

    async def _renew_certificates(self) -> None:
        while True:
            await asyncio.sleep(CERTIFICATES)
            try:
                self.server.renew_certificate()
            except InputError as wrong:  # half-written files: the old ones still serve
                log.warning("the certificate cannot be read", extra=fields(why=str(wrong)))


async def _end(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
