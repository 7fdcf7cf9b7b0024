"""Figures that are made when somebody asks for them: families of series, and the page they are written on.

Room:  the text that Prometheus reads, written by hand: the figures of a large cluster are hundreds of thousands of
       lines, and whoever writes them has other things to do in between. Names and labels are a contract: they are
       only ever added. Memory is in bytes, cores are a share of one card (1 is all of it).
Door:  `ExpositionPage.add`, then `ExpositionPage.text`; the families of the scheduler and of the agent.
"""

from collections.abc import Iterable, Iterator

import msgspec

from gputile.model.units import ALL
from gputile.model.usage import CardUsage

MIB = 1024 * 1024
PAGE_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricFamily(msgspec.Struct, frozen=True):
    """One name and what it means; all of them are gauges."""

    name: str
    text: str
    labels: tuple[str, ...] = ()


class ExpositionPage:
    """The series of some families. Samples of one family stand together, in whatever order they are added."""

    def __init__(self, families: Iterable[MetricFamily]) -> None:
        self._lines: dict[MetricFamily, list[str]] = {family: [] for family in families}

    def add(self, family: MetricFamily, labels: str, value: float) -> None:
        """`labels`: what `labelled` made of the family's labels."""
        self._lines[family].append(f"{family.name}{labels} {value}\n")

    def add_use(self, memory: MetricFamily, cores: MetricFamily, labels: str, used: CardUsage) -> None:
        """What is not known is left out."""
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
    """The labels of a series. To be made once for all families that have the same."""
    pairs = [f'{name}="{escaped(value)}"' for name, value in zip(names, values, strict=True)]
    return "{" + ",".join(pairs) + "}"


def escaped(value: str) -> str:
    if "\\" in value or '"' in value or "\n" in value:
        return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return value


# ---- the scheduler: all of the cluster ------------------------------------------------------------------------------

NODE = ("node",)
MODEL = ("model",)
QUOTA = ("namespace", "model", "kind")
CARD = ("node", "uuid", "index", "model")
POD = ("namespace", "pod", "uid", "node", "uuid")
CONTAINER = ("namespace", "pod", "uid", "container", "node", "uuid")

FREE_CARDS = MetricFamily("gputile_free_gpus", "Free shares of all usable cards, added up, in cards.")
FRAGMENTED_CARDS = MetricFamily(
    "gputile_fragmented_gpus", "Of the free cards, what the pods seen so far could not use."
)
WAITING_PODS = MetricFamily(
    "gputile_pending_pods", "Pods that wait for cards, by what hinders them.", ("namespace", "reason")
)
QUOTA_USED = MetricFamily("gputile_quota_used", "Held of what a quota counts: cards, memory in bytes, or cores.", QUOTA)
QUOTA_LIMIT = MetricFamily("gputile_quota_limit", "What a quota allows at most, in the same units.", QUOTA)
LEFT_OUT = MetricFamily(
    "gputile_series_omitted", "Cards and pods without series of their own here: see docs.", ("kind",)
)

MODEL_CARDS = MetricFamily("gputile_model_gpus", "Cards by model and state, in the whole cluster.", ("model", "state"))
MODEL_IDLE_CARDS = MetricFamily("gputile_model_idle_gpus", "Usable cards that nobody holds anything of.", MODEL)
MODEL_MEMORY = MetricFamily("gputile_model_memory_bytes", "Memory of all cards of a model.", MODEL)
MODEL_MEMORY_ALLOCATED = MetricFamily("gputile_model_memory_allocated_bytes", "Of it, what pods hold.", MODEL)
MODEL_CORES_ALLOCATED = MetricFamily(
    "gputile_model_cores_allocated_ratio", "Share of their cores that pods hold.", MODEL
)

NODE_CARDS = MetricFamily("gputile_node_gpus", "Cards of a node by model and state.", ("node", "model", "state"))
NODE_FAULT = MetricFamily("gputile_node_fault", "1 for a node that is out of use, by why.", ("node", "code"))
NODE_AGENT_ALIVE = MetricFamily(
    "gputile_node_agent_alive", "1 while the node's agent speaks, 0 when it is silent.", NODE
)
NODE_PODS = MetricFamily("gputile_node_pods", "Pods that hold cards of a node.", NODE)
NODE_FREE_CARDS = MetricFamily("gputile_node_free_gpus", "Free shares of its usable cards, added up, in cards.", NODE)
NODE_FRAGMENTED_CARDS = MetricFamily(
    "gputile_node_fragmented_gpus", "Of them, what pods seen so far could not use.", NODE
)
NODE_IDLE_CARDS = MetricFamily("gputile_node_idle_gpus", "Usable cards of a node that nobody holds anything of.", NODE)
NODE_MEMORY = MetricFamily("gputile_node_memory_bytes", "Memory of all cards of a node.", NODE)
NODE_MEMORY_ALLOCATED = MetricFamily("gputile_node_memory_allocated_bytes", "Of it, what pods hold.", NODE)
NODE_MEMORY_USED = MetricFamily(
    "gputile_node_memory_used_bytes", "Of it, what pods use; where the agent says so.", NODE
)
NODE_CORES_ALLOCATED = MetricFamily(
    "gputile_node_cores_allocated_ratio", "Share of its cards' cores that pods hold.", NODE
)

CARD_USABLE = MetricFamily("gputile_gpu_usable", "1 for a card that is in use, 0 for one that is not.", CARD)
CARD_PODS = MetricFamily("gputile_gpu_pods", "Pods that hold a part of a card.", CARD)
CARD_MEMORY = MetricFamily("gputile_gpu_memory_bytes", "Memory of a card.", CARD)
CARD_MEMORY_ALLOCATED = MetricFamily("gputile_gpu_memory_allocated_bytes", "Of it, what pods hold.", CARD)
CARD_MEMORY_USED = MetricFamily("gputile_gpu_memory_used_bytes", "Of it, what pods use; where the agent says so.", CARD)
CARD_CORES_ALLOCATED = MetricFamily("gputile_gpu_cores_allocated_ratio", "Share of its cores that pods hold.", CARD)
CARD_CORES_USED = MetricFamily("gputile_gpu_cores_used_ratio", "How busy pods keep it; where the driver says so.", CARD)

POD_MEMORY_ALLOCATED = MetricFamily("gputile_pod_memory_allocated_bytes", "What a pod holds of a card.", POD)
POD_CORES_ALLOCATED = MetricFamily("gputile_pod_cores_allocated_ratio", "Share of its cores that a pod holds.", POD)
CONTAINER_MEMORY_ALLOCATED = MetricFamily(
    "gputile_container_memory_allocated_bytes", "What a container was granted of a card.", CONTAINER
)
CONTAINER_CORES_ALLOCATED = MetricFamily(
    "gputile_container_cores_allocated_ratio", "Share of a card's cores that it was granted.", CONTAINER
)
CONTAINER_MEMORY_USED = MetricFamily(
    "gputile_container_memory_used_bytes", "What its processes use of a card; where the agent says so.", CONTAINER
)
CONTAINER_CORES_USED = MetricFamily(
    "gputile_container_cores_used_ratio", "How busy they keep it; where the driver says so.", CONTAINER
)

FAMILIES = (
    FREE_CARDS,
    FRAGMENTED_CARDS,
    WAITING_PODS,
    QUOTA_USED,
    QUOTA_LIMIT,
    LEFT_OUT,
    MODEL_CARDS,
    MODEL_IDLE_CARDS,
    MODEL_MEMORY,
    MODEL_MEMORY_ALLOCATED,
    MODEL_CORES_ALLOCATED,
    NODE_CARDS,
    NODE_FAULT,
    NODE_AGENT_ALIVE,
    NODE_PODS,
    NODE_FREE_CARDS,
    NODE_FRAGMENTED_CARDS,
    NODE_IDLE_CARDS,
    NODE_MEMORY,
    NODE_MEMORY_ALLOCATED,
    NODE_MEMORY_USED,
    NODE_CORES_ALLOCATED,
    CARD_USABLE,
    CARD_PODS,
    CARD_MEMORY,
    CARD_MEMORY_ALLOCATED,
    CARD_MEMORY_USED,
    CARD_CORES_ALLOCATED,
    CARD_CORES_USED,
    POD_MEMORY_ALLOCATED,
    POD_CORES_ALLOCATED,
    CONTAINER_MEMORY_ALLOCATED,
    CONTAINER_CORES_ALLOCATED,
    CONTAINER_MEMORY_USED,
    CONTAINER_CORES_USED,
)

# ---- the agent: one node, as its driver says ------------------------------------------------------------------------

AGENT_CARD = ("uuid", "index", "model")
AGENT_CONTAINER = ("namespace", "pod", "uid", "container", "uuid")

AGENT_CARD_PROCESSES = MetricFamily("gputile_agent_gpu_processes", "Processes on a card, whoever they are.", AGENT_CARD)
AGENT_CARD_MEMORY_USED = MetricFamily("gputile_agent_gpu_memory_used_bytes", "What they use of its memory.", AGENT_CARD)
AGENT_CARD_CORES_USED = MetricFamily("gputile_agent_gpu_cores_used_ratio", "How busy they keep it.", AGENT_CARD)
AGENT_CONTAINER_MEMORY_USED = MetricFamily(
    "gputile_agent_container_memory_used_bytes", "What a container's processes use of a card.", AGENT_CONTAINER
)
AGENT_CONTAINER_CORES_USED = MetricFamily(
    "gputile_agent_container_cores_used_ratio", "How busy a container keeps a card.", AGENT_CONTAINER
)

AGENT_FAMILIES = (
    AGENT_CARD_PROCESSES,
    AGENT_CARD_MEMORY_USED,
    AGENT_CARD_CORES_USED,
    AGENT_CONTAINER_MEMORY_USED,
    AGENT_CONTAINER_CORES_USED,
)
