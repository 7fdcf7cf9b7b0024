"""The list-and-watch loop with scripted feeds, and the decoding of lines and objects."""

import asyncio
import weakref
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from itertools import pairwise
from typing import Any, TypeAlias

import orjson
import pytest

from gputile.dialects.kube_objects import Metadata, Pod
from gputile.kube.api import (
    ApiRejected,
    Bookmark,
    Change,
    OutcomeUnknown,
    Snapshot,
    Undecodable,
    WatchFailed,
    WatchUpdate,
)
from gputile.kube.watch import OPENED, ApiFeed, ListResult, WatchError, WatchEvent, follow, lines, next_page
from tests.kube.server import line, listing, pod

Step: TypeAlias = WatchEvent[str] | Exception | float
A, B = Change("ADDED", "a"), Change("MODIFIED", "b")


class ScriptEnded(Exception):
    """The script has ended; `follow` must not handle this exception."""


class Script:
    """A feed that plays lists and watches in order, then ends. A number in a watch lets time pass."""

    what = "pods"

    def __init__(self, *plays: ListResult[str] | Exception | list[Step]) -> None:
        self._plays = list(plays)
        self.requests: list[str] = []
        self.slept: list[float] = []
        self.now = 0.0
        self.open = 0

    async def _next(self) -> Any:
        if not self._plays:
            raise ScriptEnded
        return self._plays.pop(0)

    async def list(self) -> ListResult[str]:
        self.requests.append("list")
        play = await self._next()
        if isinstance(play, Exception):
            raise play
        assert isinstance(play, ListResult)
        return play

    async def watch(self, version: str) -> AsyncGenerator[WatchEvent[str], None]:
        self.requests.append(f"watch {version}")
        play = await self._next()
        assert isinstance(play, list)
        self.open += 1
        try:
            for step in play:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, float):
                    self.now += step
                else:
                    yield step
        finally:
            self.open -= 1

    async def pause(self, seconds: float) -> None:
        self.slept.append(seconds)

    def follow(self) -> AsyncGenerator[WatchUpdate[str], None]:
        return follow(self, self.pause, jitter=lambda: 1.0, clock=lambda: self.now)


def updates_of(script: Script) -> list[WatchUpdate[str]]:
    """All updates before the script ends."""

    updates: list[WatchUpdate[str]] = []

    async def gather() -> None:
        async with aclosing(script.follow()) as stream:
            async for update in stream:
                updates.append(update)

    with pytest.raises(ScriptEnded):
        asyncio.run(gather())
    return updates


EMPTY = ListResult[str]((), "1")
DROPPED = OutcomeUnknown("reset")
GONE = ApiRejected(410, "Expired", "too old")


def watched(version: str, seen: Change[str] | Bookmark | Undecodable = A) -> WatchEvent[str]:
    return WatchEvent(version, seen)


def kinds(script: Script) -> list[str]:
    return [type(update).__name__.lower() for update in updates_of(script)]


@pytest.mark.parametrize(
    ("plays", "want"),
    [
        pytest.param([EMPTY, [OPENED]], ["snapshot", "bookmark", "watchfailed"], id="an-accepted-watch-is-alive"),
        pytest.param(
            [EMPTY, [OPENED, DROPPED], [OPENED, 200.0]],
            ["snapshot", "bookmark", "watchfailed", "bookmark"],
            id="also-after-a-drop: a quiet cluster sends nothing for a minute",
        ),
        pytest.param(
            [EMPTY, [OPENED, 90.0, DROPPED], [OPENED, 90.0, DROPPED], [OPENED, 90.0]],
            ["snapshot", "bookmark", "watchfailed", "watchfailed"],
            id="not-after-an-accepted-watch-without-even-a-bookmark",
        ),
        pytest.param(
            [EMPTY, [OPENED, 90.0, DROPPED], [OPENED, watched("2"), DROPPED], [OPENED, 20.0]],
            ["snapshot", "bookmark", "watchfailed", "change", "watchfailed", "bookmark"],
            id="until-the-next-event",
        ),
    ],
)
def test_what_shows_that_a_watch_is_alive(plays: list[Any], want: list[str]) -> None:
    assert kinds(Script(*plays)) == want


def test_a_watch_that_ends_after_its_start_is_retried_with_backoff() -> None:
    script = Script(EMPTY, [OPENED], [OPENED])
    updates_of(script)
    assert script.slept == [1.0, 2.0]


@pytest.mark.parametrize(
    ("plays", "requests", "slept"),
    [
        pytest.param([EMPTY, [watched("2")]], ["list", "watch 1", "watch 2"], [], id="resumes-after-a-normal-end"),
        pytest.param(
            [EMPTY, [watched("7", Bookmark())]], ["list", "watch 1", "watch 7"], [], id="a-bookmark-moves-the-version"
        ),
        pytest.param([EMPTY, [300.0]], ["list", "watch 1", "watch 1"], [], id="a-quiet-watch-that-times-out-is-normal"),
        pytest.param(
            [EMPTY, [], []],
            ["list", "watch 1", "watch 1", "watch 1"],
            [1.0, 2.0],
            id="a-watch-that-ends-at-once-is-retried-with-backoff",
        ),
        pytest.param(
            [EMPTY, [watched("2"), DROPPED]],
            ["list", "watch 1", "watch 2"],
            [1.0],
            id="a-dropped-watch-resumes-from-the-last-version",
        ),
        pytest.param(
            [EMPTY, [watched("2", Undecodable("Pod x", "bad")), DROPPED]],
            ["list", "watch 1", "watch 2"],
            [1.0],
            id="an-undecodable-object-moves-the-version-too",
        ),
        pytest.param(
            [EMPTY, [watched("2"), WatchEvent(None, A), DROPPED]],
            ["list", "watch 1", "watch 2"],
            [1.0],
            id="an-object-without-a-version-does-not",
        ),
        pytest.param(
            [DROPPED] * 7 + [EMPTY],
            ["list"] * 8 + ["watch 1"],
            [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0],
            id="backoff-doubles-to-thirty-seconds-and-never-gives-up",
        ),
        pytest.param(
            [DROPPED, DROPPED, EMPTY, [DROPPED]],
            ["list", "list", "list", "watch 1", "watch 1"],
            [1.0, 2.0, 1.0],
            id="a-list-resets-the-backoff",
        ),
        pytest.param(
            [EMPTY, [DROPPED], [DROPPED], [watched("2"), DROPPED], [DROPPED]],
            ["list", "watch 1", "watch 1", "watch 1", "watch 2", "watch 2"],
            [1.0, 2.0, 1.0, 2.0],
            id="a-watch-with-an-event-resets-the-backoff",
        ),
        pytest.param(
            [EMPTY, [watched("2"), GONE], EMPTY],
            ["list", "watch 1", "list", "watch 1"],
            [],
            id="an-expired-version-is-relisted-at-once",
        ),
        pytest.param(
            [EMPTY, [GONE], EMPTY, [GONE], EMPTY, [GONE], EMPTY],
            ["list", "watch 1"] * 4,
            [1.0, 1.0],
            id="a-server-that-always-answers-410-is-retried-with-backoff",
        ),
        pytest.param(
            [EMPTY, [WatchError(410, "Expired", "too old")], EMPTY],
            ["list", "watch 1", "list", "watch 1"],
            [],
            id="expired-as-an-error-event-is-the-same",
        ),
        pytest.param(
            [EMPTY, [WatchError(500, "InternalError", "etcd")], EMPTY],
            ["list", "watch 1", "list", "watch 1"],
            [1.0],
            id="another-error-event-relists-after-a-pause",
        ),
        pytest.param(
            [EMPTY, [ApiRejected(429, "TooManyRequests", "slow down", retry_after=7.0)]],
            ["list", "watch 1", "watch 1"],
            [7.0],
            id="retry-after-is-honoured",
        ),
        pytest.param(
            [ApiRejected(429, "TooManyRequests", "slow down", retry_after=1e9), EMPTY],
            ["list", "list", "watch 1"],
            [300.0],
            id="retry-after-is-limited",
        ),
        pytest.param(
            [EMPTY, *[[DROPPED]] * 5, EMPTY],
            ["list", *["watch 1"] * 5, "list", "watch 1"],
            [1.0, 2.0, 4.0, 8.0, 16.0],
            id="five-failed-watches-in-a-row-relist",
        ),
    ],
)
def test_requests_and_backoff(plays: list[Any], requests: list[str], slept: list[float]) -> None:
    script = Script(*plays)
    updates_of(script)
    assert (script.requests, script.slept) == (requests, slept)


async def test_a_list_is_not_kept_in_memory_while_the_watch_lasts() -> None:
    class Thing:
        pass

    script: Any = Script(ListResult((Thing(),), "1"), [WatchEvent("2", Bookmark())])  # type: ignore[arg-type]
    async with aclosing(script.follow()) as stream:
        snapshot = await anext(stream)
        reference = weakref.ref(snapshot.items[0])
        del snapshot
        await anext(stream)
        assert reference() is None


def test_list_changes_and_failures_in_order() -> None:
    undecodable = Undecodable("Pod ns/x", "bad")
    script = Script(
        ListResult(("a", "b"), "1", (undecodable,)),
        [watched("2", A), watched("3", Bookmark()), DROPPED],
        [watched("4", B)],
    )
    assert updates_of(script) == [
        undecodable,
        Snapshot(("a", "b")),
        A,
        Bookmark(),
        WatchFailed("cannot watch pods: reset"),
        B,
    ]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        pytest.param(GONE, ["resource version has expired", "relisting"], id="expired"),
        pytest.param(
            ApiRejected(403, "Forbidden", "pods is forbidden"),
            ["cannot list pods", "pods is forbidden", 'apiGroups: [""], resources: [pods], verbs: [get, list, watch]'],
            id="forbidden-names-the-rule-to-add",
        ),
        pytest.param(
            ApiRejected(401, "Unauthorized", "unknown token"), ["cannot list pods", "token"], id="unauthenticated"
        ),
        pytest.param(DROPPED, ["cannot list pods: reset"], id="dropped"),
    ],
)
def test_a_failure_says_what_to_do(error: Exception, words: list[str]) -> None:
    (failure,) = [update for update in updates_of(Script(error, EMPTY)) if isinstance(update, WatchFailed)]
    assert [word for word in words if word not in failure.why] == []


@pytest.mark.parametrize(
    ("path", "what", "rule"),
    [
        pytest.param("/api/v1/pods", "pods", 'apiGroups: [""], resources: [pods]', id="of-the-core-group"),
        pytest.param(
            "/apis/coordination.k8s.io/v1/namespaces/ns/leases",
            "leases.coordination.k8s.io",
            '(or Role): {apiGroups: ["coordination.k8s.io"], resources: [leases]',
            id="of-a-group-in-one-namespace",
        ),
    ],
)
def test_a_missing_right_is_named_as_an_rbac_rule(path: str, what: str, rule: str) -> None:
    script = Script(ApiRejected(403, "Forbidden", "denied"), EMPTY)
    script.what = ApiFeed(Pages(), path, "Any", Pod).what
    (failure,) = [update for update in updates_of(script) if isinstance(update, WatchFailed)]
    assert script.what == what
    assert rule in failure.why


def test_jitter_halves_the_wait_at_most() -> None:
    async def slept(chance: float) -> float:
        script = Script(DROPPED, EMPTY)
        async with aclosing(follow(script, script.pause, jitter=lambda: chance)) as stream:
            assert isinstance(await anext(stream), WatchFailed)
            assert isinstance(await anext(stream), Snapshot)
        return script.slept[0]

    assert [asyncio.run(slept(chance)) for chance in (0.0, 0.5, 1.0)] == [0.5, 0.75, 1.0]


def test_closing_ends_the_watch() -> None:
    async def run() -> int:
        script = Script(EMPTY, [watched("2"), watched("3")])
        async with aclosing(script.follow()) as stream:
            await anext(stream)
            await anext(stream)
            assert script.open == 1
        return script.open

    assert asyncio.run(run()) == 0


# ---- lines ----------------------------------------------------------------------------------------------------------


async def pieces(*chunks: bytes) -> AsyncGenerator[bytes, None]:
    for chunk in chunks:
        yield chunk


def split(*chunks: bytes) -> list[bytes]:
    async def gather() -> list[bytes]:
        return [complete async for complete in lines(pieces(*chunks))]

    return asyncio.run(gather())


LARGE = b"x" * 1_500_000


@pytest.mark.parametrize(
    ("chunks", "want"),
    [
        pytest.param([b"a\nb\n"], [b"a", b"b"], id="two-in-one-chunk"),
        pytest.param([b"a", b"b\nc", b"\n"], [b"ab", b"c"], id="one-across-chunks"),
        pytest.param([b"a\n", b"half"], [b"a"], id="half-a-line-at-the-end-is-dropped"),
        pytest.param([LARGE[:700_000], LARGE[700_000:] + b"\n"], [LARGE], id="a-line-of-megabytes"),
        pytest.param(
            [b"a\n" + LARGE, LARGE + b"\n"], [b"a", LARGE + LARGE], id="a-line-of-megabytes-after-a-short-one"
        ),
        pytest.param([b"", b"a", b"", b"\n"], [b"a"], id="empty-chunks"),
    ],
)
def test_lines(chunks: list[bytes], want: list[bytes]) -> None:
    assert split(*chunks) == want


def test_lines_do_not_depend_on_where_chunks_end() -> None:
    text = b"one\n\ntwo\nthree\n"
    cuts = [[text[i:j] for i, j in pairwise([0, cut, len(text)])] for cut in range(len(text))]
    assert {tuple(split(*chunks)) for chunks in cuts} == {(b"one", b"", b"two", b"three")}


# ---- the feed -------------------------------------------------------------------------------------------------------


class Pages:
    """HTTP without a server: responses in order."""

    def __init__(self, *answers: object) -> None:
        self._answers = list(answers)
        self.params: list[Mapping[str, str]] = []
        self.open = 0

    async def request(self, method: str, path: str, *, params: Mapping[str, str] | None = None) -> bytes:
        self.params.append(dict(params or {}))
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, bytes) else orjson.dumps(answer)

    async def stream(self, path: str, params: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        self.params.append(dict(params))
        self.open += 1
        try:
            for answer in self._answers:
                assert isinstance(answer, bytes)
                yield answer
        finally:
            self.open -= 1


def feed(http: Pages) -> ApiFeed[Pod]:
    return ApiFeed(http, "/api/v1/pods", "Pod", Pod, page=2, watch_timeout=300)


def names(listed: ListResult[Pod]) -> list[str]:
    return [item.name for item in listed.items]


def test_a_list_is_read_page_by_page() -> None:
    http = Pages(listing(pod("a"), pod("b"), more="c1"), listing(pod("c"), version="12"))
    listed = asyncio.run(feed(http).list())
    assert (names(listed), listed.version) == (["a", "b", "c"], "12")
    assert http.params == [{"limit": "2"}, {"limit": "2", "continue": "c1"}]


@pytest.mark.parametrize(
    ("size", "megabytes", "want"),
    [
        pytest.param(100, 1, 400, id="more-small-objects"),
        pytest.param(100, 0, 400, id="at-most-four-times-as-many-tiny-objects"),
        pytest.param(400, 1, 500, id="never-more-than-the-setting"),
        pytest.param(100, 8, 50, id="fewer-large-objects"),
        pytest.param(250, 300, 10, id="ten-huge-objects"),
    ],
)
def test_a_page_has_as_many_objects_as_fit_into_a_few_megabytes(size: int, megabytes: int, want: int) -> None:
    assert next_page(size, megabytes * 2**20, most=500) == want


def test_an_expired_continue_token_relists_without_pages() -> None:
    http = Pages(listing(pod("gone"), more="c1"), GONE, listing(pod("a"), pod("b"), pod("c")))
    assert names(asyncio.run(feed(http).list())) == ["a", "b", "c"]
    assert http.params == [{"limit": "2"}, {"limit": "2", "continue": "c1"}, {}]


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(DROPPED, id="dropped"),
        pytest.param(b'{"metadata": {"resourceVersion": "1"}, "items": [{', id="truncated"),
        pytest.param(b"<html>gateway</html>", id="not-JSON"),
    ],
)
def test_a_list_that_fails_midway_is_outcome_unknown(broken: object) -> None:
    with pytest.raises(OutcomeUnknown):
        asyncio.run(feed(Pages(listing(pod("a"), more="c1"), broken)).list())


@pytest.mark.parametrize(
    ("item", "what"),
    [
        pytest.param(pod("bad", spec={"containers": "none"}), "Pod ns/bad", id="a-field-of-the-wrong-type"),
        pytest.param(["no", "object"], "Pod ?", id="not-an-object"),
        pytest.param({"metadata": {"name": "x", "labels": 3}}, "Pod x", id="bad-metadata-keeps-its-name"),
        pytest.param({"metadata": "x"}, "Pod ?", id="no-metadata"),
    ],
)
def test_an_undecodable_object_affects_no_other(item: object, what: str) -> None:
    listed = asyncio.run(feed(Pages(listing(pod("a"), item, pod("b")))).list())
    assert (names(listed), [item.what for item in listed.undecodable]) == (["a", "b"], [what])


def test_an_empty_list_may_have_null_items() -> None:
    assert names(asyncio.run(feed(Pages({"metadata": {"resourceVersion": "5"}, "items": None})).list())) == []


def events(*chunks: bytes) -> list[WatchEvent[Pod]]:
    async def gather() -> list[WatchEvent[Pod]]:
        return [event async for event in feed(Pages(*chunks)).watch("1")]

    return asyncio.run(gather())


def test_watch_lines_become_events() -> None:
    bad = pod("bad", "4", spec={"containers": 3})
    watched_events = events(
        line("ADDED", pod("a", "2")) + b"\n" + line("BOOKMARK", {"metadata": {"resourceVersion": "3"}}),
        line("MODIFIED", bad),
    )
    assert [event.version for event in watched_events] == ["2", "3", "4"]
    added, bookmark, undecodable = [event.seen for event in watched_events]
    assert isinstance(added, Change)
    assert (added.kind, added.item.name, bookmark) == ("ADDED", "a", Bookmark())
    assert isinstance(undecodable, Undecodable)
    assert undecodable.what == "Pod ns/bad"


def test_the_deletion_of_an_undecodable_object_is_reported() -> None:
    (event,) = events(line("DELETED", pod("bad", "4", spec={"containers": 3})))
    meta = Metadata(name="bad", namespace="ns", uid="uid-bad", resource_version="4")
    assert event == WatchEvent("4", Change("DELETED", Pod(metadata=meta)))


@pytest.mark.parametrize(
    ("chunk", "status"),
    [
        pytest.param(line("ERROR", {"code": 410, "reason": "Expired", "message": "too old"}), 410, id="expired"),
        pytest.param(line("ERROR", {"code": 500}), 500, id="internal"),
        pytest.param(line("ERROR", "what"), 0, id="not-a-Status"),
    ],
)
def test_an_error_event_is_raised(chunk: bytes, status: int) -> None:
    with pytest.raises(WatchError) as caught:
        events(chunk)
    assert caught.value.status == status


@pytest.mark.parametrize(
    "chunk", [b"not json\n", b'{"type": "NEW", "object": {}}\n', b"\xff\n", b"[" * 100_000 + b"\n"]
)
def test_an_invalid_line_is_outcome_unknown(chunk: bytes) -> None:
    with pytest.raises(OutcomeUnknown):
        events(chunk)


def test_a_watch_requests_bookmarks_and_a_timeout() -> None:
    http = Pages()
    asyncio.run(drained(feed(http).watch("77")))
    assert http.params == [
        {"watch": "true", "resourceVersion": "77", "allowWatchBookmarks": "true", "timeoutSeconds": "300"}
    ]


def test_closing_a_watch_closes_its_stream_at_once() -> None:
    async def run() -> tuple[int, int]:
        http = Pages(line("ADDED", pod("a", "2")), line("ADDED", pod("b", "3")))
        async with aclosing(feed(http).watch("1")) as stream:
            await anext(stream)
            before = http.open
        return before, http.open

    assert asyncio.run(run()) == (1, 0)


async def drained(stream: AsyncGenerator[WatchEvent[Pod], None]) -> None:
    async for _ in stream:
        pass
