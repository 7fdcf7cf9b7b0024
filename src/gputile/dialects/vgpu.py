"""vgpu-manager, the successor of gpu-admission and gpu-manager: a tile of each of several cards.

    nvidia.com/vgpu-number: 2      two cards
    nvidia.com/vgpu-memory: 3000   of each 3000 MiB (times the node's memory factor); left out: all its memory
    nvidia.com/vgpu-cores: 30      of each 30 percent; left out: none reserved, or all when memory is left out too

The prefix is a setting, because vgpu-manager's is.
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
    no_device,
    number,
    one_of,
    quoted,
    request,
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
    """Today's name, and the one of version 0.1."""
    return f"{settings.vgpu_domain}/vgpu-cores", f"{settings.vgpu_domain}/vgpu-core"


def resources(settings: DialectSettings) -> frozenset[str]:
    return frozenset({_number(settings), _memory(settings), *_cores(settings)})


# ---- read a pod ---------------------------------------------------------------------------------------------------


def read_pod(pod: Pod, settings: DialectSettings) -> PodRequest | None:
    asks = tuple(_ask(role, container, settings) for role, container in pod.containers())
    warnings: list[str] = []
    constraints = _constraints(pod, settings.vgpu_domain, warnings)
    return request(NAME, pod, asks, constraints, warnings=warnings)


def _ask(role: Role, container: Container, settings: DialectSettings) -> ContainerRequest:
    cards = amount(container, _number(settings))
    cores = max(amount(container, name) for name in _cores(settings))
    memory = card_memory(container, _memory(settings), settings.vgpu_memory_factor)
    if cores > ALL:
        raise UnreadableValue(
            RequestError.OUT_OF_RANGE,
            f"`{_cores(settings)[0]}` of container `{container.shown}` is {cores}, percent of each card; write at most "
            f"100, and more cards with `{_number(settings)}`",
        )
    if not cards:
        if memory or cores:
            has = _memory(settings) if memory else _cores(settings)[0]
            raise no_device(container, has, _number(settings), f"{_number(settings)}: 1")
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
    said = pod.annotations
    numa, links = one_of(said, f"{domain}/device-topology-mode", _TOPOLOGY) or (Strength.NO, Strength.NO)
    one_of(said, f"{domain}/vgpu-compute-policy", {"none": 0, "balance": 0, "fixed": 0})  # its agent's business
    if one_of(said, f"{domain}/memory-scheduler-policy", {"virtual": True, "physical": False}):
        warnings.append(f"annotation `{domain}/memory-scheduler-policy: virtual` is read and not used")
    return Constraints(
        models=rules(said, f"{domain}/include-gpu-type", Match.SUBSTRING),
        not_models=rules(said, f"{domain}/exclude-gpu-type", Match.SUBSTRING),
        uuids=frozenset(listed(said, f"{domain}/include-gpu-uuid")),
        not_uuids=frozenset(listed(said, f"{domain}/exclude-gpu-uuid")),
        numa=numa,
        links=links,
        node_policy=one_of(said, f"{domain}/node-scheduler-policy", _POLICY),
        card_policy=one_of(said, f"{domain}/device-scheduler-policy", _POLICY),
    )


# ---- grants ---------------------------------------------------------------------------------------------------------


def write_grant(award: GrantContext) -> PodRecord:
    domain = award.settings.vgpu_domain
    record = ";".join(
        f"{held.container}["
        + ",".join(f"{tile.index}_{tile.uuid}_{tile.cores}_{tile.memory}" for tile in held.tiles)
        + "]"
        for held in award.grant.containers
    )
    return PodRecord(
        annotations={
            f"{domain}/pre-allocated": record,
            f"{domain}/predicate-node": award.grant.node,
            f"{domain}/predicate-time": str(award.at),
        },
        labels={f"{domain}/assigned-phase": "allocating", f"{domain}/metrics-node": award.grant.node},
        env={held.container: _env(award, held) for held in award.grant.containers},
    )


def _env(award: GrantContext, held: ContainerGrant) -> dict[str, str]:
    uuids = visible_devices(held)["NVIDIA_VISIBLE_DEVICES"]
    env = {
        "NVIDIA_VISIBLE_DEVICES": uuids,
        "MANAGER_VISIBLE_DEVICES": uuids,
        "VGPU_POD_NAME": award.pod.name,
        "VGPU_POD_NAMESPACE": award.pod.namespace,
        "VGPU_POD_UID": award.grant.pod,
        "VGPU_CONTAINER_NAME": held.container,
    }
    for position, tile in enumerate(held.tiles):
        env[f"CUDA_MEM_LIMIT_{position}"] = f"{tile.memory}m"
        env[f"CUDA_CORE_LIMIT_{position}"] = str(tile.cores)
    return env


def record_keys(settings: DialectSettings) -> Iterable[str]:
    return (f"{settings.vgpu_domain}/real-allocated", f"{settings.vgpu_domain}/pre-allocated")


def read_grant(pod: Pod, cards: tuple[Card, ...], settings: DialectSettings) -> Grant | None:
    """What the agent really gave wins over what the scheduler planned, container by container."""
    if is_for_another_node(pod, f"{settings.vgpu_domain}/predicate-node"):
        return None
    real, planned = (str(pod.annotations.get(key) or "") for key in record_keys(settings))
    found = _record(planned) | _record(real)
    roles = {container.name: role for role, container in pod.containers()}
    order = [*roles, *(name for name in found if name not in roles)]  # one that the pod lacks runs all the time
    containers = tuple(
        ContainerGrant(name, found[name], roles.get(name, Role.APP)) for name in order if found.get(name)
    )
    if not containers:
        return None
    return Grant(pod=pod.uid, node=pod.node_name, dialect=NAME, containers=containers)


def _record(said: str) -> dict[str, tuple[Tile, ...]]:
    """`<container>[<index>_<uuid>_<cores>_<MiB>,...];...`"""
    found: dict[str, tuple[Tile, ...]] = {}
    for part in filter(None, said.split(";")):
        container, opened, devices = part.partition("[")
        if not opened or not devices.endswith("]"):
            raise UnreadableValue(RequestError.BAD_ANNOTATION, f"the allocation record has {quoted(part)}")
        found[container] = tuple(_tile(device) for device in filter(None, devices[:-1].split(",")))
    return found


def _tile(device: str) -> Tile:
    parts = device.split("_")
    if len(parts) < 4:
        raise UnreadableValue(RequestError.BAD_ANNOTATION, f"the allocation record has a device {quoted(device)}")
    index, memory, cores = (number(parts[at], "the allocation record") for at in (0, -1, -2))
    return Tile("_".join(parts[1:-2]), index, memory, cores)


# ---- inventory ------------------------------------------------------------------------------------------------------


class _Registered(msgspec.Struct, rename="camel"):
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
    device_split: int = 0


class _Topology(msgspec.Struct):
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
    found = decode(_REGISTERS, register, f"{domain}/node-device-register")
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
        for card in found
    )
    return NodeInventory(cards, _links(node, cards, domain))


def _links(node: NodeObject, cards: tuple[Card, ...], domain: str) -> tuple[tuple[int, ...], ...]:
    """The closest link of each pair; an unreadable table only costs the preference."""
    found = decode_or_none(_TOPOLOGIES, node.annotations.get(f"{domain}/node-device-topology"))
    if found is None:
        return ()
    tables = {entry.index: entry.links for entry in found}
    return tuple(
        tuple(max(tables.get(card.index, {}).get(str(peer.index), [0]), default=0) for peer in cards) for card in cards
    )
