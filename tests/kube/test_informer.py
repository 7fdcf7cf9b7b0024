"""The informer: what it passes on, what it logs, and what it knows about its watch."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from gputile.kube.api import Bookmark, Change, Snapshot, Undecodable, WatchFailed, WatchUpdate
from gputile.kube.informer import LONGEST_ERROR, Informer, one_object
from gputile.telemetry.logs import JsonLines

RESET = WatchFailed("reset")
ODD = Undecodable("Pod ns/odd", "spec is a list")


class Follower:
    """An informer on a script of updates, and what it passed on, in order."""

    def __init__(self, *updates: WatchUpdate[str], **more: Any) -> None:
        self.updates, self.calls, self.now = updates, list[str](), 0.0
        self.feeds = 0
        self.failing = ""  # the object whose handling fails
        hooks = {
            "on_failure": lambda failed: self.calls.append(f"failed: {failed.why}"),
            "on_undecodable": lambda undecodable: self.calls.append(f"undecodable: {undecodable.what}"),
            "on_alive": lambda: self.calls.append("alive"),
        }
        self.informer = Informer(self.feed, self.listed, self.changed, clock=self.clock, **{**hooks, **more})

    def clock(self) -> float:
        self.now += 1.0
        return self.now

    async def feed(self) -> AsyncIterator[WatchUpdate[str]]:
        self.feeds += 1
        for update in self.updates:
            yield update

    async def listed(self, items: tuple[str, ...]) -> None:
        self.calls.append(f"list: {' '.join(items)}")

    async def changed(self, item: str, deleted: bool) -> None:
        if item == self.failing:
            raise RuntimeError(item)
        self.calls.append(f"{'deleted' if deleted else 'changed'}: {item}")


@pytest.mark.parametrize(
    ("updates", "calls"),
    [
        pytest.param([Snapshot(("a", "b"))], ["list: a b", "alive"], id="a-list"),
        pytest.param([Change("ADDED", "a")], ["changed: a", "alive"], id="an-added-object"),
        pytest.param([Change("DELETED", "a")], ["deleted: a", "alive"], id="a-deleted-object"),
        pytest.param([Bookmark()], ["alive"], id="a-bookmark-only-shows-that-the-watch-is-alive"),
        pytest.param([RESET], ["failed: reset"], id="a-failure-is-no-sign-of-life"),
        pytest.param([ODD], ["undecodable: Pod ns/odd"], id="nor-is-an-undecodable-object"),
    ],
)
async def test_each_update_is_passed_on(updates: list[WatchUpdate[str]], calls: list[str]) -> None:
    follower = Follower(*updates)
    await follower.informer.run()
    assert follower.calls == calls


@pytest.mark.parametrize(
    ("updates", "broken_since", "failure", "seen_at", "listed"),
    [
        pytest.param([], None, "", None, False, id="nothing-yet"),
        pytest.param([RESET], 1.0, "reset", None, False, id="broken-from-the-start"),
        pytest.param(
            [Snapshot(()), RESET, WatchFailed("again")], 2.0, "again", 1.0, True, id="since-the-first-failure"
        ),
        pytest.param([RESET, Snapshot(())], None, "", 2.0, True, id="a-list-ends-it"),
        pytest.param([RESET, Change("ADDED", "a")], None, "", 2.0, False, id="a-change-ends-it"),
        pytest.param([RESET, Bookmark()], None, "", 2.0, False, id="a-bookmark-ends-it"),
        pytest.param([RESET, ODD], 1.0, "reset", None, False, id="an-undecodable-object-does-not"),
    ],
)
async def test_it_knows_how_its_watch_is(
    updates: list[WatchUpdate[str]], broken_since: float | None, failure: str, seen_at: float | None, listed: bool
) -> None:
    informer = Follower(*updates).informer
    await informer.run()
    assert (informer.broken_since, informer.failure, informer.seen_at) == (broken_since, failure, seen_at)
    assert informer.listed.is_set() is listed


async def test_a_list_counts_only_when_it_was_handled() -> None:
    arrived, gate = asyncio.Event(), asyncio.Event()

    async def slowly(items: tuple[str, ...]) -> None:
        arrived.set()
        await gate.wait()

    follower = Follower(Snapshot(("a",)))
    informer = Informer(follower.feed, slowly, follower.changed)
    run = asyncio.create_task(informer.run())
    await arrived.wait()
    assert not informer.listed.is_set()
    gate.set()
    await run
    assert informer.listed.is_set()


@pytest.mark.parametrize(
    ("updates", "undecodable"),
    [
        pytest.param([ODD, Snapshot(())], {"ns/odd"}, id="of-the-list"),
        pytest.param([Snapshot(()), ODD], set(), id="not-before-the-next-list"),
        pytest.param([Snapshot(()), ODD, Snapshot(())], {"ns/odd"}, id="also-those-that-the-watch-showed-before-it"),
        pytest.param([ODD, Snapshot(()), Snapshot(())], set(), id="not-of-the-list-before"),
        pytest.param([Undecodable("Node n1", "odd"), Snapshot(())], {"n1"}, id="of-a-kind-without-namespace"),
    ],
)
async def test_it_knows_the_undecodable_objects_of_the_last_list(
    updates: list[WatchUpdate[str]], undecodable: set[str]
) -> None:
    informer = Follower(*updates).informer
    await informer.run()
    assert informer.undecodable == undecodable


# ---- logs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("updates", "more", "lines"),
    [
        pytest.param([RESET] * 3, {}, 1, id="a-failure-that-repeats-once"),
        pytest.param([RESET] * 3, {"log_repeats": True}, 3, id="or-each-time"),
        pytest.param([RESET, WatchFailed("403"), RESET], {}, 3, id="another-failure"),
        pytest.param([RESET, Bookmark(), RESET], {}, 2, id="after-a-sign-of-life-the-same-failure-is-a-new-one"),
        pytest.param([ODD] * 3, {}, 1, id="an-undecodable-object-that-repeats-once"),
        pytest.param([ODD] * 3, {"log_repeats": True}, 3, id="an-undecodable-object-each-time"),
        pytest.param([ODD, Undecodable("Pod ns/b", "odd"), ODD], {}, 3, id="another-undecodable-object"),
        pytest.param([RESET, ODD], {"message": ""}, 0, id="without-a-message-nothing"),
    ],
)
async def test_what_is_logged(
    updates: list[WatchUpdate[str]], more: dict[str, Any], lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    await Follower(*updates, **{"message": "watch failed; reconnecting", **more}).informer.run()
    assert len(caplog.records) == lines


async def test_a_log_line_is_a_constant_sentence_and_fields(caplog: pytest.LogCaptureFixture) -> None:
    long = Undecodable("Pod ns/odd", "x" * 2 * LONGEST_ERROR)
    follower = Follower(RESET, long, message="watch failed; reconnecting", log_fields={"kind": "pods"})
    await follower.informer.run()
    first, second = (JsonLines().format(record) for record in caplog.records)
    assert '"msg":"watch failed; reconnecting","kind":"pods","why":"reset"' in first
    why = "x" * LONGEST_ERROR
    assert f'"msg":"ignoring an undecodable object","what":"Pod ns/odd","why":"{why}"}}' in second
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


# ---- failing handlers -----------------------------------------------------------------------------------------------


async def test_without_isolation_an_error_of_a_handler_ends_the_run() -> None:
    follower = Follower(Change("ADDED", "bad"), Change("ADDED", "good"))
    follower.failing = "bad"
    with pytest.raises(RuntimeError, match="bad"):
        await follower.informer.run()
    assert follower.calls == []


async def test_with_isolation_the_other_updates_are_passed_on() -> None:
    caught: list[str] = []

    async def isolate(work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except RuntimeError as error:
            caught.append(str(error))

    follower = Follower(RESET, Change("ADDED", "bad"), ODD, Change("ADDED", "good"), isolate=isolate)
    follower.failing = "bad"
    await follower.informer.run()
    assert follower.calls == ["failed: reset", "undecodable: Pod ns/odd", "changed: good", "alive"]
    assert caught == ["bad"]


# ---- relist ---------------------------------------------------------------------------------------------------------


class Restartable(Follower):
    """Its feed lists at once, and then shows the changes of the test."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: asyncio.Queue[str] = asyncio.Queue()
        self.gate = asyncio.Event()
        self.gate.set()

    async def feed(self) -> AsyncIterator[WatchUpdate[str]]:
        self.feeds += 1
        await self.gate.wait()
        yield Snapshot((f"list-{self.feeds}",))
        while True:
            yield Change("ADDED", await self.changes.get())


async def test_a_relist_starts_the_feed_again_and_returns_when_its_list_was_passed_on() -> None:
    follower = Restartable()
    run = asyncio.create_task(follower.informer.run())
    await follower.informer.listed.wait()
    follower.gate.clear()
    relist = asyncio.create_task(follower.informer.relist())
    async with asyncio.timeout(2):
        while follower.feeds < 2:
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        assert not relist.done()
        follower.gate.set()
        await relist
        assert [call for call in follower.calls if call != "alive"] == ["list: list-1", "list: list-2"]
        follower.changes.put_nowait("a")  # one feed is left, so one change arrives once
        while "changed: a" not in follower.calls:
            await asyncio.sleep(0)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    assert follower.calls.count("changed: a") == 1


async def test_a_run_that_is_cancelled_closes_its_feed() -> None:
    follower, closed = Restartable(), asyncio.Event()

    async def feed() -> AsyncIterator[WatchUpdate[str]]:
        try:
            yield Snapshot(())
            await asyncio.Event().wait()
        finally:
            closed.set()

    informer = Informer(feed, follower.listed, follower.changed)
    run = asyncio.create_task(informer.run())
    await informer.listed.wait()
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    assert closed.is_set()


# ---- a feed of one object -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("update", "seen"),
    [
        pytest.param(Snapshot(("a",)), "a", id="it-is-listed"),
        pytest.param(Snapshot(()), None, id="it-does-not-exist"),
        pytest.param(Change("MODIFIED", "b"), "b", id="it-changed"),
        pytest.param(Change("DELETED", "b"), None, id="it-was-deleted"),
    ],
)
async def test_a_feed_of_one_object(update: WatchUpdate[str], seen: str | None) -> None:
    objects: list[str | None] = []

    async def on_object(found: str | None) -> None:
        objects.append(found)

    await Informer(Follower(update).feed, *one_object(on_object)).run()
    assert objects == [seen]
