"""Long work on the event loop, in time slices: probes, extender calls and lease renewals run between two slices.

Searches (why a pod is pending, which pods to evict) share one `SearchLane`: one slice of one search at a time, followed
by a pause as long as the slice. A probe over TLS needs half a dozen turns of the event loop, and without the lane every
turn would wait for a slice of every running search. Updates of the watch use no lane and no pause: decisions wait for
them.
"""

from collections.abc import Awaitable, Callable, Generator
from typing import TypeVar

SLICE = 0.005  # seconds
PATIENCE = 20  # pauses in a row, after which a search continues although other searches were faster each time

T = TypeVar("T")

Pause = Callable[[float], Awaitable[None]]


class SearchLane:
    """The time from which on the searches that share this lane may continue."""

    def __init__(self) -> None:
        self.rests_until = 0.0


class TimeSlices:
    """Interrupts long work whenever its time slice is used up."""

    def __init__(self, clock: Callable[[], float], pause: Pause, lane: SearchLane | None = None) -> None:
        self._clock, self._pause, self._lane = clock, pause, lane
        self._began = clock()

    async def turn(self) -> None:
        """A point where the work may be interrupted."""
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

    async def run(self, work: Generator[None, None, T]) -> T:
        """Run work that yields where it may be interrupted."""
        while True:
            try:
                next(work)
            except StopIteration as end:
                result: T = end.value
                return result
            await self.turn()
