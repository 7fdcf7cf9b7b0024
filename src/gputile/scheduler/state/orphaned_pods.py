"""Tiles of pods that are gone from the API server while their containers may still run.

Room:  which entries of the book belong to no pod any more, why they are kept, and until when. No I/O.
Door:  `vanished` and `ended` take a pod's end; `told` takes what an agent says; `tick` lets go.

            the pod ends: terminal phase, or never bound
    shown ------------------------------------------------------> gone
      |                                                             ^
      | vanishes: deleted by force,                                 | the agent renews its Lease `agents.orphan_grace`
      | or missing in a list                                        | seconds later, and has not named it
      v                                                             |
    doubtful -------------------------------------------------------+
      |                                                             ^
      | the agent names it in gputile.io/orphaned                  | the agent names it no more, or the node goes
      v                                                             |
    lingering ------------------------------------------------------+

A kubelet that ends a pod writes a terminal phase before the object goes. An object that vanishes without one was
deleted by force, and nothing says that its containers are gone. The agent of its node will: it compares what runs with
the pods of the API server, and names on its node those that run without one. That takes a moment, in which the tile
must not be sold. So where an agent of ours has the node (it keeps a Lease), the tile is kept for `agents.orphan_grace`
seconds, and then until the agent renews its Lease: an agent that is alive has looked by then. One that is not has not,
and no time frees the tile; and what we could not have heard, with a watch of ours that is broken, does not count.

A kept tile belongs to nobody who could be evicted, and takes no CPU: kube-scheduler does not count that either.
docs/decisions/0014-force-deleted-pods.md has the reasons.
"""

import logging
import math
from collections.abc import Callable, Container, Iterable

import msgspec

from gputile.dialects import gputile
from gputile.ledger.events import Confirmed, Freed, Instruction, PodGone
from gputile.ledger.ledger import AllocationState, Ledger
from gputile.model.allocations import Allocation
from gputile.model.grants import Grant
from gputile.scheduler.state.agent_liveness import AgentLiveness
from gputile.telemetry.logs import fields

log = logging.getLogger(__name__)

NOBODYS = 2**31 - 1
"""The priority of a tile that nobody can be evicted from."""

SETTLE = 1.0  # seconds; the renewal and what the agent wrote before it come over two watches


class VanishedPod(msgspec.Struct):
    """Whether an agent will name a pod that has vanished."""

    until: float  # it has time to do so
    proven: float = math.inf  # since when we know that it was alive then


class OrphanTracker:
    """See the module's text."""

    def __init__(self, ledger: Ledger, agents: AgentLiveness, seconds: float, clock: Callable[[], float]) -> None:
        self._ledger, self._agents, self._seconds, self._clock = ledger, agents, seconds, clock
        self._named: dict[str, dict[str, Grant]] = {}  # by node: what its agent says, by UID
        self._kept: dict[
            str, VanishedPod | None
        ] = {}  # by UID; None: while it is named. The book has an entry for each

    def __contains__(self, uid: str) -> bool:
        return uid in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def allocations(self) -> list[Allocation]:
        """What is kept; no list of pods will ever show it."""
        return [entry.allocation for uid in self._kept if (entry := self._ledger.entry(uid)) is not None]

    # ---- pods -------------------------------------------------------------------------------------------------------

    def shown(self, uid: str, node: str) -> list[Instruction]:
        """The pod is there after all: on its node it counts by itself, and without one nothing of it can run."""
        if uid not in self._kept:
            return []
        if not node:
            return self._let_go(uid)
        del self._kept[uid]
        return []

    def ended(self, uid: str) -> list[Instruction]:
        """The pod's containers are gone, or never were; only the node's agent may say otherwise."""
        entry = self._ledger.entry(uid)
        if entry is not None and uid in self._named.get(entry.allocation.node, ()):
            return self._keep(entry.allocation, None)
        return self._let_go(uid)

    def vanished(self, uid: str) -> list[Instruction]:
        """The pod is gone, and nobody has said that its containers are."""
        entry = self._ledger.entry(uid)
        if entry is None or entry.state is AllocationState.RESERVED or not entry.allocation.uses():
            return self._let_go(uid)
        allocation = entry.allocation
        if uid in self._named.get(allocation.node, ()):
            return self._keep(allocation, None)
        if uid in self._kept:
            return []
        if not self._has_agent(allocation.node):
            return self._let_go(uid)
        extra = fields(pod=allocation.name, uid=uid, node=allocation.node, seconds=self._seconds)
        log.warning("deleted by force; its tile is kept until the node's agent has spoken", extra=extra)
        return self._keep(allocation, VanishedPod(self._clock() + self._seconds))

    def _has_agent(self, name: str) -> bool:
        node = self._ledger.fleet.node(name)
        return node is not None and node.agent in (gputile.NAME, "") and name in self._agents

    def _keep(self, allocation: Allocation, doubt: VanishedPod | None) -> list[Instruction]:
        self._kept[allocation.pod] = doubt
        nobodys = msgspec.structs.replace(allocation, cpu=0, memory=0, priority=NOBODYS)
        if nobodys == allocation:
            return []
        return [*self._ledger.handle(Confirmed(nobodys)), Freed(allocation.node)]  # its CPU is free

    def _let_go(self, uid: str) -> list[Instruction]:
        self._kept.pop(uid, None)
        return self._ledger.handle(PodGone(uid))

    # ---- nodes ------------------------------------------------------------------------------------------------------

    def told(self, node: str, grants: Iterable[Grant], waiting: Container[str]) -> list[Instruction]:
        """What the node's agent says, all of it; nobody believes it of pods that wait."""
        named = {grant.pod: grant for grant in grants}
        before = self._named.get(node, {})
        if named == before:
            return []
        self._name(node, named)
        done: list[Instruction] = []
        for uid in before.keys() - named.keys():
            if uid in self._kept and self._is_on(uid, node):
                log.info("the containers of a deleted pod are gone", extra=fields(uid=uid, node=node))
                done += self._let_go(uid)
        for uid, grant in named.items():
            if before.get(uid) != grant and uid not in waiting:
                done += self._take_word(uid, grant)
        return done

    def _name(self, node: str, named: dict[str, Grant]) -> None:
        self._named[node] = named
        if not named:
            del self._named[node]

    def _take_word(self, uid: str, grant: Grant) -> list[Instruction]:
        """What the pod's own grant said, if we have seen it, counts more than what its node says of it."""
        entry = self._ledger.entry(uid)
        if entry is None:
            log.warning("containers of a deleted pod still run", extra=fields(uid=uid, node=grant.node))
            return self._keep(Allocation(pod=uid, node=grant.node, name=f"(deleted)/{uid}", grant=grant), None)
        if uid in self._kept and entry.allocation.node == grant.node:
            self._kept[uid] = None
        return []  # else the cluster still shows the pod: it counts by itself, and we look here when it goes

    def node_gone(self, node: str) -> list[Instruction]:
        self._named.pop(node, None)
        return [one for uid in list(self._kept) if self._is_on(uid, node) for one in self._let_go(uid)]

    def _is_on(self, uid: str, node: str) -> bool:
        entry = self._ledger.entry(uid)
        return entry is not None and entry.allocation.node == node

    # ---- time -------------------------------------------------------------------------------------------------------

    def tick(self, *, blind: bool = False) -> list[Instruction]:
        """Let go of those whom their agents could have named, and have not. `blind`: we may not have heard it."""
        return [one for uid in self.kept() for one in self.look_at(uid, blind=blind)]

    def kept(self) -> list[str]:
        return list(self._kept)

    def look_at(self, uid: str, *, blind: bool = False) -> list[Instruction]:
        """The same for one of those who are kept."""
        now, doubt, entry = self._clock(), self._kept.get(uid), self._ledger.entry(uid)
        if doubt is None or entry is None:
            return []
        if blind or self._agents.is_disconnected:
            self._kept[uid] = VanishedPod(now + self._seconds)
            return []
        return self._let_go(uid) if self._is_over(doubt, entry.allocation.node, now) else []

    def _is_over(self, doubt: VanishedPod, node: str, now: float) -> bool:
        if node not in self._agents:  # it has none any more, and nobody will name anything
            return now >= doubt.until
        if doubt.proven == math.inf and self._agents.renewed(node) >= doubt.until:
            doubt.proven = now
        return now >= doubt.proven + SETTLE
