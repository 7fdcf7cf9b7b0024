"""How many GPUs a pod's containers request and how much of each: plain sums, without any rule about which GPU.

Annotations that select GPUs or policies are ignored: a running pod holds GPUs, whatever it selects. An amount that no
system can serve (150 percent of a GPU) counts as whole GPUs.
"""

from collections.abc import Callable, Iterator, Mapping

import msgspec

from gputile.audit.fields import Json, amount, digits
from gputile.audit.objects import AuditedPod
from gputile.audit.sizes import GPU, GPU_COUNT, GPU_MEM, NANO, VCUDA, NodeGpus, nano_unit
from gputile.model.cards import Card
from gputile.model.units import ALL, LARGEST_CARD, MiB, Percent

MEMORY, PERCENT, CORES, PRIORITY = (
    f"nvidia.com/{name}" for name in ("gpumem", "gpumem-percentage", "gpucores", "priority")
)
SHARES = (MEMORY, PERCENT, CORES, PRIORITY)
VGPU = ("vgpu-number", "vgpu-memory", "vgpu-cores", "vgpu-core")
OURS = ("gputile.io/gpu", "gputile.io/memory", "gputile.io/cores")
NOTHING = (0, "0", None)
_FAMILY = {
    **dict.fromkeys(OURS, "gputile"),
    **dict.fromkeys((GPU_MEM, GPU_COUNT), "gpushare"),
    **dict.fromkeys((GPU, *SHARES), "hami"),
    **{name: "nano" for core, memory, _ in NANO for name in (core, memory) if name},
    **{name: "vcuda" for core, memory, _ in VCUDA for name in (core, memory)},
}


class AuditedContainerRequest(msgspec.Struct, frozen=True):
    """What one container requests: `gpus` times the same share."""

    container: int  # its position in the pod
    gpus: int
    memory: MiB | None  # per GPU; None: `percent` of the GPU
    percent: Percent
    cores: Percent
    odd: bool = False  # no system can serve the amounts: counted as whole GPUs

    @property
    def is_whole(self) -> bool:
        return self.memory is None and self.percent >= ALL and self.cores >= ALL

    def of(self, gpu: Card) -> tuple[MiB, Percent]:
        return (gpu.memory * self.percent // ALL if self.memory is None else self.memory), self.cores


class AuditedRequest(msgspec.Struct, frozen=True):
    """What one pod requests, and in which family's resources."""

    family: str
    asks: tuple[AuditedContainerRequest, ...]  # at most one per container

    @property
    def is_readable(self) -> bool:
        return not any(ask.odd for ask in self.asks)


def whole(container: int, gpus: int, *, odd: bool = False) -> AuditedContainerRequest:
    return AuditedContainerRequest(container, gpus, None, ALL, ALL, odd)


def read_request(pod: AuditedPod, gpus: NodeGpus, domains: frozenset[str]) -> AuditedRequest | None:
    """None when the pod requests no GPU in a known dialect. `domains`: prefixes of vgpu-manager in use."""
    families = {family for family, _ in _named(pod, domains)}
    if not families:
        return None
    family = gpus.agent if gpus.agent in families else min(families)
    read = _reader(family, pod, gpus, domains)
    if gpus.agent == "nvidia" and family == "hami":
        read = _by_device(gpus)
    elif len(families) > 1 and family != gpus.agent:
        read = _any_of([_reader(each, pod, gpus, domains) for each in sorted(families)])
    parsed = (read(at, container.asks) for at, container in enumerate(pod.containers))
    asks = tuple(ask for ask in parsed if ask is not None and ask.gpus)
    if not asks:
        return None
    return AuditedRequest("nvidia" if family == "hami" and not _shares(pod) else family, asks)


def gpu_like(pod: AuditedPod, domains: frozenset[str]) -> list[str]:
    """The GPU resources that the pod requests, known to gputile or not."""
    known = {resource for _, resource in _named(pod, domains)}
    requested = {name for container in pod.containers for name, value in container.asks.items() if value not in NOTHING}
    return sorted(known | {name for name in requested if _looks_like_gpu(name)})


def _looks_like_gpu(resource: str) -> bool:
    plain = resource.lower()
    return "gpu" in plain or "vcuda" in plain or "/mig-" in plain


def _named(pod: AuditedPod, domains: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Families and resources of which a container requests any amount."""
    for container in pod.containers:
        for resource, value in container.asks.items():
            if value in NOTHING:
                continue
            domain, _, name = resource.partition("/")
            family = _FAMILY.get(resource) or ("vgpu" if name in VGPU and domain in domains else None)
            if family is not None:
                yield family, resource


def _shares(pod: AuditedPod) -> bool:
    return any(name in container.asks for container in pod.containers for name in SHARES)


# ---- one family each ------------------------------------------------------------------------------------------------

Reader = Callable[[int, Json], AuditedContainerRequest | None]


def _reader(family: str, pod: AuditedPod, gpus: NodeGpus, domains: frozenset[str]) -> Reader:
    match family:
        case "gputile":
            return lambda at, asks: _by_count(at, asks, *OURS)
        case "vgpu":
            return lambda at, asks: _vgpu(at, asks, domains, gpus.vgpu_factor)
        case "gpushare":
            split = _split(pod)
            return lambda at, asks: _gpushare(at, asks, split, gpus)
        case "nano":
            return lambda at, asks: _nano(at, asks, gpus)
        case "vcuda":
            return _vcuda
    return _hami


def _by_device(gpus: NodeGpus) -> Reader:
    """The NVIDIA device plugin allocates whole GPUs, or slots where it is configured to share them."""

    def read(at: int, asks: Json) -> AuditedContainerRequest | None:
        count = _amount(asks, GPU)
        if count is None:
            return whole(at, 1, odd=True)
        return AuditedContainerRequest(at, count, 0, 0, 0) if gpus.replicas > 1 else whole(at, count)

    return read


def _any_of(readers: list[Reader]) -> Reader:
    """A pod that mixes dialects: the largest number of GPUs counts."""

    def read_largest(at: int, asks: Json) -> AuditedContainerRequest | None:
        counts = [ask.gpus for ask in (read(at, asks) for read in readers) if ask is not None]
        return whole(at, max(counts), odd=True) if counts else None

    return read_largest


def _by_count(at: int, asks: Json, count: str, size: str, share: str, unit: MiB = 1) -> AuditedContainerRequest | None:
    """A number of GPUs with memory and cores of each; whole GPUs where neither is named."""
    gpus, memory, cores = (_amount(asks, key) for key in (count, size, share))
    if gpus is None or memory is None or cores is None or cores > ALL or memory * unit > LARGEST_CARD:
        return whole(at, 1 if gpus is None else gpus, odd=True)
    if not gpus:
        return whole(at, 1, odd=True) if memory or cores else None
    if not memory and not cores:
        return whole(at, gpus)
    return AuditedContainerRequest(at, gpus, memory * unit or None, ALL, cores)


def _vgpu(at: int, asks: Json, domains: frozenset[str], factor: MiB) -> AuditedContainerRequest | None:
    named = (resource.partition("/") for resource in asks)
    domain = min((domain for domain, _, name in named if name in VGPU and domain in domains), default=None)
    if domain is None:
        return None
    number, memory, cores, early = (f"{domain}/{name}" for name in VGPU)
    return _by_count(at, asks, number, memory, cores if cores in asks else early, factor)


def _hami(at: int, asks: Json) -> AuditedContainerRequest | None:
    gpus, memory, percent, cores = (_amount(asks, key) for key in (GPU, MEMORY, PERCENT, CORES))
    if None in (gpus, memory, percent, cores) or (percent or 0) > ALL or (memory or 0) > LARGEST_CARD:
        return whole(at, 1 if gpus is None else gpus, odd=True)
    if not gpus:  # its webhook adds the number where it is missing
        return whole(at, 1, odd=True) if memory or percent or cores else None
    if CORES not in asks:
        cores = ALL if not memory and percent in (0, ALL) else 0
    return AuditedContainerRequest(at, gpus, memory or None, percent or ALL, min(cores or 0, ALL))


def _gpushare(at: int, asks: Json, split: int, gpus: NodeGpus) -> AuditedContainerRequest | None:
    """The memory of a container is on one GPU, or in equal parts on several."""
    units = _amount(asks, GPU_MEM)
    if units is None:
        return whole(at, split, odd=True)
    return AuditedContainerRequest(at, split, mebibytes(-(-units // split), gpus), 0, 0) if units else None


def _split(pod: AuditedPod) -> int:
    label = pod.labels.get(GPU_COUNT, pod.annotations.get(GPU_COUNT))
    limits = [_amount(container.asks, GPU_COUNT) or 0 for container in pod.containers]
    count = digits(label) if label is not None else max(limits, default=0)
    return min(max(count or 1, 1), 1024)


def mebibytes(units: int, gpus: NodeGpus) -> MiB:
    """gpushare's units in MiB. Where no capacity of the node shows the unit, a unit in which it fits a GPU."""
    size = units * gpus.unit
    return units if not gpus.unit_known and size > gpus.largest >= units else size


def _nano(at: int, asks: Json, gpus: NodeGpus) -> AuditedContainerRequest | None:
    """100 cores are a GPU, more are rounded down. Fewer are a share with its memory; memory alone is a share, too."""
    for core, size, is_mib in NANO:
        if core not in asks and (not size or size not in asks):
            continue
        cores, memory = _amount(asks, core), _amount(asks, size) if size else 0
        if cores is None or memory is None:
            return whole(at, 1, odd=True)
        if cores >= ALL:
            return whole(at, cores // ALL)
        if not cores and not memory:
            return None
        if not size:
            return AuditedContainerRequest(at, 1, None, cores, cores)
        return AuditedContainerRequest(at, 1, memory if is_mib else _nano_size(memory, gpus), 0, cores)
    return None


def _nano_size(memory: int, gpus: NodeGpus) -> MiB:
    """The first generation's unit, as the size of the node's GPUs shows it."""
    size = memory * nano_unit(memory)
    return memory if size > gpus.largest >= memory else size


def _vcuda(at: int, asks: Json) -> AuditedContainerRequest | None:
    """Cores without memory get the same percentage of the memory from gputile; the original fails to serve them."""
    for core, size, block in VCUDA:
        if core not in asks and size not in asks:
            continue
        cores, memory = _amount(asks, core), _amount(asks, size)
        if cores is None or memory is None or (memory and not cores):
            return whole(at, 1, odd=True)
        if cores >= ALL:
            return whole(at, cores // ALL)
        if not cores:
            return None
        return AuditedContainerRequest(at, 1, memory * block if memory else None, cores, cores)
    return None


def _amount(asks: Mapping[str, object], resource: str) -> int | None:
    """0 when the container does not name the resource; None when the amount is not a number."""
    return amount(asks[resource]) if resource in asks else 0
