"""One failing object stays one failing object: unexpected errors are caught here, and nowhere else.

Every background loop does its work about one object (a pod, a node, a lease, a quota) through `FailureIsolation`. An
expected
no (`ApiRejected`, `OutcomeUnknown`) is the loop's own affair; what nobody expected is logged with the object's name
and the
traceback, counted, and told to the object by an Event where there is one to tell. The loop goes on with the others, and
leaves that object alone for a while, longer each time. A loop that breaks as a whole is started again.

Only `Exception` is caught: to be cancelled, or to be told to exit, is no error. A file or flag that cannot be used
(`InputError`) ends the process, as it should.
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

AGAIN, LONGEST_AGAIN = 1.0, 300.0  # seconds that a failing object is left alone; doubled each time
SAY_AGAIN = 60.0  # seconds between two tracebacks about one object, and
TRACEBACKS = 20  # of all objects together in that time
NOTES = 100  # that wait to be written; more than that, and nobody would read them
REPEAT = 30 * 60.0  # seconds after which the same is told to a pod again, for Events are kept for an hour only
FORGET = 3600.0  # seconds
MOST = 10_000  # objects that are remembered
REASON = "InternalError"
Expected = tuple[type[Exception], ...]
EXPECTED: Expected = (ApiRejected, OutcomeUnknown)

T = TypeVar("T")


class FailingObject(msgspec.Struct):
    """One object in one loop."""

    failures: int = 0
    not_before: float = 0.0
    logged_at: float = -SAY_AGAIN
    last: float = 0.0


class FailureIsolation:
    """See the module's text."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._metrics, self._clock = metrics, clock
        self._failing: dict[tuple[str, str], FailingObject] = {}
        self._logged: list[float] = []  # when the last tracebacks were logged
        self._notes: dict[str, KubeEvent] = {}  # by UID: to be written
        self._told: dict[str, float] = {}  # by UID

    # ---- steps ------------------------------------------------------------------------------------------------------

    def rests(self, loop: str, what: str) -> bool:
        """Whether the object has failed there a moment ago, and is to be left alone."""
        known = self._failing.get((loop, what))
        return known is not None and self._clock() < known.not_before

    def step(
        self, loop: str, what: str, work: Callable[[], T], about: Pod | None = None, expected: Expected = EXPECTED
    ) -> T | None:
        """Work about one object that must be done whenever it is due, such as taking in what the watch shows."""
        try:
            done = work()
        except expected:
            raise
        except Exception as wrong:
            self._failed(loop, what, wrong, about)
            return None
        self._failing.pop((loop, what), None)
        return done

    async def attempt(
        self,
        loop: str,
        what: str,
        work: Callable[[], Awaitable[T]],
        about: Pod | None = None,
        *,
        always: bool = False,
        expected: Expected = EXPECTED,
    ) -> T | None:
        """Work about one object that can wait (or cannot, with `always`): passed over while the object rests."""
        if not always and self.rests(loop, what):
            return None
        try:
            done = await work()
        except expected:
            raise
        except Exception as wrong:
            self._failed(loop, what, wrong, about)
            return None
        self._failing.pop((loop, what), None)
        return done

    async def keep_running(
        self, loop: str, start: Callable[[], Awaitable[None]], pause: Callable[[float], Awaitable[None]]
    ) -> None:
        """A loop that never ends; one that does is started again. Ends only when cancelled, or with an `InputError`."""
        while True:
            try:
                await start()
                log.error("a loop has ended; it is started again", extra=fields(loop=loop))
            except InputError:
                raise
            except Exception as wrong:
                self._failed(loop, "", wrong, None)
            known = self._failing.get((loop, ""))
            await pause(AGAIN if known is None else max(AGAIN, known.not_before - self._clock()))

    # ---- what is made of an error -----------------------------------------------------------------------------------

    def _failed(self, loop: str, what: str, wrong: Exception, about: Pod | None) -> None:
        now = self._clock()
        if len(self._failing) >= MOST:
            self._failing.clear()
        known = self._failing.setdefault((loop, what), FailingObject())
        known.failures, known.last = known.failures + 1, now
        known.not_before = now + min(AGAIN * 2 ** min(known.failures - 1, 10), LONGEST_AGAIN)
        self._metrics.failures.labels(loop).inc()
        self._log(loop, what, wrong, known)
        if about is not None:
            self._tell(about, loop, wrong)

    def _log(self, loop: str, what: str, wrong: Exception, known: FailingObject) -> None:
        now = self._clock()
        self._logged = [at for at in self._logged if now < at + SAY_AGAIN]
        if now < known.logged_at + SAY_AGAIN or len(self._logged) >= TRACEBACKS:
            return
        known.logged_at = now
        self._logged.append(now)
        extra = fields(
            loop=loop, what=what or None, failures=known.failures, error=f"{type(wrong).__name__}: {wrong}"[:500]
        )
        log.error("an unexpected error; the loop goes on without this object", extra=extra, exc_info=wrong)

    def _tell(self, pod: Pod, loop: str, wrong: Exception) -> None:
        if self._clock() < self._told.get(pod.uid, -REPEAT) + REPEAT or len(self._notes) >= NOTES or not pod.name:
            return
        self._told[pod.uid] = self._clock()
        said = (
            f"gputile failed on this pod by an error of its own ({type(wrong).__name__} in `{loop}`); other pods are "
            "not affected. It is tried again; please report it with the log of gputile's scheduler"
        )
        self._notes[pod.uid] = KubeEvent(
            namespace=pod.namespace, pod=pod.name, uid=pod.uid, reason=REASON, message=said
        )

    # ---- telling ----------------------------------------------------------------------------------------------------

    async def tell(self, api: Api) -> None:
        """Write the Events that wait. Whoever calls this leads."""
        while self._notes:
            uid = next(iter(self._notes))
            note = self._notes.pop(uid)
            try:
                await api.note(note)
            except (ApiRejected, OutcomeUnknown) as wrong:
                log.warning("a pod could not be told", extra=fields(pod=f"{note.namespace}/{note.pod}", why=str(wrong)))

    def forget(self) -> None:
        """Drop what is remembered of objects that have not failed for long."""
        now = self._clock()
        self._failing = {key: known for key, known in self._failing.items() if now < known.last + FORGET}
        self._told = {uid: at for uid, at in self._told.items() if now < at + REPEAT}
