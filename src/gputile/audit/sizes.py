"""The GPUs of a node: how many, how large, and which agent serves the node.

Agents that list single GPUs come first (`registers`), then the capacities of agents that only count (vcuda, gpushare,
nano), then the NVIDIA device plugin with the labels of GPU feature discovery.
"""

from collections.abc import Iterable, Mapping

import msgspec

from gputile.audit.fields import amount, decoded, digits, mapping, text
from gputile.audit.objects import AuditedNode, UnreadableObject
from gputile.audit.registers import INVENTORY, listed_by, vgpu_domains, vgpu_factor
from gputile.audit.times import seconds
from gputile.model.cards import DEFAULT_SLOTS, Card
from gputile.model.units import ALL, MiB

GPU_MEM, GPU_COUNT = "aliyun.com/gpu-mem", "aliyun.com/gpu-count"
GPU = "nvidia.com/gpu"
GIB = 1024
LARGEST_IN_GIB = 1024
"""No GPU has a tebibyte, and none in use has less than one gibibyte: more units than this per GPU are MiB."""

MOST_GPUS = 1024  # of a node whose agent only counts them; the agent may write any number
NANO = (  # core, memory, whether it fills allocatable; the newest generation first
    ("elasticgpu.io/gpu-core", "elasticgpu.io/gpu-memory", True),
    ("nano-gpu/gpu-percent", "", False),
    ("nano-gpu.io/gpu-core", "nano-gpu.io/gpu-memory", False),
)
VCUDA = (
    ("tencent.com/vcuda-core", "tencent.com/vcuda-memory", 256),
    ("nvidia.com/vcuda-core", "nvidia.com/vcuda-memory", 1),
)


class NodeGpus(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one node's GPUs."""

    node: str
    agent: str = ""  # the family whose agent serves the node; "" when none does
    gpus: tuple[Card, ...] = ()
    since: float | None = None  # when gputile's agent first served the node; None: unknown
    replicas: int = 1  # how many pods the NVIDIA device plugin puts on a GPU
    unit: MiB = GIB  # of `aliyun.com/gpu-mem`
    unit_known: bool = False  # the node's own capacity shows the unit
    domains: frozenset[str] = frozenset({"nvidia.com"})  # prefixes of vgpu-manager's resources
    vgpu_factor: MiB = 1  # per `vgpu-memory`
    smallest: MiB = 0  # memory of the smallest GPU
    largest: MiB = 0
    by_uuid: Mapping[str, Card] = {}
    by_index: Mapping[int, Card] = {}

    def named(self, uuid: str) -> Card | None:
        """A GPU by its UUID, or by the placeholder that gputile uses where no agent publishes the UUID."""
        gpu = self.by_uuid.get(uuid)
        if gpu is None and uuid.startswith(f"{self.node}#"):
            index = digits(uuid.removeprefix(f"{self.node}#"))
            return None if index is None else self.by_index.get(index)
        return gpu


def read_gpus(node: AuditedNode, unit: str = "auto", fallback: MiB = GIB) -> NodeGpus:
    """`unit`: `GiB` or `MiB` is the operator's setting for gpushare, `auto` derives it from the node's capacity, or
    uses `fallback` where the node has none.

    Raises `UnreadableObject`, among others where two GPUs share a UUID or index: their sums would be wrong.
    """
    listed = listed_by(node)
    agent, gpus = (listed[0], listed[1](node)) if listed else _counted(node, unit)
    by_uuid, by_index = {gpu.uuid: gpu for gpu in gpus}, {gpu.index: gpu for gpu in gpus}
    if not len(by_uuid) == len(by_index) == len(gpus):
        raise UnreadableObject("two GPUs share a UUID or an index")
    size = _shown_unit(node, gpus, unit)
    return NodeGpus(
        node=node.name,
        agent=agent,
        gpus=gpus,
        since=_since(node) if agent == "gputile" else None,
        replicas=_replicas(node) if agent == "nvidia" else 1,
        unit=size or {"MiB": 1, "GiB": GIB}.get(unit, fallback),
        unit_known=size is not None,
        domains=frozenset({"nvidia.com", *vgpu_domains(node)}),
        vgpu_factor=vgpu_factor(node),
        smallest=min((gpu.memory for gpu in gpus), default=0),
        largest=max((gpu.memory for gpu in gpus), default=0),
        by_uuid=by_uuid,
        by_index=by_index,
    )


def _since(node: AuditedNode) -> float | None:
    since = text(mapping(decoded(node.annotations[INVENTORY])).get("since"))
    return (seconds(since) or None) if since else None


# ---- agents that only count -----------------------------------------------------------------------------------------


def _counted(node: AuditedNode, unit: str) -> tuple[str, tuple[Card, ...]]:
    for core, memory, block in VCUDA:
        if count := _amount(node.capacity, core) // ALL:
            return "vcuda", _unnamed(node, count, _amount(node.capacity, memory) * block // count)
    if total := _amount(node.capacity, GPU_MEM):
        return "gpushare", _gpushare(node, total, unit)
    for core, memory, in_allocatable in NANO:
        amounts = node.allocatable if in_allocatable else node.capacity
        if count := _amount(amounts, core) // ALL:
            per_gpu = _amount(amounts, memory) // count
            return "nano", _unnamed(node, count, per_gpu if in_allocatable else per_gpu * nano_unit(per_gpu))
    if capacity := _amount(node.capacity, GPU):
        return "nvidia", _nvidia(node, capacity)
    return "", ()


def _gpushare(node: AuditedNode, total: int, unit: str) -> tuple[Card, ...]:
    count = _amount(node.capacity, GPU_COUNT)
    if not count:
        raise UnreadableObject(f"`{GPU_MEM}` without `{GPU_COUNT}`: its device plugin may not patch the node's status")
    return _unnamed(node, count, total // count * _unit_of(total // count, unit))


def _nvidia(node: AuditedNode, capacity: int) -> tuple[Card, ...]:
    """The capacity counts replicas, where the plugin is configured to share GPUs."""
    replicas = _replicas(node)
    count = digits(node.labels.get("nvidia.com/gpu.count")) or capacity // replicas
    memory = digits(node.labels.get("nvidia.com/gpu.memory")) or 0
    return _unnamed(node, count, memory, replicas if replicas > 1 else DEFAULT_SLOTS)


def _replicas(node: AuditedNode) -> int:
    return max(1, digits(node.labels.get("nvidia.com/gpu.replicas")) or 1)


def _amount(amounts: Mapping[str, object], resource: str) -> int:
    return amount(amounts.get(resource)) or 0


def _unnamed(node: AuditedNode, count: int, memory: MiB, slots: int = DEFAULT_SLOTS) -> tuple[Card, ...]:
    """GPUs whose UUIDs no agent publishes."""
    return tuple(
        Card(index=index, uuid=f"{node.name}#{index}", memory=memory, slots=slots)
        for index in range(min(count, MOST_GPUS))
    )


# ---- units that no API object has -----------------------------------------------------------------------------------


def _shown_unit(node: AuditedNode, gpus: tuple[Card, ...], unit: str) -> MiB | None:
    """MiB per `aliyun.com/gpu-mem`, as the node's capacity shows it; None when the node has none."""
    total, count = _amount(node.capacity, GPU_MEM), _amount(node.capacity, GPU_COUNT) or len(gpus)
    return _unit_of(total // count, unit) if total and count else None


def common_unit(nodes: Iterable[AuditedNode]) -> MiB:
    """What the first node with such a capacity shows, as `kubectl inspect gpushare` guesses."""
    shown = (_shown_unit(node, (), "auto") for node in nodes)
    return next((unit for unit in shown if unit is not None), GIB)


def _unit_of(per_gpu: int, unit: str) -> MiB:
    """The capacity wins over the setting: 8138 units per GPU cannot be GiB."""
    return 1 if per_gpu > LARGEST_IN_GIB or unit == "MiB" else GIB


def nano_unit(per_gpu: int) -> MiB:
    """The first generation does not define its unit; its README suggests GiB."""
    return 1 if per_gpu > LARGEST_IN_GIB else GIB
