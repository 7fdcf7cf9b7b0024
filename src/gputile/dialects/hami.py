"""HAMi: a tile of each of several cards.

    nvidia.com/gpu: 2                    two cards
    nvidia.com/gpumem: 3000              of each 3000 MiB, or
    nvidia.com/gpumem-percentage: 50     of each half its memory; with neither, all of it
    nvidia.com/gpucores: 30              of each 30 percent of the cores; 100 makes the card exclusive

A pod that requests neither cores nor a part of the memory gets the card exclusively.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec

from gputile.dialects.device_resources import DeviceResource, by_count
from gputile.dialects.kube_objects import Container, GrantContext, NodeInventory, NodeObject, Pod, PodRecord, Weight
from gputile.dialects.parsing import (
    LARGEST_NODE,
    UnreadableValue,
    amount,
    build_request,
    card_memory,
    container_label,
    decode,
    decode_or_none,
    is_for_another_node,
    listed,
    missing_device_resource,
    names,
    parse_number,
    quoted,
    resource_value,
    visible_devices,
)
from gputile.dialects.selectors import by_nvidia_keys
from gputile.dialects.settings import DialectSettings
from gputile.model.cards import Card
from gputile.model.grants import ContainerGrant, Grant, Tile
from gputile.model.refusals import RequestError
from gputile.model.requests import ContainerRequest, PodRequest, Role
from gputile.model.units import ALL

NAME = "hami"
GPU, MEMORY = "nvidia.com/gpu", "nvidia.com/gpumem"
PERCENT, CORES, PRIORITY = "nvidia.com/gpumem-percentage", "nvidia.com/gpucores", "nvidia.com/priority"
ALLOCATED, TO_ALLOCATE = "hami.io/vgpu-devices-allocated", "hami.io/vgpu-devices-to-allocate"
NODE = "hami.io/vgpu-node"
REGISTER, SCORE, CORDON = "hami.io/node-nvidia-register", "hami.io/node-nvidia-score", "hami.io/device-cordon"
WEIGHTS = "hami.io/device-scoring-weights"
EXTENDS = "nvidia"
SLOTS_PER_TILE = 1
AGENT_GUESSES = True
EXTENDER_PATHS: tuple[str, ...] = ("/filter", "/bind")
EXAMPLES: tuple[Mapping[str, int], ...] = ({GPU: 2, MEMORY: 3000, CORES: 30}, {GPU: 1, PERCENT: 50})


def resources(settings: DialectSettings) -> frozenset[str]:
    return frozenset({MEMORY, PERCENT, CORES, PRIORITY})


def amounts_of_one_gpu(settings: DialectSettings) -> Mapping[str, int]:
    return {GPU: 1}


def device_resources(cards: list[Card], settings: DialectSettings) -> list[DeviceResource]:
    return [by_count(GPU, NAME, cards)]


def status_resources(cards: list[Card], settings: DialectSettings) -> dict[str, int]:
    return {}


# ---- read a pod ---------------------------------------------------------------------------------------------------


def read_pod(pod: Pod, settings: DialectSettings) -> PodRequest | None:
    warnings = _check_weights(pod)
    asks = tuple(_container_request(role, container, settings, warnings) for role, container in pod.containers())
    return build_request(NAME, pod, asks, by_nvidia_keys(pod), warnings=warnings)


def _container_request(
    role: Role, container: Container, settings: DialectSettings, warnings: list[str]
) -> ContainerRequest:
    cards, cores, percent = amount(container, GPU), amount(container, CORES), amount(container, PERCENT)
    memory = card_memory(container, MEMORY, settings.hami_memory_factor)
    amount(container, PRIORITY)  # a bad value is rejected here, not when the grant is written
    if percent > ALL:
        raise UnreadableValue(
            RequestError.OUT_OF_RANGE,
            f"{container_label(container)}: `{PERCENT}` is {percent}, more than 100 percent; write 1 to 100",
        )
    if not cards:
        share = MEMORY if memory else PERCENT if percent else CORES if cores else ""
        if share:
            raise missing_device_resource(container, share, GPU, f"{GPU}: 1")
        return ContainerRequest(container=container.name, role=role)
    if cores > ALL:
        warnings.append(f"{container_label(container)}: `{CORES}` is {cores}; gputile uses 100, the whole GPU")
    names_cores = resource_value(container, CORES) is not None
    cores = min(cores, ALL) if names_cores else ALL if not memory and percent in (0, ALL) else 0
    return ContainerRequest(
        container=container.name,
        role=role,
        cards=cards,
        memory=memory or None,
        memory_percent=None if memory else percent or ALL,
        cores=cores,
        exclusive=cores == ALL,
    )


def _check_weights(pod: Pod) -> list[str]:
    value = pod.annotations.get(WEIGHTS)
    if value is None:
        return []
    parts = [part.split("=")[-1].strip() for part in listed(pod.annotations, WEIGHTS)]
    if len(parts) != 3 or not all(part.isdecimal() for part in parts) or not any(int(part[:9]) for part in parts):
        raise UnreadableValue(
            RequestError.BAD_ANNOTATION,
            f"annotation `{WEIGHTS}`: {quoted(value)} is not a list of weights; write three numbers, for slot, core "
            "and memory, one of them above 0",
        )
    return [f"annotation `{WEIGHTS}`: ignored, because gputile ranks a GPU by its most allocated dimension"]


# ---- grants ---------------------------------------------------------------------------------------------------------


def write_grant(context: GrantContext) -> PodRecord:
    held = {c.container: c for c in context.grant.containers}
    containers = {c.name: c for _, c in context.pod.containers()}
    record = "".join(_devices(held.get(ask.container)) + ";" for ask in context.asked.asks)
    seconds = str(context.at // 10**9)
    return PodRecord(
        annotations={
            ALLOCATED: record,
            TO_ALLOCATE: record,
            NODE: context.grant.node,
            "hami.io/vgpu-time": seconds,
            "hami.io/bind-phase": "allocating",
            "hami.io/bind-time": seconds,
        },
        labels={NODE: context.grant.node},
        env={name: _env(grant, containers[name]) for name, grant in held.items()},
    )


def _devices(held: ContainerGrant | None) -> str:
    """The entry of one container in the record; a container without cards has an empty entry."""
    if held is None:
        return ""
    return "".join(f"{tile.uuid},NVIDIA,{tile.memory},{tile.cores}:" for tile in held.tiles)


def _env(held: ContainerGrant, container: Container) -> dict[str, str]:
    env = visible_devices(held)
    for position, tile in enumerate(held.tiles):
        env[f"CUDA_DEVICE_MEMORY_LIMIT_{position}"] = f"{tile.memory}m"
    env["CUDA_DEVICE_SM_LIMIT"] = str(held.tiles[0].cores)
    if resource_value(container, PRIORITY) is not None:
        env["CUDA_TASK_PRIORITY"] = str(amount(container, PRIORITY))
    return env


def record_keys(settings: DialectSettings) -> Iterable[str]:
    return (ALLOCATED,)


def read_grant(pod: Pod, cards: tuple[Card, ...], settings: DialectSettings) -> Grant | None:
    record = pod.annotations.get(ALLOCATED)
    if record is None or is_for_another_node(pod, NODE):
        return None
    index = {card.uuid: card.index for card in cards}
    containers = []
    for (role, name), entry in _entries(pod, str(record)):
        tiles = tuple(_tile(device, index) for device in entry.split(":") if device)
        if tiles:
            containers.append(ContainerGrant(name, tiles, role))
    if not containers:
        return None
    return Grant(pod=pod.uid, node=pod.node_name, dialect=NAME, containers=tuple(containers))


def _entries(pod: Pod, record: str) -> Iterable[tuple[tuple[Role, str], str]]:
    """The record's entries with their containers. HAMi before 2.9 wrote none for init containers, so the number of
    entries decides. With any other number the containers are unknown, and all entries add up."""
    entries = record.removesuffix(";").split(";")
    containers = [(role, container.name) for role, container in pod.containers()]
    apps = [owner for owner in containers if owner[0] is Role.APP]
    if len(entries) == len(containers):
        owners = containers
    elif len(entries) <= len(apps):
        owners = apps
    else:
        owners = [(Role.APP, f"#{position}") for position in range(len(entries))]
    return zip(owners, entries, strict=False)


def _tile(device: str, index: dict[str, int]) -> Tile:
    """`<uuid>,<type>,<MiB>,<cores>`; under dynamic MIG the UUID ends in the position of the slice, `GPU-0[2-1]`."""
    parts = device.split(",")
    if len(parts) < 4:
        raise UnreadableValue(
            RequestError.BAD_ANNOTATION,
            f"annotation `{ALLOCATED}`: {quoted(device)} is not a device; restart HAMi's scheduler, which writes it",
        )
    uuid = parts[0].partition("[")[0]
    return Tile(uuid, index.get(uuid, -1), parse_number(parts[2], ALLOCATED), parse_number(parts[3], ALLOCATED))


# ---- inventory ------------------------------------------------------------------------------------------------------


class _Registered(msgspec.Struct):
    """A card in the JSON register. HAMi omits zero values: an absent index is 0, an absent health is false."""

    id: str
    count: int = 0
    devmem: int = 0
    devcore: int = 0
    type: str = ""
    numa: int = 0
    mode: str = ""
    health: bool = False
    index: int = 0


_REGISTERS = msgspec.json.Decoder(Annotated[list[_Registered], msgspec.Meta(max_length=LARGEST_NODE)])


class _Scores(msgspec.Struct):
    """The link scores of one card, by the UUID of the other card."""

    uuid: str
    score: dict[str, Weight] = msgspec.field(default_factory=dict)


_SCORES = msgspec.json.Decoder(Annotated[list[_Scores], msgspec.Meta(max_length=LARGEST_NODE)])


def read_cards(node: NodeObject, settings: DialectSettings) -> NodeInventory | None:
    """The register annotation, in JSON or in the older text with colons and commas."""
    register = str(node.annotations.get(REGISTER) or "").strip()
    if not register:
        return None
    entries = decode(_REGISTERS, register, REGISTER) if register.startswith("[") else list(_old_register(register))
    cordoned = frozenset(names(node.annotations.get(CORDON)))
    cards = tuple(
        Card(
            index=card.index,
            uuid=card.id,
            memory=card.devmem,
            cores=card.devcore,
            slots=card.count,
            model=card.type,
            numa=card.numa,
            mode=card.mode,
            healthy=card.health,
            cordoned=card.id in cordoned,
        )
        for card in entries
    )
    return NodeInventory(cards, _links(node, cards))


def _old_register(register: str) -> Iterable[_Registered]:
    """`uuid,count,MiB,core,type,numa,health[,index,mode]` per card, cards ended by a colon."""
    if register.count(":") > LARGEST_NODE:
        raise UnreadableValue(
            RequestError.BAD_ANNOTATION, f"annotation `{REGISTER}`: it lists more than {LARGEST_NODE} GPUs"
        )
    for position, text in enumerate(part for part in register.split(":") if part.strip()):
        fields = [field.strip() for field in text.split(",")]
        if len(fields) not in (7, 9):
            raise UnreadableValue(
                RequestError.BAD_ANNOTATION, f"annotation `{REGISTER}`: a GPU has {len(fields)} fields, not 7 or 9"
            )
        yield _Registered(
            id=fields[0],
            count=parse_number(fields[1], REGISTER),
            devmem=parse_number(fields[2], REGISTER),
            devcore=parse_number(fields[3], REGISTER),
            type=fields[4],
            numa=parse_number(fields[5], REGISTER),
            health=fields[6].lower() == "true",
            index=parse_number(fields[7], REGISTER) if len(fields) == 9 else position,
            mode=fields[8] if len(fields) == 9 else "",
        )


def _links(node: NodeObject, cards: tuple[Card, ...]) -> tuple[tuple[int, ...], ...]:
    """The link scores, if the agent publishes them; unreadable scores only disable the preference for linked cards."""
    entries = decode_or_none(_SCORES, node.annotations.get(SCORE))
    if entries is None:
        return ()
    scores = {entry.uuid: entry.score for entry in entries}
    return tuple(tuple(scores.get(card.uuid, {}).get(peer.uuid, 0) for peer in cards) for card in cards)
