"""Every "no" of the program: a code that stays, and the words for people, made once.

Two kinds: `BadRequest` (the pod itself asks for something that cannot be understood or served anywhere) and `Refusal`
(this node does not fit, now). Both are values, not exceptions: a no is an answer.
"""

from enum import StrEnum

import msgspec


class RequestCode(StrEnum):
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

    code: RequestCode
    message: str


class NodeCode(StrEnum):
    """Why a node does not fit. Stable: programs may match on the text."""

    UNKNOWN_NODE = "UnknownNode"
    BAD_INVENTORY = "BadInventory"
    AGENT_SILENT = "AgentSilent"
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
    PROMISED = "PromisedElsewhere"
    AGENT_BUSY = "AgentBusy"
    OTHER_AGENT = "OtherAgent"
    UNCOUNTED = "PodNotCounted"


SENTENCE: dict[NodeCode, str] = {
    NodeCode.UNKNOWN_NODE: "unknown to gputile",
    NodeCode.BAD_INVENTORY: "unreadable GPU inventory",
    NodeCode.AGENT_SILENT: "silent GPU agent",
    NodeCode.PLUGIN_GONE: "no gputile device plugin at the kubelet",
    NodeCode.NO_CARDS: "no GPU",
    NodeCode.TOO_FEW_CARDS: "fewer GPUs than wanted",
    NodeCode.MODEL: "too few GPUs of a wanted model",
    NodeCode.UUID: "too few GPUs with a wanted UUID",
    NodeCode.MODE: "too few GPUs in a wanted sharing mode",
    NodeCode.UNHEALTHY: "too few healthy GPUs",
    NodeCode.CORDONED: "too few GPUs that are not cordoned",
    NodeCode.TOO_SMALL: "GPUs smaller than wanted",
    NodeCode.NOT_IDLE: "too few idle GPUs",
    NodeCode.MEMORY: "too little free memory on a single GPU",
    NodeCode.CORES: "too few free cores on a single GPU",
    NodeCode.SLOTS: "no free slot on a single GPU",
    NodeCode.NUMA: "too few fitting GPUs on one NUMA node",
    NodeCode.LINKS: "too few fitting GPUs that are linked",
    NodeCode.TOGETHER: "room for each container, but not for all at once",
    NodeCode.SEARCH: "not searched further: too many ways to place the containers",
    NodeCode.CPU: "too little free CPU",
    NodeCode.HOST_MEMORY: "too little free main memory",
    NodeCode.QUOTA_POOL: "outside the pools of the namespace's quota",
    NodeCode.QUOTA_MODEL: "too few GPUs of a model in the namespace's quota",
    NodeCode.QUOTA: "quota of the namespace used up",
    NodeCode.PROMISED: "room being made on another node",
    NodeCode.AGENT_BUSY: "another pod starting under an agent that takes one at a time",
    NodeCode.OTHER_AGENT: "run by another system's agent",
    NodeCode.UNCOUNTED: "a pod there whose GPUs gputile failed to count",
}
"""Short and constant, because kube-scheduler groups nodes by identical text; figures belong to `explain`."""

HAMI_ALIAS: dict[NodeCode, str] = {
    NodeCode.UNKNOWN_NODE: "NodeUnfitPod",
    NodeCode.BAD_INVENTORY: "NodeUnfitPod",
    NodeCode.AGENT_SILENT: "NodeUnfitPod",
    NodeCode.PLUGIN_GONE: "NodeUnfitPod",
    NodeCode.NO_CARDS: "NodeInsufficientDevice",
    NodeCode.TOO_FEW_CARDS: "NodeInsufficientDevice",
    NodeCode.MODEL: "CardTypeMismatch",
    NodeCode.UUID: "CardUuidMismatch",
    NodeCode.MODE: "ModeNotFit",
    NodeCode.UNHEALTHY: "CardNotHealth",
    NodeCode.CORDONED: "CardCordoned",
    NodeCode.TOO_SMALL: "CardInsufficientMemory",
    NodeCode.NOT_IDLE: "ExclusiveDeviceAllocateConflict",
    NodeCode.MEMORY: "CardInsufficientMemory",
    NodeCode.CORES: "CardInsufficientCore",
    NodeCode.SLOTS: "CardTimeSlicingExhausted",
    NodeCode.NUMA: "NumaNotFit",
    NodeCode.LINKS: "CardNotFoundCustomFilterRule",
    NodeCode.TOGETHER: "AllocatedCardsInsufficientRequest",
    NodeCode.SEARCH: "NodeUnfitPod",
    NodeCode.CPU: "NodeUnfitPod",
    NodeCode.HOST_MEMORY: "NodeUnfitPod",
    NodeCode.QUOTA_POOL: "ResourceQuotaNotFit",
    NodeCode.QUOTA_MODEL: "ResourceQuotaNotFit",
    NodeCode.QUOTA: "ResourceQuotaNotFit",
    NodeCode.PROMISED: "NodeUnfitPod",
    NodeCode.AGENT_BUSY: "NodeUnfitPod",
    NodeCode.OTHER_AGENT: "NodeUnfitPod",
    NodeCode.UNCOUNTED: "NodeUnfitPod",
}

VGPU_ALIAS: dict[NodeCode, str] = {
    NodeCode.UNKNOWN_NODE: "NodeCacheMiss",
    NodeCode.BAD_INVENTORY: "NodeBadVGPURegister",
    NodeCode.AGENT_SILENT: "NodeInfoBuildFailed",
    NodeCode.PLUGIN_GONE: "NodeNotVGPUEnabled",
    NodeCode.NO_CARDS: "NodeNotVGPUEnabled",
    NodeCode.TOO_FEW_CARDS: "InsufficientGPUCards",
    NodeCode.MODEL: "DeviceTypeMismatch",
    NodeCode.UUID: "DeviceUUIDMismatch",
    NodeCode.MODE: "DeviceMIGEnabled",
    NodeCode.UNHEALTHY: "DeviceUnhealthy",
    NodeCode.CORDONED: "DeviceUnhealthy",
    NodeCode.TOO_SMALL: "InsufficientVGPUMemory",
    NodeCode.NOT_IDLE: "InsufficientGPUCards",
    NodeCode.MEMORY: "InsufficientVGPUMemory",
    NodeCode.CORES: "InsufficientVGPUCore",
    NodeCode.SLOTS: "InsufficientVGPUSlot",
    NodeCode.NUMA: "NUMATopologyUnsatisfied",
    NodeCode.LINKS: "LinkTopologyUnsatisfied",
    NodeCode.TOGETHER: "InsufficientGPUResources",
    NodeCode.SEARCH: "AllocatorInternalError",
    NodeCode.CPU: "InsufficientGPUResources",
    NodeCode.HOST_MEMORY: "InsufficientGPUResources",
    NodeCode.QUOTA_POOL: "InsufficientGPUResources",
    NodeCode.QUOTA_MODEL: "InsufficientGPUResources",
    NodeCode.QUOTA: "InsufficientGPUResources",
    NodeCode.PROMISED: "AlreadyScheduledElsewhere",
    NodeCode.AGENT_BUSY: "AllocatorInternalError",
    NodeCode.OTHER_AGENT: "NodeNotVGPUEnabled",
    NodeCode.UNCOUNTED: "NodeInfoBuildFailed",
}


class Refusal(msgspec.Struct, frozen=True):
    """Why a node does not fit: what was wanted against what was found, and whether eviction could cure it."""

    node: str
    code: NodeCode
    wanted: int  # cards, but for CPU (millicores) and main memory (MiB)
    found: int
    curable: bool  # the node would fit with nobody on it

    @property
    def sentence(self) -> str:
        return SENTENCE[self.code]
