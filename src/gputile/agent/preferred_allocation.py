"""Which devices the kubelet should take, so that those who read its books see the booked card.

A kindness, not a decision: the kubelet does not say for whom it asks, and two pods that ask for the same amount may get
each other's devices. What a container gets is decided when it starts, by its pod's grant.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from gputile.model.grants import ContainerGrant


class ExpectedContainer(msgspec.Struct, frozen=True):
    """A container that has been granted its cards and not yet got its devices."""

    pod: str  # UID
    held: ContainerGrant
    size: int  # how many devices it will ask for


def prefer(
    available: Sequence[str],
    must_include: Sequence[str],
    size: int,
    expected: Iterable[ExpectedContainer],
    card_of: Mapping[str, str],
) -> list[str]:
    """The devices of the booked cards of the first expected container of this size; else the first there are."""
    for one in expected:
        if one.size == size:
            chosen = _on_cards(available, must_include, size, one.held, card_of)
            if chosen is not None:
                return chosen
    return _ordered(available, must_include)[:size]


def _ordered(available: Sequence[str], must_include: Sequence[str]) -> list[str]:
    """First those that must be taken."""
    must = set(must_include)
    return [*must_include, *(name for name in sorted(available) if name not in must)]


def _on_cards(
    available: Sequence[str], must_include: Sequence[str], size: int, held: ContainerGrant, card_of: Mapping[str, str]
) -> list[str] | None:
    """Equally many of each of its cards; None when the card has not enough left, or others must be taken too."""
    if not held.tiles or size % len(held.tiles):
        return None
    by_card: dict[str, list[str]] = {}
    for name in _ordered(available, must_include):
        by_card.setdefault(card_of.get(name, ""), []).append(name)
    each, chosen = size // len(held.tiles), []
    for tile in held.tiles:
        mine = by_card.get(tile.uuid, [])
        if len(mine) < each:
            return None
        chosen += mine[:each]
        del mine[:each]  # two tiles may be of one card
    return chosen if set(must_include) <= set(chosen) else None
