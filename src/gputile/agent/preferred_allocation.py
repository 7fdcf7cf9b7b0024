"""Chooses the devices for GetPreferredAllocation, so that the kubelet's records show the granted cards.

With CDI this is a hint and no decision: the kubelet does not name the pod, and two pods that request the same number
may get each other's devices. What a container gets is decided when it starts, by its pod's grant.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from gputile.model.grants import ContainerGrant


class ExpectedContainer(msgspec.Struct, frozen=True):
    """A container that has a grant and no allocated devices yet."""

    pod: str  # UID
    grant: ContainerGrant
    size: int  # how many devices it requests


def preferred_devices(
    available: Sequence[str],
    must_include: Sequence[str],
    size: int,
    expected: Iterable[ExpectedContainer],
    card_of: Mapping[str, str],
) -> list[str]:
    """Devices of the granted cards of the first expected container of this size; otherwise the first available ones."""
    for container in expected:
        if container.size == size:
            chosen = _on_granted_cards(available, must_include, size, container.grant, card_of)
            if chosen is not None:
                return chosen
    return _ordered(available, must_include)[:size]


def _ordered(available: Sequence[str], must_include: Sequence[str]) -> list[str]:
    """First the devices that must be included."""
    must = set(must_include)
    return [*must_include, *(device_id for device_id in sorted(available) if device_id not in must)]


def _on_granted_cards(
    available: Sequence[str], must_include: Sequence[str], size: int, grant: ContainerGrant, card_of: Mapping[str, str]
) -> list[str] | None:
    """The same number of each granted card; None when a card has too few left, or other devices must be included."""
    if not grant.tiles or size % len(grant.tiles):
        return None
    by_card: dict[str, list[str]] = {}
    for device_id in _ordered(available, must_include):
        by_card.setdefault(card_of.get(device_id, ""), []).append(device_id)
    per_tile, chosen = size // len(grant.tiles), []
    for tile in grant.tiles:
        devices = by_card.get(tile.uuid, [])
        if len(devices) < per_tile:
            return None
        chosen += devices[:per_tile]
        del devices[:per_tile]  # two tiles may be of one card
    return chosen if set(must_include) <= set(chosen) else None
