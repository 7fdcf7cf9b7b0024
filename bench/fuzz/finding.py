"""Findings of the fuzzer, with everything that is needed to reproduce them."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import msgspec

SLOW = 2.0  # seconds
SHOWN = 2000  # bytes of an input that are printed

Report: TypeAlias = Callable[[str], None]


def silent(line: str) -> None:
    """Print nothing."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One input, its target, and the problem with the result."""

    target: str
    seed: int
    number: int
    path: str
    body: bytes
    why: str

    def text(self) -> str:
        body = repr(self.body[:SHOWN]) + (f" ... {len(self.body)} bytes" if len(self.body) > SHOWN else "")
        again = f"python -m bench.fuzz --target {self.target} --seed {self.seed} --only {self.number}"
        where = f"{self.target}: input {self.number} of seed {self.seed} to {self.path}"
        return f"{where}: {self.why}\n  {body}\n  reproduce: {again}"


@contextmanager
def quiet() -> Iterator[None]:
    """Disable logging: every corrupted input would be logged."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
