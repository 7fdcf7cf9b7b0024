"""Limits the number of simultaneous watches: in total, and per user.

A watch lasts for half an hour or more, and occupies a connection of the API server.
"""

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing

from gputile.metrics_api.status import StatusError

MOST = 256  # half of the API server's connections, so that lists and discovery always get one
MOST_PER_USER = 64
RETRY = 10  # seconds


class WatchLimits:
    """Counts watches, so that one user cannot block others, and all watches together cannot block other requests."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._running.total()

    def check(self, user: str) -> None:
        """`StatusError` 429 if the limit is reached."""
        if self._running[user] >= MOST_PER_USER:
            raise _too_many(f"user {user!r}: the limit of {MOST_PER_USER} watches is reached; end some of them")
        if len(self) >= MOST:
            raise _too_many(f"the limit of {MOST} watches is reached; try again later")

    async def counted(self, user: str, pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """Pass the pieces through. Counting starts with the first: an unstarted stream is never closed."""
        self._running[user] += 1
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    yield piece
        finally:
            self._running[user] -= 1
            if not self._running[user]:
                del self._running[user]


def _too_many(message: str) -> StatusError:
    return StatusError(429, "TooManyRequests", message, retryAfterSeconds=RETRY)
