"""Every "no" of the program: a code that stays, and the words for people, made once.

Two kinds: `BadRequest` (the pod itself asks for something that cannot be understood or served anywhere) and `Refusal`
(this node does not fit, now). Both are values, not exceptions: a no is an answer.
"""

from enum import StrEnum

import msgspec


class RequestError(StrEnum):
    """What is wrong with a request. Stable: programs may match on the text."""

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
    """A request that no node can serve; the message says what to write instead."""

    code: RequestError
    message: str


class NodeReason(StrEnum):
    """Why a node does not fit. Stable: programs may match on the text."""

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
    NodeReason.UNKNOWN_NODE: "unknown to gputile",
    NodeReason.BAD_INVENTORY: "unreadable GPU inventory",
    NodeReason.AGENT_SILENT: "silent GPU agent",
    NodeReason.PLUGIN_GONE: "no gputile device plugin at the kubelet",
    NodeReason.NO_CARDS: "no GPU",
    NodeReason.TOO_FEW_CARDS: "fewer GPUs than wanted",
    NodeReason.MODEL: "too few GPUs of a wanted model",
    NodeReason.UUID: "too few GPUs with a wanted UUID",
    NodeReason.MODE: "too few GPUs in a wanted sharing mode",
    NodeReason.UNHEALTHY: "too few healthy GPUs",
    NodeReason.CORDONED: "too few GPUs that are not cordoned",
    NodeReason.TOO_SMALL: "GPUs smaller than wanted",
    NodeReason.NOT_IDLE: "too few idle GPUs",
    NodeReason.MEMORY: "too little free memory on a single GPU",
    NodeReason.CORES: "too few free cores on a single GPU",
    NodeReason.SLOTS: "no free slot on a single GPU",
    NodeReason.NUMA: "too few fitting GPUs on one NUMA node",
    NodeReason.LINKS: "too few fitting GPUs that are linked",
    NodeReason.TOGETHER: "room for each container, but not for all at once",
    NodeReason.SEARCH: "not searched further: too many ways to place the containers",
    NodeReason.CPU: "too little free CPU",
    NodeReason.HOST_MEMORY: "too little free main memory",
    NodeReason.QUOTA_POOL: "outside the pools of the namespace's quota",
    NodeReason.QUOTA_MODEL: "too few GPUs of a model in the namespace's quota",
    NodeReason.QUOTA: "quota of the namespace used up",
    NodeReason.NOMINATED: "room being made on another node",
    NodeReason.AGENT_BUSY: "another pod starting under an agent that takes one at a time",
    NodeReason.OTHER_AGENT: "run by another system's agent",
    NodeReason.UNCOUNTED: "a pod there whose GPUs gputile failed to count",
}
"""Short and constant, because kube-scheduler groups nodes by identical text; figures belong to `explain`."""

HAMI_ALIAS: dict[NodeReason, str] = {
    NodeReason.UNKNOWN_NODE: "NodeUnfitPod",
    NodeReason.BAD_INVENTORY: "NodeUnfitPod",
    NodeReason.AGENT_SILENT: "NodeUnfitPod",
    NodeReason.PLUGIN_GONE: "NodeUnfitPod",
    NodeReason.NO_CARDS: "NodeInsufficientDevice",
    NodeReason.TOO_FEW_CARDS: "NodeInsufficientDevice",
    NodeReason.MODEL: "CardTypeMismatch",
    NodeReason.UUID: "CardUuidMismatch",
    NodeReason.MODE: "ModeNotFit",
    NodeReason.UNHEALTHY: "CardNotHealth",
    NodeReason.CORDONED: "CardCordoned",
    NodeReason.TOO_SMALL: "CardInsufficientMemory",
    NodeReason.NOT_IDLE: "ExclusiveDeviceAllocateConflict",
    NodeReason.MEMORY: "CardInsufficientMemory",
    NodeReason.CORES: "CardInsufficientCore",
    NodeReason.SLOTS: "CardTimeSlicingExhausted",
    NodeReason.NUMA: "NumaNotFit",
    NodeReason.LINKS: "CardNotFoundCustomFilterRule",
    NodeReason.TOGETHER: "AllocatedCardsInsufficientRequest",
    NodeReason.SEARCH: "NodeUnfitPod",
    NodeReason.CPU: "NodeUnfitPod",
    NodeReason.HOST_MEMORY: "NodeUnfitPod",
    NodeReason.QUOTA_POOL: "ResourceQuotaNotFit",
    NodeReason.QUOTA_MODEL: "ResourceQuotaNotFit",
    NodeReason.QUOTA: "ResourceQuotaNotFit",
    NodeReason.NOMINATED: "NodeUnfitPod",
    NodeReason.AGENT_BUSY: "NodeUnfitPod",
    NodeReason.OTHER_AGENT: "NodeUnfitPod",
    NodeReason.UNCOUNTED: "NodeUnfitPod",
}

VGPU_ALIAS: dict[NodeReason, str] = {
    NodeReason.UNKNOWN_NODE: "NodeCacheMiss",
    NodeReason.BAD_INVENTORY: "NodeBadVGPURegister",
    NodeReason.AGENT_SILENT: "NodeInfoBuildFailed",
    NodeReason.PLUGIN_GONE: "NodeNotVGPUEnabled",
    NodeReason.NO_CARDS: "NodeNotVGPUEnabled",
    NodeReason.TOO_FEW_CARDS: "InsufficientGPUCards",
    NodeReason.MODEL: "DeviceTypeMismatch",
    NodeReason.UUID: "DeviceUUIDMismatch",
    NodeReason.MODE: "DeviceMIGEnabled",
    NodeReason.UNHEALTHY: "DeviceUnhealthy",
    NodeReason.CORDONED: "DeviceUnhealthy",
    NodeReason.TOO_SMALL: "InsufficientVGPUMemory",
    NodeReason.NOT_IDLE: "InsufficientGPUCards",
    NodeReason.MEMORY: "InsufficientVGPUMemory",
    NodeReason.CORES: "InsufficientVGPUCore",
    NodeReason.SLOTS: "InsufficientVGPUSlot",
    NodeReason.NUMA: "NUMATopologyUnsatisfied",
    NodeReason.LINKS: "LinkTopologyUnsatisfied",
    NodeReason.TOGETHER: "InsufficientGPUResources",
    NodeReason.SEARCH: "AllocatorInternalError",
    NodeReason.CPU: "InsufficientGPUResources",
    NodeReason.HOST_MEMORY: "InsufficientGPUResources",
    NodeReason.QUOTA_POOL: "InsufficientGPUResources",
    NodeReason.QUOTA_MODEL: "InsufficientGPUResources",
    NodeReason.QUOTA: "InsufficientGPUResources",
    NodeReason.NOMINATED: "AlreadyScheduledElsewhere",
    NodeReason.AGENT_BUSY: "AllocatorInternalError",
    NodeReason.OTHER_AGENT: "NodeNotVGPUEnabled",
    NodeReason.UNCOUNTED: "NodeInfoBuildFailed",
}


class Refusal(msgspec.Struct, frozen=True):
    """Why a node does not fit: what was wanted against what was found, and whether eviction could cure it."""

    node: str
    code: NodeReason
    wanted: int  # cards, but for CPU (millicores) and main memory (MiB)
    found: int
    resolvable: bool  # the node would fit with nobody on it

    @property
    def sentence(self) -> str:
        return SENTENCE[self.code]
