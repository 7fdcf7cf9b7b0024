"""bind: place on the chosen node against the present book, assume, and write it all in one API call.

Room:  binds in flight. Several run at once, also on one node; nothing is locked: the book decides before each write.
Door:  `Binder.bind`, which returns "" or why not; `Binder.finish` before the process stops.

The Binding carries node, grant and the dialect's annotations and labels, and the pod's UID: a pod is bound if and only
if it carries its grant. A definite no forgets the assumption. An answer that got lost keeps it: the bind may have
landed, and only a look at the live pod can tell; until then the same pod is only ever offered the same cards again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from gputile.dialects import records, registry
from gputile.dialects.kube_objects import GrantContext, Pod
from gputile.engine.placement.place import Placement
from gputile.engine.search_budget import SearchBudget
from gputile.kube.api import Api, ApiRejected, Binding, OutcomeUnknown
from gputile.ledger.events import Assumed, Denied, Forgotten, Instruction
from gputile.ledger.ledger import AllocationState, LedgerEntry
from gputile.model.allocations import Allocation
from gputile.model.cards import Card
from gputile.model.grants import Grant
from gputile.model.refusals import BadRequest, about_one_node
from gputile.model.requests import PodRequest
from gputile.scheduler.extender_api import BindArgs
from gputile.scheduler.settings import Settings
from gputile.scheduler.state.allocations import SECONDS, STEPS, allocation_of, seed_of
from gputile.scheduler.state.cluster_state import ClusterState
from gputile.scheduler.state.node_availability import NodeAvailability
from gputile.scheduler.state.pod_requests import PodRequests
from gputile.telemetry.logs import fields
from gputile.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

FIRST_PAUSE = 0.05
NOT_LEADING = "this gputile replica does not lead; the Service sends the next try to the one that does"


class BindFailed(Exception):
    """Why this pod is not bound, in words for its event; `end` is how the metric counts it."""

    def __init__(self, why: str, end: str = "rejected") -> None:
        super().__init__(why)
        self.end = end


class Binder:
    """See the module's text."""

    def __init__(
        self,
        api: Api,
        requests: PodRequests,
        availability: NodeAvailability,
        cluster_state: ClusterState,
        settings: Settings,
        metrics: Metrics,
        *,
        leads: Callable[[], bool],
        clock: Callable[[], float],
        wall: Callable[[], int],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._api, self._cluster_state, self._ledger = api, cluster_state, cluster_state.ledger
        self._requests, self._availability = requests, availability
        self._settings, self._metrics = settings, metrics
        self._leads, self._clock, self._wall, self._pause = leads, clock, wall, pause
        self._open: dict[str, tuple[str, asyncio.Task[str]]] = {}  # by UID: node and the bind in flight
        self.look_up: Callable[[str], None] = lambda uid: None  # have a pod looked at, later
        self.on_bound: Callable[[str], None] = lambda uid: None  # the API server said yes
        self.on_freed: Callable[[list[Instruction]], None] = lambda done: None  # what was assumed is free again

    async def bind(self, args: BindArgs) -> str:
        """ "" when the pod is bound. A caller that goes away does not stop a bind in flight."""
        name = args.uid or args.key
        node, task = self._open.get(name, (args.node, None))
        if node != args.node:
            return f"the pod is being bound to node {node}; try again"
        if task is None:
            task = asyncio.create_task(self._answer(args))
            self._open[name] = (node, task)
            task.add_done_callback(lambda _: self._open.pop(name, None))
        return await asyncio.shield(task)

    def is_busy(self, uid: str) -> bool:
        """Whether a bind of this pod is under way."""
        return uid in self._open

    async def finish(self) -> None:
        """Wait for the binds in flight."""
        await asyncio.gather(*(task for _, task in self._open.values()), return_exceptions=True)

    async def _answer(self, args: BindArgs) -> str:
        started = self._clock()
        try:
            await self._walk(args)
        except BindFailed as no:
            self._metrics.binds.labels(no.end).inc()
            why = str(no)
            log.warning("not bound", extra=fields(pod=args.key, node=args.node, why=why, took=self._since(started)))
            return why
        self._metrics.binds.labels("bound").inc()
        return ""

    async def _walk(self, args: BindArgs) -> None:
        if not self._leads():
            raise BindFailed(NOT_LEADING)
        pod = await self._pod(args)
        if pod.node_name == args.node:
            return  # kube-scheduler repeats itself
        if pod.node_name:
            raise BindFailed(f"the pod is bound to node {pod.node_name} already")
        if pod.is_terminating or pod.is_terminal:
            raise BindFailed("the pod is being deleted, or has ended")
        started = self._clock()
        asked = self._requests.of(pod)
        if isinstance(asked, BadRequest):
            raise BindFailed(asked.message)
        if asked is None:  # no cards asked for: bind it as kube-scheduler would
            await self._write(_binding(pod, args.node), None, landed=False)
            return
        before = self._ledger.entry(pod.uid)
        allocation, grant = self._assume(pod, asked, args.node)
        written = registry.write_grant(self._award(pod, asked, grant))
        binding = _binding(pod, args.node, written.annotations, written.labels)
        self._metrics.stage("bind", "decide").observe(self._clock() - started)
        await self._write(binding, grant, landed=before is not None and before.state is AllocationState.ASSUMED)
        self._log_bound(pod, asked, allocation, started)

    async def _pod(self, args: BindArgs) -> Pod:
        """The pod as our watch knows it; a live look only if the watch does not (yet), or the UID is not given."""
        known = (self._cluster_state.pod(args.uid) or self._requests.recent(args.uid)) if args.uid else None
        if known is not None:
            return known
        try:
            live = await self._look(args.namespace, args.name)
        except (ApiRejected, OutcomeUnknown, TimeoutError) as wrong:
            raise BindFailed(f"the pod cannot be looked up: {wrong or 'no answer in time'}") from wrong
        if live is None:
            raise BindFailed(f"there is no pod {args.key}")
        if args.uid and live.uid != args.uid:
            raise BindFailed(f"pod {args.key} is another one now: its UID is {live.uid}, not {args.uid}")
        return live

    async def _look(self, namespace: str, name: str) -> Pod | None:
        async with asyncio.timeout(self._settings.bind.attempt):
            return await self._api.pod(namespace, name)

    # ---- deciding: no await between looking and booking -------------------------------------------------------------

    def _assume(self, pod: Pod, asked: PodRequest, node: str) -> tuple[Allocation, Grant]:
        entry = self._ledger.entry(pod.uid)
        if entry is not None and entry.state is not AllocationState.RESERVED:
            return self._again(entry, node)
        blocked = self._availability.blocked([node], pod.uid)
        if blocked:
            raise BindFailed(f"node {node} {about_one_node(blocked[node])}", "conflict")
        if node not in self._ledger.fleet:
            raise BindFailed(f"node {node} is unknown to gputile; it may have just gone")
        allocation = self._reserved(entry, node) or self._place(pod, asked, node)
        denied = [one for one in self._ledger.handle(Assumed(allocation, self._clock())) if isinstance(one, Denied)]
        if denied and denied[0].beyond_quota:
            raise BindFailed(denied[0].why, "conflict")
        if denied:
            raise self._lost_race(pod, node, denied[0].why)
        if entry is not None:
            self._metrics.reservations.labels("bound" if entry.allocation.node == node else "replaced").inc()
        assert allocation.grant is not None, "a placement is a grant"
        return allocation, allocation.grant

    def _reserved(self, entry: LedgerEntry | None, node: str) -> Allocation | None:
        """What filter pencilled in on this node: the book has held it since, so it is as good as a new placement."""
        if entry is None or entry.allocation.node != node or entry.allocation.grant is None:
            return None
        found = self._ledger.fleet.node(node)
        if found is None or found.fault:
            return None
        usable = {card.uuid for card in found.cards if card.healthy and not card.cordoned}
        return entry.allocation if usable.issuperset(entry.allocation.uses()) else None

    def _place(self, pod: Pod, asked: PodRequest, node: str) -> Allocation:
        with self._ledger.without_claims_of(pod.uid, pod.priority) as fleet:
            may = self._ledger.quota_usage.allowed(pod.namespace, asked)
            budget = SearchBudget(STEPS, SECONDS, self._clock)
            where = fleet.place(may, node, self._settings.policy, seed_of(pod.uid), budget)
        if not isinstance(where, Placement):
            raise self._lost_race(pod, node, f"it {about_one_node(where.code)}")
        return allocation_of(pod, asked, where.grant(pod.uid, asked.dialect))

    def _again(self, entry: LedgerEntry, node: str) -> tuple[Allocation, Grant]:
        """After a lost answer: the same cards again, whichever try lands; unless they went to another pod meanwhile."""
        allocation = entry.allocation
        if allocation.node != node:
            raise BindFailed(f"the pod is {entry.state} on node {allocation.node}")
        if allocation.grant is None or self._ledger.overcommitted(allocation.pod):
            self.look_up(allocation.pod)
            raise BindFailed("the cards of an earlier try went to another pod; what became of it is being looked up")
        return allocation, allocation.grant

    def _lost_race(self, pod: Pod, node: str, why: str) -> BindFailed:
        self._availability.deprioritize(pod.uid, node)
        return BindFailed(f"{node} does not fit any more: {why}", "conflict")

    def _award(self, pod: Pod, asked: PodRequest, grant: Grant) -> GrantContext:
        cards, settings = self._cards(grant.node), self._cluster_state.settings
        return GrantContext(grant=grant, pod=pod, asked=asked, cards=cards, at=self._wall(), settings=settings)

    # ---- writing ----------------------------------------------------------------------------------------------------

    async def _write(self, binding: Binding, grant: Grant | None, *, landed: bool) -> None:
        """Try until there is a definite answer, or no time. `landed`: an earlier try may have been written."""
        deadline, delay, why = self._clock() + self._settings.bind.timeout, FIRST_PAUSE, ""
        while (left := deadline - self._clock()) > 0:
            if not self._leads():
                why = NOT_LEADING
                break
            started = self._clock()
            try:
                await self._api.bind(binding, min(left, self._settings.bind.attempt))
                self.on_bound(binding.uid)
                return
            except ApiRejected as no:
                if no.status not in (0, 408, 429):
                    await self._refused(binding, grant, no, landed=landed)
                    return
                why, delay = str(no), max(delay, no.retry_after or 0.0)
            except OutcomeUnknown as wrong:
                landed, why = True, str(wrong)
            finally:
                self._metrics.stage("bind", "api").observe(self._clock() - started)
            await self._pause(min(delay, max(0.0, deadline - self._clock())))
            delay *= 2
        if landed:
            raise BindFailed(
                f"the API server's answer got lost ({why}); the cards are kept until it is known", "unknown"
            )
        self._forget(binding, grant)
        raise BindFailed(f"the API server did not take the bind: {why}")

    async def _refused(self, binding: Binding, grant: Grant | None, no: ApiRejected, *, landed: bool) -> None:
        """A definite no to this try. If an earlier one may have landed, or somebody bound the pod, look at it."""
        if no.status != 409 and not landed:
            self._forget(binding, grant)
            raise BindFailed(f"the API server refused the bind: {no}") from no
        try:
            live = await self._look(binding.namespace, binding.name)
        except (ApiRejected, OutcomeUnknown, TimeoutError) as wrong:
            raise BindFailed(
                f"the bind may have landed, and the pod cannot be looked up: {wrong}", "unknown"
            ) from wrong
        if live is not None and live.uid == binding.uid and live.node_name == binding.node:
            shown = records.read_grant(live, self._ledger.fleet.node(binding.node), self._cluster_state.settings)
            if grant is None or shown == grant:
                return
        is_free = live is not None and live.uid == binding.uid and not live.node_name
        if landed and is_free:  # an earlier try may still be under way
            raise BindFailed(f"the API server refused the bind: {no}; an earlier try is waited for", "unknown") from no
        if landed and (live is None or live.uid != binding.uid):
            self.on_freed(self._cluster_state.vanished(binding.uid))  # it may have landed, and its containers may run
        else:
            self._forget(binding, grant)
        raise BindFailed(f"the API server refused the bind: {no}") from no

    def _cards(self, name: str) -> tuple[Card, ...]:
        node = self._ledger.fleet.node(name)
        return node.cards if node is not None else ()

    def _forget(self, binding: Binding, grant: Grant | None) -> None:
        if grant is not None:
            self.on_freed(self._ledger.handle(Forgotten(binding.uid)))
            self._availability.deprioritize(binding.uid, binding.node)

    # ---- words ------------------------------------------------------------------------------------------------------

    def _log_bound(self, pod: Pod, asked: PodRequest, allocation: Allocation, started: float) -> None:
        cards = {uuid: f"{use.memory}MiB/{use.cores}%" for uuid, use in allocation.uses().items()}
        extra = fields(pod=pod.key, node=allocation.node, cards=cards, dialect=asked.dialect, took=self._since(started))
        log.info("bound", extra=extra)

    def _since(self, started: float) -> float:
        return round(self._clock() - started, 4)


def _binding(
    pod: Pod, node: str, annotations: dict[str, str] | None = None, labels: dict[str, str] | None = None
) -> Binding:
    return Binding(
        namespace=pod.namespace,
        name=pod.name,
        uid=pod.uid,
        node=node,
        annotations=annotations or {},
        labels=labels or {},
    )
