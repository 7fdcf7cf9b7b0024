"""gpushare: memory of one card, counted in GiB or MiB.

    aliyun.com/gpu-mem: 3                     the sum over a pod's containers comes out of one card
    label aliyun.com/gpu-count: "4"           the memory is split evenly over four cards of one node

All containers of a pod share the same card or cards: the original guarantees it, and its tools read one index per pod.
"""

from collections.abc import Iterable, Mapping

import msgspec

from gputile.dialects.device_resources import DeviceResource, within_message_limit
from gputile.dialects.kube_objects import Container, GrantContext, NodeInventory, NodeObject, Pod, PodRecord
from gputile.dialects.parsing import (
    UnreadableValue,
    amount,
    amount_or_none,
    build_request,
    card_memory,
    container_label,
    count_of,
    decode_or_none,
    grant_from_indices,
    indices_of,
    quoted,
    unnamed_cards,
    visible_devices,
)
from gputile.dialects.settings import UNIT, DialectSettings, Unit
from gputile.model.cards import Card
from gputile.model.grants import ContainerGrant, Grant, Tile
from gputile.model.refusals import RequestError
from gputile.model.requests import ContainerRequest, PodRequest, Role
from gputile.model.units import LARGEST_CARD, MiB, quantity

NAME = "gpushare"
MEM, COUNT = "aliyun.com/gpu-mem", "aliyun.com/gpu-count"
INDEX, TOTAL, CARD_SIZE = "ALIYUN_COM_GPU_MEM_IDX", "ALIYUN_COM_GPU_MEM_POD", "ALIYUN_COM_GPU_MEM_DEV"
ASSIGNED, ASSUME_TIME = "ALIYUN_COM_GPU_MEM_ASSIGNED", "ALIYUN_COM_GPU_MEM_ASSUME_TIME"
ALLOCATION = "scheduler.framework.gpushare.allocation"
EXTENDS = ""
SLOTS_PER_TILE = 0
AGENT_GUESSES = True
EXTENDER_PATHS: tuple[str, ...] = ("/gpushare-scheduler/filter", "/gpushare-scheduler/bind")
EXAMPLES: tuple[Mapping[str, int], ...] = ({MEM: 3},)
_ALLOCATIONS = msgspec.json.Decoder(dict[int, dict[int, int]])


def resources(settings: DialectSettings) -> frozenset[str]:
    return frozenset({MEM, COUNT})


def amounts_of_one_gpu(settings: DialectSettings) -> Mapping[str, int]:
    return {COUNT: 1}


def device_resources(cards: list[Card], settings: DialectSettings) -> list[DeviceResource]:
    """In GiB with the device IDs of gpushare, which its tools parse; in MiB with the card's index, which is shorter."""
    size = unit(settings)
    devices = [
        (f"{card.uuid if size > 1 else card.index}-_-{n}", card.uuid)
        for card in cards
        for n in range(card.memory // size)
    ]
    remedy = "count `aliyun.com/gpu-mem` in GiB (setting `gpushare_unit`)"
    return [within_message_limit(MEM, NAME, devices, remedy)]


def status_resources(cards: list[Card], settings: DialectSettings) -> dict[str, int]:
    return {COUNT: len(cards)}


def unit(settings: DialectSettings) -> MiB:
    """MiB per unit. Callers that know the nodes replace `auto` with `resolved`; until then it is GiB."""
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
    asks = tuple(_container_request(role, container, cards, unit(settings)) for role, container in containers)
    request = build_request(NAME, pod, asks, together=True, block=unit(settings))
    if request is None and any(amount(container, COUNT) for _, container in containers):
        raise UnreadableValue(
            RequestError.NO_DEVICE_RESOURCE,
            f"pod: `{COUNT}` without `{MEM}` allocates no GPU; add `{MEM}: <memory>` to the limits of a container",
        )
    return request


def _card_count(pod: Pod, containers: list[Container]) -> int:
    """Over how many cards the memory is split: by label, annotation or limit."""
    count = pod.labels.get(COUNT, pod.annotations.get(COUNT))
    if count is None:
        return max((amount(container, COUNT) for container in containers), default=0) or 1
    value = None if isinstance(count, bool) else quantity(count)
    if value is None or value.denominator != 1 or not 1 <= value <= 1024:
        raise UnreadableValue(
            RequestError.NOT_A_NUMBER,
            f'pod: `{COUNT}` is {quoted(count)}, not a number from 1 to 1024; write a number such as "2"',
        )
    return int(value)


def _container_request(role: Role, container: Container, cards: int, size: MiB) -> ContainerRequest:
    units = amount(container, MEM)
    if not units:
        return ContainerRequest(container=container.name, role=role)
    if units % cards:
        lower, upper = units - units % cards, units - units % cards + cards
        raise UnreadableValue(
            RequestError.UNEVEN_SPLIT,
            f"{container_label(container)}: `{MEM}` is {units}, which does not divide evenly over {cards} GPUs; "
            f"write {f'{lower} or ' if lower else ''}{upper}, or another `{COUNT}`",
        )
    return ContainerRequest(
        container=container.name, role=role, cards=cards, memory=card_memory(container, MEM, size, cards)
    )


def write_grant(context: GrantContext) -> PodRecord:
    size = unit(context.settings)
    positions = context.pod.positions()
    tiles = [tile for held in context.grant.containers for tile in held.tiles]
    indices = sorted({tile.index for tile in tiles})
    total = sum(use.memory for use in context.grant.uses().values()) // size
    card = context.card(indices[0])
    card_size = str((card.memory if card else 0) // size)
    annotations = {
        TOTAL: str(total),
        CARD_SIZE: card_size,
        ASSIGNED: "false",
        ASSUME_TIME: str(context.at),
        ALLOCATION: msgspec.json.encode(
            {
                str(positions[held.container]): {str(tile.index): tile.memory // size for tile in held.tiles}
                for held in context.grant.containers
            }
        ).decode(),
    }
    if len(indices) == 1:  # a reader that knows only one index must not count the sum of several cards on it
        annotations[INDEX] = str(indices[0])
    env = {
        held.container: visible_devices(held)
        | {
            INDEX: ",".join(str(tile.index) for tile in held.tiles),
            TOTAL: _units(held, size),  # of one Allocate call, so of one container
            "ALIYUN_COM_GPU_MEM_CONTAINER": _units(held, size),
            CARD_SIZE: card_size,
        }
        for held in context.grant.containers
    }
    return PodRecord(annotations=annotations, env=env)


def _units(held: ContainerGrant, size: MiB) -> str:
    return str(sum(tile.memory for tile in held.tiles) // size)


def record_keys(settings: DialectSettings) -> Iterable[str]:
    return (ALLOCATION, INDEX)


def read_grant(pod: Pod, cards: tuple[Card, ...], settings: DialectSettings) -> Grant | None:
    """By the newer annotation, which has amounts per container and card, else by the pod's index."""
    allocations = decode_or_none(_ALLOCATIONS, pod.annotations.get(ALLOCATION))
    if allocations:
        return _grant_from_allocations(pod, cards, allocations, unit(settings))
    return grant_from_indices(pod, NAME, cards, _recorded_asks(pod, unit(settings)))


def _grant_from_allocations(
    pod: Pod, cards: tuple[Card, ...], allocations: dict[int, dict[int, int]], size: MiB
) -> Grant | None:
    """A container that the pod lacks counts as one that runs all the time."""
    by_index = {card.index: card for card in cards}
    roles = {container.name: role for role, container in pod.containers()}
    owners = {position: (name, roles[name]) for name, position in pod.positions().items()}
    containers = []
    for position, amounts in sorted(allocations.items()):
        if not all(index in by_index and units >= 0 for index, units in amounts.items()):
            return None
        name, role = owners.get(position, (f"#{position}", Role.APP))
        tiles = tuple(Tile(by_index[index].uuid, index, units * size, 0) for index, units in amounts.items() if units)
        if tiles:
            containers.append(ContainerGrant(name, tiles, role))
    if not containers:
        return None
    order = {name: place for place, name in enumerate(roles)}
    containers.sort(key=lambda held: order.get(held.container, len(order)))
    return Grant(pod=pod.uid, node=pod.node_name, dialect=NAME, containers=tuple(containers))


def _recorded_asks(pod: Pod, size: MiB) -> Iterable[tuple[ContainerRequest, tuple[int, ...]]]:
    """Every container with memory is on the pod's cards; a container with an unreadable amount takes all of them."""
    indices = indices_of(pod.annotations.get(INDEX))
    if not indices:
        return
    amounts = [(role, container, amount_or_none(container, MEM)) for role, container in pod.containers()]
    for role, container, units in amounts:
        if units != 0:
            yield _share(container.name, role, units, len(indices), size), indices
    lasting = sum(units or 0 for role, _, units in amounts if role is not Role.INIT)
    total = indices_of(pod.annotations.get(TOTAL))
    if len(total) == 1 and total[0] > lasting:  # the record has more than the containers that run all the time
        yield _share("#rest", Role.APP, total[0] - lasting, len(indices), size), indices
    elif not any(units != 0 for _, _, units in amounts):
        yield ContainerRequest.whole("#all", Role.APP, len(indices)), indices


def _share(container: str, role: Role, units: int | None, cards: int, size: MiB) -> ContainerRequest:
    if not units:
        return ContainerRequest.whole(container, role, cards)
    return ContainerRequest(container=container, role=role, cards=cards, memory=-(-units * size // cards))


def read_cards(node: NodeObject, settings: DialectSettings) -> NodeInventory | None:
    """Number and average size of the cards: the original's device plugin publishes no more."""
    memory, count = count_of(node.capacity, MEM), count_of(node.capacity, COUNT)
    if not memory:
        return None
    if not count:
        raise UnreadableValue(
            RequestError.MALFORMED,
            f"node: `{MEM}` without `{COUNT}`, so its device plugin may not patch nodes/status; grant it that right "
            "and restart it",
        )
    size = _unit_of(memory // count, settings, node)
    cards = unnamed_cards(node, count, memory // count * size, slots=settings.slots_per_card)
    return NodeInventory(cards, gpushare_unit=size)


def _unit_of(average: int, settings: DialectSettings, node: NodeObject) -> MiB:
    """The unit in which the node itself counts: no card has 1,024 GiB, so larger sums are MiB whatever the setting."""
    return UNIT["MiB"] if average * UNIT["GiB"] > LARGEST_CARD else unit(resolved(settings, [node]))
