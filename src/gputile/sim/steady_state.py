"""The same pods, but they also end: a cluster in steady state instead of one that fills up.

Pods are drawn from the list and arrive at random moments, so often that the work they bring keeps a given part of the
cluster busy. The cluster starts as if it had always run: filled with pods drawn in proportion to how long they run,
each somewhere in its life. A pod that fits nowhere waits; the waiting are tried again, oldest first, when one ends.
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
from gputile.sim.replay import PlacedPod, ReplayPlan, Tell, average_card, fleet_of, schedule, size_of
from gputile.sim.traces import Job


class SteadyRun(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one run; means over time."""

    plan: ReplayPlan
    cards: int
    pods: int
    hours: float  # that were simulated
    turned_over: float  # percent of the cards' worth that was given back in that time
    allocated: float  # percent of the cards
    waiting: float  # pods
    waited_share: float  # percent of the pods that did not start at once
    mean_wait: float  # minutes, over all pods; those still waiting at the end count up to then
    p95_wait: float
    never_started: int
    seconds: float


def steady(
    nodes: Sequence[Node],
    jobs: Sequence[Job],
    plan: ReplayPlan,
    tell: Tell,
    *,
    base: Sequence[Node] | None = None,
    pods: int | None = None,
    longest: float = float("inf"),
) -> SteadyRun:
    """`base` says how much work comes, `pods` how many arrive, `longest` (seconds) cuts the durations."""
    start = time.perf_counter()
    lasting = [msgspec.structs.replace(job, seconds=min(job.seconds, longest)) for job in jobs if job.seconds]
    if not any(job.request.asks for job in lasting):
        raise InputError("no GPU pod of the list has times (scheduled_time, deletion_time), so pods cannot leave")
    world = _World(nodes, lasting, plan, base or nodes)
    world.fill()
    total = pods or len(jobs)
    for number in range(total):
        world.arrive(number)
        if number % 100 == 0:
            tell(number / total)
    return world.result(total, time.perf_counter() - start)


class _Waiting(msgspec.Struct):
    job: Job
    seconds: float  # that it will run
    since: float
    number: int


class _World:
    def __init__(self, nodes: Sequence[Node], jobs: list[Job], plan: ReplayPlan, base: Sequence[Node]) -> None:
        self._jobs, self._plan = jobs, plan
        self._fleet: Fleet = fleet_of(nodes, plan)
        self._cards = sum(len(node.cards) for node in nodes)
        self._average = average_card(base)
        self._load = plan.ratio * sum(len(node.cards) for node in base)  # cards' worth of work
        if plan.mix_from_list:
            self._fleet.learn_all([job.request for job in jobs])
        self._dice = np.random.default_rng(plan.seed)
        self._sizes = np.array([size_of(job.request, self._average) for job in jobs])
        self._seconds = np.array([job.seconds or 0.0 for job in jobs])
        self._pause = float(np.mean(self._sizes * self._seconds)) / self._load
        self._now = 0.0
        self._ends: list[tuple[float, int, PlacedPod]] = []
        self._queue: list[_Waiting] = []
        self._all = self._fleet.free_cards()
        self._busy = self._waited = self._given_back = 0.0  # cards x seconds; pods x seconds; cards
        self._waits: list[float] = []

    def fill(self) -> None:
        """As if the cluster had always run."""
        chance = self._seconds / self._seconds.sum()
        load = 0.0
        number = -1
        while True:
            picked = int(self._dice.choice(len(self._jobs), p=chance))
            load += float(self._sizes[picked])
            if load > self._load:
                return
            self._come(self._jobs[picked], number, float(self._dice.random() * self._seconds[picked]))
            number -= 1

    def arrive(self, number: int) -> None:
        self._advance(self._now + float(self._dice.exponential(self._pause)))
        job = self._jobs[int(self._dice.integers(len(self._jobs)))]
        self._come(job, number, job.seconds or 0.0)

    def _come(self, job: Job, number: int, seconds: float) -> None:
        """Start now, or wait."""
        if self._start(job, number, seconds):
            self._note(number, 0.0)
        else:
            self._queue.append(_Waiting(job, seconds, self._now, number))

    def _advance(self, until: float) -> None:
        """Let pods end up to a moment; whoever waits may take their place at once."""
        while self._ends and self._ends[0][0] <= until:
            at, _, held = heapq.heappop(self._ends)
            self._pass_time(at)
            request = held.request
            self._fleet.release(held.node, held.uses, request.cpu, request.memory)
            self._given_back += size_of(request, self._average)
            self._retry(held.node)
        self._pass_time(until)

    def _pass_time(self, until: float) -> None:
        self._busy += (self._all - self._fleet.free_cards()) * (until - self._now)
        self._waited += len(self._queue) * (until - self._now)
        self._now = until

    def _retry(self, node: str) -> None:
        """Only the node that gained room can take anybody; a kind of pod that it refuses is not asked again."""
        refused: set[tuple[PodRequest, ...]] = set()
        for waiting in list(self._queue):
            kind = (waiting.job.request,)
            if kind in refused:
                continue
            if not fits(waiting.job.request, self._fleet.view(node)):
                refused.add(kind)
            elif self._start(waiting.job, waiting.number, waiting.seconds, again=True):
                self._queue.remove(waiting)
                self._note(waiting.number, self._now - waiting.since)

    def _start(self, job: Job, number: int, seconds: float, *, again: bool = False) -> bool:
        held = schedule(self._fleet, job.request, self._plan, number, again=again)
        if held is None:
            return False
        heapq.heappush(self._ends, (self._now + seconds, number, held))
        return True

    def _note(self, number: int, wait: float) -> None:
        """Only pods that arrived count, not those the cluster began with."""
        if number >= 0:
            self._waits.append(wait)

    def result(self, pods: int, seconds: float) -> SteadyRun:
        left = [waiting for waiting in self._queue if waiting.number >= 0]
        waits = np.array([*self._waits, *(self._now - waiting.since for waiting in left)]) / 60
        span = max(self._now, 1e-9)
        return SteadyRun(
            plan=self._plan,
            cards=self._cards,
            pods=pods,
            hours=self._now / 3600,
            turned_over=100 * self._given_back / self._cards,
            allocated=100 * self._busy / span / self._cards,
            waiting=self._waited / span,
            waited_share=100 * float(np.mean(waits > 0)),
            mean_wait=float(waits.mean()),
            p95_wait=float(np.quantile(waits, 0.95)),
            never_started=len(left),
            seconds=seconds,
        )
