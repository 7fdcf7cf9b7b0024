"""The guarantee that matters: in any order of events no tile is double-allocated, none leaks, and the ledger can be
rebuilt.

A hypothesis state machine acts as kube-scheduler, API server, kubelet and operators at once: pods are reserved,
assumed, confirmed, forgotten, deleted, corrected, nominated; nodes lose cards, become unhealthy, shrink, disappear and
come back; other schedulers bind pods to our cards; watches break and lists repair them. Its own oracle adds up tiles
without the arithmetic of the ledger.

Deliberate bugs that it caught, each alone:
  1. `_write` does not check the free capacity: two pods hold one tile ("allocated beyond its size").
  2. `_replace` does not release the entry before: the tile of a re-filtered pod leaks.
  3. `_node_seen` does not hold again: a node that changed allocates its tiles a second time.
  4. `Forgotten` also drops a confirmed pod: a late bind error frees a tile that is in use.
  5. `_listed` drops no pods: pods deleted during a watch gap are held for ever.
  6. `_tick` drops an old assumed bind instead of verifying it: a bind whose answer was lost is allocated again.
  7. `_fleet_without` releases in the fleet instead of a part of it: a second filter call frees the reservation.
  8. `_confirm` keeps the nomination: the capacity of a pod that is already running stays reserved.
  9. `ignored_by` without the pod's own reservation: a look shows too little.
"""

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from gputile.engine.fleet.fleet import Fleet
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
from tests.engine.test_overlay import facts

NODES = ("n0", "n1")
RESERVED = AllocationState.RESERVED
REQUESTS = st.sampled_from(
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
    """A cluster under random events. `truth` is what the API server knows; the ledger learns it sooner or later."""

    pods = Bundle("pods")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.now = 0.0
        self.born = 0
        self.looks = 0
        self.living: set[str] = set()  # few, so that they compete
        self.requests: dict[str, PodRequest] = {}
        self.truth: dict[str, Allocation] = {}
        self.nodes = {name: machine(name) for name in NODES}
        self.contested: set[str] = set()  # cards that another scheduler overcommitted
        for node_ in self.nodes.values():
            self.send(NodeSeen(node_))

    def send(self, event: object) -> list[Instruction]:
        done = self.ledger.handle(event)  # type: ignore[arg-type]
        for instruction in done:
            if isinstance(instruction, Conflict):
                self.contested.update(instruction.cards)
        return done

    def allocation(self, pod: str, placement: Placement) -> Allocation:
        request = self.requests[pod]
        grant = placement.grant(pod, request)
        rank = int(pod[1:]) % 3  # so that priorities differ
        return Allocation(
            pod=pod,
            name=f"ns/{pod}",
            node=placement.node,
            grant=grant,
            cpu=request.cpu,
            started=self.now,
            priority=rank,
        )

    def choose(self, pod: str) -> Allocation | None:
        """Filter and place, as the scheduler does."""
        fleet = self.ledger.fleet_for(pod, int(pod[1:]) % 3)
        best = fleet.best(self.requests[pod], "spread", seed=self.born)
        placement = place(self.requests[pod], fleet.view(best[0])) if best else None
        return self.allocation(pod, placement) if isinstance(placement, Placement) else None

    def state(self, pod: str) -> AllocationState | None:
        entry = self.ledger.entry(pod)
        return entry.state if entry else None

    # ---- what our scheduler does ------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.living) < 4)
    @rule(target=pods, request=REQUESTS)
    def arrive(self, request: PodRequest) -> str:
        self.born += 1
        pod = f"p{self.born}"
        self.requests[pod] = request
        self.living.add(pod)
        return pod

    @rule(pod=pods)
    def reservation(self, pod: str) -> None:
        chosen = self.choose(pod)
        if chosen is not None and pod not in self.truth:
            done = self.send(Reserved(chosen, self.now))
            assert not done or self.state(pod) is not AllocationState.RESERVED, "a reservation of free tiles was denied"

    @rule(pod=pods)
    def unreserve(self, pod: str) -> None:
        self.send(Unreserved(pod))

    @rule(pod=pods)
    def assume(self, pod: str) -> None:
        entry = self.ledger.entry(pod)
        chosen = entry.allocation if entry and entry.state is AllocationState.RESERVED else self.choose(pod)
        if chosen is not None and pod not in self.truth:
            before = self.state(pod)
            done = self.send(Assumed(chosen, self.now))
            assert (
                not done
                or before in (AllocationState.ASSUMED, AllocationState.CONFIRMED)
                or isinstance(done[0], Denied)
            )

    @rule(pod=pods)
    def assume_without_placing(self, pod: str) -> None:
        """A bind that ignores the ledger: it may be denied, it must not double-allocate."""
        placement = place(self.requests[pod], NodeView.empty(self.nodes["n0"]))
        if isinstance(placement, Placement) and pod not in self.truth:
            self.send(Assumed(self.allocation(pod, placement), self.now))

    # ---- what the API server does -----------------------------------------------------------------------------------

    @rule(pod=pods, confirmed=st.booleans())
    def bind_is_written(self, pod: str, confirmed: bool) -> None:
        """Confirmed or not: the response may be lost."""
        entry = self.ledger.entry(pod)
        if entry and entry.state is AllocationState.ASSUMED and pod not in self.truth:
            self.truth[pod] = entry.allocation
            if confirmed:
                self.send(Confirmed(entry.allocation))

    @rule(pod=pods)
    def the_answer_to_a_bind_is_lost(self, pod: str) -> None:
        self.assume(pod)
        self.bind_is_written(pod, confirmed=False)

    @rule(pod=pods)
    def bind_is_rejected(self, pod: str) -> None:
        if self.state(pod) is AllocationState.ASSUMED and pod not in self.truth:
            self.send(Forgotten(pod))

    @rule(pod=pods)
    def a_late_error_arrives(self, pod: str) -> None:
        if pod in self.truth and self.state(pod) is AllocationState.CONFIRMED:
            self.send(Forgotten(pod))

    @rule(pod=pods)
    def watch_shows(self, pod: str) -> None:
        if pod in self.truth:
            self.send(Confirmed(self.truth[pod]))

    @rule(pod=consumes(pods), confirmed=st.booleans())
    def delete(self, pod: str, confirmed: bool) -> None:
        """Without an event: the watch was broken, and a list must repair it."""
        self.truth.pop(pod, None)
        self.living.discard(pod)
        if confirmed or self.state(pod) is not AllocationState.CONFIRMED:
            self.send(PodGone(pod))

    @rule(pod=consumes(pods))
    def a_pod_ends_while_the_watch_is_broken(self, pod: str) -> None:
        if pod in self.truth:
            self.watch_shows(pod)
        self.delete(pod, confirmed=False)
        self.relist()
        assert self.state(pod) is None, "a pod that is gone is still held"

    @rule()
    def relist(self) -> None:
        self.send(PodsListed(tuple(self.truth.values())))

    @rule(pod=pods, name=st.sampled_from(NODES), careless=st.booleans())
    def another_scheduler_binds(self, pod: str, name: str, careless: bool) -> None:
        """Another scheduler binds a pod: to free cards, or to any cards (`careless`)."""
        view = NodeView.empty(self.nodes[name]) if careless else self.true_view(name)
        placement = place(self.requests[pod], view)
        if isinstance(placement, Placement) and self.state(pod) is None and pod not in self.truth:
            self.truth[pod] = self.allocation(pod, placement)
            self.send(Confirmed(self.truth[pod]))

    @rule(pod=pods)
    def another_scheduler_takes_a_reserved_tile(self, pod: str) -> None:
        self.reservation(pod)
        entry = self.ledger.entry(pod)
        if entry and entry.state is AllocationState.RESERVED and entry.allocation.grant is not None:
            self.born += 1
            grant = msgspec.structs.replace(entry.allocation.grant, pod=f"p{self.born}")
            thief = Allocation(pod=grant.pod, node=grant.node, grant=grant, started=self.now)
            self.truth[thief.pod] = thief
            self.send(Confirmed(thief))

    def true_view(self, name: str) -> NodeView:
        fresh = Ledger()
        fresh.handle(NodeSeen(self.nodes[name]))
        fresh.handle(PodsListed(tuple(self.truth.values())))
        return fresh.fleet.view(name)

    @rule(pod=pods)
    def correct(self, pod: str) -> None:
        """The grant of a confirmed pod is corrected: the pod was on other cards all along."""
        if self.state(pod) is not AllocationState.CONFIRMED or pod not in self.truth:
            return
        placement = place(self.requests[pod], self.true_view(self.truth[pod].node))
        if isinstance(placement, Placement):
            moved = self.allocation(pod, placement)
            self.truth[pod] = moved
            assert moved.grant is not None
            self.send(Corrected(pod, moved.grant))
            self.send(Confirmed(moved))

    # ---- nominations and time -------------------------------------------------------------------------------------

    @rule(pod=pods, name=st.sampled_from(NODES))
    def nomination(self, pod: str, name: str) -> None:
        placement = place(self.requests[pod], NodeView.empty(self.nodes[name]))
        if isinstance(placement, Placement) and pod not in self.truth:
            self.send(Nominated(self.allocation(pod, placement), self.now + 10))

    @rule(pod=pods, name=st.sampled_from(NODES))
    def a_nominated_pod_is_bound(self, pod: str, name: str) -> None:
        self.nomination(pod, name)
        self.assume(pod)
        self.bind_is_written(pod, confirmed=True)

    @rule(pod=pods)
    def a_nomination_is_withdrawn(self, pod: str) -> None:
        self.send(Withdrawn(pod))
        assert self.ledger.nomination(pod) is None

    @rule(seconds=st.sampled_from([0.5, 3.0, 40.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for instruction in self.send(Tick(self.now)):
            if isinstance(instruction, VerifyBind):
                assert self.state(instruction.pod) is AllocationState.ASSUMED, (
                    "an assumed bind was dropped without verification"
                )
                live = self.truth.get(instruction.pod)
                self.send(Confirmed(live) if live else Forgotten(instruction.pod))

    # ---- nodes ------------------------------------------------------------------------------------------------------

    @rule(
        name=st.sampled_from(NODES),
        cards=st.sampled_from([1, 2, 3]),
        size=st.sampled_from([6, 8, 8, 8]),
        healthy=st.booleans(),
    )
    def node_changes(self, name: str, cards: int, size: int, healthy: bool) -> None:
        self.nodes[name] = machine(name, cards, size, healthy)
        self.send(NodeSeen(self.nodes[name]))

    @rule(name=st.sampled_from(NODES))
    def node_goes_and_comes_back(self, name: str) -> None:
        self.send(NodeGone(name))
        assert name not in self.ledger.fleet
        self.send(NodeSeen(self.nodes[name]))

    # ---- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def the_ledger_is_consistent(self) -> None:
        self.ledger.check()

    @invariant()
    def no_tile_is_double_allocated(self) -> None:
        """By an independent oracle: plain sums of tiles, card by card. We add nothing to cards that others
        overcommit."""
        for node_ in self.nodes.values():
            for card in node_.cards:
                tiles = [
                    (entry.state, tile)
                    for entry in self.ledger.entries()
                    if entry.allocation.grant is not None and entry.allocation.node == node_.name
                    for held in entry.allocation.grant.containers
                    for tile in held.tiles
                    if tile.uuid == card.uuid
                ]
                memory, cores = sum(tile.memory for _, tile in tiles), sum(tile.cores for _, tile in tiles)
                if memory <= card.memory and cores <= card.cores:
                    self.contested.discard(card.uuid)
                else:
                    assert card.uuid in self.contested, "double-allocated without a Conflict"
                    assert all(state is not AllocationState.RESERVED for state, _ in tiles), (
                        "reserved on an overcommitted card"
                    )

    @invariant()
    def reservations_are_counted(self) -> None:
        assert self.ledger.reservations() == sum(e.state is AllocationState.RESERVED for e in self.ledger.entries())

    @invariant()
    def the_lowest_priority_is_known(self) -> None:
        held = [entry.allocation.priority for entry in self.ledger.entries() if entry.allocation.grant is not None]
        assert self.ledger.lowest_priority() == min(held, default=None)

    @invariant()
    def a_look_shows_what_the_pod_may_use_and_changes_nothing(self) -> None:
        """By a new sum; at each step for another pod."""
        if not self.living:
            return
        self.looks += 1
        pod = sorted(self.living)[self.looks % len(self.living)]
        priority, before = int(pod[1:]) % 3, facts(self.ledger.fleet)
        entries = {e.allocation.pod: e for e in self.ledger.entries()}
        held = [e.allocation for e in entries.values() if e.allocation.pod != pod or e.state is not RESERVED]
        nominated = [n.allocation for n in self.ledger.nominations() if n.allocation.pod not in entries]
        held += [a for a in nominated if a.pod != pod and a.priority >= priority]
        fresh = Fleet()
        for name in self.ledger.fleet.names():
            fresh.set_node(self.nodes[name])
        for allocation in held:
            fresh.hold(allocation.node, allocation.uses(), allocation.cpu, allocation.memory)
        fleet = self.ledger.fleet_for(pod, priority)
        assert [fleet.view(name) for name in fleet.names()] == [fresh.view(name) for name in fresh.names()]
        assert fleet.refusals(self.requests[pod]) == fresh.refusals(self.requests[pod])
        assert facts(self.ledger.fleet) == before

    @invariant()
    def a_running_pod_has_no_nomination(self) -> None:
        for entry in self.ledger.entries():
            assert entry.state is not AllocationState.CONFIRMED or self.ledger.nomination(entry.allocation.pod) is None

    @invariant()
    def what_the_cluster_confirmed_is_held(self) -> None:
        for pod in self.truth:
            entry = self.ledger.entry(pod)
            if entry is not None and entry.state is AllocationState.CONFIRMED:
                assert entry.allocation == self.truth[pod]
            elif entry is None:
                raise AssertionError(f"{pod} runs in the cluster and is not in the ledger")

    def teardown(self) -> None:
        """After a while without changes the ledger must equal one that is rebuilt from a single list."""
        for _ in range(3):
            self.time_passes(100.0)
        self.relist()
        fresh = Ledger()
        for node_ in self.nodes.values():
            fresh.handle(NodeSeen(node_))
        fresh.handle(PodsListed(tuple(self.truth.values())))
        assert {e.allocation.pod: e for e in self.ledger.entries()} == {e.allocation.pod: e for e in fresh.entries()}
        for name in NODES:
            assert self.ledger.fleet.view(name) == fresh.fleet.view(name)
        names = self.ledger.fleet.names()
        assert sorted(names) == sorted(fresh.fleet.names())
        assert self.ledger.fleet.free_shares_of(names) == fresh.fleet.free_shares_of(names)
        self.ledger.check()


Cluster.TestCase.settings = settings(max_examples=150 * EFFORT, stateful_step_count=25)
TestLedger = Cluster.TestCase
