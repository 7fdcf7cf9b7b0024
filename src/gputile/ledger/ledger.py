"""The ledger: events in, instructions out.

                 +---- Unreserved, PodGone, Tick past its deadline ----+
                 |                                                     v
    unknown --Reserved--> reserved --Assumed--> assumed            unknown
       |                                        |     |                ^
       |                                 Confirmed   Forgotten, PodGone
       |                                        v                      ^
       +-----Confirmed, PodsListed--------> confirmed ----PodGone------+

A reservation holds tiles between filter and bind. An assumed bind may have reached the API server, so it never expires
by itself; past its deadline the ledger returns `VerifyBind`. A nomination keeps capacity for a pod that preempted
others. It holds while the pod has no entry, and ends when the pod is confirmed or gone, when it is withdrawn, or at its
deadline. Pods of higher priority may use the nominated capacity.

The state of the cluster always wins: a confirmed pod removes reservations from its cards, and remaining overlaps are
reported.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import StrEnum
from functools import reduce
from operator import sub

import msgspec

from gputile.engine.fleet.fleet import Fleet
from gputile.engine.fleet.overlay import FleetOverlay
from gputile.engine.victims import Victim
from gputile.ledger.events import (
    Assumed,
    Compared,
    Confirmed,
    Conflict,
    Corrected,
    Denied,
    Event,
    Forgotten,
    Freed,
    Instruction,
    NodeGone,
    NodeSeen,
    Nominated,
    PodGone,
    PodsListed,
    QuotasSet,
    Relisted,
    Reserved,
    Tick,
    Unreserved,
    VerifyBind,
    Withdrawn,
)
from gputile.ledger.unplaced import UnplacedAllocations
from gputile.model.allocations import Allocation
from gputile.model.cards import NOTHING, FreeCapacity, Node, NodeView, Use
from gputile.model.errors import Overcommitted
from gputile.model.grants import Grant
from gputile.quota.usage import QuotaUsage


class LedgerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the ledger."""

    reserve_ttl: float = 2.0
    """Seconds for which tiles stay reserved between filter and bind."""

    assume_ttl: float = 65.0
    """Seconds after which an unconfirmed bind is looked up. Longer than the request timeout of the API server (60)."""

    history: int = 2000
    """How many events are kept for the history in an alarm."""


class AllocationState(StrEnum):
    """How far a pod's allocation has come, from filter to the running pod."""

    RESERVED = "reserved"
    ASSUMED = "assumed"
    CONFIRMED = "confirmed"


class LedgerEntry(msgspec.Struct, frozen=True):
    """A pod in the ledger: its state and what it holds."""

    state: AllocationState
    allocation: Allocation
    deadline: float = float("inf")


class Ledger:
    """Which pod holds which tiles; the state diagram is at the top of this module."""

    def __init__(self, settings: LedgerSettings | None = None) -> None:
        self.fleet = Fleet()
        self.quota_usage = QuotaUsage(self.fleet)
        self._unplaced = UnplacedAllocations(self.fleet)
        self._settings = settings or LedgerSettings()
        self._entries: dict[str, LedgerEntry] = {}
        self._in_flight: set[str] = set()  # reserved or assumed: few, and checked on every tick
        self._reservations = 0  # how many of them are reserved
        self._on_node: dict[str, set[str]] = {}  # UIDs with an entry or an open nomination there
        self._nominations: dict[str, Nominated] = {}
        self._priorities: Counter[int] = Counter()  # of pods with a grant
        self._disputed: set[str] = set()  # cards on which the cluster shows more than they have
        self._history: deque[Event] = deque(maxlen=self._settings.history)

    # ---- reading ----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many pods are in the ledger."""
        return len(self._entries)

    def entry(self, pod: str) -> LedgerEntry | None:
        return self._entries.get(pod)

    def entries(self) -> Iterable[LedgerEntry]:
        return self._entries.values()

    def nomination(self, pod: str) -> Nominated | None:
        return self._nominations.get(pod)

    def nominations(self) -> list[Nominated]:
        """All open and closed nominations."""
        return list(self._nominations.values())

    def lowest_priority(self) -> int | None:
        """The lowest priority of all pods that hold cards; None when there are none."""
        return min(self._priorities, default=None)

    def overcommitted(self, pod: str) -> list[str]:
        """The cards of a pod that are overcommitted."""
        entry = self._entries.get(pod)
        return self._overcommitted(entry.allocation) if entry is not None else []

    def reservations(self) -> int:
        """How many pods are between filter and bind."""
        return self._reservations

    def in_flight(self) -> list[LedgerEntry]:
        """Pods between filter and the confirmation of their bind."""
        return [self._entries[pod] for pod in self._in_flight]

    def on_node(self, node: str) -> list[LedgerEntry]:
        """Every entry on a node, in the order of their UIDs."""
        return [self._entries[pod] for pod in sorted(self._on_node.get(node, ())) if pod in self._entries]

    def holders(self, node: str) -> list[Victim]:
        """The pods on a node, for preemption and explanation."""
        return [Victim.of(entry.allocation) for entry in self.on_node(node)]

    def ignored_by(self, pod: str, priority: int | None = None) -> dict[str, Allocation]:
        """By pod, the claims that this pod may ignore: its own reservation or nomination, and the nominations of pods
        below `priority`."""
        lower = [a for a in self._open_nominations() if a.priority < priority] if priority is not None else []
        own = [a for a in (self._reservation(pod), self._open_nomination(pod)) if a is not None]
        return {claim.pod: claim for claim in (*own, *lower)}

    def fleet_for(self, pod: str, priority: int | None = None) -> Fleet:
        """The fleet without what this pod may ignore: these claims, and the capacity withheld for its own unplaced
        GPUs. To be read only, and until the ledger changes."""
        return self._fleet_without(self.ignored_by(pod, priority).values(), pod)

    def _fleet_without(self, claims: Collection[Allocation], placing: str = "") -> Fleet:
        """The fleet without these claims, and without the capacity withheld for unplaced GPUs of the pod `placing`."""
        entry = self._entries.get(placing)
        unplaced = {entry.allocation.node} if entry is not None and entry.allocation.unplaced else set()
        names = [name for name in sorted({claim.node for claim in claims} | unplaced) if name in self.fleet]
        if not names:
            return self.fleet
        part = self.fleet.part(names)
        for node in unplaced.intersection(names):
            self._unplaced.keep_others(part, node, placing)
        for claim in claims:
            part.release(claim.node, claim.uses(), claim.cpu, claim.memory)
        return FleetOverlay(self.fleet, part)

    def _reservation(self, pod: str) -> Allocation | None:
        entry = self._entries.get(pod)
        return entry.allocation if entry is not None and entry.state is AllocationState.RESERVED else None

    def _open_nomination(self, pod: str) -> Allocation | None:
        """The nomination, while it is what holds the capacity."""
        nominated = self._nominations.get(pod)
        return nominated.allocation if nominated is not None and pod not in self._entries else None

    def _open_nominations(self) -> list[Allocation]:
        return [nominated.allocation for pod, nominated in self._nominations.items() if pod not in self._entries]

    # ---- events -----------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Instruction]:
        """Apply an event; the caller carries out the returned instructions."""
        self._history.append(event)
        match event:
            case NodeSeen(node):
                return self._node_seen(node)
            case NodeGone(name):
                return self._node_gone(name)
            case Reserved(allocation, at):
                return self._write(AllocationState.RESERVED, allocation, at + self._settings.reserve_ttl)
            case Unreserved(pod):
                return self._drop(pod, AllocationState.RESERVED)
            case Assumed(allocation, at):
                return self._write(AllocationState.ASSUMED, allocation, at + self._settings.assume_ttl)
            case Forgotten(pod):
                return self._drop(pod, AllocationState.ASSUMED)
            case Confirmed(allocation):
                return self._confirm(allocation)
            case Relisted(allocation):
                return [] if self._is_confirmed(allocation) else self._relist(allocation)
            case Compared(pod):
                return self._conflicts(self._entries[pod].allocation) if pod in self._entries else []
            case Corrected(pod, grant):
                return self._correct(pod, grant)
            case PodGone(pod):
                return self._gone(pod)
            case Nominated(allocation, until):
                return self._nominate(allocation, until)
            case Withdrawn(pod):
                nominated = self._end_nomination(pod)
                return [] if nominated is None else [Freed(nominated.allocation.node)]
            case PodsListed(allocations):
                return self._listed(allocations)
            case QuotasSet(quotas):
                self.quota_usage.set(quotas, self._allocations())
                return [Freed("")]
            case Tick(now):
                return self._tick(now)

    def _node_seen(self, node: Node) -> list[Instruction]:
        if self.fleet.node(node.name) == node:
            return []
        self.fleet.set_node(node)
        for pod in self._on_node.get(node.name, ()):
            self._hold_again(pod)
        self._unplaced.keep(node.name)
        return [*self._shrunk(node), Freed(node.name)]

    def _shrunk(self, node: Node) -> list[Instruction]:
        """A card is now smaller than what pods hold of it: drop reservations, and report the newest pod."""
        done: list[Instruction] = []
        holders = sorted(self.holders(node.name), key=lambda holder: (holder.started, holder.pod), reverse=True)
        for holder in holders:
            if self._overcommitted(self._entries[holder.pod].allocation):
                done += self._drop(holder.pod, AllocationState.RESERVED)
        for holder in holders:
            entry = self._entries.get(holder.pod)
            cards = self._overcommitted(entry.allocation) if entry is not None else []
            new = [card for card in cards if card not in self._disputed]
            if new:
                done.append(Conflict(holder.pod, node.name, tuple(new), shrunk=True))
            self._disputed.update(cards)
        return done

    def _hold_again(self, pod: str) -> None:
        entry = self._entries.get(pod)
        allocation = entry.allocation if entry is not None else self._open_nomination(pod)
        if allocation is not None:
            self._hold(allocation)

    def _allocations(self) -> list[Allocation]:
        """Everything that holds capacity: entries, and nominations of pods without an entry."""
        return [*(entry.allocation for entry in self._entries.values()), *self._open_nominations()]

    def _node_gone(self, name: str) -> list[Instruction]:
        """Pods stay in the ledger until the cluster reports them gone; the node may come back."""
        self.fleet.remove_node(name)
        for pod in list(self._on_node.get(name, ())):
            self._drop(pod, AllocationState.RESERVED)
        return []

    def _write(self, state: AllocationState, allocation: Allocation, deadline: float) -> list[Instruction]:
        """Reserve or assume, if the tiles are free for this pod."""
        pod = allocation.pod
        entry = self._entries.get(pod)
        if entry is not None and entry.state is not AllocationState.RESERVED:
            repeated = state is AllocationState.ASSUMED and entry.state is state and entry.allocation == allocation
            return [] if repeated else [Denied(pod, f"the pod is {entry.state} on {entry.allocation.node}")]
        short = [] if self._is_held(pod, allocation) else self._short_for(pod, allocation)
        if short:
            return [Denied(pod, f"too little free capacity on {', '.join(short)} of node {allocation.node}")]
        over = self.beyond_quota(allocation)
        if over:
            return [Denied(pod, over, beyond_quota=True)]
        self._replace(pod, LedgerEntry(state, allocation, deadline))
        return []

    def _short_for(self, pod: str, allocation: Allocation) -> list[str]:
        ignored = self.ignored_by(pod, allocation.priority).values()
        fleet = self._fleet_without([claim for claim in ignored if claim.node == allocation.node], pod)
        return cards_failing(fleet, allocation, Use.fits)

    def beyond_quota(self, allocation: Allocation) -> str:
        """Why the quota of the pod's namespace forbids this allocation; "" when it allows it. What the pod holds
        already and the nominations of lower-priority pods are ignored."""
        if not self.quota_usage.quotas or allocation.grant is None:
            return ""
        return self.quota_usage.objection(allocation, ignoring=self.ignored_by(allocation.pod, allocation.priority))

    def _is_held(self, pod: str, allocation: Allocation) -> bool:
        """Whether exactly this is held for the pod: from reserved to assumed to confirmed the cards stay the same."""
        entry = self._entries.get(pod)
        return entry is not None and entry.allocation == allocation

    def _drop(self, pod: str, state: AllocationState) -> list[Instruction]:
        """Remove the entry if it is in this state: the end of an earlier state does not undo a later one."""
        entry = self._entries.get(pod)
        if entry is None or entry.state is not state:
            return []
        self._replace(pod, None)
        return [Freed(entry.allocation.node)]

    def _confirm(self, allocation: Allocation) -> list[Instruction]:
        if self._is_confirmed(allocation):
            return []
        return self._set_confirmed(allocation) + self._conflicts(allocation)

    def _is_confirmed(self, allocation: Allocation) -> bool:
        before = self._entries.get(allocation.pod)
        return before is not None and before.state is AllocationState.CONFIRMED and before.allocation == allocation

    def _set_confirmed(self, allocation: Allocation) -> list[Instruction]:
        self._end_nomination(allocation.pod)
        before = self._entries.get(allocation.pod)
        self._replace(allocation.pod, LedgerEntry(AllocationState.CONFIRMED, allocation))
        if before is None or _extent(before.allocation) == _extent(allocation):
            return []
        return [Freed(before.allocation.node)]

    def _relist(self, allocation: Allocation) -> list[Instruction]:
        """One pod of a list. Overlaps are checked when the list is complete (`Compared`), because pods may have changed
        places. Until then an overlap is disputed, and `check` raises no alarm."""
        done = self._set_confirmed(allocation)
        self._disputed.update(self._overcommitted(allocation))
        return done

    def _conflicts(self, allocation: Allocation) -> list[Instruction]:
        """Drop the reservations on the cards of a confirmed pod; report the overlaps that remain."""
        if not self._overcommitted(allocation):
            return []
        for pod in sorted(self._on_node[allocation.node]):
            reservation = self._reservation(pod)
            if reservation is not None and reservation.uses().keys() & set(self._overcommitted(allocation)):
                self._drop(pod, AllocationState.RESERVED)
        cards = self._overcommitted(allocation)
        self._disputed.update(cards)
        return [Conflict(allocation.pod, allocation.node, tuple(cards))] if cards else []

    def _overcommitted(self, allocation: Allocation) -> list[str]:
        """The overcommitted cards of this pod; nominations do not count."""
        if allocation.node not in self.fleet:
            return []
        nominated = [a for a in self._open_nominations() if a.node == allocation.node]
        return cards_failing(self._fleet_without(nominated), allocation, not_overcommitted)

    def _correct(self, pod: str, grant: Grant) -> list[Instruction]:
        entry = self._entries.get(pod)
        if entry is None or entry.state is not AllocationState.CONFIRMED:
            return []
        return self._confirm(msgspec.structs.replace(entry.allocation, grant=grant, node=grant.node))

    def _gone(self, pod: str) -> list[Instruction]:
        nominated = self._end_nomination(pod)
        entry = self._entries.get(pod)
        if entry is not None:
            self._replace(pod, None)
            return [Freed(entry.allocation.node)]
        return [Freed(nominated.allocation.node)] if nominated is not None else []

    def _nominate(self, allocation: Allocation, until: float) -> list[Instruction]:
        pod = allocation.pod
        entry = self._entries.get(pod)
        if entry is not None and entry.state is not AllocationState.RESERVED:
            return [Denied(pod, f"the pod is {entry.state} on {entry.allocation.node}")]
        self._end_nomination(pod)
        self._replace(pod, None)
        self._nominations[pod] = Nominated(allocation, until)
        self._hold(allocation)
        return []

    def _end_nomination(self, pod: str) -> Nominated | None:
        held = self._open_nomination(pod)
        if held is not None:
            self._release(held)
        return self._nominations.pop(pod, None)

    def _listed(self, allocations: tuple[Allocation, ...]) -> list[Instruction]:
        """Confirmed pods that are not listed are gone; binds in flight may be newer than the list."""
        listed = {allocation.pod for allocation in allocations}
        missing = [p for p, e in self._entries.items() if e.state is AllocationState.CONFIRMED and p not in listed]
        done: list[Instruction] = []
        for pod in missing:
            done += self._gone(pod)
        changed = [allocation for allocation in allocations if not self._is_confirmed(allocation)]
        for allocation in changed:  # all of them before looking for conflicts: pods may have changed places
            done += self._set_confirmed(allocation)
        for allocation in changed:
            done += self._conflicts(allocation)
        return done

    def _tick(self, now: float) -> list[Instruction]:
        done: list[Instruction] = []
        for pod in sorted(self._in_flight):
            entry = self._entries[pod]
            if entry.deadline > now:
                continue
            if entry.state is AllocationState.RESERVED:
                done += self._drop(pod, AllocationState.RESERVED)
            else:
                self._entries[pod] = LedgerEntry(entry.state, entry.allocation, now + self._settings.assume_ttl)
                done.append(VerifyBind(pod))
        for pod, nominated in list(self._nominations.items()):
            if nominated.until <= now:
                self._end_nomination(pod)
                done.append(Freed(nominated.allocation.node))
        return done

    # ---- entries ----------------------------------------------------------------------------------------------------

    def _replace(self, pod: str, entry: LedgerEntry | None) -> None:
        """The only place where the entry of a pod changes. Its nomination holds capacity exactly while it has no
        entry."""
        self._reservations += _is_reservation(entry) - _is_reservation(self._entries.get(pod))
        if entry is not None and self._is_held(pod, entry.allocation):
            self._entries[pod] = entry
            (self._in_flight.discard if entry.state is AllocationState.CONFIRMED else self._in_flight.add)(pod)
            return
        nominated = self._open_nomination(pod)
        before = self._entries.pop(pod, None)
        touched = self._drop_unplaced(pod, before, entry)
        self._in_flight.discard(pod)
        self._count_priority(before, -1)
        self._count_priority(entry, 1)
        for allocation in (nominated, before.allocation if before is not None else None):
            if allocation is not None:
                self._release(allocation)
        if entry is not None:
            self._entries[pod] = entry
            if entry.state is not AllocationState.CONFIRMED:
                self._in_flight.add(pod)
        holds = entry.allocation if entry is not None else self._open_nomination(pod)
        if holds is not None:
            self._hold(holds)
        for node in touched:
            self._unplaced.keep(node)

    def _drop_unplaced(self, pod: str, before: LedgerEntry | None, after: LedgerEntry | None) -> set[str]:
        """Nodes whose unplaced GPUs must be chosen again, because something else on them changes; none are withheld
        now."""
        touched = {entry.allocation.node for entry in (before, after) if entry is not None}
        for node in touched & self._unplaced.nodes():
            self._unplaced.drop(node)
        if before is not None and before.allocation.unplaced:
            self._unplaced.set(before.allocation.node, pod, 0)
        if after is not None and after.allocation.unplaced:
            self._unplaced.set(after.allocation.node, pod, after.allocation.unplaced)
        return touched & self._unplaced.nodes()

    def _count_priority(self, entry: LedgerEntry | None, by: int) -> None:
        if entry is not None and entry.allocation.grant is not None:
            priority = entry.allocation.priority
            self._priorities[priority] += by
            if not self._priorities[priority]:
                del self._priorities[priority]

    def _hold(self, allocation: Allocation) -> None:
        self._on_node.setdefault(allocation.node, set()).add(allocation.pod)
        self.fleet.hold(allocation.node, allocation.uses(), allocation.cpu, allocation.memory)
        if self.quota_usage.quotas:
            self.quota_usage.charge(allocation)

    def _release(self, allocation: Allocation) -> None:
        pods = self._on_node[allocation.node]
        pods.discard(allocation.pod)
        if not pods:
            del self._on_node[allocation.node]
        uses = allocation.uses()
        self.fleet.release(allocation.node, uses, allocation.cpu, allocation.memory)
        if self.quota_usage.quotas:
            self.quota_usage.refund(allocation.pod)
        if self._disputed & uses.keys():
            self._disputed -= uses.keys() - set(cards_failing(self.fleet, allocation, not_overcommitted))

    # ---- audit ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Verify that the fleet shows exactly what the ledger holds, and that no card is double-allocated.

        Cards that the cluster itself shows as overcommitted (reported as `Conflict`) are exempt until that is resolved.
        """
        for pod, entry in self._entries.items():
            if pod not in self._on_node.get(entry.allocation.node, ()):
                raise Overcommitted(self._alarm(f"pod {pod} is in the ledger but not on its node", pod))
        if not self.quota_usage.is_right(self._allocations()):
            raise Overcommitted(self._alarm("the quota usage of namespaces is not the sum of their pods", ""))
        for _ in self.checks():
            pass

    def checks(self) -> Iterator[str]:
        """The same, node by node, with interruptions; the ledger may change in between."""
        for name in self.fleet.names():
            if name in self.fleet:
                self.check_node(name)
                yield name

    def check_node(self, name: str) -> None:
        """The same for one known node."""
        self._check_node(self.fleet.view(name))

    def _check_node(self, view: NodeView) -> None:
        name = view.node.name
        held = [entry.allocation for entry in self.on_node(name)]
        nominated = [a for a in self._open_nominations() if a.node == name]
        kept = self._unplaced.kept(name)
        for card, free in zip(view.node.cards, view.free_by_card, strict=True):
            uses = [use for a in (*held, *nominated) if (use := a.uses().get(card.uuid)) is not None]
            uses += [kept[card.uuid]] if card.uuid in kept else []
            if free != reduce(sub, uses, FreeCapacity.of(card)):
                raise Overcommitted(
                    self._alarm(f"{card.uuid} of {name}: the free capacity is not what its pods leave", card.uuid)
                )
            own = [use for a in held if (use := a.uses().get(card.uuid)) is not None]
            left = reduce(sub, own, FreeCapacity.of(card))
            if min(left.memory, left.cores, left.slots) < 0 and card.uuid not in self._disputed:
                raise Overcommitted(self._alarm(f"{card.uuid} of {name} is allocated beyond its size", card.uuid))
        cpu = view.node.cpu - sum(a.cpu for a in (*held, *nominated))
        memory = view.node.memory - sum(a.memory for a in (*held, *nominated))
        if (view.cpu, view.memory) != (cpu, memory):
            raise Overcommitted(self._alarm(f"{name}: the free CPU or memory is not what its pods leave", name))

    def _alarm(self, problem: str, about: str) -> str:
        lines = [f"  {event}" for event in self._history if about in repr(event)]
        return "\n".join([f"{problem}. History:", *lines])


def _is_reservation(entry: LedgerEntry | None) -> bool:
    return entry is not None and entry.state is AllocationState.RESERVED


def _extent(allocation: Allocation) -> tuple[str, dict[str, Use], int]:
    return allocation.node, allocation.uses(), allocation.unplaced


def cards_failing(fleet: Fleet, allocation: Allocation, fits: Callable[[Use, FreeCapacity], bool]) -> list[str]:
    """The cards of the allocation that are unknown, or for which `fits` is false."""
    node, uses = allocation.node, allocation.uses()
    if node not in fleet:
        return sorted(uses) or [node]
    pairs = ((uuid, use, fleet.free_capacity(node, uuid)) for uuid, use in uses.items())
    return [uuid for uuid, use, free in pairs if free is None or not fits(use, free)]


def not_overcommitted(_: Use, free: FreeCapacity) -> bool:
    """With the use already subtracted."""
    return NOTHING.fits_beside(free)
