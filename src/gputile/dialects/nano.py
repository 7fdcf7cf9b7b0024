"""nano-gpu and its successor elastic-gpu: percent of a card's cores and memory per container, in three generations.

    nano-gpu.io/gpu-core + nano-gpu.io/gpu-memory       generation 1; the memory unit is a setting
    nano-gpu/gpu-percent                                generation 2: a percentage of cores and memory alike
    elasticgpu.io/gpu-core + elasticgpu.io/gpu-memory   generation 3; MiB

100 or more are whole cards, rounded down (150 is one card), and their memory is not looked at. Below, cores without
memory reserve none. Memory without cores brings no card and is refused.
"""

from collections.abc import Iterable
from functools import partial

import msgspec

from gputile.dialects.kube_objects import (
    Container,
    GrantContext,
    NodeInventory,
    NodeObject,
    Pod,
    PodRecord,
    UnreadableValue,
    amount,
    amount_or_none,
    card_memory,
    count_of,
    first_readable,
    indices_of,
    no_device,
    recorded,
    request,
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


class NanoGeneration(msgspec.Struct, frozen=True):
    """The names of one generation."""

    core: str
    memory: str  # "" where it has none
    assumed: str  # label and annotation
    prefix: str  # of the annotation per container
    marks_idle: bool = False  # writes -1 for containers without a card


ONE = NanoGeneration("nano-gpu.io/gpu-core", "nano-gpu.io/gpu-memory", "nano-gpu.io/gpu", "nano-gpu.io/gpu-")
TWO = NanoGeneration("nano-gpu/gpu-percent", "", "nano-gpu/assume", "nano-gpu/container-", marks_idle=True)
THREE = NanoGeneration(
    "elasticgpu.io/gpu-core", "elasticgpu.io/gpu-memory", "elasticgpu.io/assumed", "elasticgpu.io/container-"
)
GENERATIONS = (THREE, TWO, ONE)


def resources(settings: DialectSettings) -> frozenset[str]:
    return frozenset(name for g in GENERATIONS for name in (g.core, g.memory) if name)


def unit(generation: NanoGeneration, settings: DialectSettings) -> MiB:
    return UNIT[settings.nano_unit] if generation is ONE else 1


def read_pod(pod: Pod, settings: DialectSettings) -> PodRequest | None:
    spoken = _spoken(pod)
    if len(spoken) > 1:
        raise UnreadableValue(
            RequestError.MIXED_DIALECTS,
            f"the pod asks in two generations of nano, `{spoken[0].core}` and `{spoken[1].core}`; write one of them",
        )
    if not spoken:
        return None
    warnings: list[str] = []
    asks = tuple(_ask(role, container, spoken[0], settings, warnings) for role, container in pod.containers())
    return request(NAME, pod, asks, block=unit(spoken[0], settings), warnings=warnings)


def _spoken(pod: Pod) -> list[NanoGeneration]:
    return [
        g
        for g in GENERATIONS
        if any(amount(c, g.core) or (g.memory and amount(c, g.memory)) for _, c in pod.containers())
    ]


def _ask(
    role: Role, container: Container, generation: NanoGeneration, settings: DialectSettings, warnings: list[str]
) -> ContainerRequest:
    cores = amount(container, generation.core)
    memory = card_memory(container, generation.memory, unit(generation, settings)) if generation.memory else 0
    if not cores:
        if memory:
            raise no_device(container, generation.memory, generation.core, f"{generation.core}: 1")
        return ContainerRequest(container=container.name, role=role)
    if cores >= ALL:
        if cores % ALL:
            warnings.append(
                f"`{generation.core}` of container `{container.shown}` is {cores}; 100 is one card, so this is "
                f"rounded down to {cores // ALL} whole"
            )
        return ContainerRequest.whole(container.name, role, cores // ALL)
    if not generation.memory:
        return ContainerRequest(container=container.name, role=role, cards=1, memory_percent=cores, cores=cores)
    return ContainerRequest(container=container.name, role=role, cards=1, memory=memory, cores=cores)


def write_grant(award: GrantContext) -> PodRecord:
    spoken = _spoken(award.pod)[0]
    held = {c.container: c.tiles for c in award.grant.containers}
    annotations = {spoken.assumed: "true"}
    for ask in award.asked.asks:
        if ask.container in held:
            annotations[spoken.prefix + ask.container] = ",".join(str(t.index) for t in held[ask.container])
        elif spoken.marks_idle:
            annotations[spoken.prefix + ask.container] = "-1"
    env = {c.container: visible_devices(c) for c in award.grant.containers}
    return PodRecord(annotations=annotations, labels={spoken.assumed: "true"}, env=env)


def record_keys(settings: DialectSettings) -> Iterable[str]:
    return (generation.assumed for generation in GENERATIONS)


def read_grant(pod: Pod, cards: tuple[Card, ...], settings: DialectSettings) -> Grant | None:
    for generation in GENERATIONS:
        if _is_marked(pod, generation):
            found = recorded(pod, NAME, cards, _recorded_asks(pod, generation, settings))
            if found is not None:
                return found
    return None


def _is_marked(pod: Pod, generation: NanoGeneration) -> bool:
    """The original writes the mark as annotation and label; either will do."""
    return any(str(written.get(generation.assumed)).lower() == "true" for written in (pod.annotations, pod.labels))


def _recorded_asks(
    pod: Pod, generation: NanoGeneration, settings: DialectSettings
) -> Iterable[tuple[ContainerRequest, tuple[int, ...]]]:
    """Containers whose cards are recorded, and what they take of each; all of it where their request is unreadable. The
    original records a card for containers that request none, too."""
    names = resources(settings)
    for role, container in pod.containers():
        indices = indices_of(pod.annotations.get(generation.prefix + container.name))
        if indices and requests_any(container, names):
            otherwise = _memory_only(role, container) or ContainerRequest.whole(container.name, role, len(indices))
            reads = (partial(_ask, role, container, each, settings, []) for each in GENERATIONS)
            yield first_readable(reads, otherwise), indices


def _memory_only(role: Role, container: Container) -> ContainerRequest | None:
    """elastic-gpu's own agent serves its memory resource, too, so such pods run there."""
    memory = amount_or_none(container, THREE.memory)
    if not memory or amount_or_none(container, THREE.core) != 0:
        return None
    return ContainerRequest(container=container.name, role=role, cards=1, memory=memory)


def read_cards(node: NodeObject, settings: DialectSettings) -> NodeInventory | None:
    """100 cores a card, the memory divided evenly. Generation 2 says nothing of memory: such cards have none."""
    for generation in GENERATIONS:
        amounts = node.allocatable if generation is THREE else node.capacity
        count = count_of(amounts, generation.core) // ALL
        if count:
            memory = count_of(amounts, generation.memory) // count * unit(generation, settings)
            return NodeInventory(unnamed_cards(node, count, memory, slots=settings.slots_per_card))
    return None
