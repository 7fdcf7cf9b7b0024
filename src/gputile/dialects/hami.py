"""HAMi: a tile of each of several cards.

    nvidia.com/gpu: 2                    two cards
    nvidia.com/gpumem: 3000              of each 3000 MiB, or
    nvidia.com/gpumem-percentage: 50     of each half its memory; with neither, all of it
    nvidia.com/gpucores: 30              of each 30 percent of the cores; 100 means nobody else on it

With neither cores nor a part of the memory asked for, the card is the pod's alone.
"""

from collections.abc import Iterable
from typing import Annotated

import msgspec

from gputile.dialects.kube_objects import (
    LARGEST_NODE,
    Container,
    GrantContext,
    NodeInventory,
    NodeObject,
    Pod,
    PodRecord,
    UnreadableValue,
    Weight,
    amount,
    card_memory,
    decode,
    decode_or_none,
    is_for_another_node,
    listed,
    names,
    no_device,
    number,
    quoted,
    request,
    visible_devices,
    written,
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


def resources(settings: DialectSettings) -> frozenset[str]:
    return frozenset({MEMORY, PERCENT, CORES, PRIORITY})


# ---- read a pod ---------------------------------------------------------------------------------------------------


def read_pod(pod: Pod, settings: DialectSettings) -> PodRequest | None:
    warnings = _check_weights(pod)
    asks = tuple(_ask(role, container, settings, warnings) for role, container in pod.containers())
    return request(NAME, pod, asks, by_nvidia_keys(pod), warnings=warnings)


def _ask(role: Role, container: Container, settings: DialectSettings, warnings: list[str]) -> ContainerRequest:
    cards, cores, percent = amount(container, GPU), amount(container, CORES), amount(container, PERCENT)
    memory = card_memory(container, MEMORY, settings.hami_memory_factor)
    amount(container, PRIORITY)  # refused here, not when the grant is written
    if percent > ALL:
        raise UnreadableValue(
            RequestError.OUT_OF_RANGE,
            f"`{PERCENT}` of container `{container.shown}` is {percent}; write 1 to 100",
        )
    if not cards:
        share = MEMORY if memory else PERCENT if percent else CORES if cores else ""
        if share:
            raise no_device(container, share, GPU, f"{GPU}: 1")
        return ContainerRequest(container=container.name, role=role)
    if cores > ALL:
        warnings.append(f"`{CORES}` of container `{container.shown}` is {cores}; 100 is the whole card and is used")
    says_cores = written(container, CORES) is not None
    cores = min(cores, ALL) if says_cores else ALL if not memory and percent in (0, ALL) else 0
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
    said = pod.annotations.get(WEIGHTS)
    if said is None:
        return []
    parts = [part.split("=")[-1].strip() for part in listed(pod.annotations, WEIGHTS)]
    if len(parts) != 3 or not all(part.isdecimal() for part in parts) or not any(int(part[:9]) for part in parts):
        raise UnreadableValue(
            RequestError.BAD_ANNOTATION,
            f"annotation `{WEIGHTS}` is {quoted(said)}; write three numbers, for slot, core and memory, one of them "
            "above 0",
        )
    return [f"annotation `{WEIGHTS}` is read and not used: gputile weighs a card by its largest share"]


# ---- grants ---------------------------------------------------------------------------------------------------------


def write_grant(award: GrantContext) -> PodRecord:
    held = {c.container: c for c in award.grant.containers}
    containers = {c.name: c for _, c in award.pod.containers()}
    record = "".join(_devices(held.get(ask.container)) + ";" for ask in award.asked.asks)
    seconds = str(award.at // 10**9)
    return PodRecord(
        annotations={
            ALLOCATED: record,
            TO_ALLOCATE: record,
            NODE: award.grant.node,
            "hami.io/vgpu-time": seconds,
            "hami.io/bind-phase": "allocating",
            "hami.io/bind-time": seconds,
        },
        labels={NODE: award.grant.node},
        env={name: _env(given, containers[name]) for name, given in held.items()},
    )


def _devices(held: ContainerGrant | None) -> str:
    """One container of the record; a container without cards keeps its empty place."""
    if held is None:
        return ""
    return "".join(f"{tile.uuid},NVIDIA,{tile.memory},{tile.cores}:" for tile in held.tiles)


def _env(held: ContainerGrant, container: Container) -> dict[str, str]:
    env = visible_devices(held)
    for position, tile in enumerate(held.tiles):
        env[f"CUDA_DEVICE_MEMORY_LIMIT_{position}"] = f"{tile.memory}m"
    env["CUDA_DEVICE_SM_LIMIT"] = str(held.tiles[0].cores)
    if written(container, PRIORITY) is not None:
        env["CUDA_TASK_PRIORITY"] = str(amount(container, PRIORITY))
    return env


def record_keys(settings: DialectSettings) -> Iterable[str]:
    return (ALLOCATED,)


def read_grant(pod: Pod, cards: tuple[Card, ...], settings: DialectSettings) -> Grant | None:
    said = pod.annotations.get(ALLOCATED)
    if said is None or is_for_another_node(pod, NODE):
        return None
    index = {card.uuid: card.index for card in cards}
    containers = []
    for (role, name), place in _places(pod, str(said)):
        tiles = tuple(_tile(device, index) for device in place.split(":") if device)
        if tiles:
            containers.append(ContainerGrant(name, tiles, role))
    if not containers:
        return None
    return Grant(pod=pod.uid, node=pod.node_name, dialect=NAME, containers=tuple(containers))


def _places(pod: Pod, said: str) -> Iterable[tuple[tuple[Role, str], str]]:
    """The record's places and whose they are. HAMi before 2.9 had none for init containers, so their number tells. With
    another number nobody knows who holds what, and all of it adds up."""
    places = said.removesuffix(";").split(";")
    found = [(role, container.name) for role, container in pod.containers()]
    apps = [owner for owner in found if owner[0] is Role.APP]
    if len(places) == len(found):
        owners = found
    elif len(places) <= len(apps):
        owners = apps
    else:
        owners = [(Role.APP, f"#{position}") for position in range(len(places))]
    return zip(owners, places, strict=False)


def _tile(device: str, index: dict[str, int]) -> Tile:
    """`<uuid>,<type>,<MiB>,<cores>`; under dynamic MIG the UUID ends in the place of the slice, `GPU-0[2-1]`."""
    parts = device.split(",")
    if len(parts) < 4:
        raise UnreadableValue(RequestError.BAD_ANNOTATION, f"annotation `{ALLOCATED}` has a device {quoted(device)}")
    uuid = parts[0].partition("[")[0]
    return Tile(uuid, index.get(uuid, -1), number(parts[2], ALLOCATED), number(parts[3], ALLOCATED))


# ---- inventory ------------------------------------------------------------------------------------------------------


class _Registered(msgspec.Struct):
    """One card of the JSON register. HAMi leaves zero values out: no index is 0, no health is false."""

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
    uuid: str
    score: dict[str, Weight] = msgspec.field(default_factory=dict)


_SCORES = msgspec.json.Decoder(Annotated[list[_Scores], msgspec.Meta(max_length=LARGEST_NODE)])


def read_cards(node: NodeObject, settings: DialectSettings) -> NodeInventory | None:
    """The register annotation, in JSON or in the older text with colons and commas."""
    said = str(node.annotations.get(REGISTER) or "").strip()
    if not said:
        return None
    found = decode(_REGISTERS, said, REGISTER) if said.startswith("[") else list(_old_register(said))
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
        for card in found
    )
    return NodeInventory(cards, _links(node, cards))


def _old_register(said: str) -> Iterable[_Registered]:
    """`uuid,count,MiB,core,type,numa,health[,index,mode]` per card, cards ended by a colon."""
    if said.count(":") > LARGEST_NODE:
        raise UnreadableValue(
            RequestError.BAD_ANNOTATION, f"annotation `{REGISTER}` lists more than {LARGEST_NODE} GPUs"
        )
    for position, text in enumerate(part for part in said.split(":") if part.strip()):
        fields = [field.strip() for field in text.split(",")]
        if len(fields) not in (7, 9):
            raise UnreadableValue(
                RequestError.BAD_ANNOTATION, f"annotation `{REGISTER}`: a card has {len(fields)} fields, not 7 or 9"
            )
        yield _Registered(
            id=fields[0],
            count=number(fields[1], REGISTER),
            devmem=number(fields[2], REGISTER),
            devcore=number(fields[3], REGISTER),
            type=fields[4],
            numa=number(fields[5], REGISTER),
            health=fields[6].lower() == "true",
            index=number(fields[7], REGISTER) if len(fields) == 9 else position,
            mode=fields[8] if len(fields) == 9 else "",
        )


def _links(node: NodeObject, cards: tuple[Card, ...]) -> tuple[tuple[int, ...], ...]:
    """Pair scores, if the agent was told to publish them; unreadable ones only cost the preference."""
    found = decode_or_none(_SCORES, node.annotations.get(SCORE))
    if found is None:
        return ()
    scores = {entry.uuid: entry.score for entry in found}
    return tuple(tuple(scores.get(card.uuid, {}).get(peer.uuid, 0) for peer in cards) for card in cards)
