"""List and watch one resource for ever: list once, watch from there, relist after a gap, with backoff.

`follow` is the endless loop; it must never give up and never hide a gap. `ApiFeed` lists and watches over HTTP. Close
`follow` (`aclosing`) or cancel it, and its connection is closed too.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

import msgspec

from gputile.concurrency.time_slices import TimeSlices
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
from gputile.model.decode_errors import decode_problem
from gputile.model.errors import GputileError

FIRST_DELAY, LONGEST_DELAY = 1.0, 30.0  # seconds between attempts
LONGEST_RETRY_AFTER = 300.0  # seconds; a longer Retry-After is cut
TOO_SHORT = 1.0  # seconds: a watch that ends sooner without an event counts as failed
LATE = 75.0  # seconds without any event, not even a bookmark; the API server sends one per minute
PAGE_BYTES = 4 * 2**20  # of a page; some objects are a thousand times as large as others
FIRST_PAGE, SMALLEST_PAGE = 100, 10  # objects
MOST_FAILURES = 5  # failed watches in a row before a relist, whatever the error

T = TypeVar("T")
Pause: TypeAlias = Callable[[float], Awaitable[None]]
UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


class ListResult(msgspec.Struct, Generic[T], frozen=True):
    """All objects at resource version `version`."""

    items: tuple[T, ...]
    version: str
    undecodable: tuple[Undecodable, ...] = ()


class WatchEvent(msgspec.Struct, Generic[T], frozen=True):
    """One event of a watch. `version` is the resource version to resume from; None if it is unknown."""

    version: str | None
    seen: Change[T] | Bookmark | Undecodable


OPENED: WatchEvent[Any] = WatchEvent(None, Bookmark())
"""The API server has accepted a watch. On a quiet cluster the first event may take a minute; the watch still counts as
alive, unless the watch before was accepted too and delivered not even a bookmark."""


class WatchError(ApiRejected):
    """The API server ended a watch with an ERROR event: the resource version can no longer be used."""


class Feed(Protocol[T]):
    """A resource to list and watch. Both calls may raise `ApiRejected` or `OutcomeUnknown`."""

    @property
    def what(self) -> str:
        """The resource, with its group where it has one: `pods`, `leases.coordination.k8s.io`."""

    async def list(self) -> ListResult[T]: ...

    def watch(self, version: str) -> AsyncGenerator[WatchEvent[T], None]:
        """Ends when the API server closes the watch, which is normal."""


# ---- the loop -------------------------------------------------------------------------------------------------------


async def follow(
    feed: Feed[T],
    pause: Pause = asyncio.sleep,
    *,
    jitter: Callable[[], float] = random.random,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncGenerator[WatchUpdate[T], None]:
    """List once, then watch from that resource version. Ends only when cancelled or closed."""
    version: str | None = None
    backoff = WatchBackoff(jitter)
    started, is_empty, is_stale = clock(), False, False
    while True:
        try:
            if version is None:
                listed = await feed.list()
                version, is_stale = listed.version, False
                backoff.listed()
                for undecodable in listed.undecodable:
                    yield undecodable
                yield Snapshot(listed.items)
                del listed  # else the whole list would stay in memory as long as the watch lasts
            started, is_empty = clock(), True
            async with aclosing(feed.watch(version)) as events:
                async for event in events:
                    if event == OPENED:
                        if not is_stale:
                            yield event.seen
                        continue
                    version, is_empty, is_stale = event.version or version, False, False
                    backoff.delivered()
                    yield event.seen
            if is_empty and clock() - started < TOO_SHORT:
                raise OutcomeUnknown("the API server closed the watch immediately, without an event")
        except GputileError as error:
            is_stale = is_stale or (is_empty and clock() - started > LATE)
            forbidden = isinstance(error, ApiRejected) and error.status == 403
            yield WatchFailed(_reason(feed.what, "list" if version is None else "watch", error), forbidden)
            wait = backoff.after(error)
            version = None if backoff.must_list(error) else version
            if wait:
                await pause(wait)


class WatchBackoff:
    """Decides how long to wait after a failure, and when to relist instead of watching."""

    def __init__(self, jitter: Callable[[], float]) -> None:
        self._jitter = jitter
        self._delay = FIRST_DELAY
        self._failures = 0  # failed watches in a row
        self._expired = False  # a 410 occurred, and no event was received since

    def listed(self) -> None:
        self._delay, self._failures = FIRST_DELAY, 0

    def delivered(self) -> None:
        self.listed()
        self._expired = False

    def after(self, error: GputileError) -> float:
        """Seconds to wait. After a 410 the relist is immediate, unless the previous relist did not help."""
        self._failures += 1
        if is_expired(error) and not self._expired:
            self._expired = True
            return 0.0
        if isinstance(error, ApiRejected) and error.retry_after is not None:
            return min(error.retry_after, LONGEST_RETRY_AFTER)
        delay, self._delay = self._delay, min(self._delay * 2, LONGEST_DELAY)
        return delay * (1 + self._jitter()) / 2

    def must_list(self, error: GputileError) -> bool:
        return is_expired(error) or isinstance(error, WatchError) or self._failures >= MOST_FAILURES


def is_expired(error: GputileError) -> bool:
    """HTTP 410: the resource version is too old."""
    return isinstance(error, ApiRejected) and error.status == 410


def _reason(resource: str, verb: str, error: GputileError) -> str:
    """What failed and what to do; for 403 the RBAC rule that is missing."""
    if is_expired(error):
        return f"{resource}: the resource version has expired ({error}); relisting"
    failure = f"cannot {verb} {resource}: {error}"
    if not isinstance(error, ApiRejected) or error.status not in (401, 403):
        return failure
    if error.status == 401:
        return f"{failure}; not authenticated: check the token, or the kubeconfig's user"
    name, _, group = resource.partition(".")
    rule = f'{{apiGroups: ["{group}"], resources: [{name}], verbs: [get, list, watch]}}'
    return f"{failure}; add this rule to gputile's ClusterRole{' (or Role)' if group else ''}: {rule}"


# ---- the feed -------------------------------------------------------------------------------------------------------


class WatchTransport(Protocol):
    """The HTTP requests that a feed needs; `Client` has them."""

    async def request(self, method: str, path: str, *, params: Mapping[str, str] | None = None) -> bytes: ...

    def stream(self, path: str, params: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        """The first piece comes when the API server has accepted the watch, and may be empty."""


class ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    """The `metadata` of a list."""

    resource_version: str = ""
    next: str | None = msgspec.field(default=None, name="continue")


class ListBody(msgspec.Struct, frozen=True):
    """A page of a list; its items are decoded one by one."""

    metadata: ListMeta
    items: tuple[msgspec.Raw, ...] | None = None


class WatchLine(msgspec.Struct, frozen=True):
    """One line of a watch; its object is decoded separately."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


class NameMeta(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The `metadata` that identifies an object."""

    name: str = "?"
    namespace: str | None = None
    uid: str | None = None
    resource_version: str | None = None


class NamedObject(msgspec.Struct, frozen=True):
    """The part of an object that is read if the rest cannot be decoded."""

    metadata: NameMeta = NameMeta()


class ApiStatus(msgspec.Struct, frozen=True):
    """A meta/v1 Status, as far as gputile reads it."""

    code: int = 0
    reason: str | None = None
    message: str | None = None


LIST = msgspec.json.Decoder(ListBody)
LINE = msgspec.json.Decoder(WatchLine)
NAMED = msgspec.json.Decoder(NamedObject)
STATUS = msgspec.json.Decoder(ApiStatus)


class ApiFeed(Generic[T]):
    """A resource of the API server; objects are decoded one by one, so that an undecodable one affects no other."""

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
        """`selector` limits the objects, such as `fieldSelector`."""
        self._http, self._path, self._kind, self._selector = http, path, kind, dict(selector or {})
        self._item: msgspec.json.Decoder[T] = msgspec.json.Decoder(item)
        self._page, self._watch_timeout = page, watch_timeout

    @property
    def what(self) -> str:
        resource = self._path.rpartition("/")[2]
        return f"{resource}.{self._path.split('/')[2]}" if self._path.startswith("/apis/") else resource

    async def list(self) -> ListResult[T]:
        """All objects, in pages. If the continue token expires, all in one response instead, which cannot expire."""
        try:
            return await self._list(self._page)
        except ApiRejected as error:
            if error.status != 410:
                raise
        return await self._list(0)

    async def _list(self, limit: int) -> ListResult[T]:
        """`limit`: objects per page; 0 for all in one response."""
        items: list[T] = []
        undecodable: list[Undecodable] = []
        size = min(FIRST_PAGE, limit)
        params = self._selector | ({"limit": str(size)} if limit else {})
        while True:
            answer = await self._http.request("GET", self._path, params=params)
            body, slices = self._body(answer), TimeSlices(time.monotonic, asyncio.sleep)
            for raw in body.items or ():
                item = self._decode(raw)
                undecodable.append(item) if isinstance(item, Undecodable) else items.append(item)
                await slices.turn()
            if not body.metadata.next:
                return ListResult(tuple(items), body.metadata.resource_version, tuple(undecodable))
            size = next_page(size, len(answer), limit)
            params = self._selector | {"limit": str(size), "continue": body.metadata.next}

    def _body(self, answer: bytes) -> ListBody:
        try:
            return LIST.decode(answer)
        except UNREADABLE as error:
            raise OutcomeUnknown(f"the list of {self.what} cannot be decoded: {decode_problem(error)}") from error

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
            async with aclosing(lines(chunks, first)) as whole_lines:
                async for line in whole_lines:
                    if line.strip():
                        yield self._event(line)

    def _event(self, line: bytes) -> WatchEvent[T]:
        try:
            event = LINE.decode(line)
        except UNREADABLE as error:
            raise OutcomeUnknown(
                f"an event of the watch on {self.what} cannot be decoded: {decode_problem(error)}"
            ) from error
        if event.type == "ERROR":
            raise watch_error(event.object)
        meta = _metadata(event.object)
        if event.type == "BOOKMARK":
            return WatchEvent(meta.resource_version, Bookmark())
        item = self._decode(event.object)
        if isinstance(item, Undecodable) and event.type == "DELETED" and meta.uid:
            item = self._item.decode(msgspec.json.encode(NamedObject(meta)))  # a deletion needs only the name
        return WatchEvent(meta.resource_version, item if isinstance(item, Undecodable) else Change(event.type, item))

    def _decode(self, raw: msgspec.Raw) -> T | Undecodable:
        try:
            return self._item.decode(raw)
        except UNREADABLE as error:
            meta = _metadata(raw)
            name = f"{meta.namespace}/{meta.name}" if meta.namespace else meta.name
            return Undecodable(f"{self._kind} {name}", str(decode_problem(error)))


def next_page(size: int, length: int, most: int) -> int:
    """The size of the next page, after a page of `size` objects had `length` bytes."""
    return min(most, 4 * size, max(SMALLEST_PAGE, size * PAGE_BYTES // max(1, length)))


def _metadata(raw: msgspec.Raw) -> NameMeta:
    try:
        return NAMED.decode(raw).metadata
    except UNREADABLE:
        return NameMeta()


def watch_error(raw: msgspec.Raw) -> WatchError:
    """The exception for an ERROR event."""
    try:
        status = STATUS.decode(raw)
    except UNREADABLE:
        status = ApiStatus()
    return WatchError(
        status.code, status.reason or "", status.message or "the API server ended the watch with an error"
    )


async def lines(chunks: AsyncIterable[bytes], first: bytes = b"") -> AsyncGenerator[bytes, None]:
    """Split chunks of any length into complete lines. An incomplete line at the end is dropped."""
    *complete, rest = first.split(b"\n")
    for line in complete:
        yield line
    parts = [rest]
    async for chunk in chunks:
        head, *tail = chunk.split(b"\n")
        parts.append(head)
        for piece in tail:
            yield b"".join(parts)
            parts = [piece]
