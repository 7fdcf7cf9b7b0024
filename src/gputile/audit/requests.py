"""How many GPUs a pod's containers ask for and how much of each: in plain sums, without any rule about which GPU.

Annotations that choose GPUs or policies are not looked at: a pod that runs holds GPUs, whatever its wishes were. What a
container asks for in numbers that nobody can serve (150 percent of a GPU) is counted as whole GPUs.
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
NO = (0, "0", None)
_FAMILY = {
    **dict.fromkeys(OURS, "gputile"),
    **dict.fromkeys((GPU_MEM, GPU_COUNT), "gpushare"),
    **dict.fromkeys((GPU, *SHARES), "hami"),
    **{name: "nano" for core, memory, _ in NANO for name in (core, memory) if name},
    **{name: "vcuda" for core, memory, _ in VCUDA for name in (core, memory)},
}


class AuditedContainerRequest(msgspec.Struct, frozen=True):
    """What one container asks for: `gpus` times the same share."""

    container: int  # its place in the pod
    gpus: int
    memory: MiB | None  # per GPU; None: `percent` of the GPU
    percent: Percent
    cores: Percent
    odd: bool = False  # the numbers are none that can be served: counted as whole GPUs

    @property
    def is_whole(self) -> bool:
        return self.memory is None and self.percent >= ALL and self.cores >= ALL

    def of(self, gpu: Card) -> tuple[MiB, Percent]:
        return (gpu.memory * self.percent // ALL if self.memory is None else self.memory), self.cores


class AuditedRequest(msgspec.Struct, frozen=True):
    family: str
    asks: tuple[AuditedContainerRequest, ...]  # at most one per container

    @property
    def is_readable(self) -> bool:
        return not any(ask.odd for ask in self.asks)


def whole(container: int, gpus: int, *, odd: bool = False) -> AuditedContainerRequest:
    return AuditedContainerRequest(container, gpus, None, ALL, ALL, odd)


def read_request(pod: AuditedPod, gpus: NodeGpus, domains: frozenset[str]) -> AuditedRequest | None:
    """None when the pod asks for no GPU in a language that is known. `domains`: prefixes of vgpu-manager in use."""
    families = {family for family, _ in _named(pod, domains)}
    if not families:
        return None
    family = gpus.agent if gpus.agent in families else min(families)
    read = _reader(family, pod, gpus, domains)
    if gpus.agent == "nvidia" and family == "hami":
        read = _by_device(gpus)
    elif len(families) > 1 and family != gpus.agent:
        read = _any_of([_reader(one, pod, gpus, domains) for one in sorted(families)])
    found = (read(at, container.asks) for at, container in enumerate(pod.containers))
    asks = tuple(ask for ask in found if ask is not None and ask.gpus)
    if not asks:
        return None
    return AuditedRequest("nvidia" if family == "hami" and not _shares(pod) else family, asks)


def gpu_like(pod: AuditedPod, domains: frozenset[str]) -> list[str]:
    """The resources of the pod that have to do with GPUs, known or not."""
    known = {resource for _, resource in _named(pod, domains)}
    asked = {name for container in pod.containers for name, said in container.asks.items() if said not in NO}
    return sorted(known | {name for name in asked if _sounds_like_one(name)})


def _sounds_like_one(resource: str) -> bool:
    plain = resource.lower()
    return "gpu" in plain or "vcuda" in plain or "/mig-" in plain


def _named(pod: AuditedPod, domains: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Families and resources in which a container asks for something."""
    for container in pod.containers:
        for resource, said in container.asks.items():
            if said in NO:
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
    """The NVIDIA device plugin gives out whole GPUs, or slots where it was told to share them."""

    def read(at: int, asks: Json) -> AuditedContainerRequest | None:
        count = _said(asks, GPU)
        if count is None:
            return whole(at, 1, odd=True)
        return AuditedContainerRequest(at, count, 0, 0, 0) if gpus.replicas > 1 else whole(at, count)

    return read


def _any_of(readers: list[Reader]) -> Reader:
    """A pod that asks in several languages: the largest number of GPUs counts."""

    def read(at: int, asks: Json) -> AuditedContainerRequest | None:
        found = [ask.gpus for ask in (one(at, asks) for one in readers) if ask is not None]
        return whole(at, max(found), odd=True) if found else None

    return read


def _by_count(at: int, asks: Json, count: str, size: str, share: str, unit: MiB = 1) -> AuditedContainerRequest | None:
    """So many GPUs, of each so much memory and cores; all of it where neither is named."""
    gpus, memory, cores = (_said(asks, key) for key in (count, size, share))
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
    gpus, memory, percent, cores = (_said(asks, key) for key in (GPU, MEMORY, PERCENT, CORES))
    if None in (gpus, memory, percent, cores) or (percent or 0) > ALL or (memory or 0) > LARGEST_CARD:
        return whole(at, 1 if gpus is None else gpus, odd=True)
    if not gpus:  # its webhook adds the number where it is missing
        return whole(at, 1, odd=True) if memory or percent or cores else None
    if CORES not in asks:
        cores = ALL if not memory and percent in (0, ALL) else 0
    return AuditedContainerRequest(at, gpus, memory or None, percent or ALL, min(cores or 0, ALL))


def _gpushare(at: int, asks: Json, split: int, gpus: NodeGpus) -> AuditedContainerRequest | None:
    """The memory of a container comes out of one GPU, or in equal parts out of several."""
    units = _said(asks, GPU_MEM)
    if units is None:
        return whole(at, split, odd=True)
    return AuditedContainerRequest(at, split, mebibytes(-(-units // split), gpus), 0, 0) if units else None


def _split(pod: AuditedPod) -> int:
    said = pod.labels.get(GPU_COUNT, pod.annotations.get(GPU_COUNT))
    limits = [_said(container.asks, GPU_COUNT) or 0 for container in pod.containers]
    found = digits(said) if said is not None else max(limits, default=0)
    return min(max(found or 1, 1), 1024)


def mebibytes(units: int, gpus: NodeGpus) -> MiB:
    """gpushare's units in MiB. Where no sum of the node shows the unit, one in which the amount fits a GPU."""
    size = units * gpus.unit
    return units if not gpus.unit_known and size > gpus.largest >= units else size


def _nano(at: int, asks: Json, gpus: NodeGpus) -> AuditedContainerRequest | None:
    """100 cores are a GPU, more are rounded down. Less than that with its memory; memory alone is served, too."""
    for core, size, is_mib in NANO:
        if core not in asks and (not size or size not in asks):
            continue
        cores, memory = _said(asks, core), _said(asks, size) if size else 0
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
    """Cores without memory take the same percentage of the memory: gputile serves them so, the original not at all."""
    for core, size, block in VCUDA:
        if core not in asks and size not in asks:
            continue
        cores, memory = _said(asks, core), _said(asks, size)
        if cores is None or memory is None or (memory and not cores):
            return whole(at, 1, odd=True)
        if cores >= ALL:
            return whole(at, cores // ALL)
        if not cores:
            return None
        return AuditedContainerRequest(at, 1, memory * block if memory else None, cores, cores)
    return None


def _said(asks: Mapping[str, object], resource: str) -> int | None:
    """0 when the container does not name it; None when it is no number."""
    return amount(asks[resource]) if resource in asks else 0
