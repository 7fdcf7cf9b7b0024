"""Cooperative work: a generator that yields wherever it may be interrupted.

The state may change at every yield, so data that must be consistent is read between two yields. The core only marks
where it may be interrupted; the caller, which has a clock and an event loop, decides when.
"""

from collections.abc import Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")

Cooperative: TypeAlias = Generator[None, None, T]


def run_to_end(work: Cooperative[T]) -> T:
    """Run the work to its end without interruption."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
