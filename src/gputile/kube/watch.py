"""Following one kind of object: list once, then watch on from there, for ever.

Room:  one small endless loop that never gives up and never hides a gap (`follow`), and the feed that it drinks from
       (`ApiFeed`, over anything that can do HTTP).
Door:  `follow(feed, pause)`. Close it (`aclosing`) or cancel it, and the connection goes with it.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

import msgspec

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
from gputile.model.errors import GputileError

FIRST_DELAY, LONGEST_DELAY = 1.0, 30.0  # seconds between attempts
LONGEST_WISH = 300.0  # seconds of a Retry-After that we honour
TOO_SHORT = 1.0  # seconds: a watch that ends sooner, and empty, was no watch
LATE = 75.0  # seconds after which at least a bookmark must have come; the server sends one a minute
SLICE = 0.005  # seconds of reading a list, after which others have their turn
PAGE_BYTES = 4 * 2**20  # of a page that we want; objects may be a thousand times as large as others
FIRST_PAGE, SMALLEST_PAGE = 100, 10  # objects
PATIENCE = 5  # broken watches in a row after which we list again, whatever the reason

T = TypeVar("T")
Pause: TypeAlias = Callable[[float], Awaitable[None]]
UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


class ListResult(msgspec.Struct, Generic[T], frozen=True):
    """All there was at `version`."""

    items: tuple[T, ...]
    version: str
    spoilt: tuple[Undecodable, ...] = ()


class WatchEvent(msgspec.Struct, Generic[T], frozen=True):
    """One thing a watch said. `version` is where to watch on after it; None where it could not be read."""

    version: str | None
    seen: Change[T] | Bookmark | Undecodable


OPENED: WatchEvent[Any] = WatchEvent(None, Bookmark())
"""The server has begun to serve a watch. On a quiet cluster a minute may pass until it says more; yet it is well,
unless the watch before was served in the same way and not even bookmarks came."""


class WatchError(ApiRejected):
    """The server ended a watch with an ERROR event: our place in the history is of no more use."""


class Feed(Protocol[T]):
    """Where objects come from. Both calls may raise `ApiRejected` or `OutcomeUnknown`."""

    @property
    def what(self) -> str:
        """The resource, with its group where it has one: `pods`, `leases.coordination.k8s.io`."""

    async def list(self) -> ListResult[T]: ...

    def watch(self, version: str) -> AsyncGenerator[WatchEvent[T], None]:
        """Ends when the server has had enough, which is no trouble."""


# ---- the loop -------------------------------------------------------------------------------------------------------


async def follow(
    feed: Feed[T],
    pause: Pause = asyncio.sleep,
    *,
    jitter: Callable[[], float] = random.random,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncGenerator[WatchUpdate[T], None]:
    """List once, then watch on from where we stand. Ends only when cancelled or closed."""
    version: str | None = None
    pace = WatchBackoff(jitter)
    begun, empty, deaf = clock(), False, False
    while True:
        try:
            if version is None:
                listed = await feed.list()
                version, deaf = listed.version, False
                pace.listed()
                for spoilt in listed.spoilt:
                    yield spoilt
                yield Snapshot(listed.items)
                del listed  # else all of it would stay in memory as long as the watch lasts
            begun, empty = clock(), True
            async with aclosing(feed.watch(version)) as events:
                async for event in events:
                    if event == OPENED:
                        if not deaf:
                            yield event.seen
                        continue
                    version, empty, deaf = event.version or version, False, False
                    pace.delivered()
                    yield event.seen
            if empty and clock() - begun < TOO_SHORT:
                raise OutcomeUnknown("the watch ended as soon as it began, without a word")
        except GputileError as broke:
            deaf = deaf or (empty and clock() - begun > LATE)
            forbidden = isinstance(broke, ApiRejected) and broke.status == 403
            yield WatchFailed(_why(feed.what, "list" if version is None else "watch", broke), forbidden)
            wait = pace.after(broke)
            version = None if pace.must_list(broke) else version
            if wait:
                await pause(wait)


class WatchBackoff:
    """How long to wait after a failure, and when to stop watching and list again."""

    def __init__(self, jitter: Callable[[], float]) -> None:
        self._jitter = jitter
        self._delay = FIRST_DELAY
        self._broken = 0  # watches in a row
        self._expired = False  # once already, and nothing has come since

    def listed(self) -> None:
        self._delay, self._broken = FIRST_DELAY, 0

    def delivered(self) -> None:
        self.listed()
        self._expired = False

    def after(self, broke: GputileError) -> float:
        """Seconds to wait. An expired history is listed again at once, unless that was of no help the last time."""
        self._broken += 1
        if is_expired(broke) and not self._expired:
            self._expired = True
            return 0.0
        if isinstance(broke, ApiRejected) and broke.retry_after is not None:
            return min(broke.retry_after, LONGEST_WISH)
        delay, self._delay = self._delay, min(self._delay * 2, LONGEST_DELAY)
        return delay * (1 + self._jitter()) / 2

    def must_list(self, broke: GputileError) -> bool:
        return is_expired(broke) or isinstance(broke, WatchError) or self._broken >= PATIENCE


def is_expired(broke: GputileError) -> bool:
    return isinstance(broke, ApiRejected) and broke.status == 410


def _why(what: str, verb: str, broke: GputileError) -> str:
    if is_expired(broke):
        return f"{what}: the history is gone where we stood ({broke}); listing again"
    said = f"cannot {verb} {what}: {broke}"
    if not isinstance(broke, ApiRejected) or broke.status not in (401, 403):
        return said
    if broke.status == 401:
        return f"{said}; the server does not know us: check the token, or the kubeconfig's user"
    resource, _, group = what.partition(".")
    line = f'{{apiGroups: ["{group}"], resources: [{resource}], verbs: [get, list, watch]}}'
    return f"{said}; add this rule to our ClusterRole{' (or Role)' if group else ''}: {line}"


# ---- the feed -------------------------------------------------------------------------------------------------------


class WatchTransport(Protocol):
    """The little HTTP that a feed needs."""

    async def request(self, method: str, path: str, *, params: Mapping[str, str] | None = None) -> bytes: ...

    def stream(self, path: str, params: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        """The first piece comes when the server has said yes, and may be empty."""


class ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""
    next: str | None = msgspec.field(default=None, name="continue")


class ListBody(msgspec.Struct, frozen=True):
    metadata: ListMeta
    items: tuple[msgspec.Raw, ...] | None = None


class WatchLine(msgspec.Struct, frozen=True):
    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


class NameMeta(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    name: str = "?"
    namespace: str | None = None
    uid: str | None = None
    resource_version: str | None = None


class NamedObject(msgspec.Struct, frozen=True):
    """What is left to read of an object that cannot be read."""

    metadata: NameMeta = NameMeta()


class ApiStatus(msgspec.Struct, frozen=True):
    """What the API server says where it has nothing better to show."""

    code: int = 0
    reason: str | None = None
    message: str | None = None


LIST = msgspec.json.Decoder(ListBody)
LINE = msgspec.json.Decoder(WatchLine)
NAMED = msgspec.json.Decoder(NamedObject)
STATUS = msgspec.json.Decoder(ApiStatus)


class ApiFeed(Generic[T]):
    """A collection of the API server, item by item, so that one spoilt object spoils no other."""

    def __init__(
        self,
        http: WatchTransport,
        path: str,
        kind: str,
        item: type[T],
        *,
        page: int = 500,
        watch_timeout: int = 300,
        selector: Mapping[str, str] | None = None,
    ) -> None:
        """`selector` narrows what is listed and watched, such as `fieldSelector`."""
        self._http, self._path, self._kind, self._selector = http, path, kind, dict(selector or {})
        self._item: msgspec.json.Decoder[T] = msgspec.json.Decoder(item)
        self._page, self._watch_timeout = page, watch_timeout

    @property
    def what(self) -> str:
        resource = self._path.rpartition("/")[2]
        return f"{resource}.{self._path.split('/')[2]}" if self._path.startswith("/apis/") else resource

    async def list(self) -> ListResult[T]:
        """All objects. Where the pages expire under our hands, all at once instead: that cannot expire."""
        try:
            return await self._paged(self._page)
        except ApiRejected as refused:
            if refused.status != 410:
                raise
        return await self._paged(0)

    async def _paged(self, limit: int) -> ListResult[T]:
        items: list[T] = []
        spoilt: list[Undecodable] = []
        size = min(FIRST_PAGE, limit)
        params = self._selector | ({"limit": str(size)} if limit else {})
        while True:
            answer = await self._http.request("GET", self._path, params=params)
            body, began = self._body(answer), time.monotonic()
            for raw in body.items or ():
                found = self._read(raw)
                spoilt.append(found) if isinstance(found, Undecodable) else items.append(found)
                if time.monotonic() - began > SLICE:
                    await asyncio.sleep(0)
                    began = time.monotonic()
            if not body.metadata.next:
                return ListResult(tuple(items), body.metadata.resource_version, tuple(spoilt))
            size = next_page(size, len(answer), limit)
            params = self._selector | {"limit": str(size), "continue": body.metadata.next}

    def _body(self, answer: bytes) -> ListBody:
        try:
            return LIST.decode(answer)
        except UNREADABLE as wrong:
            raise OutcomeUnknown(f"the server's list of {self.what} cannot be read: {wrong}") from wrong

    async def watch(self, version: str) -> AsyncGenerator[WatchEvent[T], None]:
        params = {
            **self._selector,
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(self._watch_timeout),
        }
        async with aclosing(self._http.stream(self._path, params)) as chunks:
            first = await anext(chunks, b"")
            if not first:
                yield OPENED
            async with aclosing(lines(chunks, first)) as found:
                async for line in found:
                    if line.strip():
                        yield self._event(line)

    def _event(self, line: bytes) -> WatchEvent[T]:
        try:
            said = LINE.decode(line)
        except UNREADABLE as wrong:
            raise OutcomeUnknown(f"a line of the watch on {self.what} cannot be read: {wrong}") from wrong
        if said.type == "ERROR":
            raise watch_error(said.object)
        named = _named(said.object)
        if said.type == "BOOKMARK":
            return WatchEvent(named.resource_version, Bookmark())
        found = self._read(said.object)
        if isinstance(found, Undecodable) and said.type == "DELETED" and named.uid:
            found = self._item.decode(
                msgspec.json.encode(NamedObject(named))
            )  # that it is gone needs no more than its name
        return WatchEvent(named.resource_version, found if isinstance(found, Undecodable) else Change(said.type, found))

    def _read(self, raw: msgspec.Raw) -> T | Undecodable:
        try:
            return self._item.decode(raw)
        except UNREADABLE as wrong:
            meta = _named(raw)
            place = f"{meta.namespace}/{meta.name}" if meta.namespace else meta.name
            return Undecodable(f"{self._kind} {place}", str(wrong))


def next_page(size: int, length: int, most: int) -> int:
    """How many objects to ask for, after a page of `size` objects had `length` bytes."""
    return min(most, 4 * size, max(SMALLEST_PAGE, size * PAGE_BYTES // max(1, length)))


def _named(raw: msgspec.Raw) -> NameMeta:
    try:
        return NAMED.decode(raw).metadata
    except UNREADABLE:
        return NameMeta()


def watch_error(raw: msgspec.Raw) -> WatchError:
    """An ERROR event as the exception that it is."""
    try:
        said = STATUS.decode(raw)
    except UNREADABLE:
        said = ApiStatus()
    return WatchError(said.code, said.reason or "", said.message or "the server broke the watch off")


async def lines(chunks: AsyncIterable[bytes], first: bytes = b"") -> AsyncGenerator[bytes, None]:
    """Whole lines of any length out of pieces of any length. What is left at the end is half a line: dropped."""
    *whole, rest = first.split(b"\n")
    for line in whole:
        yield line
    begun = [rest]
    async for chunk in chunks:
        head, *tail = chunk.split(b"\n")
        begun.append(head)
        for piece in tail:
            yield b"".join(begun)
            begun = [piece]
