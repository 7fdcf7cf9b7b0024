"""The last defence against double allocation: does a grant fit on its cards beside the earlier grants?"""

from collections.abc import Iterable, Mapping

from gputile.dialects.parsing import shortened
from gputile.model.cards import NOTHING, Card, Use
from gputile.model.grants import Grant


class CardAllocations:
    """The sum of grants on each card."""

    def __init__(self, grants: Iterable[Grant] = ()) -> None:
        self._uses: dict[str, Use] = {}
        for grant in grants:
            self.add(grant.uses())

    def add(self, uses: Mapping[str, Use]) -> None:
        for uuid, use in uses.items():
            self._uses[uuid] = self.of(uuid) + use

    def of(self, uuid: str) -> Use:
        return self._uses.get(uuid, NOTHING)


def overlap(uses: Mapping[str, Use], earlier: CardAllocations, cards: Mapping[str, Card]) -> str:
    """Why a grant of these uses is rejected; "" when it fits. `cards` are those of the node, by UUID."""
    for uuid, use in uses.items():
        card, before = cards.get(uuid), earlier.of(uuid)
        if card is None:
            return f"its grant has the GPU {shortened(uuid)}, which is not on this node"
        for unit, size, allocated, granted in (
            ("MiB of memory", card.memory, before.memory, use.memory),
            ("percent of the cores", card.cores, before.cores, use.cores),
        ):
            if granted > size:
                return f"its grant is {granted} {unit} of GPU {card.index} ({uuid}), which has {size}"
            if granted and allocated + granted > size:
                return (
                    f"its grant of {granted} {unit} of GPU {card.index} ({uuid}) overlaps earlier grants, which hold "
                    f"{allocated} of {size}"
                )
    return ""
