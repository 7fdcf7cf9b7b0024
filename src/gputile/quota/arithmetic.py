"""The arithmetic of quota. The ledger knows which pods hold what.

A namespace without a quota is unlimited. A namespace with a quota may use only the models that its limits list (`*` is
any model) and, if the quota names pools, only nodes of those pools.
"""

from collections.abc import Iterable, Mapping

import msgspec

from gputile.model.cards import Card, Node, Use
from gputile.model.grants import Grant
from gputile.model.units import ALL, Percent
from gputile.quota.limits import Amount, Limit, Quota

KINDS = ("cards", "memory", "cores")
"""The kinds of amounts that a limit may have."""


class Overrun(msgspec.Struct, frozen=True):
    """A limit that would be exceeded, and the amounts."""

    model: str
    what: str  # "cards", "memory", "cores", or "" when the model is not in the quota at all
    held: int
    requested: int
    limit: int

    def sentence(self, namespace: str) -> str:
        """For Events and terminal: `team-a holds 4 of 4 A100; this pod needs 1 more`."""
        if not self.what:
            return f"{namespace} has no quota for {self.model or 'GPUs of an unknown model'}"
        unit = {"cards": "", "memory": " MiB of", "cores": " % of the cores of"}[self.what]
        show = show_cards if self.what == "cards" else str
        model = "GPUs of any model" if self.model == "*" else self.model
        return (
            f"{namespace} holds {show(self.held)} of {show(self.limit)}{unit} {model}; "
            f"this pod needs {show(self.requested)} more"
        )


def show_cards(percent: int) -> str:
    """Hundredths of a card as a number of cards: `250` is `2.5`."""
    return f"{percent / ALL:.10g}"


Spent = Mapping[str, Amount]
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
    """In percent of a card, rounded up, so that tiny tiles are not free of charge."""
    by_memory = -(-use.memory * ALL // card.memory) if card.memory else 0
    return max(by_memory, use.cores)


def add(held: Spent, more: Spent) -> dict[str, Amount]:
    return {model: held.get(model, Amount()) + more.get(model, Amount()) for model in {**held, **more}}


def subtract(held: Spent, less: Spent) -> dict[str, Amount]:
    """What is left; models of which nothing is left are dropped."""
    left = {model: held.get(model, Amount()) - less.get(model, Amount()) for model in {**held, **less}}
    return {model: amount for model, amount in left.items() if amount != Amount()}


def overrun(quota: Quota | None, held: Spent, more: Spent) -> Overrun | None:
    """The first limit that `more` would exceed; None when the quota allows it."""
    if quota is None:
        return None
    for model in more:
        covering = [limit for limit in quota.limits if limit.covers(model)]
        if not covering:
            return Overrun(model, "", 0, more[model].cards, 0)
        for limit in covering:
            exceeded = _exceeded(limit, held, more)
            if exceeded is not None:
                return exceeded
    return None


def _exceeded(limit: Limit, held: Spent, more: Spent) -> Overrun | None:
    """A limit counts the sum over all models it covers."""
    has, needs = total(held, limit), total(more, limit)
    if limit.cards is not None and has.cards + needs.cards > limit.cards:
        return Overrun(limit.model, "cards", has.cards, needs.cards, limit.cards)
    if limit.memory is not None and has.memory + needs.memory > limit.memory:
        return Overrun(limit.model, "memory", has.memory, needs.memory, limit.memory)
    if limit.cores is not None and has.cores + needs.cores > limit.cores:
        return Overrun(limit.model, "cores", has.cores, needs.cores, limit.cores)
    return None


def total(spent: Spent, limit: Limit) -> Amount:
    """The sum of all models that the limit covers."""
    cards = memory = cores = 0
    for model, amount in spent.items():  # hot in filter calls: plain sums take a third of the time
        if limit.covers(model):
            cards, memory, cores = cards + amount.cards, memory + amount.memory, cores + amount.cores
    return Amount(cards, memory, cores)
