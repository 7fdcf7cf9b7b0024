"""What our watch shows of the cluster, told to the book.

Room:  pods and nodes as the API server last showed them, and which of them the book must hear about. No I/O, no await.
Door:  `pods_listed`, `pod_changed`, `nodes_listed`, `node_changed`; each returns what the book wants done.

A pod counts from its binding until its containers are gone: a terminal phase or its removal, not the wish to delete it,
and if it was removed by force, until the node's agent has had time to say that they run on (`orphans`).
Whoever bound it, it is booked: by our grant, else by another system's record, else by the number of its GPUs where
another system's agent runs it. One that asks for cards and carries no grant or record is `ungranted`, and the leader's
to grant.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Set
from datetime import datetime

import msgspec

from gputile.dialects import gpushare, gputile, records, registry
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

GUESSING = frozenset({"gpushare", "vcuda", "hami", "vgpu"})
"""Dialects whose own agents find out by age, amount or a lock which pod an allocation is for."""


class UnboundPod(msgspec.Struct, frozen=True):
    """A pod without a node that asks for cards."""

    pod: Pod
    asked: PodRequest | BadRequest


class ClusterState:
    """See the module's text."""

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
        self.turned_away: dict[str, Pod] = {}  # pods with cards whose kubelet just failed them, for good
        self.waiting: dict[str, UnboundPod] = {}
        self.main_reasons: dict[str, NodeReason] = {}  # by waiting pod: why most nodes were last refused
        self.ungranted: dict[str, Pod] = {}
        self.suspects: dict[str, tuple[Pod, str]] = {}  # pods whose grant was copied or edited, and what is wrong
        self.fresh: dict[str, Pod] = {}  # bound pods with cards that were just seen so for the first time
        self.arrivals: list[PodRequest] = []  # what pods ask for that were just seen for the first time
        self.guessing: set[str] = set()  # nodes whose agent guesses
        self.keeps_plain = False  # whether pods without GPUs are our business too: see `steering`
        self.plain: dict[str, PodRequest] = {}  # pods without a node that ask for CPU or memory only, if they are
        self._settings = settings
        self._seen: dict[str, Grant] = {}  # the grants that pods were seen to carry
        self._bound: dict[str, Pod] = {}  # those that ask for cards
        self._on_node: dict[str, set[str]] = {}
        self._nodes: dict[str, NodeObject] = {}  # kept only to guess gpushare's unit
        self._resolved = settings
        self.uncounted: dict[str, str] = {}  # pods on which we failed, and their nodes
        self._moved: list[str] = []  # pods of lists that were booked anew, and not yet compared with others

    @property
    def settings(self) -> DialectSettings:
        """With gpushare's unit guessed from the nodes, if it is to be guessed."""
        return self._resolved

    # ---- pods -------------------------------------------------------------------------------------------------------

    def pods_listed(self, pods: Iterable[Pod], unreadable: Collection[str] = ()) -> list[Instruction]:
        """One list shows all pods: what it does not show is gone. What it shows and we cannot read (keys) stays.

        First all that is there, then what is gone, then what overlaps. So it can be done in slices: between two of them
        too much is held, and never too little, for who comes meanwhile may not have what a listed pod holds.
        """
        listed = list(pods)
        missing = self.unlisted({pod.uid for pod in listed}, unreadable)
        done = [one for pod in listed for one in self.relisted(pod)]
        done += [one for uid in missing for one in self.let_go(uid)]
        return done + [one for uid in self.take_moved() for one in self.ledger.handle(Compared(uid))]

    def unlisted(self, alive: Set[str], unreadable: Collection[str] = ()) -> list[str]:
        """The pods (UIDs) that we know and that a list, just read, does not show."""
        absent = (
            e.allocation
            for e in self.ledger.entries()
            if e.allocation.pod not in alive and e.state is AllocationState.CONFIRMED
        )
        gone = {allocation.pod: allocation.name for allocation in absent}
        memories = (self.waiting, self.plain, self._bound, self._seen, self.turned_away, self.uncounted)
        known = dict.fromkeys(uid for memory in memories for uid in sorted(memory.keys() - alive))
        return [uid for uid in {**known, **gone} if gone.get(uid) not in unreadable]

    def relisted(self, pod: Pod) -> list[Instruction]:
        """One pod of a list: as if the watch had shown it, but that nobody looks yet whom it overlaps."""
        if pod.is_terminal:
            known = self.ledger.entry(pod.uid) is not None or self.pod(pod.uid) is not None
            return self._over(pod) if known else self._forgotten(pod.uid)
        done = self.orphans.shown(pod.uid, pod.node_name)
        if self._opens(pod):
            done.append(Freed(pod.node_name))
        allocation, entry = self._see(pod), self.ledger.entry(pod.uid)
        if allocation is None or (
            entry is not None and entry.state is AllocationState.CONFIRMED and entry.allocation is allocation
        ):
            return done
        self._moved.append(pod.uid)
        return done + self.ledger.handle(Relisted(allocation))

    def let_go(self, uid: str) -> list[Instruction]:
        """A pod that a list does not show any more: how it went, the watch did not tell us."""
        self.turned_away.pop(uid, None)
        self._lost(uid)
        entry = self.ledger.entry(uid)
        confirmed = entry is not None and entry.state is AllocationState.CONFIRMED
        return self.orphans.vanished(uid) if confirmed else []

    def uncounted_unless(self, counted: bool, pod: Pod) -> None:
        """Whether what a pod on a node holds is known: if not even from before, the node takes no other."""
        if not counted and pod.node_name and not pod.is_terminal and self.ledger.entry(pod.uid) is None:
            self.uncounted[pod.uid] = pod.node_name
        else:
            self.uncounted.pop(pod.uid, None)

    def take_moved(self) -> list[str]:
        """The pods that lists showed with more, less or other than was booked; each is told once."""
        moved, self._moved = self._moved, []
        return moved

    def _forgotten(self, uid: str) -> list[Instruction]:
        self._lost(uid)
        return []

    def pod_changed(self, pod: Pod, *, deleted: bool = False) -> list[Instruction]:
        if pod.is_terminal:
            return self._over(pod, deleted=deleted)
        if deleted:
            self._lost(pod.uid)
            was_bound = pod.spec is None or bool(pod.node_name)  # one that could not be read says nothing
            return self.orphans.vanished(pod.uid) if was_bound else self.orphans.ended(pod.uid)
        done = self.orphans.shown(pod.uid, pod.node_name)
        if self._opens(pod):
            done.append(Freed(pod.node_name))
        allocation = self._see(pod)
        return done if allocation is None else done + self.ledger.handle(Confirmed(allocation))

    def _opens(self, pod: Pod) -> bool:
        """Whether its node, whose agent guesses, has now taken it in and may have the next one. Nobody else would say
        so: kube-scheduler tries no pod again because another one has started."""
        before = self._bound.get(pod.uid) if pod.node_name in self.guessing else None
        return before is not None and not before.is_admitted and pod.is_admitted

    def _over(self, pod: Pod, *, deleted: bool = False) -> list[Instruction]:
        """The pod has ended, and its containers with it."""
        if pod.rejected_by_kubelet and not deleted and self.pod(pod.uid) is not None:
            self.turned_away[pod.uid] = pod
        if deleted:
            self.turned_away.pop(pod.uid, None)
        self._lost(pod.uid)
        return self.orphans.ended(pod.uid)

    def vanished(self, uid: str) -> list[Instruction]:
        """A live look found no such pod, and our watch may be late."""
        return self.orphans.vanished(uid)

    def pod(self, uid: str) -> Pod | None:
        """A pod that asks for cards, as last seen."""
        waiting = self.waiting.get(uid)
        return waiting.pod if waiting is not None else self._bound.get(uid)

    def bound(self) -> Collection[str]:
        """The UIDs of all pods with a node that ask for cards or hold them."""
        return self._bound.keys()

    def used_by(self, uid: str) -> PodUsage | None:
        """By container and card what the pod uses now; None when nobody says. Not to be changed.

        A container that is not named, and a figure that is None, is not known: never take it for nothing.
        """
        entry = self.ledger.entry(uid)
        usage = used_on(self.agents, entry.allocation.node) if entry is not None else None
        return usage.pods.get(uid) if usage is not None else None

    def bound_to(self, node: str) -> Collection[str]:
        return self._on_node.get(node, ())

    def starting(self, node: str, but: str = "") -> str | None:
        """The UID of a pod that was bound to the node and that its kubelet has not taken in yet, if there is one."""
        found = self._on_node.get(node, ())
        return next((uid for uid in found if uid != but and not self._bound[uid].is_admitted), None)

    def take_arrivals(self) -> list[PodRequest]:
        taken, self.arrivals = self.arrivals, []
        return taken

    def is_granted(self, uid: str) -> bool:
        """Whether the pod carries a grant that is believed."""
        pod = self._bound.get(uid)
        found = self._grant(pod) if pod is not None else None
        return isinstance(found, Grant) and found == self._seen.get(uid, found)

    def granted(self, pod: Pod, grant: Grant) -> list[Instruction]:
        """The leader has chosen cards for a pod that was bound around us; book them, whether written yet or not."""
        self.ungranted.pop(pod.uid, None)
        return self.ledger.handle(Confirmed(_allocation(pod, grant)))

    def _see(self, pod: Pod) -> Allocation | None:
        """Sort the pod in; what it holds, if it has a node."""
        if pod.is_terminal:
            self._lost(pod.uid)
            return None
        known, was_plain = self.pod(pod.uid), pod.uid in self.plain
        if not pod.node_name:
            if known is None or not is_same(known, pod):
                asked = registry.read_pod(pod, self._resolved)
                self._forget(pod.uid)
            else:
                asked = self.waiting[pod.uid].asked if pod.uid in self.waiting else None
            if isinstance(asked, PodRequest) and known is None:
                self.arrivals.append(asked)
            if asked is not None:
                self.waiting[pod.uid] = UnboundPod(pod, asked)
            elif self.keeps_plain:
                self._see_plain(pod, is_new=not was_plain)
            return None
        return self._see_bound(pod, known)

    def _see_plain(self, pod: Pod, *, is_new: bool) -> None:
        """A pod without GPUs takes CPU that cards need; what arrives of these is learnt as well."""
        asked = self.plain[pod.uid] = plain_request(pod)
        if is_new:
            self.arrivals.append(asked)

    def _see_bound(self, pod: Pod, known: Pod | None) -> Allocation | None:
        entry = self.ledger.entry(pod.uid)
        same = known is not None and known.node_name and is_same(known, pod) and not self._has_started(known, pod)
        if same and entry is not None and entry.allocation.node == pod.node_name:
            if pod != known:  # else it is kept, for a list shows thousands again that take as much memory
                self._bound[pod.uid] = pod  # only its status changed
            return entry.allocation
        return self._read_bound(pod, known)

    def _has_started(self, known: Pod, pod: Pod) -> bool:
        """Whether a pod without a grant has just started: only now is it known under whose agent it did."""
        return pod.uid in self.ungranted and pod.is_admitted and not known.is_admitted

    def settings_on(self, node: str) -> DialectSettings:
        """The settings, with gpushare's unit as this node counts it."""
        return records.settings_on(self.ledger.fleet.node(node), self._resolved)

    def _read_bound(self, pod: Pod, known: Pod | None) -> Allocation:
        entry = self.ledger.entry(pod.uid)
        is_new = known is None and entry is None and pod.uid not in self.plain
        self._forget(pod.uid)
        booked = self.booked_grant(pod.uid, pod.node_name)
        shown = self._shown(pod, self._seen.get(pod.uid))
        # A pod that was seen before and shows its grant has nothing more to say; most have both.
        asked = registry.read_pod(pod, self.settings_on(pod.node_name)) if shown is None or known is None else None
        if asked is not None or shown is not None or records.carries_record(pod, self._resolved):
            self._bound[pod.uid] = pod
            self._on_node.setdefault(pod.node_name, set()).add(pod.uid)
        if known is None and isinstance(asked, PodRequest):
            self.arrivals.append(asked)
        if self.keeps_plain and asked is None and is_new:
            self.arrivals.append(plain_request(pod))
        if shown is not None:
            self._seen[pod.uid] = shown
            self.fresh[pod.uid] = pod
        elif isinstance(asked, PodRequest) and not self._has_cards_of_others(pod):
            self.ungranted[pod.uid] = pod
        if entry is not None and booked is not None and known is not None and _is_as_booked(known, pod, shown, booked):
            return entry.allocation  # the usual: our own bind comes back
        return _allocation(pod, shown or booked or self._by_number(pod))

    def booked_grant(self, uid: str, node: str) -> Grant | None:
        """The cards that the ledger has for the pod on this node, if it knows which they are."""
        entry = self.ledger.entry(uid)
        grant = entry.allocation.grant if entry is not None and entry.allocation.node == node else None
        return grant if grant is not None and grant.containers else None

    def _has_cards_of_others(self, pod: Pod) -> bool:
        """Whether it runs on cards that another system recorded in a way that we cannot read (now): a grant of ours
        would name others, and overwrite the record."""
        node = self.ledger.fleet.node(pod.node_name)
        if node is None or not pod.is_admitted or not records.carries_record(pod, self._resolved):
            return False
        return GRANT not in pod.annotations and records.served_by(pod, node) is records.GrantedBy.OTHERS

    def _by_number(self, pod: Pod) -> Grant | None:
        return records.unplaced_grant(pod, self.ledger.fleet.node(pod.node_name), self._resolved)

    def _shown(self, pod: Pod, before: Grant | None) -> Grant | None:
        """The grant that the pod carries, unless it was copied, or is another than it carried before."""
        held = records.read_held(pod, self.ledger.fleet.node(pod.node_name), self._resolved)
        found = held.grant
        if held.bad is not None:
            self.suspects[pod.uid] = (pod, held.bad.message)
        if found is not None and before not in (None, found) and GRANT in pod.annotations:
            why = f"annotation `{GRANT}` was changed after the pod was bound; it is set right again"
            self.suspects[pod.uid] = (pod, why)
            return None
        if found is not None:
            self._report_strange_cards(pod, found)
        return found

    def _report_strange_cards(self, pod: Pod, grant: Grant) -> None:
        """A grant may name a card that its node does not have (any more); the book cannot hold that for it."""
        node = self.ledger.fleet.node(grant.node)
        known = {card.uuid for card in node.cards} if node is not None else set()
        strange = sorted(set(grant.uses()) - known)
        if node is not None and strange:
            self.suspects[pod.uid] = (pod, f"its grant names cards that node {grant.node} lacks: {', '.join(strange)}")

    def _grant(self, pod: Pod) -> Grant | BadRequest | None:
        return records.read_grant(pod, self.ledger.fleet.node(pod.node_name), self._resolved)

    def _forget(self, uid: str) -> None:
        self.waiting.pop(uid, None)
        self.main_reasons.pop(uid, None)
        self.plain.pop(uid, None)
        self.ungranted.pop(uid, None)
        self.fresh.pop(uid, None)
        pod = self._bound.pop(uid, None)
        if pod is not None:
            there = self._on_node.get(pod.node_name, set())
            there.discard(uid)
            if not there:
                self._on_node.pop(pod.node_name, None)

    def _lost(self, uid: str) -> None:
        """The pod is gone for good."""
        self._forget(uid)
        self._seen.pop(uid, None)
        self.suspects.pop(uid, None)

    # ---- nodes ------------------------------------------------------------------------------------------------------

    def nodes_listed(self, nodes: Iterable[NodeObject]) -> list[Instruction]:
        found = list(nodes)
        done = self.only_nodes({node.name for node in found})
        for node in found:
            done += self.node_changed(node)
        return done

    def only_nodes(self, names: Collection[str]) -> list[Instruction]:
        """There are no others than these."""
        return [one for name in self.nodes_but(names) for one in self.node_gone(name)]

    def nodes_but(self, names: Collection[str]) -> list[str]:
        """The nodes that we know beside these."""
        return [name for name in self.ledger.fleet.names() if name not in names]

    def node_changed(self, node: NodeObject, *, deleted: bool = False) -> list[Instruction]:
        if deleted:
            return self.node_gone(node.name)
        done = self._guess_unit(node)
        read = registry.read_node(node, self._resolved)
        if isinstance(read, BadRequest):
            return self.node_gone(node.name)
        guesses = read.agent in GUESSING or read.one_at_a_time
        (self.guessing.add if guesses else self.guessing.discard)(read.name)
        before = self.ledger.fleet.node(read.name)
        done += self.ledger.handle(NodeSeen(self._judged(read)))
        if before is None or _tells_records(before) != _tells_records(read):
            done += self._read_grants_again(read)
        return done + self._linger(node, read)

    def node_gone(self, name: str) -> list[Instruction]:
        self._nodes.pop(name, None)
        self.guessing.discard(name)
        return self.orphans.node_gone(name) + self.ledger.handle(NodeGone(name))

    def _linger(self, node: NodeObject, read: Node) -> list[Instruction]:
        """What its agent says of pods that are gone. What cannot be read changes nothing; what it said before stays."""
        told = registry.read_orphaned_pods(node, read.cards)
        if isinstance(told, BadRequest):
            log.warning("an agent's word is passed over", extra=fields(node=read.name, why=told.message))
            return []
        return self.orphans.told(read.name, told, self.waiting)

    # ---- agents -----------------------------------------------------------------------------------------------------

    def agents_changed(self, nodes: Iterable[str]) -> list[Instruction]:
        """The agents of these nodes have fallen silent, spoken again, come or gone."""
        known = [node for name in nodes if (node := self.ledger.fleet.node(name)) is not None]
        turned = [judged for node in known if (judged := self._judged(node)) is not node]
        return [one for node in turned for one in self.ledger.handle(NodeSeen(node))]

    def _judged(self, node: Node) -> Node:
        """Out of use while its agent, if it is ours, is silent. What is wrong with the node itself counts first."""
        if node.fault not in ("", NodeReason.AGENT_SILENT):
            return node
        silent = node.agent == gputile.NAME and self.agents.is_stale(node.name)
        fault = NodeReason.AGENT_SILENT if silent else ""
        return node if node.fault == fault else msgspec.structs.replace(node, fault=fault)

    def _read_grants_again(self, node: Node) -> list[Instruction]:
        """Records that name cards by index mean something only once the cards are known."""
        done: list[Instruction] = []
        for uid in sorted(self._on_node.get(node.name, ())):
            pod = self._bound[uid]
            self._seen.pop(uid, None)  # the same record may name another card now
            done += self.ledger.handle(Confirmed(self._read_bound(pod, pod)))
        return done

    def _guess_unit(self, node: NodeObject) -> list[Instruction]:
        """With another unit every gpushare pod says something else."""
        if self._settings.gpushare_unit != "auto":
            return []
        self._nodes[node.name] = node
        before, self._resolved = self._resolved, gpushare.resolved(self._settings, self._nodes.values())
        if self._resolved == before:
            return []
        for uid, waiting in list(self.waiting.items()):
            asked = registry.read_pod(waiting.pod, self._resolved)
            if asked is not None:
                self.waiting[uid] = UnboundPod(waiting.pod, asked)
        known = [found for name in self._on_node if (found := self.ledger.fleet.node(name)) is not None]
        return [one for found in known for one in self._read_grants_again(found)]


def plain_request(pod: Pod) -> PodRequest:
    """What a pod without GPUs asks of its node."""
    cpu, memory = host_needs(pod)
    return PodRequest(dialect="", asks=(), cpu=cpu, memory=memory)


def _tells_records(node: Node) -> tuple[object, ...]:
    """What of a node decides how its pods' records are read."""
    return node.cards, node.agent, node.since, node.gpushare_unit


def is_same(before: Pod, after: Pod) -> bool:
    """Whether at most the status changed."""
    return before.spec == after.spec and before.annotations == after.annotations and before.labels == after.labels


def _is_as_booked(known: Pod, pod: Pod, shown: Grant | None, booked: Grant) -> bool:
    """Whether the pod holds what the book has of it: the same cards, and of the host what it wanted before."""
    before, after = known.spec, pod.spec
    if before is None or after is None or shown not in (None, booked):
        return False
    return (before.containers, before.init_containers, before.overhead, before.priority) == (
        after.containers,
        after.init_containers,
        after.overhead,
        after.priority,
    )


def _allocation(pod: Pod, grant: Grant | None) -> Allocation:
    cpu, memory = host_needs(pod)
    return Allocation(
        pod=pod.uid,
        node=pod.node_name,
        name=pod.key,
        grant=grant,
        cpu=cpu,
        memory=memory,
        priority=pod.priority,
        started=created(pod),
    )


def created(pod: Pod) -> float:
    """When the pod was made, in seconds since 1970; 0 when nobody says."""
    said = (pod.metadata and pod.metadata.creation_timestamp) or ""
    try:
        return datetime.fromisoformat(said).timestamp()
    except ValueError:
        return 0.0
