"""Classes of callers: who gets a place, who has to go for it, and that the sums are right whatever happens."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gputile.http.limits import CallerClass, CallerLimits
from tests.effort import examples


class Visitor:
    """A connection that has to go when it is told to."""

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
    ("there", "comes", "gone"),
    [
        pytest.param(
            [Visitor("a", since=2), Visitor("b", since=1)], Visitor("new", since=9), "", id="there-is-a-place"
        ),
        pytest.param(
            [Visitor("a", since=2), Visitor("b", since=1), Visitor("c", since=3)],
            Visitor("new", since=9),
            "b",
            id="the-one-that-did-nothing-for-longest-goes",
        ),
        pytest.param(
            [Visitor("kubelet", KUBELET, since=1), Visitor("b", since=2), Visitor("c", since=3)],
            Visitor("new", since=9),
            "b",
            id="it-is-one-of-the-address-that-has-most",
        ),
        pytest.param(
            [Visitor("a", since=1), Visitor("b", since=2), Visitor("c", since=3)],
            Visitor("kubelet", KUBELET, since=9),
            "a",
            id="a-newcomer-of-another-address-gets-a-place-of-the-crowd",
        ),
        pytest.param(
            [Visitor("a", since=1, served=True), Visitor("b", since=2), Visitor("c", since=3)],
            Visitor("new", since=9),
            "b",
            id="a-bind-under-way-is-not-cut-off",
        ),
        pytest.param(
            [Visitor(name, since=1, served=True) for name in "abc"],
            Visitor("new", since=9),
            "new",
            id="where-all-are-being-served-the-newcomer-has-to-try-again",
        ),
        pytest.param(
            [Visitor("a", "10.0.0.3", since=1), Visitor("b", "10.0.0.4", since=2), Visitor("c", "10.0.0.5", since=3)],
            Visitor("new", KUBELET, since=9),
            "a",
            id="where-nobody-has-more-than-one-the-slowest-goes",
        ),
    ],
)
def test_who_has_to_go_for_a_newcomer(there: list[Visitor], comes: Visitor, gone: str) -> None:
    found = callers()
    for visitor in (*there, comes):
        found.enter(visitor)
    assert [visitor.name for visitor in (*there, comes) if visitor.is_cut] == ([gone] if gone else [])
    assert len(found) == 3


def test_bodies_that_are_too_much_in_all_cost_the_slowest_of_the_others() -> None:
    found = callers()
    slow, quick, new = Visitor("slow", since=1), Visitor("quick", since=5), Visitor("new", since=0)
    for visitor in (slow, quick, new):
        found.enter(visitor)
    found.keep(slow, 50)
    found.keep(quick, 50)
    assert not slow.is_cut
    found.keep(new, 1)
    assert (slow.is_cut, quick.is_cut, new.is_cut) == (True, False, False)
    assert found.kept == 51
    found.keep(quick, 0)
    found.keep(new, 100)
    assert not quick.is_cut, "its body is whole"


def test_one_body_alone_is_never_too_much_here() -> None:
    found, visitor = callers(), Visitor()
    found.enter(visitor)
    found.keep(visitor, 101)
    assert not visitor.is_cut


def test_an_answer_that_many_are_sent_counts_once() -> None:
    found, page = callers(connections=50), b"x" * 60
    readers = [Visitor(str(n)) for n in range(20)]
    for reader in readers:
        found.enter(reader)
        found.begin(reader, page)
    assert (found.unsent, any(reader.is_cut for reader in readers)) == (60, False)
    for reader in readers:
        found.end(reader, page)
    assert found.unsent == 0


def test_answers_that_are_too_much_in_all_cost_those_who_fetch_nothing() -> None:
    """Of another answer: nothing would be won by those who are sent the same."""
    found = callers(connections=50)
    old, new = b"o" * 60, b"n" * 60
    stuck, slow, fresh, same = (Visitor(name, since=since) for name, since in zip("abcd", (1, 2, 3, 0), strict=True))
    for reader, page in ((stuck, old), (slow, old)):
        found.enter(reader)
        found.begin(reader, page)
    for reader in (same, fresh):
        found.enter(reader)
        found.begin(reader, new)
    assert [reader.is_cut for reader in (stuck, slow, fresh, same)] == [True, True, False, False]
    assert found.unsent == 60


def test_one_answer_is_always_sent_however_large() -> None:
    found, reader, page = callers(), Visitor(), b"x" * 1000
    found.enter(reader)
    found.begin(reader, page)
    assert not reader.is_cut


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda found, visitor, page: found.leave(visitor), id="who-leaves"),
        pytest.param(lambda found, visitor, page: found._evict(visitor), id="who-is-cut"),
    ],
)
def test_nothing_is_left_of_those_who_go(end: Callable[[CallerClass, Visitor, bytes], None]) -> None:
    found, visitor, page = callers(), Visitor(), b"page"
    found.enter(visitor)
    found.keep(visitor, 7)
    found.begin(visitor, page)
    end(found, visitor, page)
    found.end(visitor, page)
    found.leave(visitor)
    assert (len(found), found.kept, found.unsent, visitor in found, visitor.kept) == (0, 0, 0, False, 0)


def test_whoever_has_gone_counts_no_more() -> None:
    found, visitor = callers(), Visitor()
    found.keep(visitor, 7)
    found.begin(visitor, b"page")
    assert (found.kept, found.unsent, visitor.kept) == (0, 0, 0)


PAGES = [bytes([n]) * (20 * n + 10) for n in range(5)]


class Anything(RuleBasedStateMachine):
    """Whatever happens in whatever order, the sums are those of the ones who are there, and within the bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.callers, self.time = callers(connections=5), 0.0
        self.there: dict[Visitor, list[bytes]] = {}

    def _some(self, number: int) -> Visitor | None:
        self.there = {one: pages for one, pages in self.there.items() if not one.is_cut}
        return list(self.there)[number % len(self.there)] if self.there else None

    @rule(address=st.sampled_from("abc"), served=st.booleans())
    def come(self, address: str, served: bool) -> None:
        self.time += 1
        visitor = Visitor(str(self.time), address, self.time, served=served)
        self.there[visitor] = []
        self.callers.enter(visitor)

    @rule(number=st.integers(0, 9))
    def go(self, number: int) -> None:
        if (visitor := self._some(number)) is not None:
            del self.there[visitor]
            self.callers.leave(visitor)

    @rule(number=st.integers(0, 9), size=st.integers(0, 90))
    def keep(self, number: int, size: int) -> None:
        if (visitor := self._some(number)) is not None:
            self.callers.keep(visitor, size)

    @rule(number=st.integers(0, 9), page=st.sampled_from(PAGES))
    def begin(self, number: int, page: bytes) -> None:
        """One answer at a time, or the same twice."""
        if (visitor := self._some(number)) is not None and self.there[visitor] in ([], [page]):
            self.there[visitor].append(page)
            self.callers.begin(visitor, page)

    @rule(number=st.integers(0, 9))
    def end(self, number: int) -> None:
        if (visitor := self._some(number)) is not None and self.there[visitor]:
            self.callers.end(visitor, self.there[visitor].pop())

    @invariant()
    def adds_up(self) -> None:
        self._some(0)
        assert len(self.callers) == len(self.there) <= 5
        assert self.callers.kept == sum(one.kept for one in self.there) <= 100
        sent = {id(page): len(page) for pages in self.there.values() for page in pages}
        assert self.callers.unsent == sum(sent.values()) <= 100
        assert sum(self.callers._by_address.values()) == len(self.there)


TestAnything = Anything.TestCase
TestAnything.settings = examples(50)
