"""Which resource of each dialect goes through the kubelet, and how many of it a card is worth.

Of a dialect's resources one carries the devices, because the kubelet makes one call per resource; the others are plain
numbers in the node's status. A kubelet reads messages of up to 4 MiB, so what counts MiB carries devices only where
the dialect has nothing else (gpushare), and then with short names, as long as they fit.
"""

from collections.abc import Iterable

import msgspec

from gputile.dialects import gpushare, gputile, hami, nano, nvidia, vcuda, vgpu
from gputile.dialects.settings import UNIT, DialectSettings
from gputile.model.cards import Card
from gputile.model.units import ALL

LARGEST_MESSAGE = 4 * 2**20 - 2**16  # bytes that a kubelet reads, with some room
PER_DEVICE = 21  # bytes besides its name: "Unhealthy", its NUMA node, the lengths

SERVED = (gputile.NAME, gpushare.NAME, nano.NAME, vcuda.NAME, nvidia.NAME, hami.NAME, vgpu.NAME)


class DeviceResource(msgspec.Struct, frozen=True, kw_only=True):
    """A resource whose devices the kubelet gives out: each stands for a part of a card."""

    resource: str
    dialect: str
    devices: tuple[tuple[str, str], ...]  # name of the device, UUID of its card; by card
    fault: str = ""  # why it cannot be served; then there are no devices


def device_resources(
    dialect: str, cards: Iterable[Card], settings: DialectSettings, *, shares_nvidia: bool
) -> list[DeviceResource]:
    """What an agent registers for the dialect. `nvidia.com/gpu` counts whole cards unless hami shares them."""
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
    raise AssertionError(f"{dialect} is no dialect")


def _by_count(resource: str, dialect: str, cards: list[Card], each: int | None = None) -> DeviceResource:
    """As many of each card as given, else as it has slots."""
    devices = [(f"{card.uuid}::{n}", card.uuid) for card in cards for n in range(each or card.slots)]
    return _fitting(resource, dialect, devices, "serve fewer slots per card")


def _gpushare(cards: list[Card], settings: DialectSettings) -> DeviceResource:
    """Its own spelling in GiB, where tools know it; in MiB the card's index must do."""
    unit = gpushare.unit(settings)
    devices = [
        (f"{card.uuid if unit > 1 else card.index}-_-{n}", card.uuid)
        for card in cards
        for n in range(card.memory // unit)
    ]
    return _fitting(gpushare.MEM, gpushare.NAME, devices, "count `aliyun.com/gpu-mem` in GiB (setting `gpushare_unit`)")


def _fitting(resource: str, dialect: str, devices: list[tuple[str, str]], instead: str) -> DeviceResource:
    size = sum(len(name) + PER_DEVICE for name, _ in devices)
    if size <= LARGEST_MESSAGE:
        return DeviceResource(resource=resource, dialect=dialect, devices=tuple(devices))
    why = (
        f"`{resource}` would have {len(devices):,} devices on this node, {size / 2**20:.0f} MiB to say, and a kubelet "
        f"reads 4; {instead}"
    )
    return DeviceResource(resource=resource, dialect=dialect, devices=(), fault=why)


def status_resources(dialect: str, cards: Iterable[Card], settings: DialectSettings) -> dict[str, int]:
    """What the node's status shows besides: sums that kube-scheduler and people may read, without devices."""
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
