"""The last line of defence: does a grant fit on its cards beside those that came before it?"""

from collections.abc import Iterable, Mapping

from gputile.model.cards import Card
from gputile.model.grants import Grant, Use

NOTHING = Use(0, 0, 0)


def overlap(grant: Grant, earlier: Iterable[Grant], cards: Mapping[str, Card]) -> str:
    """Why the grant cannot be honoured; "" when it can. `cards` are those of the node, by UUID."""
    held = _sum(earlier)
    for uuid, use in grant.uses().items():
        card, before = cards.get(uuid), held.get(uuid, NOTHING)
        if card is None:
            return f"its grant names the card {uuid}, and this node has none of that name"
        for what, size, taken, wanted in (
            ("MiB of memory", card.memory, before.memory, use.memory),
            ("percent of the cores", card.cores, before.cores, use.cores),
        ):
            if wanted and taken and taken + wanted > size:  # alone on a card that became smaller, it overlaps nobody
                return (
                    f"its grant of {wanted} {what} of card {card.index} ({uuid}) overlaps earlier ones, which hold "
                    f"{taken} of {size}"
                )
    return ""


def _sum(grants: Iterable[Grant]) -> dict[str, Use]:
    found: dict[str, Use] = {}
    for grant in grants:
        for uuid, use in grant.uses().items():
            before = found.get(uuid, NOTHING)
            found[uuid] = Use(before.memory + use.memory, before.cores + use.cores, before.slots + use.slots)
    return found
