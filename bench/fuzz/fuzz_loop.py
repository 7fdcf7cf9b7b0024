"""The loop of all targets except the verbs, which have a loop of their own.

`run(name, target, inputs, seed)`: a `Target` makes an input from a random generator and checks the result.
"""

import random
import time
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from bench.fuzz.finding import SLOW, Finding, Report, silent

AUDIT_EVERY = 1000  # inputs between two audits


class Target(Protocol):
    """A component that parses external input."""

    def sample(self, rng: random.Random) -> tuple[str, bytes]:
        """The path and the body of an input."""

    async def problem(self, path: str, body: bytes) -> str:
        """The problem with the result; "" if there is none. A crash raises."""

    async def audit(self) -> str:
        """A slower check, once in a while: whether valid input is still served."""


async def run(
    name: str,
    target: AbstractAsyncContextManager[Target],
    inputs: int,
    seed: int,
    *,
    first: int = 0,
    most: int = 10,
    report: Report = silent,
) -> list[Finding]:
    """The findings, `most` at most."""
    findings, start_time = list[Finding](), time.monotonic()
    async with target as instance:
        for number in range(first, first + inputs):
            path, body = instance.sample(random.Random(f"{name}:{seed}:{number}"))
            why = await _problem(instance, path, body)
            if number % AUDIT_EVERY == AUDIT_EVERY - 1 or number == first + inputs - 1:
                why = why or await instance.audit()
            if why:
                findings.append(Finding(target=name, seed=seed, number=number, path=path, body=body, why=why))
            if number % 10_000 == 9_999:
                report(
                    f"{name}: {number + 1:>8,} inputs, {time.monotonic() - start_time:5.0f} s, {len(findings)} findings"
                )
            if len(findings) >= most:
                break
    return findings


async def _problem(instance: Target, path: str, body: bytes) -> str:
    start_time = time.perf_counter()
    try:
        why = await instance.problem(path, body)
    except Exception as crash:
        return f"{type(crash).__name__}: {crash}"
    took = time.perf_counter() - start_time
    return why or (f"took {took:.1f} s" if took > SLOW else "")
