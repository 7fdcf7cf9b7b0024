"""Who holds what of every GPU, and whether that is more than the GPU, or the node's GPUs together, have."""

from collections.abc import Collection, Iterable

from gputile.audit.advice import DELETED, LOOK_AT_REQUEST, advice
from gputile.audit.notices import Notices
from gputile.audit.report import AuditedGpu, AuditReport, FindingCode, GpuHolder, UnplacedGpus
from gputile.audit.sizes import NodeGpus
from gputile.model.cards import Card

DIMENSIONS = ("memory", "cores", "slots")
UNITS = {"memory": "MiB", "cores": "% of its cores", "slots": "slots"}


class GpuSums:
    """What was found of each GPU, in the order in which pods were looked at."""

    def __init__(self) -> None:
        self._held: dict[str, list[GpuHolder]] = {}  # by GPU
        self._unplaced: dict[str, list[UnplacedGpus]] = {}  # by node

    def put(self, uuid: str, held: GpuHolder) -> None:
        self._held.setdefault(uuid, []).append(held)

    def put_somewhere(self, unplaced: UnplacedGpus) -> None:
        self._unplaced.setdefault(unplaced.node, []).append(unplaced)

    def judge(self, nodes: Iterable[NodeGpus], notices: Notices) -> None:
        for node in nodes:
            for gpu in node.gpus:
                self._judge_gpu(node, gpu, notices)
            if node.node in self._unplaced:
                self._judge_node(node, self._unplaced[node.node], notices)

    def _judge_gpu(self, node: NodeGpus, gpu: Card, notices: Notices) -> None:
        held = self._holders(gpu)
        over = [what for what in DIMENSIONS if _sum(held, what) > getattr(gpu, what) and _is_known(gpu, what)]
        if over:
            sums = [f"{_sum(held, what)} of {getattr(gpu, what)} {UNITS[what]}" for what in over]
            said = f"GPU {gpu.uuid} of node {node.node} is double-allocated: {' and '.join(sums)} are allocated"
            notices.find(FindingCode.OVERSOLD, said, advice(held), node=node.node, card=gpu, holders=held)
        elif held and (gpu.cordoned or not gpu.healthy):
            why = "cordoned" if gpu.healthy else f"unhealthy ({gpu.reason or 'no reason given'})"
            said = f"GPU {gpu.uuid} of node {node.node} is {why} and in use"
            notices.remark(FindingCode.OUT_OF_USE, said, node=node.node, card=gpu, holders=held)

    def _holders(self, gpu: Card) -> tuple[GpuHolder, ...]:
        """In the order in which they came."""
        return tuple(sorted(self._held.get(gpu.uuid, ()), key=lambda held: (held.bound, held.granted, held.pod)))

    # ---- GPUs of which only the number is known ---------------------------------------------------------------------

    def _judge_node(self, node: NodeGpus, unplaced: list[UnplacedGpus], notices: Notices) -> None:
        named = sum(gpu.uuid in self._held for gpu in node.gpus)
        whole, shares = sum(one.gpus for one in unplaced), sum(one.shares for one in unplaced)
        asked = " and ".join(f"{n} {what}" for n, what in ((whole, "GPUs"), (shares, "shares of GPUs")) if n)
        said = (
            f"node {node.node} has {len(node.gpus)} GPUs: records name {named} of them, and {len(unplaced)} pods "
            f"without a complete record request {asked}"
        )
        if named + whole > len(node.gpus) or any(self._exceeds(node, unplaced, what) for what in DIMENSIONS):
            said = f"{said}, which is more than it has"
            notices.find(FindingCode.NODE_OVERCOMMITTED, said, LOOK_AT_REQUEST, node=node.node)
        elif node.agent == "nvidia":
            notices.remark(FindingCode.BY_NUMBER, f"{said}; on which GPUs is unknown", node=node.node)

    def _exceeds(self, node: NodeGpus, unplaced: list[UnplacedGpus], what: str) -> bool:
        """Whether the node's GPUs together have too little of it. A GPU that is double-allocated is taken as full."""
        total: int = sum(getattr(gpu, what) for gpu in node.gpus)
        held: int = sum(min(_sum(self._held.get(gpu.uuid, ()), what), getattr(gpu, what)) for gpu in node.gpus)
        alone = 0 if what == "slots" else min((getattr(gpu, what) for gpu in node.gpus), default=0)
        asked: int = sum(getattr(one, what) + one.gpus * alone for one in unplaced)
        return 0 < total < held + asked

    # ---- the whole --------------------------------------------------------------------------------------------------

    def report(self, nodes: Collection[NodeGpus], pending: int, notices: Notices) -> AuditReport:
        gpus = tuple(self._gpu(node.node, gpu) for node in nodes for gpu in node.gpus)
        unplaced = tuple(one for found in self._unplaced.values() for one in found)
        holders = {held.uid or held.pod for gpu in gpus for held in gpu.holders if held.phase != DELETED}
        sizes = {node.node: node.smallest for node in nodes}
        return AuditReport(
            nodes=sum(bool(node.gpus) for node in nodes),
            cards=len(gpus),
            pods=len(holders | {one.uid or one.pod for one in unplaced}),
            waiting=pending,
            memory=sum(gpu.memory for gpu in gpus),
            memory_sold=sum(gpu.memory_allocated for gpu in gpus)
            + sum(one.memory + one.gpus * sizes.get(one.node, 0) for one in unplaced),
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


def _sum(held: Iterable[GpuHolder], what: str) -> int:
    return sum(getattr(one, what) for one in held)


def _is_known(gpu: Card, what: str) -> bool:
    """Some agents do not tell the memory of their GPUs; then it is 0, and no bound."""
    return what != "memory" or gpu.memory > 0
