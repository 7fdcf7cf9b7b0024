"""vcuda: gpu-admission with gpu-manager, and the fork of both on `nvidia.com/*`.

    tencent.com/vcuda-core: 30 + tencent.com/vcuda-memory: 4       30 % of a card and 4 x 256 MiB
    nvidia.com/vcuda-core: 30 + nvidia.com/vcuda-memory: 1024      the fork counts memory in MiB
    .../vcuda-core: 200                                            two whole cards; multiples of 100 only

Cores without memory, which the original accepts and then fails to serve, get the same percentage of the memory.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Annotated

import msgspec

from gputile.dialects.device_resources import DeviceResource, by_count
from gputile.dialects.kube_objects import Container, GrantContext, NodeInventory, NodeObject, Pod, PodRecord
from gputile.dialects.parsing import (
    LARGEST_NODE,
    UnreadableValue,
    amount,
    build_request,
    card_memory,
    container_label,
    count_of,
    decode,
    first_readable,
    grant_from_indices,
    indices_of,
    is_for_another_node,
    missing_device_resource,
    quoted,
    requests_any,
    unnamed_cards,
    visible_devices,
)
from gputile.dialects.selectors import by_nvidia_keys
from gputile.dialects.settings import DialectSettings
from gputile.model.cards import Card
from gputile.model.grants import Grant
from gputile.model.refusals import RequestError
from gputile.model.requests import ContainerRequest, PodRequest, Role
from gputile.model.units import ALL, MiB, quantity

NAME = "vcuda"
EXTENDS = ""
SLOTS_PER_TILE = 0
AGENT_GUESSES = True
EXTENDER_PATHS: tuple[str, ...] = tuple(f"/scheduler/{verb}" for verb in ("predicates", "priorities", "bind"))
REGISTER = "tydic.io/nvidia-device-register"
MODEL_LABELS = ("gaia.tencent.com/gpu-model", "tkestack.io/gpu-model", "gaia.nvidia.com/gpu-model")
POOL_LABELS = ("gaia.tencent.com/gpu-pool", "tkestack.io/gpu-pool")


class VcudaEdition(msgspec.Struct, frozen=True):
    """One of the two sets of resource names: the original's and the fork's."""

    prefix: str
    block: MiB  # per unit of memory

    @property
    def core(self) -> str:
        return f"{self.prefix}/vcuda-core"

    @property
    def memory(self) -> str:
        return f"{self.prefix}/vcuda-memory"


TENCENT, FORK = VcudaEdition("tencent.com", 256), VcudaEdition("nvidia.com", 1)
EDITIONS = (TENCENT, FORK)
EXAMPLES: tuple[Mapping[str, int], ...] = (
    {TENCENT.core: 30, TENCENT.memory: 4},
    {FORK.core: 30, FORK.memory: 1024},
)


def resources(settings: DialectSettings) -> frozenset[str]:
    return frozenset(name for edition in EDITIONS for name in (edition.core, edition.memory))


def amounts_of_one_gpu(settings: DialectSettings) -> Mapping[str, int]:
    return {edition.core: ALL for edition in EDITIONS}


def device_resources(cards: list[Card], settings: DialectSettings) -> list[DeviceResource]:
    return [by_count(edition.core, NAME, cards, ALL) for edition in EDITIONS]


def status_resources(cards: list[Card], settings: DialectSettings) -> dict[str, int]:
    memory = sum(card.memory for card in cards)
    return {edition.memory: memory // edition.block for edition in EDITIONS}


def read_pod(pod: Pod, settings: DialectSettings) -> PodRequest | None:
    editions = _editions_of(pod)
    if len(editions) > 1:
        raise UnreadableValue(
            RequestError.MIXED_DIALECTS,
            f"pod: it mixes `{TENCENT.prefix}/vcuda-*` and `{FORK.prefix}/vcuda-*`; use one of them",
        )
    if not editions:
        return None
    edition = editions[0]
    warnings: list[str] = []
    _check_core_limit(pod, edition)
    asks = tuple(_container_request(role, container, edition, warnings) for role, container in pod.containers())
    return build_request(NAME, pod, asks, by_nvidia_keys(pod), block=edition.block, warnings=warnings)


def _editions_of(pod: Pod) -> list[VcudaEdition]:
    return [e for e in EDITIONS if any(amount(c, e.core) or amount(c, e.memory) for _, c in pod.containers())]


def _check_core_limit(pod: Pod, edition: VcudaEdition) -> None:
    key = f"{edition.prefix}/vcuda-core-limit"
    limit = pod.annotations.get(key)
    if limit is None:
        return
    value = None if isinstance(limit, bool) else quantity(limit)
    if value is None or value.denominator != 1 or value < 0:
        raise UnreadableValue(
            RequestError.BAD_ANNOTATION,
            f'annotation `{key}`: {quoted(limit)} is not a whole percentage; write a percentage such as "60"',
        )


def _container_request(
    role: Role, container: Container, edition: VcudaEdition, warnings: list[str]
) -> ContainerRequest:
    cores = amount(container, edition.core)
    memory = card_memory(container, edition.memory, edition.block)
    if not cores:
        if memory:
            raise missing_device_resource(container, edition.memory, edition.core, f"{edition.core}: 10")
        return ContainerRequest(container=container.name, role=role)
    if cores > ALL and cores % ALL:
        raise UnreadableValue(
            RequestError.OUT_OF_RANGE,
            f"{container_label(container)}: `{edition.core}` is {cores}, neither a share of one GPU nor whole GPUs; "
            f"write less than 100 for a share, or {cores // ALL * ALL} or {(cores // ALL + 1) * ALL} for whole GPUs",
        )
    if cores >= ALL:
        return ContainerRequest.whole(container.name, role, cores // ALL)
    if not memory:
        warnings.append(
            f"{container_label(container)}: `{edition.core}` without `{edition.memory}`; it gets {cores} % of the "
            "GPU's memory"
        )
        return ContainerRequest(container=container.name, role=role, cards=1, memory_percent=cores, cores=cores)
    return ContainerRequest(container=container.name, role=role, cards=1, memory=memory, cores=cores)


def write_grant(context: GrantContext) -> PodRecord:
    prefix = _editions_of(context.pod)[0].prefix
    positions = context.pod.positions()
    annotations = {
        f"{prefix}/predicate-gpu-idx-{positions[held.container]}": ",".join(str(tile.index) for tile in held.tiles)
        for held in context.grant.containers
    }
    annotations |= {
        f"{prefix}/predicate-node": context.grant.node,
        f"{prefix}/predicate-time": str(context.at),
        f"{prefix}/gpu-assigned": "false",
    }
    labels = {}
    if prefix == FORK.prefix:
        labels = {"tydic.io/bind-time": str(context.at), "tydic.io/bind-phase": "allocating"}
    env = {held.container: visible_devices(held) for held in context.grant.containers}
    return PodRecord(annotations=annotations, labels=labels, env=env)


def record_keys(settings: DialectSettings) -> Iterable[str]:
    return (_index_key(edition, 0) for edition in EDITIONS)


def lacks_record(pod: Pod) -> bool:
    """Whether no container of the pod has recorded cards; the keys of the record number the containers."""
    count = sum(1 for _ in pod.containers())
    return not any(_index_key(edition, n) in pod.annotations for edition in EDITIONS for n in range(1, count))


def _index_key(edition: VcudaEdition, position: int) -> str:
    return f"{edition.prefix}/predicate-gpu-idx-{position}"


def read_grant(pod: Pod, cards: tuple[Card, ...], settings: DialectSettings) -> Grant | None:
    for edition in EDITIONS:
        if not is_for_another_node(pod, f"{edition.prefix}/predicate-node"):
            grant = grant_from_indices(pod, NAME, cards, _recorded_asks(pod, edition))
            if grant is not None:
                return grant
    return None


def _recorded_asks(pod: Pod, edition: VcudaEdition) -> Iterable[tuple[ContainerRequest, tuple[int, ...]]]:
    """Containers whose cards are recorded, and their share of each; the whole card where the request is unreadable."""
    positions, known = pod.positions(), frozenset(name for each in EDITIONS for name in (each.core, each.memory))
    for role, container in pod.containers():
        indices = indices_of(pod.annotations.get(_index_key(edition, positions[container.name])))
        if indices and requests_any(container, known):
            whole = ContainerRequest.whole(container.name, role, len(indices))
            reads = (partial(_container_request, role, container, each, []) for each in EDITIONS)
            yield first_readable(reads, whole), indices


class _Registered(msgspec.Struct):
    """A card in the fork's register; its position in the array is its index."""

    id: str
    memory: int
    core: int = ALL
    type: str = ""
    isMig: bool = False  # noqa: N815 - the fork's spelling
    health: bool = False


_REGISTERS = msgspec.json.Decoder(Annotated[list[_Registered], msgspec.Meta(max_length=LARGEST_NODE)])


def read_cards(node: NodeObject, settings: DialectSettings) -> NodeInventory | None:
    """The fork's register, or bare capacities: 100 cores per card and the memory divided evenly."""
    register = node.annotations.get(REGISTER)
    if register is not None:
        return _registered(str(register), settings)
    for edition in EDITIONS:
        count = count_of(node.capacity, edition.core) // ALL
        if count:
            memory = count_of(node.capacity, edition.memory) * edition.block // count
            model = next((str(node.labels[key]) for key in MODEL_LABELS if node.labels.get(key)), "")
            return NodeInventory(unnamed_cards(node, count, memory, model=model, slots=settings.slots_per_card))
    return None


def _registered(register: str, settings: DialectSettings) -> NodeInventory:
    entries = decode(_REGISTERS, register, REGISTER)
    return NodeInventory(
        tuple(
            Card(
                index=index,
                uuid=card.id,
                memory=card.memory,
                cores=card.core,
                model=card.type,
                mode="mig" if card.isMig else "",
                healthy=card.health,
                slots=settings.slots_per_card,
            )
            for index, card in enumerate(entries)
        )
    )
