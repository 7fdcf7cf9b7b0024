"""Whole cards, by model: NVIDIA's device plugin with nvidia-gpu-scheduler.

    nvidia.com/gpu: 2                                     two whole cards
    annotation nvidia.com/gpu.model: "Tesla V100, A30"    of these models (nvidia-gpu-scheduler/gpu.model is the same)

With `nvidia.com/gpumem` or `gpucores` beside it, the pod uses the hami dialect. The original writes nothing on the pod,
so there is no record to read; our grant is in `gputile.io/grant`.
"""

from collections.abc import Iterable, Mapping

from gputile.dialects.device_resources import DeviceResource, by_count
from gputile.dialects.kube_objects import GrantContext, NodeInventory, NodeObject, Pod, PodRecord
from gputile.dialects.parsing import amount, build_request, count_of, unnamed_cards, visible_devices
from gputile.dialects.selectors import by_nvidia_keys
from gputile.dialects.settings import DialectSettings
from gputile.model.cards import Card
from gputile.model.grants import Grant
from gputile.model.requests import ContainerRequest, PodRequest

NAME = "nvidia"
GPU = "nvidia.com/gpu"
EXTENDS = ""
SLOTS_PER_TILE = 1
AGENT_GUESSES = False
EXTENDER_PATHS: tuple[str, ...] = tuple(
    f"/apis/{api}/schedule/{verb}"
    for api in ("metrics.nvidia.com/v1alpha1", "nvidia-gpu-scheduler/v1")
    for verb in ("filter", "prioritize", "preempt", "bind")
)
EXAMPLES: tuple[Mapping[str, int], ...] = ({GPU: 2},)


def resources(settings: DialectSettings) -> frozenset[str]:
    return frozenset({GPU})


def amounts_of_one_gpu(settings: DialectSettings) -> Mapping[str, int]:
    return {GPU: 1}


def device_resources(cards: list[Card], settings: DialectSettings) -> list[DeviceResource]:
    return [by_count(GPU, NAME, cards, 1)]


def status_resources(cards: list[Card], settings: DialectSettings) -> dict[str, int]:
    return {}


def read_pod(pod: Pod, settings: DialectSettings) -> PodRequest | None:
    asks = []
    for role, container in pod.containers():
        cards = amount(container, GPU)
        asks.append(
            ContainerRequest.whole(container.name, role, cards)
            if cards
            else ContainerRequest(container=container.name, role=role)
        )
    return build_request(NAME, pod, tuple(asks), by_nvidia_keys(pod))


def write_grant(context: GrantContext) -> PodRecord:
    return PodRecord(env={held.container: visible_devices(held) for held in context.grant.containers})


def record_keys(settings: DialectSettings) -> Iterable[str]:
    return ()


def read_grant(pod: Pod, cards: tuple[Card, ...], settings: DialectSettings) -> Grant | None:
    return None


def read_cards(node: NodeObject, settings: DialectSettings) -> NodeInventory | None:
    """Model and memory from the labels of GPU feature discovery, the number from the capacity."""
    capacity = count_of(node.capacity, GPU)
    if not capacity:
        return None
    labels = node.labels
    product = str(labels.get("nvidia.com/gpu.product") or "").removesuffix("-SHARED")
    replicas = max(1, count_of(_label_texts(node), "nvidia.com/gpu.replicas"))
    return NodeInventory(
        unnamed_cards(
            node,
            count_of(_label_texts(node), "nvidia.com/gpu.count") or capacity // replicas,
            count_of(_label_texts(node), "nvidia.com/gpu.memory"),
            model=product.replace("-", " "),
            slots=replicas if replicas > 1 else settings.slots_per_card,
        )
    )


def _label_texts(node: NodeObject) -> dict[str, str]:
    """The labels as text: in a hand-written manifest a value may be a number."""
    return {key: str(value) for key, value in node.labels.items()}
