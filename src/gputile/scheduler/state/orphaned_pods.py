"""Tiles of pods that are gone from the API server while their containers may still run: which are kept, and until when.

No I/O. `vanished` and `ended` record the end of a pod, `reported` records what an agent reports, `tick` frees tiles.

            the pod ends: terminal phase, or never bound
    shown ------------------------------------------------------> gone
      |                                                             ^
      | vanishes: deleted by force,                                 | the agent renews its Lease `agents.orphan_grace`
      | or missing in a list                                        | seconds later, and has not reported the pod
      v                                                             |
    vanished -------------------------------------------------------+
      |                                                             ^
      | the agent reports it in gputile.io/orphaned                 | it is reported no longer, or the node is gone
      v                                                             |
    orphaned -------------------------------------------------------+

A kubelet that ends a pod writes a terminal phase before the object is deleted. An object that vanishes without one was
deleted by force, and its containers may still run. The agent of the node finds out: it compares the running containers
with the pods of the API server, and reports on its node those without a pod. That takes a moment, in which the tile
must not be allocated again. So where an agent of ours has the node (it keeps a Lease), the tile is kept for
`agents.orphan_grace` seconds, and then until the agent renews its Lease: an agent that is alive has compared by then. A
stale agent has not, so no time frees the tile; and while our own watch is broken, no time counts.

A kept tile belongs to no pod that could be evicted, and holds no CPU: kube-scheduler does not count that either.
docs/decisions/0014-force-deleted-pods.md has the reasons.
"""

import logging
import math
from collections.abc import Callable, Container, Iterable

import msgspec

from gputile.dialects import gputile
from gputile.dialects.allocations import allocation_of_deleted_pod
from gputile.ledger.events import Confirmed, Freed, Instruction, PodGone
from gputile.ledger.ledger import AllocationState, Ledger
from gputile.model.allocations import Allocation
from gputile.model.grants import Grant
from gputile.scheduler.state.agent_liveness import AgentLiveness
from gputile.telemetry.logs import fields

log = logging.getLogger(__name__)

NEVER_PREEMPTED = 2**31 - 1
"""The priority of a kept tile: it has no pod that could be evicted."""

SETTLE = 1.0  # seconds; the renewal and the report that the agent wrote before it arrive over two watches


class VanishedPod(msgspec.Struct):
    """A pod that vanished, and whose agent may still report its containers."""

    until: float  # the agent has time to report it
    proven: float = math.inf  # since when we know that the agent was alive after that time


class OrphanTracker:
    """The tiles that are kept for pods without an object in the API server; the ledger has an entry for each."""

    def __init__(self, ledger: Ledger, agents: AgentLiveness, seconds: float, clock: Callable[[], float]) -> None:
        self._ledger, self._agents, self._seconds, self._clock = ledger, agents, seconds, clock
        self._reported: dict[str, dict[str, Grant]] = {}  # by node: the report of its agent, by UID
        self._kept: dict[str, VanishedPod | None] = {}  # by UID; None: the agent reports it

    def __contains__(self, uid: str) -> bool:
        return uid in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def allocations(self) -> list[Allocation]:
        """The kept allocations; no list of pods will ever show them."""
        return [entry.allocation for uid in self._kept if (entry := self._ledger.entry(uid)) is not None]

    # ---- pods -------------------------------------------------------------------------------------------------------

    def pod_seen(self, uid: str, node: str) -> list[Instruction]:
        """The pod exists after all: with a node it counts by itself, and unbound none of its containers can run."""
        if uid not in self._kept:
            return []
        if not node:
            return self._free(uid)
        del self._kept[uid]
        return []

    def ended(self, uid: str) -> list[Instruction]:
        """The pod's containers are gone, or never ran, unless the node's agent reports them."""
        entry = self._ledger.entry(uid)
        if entry is not None and uid in self._reported.get(entry.allocation.node, ()):
            return self._keep(entry.allocation, None)
        return self._free(uid)

    def vanished(self, uid: str) -> list[Instruction]:
        """The pod's object is gone, and it is unknown whether its containers are."""
        entry = self._ledger.entry(uid)
        if entry is None or entry.state is AllocationState.RESERVED or not entry.allocation.uses():
            return self._free(uid)
        allocation = entry.allocation
        if uid in self._reported.get(allocation.node, ()):
            return self._keep(allocation, None)
        if uid in self._kept:
            return []
        if not self._has_agent(allocation.node):
            return self._free(uid)
        extra = fields(pod=allocation.name, uid=uid, node=allocation.node, seconds=self._seconds)
        log.warning("pod was force-deleted; its GPU share is kept until the node's agent has reported", extra=extra)
        return self._keep(allocation, VanishedPod(self._clock() + self._seconds))

    def _has_agent(self, name: str) -> bool:
        node = self._ledger.fleet.node(name)
        return node is not None and node.agent in (gputile.NAME, "") and name in self._agents

    def _keep(self, allocation: Allocation, vanished: VanishedPod | None) -> list[Instruction]:
        self._kept[allocation.pod] = vanished
        kept = msgspec.structs.replace(allocation, cpu=0, memory=0, priority=NEVER_PREEMPTED)
        if kept == allocation:
            return []
        return [*self._ledger.handle(Confirmed(kept)), Freed(allocation.node)]  # its CPU is free

    def _free(self, uid: str) -> list[Instruction]:
        self._kept.pop(uid, None)
        return self._ledger.handle(PodGone(uid))

    # ---- nodes ------------------------------------------------------------------------------------------------------

    def reported(self, node: str, grants: Iterable[Grant], pending: Container[str]) -> list[Instruction]:
        """The complete report of the node's agent; entries for pending pods are ignored."""
        report = {grant.pod: grant for grant in grants}
        before = self._reported.get(node, {})
        if report == before:
            return []
        self._store_report(node, report)
        done: list[Instruction] = []
        for uid in before.keys() - report.keys():
            if uid in self._kept and self._is_on(uid, node):
                log.info("orphaned containers of a deleted pod are gone", extra=fields(uid=uid, node=node))
                done += self._free(uid)
        for uid, grant in report.items():
            if before.get(uid) != grant and uid not in pending:
                done += self._adopt(uid, grant)
        return done

    def _store_report(self, node: str, report: dict[str, Grant]) -> None:
        self._reported[node] = report
        if not report:
            del self._reported[node]

    def _adopt(self, uid: str, grant: Grant) -> list[Instruction]:
        """Keep a reported tile. The pod's own grant, if we have seen it, takes precedence over the report."""
        entry = self._ledger.entry(uid)
        if entry is None:
            log.warning("orphaned containers of a deleted pod still run", extra=fields(uid=uid, node=grant.node))
            return self._keep(allocation_of_deleted_pod(grant), None)
        if uid in self._kept and entry.allocation.node == grant.node:
            self._kept[uid] = None
        return []  # otherwise the cluster still shows the pod: it counts by itself, and the report counts when it goes

    def node_gone(self, node: str) -> list[Instruction]:
        self._reported.pop(node, None)
        on_node = [uid for uid in self._kept if self._is_on(uid, node)]
        return [instruction for uid in on_node for instruction in self._free(uid)]

    def _is_on(self, uid: str, node: str) -> bool:
        entry = self._ledger.entry(uid)
        return entry is not None and entry.allocation.node == node

    # ---- time -------------------------------------------------------------------------------------------------------

    def tick(self, *, is_disconnected: bool = False) -> list[Instruction]:
        """Free the tiles that agents could have reported and have not. `is_disconnected`: a watch is broken."""
        return [instruction for uid in self.kept() for instruction in self.check(uid, is_disconnected=is_disconnected)]

    def kept(self) -> list[str]:
        return list(self._kept)

    def check(self, uid: str, *, is_disconnected: bool = False) -> list[Instruction]:
        """The same for one kept tile."""
        now, vanished, entry = self._clock(), self._kept.get(uid), self._ledger.entry(uid)
        if vanished is None or entry is None:
            return []
        if is_disconnected or self._agents.is_disconnected:
            self._kept[uid] = VanishedPod(now + self._seconds)
            return []
        return self._free(uid) if self._is_over(vanished, entry.allocation.node, now) else []

    def _is_over(self, vanished: VanishedPod, node: str, now: float) -> bool:
        if node not in self._agents:  # the node has no agent any more that could report
            return now >= vanished.until
        if vanished.proven == math.inf and self._agents.renewed(node) >= vanished.until:
            vanished.proven = now
        return now >= vanished.proven + SETTLE
