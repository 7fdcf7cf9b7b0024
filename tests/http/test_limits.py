"""Classes of callers: which connection is evicted for a new one, and that the counts are always right."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gputile.http.limits import CallerClass, CallerLimits
from tests.effort import examples


class FakeConnection:
    """A connection that records whether it was cut."""

    def __init__(self, name: str = "", address: str = "10.0.0.1", since: float = 0.0, *, served: bool = False) -> None:
        self.name, self.address, self.since, self.kept, self.is_served = name, address, since, 0, served
        self.is_cut = False

    def cut(self) -> None:
        self.is_cut = True

    def __repr__(self) -> str:
        return self.name


def callers(**limits: Any) -> CallerClass:
    wide: dict[str, Any] = {"connections": 3, "head": 100, "bodies": 100, "answers": 100, "idle": 1.0, "slow": 1.0}
    return CallerClass(CallerLimits(**{**wide, **limits}))


KUBELET = "10.0.0.2"


@pytest.mark.parametrize(
    ("existing", "newcomer", "evicted"),
    [
        pytest.param(
            [FakeConnection("a", since=2), FakeConnection("b", since=1)],
            FakeConnection("new", since=9),
            "",
            id="below-the-limit",
        ),
        pytest.param(
            [FakeConnection("a", since=2), FakeConnection("b", since=1), FakeConnection("c", since=3)],
            FakeConnection("new", since=9),
            "b",
            id="the-longest-idle-connection-is-evicted",
        ),
        pytest.param(
            [FakeConnection("kubelet", KUBELET, since=1), FakeConnection("b", since=2), FakeConnection("c", since=3)],
            FakeConnection("new", since=9),
            "b",
            id="it-belongs-to-the-address-with-the-most-connections",
        ),
        pytest.param(
            [FakeConnection("a", since=1), FakeConnection("b", since=2), FakeConnection("c", since=3)],
            FakeConnection("kubelet", KUBELET, since=9),
            "a",
            id="a-newcomer-of-another-address-evicts-one-of-the-crowd",
        ),
        pytest.param(
            [FakeConnection("a", since=1, served=True), FakeConnection("b", since=2), FakeConnection("c", since=3)],
            FakeConnection("new", since=9),
            "b",
            id="a-bind-under-way-is-not-evicted",
        ),
        pytest.param(
            [FakeConnection(name, since=1, served=True) for name in "abc"],
            FakeConnection("new", since=9),
            "new",
            id="if-all-are-being-served-the-newcomer-is-evicted",
        ),
        pytest.param(
            [
                FakeConnection("a", "10.0.0.3", since=1),
                FakeConnection("b", "10.0.0.4", since=2),
                FakeConnection("c", "10.0.0.5", since=3),
            ],
            FakeConnection("new", KUBELET, since=9),
            "a",
            id="with-one-connection-per-address-the-slowest-is-evicted",
        ),
    ],
)
def test_evicted_for_a_newcomer(existing: list[FakeConnection], newcomer: FakeConnection, evicted: str) -> None:
    limited = callers()
    for connection in (*existing, newcomer):
        limited.enter(connection)
    assert [connection.name for connection in (*existing, newcomer) if connection.is_cut] == (
        [evicted] if evicted else []
    )
    assert len(limited) == 3


def test_bodies_beyond_the_limit_evict_the_slowest_other() -> None:
    limited = callers()
    slow, quick, new = FakeConnection("slow", since=1), FakeConnection("quick", since=5), FakeConnection("new", since=0)
    for connection in (slow, quick, new):
        limited.enter(connection)
    limited.keep(slow, 50)
    limited.keep(quick, 50)
    assert not slow.is_cut
    limited.keep(new, 1)
    assert (slow.is_cut, quick.is_cut, new.is_cut) == (True, False, False)
    assert limited.kept == 51
    limited.keep(quick, 0)
    limited.keep(new, 100)
    assert not quick.is_cut, "its body is complete"


def test_a_single_body_is_never_evicted() -> None:
    limited, connection = callers(), FakeConnection()
    limited.enter(connection)
    limited.keep(connection, 101)
    assert not connection.is_cut


def test_a_response_sent_to_many_counts_once() -> None:
    limited, page = callers(connections=50), b"x" * 60
    readers = [FakeConnection(str(n)) for n in range(20)]
    for reader in readers:
        limited.enter(reader)
        limited.begin(reader, page)
    assert (limited.unsent, any(reader.is_cut for reader in readers)) == (60, False)
    for reader in readers:
        limited.end(reader, page)
    assert limited.unsent == 0


def test_responses_beyond_the_limit_evict_the_slowest_readers() -> None:
    """Readers of another response: evicting a reader of the same one frees no memory."""
    limited = callers(connections=50)
    old, new = b"o" * 60, b"n" * 60
    stuck, slow, fresh, same = (
        FakeConnection(name, since=since) for name, since in zip("abcd", (1, 2, 3, 0), strict=True)
    )
    for reader, page in ((stuck, old), (slow, old)):
        limited.enter(reader)
        limited.begin(reader, page)
    for reader in (same, fresh):
        limited.enter(reader)
        limited.begin(reader, new)
    assert [reader.is_cut for reader in (stuck, slow, fresh, same)] == [True, True, False, False]
    assert limited.unsent == 60


def test_a_single_response_is_always_sent() -> None:
    limited, reader, page = callers(), FakeConnection(), b"x" * 1000
    limited.enter(reader)
    limited.begin(reader, page)
    assert not reader.is_cut


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda limited, connection, page: limited.leave(connection), id="a-connection-that-leaves"),
        pytest.param(lambda limited, connection, page: limited._evict(connection), id="an-evicted-connection"),
    ],
)
def test_a_closed_connection_leaves_no_counts(end: Callable[[CallerClass, FakeConnection, bytes], None]) -> None:
    limited, connection, page = callers(), FakeConnection(), b"page"
    limited.enter(connection)
    limited.keep(connection, 7)
    limited.begin(connection, page)
    end(limited, connection, page)
    limited.end(connection, page)
    limited.leave(connection)
    assert (len(limited), limited.kept, limited.unsent, connection in limited, connection.kept) == (0, 0, 0, False, 0)


def test_a_closed_connection_is_not_counted() -> None:
    limited, connection = callers(), FakeConnection()
    limited.keep(connection, 7)
    limited.begin(connection, b"page")
    assert (limited.kept, limited.unsent, connection.kept) == (0, 0, 0)


PAGES = [bytes([n]) * (20 * n + 10) for n in range(5)]


class AnyOrder(RuleBasedStateMachine):
    """In any order of events, the counts are those of the open connections, and within the limits."""

    def __init__(self) -> None:
        super().__init__()
        self.callers, self.time = callers(connections=5), 0.0
        self.open: dict[FakeConnection, list[bytes]] = {}

    def _pick(self, number: int) -> FakeConnection | None:
        self.open = {connection: pages for connection, pages in self.open.items() if not connection.is_cut}
        return list(self.open)[number % len(self.open)] if self.open else None

    @rule(address=st.sampled_from("abc"), served=st.booleans())
    def enter(self, address: str, served: bool) -> None:
        self.time += 1
        connection = FakeConnection(str(self.time), address, self.time, served=served)
        self.open[connection] = []
        self.callers.enter(connection)

    @rule(number=st.integers(0, 9))
    def leave(self, number: int) -> None:
        if (connection := self._pick(number)) is not None:
            del self.open[connection]
            self.callers.leave(connection)

    @rule(number=st.integers(0, 9), size=st.integers(0, 90))
    def keep(self, number: int, size: int) -> None:
        if (connection := self._pick(number)) is not None:
            self.callers.keep(connection, size)

    @rule(number=st.integers(0, 9), page=st.sampled_from(PAGES))
    def begin(self, number: int, page: bytes) -> None:
        """One response at a time, or the same twice."""
        if (connection := self._pick(number)) is not None and self.open[connection] in ([], [page]):
            self.open[connection].append(page)
            self.callers.begin(connection, page)

    @rule(number=st.integers(0, 9))
    def end(self, number: int) -> None:
        if (connection := self._pick(number)) is not None and self.open[connection]:
            self.callers.end(connection, self.open[connection].pop())

    @invariant()
    def adds_up(self) -> None:
        self._pick(0)
        assert len(self.callers) == len(self.open) <= 5
        assert self.callers.kept == sum(connection.kept for connection in self.open) <= 100
        sent = {id(page): len(page) for pages in self.open.values() for page in pages}
        assert self.callers.unsent == sum(sent.values()) <= 100
        assert sum(self.callers._by_address.values()) == len(self.open)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = examples(50)
