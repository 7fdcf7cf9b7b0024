"""Long work on the event loop, in slices: between two of them probes and verbs are answered, and the lease is kept.

Searches (why a pod waits, whom to evict for it) share one `SearchLane`: one slice of one of them at a time, and then
a rest
as long as the slice. A probe needs half a dozen turns of the event loop (TLS), and each turn would cost it a slice of
every search that goes on. What the watch brings has no lane and no rest: decisions wait for it.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from gputile.engine.cooperative import Cooperative

SLICE = 0.005  # seconds
PATIENCE = 20  # rests in a row, after which a search goes on though others were quicker each time

T = TypeVar("T")

Pause = Callable[[float], Awaitable[None]]


class SearchLane:
    """When the searches that share it may go on."""

    def __init__(self) -> None:
        self.rests_until = 0.0


class TimeSlices:
    """Lets others have their turn whenever a slice of time is used up."""

    def __init__(self, clock: Callable[[], float], pause: Pause, lane: SearchLane | None = None) -> None:
        self._clock, self._pause, self._lane = clock, pause, lane
        self._began = clock()

    async def turn(self) -> None:
        """Here the work may be interrupted."""
        used = self._clock() - self._began
        if used > SLICE:
            await self._rest(used)
            self._began = self._clock()

    async def _rest(self, used: float) -> None:
        if self._lane is None:
            await self._pause(0)
            return
        self._lane.rests_until = self._clock() + used
        for _ in range(PATIENCE):
            await self._pause(max(0.0, self._lane.rests_until - self._clock()))
            if self._clock() >= self._lane.rests_until:
                return

    async def run(self, work: Cooperative[T]) -> T:
        """Work that says by itself where it may be interrupted."""
        while True:
            try:
                next(work)
            except StopIteration as end:
                result: T = end.value
                return result
            await self.turn()
