"""Executes preemption plans: nominates the pod, evicts the victims, and keeps the capacity until the pod is bound.

These are steps 4 to 6 of `Preemptor._preempt`. There is one open plan per pod; a failed step is retried. Only the
leader acts. Which pods to evict is decided by `victim_selection`, never here.

    planned --one write: nominated node and nomination--> announced --evictions--> bound
                                                              |
              withdrawn <-- no victim may be evicted, or -----+--- timeout --> expired
                            eviction no longer helps

From planning on, the ledger holds the nomination, so that no pod of lower priority takes the capacity. The nomination
is also an annotation of the pod: a new leader finds it there and continues. Victims are evicted through the Eviction
API, which respects disruption budgets; both sides get Events. The end of a plan is written to the pod, with retries.
"""

import logging
from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from gputile.background.failure_isolation import FailureIsolation
from gputile.dialects.allocations import allocation_of
from gputile.dialects.gputile import NOMINATION, Nomination, write_nomination
from gputile.dialects.kube_objects import Pod
from gputile.dialects.registry import read_nomination
from gputile.kube.api import Api, ApiRejected, KubeEvent, OutcomeUnknown
from gputile.ledger.events import Instruction, Nominated, Withdrawn
from gputile.model.requests import PodRequest
from gputile.scheduler.preemption.victim_selection import PreemptionPlan, VictimSelector
from gputile.scheduler.settings import Settings
from gputile.scheduler.state.cluster_state import ClusterState, UnboundPod
from gputile.telemetry.logs import fields
from gputile.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

RETRY = 5.0  # seconds until a failed step is retried
BACKOFF, MAX_BACKOFF = 30.0, 1800.0  # seconds after a failed plan; doubled each time
MAX_NOMINATION = 3600.0  # seconds
LOOP = "nominations"  # in logs and metrics

OnFreed = Callable[[Iterable[Instruction]], None]
"""Called with the ledger's instructions when kept capacity is freed."""


class OpenPlan(msgspec.Struct):
    """A preemption plan that is being executed."""

    pod: Pod
    request: PodRequest
    nomination: Nomination
    left: dict[str, str]  # victims that are still to be evicted: UID and namespace/name
    victim_names: str  # of all victims, for the Event
    announced: bool = False
    evicted: int = 0
    not_before: float = 0.0
    blocked: str = ""
    end: str = ""  # the outcome, while it is still to be written to the pod

    @property
    def node(self) -> str:
        return self.nomination.grant.node


class PlanBackoff(msgspec.Struct):
    """The backoff of a pod after failed plans: no pod is evicted for it until then."""

    until: float
    failures: int


class PreemptionExecutor:
    """Executes the open plans, and holds the backoff of pods whose plans failed."""

    def __init__(
        self,
        api: Api,
        cluster_state: ClusterState,
        victim_selector: VictimSelector,
        settings: Settings,
        metrics: Metrics,
        *,
        leads: Callable[[], bool],
        clock: Callable[[], float],
        wall: Callable[[], int],
        on_freed: OnFreed,
        isolation: FailureIsolation | None = None,
    ) -> None:
        self._isolation = isolation or FailureIsolation(metrics, clock)
        self._api, self._cluster_state, self._ledger, self._victim_selector = (
            api,
            cluster_state,
            cluster_state.ledger,
            victim_selector,
        )
        self._settings, self._attempt, self._metrics = settings.preempt, settings.bind.attempt, metrics
        self._leads, self._clock, self._wall, self._on_freed = leads, clock, wall, on_freed
        self._open: dict[str, OpenPlan] = {}
        self._backoffs: dict[str, PlanBackoff] = {}

    # ---- state ------------------------------------------------------------------------------------------------------

    def has_open_plan(self, uid: str) -> bool:
        return uid in self._open

    def backoff_until(self, uid: str) -> float:
        return self._backoffs[uid].until if uid in self._backoffs else 0.0

    def prune(self) -> None:
        selector = self._victim_selector
        waiting = self._cluster_state.pending
        self._backoffs = {uid: backoff for uid, backoff in self._backoffs.items() if uid in waiting}
        selector.evicted = {uid for uid in selector.evicted if self._ledger.entry(uid) is not None}
        selector.refused_until = {uid: until for uid, until in selector.refused_until.items() if self._clock() < until}

    # ---- starting a plan --------------------------------------------------------------------------------------------

    def nominate(self, pod: Pod, request: PodRequest, plan: PreemptionPlan) -> Nomination:
        """Keep the capacity in the ledger while the victims leave; evicts no pod."""
        wait = max((self._victim_selector.seconds_left(victim) for victim in plan.victims + plan.leaving), default=0.0)
        seconds = min(wait + self._settings.margin, MAX_NOMINATION)
        grant = plan.where.grant(pod.uid, request)
        self._ledger.handle(Nominated(allocation_of(pod, request, grant), self._clock() + seconds))
        log.info("nominated", extra=fields(pod=pod.key, node=plan.node, seconds=seconds))
        return Nomination(grant, self._wall() + int(seconds * 1e9), tuple(victim.pod for victim in plan.victims))

    def open(self, pod: Pod, request: PodRequest, plan: PreemptionPlan) -> OpenPlan:
        """Nominate the pod; `advance` then evicts the victims. Pods under budgets come first: a refused eviction then
        ends the plan before any other pod is gone."""
        nomination = self.nominate(pod, request, plan)
        protected_first = sorted(plan.victims, key=lambda victim: not self._victim_selector.is_protected(victim))
        left = {victim.pod: victim.name for victim in protected_first}
        names = ", ".join(victim.name for victim in plan.victims or plan.leaving)
        opened = self._open[pod.uid] = OpenPlan(pod, request, nomination, left, victim_names=names)
        return opened

    def restore(self) -> None:
        """Restore nominations of an earlier leader from their pods, and finish their plans by this replica's rules."""
        for uid, waiting in list(self._cluster_state.pending.items()):
            self._isolation.step(LOOP, waiting.pod.key, partial(self._restore, uid, waiting), waiting.pod)

    def _restore(self, uid: str, waiting: UnboundPod) -> None:
        nomination = read_nomination(waiting.pod)
        if nomination is None or uid in self._open or not isinstance(waiting.request, PodRequest):
            return
        seconds = min((nomination.until - self._wall()) / 1e9, MAX_NOMINATION)
        if seconds <= 0 or self._ledger.entry(uid) is not None:
            return
        allocation = allocation_of(waiting.pod, waiting.request, nomination.grant)
        self._ledger.handle(Nominated(allocation, self._clock() + seconds))
        left = self._remaining_victims(nomination, waiting.pod)
        opened = OpenPlan(waiting.pod, waiting.request, nomination, left, "", announced=True)
        opened.evicted = len(nomination.victims) - len(left)
        self._open[uid] = opened

    def _remaining_victims(self, nomination: Nomination, pod: Pod) -> dict[str, str]:
        if not self._settings.own:
            return {}
        holders = self._ledger.holders(nomination.grant.node)
        lower = {holder.pod: holder.name for holder in holders if holder.priority < pod.priority}
        return {
            uid: lower[uid]
            for uid in nomination.victims
            if uid in lower and not self._victim_selector.is_terminating(uid)
        }

    def on_elected(self) -> None:
        """Another replica may have been the leader meanwhile: the nominations on the pods are the true ones."""
        self._open.clear()
        for nominated in self._ledger.nominations():
            waiting = self._cluster_state.pending.get(nominated.allocation.pod)
            by_kube_scheduler = waiting is not None and waiting.pod.nominated == nominated.allocation.node
            if not by_kube_scheduler and (waiting is None or read_nomination(waiting.pod) is None):
                self._withdraw(nominated.allocation.pod)
        self.restore()

    # ---- executing --------------------------------------------------------------------------------------------------

    async def round(self) -> None:
        for opened in list(self._open.values()):
            if self._is_open(opened) and self._clock() >= opened.not_before:
                await self._isolation.attempt(LOOP, opened.pod.key, partial(self.advance, opened), opened.pod)

    def _is_open(self, opened: OpenPlan) -> bool:
        """Whether the plan is still open: a new term of leadership may have begun during an API call."""
        return self._open.get(opened.pod.uid) is opened

    async def advance(self, opened: OpenPlan) -> None:
        """Steps 5 and 6 of `Preemptor._preempt`: end the plan if it is over; otherwise announce it and evict."""
        uid = opened.pod.uid
        if self._ledger.entry(uid) is not None and uid in self._cluster_state.pending:
            return  # the pod is being bound
        if uid not in self._cluster_state.pending:
            self._close(opened, "bound" if self._ledger.entry(uid) is not None else "withdrawn")
            return
        try:
            if not opened.end:
                self._check_end(opened)
            if opened.end:
                await self._clean_up(opened)
                return
            if not opened.announced:
                await self._announce(opened)
            for victim in list(opened.left):
                await self._evict(opened, victim)
        except (ApiRejected, OutcomeUnknown) as error:
            opened.not_before = self._clock() + RETRY
            log.warning("preemption failed; retrying", extra=fields(pod=opened.pod.key, why=str(error)))

    def _check_end(self, opened: OpenPlan) -> None:
        if self._ledger.nomination(opened.pod.uid) is None:
            why = f"the nomination of node {opened.node} expired: the pod was not bound there in time"
            self._fail(opened, "expired", why)
        elif not self._victim_selector.fits_after_eviction(opened.pod, opened.request, opened.node, opened.left):
            why = f"the pod no longer fits on node {opened.node}, even after the evictions"
            self._fail(opened, "withdrawn", why, back_off=False)

    async def _announce(self, opened: OpenPlan) -> None:
        """Write the nominated node and the nomination in one patch, before the first eviction."""
        await self._patch(opened.pod, write_nomination(opened.nomination, self._wall()), opened.node)
        opened.announced = True
        kept = f"its capacity is kept for this pod for {(opened.nomination.until - self._wall()) // 10**9} s at most"
        evicting = f"evicting {opened.victim_names} from node {opened.node}; {kept}"
        leaving = f"waiting for {opened.victim_names} to terminate on node {opened.node}; {kept}"
        await self.record_event(opened.pod, "Preempting", evicting if opened.left else leaving, warn=False)

    async def _evict(self, opened: OpenPlan, victim: str) -> None:
        if not self._is_open(opened) or opened.end or victim not in opened.left:
            return
        if not self._is_needed(opened):
            return
        namespace, _, name = opened.left[victim].partition("/")
        self._check_leader()
        try:
            await self._api.evict(namespace, name, victim, timeout=self._attempt)
        except ApiRejected as rejection:
            await self._handle_rejection(opened, victim, rejection)
            return
        opened.left.pop(victim, None)
        opened.evicted += 1
        self._victim_selector.evicted.add(victim)
        self._metrics.evictions.inc()
        log.info("evicted", extra=fields(pod=f"{namespace}/{name}", preemptor=opened.pod.key))
        message = f"preempted by {opened.pod.key} (priority {opened.pod.priority}) on node {opened.node}"
        await self._write_event(
            KubeEvent(namespace=namespace, pod=name, uid=victim, reason="Preempted", message=message)
        )

    def _is_needed(self, opened: OpenPlan) -> bool:
        """No pod is evicted for a pod that is placed elsewhere, fits already, or whose nomination would expire before
        the victims are gone."""
        nominated, uid = self._ledger.nomination(opened.pod.uid), opened.pod.uid
        if nominated is None or self._ledger.entry(uid) is not None or uid not in self._cluster_state.pending:
            return False
        if self._victim_selector.fits_now(opened.pod, opened.request, opened.node):
            opened.left.clear()
            return False
        pods = (self._cluster_state.pod(uid) for uid in opened.left)
        grace = max((pod.grace for pod in pods if pod is not None), default=0)
        if not opened.evicted and nominated.until - self._clock() < grace:
            self._fail(opened, "withdrawn", "no pod could be evicted before the nomination expires", back_off=False)
        return not opened.end

    async def _handle_rejection(self, opened: OpenPlan, victim: str, rejection: ApiRejected) -> None:
        """The victim is gone already, or a disruption budget or another rule forbids its eviction. In that case the
        plan ends if no pod has been evicted yet, and is retried otherwise."""
        if rejection.status == 0:
            raise rejection
        name = opened.left.get(victim, "")
        if rejection.status in (404, 409):  # 409: replaced by another pod of the same name
            opened.left.pop(victim, None)
            self._victim_selector.evicted.add(victim)  # until the watch shows it
        elif opened.evicted:
            if opened.blocked != str(rejection):
                opened.blocked = str(rejection)
                await self.record_event(opened.pod, "PreemptionBlocked", f"{name} cannot be evicted yet: {rejection}")
            raise rejection
        else:
            backoff = BACKOFF if rejection.status == 429 else MAX_BACKOFF  # 429: a disruption budget
            self._victim_selector.refused_until[victim] = self._clock() + backoff
            self._fail(opened, "withdrawn", f"{name} may not be evicted: {rejection}")
            await self._clean_up(opened)

    # ---- ending a plan ----------------------------------------------------------------------------------------------

    def _fail(self, opened: OpenPlan, end: str, why: str, *, back_off: bool = True) -> None:
        """The plan failed: free the capacity at once. `_clean_up` removes the nomination from the pod."""
        opened.end, opened.blocked = end, why
        self._withdraw(opened.pod.uid)
        if back_off:
            failures = self._backoffs[opened.pod.uid].failures if opened.pod.uid in self._backoffs else 0
            wait = min(BACKOFF * 2 ** min(failures, 10), MAX_BACKOFF)
            self._backoffs[opened.pod.uid] = PlanBackoff(self._clock() + wait, failures + 1)

    async def _clean_up(self, opened: OpenPlan) -> None:
        if not self._is_open(opened):
            return
        await self._patch(opened.pod, None, "")  # even if not announced: the answer to that write may have been lost
        if self._is_open(opened):
            self._close(opened, opened.end)
            reason = "NominationExpired" if opened.end == "expired" else "PreemptionBlocked"
            await self.record_event(opened.pod, reason, opened.blocked)

    def _close(self, opened: OpenPlan, end: str) -> None:
        del self._open[opened.pod.uid]
        self._metrics.preemptions.labels(end).inc()
        if end == "withdrawn":
            self._withdraw(opened.pod.uid)

    def _withdraw(self, uid: str) -> None:
        self._on_freed(self._ledger.handle(Withdrawn(uid)))

    # ---- writing ----------------------------------------------------------------------------------------------------

    def _check_leader(self) -> None:
        if not self._leads():
            raise ApiRejected(0, "NotLeading", "this replica lost leadership")

    async def _patch(self, pod: Pod, nomination: str | None, node: str) -> None:
        self._check_leader()
        await self._api.patch_pod(
            pod.namespace, pod.name, pod.uid, {NOMINATION: nomination}, {}, nominate=node, timeout=self._attempt
        )

    async def record_event(self, pod: Pod, reason: str, message: str, *, warn: bool = True) -> None:
        event = KubeEvent(namespace=pod.namespace, pod=pod.name, uid=pod.uid, reason=reason, message=message)
        await self._write_event(event if warn else msgspec.structs.replace(event, kind="Normal"))

    async def _write_event(self, event: KubeEvent) -> None:
        """A failure to write an Event does not interrupt the plan."""
        if not self._leads():
            return
        try:
            await self._api.note(event)
        except (ApiRejected, OutcomeUnknown) as error:
            log.warning("event not recorded", extra=fields(pod=f"{event.namespace}/{event.pod}", why=str(error)))
