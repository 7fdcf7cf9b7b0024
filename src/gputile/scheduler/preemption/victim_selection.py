"""Selects the pods to evict so that a pending pod fits on real cards: one node at a time, from the ledger. No I/O.

Terminating pods count as gone: no other pod is evicted for capacity that is about to be freed. Pods between filter and
bind cannot be evicted, nor can pods that are stuck in termination. When kube-scheduler asks, violations of disruption
budgets are minimized, as it does itself; when gputile preempts on its own, budgets are never violated. Where the quota
of the pod's namespace is used up, only evicting pods of that namespace frees quota.
"""

from collections.abc import Callable, Collection

import msgspec

from gputile.dialects.kube_objects import Pod
from gputile.engine.placement.place import Placement, place
from gputile.engine.search_budget import SearchBudget
from gputile.engine.victims import Cost, RequestAfterEviction, Victim, cost, victims, without
from gputile.kube.disruption_budgets import DisruptionBudget
from gputile.ledger.ledger import AllocationState, LedgerEntry
from gputile.model.cards import NodeView
from gputile.model.requests import PodRequest
from gputile.model.units import unix_seconds
from gputile.scheduler.settings import Settings
from gputile.scheduler.state.cluster_state import ClusterState
from gputile.scheduler.state.pod_requests import seed_of

STUCK = 10.0  # seconds after its grace period, when a terminating pod no longer counts as leaving
NODE_STEPS, NODE_SECONDS = 4000, 0.01  # limit of the search on one node: extender calls wait meanwhile
UNKNOWN_GRACE = 300.0  # seconds, for pods without cards, whose grace period is not stored


class PreemptionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The placement of a pod on one node after these pods are gone."""

    node: str
    victims: tuple[Victim, ...]  # to be evicted
    leaving: tuple[Victim, ...]  # terminating already, and counted as gone
    where: Placement

    @property
    def fits_already(self) -> bool:
        return not self.victims and not self.leaving

    @property
    def cost(self) -> Cost:
        return cost(self.victims)


class BlockedByBudgets(msgspec.Struct, frozen=True):
    """A node where eviction would help, if these disruption budgets allowed it."""

    node: str
    budgets: tuple[str, ...]


class VictimSelector:
    """Finds the cheapest preemption plan on a node, from the ledger and the disruption budgets."""

    def __init__(
        self, cluster_state: ClusterState, settings: Settings, clock: Callable[[], float], wall: Callable[[], int]
    ) -> None:
        self._cluster_state, self._ledger, self._policy = cluster_state, cluster_state.ledger, settings.policy
        self._clock, self._wall = clock, wall
        self.budgets: tuple[DisruptionBudget, ...] | None = None  # None: unknown
        self.evicted: set[str] = set()  # UIDs that were evicted; the watch may not have shown it yet
        self.refused_until: dict[str, float] = {}  # UIDs whose eviction the API server refused; when to try again

    # ---- plans ------------------------------------------------------------------------------------------------------

    def plan(
        self, pod: Pod, request: PodRequest, node: str, budget: SearchBudget | None = None
    ) -> PreemptionPlan | None:
        """The cheapest plan, budget violations included. None: eviction does not help. No victims: the pod fits."""
        part = self._part(budget)
        exhausted = [budget for budget in self.budgets or () if budget.allowed == 0]
        candidates = [
            msgspec.structs.replace(victim, budget_cost=len(self._protectors(victim, exhausted)))
            for victim in self._evictable(node, pod.priority)
        ]
        view, after = self._view(pod, node), self._request_after(pod, request)
        chosen = (
            victims(request, view, candidates, pod.priority, after=after, budget=part) if view is not None else None
        )
        return self._plan(pod, request, node, chosen, after, part)

    def plan_within_budgets(
        self, pod: Pod, request: PodRequest, node: str, budget: SearchBudget | None = None
    ) -> PreemptionPlan | BlockedByBudgets | None:
        """The cheapest plan that violates no budget. Pods without cards are left to kube-scheduler."""
        part = self._part(budget)
        holders = [victim for victim in self._evictable(node, pod.priority) if victim.uses]
        view, after = self._view(pod, node), self._request_after(pod, request)
        if view is None or not (holders or self._terminating(node)):
            return None
        candidates = [victim for victim in holders if not self._was_refused(victim)]
        chosen = victims(request, view, candidates, pod.priority, self._is_within_budgets, after, part)
        plan = self._plan(pod, request, node, chosen, after, part)
        if plan is not None:
            return plan
        violating = victims(request, view, candidates, pod.priority, after=after, budget=part)
        return BlockedByBudgets(node, self._violated_by(violating)) if violating else None

    def _part(self, budget: SearchBudget | None = None) -> SearchBudget:
        """The search budget of one node, as a part of the budget of all."""
        return (budget or SearchBudget(NODE_STEPS, now=self._clock)).part(NODE_STEPS, NODE_SECONDS)

    def _place(
        self, pod: Pod, request: PodRequest, view: NodeView, budget: SearchBudget | None = None
    ) -> Placement | None:
        placement = place(request, view, self._policy, seed_of(pod.uid), budget=self._part(budget))
        return placement if isinstance(placement, Placement) else None

    def fits_after_eviction(self, pod: Pod, request: PodRequest, node: str, leaving: Collection[str]) -> bool:
        """Whether the pod fits there after these pods and all terminating pods are gone."""
        view = self._view(pod, node)
        if view is None:
            return False
        gone = [
            holder
            for holder in self._ledger.holders(node)
            if holder.pod in leaving and not self.is_terminating(holder.pod)
        ]
        allowed = self._request_after(pod, request)(gone)
        return self._place(pod, allowed, without(view, gone)) is not None

    def fits_now(self, pod: Pod, request: PodRequest, node: str, budget: SearchBudget | None = None) -> bool:
        if node not in self._ledger.fleet:
            return False
        fleet, ignored = self._ledger.fleet_for(pod.uid, pod.priority), self._ledger.ignored_by(pod.uid, pod.priority)
        allowed = self._ledger.quota_usage.allowed(pod.namespace, request, ignored)
        return self._place(pod, allowed, fleet.view(node), budget) is not None

    def _request_after(self, pod: Pod, request: PodRequest) -> RequestAfterEviction:
        """What the quota allows the pod after some pods are gone."""
        ignored = self._ledger.ignored_by(pod.uid, pod.priority)
        return self._ledger.quota_usage.after_eviction(pod.namespace, request, self.is_terminating, ignored)

    def _plan(
        self,
        pod: Pod,
        request: PodRequest,
        node: str,
        chosen: tuple[Victim, ...] | None,
        after: RequestAfterEviction,
        budget: SearchBudget,
    ) -> PreemptionPlan | None:
        view = self._view(pod, node)
        if chosen is None or view is None:
            return None
        where = self._place(pod, after(chosen), without(view, chosen), budget)
        leaving = () if self.fits_now(pod, request, node, budget) else tuple(self._terminating(node))
        return None if where is None else PreemptionPlan(node=node, victims=chosen, leaving=leaving, where=where)

    def _view(self, pod: Pod, node: str) -> NodeView | None:
        """The node without this pod's own claims and without its terminating pods."""
        if node not in self._ledger.fleet:
            return None
        return without(self._ledger.fleet_for(pod.uid, pod.priority).view(node), self._terminating(node))

    # ---- pods of a node ---------------------------------------------------------------------------------------------

    def _evictable(self, node: str, below: int) -> list[Victim]:
        """Bound pods of lower priority that are not terminating yet."""
        lower = {entry.allocation.pod for entry in self._confirmed(node) if entry.allocation.priority < below}
        holders = self._ledger.holders(node)
        return [holder for holder in holders if holder.pod in lower and not self._was_evicted(holder.pod)]

    def _terminating(self, node: str) -> list[Victim]:
        pods = {entry.allocation.pod for entry in self._confirmed(node) if self.is_terminating(entry.allocation.pod)}
        return [holder for holder in self._ledger.holders(node) if holder.pod in pods] if pods else []

    def _confirmed(self, node: str) -> list[LedgerEntry]:
        return [entry for entry in self._ledger.on_node(node) if entry.state is AllocationState.CONFIRMED]

    def _was_evicted(self, uid: str) -> bool:
        pod = self._cluster_state.pod(uid)
        return uid in self.evicted or (pod is not None and pod.is_terminating)

    def is_terminating(self, uid: str) -> bool:
        """Whether the pod will be gone soon. One that exceeded its grace period is stuck, and does not count."""
        pod = self._cluster_state.pod(uid)
        if pod is None or not pod.is_terminating:
            return uid in self.evicted
        return self._wall() / 1e9 < _gone_by(pod) + STUCK

    def seconds_left(self, victim: Victim) -> float:
        """How long the pod may take to terminate."""
        pod = self._cluster_state.pod(victim.pod)
        if pod is None:
            return UNKNOWN_GRACE
        return max(0.0, _gone_by(pod) - self._wall() / 1e9) if pod.is_terminating else float(pod.grace)

    # ---- budgets ----------------------------------------------------------------------------------------------------

    def violations(self, gone: Collection[Victim]) -> int:
        """How many evictions the budgets do not allow."""
        return sum(max(0, self._count(gone, budget) - budget.allowed) for budget in self.budgets or ())

    def is_protected(self, victim: Victim) -> bool:
        return bool(self._protectors(victim, self.budgets or ()))

    def _is_within_budgets(self, gone: Collection[Victim]) -> bool:
        return not self._violated_by(gone)

    def _violated_by(self, gone: Collection[Victim]) -> tuple[str, ...]:
        """Budgets that forbid these evictions. The Eviction API refuses to evict a pod under more than one budget."""
        budgets = self.budgets or ()
        violated = {budget.key for budget in budgets if self._count(gone, budget) > budget.allowed}
        for victim in gone:
            protectors = self._protectors(victim, budgets)
            violated |= {budget.key for budget in protectors} if len(protectors) > 1 else set()
        return tuple(sorted(violated))

    def _count(self, gone: Collection[Victim], budget: DisruptionBudget) -> int:
        return sum(bool(self._protectors(victim, (budget,))) for victim in gone)

    def _protectors(self, victim: Victim, budgets: Collection[DisruptionBudget]) -> list[DisruptionBudget]:
        pod = self._cluster_state.pod(victim.pod) if budgets else None
        return [budget for budget in budgets if pod is not None and budget.protects(pod.namespace, pod.labels)]

    def _was_refused(self, victim: Victim) -> bool:
        return self._clock() < self.refused_until.get(victim.pod, 0.0)


def _gone_by(pod: Pod) -> float:
    """The deletion timestamp (the end of the grace period) in seconds since 1970; 0 if it is unreadable."""
    return unix_seconds(pod.metadata.deletion_timestamp if pod.metadata else None) or 0.0
