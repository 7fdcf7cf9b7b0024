"""Quotas: how much of which GPU model a namespace may hold. Values only; `arithmetic` compares them with usage.

A limit counts cards, memory and cores. Cards are counted by share: two pods with half a card each hold one card. The
share of a tile is the larger of its part of the card's memory and its part of the card's cores.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import TypeAlias

import msgspec

from gputile.model.requests import ModelRule
from gputile.model.units import MiB, Percent

ANY_MODEL = "*"
DEFAULT_KEY = "*"
"""The key of the default quota, for every namespace without a quota of its own."""


class Amount(msgspec.Struct, frozen=True):
    """How much of one GPU model is held or requested."""

    cards: Percent = 0  # 100 is one card
    memory: MiB = 0
    cores: Percent = 0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(self.cards + other.cards, self.memory + other.memory, self.cores + other.cores)

    def __sub__(self, other: "Amount") -> "Amount":
        return Amount(self.cards - other.cards, self.memory - other.memory, self.cores - other.cores)


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a namespace may hold of a GPU model; None means unlimited."""

    model: str
    cards: Percent | None = None  # 100 is one card
    memory: MiB | None = None
    cores: Percent | None = None

    def covers(self, model: str) -> bool:
        return self.model == ANY_MODEL or _is_named(self.model, model)


@lru_cache(maxsize=4096)
def _is_named(name: str, model: str) -> bool:
    """Cached: every request compares the same few names."""
    return ModelRule((name,)).accepts(model)


class Quota(msgspec.Struct, frozen=True):
    """The quota of one namespace. It allows only models that a limit covers, and only nodes of its pools."""

    limits: tuple[Limit, ...] = ()
    pools: tuple[str, ...] = ()  # empty: nodes of any pool
    source: str = ""  # the object or file that defines it, for messages

    def admits_pool(self, pool: str) -> bool:
        return not self.pools or pool in self.pools


Quotas: TypeAlias = Mapping[str, Quota]
"""By namespace; the key `DEFAULT_KEY` has the default. A namespace without a quota is unlimited."""


def quota_of(namespace: str, quotas: Quotas) -> Quota | None:
    return quotas.get(namespace) or quotas.get(DEFAULT_KEY)
