"""Unschedulable pods: writes Events that say why a pod is pending, and requeues (nudges) the pod when it fits.

It works in the background and never delays an extender call.

kube-scheduler's own Events have the short reasons; the numbers, and what would help, are in one Event per pod from
here, a few per second. kube-scheduler retries an unschedulable pod on any change of the cluster. It can be faster than
gputile's watch and get a rejection from a ledger that is slightly stale, after which no change triggers another retry.
Such a pod is nudged: an annotation is touched, so that kube-scheduler requeues it. Pods that another replica may have
rejected before this one became the leader are nudged too. A pod that is rejected before the watch has shown it is kept
until the watch catches up.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from enum import Enum
from functools import partial

import msgspec

from gputile.background.failure_isolation import FailureIsolation
from gputile.concurrency.time_slices import SearchLane, TimeSlices
from gputile.dialects.gputile import NUDGED
from gputile.dialects.kube_objects import Pod
from gputile.engine.cooperative import Cooperative, run_to_end
from gputile.engine.search_budget import SearchBudget
from gputile.kube.api import Api, ApiRejected, KubeEvent, OutcomeUnknown
from gputile.ledger.events import Nominated
from gputile.ledger.holders import NodeAllocations
from gputile.ledger.ledger import Ledger
from gputile.model.refusals import BadRequest
from gputile.model.requests import PodRequest
from gputile.scheduler.settings import Settings
from gputile.scheduler.state.cluster_state import ClusterState
from gputile.scheduler.state.unschedulable import UnschedulablePod
from gputile.telemetry.logs import fields
from gputile.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

ROUND = 0.25  # seconds
PATIENCE = 0.5  # seconds that kube-scheduler has to retry by itself
NUDGE_INTERVAL = 5.0  # seconds between two nudges of one pod
SETTLE = 15.0  # seconds that kube-scheduler has to retry the pods that were pending when this replica became the leader
REPEAT = 30 * 60.0  # seconds after which the same Event is written again, because Events are kept for one hour
NUDGES = 20  # per round and equal requests
UNSEEN_TTL = 60.0  # seconds that the watch has to show a rejected pod: longer than its longest pause
MAX_UNSEEN = 1000  # of these; a caller may invent pods
EXPLAINED_NODES = 100  # nodes that are explained in detail; thousands would delay extender calls
SHARE = 0.05  # of the time may be spent on explanations
STEPS, SECONDS = 20_000, 1.0  # limit of the search for one explanation
FIT_STEPS, FIT_SECONDS = 2000, 0.01  # limit of the search for whether a pod fits by now
NEVER = -math.inf
LOOP = "pending pods"  # in logs and metrics


class RoundOutcome(Enum):
    """Whether a round continues after one pod."""

    CONTINUE = 1
    END = 2


Reasons = dict[tuple[str, PodRequest | BadRequest], str]
"""By namespace and request, in one round: equal pods are pending for equal reasons."""


class PendingPod(msgspec.Struct):
    """An unschedulable pod: its last rejection, Event and nudge."""

    pod: Pod
    request: PodRequest | BadRequest
    refused_at: float
    capacity_generation: int  # how often capacity had been freed when it was rejected
    is_inherited: bool = False  # another replica may have rejected it; this one was never called about it
    is_seen: bool = True  # the watch has shown it; until then it gets no Event and no nudge
    checked_at: float = NEVER
    reported_at: float = NEVER
    reported: str = ""  # the message of the last Event
    nudged_at: float = NEVER
    was_nudged: bool = False  # and the API server accepted the write


class PendingPods:
    """The unschedulable pods of this replica; writes their Events and nudges them."""

    def __init__(
        self,
        api: Api,
        cluster_state: ClusterState,
        settings: Settings,
        metrics: Metrics,
        *,
        leads: Callable[[], bool],
        clock: Callable[[], float],
        wall: Callable[[], int],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        isolation: FailureIsolation | None = None,
        lane: SearchLane | None = None,
    ) -> None:
        self._isolation, self._lane = isolation or FailureIsolation(metrics, clock), lane or SearchLane()
        self._api, self._cluster_state, self._settings, self._metrics = api, cluster_state, settings.tell, metrics
        self._timeout = settings.bind.attempt
        self._leads, self._clock, self._wall, self._pause = leads, clock, wall, pause
        self._pending: dict[str, PendingPod] = {}
        self._unseen = 0  # of these, rejected before the watch has shown them
        self._freed_count = 0
        self._led = False
        self._tokens = self._settings.per_second  # Events that may be written now: a token bucket
        self._tokens_at = clock()
        self._quiet_until = 0.0

    def __len__(self) -> int:
        return len(self._pending)

    def refused(self, unschedulable: UnschedulablePod) -> None:
        """A pod fits on no node. Called on the hot path: it only records the pod."""
        pod, request = unschedulable.pod, unschedulable.request
        now, generation = self._clock(), self._capacity_generation()
        pending = self._pending.get(pod.uid)
        if pending is None:
            is_seen = pod.uid in self._cluster_state.pending
            if is_seen or self._unseen < MAX_UNSEEN:
                self._pending[pod.uid] = PendingPod(pod, request, now, generation, is_seen=is_seen)
                self._unseen += not is_seen
        else:
            pending.request, pending.refused_at, pending.capacity_generation = request, now, generation
            pending.is_inherited = False

    def capacity_freed(self) -> None:
        """Capacity was freed on some node, perhaps by a change that the ledger's cards do not show: an agent is idle
        again, a quota was raised."""
        self._freed_count += 1

    def _capacity_generation(self) -> int:
        """How often capacity was freed. The fleet counts every increase on its cards itself."""
        return self._freed_count + self._cluster_state.ledger.fleet.capacity_generation()

    async def run(self) -> None:
        while True:
            await self._isolation.attempt(LOOP, "", self._try_round, always=True)
            await self._pause(ROUND)

    async def _try_round(self) -> None:
        try:
            await self.round()
        except (ApiRejected, OutcomeUnknown) as error:
            log.warning("event or nudge of a pending pod failed", extra=fields(why=str(error)))

    async def round(self) -> None:
        self._forget_gone()
        led, self._led = self._led, self._leads()
        if not self._led:
            return
        if not led:
            self._inherit()
        if self._settings.nudge:
            await self._nudge()
        await self._report()

    def _forget_gone(self) -> None:
        """Forget pods that are bound or deleted, and pods that the watch never showed."""
        pending_pods, now, self._unseen = self._cluster_state.pending, self._clock(), 0
        for uid, pending in list(self._pending.items()):
            if uid in pending_pods:
                pending.is_seen = True
            elif pending.is_seen or now - pending.refused_at > UNSEEN_TTL:
                del self._pending[uid]
            else:
                self._unseen += 1

    def _inherit(self) -> None:
        """The previous leader may have rejected pods that kube-scheduler never retries by itself."""
        retried_by = self._clock() + SETTLE
        for uid, waiting in self._cluster_state.pending.items():
            self._pending.setdefault(uid, PendingPod(waiting.pod, waiting.request, retried_by, -1, is_inherited=True))

    # ---- events -----------------------------------------------------------------------------------------------------

    async def _report(self) -> None:
        now = self._clock()
        earned = (now - self._tokens_at) * self._settings.per_second
        self._tokens, self._tokens_at = min(self._settings.per_second, self._tokens + earned), now
        reasons: Reasons = {}
        for uid, pending in list(self._pending.items()):
            if self._tokens < 1.0:
                return
            is_ours = pending.is_seen and not pending.is_inherited
            if is_ours and now - pending.checked_at >= self._settings.every:
                work = partial(self._report_pod, uid, pending, reasons)
                if await self._isolation.attempt(LOOP, pending.pod.key, work, pending.pod) is RoundOutcome.END:
                    return

    async def _report_pod(self, uid: str, pending: PendingPod, reasons: Reasons) -> RoundOutcome:
        now, nominated = self._tokens_at, self._cluster_state.ledger.nomination(uid)
        namespace = self._cluster_state.ledger.quota_usage.scope(pending.pod.namespace)
        if nominated is None and (namespace, pending.request) not in reasons:
            if now < self._quiet_until:
                return RoundOutcome.END
            began = self._clock()
            reasons[namespace, pending.request] = await self._reason(pending.request, namespace)
            self._quiet_until = now + (self._clock() - began) / SHARE
        message = reasons[namespace, pending.request] if nominated is None else _preempting(nominated)
        pending.checked_at = now
        if message and (message != pending.reported or now - pending.reported_at > REPEAT) and self._leads():
            self._tokens -= 1.0
            await self._api.note(_event(uid, pending.pod, message))
            pending.reported, pending.reported_at = message, now
            log.info("pod unschedulable", extra=fields(pod=pending.pod.key, why=message))
        return RoundOutcome.CONTINUE

    async def _reason(self, request: PodRequest | BadRequest, namespace: str) -> str:
        budget = SearchBudget(STEPS, SECONDS, self._clock)
        search = reason_cooperatively(request, self._cluster_state.ledger, namespace, budget)
        message = await TimeSlices(self._clock, self._pause, self._lane).run(search)
        if budget.ran_out:
            self._metrics.cut_short.labels("explanation").inc()
        return message

    # ---- nudging ----------------------------------------------------------------------------------------------------

    async def _nudge(self) -> None:
        """Touch pods that were rejected before capacity was freed, that fit now, and that were not retried since."""
        now, capacity_generation = self._clock(), self._capacity_generation()
        due = [
            (uid, pending)
            for uid, pending in self._pending.items()
            if pending.is_seen
            and pending.capacity_generation < capacity_generation
            and now - pending.refused_at > PATIENCE
            and now - pending.nudged_at > _nudge_interval(pending)
        ]
        fitting: dict[PodRequest, int] = {}  # nodes where such a pod fits: nudging more pods at once is useless
        nudged: Counter[PodRequest] = Counter()
        slices = TimeSlices(self._clock, self._pause, self._lane)
        for uid, pending in due:
            await slices.turn()
            work = partial(self._nudge_pod, uid, pending, fitting, nudged)
            if await self._isolation.attempt(LOOP, pending.pod.key, work, pending.pod) is RoundOutcome.END:
                return

    async def _nudge_pod(
        self, uid: str, pending: PendingPod, fitting: dict[PodRequest, int], nudged: Counter[PodRequest]
    ) -> RoundOutcome:
        pod, ledger = pending.pod, self._cluster_state.ledger
        if not isinstance(pending.request, PodRequest) or ledger.entry(uid) is not None:
            return RoundOutcome.CONTINUE
        allowed = ledger.quota_usage.allowed(pod.namespace, pending.request)
        if ledger.nomination(uid) is not None:
            count = self._fitting_when_nominated(uid, pending)
        elif allowed not in fitting:
            count = fitting[allowed] = min(NUDGES, int(ledger.fleet.fits(allowed, self._budget()).sum()))
        else:
            count = fitting[allowed]
        if count == 0:
            pending.capacity_generation = self._capacity_generation()  # checked: wait for the next freed capacity
            return RoundOutcome.CONTINUE
        if nudged[allowed] >= count:
            return RoundOutcome.CONTINUE  # enough for this round
        if not self._leads():
            return RoundOutcome.END
        nudged[allowed] += 1
        pending.nudged_at = self._clock()
        self._metrics.nudges.inc()
        annotations: dict[str, str | None] = {NUDGED: str(self._wall())}
        await self._api.patch_pod(pod.namespace, pod.name, uid, annotations, {}, timeout=self._timeout)
        pending.was_nudged = True
        return RoundOutcome.CONTINUE

    def _budget(self) -> SearchBudget:
        return SearchBudget(FIT_STEPS, FIT_SECONDS, self._clock)

    def _fitting_when_nominated(self, uid: str, pending: PendingPod) -> int:
        """Without the pod's own nomination, which must not count against it."""
        assert isinstance(pending.request, PodRequest)
        ledger, pod = self._cluster_state.ledger, pending.pod
        allowed = ledger.quota_usage.allowed(pod.namespace, pending.request, ledger.ignored_by(uid, pod.priority))
        return int(ledger.fleet_for(uid, pod.priority).fits(allowed, self._budget()).sum())


def _nudge_interval(pending: PendingPod) -> float:
    """An inherited pod is nudged once: another scheduler may be responsible for it, or it has scheduling gates."""
    return math.inf if pending.is_inherited and pending.was_nudged else NUDGE_INTERVAL


def reason(request: PodRequest | BadRequest, ledger: Ledger, namespace: str = "") -> str:
    """Why a pod (of this namespace, for its quota) is pending and what would help, as one text; "" when it fits."""
    return run_to_end(reason_cooperatively(request, ledger, namespace))


def reason_cooperatively(
    request: PodRequest | BadRequest, ledger: Ledger, namespace: str = "", budget: SearchBudget | None = None
) -> Cooperative[str]:
    """The same as a generator, which yields where it may be interrupted."""
    if isinstance(request, BadRequest):
        return request.message
    quota_usage = ledger.quota_usage
    explanation = yield from quota_usage.explain(
        namespace, request, ledger.fleet, NodeAllocations(ledger), EXPLAINED_NODES, budget
    )
    if explanation.fitting:
        return ""
    quota = quota_usage.objections(namespace, request)
    first, *rest = (line.strip() for line in (*explanation.lines(), *quota, *_nominated(ledger)))
    return f"{first} {'; '.join(rest)}".strip()


def _nominated(ledger: Ledger) -> list[str]:
    """Capacity that looks free and is not: it is kept for nominated pods."""
    kept = [
        nominated.allocation for nominated in ledger.nominations() if ledger.entry(nominated.allocation.pod) is None
    ]
    more = f" and for {len(kept) - 1} more pods" if len(kept) > 1 else ""
    return [f"capacity on node {kept[0].node} is kept for {kept[0].name}{more}"] if kept else []


def _preempting(nominated: Nominated) -> str:
    return f"nominated for node {nominated.allocation.node}: waiting for preempted pods to terminate"


def _event(uid: str, pod: Pod, message: str) -> KubeEvent:
    return KubeEvent(namespace=pod.namespace, pod=pod.name, uid=uid, reason="NoFittingGPU", message=message)
