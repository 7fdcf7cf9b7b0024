"""Leader election: the leader is the replica that holds a Lease and keeps renewing it.

Each replica has one `Elector`: `run` it for ever, check `holds` right before each write, `release` on shutdown. It must
never trust the clock of another machine. Whether another holder's Lease has expired is judged by how long *this*
replica has seen the record unchanged; whether this replica is still the leader, by the time at which it *sent* the last
successful renewal. The first period is longer than the second, so that there are never two leaders. `ApiLeases` is the
Lease on the API server.

             acquired the lease                  not renewed in time, or another holder
  waiting ----------------------> leader (Term) ---------------------------------------> waiting
     ^ |                             ^ |
     +-+ held by another, valid      +-+ renewed
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Protocol, TypeAlias

import msgspec

from gputile.kube.api import NO_ANNOTATIONS, ApiRejected, Json, LeaseRecord, Leases, OutcomeUnknown
from gputile.model.decode_errors import decode_problem
from gputile.model.errors import GputileError

NEVER = -math.inf


class LeaseSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Leader election between the replicas of the scheduler."""

    enabled: bool = True
    """False: this is the only replica, and always the leader."""

    namespace: str = "kube-system"
    """Namespace of the Lease."""

    name: str = "gputile-scheduler"
    """Name of the Lease. Schedulers with the same Lease are replicas of each other."""

    duration: float = 6.0
    """Seconds after the last renewal until another replica takes the Lease. The leader stops writing a sixth
    earlier."""

    renew: float = 2.0
    """Seconds between renewals."""

    retry: float = 1.0
    """Seconds between reads of another replica's Lease, and after a failed renewal."""


class Term(msgspec.Struct, frozen=True):
    """One period as the leader."""

    transitions: int
    inherited: bool  # the previous leader may still be writing: its Lease expired, it was not released


OnChange: TypeAlias = Callable[[Term | None], Awaitable[None]]
VersionedLease: TypeAlias = tuple[LeaseRecord, str]


def elapsed() -> float:
    """Monotonic seconds, including system suspend where the operating system counts it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Elector:
    """Acquires, renews and loses the Lease. `on_change` gets each change of leadership, in order; renewing continues
    meanwhile."""

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
        self._changes: asyncio.Queue[Term | None] = asyncio.Queue()
        self._valid_until = NEVER  # this replica may write before this time
        self._term: Term | None = None
        self._lease: VersionedLease | None = None  # as last read or written
        self._changed_at = NEVER  # when `_lease` last changed
        self.predecessor = ""  # the last holder whose expired Lease this replica took
        self._taking = False  # a takeover of an expired Lease was sent; if this replica is the holder, it succeeded

    @property
    def term(self) -> Term | None:
        return self._term if self.holds() else None

    def holds(self) -> bool:
        """Whether this replica is the leader now. A process that was suspended detects it here, before it writes."""
        return self._clock() < self._valid_until

    async def run(self) -> None:
        """Ends only when cancelled, or by an error of `on_change`."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._notify())
            while True:
                await self._pause(await self.step())

    async def _notify(self) -> None:
        while True:
            await self._on_change(await self._changes.get())

    async def step(self) -> float:
        """Try once to acquire or renew the Lease; return the seconds until the next attempt."""
        if self._term and not self.holds():  # suspended for too long: another replica may have been the leader since
            self._lose()
        try:
            is_leader = await self._attempt()
        except (GputileError, OSError):
            is_leader = False  # unknown: `holds` decides until when the last renewal is valid
        if self._term and not self.holds():
            self._lose()
        return self._settings.renew if is_leader else self._settings.retry

    async def release(self) -> None:
        """Release the Lease, so that the next leader need not wait for its expiry. Cancel `run` first."""
        held, self._valid_until = self.holds(), NEVER
        self._term = None
        if not held or self._lease is None:
            return
        record, version = self._lease
        released = msgspec.structs.replace(record, holder_identity="", lease_duration_seconds=1, renew_time=self._now())
        try:
            await self._leases.write(released, version)
        except (GputileError, OSError):
            return  # the Lease expires

    # ---- one attempt ------------------------------------------------------------------------------------------------

    async def _attempt(self) -> bool:
        """Renew the Lease as last known; after a conflict, read it and try again."""
        if self._term and self._lease:
            try:
                return await self._write(self._lease, inherited=False)
            except ApiRejected as error:
                if error.status not in (404, 409):
                    raise
        lease = await self._leases.read()
        holder = lease[0].holder_identity if lease is not None else None
        if self._term and holder != self._identity:  # another replica is or was the leader, or the Lease was deleted
            self._lose()
        if lease is None:
            return await self._create()
        self._observe(lease)
        if holder and holder != self._identity:
            return self._is_expired() and await self._write(lease, inherited=True)
        return await self._write(lease, inherited=bool(holder) and self._taking)

    def _observe(self, lease: VersionedLease) -> None:
        if lease != self._lease:
            self._lease, self._changed_at = lease, self._clock()

    def _is_expired(self) -> bool:
        duration = (self._lease and self._lease[0].lease_duration_seconds) or 0
        return self._clock() >= self._changed_at + max(duration, self._settings.duration)

    async def _create(self) -> bool:
        """The Lease does not exist. If another replica held it, that leader may not have noticed the deletion yet."""
        holder = self._lease and self._lease[0].holder_identity
        held_by_other = bool(holder) and holder != self._identity
        if held_by_other and not self._is_expired():
            return False
        sent, record = self._clock(), self._record(LeaseRecord(), 0)
        self._taking = held_by_other
        self.predecessor = (holder or "") if held_by_other else self.predecessor
        self._acquired(record, await self._leases.create(record), sent, held_by_other)
        return True

    async def _write(self, lease: VersionedLease, inherited: bool) -> bool:
        before, version = lease
        is_ours = before.holder_identity == self._identity
        record = self._record(before, (before.lease_transitions or 0) + (not is_ours))
        self._taking = inherited
        self.predecessor = (before.holder_identity or "") if inherited and not is_ours else self.predecessor
        sent = self._clock()
        self._acquired(record, await self._leases.write(record, version), sent, inherited)
        return True

    def _record(self, before: LeaseRecord, transitions: int) -> LeaseRecord:
        now = self._now()
        is_ours = before.holder_identity == self._identity
        return LeaseRecord(
            holder_identity=self._identity,
            lease_duration_seconds=max(1, math.ceil(self._settings.duration)),
            acquire_time=(before.acquire_time if is_ours else None) or now,
            renew_time=now,
            lease_transitions=transitions,
        )

    def _now(self) -> str:
        return datetime.fromtimestamp(self._wall(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    def _acquired(self, record: LeaseRecord, version: str, sent: float, inherited: bool) -> None:
        self._observe((record, version))
        self._valid_until = sent + self._settings.duration * 5 / 6
        self._taking = False
        if not self._term:
            self._term = Term(record.lease_transitions or 0, inherited)
            self._changes.put_nowait(self._term)

    def _lose(self) -> None:
        self._valid_until, self._term = NEVER, None
        self._changes.put_nowait(None)


# ---- the Lease on the API server ------------------------------------------------------------------------------------


class LeaseTransport(Protocol):
    """The HTTP request that `ApiLeases` needs; `Client` has it."""

    async def request(
        self, method: str, path: str, *, body: Json | None = None, timeout: float | None = None
    ) -> bytes: ...


class LeaseVersion(msgspec.Struct, frozen=True, rename="camel"):
    """The `metadata` of a Lease, as far as leader election reads it."""

    resource_version: str


class LeaseBody(msgspec.Struct, frozen=True):
    """A Lease, as far as leader election reads it."""

    metadata: LeaseVersion
    spec: LeaseRecord | None = None


class ApiLeases:
    """One Lease on the API server; all calls may raise `ApiRejected` or `OutcomeUnknown`."""

    def __init__(self, http: LeaseTransport, namespace: str, name: str, timeout: float) -> None:
        self._http, self._namespace, self._name, self._timeout = http, namespace, name, timeout
        self._all = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"

    async def read(self) -> tuple[LeaseRecord, str] | None:
        try:
            lease = await self._request("GET", f"{self._all}/{self._name}")
        except ApiRejected as error:
            if error.status == 404:
                return None
            raise
        return lease.spec or LeaseRecord(), lease.metadata.resource_version

    async def create(self, record: LeaseRecord, annotations: Mapping[str, str] = NO_ANNOTATIONS) -> str:
        return (await self._request("POST", self._all, self._body(record, annotations))).metadata.resource_version

    async def write(self, record: LeaseRecord, version: str, annotations: Mapping[str, str] = NO_ANNOTATIONS) -> str:
        body = self._body(record, annotations, resourceVersion=version)
        return (await self._request("PUT", f"{self._all}/{self._name}", body)).metadata.resource_version

    def _body(self, record: LeaseRecord, annotations: Mapping[str, str], **extra: str) -> Json:
        meta: Json = {"name": self._name, "namespace": self._namespace, **extra}
        if annotations:
            meta["annotations"] = dict(annotations)
        spec = msgspec.to_builtins(record)
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": meta, "spec": spec}

    async def _request(self, method: str, path: str, body: Json | None = None) -> LeaseBody:
        answer = await self._http.request(method, path, body=body, timeout=self._timeout)
        try:
            return msgspec.json.decode(answer, type=LeaseBody)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise OutcomeUnknown(f"{method} {path}: the response is not a Lease: {decode_problem(error)}") from error
