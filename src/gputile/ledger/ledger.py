"""The ledger: events in, instructions out.

                  +---- Rubbed, Gone, Tick past its deadline ----+
                  |                                              v
    unknown --Pencilled--> pencilled --Assumed--> assumed    unknown
       |                                          |     |        ^
       |                                   Confirmed   Forgotten, Gone
       |                                          v              ^
       +----------Confirmed, Listed---------> confirmed --Gone---+

A pencil is a hold for the moment between filter and bind. An assumption is a bind that may have reached the API server:
it never expires by itself; past its deadline the ledger asks to `Verify` it. A promise keeps room for a pod that
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
from gputile.engine.victims import Holder
from gputile.ledger.card_capacity import cards_short, room_left
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
    Gone,
    Instruction,
    Listed,
    NodeGone,
    NodeSeen,
    Pencilled,
    Promised,
    QuotasSet,
    Relisted,
    Rubbed,
    Tick,
    Verify,
    Withdrawn,
)
from gputile.ledger.unplaced import Unplaced
from gputile.model.allocations import Holding
from gputile.model.cards import Node, NodeView, Room
from gputile.model.errors import DoubleBooked
from gputile.model.grants import Grant, Use
from gputile.quota.usage import Spending


class BookSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of this room."""

    pencil_ttl: float = 2.0
    """Seconds that filter's choice is held for bind."""

    assume_ttl: float = 65.0
    """Seconds after which an unconfirmed bind is looked up. Longer than an API server works on a request (60)."""

    story: int = 2000
    """How many events are remembered for the story of an alarm."""


class State(StrEnum):
    PENCILLED = "pencilled"
    ASSUMED = "assumed"
    CONFIRMED = "confirmed"


class Entry(msgspec.Struct, frozen=True):
    """A pod in the book."""

    state: State
    holding: Holding
    deadline: float = float("inf")


class Ledger:
    """See the module's diagram."""

    def __init__(self, settings: BookSettings | None = None) -> None:
        self.fleet = Fleet()
        self.spending = Spending(self.fleet)
        self._unplaced = Unplaced(self.fleet)
        self._settings = settings or BookSettings()
        self._entries: dict[str, Entry] = {}
        self._in_flight: set[str] = set()  # pencilled or assumed: few, and looked at on every tick
        self._pencils = 0  # how many of them are pencilled
        self._on_node: dict[str, set[str]] = {}  # UIDs with an entry or an open promise there
        self._promises: dict[str, Promised] = {}
        self._priorities: Counter[int] = Counter()  # of pods with a grant
        self._lent = 0  # how many of the fleet's gains were only for a look
        self._disputed: set[str] = set()  # cards on which the cluster shows more than they have
        self._story: deque[Event] = deque(maxlen=self._settings.story)

    # ---- reading ----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many pods are in the book."""
        return len(self._entries)

    def entry(self, pod: str) -> Entry | None:
        return self._entries.get(pod)

    def entries(self) -> Iterable[Entry]:
        return self._entries.values()

    def promise(self, pod: str) -> Promised | None:
        return self._promises.get(pod)

    def promises(self) -> list[Promised]:
        """All that is being kept for somebody."""
        return list(self._promises.values())

    def lowest_priority(self) -> int | None:
        """Of all pods that hold cards; None when nobody does."""
        return min(self._priorities, default=None)

    def oversold(self, pod: str) -> list[str]:
        """The cards under a pod that hold more than they have."""
        entry = self._entries.get(pod)
        return self._oversold(entry.holding) if entry is not None else []

    def pencils(self) -> int:
        """How many pods are between filter and bind."""
        return self._pencils

    def in_flight(self) -> list[Entry]:
        """Pods between filter and the day the cluster shows them bound."""
        return [self._entries[pod] for pod in self._in_flight]

    def on_node(self, node: str) -> list[Entry]:
        """Every entry on a node, in the order of their UIDs."""
        return [self._entries[pod] for pod in sorted(self._on_node.get(node, ())) if pod in self._entries]

    def holders(self, node: str) -> list[Holder]:
        """The pods on a node, for preemption and explanation."""
        return [Holder.of(entry.holding) for entry in self.on_node(node)]

    @contextmanager
    def aside(self, pod: str, priority: int | None = None) -> Iterator[Fleet]:
        """The fleet as this pod may see it. Its own pencil and promise, what is kept for its own unplaced GPUs, and
        what is only promised to pods less important than `priority`, do not stand in its way."""
        mine = [h for h in (self._pencil(pod), self._open_promise(pod)) if h is not None]
        if priority is not None and self._promises:
            mine += [h for p in self._promises if p != pod and (h := self._open_promise(p)) and h.priority < priority]
        with self._placing(pod), self._without(mine):
            yield self.fleet

    @contextmanager
    def _placing(self, pod: str) -> Iterator[None]:
        """While this pod is being placed, its GPUs of unknown place are not kept from it."""
        entry = self._entries.get(pod)
        if entry is None or not entry.holding.unplaced:
            yield
            return
        self._keep_but(entry.holding.node, pod)
        try:
            yield
        finally:
            self._keep_but(entry.holding.node, "")

    def _keep_but(self, node: str, pod: str) -> None:
        """Choose the node's unplaced GPUs anew, without those of one pod. It is a look: nothing becomes free by it."""
        before = self.fleet.gains()
        self._unplaced.drop(node)
        self._unplaced.keep(node, ignoring=pod)
        self._lent += self.fleet.gains() - before

    @contextmanager
    def _without(self, lent: list[Holding]) -> Iterator[None]:
        """While somebody looks, this is not held."""
        before = self.fleet.gains()
        for holding in lent:
            self._release(holding)
        self._lent += self.fleet.gains() - before
        try:
            yield
        finally:
            for holding in lent:
                self._hold(holding)

    def gains(self) -> int:
        """Counts the changes that may have made room, and not only for a look. While it stands, room only shrinks."""
        return self.fleet.gains() - self._lent

    def _pencil(self, pod: str) -> Holding | None:
        entry = self._entries.get(pod)
        return entry.holding if entry is not None and entry.state is State.PENCILLED else None

    def _open_promise(self, pod: str) -> Holding | None:
        """The promise, while it is what holds the room."""
        promised = self._promises.get(pod)
        return promised.holding if promised is not None and pod not in self._entries else None

    # ---- changing ---------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Instruction]:
        """Take an event in; what comes out is for the caller to carry out."""
        self._story.append(event)
        match event:
            case NodeSeen(node):
                return self._node_seen(node)
            case NodeGone(name):
                return self._node_gone(name)
            case Pencilled(holding, at):
                return self._write(State.PENCILLED, holding, at + self._settings.pencil_ttl)
            case Rubbed(pod):
                return self._drop(pod, State.PENCILLED)
            case Assumed(holding, at):
                return self._write(State.ASSUMED, holding, at + self._settings.assume_ttl)
            case Forgotten(pod):
                return self._drop(pod, State.ASSUMED)
            case Confirmed(holding):
                return self._confirm(holding)
            case Relisted(holding):
                return [] if self._is_confirmed(holding) else self._relist(holding)
            case Compared(pod):
                return self._conflicts(self._entries[pod].holding) if pod in self._entries else []
            case Corrected(pod, grant):
                return self._correct(pod, grant)
            case Gone(pod):
                return self._gone(pod)
            case Promised(holding, until):
                return self._promise(holding, until)
            case Withdrawn(pod):
                promised = self._end_promise(pod)
                return [] if promised is None else [Freed(promised.holding.node)]
            case Listed(holdings):
                return self._listed(holdings)
            case QuotasSet(quotas):
                self.spending.set(quotas, self._holdings())
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
            if self._oversold(self._entries[holder.pod].holding):
                done += self._drop(holder.pod, State.PENCILLED)
        for holder in holders:
            entry = self._entries.get(holder.pod)
            cards = self._oversold(entry.holding) if entry is not None else []
            new = [card for card in cards if card not in self._disputed]
            if new:
                done.append(Conflict(holder.pod, node.name, tuple(new), shrunk=True))
            self._disputed.update(cards)
        return done

    def _hold_again(self, pod: str) -> None:
        entry = self._entries.get(pod)
        holding = entry.holding if entry is not None else self._open_promise(pod)
        if holding is not None:
            self._hold(holding)

    def _holdings(self) -> list[Holding]:
        """All that holds room: entries, and promises to those who have none."""
        promised = [h for pod in self._promises if (h := self._open_promise(pod)) is not None]
        return [*(entry.holding for entry in self._entries.values()), *promised]

    def _node_gone(self, name: str) -> list[Instruction]:
        """Pods stay in the book until the cluster says they are gone; the node may come back."""
        self.fleet.remove_node(name)
        for pod in list(self._on_node.get(name, ())):
            self._drop(pod, State.PENCILLED)
        return []

    def _write(self, state: State, holding: Holding, deadline: float) -> list[Instruction]:
        """Pencil or assume, if the tiles are free for this pod."""
        pod = holding.pod
        entry = self._entries.get(pod)
        if entry is not None and entry.state is not State.PENCILLED:
            repeated = state is State.ASSUMED and entry.state is state and entry.holding == holding
            return [] if repeated else [Denied(pod, f"the pod is {entry.state} on {entry.holding.node}")]
        short = [] if self._holds_already(pod, holding) else self._short_for(pod, holding)
        if short:
            return [Denied(pod, f"no room on {', '.join(short)} of node {holding.node}")]
        over = self.beyond_quota(holding)
        if over:
            return [Denied(pod, over, beyond_quota=True)]
        self._replace(pod, Entry(state, holding, deadline))
        return []

    def _short_for(self, pod: str, holding: Holding) -> list[str]:
        with self.aside(pod, holding.priority) as fleet:
            return cards_short(fleet, holding)

    def beyond_quota(self, holding: Holding) -> str:
        """Why the pod's namespace may not have this, in words; "" when it may. Whatever the pod holds gives way to it,
        and so does what is only promised to others less important."""
        if not self.spending.quotas or holding.grant is None:
            return ""
        if not self._promises:
            return self.spending.objection(holding)
        with self.aside(holding.pod, holding.priority):
            return self.spending.objection(holding)

    def _holds_already(self, pod: str, holding: Holding) -> bool:
        """Whether exactly this is held for the pod: from pencil to bind to confirmed nothing moves on the cards."""
        entry = self._entries.get(pod)
        return entry is not None and entry.holding == holding

    def _drop(self, pod: str, state: State) -> list[Instruction]:
        """Take a pod out, if it is in this state; a later state is not undone by an earlier one's end."""
        entry = self._entries.get(pod)
        if entry is None or entry.state is not state:
            return []
        self._replace(pod, None)
        return [Freed(entry.holding.node)]

    def _confirm(self, holding: Holding) -> list[Instruction]:
        if self._is_confirmed(holding):
            return []
        return self._take_as_true(holding) + self._conflicts(holding)

    def _is_confirmed(self, holding: Holding) -> bool:
        before = self._entries.get(holding.pod)
        return before is not None and before.state is State.CONFIRMED and before.holding == holding

    def _take_as_true(self, holding: Holding) -> list[Instruction]:
        self._end_promise(holding.pod)
        before = self._entries.get(holding.pod)
        self._replace(holding.pod, Entry(State.CONFIRMED, holding))
        if before is None or _extent(before.holding) == _extent(holding):
            return []
        return [Freed(before.holding.node)]

    def _relist(self, holding: Holding) -> list[Instruction]:
        """One pod of a list. What overlaps is looked at when the list is whole (`Compared`): pods may have changed
        places. Until then an overlap is the cluster's word, and no alarm of `check`."""
        done = self._take_as_true(holding)
        self._disputed.update(self._oversold(holding))
        return done

    def _conflicts(self, holding: Holding) -> list[Instruction]:
        """Rub out the pencils that a confirmed pod stands on; report what overlaps even so."""
        if not self._oversold(holding):
            return []
        for pod in sorted(self._on_node[holding.node]):
            pencil = self._pencil(pod)
            if pencil is not None and pencil.uses().keys() & set(self._oversold(holding)):
                self._drop(pod, State.PENCILLED)
        cards = self._oversold(holding)
        self._disputed.update(cards)
        return [Conflict(holding.pod, holding.node, tuple(cards))] if cards else []

    def _oversold(self, holding: Holding) -> list[str]:
        """The cards under this pod that hold more than they have; room that is only promised does not count."""
        if holding.node not in self.fleet:
            return []
        there = self._on_node[holding.node] if self._promises else ()
        promised = [h for pod in there if (h := self._open_promise(pod)) is not None]
        with self._without(promised):
            return cards_short(self.fleet, holding, taken=True)

    def _correct(self, pod: str, grant: Grant) -> list[Instruction]:
        entry = self._entries.get(pod)
        if entry is None or entry.state is not State.CONFIRMED:
            return []
        return self._confirm(msgspec.structs.replace(entry.holding, grant=grant, node=grant.node))

    def _gone(self, pod: str) -> list[Instruction]:
        promised = self._end_promise(pod)
        entry = self._entries.get(pod)
        if entry is not None:
            self._replace(pod, None)
            return [Freed(entry.holding.node)]
        return [Freed(promised.holding.node)] if promised is not None else []

    def _promise(self, holding: Holding, until: float) -> list[Instruction]:
        pod = holding.pod
        entry = self._entries.get(pod)
        if entry is not None and entry.state is not State.PENCILLED:
            return [Denied(pod, f"the pod is {entry.state} on {entry.holding.node}")]
        self._end_promise(pod)
        self._replace(pod, None)
        self._promises[pod] = Promised(holding, until)
        self._hold(holding)
        return []

    def _end_promise(self, pod: str) -> Promised | None:
        held = self._open_promise(pod)
        if held is not None:
            self._release(held)
        return self._promises.pop(pod, None)

    def _listed(self, holdings: tuple[Holding, ...]) -> list[Instruction]:
        """Confirmed pods that are not listed are gone; binds in flight may not have been seen by the list."""
        listed = {holding.pod for holding in holdings}
        missing = [p for p, e in self._entries.items() if e.state is State.CONFIRMED and p not in listed]
        done: list[Instruction] = []
        for pod in missing:
            done += self._gone(pod)
        changed = [holding for holding in holdings if not self._is_confirmed(holding)]
        for holding in changed:  # all of them before looking for conflicts: pods may have changed places
            done += self._take_as_true(holding)
        for holding in changed:
            done += self._conflicts(holding)
        return done

    def _tick(self, now: float) -> list[Instruction]:
        done: list[Instruction] = []
        for pod in sorted(self._in_flight):
            entry = self._entries[pod]
            if entry.deadline > now:
                continue
            if entry.state is State.PENCILLED:
                done += self._drop(pod, State.PENCILLED)
            else:
                self._entries[pod] = Entry(entry.state, entry.holding, now + self._settings.assume_ttl)
                done.append(Verify(pod))
        for pod, promised in list(self._promises.items()):
            if promised.until <= now:
                self._end_promise(pod)
                done.append(Freed(promised.holding.node))
        return done

    # ---- holding ----------------------------------------------------------------------------------------------------

    def _replace(self, pod: str, entry: Entry | None) -> None:
        """The one place where a pod's entry changes; its promise holds exactly while it has no entry."""
        self._pencils += _is_pencil(entry) - _is_pencil(self._entries.get(pod))
        if entry is not None and self._holds_already(pod, entry.holding):
            self._entries[pod] = entry
            (self._in_flight.discard if entry.state is State.CONFIRMED else self._in_flight.add)(pod)
            return
        promised = self._open_promise(pod)
        before = self._entries.pop(pod, None)
        touched = self._let_go_unplaced(pod, before, entry)
        self._in_flight.discard(pod)
        self._count_priority(before, -1)
        self._count_priority(entry, 1)
        for holding in (promised, before.holding if before is not None else None):
            if holding is not None:
                self._release(holding)
        if entry is not None:
            self._entries[pod] = entry
            if entry.state is not State.CONFIRMED:
                self._in_flight.add(pod)
        holds = entry.holding if entry is not None else self._open_promise(pod)
        if holds is not None:
            self._hold(holds)
        for node in touched:
            self._unplaced.keep(node)

    def _let_go_unplaced(self, pod: str, before: Entry | None, after: Entry | None) -> set[str]:
        """Nodes whose unplaced GPUs must be chosen anew, because something else on them changes; none are kept now."""
        touched = {entry.holding.node for entry in (before, after) if entry is not None}
        for node in touched & self._unplaced.nodes():
            self._unplaced.drop(node)
        if before is not None and before.holding.unplaced:
            self._unplaced.set(before.holding.node, pod, 0)
        if after is not None and after.holding.unplaced:
            self._unplaced.set(after.holding.node, pod, after.holding.unplaced)
        return touched & self._unplaced.nodes()

    def _count_priority(self, entry: Entry | None, by: int) -> None:
        if entry is not None and entry.holding.grant is not None:
            priority = entry.holding.priority
            self._priorities[priority] += by
            if not self._priorities[priority]:
                del self._priorities[priority]

    def _hold(self, holding: Holding) -> None:
        self._on_node.setdefault(holding.node, set()).add(holding.pod)
        self.fleet.hold(holding.node, holding.uses(), holding.cpu, holding.memory)
        if self.spending.quotas:
            self.spending.charge(holding)

    def _release(self, holding: Holding) -> None:
        there = self._on_node[holding.node]
        there.discard(holding.pod)
        if not there:
            del self._on_node[holding.node]
        uses = holding.uses()
        self.fleet.release(holding.node, uses, holding.cpu, holding.memory)
        if self.spending.quotas:
            self.spending.refund(holding.pod)
        if self._disputed & uses.keys():
            self._disputed -= uses.keys() - set(cards_short(self.fleet, holding, taken=True))

    # ---- audit ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Prove that the fleet shows exactly what the book holds, and that no card is sold twice.

        Cards of which the cluster itself shows too much (reported as `Conflict`) are let pass until that is mended.
        """
        for pod, entry in self._entries.items():
            if pod not in self._on_node.get(entry.holding.node, ()):
                raise DoubleBooked(self._alarm(f"pod {pod} is in the book but not on its node", pod))
        if not self.spending.is_right(self._holdings()):
            raise DoubleBooked(self._alarm("what namespaces hold is not what their pods cost", ""))
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
        held = [entry.holding for entry in self.on_node(name)]
        promised = [h for p in self._promises if (h := self._open_promise(p)) is not None and h.node == name]
        kept = self._unplaced.kept(name)
        for card, room in zip(view.node.cards, view.rooms, strict=True):
            uses = [use for h in (*held, *promised) if (use := h.uses().get(card.uuid)) is not None]
            uses += [kept[card.uuid]] if card.uuid in kept else []
            if room != room_left(Room.of(card), uses):
                raise DoubleBooked(self._alarm(f"{card.uuid} of {name} is not what its holders leave of it", card.uuid))
            sold = room_left(Room.of(card), [use for h in held if (use := h.uses().get(card.uuid)) is not None])
            if min(sold.memory, sold.cores, sold.slots) < 0 and card.uuid not in self._disputed:
                raise DoubleBooked(self._alarm(f"{card.uuid} of {name} is booked beyond its size", card.uuid))
        cpu = view.node.cpu - sum(h.cpu for h in (*held, *promised))
        memory = view.node.memory - sum(h.memory for h in (*held, *promised))
        if (view.cpu, view.memory) != (cpu, memory):
            raise DoubleBooked(self._alarm(f"CPU or memory of {name} is not what its pods leave of it", name))

    def _alarm(self, what: str, about: str) -> str:
        lines = [f"  {event}" for event in self._story if about in repr(event)]
        return "\n".join([f"{what}. Story:", *lines])


def _is_pencil(entry: Entry | None) -> bool:
    return entry is not None and entry.state is State.PENCILLED


def _extent(holding: Holding) -> tuple[str, dict[str, Use], int]:
    return holding.node, holding.uses(), holding.unplaced
