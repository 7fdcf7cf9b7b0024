"""The reconcile loop: carries out the ledger's instructions, and grants GPUs to pods that another scheduler bound.

This is slow work that must not delay the verbs: live lookups of pods, grants, Events, and labels that an API server did
not copy from a Binding. Only the leader writes. `Reconciler.apply(instructions)` collects work; `Reconciler.run` does
it, and ends only when cancelled.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from itertools import islice

from gputile.background.failure_isolation import FailureIsolation
from gputile.dialects import gputile, registry
from gputile.dialects.allocations import allocation_of
from gputile.dialects.kube_objects import GrantContext, Pod, PodRecord
from gputile.engine.placement.place import Placement
from gputile.kube.api import Api, ApiRejected, KubeEvent, OutcomeUnknown
from gputile.ledger.events import Conflict, Forgotten, Freed, Instruction, VerifyBind
from gputile.ledger.ledger import AllocationState
from gputile.model.grants import Grant
from gputile.model.refusals import Refusal, about_one_node
from gputile.model.requests import PodRequest
from gputile.scheduler.binding.open_binds import OpenBinds
from gputile.scheduler.binding.overlap_resolver import OverlapResolver
from gputile.scheduler.settings import Settings
from gputile.scheduler.state.cluster_state import ClusterState
from gputile.scheduler.state.pod_requests import call_budget, seed_of
from gputile.telemetry.logs import fields
from gputile.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

ROUND = 0.25  # seconds between two rounds
AT_ONCE = 200  # pods per round, so that verbs are answered in between
RETRY = 5.0  # seconds until failed work is retried
LOOP = "grants"  # in logs and metrics
PENDING = (None, "", "Pending")  # phases of a pod none of whose containers has started


class Reconciler:
    """Work of the leader that follows from the ledger and the watches, one pod at a time."""

    def __init__(
        self,
        api: Api,
        cluster_state: ClusterState,
        settings: Settings,
        metrics: Metrics,
        binds: OpenBinds,
        *,
        leads: Callable[[], bool],
        clock: Callable[[], float],
        wall: Callable[[], int],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        isolation: FailureIsolation | None = None,
    ) -> None:
        self._isolation = isolation or FailureIsolation(metrics, clock)
        self._api, self._cluster_state, self._settings, self._metrics = api, cluster_state, settings, metrics
        self._leads, self._clock, self._wall, self._pause = leads, clock, wall, pause
        self._binds = binds
        self._overlap_resolver = OverlapResolver(
            api, cluster_state, settings, metrics, leads=leads, clock=clock, wall=wall, isolation=self._isolation
        )
        self._unwritten: dict[str, Grant] = {}  # granted and confirmed in the ledger, but not written to the pod yet
        self._not_before: dict[str, float] = {}  # by UID: when to retry failed work
        self._unplaced_since: dict[str, float] = {}  # by UID: bound by another scheduler, and no cards found for it
        self._unplaced: dict[str, tuple[Pod, str]] = {}  # the same pods, and the message of the Event to write
        self._reported: dict[str, str] = {}  # by UID: the message of the last Event

    def apply(self, instructions: Iterable[Instruction]) -> None:
        """Collect the ledger's instructions; `run` carries them out."""
        for instruction in instructions:
            match instruction:
                case VerifyBind(pod):
                    self._metrics.expired.inc()
                    self._binds.unknown.add(pod)
                case Conflict():
                    self._metrics.conflicts.inc()
                    self._overlap_resolver.add(instruction)
                case Freed():
                    self._unplaced_since.clear()  # pods that did not fit may be granted now

    def on_elected(self) -> None:
        """This replica became the leader, and another may have been in between: decide unwritten grants again."""
        for uid in list(self._unwritten):
            pod = self._cluster_state.pod(uid)
            if pod is not None and not self._cluster_state.is_granted(uid):
                self._cluster_state.ungranted[uid] = pod
        self._unwritten.clear()
        for entry in self._cluster_state.ledger.in_flight():
            if entry.state is AllocationState.ASSUMED:
                self._binds.unknown.add(entry.allocation.pod)

    async def run(self) -> None:
        while True:
            await self._isolation.attempt(LOOP, "", self.round, always=True)
            await self._pause(ROUND)

    async def round(self) -> None:
        """Do all work that is due, once. Failed work is retried later, and delays nothing else."""
        for uid in sorted(self._binds.unknown):
            await self._attempt(uid, self._look_up)
        if not self._leads():
            self._cluster_state.invalid_grants.clear()
            self._cluster_state.rejected_by_kubelet.clear()
            return
        for uid in list(islice(self._cluster_state.ungranted, AT_ONCE)):
            if self._clock() >= self._unplaced_since.get(uid, -RETRY) + RETRY and not self._isolation.is_backing_off(
                LOOP, uid
            ):
                self._isolation.step(LOOP, uid, partial(self._grant, uid), self._cluster_state.pod(uid))
        for uid in list(self._unwritten):
            await self._attempt(uid, self._write)
        for uid in list(islice(self._cluster_state.newly_bound, AT_ONCE)):
            await self._attempt(uid, self._complete_labels)
        for uid in list(self._cluster_state.invalid_grants):
            await self._attempt(uid, self._report_invalid_grant)
        for uid in list(self._unplaced):
            await self._attempt(uid, self._report_unplaced)
        for uid in list(islice(self._cluster_state.rejected_by_kubelet, AT_ONCE)):
            await self._attempt(uid, self._report_rejected_by_kubelet)
        await self._overlap_resolver.round()
        await self._isolation.write_events(self._api)

    async def _attempt(self, uid: str, work: Callable[[str], Awaitable[None]]) -> None:
        """Do work for one pod, unless it failed a moment ago. Work that writes checks leadership first."""
        if self._clock() < self._not_before.get(uid, 0.0):
            return
        await self._isolation.attempt(LOOP, uid, lambda: self._try(uid, work), self._cluster_state.pod(uid))

    async def _try(self, uid: str, work: Callable[[str], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(self._settings.bind.attempt + 1.0):
                await work(uid)
            self._not_before.pop(uid, None)
        except (ApiRejected, OutcomeUnknown, TimeoutError) as error:
            self._not_before[uid] = self._clock() + RETRY
            log.warning("reconcile failed; retrying", extra=fields(what=work.__name__, pod=uid, why=str(error)))

    # ---- binds with a lost answer -----------------------------------------------------------------------------------

    async def _look_up(self, uid: str) -> None:
        entry = self._cluster_state.ledger.entry(uid)
        if entry is None or entry.state is not AllocationState.ASSUMED:
            self._binds.unknown.discard(uid)
            return
        namespace, _, name = entry.allocation.name.partition("/")
        live = None if uid in self._binds.in_flight else await self._api.pod(namespace, name)
        if uid in self._binds.in_flight:
            return  # a bind in flight will show the outcome, or be looked up itself
        self._binds.unknown.discard(uid)
        if self._cluster_state.ledger.entry(uid) is not entry:
            return  # the watch, or another bind, was faster: the lookup is stale
        if live is None or live.uid != uid:
            self.apply(self._cluster_state.vanished(uid))
        elif live.node_name:
            self.apply(self._cluster_state.pod_changed(live))
        elif uid not in self._binds.unconfirmed:  # otherwise a later attempt succeeded after the lookup was sent
            self.apply(self._cluster_state.ledger.handle(Forgotten(uid)))
        node = live.node_name if live else None
        log.info("outcome of a bind looked up", extra=fields(pod=entry.allocation.name, node=node))

    # ---- pods bound by another scheduler ----------------------------------------------------------------------------

    def _grant(self, uid: str) -> None:
        """Choose cards on the node of the pod, and confirm them in the ledger before anything is written."""
        pod = self._cluster_state.ungranted[uid]
        request = registry.read_pod(pod, self._cluster_state.settings_on(pod.node_name))
        if not isinstance(request, PodRequest) or pod.node_name not in self._cluster_state.ledger.fleet:
            self._unplaced_since[uid] = self._clock()
            return
        # Cards that the ledger has for it already: reserved by filter before kube-scheduler itself bound it.
        grant = self._cluster_state.grant_in_ledger(uid, pod.node_name)
        if grant is None:
            answer = self._place(pod, request)
            if not isinstance(answer, Placement):
                self._unplaced_since[uid] = self._clock()
                self._reject(pod, answer)
                return
            grant = answer.grant(uid, request)
            over_quota = self._beyond_quota(pod, request, grant)
            if over_quota:
                self._unplaced_since[uid] = self._clock()
                message = f"bound to {pod.node_name} by another scheduler, beyond its quota: {over_quota}"
                self._unplaced[uid] = (pod, message)
                return
        self.apply(self._cluster_state.granted(pod, grant))
        self._unwritten[uid] = grant
        self._metrics.adopted.inc()
        log.info("granted GPUs to a pod bound by another scheduler", extra=fields(pod=pod.key, node=pod.node_name))

    def _beyond_quota(self, pod: Pod, request: PodRequest, grant: Grant) -> str:
        """Only for pods that have not started: our own agents start no container without a grant, so their cards stay
        free. The cards of a running pod are always counted."""
        node = self._cluster_state.ledger.fleet.node(grant.node)
        is_pending = pod.status is None or pod.status.phase in PENDING
        waits = node is not None and node.agent == gputile.NAME and is_pending
        return self._cluster_state.ledger.beyond_quota(allocation_of(pod, request, grant)) if waits else ""

    def _place(self, pod: Pod, request: PodRequest) -> Placement | Refusal:
        # Of several GPU models, prefer one that is within quota.
        allowed = self._cluster_state.ledger.quota_usage.allowed(pod.namespace, request)
        budget, policy, seed = call_budget(self._clock), self._settings.policy, seed_of(pod.uid)
        fleet = self._cluster_state.ledger.fleet_for(pod.uid)
        answer = fleet.place(allowed, pod.node_name, policy, seed, budget.half())
        if isinstance(answer, Placement):
            return answer
        return fleet.place(request, pod.node_name, policy, seed, budget)

    def _reject(self, pod: Pod, refusal: Refusal) -> None:
        reason = f"the node {about_one_node(refusal.code)}"
        message = f"bound to node {pod.node_name} by another scheduler, and no GPU fits: {reason}"
        self._unplaced[pod.uid] = (pod, message)

    async def _write(self, uid: str) -> None:
        pod, grant = self._cluster_state.pod(uid), self._unwritten[uid]
        if pod is None or pod.node_name != grant.node or self._cluster_state.is_granted(uid):
            del self._unwritten[uid]  # gone, moved, or granted by another leader
            return
        record = self._record(pod, grant)
        if record is not None:
            await self._patch(pod, {**record.annotations}, {**record.labels}, only_if_unchanged=True)
        self._unwritten.pop(uid, None)

    async def _patch(
        self, pod: Pod, annotations: dict[str, str | None], labels: dict[str, str | None], *, only_if_unchanged: bool
    ) -> None:
        """Leadership is checked right before the write; a write that hangs times out before a new leader starts."""
        if not self._leads():
            raise ApiRejected(0, "NotLeader", "this replica lost leadership")
        version = pod.metadata.resource_version if only_if_unchanged and pod.metadata else None
        timeout = self._settings.bind.attempt
        await self._api.patch_pod(
            pod.namespace, pod.name, pod.uid, annotations, labels, version=version, timeout=timeout
        )

    def _record(self, pod: Pod, grant: Grant) -> PodRecord | None:
        settings, now = self._cluster_state.settings_on(grant.node), self._wall()
        request = registry.read_pod(pod, settings)
        node = self._cluster_state.ledger.fleet.node(grant.node)
        if not isinstance(request, PodRequest) or node is None:
            return None
        context = GrantContext(grant=grant, pod=pod, asked=request, cards=node.cards, at=now, settings=settings)
        return registry.write_grant(context)

    # ---- labels that the API server did not copy from the Binding ---------------------------------------------------

    async def _complete_labels(self, uid: str) -> None:
        """API servers before 1.35 copy only annotations from a Binding. An existing label is not changed."""
        pod = self._cluster_state.newly_bound.get(uid)
        if pod is None:
            return  # the pod is gone by now
        entry = self._cluster_state.ledger.entry(uid)
        grant = entry.allocation.grant if entry is not None else None
        may_lack = grant is not None and grant.dialect != gputile.NAME and not pod.is_admitted  # ours has no labels
        record = self._record(pod, grant) if grant is not None and may_lack else None
        missing = {key: value for key, value in (record.labels if record else {}).items() if key not in pod.labels}
        try:
            if missing:
                await self._patch(pod, {}, {**missing}, only_if_unchanged=False)
        except ApiRejected as error:
            if error.status in (0, 408, 429):
                raise
            log.warning("API server rejected the labels of a pod", extra=fields(pod=pod.key, why=str(error)))
        self._cluster_state.newly_bound.pop(uid, None)

    # ---- Events -----------------------------------------------------------------------------------------------------

    async def _report_invalid_grant(self, uid: str) -> None:
        pod, message = self._cluster_state.invalid_grants.get(uid, (None, ""))
        if pod is not None and await self._record_event(pod, "GrantInvalid", message):
            self._metrics.copied.inc()
        self._cluster_state.invalid_grants.pop(uid, None)

    async def _report_unplaced(self, uid: str) -> None:
        pod, message = self._unplaced[uid]
        await self._record_event(pod, "NoFittingGPU", message)
        self._unplaced.pop(uid, None)

    async def _report_rejected_by_kubelet(self, uid: str) -> None:
        pod = self._cluster_state.rejected_by_kubelet.get(uid)
        if pod is not None and await self._record_event(pod, "AdmissionFailed", _kubelet_message(pod)):
            self._metrics.admission_failures.inc()
        self._cluster_state.rejected_by_kubelet.pop(uid, None)

    async def _record_event(self, pod: Pod, reason: str, message: str) -> bool:
        """Write an Event, unless it repeats the last one about the pod; whether it was written."""
        if self._reported.get(pod.uid) == message or not self._leads():
            return False
        event = KubeEvent(namespace=pod.namespace, pod=pod.name, uid=pod.uid, reason=reason, message=message)
        await self._api.note(event)
        self._reported[pod.uid] = message
        log.warning("event recorded", extra=fields(reason=reason, pod=pod.key, node=pod.node_name, why=message))
        return True

    def prune(self) -> None:
        """Forget pods that are gone."""
        self._binds.unconfirmed &= {entry.allocation.pod for entry in self._cluster_state.ledger.in_flight()}
        for by_uid in (self._reported, self._not_before, self._unplaced_since):
            for uid in [uid for uid in by_uid if self._cluster_state.pod(uid) is None]:
                del by_uid[uid]


def _kubelet_message(pod: Pod) -> str:
    texts = [text for text in (pod.status and (pod.status.reason, pod.status.message)) or () if text]
    return (
        f"the kubelet of node {pod.node_name} rejected the pod ({': '.join(texts)}). Its GPU share is free again. Its "
        "controller will create a new pod, which is scheduled again; a bare pod must be recreated by hand."
    )
