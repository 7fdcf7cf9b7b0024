"""The bind verb: places the pod on the chosen node, assumes it in the ledger, and writes everything in one API call.

Several binds run at once, also on one node. Nothing is locked: the ledger decides before each write. `Binder.bind`
returns "" or the reason of the failure; `Binder.finish` waits for the binds in flight before the process stops.

The Binding carries node, grant, the annotations and labels of the dialect, and the pod's UID: a pod is bound if and
only if it carries its grant. A definite rejection by the API server forgets the assumption. A lost answer keeps it:
the bind may have been written, and only a live lookup of the pod can decide. Until then, a retry for this pod offers
the same cards again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from gputile.dialects import records, registry
from gputile.dialects.allocations import allocation_of
from gputile.dialects.kube_objects import GrantContext, Pod
from gputile.engine.placement.place import Placement
from gputile.kube.api import Api, ApiRejected, Binding, OutcomeUnknown
from gputile.ledger.events import Assumed, Denied, Forgotten, Instruction
from gputile.ledger.ledger import AllocationState, LedgerEntry
from gputile.model.allocations import Allocation
from gputile.model.cards import Card
from gputile.model.grants import Grant
from gputile.model.refusals import BadRequest, about_one_node
from gputile.model.requests import PodRequest
from gputile.scheduler.binding.open_binds import OpenBinds
from gputile.scheduler.extender_api import BindArgs
from gputile.scheduler.settings import Settings
from gputile.scheduler.state.cluster_state import ClusterState
from gputile.scheduler.state.node_availability import NodeAvailability
from gputile.scheduler.state.pod_requests import PodRequests, call_budget, seed_of
from gputile.telemetry.logs import fields
from gputile.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

FIRST_PAUSE = 0.05
NOT_LEADER = "this replica is not the leader; retry, the Service routes to the leader"


class BindFailed(Exception):
    """Why the pod is not bound, as the text of its Event; `outcome` is the label of the metric."""

    def __init__(self, reason: str, outcome: str = "rejected") -> None:
        super().__init__(reason)
        self.outcome = outcome


class Binder:
    """Binds pods with their grants; several binds run at once."""

    def __init__(
        self,
        api: Api,
        requests: PodRequests,
        availability: NodeAvailability,
        cluster_state: ClusterState,
        settings: Settings,
        metrics: Metrics,
        binds: OpenBinds,
        *,
        on_freed: Callable[[list[Instruction]], None],
        leads: Callable[[], bool],
        clock: Callable[[], float],
        wall: Callable[[], int],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`on_freed`: an assumed allocation is free again."""
        self._api, self._cluster_state, self._ledger = api, cluster_state, cluster_state.ledger
        self._requests, self._availability = requests, availability
        self._settings, self._metrics = settings, metrics
        self._leads, self._clock, self._wall, self._pause = leads, clock, wall, pause
        self._binds, self._on_freed = binds, on_freed

    async def bind(self, args: BindArgs) -> str:
        """ "" when the pod is bound. A bind in flight continues if its caller disconnects."""
        name = args.uid or args.key
        node, task = self._binds.in_flight.get(name, (args.node, None))
        if node != args.node:
            return f"the pod is being bound to node {node}; try again"
        if task is None:
            task = asyncio.create_task(self._bind_and_count(args))
            self._binds.in_flight[name] = (node, task)
            task.add_done_callback(lambda _: self._binds.in_flight.pop(name, None))
        return await asyncio.shield(task)

    async def finish(self) -> None:
        """Wait for the binds in flight."""
        await asyncio.gather(*(task for _, task in self._binds.in_flight.values()), return_exceptions=True)

    async def _bind_and_count(self, args: BindArgs) -> str:
        started = self._clock()
        try:
            await self._bind(args)
        except BindFailed as error:
            self._metrics.binds.labels(error.outcome).inc()
            reason = str(error)
            took = self._since(started)
            log.warning("bind failed", extra=fields(pod=args.key, node=args.node, why=reason, took=took))
            return reason
        self._metrics.binds.labels("bound").inc()
        return ""

    async def _bind(self, args: BindArgs) -> None:
        if not self._leads():
            raise BindFailed(NOT_LEADER)
        pod = await self._pod(args)
        if pod.node_name == args.node:
            return  # kube-scheduler repeated the call
        if pod.node_name:
            raise BindFailed(f"the pod is already bound to node {pod.node_name}")
        if pod.is_terminating or pod.is_terminal:
            raise BindFailed("the pod is terminating, or has ended")
        started = self._clock()
        request = self._requests.of(pod)
        if isinstance(request, BadRequest):
            raise BindFailed(request.message)
        if request is None:  # a pod without GPUs: bind it as kube-scheduler would
            await self._write(_binding(pod, args.node), None, may_be_written=False)
            return
        before = self._ledger.entry(pod.uid)
        allocation, grant = self._assume(pod, request, args.node)
        record = registry.write_grant(self._grant_context(pod, request, grant))
        binding = _binding(pod, args.node, record.annotations, record.labels)
        self._metrics.stage("bind", "decide").observe(self._clock() - started)
        was_assumed = before is not None and before.state is AllocationState.ASSUMED
        await self._write(binding, grant, may_be_written=was_assumed)
        self._log_bound(pod, request, allocation, started)

    async def _pod(self, args: BindArgs) -> Pod:
        """The pod as our watch shows it; a live lookup only if the watch does not (yet), or if the UID is not given."""
        known = (self._cluster_state.pod(args.uid) or self._requests.recent(args.uid)) if args.uid else None
        if known is not None:
            return known
        try:
            live = await self._live_pod(args.namespace, args.name)
        except (ApiRejected, OutcomeUnknown, TimeoutError) as error:
            raise BindFailed(f"lookup of the pod failed: {error or 'timed out'}") from error
        if live is None:
            raise BindFailed(f"pod {args.key} not found")
        if args.uid and live.uid != args.uid:
            raise BindFailed(f"pod {args.key} was recreated: its UID is {live.uid}, not {args.uid}")
        return live

    async def _live_pod(self, namespace: str, name: str) -> Pod | None:
        async with asyncio.timeout(self._settings.bind.attempt):
            return await self._api.pod(namespace, name)

    # ---- deciding: no await between reading the ledger and assuming -------------------------------------------------

    def _assume(self, pod: Pod, request: PodRequest, node: str) -> tuple[Allocation, Grant]:
        entry = self._ledger.entry(pod.uid)
        if entry is not None and entry.state is not AllocationState.RESERVED:
            return self._retry(entry, node)
        blocked = self._availability.blocked([node], pod.uid)
        if blocked:
            raise BindFailed(f"node {node} {about_one_node(blocked[node])}", "conflict")
        if node not in self._ledger.fleet:
            raise BindFailed(f"node {node} is unknown to gputile; it may have just been deleted")
        allocation = self._reserved(entry, node) or self._place(pod, request, node)
        instructions = self._ledger.handle(Assumed(allocation, self._clock()))
        denied = next((instruction for instruction in instructions if isinstance(instruction, Denied)), None)
        if denied is not None and denied.beyond_quota:
            raise BindFailed(denied.why, "conflict")
        if denied is not None:
            raise self._lost_race(pod, node, denied.why)
        if entry is not None:
            self._metrics.reservations.labels("bound" if entry.allocation.node == node else "replaced").inc()
        assert allocation.grant is not None, "a placement is a grant"
        return allocation, allocation.grant

    def _reserved(self, entry: LedgerEntry | None, node: str) -> Allocation | None:
        """The reservation of filter on this node: the ledger has kept it, so it is as good as a new placement."""
        if entry is None or entry.allocation.node != node or entry.allocation.grant is None:
            return None
        view = self._ledger.fleet.node(node)
        if view is None or view.fault:
            return None
        usable = {card.uuid for card in view.cards if card.healthy and not card.cordoned}
        return entry.allocation if usable.issuperset(entry.allocation.uses()) else None

    def _place(self, pod: Pod, request: PodRequest, node: str) -> Allocation:
        fleet, ignored = self._ledger.fleet_for(pod.uid, pod.priority), self._ledger.ignored_by(pod.uid, pod.priority)
        allowed = self._ledger.quota_usage.allowed(pod.namespace, request, ignored)
        answer = fleet.place(allowed, node, self._settings.policy, seed_of(pod.uid), call_budget(self._clock))
        if not isinstance(answer, Placement):
            raise self._lost_race(pod, node, f"it {about_one_node(answer.code)}")
        return allocation_of(pod, request, answer.grant(pod.uid, request))

    def _retry(self, entry: LedgerEntry, node: str) -> tuple[Allocation, Grant]:
        """After a lost answer: the same cards again, whichever attempt is written; unless another pod has them now."""
        allocation = entry.allocation
        if allocation.node != node:
            raise BindFailed(f"the pod is already {entry.state} on node {allocation.node}")
        if allocation.grant is None or self._ledger.overcommitted(allocation.pod):
            self._binds.unknown.add(allocation.pod)
            raise BindFailed("the GPUs of an earlier attempt went to another pod; gputile is looking up its outcome")
        return allocation, allocation.grant

    def _lost_race(self, pod: Pod, node: str, reason: str) -> BindFailed:
        self._availability.deprioritize(pod.uid, node)
        return BindFailed(f"the pod no longer fits on node {node}: {reason}", "conflict")

    def _grant_context(self, pod: Pod, request: PodRequest, grant: Grant) -> GrantContext:
        cards, settings = self._cards(grant.node), self._cluster_state.settings
        return GrantContext(grant=grant, pod=pod, asked=request, cards=cards, at=self._wall(), settings=settings)

    # ---- writing ----------------------------------------------------------------------------------------------------

    async def _write(self, binding: Binding, grant: Grant | None, *, may_be_written: bool) -> None:
        """Retry until there is a definite answer, or no time. `may_be_written`: an earlier attempt may have worked."""
        deadline, delay, reason = self._clock() + self._settings.bind.timeout, FIRST_PAUSE, ""
        while (left := deadline - self._clock()) > 0:
            if not self._leads():
                reason = NOT_LEADER
                break
            started = self._clock()
            try:
                await self._api.bind(binding, min(left, self._settings.bind.attempt))
                self._binds.unconfirmed.add(binding.uid)
                return
            except ApiRejected as error:
                if error.status not in (0, 408, 429):
                    await self._rejected(binding, grant, error, may_be_written=may_be_written)
                    return
                reason, delay = str(error), max(delay, error.retry_after or 0.0)
            except OutcomeUnknown as error:
                may_be_written, reason = True, str(error)
            finally:
                self._metrics.stage("bind", "api").observe(self._clock() - started)
            await self._pause(min(delay, max(0.0, deadline - self._clock())))
            delay *= 2
        if may_be_written:
            raise BindFailed(
                f"no answer from the API server ({reason}); the GPUs stay assumed until the outcome is known", "unknown"
            )
        self._forget(binding, grant)
        raise BindFailed(f"the API server did not accept the bind: {reason}")

    async def _rejected(
        self, binding: Binding, grant: Grant | None, rejection: ApiRejected, *, may_be_written: bool
    ) -> None:
        """The API server rejected this attempt. If an earlier one may be written, or another client bound the pod, look
        the pod up."""
        if rejection.status != 409 and not may_be_written:
            self._forget(binding, grant)
            raise BindFailed(f"the API server rejected the bind: {rejection}") from rejection
        try:
            live = await self._live_pod(binding.namespace, binding.name)
        except (ApiRejected, OutcomeUnknown, TimeoutError) as error:
            raise BindFailed(
                f"the bind may have been written, and the lookup of the pod failed: {error}", "unknown"
            ) from error
        if live is not None and live.uid == binding.uid and live.node_name == binding.node:
            carried = records.read_grant(live, self._ledger.fleet.node(binding.node), self._cluster_state.settings)
            if grant is None or carried == grant:
                return
        is_unbound = live is not None and live.uid == binding.uid and not live.node_name
        if may_be_written and is_unbound:  # an earlier attempt may still be in flight
            raise BindFailed(
                f"the API server rejected the bind: {rejection}; an earlier attempt may still succeed", "unknown"
            ) from rejection
        if may_be_written and (live is None or live.uid != binding.uid):
            self._on_freed(self._cluster_state.vanished(binding.uid))  # its containers may run
        else:
            self._forget(binding, grant)
        raise BindFailed(f"the API server rejected the bind: {rejection}") from rejection

    def _cards(self, name: str) -> tuple[Card, ...]:
        node = self._ledger.fleet.node(name)
        return node.cards if node is not None else ()

    def _forget(self, binding: Binding, grant: Grant | None) -> None:
        if grant is not None:
            self._on_freed(self._ledger.handle(Forgotten(binding.uid)))
            self._availability.deprioritize(binding.uid, binding.node)

    # ---- logs -------------------------------------------------------------------------------------------------------

    def _log_bound(self, pod: Pod, request: PodRequest, allocation: Allocation, started: float) -> None:
        cards = {uuid: f"{use.memory}MiB/{use.cores}%" for uuid, use in allocation.uses().items()}
        took, node = self._since(started), allocation.node
        log.info("bound", extra=fields(pod=pod.key, node=node, gpus=cards, dialect=request.dialect, took=took))

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
