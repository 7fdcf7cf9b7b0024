"""nano-gpu and its successor elastic-gpu: percent of a card's cores and memory per container, in three generations.

    nano-gpu.io/gpu-core + nano-gpu.io/gpu-memory       generation 1; the memory unit is a setting
    nano-gpu/gpu-percent                                generation 2: a percentage of cores and memory alike
    elasticgpu.io/gpu-core + elasticgpu.io/gpu-memory   generation 3; MiB

100 cores or more are whole cards, rounded down (150 is one card), and their memory is ignored. Below 100, cores without
memory reserve no memory. Memory without cores allocates no card and is rejected.
"""

from collections.abc import Iterable, Mapping
from functools import partial

import msgspec

from gputile.dialects.device_resources import DeviceResource, by_count
from gputile.dialects.kube_objects import Container, GrantContext, NodeInventory, NodeObject, Pod, PodRecord
from gputile.dialects.parsing import (
    UnreadableValue,
    amount,
    amount_or_none,
    build_request,
    card_memory,
    container_label,
    count_of,
    first_readable,
    grant_from_indices,
    indices_of,
    missing_device_resource,
    requests_any,
    unnamed_cards,
    visible_devices,
)
from gputile.dialects.settings import UNIT, DialectSettings
from gputile.model.cards import Card
from gputile.model.grants import Grant
from gputile.model.refusals import RequestError
from gputile.model.requests import ContainerRequest, PodRequest, Role
from gputile.model.units import ALL, MiB

NAME = "nano"
EXTENDS = ""
SLOTS_PER_TILE = 0
AGENT_GUESSES = False
EXTENDER_PATHS: tuple[str, ...] = tuple(f"/scheduler/{verb}" for verb in ("filter", "priorities", "prioritize", "bind"))


class NanoGeneration(msgspec.Struct, frozen=True):
    """The resource names and annotation keys of one generation."""

    core: str
    memory: str  # "" where it has none
    assumed: str  # label and annotation
    prefix: str  # of the annotation of each container
    marks_idle: bool = False  # writes -1 for containers without a card


ONE = NanoGeneration("nano-gpu.io/gpu-core", "nano-gpu.io/gpu-memory", "nano-gpu.io/gpu", "nano-gpu.io/gpu-")
TWO = NanoGeneration("nano-gpu/gpu-percent", "", "nano-gpu/assume", "nano-gpu/container-", marks_idle=True)
THREE = NanoGeneration(
    "elasticgpu.io/gpu-core", "elasticgpu.io/gpu-memory", "elasticgpu.io/assumed", "elasticgpu.io/container-"
)
GENERATIONS = (THREE, TWO, ONE)
EXAMPLES: tuple[Mapping[str, int], ...] = (
    {ONE.core: 20, ONE.memory: 4},
    {TWO.core: 20},
    {THREE.core: 20, THREE.memory: 4096},
)


def resources(settings: DialectSettings) -> frozenset[str]:
    return frozenset(name for g in GENERATIONS for name in (g.core, g.memory) if name)


def amounts_of_one_gpu(settings: DialectSettings) -> Mapping[str, int]:
    return {generation.core: ALL for generation in GENERATIONS}


def device_resources(cards: list[Card], settings: DialectSettings) -> list[DeviceResource]:
    return [by_count(generation.core, NAME, cards, ALL) for generation in GENERATIONS]


def status_resources(cards: list[Card], settings: DialectSettings) -> dict[str, int]:
    memory = sum(card.memory for card in cards)
    return {each.memory: memory // unit(each, settings) for each in (ONE, THREE)}


def unit(generation: NanoGeneration, settings: DialectSettings) -> MiB:
    return UNIT[settings.nano_unit] if generation is ONE else 1


def read_pod(pod: Pod, settings: DialectSettings) -> PodRequest | None:
    generations = _generations_of(pod)
    if len(generations) > 1:
        raise UnreadableValue(
            RequestError.MIXED_DIALECTS,
            f"pod: it mixes two generations of nano, `{generations[0].core}` and `{generations[1].core}`; use one of "
            "them",
        )
    if not generations:
        return None
    generation = generations[0]
    warnings: list[str] = []
    asks = tuple(
        _container_request(role, container, generation, settings, warnings) for role, container in pod.containers()
    )
    return build_request(NAME, pod, asks, block=unit(generation, settings), warnings=warnings)


def _generations_of(pod: Pod) -> list[NanoGeneration]:
    return [
        g
        for g in GENERATIONS
        if any(amount(c, g.core) or (g.memory and amount(c, g.memory)) for _, c in pod.containers())
    ]


def _container_request(
    role: Role, container: Container, generation: NanoGeneration, settings: DialectSettings, warnings: list[str]
) -> ContainerRequest:
    cores = amount(container, generation.core)
    memory = card_memory(container, generation.memory, unit(generation, settings)) if generation.memory else 0
    if not cores:
        if memory:
            raise missing_device_resource(container, generation.memory, generation.core, f"{generation.core}: 1")
        return ContainerRequest(container=container.name, role=role)
    if cores >= ALL:
        if cores % ALL:
            warnings.append(
                f"{container_label(container)}: `{generation.core}` is {cores}; 100 is one GPU, so it is rounded down "
                f"to {cores // ALL} whole GPU(s)"
            )
        return ContainerRequest.whole(container.name, role, cores // ALL)
    if not generation.memory:
        return ContainerRequest(container=container.name, role=role, cards=1, memory_percent=cores, cores=cores)
    return ContainerRequest(container=container.name, role=role, cards=1, memory=memory, cores=cores)


def write_grant(context: GrantContext) -> PodRecord:
    generation = _generations_of(context.pod)[0]
    held = {c.container: c.tiles for c in context.grant.containers}
    annotations = {generation.assumed: "true"}
    for ask in context.asked.asks:
        if ask.container in held:
            annotations[generation.prefix + ask.container] = ",".join(str(t.index) for t in held[ask.container])
        elif generation.marks_idle:
            annotations[generation.prefix + ask.container] = "-1"
    env = {c.container: visible_devices(c) for c in context.grant.containers}
    return PodRecord(annotations=annotations, labels={generation.assumed: "true"}, env=env)


def record_keys(settings: DialectSettings) -> Iterable[str]:
    return (generation.assumed for generation in GENERATIONS)


def read_grant(pod: Pod, cards: tuple[Card, ...], settings: DialectSettings) -> Grant | None:
    for generation in GENERATIONS:
        if _is_marked(pod, generation):
            grant = grant_from_indices(pod, NAME, cards, _recorded_asks(pod, generation, settings))
            if grant is not None:
                return grant
    return None


def _is_marked(pod: Pod, generation: NanoGeneration) -> bool:
    """The original writes the mark as annotation and label; either of them counts."""
    return any(str(marks.get(generation.assumed)).lower() == "true" for marks in (pod.annotations, pod.labels))


def _recorded_asks(
    pod: Pod, generation: NanoGeneration, settings: DialectSettings
) -> Iterable[tuple[ContainerRequest, tuple[int, ...]]]:
    """Containers whose cards are recorded, and their share of each; the whole card where the request is unreadable. The
    original records a card also for containers that request none."""
    known = resources(settings)
    for role, container in pod.containers():
        indices = indices_of(pod.annotations.get(generation.prefix + container.name))
        if indices and requests_any(container, known):
            otherwise = _memory_only(role, container) or ContainerRequest.whole(container.name, role, len(indices))
            reads = (partial(_container_request, role, container, each, settings, []) for each in GENERATIONS)
            yield first_readable(reads, otherwise), indices


def _memory_only(role: Role, container: Container) -> ContainerRequest | None:
    """elastic-gpu's own agent also serves the memory resource alone, so such pods run there."""
    memory = amount_or_none(container, THREE.memory)
    if not memory or amount_or_none(container, THREE.core) != 0:
        return None
    return ContainerRequest(container=container.name, role=role, cards=1, memory=memory)


def read_cards(node: NodeObject, settings: DialectSettings) -> NodeInventory | None:
    """100 cores per card, the memory divided evenly. Generation 2 publishes no memory: such cards have 0."""
    for generation in GENERATIONS:
        amounts = node.allocatable if generation is THREE else node.capacity
        count = count_of(amounts, generation.core) // ALL
        if count:
            memory = count_of(amounts, generation.memory) // count * unit(generation, settings)
            return NodeInventory(unnamed_cards(node, count, memory, slots=settings.slots_per_card))
    return None
