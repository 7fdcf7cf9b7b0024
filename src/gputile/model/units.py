"""Units, and the only parser of Kubernetes quantities and times.

Inside the program memory is in whole MiB, cores are in whole percent of one card, CPU is in whole millicores. Only
`dialects` converts what users write.
"""

import re
from datetime import UTC, datetime
from fractions import Fraction
from functools import lru_cache
from typing import TypeAlias

MiB: TypeAlias = int
Percent: TypeAlias = int  # of one card: 100 is the whole card
Millicores: TypeAlias = int
Quantity: TypeAlias = str | int | float | None  # as JSON or YAML may carry it

ALL: Percent = 100

LARGEST_CARD: MiB = 1024 * 1024
"""No GPU has a tebibyte of memory. A larger request has the wrong unit."""

_QUANTITY = re.compile(
    r"(?P<number>[+-]?(?:[0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30}))(?P<suffix>[numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,2})?"
)
_SUFFIX = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    **{letter: Fraction(1000**power) for power, letter in enumerate("kMGTPE", start=1)},
    **{f"{letter}i": Fraction(1024**power) for power, letter in enumerate("KMGTPE", start=1)},
}


def quantity(written: Quantity) -> Fraction | None:
    """The exact value of `"500m"`, `"4Gi"`, `"1e3"`, `7`; None if the text is not a quantity."""
    if written is None or isinstance(written, bool) or (isinstance(written, int) and abs(written) > 10**30):
        return None
    return _parsed(str(written).strip())


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Fraction | None:
    """Cached: the pods of a cluster use the same few quantities."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        return None
    number, suffix = Fraction(match["number"]), match["suffix"]
    if suffix is None:
        return number
    if suffix in _SUFFIX:
        return number * _SUFFIX[suffix]
    return number * Fraction(10) ** int(suffix[1:])


def millicores(written: Quantity) -> Millicores | None:
    """CPU as Kubernetes counts it, rounded up: `"0.5"` is 500."""
    cpu = quantity(written)
    return None if cpu is None else -int(-cpu * 1000 // 1)


def host_mebibytes(written: Quantity) -> MiB | None:
    """The host memory of a node or container, written in bytes, rounded up to MiB."""
    size = quantity(written)
    return None if size is None else -int(-size // 1024**2)


def unix_seconds(timestamp: str | None) -> float | None:
    """An RFC 3339 time, as Kubernetes writes it, in seconds since 1970; None if the text is not a time."""
    try:
        time = datetime.fromisoformat(timestamp or "")
    except ValueError:
        return None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def show_memory(amount: MiB) -> str:
    """For messages: `3072` is `3 GiB`, `3000` is `3000 MiB`."""
    return f"{amount // 1024} GiB" if amount and amount % 1024 == 0 else f"{amount} MiB"
