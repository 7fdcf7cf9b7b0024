"""Careful access to JSON of unknown origin: every function takes any value and returns a plain one, or None.

Pods are written by tenants: a number may have a thousand digits, a list may be nested a thousand deep, and a string may
contain control characters. Nothing here raises, and nothing costs more than the size of the value.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gputile.model.units import quantity

MOST = 2**31 - 1
"""No GPU and no node has this much of anything. Larger numbers count as this one."""

Json = Mapping[str, Any]
NOTHING: Json = {}
_DIGITS = re.compile(r"[0-9]{1,18}")
_UNPRINTABLE = re.compile(r"[^\x20-\x7e]")


def mapping(value: object) -> Json:
    return value if isinstance(value, dict) else NOTHING


def items(value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else []


def text(value: object) -> str | None:
    """A string, or a number or boolean as a hand-written manifest has it; None for everything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value) if abs(value) < 2**63 else None
    return None


def texts(value: object) -> dict[str, str]:
    """Labels or annotations."""
    converted = {key: text(entry) for key, entry in mapping(value).items() if isinstance(key, str)}
    return {key: entry for key, entry in converted.items() if entry is not None}


def whole(value: object) -> int | None:
    """A JSON number that counts something: 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        return None
    return min(value, MOST)


def digits(value: object) -> int | None:
    """Plain decimal digits, as the families write numbers into annotations."""
    number = value.strip() if isinstance(value, str) else ""
    return min(int(number), MOST) if _DIGITS.fullmatch(number) else None


def indices(value: object) -> tuple[int, ...] | None:
    """`"0,2"` as GPU indices; None when a part is not an index."""
    parts = [digits(part) for part in value.split(",") if part.strip()] if isinstance(value, str) else []
    valid = tuple(part for part in parts if part is not None)
    return valid if valid and len(valid) == len(parts) else None


def amount(value: object) -> int | None:
    """A Kubernetes quantity that is a whole number, such as `3`, `"3k"` or `"3e3"`; else None."""
    if isinstance(value, int):
        return whole(value)
    if not isinstance(value, str | float):
        return None
    if isinstance(value, str) and len(value) > 64:
        return None
    exact = quantity(value)
    if exact is None or exact.denominator != 1 or exact < 0:
        return None
    return min(exact.numerator, MOST)


def decoded(value: object) -> Any:
    """JSON inside a string; None when it is broken or too deep, or the value is not a string."""
    try:
        return msgspec.json.decode(value.encode()) if isinstance(value, str) else None
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None


def names(value: object) -> frozenset[str]:
    """A comma list."""
    return (
        frozenset(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else frozenset()
    )


def shown(value: object, most: int = 80) -> str:
    """A value inside a sentence: short, and without control characters."""
    plain = _UNPRINTABLE.sub("?", value if isinstance(value, str) else type(value).__name__)
    return plain if len(plain) <= most else f"{plain[:most]}..."
