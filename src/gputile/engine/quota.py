"""How much of which GPU model a namespace may hold. Arithmetic only: who holds what is the book's to say.

A limit counts cards, memory and cores. Cards are counted by share: two pods with half a card each hold one card, and a
tile's share is the larger of its part of the memory and of the cores. A namespace without a quota is unlimited; one
with a quota may use only the models that it lists (`*` is any model) and, if it names pools, only nodes of those pools.
"""

from collections.abc import Iterable, Mapping

import msgspec

from gputile.model.cards import Card, Node
from gputile.model.grants import Grant, Use
from gputile.model.requests import ModelRule
from gputile.model.units import ALL, MiB, Percent

ANY_MODEL = "*"


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
        return self.model == ANY_MODEL or ModelRule((self.model,)).accepts(model)


class Quota(msgspec.Struct, frozen=True):
    """What one namespace may hold."""

    limits: tuple[Limit, ...] = ()
    pools: tuple[str, ...] = ()  # empty: nodes of any pool

    def admits_node(self, node: Node) -> bool:
        return not self.pools or node.pool in self.pools


class Overrun(msgspec.Struct, frozen=True):
    """Which limit would be passed, and by how much."""

    model: str
    what: str  # "cards", "memory", "cores", or "" when the model is not in the quota at all
    held: int
    wanted: int
    limit: int

    def sentence(self, namespace: str) -> str:
        if not self.what:
            return f"{namespace} has no quota for {self.model}"
        unit = {"cards": "", "memory": " MiB of", "cores": " % of the cores of"}[self.what]
        show = _cards if self.what == "cards" else str
        return (
            f"{namespace} holds {show(self.held)} of {show(self.limit)}{unit} {self.model}; "
            f"this pod needs {show(self.wanted)} more"
        )


def _cards(percent: int) -> str:
    return f"{percent / ALL:g}"


Spending = Mapping[str, Amount]
"""By model: what a namespace holds, or a pod would cost."""


def cost(uses: Mapping[str, Use], cards: Iterable[Card]) -> dict[str, Amount]:
    """By model: what holding these tiles costs."""
    spent: dict[str, Amount] = {}
    for card in cards:
        use = uses.get(card.uuid)
        if use is not None:
            spent[card.model] = spent.get(card.model, Amount()) + Amount(_share(use, card), use.memory, use.cores)
    return spent


def cost_of(grant: Grant, node: Node) -> dict[str, Amount]:
    return cost(grant.uses(), node.cards)


def _share(use: Use, card: Card) -> Percent:
    """In percent of a card, rounded up so that slivers are not free."""
    by_memory = -(-use.memory * ALL // card.memory) if card.memory else 0
    return max(by_memory, use.cores)


def add(held: Spending, more: Spending) -> dict[str, Amount]:
    return {model: held.get(model, Amount()) + more.get(model, Amount()) for model in {**held, **more}}


def subtract(held: Spending, less: Spending) -> dict[str, Amount]:
    """What is left; a model of which nothing is held any more is dropped."""
    left = {model: held.get(model, Amount()) - less.get(model, Amount()) for model in {**held, **less}}
    return {model: amount for model, amount in left.items() if amount != Amount()}


def overrun(quota: Quota | None, held: Spending, more: Spending) -> Overrun | None:
    """The first limit that `more` would pass; None when it may be granted."""
    if quota is None:
        return None
    for model in more:
        covering = [limit for limit in quota.limits if limit.covers(model)]
        if not covering:
            return Overrun(model, "", 0, more[model].cards, 0)
        for limit in covering:
            found = _passes(limit, held, more)
            if found is not None:
                return found
    return None


def _passes(limit: Limit, held: Spending, more: Spending) -> Overrun | None:
    """A limit counts all models it covers together."""
    has = _total(held, limit)
    wants = _total(more, limit)
    for what in ("cards", "memory", "cores"):
        most = getattr(limit, what)
        if most is not None and getattr(has, what) + getattr(wants, what) > most:
            return Overrun(limit.model, what, getattr(has, what), getattr(wants, what), most)
    return None


def _total(spending: Spending, limit: Limit) -> Amount:
    return sum((amount for model, amount in spending.items() if limit.covers(model)), Amount())
