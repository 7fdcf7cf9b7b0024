"""Quotas, followed live: two ConfigMaps, of each the last that could be read.

Room:  our ConfigMap and gpu-admission's, as values; the book is told when they change. Only the leader writes Events.
Door:  `QuotaWatcher.run`, until it is cancelled; `QuotaWatcher.known` is set once we know whether there are quotas at
       all.

A ConfigMap that cannot be used (a slip in an edit) changes nothing: the last good one stays in force, an Event on the
ConfigMap says what is wrong, and `gputile_quota_invalid` shows it. So that a process that starts after the slip knows
the last good one too, the leader keeps it in an annotation of the ConfigMap. One that is deleted is a quota less. Where
both name a namespace, ours counts.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

import msgspec

from gputile.background.failure_isolation import FailureIsolation
from gputile.kube.api import (
    Api,
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
from gputile.kube.quota_config_maps import LAST_GOOD, QuotaConfigMap, read_quotas
from gputile.ledger.events import Instruction, QuotasSet
from gputile.ledger.ledger import Ledger
from gputile.model.errors import InputError
from gputile.model.quotas import Quotas
from gputile.quota.documents import OLD_KEY, OUR_KEY, merged
from gputile.telemetry.logs import fields
from gputile.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

ROUND = 1.0  # seconds between two looks at what is to be told
LONGEST = 60_000  # characters of it in an annotation, of which all together may have 256 KiB; kubectl keeps a copy too
REASON = "QuotaInvalid"
LOOP = "quotas"  # in logs and metrics
BELIEVED = 3  # times, over some two seconds: an API server that has just started knows no rights yet, and forbids all
REPEAT = 30 * 60.0  # seconds after which the same is said again, for Events are kept for an hour only


class QuotaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    namespace: str = "kube-system"
    """Where the ConfigMaps are."""

    name: str = "gputile-quota"
    """The ConfigMap with the key `quota.yaml`: see docs/quota.md. Empty: none is read."""

    old_name: str = "gpuquota"
    """The ConfigMap of gpu-admission, with the key `gpu_quota`. Empty: none is read."""


class QuotaSource(msgspec.Struct):
    """One ConfigMap, and what we think of it."""

    namespace: str
    name: str
    key: str
    good: Quotas = msgspec.field(default_factory=dict)
    known: bool = False
    trouble: str = ""  # why it could not be followed, as last logged
    noes: int = 0  # how often in a row we were told that we may not read it
    last: QuotaConfigMap | None = None
    text: str | None = None  # that `good` was read from
    broken: str = ""  # why what is there now cannot be used
    told: str = ""
    told_at: float = 0.0
    keep_at: float = 0.0  # when the last good text may be written to the ConfigMap, if it is not there

    @property
    def title(self) -> str:
        return f"{self.namespace}/{self.name}"

    def read(self, text: str | None) -> Quotas:
        return read_quotas(text, self.key, f"ConfigMap {self.title}")


class QuotaWatcher:
    """See the module's text."""

    def __init__(
        self,
        api: Api,
        ledger: Ledger,
        settings: QuotaSettings,
        metrics: Metrics,
        *,
        leads: Callable[[], bool],
        clock: Callable[[], float],
        apply: Callable[[Iterable[Instruction]], None],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        isolation: FailureIsolation | None = None,
    ) -> None:
        self._isolation = isolation or FailureIsolation(metrics, clock)
        self._api, self._ledger, self._metrics = api, ledger, metrics
        self._leads, self._clock, self._carry_out, self._pause = leads, clock, apply, pause
        named = ((settings.name, OUR_KEY), (settings.old_name, OLD_KEY))
        self.sources = [QuotaSource(settings.namespace, name, key) for name, key in named if name]
        self.known = asyncio.Event()
        if not self.sources:
            self.known.set()

    async def run(self) -> None:
        """Each by itself: one ConfigMap that makes trouble stands in nobody's way."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._isolation.keep_running(LOOP, self._tell_for_ever, self._pause))
            for source in self.sources:
                follow = partial(self._follow, source)
                tasks.create_task(self._isolation.keep_running(f"{LOOP} {source.title}", follow, self._pause))

    # ---- following --------------------------------------------------------------------------------------------------

    async def _follow(self, source: QuotaSource) -> None:
        async for seen in self._api.follow_config_map(source.namespace, source.name):
            await self._isolation.attempt(LOOP, source.title, partial(self._heard, source, seen), always=True)

    async def _heard(self, source: QuotaSource, seen: WatchUpdate[QuotaConfigMap]) -> None:
        match seen:
            case WatchFailed(why, forbidden):
                self._metrics.troubles.labels("configmaps").inc()
                if why != source.trouble:
                    source.trouble = why
                    log.warning("a quota cannot be followed; trying again", extra=fields(quota=source.title, why=why))
                source.noes = source.noes + 1 if forbidden else 0
                if source.noes >= BELIEVED:  # whoever installed us without this right wants no quota
                    self._is_known(source)
            case Undecodable(_, why):
                source.last = None
                self._refuse(source, f"ConfigMap {source.title}: {why}")
            case Snapshot(items):
                await self._take(source, items[0] if items else None)
            case Change(how, item):
                await self._take(source, None if how == "DELETED" else item)
            case Bookmark():
                pass

    async def _take(self, source: QuotaSource, found: QuotaConfigMap | None) -> None:
        before, source.last = source.last, found
        same = before is not None and found is not None and before.text(source.key) == found.text(source.key)
        if source.known and (same or before is found):
            return  # only its labels or annotations, or a list that shows nothing new
        source.keep_at = 0.0
        if found is None:
            self._accept(source, {}, None)
            return
        text = found.text(source.key)
        try:
            # In a thread: YAML of a thousand namespaces takes a tenth of a second, and the verbs should not wait.
            read = await asyncio.to_thread(source.read, text)
        except InputError as wrong:
            await self._restore(source, found)
            self._refuse(source, str(wrong))
            return
        self._accept(source, read, text)

    async def _restore(self, source: QuotaSource, found: QuotaConfigMap) -> None:
        """We have never seen a good one; another process may have."""
        if source.text is not None or found.last_good is None:
            return
        try:
            self._put_in_force(source, await asyncio.to_thread(source.read, found.last_good), found.last_good)
        except InputError as wrong:
            log.warning("the last good quota cannot be read either", extra=fields(why=str(wrong)))

    def _accept(self, source: QuotaSource, read: Quotas, text: str | None) -> None:
        source.broken = source.told = ""
        self._metrics.quota_broken.labels(source.title).set(0)
        if text != source.text:
            self._metrics.quota_edits.labels(source.title, "taken").inc()
            log.info("quotas taken", extra=fields(quota=source.title, namespaces=len(read)))
        self._put_in_force(source, read, text)
        self._is_known(source)

    def _refuse(self, source: QuotaSource, why: str) -> None:
        source.broken = why
        self._metrics.quota_broken.labels(source.title).set(1)
        self._metrics.quota_edits.labels(source.title, "refused").inc()
        log.error("a quota cannot be used; what it said before stays in force", extra=fields(why=why))
        self._is_known(source)

    def _put_in_force(self, source: QuotaSource, read: Quotas, text: str | None) -> None:
        changed = read != source.good
        source.good, source.text = read, text
        if not changed:
            return
        by_key = {source.key: source.good for source in self.sources}
        quotas = merged(by_key.get(OUR_KEY, {}), by_key.get(OLD_KEY, {}))
        self._carry_out(self._ledger.handle(QuotasSet(quotas)))

    def _is_known(self, source: QuotaSource) -> None:
        source.known = True
        if all(one.known for one in self.sources):
            self.known.set()

    # ---- telling ----------------------------------------------------------------------------------------------------

    async def _tell_for_ever(self) -> None:
        while True:
            await self.tell()
            await self._pause(ROUND)

    async def tell(self) -> None:
        """By the leader: what was understood last is kept on each ConfigMap, and one that cannot be used is told so."""
        for source in self.sources if self._leads() else ():
            await self._isolation.attempt(f"{LOOP} events", source.title, partial(self._tell_one, source))

    async def _tell_one(self, source: QuotaSource) -> None:
        try:
            await self._keep(source)
            await self._complain(source)
        except (ApiRejected, OutcomeUnknown) as wrong:
            log.warning("a quota could not be told", extra=fields(quota=source.title, why=str(wrong)))

    async def _keep(self, source: QuotaSource) -> None:
        found, text = source.last, source.text
        if found is None or text is None or found.last_good == text or len(text) > LONGEST:
            return
        if self._clock() >= source.keep_at:
            source.keep_at = self._clock() + REPEAT  # the watch will show it; one who keeps taking it off is let be
            await self._api.annotate_config_map(source.namespace, source.name, found.metadata.uid, {LAST_GOOD: text})

    async def _complain(self, source: QuotaSource) -> None:
        is_old = self._clock() > source.told_at + REPEAT
        if source.broken and source.last is not None and (source.told != source.broken or is_old):
            kept = f"quotas of {len(source.good)} namespaces" if source.text is not None else "no quota"
            said = f"{source.broken}. What it said before stays in force: {kept}."
            uid, name = source.last.metadata.uid, source.name
            note = KubeEvent(
                namespace=source.namespace, pod=name, uid=uid, about="ConfigMap", reason=REASON, message=said
            )
            await self._api.note(note)
            source.told, source.told_at = source.broken, self._clock()
