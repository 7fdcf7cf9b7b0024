"""The promise that matters: whatever the order of events, no tile is sold twice, none leaks, and the book is rebuilt.

A hypothesis state machine plays kube-scheduler, API server, kubelet and operators at once: pods are pencilled, assumed,
confirmed, forgotten, deleted, corrected, promised; nodes lose cards, fall ill, shrink, go and come back; others
put pods onto our cards; watches break and lists heal them. Its own oracle adds up tiles without the book's arithmetic.

Deliberate bugs it was seen to catch, each alone:
  1. `_write` does not check for room: two pods hold one tile ("booked beyond its size").
  2. `_replace` forgets to release the entry before: the tile of a re-filtered pod leaks.
  3. `_node_seen` does not hold again: a node that changed sells its tiles a second time.
  4. `Forgotten` also drops a confirmed pod: a late bind error frees a tile that is in use.
  5. `_listed` forgets nobody: pods deleted during a watch gap are held for ever.
  6. `_tick` drops an old assumption instead of asking: a bind whose answer was lost is sold again.
  7. `without_claims_of` does not put the pencil back: a filter that is asked twice frees its own hold.
  8. `_confirm` keeps the promise: the room of a pod that is already running stays reserved.
"""

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from gputile.engine.placement.place import Placement, place
from gputile.ledger.events import (
    Assumed,
    Confirmed,
    Conflict,
    Corrected,
    Denied,
    Forgotten,
    Instruction,
    NodeGone,
    NodeSeen,
    Nominated,
    PodGone,
    PodsListed,
    Reserved,
    Tick,
    Unreserved,
    VerifyBind,
    Withdrawn,
)
from gputile.ledger.ledger import AllocationState, Ledger
from gputile.model.allocations import Allocation
from gputile.model.cards import Node, NodeView
from gputile.model.requests import PodRequest
from gputile.testing.builders import ask, node, wants
from tests.effort import EFFORT

NODES = ("n0", "n1")
WISHES = st.sampled_from(
    [
        wants(ask(3)),
        wants(ask(5)),
        wants(ask(8, cores=50)),
        wants(ask(2, cores=60), cpu=1000),
        wants(ask(4, cards=2)),
        wants(ask(whole=True)),
        wants(ask(3, name="a"), ask(4, name="b"), cpu=500),
        wants(ask(3, name="a"), ask(2, name="b"), together=True, dialect="gpushare"),
    ]
)


def machine(name: str, cards: int = 2, size: int = 8, healthy: bool = True) -> Node:
    return node(name, cpu="4").cards(cards - 1, size=size).card(size=size, healthy=healthy).node()


class Cluster(RuleBasedStateMachine):
    """`truth` is what the API server knows; the ledger hears of it sooner or later."""

    pods = Bundle("pods")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.now = 0.0
        self.born = 0
        self.living: set[str] = set()  # few, so that they meet
        self.wishes: dict[str, PodRequest] = {}
        self.truth: dict[str, Allocation] = {}
        self.nodes = {name: machine(name) for name in NODES}
        self.contested: set[str] = set()  # cards that somebody else oversold
        for found in self.nodes.values():
            self.tell(NodeSeen(found))

    def tell(self, event: object) -> list[Instruction]:
        done = self.ledger.handle(event)  # type: ignore[arg-type]
        for instruction in done:
            if isinstance(instruction, Conflict):
                self.contested.update(instruction.cards)
        return done

    def allocation(self, pod: str, where: Placement) -> Allocation:
        wish = self.wishes[pod]
        grant = where.grant(pod, wish.dialect)
        rank = int(pod[1:]) % 3  # so that some are more important than others
        return Allocation(
            pod=pod, name=f"ns/{pod}", node=where.node, grant=grant, cpu=wish.cpu, started=self.now, priority=rank
        )

    def choose(self, pod: str) -> Allocation | None:
        """Filter and place, as the scheduler does."""
        with self.ledger.without_claims_of(pod, int(pod[1:]) % 3) as fleet:
            best = fleet.best(self.wishes[pod], "spread", seed=self.born)
            where = place(self.wishes[pod], fleet.view(best[0])) if best else None
        return self.allocation(pod, where) if isinstance(where, Placement) else None

    def state(self, pod: str) -> AllocationState | None:
        entry = self.ledger.entry(pod)
        return entry.state if entry else None

    # ---- what our scheduler does ------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.living) < 4)
    @rule(target=pods, wish=WISHES)
    def arrive(self, wish: PodRequest) -> str:
        self.born += 1
        pod = f"p{self.born}"
        self.wishes[pod] = wish
        self.living.add(pod)
        return pod

    @rule(pod=pods)
    def reservation(self, pod: str) -> None:
        chosen = self.choose(pod)
        if chosen is not None and pod not in self.truth:
            done = self.tell(Reserved(chosen, self.now))
            assert not done or self.state(pod) is not AllocationState.RESERVED, "a pencil on free tiles was denied"

    @rule(pod=pods)
    def rub(self, pod: str) -> None:
        self.tell(Unreserved(pod))

    @rule(pod=pods)
    def assume(self, pod: str) -> None:
        entry = self.ledger.entry(pod)
        chosen = entry.allocation if entry and entry.state is AllocationState.RESERVED else self.choose(pod)
        if chosen is not None and pod not in self.truth:
            before = self.state(pod)
            done = self.tell(Assumed(chosen, self.now))
            assert (
                not done
                or before in (AllocationState.ASSUMED, AllocationState.CONFIRMED)
                or isinstance(done[0], Denied)
            )

    @rule(pod=pods)
    def assume_blindly(self, pod: str) -> None:
        """A bind that did not look at the book: it may be denied, it must not be sold."""
        where = place(self.wishes[pod], NodeView.empty(self.nodes["n0"]))
        if isinstance(where, Placement) and pod not in self.truth:
            self.tell(Assumed(self.allocation(pod, where), self.now))

    # ---- what the API server does -----------------------------------------------------------------------------------

    @rule(pod=pods, heard=st.booleans())
    def bind_lands(self, pod: str, heard: bool) -> None:
        """Heard or not: an answer may be lost on the way."""
        entry = self.ledger.entry(pod)
        if entry and entry.state is AllocationState.ASSUMED and pod not in self.truth:
            self.truth[pod] = entry.allocation
            if heard:
                self.tell(Confirmed(entry.allocation))

    @rule(pod=pods)
    def the_answer_to_a_bind_is_lost(self, pod: str) -> None:
        self.assume(pod)
        self.bind_lands(pod, heard=False)

    @rule(pod=pods)
    def bind_is_refused(self, pod: str) -> None:
        if self.state(pod) is AllocationState.ASSUMED and pod not in self.truth:
            self.tell(Forgotten(pod))

    @rule(pod=pods)
    def a_late_error_arrives(self, pod: str) -> None:
        if pod in self.truth and self.state(pod) is AllocationState.CONFIRMED:
            self.tell(Forgotten(pod))

    @rule(pod=pods)
    def watch_shows(self, pod: str) -> None:
        if pod in self.truth:
            self.tell(Confirmed(self.truth[pod]))

    @rule(pod=consumes(pods), heard=st.booleans())
    def delete(self, pod: str, heard: bool) -> None:
        """Unheard: the watch was broken, and a list must heal it."""
        self.truth.pop(pod, None)
        self.living.discard(pod)
        if heard or self.state(pod) is not AllocationState.CONFIRMED:
            self.tell(PodGone(pod))

    @rule(pod=consumes(pods))
    def a_pod_ends_while_the_watch_is_broken(self, pod: str) -> None:
        if pod in self.truth:
            self.watch_shows(pod)
        self.delete(pod, heard=False)
        self.relist()
        assert self.state(pod) is None, "a pod that is gone is still held"

    @rule()
    def relist(self) -> None:
        self.tell(PodsListed(tuple(self.truth.values())))

    @rule(pod=pods, name=st.sampled_from(NODES), blind=st.booleans())
    def another_scheduler_binds(self, pod: str, name: str, blind: bool) -> None:
        """A pod comes around us: onto what is free in the cluster, or blindly onto anything."""
        view = NodeView.empty(self.nodes[name]) if blind else self.true_view(name)
        where = place(self.wishes[pod], view)
        if isinstance(where, Placement) and self.state(pod) is None and pod not in self.truth:
            self.truth[pod] = self.allocation(pod, where)
            self.tell(Confirmed(self.truth[pod]))

    @rule(pod=pods)
    def another_scheduler_takes_a_pencilled_tile(self, pod: str) -> None:
        self.reservation(pod)
        entry = self.ledger.entry(pod)
        if entry and entry.state is AllocationState.RESERVED and entry.allocation.grant is not None:
            self.born += 1
            grant = msgspec.structs.replace(entry.allocation.grant, pod=f"p{self.born}")
            thief = Allocation(pod=grant.pod, node=grant.node, grant=grant, started=self.now)
            self.truth[thief.pod] = thief
            self.tell(Confirmed(thief))

    def true_view(self, name: str) -> NodeView:
        fresh = Ledger()
        fresh.handle(NodeSeen(self.nodes[name]))
        fresh.handle(PodsListed(tuple(self.truth.values())))
        return fresh.fleet.view(name)

    @rule(pod=pods)
    def correct(self, pod: str) -> None:
        """A confirmed pod's grant is set right: it was on other cards all along."""
        if self.state(pod) is not AllocationState.CONFIRMED or pod not in self.truth:
            return
        where = place(self.wishes[pod], self.true_view(self.truth[pod].node))
        if isinstance(where, Placement):
            moved = self.allocation(pod, where)
            self.truth[pod] = moved
            assert moved.grant is not None
            self.tell(Corrected(pod, moved.grant))
            self.tell(Confirmed(moved))

    # ---- promises and time ------------------------------------------------------------------------------------------

    @rule(pod=pods, name=st.sampled_from(NODES))
    def nomination(self, pod: str, name: str) -> None:
        where = place(self.wishes[pod], NodeView.empty(self.nodes[name]))
        if isinstance(where, Placement) and pod not in self.truth:
            self.tell(Nominated(self.allocation(pod, where), self.now + 10))

    @rule(pod=pods, name=st.sampled_from(NODES))
    def a_promise_is_kept(self, pod: str, name: str) -> None:
        self.nomination(pod, name)
        self.assume(pod)
        self.bind_lands(pod, heard=True)

    @rule(pod=pods)
    def a_promise_is_withdrawn(self, pod: str) -> None:
        self.tell(Withdrawn(pod))
        assert self.ledger.nomination(pod) is None

    @rule(seconds=st.sampled_from([0.5, 3.0, 40.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for instruction in self.tell(Tick(self.now)):
            if isinstance(instruction, VerifyBind):
                assert self.state(instruction.pod) is AllocationState.ASSUMED, "an assumption was dropped unasked"
                live = self.truth.get(instruction.pod)
                self.tell(Confirmed(live) if live else Forgotten(instruction.pod))

    # ---- nodes ------------------------------------------------------------------------------------------------------

    @rule(
        name=st.sampled_from(NODES),
        cards=st.sampled_from([1, 2, 3]),
        size=st.sampled_from([6, 8, 8, 8]),
        healthy=st.booleans(),
    )
    def node_changes(self, name: str, cards: int, size: int, healthy: bool) -> None:
        self.nodes[name] = machine(name, cards, size, healthy)
        self.tell(NodeSeen(self.nodes[name]))

    @rule(name=st.sampled_from(NODES))
    def node_goes_and_comes_back(self, name: str) -> None:
        self.tell(NodeGone(name))
        assert name not in self.ledger.fleet
        self.tell(NodeSeen(self.nodes[name]))

    # ---- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def the_book_agrees_with_itself(self) -> None:
        self.ledger.check()

    @invariant()
    def no_tile_is_sold_twice(self) -> None:
        """By an oracle of its own: plain sums of tiles, card by card. Where others oversell, we add nothing."""
        for found in self.nodes.values():
            for card in found.cards:
                tiles = [
                    (entry.state, tile)
                    for entry in self.ledger.entries()
                    if entry.allocation.grant is not None and entry.allocation.node == found.name
                    for held in entry.allocation.grant.containers
                    for tile in held.tiles
                    if tile.uuid == card.uuid
                ]
                memory, cores = sum(tile.memory for _, tile in tiles), sum(tile.cores for _, tile in tiles)
                if memory <= card.memory and cores <= card.cores:
                    self.contested.discard(card.uuid)
                else:
                    assert card.uuid in self.contested, "sold twice, and nobody was told"
                    assert all(state is not AllocationState.RESERVED for state, _ in tiles), (
                        "pencilled onto an oversold card"
                    )

    @invariant()
    def pencils_are_counted(self) -> None:
        assert self.ledger.reservations() == sum(e.state is AllocationState.RESERVED for e in self.ledger.entries())

    @invariant()
    def the_lowest_priority_is_known(self) -> None:
        held = [entry.allocation.priority for entry in self.ledger.entries() if entry.allocation.grant is not None]
        assert self.ledger.lowest_priority() == min(held, default=None)

    @invariant()
    def a_pod_that_runs_needs_no_promise(self) -> None:
        for entry in self.ledger.entries():
            assert entry.state is not AllocationState.CONFIRMED or self.ledger.nomination(entry.allocation.pod) is None

    @invariant()
    def what_the_cluster_confirmed_is_held(self) -> None:
        for pod in self.truth:
            entry = self.ledger.entry(pod)
            if entry is not None and entry.state is AllocationState.CONFIRMED:
                assert entry.allocation == self.truth[pod]
            elif entry is None:
                raise AssertionError(f"{pod} runs in the cluster and is not in the book")

    def teardown(self) -> None:
        """Let everything settle; the book must then equal one rebuilt from a single list."""
        for _ in range(3):
            self.time_passes(100.0)
        self.relist()
        fresh = Ledger()
        for found in self.nodes.values():
            fresh.handle(NodeSeen(found))
        fresh.handle(PodsListed(tuple(self.truth.values())))
        assert {e.allocation.pod: e for e in self.ledger.entries()} == {e.allocation.pod: e for e in fresh.entries()}
        for name in NODES:
            assert self.ledger.fleet.view(name) == fresh.fleet.view(name)
        assert self.ledger.fleet.free_shares() == fresh.fleet.free_shares()
        self.ledger.check()


Cluster.TestCase.settings = settings(max_examples=150 * EFFORT, stateful_step_count=25)
TestBook = Cluster.TestCase
