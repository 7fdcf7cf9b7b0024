"""The agent process, put together: what runs side by side, in which order it starts and stops.

Room:  the endless loops, each one small. Whatever goes wrong in one thing is said once, and the loop goes on: no pod,
       no node, no word of the kubelet's ends the process.
Door:  `Agent.run`, until `stop` is set, or the runtime's socket was replaced under us (`runtime.Replaced`).
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
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
from gputile.agent.plugin_manager import PluginManager, cancelled
from gputile.agent.settings import AgentSettings
from gputile.dialects.kube_objects import NodeObject, Pod
from gputile.kube.api import (
    ApiRejected,
    Bookmark,
    Change,
    KubeEvent,
    OutcomeUnknown,
    Snapshot,
    Undecodable,
    WatchFailed,
    WatchUpdate,
)
from gputile.kube.node_client import NodeClient, NodeLease
from gputile.kubelet import cri
from gputile.model.cards import Card
from gputile.nvml.driver import Driver, DriverSnapshot, NoDriver
from gputile.telemetry.agent_metrics import AgentMetrics
from gputile.telemetry.logs import fields

log = logging.getLogger(__name__)

T = TypeVar("T")

PODS = "pods"
REPORT = 1.0  # seconds between two looks at what runs, and at what stands on the node
SPOKE = 8.0  # seconds after which our word is too old for a heartbeat: see docs/decisions/0014
SWEEP = 10.0  # seconds between two rounds of cleaning and comparing
HANGS = 30.0  # seconds after which a driver that does not answer is out of use
LONGEST_BUG = 500  # characters of what somebody else's object made a loop say
XID_WAIT = 2.0  # seconds; the driver is asked again after it, so that we can stop


class Agent:
    """One node's agent."""

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
        self.slots = CdiSpecStore(Path(settings.folders.cdi))
        self._plugins = Path(settings.folders.plugins)
        self.host = HostFiles(settings.folders)
        self.shared = NodeContext(
            self.node_pods,
            self.slots,
            self.host,
            self._plugins,
            isolation=settings.isolation,
            pods_choose=settings.pods_choose_isolation,
            hold=settings.grant_timeout,
            early=not cdi.works,
        )
        self.plugin_manager = PluginManager(self._plugins, self.shared, metrics, self._say, self._is_offered)
        self._node_seen, self._looked = asyncio.Event(), asyncio.Event()
        self._orphans = OrphanContainers()
        lasts = settings.heartbeat.duration
        self.meter = UsageMeter(driver, self.node_pods, lasts=lasts, clock=time.monotonic, hami=settings.hami_metrics)
        self._running: dict[str, cri.RunningContainer] | None = None  # by container ID; None: the runtime does not say
        self._spoke_at = -SPOKE  # when the node last said all that we know
        self._deaf = ""  # why we do not hear of the node's pods
        self._news = asyncio.Event()  # there is something to say
        self._said: dict[str, str] = {}  # by subject: what was last said about it
        self._shown: tuple[tuple[Card, ...], DesiredNodeStatus] | None = None  # what everybody was last told
        self._tasks: set[asyncio.Task[Any]] = set()
        self._looking: asyncio.Task[DriverSnapshot] | None = None  # the driver was asked, and has not answered

    # ---- life -------------------------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        self.metrics.has_cdi.set(int(self.cdi.works))
        loops: list[Coroutine[Any, Any, None]] = [
            self._follow(PODS, self.client.follow_pods, self.node_pods.listed, self._pod_changed),
            self._follow("node", self.client.follow_node, self._nodes_listed, self._node_changed),
            self._look(),
            self._hear_errors(),
            self._beat(),
            self._report(),
            self._tidy(),
        ]
        if self.settings.report_use:
            self.metrics.page = self.meter.page
            loops.append(self._measure())
        self._tasks = {asyncio.create_task(loop) for loop in loops}
        waits = asyncio.create_task(stop.wait())
        self._tasks.add(waits)
        try:
            while not waits.done():
                all_tasks = self._tasks | self.plugin_manager.tasks()
                done, _ = await asyncio.wait(all_tasks, timeout=REPORT, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {waits}:
                    task.result()  # a loop ends only for `Replaced`, or by a bug of its own: let it be seen
        finally:
            await self._stop()

    async def _stop(self) -> None:
        """First tell the scheduler, so that no pod is sent to a plugin that is gone; then leave the kubelet."""
        log.info("stopping")
        await cancelled(self._tasks)  # no heartbeat after the withdrawal
        await self._withdraw()
        await cancelled(self.plugin_manager.tasks())
        self.driver.close()
        await self.client.close()

    async def _withdraw(self) -> None:
        """Twice, for the first may meet a heartbeat that was on its way."""
        why = ""
        for _ in range(2):
            try:
                async with asyncio.timeout(2.0):
                    await self.heartbeat.withdraw(time.time())
                return
            except (ApiRejected, OutcomeUnknown, TimeoutError) as wrong:
                why = str(wrong)
        log.warning("the node could not be withdrawn", extra=fields(why=why))

    def why_not_ready(self) -> str:
        if not self.node_pods.is_listed:
            return "the node's pods have not been seen yet"
        if not self._node_seen.is_set():
            return f"the node {self.settings.node} has not been seen yet"
        return "" if self._looked.is_set() else "the driver has not been asked yet"

    def _say(self, subject: str, what: str, level: int = logging.WARNING, **more: object) -> None:
        """Once, until there is something else to say."""
        if self._said.get(subject) != what:
            self._said[subject] = what
            if what:
                log.log(level, subject, extra=fields(why=what, **more))

    async def _survive(self, loop: str, turn: Awaitable[None]) -> bool:
        """One turn of a loop. What nobody thought of ends the turn and not the process: the loop goes on after its
        usual pause, and says each surprise once. Returns whether all went well."""
        try:
            await turn
        except cri.SocketReplaced:
            raise
        except Exception as bug:
            self.metrics.loop_failures.labels(loop).inc()
            said = f"{type(bug).__name__}: {bug}"[:LONGEST_BUG]
            if self._said.get(loop) != said:
                self._said[loop] = said
                log.exception("a loop of the agent failed, and goes on", extra=fields(loop=loop))
            return False
        return True

    # ---- following the cluster --------------------------------------------------------------------------------------

    async def _follow(
        self,
        kind: str,
        feed: Callable[[], AsyncIterator[WatchUpdate[T]]],
        listed: Callable[[tuple[T, ...]], Awaitable[None]],
        changed: Callable[[T, bool], Awaitable[None]],
    ) -> None:
        async def once() -> None:
            async for seen in feed():
                await self._survive(kind, self._take(kind, seen, listed, changed))

        while True:  # the feed itself goes on for ever; if it does not, it lists anew
            await self._survive(kind, once())
            await asyncio.sleep(self.settings.poll_interval)

    async def _take(
        self,
        kind: str,
        seen: WatchUpdate[T],
        listed: Callable[[tuple[T, ...]], Awaitable[None]],
        changed: Callable[[T, bool], Awaitable[None]],
    ) -> None:
        match seen:
            case WatchFailed(why):
                self._say(f"cannot follow the {kind}; trying again", why)
                self._deaf = why if kind == PODS else self._deaf
                return
            case Undecodable(what, why):
                self._say("an object cannot be read", f"{what}: {why}"[:LONGEST_BUG])
                return
            case Snapshot(items):
                await listed(items)
            case Change(how, item):
                await changed(item, how == "DELETED")
            case Bookmark():
                pass
        self._say(f"cannot follow the {kind}; trying again", "")
        self._deaf = "" if kind == PODS else self._deaf

    async def _pod_changed(self, pod: Pod, deleted: bool) -> None:
        await self.node_pods.changed(pod, deleted=deleted)

    async def _nodes_listed(self, nodes: tuple[NodeObject, ...]) -> None:
        if not nodes:
            self._say("the node is not there", f"no node is called {self.settings.node}")
        for node in nodes:
            await self._node_changed(node, False)

    async def _node_changed(self, node: NodeObject, deleted: bool) -> None:
        if deleted:
            self.reporter.gone()
            return
        before = self.reporter.cordoned()
        self.reporter.seen(node)
        if not self._node_seen.is_set():
            self._orphans.restore(self.reporter.named_before())
            wall = kubernetes_time(time.time())
            self.cards.restore(self.reporter.inventory_before(), time.monotonic(), wall)
            await self._cards_changed()
        self._node_seen.set()
        if self.reporter.cordoned() != before:
            await self._cards_changed()

    # ---- cards ------------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        while True:
            await self._survive("look", self.look())
            await asyncio.sleep(self.settings.poll_interval)

    async def look(self) -> None:
        hit: list[str] = []
        try:
            sight = await self._ask_driver()
        except NoDriver as no:
            self._say("there is no GPU to serve; looking again", str(no), logging.INFO)
            self.metrics.has_driver.set(0)
            self.cards.no_driver(str(no))
        else:
            none = "" if sight.gpus else "the driver shows no card"
            self._say("there is no GPU to serve; looking again", none, logging.INFO)
            self.metrics.has_driver.set(1)
            self.host.sight = sight
            hit = self.cards.seen(sight, time.monotonic())
        await self._cards_changed()
        self._looked.set()
        await self._tell_tenants(set(hit))

    async def _ask_driver(self) -> DriverSnapshot:
        """A driver that hangs is as good as none; it is not asked a second time before it has answered."""
        if self._looking is None:
            self._looking = asyncio.create_task(asyncio.to_thread(self.driver.look))
        done, _ = await asyncio.wait({self._looking}, timeout=HANGS)
        if not done:
            raise NoDriver(f"the driver has not answered for {HANGS:g} seconds")
        looking, self._looking = self._looking, None
        return looking.result()

    async def _hear_errors(self) -> None:
        while True:
            if not await self._survive("errors", self._hear_error()):
                await asyncio.sleep(self.settings.poll_interval)

    async def _hear_error(self) -> None:
        try:
            xid = await asyncio.to_thread(self.driver.wait, XID_WAIT)
        except NoDriver:
            await asyncio.sleep(self.settings.poll_interval)
            return
        if xid is None:
            return
        self.metrics.xids.labels(str(xid.number)).inc()
        hit = self.cards.record_xid(xid, time.monotonic())
        log.warning("the driver reports an error", extra=fields(xid=xid.number, card=xid.uuid, out_of_use=hit))
        if hit:
            await self._cards_changed()
            await self._tell_tenants(set(hit))

    async def _cards_changed(self) -> None:
        """Everybody who shows cards shows them as they are now."""
        cordoned = self.reporter.cordoned()
        now, wanted = self.cards.now(cordoned), self.cards.wanted(cordoned, self.cdi)
        if (now, wanted) == self._shown:
            return
        self._shown = now, wanted
        self.shared.cards = {card.uuid: card for card in now}
        await self.node_pods.serves(now, self.cards.since)
        await self.plugin_manager.show(self.cards.carriers())
        self.reporter.wanted = wanted
        self._news.set()

    def _is_offered(self, resource: str) -> bool:
        """Whether the node has devices of the resource, of whomever; true as long as we have not seen it."""
        return not self._node_seen.is_set() or self.reporter.offers(resource)

    async def _tell_tenants(self, uuids: set[str]) -> None:
        """Whoever is on a card that failed should hear it: moving on is theirs to decide."""
        for one in self.node_pods.all():
            hit = sorted(uuids & set(one.grant.uses())) if one.grant is not None else []
            if hit:
                faults = self.cards.faults()
                said = "; ".join(f"{uuid}: {faults.get(uuid, '')}" for uuid in hit)
                await self._note(one.pod, "GPUUnhealthy", f"a card that this pod holds is out of use: {said}")

    async def _note(self, pod: Pod, reason: str, message: str) -> None:
        try:
            await self.client.note(
                KubeEvent(namespace=pod.namespace, pod=pod.name, uid=pod.uid, reason=reason, message=message)
            )
        except (ApiRejected, OutcomeUnknown) as wrong:
            log.warning("an event could not be written", extra=fields(pod=pod.key, why=str(wrong)))

    # ---- the API server ---------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            await self._survive("heartbeat", self._beat_and_say())
            await asyncio.sleep(self.settings.heartbeat.renew)

    async def _beat_and_say(self) -> None:
        why = await self._beat_once()
        self.metrics.beats.labels("failed" if why else "renewed").inc()
        self._say("the heartbeat is missing", why)

    async def _beat_once(self) -> str:
        """It says that the node's word is fresh: what runs was compared with the pods, and is written there."""
        if time.monotonic() - self._spoke_at > SPOKE:
            return "the node has not said lately what runs on it"
        if self._deaf:
            return f"the node's pods cannot be followed: {self._deaf}"
        try:
            await self.heartbeat.beat(time.time(), self.meter.said())
        except (ApiRejected, OutcomeUnknown) as wrong:
            return str(wrong)
        return ""

    async def _report(self) -> None:
        await asyncio.gather(self._looked.wait(), self._node_seen.wait(), self.node_pods.wait_listed())
        while True:
            if not await self._survive("report", self._report_and_say()):
                await asyncio.sleep(REPORT)  # news come as fast as pods change
            await self._wait_for_news()

    async def _report_and_say(self) -> None:
        why = ""
        try:
            await self.report()
        except (ApiRejected, OutcomeUnknown, cri.RuntimeUnavailable) as wrong:
            why = str(wrong)
        self._say("the node cannot say how it is; trying again", why)

    async def _wait_for_news(self) -> None:
        """At most a second."""
        with suppress(TimeoutError):
            async with asyncio.timeout(REPORT):
                await self._news.wait()
        self._news.clear()

    async def report(self) -> None:
        """Compare what runs with the pods, and write what differs."""
        if self._running is not None or await self._asks_runtime():
            self._running = await cri.running(Path(self.settings.runtime))
            lingers = self._orphans.compare(self.node_pods.all(), {one.pod for one in self._running.values()})
        else:
            lingers = self._orphans.kept(self.node_pods.all())
        self.shared.orphans = lingers
        self.reporter.lingers(lingers)
        await self.reporter.step(time.time())
        self._spoke_at = time.monotonic()

    async def _asks_runtime(self) -> bool:
        """Whether there is a runtime's socket to ask; one that ever answered must go on answering."""
        there = await asyncio.to_thread(Path(self.settings.runtime).exists)
        told = "" if there else f"there is no {self.settings.runtime}: pods deleted by force are not noticed"
        self._say("the runtime cannot be asked what runs", told)
        return there

    # ---- cleaning and comparing -------------------------------------------------------------------------------------

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(SWEEP)
            await self._survive("tidy", self._tidy_once())

    async def _tidy_once(self) -> None:
        if self.node_pods.is_listed:
            self.tidy()

    async def _measure(self) -> None:
        """Beside the heartbeat, which must not wait for a driver; each renewal says what was last seen."""
        await self.node_pods.wait_listed()
        while True:
            await self._survive("measure", self.measure())
            await asyncio.sleep(self.settings.heartbeat.renew)

    async def measure(self) -> None:
        """Look at what containers use. Who takes more of a card than granted is told; nobody is stopped by us."""
        await self.meter.look(self.shared.cards.values(), self._running or {})
        found = self.meter.over_use()
        self.metrics.over_use.set(len(found))
        for one in self.meter.untold(found):
            await self._note(one.pod.pod, "GPUOverUse", one.sentence)

    def tidy(self) -> None:
        swept = self.slots.sweep({one.pod.uid for one in self.node_pods.all()})
        self.metrics.swept.inc(swept)
        devices = self.plugin_manager.devices()
        held, cards = self.shared.held_or_none(), self.shared.cards
        found = compare(self.node_pods.all(), held, devices, cards, has_slots=self.cdi.works)
        found.disagreements["stolen-name"] += self.plugin_manager.stolen()
        self.metrics.compared.inc()
        self.metrics.elsewhere.set(found.elsewhere)
        for kind, stories in found.disagreements.items():
            self.metrics.disagreements.labels(kind).set(len(stories))
            self._say(f"the node disagrees with its grants: {kind}", "; ".join(stories[:5]))
