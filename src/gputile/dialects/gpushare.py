"""gpushare: memory of one card, counted in GiB or MiB.

    aliyun.com/gpu-mem: 3                     the sum over a pod's containers comes out of one card
    label aliyun.com/gpu-count: "4"           the memory is split evenly over four cards of one node

All containers of a pod share the same card or cards: the original promises it, and its tools read one index per pod.
"""

from collections.abc import Iterable

import msgspec

from gputile.dialects.settings import UNIT, DialectSettings, Unit
from gputile.dialects.wire import (
    Award,
    Container,
    Inventory,
    NodeObject,
    Pod,
    Unreadable,
    Written,
    amount,
    card_memory,
    count_of,
    decode_or_none,
    grant_by_index,
    indices_of,
    quoted,
    request,
    unnamed_cards,
    visible_devices,
)
from gputile.model.cards import Card
from gputile.model.grants import ContainerGrant, Grant
from gputile.model.refusals import RequestCode
from gputile.model.requests import Ask, PodRequest, Role
from gputile.model.units import MiB, quantity

NAME = "gpushare"
MEM, COUNT = "aliyun.com/gpu-mem", "aliyun.com/gpu-count"
INDEX, TOTAL, CARD_SIZE = "ALIYUN_COM_GPU_MEM_IDX", "ALIYUN_COM_GPU_MEM_POD", "ALIYUN_COM_GPU_MEM_DEV"
ASSIGNED, ASSUME_TIME = "ALIYUN_COM_GPU_MEM_ASSIGNED", "ALIYUN_COM_GPU_MEM_ASSUME_TIME"
ALLOCATION = "scheduler.framework.gpushare.allocation"
_ALLOCATIONS = msgspec.json.Decoder(dict[int, dict[int, int]])


def resources(settings: DialectSettings) -> frozenset[str]:
    return frozenset({MEM, COUNT})


def unit(settings: DialectSettings) -> MiB:
    """MiB per unit. `auto` is replaced with `resolved` by whoever knows the nodes; until then GiB."""
    return UNIT.get(settings.gpushare_unit, UNIT["GiB"])


def guess_unit(nodes: Iterable[NodeObject]) -> Unit:
    """As `kubectl inspect gpushare` guesses: over 100 units on a card of the first node with GPUs means MiB."""
    for node in nodes:
        count, memory = count_of(node.allocatable, COUNT), count_of(node.allocatable, MEM)
        if count and memory:
            return "MiB" if memory // count > 100 else "GiB"
    return "GiB"


def resolved(settings: DialectSettings, nodes: Iterable[NodeObject]) -> DialectSettings:
    """The settings with `auto` replaced by the guess from these nodes."""
    if settings.gpushare_unit != "auto":
        return settings
    return msgspec.structs.replace(settings, gpushare_unit=guess_unit(nodes))


def read_pod(pod: Pod, settings: DialectSettings) -> PodRequest | None:
    containers = list(pod.containers())
    cards = _card_count(pod, [container for _, container in containers])
    asks = tuple(_ask(role, container, cards, unit(settings)) for role, container in containers)
    asked = request(NAME, pod, asks, together=True, block=unit(settings))
    if asked is None and any(amount(container, COUNT) for _, container in containers):
        raise Unreadable(
            RequestCode.NO_DEVICE_RESOURCE,
            f"the pod asks for `{COUNT}` without `{MEM}`, and only that brings a card; add `{MEM}: <memory>`",
        )
    return asked


def _card_count(pod: Pod, containers: list[Container]) -> int:
    """Over how many cards the memory is split: by label, annotation or limit."""
    said = pod.labels.get(COUNT, pod.annotations.get(COUNT))
    if said is None:
        return max((amount(container, COUNT) for container in containers), default=0) or 1
    value = None if isinstance(said, bool) else quantity(said)
    if value is None or value.denominator != 1 or not 1 <= value <= 1024:
        raise Unreadable(
            RequestCode.NOT_A_NUMBER, f'`{COUNT}` of the pod is {quoted(said)}; write a number such as "2"'
        )
    return int(value)


def _ask(role: Role, container: Container, cards: int, size: MiB) -> Ask:
    units = amount(container, MEM)
    if not units:
        return Ask(container=container.name, role=role)
    if units % cards:
        lower, upper = units - units % cards, units - units % cards + cards
        raise Unreadable(
            RequestCode.UNEVEN_SPLIT,
            f"`{MEM}` of container `{container.shown}` is {units}, which does not divide evenly over {cards} cards; "
            f"write {f'{lower} or ' if lower else ''}{upper}, or another `{COUNT}`",
        )
    return Ask(container=container.name, role=role, cards=cards, memory=card_memory(container, MEM, size, cards))


def write_grant(award: Award) -> Written:
    size = unit(award.settings)
    positions = award.pod.positions()
    tiles = [tile for held in award.grant.containers for tile in held.tiles]
    indices = sorted({tile.index for tile in tiles})
    total = sum(use.memory for use in award.grant.uses().values()) // size
    card = award.card(indices[0])
    card_size = str((card.memory if card else 0) // size)
    annotations = {
        TOTAL: str(total),
        CARD_SIZE: card_size,
        ASSIGNED: "false",
        ASSUME_TIME: str(award.at),
        ALLOCATION: msgspec.json.encode(
            {
                str(positions[held.container]): {str(tile.index): tile.memory // size for tile in held.tiles}
                for held in award.grant.containers
            }
        ).decode(),
    }
    if len(indices) == 1:  # a reader that knows one index only must not book the sum of several cards on it
        annotations[INDEX] = str(indices[0])
    env = {
        held.container: visible_devices(held)
        | {
            INDEX: ",".join(str(tile.index) for tile in held.tiles),
            TOTAL: _units(held, size),  # of one Allocate call, which is one container
            "ALIYUN_COM_GPU_MEM_CONTAINER": _units(held, size),
            CARD_SIZE: card_size,
        }
        for held in award.grant.containers
    }
    return Written(annotations=annotations, env=env)


def _units(held: ContainerGrant, size: MiB) -> str:
    return str(sum(tile.memory for tile in held.tiles) // size)


def read_grant(pod: Pod, asked: PodRequest | None, cards: tuple[Card, ...], settings: DialectSettings) -> Grant | None:
    if asked is None:
        return None
    by_container = _allocation(pod)
    if not by_container:
        index = indices_of(pod.annotations.get(INDEX))
        by_container = {ask.container: index for ask in asked.asks}
    return grant_by_index(pod, asked, cards, by_container)


def _allocation(pod: Pod) -> dict[str, tuple[int, ...]]:
    """Card indices by container name from the newer annotation; nothing if it is absent or unreadable."""
    found = decode_or_none(_ALLOCATIONS, pod.annotations.get(ALLOCATION)) or {}
    return {name: tuple(found[position]) for name, position in pod.positions().items() if position in found}


def read_cards(node: NodeObject, settings: DialectSettings) -> Inventory | None:
    """Count and average: all that the original's plugin says."""
    memory, count = count_of(node.capacity, MEM), count_of(node.capacity, COUNT)
    if not memory:
        return None
    if not count:
        raise Unreadable(
            RequestCode.MALFORMED,
            f"node has `{MEM}` but no `{COUNT}`: its plugin may not patch nodes/status; restart it with that right",
        )
    size = unit(resolved(settings, [node]))
    return Inventory(unnamed_cards(node, count, memory // count * size, slots=settings.slots_per_card))
