"""Whole cards, by model: NVIDIA's device plugin with nvidia-gpu-scheduler.

    nvidia.com/gpu: 2                                     two whole cards
    annotation nvidia.com/gpu.model: "Tesla V100, A30"    of these models (nvidia-gpu-scheduler/gpu.model is the same)

With `nvidia.com/gpumem` or `gpucores` beside it, the pod speaks hami. The original writes nothing on the pod, so there
is no grant to read back; ours is in `gputile.io/grant`.
"""

from collections.abc import Iterable

from gputile.dialects.kube_objects import (
    GrantContext,
    NodeInventory,
    NodeObject,
    Pod,
    PodRecord,
    amount,
    count_of,
    request,
    unnamed_cards,
    visible_devices,
)
from gputile.dialects.selectors import by_nvidia_keys
from gputile.dialects.settings import DialectSettings
from gputile.model.cards import Card
from gputile.model.grants import Grant
from gputile.model.requests import ContainerRequest, PodRequest

NAME = "nvidia"
GPU = "nvidia.com/gpu"


def resources(settings: DialectSettings) -> frozenset[str]:
    return frozenset({GPU})


def read_pod(pod: Pod, settings: DialectSettings) -> PodRequest | None:
    asks = []
    for role, container in pod.containers():
        cards = amount(container, GPU)
        asks.append(
            ContainerRequest.whole(container.name, role, cards)
            if cards
            else ContainerRequest(container=container.name, role=role)
        )
    return request(NAME, pod, tuple(asks), by_nvidia_keys(pod))


def write_grant(award: GrantContext) -> PodRecord:
    return PodRecord(env={held.container: visible_devices(held) for held in award.grant.containers})


def record_keys(settings: DialectSettings) -> Iterable[str]:
    return ()


def read_grant(pod: Pod, cards: tuple[Card, ...], settings: DialectSettings) -> Grant | None:
    return None


def read_cards(node: NodeObject, settings: DialectSettings) -> NodeInventory | None:
    """GPU feature discovery's labels say model and memory; the capacity says how many."""
    capacity = count_of(node.capacity, GPU)
    if not capacity:
        return None
    labels = node.labels
    product = str(labels.get("nvidia.com/gpu.product") or "").removesuffix("-SHARED")
    replicas = max(1, count_of(_numbers(node), "nvidia.com/gpu.replicas"))
    return NodeInventory(
        unnamed_cards(
            node,
            count_of(_numbers(node), "nvidia.com/gpu.count") or capacity // replicas,
            count_of(_numbers(node), "nvidia.com/gpu.memory"),
            model=product.replace("-", " "),
            slots=replicas if replicas > 1 else settings.slots_per_card,
        )
    )


def _numbers(node: NodeObject) -> dict[str, str]:
    return {key: str(value) for key, value in node.labels.items()}
