"""vcuda: gpu-admission with gpu-manager, and the fork of both on `nvidia.com/*`.

    tencent.com/vcuda-core: 30 + tencent.com/vcuda-memory: 4       30 % of a card and 4 x 256 MiB
    nvidia.com/vcuda-core: 30 + nvidia.com/vcuda-memory: 1024      the fork counts memory in MiB
    .../vcuda-core: 200                                            two whole cards; multiples of 100 only

Cores without memory, which the original accepts and then fails to serve, take the same percentage of the memory.
"""

from collections.abc import Iterable
from functools import partial
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
    amount,
    card_memory,
    count_of,
    decode,
    first_readable,
    indices_of,
    is_for_another_node,
    no_device,
    quoted,
    recorded,
    request,
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
REGISTER = "tydic.io/nvidia-device-register"
MODEL_LABELS = ("gaia.tencent.com/gpu-model", "tkestack.io/gpu-model", "gaia.nvidia.com/gpu-model")
POOL_LABELS = ("gaia.tencent.com/gpu-pool", "tkestack.io/gpu-pool")


class VcudaEdition(msgspec.Struct, frozen=True):
    """One of the two sets of names."""

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


def resources(settings: DialectSettings) -> frozenset[str]:
    return frozenset(name for edition in EDITIONS for name in (edition.core, edition.memory))


def read_pod(pod: Pod, settings: DialectSettings) -> PodRequest | None:
    spoken = _spoken(pod)
    if len(spoken) > 1:
        raise UnreadableValue(
            RequestError.MIXED_DIALECTS,
            f"the pod asks for both `{TENCENT.prefix}/vcuda-*` and `{FORK.prefix}/vcuda-*`; write one of them",
        )
    if not spoken:
        return None
    _check_core_limit(pod, spoken[0])
    warnings: list[str] = []
    asks = tuple(_ask(role, container, spoken[0], warnings) for role, container in pod.containers())
    return request(NAME, pod, asks, by_nvidia_keys(pod), block=spoken[0].block, warnings=warnings)


def _spoken(pod: Pod) -> list[VcudaEdition]:
    return [e for e in EDITIONS if any(amount(c, e.core) or amount(c, e.memory) for _, c in pod.containers())]


def _check_core_limit(pod: Pod, edition: VcudaEdition) -> None:
    key = f"{edition.prefix}/vcuda-core-limit"
    said = pod.annotations.get(key)
    if said is None:
        return
    value = None if isinstance(said, bool) else quantity(said)
    if value is None or value.denominator != 1 or value < 0:
        raise UnreadableValue(
            RequestError.BAD_ANNOTATION, f'annotation `{key}` is {quoted(said)}; write a percentage such as "60"'
        )


def _ask(role: Role, container: Container, edition: VcudaEdition, warnings: list[str]) -> ContainerRequest:
    cores = amount(container, edition.core)
    memory = card_memory(container, edition.memory, edition.block)
    if not cores:
        if memory:
            raise no_device(container, edition.memory, edition.core, f"{edition.core}: 10")
        return ContainerRequest(container=container.name, role=role)
    if cores > ALL and cores % ALL:
        raise UnreadableValue(
            RequestError.OUT_OF_RANGE,
            f"`{edition.core}` of container `{container.shown}` is {cores}; write less than 100 for a share of one "
            f"card, or {cores // ALL * ALL} or {(cores // ALL + 1) * ALL} for whole cards",
        )
    if cores >= ALL:
        return ContainerRequest.whole(container.name, role, cores // ALL)
    if not memory:
        warnings.append(
            f"container `{container.shown}` asks for `{edition.core}` without `{edition.memory}`; it gets {cores} % of "
            f"the card's memory"
        )
        return ContainerRequest(container=container.name, role=role, cards=1, memory_percent=cores, cores=cores)
    return ContainerRequest(container=container.name, role=role, cards=1, memory=memory, cores=cores)


def write_grant(award: GrantContext) -> PodRecord:
    prefix = _spoken(award.pod)[0].prefix
    positions = award.pod.positions()
    annotations = {
        f"{prefix}/predicate-gpu-idx-{positions[held.container]}": ",".join(str(tile.index) for tile in held.tiles)
        for held in award.grant.containers
    }
    annotations |= {
        f"{prefix}/predicate-node": award.grant.node,
        f"{prefix}/predicate-time": str(award.at),
        f"{prefix}/gpu-assigned": "false",
    }
    labels = {}
    if prefix == FORK.prefix:
        labels = {"tydic.io/bind-time": str(award.at), "tydic.io/bind-phase": "allocating"}
    env = {held.container: visible_devices(held) for held in award.grant.containers}
    return PodRecord(annotations=annotations, labels=labels, env=env)


def record_keys(settings: DialectSettings) -> Iterable[str]:
    return (_index_key(edition, 0) for edition in EDITIONS)


def lacks_record(pod: Pod) -> bool:
    """Whether none of the pod's containers has cards recorded; its keys number them."""
    count = sum(1 for _ in pod.containers())
    return not any(_index_key(edition, n) in pod.annotations for edition in EDITIONS for n in range(1, count))


def _index_key(edition: VcudaEdition, position: int) -> str:
    return f"{edition.prefix}/predicate-gpu-idx-{position}"


def read_grant(pod: Pod, cards: tuple[Card, ...], settings: DialectSettings) -> Grant | None:
    for edition in EDITIONS:
        if not is_for_another_node(pod, f"{edition.prefix}/predicate-node"):
            found = recorded(pod, NAME, cards, _recorded_asks(pod, edition))
            if found is not None:
                return found
    return None


def _recorded_asks(pod: Pod, edition: VcudaEdition) -> Iterable[tuple[ContainerRequest, tuple[int, ...]]]:
    """Containers whose cards are recorded, and what they take of each; all of it where their request is unreadable."""
    positions, names = pod.positions(), frozenset(name for each in EDITIONS for name in (each.core, each.memory))
    for role, container in pod.containers():
        indices = indices_of(pod.annotations.get(_index_key(edition, positions[container.name])))
        if indices and requests_any(container, names):
            whole = ContainerRequest.whole(container.name, role, len(indices))
            yield first_readable((partial(_ask, role, container, each, []) for each in EDITIONS), whole), indices


class _Registered(msgspec.Struct):
    """One card in the fork's register; its position in the array is its index."""

    id: str
    memory: int
    core: int = ALL
    type: str = ""
    isMig: bool = False  # noqa: N815 - the wire's spelling
    health: bool = False


_REGISTERS = msgspec.json.Decoder(Annotated[list[_Registered], msgspec.Meta(max_length=LARGEST_NODE)])


def read_cards(node: NodeObject, settings: DialectSettings) -> NodeInventory | None:
    """The fork's register, or bare capacities: 100 cores a card and the memory divided evenly."""
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
    found = decode(_REGISTERS, register, REGISTER)
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
            for index, card in enumerate(found)
        )
    )
