"""Long work on the event loop: when other tasks run."""

from collections.abc import Generator
from itertools import product
from typing import Any

import pytest

from gputile.concurrency import time_slices
from gputile.concurrency.time_slices import SearchLane, TimeSlices
from tests.scheduler.rig import Clock


def steps(clock: Clock, *seconds: float) -> Generator[None, None, str]:
    """Work that may be interrupted after each of these."""
    for each in seconds:
        clock.now += each
        yield
    return "done"


@pytest.mark.parametrize(("number", "slice_"), list(product((1, 7), (-1.0, 1e9))), ids=str)
async def test_work_is_interrupted_when_its_slice_is_used_up(
    monkeypatch: pytest.MonkeyPatch, number: int, slice_: float
) -> None:
    monkeypatch.setattr(time_slices, "SLICE", slice_)
    turns: list[float] = []

    async def pause(seconds: float) -> None:
        turns.append(seconds)

    def work() -> Any:
        for _ in range(number):
            yield
        return "done"

    assert await TimeSlices(lambda: 0.0, pause).run(work()) == "done"
    assert len(turns) == (number if slice_ < 0 else 0)


async def test_a_search_pauses_as_long_as_it_worked() -> None:
    clock = Clock()
    assert await TimeSlices(clock, clock.pause, SearchLane()).run(steps(clock, 0.02, 0.001, 0.03)) == "done"
    assert clock.pauses == pytest.approx([0.02, 0.031])


async def test_updates_of_the_watch_never_pause() -> None:
    clock = Clock()
    await TimeSlices(clock, clock.pause).run(steps(clock, 0.02, 0.03))
    assert clock.pauses == [0, 0]


async def test_while_another_search_pauses_this_one_does_too() -> None:
    clock, lane = Clock(), SearchLane()

    async def overtaken(seconds: float) -> None:
        await clock.pause(seconds)
        if len(clock.pauses) < 4:  # another search was faster, and worked for a second
            lane.rests_until = clock.now + 1

    await TimeSlices(clock, overtaken, lane).run(steps(clock, 0.01))
    assert clock.pauses == pytest.approx([0.01, 1, 1, 1])


async def test_a_search_that_others_always_overtake_continues_in_the_end() -> None:
    clock, lane = Clock(), SearchLane()

    async def overtaken(seconds: float) -> None:
        await clock.pause(seconds)
        lane.rests_until = clock.now + 1

    assert await TimeSlices(clock, overtaken, lane).run(steps(clock, 0.01)) == "done"
    assert len(clock.pauses) == time_slices.PATIENCE
