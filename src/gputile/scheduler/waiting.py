"""Pods that wait: told why, and tried again when they fit.

Room:  the pods that filter refused, what was said about each, and when. Beside the verbs, never in their way.
Door:  `Teller.refused` takes a no; `Teller.run` tells and nudges until it is cancelled.

kube-scheduler shows the short reasons; the figures and what would help come from here, as one Event per pod, few per
second. kube-scheduler tries a refused pod again on any change of the cluster. It can be quicker than our own watch, be
told no from a book that is a moment old, and then hear of nothing more: such a pod is nudged, by touching it. So may a
pod be that another replica refused before we led.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable

import msgspec

from gputile.book.events import Promised
from gputile.book.holders import Holders
from gputile.book.ledger import Ledger
from gputile.dialects.gputile import NUDGED
from gputile.dialects.wire import Pod
from gputile.engine.explaining import explain
from gputile.kube.values import Api, Note, Refused, Unclear
from gputile.model.refusals import BadRequest
from gputile.model.requests import PodRequest
from gputile.scheduler.mirror import Mirror
from gputile.scheduler.settings import Settings
from gputile.scheduler.verbs import No
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
NEVER = -math.inf


class Story(msgspec.Struct):
    """One waiting pod."""

    pod: Pod
    asked: PodRequest | BadRequest
    refused_at: float
    gains: int  # how often room had appeared when it was refused
    is_hearsay: bool = False  # another replica may have refused it; we were never asked
    looked_at: float = NEVER
    told_at: float = NEVER
    told: str = ""
    nudged_at: float = NEVER
    was_nudged: bool = False  # and the API server took it


class Teller:
    """See the module's text."""

    def __init__(
        self,
        api: Api,
        mirror: Mirror,
        settings: Settings,
        metrics: Metrics,
        *,
        leads: Callable[[], bool],
        clock: Callable[[], float],
        wall: Callable[[], int],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._api, self._mirror, self._settings, self._metrics = api, mirror, settings.tell, metrics
        self._patience = settings.bind.attempt
        self._leads, self._clock, self._wall, self._pause = leads, clock, wall, pause
        self._stories: dict[str, Story] = {}
        self._openings = 0
        self._led = False
        self._allowance = self._settings.per_second
        self._allowed_at = clock()
        self._quiet_until = 0.0

    def refused(self, no: No) -> None:
        """A pod fitted nowhere. Called on the hot path: only takes note."""
        uid = no.pod.uid
        if uid not in self._mirror.waiting:
            return  # a stranger; nobody reads its events
        story = self._stories.get(uid)
        if story is None:
            self._stories[uid] = Story(no.pod, no.asked, self._clock(), self._gains())
        else:
            story.asked, story.refused_at, story.gains = no.asked, self._clock(), self._gains()
            story.is_hearsay = False

    def room_appeared(self) -> None:
        """Somewhere; it also comes by what the book's cards do not show: an agent is idle again, a quota was raised."""
        self._openings += 1

    def _gains(self) -> int:
        """How often room has appeared. The book counts it itself, however it came about."""
        return self._openings + self._mirror.ledger.gains()

    async def run(self) -> None:
        while True:
            try:
                await self.round()
            except (Refused, Unclear) as wrong:
                log.warning("a waiting pod could not be told", extra=fields(why=str(wrong)))
            await self._pause(ROUND)

    async def round(self) -> None:
        for uid in [uid for uid in self._stories if uid not in self._mirror.waiting]:
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
        for uid, waiting in self._mirror.waiting.items():
            self._stories.setdefault(uid, Story(waiting.pod, waiting.asked, tried, -1, is_hearsay=True))

    # ---- telling ----------------------------------------------------------------------------------------------------

    async def _tell(self) -> None:
        now = self._clock()
        earned = (now - self._allowed_at) * self._settings.per_second
        self._allowance, self._allowed_at = min(self._settings.per_second, self._allowance + earned), now
        known: dict[tuple[str, PodRequest | BadRequest], str] = {}  # equal pods wait for equal reasons
        quotas = self._mirror.ledger.spending.quotas
        for uid, story in list(self._stories.items()):
            if self._allowance < 1.0:
                return
            if story.is_hearsay or now - story.looked_at < self._settings.every:
                continue
            promised = self._mirror.ledger.promise(uid)
            namespace = story.pod.namespace if quotas else ""
            if promised is None and (namespace, story.asked) not in known:
                if now < self._quiet_until:
                    return
                known[namespace, story.asked] = reason(story.asked, self._mirror.ledger, namespace)
                self._quiet_until = now + (self._clock() - now) / SHARE
            said = known[namespace, story.asked] if promised is None else _being_made(promised)
            story.looked_at = now
            if said and (said != story.told or now - story.told_at > REPEAT) and self._leads():
                self._allowance -= 1.0
                await self._api.note(_note(uid, story.pod, said))
                story.told, story.told_at = said, now
                log.info("waits", extra=fields(pod=story.pod.key, why=said))

    # ---- nudging ----------------------------------------------------------------------------------------------------

    async def _nudge(self) -> None:
        """Touch pods that were refused before room appeared, that fit now, and that nobody tried since."""
        now, gains = self._clock(), self._gains()
        late = [
            (uid, story)
            for uid, story in self._stories.items()
            if story.gains < gains and now - story.refused_at > PATIENCE and now - story.nudged_at > _rest(story)
        ]
        room: dict[PodRequest, int] = {}  # nodes that would take such a pod: no use in waking more than that at once
        woken: dict[PodRequest, int] = {}
        for uid, story in late:
            if not isinstance(story.asked, PodRequest) or self._mirror.ledger.entry(uid) is not None:
                continue
            may = self._mirror.ledger.spending.allowed(story.pod.namespace, story.asked)
            if self._mirror.ledger.promise(uid) is not None:
                fits = self._fits_where_promised(uid, story)
            elif may not in room:
                fits = room[may] = min(NUDGES, int(self._mirror.ledger.fleet.fits(may).sum()))
            else:
                fits = room[may]
            if fits == 0:
                story.gains = self._gains()  # looked at; wait for the next gain
                continue
            if woken.get(may, 0) >= fits:
                continue  # enough for this round
            if not self._leads():
                return
            woken[may] = woken.get(may, 0) + 1
            story.nudged_at = now
            self._metrics.nudges.inc()
            key, touch = story.pod, {NUDGED: str(self._wall())}
            await self._api.patch_pod(key.namespace, key.name, uid, {**touch}, {}, timeout=self._patience)
            story.was_nudged = True

    def _fits_where_promised(self, uid: str, story: Story) -> int:
        """Its own promise must not stand in its way."""
        assert isinstance(story.asked, PodRequest)
        with self._mirror.ledger.aside(uid, story.pod.priority) as fleet:
            return int(fleet.fits(self._mirror.ledger.spending.allowed(story.pod.namespace, story.asked)).sum())


def _rest(story: Story) -> float:
    """Once is enough for a pod that we only heard of: another scheduler may have it, or nobody may schedule it yet."""
    return math.inf if story.is_hearsay and story.was_nudged else REST


def reason(asked: PodRequest | BadRequest, ledger: Ledger, namespace: str = "") -> str:
    """Why a pod (of this namespace, if it may have a quota) waits and what would help, as one text; "" when it fits."""
    if isinstance(asked, BadRequest):
        return asked.message
    spending = ledger.spending
    purse = spending.purse(namespace, asked)
    found = explain(
        purse(()),
        ledger.fleet,
        Holders(ledger),
        LOOK_AT,
        after=lambda gone: purse([one.pod for one in gone]),
        allow=lambda changed: spending.allowed(namespace, changed.allowed(None)),
    )
    if found.fitting:
        return ""
    quota = spending.objections(namespace, asked)
    first, *rest = (line.strip() for line in (*found.lines(), *quota, *_kept(ledger)))
    return f"{first} {'; '.join(rest)}".strip()


def _kept(ledger: Ledger) -> list[str]:
    """Room that looks free to a person and is not: it is kept for those for whom others were evicted."""
    kept = [promised.holding for promised in ledger.promises() if ledger.entry(promised.holding.pod) is None]
    more = f" and for {len(kept) - 1} more pods" if len(kept) > 1 else ""
    return [f"room on node {kept[0].node} is kept for {kept[0].name}{more}"] if kept else []


def _being_made(promised: Promised) -> str:
    return f"room is being made for it on node {promised.holding.node}: less important pods are leaving"


def _note(uid: str, pod: Pod, message: str) -> Note:
    return Note(namespace=pod.namespace, pod=pod.name, uid=uid, reason="NoFittingGPU", message=message)
