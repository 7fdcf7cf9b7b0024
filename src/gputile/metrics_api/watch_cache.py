"""The watch cache of one kind: the present objects, and a bounded log of their changes.

It has no I/O and no clock, and a slow watch cannot make it keep more.

Every change has a number. A resourceVersion is that number and a mark of this process, in one decimal number, so that a
resourceVersion of another replica, or of this one before a restart, is recognized. It raises `ResourceExpired`, as does
one that is older than the log: the client lists again, and no watch ever misses a change.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import msgspec

MARK = 20  # bits; 41 are left for milliseconds, the sum fits into 63
DIGITS = 20  # of a 64-bit number at most
Json: TypeAlias = dict[str, Any]
Key: TypeAlias = tuple[str, str]  # namespace ("" where the kind has none), name


class ResourceExpired(Exception):
    """The resourceVersion is not, or no longer, in the log."""


class CachedObject(msgspec.Struct, frozen=True):
    """One version of an object."""

    key: Key
    uid: str
    body: Json  # without its resourceVersion
    version: int

    @property
    def labels(self) -> dict[str, str]:
        labels: dict[str, str] = self.body["metadata"].get("labels") or {}
        return labels


class CachedEvent(msgspec.Struct, frozen=True):
    """One change. Both versions are kept, because a selector may match only one of them."""

    version: int
    before: CachedObject | None
    after: CachedObject | None


class WatchCache:
    """The objects of one kind with the log of their changes, for list and watch."""

    def __init__(self, history: int, born: int, mark: int) -> None:
        """`born`: the first number, milliseconds since 1970 at the start. `mark`: a random number of this process."""
        self._items: dict[Key, CachedObject] = {}
        self._log: deque[CachedEvent] = deque(maxlen=history)
        self._version, self._floor, self._mark = born, born, mark
        self._news = asyncio.Event()
        self.closings = 0
        """How often all watches were closed."""

    def __len__(self) -> int:
        return len(self._items)

    # ---- changing ---------------------------------------------------------------------------------------------------

    def put(self, key: Key, uid: str, body: Json) -> bool:
        """Returns whether the object changed."""
        before = self._items.get(key)
        if before is not None and before.uid != uid:
            self.drop(key)  # a new object of the same name
            before = None
        if before is not None and before.body == body:
            return False
        after = self._items[key] = CachedObject(key, uid, body, self._version + 1)
        self._append(before, after)
        return True

    def drop(self, key: Key) -> None:
        before = self._items.pop(key, None)
        if before is not None:
            self._append(before, None)

    def close_watches(self) -> None:
        """End all watches; their clients may reconnect to another replica."""
        self.closings += 1
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _append(self, before: CachedObject | None, after: CachedObject | None) -> None:
        self._version += 1
        if len(self._log) == self._log.maxlen:
            self._floor = self._log[0].version
        self._log.append(CachedEvent(self._version, before, after))
        news, self._news = self._news, asyncio.Event()
        news.set()

    # ---- reading ----------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._version

    def items(self) -> list[CachedObject]:
        """In the order of their namespaces and names."""
        return [self._items[key] for key in sorted(self._items)]

    def find(self, key: Key) -> CachedObject | None:
        return self._items.get(key)

    def names(self) -> list[str]:
        """Without their namespaces."""
        return [name for _, name in self._items]

    def since(self, version: int, most: int = 500) -> list[CachedEvent]:
        """The first changes after this number; `ResourceExpired` if the log does not reach back to it."""
        if not self._floor <= version <= self._version:
            raise ResourceExpired
        start = len(self._log) - (self._version - version)
        return [self._log[at] for at in range(start, min(start + most, len(self._log)))]

    @property
    def news(self) -> Callable[[], Coroutine[Any, Any, bool]]:
        """Get it before reading the log and await it after, so that no change in between is missed."""
        return self._news.wait

    # ---- resourceVersions -------------------------------------------------------------------------------------------

    def written(self, version: int) -> str:
        return str(version << MARK | self._mark)

    def read(self, text: str) -> int:
        """The number in a resourceVersion of this process; `ResourceExpired` for any other."""
        is_number = text.isascii() and text.isdecimal() and len(text) <= DIGITS
        if not is_number or int(text) & ((1 << MARK) - 1) != self._mark:
            raise ResourceExpired
        return int(text) >> MARK
