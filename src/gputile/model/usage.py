"""What processes really use of cards, as far as somebody measured it; what they were given is in `grants`."""

from collections.abc import Iterable
from typing import TypeAlias

import msgspec

from gputile.model.units import ALL, MiB, Percent


class CardUsage(msgspec.Struct, frozen=True):
    """Of one card. None is not known, which is not nothing."""

    memory: MiB | None = None
    cores: Percent | None = None  # how busy they kept it lately


PodUsage: TypeAlias = dict[str, dict[str, CardUsage]]
"""By container and card UUID. A container "" stands for those of the pod's processes that nobody could tell apart."""

Usage: TypeAlias = dict[str, PodUsage]
"""By pod UID."""


def together(parts: Iterable[CardUsage]) -> CardUsage:
    """The sum; where one part is not known, neither is the sum. Processes that take turns keep a card busy once."""
    found = list(parts)
    memory, cores = [one.memory for one in found], [one.cores for one in found]
    return CardUsage(
        None if None in memory else sum(size for size in memory if size is not None),
        None if None in cores else min(ALL, sum(part for part in cores if part is not None)),
    )
