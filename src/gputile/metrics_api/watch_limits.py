"""How many watches run at once: in all, and of one user.

Room:  counting. A watch lives for half an hour and more, and each has a connection of the API server's for itself.
Door:  `WatchLimits.check` before a watch begins, `counted` around it.
"""

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing

from gputile.metrics_api.status import StatusError

MOST = 256  # half of the connections that the API server may have: lists and discovery always find one
MOST_OF_ONE = 64  # of one user
RETRY = 10  # seconds


class WatchLimits:
    """So that no user's watches lock out those of others, nor all of them the API server's other requests."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._running.total()

    def check(self, user: str) -> None:
        """`StatusError` 429 where there is no place."""
        if self._running[user] >= MOST_OF_ONE:
            raise _too_many(f"User {user!r} has {MOST_OF_ONE} watches here; end some of them")
        if len(self) >= MOST:
            raise _too_many(f"there are {MOST} watches here; try again later")

    async def counted(self, user: str, pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """The same pieces. Counted from the first on: a watch whose client left before it began never has an end."""
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
