"""Rejections: a stable code for programs and a constant sentence for people, both defined here only.

There are two kinds. `BadRequest`: the pod's request is invalid, or no node could serve it. `Refusal`: one node does not
fit at this moment. Both are values, not exceptions, because a rejection is an expected answer.
"""

from enum import StrEnum

import msgspec


class RequestError(StrEnum):
    """Why a request is invalid. The values are stable: programs may match on them."""

    MALFORMED = "Malformed"
    MIXED_DIALECTS = "MixedDialects"
    NO_DEVICE_RESOURCE = "NoDeviceResource"
    NOT_A_NUMBER = "NotANumber"
    NEGATIVE = "Negative"
    OUT_OF_RANGE = "OutOfRange"
    UNEVEN_SPLIT = "UnevenSplit"
    UNKNOWN_POLICY = "UnknownPolicy"
    UNKNOWN_NAME = "UnknownName"
    BAD_ANNOTATION = "BadAnnotation"
    RESOURCE_IN_ANNOTATION = "ResourceInAnnotation"
    TOO_MANY_CONTAINERS = "TooManyContainers"


class BadRequest(msgspec.Struct, frozen=True):
    """A request that no node can serve. The message says what to write instead."""

    code: RequestError
    message: str


class NodeReason(StrEnum):
    """Why a node does not fit. The values are stable: programs may match on them."""

    UNKNOWN_NODE = "UnknownNode"
    BAD_INVENTORY = "BadInventory"
    AGENT_SILENT = "AgentStale"
    PLUGIN_GONE = "PluginGone"
    NO_CARDS = "NoCards"
    TOO_FEW_CARDS = "TooFewCards"
    MODEL = "ModelMismatch"
    UUID = "UuidMismatch"
    MODE = "ModeMismatch"
    UNHEALTHY = "CardUnhealthy"
    CORDONED = "CardCordoned"
    TOO_SMALL = "CardTooSmall"
    NOT_IDLE = "CardNotIdle"
    MEMORY = "InsufficientCardMemory"
    CORES = "InsufficientCardCores"
    SLOTS = "InsufficientCardSlots"
    NUMA = "NumaMismatch"
    LINKS = "LinkMismatch"
    TOGETHER = "ContainersNotTogether"
    SEARCH = "SearchTooLong"
    CPU = "InsufficientCpu"
    HOST_MEMORY = "InsufficientMemory"
    QUOTA_POOL = "PoolNotAllowed"
    QUOTA_MODEL = "ModelNotInQuota"
    QUOTA = "QuotaExceeded"
    NOMINATED = "NominatedElsewhere"
    AGENT_BUSY = "AgentBusy"
    OTHER_AGENT = "OtherAgent"
    UNCOUNTED = "PodNotCounted"


SENTENCE: dict[NodeReason, str] = {
    NodeReason.UNKNOWN_NODE: "node(s) are unknown to gputile",
    NodeReason.BAD_INVENTORY: "node(s) have an unreadable GPU inventory",
    NodeReason.AGENT_SILENT: "node(s) have a GPU agent whose Lease has expired",
    NodeReason.PLUGIN_GONE: "node(s) have no gputile device plugin registered with the kubelet",
    NodeReason.NO_CARDS: "node(s) have no GPU",
    NodeReason.TOO_FEW_CARDS: "node(s) have fewer GPUs than requested",
    NodeReason.MODEL: "node(s) have too few GPUs of the requested model",
    NodeReason.UUID: "node(s) have too few GPUs with a requested UUID",
    NodeReason.MODE: "node(s) have too few GPUs in a requested sharing mode",
    NodeReason.UNHEALTHY: "node(s) have too few healthy GPUs",
    NodeReason.CORDONED: "node(s) have too few GPUs that are not cordoned",
    NodeReason.TOO_SMALL: "node(s) have GPUs smaller than requested",
    NodeReason.NOT_IDLE: "node(s) have too few idle GPUs",
    NodeReason.MEMORY: "node(s) have too little free memory on a single GPU",
    NodeReason.CORES: "node(s) have too few free cores on a single GPU",
    NodeReason.SLOTS: "node(s) have no free slot on a single GPU",
    NodeReason.NUMA: "node(s) have too few fitting GPUs on one NUMA node",
    NodeReason.LINKS: "node(s) have too few fitting GPUs that are linked",
    NodeReason.TOGETHER: "node(s) have enough GPU capacity for each container, but not for all together",
    NodeReason.SEARCH: "node(s) were not searched further: too many ways to place the containers",
    NodeReason.CPU: "node(s) have too little free CPU",
    NodeReason.HOST_MEMORY: "node(s) have too little free host memory",
    NodeReason.QUOTA_POOL: "node(s) are outside the node pools of the namespace's quota",
    NodeReason.QUOTA_MODEL: "node(s) have too few GPUs of a model in the namespace's quota",
    NodeReason.QUOTA: "node(s) have GPUs for which the namespace's quota is used up",
    NodeReason.NOMINATED: "node(s) are not the node nominated for this pod",
    NodeReason.AGENT_BUSY: "node(s) have an agent that starts one pod at a time and is starting another",
    NodeReason.OTHER_AGENT: "node(s) are run by another system's GPU agent",
    NodeReason.UNCOUNTED: "node(s) have a pod whose GPUs gputile failed to count",
}
"""What follows the number of nodes in kube-scheduler's grammar: `3 node(s) have no GPU`.

Short and constant, because kube-scheduler groups nodes by identical text. Numbers belong to `explain`.
"""

_SINGULAR = {"have": "has", "are": "is", "were": "was"}


def about_one_node(code: NodeReason) -> str:
    """The sentence for a message that names the node: `has no GPU`."""
    verb, _, rest = SENTENCE[code].removeprefix("node(s) ").partition(" ")
    return f"{_SINGULAR[verb]} {rest}"


class Refusal(msgspec.Struct, frozen=True):
    """Why a node does not fit: the amounts requested and found, and whether evicting pods could make the node fit."""

    node: str
    code: NodeReason
    requested: int  # cards, except for CPU (millicores) and host memory (MiB)
    found: int
    resolvable: bool  # the node would fit with no pods on it

    @property
    def sentence(self) -> str:
        """For kube-scheduler, which puts the number of nodes in front."""
        return SENTENCE[self.code]
