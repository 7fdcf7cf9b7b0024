"""vgpu-manager, the successor of gpu-admission and gpu-manager: a tile of each of several cards.

    nvidia.com/vgpu-number: 2      two cards
    nvidia.com/vgpu-memory: 3000   of each 3000 MiB (times the node's memory factor); left out: all its memory
    nvidia.com/vgpu-cores: 30      of each 30 percent; left out: none reserved, or all when memory is left out too

The prefix is a setting, because it is an option of vgpu-manager.
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
    one_of,
    parse_number,
    quoted,
    visible_devices,
)
from gputile.dialects.selectors import rules
from gputile.dialects.settings import DialectSettings
from gputile.model.cards import Card
from gputile.model.grants import ContainerGrant, Grant, Tile
from gputile.model.refusals import RequestError
from gputile.model.requests import Constraints, ContainerRequest, Match, PodRequest, Role, Strength
from gputile.model.units import ALL

NAME = "vgpu"
EXTENDS = ""
SLOTS_PER_TILE = 1
AGENT_GUESSES = True
EXTENDER_PATHS: tuple[str, ...] = tuple(f"/scheduler/{verb}" for verb in ("filter", "filter-dryrun", "bind", "preempt"))
EXAMPLES: tuple[Mapping[str, int], ...] = (
    {"nvidia.com/vgpu-number": 2, "nvidia.com/vgpu-memory": 3000, "nvidia.com/vgpu-cores": 30},
)
_POLICY = {"binpack": "binpack", "spread": "spread", "none": None}
_TOPOLOGY = {
    "none": (Strength.NO, Strength.NO),
    "numa": (Strength.PREFER, Strength.NO),
    "numa-strict": (Strength.REQUIRE, Strength.NO),
    "link": (Strength.NO, Strength.PREFER),
    "link-strict": (Strength.NO, Strength.REQUIRE),
}


def _number(settings: DialectSettings) -> str:
    return f"{settings.vgpu_domain}/vgpu-number"


def _memory(settings: DialectSettings) -> str:
    return f"{settings.vgpu_domain}/vgpu-memory"


def _cores(settings: DialectSettings) -> tuple[str, str]:
    """The current name, and the name of version 0.1."""
    return f"{settings.vgpu_domain}/vgpu-cores", f"{settings.vgpu_domain}/vgpu-core"


def resources(settings: DialectSettings) -> frozenset[str]:
    return frozenset({_number(settings), _memory(settings), *_cores(settings)})


def amounts_of_one_gpu(settings: DialectSettings) -> Mapping[str, int]:
    return {_number(settings): 1}


def device_resources(cards: list[Card], settings: DialectSettings) -> list[DeviceResource]:
    return [by_count(_number(settings), NAME, cards)]


def status_resources(cards: list[Card], settings: DialectSettings) -> dict[str, int]:
    return {}


# ---- read a pod ---------------------------------------------------------------------------------------------------


def read_pod(pod: Pod, settings: DialectSettings) -> PodRequest | None:
    asks = tuple(_container_request(role, container, settings) for role, container in pod.containers())
    warnings: list[str] = []
    constraints = _constraints(pod, settings.vgpu_domain, warnings)
    return build_request(NAME, pod, asks, constraints, warnings=warnings)


def _container_request(role: Role, container: Container, settings: DialectSettings) -> ContainerRequest:
    cards = amount(container, _number(settings))
    cores = max(amount(container, name) for name in _cores(settings))
    memory = card_memory(container, _memory(settings), settings.vgpu_memory_factor)
    if cores > ALL:
        raise UnreadableValue(
            RequestError.OUT_OF_RANGE,
            f"{container_label(container)}: `{_cores(settings)[0]}` is {cores}, more than 100 percent of a GPU; write "
            f"at most 100, and request more GPUs with `{_number(settings)}`",
        )
    if not cards:
        if memory or cores:
            share = _memory(settings) if memory else _cores(settings)[0]
            raise missing_device_resource(container, share, _number(settings), f"{_number(settings)}: 1")
        return ContainerRequest(container=container.name, role=role)
    if not memory and not cores:
        return ContainerRequest.whole(container.name, role, cards)
    return ContainerRequest(
        container=container.name,
        role=role,
        cards=cards,
        memory=memory or None,
        memory_percent=None if memory else ALL,
        cores=cores,
    )


def _constraints(pod: Pod, domain: str, warnings: list[str]) -> Constraints:
    annotations = pod.annotations
    numa, links = one_of(annotations, f"{domain}/device-topology-mode", _TOPOLOGY) or (Strength.NO, Strength.NO)
    one_of(
        annotations, f"{domain}/vgpu-compute-policy", {"none": 0, "balance": 0, "fixed": 0}
    )  # only its agent uses it
    if one_of(annotations, f"{domain}/memory-scheduler-policy", {"virtual": True, "physical": False}):
        warnings.append(f"annotation `{domain}/memory-scheduler-policy: virtual`: ignored by gputile")
    return Constraints(
        models=rules(annotations, f"{domain}/include-gpu-type", Match.SUBSTRING),
        not_models=rules(annotations, f"{domain}/exclude-gpu-type", Match.SUBSTRING),
        uuids=frozenset(listed(annotations, f"{domain}/include-gpu-uuid")),
        not_uuids=frozenset(listed(annotations, f"{domain}/exclude-gpu-uuid")),
        numa=numa,
        links=links,
        node_policy=one_of(annotations, f"{domain}/node-scheduler-policy", _POLICY),
        card_policy=one_of(annotations, f"{domain}/device-scheduler-policy", _POLICY),
    )


# ---- grants ---------------------------------------------------------------------------------------------------------


def write_grant(context: GrantContext) -> PodRecord:
    domain = context.settings.vgpu_domain
    record = ";".join(
        f"{held.container}["
        + ",".join(f"{tile.index}_{tile.uuid}_{tile.cores}_{tile.memory}" for tile in held.tiles)
        + "]"
        for held in context.grant.containers
    )
    return PodRecord(
        annotations={
            f"{domain}/pre-allocated": record,
            f"{domain}/predicate-node": context.grant.node,
            f"{domain}/predicate-time": str(context.at),
        },
        labels={f"{domain}/assigned-phase": "allocating", f"{domain}/metrics-node": context.grant.node},
        env={held.container: _env(context, held) for held in context.grant.containers},
    )


def _env(context: GrantContext, held: ContainerGrant) -> dict[str, str]:
    uuids = visible_devices(held)["NVIDIA_VISIBLE_DEVICES"]
    env = {
        "NVIDIA_VISIBLE_DEVICES": uuids,
        "MANAGER_VISIBLE_DEVICES": uuids,
        "VGPU_POD_NAME": context.pod.name,
        "VGPU_POD_NAMESPACE": context.pod.namespace,
        "VGPU_POD_UID": context.grant.pod,
        "VGPU_CONTAINER_NAME": held.container,
    }
    for position, tile in enumerate(held.tiles):
        env[f"CUDA_MEM_LIMIT_{position}"] = f"{tile.memory}m"
        env[f"CUDA_CORE_LIMIT_{position}"] = str(tile.cores)
    return env


def record_keys(settings: DialectSettings) -> Iterable[str]:
    return (f"{settings.vgpu_domain}/real-allocated", f"{settings.vgpu_domain}/pre-allocated")


def read_grant(pod: Pod, cards: tuple[Card, ...], settings: DialectSettings) -> Grant | None:
    """What the agent allocated wins over what the scheduler planned, container by container."""
    if is_for_another_node(pod, f"{settings.vgpu_domain}/predicate-node"):
        return None
    real, planned = (str(pod.annotations.get(key) or "") for key in record_keys(settings))
    recorded = _tiles_by_container(planned) | _tiles_by_container(real)
    roles = {container.name: role for role, container in pod.containers()}
    order = [
        *roles,
        *(name for name in recorded if name not in roles),
    ]  # a container that the pod lacks counts as one that runs
    containers = tuple(
        ContainerGrant(name, recorded[name], roles.get(name, Role.APP)) for name in order if recorded.get(name)
    )
    if not containers:
        return None
    return Grant(pod=pod.uid, node=pod.node_name, dialect=NAME, containers=containers)


def _tiles_by_container(record: str) -> dict[str, tuple[Tile, ...]]:
    """`<container>[<index>_<uuid>_<cores>_<MiB>,...];...`"""
    tiles: dict[str, tuple[Tile, ...]] = {}
    for part in filter(None, record.split(";")):
        container, opened, devices = part.partition("[")
        if not opened or not devices.endswith("]"):
            raise _bad_record(f"{quoted(part)} is not a container with its devices")
        tiles[container] = tuple(_tile(device) for device in filter(None, devices[:-1].split(",")))
    return tiles


def _bad_record(problem: str) -> UnreadableValue:
    return UnreadableValue(
        RequestError.BAD_ANNOTATION, f"allocation record: {problem}; restart vgpu-manager's scheduler, which writes it"
    )


def _tile(device: str) -> Tile:
    parts = device.split("_")
    if len(parts) < 4:
        raise _bad_record(f"{quoted(device)} is not a device")
    index, memory, cores = (parse_number(parts[at], "allocation record") for at in (0, -1, -2))
    return Tile("_".join(parts[1:-2]), index, memory, cores)


# ---- inventory ------------------------------------------------------------------------------------------------------


class _Registered(msgspec.Struct, rename="camel"):
    """A card in the register of the node."""

    id: int
    uuid: str
    memory: int = 0
    core: int = ALL
    number: int = 0
    type: str = ""
    numa: int = -1
    mig: bool = False
    bus_id: str = ""
    healthy: bool = False


class _Config(msgspec.Struct, rename="camel"):
    """The options of the node's agent."""

    device_split: int = 0


class _Topology(msgspec.Struct):
    """The links of one card, by the index of the other card."""

    index: int
    links: dict[str, list[Weight]] = msgspec.field(default_factory=dict)


_REGISTERS = msgspec.json.Decoder(Annotated[list[_Registered], msgspec.Meta(max_length=LARGEST_NODE)])
_CONFIGS = msgspec.json.Decoder(_Config)
_TOPOLOGIES = msgspec.json.Decoder(Annotated[list[_Topology], msgspec.Meta(max_length=LARGEST_NODE)])


def read_cards(node: NodeObject, settings: DialectSettings) -> NodeInventory | None:
    domain = settings.vgpu_domain
    register = node.annotations.get(f"{domain}/node-device-register")
    if register is None:
        return None
    entries = decode(_REGISTERS, register, f"{domain}/node-device-register")
    config_key = f"{domain}/node-config-info"
    config = decode(_CONFIGS, node.annotations.get(config_key, "{}"), config_key)
    cards = tuple(
        Card(
            index=card.id,
            uuid=card.uuid,
            memory=card.memory,
            cores=card.core,
            slots=card.number or config.device_split or settings.slots_per_card,
            model=card.type,
            numa=card.numa,
            pci=card.bus_id,
            mode="mig" if card.mig else "",
            healthy=card.healthy,
        )
        for card in entries
    )
    return NodeInventory(cards, _links(node, cards, domain))


def _links(node: NodeObject, cards: tuple[Card, ...], domain: str) -> tuple[tuple[int, ...], ...]:
    """The closest link of each pair; an unreadable table only disables the preference for linked cards."""
    entries = decode_or_none(_TOPOLOGIES, node.annotations.get(f"{domain}/node-device-topology"))
    if entries is None:
        return ()
    tables = {entry.index: entry.links for entry in entries}
    return tuple(
        tuple(max(tables.get(card.index, {}).get(str(peer.index), [0]), default=0) for peer in cards) for card in cards
    )
