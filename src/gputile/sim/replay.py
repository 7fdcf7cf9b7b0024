"""Replay a list of pods on a list of nodes with the production core, until more has arrived than fits.

Pods arrive one by one and are never moved; a pod that fits on no node is dropped. This is the experiment that compares
placement policies (docs/packing.md). It measures how much of the cluster's GPU is allocated.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from gputile.engine.fleet.fleet import Fleet
from gputile.engine.placement.place import Placement
from gputile.engine.placement.shares import CARD, ask_share
from gputile.engine.policies.table import POLICIES
from gputile.model.cards import Node, Use
from gputile.model.requests import PodRequest, Role
from gputile.model.units import MiB
from gputile.sim.traces import Job

Progress = Callable[[float], None]
"""Called with the completed part of the work, 0 to 1."""


class ReplayPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of one replay."""

    policy: str
    seed: int = 42
    ratio: float = 1.3  # GPU demand that arrives, over capacity
    random_ties: bool = False  # random choice among equally good nodes, instead of a fixed order
    shuffle_nodes: bool = True  # the fixed order is random per replay; otherwise it is the order of the list
    mix_from_list: bool = False  # learn the workload from the whole list beforehand, as FGD's paper does


class CurvePoint(msgspec.Struct, frozen=True):
    """The cluster after so much load has arrived; all in percent of its cards."""

    arrived: float
    allocated: float
    fragment: float  # idle, and unusable for the pods of the list


class PlacedPod(msgspec.Struct, frozen=True):
    """A pod that was placed, and what it holds."""

    node: str
    uses: Mapping[str, Use]
    request: PodRequest


class ReplayRun(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one replay."""

    plan: ReplayPlan
    cards: int  # in the cluster
    pods: int
    refused: int
    allocated_cards: float
    final: float  # percent of the cards allocated at the end
    at_full: float | None  # mean while the arrived load rounds to 100 %; None if that was not reached
    first_refusal: float | None  # arrived load at the first rejected GPU pod
    fragment: float  # at the end
    seconds: float
    curve: tuple[CurvePoint, ...]


def size_of(request: PodRequest, average_card: MiB) -> float:
    """In cards of average size, in the main phase of the pod."""
    main = [ask for ask in request.asks if ask.role is not Role.INIT]
    return sum(ask.cards * ask_share(ask, average_card) for ask in main) / CARD


def average_card(nodes: Sequence[Node]) -> MiB:
    cards = [card.memory for node in nodes for card in node.cards]
    return sum(cards) // max(1, len(cards))


def arrivals(jobs: Sequence[Job], target: float, seed: int, average: MiB) -> list[Job]:
    """The shuffled list, extended by random draws from it or thinned out until the target (in cards) is reached."""
    rng = np.random.default_rng(seed)
    order = [jobs[n] for n in rng.permutation(len(jobs))]
    total = sum(size_of(job.request, average) for job in order)
    while total > target and order:
        total -= size_of(order.pop(int(rng.integers(len(order)))).request, average)
    while any(size_of(job.request, average) for job in jobs):
        drawn = jobs[int(rng.integers(len(jobs)))]
        cards = max((ask.cards for ask in drawn.request.asks), default=1)
        if total + size_of(drawn.request, average) / cards > target:
            break
        order.append(drawn)
        total += size_of(drawn.request, average)
    return order


def replay(
    nodes: Sequence[Node],
    jobs: Sequence[Job],
    plan: ReplayPlan,
    progress: Progress,
    *,
    base: Sequence[Node] | None = None,
) -> ReplayRun:
    """Run one replay. `base` defines how much arrives and what 100 % is, where the cluster was changed and the demand
    was not."""
    start = time.perf_counter()
    base = base or nodes
    fleet = fleet_of(nodes, plan)
    cards = sum(len(node.cards) for node in nodes)
    average, capacity = average_card(base), sum(len(node.cards) for node in base)
    pods = arrivals(jobs, plan.ratio * capacity, plan.seed, average)
    meter = _Meter(fleet, [job.request for job in jobs], capacity, average)
    if plan.mix_from_list:
        fleet.scorer.learn_all([job.request for job in jobs])
    for number, job in enumerate(pods):
        meter.count(job.request, schedule(fleet, job.request, plan, number) is not None)
        if number % 100 == 0:
            progress(number / len(pods))
    return meter.run(plan, cards, len(pods), time.perf_counter() - start)


def fleet_of(nodes: Sequence[Node], plan: ReplayPlan) -> Fleet:
    order = np.random.default_rng(plan.seed + 1000).permutation(len(nodes)) if plan.shuffle_nodes else range(len(nodes))
    fleet = Fleet()
    for n in order:
        fleet.set_node(nodes[n])
    return fleet


def schedule(
    fleet: Fleet, request: PodRequest, plan: ReplayPlan, number: int, *, again: bool = False
) -> PlacedPod | None:
    """Filter, place and hold one pod; None if no node fits. A pod that is retried is not learnt again."""
    if not again and POLICIES[plan.policy].learnt:
        fleet.scorer.observe(request)  # no effect when the workload was taken from the list
        fleet.scorer.refresh()
    seed = plan.seed * 1_000_003 + number
    best = fleet.best(request, plan.policy, seed=seed, keep=1, shuffle=plan.random_ties)
    if not best:
        return None
    placement = fleet.place(request, best[0], plan.policy, seed)
    assert isinstance(placement, Placement), placement
    pod = PlacedPod(best[0], placement.grant("", request).uses(), request)
    fleet.hold(pod.node, pod.uses, request.cpu, request.memory)
    return pod


class _Meter:
    """Measures what arrives and what is allocated, with one point of the curve per percent of load."""

    def __init__(self, fleet: Fleet, mix: list[PodRequest], capacity: int, average: MiB) -> None:
        self._fleet, self._capacity, self._average = fleet, capacity, average
        self._fragment_meter = fleet.fragment_meter(mix)
        self._all = fleet.free_cards()
        self._arrived = self._allocated = 0.0
        self._refused = 0
        self._first: float | None = None
        self._at_full: list[float] = []
        self._curve: list[CurvePoint] = []

    def count(self, request: PodRequest, fitted: bool) -> None:
        size = size_of(request, self._average)
        self._arrived += size
        self._allocated = (
            self._all - self._fleet.free_cards()
        )  # the true shares, independent of the cards the pods are on
        self._refused += not fitted
        if not fitted and size and self._first is None:
            self._first = self._percent(self._arrived)
        load = round(self._percent(self._arrived))
        if load == 100 or (load > 100 and not self._at_full):  # on a small cluster one pod may skip 100 %
            self._at_full.append(self._percent(self._allocated))
        if self._percent(self._arrived) >= len(self._curve):
            self._add_point()

    def _percent(self, cards: float) -> float:
        return 100.0 * cards / self._capacity

    def _add_point(self) -> None:
        fragment = self._percent(self._fragment_meter())
        self._curve.append(CurvePoint(self._percent(self._arrived), self._percent(self._allocated), fragment))

    def run(self, plan: ReplayPlan, cards: int, pods: int, seconds: float) -> ReplayRun:
        self._add_point()
        return ReplayRun(
            plan=plan,
            cards=cards,
            pods=pods,
            refused=self._refused,
            allocated_cards=self._allocated,
            final=self._percent(self._allocated),
            at_full=float(np.mean(self._at_full)) if self._at_full else None,
            first_refusal=self._first,
            fragment=self._curve[-1].fragment,
            seconds=seconds,
            curve=tuple(self._curve),
        )
