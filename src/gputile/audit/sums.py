"""The sums of every GPU: which pods hold how much of it, and whether it, or its node, is overcommitted."""

from collections.abc import Collection, Iterable

from gputile.audit.advice import DELETED, LOOK_AT_REQUEST, advice
from gputile.audit.notices import Notices
from gputile.audit.report import AuditedGpu, AuditReport, FindingCode, GpuHolder, UnplacedGpus
from gputile.audit.sizes import NodeGpus
from gputile.model.cards import Card

DIMENSIONS = ("memory", "cores", "slots")
UNITS = {"memory": "MiB", "cores": "% of its cores", "slots": "slots"}


class GpuSums:
    """The holders of each GPU, in the order in which the pods were read."""

    def __init__(self) -> None:
        self._held: dict[str, list[GpuHolder]] = {}  # by GPU
        self._unplaced: dict[str, list[UnplacedGpus]] = {}  # by node

    def put(self, uuid: str, held: GpuHolder) -> None:
        self._held.setdefault(uuid, []).append(held)

    def put_unplaced(self, unplaced: UnplacedGpus) -> None:
        self._unplaced.setdefault(unplaced.node, []).append(unplaced)

    def judge(self, nodes: Iterable[NodeGpus], notices: Notices) -> None:
        for node in nodes:
            for gpu in node.gpus:
                self._judge_gpu(node, gpu, notices)
            if node.node in self._unplaced:
                self._judge_node(node, self._unplaced[node.node], notices)

    def _judge_gpu(self, node: NodeGpus, gpu: Card, notices: Notices) -> None:
        held = self._holders(gpu)
        over = [name for name in DIMENSIONS if _sum(held, name) > getattr(gpu, name) and _is_known(gpu, name)]
        if over:
            sums = [f"{_sum(held, name)} of {getattr(gpu, name)} {UNITS[name]}" for name in over]
            message = f"GPU {gpu.uuid} of node {node.node} is double-allocated: {' and '.join(sums)} are allocated"
            notices.find(FindingCode.DOUBLE_ALLOCATED, message, advice(held), node=node.node, card=gpu, holders=held)
        elif held and (gpu.cordoned or not gpu.healthy):
            state = "cordoned" if gpu.healthy else f"unhealthy ({gpu.reason or 'no reason given'})"
            message = f"GPU {gpu.uuid} of node {node.node} is {state} and in use"
            notices.remark(FindingCode.OUT_OF_USE, message, node=node.node, card=gpu, holders=held)

    def _holders(self, gpu: Card) -> tuple[GpuHolder, ...]:
        """The oldest first."""
        return tuple(sorted(self._held.get(gpu.uuid, ()), key=lambda held: (held.bound, held.granted, held.pod)))

    # ---- GPUs of which only the number is known ---------------------------------------------------------------------

    def _judge_node(self, node: NodeGpus, unplaced: list[UnplacedGpus], notices: Notices) -> None:
        named = sum(gpu.uuid in self._held for gpu in node.gpus)
        whole, shares = sum(pod.gpus for pod in unplaced), sum(pod.shares for pod in unplaced)
        requested = " and ".join(
            f"{count} {noun}" for count, noun in ((whole, "GPUs"), (shares, "shares of GPUs")) if count
        )
        message = (
            f"node {node.node} has {len(node.gpus)} GPUs: records name {named} of them, and {len(unplaced)} pods "
            f"without a complete record request {requested}"
        )
        if named + whole > len(node.gpus) or any(self._exceeds(node, unplaced, name) for name in DIMENSIONS):
            message = f"{message}, which is more than it has"
            notices.find(FindingCode.NODE_OVERCOMMITTED, message, LOOK_AT_REQUEST, node=node.node)
        elif node.agent == "nvidia":
            notices.remark(FindingCode.BY_NUMBER, f"{message}; on which GPUs is unknown", node=node.node)

    def _exceeds(self, node: NodeGpus, unplaced: list[UnplacedGpus], dimension: str) -> bool:
        """Whether the node's GPUs together have too little of it. A double-allocated GPU counts as full."""
        total: int = sum(getattr(gpu, dimension) for gpu in node.gpus)
        held: int = sum(
            min(_sum(self._held.get(gpu.uuid, ()), dimension), getattr(gpu, dimension)) for gpu in node.gpus
        )
        whole = 0 if dimension == "slots" else min((getattr(gpu, dimension) for gpu in node.gpus), default=0)
        requested: int = sum(getattr(pod, dimension) + pod.gpus * whole for pod in unplaced)
        return 0 < total < held + requested

    # ---- the whole --------------------------------------------------------------------------------------------------

    def report(self, nodes: Collection[NodeGpus], pending: int, notices: Notices) -> AuditReport:
        gpus = tuple(self._gpu(node.node, gpu) for node in nodes for gpu in node.gpus)
        unplaced = tuple(pod for pods in self._unplaced.values() for pod in pods)
        holders = {held.uid or held.pod for gpu in gpus for held in gpu.holders if held.phase != DELETED}
        sizes = {node.node: node.smallest for node in nodes}
        return AuditReport(
            nodes=sum(bool(node.gpus) for node in nodes),
            cards=len(gpus),
            pods=len(holders | {pod.uid or pod.pod for pod in unplaced}),
            pending=pending,
            memory=sum(gpu.memory for gpu in gpus),
            memory_allocated=sum(gpu.memory_allocated for gpu in gpus)
            + sum(pod.memory + pod.gpus * sizes.get(pod.node, 0) for pod in unplaced),
            findings=tuple(notices.findings),
            remarks=tuple(notices.remarks),
            gpus=gpus,
            unplaced=unplaced,
        )

    def _gpu(self, node: str, gpu: Card) -> AuditedGpu:
        held = self._holders(gpu)
        return AuditedGpu(
            node=node,
            index=gpu.index,
            uuid=gpu.uuid,
            memory=gpu.memory,
            memory_allocated=_sum(held, "memory"),
            cores=gpu.cores,
            cores_allocated=_sum(held, "cores"),
            slots=gpu.slots,
            slots_allocated=_sum(held, "slots"),
            holders=held,
        )


def _sum(held: Iterable[GpuHolder], dimension: str) -> int:
    return sum(getattr(holder, dimension) for holder in held)


def _is_known(gpu: Card, dimension: str) -> bool:
    """Some agents do not publish the memory of their GPUs; then it is 0, which means unknown."""
    return dimension != "memory" or gpu.memory > 0
