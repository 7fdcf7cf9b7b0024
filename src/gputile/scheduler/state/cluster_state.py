"""The informer cache of the scheduler: pods and nodes as the watches last showed them, passed on to the ledger.

No I/O and no await. `pods_listed`, `pod_changed`, `nodes_listed` and `node_changed` return the ledger's instructions.

A pod counts from its binding until its containers are gone: that is a terminal phase or the removal of its object, not
the request to delete it. After a forced deletion it counts until the node's agent has had time to report containers
that still run (`orphans`). The scheduler that bound a pod does not matter: its allocation is our grant, otherwise the
record of another system, otherwise the number of its GPUs, where the agent of another system runs it. A pod that
requests GPUs and carries neither grant nor record is `ungranted`: the leader chooses cards for it.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Set

import msgspec

from gputile.dialects import gpushare, gputile, records, registry
from gputile.dialects.allocations import allocation_of
from gputile.dialects.gputile import GRANT
from gputile.dialects.kube_objects import NodeObject, Pod
from gputile.dialects.parsing import host_needs
from gputile.dialects.settings import DialectSettings
from gputile.ledger.events import Compared, Confirmed, Freed, Instruction, NodeGone, NodeSeen, Relisted
from gputile.ledger.ledger import AllocationState, Ledger
from gputile.model.allocations import Allocation
from gputile.model.cards import Node
from gputile.model.grants import Grant
from gputile.model.refusals import BadRequest, NodeReason
from gputile.model.requests import PodRequest
from gputile.model.usage import PodUsage
from gputile.scheduler.state.agent_liveness import AgentLiveness, AgentLivenessSettings
from gputile.scheduler.state.orphaned_pods import OrphanTracker
from gputile.scheduler.state.usage import used_on
from gputile.telemetry.logs import fields

log = logging.getLogger(__name__)

"""Dialects whose own agents guess by age, amount or a lock which pod an allocation is for."""


class UnboundPod(msgspec.Struct, frozen=True):
    """A pod without a node that requests GPUs."""

    pod: Pod
    request: PodRequest | BadRequest


class ClusterState:
    """Pods, nodes and agents as the watches show them; keeps the ledger up to date and collects work for the leader."""

    def __init__(
        self,
        ledger: Ledger,
        settings: DialectSettings,
        agents: AgentLivenessSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ledger = ledger
        self.agents = AgentLiveness(clock)
        self.orphans = OrphanTracker(ledger, self.agents, (agents or AgentLivenessSettings()).orphan_grace, clock)
        self.rejected_by_kubelet: dict[str, Pod] = {}  # pods with cards that their kubelet just rejected for good
        self.pending: dict[str, UnboundPod] = {}  # pods without a node that request GPUs
        self.main_reasons: dict[str, NodeReason] = {}  # by pending pod: the reason that refused most nodes
        self.ungranted: dict[str, Pod] = {}  # bound pods that request GPUs and carry neither grant nor record
        self.invalid_grants: dict[str, tuple[Pod, str]] = {}  # pods whose grant was copied or edited, and the message
        self.newly_bound: dict[str, Pod] = {}  # pods that were just seen with their grant for the first time
        self.arrivals: list[PodRequest] = []  # requests of pods that were just seen for the first time
        self.guessing: set[str] = set()  # nodes whose agent guesses
        self.tracks_cpu_pods = False  # whether pods without GPUs are tracked too: see `extender.cpu_pods`
        self.cpu_pods: dict[str, PodRequest] = {}  # pods without a node that request only CPU or memory, if tracked
        self._settings = settings
        self._seen: dict[str, Grant] = {}  # the grants that pods were seen to carry
        self._bound: dict[str, Pod] = {}  # bound pods that request GPUs or hold them
        self._on_node: dict[str, set[str]] = {}
        self._nodes: dict[str, NodeObject] = {}  # kept only to guess gpushare's unit
        self._resolved = settings
        self.uncounted: dict[str, str] = {}  # pods whose processing failed, and their nodes
        self._changed: list[str] = []  # listed pods whose allocation changed and was not compared with others yet

    @property
    def settings(self) -> DialectSettings:
        """The dialect settings; gpushare's unit is guessed from the nodes if it is set to `auto`."""
        return self._resolved

    # ---- pods -------------------------------------------------------------------------------------------------------

    def pods_listed(self, pods: Iterable[Pod], unreadable: Collection[str] = ()) -> list[Instruction]:
        """A list shows all pods: a missing pod is gone, but an undecodable pod (`unreadable`: keys) stays.

        First add all listed pods, then remove the missing ones, then compare overlaps. So it can be done in slices:
        between two slices the ledger holds too much and never too little, because a new pod cannot get what a listed
        pod holds.
        """
        listed = list(pods)
        missing = self.unlisted({pod.uid for pod in listed}, unreadable)
        done = [instruction for pod in listed for instruction in self.relisted(pod)]
        done += [instruction for uid in missing for instruction in self.remove_unlisted(uid)]
        changed = self.take_changed()
        return done + [instruction for uid in changed for instruction in self.ledger.handle(Compared(uid))]

    def unlisted(self, alive: Set[str], unreadable: Collection[str] = ()) -> list[str]:
        """The known pods (UIDs) that are missing in a list that was just read."""
        confirmed = (entry for entry in self.ledger.entries() if entry.state is AllocationState.CONFIRMED)
        gone = {e.allocation.pod: e.allocation.name for e in confirmed if e.allocation.pod not in alive}
        caches = (self.pending, self.cpu_pods, self._bound, self._seen, self.rejected_by_kubelet, self.uncounted)
        known = dict.fromkeys(uid for cache in caches for uid in sorted(cache.keys() - alive))
        return [uid for uid in {**known, **gone} if gone.get(uid) not in unreadable]

    def relisted(self, pod: Pod) -> list[Instruction]:
        """Add one pod of a list, as if the watch had shown it; overlaps are compared later (`take_changed`)."""
        if pod.is_terminal:
            known = self.ledger.entry(pod.uid) is not None or self.pod(pod.uid) is not None
            if known:
                return self._end_pod(pod)
            self._forget_for_good(pod.uid)
            return []
        done = self.orphans.pod_seen(pod.uid, pod.node_name)
        if self._frees_guessing_agent(pod):
            done.append(Freed(pod.node_name))
        allocation, entry = self._read(pod), self.ledger.entry(pod.uid)
        if allocation is None or (
            entry is not None and entry.state is AllocationState.CONFIRMED and entry.allocation is allocation
        ):
            return done
        self._changed.append(pod.uid)
        return done + self.ledger.handle(Relisted(allocation))

    def remove_unlisted(self, uid: str) -> list[Instruction]:
        """Remove a pod that is missing in a list: the watch did not show how it ended."""
        self.rejected_by_kubelet.pop(uid, None)
        self.uncounted.pop(uid, None)
        self._forget_for_good(uid)
        entry = self.ledger.entry(uid)
        confirmed = entry is not None and entry.state is AllocationState.CONFIRMED
        return self.orphans.vanished(uid) if confirmed else []

    def uncounted_unless(self, counted: bool, pod: Pod) -> None:
        """Record whether the allocation of a bound pod is known. While it is unknown, its node accepts no other pod."""
        if not counted and pod.node_name and not pod.is_terminal and self.ledger.entry(pod.uid) is None:
            self.uncounted[pod.uid] = pod.node_name
        else:
            self.uncounted.pop(pod.uid, None)

    def take_changed(self) -> list[str]:
        """The listed pods whose allocation differs from the ledger's; each is returned once."""
        changed, self._changed = self._changed, []
        return changed

    def pod_changed(self, pod: Pod, *, deleted: bool = False) -> list[Instruction]:
        if pod.is_terminal:
            return self._end_pod(pod, deleted=deleted)
        if deleted:
            self._forget_for_good(pod.uid)
            was_bound = pod.spec is None or bool(pod.node_name)  # unknown for an undecodable pod
            return self.orphans.vanished(pod.uid) if was_bound else self.orphans.ended(pod.uid)
        done = self.orphans.pod_seen(pod.uid, pod.node_name)
        if self._frees_guessing_agent(pod):
            done.append(Freed(pod.node_name))
        allocation = self._read(pod)
        return done if allocation is None else done + self.ledger.handle(Confirmed(allocation))

    def _frees_guessing_agent(self, pod: Pod) -> bool:
        """Whether the kubelet has now admitted the pod on a node whose agent guesses, so that the next pod may follow.
        kube-scheduler itself does not retry a pod because another pod has started."""
        before = self._bound.get(pod.uid) if pod.node_name in self.guessing else None
        return before is not None and not before.is_admitted and pod.is_admitted

    def _end_pod(self, pod: Pod, *, deleted: bool = False) -> list[Instruction]:
        """The pod is in a terminal phase: its containers have ended."""
        if pod.rejected_by_kubelet and not deleted and self.pod(pod.uid) is not None:
            self.rejected_by_kubelet[pod.uid] = pod
        if deleted:
            self.rejected_by_kubelet.pop(pod.uid, None)
        self._forget_for_good(pod.uid)
        return self.orphans.ended(pod.uid)

    def vanished(self, uid: str) -> list[Instruction]:
        """A live lookup found no such pod; our watch may be late."""
        return self.orphans.vanished(uid)

    def pod(self, uid: str) -> Pod | None:
        """A pod that requests GPUs, as last seen."""
        pending = self.pending.get(uid)
        return pending.pod if pending is not None else self._bound.get(uid)

    def bound(self) -> Collection[str]:
        """The UIDs of all bound pods that request GPUs or hold them."""
        return self._bound.keys()

    def used_by(self, uid: str) -> PodUsage | None:
        """The pod's current usage by container and card; None when it is unknown. Read-only.

        A missing container and a None value mean unknown, not zero.
        """
        entry = self.ledger.entry(uid)
        usage = used_on(self.agents, entry.allocation.node) if entry is not None else None
        return usage.pods.get(uid) if usage is not None else None

    def bound_to(self, node: str) -> Collection[str]:
        return self._on_node.get(node, ())

    def starting(self, node: str, ignoring: str = "") -> str | None:
        """The UID of a pod that was bound to the node and that its kubelet has not admitted yet, if there is one."""
        uids = self._on_node.get(node, ())
        return next((uid for uid in uids if uid != ignoring and not self._bound[uid].is_admitted), None)

    def take_arrivals(self) -> list[PodRequest]:
        arrivals, self.arrivals = self.arrivals, []
        return arrivals

    def is_granted(self, uid: str) -> bool:
        """Whether the pod carries a valid grant."""
        pod = self._bound.get(uid)
        grant = self._grant(pod) if pod is not None else None
        return isinstance(grant, Grant) and grant == self._seen.get(uid, grant)

    def granted(self, pod: Pod, grant: Grant) -> list[Instruction]:
        """The leader has chosen cards for a pod that another scheduler bound; confirm them, even if not written yet."""
        self.ungranted.pop(pod.uid, None)
        return self.ledger.handle(Confirmed(allocation_of(pod, None, grant, pod.node_name)))

    def _read(self, pod: Pod) -> Allocation | None:
        """Update the caches with the pod; returns its allocation if it is bound."""
        if pod.is_terminal:
            self._forget_for_good(pod.uid)
            return None
        known, was_cpu_pod = self.pod(pod.uid), pod.uid in self.cpu_pods
        if not pod.node_name:
            if known is None or not is_same(known, pod):
                request = registry.read_pod(pod, self._resolved)
                self._forget(pod.uid)
            else:
                request = self.pending[pod.uid].request if pod.uid in self.pending else None
            if isinstance(request, PodRequest) and known is None:
                self.arrivals.append(request)
            if request is not None:
                self.pending[pod.uid] = UnboundPod(pod, request)
            elif self.tracks_cpu_pods:
                self._add_cpu_pod(pod, is_new=not was_cpu_pod)
            return None
        return self._update_bound(pod, known)

    def _add_cpu_pod(self, pod: Pod, *, is_new: bool) -> None:
        """A pod without GPUs uses CPU that GPU pods need, so the policy learns its arrival too."""
        request = self.cpu_pods[pod.uid] = cpu_request(pod)
        if is_new:
            self.arrivals.append(request)

    def _update_bound(self, pod: Pod, known: Pod | None) -> Allocation | None:
        entry = self.ledger.entry(pod.uid)
        same = known is not None and known.node_name and is_same(known, pod) and not self._has_started(known, pod)
        if same and entry is not None and entry.allocation.node == pod.node_name:
            if pod != known:  # otherwise keep the old object: a list repeats thousands, which would double the memory
                self._bound[pod.uid] = pod  # only its status changed
            return entry.allocation
        return self._read_bound(pod, known)

    def _has_started(self, known: Pod, pod: Pod) -> bool:
        """Whether an ungranted pod has just been admitted: only now is it known which agent allocated its devices."""
        return pod.uid in self.ungranted and pod.is_admitted and not known.is_admitted

    def settings_on(self, node: str) -> DialectSettings:
        """The settings, with gpushare's unit as this node counts it."""
        return records.settings_on(self.ledger.fleet.node(node), self._resolved)

    def _read_bound(self, pod: Pod, known: Pod | None) -> Allocation:
        entry = self.ledger.entry(pod.uid)
        is_new = known is None and entry is None and pod.uid not in self.cpu_pods
        self._forget(pod.uid)
        ledger_grant = self.grant_in_ledger(pod.uid, pod.node_name)
        carried = self._carried_grant(pod, self._seen.get(pod.uid))
        # The request of a known pod that carries its grant is not needed; that is the common case.
        request = registry.read_pod(pod, self.settings_on(pod.node_name)) if carried is None or known is None else None
        if request is not None or carried is not None or records.carries_record(pod, self._resolved):
            self._bound[pod.uid] = pod
            self._on_node.setdefault(pod.node_name, set()).add(pod.uid)
        if known is None and isinstance(request, PodRequest):
            self.arrivals.append(request)
        if self.tracks_cpu_pods and request is None and is_new:
            self.arrivals.append(cpu_request(pod))
        if carried is not None:
            self._seen[pod.uid] = carried
            self.newly_bound[pod.uid] = pod
        elif isinstance(request, PodRequest) and not self._has_cards_of_others(pod):
            self.ungranted[pod.uid] = pod
        if (
            entry is not None
            and ledger_grant is not None
            and known is not None
            and _is_as_in_ledger(known, pod, carried, ledger_grant)
        ):
            return entry.allocation  # the common case: the watch shows our own bind
        grant = carried or ledger_grant or self._grant_by_count(pod)
        return allocation_of(pod, None, grant, pod.node_name)

    def grant_in_ledger(self, uid: str, node: str) -> Grant | None:
        """The cards that the ledger has for the pod on this node, if it knows which they are."""
        entry = self.ledger.entry(uid)
        grant = entry.allocation.grant if entry is not None and entry.allocation.node == node else None
        return grant if grant is not None and grant.containers else None

    def _has_cards_of_others(self, pod: Pod) -> bool:
        """Whether the pod runs on cards of another system whose record is undecodable (now): a grant of ours would name
        other cards, and overwrite the record."""
        node = self.ledger.fleet.node(pod.node_name)
        if node is None or not pod.is_admitted or not records.carries_record(pod, self._resolved):
            return False
        return GRANT not in pod.annotations and records.served_by(pod, node) is records.GrantedBy.OTHERS

    def _grant_by_count(self, pod: Pod) -> Grant | None:
        return records.unplaced_grant(pod, self.ledger.fleet.node(pod.node_name), self._resolved)

    def _carried_grant(self, pod: Pod, before: Grant | None) -> Grant | None:
        """The grant that the pod carries, unless it was copied, or differs from the grant it carried before."""
        held = records.read_held(pod, self.ledger.fleet.node(pod.node_name), self._resolved)
        grant = held.grant
        if held.bad is not None:
            self.invalid_grants[pod.uid] = (pod, held.bad.message)
        if grant is not None and before not in (None, grant) and GRANT in pod.annotations:
            message = f"annotation `{GRANT}` was changed after the pod was bound; gputile restores it"
            self.invalid_grants[pod.uid] = (pod, message)
            return None
        if grant is not None:
            self._report_unknown_cards(pod, grant)
        return grant

    def _report_unknown_cards(self, pod: Pod, grant: Grant) -> None:
        """A grant may name a card that its node does not have (any more); the ledger cannot allocate it."""
        node = self.ledger.fleet.node(grant.node)
        known = {card.uuid for card in node.cards} if node is not None else set()
        unknown = sorted(set(grant.uses()) - known)
        if node is not None and unknown:
            message = f"the grant names GPUs that node {grant.node} does not have: {', '.join(unknown)}"
            self.invalid_grants[pod.uid] = (pod, message)

    def _grant(self, pod: Pod) -> Grant | BadRequest | None:
        return records.read_grant(pod, self.ledger.fleet.node(pod.node_name), self._resolved)

    def _forget(self, uid: str) -> None:
        self.pending.pop(uid, None)
        self.main_reasons.pop(uid, None)
        self.cpu_pods.pop(uid, None)
        self.ungranted.pop(uid, None)
        self.newly_bound.pop(uid, None)
        pod = self._bound.pop(uid, None)
        if pod is not None:
            on_node = self._on_node.get(pod.node_name, set())
            on_node.discard(uid)
            if not on_node:
                self._on_node.pop(pod.node_name, None)

    def _forget_for_good(self, uid: str) -> None:
        """The pod is gone: also forget the grants it carried."""
        self._forget(uid)
        self._seen.pop(uid, None)
        self.invalid_grants.pop(uid, None)

    # ---- nodes ------------------------------------------------------------------------------------------------------

    def nodes_listed(self, nodes: Iterable[NodeObject]) -> list[Instruction]:
        listed = list(nodes)
        done = self.only_nodes({node.name for node in listed})
        for node in listed:
            done += self.node_changed(node)
        return done

    def only_nodes(self, names: Collection[str]) -> list[Instruction]:
        """Remove all nodes except these."""
        return [instruction for name in self.nodes_except(names) for instruction in self.node_gone(name)]

    def nodes_except(self, names: Collection[str]) -> list[str]:
        """The known nodes that are not among these."""
        return [name for name in self.ledger.fleet.names() if name not in names]

    def node_changed(self, node: NodeObject, *, deleted: bool = False) -> list[Instruction]:
        if deleted:
            return self.node_gone(node.name)
        done = self._guess_unit(node)
        parsed = registry.read_node(node, self._resolved)
        if isinstance(parsed, BadRequest):
            return self.node_gone(node.name)
        guesses = registry.agent_guesses(parsed.agent) or parsed.one_at_a_time
        (self.guessing.add if guesses else self.guessing.discard)(parsed.name)
        before = self.ledger.fleet.node(parsed.name)
        done += self.ledger.handle(NodeSeen(self._with_agent_state(parsed)))
        if before is None or _record_context(before) != _record_context(parsed):
            done += self._read_grants_again(parsed)
        return done + self._read_orphans(node, parsed)

    def node_gone(self, name: str) -> list[Instruction]:
        self._nodes.pop(name, None)
        self.guessing.discard(name)
        return self.orphans.node_gone(name) + self.ledger.handle(NodeGone(name))

    def _read_orphans(self, node: NodeObject, parsed: Node) -> list[Instruction]:
        """The agent's report of orphaned containers. An undecodable report is ignored; the last valid report counts."""
        grants = registry.read_orphaned_pods(node, parsed.cards)
        if isinstance(grants, BadRequest):
            log.warning("ignoring invalid agent annotation", extra=fields(node=parsed.name, why=grants.message))
            return []
        return self.orphans.reported(parsed.name, grants, self.pending)

    # ---- agents -----------------------------------------------------------------------------------------------------

    def agents_changed(self, nodes: Iterable[str]) -> list[Instruction]:
        """The agents of these nodes became stale or alive, or their Leases were created or deleted."""
        known = [node for name in nodes if (node := self.ledger.fleet.node(name)) is not None]
        changed = [now for node in known if (now := self._with_agent_state(node)) is not node]
        return [instruction for node in changed for instruction in self.ledger.handle(NodeSeen(node))]

    def _with_agent_state(self, node: Node) -> Node:
        """The node, faulty while its agent, if it is ours, is stale. A fault of the node itself takes precedence."""
        if node.fault not in ("", NodeReason.AGENT_SILENT):
            return node
        is_stale = node.agent == gputile.NAME and self.agents.is_stale(node.name)
        fault = NodeReason.AGENT_SILENT if is_stale else ""
        return node if node.fault == fault else msgspec.structs.replace(node, fault=fault)

    def _read_grants_again(self, node: Node) -> list[Instruction]:
        """Records name cards by index, so they can only be read once the cards of the node are known."""
        done: list[Instruction] = []
        for uid in sorted(self._on_node.get(node.name, ())):
            pod = self._bound[uid]
            self._seen.pop(uid, None)  # the same record may name another card now
            done += self.ledger.handle(Confirmed(self._read_bound(pod, pod)))
        return done

    def _guess_unit(self, node: NodeObject) -> list[Instruction]:
        """Resolve gpushare's unit; if it changes, all pods are parsed again, because their amounts change."""
        if self._settings.gpushare_unit != "auto":
            return []
        self._nodes[node.name] = node
        before, self._resolved = self._resolved, gpushare.resolved(self._settings, self._nodes.values())
        if self._resolved == before:
            return []
        for uid, pending in list(self.pending.items()):
            request = registry.read_pod(pending.pod, self._resolved)
            if request is not None:
                self.pending[uid] = UnboundPod(pending.pod, request)
        known = [parsed for name in self._on_node if (parsed := self.ledger.fleet.node(name)) is not None]
        return [instruction for parsed in known for instruction in self._read_grants_again(parsed)]


def cpu_request(pod: Pod) -> PodRequest:
    """The request of a pod without GPUs: CPU and memory."""
    cpu, memory = host_needs(pod)
    return PodRequest(dialect="", asks=(), cpu=cpu, memory=memory)


def _record_context(node: Node) -> tuple[object, ...]:
    """The properties of a node that decide how the records of its pods are read."""
    return node.cards, node.agent, node.since, node.gpushare_unit


def is_same(before: Pod, after: Pod) -> bool:
    """Whether at most the status differs."""
    return before.spec == after.spec and before.annotations == after.annotations and before.labels == after.labels


def _is_as_in_ledger(known: Pod, pod: Pod, carried: Grant | None, in_ledger: Grant) -> bool:
    """Whether the ledger's allocation is that of the pod: the same cards, and the same CPU, memory and priority."""
    before, after = known.spec, pod.spec
    if before is None or after is None or carried not in (None, in_ledger):
        return False
    return (before.containers, before.init_containers, before.overhead, before.priority) == (
        after.containers,
        after.init_containers,
        after.overhead,
        after.priority,
    )
