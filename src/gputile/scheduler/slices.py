"""Long work on the event loop, in slices: between two of them probes and verbs are answered, and the lease is kept."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from gputile.engine.turns import InTurns

SLICE = 0.01  # seconds

T = TypeVar("T")

Pause = Callable[[float], Awaitable[None]]


class Slices:
    """Lets others have their turn whenever a slice of time is used up."""

    def __init__(self, clock: Callable[[], float], pause: Pause) -> None:
        self._clock, self._pause = clock, pause
        self._began = clock()

    async def turn(self) -> None:
        """Here the work may be interrupted."""
        if self._clock() - self._began > SLICE:
            await self._pause(0)
            self._began = self._clock()

    async def run(self, work: InTurns[T]) -> T:
        """Work that says by itself where it may be interrupted."""
        while True:
            try:
                next(work)
            except StopIteration as end:
                result: T = end.value
                return result
            await self.turn()
