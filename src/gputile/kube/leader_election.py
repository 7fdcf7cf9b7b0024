"""Which replica leads: the one whose name stands in a Lease, for as long as it keeps it fresh.

Room:  one `Elector` per replica. No clock of another machine is ever believed: whether another holder is gone is judged
       by how long *we* have seen its record unchanged, and whether we still lead by how long ago *we* began to ask for
       the renewal that worked. The first is longer than the second, so that no two lead at once.
       `ApiLeases` is the Lease itself, on the API server.
Door:  `Elector.run` for ever; `Elector.holds` right before each write; `Elector.release` on the way out.

             written by us                       not renewed in time, or another's name
  waiting ------------------> leading (Term) ---------------------------------------------> waiting
     ^ |                         ^ |
     +-+ another's, and fresh    +-+ renewed
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Protocol, TypeAlias

import msgspec

from gputile.kube.api import NO_WORDS, ApiRejected, Json, LeaseRecord, Leases, OutcomeUnknown
from gputile.model.errors import GputileError

NEVER = -math.inf


class LeaseSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How leadership passes on."""

    enabled: bool = True
    """False: this is the only replica there will ever be, and it always leads."""

    namespace: str = "kube-system"
    """Where the Lease lives."""

    name: str = "gputile-scheduler"
    """Its name. Two schedulers with one name are replicas of each other."""

    duration: float = 6.0
    """Seconds that others wait after the last sign of life. We stop writing a sixth of it sooner."""

    renew: float = 2.0
    """Seconds between renewals."""

    retry: float = 1.0
    """Seconds between looks at another's Lease, and after a renewal that failed."""


class Term(msgspec.Struct, frozen=True):
    """One time of leading."""

    transitions: int
    inherited: bool  # the holder before may still be writing: it did not let go, it expired


OnChange: TypeAlias = Callable[[Term | None], Awaitable[None]]
Sight: TypeAlias = tuple[LeaseRecord, str]


def elapsed() -> float:
    """Seconds that also pass while the machine sleeps, where the system counts them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Elector:
    """Campaigns, renews and loses. `on_change` hears of each turn, in order, while renewing goes on beside it."""

    def __init__(
        self,
        leases: Leases,
        identity: str,
        settings: LeaseSettings | None = None,
        *,
        on_change: OnChange,
        clock: Callable[[], float] = elapsed,
        wall: Callable[[], float] = time.time,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._leases, self._identity, self._settings = leases, identity, settings or LeaseSettings()
        self._on_change, self._clock, self._wall, self._pause = on_change, clock, wall, pause
        self._turns: asyncio.Queue[Term | None] = asyncio.Queue()
        self._until = NEVER  # we may write before this moment
        self._term: Term | None = None
        self._seen: Sight | None = None  # the Lease as last read or written
        self._seen_at = NEVER  # when it last changed under our eyes
        self.predecessor = ""  # the identity that we last took the Lease from, because it had expired
        self._taking = False  # we tried to take it from one who expired; if our name stands there, that worked

    @property
    def term(self) -> Term | None:
        return self._term if self.holds() else None

    def holds(self) -> bool:
        """May we write, now? A process that was frozen finds out here, before it does harm."""
        return self._clock() < self._until

    async def run(self) -> None:
        """Ends only when cancelled, or by an error of `on_change`."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tell())
            while True:
                await self._pause(await self.step())

    async def _tell(self) -> None:
        while True:
            await self._on_change(await self._turns.get())

    async def step(self) -> float:
        """One attempt to lead or to go on leading; says how many seconds to wait for the next."""
        if self._term and not self.holds():  # frozen for too long: another may have led since
            self._lose()
        try:
            kept = await self._attempt()
        except (GputileError, OSError):
            kept = False  # not known, rather; `holds` decides how long we may live on what we know
        if self._term and not self.holds():
            self._lose()
        return self._settings.renew if kept else self._settings.retry

    async def release(self) -> None:
        """Let go, so that the next one need not wait. Cancel `run` first."""
        held, self._until = self.holds(), NEVER
        self._term = None
        if not held or self._seen is None:
            return
        record, version = self._seen
        free = msgspec.structs.replace(record, holder_identity="", lease_duration_seconds=1, renew_time=self._now())
        try:
            await self._leases.write(free, version)
        except (GputileError, OSError):
            return  # it expires by itself

    # ---- one attempt ------------------------------------------------------------------------------------------------

    async def _attempt(self) -> bool:
        """Renew by what we know; where that is outdated, read and try again."""
        if self._term and self._seen:
            try:
                return await self._write(self._seen, inherited=False)
            except ApiRejected as refused:
                if refused.status not in (404, 409):
                    raise
        found = await self._leases.read()
        holder = found[0].holder_identity if found is not None else None
        if self._term and holder != self._identity:  # another leads or led, or somebody removed the Lease
            self._lose()
        if found is None:
            return await self._create()
        self._look(found)
        if holder and holder != self._identity:
            return self._is_expired() and await self._write(found, inherited=True)
        return await self._write(found, inherited=bool(holder) and self._taking)

    def _look(self, found: Sight) -> None:
        if found != self._seen:
            self._seen, self._seen_at = found, self._clock()

    def _is_expired(self) -> bool:
        said = (self._seen and self._seen[0].lease_duration_seconds) or 0
        return self._clock() >= self._seen_at + max(said, self._settings.duration)

    async def _create(self) -> bool:
        """The Lease is not there. If it was, and another's, somebody deleted it under a leader who may not know yet."""
        holder = self._seen and self._seen[0].holder_identity
        others = bool(holder) and holder != self._identity
        if others and not self._is_expired():
            return False
        sent, record = self._clock(), self._record(LeaseRecord(), 0)
        self._taking = others
        self.predecessor = (holder or "") if others else self.predecessor
        self._won(record, await self._leases.create(record), sent, others)
        return True

    async def _write(self, found: Sight, inherited: bool) -> bool:
        before, version = found
        mine = before.holder_identity == self._identity
        record = self._record(before, (before.lease_transitions or 0) + (not mine))
        self._taking = inherited
        self.predecessor = (before.holder_identity or "") if inherited and not mine else self.predecessor
        sent = self._clock()
        self._won(record, await self._leases.write(record, version), sent, inherited)
        return True

    def _record(self, before: LeaseRecord, transitions: int) -> LeaseRecord:
        now = self._now()
        mine = before.holder_identity == self._identity
        return LeaseRecord(
            holder_identity=self._identity,
            lease_duration_seconds=max(1, math.ceil(self._settings.duration)),
            acquire_time=(before.acquire_time if mine else None) or now,
            renew_time=now,
            lease_transitions=transitions,
        )

    def _now(self) -> str:
        return datetime.fromtimestamp(self._wall(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    def _won(self, record: LeaseRecord, version: str, sent: float, inherited: bool) -> None:
        self._look((record, version))
        self._until = sent + self._settings.duration * 5 / 6
        self._taking = False
        if not self._term:
            self._term = Term(record.lease_transitions or 0, inherited)
            self._turns.put_nowait(self._term)

    def _lose(self) -> None:
        self._until, self._term = NEVER, None
        self._turns.put_nowait(None)


# ---- the Lease on the API server ------------------------------------------------------------------------------------


class LeaseTransport(Protocol):
    """The little HTTP that a Lease needs."""

    async def request(
        self, method: str, path: str, *, body: Json | None = None, timeout: float | None = None
    ) -> bytes: ...


class LeaseVersion(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str


class LeaseBody(msgspec.Struct, frozen=True):
    metadata: LeaseVersion
    spec: LeaseRecord | None = None


class ApiLeases:
    """One Lease; all three calls may raise `ApiRejected` or `OutcomeUnknown`."""

    def __init__(self, http: LeaseTransport, namespace: str, name: str, timeout: float) -> None:
        self._http, self._namespace, self._name, self._timeout = http, namespace, name, timeout
        self._all = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"

    async def read(self) -> tuple[LeaseRecord, str] | None:
        try:
            found = await self._ask("GET", f"{self._all}/{self._name}")
        except ApiRejected as refused:
            if refused.status == 404:
                return None
            raise
        return found.spec or LeaseRecord(), found.metadata.resource_version

    async def create(self, record: LeaseRecord, annotations: Mapping[str, str] = NO_WORDS) -> str:
        return (await self._ask("POST", self._all, self._body(record, annotations))).metadata.resource_version

    async def write(self, record: LeaseRecord, version: str, annotations: Mapping[str, str] = NO_WORDS) -> str:
        body = self._body(record, annotations, resourceVersion=version)
        return (await self._ask("PUT", f"{self._all}/{self._name}", body)).metadata.resource_version

    def _body(self, record: LeaseRecord, annotations: Mapping[str, str], **extra: str) -> Json:
        meta: Json = {"name": self._name, "namespace": self._namespace, **extra}
        if annotations:
            meta["annotations"] = dict(annotations)
        spec = msgspec.to_builtins(record)
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": meta, "spec": spec}

    async def _ask(self, method: str, path: str, body: Json | None = None) -> LeaseBody:
        answer = await self._http.request(method, path, body=body, timeout=self._timeout)
        try:
            return msgspec.json.decode(answer, type=LeaseBody)
        except (msgspec.DecodeError, UnicodeDecodeError) as wrong:
            raise OutcomeUnknown(f"{method} {path}: the answer is no Lease: {wrong}") from wrong
