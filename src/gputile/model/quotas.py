"""How much of which GPU model a namespace may hold: values only; `engine.quota` does the sums.

A limit counts cards, memory and cores. Cards are counted by share: two pods with half a card each hold one card, and a
tile's share is the larger of its part of the memory and of the cores.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import TypeAlias

import msgspec

from gputile.model.requests import ModelRule
from gputile.model.units import MiB, Percent

ANY_MODEL = "*"
EVERYBODY = "*"
"""The namespace that stands for each one that is not named."""


class Amount(msgspec.Struct, frozen=True):
    """What is held of one model, or would be."""

    cards: Percent = 0  # 100 is one card
    memory: MiB = 0
    cores: Percent = 0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(self.cards + other.cards, self.memory + other.memory, self.cores + other.cores)

    def __sub__(self, other: "Amount") -> "Amount":
        return Amount(self.cards - other.cards, self.memory - other.memory, self.cores - other.cores)


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """The most that may be held of a model; None is no limit."""

    model: str
    cards: Percent | None = None  # 100 is one card
    memory: MiB | None = None
    cores: Percent | None = None

    def covers(self, model: str) -> bool:
        return self.model == ANY_MODEL or _is_named(self.model, model)


@lru_cache(maxsize=4096)
def _is_named(name: str, model: str) -> bool:
    """Remembered: the same few names are compared at every question."""
    return ModelRule((name,)).accepts(model)


class Quota(msgspec.Struct, frozen=True):
    """What one namespace may hold: only models that some limit covers, and only on nodes of its pools."""

    limits: tuple[Limit, ...] = ()
    pools: tuple[str, ...] = ()  # empty: nodes of any pool
    source: str = ""  # where it is written, for people

    def admits_pool(self, pool: str) -> bool:
        return not self.pools or pool in self.pools


Quotas: TypeAlias = Mapping[str, Quota]
"""By namespace; `EVERYBODY` is for each one that is not named. Who has none is unlimited."""


def quota_of(namespace: str, quotas: Quotas) -> Quota | None:
    return quotas.get(namespace) or quotas.get(EVERYBODY)
