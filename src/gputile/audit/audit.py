"""The proof itself: the sum of every GPU, and every record with its pod.

Pure functions over pods and nodes as JSON; the time comes in as a number. An object that cannot be read is a finding of
its own and spoils no other.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

from gputile.audit.advice import DELETED, LOOK_AT_RECORD, LOOK_AT_REQUEST
from gputile.audit.allocations import OURS, AuditedAllocation, allocate, gpu_resources, has_record, requested
from gputile.audit.fields import shown
from gputile.audit.grants import differences, strange_containers, strange_gpus
from gputile.audit.holdings import NONE, SOMEWHERE, HeldAmounts, Holding, at_once
from gputile.audit.notices import Notices
from gputile.audit.objects import AuditedNode, AuditedPod, UnreadableObject, label_of, read_node, read_pod
from gputile.audit.records.gputile import GrantRecord, GrantRecordContainer, read_lingering
from gputile.audit.report import AuditReport, FindingCode, GpuHolder, UnplacedGpus
from gputile.audit.sizes import NodeGpus, common_unit, read_gpus
from gputile.audit.sums import GpuSums
from gputile.audit.times import seconds, written
from gputile.model.requests import Role

YOUNG = 60.0  # seconds that the leader has to write a grant for a pod that another scheduler bound
NOWHERE = NodeGpus(node="")
T = TypeVar("T")


def audit(nodes: Iterable[object], pods: Iterable[object], unit: str = "auto", now: float = 0.0) -> AuditReport:
    """`nodes` and `pods` as JSON objects, `now` in seconds since 1970.

    `unit`: what one `aliyun.com/gpu-mem` is where no sum of a node shows it: `GiB`, `MiB`, or `auto`.
    """
    return _Audit(now).report(nodes, pods, unit)


class _Audit:
    """One look at one cluster."""

    def __init__(self, now: float) -> None:
        self._now = now
        self._told = Notices()
        self._sums = GpuSums()
        self._nodes: dict[str, NodeGpus] = {}
        self._homes: dict[str, str] = {}  # by GPU: its node
        self._lingering: list[GrantRecord] = []
        self._alive: set[str] = set()
        self._pending = 0

    def report(self, nodes: Iterable[object], pods: Iterable[object], unit: str) -> AuditReport:
        found = [node for obj in nodes if (node := self._isolated("node", obj, read_node)) is not None]
        fallback = common_unit(found)
        for node in found:
            self._see_node(node, unit, fallback)
        for obj in pods:
            self._isolated("pod", obj, self._see_pod)
        for grant in self._lingering:
            if grant.pod not in self._alive:
                self._see_lingering(grant)
        self._sums.judge(self._nodes.values(), self._told)
        return self._sums.report(self._nodes.values(), self._pending, self._told)

    def _isolated(self, kind: str, obj: object, look: Callable[[object], T]) -> T | None:
        """Whatever is wrong with one object is a finding, and no other object's business."""
        try:
            return look(obj)
        except Exception as error:  # of any kind: a tenant wrote the object, and the audit must go on
            why = str(error) if isinstance(error, UnreadableObject) else f"{type(error).__name__}: {shown(str(error))}"
            code = FindingCode.UNREADABLE_NODE if kind == "node" else FindingCode.UNREADABLE_POD
            todo = f"look at it with `kubectl get {kind} -o yaml`; what it holds is not counted"
            self._told.find(code, f"{kind} {label_of(obj)} cannot be read: {why}", todo)
            return None

    # ---- nodes ------------------------------------------------------------------------------------------------------

    def _see_node(self, node: AuditedNode, unit: str, fallback: int) -> None:
        name = node.name
        try:
            gpus = self._nodes[name] = read_gpus(node, unit, fallback)
        except UnreadableObject as wrong:
            self._told.find(FindingCode.UNREADABLE_NODE, f"node {name}: {wrong}", "look at its annotations", node=name)
            return
        try:
            self._lingering += read_lingering(node, gpus)
        except UnreadableObject as wrong:
            todo = "restart the node's agent, or remove the annotation if it has none"
            self._told.find(FindingCode.UNREADABLE_NODE, f"node {name}: {wrong}", todo, node=name)
        self._see_homes(gpus)

    def _see_homes(self, gpus: NodeGpus) -> None:
        for gpu in gpus.gpus:
            home = self._homes.setdefault(gpu.uuid, gpus.node)
            if home != gpus.node:
                what = f"GPU {shown(gpu.uuid)} is listed by node {home} and by node {gpus.node}"
                todo = "one of them lists GPUs that it does not have; restart its agent, or correct its annotation"
                self._told.find(FindingCode.CARD_ON_TWO_NODES, what, todo, node=gpus.node, card=gpu)

    # ---- pods -------------------------------------------------------------------------------------------------------

    def _see_pod(self, obj: object) -> None:
        pod = read_pod(obj)
        if pod.is_over:
            return
        self._alive.add(pod.uid)
        gpus = self._nodes.get(pod.node)
        if not pod.node:
            asked = requested(pod, NOWHERE)
            self._pending += asked is not None and asked.is_readable and not pod.deleting
        elif gpus is not None:
            self._see_bound(pod, gpus)
        elif has_record(pod) or gpu_resources(pod, NOWHERE):
            what = f"pod {pod.key} is on node {pod.node}, which is gone or cannot be read"
            self._told.remark_in(pod, FindingCode.NODE_GONE, what)

    def _see_bound(self, pod: AuditedPod, gpus: NodeGpus) -> None:
        found = allocate(pod, gpus)
        for uuid, amounts in found.holding.items():
            if uuid == SOMEWHERE:
                self._sums.put_somewhere(_unplaced(pod, amounts))
            else:
                self._sums.put(uuid, _held(pod, found, amounts))
        if not self._see_grant(pod, gpus, found):
            self._see_unknown(pod, gpus, found)

    def _see_grant(self, pod: AuditedPod, gpus: NodeGpus, found: AuditedAllocation) -> bool:
        """Whether something is wrong with our grant."""
        before = len(self._told.findings)
        if found.copied or found.broken:
            code = FindingCode.NOT_ITS_GRANT if found.copied else FindingCode.UNREADABLE_GRANT
            todo = f"it is not believed, and the leader writes another one; if it stays, {LOOK_AT_RECORD}"
            self._told.find_in(pod, code, f"pod {pod.key}: {found.copied or found.broken}", todo)
        if found.grant is not None:
            for what in strange_containers(pod, found.grant):
                self._told.find_in(pod, FindingCode.NO_SUCH_CONTAINER, f"pod {pod.key}: {what}", LOOK_AT_RECORD)
            for what in strange_gpus(found.grant, gpus):
                todo = f"see whether the agent of the node lists all its GPUs; else {LOOK_AT_RECORD}"
                self._told.find_in(pod, FindingCode.NO_SUCH_CARD, f"pod {pod.key}: {what}", todo)
            for what in differences(pod, found.request, found.grant):
                self._told.remark_in(pod, FindingCode.NOT_AS_ASKED, f"pod {pod.key}: {what}")
        return len(self._told.findings) > before

    # ---- what is not known ------------------------------------------------------------------------------------------

    def _see_unknown(self, pod: AuditedPod, gpus: NodeGpus, found: AuditedAllocation) -> None:
        """Records that are not believed, GPUs that no record names, and pods that count as nothing."""
        doubts = "; ".join(f"its {one.family} record is not believed: {one.why}" for one in found.disbeliefs)
        if not found.holding:
            self._see_nothing(pod, gpus, found, doubts)
        elif not found.by and gpus.agent != "nvidia":
            self._see_ungranted(pod, f"it counts by number{_in_brackets(doubts)}", LOOK_AT_REQUEST)
        elif found.by and SOMEWHERE in found.holding:
            what = f"pod {pod.key}: its {found.by} record names fewer GPUs than it requests; the rest counts by number"
            self._told.remark_in(pod, FindingCode.BY_NUMBER, what)
        if doubts and found.by:
            what = f"pod {pod.key}: {doubts}; its {found.by} record counts"
            self._told.remark_in(pod, FindingCode.RECORD_NOT_BELIEVED, what)

    def _see_nothing(self, pod: AuditedPod, gpus: NodeGpus, found: AuditedAllocation, doubts: str) -> None:
        if found.request is not None and gpus.agent == OURS and found.grant is None:
            todo = f"see whether a gputile scheduler leads, and the events of the pod; {LOOK_AT_REQUEST}"
            self._see_ungranted(pod, f"it counts as nothing{_in_brackets(doubts)}", todo)
            return
        named, marked = gpu_resources(pod, gpus), has_record(pod)
        if not named and not marked:
            return
        asked = f"requests {', '.join(map(shown, named[:3]))}" if named else "carries a record of GPUs"
        what = f"pod {pod.key} on node {pod.node} {asked} and counts as nothing{_in_brackets(doubts)}"
        if marked or found.request is not None or (gpus.gpus and not all("/mig-" in name for name in named)):
            self._told.find_in(pod, FindingCode.NOT_COUNTED, what, LOOK_AT_REQUEST)
        else:  # GPUs of another make, or parts of a GPU that the NVIDIA plugin keeps apart: not those that we count
            self._told.remark_in(pod, FindingCode.NOT_COUNTED, what)

    def _see_ungranted(self, pod: AuditedPod, how: str, todo: str) -> None:
        what = f"pod {pod.key} is bound to node {pod.node}, requests GPUs and has no grant"
        if self._now - seconds(pod.bound or pod.created) < YOUNG:
            self._told.remark_in(pod, FindingCode.NO_GRANT, f"{what} yet: the leader has a minute")
        else:
            what = f"{what}, nor a record of another system that is believed; {how}"
            self._told.find_in(pod, FindingCode.NO_GRANT, what, todo)

    # ---- pods that are gone while their containers run --------------------------------------------------------------

    def _see_lingering(self, grant: GrantRecord) -> None:
        what = f"containers of pod {shown(grant.pod)}, which was deleted, still run on node {grant.node} and hold GPUs"
        self._told.remark(FindingCode.LINGERING, what, node=grant.node)
        gpus, slot = self._nodes[grant.node], int(grant.takes_slots)
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


def _held(pod: AuditedPod, found: AuditedAllocation, of: HeldAmounts) -> GpuHolder:
    return GpuHolder(
        pod=pod.key,
        uid=pod.uid,
        memory=of.memory,
        cores=of.cores,
        slots=of.slots,
        by=found.by,
        granted=written(found.at),
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


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""
