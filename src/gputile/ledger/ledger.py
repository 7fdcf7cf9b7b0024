"""The ledger: events in, instructions out.

                  +---- Rubbed, Gone, Tick past its deadline ----+
                  |                                              v
    unknown --Pencilled--> pencilled --Assumed--> assumed    unknown
       |                                          |     |        ^
       |                                   Confirmed   Forgotten, Gone
       |                                          v              ^
       +----------Confirmed, Listed---------> confirmed --Gone---+

A pencil is a hold for the moment between filter and bind. An assumption is a bind that may have reached the API server:
it never expires by itself; past its deadline the ledger asks to `VerifyBind` it. A promise keeps room for a pod that
preempted; it holds while the pod holds nothing else, and ends when the pod is confirmed or gone, when it is withdrawn,
or in time. Pods that are more important may take the room.

What the cluster shows always wins: a confirmed pod pushes pencils off its cards, and what then overlaps is reported.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum

import msgspec

from gputile.engine.fleet.fleet import Fleet
from gputile.engine.victims import Victim
from gputile.ledger.card_capacity import capacity_left, cards_short
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
from gputile.model.cards import FreeCapacity, Node, NodeView
from gputile.model.errors import Overcommitted
from gputile.model.grants import Grant, Use
from gputile.quota.usage import QuotaUsage


class LedgerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of this room."""

    reserve_ttl: float = 2.0
    """Seconds that filter's choice is held for bind."""

    assume_ttl: float = 65.0
    """Seconds after which an unconfirmed bind is looked up. Longer than an API server works on a request (60)."""

    history: int = 2000
    """How many events are remembered for the story of an alarm."""


class AllocationState(StrEnum):
    RESERVED = "reserved"
    ASSUMED = "assumed"
    CONFIRMED = "confirmed"


class LedgerEntry(msgspec.Struct, frozen=True):
    """A pod in the book."""

    state: AllocationState
    allocation: Allocation
    deadline: float = float("inf")


class Ledger:
    """See the module's diagram."""

    def __init__(self, settings: LedgerSettings | None = None) -> None:
        self.fleet = Fleet()
        self.quota_usage = QuotaUsage(self.fleet)
        self._unplaced = UnplacedAllocations(self.fleet)
        self._settings = settings or LedgerSettings()
        self._entries: dict[str, LedgerEntry] = {}
        self._in_flight: set[str] = set()  # pencilled or assumed: few, and looked at on every tick
        self._reservations = 0  # how many of them are pencilled
        self._on_node: dict[str, set[str]] = {}  # UIDs with an entry or an open promise there
        self._nominations: dict[str, Nominated] = {}
        self._priorities: Counter[int] = Counter()  # of pods with a grant
        self._lent = 0  # how many of the fleet's gains were only for a look
        self._disputed: set[str] = set()  # cards on which the cluster shows more than they have
        self._story: deque[Event] = deque(maxlen=self._settings.history)

    # ---- reading ----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many pods are in the book."""
        return len(self._entries)

    def entry(self, pod: str) -> LedgerEntry | None:
        return self._entries.get(pod)

    def entries(self) -> Iterable[LedgerEntry]:
        return self._entries.values()

    def nomination(self, pod: str) -> Nominated | None:
        return self._nominations.get(pod)

    def nominations(self) -> list[Nominated]:
        """All that is being kept for somebody."""
        return list(self._nominations.values())

    def lowest_priority(self) -> int | None:
        """Of all pods that hold cards; None when nobody does."""
        return min(self._priorities, default=None)

    def overcommitted(self, pod: str) -> list[str]:
        """The cards under a pod that hold more than they have."""
        entry = self._entries.get(pod)
        return self._overcommitted(entry.allocation) if entry is not None else []

    def reservations(self) -> int:
        """How many pods are between filter and bind."""
        return self._reservations

    def in_flight(self) -> list[LedgerEntry]:
        """Pods between filter and the day the cluster shows them bound."""
        return [self._entries[pod] for pod in self._in_flight]

    def on_node(self, node: str) -> list[LedgerEntry]:
        """Every entry on a node, in the order of their UIDs."""
        return [self._entries[pod] for pod in sorted(self._on_node.get(node, ())) if pod in self._entries]

    def holders(self, node: str) -> list[Victim]:
        """The pods on a node, for preemption and explanation."""
        return [Victim.of(entry.allocation) for entry in self.on_node(node)]

    @contextmanager
    def without_claims_of(self, pod: str, priority: int | None = None) -> Iterator[Fleet]:
        """The fleet as this pod may see it. Its own pencil and promise, what is kept for its own unplaced GPUs, and
        what is only promised to pods less important than `priority`, do not stand in its way."""
        mine = [h for h in (self._reserve(pod), self._open_nomination(pod)) if h is not None]
        if priority is not None and self._nominations:
            mine += [
                h for p in self._nominations if p != pod and (h := self._open_nomination(p)) and h.priority < priority
            ]
        with self._placing(pod), self._without(mine):
            yield self.fleet

    @contextmanager
    def _placing(self, pod: str) -> Iterator[None]:
        """While this pod is being placed, its GPUs of unknown place are not kept from it."""
        entry = self._entries.get(pod)
        if entry is None or not entry.allocation.unplaced:
            yield
            return
        self._keep_but(entry.allocation.node, pod)
        try:
            yield
        finally:
            self._keep_but(entry.allocation.node, "")

    def _keep_but(self, node: str, pod: str) -> None:
        """Choose the node's unplaced GPUs anew, without those of one pod. It is a look: nothing becomes free by it."""
        before = self.fleet.capacity_generation()
        self._unplaced.drop(node)
        self._unplaced.keep(node, ignoring=pod)
        self._lent += self.fleet.capacity_generation() - before

    @contextmanager
    def _without(self, lent: list[Allocation]) -> Iterator[None]:
        """While somebody looks, this is not held."""
        before = self.fleet.capacity_generation()
        for allocation in lent:
            self._release(allocation)
        self._lent += self.fleet.capacity_generation() - before
        try:
            yield
        finally:
            for allocation in lent:
                self._hold(allocation)

    def capacity_generation(self) -> int:
        """Counts the changes that may have made room, and not only for a look. While it stands, room only shrinks."""
        return self.fleet.capacity_generation() - self._lent

    def _reserve(self, pod: str) -> Allocation | None:
        entry = self._entries.get(pod)
        return entry.allocation if entry is not None and entry.state is AllocationState.RESERVED else None

    def _open_nomination(self, pod: str) -> Allocation | None:
        """The promise, while it is what holds the room."""
        nominated = self._nominations.get(pod)
        return nominated.allocation if nominated is not None and pod not in self._entries else None

    # ---- changing ---------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Instruction]:
        """Take an event in; what comes out is for the caller to carry out."""
        self._story.append(event)
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
        """A card that came back smaller than what is held of it: pencils go, and the pod that came last is named."""
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
        """All that holds room: entries, and promises to those who have none."""
        nominated = [h for pod in self._nominations if (h := self._open_nomination(pod)) is not None]
        return [*(entry.allocation for entry in self._entries.values()), *nominated]

    def _node_gone(self, name: str) -> list[Instruction]:
        """Pods stay in the book until the cluster says they are gone; the node may come back."""
        self.fleet.remove_node(name)
        for pod in list(self._on_node.get(name, ())):
            self._drop(pod, AllocationState.RESERVED)
        return []

    def _write(self, state: AllocationState, allocation: Allocation, deadline: float) -> list[Instruction]:
        """Pencil or assume, if the tiles are free for this pod."""
        pod = allocation.pod
        entry = self._entries.get(pod)
        if entry is not None and entry.state is not AllocationState.RESERVED:
            repeated = state is AllocationState.ASSUMED and entry.state is state and entry.allocation == allocation
            return [] if repeated else [Denied(pod, f"the pod is {entry.state} on {entry.allocation.node}")]
        short = [] if self._holds_already(pod, allocation) else self._short_for(pod, allocation)
        if short:
            return [Denied(pod, f"no room on {', '.join(short)} of node {allocation.node}")]
        over = self.beyond_quota(allocation)
        if over:
            return [Denied(pod, over, beyond_quota=True)]
        self._replace(pod, LedgerEntry(state, allocation, deadline))
        return []

    def _short_for(self, pod: str, allocation: Allocation) -> list[str]:
        with self.without_claims_of(pod, allocation.priority) as fleet:
            return cards_short(fleet, allocation)

    def beyond_quota(self, allocation: Allocation) -> str:
        """Why the pod's namespace may not have this, in words; "" when it may. Whatever the pod holds gives way to it,
        and so does what is only promised to others less important."""
        if not self.quota_usage.quotas or allocation.grant is None:
            return ""
        if not self._nominations:
            return self.quota_usage.objection(allocation)
        with self.without_claims_of(allocation.pod, allocation.priority):
            return self.quota_usage.objection(allocation)

    def _holds_already(self, pod: str, allocation: Allocation) -> bool:
        """Whether exactly this is held for the pod: from pencil to bind to confirmed nothing moves on the cards."""
        entry = self._entries.get(pod)
        return entry is not None and entry.allocation == allocation

    def _drop(self, pod: str, state: AllocationState) -> list[Instruction]:
        """Take a pod out, if it is in this state; a later state is not undone by an earlier one's end."""
        entry = self._entries.get(pod)
        if entry is None or entry.state is not state:
            return []
        self._replace(pod, None)
        return [Freed(entry.allocation.node)]

    def _confirm(self, allocation: Allocation) -> list[Instruction]:
        if self._is_confirmed(allocation):
            return []
        return self._take_as_true(allocation) + self._conflicts(allocation)

    def _is_confirmed(self, allocation: Allocation) -> bool:
        before = self._entries.get(allocation.pod)
        return before is not None and before.state is AllocationState.CONFIRMED and before.allocation == allocation

    def _take_as_true(self, allocation: Allocation) -> list[Instruction]:
        self._end_nomination(allocation.pod)
        before = self._entries.get(allocation.pod)
        self._replace(allocation.pod, LedgerEntry(AllocationState.CONFIRMED, allocation))
        if before is None or _extent(before.allocation) == _extent(allocation):
            return []
        return [Freed(before.allocation.node)]

    def _relist(self, allocation: Allocation) -> list[Instruction]:
        """One pod of a list. What overlaps is looked at when the list is whole (`Compared`): pods may have changed
        places. Until then an overlap is the cluster's word, and no alarm of `check`."""
        done = self._take_as_true(allocation)
        self._disputed.update(self._overcommitted(allocation))
        return done

    def _conflicts(self, allocation: Allocation) -> list[Instruction]:
        """Rub out the pencils that a confirmed pod stands on; report what overlaps even so."""
        if not self._overcommitted(allocation):
            return []
        for pod in sorted(self._on_node[allocation.node]):
            reservation = self._reserve(pod)
            if reservation is not None and reservation.uses().keys() & set(self._overcommitted(allocation)):
                self._drop(pod, AllocationState.RESERVED)
        cards = self._overcommitted(allocation)
        self._disputed.update(cards)
        return [Conflict(allocation.pod, allocation.node, tuple(cards))] if cards else []

    def _overcommitted(self, allocation: Allocation) -> list[str]:
        """The cards under this pod that hold more than they have; room that is only promised does not count."""
        if allocation.node not in self.fleet:
            return []
        there = self._on_node[allocation.node] if self._nominations else ()
        nominated = [h for pod in there if (h := self._open_nomination(pod)) is not None]
        with self._without(nominated):
            return cards_short(self.fleet, allocation, taken=True)

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
        """Confirmed pods that are not listed are gone; binds in flight may not have been seen by the list."""
        listed = {allocation.pod for allocation in allocations}
        missing = [p for p, e in self._entries.items() if e.state is AllocationState.CONFIRMED and p not in listed]
        done: list[Instruction] = []
        for pod in missing:
            done += self._gone(pod)
        changed = [allocation for allocation in allocations if not self._is_confirmed(allocation)]
        for allocation in changed:  # all of them before looking for conflicts: pods may have changed places
            done += self._take_as_true(allocation)
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

    # ---- holding ----------------------------------------------------------------------------------------------------

    def _replace(self, pod: str, entry: LedgerEntry | None) -> None:
        """The one place where a pod's entry changes; its promise holds exactly while it has no entry."""
        self._reservations += _is_reservation(entry) - _is_reservation(self._entries.get(pod))
        if entry is not None and self._holds_already(pod, entry.allocation):
            self._entries[pod] = entry
            (self._in_flight.discard if entry.state is AllocationState.CONFIRMED else self._in_flight.add)(pod)
            return
        nominated = self._open_nomination(pod)
        before = self._entries.pop(pod, None)
        touched = self._let_go_unplaced(pod, before, entry)
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

    def _let_go_unplaced(self, pod: str, before: LedgerEntry | None, after: LedgerEntry | None) -> set[str]:
        """Nodes whose unplaced GPUs must be chosen anew, because something else on them changes; none are kept now."""
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
        there = self._on_node[allocation.node]
        there.discard(allocation.pod)
        if not there:
            del self._on_node[allocation.node]
        uses = allocation.uses()
        self.fleet.release(allocation.node, uses, allocation.cpu, allocation.memory)
        if self.quota_usage.quotas:
            self.quota_usage.refund(allocation.pod)
        if self._disputed & uses.keys():
            self._disputed -= uses.keys() - set(cards_short(self.fleet, allocation, taken=True))

    # ---- audit ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Prove that the fleet shows exactly what the book holds, and that no card is sold twice.

        Cards of which the cluster itself shows too much (reported as `Conflict`) are let pass until that is mended.
        """
        for pod, entry in self._entries.items():
            if pod not in self._on_node.get(entry.allocation.node, ()):
                raise Overcommitted(self._alarm(f"pod {pod} is in the book but not on its node", pod))
        if not self.quota_usage.is_right(self._allocations()):
            raise Overcommitted(self._alarm("what namespaces hold is not what their pods cost", ""))
        for _ in self.checks():
            pass

    def checks(self) -> Iterator[str]:
        """The same, node by node, for those who have other things to do in between; the book may change meanwhile."""
        for name in self.fleet.names():
            if name in self.fleet:
                self.check_node(name)
                yield name

    def check_node(self, name: str) -> None:
        """The same for one node, which must be here."""
        self._check_node(self.fleet.view(name))

    def _check_node(self, view: NodeView) -> None:
        name = view.node.name
        held = [entry.allocation for entry in self.on_node(name)]
        nominated = [h for p in self._nominations if (h := self._open_nomination(p)) is not None and h.node == name]
        kept = self._unplaced.kept(name)
        for card, room in zip(view.node.cards, view.free_by_card, strict=True):
            uses = [use for h in (*held, *nominated) if (use := h.uses().get(card.uuid)) is not None]
            uses += [kept[card.uuid]] if card.uuid in kept else []
            if room != capacity_left(FreeCapacity.of(card), uses):
                raise Overcommitted(
                    self._alarm(f"{card.uuid} of {name} is not what its holders leave of it", card.uuid)
                )
            sold = capacity_left(
                FreeCapacity.of(card), [use for h in held if (use := h.uses().get(card.uuid)) is not None]
            )
            if min(sold.memory, sold.cores, sold.slots) < 0 and card.uuid not in self._disputed:
                raise Overcommitted(self._alarm(f"{card.uuid} of {name} is booked beyond its size", card.uuid))
        cpu = view.node.cpu - sum(h.cpu for h in (*held, *nominated))
        memory = view.node.memory - sum(h.memory for h in (*held, *nominated))
        if (view.cpu, view.memory) != (cpu, memory):
            raise Overcommitted(self._alarm(f"CPU or memory of {name} is not what its pods leave of it", name))

    def _alarm(self, what: str, about: str) -> str:
        lines = [f"  {event}" for event in self._story if about in repr(event)]
        return "\n".join([f"{what}. Story:", *lines])


def _is_reservation(entry: LedgerEntry | None) -> bool:
    return entry is not None and entry.state is AllocationState.RESERVED


def _extent(allocation: Allocation) -> tuple[str, dict[str, Use], int]:
    return allocation.node, allocation.uses(), allocation.unplaced
