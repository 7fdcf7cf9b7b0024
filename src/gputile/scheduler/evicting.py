"""Whom to evict for a pod, so that it fits on real cards: one node at a time, decided from the book. No I/O.

Pods that are on their way out count as gone for free: nobody else is evicted for room that appears by itself. Pods
between filter and bind cannot be evicted. Disruption budgets are weighed when kube-scheduler asks, as it does itself,
and kept to the letter when we act on our own.
"""

from collections.abc import Callable, Sequence
from datetime import datetime

import msgspec

from gputile.book.ledger import State
from gputile.dialects.wire import Pod
from gputile.engine.placing import Placement, place
from gputile.engine.preempting import Cost, Holder, cost, victims, without
from gputile.kube.budgets import Budget
from gputile.model.requests import PodRequest
from gputile.scheduler.mirror import Mirror
from gputile.scheduler.settings import Settings
from gputile.scheduler.verbs import seed_of

ALREADY_GOING = -(2**31)
"""Below every priority: those who leave anyway are the first to be counted on."""

STUCK = 10.0  # seconds after the end of its grace period from which on nobody counts on a pod's leaving


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """On this node, once these pods have left, the pod is placed like this."""

    node: str
    victims: tuple[Holder, ...]  # those that leave anyway too
    where: Placement

    @property
    def to_evict(self) -> tuple[Holder, ...]:
        return tuple(holder for holder in self.victims if holder.priority != ALREADY_GOING)

    @property
    def cost(self) -> Cost:
        return cost(self.to_evict)


class Forbidden(msgspec.Struct, frozen=True):
    """Room could be made on this node, if these budgets allowed it."""

    node: str
    budgets: tuple[str, ...]


class Evicting:
    """See the module's text."""

    def __init__(self, mirror: Mirror, settings: Settings, wall: Callable[[], int]) -> None:
        self._mirror, self._ledger, self._policy, self._wall = mirror, mirror.ledger, settings.policy, wall
        self.budgets: tuple[Budget, ...] = ()
        self.asked_to_go: set[str] = set()  # UIDs that we have evicted; the watch may not have shown it yet

    def plan(self, pod: Pod, asked: PodRequest, node: str) -> Plan | None:
        """The cheapest way, budgets weighed; None if nobody's leaving helps. Without victims if there is room."""
        return self._plan(pod, asked, node, self.holders(node, pod.priority))

    def lawful_plan(self, pod: Pod, asked: PodRequest, node: str) -> Plan | Forbidden | None:
        """The cheapest way that no budget forbids."""
        everybody = self.holders(node, pod.priority)
        willing = [holder for holder in everybody if not holder.budget_cost]
        plan = self._plan(pod, asked, node, willing)
        while plan is not None and (overdrawn := self._overdrawn(plan.to_evict)):
            kept = max((h for h in plan.to_evict if self._protectors(h.pod, overdrawn)), key=lambda h: h.priority)
            willing = [holder for holder in willing if holder is not kept]
            plan = self._plan(pod, asked, node, willing)
        if plan is not None:
            return plan
        unlawful = self._plan(pod, asked, node, everybody)
        return None if unlawful is None else Forbidden(node, self._in_the_way(unlawful.to_evict))

    def _plan(self, pod: Pod, asked: PodRequest, node: str, holders: Sequence[Holder]) -> Plan | None:
        if node not in self._ledger.fleet:
            return None
        with self._ledger.aside(pod.uid, pod.priority) as fleet:
            view = fleet.view(node)
        found = victims(asked, view, holders, pod.priority)
        if found is None:
            return None
        where = place(asked, without(view, found), self._policy, seed_of(pod.uid))
        return Plan(node=node, victims=found, where=where) if isinstance(where, Placement) else None

    # ---- who is there -----------------------------------------------------------------------------------------------

    def holders(self, node: str, below: int) -> list[Holder]:
        """Less important pods that are really there, with what their eviction costs."""
        bound = {e.holding.pod for e in self._ledger.on_node(node) if e.state is State.CONFIRMED}
        found = [h for h in self._ledger.holders(node) if h.pod in bound and h.priority < below]
        return [
            msgspec.structs.replace(h, priority=ALREADY_GOING)
            if self.is_going(h.pod)
            else msgspec.structs.replace(h, budget_cost=len(self._protectors(h.pod, self._spent())))
            for h in found
        ]

    def is_going(self, uid: str) -> bool:
        """Whether the pod will be gone in a moment; one that should be gone by now and is not, is stuck."""
        pod = self._mirror.pod(uid)
        if pod is None or not pod.is_going:
            return uid in self.asked_to_go
        said = pod.metadata.deletion_timestamp if pod.metadata else None
        return self._wall() / 1e9 < datetime.fromisoformat(said or "").timestamp() + STUCK

    # ---- budgets ----------------------------------------------------------------------------------------------------

    def violations(self, gone: Sequence[Holder]) -> int:
        return sum(holder.budget_cost for holder in gone)

    def is_protected(self, uid: str) -> bool:
        return bool(self._protectors(uid, self.budgets))

    def _spent(self) -> list[Budget]:
        return [budget for budget in self.budgets if budget.allowed == 0]

    def _protectors(self, uid: str, budgets: Sequence[Budget]) -> list[Budget]:
        pod = self._mirror.pod(uid) if budgets else None
        return [b for b in budgets if pod is not None and b.protects(pod.namespace, pod.labels)]

    def _overdrawn(self, gone: Sequence[Holder]) -> list[Budget]:
        """Budgets that allow some of these to go, but not all."""
        return [b for b in self.budgets if sum(bool(self._protectors(h.pod, [b])) for h in gone) > b.allowed]

    def _in_the_way(self, gone: Sequence[Holder]) -> tuple[str, ...]:
        return tuple(sorted(budget.key for budget in self._overdrawn(gone)))
