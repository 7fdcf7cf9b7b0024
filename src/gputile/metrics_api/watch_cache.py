"""Objects of one kind with their history: what is there, and what happened since.

Room:  a dict and a log of bounded length. No I/O, no clock; nobody who reads slowly can make it keep more.
Door:  `put` and `drop` change it; `items`, `find`, `since` read it; `news` is awaited by those who watch.

Every change has a number. A resourceVersion is that number and a mark of this process, in one decimal: a number that
another replica gave, or we before a restart, is recognised as such. It is answered with `ResourceExpired`, as is one
that is older than the log: the reader lists again, and is never told a history with a hole in it.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import msgspec

MARK = 20  # bits; 41 are left for milliseconds, the sum fits into 63
DIGITS = 20  # what 64 bits take at most
Json: TypeAlias = dict[str, Any]
Key: TypeAlias = tuple[str, str]  # namespace ("" where the kind has none), name


class ResourceExpired(Exception):
    """This place in the history is not here (any more)."""


class CachedObject(msgspec.Struct, frozen=True):
    """One object, as it is since a change."""

    key: Key
    uid: str
    body: Json  # without its resourceVersion
    version: int

    @property
    def labels(self) -> dict[str, str]:
        found: dict[str, str] = self.body["metadata"].get("labels") or {}
        return found


class CachedEvent(msgspec.Struct, frozen=True):
    """One change. Both sides are kept, for a selector may match only one of them."""

    version: int
    before: CachedObject | None
    after: CachedObject | None


class WatchCache:
    """See the module's text."""

    def __init__(self, history: int, born: int, mark: int) -> None:
        """`born`: the first number, milliseconds since 1970 at our start. `mark`: by chance, this process's own."""
        self._items: dict[Key, CachedObject] = {}
        self._log: deque[CachedEvent] = deque(maxlen=history)
        self._version, self._floor, self._mark = born, born, mark
        self._news = asyncio.Event()
        self.closings = 0
        """How often all who watched were sent home."""

    def __len__(self) -> int:
        return len(self._items)

    # ---- changing ---------------------------------------------------------------------------------------------------

    def put(self, key: Key, uid: str, body: Json) -> bool:
        """Whether that changed anything."""
        before = self._items.get(key)
        if before is not None and before.uid != uid:
            self.drop(key)  # another object of the same name
            before = None
        if before is not None and before.body == body:
            return False
        after = self._items[key] = CachedObject(key, uid, body, self._version + 1)
        self._tell(before, after)
        return True

    def drop(self, key: Key) -> None:
        before = self._items.pop(key, None)
        if before is not None:
            self._tell(before, None)

    def send_home(self) -> None:
        """Whoever watches goes, and may come back to another replica."""
        self.closings += 1
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _tell(self, before: CachedObject | None, after: CachedObject | None) -> None:
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
        """The first that happened after this; `ResourceExpired` where that is not known."""
        if not self._floor <= version <= self._version:
            raise ResourceExpired
        start = len(self._log) - (self._version - version)
        return [self._log[at] for at in range(start, min(start + most, len(self._log)))]

    @property
    def news(self) -> Callable[[], Coroutine[Any, Any, bool]]:
        """To be taken before looking, and awaited after: nothing that happens in between is missed."""
        return self._news.wait

    # ---- resourceVersions -------------------------------------------------------------------------------------------

    def written(self, version: int) -> str:
        return str(version << MARK | self._mark)

    def read(self, said: str) -> int:
        """The number in a resourceVersion of ours; `ResourceExpired` for another's."""
        is_number = said.isascii() and said.isdecimal() and len(said) <= DIGITS
        if not is_number or int(said) & ((1 << MARK) - 1) != self._mark:
            raise ResourceExpired
        return int(said) >> MARK
