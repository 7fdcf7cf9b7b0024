"""The audit itself: the sum of every GPU, and every record compared with its pod.

Pure functions over pods and nodes as JSON; the time is an argument. An unreadable object is a finding of its own and
does not affect the others.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

from gputile.audit.advice import DELETED, LOOK_AT_RECORD, LOOK_AT_REQUEST
from gputile.audit.allocations import OURS, AuditedAllocation, allocate, gpu_resources, has_record, requested
from gputile.audit.fields import shown
from gputile.audit.grants import differences, unknown_containers, unknown_gpus
from gputile.audit.holdings import NONE, SOMEWHERE, HeldAmounts, Holding, at_once
from gputile.audit.notices import Notices
from gputile.audit.objects import AuditedNode, AuditedPod, UnreadableObject, label_of, read_node, read_pod
from gputile.audit.records.gputile import GrantRecord, GrantRecordContainer, read_orphaned_pods
from gputile.audit.records.readers import takes_slots
from gputile.audit.report import AuditReport, FindingCode, GpuHolder, UnplacedGpus
from gputile.audit.sizes import NodeGpus, common_unit, read_gpus
from gputile.audit.sums import GpuSums
from gputile.audit.times import seconds, timestamp
from gputile.model.requests import Role

YOUNG = 60.0  # seconds that the leader has to write a grant for a pod that another scheduler bound
NOWHERE = NodeGpus(node="")
T = TypeVar("T")


def audit(nodes: Iterable[object], pods: Iterable[object], unit: str = "auto", now: float = 0.0) -> AuditReport:
    """`nodes` and `pods` as JSON objects, `now` in seconds since 1970.

    `unit`: the unit of `aliyun.com/gpu-mem` where no capacity of a node shows it: `GiB`, `MiB`, or `auto`.
    """
    return _Audit(now).report(nodes, pods, unit)


class _Audit:
    """One audit of one cluster."""

    def __init__(self, now: float) -> None:
        self._now = now
        self._notices = Notices()
        self._sums = GpuSums()
        self._nodes: dict[str, NodeGpus] = {}
        self._homes: dict[str, str] = {}  # by GPU: its node
        self._orphaned: list[GrantRecord] = []
        self._alive: set[str] = set()
        self._pending = 0

    def report(self, nodes: Iterable[object], pods: Iterable[object], unit: str) -> AuditReport:
        readable = [node for obj in nodes if (node := self._isolated("node", obj, read_node)) is not None]
        fallback = common_unit(readable)
        for node in readable:
            self._see_node(node, unit, fallback)
        for obj in pods:
            self._isolated("pod", obj, self._see_pod)
        for grant in self._orphaned:
            if grant.pod not in self._alive:
                self._see_orphaned(grant)
        self._sums.judge(self._nodes.values(), self._notices)
        return self._sums.report(self._nodes.values(), self._pending, self._notices)

    def _isolated(self, kind: str, obj: object, look: Callable[[object], T]) -> T | None:
        """An error in one object is a finding, and the other objects are audited all the same."""
        try:
            return look(obj)
        except Exception as error:  # any error: a tenant wrote the object, and the audit must go on
            known = isinstance(error, UnreadableObject)
            problem = str(error) if known else f"{type(error).__name__}: {shown(str(error))}"
            code = FindingCode.UNREADABLE_NODE if kind == "node" else FindingCode.UNREADABLE_POD
            todo = f"inspect it with `kubectl get {kind} -o yaml`; what it holds is not counted"
            self._notices.find(code, f"{kind} {label_of(obj)} cannot be read: {problem}", todo)
            return None

    # ---- nodes ------------------------------------------------------------------------------------------------------

    def _see_node(self, node: AuditedNode, unit: str, fallback: int) -> None:
        name = node.name
        try:
            gpus = self._nodes[name] = read_gpus(node, unit, fallback)
        except UnreadableObject as error:
            self._notices.find(
                FindingCode.UNREADABLE_NODE, f"node {name}: {error}", "inspect its annotations", node=name
            )
            return
        try:
            self._orphaned += read_orphaned_pods(node, gpus)
        except UnreadableObject as error:
            todo = "restart the node's agent, or remove the annotation if the node has no agent"
            self._notices.find(FindingCode.UNREADABLE_NODE, f"node {name}: {error}", todo, node=name)
        self._see_homes(gpus)

    def _see_homes(self, gpus: NodeGpus) -> None:
        for gpu in gpus.gpus:
            home = self._homes.setdefault(gpu.uuid, gpus.node)
            if home != gpus.node:
                message = f"GPU {shown(gpu.uuid)} is listed by node {home} and by node {gpus.node}"
                todo = "one of them lists GPUs that it does not have; restart its agent, or correct its annotation"
                self._notices.find(FindingCode.CARD_ON_TWO_NODES, message, todo, node=gpus.node, card=gpu)

    # ---- pods -------------------------------------------------------------------------------------------------------

    def _see_pod(self, obj: object) -> None:
        pod = read_pod(obj)
        if pod.is_over:
            return
        self._alive.add(pod.uid)
        gpus = self._nodes.get(pod.node)
        if not pod.node:
            request = requested(pod, NOWHERE)
            self._pending += request is not None and request.is_readable and not pod.deleting
        elif gpus is not None:
            self._see_bound(pod, gpus)
        elif has_record(pod) or gpu_resources(pod, NOWHERE):
            message = f"pod {pod.key} is on node {pod.node}, which is deleted or unreadable"
            self._notices.remark_in(pod, FindingCode.NODE_GONE, message)

    def _see_bound(self, pod: AuditedPod, gpus: NodeGpus) -> None:
        allocation = allocate(pod, gpus)
        for uuid, amounts in allocation.holding.items():
            if uuid == SOMEWHERE:
                self._sums.put_unplaced(_unplaced(pod, amounts))
            else:
                self._sums.put(uuid, _held(pod, allocation, amounts))
        if not self._see_grant(pod, gpus, allocation):
            self._see_unknown(pod, gpus, allocation)

    def _see_grant(self, pod: AuditedPod, gpus: NodeGpus, allocation: AuditedAllocation) -> bool:
        """Whether our grant has a finding."""
        before = len(self._notices.findings)
        if allocation.copied or allocation.broken:
            code = FindingCode.NOT_ITS_GRANT if allocation.copied else FindingCode.UNREADABLE_GRANT
            todo = f"gputile ignores it, and the leader writes another one; if it persists, {LOOK_AT_RECORD}"
            self._notices.find_in(pod, code, f"pod {pod.key}: {allocation.copied or allocation.broken}", todo)
        if allocation.grant is not None:
            for problem in unknown_containers(pod, allocation.grant):
                self._notices.find_in(pod, FindingCode.NO_SUCH_CONTAINER, f"pod {pod.key}: {problem}", LOOK_AT_RECORD)
            for problem in unknown_gpus(allocation.grant, gpus):
                todo = f"see whether the agent of the node lists all its GPUs; else {LOOK_AT_RECORD}"
                self._notices.find_in(pod, FindingCode.NO_SUCH_CARD, f"pod {pod.key}: {problem}", todo)
            for difference in differences(pod, allocation.request, allocation.grant):
                self._notices.remark_in(pod, FindingCode.NOT_AS_REQUESTED, f"pod {pod.key}: {difference}")
        return len(self._notices.findings) > before

    # ---- pods without a valid record --------------------------------------------------------------------------------

    def _see_unknown(self, pod: AuditedPod, gpus: NodeGpus, allocation: AuditedAllocation) -> None:
        """Invalid records, GPUs that no record names, and pods that are not counted."""
        doubts = "; ".join(
            f"its {record.family} record is invalid: {record.why}" for record in allocation.invalid_records
        )
        if not allocation.holding:
            self._see_uncounted(pod, gpus, allocation, doubts)
        elif not allocation.by and gpus.agent != "nvidia":
            self._see_ungranted(pod, f"it counts by number{_in_parentheses(doubts)}", LOOK_AT_REQUEST)
        elif allocation.by and SOMEWHERE in allocation.holding:
            record = f"its {allocation.by} record names fewer GPUs than it requests"
            message = f"pod {pod.key}: {record}; the rest counts by number"
            self._notices.remark_in(pod, FindingCode.BY_NUMBER, message)
        if doubts and allocation.by:
            message = f"pod {pod.key}: {doubts}; its {allocation.by} record counts"
            self._notices.remark_in(pod, FindingCode.INVALID_RECORD, message)

    def _see_uncounted(self, pod: AuditedPod, gpus: NodeGpus, allocation: AuditedAllocation, doubts: str) -> None:
        if allocation.request is not None and gpus.agent == OURS and allocation.grant is None:
            todo = f"see whether a gputile scheduler is the leader, and the events of the pod; {LOOK_AT_REQUEST}"
            self._see_ungranted(pod, f"it counts as nothing{_in_parentheses(doubts)}", todo)
            return
        named, marked = gpu_resources(pod, gpus), has_record(pod)
        if not named and not marked:
            return
        subject = f"requests {', '.join(map(shown, named[:3]))}" if named else "carries a record of GPUs"
        message = f"pod {pod.key} on node {pod.node} {subject} and counts as nothing{_in_parentheses(doubts)}"
        if marked or allocation.request is not None or (gpus.gpus and not all("/mig-" in name for name in named)):
            self._notices.find_in(pod, FindingCode.NOT_COUNTED, message, LOOK_AT_REQUEST)
        else:  # GPUs of another vendor, or MIG slices, which the NVIDIA plugin serves: the audit does not count these
            self._notices.remark_in(pod, FindingCode.NOT_COUNTED, message)

    def _see_ungranted(self, pod: AuditedPod, how: str, todo: str) -> None:
        message = f"pod {pod.key} is bound to node {pod.node}, requests GPUs and has no grant"
        if self._now - seconds(pod.bound or pod.created) < YOUNG:
            self._notices.remark_in(pod, FindingCode.NO_GRANT, f"{message} yet: the leader has a minute")
        else:
            message = f"{message}, nor a valid record of another system; {how}"
            self._notices.find_in(pod, FindingCode.NO_GRANT, message, todo)

    # ---- orphaned pods ----------------------------------------------------------------------------------------------

    def _see_orphaned(self, grant: GrantRecord) -> None:
        message = (
            f"containers of pod {shown(grant.pod)}, which was deleted, still run on node {grant.node} and hold GPUs"
        )
        self._notices.remark(FindingCode.ORPHANED, message, node=grant.node)
        gpus, slot = self._nodes[grant.node], int(takes_slots(grant.dialect))
        parts = ((Role(container.role), _granted(container, gpus, slot)) for container in grant.containers)
        for uuid, of in at_once(parts).items():
            name = f"{DELETED}/{shown(grant.pod)}"
            self._sums.put(uuid, GpuHolder(name, grant.pod, of.memory, of.cores, of.slots, by=OURS, phase=DELETED))


def _granted(container: GrantRecordContainer, gpus: NodeGpus, slot: int) -> Holding:
    own: Holding = {}
    for tile in container.tiles:
        if tile.uuid in gpus.by_uuid:
            own[tile.uuid] = own.get(tile.uuid, NONE).plus(HeldAmounts(tile.memory, tile.cores, slot))
    return own


def _held(pod: AuditedPod, allocation: AuditedAllocation, of: HeldAmounts) -> GpuHolder:
    return GpuHolder(
        pod=pod.key,
        uid=pod.uid,
        memory=of.memory,
        cores=of.cores,
        slots=of.slots,
        by=allocation.by,
        granted=timestamp(allocation.at),
        bound=pod.bound,
        phase=pod.phase,
        going=pod.deleting,
    )


def _unplaced(pod: AuditedPod, of: HeldAmounts) -> UnplacedGpus:
    return UnplacedGpus(
        node=pod.node,
        pod=pod.key,
        uid=pod.uid,
        gpus=of.whole,
        shares=of.shares,
        memory=of.memory,
        cores=of.cores,
        slots=of.slots,
    )


def _in_parentheses(text: str) -> str:
    return f" ({text})" if text else ""
