"""Pods that wait: told why, and tried again when they fit.

Room:  the pods that filter refused, what was said about each, and when. Beside the verbs, never in their way.
Door:  `PendingPods.refused` takes a no; `PendingPods.run` tells and nudges until it is cancelled.

kube-scheduler shows the short reasons; the figures and what would help come from here, as one Event per pod, few per
second. kube-scheduler tries a refused pod again on any change of the cluster. It can be quicker than our own watch, be
told no from a book that is a moment old, and then hear of nothing more: such a pod is nudged, by touching it. So may a
pod be that another replica refused before we led.
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
from gputile.background.time_slices import SearchLane, TimeSlices
from gputile.dialects.gputile import NUDGED
from gputile.dialects.kube_objects import Pod
from gputile.engine.cooperative import Cooperative, run_to_end
from gputile.engine.explanation import explain_cooperatively
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
PATIENCE = 0.5  # seconds that kube-scheduler has to try by itself
REST = 5.0  # seconds between two nudges of one pod
SETTLE = 15.0  # seconds that kube-scheduler has to try all that waited already when we came to lead
REPEAT = 30 * 60.0  # seconds after which the same is said again, for Events are kept for an hour only
NUDGES = 20  # per round and kind of pod
LOOK_AT = 100  # nodes whose misses are looked at closely; looking at thousands would hold up the verbs
SHARE = 0.05  # of the time that may be spent on explanations
STEPS, SECONDS = 20_000, 1.0  # of searching for one explanation
FIT_STEPS, FIT_SECONDS = 2000, 0.01  # of searching for whether a pod fits by now
NEVER = -math.inf
LOOP = "pending pods"  # in logs and metrics


class RoundOutcome(Enum):
    """What becomes of a round after one pod."""

    GOES_ON = 1
    OVER = 2


Reasons = dict[tuple[str, PodRequest | BadRequest], str]
"""By namespace and request, in one round: equal pods wait for equal reasons."""


class PendingPod(msgspec.Struct):
    """One waiting pod."""

    pod: Pod
    asked: PodRequest | BadRequest
    refused_at: float
    capacity_generation: int  # how often room had appeared when it was refused
    is_hearsay: bool = False  # another replica may have refused it; we were never asked
    looked_at: float = NEVER
    told_at: float = NEVER
    told: str = ""
    nudged_at: float = NEVER
    was_nudged: bool = False  # and the API server took it


class PendingPods:
    """See the module's text."""

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
        self._patience = settings.bind.attempt
        self._leads, self._clock, self._wall, self._pause = leads, clock, wall, pause
        self._stories: dict[str, PendingPod] = {}
        self._openings = 0
        self._led = False
        self._allowance = self._settings.per_second
        self._allowed_at = clock()
        self._quiet_until = 0.0

    def refused(self, no: UnschedulablePod) -> None:
        """A pod fitted nowhere. Called on the hot path: only takes note."""
        uid = no.pod.uid
        if uid not in self._cluster_state.pending:
            return  # a stranger; nobody reads its events
        story = self._stories.get(uid)
        if story is None:
            self._stories[uid] = PendingPod(no.pod, no.request, self._clock(), self._capacity_generation())
        else:
            story.asked, story.refused_at, story.capacity_generation = (
                no.request,
                self._clock(),
                self._capacity_generation(),
            )
            story.is_hearsay = False

    def room_appeared(self) -> None:
        """Somewhere; it also comes by what the book's cards do not show: an agent is idle again, a quota was raised."""
        self._openings += 1

    def _capacity_generation(self) -> int:
        """How often room has appeared. The book counts it itself, however it came about."""
        return self._openings + self._cluster_state.ledger.capacity_generation()

    async def run(self) -> None:
        while True:
            await self._isolation.attempt(LOOP, "", self._try_round, always=True)
            await self._pause(ROUND)

    async def _try_round(self) -> None:
        try:
            await self.round()
        except (ApiRejected, OutcomeUnknown) as wrong:
            log.warning("a waiting pod could not be told", extra=fields(why=str(wrong)))

    async def round(self) -> None:
        for uid in [uid for uid in self._stories if uid not in self._cluster_state.pending]:
            del self._stories[uid]
        led, self._led = self._led, self._leads()
        if not self._led:
            return
        if not led:
            self._inherit()
        if self._settings.nudge:
            await self._nudge()
        await self._tell()

    def _inherit(self) -> None:
        """Who led before us has refused pods too, and kube-scheduler may never ask about them again by itself."""
        tried = self._clock() + SETTLE
        for uid, waiting in self._cluster_state.pending.items():
            self._stories.setdefault(uid, PendingPod(waiting.pod, waiting.request, tried, -1, is_hearsay=True))

    # ---- telling ----------------------------------------------------------------------------------------------------

    async def _tell(self) -> None:
        now = self._clock()
        earned = (now - self._allowed_at) * self._settings.per_second
        self._allowance, self._allowed_at = min(self._settings.per_second, self._allowance + earned), now
        known: Reasons = {}
        for uid, story in list(self._stories.items()):
            if self._allowance < 1.0:
                return
            if not story.is_hearsay and now - story.looked_at >= self._settings.every:
                work = partial(self._tell_one, uid, story, known)
                if await self._isolation.attempt(LOOP, story.pod.key, work, story.pod) is RoundOutcome.OVER:
                    return

    async def _tell_one(self, uid: str, story: PendingPod, known: Reasons) -> RoundOutcome:
        now, nominated = self._allowed_at, self._cluster_state.ledger.nomination(uid)
        namespace = story.pod.namespace if self._cluster_state.ledger.quota_usage.quotas else ""
        if nominated is None and (namespace, story.asked) not in known:
            if now < self._quiet_until:
                return RoundOutcome.OVER
            began = self._clock()
            known[namespace, story.asked] = await self._reason(story.asked, namespace)
            self._quiet_until = now + (self._clock() - began) / SHARE
        said = known[namespace, story.asked] if nominated is None else _being_made(nominated)
        story.looked_at = now
        if said and (said != story.told or now - story.told_at > REPEAT) and self._leads():
            self._allowance -= 1.0
            await self._api.note(_note(uid, story.pod, said))
            story.told, story.told_at = said, now
            log.info("waits", extra=fields(pod=story.pod.key, why=said))
        return RoundOutcome.GOES_ON

    async def _reason(self, asked: PodRequest | BadRequest, namespace: str) -> str:
        budget = SearchBudget(STEPS, SECONDS, self._clock)
        said = reason_in_turns(asked, self._cluster_state.ledger, namespace, budget)
        found = await TimeSlices(self._clock, self._pause, self._lane).run(said)
        if budget.ran_out:
            self._metrics.cut_short.labels("explanation").inc()
        return found

    # ---- nudging ----------------------------------------------------------------------------------------------------

    async def _nudge(self) -> None:
        """Touch pods that were refused before room appeared, that fit now, and that nobody tried since."""
        now, capacity_generation = self._clock(), self._capacity_generation()
        late = [
            (uid, story)
            for uid, story in self._stories.items()
            if story.capacity_generation < capacity_generation
            and now - story.refused_at > PATIENCE
            and now - story.nudged_at > _rest(story)
        ]
        room: dict[PodRequest, int] = {}  # nodes that would take such a pod: no use in waking more than that at once
        woken: Counter[PodRequest] = Counter()
        slices = TimeSlices(self._clock, self._pause, self._lane)
        for uid, story in late:
            await slices.turn()
            work = partial(self._nudge_one, uid, story, room, woken)
            if await self._isolation.attempt(LOOP, story.pod.key, work, story.pod) is RoundOutcome.OVER:
                return

    async def _nudge_one(
        self, uid: str, story: PendingPod, room: dict[PodRequest, int], woken: Counter[PodRequest]
    ) -> RoundOutcome:
        if not isinstance(story.asked, PodRequest) or self._cluster_state.ledger.entry(uid) is not None:
            return RoundOutcome.GOES_ON
        may = self._cluster_state.ledger.quota_usage.allowed(story.pod.namespace, story.asked)
        if self._cluster_state.ledger.nomination(uid) is not None:
            fits = self._fits_where_nominated(uid, story)
        elif may not in room:
            fits = room[may] = min(NUDGES, int(self._cluster_state.ledger.fleet.fits(may, self._budget()).sum()))
        else:
            fits = room[may]
        if fits == 0:
            story.capacity_generation = self._capacity_generation()  # looked at; wait for the next gain
            return RoundOutcome.GOES_ON
        if woken[may] >= fits:
            return RoundOutcome.GOES_ON  # enough for this round
        if not self._leads():
            return RoundOutcome.OVER
        woken[may] += 1
        story.nudged_at = self._clock()
        self._metrics.nudges.inc()
        key, touch = story.pod, {NUDGED: str(self._wall())}
        await self._api.patch_pod(key.namespace, key.name, uid, {**touch}, {}, timeout=self._patience)
        story.was_nudged = True
        return RoundOutcome.GOES_ON

    def _budget(self) -> SearchBudget:
        return SearchBudget(FIT_STEPS, FIT_SECONDS, self._clock)

    def _fits_where_nominated(self, uid: str, story: PendingPod) -> int:
        """Its own promise must not stand in its way."""
        assert isinstance(story.asked, PodRequest)
        with self._cluster_state.ledger.without_claims_of(uid, story.pod.priority) as fleet:
            may = self._cluster_state.ledger.quota_usage.allowed(story.pod.namespace, story.asked)
            return int(fleet.fits(may, self._budget()).sum())


def _rest(story: PendingPod) -> float:
    """Once is enough for a pod that we only heard of: another scheduler may have it, or nobody may schedule it yet."""
    return math.inf if story.is_hearsay and story.was_nudged else REST


def reason(asked: PodRequest | BadRequest, ledger: Ledger, namespace: str = "") -> str:
    """Why a pod (of this namespace, if it may have a quota) waits and what would help, as one text; "" when it fits."""
    return run_to_end(reason_in_turns(asked, ledger, namespace))


def reason_in_turns(
    asked: PodRequest | BadRequest, ledger: Ledger, namespace: str = "", budget: SearchBudget | None = None
) -> Cooperative[str]:
    """The same for those who have other things to do in between."""
    if isinstance(asked, BadRequest):
        return asked.message
    quota_usage = ledger.quota_usage
    after_eviction = quota_usage.after_eviction(namespace, asked)
    found = yield from explain_cooperatively(
        after_eviction(()),
        ledger.fleet,
        NodeAllocations(ledger),
        LOOK_AT,
        after=lambda gone: after_eviction([one.pod for one in gone]),
        allow=lambda changed: quota_usage.allowed(namespace, changed.allowed(None)),
        budget=budget,
    )
    if found.fitting:
        return ""
    quota = quota_usage.objections(namespace, asked)
    first, *rest = (line.strip() for line in (*found.lines(), *quota, *_kept(ledger)))
    return f"{first} {'; '.join(rest)}".strip()


def _kept(ledger: Ledger) -> list[str]:
    """Room that looks free to a person and is not: it is kept for those for whom others were evicted."""
    kept = [
        nominated.allocation for nominated in ledger.nominations() if ledger.entry(nominated.allocation.pod) is None
    ]
    more = f" and for {len(kept) - 1} more pods" if len(kept) > 1 else ""
    return [f"room on node {kept[0].node} is kept for {kept[0].name}{more}"] if kept else []


def _being_made(nominated: Nominated) -> str:
    return f"room is being made for it on node {nominated.allocation.node}: less important pods are leaving"


def _note(uid: str, pod: Pod, message: str) -> KubeEvent:
    return KubeEvent(namespace=pod.namespace, pod=pod.name, uid=uid, reason="NoFittingGPU", message=message)
