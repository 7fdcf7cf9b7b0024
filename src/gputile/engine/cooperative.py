"""Work that lets others have their turn: a generator that yields wherever it may be interrupted.

What it looks at may change while others have their turn, so whatever must be seen at one moment is seen between two
yields. The core only says where; whoever has a clock and an event loop decides when.
"""

from collections.abc import Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")

Cooperative: TypeAlias = Generator[None, None, T]


def run_to_end(work: Cooperative[T]) -> T:
    """Do it without letting anybody else have a turn."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
