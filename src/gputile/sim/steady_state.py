"""Simulation of a cluster in steady state: pods also end, instead of filling the cluster up.

Pods are drawn from the list and arrive at random times, at a rate that keeps a given part of the cluster busy. The
cluster starts in equilibrium: it is filled with pods drawn in proportion to their run time, each at a random point of
its run. A pod that does not fit is pending; pending pods are retried, oldest first, when a pod ends.
"""

import heapq
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from gputile.engine.fleet.fleet import Fleet
from gputile.engine.placement.place import fits
from gputile.model.cards import Node
from gputile.model.errors import InputError
from gputile.model.requests import PodRequest
from gputile.sim.replay import PlacedPod, Progress, ReplayPlan, average_card, fleet_of, schedule, size_of
from gputile.sim.traces import Job


class SteadyRun(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one run; means over time."""

    plan: ReplayPlan
    cards: int
    pods: int
    hours: float  # of simulated time
    turned_over: float  # cards released in that time, in percent of all cards
    allocated: float  # percent of the cards
    waiting: float  # pods
    waited_share: float  # percent of the pods that did not start immediately
    mean_wait: float  # minutes, over all pods; pods that are pending at the end count up to then
    p95_wait: float
    never_started: int
    seconds: float


def steady(
    nodes: Sequence[Node],
    jobs: Sequence[Job],
    plan: ReplayPlan,
    progress: Progress,
    *,
    base: Sequence[Node] | None = None,
    pods: int | None = None,
    longest: float = float("inf"),
) -> SteadyRun:
    """Run one simulation. `base` defines the load, `pods` how many arrive, `longest` (seconds) limits the durations."""
    start = time.perf_counter()
    timed = [msgspec.structs.replace(job, seconds=min(job.seconds, longest)) for job in jobs if job.seconds]
    if not any(job.request.asks for job in timed):
        raise InputError(
            "the list: no GPU pod has the times scheduled_time and deletion_time; add them, so that pods can end"
        )
    simulation = _Simulation(nodes, timed, plan, base or nodes)
    simulation.fill()
    total = pods or len(jobs)
    for number in range(total):
        simulation.arrive(number)
        if number % 100 == 0:
            progress(number / total)
    return simulation.result(total, time.perf_counter() - start)


class _PendingPod(msgspec.Struct):
    """A pod that does not fit yet."""

    job: Job
    seconds: float  # run time
    since: float
    number: int


class _Simulation:
    """The simulated cluster: fleet, queue of pending pods, clock and measurements."""

    def __init__(self, nodes: Sequence[Node], jobs: list[Job], plan: ReplayPlan, base: Sequence[Node]) -> None:
        self._jobs, self._plan = jobs, plan
        self._fleet: Fleet = fleet_of(nodes, plan)
        self._cards = sum(len(node.cards) for node in nodes)
        self._average = average_card(base)
        self._load = plan.ratio * sum(len(node.cards) for node in base)  # in cards
        if plan.mix_from_list:
            self._fleet.scorer.learn_all([job.request for job in jobs])
        self._rng = np.random.default_rng(plan.seed)
        self._sizes = np.array([size_of(job.request, self._average) for job in jobs])
        self._seconds = np.array([job.seconds or 0.0 for job in jobs])
        self._pause = float(np.mean(self._sizes * self._seconds)) / self._load
        self._now = 0.0
        self._ends: list[tuple[float, int, PlacedPod]] = []
        self._queue: list[_PendingPod] = []
        self._all = self._fleet.free_cards()
        self._busy = self._pending_time = self._released = 0.0  # cards x seconds; pods x seconds; cards
        self._waits: list[float] = []

    def fill(self) -> None:
        """Fill the cluster with pods as in equilibrium."""
        chance = self._seconds / self._seconds.sum()
        load = 0.0
        number = -1
        while True:
            picked = int(self._rng.choice(len(self._jobs), p=chance))
            load += float(self._sizes[picked])
            if load > self._load:
                return
            self._submit(self._jobs[picked], number, float(self._rng.random() * self._seconds[picked]))
            number -= 1

    def arrive(self, number: int) -> None:
        self._advance(self._now + float(self._rng.exponential(self._pause)))
        job = self._jobs[int(self._rng.integers(len(self._jobs)))]
        self._submit(job, number, job.seconds or 0.0)

    def _submit(self, job: Job, number: int, seconds: float) -> None:
        """Start the pod now, or queue it."""
        if self._start(job, number, seconds):
            self._record_wait(number, 0.0)
        else:
            self._queue.append(_PendingPod(job, seconds, self._now, number))

    def _advance(self, until: float) -> None:
        """Advance the clock: pods end, and pending pods may start in their place."""
        while self._ends and self._ends[0][0] <= until:
            at, _, pod = heapq.heappop(self._ends)
            self._pass_time(at)
            request = pod.request
            self._fleet.release(pod.node, pod.uses, request.cpu, request.memory)
            self._released += size_of(request, self._average)
            self._retry(pod.node)
        self._pass_time(until)

    def _pass_time(self, until: float) -> None:
        self._busy += (self._all - self._fleet.free_cards()) * (until - self._now)
        self._pending_time += len(self._queue) * (until - self._now)
        self._now = until

    def _retry(self, node: str) -> None:
        """Only the node with new free capacity can take a pod; a kind of pod that does not fit is not tried again."""
        rejected: set[tuple[PodRequest, ...]] = set()
        for pending in list(self._queue):
            kind = (pending.job.request,)
            if kind in rejected:
                continue
            if not fits(pending.job.request, self._fleet.view(node)):
                rejected.add(kind)
            elif self._start(pending.job, pending.number, pending.seconds, again=True):
                self._queue.remove(pending)
                self._record_wait(pending.number, self._now - pending.since)

    def _start(self, job: Job, number: int, seconds: float, *, again: bool = False) -> bool:
        pod = schedule(self._fleet, job.request, self._plan, number, again=again)
        if pod is None:
            return False
        heapq.heappush(self._ends, (self._now + seconds, number, pod))
        return True

    def _record_wait(self, number: int, wait: float) -> None:
        """Only pods that arrived count, not those of the initial fill."""
        if number >= 0:
            self._waits.append(wait)

    def result(self, pods: int, seconds: float) -> SteadyRun:
        left = [pending for pending in self._queue if pending.number >= 0]
        waits = np.array([*self._waits, *(self._now - pending.since for pending in left)]) / 60
        span = max(self._now, 1e-9)
        return SteadyRun(
            plan=self._plan,
            cards=self._cards,
            pods=pods,
            hours=self._now / 3600,
            turned_over=100 * self._released / self._cards,
            allocated=100 * self._busy / span / self._cards,
            waiting=self._pending_time / span,
            waited_share=100 * float(np.mean(waits > 0)),
            mean_wait=float(waits.mean()),
            p95_wait=float(np.quantile(waits, 0.95)),
            never_started=len(left),
            seconds=seconds,
        )
