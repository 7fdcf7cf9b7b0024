"""Follows one kind of objects: passes each list and change on, and knows how current the passed-on state is.

It is client-go's informer without its cache: the followers keep what they need. It decides nothing about the objects.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Generic, TypeAlias, TypeVar

from gputile.concurrency.tasks import cancel_all
from gputile.kube.api import Bookmark, Change, Snapshot, Undecodable, WatchFailed, WatchUpdate
from gputile.telemetry.logs import fields

log = logging.getLogger(__name__)

LONGEST_ERROR = 500  # characters of an error in the log; parts of it may come from objects that others write
RELIST_CHECK = 0.02  # seconds between two checks whether a relist has arrived

T = TypeVar("T")
Feed: TypeAlias = Callable[[], AsyncIterator[WatchUpdate[T]]]
OnList: TypeAlias = Callable[[tuple[T, ...]], Awaitable[None]]
OnChange: TypeAlias = Callable[[T, bool], Awaitable[None]]
Isolate: TypeAlias = Callable[[Callable[[], Awaitable[None]]], Awaitable[object]]


class Informer(Generic[T]):
    """Runs the list and watch of one kind, and remembers whether they are broken and what they could not decode."""

    def __init__(
        self,
        feed: Feed[T],
        on_list: OnList[T],
        on_change: OnChange[T],
        *,
        on_failure: Callable[[WatchFailed], None] = lambda failure: None,
        on_undecodable: Callable[[Undecodable], None] = lambda undecodable: None,
        on_alive: Callable[[], None] = lambda: None,
        isolate: Isolate | None = None,
        clock: Callable[[], float] = time.monotonic,
        message: str = "",
        log_fields: dict[str, str] | None = None,
        log_repeats: bool = False,
    ) -> None:
        """`on_change` gets the object and whether it was deleted; `on_alive` is called after each list, change and
        bookmark. `isolate` runs the handling of one update; without it an error of a handler ends `run`.

        `message`: the log line of a failure, "" for no log at all. A failure that repeats is logged once, until the
        watch is alive again; an undecodable object that repeats once, until there is another. With `log_repeats` each
        time.
        """
        self._feed, self._on_list, self._on_change = feed, on_list, on_change
        self._on_failure, self._on_undecodable, self._on_alive = on_failure, on_undecodable, on_alive
        self._isolate, self._clock = isolate, clock
        self._message, self._log_fields, self._log_repeats = message, log_fields or {}, log_repeats
        self.listed = asyncio.Event()  # the first list has been passed on
        self.failure = ""  # why the watch is broken; "" while it is not
        self.broken_since: float | None = None
        self.seen_at: float | None = None  # when the API server last sent anything
        self.undecodable: set[str] = set()  # of the last list, as namespace/name
        self._found_undecodable: set[str] = set()  # since the last list
        self._last_undecodable: Undecodable | None = None  # as logged
        self._relist = asyncio.Event()
        self._stream = self._listed_stream = 0  # number of the watch, and of the last one that delivered a list

    def broken_for(self) -> float:
        """Seconds since the watch broke; 0 while it is not broken."""
        return 0.0 if self.broken_since is None else self._clock() - self.broken_since

    # ---- running ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow the feed, and from the start again after each `relist`. Ends only with the feed, which is endless."""
        again = True
        while again:
            self._relist.clear()
            self._stream += 1
            stream, relist = asyncio.create_task(self._follow()), asyncio.create_task(self._relist.wait())
            try:
                await asyncio.wait([stream, relist], return_when=asyncio.FIRST_COMPLETED)
                again = not stream.done()
                if stream.done():
                    stream.result()
            finally:
                await cancel_all([stream, relist])

    async def relist(self) -> None:
        """List all objects again, and wait until they have been passed on.

        Restarts the watch itself, so that the list and later changes arrive in the right order.
        """
        next_stream = self._stream + 1
        self._relist.set()
        while self._listed_stream < next_stream:
            await asyncio.sleep(RELIST_CHECK)

    async def _follow(self) -> None:
        self._found_undecodable = set()
        async for update in self._feed():
            if self._isolate is None:
                await self._handle(update)
            else:
                await self._isolate(partial(self._handle, update))
            del update  # a list is large: free it before the next update arrives

    async def _handle(self, update: WatchUpdate[T]) -> None:
        match update:
            case WatchFailed():
                self._handle_failure(update)
                return
            case Undecodable():
                self._handle_undecodable(update)
                return
            case Snapshot(items):
                self.undecodable, self._found_undecodable = self._found_undecodable, set()
                await self._on_list(items)
                self.listed.set()
                self._listed_stream = self._stream
            case Change(how, item):
                await self._on_change(item, how == "DELETED")
            case Bookmark():
                pass
        self.failure, self.broken_since, self.seen_at = "", None, self._clock()
        self._on_alive()

    # ---- failures ---------------------------------------------------------------------------------------------------

    def _handle_failure(self, failed: WatchFailed) -> None:
        is_repeated, self.failure = failed.why == self.failure, failed.why
        if self.broken_since is None:
            self.broken_since = self._clock()
        if self._message and (self._log_repeats or not is_repeated):
            log.warning(self._message, extra=fields(**self._log_fields, why=failed.why))
        self._on_failure(failed)

    def _handle_undecodable(self, undecodable: Undecodable) -> None:
        self._found_undecodable.add(undecodable.what.rpartition(" ")[2])
        is_repeated, self._last_undecodable = undecodable == self._last_undecodable, undecodable
        if self._message and (self._log_repeats or not is_repeated):
            why = undecodable.why[:LONGEST_ERROR]
            log.warning("ignoring an undecodable object", extra=fields(what=undecodable.what, why=why))
        self._on_undecodable(undecodable)


def one_object(on_object: Callable[[T | None], Awaitable[None]]) -> tuple[OnList[T], OnChange[T]]:
    """`on_list` and `on_change` for a feed of one object; None: it does not exist."""

    async def on_list(items: tuple[T, ...]) -> None:
        await on_object(items[0] if items else None)

    async def on_change(item: T, deleted: bool) -> None:
        await on_object(None if deleted else item)

    return on_list, on_change
