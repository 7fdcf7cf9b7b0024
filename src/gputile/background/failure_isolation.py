"""Isolates failures: an unexpected error on one object affects no other object. Such errors are caught only here.

Every background loop does its work on one object (a pod, a node, a lease, a quota) through `FailureIsolation`. Expected
API errors (`ApiRejected`, `OutcomeUnknown`) are left to the loop. An unexpected error is logged with the object's name
and the traceback, counted, and reported by an Event if the object is a pod. The loop continues with the other objects
and retries that one with exponential backoff. A loop that fails as a whole is restarted.

Only `Exception` is caught, so cancellation and exit pass through. An unusable file or flag (`InputError`) ends the
process.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from gputile.dialects.kube_objects import Pod
from gputile.kube.api import Api, ApiRejected, KubeEvent, OutcomeUnknown
from gputile.model.errors import InputError
from gputile.telemetry.logs import fields
from gputile.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

BACKOFF, MAX_BACKOFF = 1.0, 300.0  # seconds until a failing object is retried; doubled each time
LOG_INTERVAL = 60.0  # seconds between two tracebacks about one object, and
TRACEBACKS = 20  # the most of all objects together in that time
MAX_EVENTS = 100  # waiting to be written; further ones are dropped
REPEAT = 30 * 60.0  # seconds after which the Event on a pod is written again, because Events are kept for one hour
FORGET = 3600.0  # seconds after its last failure, when an object is forgotten
MAX_OBJECTS = 10_000  # that are remembered
REASON = "InternalError"
Expected = tuple[type[Exception], ...]
EXPECTED: Expected = (ApiRejected, OutcomeUnknown)

T = TypeVar("T")


class FailingObject(msgspec.Struct):
    """The failures of one object in one loop."""

    failures: int = 0
    not_before: float = 0.0
    logged_at: float = -LOG_INTERVAL
    last: float = 0.0


class FailureIsolation:
    """Runs work on single objects so that an unexpected error stays with that object, and remembers failing ones."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._metrics, self._clock = metrics, clock
        self._failing: dict[tuple[str, str], FailingObject] = {}
        self._logged: list[float] = []  # when the last tracebacks were logged
        self._events: dict[str, KubeEvent] = {}  # by UID: to be written
        self._reported: dict[str, float] = {}  # by UID: when its last Event was made

    # ---- steps ------------------------------------------------------------------------------------------------------

    def is_backing_off(self, loop: str, name: str) -> bool:
        """Whether the object failed in this loop recently, and must not be retried yet."""
        failing = self._failing.get((loop, name))
        return failing is not None and self._clock() < failing.not_before

    def step(
        self, loop: str, name: str, work: Callable[[], T], about: Pod | None = None, expected: Expected = EXPECTED
    ) -> T | None:
        """Work on one object that cannot be skipped, such as applying an update of the watch. None: it failed."""
        try:
            result = work()
        except expected:
            raise
        except Exception as error:
            self._record_failure(loop, name, error, about)
            return None
        self._failing.pop((loop, name), None)
        return result

    async def attempt(
        self,
        loop: str,
        name: str,
        work: Callable[[], Awaitable[T]],
        about: Pod | None = None,
        *,
        always: bool = False,
        expected: Expected = EXPECTED,
    ) -> T | None:
        """Work on one object that is skipped during its backoff (unless `always`). None: it failed or was skipped."""
        if not always and self.is_backing_off(loop, name):
            return None
        try:
            result = await work()
        except expected:
            raise
        except Exception as error:
            self._record_failure(loop, name, error, about)
            return None
        self._failing.pop((loop, name), None)
        return result

    async def keep_running(
        self, loop: str, start: Callable[[], Awaitable[None]], pause: Callable[[float], Awaitable[None]]
    ) -> None:
        """Run an endless loop; restart it when it ends or fails. Ends only when cancelled, or with an `InputError`."""
        while True:
            try:
                await start()
                log.error("a background loop ended unexpectedly; restarting it", extra=fields(loop=loop))
            except InputError:
                raise
            except Exception as error:
                self._record_failure(loop, "", error, None)
            failing = self._failing.get((loop, ""))
            await pause(BACKOFF if failing is None else max(BACKOFF, failing.not_before - self._clock()))

    # ---- failures ---------------------------------------------------------------------------------------------------

    def _record_failure(self, loop: str, name: str, error: Exception, about: Pod | None) -> None:
        now = self._clock()
        if len(self._failing) >= MAX_OBJECTS:
            self._failing.clear()
        failing = self._failing.setdefault((loop, name), FailingObject())
        failing.failures, failing.last = failing.failures + 1, now
        failing.not_before = now + min(BACKOFF * 2 ** min(failing.failures - 1, 10), MAX_BACKOFF)
        self._metrics.failures.labels(loop).inc()
        self._log(loop, name, error, failing)
        if about is not None:
            self._add_event(about, loop, error)

    def _log(self, loop: str, name: str, error: Exception, failing: FailingObject) -> None:
        now = self._clock()
        self._logged = [at for at in self._logged if now < at + LOG_INTERVAL]
        if now < failing.logged_at + LOG_INTERVAL or len(self._logged) >= TRACEBACKS:
            return
        failing.logged_at = now
        self._logged.append(now)
        extra = fields(
            loop=loop, what=name or None, failures=failing.failures, error=f"{type(error).__name__}: {error}"[:500]
        )
        log.error("unexpected error; the loop continues without this object", extra=extra, exc_info=error)

    def _add_event(self, pod: Pod, loop: str, error: Exception) -> None:
        is_repeated = self._clock() < self._reported.get(pod.uid, -REPEAT) + REPEAT
        if is_repeated or len(self._events) >= MAX_EVENTS or not pod.name:
            return
        self._reported[pod.uid] = self._clock()
        message = (
            f"internal error of gputile on this pod ({type(error).__name__} in `{loop}`); other pods are not affected. "
            "gputile retries; please report it with the log of gputile's scheduler"
        )
        self._events[pod.uid] = KubeEvent(
            namespace=pod.namespace, pod=pod.name, uid=pod.uid, reason=REASON, message=message
        )

    # ---- events -----------------------------------------------------------------------------------------------------

    async def write_events(self, api: Api) -> None:
        """Write the waiting Events. Only the leader may call this."""
        while self._events:
            uid = next(iter(self._events))
            event = self._events.pop(uid)
            try:
                await api.note(event)
            except (ApiRejected, OutcomeUnknown) as error:
                log.warning("event not recorded", extra=fields(pod=f"{event.namespace}/{event.pod}", why=str(error)))

    def prune(self) -> None:
        """Forget objects that have not failed for long."""
        now = self._clock()
        self._failing = {key: failing for key, failing in self._failing.items() if now < failing.last + FORGET}
        self._reported = {uid: at for uid, at in self._reported.items() if now < at + REPEAT}
