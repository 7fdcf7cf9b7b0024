"""The agent process: its loops, and the order in which they start and stop.

Each loop is endless and small. An error in one object is logged once and the loop continues; no pod, node or answer of
the kubelet ends the process. Only `cri.SocketReplaced` does, because the kubelet must restart the container then.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from gputile.agent.card_plugin import NodeContext
from gputile.agent.cards import CardInventory
from gputile.agent.cdi_specs import CdiSpecStore
from gputile.agent.consistency import compare
from gputile.agent.host_files import HostFiles
from gputile.agent.metering import UsageMeter
from gputile.agent.node_pods import NodePods
from gputile.agent.node_reporter import DesiredNodeStatus, NodeReporter, kubernetes_time
from gputile.agent.orphaned_pods import OrphanContainers
from gputile.agent.plugin_manager import PluginManager
from gputile.agent.settings import AgentSettings
from gputile.concurrency.tasks import cancel_all
from gputile.dialects.kube_objects import NodeObject, Pod
from gputile.kube.api import ApiRejected, KubeEvent, OutcomeUnknown
from gputile.kube.informer import Feed, Informer, OnChange, OnList
from gputile.kube.node_client import NodeClient, NodeLease
from gputile.kubelet import cri
from gputile.model.cards import Card
from gputile.nvml.driver import Driver, DriverSnapshot, NoDriver
from gputile.telemetry.agent_metrics import AgentMetrics
from gputile.telemetry.logs import fields

log = logging.getLogger(__name__)

T = TypeVar("T")

REPORT_INTERVAL = 1.0  # seconds between two comparisons of running containers and pods, and of the node and its status
REPORT_MAX_AGE = 8.0  # seconds after which a report is too old for a heartbeat: see docs/decisions/0014
CLEANUP_INTERVAL = 10.0  # seconds between two cleanups and consistency checks
DRIVER_TIMEOUT = 30.0  # seconds after which a driver that does not answer counts as gone
LONGEST_ERROR = 500  # characters of an error in the log; parts of it may come from objects that others write
XID_WAIT = 2.0  # seconds of one wait for XID errors; short, so that the agent can stop


class Agent:
    """The agent of one node, with all its parts and loops."""

    def __init__(
        self,
        client: NodeClient,
        heartbeat: NodeLease,
        driver: Driver,
        settings: AgentSettings,
        metrics: AgentMetrics,
        *,
        cdi: cri.CdiSupport,
    ) -> None:
        self.client, self.heartbeat, self.driver = client, heartbeat, driver
        self.settings, self.metrics, self.cdi = settings, metrics, cdi
        self.node_pods = NodePods(settings.dialects)
        self.reporter = NodeReporter(client, metrics)
        self.cards = CardInventory(settings, metrics)
        self.cdi_specs = CdiSpecStore(Path(settings.folders.cdi))
        self._plugins = Path(settings.folders.plugins)
        self.host_files = HostFiles(settings.folders)
        self.context = NodeContext(
            self.node_pods,
            self.cdi_specs,
            self.host_files,
            self._plugins,
            isolation=settings.isolation,
            pods_choose=settings.pods_choose_isolation,
            grant_timeout=settings.grant_timeout,
            has_cdi=cdi.works,
        )
        self.plugin_manager = PluginManager(
            self._plugins, self.context, metrics, self._report_problem, self._is_allocatable
        )
        self._node_seen, self._driver_polled = asyncio.Event(), asyncio.Event()
        self._orphans = OrphanContainers()
        max_age = settings.heartbeat.duration
        self.meter = UsageMeter(
            driver, self.node_pods, max_age=max_age, clock=time.monotonic, hami=settings.hami_metrics
        )
        self._running: dict[str, cri.RunningContainer] | None = None  # by container ID; None: unknown
        self._reported_at = -REPORT_MAX_AGE  # when the node's annotations and status last matched what we know
        self._pods = self._informer("pods", lambda: self.client.follow_pods(), self._pods_listed, self._pod_changed)
        self._node = self._informer("node", lambda: self.client.follow_node(), self._nodes_listed, self._node_changed)
        self._report_needed = asyncio.Event()
        self._problems: dict[str, str] = {}  # by subject: the message that was last logged
        self._published: tuple[tuple[Card, ...], DesiredNodeStatus] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._driver_query: asyncio.Task[DriverSnapshot] | None = None  # a snapshot that is still under way

    # ---- life -------------------------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        self.metrics.has_cdi.set(int(self.cdi.works))
        loops: list[Coroutine[Any, Any, None]] = [
            self._watch_forever("pods", self._pods),
            self._watch_forever("node", self._node),
            self._poll_driver_forever(),
            self._handle_xids_forever(),
            self._renew_heartbeat_forever(),
            self._report_forever(),
            self._clean_up_forever(),
        ]
        if self.settings.report_use:
            loops.append(self._measure_usage_forever())
        self._tasks = {asyncio.create_task(loop) for loop in loops}
        stopping = asyncio.create_task(stop.wait())
        self._tasks.add(stopping)
        try:
            while not stopping.done():
                all_tasks = self._tasks | self.plugin_manager.tasks()
                done, _ = await asyncio.wait(all_tasks, timeout=REPORT_INTERVAL, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {stopping}:
                    task.result()  # a loop ends only by `SocketReplaced` or by a bug of its own: raise it
        finally:
            await self._stop()

    async def _stop(self) -> None:
        """First withdraw the Lease, so that no pod is bound to a node without a plugin; then leave the kubelet."""
        log.info("stopping")
        await cancel_all(self._tasks)  # no heartbeat after the withdrawal
        await self._withdraw()
        await cancel_all(self.plugin_manager.tasks())
        self.driver.close()
        await self.client.close()

    async def _withdraw(self) -> None:
        """Twice, because a heartbeat that is still under way may conflict with the first try."""
        why = ""
        for _ in range(2):
            try:
                async with asyncio.timeout(2.0):
                    await self.heartbeat.withdraw(time.time())
                return
            except (ApiRejected, OutcomeUnknown, TimeoutError) as error:
                why = str(error)
        log.warning("cannot withdraw the Lease of this node", extra=fields(why=why))

    def why_not_ready(self) -> str:
        """The reason for /readyz, "" when the agent is ready."""
        if not self._pods.listed.is_set():
            return "the pods of this node are not listed yet"
        if not self._node_seen.is_set():
            return f"the node {self.settings.node} is not listed yet"
        return "" if self._driver_polled.is_set() else "the GPU driver is not queried yet"

    def metrics_page(self) -> bytes:
        """For /metrics: the counters, and the usage computed at the scrape."""
        return self.metrics.text() + (self.meter.page() if self.settings.report_use else b"")

    def _report_problem(self, subject: str, message: str, level: int = logging.WARNING, **more: object) -> None:
        """Log the message, unless it is the last one about this subject; "" ends the problem."""
        if self._problems.get(subject) != message:
            self._problems[subject] = message
            if message:
                log.log(level, subject, extra=fields(why=message, **more))

    async def _isolate(self, loop: str, turn: Awaitable[None]) -> bool:
        """One turn of a loop; returns whether it succeeded. An unexpected error ends the turn and not the process: it
        is logged once, and the loop continues after its usual pause."""
        try:
            await turn
        except cri.SocketReplaced:
            raise
        except Exception as error:
            self.metrics.loop_failures.labels(loop).inc()
            message = f"{type(error).__name__}: {error}"[:LONGEST_ERROR]
            if self._problems.get(loop) != message:
                self._problems[loop] = message
                log.exception("unexpected error in a loop of the agent; the loop continues", extra=fields(loop=loop))
            return False
        return True

    # ---- watches ----------------------------------------------------------------------------------------------------

    def _informer(self, kind: str, feed: Feed[T], on_list: OnList[T], on_change: OnChange[T]) -> Informer[T]:
        return Informer(
            feed,
            on_list,
            on_change,
            isolate=lambda work: self._isolate(kind, work()),
            message=f"cannot watch the {kind}; reconnecting",
        )

    async def _watch_forever(self, kind: str, informer: Informer[Any]) -> None:
        while True:  # the feed is endless; should it end, the next one lists anew
            await self._isolate(kind, informer.run())
            await asyncio.sleep(self.settings.poll_interval)

    async def _pods_listed(self, pods: tuple[Pod, ...]) -> None:
        await self.node_pods.listed(pods)

    async def _pod_changed(self, pod: Pod, deleted: bool) -> None:
        await self.node_pods.changed(pod, deleted=deleted)

    async def _nodes_listed(self, nodes: tuple[NodeObject, ...]) -> None:
        if not nodes:
            self._report_problem("node not found", f"there is no node {self.settings.node}; set `node` to its name")
        for node in nodes:
            await self._node_changed(node, False)

    async def _node_changed(self, node: NodeObject, deleted: bool) -> None:
        if deleted:
            self.reporter.gone()
            return
        before = self.reporter.cordoned()
        self.reporter.seen(node)
        if not self._node_seen.is_set():
            self._orphans.restore(self.reporter.previous_orphans())
            wall = kubernetes_time(time.time())
            self.cards.restore(self.reporter.previous_inventory(), time.monotonic(), wall)
            await self._publish_cards()
        self._node_seen.set()
        if self.reporter.cordoned() != before:
            await self._publish_cards()

    # ---- cards ------------------------------------------------------------------------------------------------------

    async def _poll_driver_forever(self) -> None:
        while True:
            await self._isolate("driver", self.poll_driver())
            await asyncio.sleep(self.settings.poll_interval)

    async def poll_driver(self) -> None:
        """Take a snapshot of the driver, and publish what changed."""
        failed: list[str] = []
        try:
            snapshot = await self._query_driver()
        except NoDriver as error:
            self._report_problem("no GPU to serve; polling the driver", str(error), logging.INFO)
            self.metrics.has_driver.set(0)
            self.cards.no_driver(str(error))
        else:
            no_gpu = "" if snapshot.gpus else "the driver reports no GPU"
            self._report_problem("no GPU to serve; polling the driver", no_gpu, logging.INFO)
            self.metrics.has_driver.set(1)
            self.host_files.snapshot = snapshot
            failed = self.cards.seen(snapshot, time.monotonic())
        await self._publish_cards()
        self._driver_polled.set()
        await self._notify_pods(set(failed))

    async def _query_driver(self) -> DriverSnapshot:
        """A driver that hangs counts as gone; there is no second query before it has answered the first."""
        if self._driver_query is None:
            self._driver_query = asyncio.create_task(asyncio.to_thread(self.driver.snapshot))
        done, _ = await asyncio.wait({self._driver_query}, timeout=DRIVER_TIMEOUT)
        if not done:
            raise NoDriver(f"the driver has not answered for {DRIVER_TIMEOUT:g} seconds")
        query, self._driver_query = self._driver_query, None
        return query.result()

    async def _handle_xids_forever(self) -> None:
        while True:
            if not await self._isolate("xid", self._handle_xid()):
                await asyncio.sleep(self.settings.poll_interval)

    async def _handle_xid(self) -> None:
        try:
            xid = await asyncio.to_thread(self.driver.wait, XID_WAIT)
        except NoDriver:
            await asyncio.sleep(self.settings.poll_interval)
            return
        if xid is None:
            return
        self.metrics.xids.labels(str(xid.number)).inc()
        failed = self.cards.record_xid(xid, time.monotonic())
        log.warning("XID error reported by the driver", extra=fields(xid=xid.number, gpu=xid.uuid, out_of_use=failed))
        if failed:
            await self._publish_cards()
            await self._notify_pods(set(failed))

    async def _publish_cards(self) -> None:
        """Pass the cards on to the plugins, the pods of this node and the node's status, if they changed."""
        cordoned = self.reporter.cordoned()
        cards, status = self.cards.current(cordoned), self.cards.desired_status(cordoned, self.cdi)
        if (cards, status) == self._published:
            return
        self._published = cards, status
        self.context.cards = {card.uuid: card for card in cards}
        await self.node_pods.set_cards(cards, self.cards.since)
        await self.plugin_manager.update(self.cards.device_resources())
        self.reporter.desired = status
        self._report_needed.set()

    def _is_allocatable(self, resource: str) -> bool:
        """Whether the node has devices of the resource, from any plugin; true as long as the node is not listed."""
        return not self._node_seen.is_set() or self.reporter.offers(resource)

    async def _notify_pods(self, uuids: set[str]) -> None:
        """Write an Event on the pods that hold a failed card; the agent stops no pod itself."""
        for node_pod in self.node_pods.all():
            failed = sorted(uuids & set(node_pod.grant.uses())) if node_pod.grant is not None else []
            if failed:
                faults = self.cards.faults()
                reasons = "; ".join(f"{uuid}: {faults.get(uuid, '')}" for uuid in failed)
                await self._write_event(node_pod.pod, "GPUUnhealthy", f"a GPU of this pod is unhealthy: {reasons}")

    async def _write_event(self, pod: Pod, reason: str, message: str) -> None:
        try:
            await self.client.note(
                KubeEvent(namespace=pod.namespace, pod=pod.name, uid=pod.uid, reason=reason, message=message)
            )
        except (ApiRejected, OutcomeUnknown) as error:
            log.warning("cannot write an Event", extra=fields(pod=pod.key, why=str(error)))

    # ---- the API server ---------------------------------------------------------------------------------------------

    async def _renew_heartbeat_forever(self) -> None:
        while True:
            await self._isolate("heartbeat", self._renew_heartbeat())
            await asyncio.sleep(self.settings.heartbeat.renew)

    async def _renew_heartbeat(self) -> None:
        why = await self._try_heartbeat()
        self.metrics.beats.labels("failed" if why else "renewed").inc()
        self._report_problem("heartbeat not renewed", why)

    async def _try_heartbeat(self) -> str:
        """Renew the Lease; returns why not, or "". A heartbeat asserts that the node's annotations are up to date: the
        running containers were compared with the pods, and the result is written."""
        if time.monotonic() - self._reported_at > REPORT_MAX_AGE:
            return f"the node's status was not updated in the last {REPORT_MAX_AGE:g} seconds"
        if self._pods.failure:
            return f"the watch on the node's pods is disconnected: {self._pods.failure}"
        try:
            await self.heartbeat.beat(time.time(), self.meter.usage_annotation())
        except (ApiRejected, OutcomeUnknown) as error:
            return str(error)
        return ""

    async def _report_forever(self) -> None:
        await asyncio.gather(self._driver_polled.wait(), self._node_seen.wait(), self._pods.listed.wait())
        while True:
            if not await self._isolate("report", self._try_report()):
                await asyncio.sleep(REPORT_INTERVAL)  # reports may be needed as often as pods change
            await self._wait_until_report_needed()

    async def _try_report(self) -> None:
        why = ""
        try:
            await self.report()
        except (ApiRejected, OutcomeUnknown, cri.RuntimeUnavailable) as error:
            why = str(error)
        self._report_problem("cannot update the node; retrying", why)

    async def _wait_until_report_needed(self) -> None:
        """At most `REPORT_INTERVAL`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(REPORT_INTERVAL):
                await self._report_needed.wait()
        self._report_needed.clear()

    async def report(self) -> None:
        """Compare the running containers with the pods, and write to the node what differs."""
        if self._running is not None or await self._has_runtime():
            self._running = await cri.running(Path(self.settings.runtime))
            running = {container.pod for container in self._running.values()}
            orphans = self._orphans.update(self.node_pods.all(), running)
        else:
            orphans = self._orphans.unlisted(self.node_pods.all())
        self.context.orphans = orphans
        self.reporter.set_orphans(orphans)
        await self.reporter.step(time.time())
        self._reported_at = time.monotonic()

    async def _has_runtime(self) -> bool:
        """Whether the runtime's socket exists. Once it has answered, the runtime must go on answering."""
        exists = await asyncio.to_thread(Path(self.settings.runtime).exists)
        why = (
            ""
            if exists
            else f"{self.settings.runtime}: no such socket, so containers of force-deleted pods go unnoticed; "
            "mount the socket, or set `runtime`"
        )
        self._report_problem("cannot list running containers", why)
        return exists

    # ---- cleanup and consistency ------------------------------------------------------------------------------------

    async def _clean_up_forever(self) -> None:
        while True:
            await asyncio.sleep(CLEANUP_INTERVAL)
            await self._isolate("cleanup", self._clean_up_if_listed())

    async def _clean_up_if_listed(self) -> None:
        if self._pods.listed.is_set():
            self.clean_up()

    async def _measure_usage_forever(self) -> None:
        """Beside the heartbeat, which must not wait for a driver; each renewal has the last sample."""
        await self._pods.listed.wait()
        while True:
            await self._isolate("usage", self.measure_usage())
            await asyncio.sleep(self.settings.heartbeat.renew)

    async def measure_usage(self) -> None:
        """Sample what containers use, and write an Event on pods that use more of a card than granted; the agent stops
        no pod."""
        await self.meter.sample(self.context.cards.values(), self._running or {})
        overuses = self.meter.over_use()
        self.metrics.over_use.set(len(overuses))
        for overuse in self.meter.unreported(overuses):
            await self._write_event(overuse.pod.pod, "GPUOverUse", overuse.message)

    def clean_up(self) -> None:
        """Remove the CDI specs of pods that are gone, and compare checkpoint, specs and grants."""
        removed = self.cdi_specs.remove_stale({node_pod.pod.uid for node_pod in self.node_pods.all()})
        self.metrics.swept.inc(removed)
        devices = self.plugin_manager.devices()
        entries, cards = self.context.checkpoint_or_none(), self.context.cards
        result = compare(self.node_pods.all(), entries, devices, cards, has_cdi=self.cdi.works)
        result.by_kind["stolen-name"] += self.plugin_manager.stolen()
        self.metrics.compared.inc()
        self.metrics.elsewhere.set(result.elsewhere)
        for kind, messages in result.by_kind.items():
            self.metrics.disagreements.labels(kind).set(len(messages))
            self._report_problem(f"inconsistency between the node and its grants: {kind}", "; ".join(messages[:5]))
