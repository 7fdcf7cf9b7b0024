"""Resources with devices: which device stands for which card, and how many of them the kubelet accepts.

The kubelet calls Allocate once per resource, so one resource of a dialect has the devices; the others are plain numbers
in the node's status. The kubelet accepts messages of up to 4 MiB, so a resource that counts MiB has devices only where
the dialect has no other (gpushare), and then with short device IDs, as long as they fit.
"""

import msgspec

from gputile.model.cards import Card

LARGEST_MESSAGE = 4 * 2**20 - 2**16  # bytes: the limit of the kubelet, less a margin
PER_DEVICE = 21  # bytes besides its ID: "Unhealthy", its NUMA node, the lengths


class DeviceResource(msgspec.Struct, frozen=True, kw_only=True):
    """A resource whose devices the kubelet allocates: each device stands for a part of a card."""

    resource: str
    dialect: str
    devices: tuple[tuple[str, str], ...]  # device ID, UUID of its card; ordered by card
    fault: str = ""  # why it cannot be served; then there are no devices


def by_count(resource: str, dialect: str, cards: list[Card], each: int | None = None) -> DeviceResource:
    """`each` devices per card, or one device per slot."""
    devices = [(f"{card.uuid}::{n}", card.uuid) for card in cards for n in range(each or card.slots)]
    return within_message_limit(resource, dialect, devices, "serve fewer slots per GPU")


def within_message_limit(resource: str, dialect: str, devices: list[tuple[str, str]], remedy: str) -> DeviceResource:
    """The resource with these devices, or with a fault when the kubelet does not accept that many."""
    size = sum(len(name) + PER_DEVICE for name, _ in devices)
    if size <= LARGEST_MESSAGE:
        return DeviceResource(resource=resource, dialect=dialect, devices=tuple(devices))
    fault = (
        f"`{resource}`: {len(devices):,} devices on this node need a message of {size / 2**20:.0f} MiB, and the "
        f"kubelet accepts 4; {remedy}"
    )
    return DeviceResource(resource=resource, dialect=dialect, devices=(), fault=fault)
