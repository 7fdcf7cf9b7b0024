"""Metrics computed at the scrape: the metric families, and the page of samples in the text format of Prometheus.

The text is written by hand: the page of a large cluster has hundreds of thousands of lines, and the event loop must
answer other requests in between. Names and labels are a contract: they may be added, never renamed or removed. Memory
is in bytes; cores are a share of one card (1 is all of it).
"""

from collections.abc import Iterable, Iterator

import msgspec

from gputile.model.units import ALL
from gputile.model.usage import CardUsage

MIB = 1024 * 1024
PAGE_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricFamily(msgspec.Struct, frozen=True):
    """The name, help text and labels of a metric; all of them are gauges."""

    name: str
    text: str
    labels: tuple[str, ...] = ()


class MetricFamilies(list[MetricFamily]):
    """The families of one page, in the order of their definition."""

    def gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> MetricFamily:
        """Define a family of the page."""
        self.append(MetricFamily(name, text, labels))
        return self[-1]


class ExpositionPage:
    """The samples of some families. Samples of one family are written together, in whatever order they are added."""

    def __init__(self, families: Iterable[MetricFamily]) -> None:
        self._lines: dict[MetricFamily, list[str]] = {family: [] for family in families}

    def add(self, family: MetricFamily, labels: str, value: float) -> None:
        """`labels`: the result of `labelled` for the family's labels."""
        self._lines[family].append(f"{family.name}{labels} {value}\n")

    def add_use(self, memory: MetricFamily, cores: MetricFamily, labels: str, used: CardUsage) -> None:
        """Unknown values are left out."""
        if used.memory is not None:
            self.add(memory, labels, used.memory * MIB)
        if used.cores is not None:
            self.add(cores, labels, used.cores / ALL)

    def parts(self) -> Iterator[bytes]:
        """The text, family by family."""
        for family, lines in self._lines.items():
            head = f"# HELP {family.name} {family.text}\n# TYPE {family.name} gauge\n"
            yield (head + "".join(lines)).encode()

    def text(self) -> bytes:
        return b"".join(self.parts())


def labelled(names: tuple[str, ...], *values: str) -> str:
    """The labels of a series, as text. Make them once for all families with the same labels."""
    pairs = [f'{name}="{escaped(value)}"' for name, value in zip(names, values, strict=True)]
    return "{" + ",".join(pairs) + "}"


def escaped(value: str) -> str:
    if "\\" in value or '"' in value or "\n" in value:
        return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return value


# ---- the scheduler: the whole cluster -------------------------------------------------------------------------------

FAMILIES = MetricFamilies()

NODE = ("node",)
MODEL = ("model",)
QUOTA = ("namespace", "model", "kind")
CARD = ("node", "uuid", "index", "model")
POD = ("namespace", "pod", "uid", "node", "uuid")
CONTAINER = ("namespace", "pod", "uid", "container", "node", "uuid")

FREE_CARDS = FAMILIES.gauge("gputile_free_gpus", "Free shares of all usable GPUs, summed up, in GPUs.")
FRAGMENTED_CARDS = FAMILIES.gauge(
    "gputile_fragmented_gpus", "Part of the free GPUs that the pods seen so far could not use."
)
PENDING_PODS = FAMILIES.gauge(
    "gputile_pending_pods", "Pods pending for GPUs, by namespace and reason.", ("namespace", "reason")
)
QUOTA_USED = FAMILIES.gauge("gputile_quota_used", "Quota in use: GPUs, memory in bytes, or cores.", QUOTA)
QUOTA_LIMIT = FAMILIES.gauge("gputile_quota_limit", "Limit of the quota, in the same units.", QUOTA)
SERIES_OMITTED = FAMILIES.gauge(
    "gputile_series_omitted", "GPUs and pods without series of their own: see docs/metrics.md.", ("kind",)
)

MODEL_CARDS = FAMILIES.gauge("gputile_model_gpus", "GPUs of the whole cluster, by model and state.", ("model", "state"))
MODEL_IDLE_CARDS = FAMILIES.gauge("gputile_model_idle_gpus", "Usable GPUs without any allocation.", MODEL)
MODEL_MEMORY = FAMILIES.gauge("gputile_model_memory_bytes", "Memory of all GPUs of a model.", MODEL)
MODEL_MEMORY_ALLOCATED = FAMILIES.gauge(
    "gputile_model_memory_allocated_bytes", "Memory of a model's GPUs allocated to pods.", MODEL
)
MODEL_CORES_ALLOCATED = FAMILIES.gauge(
    "gputile_model_cores_allocated_ratio", "Share of a model's GPU cores allocated to pods.", MODEL
)

NODE_CARDS = FAMILIES.gauge("gputile_node_gpus", "GPUs of a node, by model and state.", ("node", "model", "state"))
NODE_FAULT = FAMILIES.gauge("gputile_node_fault", "1 for a node that is out of use, by reason code.", ("node", "code"))
NODE_AGENT_ALIVE = FAMILIES.gauge(
    "gputile_node_agent_alive", "1 while the node's agent renews its Lease, 0 when the Lease is stale.", NODE
)
NODE_PODS = FAMILIES.gauge("gputile_node_pods", "Pods with GPU allocations on a node.", NODE)
NODE_FREE_CARDS = FAMILIES.gauge(
    "gputile_node_free_gpus", "Free shares of a node's usable GPUs, summed up, in GPUs.", NODE
)
NODE_FRAGMENTED_CARDS = FAMILIES.gauge(
    "gputile_node_fragmented_gpus", "Part of a node's free GPUs that the pods seen so far could not use.", NODE
)
NODE_IDLE_CARDS = FAMILIES.gauge("gputile_node_idle_gpus", "Usable GPUs of a node without any allocation.", NODE)
NODE_MEMORY = FAMILIES.gauge("gputile_node_memory_bytes", "Memory of all GPUs of a node.", NODE)
NODE_MEMORY_ALLOCATED = FAMILIES.gauge(
    "gputile_node_memory_allocated_bytes", "GPU memory of a node allocated to pods.", NODE
)
NODE_MEMORY_USED = FAMILIES.gauge(
    "gputile_node_memory_used_bytes", "GPU memory of a node used by pods, where the agent reports it.", NODE
)
NODE_CORES_ALLOCATED = FAMILIES.gauge(
    "gputile_node_cores_allocated_ratio", "Share of a node's GPU cores allocated to pods.", NODE
)

CARD_USABLE = FAMILIES.gauge(
    "gputile_gpu_usable", "1 for a GPU that can be allocated, 0 for one that is out of use.", CARD
)
CARD_PODS = FAMILIES.gauge("gputile_gpu_pods", "Pods with an allocation on a GPU.", CARD)
CARD_MEMORY = FAMILIES.gauge("gputile_gpu_memory_bytes", "Memory of a GPU.", CARD)
CARD_MEMORY_ALLOCATED = FAMILIES.gauge("gputile_gpu_memory_allocated_bytes", "Memory of a GPU allocated to pods.", CARD)
CARD_MEMORY_USED = FAMILIES.gauge(
    "gputile_gpu_memory_used_bytes", "Memory of a GPU used by pods, where the agent reports it.", CARD
)
CARD_CORES_ALLOCATED = FAMILIES.gauge(
    "gputile_gpu_cores_allocated_ratio", "Share of a GPU's cores allocated to pods.", CARD
)
CARD_CORES_USED = FAMILIES.gauge(
    "gputile_gpu_cores_used_ratio", "Utilization of a GPU by pods, where the driver reports it.", CARD
)

POD_MEMORY_ALLOCATED = FAMILIES.gauge("gputile_pod_memory_allocated_bytes", "Memory of a GPU allocated to a pod.", POD)
POD_CORES_ALLOCATED = FAMILIES.gauge(
    "gputile_pod_cores_allocated_ratio", "Share of a GPU's cores allocated to a pod.", POD
)
CONTAINER_MEMORY_ALLOCATED = FAMILIES.gauge(
    "gputile_container_memory_allocated_bytes", "Memory of a GPU granted to a container.", CONTAINER
)
CONTAINER_CORES_ALLOCATED = FAMILIES.gauge(
    "gputile_container_cores_allocated_ratio", "Share of a GPU's cores granted to a container.", CONTAINER
)
CONTAINER_MEMORY_USED = FAMILIES.gauge(
    "gputile_container_memory_used_bytes", "Memory of a GPU used by a container, where the agent reports it.", CONTAINER
)
CONTAINER_CORES_USED = FAMILIES.gauge(
    "gputile_container_cores_used_ratio", "Utilization of a GPU by a container, where the driver reports it.", CONTAINER
)

# ---- the agent: one node, as reported by its driver -----------------------------------------------------------------

AGENT_FAMILIES = MetricFamilies()

AGENT_CARD = ("uuid", "index", "model")
AGENT_CONTAINER = ("namespace", "pod", "uid", "container", "uuid")

AGENT_CARD_PROCESSES = AGENT_FAMILIES.gauge(
    "gputile_agent_gpu_processes", "Processes on a GPU, inside and outside of pods.", AGENT_CARD
)
AGENT_CARD_MEMORY_USED = AGENT_FAMILIES.gauge(
    "gputile_agent_gpu_memory_used_bytes", "Memory of a GPU used by all processes.", AGENT_CARD
)
AGENT_CARD_CORES_USED = AGENT_FAMILIES.gauge(
    "gputile_agent_gpu_cores_used_ratio", "Utilization of a GPU by all processes.", AGENT_CARD
)
AGENT_CONTAINER_MEMORY_USED = AGENT_FAMILIES.gauge(
    "gputile_agent_container_memory_used_bytes", "Memory of a GPU used by a container's processes.", AGENT_CONTAINER
)
AGENT_CONTAINER_CORES_USED = AGENT_FAMILIES.gauge(
    "gputile_agent_container_cores_used_ratio", "Utilization of a GPU by a container.", AGENT_CONTAINER
)
