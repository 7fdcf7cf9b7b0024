"""The last line of defence: does a grant fit on its cards beside those that came before it?"""

from collections.abc import Iterable, Mapping

from gputile.dialects.parsing import shortened
from gputile.model.cards import Card
from gputile.model.grants import Grant, Use

NOTHING = Use(0, 0, 0)


class CardAllocations:
    """What grants hold of each card, added up as they come."""

    def __init__(self, grants: Iterable[Grant] = ()) -> None:
        self._uses: dict[str, Use] = {}
        for grant in grants:
            self.add(grant.uses())

    def add(self, uses: Mapping[str, Use]) -> None:
        for uuid, use in uses.items():
            before = self.of(uuid)
            self._uses[uuid] = Use(before.memory + use.memory, before.cores + use.cores, before.slots + use.slots)

    def of(self, uuid: str) -> Use:
        return self._uses.get(uuid, NOTHING)


def overlap(uses: Mapping[str, Use], earlier: CardAllocations, cards: Mapping[str, Card]) -> str:
    """Why a grant of these uses cannot be honoured; "" when it can. `cards` are those of the node, by UUID."""
    for uuid, use in uses.items():
        card, before = cards.get(uuid), earlier.of(uuid)
        if card is None:
            return f"its grant names the card {shortened(uuid)}, and this node has none of that name"
        for what, size, taken, wanted in (
            ("MiB of memory", card.memory, before.memory, use.memory),
            ("percent of the cores", card.cores, before.cores, use.cores),
        ):
            if wanted > size:
                return f"its grant is {wanted} {what} of card {card.index} ({uuid}), which has {size}"
            if wanted and taken + wanted > size:
                return (
                    f"its grant of {wanted} {what} of card {card.index} ({uuid}) overlaps earlier ones, which hold "
                    f"{taken} of {size}"
                )
    return ""
