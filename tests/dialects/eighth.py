"""An eighth dialect, which only exists in tests: all that a new dialect needs, in one file.

tenths.io/gpu-tenths: 3     three tenths of the memory and cores of one GPU; 10, 20, ... are whole GPUs
"""

from collections.abc import Iterable, Mapping

import msgspec

from gputile.dialects.device_resources import DeviceResource, by_count
from gputile.dialects.kube_objects import Container, GrantContext, NodeInventory, NodeObject, Pod, PodRecord
from gputile.dialects.parsing import (
    UnreadableValue,
    amount,
    build_request,
    container_label,
    count_of,
    decode,
    is_for_another_node,
    unnamed_cards,
    visible_devices,
)
from gputile.dialects.settings import DialectSettings
from gputile.model.cards import Card
from gputile.model.grants import ContainerGrant, Grant, Tile
from gputile.model.refusals import RequestError
from gputile.model.requests import ContainerRequest, PodRequest, Role

NAME = "tenths"
EXTENDS = ""
SLOTS_PER_TILE = 0
AGENT_GUESSES = True
EXTENDER_PATHS: tuple[str, ...] = ("/tenths/predicates", "/tenths/bind")
TENTHS, MEMORY, RECORD, NODE = "tenths.io/gpu-tenths", "tenths.io/memory", "tenths.io/gpus", "tenths.io/node"
EXAMPLES: tuple[Mapping[str, int], ...] = ({TENTHS: 3},)
_RECORDS = msgspec.json.Decoder(dict[str, dict[int, tuple[int, int]]])  # by container and index: MiB, percent


def resources(settings: DialectSettings) -> frozenset[str]:
    return frozenset({TENTHS, MEMORY})


def amounts_of_one_gpu(settings: DialectSettings) -> Mapping[str, int]:
    return {TENTHS: 10}


def device_resources(cards: list[Card], settings: DialectSettings) -> list[DeviceResource]:
    return [by_count(TENTHS, NAME, cards, 10)]


def status_resources(cards: list[Card], settings: DialectSettings) -> dict[str, int]:
    return {MEMORY: sum(card.memory for card in cards)}


def read_pod(pod: Pod, settings: DialectSettings) -> PodRequest | None:
    return build_request(NAME, pod, tuple(_container_request(role, container) for role, container in pod.containers()))


def _container_request(role: Role, container: Container) -> ContainerRequest:
    tenths = amount(container, TENTHS)
    if tenths > 10 and tenths % 10:
        raise UnreadableValue(
            RequestError.OUT_OF_RANGE, f"{container_label(container)}: `{TENTHS}` is {tenths}; write 1 to 10, 20, ..."
        )
    if tenths >= 10:
        return ContainerRequest.whole(container.name, role, tenths // 10)
    if not tenths:
        return ContainerRequest(container=container.name, role=role)
    percent = 10 * tenths
    return ContainerRequest(container=container.name, role=role, cards=1, memory_percent=percent, cores=percent)


def write_grant(context: GrantContext) -> PodRecord:
    held = context.grant.containers
    record = {each.container: {tile.index: (tile.memory, tile.cores) for tile in each.tiles} for each in held}
    return PodRecord(
        annotations={RECORD: msgspec.json.encode(record).decode(), NODE: context.grant.node},
        env={each.container: visible_devices(each) | {"TENTHS": "yes"} for each in held},
    )


def record_keys(settings: DialectSettings) -> Iterable[str]:
    return (RECORD,)


def read_grant(pod: Pod, cards: tuple[Card, ...], settings: DialectSettings) -> Grant | None:
    if RECORD not in pod.annotations or is_for_another_node(pod, NODE):
        return None
    record = decode(_RECORDS, pod.annotations[RECORD], RECORD)
    uuids = {card.index: card.uuid for card in cards}
    containers = tuple(
        ContainerGrant(
            container.name,
            tuple(Tile(uuids.get(at, ""), at, *amounts) for at, amounts in record[container.name].items()),
            role,
        )
        for role, container in pod.containers()
        if container.name in record
    )
    return Grant(pod=pod.uid, node=pod.node_name, dialect=NAME, containers=containers) if containers else None


def read_cards(node: NodeObject, settings: DialectSettings) -> NodeInventory | None:
    count = count_of(node.capacity, TENTHS) // 10
    return NodeInventory(unnamed_cards(node, count, count_of(node.capacity, MEMORY) // count)) if count else None
