"""Leader election: how a term begins and ends, and the guarantee that there are never two leaders.

The guarantee is a property test without an event loop: every request of an `Elector` yields control, so that
hypothesis decides which replica continues, how far each clock gets meanwhile (clocks run at different speeds), and
whether a request works, is rejected, works with its response lost, or takes effect long after it timed out.

Deliberate bugs that it caught, each alone:
  1. The Lease counts from the response to the renewal, not from before it was sent.
  2. The leader stops writing a fifth after the end of the Lease, not a sixth before it.
  3. The expiry of another's Lease is not counted from its last observed change.
  4. A renewal of another does not restart the wait.
  5. `holds` does not look at the clock.
With EFFORT=20 also: no margin (clocks that drift apart), and 1. for the request that creates the Lease.
"""

import asyncio
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextlib import closing, suppress
from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputile.kube.api import NO_ANNOTATIONS, ApiRejected, LeaseRecord, OutcomeUnknown
from gputile.kube.leader_election import Elector, LeaseSettings, Term
from tests.effort import examples

SETTINGS = LeaseSettings()


class Store:
    """The Lease as etcd stores it."""

    def __init__(self, record: LeaseRecord | None = None) -> None:
        self.record, self.version = record, 1
        self.slow: Callable[[], None] = lambda: None  # called before a write takes effect

    def create(self, record: LeaseRecord) -> str:
        if self.record is not None:
            raise ApiRejected(409, "AlreadyExists", "it exists")
        return self._put(record)

    def write(self, record: LeaseRecord, version: str) -> str:
        if self.record is None:
            raise ApiRejected(404, "NotFound", "it does not exist")
        if version != str(self.version):
            raise ApiRejected(409, "Conflict", "it has been modified")
        return self._put(record)

    def _put(self, record: LeaseRecord) -> str:
        self.slow()
        self.record, self.version = record, self.version + 1
        return str(self.version)


class Memory:
    """`Leases` that work at once, unless `broken` or `lost` is set."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.broken: Exception | None = None
        self.lost = False  # requests work, and their responses are lost
        self.calls: list[str] = []

    async def read(self) -> tuple[LeaseRecord, str] | None:
        self._call("read")
        return None if self.store.record is None else (self.store.record, str(self.store.version))

    async def create(self, record: LeaseRecord, annotations: Mapping[str, str] = NO_ANNOTATIONS) -> str:
        self._call("create")
        return self._answer(self.store.create(record))

    async def write(self, record: LeaseRecord, version: str, annotations: Mapping[str, str] = NO_ANNOTATIONS) -> str:
        self._call("write")
        return self._answer(self.store.write(record, version))

    def _call(self, verb: str) -> None:
        self.calls.append(verb)
        if self.broken:
            raise self.broken

    def _answer(self, version: str) -> str:
        if self.lost:
            raise OutcomeUnknown("the response was lost")
        return version


class Replica:
    """An elector with its own view of one store, and a clock that a test moves."""

    def __init__(self, store: Store, name: str, now: list[float]) -> None:
        self.leases = Memory(store)
        self.changes: list[Term | None] = []
        self.elector = Elector(
            self.leases,
            name,
            SETTINGS,
            clock=lambda: now[0],
            wall=lambda: 1_700_000_000 + now[0],
            on_change=self._record,
        )

    async def _record(self, term: Term | None) -> None:
        self.changes.append(term)

    def step(self) -> float:
        return asyncio.run(self.elector.step())

    @property
    def term(self) -> Term | None:
        return self.elector.term


def held_by(name: str | None, transitions: int = 3, seconds: int = 6) -> LeaseRecord:
    return LeaseRecord(
        holder_identity=name,
        lease_duration_seconds=seconds,
        acquire_time="2020-01-01T00:00:00.000000Z",
        renew_time="2020-01-01T00:00:00.000000Z",
        lease_transitions=transitions,
    )


@pytest.mark.parametrize(
    ("record", "waits", "want"),
    [
        pytest.param(None, 0.0, Term(0, False), id="a-missing-lease-is-acquired-at-once"),
        pytest.param(held_by(""), 0.0, Term(4, False), id="a-released-lease-is-acquired-at-once"),
        pytest.param(held_by(None), 0.0, Term(4, False), id="a-lease-without-holder-is-acquired-at-once"),
        pytest.param(held_by("a"), 0.0, Term(3, False), id="our-own-lease-is-resumed"),
        pytest.param(held_by("b"), 0.0, None, id="another's-lease-is-respected-whatever-its-renew-time"),
        pytest.param(held_by("b"), 5.9, None, id="another's-lease-is-respected-until-it-expires"),
        pytest.param(held_by("b"), 6.0, Term(4, True), id="an-expired-lease-is-inherited"),
        pytest.param(held_by("b", seconds=20), 6.0, None, id="a-longer-duration-in-the-record-is-respected"),
        pytest.param(held_by("b", seconds=20), 20.0, Term(4, True), id="and-expires-too"),
        pytest.param(LeaseRecord(), 0.0, Term(1, False), id="an-empty-record-is-free"),
    ],
)
def test_a_term_begins(record: LeaseRecord | None, waits: float, want: Term | None) -> None:
    now = [0.0]
    replica = Replica(Store(record), "a", now)
    replica.step()
    now[0] = waits
    replica.step()
    assert replica.term == want


def test_the_record_that_is_written() -> None:
    now = [0.25]
    store = Store(held_by(""))
    replica = Replica(store, "a", now)
    assert replica.step() == SETTINGS.renew
    begun = "2023-11-14T22:13:20.250000Z"
    first = LeaseRecord(
        holder_identity="a", lease_duration_seconds=6, acquire_time=begun, renew_time=begun, lease_transitions=4
    )
    assert store.record == first
    now[0] = 2.5
    replica.step()
    assert store.record == msgspec.structs.replace(first, renew_time="2023-11-14T22:13:22.500000Z")
    assert replica.leases.calls == ["read", "write", "write"]  # a renewal is replica request


@pytest.mark.parametrize(
    ("at", "want"),
    [
        pytest.param(4.9, True, id="held-until-a-sixth-before-the-end"),
        pytest.param(5.0, False, id="then-not"),
        pytest.param(500.0, False, id="not-by-a-process-that-was-suspended"),
    ],
)
def test_the_lease_is_held_only_for_its_duration(at: float, want: bool) -> None:
    now = [0.0]
    replica = Replica(Store(), "a", now)
    replica.step()
    now[0] = at
    assert replica.elector.holds() is want


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(None, id="created"),
        pytest.param(held_by(""), id="acquired"),
        pytest.param(held_by("a"), id="renewed"),
    ],
)
def test_the_lease_counts_from_before_the_request_was_sent(record: LeaseRecord | None) -> None:
    now = [0.0]
    store = Store(record)
    replica = Replica(store, "a", now)
    store.slow = lambda: now.__setitem__(0, now[0] + 4.0)
    replica.step()
    assert replica.elector.holds()
    now[0] = 5.0
    assert not replica.elector.holds()


def test_each_renewal_of_another_restarts_the_wait() -> None:
    now = [0.0]
    store = Store()
    replica, other = Replica(store, "a", now), Replica(store, "b", now)
    for moment in range(20):
        now[0] = float(moment)
        if moment % 4 == 0:
            replica.step()
        other.step()
        assert (replica.elector.holds(), other.elector.holds()) == (True, False)


def queued(replica: Replica) -> list[Term | None]:
    """The changes that `on_change` would get."""
    changes = replica.elector._changes
    return [changes.get_nowait() for _ in range(changes.qsize())]


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(ApiRejected(403, "Forbidden", "denied"), id="forbidden"),
        pytest.param(ApiRejected(0, "Unreachable", "down"), id="unreachable"),
        pytest.param(OutcomeUnknown("time-out"), id="time-out"),
        pytest.param(OSError("reset"), id="reset"),
    ],
)
def test_failing_renewals_lose_leadership_when_the_lease_ends(broken: Exception) -> None:
    now = [0.0]
    replica = Replica(Store(), "a", now)
    replica.step()
    replica.leases.broken = broken
    for moment in (2.0, 3.0, 4.0):
        now[0] = moment
        assert replica.step() == SETTINGS.retry
        assert replica.term == Term(0, False)
    now[0] = 5.0
    replica.step()
    assert (replica.term, queued(replica)) == (None, [Term(0, False), None])
    replica.leases.broken = None
    replica.step()
    assert (replica.term, queued(replica)) == (Term(0, False), [Term(0, False)])  # this replica was still the holder


def test_another_holder_ends_the_term_at_once() -> None:
    now = [0.0]
    store = Store()
    replica = Replica(store, "a", now)
    replica.step()
    store.write(held_by("b"), str(store.version))
    now[0] = 1.0
    replica.step()
    assert (replica.elector.holds(), queued(replica)) == (False, [Term(0, False), None])


def test_a_foreign_edit_of_the_lease_costs_one_more_read() -> None:
    store = Store()
    replica = Replica(store, "a", [0.0])
    replica.step()
    store.version += 1  # an edit of its labels
    replica.step()
    assert replica.leases.calls == ["read", "create", "write", "read", "write"]
    assert queued(replica) == [Term(0, False)]


def test_a_renewal_whose_response_was_lost_keeps_leadership() -> None:
    now = [0.0]
    replica = Replica(Store(), "a", now)
    replica.step()
    replica.leases.lost = True
    now[0] = 2.0
    replica.step()
    replica.leases.lost = False
    now[0] = 3.0
    replica.step()
    now[0] = 7.9
    assert replica.elector.holds()
    assert queued(replica) == [Term(0, False)]


def test_a_takeover_whose_response_was_lost_is_still_inherited() -> None:
    now = [0.0]
    replica = Replica(Store(held_by("b")), "a", now)
    replica.step()
    replica.leases.lost, now[0] = True, 6.0
    replica.step()
    assert replica.term is None
    replica.leases.lost, now[0] = False, 7.0
    replica.step()
    assert replica.term == Term(4, True)


@pytest.mark.parametrize("deleted", [False, True], ids=["existing", "deleted"])
def test_the_predecessor_is_known_when_the_response_was_lost(deleted: bool) -> None:
    now = [0.0]
    store = Store(held_by("b"))
    replica = Replica(store, "a", now)
    replica.step()
    assert replica.elector.predecessor == ""
    if deleted:
        store.record = None
    replica.leases.lost, now[0] = True, 6.0
    replica.step()
    replica.leases.lost, now[0] = False, 7.0
    replica.step()
    assert replica.elector.predecessor == "b"
    assert replica.elector.holds()


def test_a_deleted_lease_of_another_leader_is_not_acquired_before_its_expiry() -> None:
    now = [0.0]
    store = Store(held_by("b"))
    replica = Replica(store, "a", now)
    replica.step()
    store.record = None
    now[0] = 5.0
    replica.step()
    assert replica.term is None
    now[0] = 6.0
    replica.step()
    assert replica.term == Term(0, True)


def test_a_deleted_lease_of_the_leader_is_created_again() -> None:
    store = Store()
    replica = Replica(store, "a", [0.0])
    replica.step()
    store.record = None
    replica.step()
    again = [Term(0, False), None, Term(0, False)]  # another replica may have been the leader in between: a new term
    assert (replica.term, store.record is not None, queued(replica)) == (Term(0, False), True, again)


def test_one_of_two_replicas_takes_an_expired_lease() -> None:
    now = [0.0]
    store = Store(held_by("c"))
    replica, other = Replica(store, "a", now), Replica(store, "b", now)
    replica.step(), other.step()
    now[0] = 6.0
    replica.step(), other.step()
    assert (replica.term, other.term) == (Term(4, True), None)


def test_a_released_lease_is_acquired_by_the_next_replica_at_once() -> None:
    now = [0.0]
    store = Store()
    replica, other = Replica(store, "a", now), Replica(store, "b", now)
    replica.step(), other.step()
    asyncio.run(replica.elector.release())
    assert store.record is not None
    assert (store.record.holder_identity, store.record.lease_duration_seconds) == ("", 1)
    assert not replica.elector.holds()
    other.step()
    assert other.term == Term(1, False)


@pytest.mark.parametrize("holder", [pytest.param("b", id="another's-lease"), pytest.param("a", id="an-expired-lease")])
def test_releasing_a_lease_that_is_not_held_writes_nothing(holder: str) -> None:
    now = [0.0]
    store = Store(held_by(holder))
    replica = Replica(store, "a", now)
    replica.step()
    now[0] = 5.5
    before = store.record
    asyncio.run(replica.elector.release())
    assert store.record == before


def test_a_failed_release_raises_nothing() -> None:
    replica = Replica(Store(), "a", [0.0])
    replica.step()
    replica.leases.broken = OutcomeUnknown("time-out")
    asyncio.run(replica.elector.release())
    assert not replica.elector.holds()


def test_renewing_continues_while_on_change_is_slow() -> None:
    async def run() -> list[Term | None]:
        now, changes = [0.0], []
        ready = asyncio.Event()
        leases = Memory(Store())

        async def record(term: Term | None) -> None:
            changes.append(term)
            await ready.wait()

        async def pause(seconds: float) -> None:
            now[0] += seconds
            if now[0] > 60.0:
                leases.broken = OutcomeUnknown("down")
            if now[0] > 90.0:
                ready.set()
            await asyncio.sleep(0)

        elector = Elector(leases, "a", on_change=record, clock=lambda: now[0], wall=lambda: now[0], pause=pause)
        task = asyncio.ensure_future(elector.run())
        while len(changes) < 2:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        return changes

    assert asyncio.run(run()) == [Term(0, False), None]


# ---- the guarantee --------------------------------------------------------------------------------------------------


class Turn:
    """Yields control to the driver of a coroutine."""

    def __await__(self) -> Generator[None, None, None]:
        yield


class Wire:
    """`Leases` over a bad network. Each request yields before it takes effect and before its response arrives."""

    def __init__(self, store: Store, late: list[Any]) -> None:
        self._store, self._late = store, late
        self.fate = "works"

    async def read(self) -> tuple[LeaseRecord, str] | None:
        lease: tuple[LeaseRecord | None, str] = await self._send(lambda: (self._store.record, str(self._store.version)))
        return None if lease[0] is None else (lease[0], lease[1])

    async def create(self, record: LeaseRecord, annotations: Mapping[str, str] = NO_ANNOTATIONS) -> str:
        return str(await self._send(lambda: self._store.create(record)))

    async def write(self, record: LeaseRecord, version: str, annotations: Mapping[str, str] = NO_ANNOTATIONS) -> str:
        return str(await self._send(lambda: self._store.write(record, version)))

    async def _send(self, request: Any) -> Any:
        await Turn()
        if self.fate == "rejected":
            raise ApiRejected(429, "TooManyRequests", "slow down")
        if self.fate == "late":
            self._late.append(request)
            raise OutcomeUnknown("timed out; it takes effect later")
        result = request()
        await Turn()
        if self.fate == "lost":
            raise OutcomeUnknown("the response was lost")
        return result


class Machine:
    """A replica that runs only when the test calls `go`; otherwise it is suspended at any point."""

    def __init__(self, name: str, world: "World", speed: float) -> None:
        self.wire = Wire(world.store, world.late)
        clock = lambda: 1000.0 + world.now * speed  # noqa: E731
        self.elector = Elector(self.wire, name, SETTINGS, clock=clock, wall=lambda: 0.0, on_change=ignore)
        self._step: Coroutine[Any, Any, float] | None = None

    def go(self, fate: str) -> None:
        self.wire.fate = fate
        self._step = self._step or self.elector.step()
        try:
            self._step.send(None)
        except StopIteration:
            self._step = None

    def close(self) -> None:
        if self._step:
            self._step.close()


async def ignore(_: Term | None) -> None:
    pass


class World:
    """Machines and one store; `now` is the true time."""

    def __init__(self, speeds: tuple[float, ...]) -> None:
        self.now = 0.0
        self.store = Store()
        self.late: list[Any] = []
        self.machines = {name: Machine(name, self, speed) for name, speed in zip("abc", speeds, strict=False)}

    def leaders(self) -> list[str]:
        return [name for name, machine in self.machines.items() if machine.elector.holds()]

    def deliver_late(self) -> None:
        """A request that timed out three requests ago takes effect."""
        while len(self.late) > 2:
            with suppress(ApiRejected):
                self.late.pop(0)()

    def close(self) -> None:
        for machine in self.machines.values():
            machine.close()


FATES = ["works"] * 8 + ["rejected", "lost", "late"]
STOPS = [1, 2, 2, 3, 6, 6]  # halves of requests before it is suspended; 6 are one or two steps
PASSES = [0.0, 0.0, 0.3, 1.0, 2.0, 4.0, 4.9, 6.5]  # seconds until the next move
MOVES = st.sampled_from(list(product("ab", FATES, STOPS, PASSES)))  # one draw each, so that many can be tried
SPEEDS = st.sampled_from(list(product([0.95, 1.0, 1.05], repeat=2)))


@examples(200)
@given(SPEEDS, st.lists(MOVES, min_size=10, max_size=60))
def test_there_are_never_two_leaders(speeds: tuple[float, ...], moves: list[tuple[str, str, int, float]]) -> None:
    with closing(World(speeds)) as world:
        for name, fate, stops, passes in moves:
            for _ in range(stops):
                world.machines[name].go(fate)
                assert len(world.leaders()) <= 1
            world.now += passes
            world.deliver_late()
            assert len(world.leaders()) <= 1


def test_the_guarantee_does_not_hold_by_having_no_leader() -> None:
    """The moves above, by hand: b and c become leaders as well, after a was suspended."""
    leaders = []
    with closing(World((1.0, 1.0, 1.0))) as world:
        for name in "abc":
            for _ in range(12):
                world.now += 0.7
                for _ in range(6):
                    world.machines[name].go("works")
                leaders += world.leaders()
    assert list(dict.fromkeys(leaders)) == ["a", "b", "c"]


def test_a_leader_that_was_suspended_through_anothers_term_begins_a_new_one() -> None:
    """The other was the leader and released the Lease meanwhile: cached state is stale, so the change must be
    reported."""
    now = [0.0]
    store = Store()
    replica, other = Replica(store, "a", now), Replica(store, "b", now)
    replica.step()
    before = replica.term
    other.step()
    now[0] = 6.5
    other.step()
    assert other.term is not None
    asyncio.run(other.elector.release())
    replica.step()
    assert replica.term is not None
    assert replica.term is not before
    assert queued(replica)[:2] == [before, None]
