"""Watches the two quota ConfigMaps (gputile's and gpu-admission's) and sets the quotas of the ledger when they change.

Every replica watches; only the leader writes Events and annotations. `QuotaWatcher.known` is set once it is known
whether there are quotas at all.

An invalid ConfigMap (a mistake in an edit) changes nothing: the last valid quotas stay in force, an Event on the
ConfigMap gives the error, and `gputile_quota_invalid` is 1. The leader keeps the last valid text in an annotation of
the ConfigMap, so that a process that starts after the mistake knows it too. Deleting a ConfigMap removes its quotas.
Where both ConfigMaps name a namespace, gputile's counts.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

import msgspec

from gputile.background.failure_isolation import FailureIsolation
from gputile.kube.api import Api, ApiRejected, KubeEvent, OutcomeUnknown, Undecodable, WatchFailed
from gputile.kube.informer import Informer, one_object
from gputile.kube.quota_config_maps import LAST_GOOD, QuotaConfigMap, read_quotas
from gputile.ledger.events import Instruction, QuotasSet
from gputile.ledger.ledger import Ledger
from gputile.model.errors import InputError
from gputile.quota.documents import OLD_KEY, OUR_KEY, merged
from gputile.quota.limits import Quotas
from gputile.telemetry.logs import fields
from gputile.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

ROUND = 1.0  # seconds between two rounds of writing Events and annotations
LONGEST = 60_000  # characters kept in an annotation; all of an object may have 256 KiB, and kubectl keeps a copy too
REASON = "QuotaInvalid"
LOOP = "quotas"  # in logs and metrics
MAX_FORBIDDEN = 3  # times in a row, over two seconds: an API server that just started forbids all until it has RBAC
REPEAT = 30 * 60.0  # seconds after which the same Event is written again, because Events are kept for one hour


class QuotaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the quota ConfigMaps are."""

    namespace: str = "kube-system"
    """Namespace of the quota ConfigMaps."""

    name: str = "gputile-quota"
    """ConfigMap with the key `quota.yaml`: see docs/quota.md. Empty: not read."""

    old_name: str = "gpuquota"
    """ConfigMap of gpu-admission, with the key `gpu_quota`. Empty: not read."""


class QuotaSource(msgspec.Struct):
    """One quota ConfigMap: the quotas in force, and the state of its last edit."""

    namespace: str
    name: str
    key: str
    good: Quotas = msgspec.field(default_factory=dict)
    known: bool = False
    forbidden: int = 0  # how often in a row the API server forbade to read it
    last: QuotaConfigMap | None = None
    text: str | None = None  # the source of `good`
    error: str = ""  # why its present text is invalid
    reported: str = ""  # the error of the last Event
    reported_at: float = 0.0
    keep_at: float = 0.0  # when the last valid text may be written to the ConfigMap, if it is missing there

    @property
    def title(self) -> str:
        return f"{self.namespace}/{self.name}"

    def read(self, text: str | None) -> Quotas:
        return read_quotas(text, self.key, f"ConfigMap {self.title}")


class QuotaWatcher:
    """Follows both quota ConfigMaps, keeps their last valid quotas in force, and reports invalid ones."""

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
        self._leads, self._clock, self._apply, self._pause = leads, clock, apply, pause
        config_maps = ((settings.name, OUR_KEY), (settings.old_name, OLD_KEY))
        self.sources = [QuotaSource(settings.namespace, name, key) for name, key in config_maps if name]
        self.known = asyncio.Event()
        if not self.sources:
            self.known.set()

    async def run(self) -> None:
        """A failure of one ConfigMap does not affect the other."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._isolation.keep_running(LOOP, self._report_loop, self._pause))
            for source in self.sources:
                watch = partial(self._watch, source)
                tasks.create_task(self._isolation.keep_running(f"{LOOP} {source.title}", watch, self._pause))

    # ---- watching ---------------------------------------------------------------------------------------------------

    async def _watch(self, source: QuotaSource) -> None:
        informer = Informer(
            partial(self._api.follow_config_map, source.namespace, source.name),
            *one_object(partial(self._update, source)),
            on_failure=partial(self._watch_failed, source),
            on_undecodable=partial(self._undecodable, source),
            isolate=lambda work: self._isolation.attempt(LOOP, source.title, work, always=True),
            message="watch of the quota ConfigMap failed; reconnecting",
            log_fields={"quota": source.title},
        )
        await informer.run()

    def _watch_failed(self, source: QuotaSource, failed: WatchFailed) -> None:
        self._metrics.watch_failures.labels("configmaps").inc()
        source.forbidden = source.forbidden + 1 if failed.forbidden else 0
        if source.forbidden >= MAX_FORBIDDEN:  # installed without this right: quotas are not wanted
            self._mark_known(source)

    def _undecodable(self, source: QuotaSource, undecodable: Undecodable) -> None:
        source.last = None
        why = f"undecodable, `data` must map keys to text: {undecodable.why}"
        self._reject(source, f"ConfigMap {source.title}: {why}")

    async def _update(self, source: QuotaSource, config_map: QuotaConfigMap | None) -> None:
        before, source.last = source.last, config_map
        same = before is not None and config_map is not None and before.text(source.key) == config_map.text(source.key)
        if source.known and (same or before is config_map):
            return  # only its labels or annotations changed, or a list shows nothing new
        source.keep_at = 0.0
        if config_map is None:
            self._accept(source, {}, None)
            return
        text = config_map.text(source.key)
        try:
            # In a thread: YAML of a thousand namespaces takes a tenth of a second, and extender calls must not wait.
            quotas = await asyncio.to_thread(source.read, text)
        except InputError as error:
            await self._restore(source, config_map)
            self._reject(source, str(error))
            return
        self._accept(source, quotas, text)

    async def _restore(self, source: QuotaSource, config_map: QuotaConfigMap) -> None:
        """This process has seen no valid text yet; another one may have kept it in the annotation."""
        if source.text is not None or config_map.last_good is None:
            return
        try:
            quotas = await asyncio.to_thread(source.read, config_map.last_good)
            self._put_in_force(source, quotas, config_map.last_good)
        except InputError as error:
            log.warning("the last valid quota in the annotation is invalid too", extra=fields(why=str(error)))

    def _accept(self, source: QuotaSource, quotas: Quotas, text: str | None) -> None:
        source.error = source.reported = ""
        self._metrics.quota_invalid.labels(source.title).set(0)
        if text != source.text:
            self._metrics.quota_edits.labels(source.title, "taken").inc()
            log.info("quotas updated", extra=fields(quota=source.title, namespaces=len(quotas)))
        self._put_in_force(source, quotas, text)
        self._mark_known(source)

    def _reject(self, source: QuotaSource, why: str) -> None:
        source.error = why
        self._metrics.quota_invalid.labels(source.title).set(1)
        self._metrics.quota_edits.labels(source.title, "refused").inc()
        log.error("invalid quota ConfigMap; the previous quotas stay in force", extra=fields(why=why))
        self._mark_known(source)

    def _put_in_force(self, source: QuotaSource, quotas: Quotas, text: str | None) -> None:
        changed = quotas != source.good
        source.good, source.text = quotas, text
        if not changed:
            return
        by_key = {source.key: source.good for source in self.sources}
        merged_quotas = merged(by_key.get(OUR_KEY, {}), by_key.get(OLD_KEY, {}))
        self._apply(self._ledger.handle(QuotasSet(merged_quotas)))

    def _mark_known(self, source: QuotaSource) -> None:
        source.known = True
        if all(source.known for source in self.sources):
            self.known.set()

    # ---- reporting --------------------------------------------------------------------------------------------------

    async def _report_loop(self) -> None:
        while True:
            await self.report()
            await self._pause(ROUND)

    async def report(self) -> None:
        """On the leader: annotate each ConfigMap with its last valid text, and write Events on invalid ones."""
        for source in self.sources if self._leads() else ():
            await self._isolation.attempt(f"{LOOP} events", source.title, partial(self._report_source, source))

    async def _report_source(self, source: QuotaSource) -> None:
        try:
            await self._keep_last_good(source)
            await self._record_event(source)
        except (ApiRejected, OutcomeUnknown) as error:
            log.warning(
                "the quota ConfigMap could not be annotated, or its event not written",
                extra=fields(quota=source.title, why=str(error)),
            )

    async def _keep_last_good(self, source: QuotaSource) -> None:
        config_map, text = source.last, source.text
        if config_map is None or text is None or config_map.last_good == text or len(text) > LONGEST:
            return
        if self._clock() >= source.keep_at:
            source.keep_at = self._clock() + REPEAT  # the watch will show it; do not fight a client that removes it
            uid = config_map.metadata.uid
            await self._api.annotate_config_map(source.namespace, source.name, uid, {LAST_GOOD: text})

    async def _record_event(self, source: QuotaSource) -> None:
        is_old = self._clock() > source.reported_at + REPEAT
        if source.error and source.last is not None and (source.reported != source.error or is_old):
            kept = f"quotas of {len(source.good)} namespaces" if source.text is not None else "no quota"
            message = f"{source.error}. The previous content stays in force: {kept}."
            uid, name = source.last.metadata.uid, source.name
            event = KubeEvent(
                namespace=source.namespace, pod=name, uid=uid, about="ConfigMap", reason=REASON, message=message
            )
            await self._api.note(event)
            source.reported, source.reported_at = source.error, self._clock()
