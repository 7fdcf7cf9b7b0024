"""The extended resources of each dialect: which one the agent serves as a device plugin, and with how many devices.

The kubelet calls Allocate once per resource, so one resource of a dialect has the devices; the others are plain numbers
in the node's status. The kubelet accepts messages of up to 4 MiB, so a resource that counts MiB has devices only where
the dialect has no other (gpushare), and then with short device IDs, as long as they fit.
"""

from collections.abc import Iterable

import msgspec

from gputile.dialects import gpushare, gputile, hami, nano, nvidia, vcuda, vgpu
from gputile.dialects.settings import UNIT, DialectSettings
from gputile.model.cards import Card
from gputile.model.units import ALL

LARGEST_MESSAGE = 4 * 2**20 - 2**16  # bytes: the limit of the kubelet, less a margin
PER_DEVICE = 21  # bytes besides its ID: "Unhealthy", its NUMA node, the lengths

SERVED = (gputile.NAME, gpushare.NAME, nano.NAME, vcuda.NAME, nvidia.NAME, hami.NAME, vgpu.NAME)


class DeviceResource(msgspec.Struct, frozen=True, kw_only=True):
    """A resource whose devices the kubelet allocates: each device stands for a part of a card."""

    resource: str
    dialect: str
    devices: tuple[tuple[str, str], ...]  # device ID, UUID of its card; ordered by card
    fault: str = ""  # why it cannot be served; then there are no devices


def device_resources(
    dialect: str, cards: Iterable[Card], settings: DialectSettings, *, shares_nvidia: bool
) -> list[DeviceResource]:
    """The device plugins of the dialect. `nvidia.com/gpu` counts whole cards unless hami shares them."""
    cards = [card for card in cards if not card.in_mig_mode]
    match dialect:
        case gputile.NAME:
            return [_by_count(gputile.GPU, dialect, cards)]
        case hami.NAME:
            return [_by_count(hami.GPU, dialect, cards)]
        case nvidia.NAME:
            return [] if shares_nvidia else [_by_count(nvidia.GPU, dialect, cards, 1)]
        case vgpu.NAME:
            return [_by_count(f"{settings.vgpu_domain}/vgpu-number", dialect, cards)]
        case nano.NAME:
            return [_by_count(generation.core, dialect, cards, ALL) for generation in nano.GENERATIONS]
        case vcuda.NAME:
            return [_by_count(edition.core, dialect, cards, ALL) for edition in vcuda.EDITIONS]
        case gpushare.NAME:
            return [_gpushare(cards, settings)]
    raise AssertionError(f"{dialect} is not a dialect")


def _by_count(resource: str, dialect: str, cards: list[Card], each: int | None = None) -> DeviceResource:
    """`each` devices per card, or one device per slot."""
    devices = [(f"{card.uuid}::{n}", card.uuid) for card in cards for n in range(each or card.slots)]
    return _within_message_limit(resource, dialect, devices, "serve fewer slots per GPU")


def _gpushare(cards: list[Card], settings: DialectSettings) -> DeviceResource:
    """In GiB with the device IDs of gpushare, which its tools parse; in MiB with the card's index, which is shorter."""
    unit = gpushare.unit(settings)
    devices = [
        (f"{card.uuid if unit > 1 else card.index}-_-{n}", card.uuid)
        for card in cards
        for n in range(card.memory // unit)
    ]
    return _within_message_limit(
        gpushare.MEM, gpushare.NAME, devices, "count `aliyun.com/gpu-mem` in GiB (setting `gpushare_unit`)"
    )


def _within_message_limit(resource: str, dialect: str, devices: list[tuple[str, str]], remedy: str) -> DeviceResource:
    size = sum(len(name) + PER_DEVICE for name, _ in devices)
    if size <= LARGEST_MESSAGE:
        return DeviceResource(resource=resource, dialect=dialect, devices=tuple(devices))
    fault = (
        f"`{resource}`: {len(devices):,} devices on this node need a message of {size / 2**20:.0f} MiB, and the "
        f"kubelet accepts 4; {remedy}"
    )
    return DeviceResource(resource=resource, dialect=dialect, devices=(), fault=fault)


def status_resources(dialect: str, cards: Iterable[Card], settings: DialectSettings) -> dict[str, int]:
    """The other resources in the node's status: sums without devices, for kube-scheduler and `kubectl describe`."""
    cards = [card for card in cards if card.healthy and not card.in_mig_mode]
    memory, cores = sum(card.memory for card in cards), sum(card.cores for card in cards)
    match dialect:
        case gputile.NAME:
            return {gputile.MEMORY: memory, gputile.CORES: cores}
        case gpushare.NAME:
            return {gpushare.COUNT: len(cards)}
        case nano.NAME:
            return {nano.ONE.memory: memory // UNIT[settings.nano_unit], nano.THREE.memory: memory}
        case vcuda.NAME:
            return {edition.memory: memory // edition.block for edition in vcuda.EDITIONS}
    return {}
