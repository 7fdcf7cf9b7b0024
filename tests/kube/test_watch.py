"""The loop that follows, with scripted feeds; and how lines and objects come out of bytes."""

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


class Over(Exception):
    """The script has been played; nothing that `follow` should understand."""


class Script:
    """A feed that plays lists and watches in order, then is over. A number in a watch lets time pass."""

    what = "pods"

    def __init__(self, *plays: ListResult[str] | Exception | list[Step]) -> None:
        self._plays = list(plays)
        self.asked: list[str] = []
        self.slept: list[float] = []
        self.now = 0.0
        self.open = 0

    async def _next(self) -> Any:
        if not self._plays:
            raise Over
        return self._plays.pop(0)

    async def list(self) -> ListResult[str]:
        self.asked.append("list")
        play = await self._next()
        if isinstance(play, Exception):
            raise play
        assert isinstance(play, ListResult)
        return play

    async def watch(self, version: str) -> AsyncGenerator[WatchEvent[str], None]:
        self.asked.append(f"watch {version}")
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


def seen_of(script: Script) -> list[WatchUpdate[str]]:
    """All that comes before the script is over."""

    found: list[WatchUpdate[str]] = []

    async def gather() -> None:
        async with aclosing(script.follow()) as stream:
            async for seen in stream:
                found.append(seen)

    with pytest.raises(Over):
        asyncio.run(gather())
    return found


EMPTY = ListResult[str]((), "1")
DROPPED = OutcomeUnknown("reset")
GONE = ApiRejected(410, "Expired", "too old")


def watched(version: str, seen: Change[str] | Bookmark | Undecodable = A) -> WatchEvent[str]:
    return WatchEvent(version, seen)


def signs(script: Script) -> list[str]:
    return [type(seen).__name__.lower() for seen in seen_of(script)]


@pytest.mark.parametrize(
    ("plays", "told"),
    [
        pytest.param(
            [EMPTY, [OPENED]], ["snapshot", "bookmark", "watchfailed"], id="a-watch-that-begins-is-a-sign-of-life"
        ),
        pytest.param(
            [EMPTY, [OPENED, DROPPED], [OPENED, 200.0]],
            ["snapshot", "bookmark", "watchfailed", "bookmark"],
            id="also-after-a-cut: a quiet cluster says nothing for a minute",
        ),
        pytest.param(
            [EMPTY, [OPENED, 90.0, DROPPED], [OPENED, 90.0, DROPPED], [OPENED, 90.0]],
            ["snapshot", "bookmark", "watchfailed", "watchfailed"],
            id="not-after-one-that-began-so-and-brought-not-even-bookmarks",
        ),
        pytest.param(
            [EMPTY, [OPENED, 90.0, DROPPED], [OPENED, watched("2"), DROPPED], [OPENED, 20.0]],
            ["snapshot", "bookmark", "watchfailed", "change", "watchfailed", "bookmark"],
            id="until-something-comes-again",
        ),
    ],
)
def test_what_shows_that_a_watch_is_well(plays: list[Any], told: list[str]) -> None:
    assert signs(Script(*plays)) == told


def test_a_watch_that_only_begins_is_not_asked_for_at_full_speed() -> None:
    script = Script(EMPTY, [OPENED], [OPENED])
    seen_of(script)
    assert script.slept == [1.0, 2.0]


@pytest.mark.parametrize(
    ("plays", "asked", "slept"),
    [
        pytest.param([EMPTY, [watched("2")]], ["list", "watch 1", "watch 2"], [], id="goes-on-after-a-normal-end"),
        pytest.param(
            [EMPTY, [watched("7", Bookmark())]], ["list", "watch 1", "watch 7"], [], id="a-bookmark-moves-our-place"
        ),
        pytest.param([EMPTY, [300.0]], ["list", "watch 1", "watch 1"], [], id="a-quiet-watch-that-times-out-is-normal"),
        pytest.param(
            [EMPTY, [], []],
            ["list", "watch 1", "watch 1", "watch 1"],
            [1.0, 2.0],
            id="a-watch-that-ends-at-once-is-not-asked-for-at-full-speed",
        ),
        pytest.param(
            [EMPTY, [watched("2"), DROPPED]],
            ["list", "watch 1", "watch 2"],
            [1.0],
            id="a-drop-goes-on-from-the-last-version",
        ),
        pytest.param(
            [EMPTY, [watched("2", Undecodable("Pod x", "bad")), DROPPED]],
            ["list", "watch 1", "watch 2"],
            [1.0],
            id="a-spoilt-object-moves-our-place-too",
        ),
        pytest.param(
            [EMPTY, [watched("2"), WatchEvent(None, A), DROPPED]],
            ["list", "watch 1", "watch 2"],
            [1.0],
            id="an-object-without-version-does-not",
        ),
        pytest.param(
            [DROPPED] * 7 + [EMPTY],
            ["list"] * 8 + ["watch 1"],
            [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0],
            id="back-off-doubles-to-thirty-seconds-and-never-gives-up",
        ),
        pytest.param(
            [DROPPED, DROPPED, EMPTY, [DROPPED]],
            ["list", "list", "list", "watch 1", "watch 1"],
            [1.0, 2.0, 1.0],
            id="a-list-resets-the-back-off",
        ),
        pytest.param(
            [EMPTY, [DROPPED], [DROPPED], [watched("2"), DROPPED], [DROPPED]],
            ["list", "watch 1", "watch 1", "watch 1", "watch 2", "watch 2"],
            [1.0, 2.0, 1.0, 2.0],
            id="a-watch-that-delivers-resets-the-back-off",
        ),
        pytest.param(
            [EMPTY, [watched("2"), GONE], EMPTY],
            ["list", "watch 1", "list", "watch 1"],
            [],
            id="an-expired-history-is-listed-again-at-once",
        ),
        pytest.param(
            [EMPTY, [GONE], EMPTY, [GONE], EMPTY, [GONE], EMPTY],
            ["list", "watch 1"] * 4,
            [1.0, 1.0],
            id="a-server-that-always-says-expired-is-not-asked-at-full-speed",
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
            id="another-error-event-lists-again-after-a-pause",
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
            id="retry-after-within-reason",
        ),
        pytest.param(
            [EMPTY, *[[DROPPED]] * 5, EMPTY],
            ["list", *["watch 1"] * 5, "list", "watch 1"],
            [1.0, 2.0, 4.0, 8.0, 16.0],
            id="five-broken-watches-in-a-row-list-again",
        ),
    ],
)
def test_what_is_asked_and_how_long_it_sleeps(plays: list[Any], asked: list[str], slept: list[float]) -> None:
    script = Script(*plays)
    seen_of(script)
    assert (script.asked, script.slept) == (asked, slept)


async def test_a_list_is_not_kept_in_memory_while_the_watch_lasts() -> None:
    class Thing:
        pass

    script: Any = Script(ListResult((Thing(),), "1"), [WatchEvent("2", Bookmark())])  # type: ignore[arg-type]
    async with aclosing(script.follow()) as stream:
        told = await anext(stream)
        thing = weakref.ref(told.items[0])
        del told
        await anext(stream)
        assert thing() is None


def test_tells_list_changes_and_gaps_in_order() -> None:
    spoilt = Undecodable("Pod ns/x", "bad")
    script = Script(
        ListResult(("a", "b"), "1", (spoilt,)), [watched("2", A), watched("3", Bookmark()), DROPPED], [watched("4", B)]
    )
    assert seen_of(script) == [
        spoilt,
        Snapshot(("a", "b")),
        A,
        Bookmark(),
        WatchFailed("cannot watch pods: reset"),
        B,
    ]


@pytest.mark.parametrize(
    ("broke", "words"),
    [
        pytest.param(GONE, ["resource version has expired", "relisting"], id="expired"),
        pytest.param(
            ApiRejected(403, "Forbidden", "pods is forbidden"),
            ["cannot list pods", "pods is forbidden", 'apiGroups: [""], resources: [pods], verbs: [get, list, watch]'],
            id="forbidden-names-the-rule-to-add",
        ),
        pytest.param(
            ApiRejected(401, "Unauthorized", "who?"), ["cannot list pods", "token"], id="unknown-to-the-server"
        ),
        pytest.param(DROPPED, ["cannot list pods: reset"], id="dropped"),
    ],
)
def test_trouble_says_what_to_do(broke: Exception, words: list[str]) -> None:
    (trouble,) = [one for one in seen_of(Script(broke, EMPTY)) if isinstance(one, WatchFailed)]
    assert [word for word in words if word not in trouble.why] == []


@pytest.mark.parametrize(
    ("path", "what", "rule"),
    [
        pytest.param("/api/v1/pods", "pods", 'apiGroups: [""], resources: [pods]', id="of-the-core"),
        pytest.param(
            "/apis/coordination.k8s.io/v1/namespaces/ns/leases",
            "leases.coordination.k8s.io",
            '(or Role): {apiGroups: ["coordination.k8s.io"], resources: [leases]',
            id="of-a-group-in-one-namespace",
        ),
    ],
)
def test_a_missing_right_is_named_as_it_has_to_be_written(path: str, what: str, rule: str) -> None:
    script = Script(ApiRejected(403, "Forbidden", "no"), EMPTY)
    script.what = ApiFeed(Pages(), path, "Any", Pod).what
    (trouble,) = [one for one in seen_of(script) if isinstance(one, WatchFailed)]
    assert script.what == what
    assert rule in trouble.why


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
        return [found async for found in lines(pieces(*chunks))]

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
    """HTTP without a server: answers in order."""

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
        pytest.param(100, 1, 400, id="small-objects-more-of-them"),
        pytest.param(100, 0, 400, id="tiny-objects-four-times-as-many-at-most"),
        pytest.param(400, 1, 500, id="never-more-than-the-setting"),
        pytest.param(100, 8, 50, id="large-objects-fewer-of-them"),
        pytest.param(250, 300, 10, id="huge-objects-ten-of-them"),
    ],
)
def test_a_page_has_as_many_objects_as_fit_into_a_few_megabytes(size: int, megabytes: int, want: int) -> None:
    assert next_page(size, megabytes * 2**20, most=500) == want


def test_a_page_that_expired_starts_the_list_again_without_pages() -> None:
    http = Pages(listing(pod("gone"), more="c1"), GONE, listing(pod("a"), pod("b"), pod("c")))
    assert names(asyncio.run(feed(http).list())) == ["a", "b", "c"]
    assert http.params == [{"limit": "2"}, {"limit": "2", "continue": "c1"}, {}]


@pytest.mark.parametrize(
    "broke",
    [
        pytest.param(DROPPED, id="dropped"),
        pytest.param(b'{"metadata": {"resourceVersion": "1"}, "items": [{', id="cut-off"),
        pytest.param(b"<html>gateway</html>", id="no-json"),
    ],
)
def test_a_list_that_fails_midway_is_no_list(broke: object) -> None:
    with pytest.raises(OutcomeUnknown):
        asyncio.run(feed(Pages(listing(pod("a"), more="c1"), broke)).list())


@pytest.mark.parametrize(
    ("item", "what"),
    [
        pytest.param(pod("bad", spec={"containers": "none"}), "Pod ns/bad", id="a-field-of-the-wrong-type"),
        pytest.param(["no", "object"], "Pod ?", id="no-object"),
        pytest.param({"metadata": {"name": "x", "labels": 3}}, "Pod x", id="bad-metadata-keeps-its-name"),
        pytest.param({"metadata": "x"}, "Pod ?", id="no-metadata"),
    ],
)
def test_a_spoilt_object_spoils_no_other(item: object, what: str) -> None:
    listed = asyncio.run(feed(Pages(listing(pod("a"), item, pod("b")))).list())
    assert (names(listed), [one.what for one in listed.spoilt]) == (["a", "b"], [what])


def test_an_empty_list_may_have_null_items() -> None:
    assert names(asyncio.run(feed(Pages({"metadata": {"resourceVersion": "5"}, "items": None})).list())) == []


def events(*chunks: bytes) -> list[WatchEvent[Pod]]:
    async def gather() -> list[WatchEvent[Pod]]:
        return [event async for event in feed(Pages(*chunks)).watch("1")]

    return asyncio.run(gather())


def test_watch_lines_become_events() -> None:
    bad = pod("bad", "4", spec={"containers": 3})
    found = events(
        line("ADDED", pod("a", "2")) + b"\n" + line("BOOKMARK", {"metadata": {"resourceVersion": "3"}}),
        line("MODIFIED", bad),
    )
    assert [event.version for event in found] == ["2", "3", "4"]
    added, bookmark, spoilt = [event.seen for event in found]
    assert isinstance(added, Change)
    assert (added.kind, added.item.name, bookmark) == ("ADDED", "a", Bookmark())
    assert isinstance(spoilt, Undecodable)
    assert spoilt.what == "Pod ns/bad"


def test_a_spoilt_object_that_was_deleted_is_told_as_deleted() -> None:
    (event,) = events(line("DELETED", pod("bad", "4", spec={"containers": 3})))
    meta = Metadata(name="bad", namespace="ns", uid="uid-bad", resource_version="4")
    assert event == WatchEvent("4", Change("DELETED", Pod(metadata=meta)))


@pytest.mark.parametrize(
    ("chunk", "status"),
    [
        pytest.param(line("ERROR", {"code": 410, "reason": "Expired", "message": "too old"}), 410, id="expired"),
        pytest.param(line("ERROR", {"code": 500}), 500, id="internal"),
        pytest.param(line("ERROR", "what"), 0, id="no-status"),
    ],
)
def test_an_error_event_is_raised(chunk: bytes, status: int) -> None:
    with pytest.raises(WatchError) as caught:
        events(chunk)
    assert caught.value.status == status


@pytest.mark.parametrize(
    "chunk", [b"not json\n", b'{"type": "NEW", "object": {}}\n', b"\xff\n", b"[" * 100_000 + b"\n"]
)
def test_a_line_that_is_no_event_is_unclear(chunk: bytes) -> None:
    with pytest.raises(OutcomeUnknown):
        events(chunk)


def test_a_watch_asks_for_bookmarks_and_an_end() -> None:
    http = Pages()
    asyncio.run(drained(feed(http).watch("77")))
    assert http.params == [
        {"watch": "true", "resourceVersion": "77", "allowWatchBookmarks": "true", "timeoutSeconds": "300"}
    ]


def test_closing_a_watch_closes_the_stream_beneath_it_at_once() -> None:
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
