"""Measured use of cards by processes. What pods were given is in `grants`."""

from collections.abc import Iterable
from typing import TypeAlias

import msgspec

from gputile.model.units import ALL, MiB, Percent


class CardUsage(msgspec.Struct, frozen=True):
    """The measured use of one card. None means unknown, not zero."""

    memory: MiB | None = None
    cores: Percent | None = None  # utilisation of the last interval


PodUsage: TypeAlias = dict[str, dict[str, CardUsage]]
"""By container and card UUID. The container "" has the processes of the pod whose container is unknown."""

Usage: TypeAlias = dict[str, PodUsage]
"""By pod UID."""


def together(parts: Iterable[CardUsage]) -> CardUsage:
    """The sum; it is unknown where a part is unknown. Cores are at most 100 %: time-sliced processes share the card."""
    usages = list(parts)
    memory, cores = [usage.memory for usage in usages], [usage.cores for usage in usages]
    return CardUsage(
        None if None in memory else sum(size for size in memory if size is not None),
        None if None in cores else min(ALL, sum(part for part in cores if part is not None)),
    )
