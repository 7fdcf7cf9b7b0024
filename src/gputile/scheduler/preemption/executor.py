"""Room that is promised to a pod: announced on the pod, made by evictions, kept until it is bound.

Room:  one open plan per pod, carried out step by step; whatever fails is tried again. Only the leader acts.
Door:  `PreemptionExecutor.begin` takes a plan that is to be carried out, `keep` one that kube-scheduler carries out
       itself; `round` does what is due; `restore` finds plans of an earlier leader on their pods.

    planned --one write: nomination and promise--> announced --evictions--> bound
                                                       |
            withdrawn <-- nobody may be evicted, or ---+--- time is up --> expired
                          it would help no more

From the moment it is planned the room is kept in the book, so that nobody of lower priority takes it meanwhile. The
promise stands on the pod as well: a new leader finds it there, and goes on. Eviction is asked for through the Eviction
API, so budgets hold; both sides are told by events. The end is written to the pod too, however long that takes.
"""

import logging
from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from gputile.background.failure_isolation import FailureIsolation
from gputile.dialects.gputile import PROMISE, Nomination, read_nomination, write_nomination
from gputile.dialects.kube_objects import Pod
from gputile.kube.api import Api, ApiRejected, KubeEvent, OutcomeUnknown
from gputile.ledger.events import Instruction, Nominated, Withdrawn
from gputile.model.requests import PodRequest
from gputile.scheduler.preemption.victim_selection import PreemptionPlan, VictimSelector
from gputile.scheduler.settings import Settings
from gputile.scheduler.state.allocations import allocation_of
from gputile.scheduler.state.cluster_state import ClusterState, UnboundPod
from gputile.telemetry.logs import fields
from gputile.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

AGAIN = 5.0  # seconds until what failed is tried again
REST, LONGEST_REST = 30.0, 1800.0  # seconds after a plan that came to nothing; doubled each time
LONGEST_PROMISE = 3600.0  # seconds
LOOP = "nominations"  # in logs and metrics

OnFreed = Callable[[Iterable[Instruction]], None]
"""Told what the book says when room that was kept is given back."""


class OpenPlan(msgspec.Struct):
    """A plan that is being carried out."""

    pod: Pod
    asked: PodRequest
    nomination: Nomination
    left: dict[str, str]  # victims that are still to be evicted: UID and namespace/name
    waits_for: str  # who leaves, for people
    announced: bool = False
    evicted: int = 0
    not_before: float = 0.0
    blocked: str = ""
    end: str = ""  # how it ended, when that is still to be written to the pod

    @property
    def node(self) -> str:
        return self.nomination.grant.node


class PlanBackoff(msgspec.Struct):
    """After plans that came to nothing: nobody is evicted for the pod for a while."""

    until: float
    failures: int


class PreemptionExecutor:
    """See the module's text."""

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
        self._rests: dict[str, PlanBackoff] = {}

    # ---- asking -----------------------------------------------------------------------------------------------------

    def is_at_work(self, uid: str) -> bool:
        return uid in self._open

    def rests_until(self, uid: str) -> float:
        return self._rests[uid].until if uid in self._rests else 0.0

    def prune(self) -> None:
        self._rests = {uid: rest for uid, rest in self._rests.items() if uid in self._cluster_state.pending}
        self._victim_selector.asked_to_go = {
            u for u in self._victim_selector.asked_to_go if self._ledger.entry(u) is not None
        }
        self._victim_selector.unwilling = {
            u: t for u, t in self._victim_selector.unwilling.items() if self._clock() < t
        }

    # ---- beginning --------------------------------------------------------------------------------------------------

    def keep(self, pod: Pod, asked: PodRequest, plan: PreemptionPlan) -> Nomination:
        """Keep the room in the book; others see to it that it is made."""
        wait = max((self._victim_selector.seconds_left(holder) for holder in plan.victims + plan.leaving), default=0.0)
        seconds = min(wait + self._settings.margin, LONGEST_PROMISE)
        grant = plan.where.grant(pod.uid, asked.dialect)
        self._ledger.handle(Nominated(allocation_of(pod, asked, grant), self._clock() + seconds))
        log.info("room promised", extra=fields(pod=pod.key, node=plan.node, seconds=seconds))
        return Nomination(grant, self._wall() + int(seconds * 1e9), tuple(holder.pod for holder in plan.victims))

    async def begin(self, pod: Pod, asked: PodRequest, plan: PreemptionPlan) -> None:
        """Promise the room, and make it. Pods under budgets are asked first: a late no comes before any harm."""
        nomination = self.keep(pod, asked, plan)
        guarded_first = sorted(plan.victims, key=lambda holder: not self._victim_selector.is_protected(holder))
        left = {holder.pod: holder.name for holder in guarded_first}
        names = ", ".join(holder.name for holder in plan.victims or plan.leaving)
        opened = self._open[pod.uid] = OpenPlan(pod, asked, nomination, left, waits_for=names)
        await self._attend(opened)

    def restore(self) -> None:
        """Keep what an earlier leader promised, and finish it. Only what we would do ourselves is done."""
        for uid, waiting in list(self._cluster_state.pending.items()):
            self._isolation.step(LOOP, waiting.pod.key, partial(self._restore, uid, waiting), waiting.pod)

    def _restore(self, uid: str, waiting: UnboundPod) -> None:
        nomination = read_nomination(waiting.pod)
        if nomination is None or uid in self._open or not isinstance(waiting.request, PodRequest):
            return
        seconds = min((nomination.until - self._wall()) / 1e9, LONGEST_PROMISE)
        if seconds <= 0 or self._ledger.entry(uid) is not None:
            return
        allocation = allocation_of(waiting.pod, waiting.request, nomination.grant)
        self._ledger.handle(Nominated(allocation, self._clock() + seconds))
        left = self._left_of(nomination, waiting.pod)
        opened = OpenPlan(waiting.pod, waiting.request, nomination, left, "", announced=True)
        opened.evicted = len(nomination.victims) - len(left)
        self._open[uid] = opened

    def _left_of(self, nomination: Nomination, pod: Pod) -> dict[str, str]:
        if not self._settings.own:
            return {}
        lesser = {h.pod: h.name for h in self._ledger.holders(nomination.grant.node) if h.priority < pod.priority}
        return {
            uid: lesser[uid]
            for uid in nomination.victims
            if uid in lesser and not self._victim_selector.is_terminating(uid)
        }

    def on_elected(self) -> None:
        """We lead (again), and another may have meanwhile: what is promised is what pods carry."""
        self._open.clear()
        for nominated in self._ledger.nominations():
            waiting = self._cluster_state.pending.get(nominated.allocation.pod)
            theirs = waiting is not None and waiting.pod.nominated == nominated.allocation.node
            if not theirs and (waiting is None or read_nomination(waiting.pod) is None):
                self._give_back(nominated.allocation.pod)
        self.restore()

    # ---- carrying it out --------------------------------------------------------------------------------------------

    async def round(self) -> None:
        for opened in list(self._open.values()):
            if self._is_open(opened) and self._clock() >= opened.not_before:
                await self._isolation.attempt(LOOP, opened.pod.key, partial(self._attend, opened), opened.pod)

    def _is_open(self, opened: OpenPlan) -> bool:
        """Whether the plan is still ours: a new term may have begun while we waited for an answer."""
        return self._open.get(opened.pod.uid) is opened

    async def _attend(self, opened: OpenPlan) -> None:
        """The next step of a plan."""
        uid = opened.pod.uid
        if self._ledger.entry(uid) is not None and uid in self._cluster_state.pending:
            return  # it is being bound
        if uid not in self._cluster_state.pending:
            self._close(opened, "bound" if self._ledger.entry(uid) is not None else "withdrawn")
            return
        try:
            if not opened.end:
                self._look_whether_it_is_over(opened)
            if opened.end:
                await self._clean_up(opened)
                return
            if not opened.announced:
                await self._announce(opened)
            for victim in list(opened.left):
                await self._evict(opened, victim)
        except (ApiRejected, OutcomeUnknown) as wrong:
            opened.not_before = self._clock() + AGAIN
            log.warning("preemption is tried again", extra=fields(pod=opened.pod.key, why=str(wrong)))

    def _look_whether_it_is_over(self, opened: OpenPlan) -> None:
        if self._ledger.nomination(opened.pod.uid) is None:
            self._fail(opened, "expired", f"room on node {opened.node} was kept for this pod and not taken in time")
        elif not self._victim_selector.still_serves(opened.pod, opened.asked, opened.node, opened.left):
            self._fail(opened, "withdrawn", f"there will be no room on node {opened.node} after all", rest=False)

    async def _announce(self, opened: OpenPlan) -> None:
        """One write: where the pod is to go, and what is kept for it there. Before anybody is evicted."""
        await self._patch(opened.pod, write_nomination(opened.nomination, self._wall()), opened.node)
        opened.announced = True
        kept = f"kept for this pod for {(opened.nomination.until - self._wall()) // 10**9} s at most"
        made = f"room is made on node {opened.node} by evicting {opened.waits_for}; it is {kept}"
        left = f"{opened.waits_for} will soon have left node {opened.node}; the room is {kept}"
        await self.note(opened.pod, "Preempting", made if opened.left else left, warn=False)

    async def _evict(self, opened: OpenPlan, victim: str) -> None:
        if not self._is_open(opened) or opened.end or victim not in opened.left:
            return
        if not self._is_needed(opened):
            return
        namespace, _, name = opened.left[victim].partition("/")
        self._must_lead()
        try:
            await self._api.evict(namespace, name, victim, timeout=self._attempt)
        except ApiRejected as no:
            await self._not_evicted(opened, victim, no)
            return
        opened.left.pop(victim, None)
        opened.evicted += 1
        self._victim_selector.asked_to_go.add(victim)
        self._metrics.evictions.inc()
        log.info("evicted", extra=fields(pod=f"{namespace}/{name}", to_make_room_for=opened.pod.key))
        said = f"evicted to make room for {opened.pod.key} (priority {opened.pod.priority}) on node {opened.node}"
        await self._say(KubeEvent(namespace=namespace, pod=name, uid=victim, reason="Preempted", message=said))

    def _is_needed(self, opened: OpenPlan) -> bool:
        """Nobody is evicted for a pod that found another place, has room already, or loses it before he is gone."""
        nominated, uid = self._ledger.nomination(opened.pod.uid), opened.pod.uid
        if nominated is None or self._ledger.entry(uid) is not None or uid not in self._cluster_state.pending:
            return False
        if self._victim_selector.fits_now(opened.pod, opened.asked, opened.node):
            opened.left.clear()
            return False
        grace = max((h.grace for one in opened.left if (h := self._cluster_state.pod(one)) is not None), default=0)
        if not opened.evicted and nominated.until - self._clock() < grace:
            self._fail(opened, "withdrawn", "nobody could be evicted in time", rest=False)
        return not opened.end

    async def _not_evicted(self, opened: OpenPlan, victim: str, no: ApiRejected) -> None:
        """Gone by itself; or refused, by a budget or another rule. If nobody has gone yet, let it be."""
        if no.status == 0:
            raise no
        name = opened.left.get(victim, "")
        if no.status in (404, 409):  # 409: replaced by another of the same name
            opened.left.pop(victim, None)
            self._victim_selector.asked_to_go.add(victim)  # until our watch shows it
        elif opened.evicted:
            if opened.blocked != str(no):
                opened.blocked = str(no)
                await self.note(opened.pod, "PreemptionBlocked", f"{name} cannot be evicted yet: {no}")
            raise no
        else:
            self._victim_selector.unwilling[victim] = self._clock() + (REST if no.status == 429 else LONGEST_REST)
            self._fail(opened, "withdrawn", f"{name} may not be evicted: {no}")
            await self._clean_up(opened)

    # ---- endings ----------------------------------------------------------------------------------------------------

    def _fail(self, opened: OpenPlan, end: str, why: str, *, rest: bool = True) -> None:
        """It came to nothing: give the room back at once; what is still on the pod is taken off by `_clean_up`."""
        opened.end, opened.blocked = end, why
        self._give_back(opened.pod.uid)
        if rest:
            failures = self._rests[opened.pod.uid].failures if opened.pod.uid in self._rests else 0
            wait = min(REST * 2 ** min(failures, 10), LONGEST_REST)
            self._rests[opened.pod.uid] = PlanBackoff(self._clock() + wait, failures + 1)

    async def _clean_up(self, opened: OpenPlan) -> None:
        if not self._is_open(opened):
            return
        await self._patch(
            opened.pod, None, ""
        )  # even if not announced for all we know: that answer may be what got lost
        if self._is_open(opened):
            self._close(opened, opened.end)
            await self.note(
                opened.pod, "NominationExpired" if opened.end == "expired" else "PreemptionBlocked", opened.blocked
            )

    def _close(self, opened: OpenPlan, end: str) -> None:
        del self._open[opened.pod.uid]
        self._metrics.preemptions.labels(end).inc()
        if end == "withdrawn":
            self._give_back(opened.pod.uid)

    def _give_back(self, uid: str) -> None:
        self._on_freed(self._ledger.handle(Withdrawn(uid)))

    # ---- writing ----------------------------------------------------------------------------------------------------

    def _must_lead(self) -> None:
        if not self._leads():
            raise ApiRejected(0, "NotLeading", "this replica leads no more")

    async def _patch(self, pod: Pod, nomination: str | None, node: str) -> None:
        self._must_lead()
        await self._api.patch_pod(
            pod.namespace, pod.name, pod.uid, {PROMISE: nomination}, {}, nominate=node, timeout=self._attempt
        )

    async def note(self, pod: Pod, reason: str, message: str, *, warn: bool = True) -> None:
        made = KubeEvent(namespace=pod.namespace, pod=pod.name, uid=pod.uid, reason=reason, message=message)
        await self._say(made if warn else msgspec.structs.replace(made, kind="Normal"))

    async def _say(self, note: KubeEvent) -> None:
        """An event that cannot be written is no reason to stop half-way."""
        if not self._leads():
            return
        try:
            await self._api.note(note)
        except (ApiRejected, OutcomeUnknown) as wrong:
            log.warning("a pod could not be told", extra=fields(pod=f"{note.namespace}/{note.pod}", why=str(wrong)))
