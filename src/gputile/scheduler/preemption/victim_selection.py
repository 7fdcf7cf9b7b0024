"""Whom to evict for a pod, so that it fits on real cards: one node at a time, decided from the book. No I/O.

Pods that are on their way out count as gone: nobody else is evicted for room that appears by itself. Pods between
filter and bind, and those that should have left long ago and are stuck, cannot be evicted. Disruption budgets are
weighed when kube-scheduler asks, as it does itself, and kept to the letter when we act on our own. Whose namespace has
used up its quota gets room only if pods of that same namespace leave: nobody else's leaving gives it back.
"""

from collections.abc import Callable, Collection
from datetime import datetime

import msgspec

from gputile.dialects.kube_objects import Pod
from gputile.engine.placement.place import Placement, place
from gputile.engine.search_budget import SearchBudget
from gputile.engine.victims import Cost, RequestAfterEviction, Victim, cost, victims, without
from gputile.kube.disruption_budgets import DisruptionBudget
from gputile.ledger.ledger import AllocationState, LedgerEntry
from gputile.model.cards import NodeView
from gputile.model.requests import PodRequest
from gputile.scheduler.settings import Settings
from gputile.scheduler.state.allocations import seed_of
from gputile.scheduler.state.cluster_state import ClusterState

STUCK = 10.0  # seconds after the end of its grace period from which on nobody counts on a pod's leaving
NODE_STEPS, NODE_SECONDS = 4000, 0.01  # that the search on one node may cost: the verbs wait meanwhile
UNKNOWN_GRACE = 300.0  # seconds, for pods without cards, of which we keep nothing but what they hold


class PreemptionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """On this node, once these pods have left, the pod is placed like this."""

    node: str
    victims: tuple[Victim, ...]  # to be evicted
    leaving: tuple[Victim, ...]  # will be gone anyway, and are counted on
    where: Placement

    @property
    def cost(self) -> Cost:
        return cost(self.victims)


class BlockedByBudgets(msgspec.Struct, frozen=True):
    """Room could be made on this node, if these budgets allowed it."""

    node: str
    budgets: tuple[str, ...]


class VictimSelector:
    """See the module's text."""

    def __init__(
        self, cluster_state: ClusterState, settings: Settings, clock: Callable[[], float], wall: Callable[[], int]
    ) -> None:
        self._cluster_state, self._ledger, self._policy = cluster_state, cluster_state.ledger, settings.policy
        self._clock, self._wall = clock, wall
        self.budgets: tuple[DisruptionBudget, ...] | None = None  # None: not known
        self.asked_to_go: set[str] = set()  # UIDs that we have evicted; the watch may not have shown it yet
        self.unwilling: dict[str, float] = {}  # UIDs whose eviction was refused, and until when they are left alone

    # ---- plans ------------------------------------------------------------------------------------------------------

    def plan(self, pod: Pod, asked: PodRequest, node: str, budget: SearchBudget | None = None) -> PreemptionPlan | None:
        """The cheapest way, budgets weighed; None if nobody's leaving helps, no victims if there is room."""
        part = self._part(budget)
        spent = [budget for budget in self.budgets or () if budget.allowed == 0]
        holders = [
            msgspec.structs.replace(holder, budget_cost=len(self._protectors(holder, spent)))
            for holder in self._evictable(node, pod.priority)
        ]
        view, after = self._view(pod, node), self._after(pod, asked)
        found = victims(asked, view, holders, pod.priority, after=after, budget=part) if view is not None else None
        return self._plan(pod, asked, node, found, after, part)

    def lawful_plan(
        self, pod: Pod, asked: PodRequest, node: str, budget: SearchBudget | None = None
    ) -> PreemptionPlan | BlockedByBudgets | None:
        """The cheapest way that no budget forbids. Pods without cards are left to kube-scheduler, which sees them."""
        part = self._part(budget)
        holders = [holder for holder in self._evictable(node, pod.priority) if holder.uses]
        view, after = self._view(pod, node), self._after(pod, asked)
        if view is None or not (holders or self._going_on(node)):
            return None
        willing = [holder for holder in holders if not self._is_unwilling(holder)]
        found = victims(asked, view, willing, pod.priority, self._is_lawful, after, part)
        plan = self._plan(pod, asked, node, found, after, part)
        if plan is not None:
            return plan
        unlawful = victims(asked, view, willing, pod.priority, after=after, budget=part)
        return BlockedByBudgets(node, self._overdrawn_by(unlawful)) if unlawful else None

    def _part(self, budget: SearchBudget | None = None) -> SearchBudget:
        """What may be spent on one node, of what is left for all."""
        return (budget or SearchBudget(NODE_STEPS, now=self._clock)).part(NODE_STEPS, NODE_SECONDS)

    def _place(
        self, pod: Pod, asked: PodRequest, view: NodeView, budget: SearchBudget | None = None
    ) -> Placement | None:
        where = place(asked, view, self._policy, seed_of(pod.uid), budget=self._part(budget))
        return where if isinstance(where, Placement) else None

    def still_serves(self, pod: Pod, asked: PodRequest, node: str, leaving: Collection[str]) -> bool:
        """Whether the pod will fit there once these have left (and those who leave anyway)."""
        view = self._view(pod, node)
        if view is None:
            return False
        gone = [
            holder
            for holder in self._ledger.holders(node)
            if holder.pod in leaving and not self.is_terminating(holder.pod)
        ]
        may = self._after(pod, asked)(gone)
        return self._place(pod, may, without(view, gone)) is not None

    def fits_now(self, pod: Pod, asked: PodRequest, node: str, budget: SearchBudget | None = None) -> bool:
        if node not in self._ledger.fleet:
            return False
        with self._ledger.without_claims_of(pod.uid, pod.priority) as fleet:
            may = self._ledger.quota_usage.allowed(pod.namespace, asked)
            return self._place(pod, may, fleet.view(node), budget) is not None

    def _after(self, pod: Pod, asked: PodRequest) -> RequestAfterEviction:
        """What it may ask for once some have left. Only those of its own namespace give quota back, and those of them
        who leave anyway have done so, wherever they are."""
        quota_usage = self._ledger.quota_usage
        with self._ledger.without_claims_of(pod.uid, pod.priority):
            after_eviction = quota_usage.after_eviction(pod.namespace, asked)
        if after_eviction(()) is asked:
            return lambda gone: asked
        leaving = {uid for uid in quota_usage.pods(pod.namespace) if self.is_terminating(uid)}
        return lambda gone: after_eviction(leaving.union(holder.pod for holder in gone))

    def _plan(
        self,
        pod: Pod,
        asked: PodRequest,
        node: str,
        found: tuple[Victim, ...] | None,
        after: RequestAfterEviction,
        budget: SearchBudget,
    ) -> PreemptionPlan | None:
        view = self._view(pod, node)
        if found is None or view is None:
            return None
        where = self._place(pod, after(found), without(view, found), budget)
        leaving = () if self.fits_now(pod, asked, node, budget) else tuple(self._going_on(node))
        return None if where is None else PreemptionPlan(node=node, victims=found, leaving=leaving, where=where)

    def _view(self, pod: Pod, node: str) -> NodeView | None:
        """The node as this pod may see it, when those have left who leave anyway."""
        if node not in self._ledger.fleet:
            return None
        with self._ledger.without_claims_of(pod.uid, pod.priority) as fleet:
            return without(fleet.view(node), self._going_on(node))

    # ---- who is there -----------------------------------------------------------------------------------------------

    def _evictable(self, node: str, below: int) -> list[Victim]:
        """Less important pods that are really there, and would go if they were asked to."""
        found = {e.allocation.pod for e in self._confirmed(node) if e.allocation.priority < below}
        return [h for h in self._ledger.holders(node) if h.pod in found and not self._was_asked_to_go(h.pod)]

    def _going_on(self, node: str) -> list[Victim]:
        going = {e.allocation.pod for e in self._confirmed(node) if self.is_terminating(e.allocation.pod)}
        return [holder for holder in self._ledger.holders(node) if holder.pod in going] if going else []

    def _confirmed(self, node: str) -> list[LedgerEntry]:
        return [entry for entry in self._ledger.on_node(node) if entry.state is AllocationState.CONFIRMED]

    def _was_asked_to_go(self, uid: str) -> bool:
        pod = self._cluster_state.pod(uid)
        return uid in self.asked_to_go or (pod is not None and pod.is_terminating)

    def is_terminating(self, uid: str) -> bool:
        """Whether the pod will be gone in a moment; one that should be gone by now and is not, is stuck."""
        pod = self._cluster_state.pod(uid)
        if pod is None or not pod.is_terminating:
            return uid in self.asked_to_go
        return self._wall() / 1e9 < _gone_by(pod) + STUCK

    def seconds_left(self, holder: Victim) -> float:
        """How long the pod may take to go."""
        pod = self._cluster_state.pod(holder.pod)
        if pod is None:
            return UNKNOWN_GRACE
        return max(0.0, _gone_by(pod) - self._wall() / 1e9) if pod.is_terminating else float(pod.grace)

    # ---- budgets ----------------------------------------------------------------------------------------------------

    def violations(self, gone: Collection[Victim]) -> int:
        """How many evictions the budgets do not allow."""
        return sum(max(0, self._count(gone, budget) - budget.allowed) for budget in self.budgets or ())

    def is_protected(self, holder: Victim) -> bool:
        return bool(self._protectors(holder, self.budgets or ()))

    def _is_lawful(self, gone: Collection[Victim]) -> bool:
        return not self._overdrawn_by(gone)

    def _overdrawn_by(self, gone: Collection[Victim]) -> tuple[str, ...]:
        """Budgets that forbid that all of these go. Nobody under two budgets can be evicted: the API cannot do it."""
        budgets = self.budgets or ()
        over = {budget.key for budget in budgets if self._count(gone, budget) > budget.allowed}
        for holder in gone:
            mine = self._protectors(holder, budgets)
            over |= {budget.key for budget in mine} if len(mine) > 1 else set()
        return tuple(sorted(over))

    def _count(self, gone: Collection[Victim], budget: DisruptionBudget) -> int:
        return sum(bool(self._protectors(holder, (budget,))) for holder in gone)

    def _protectors(self, holder: Victim, budgets: Collection[DisruptionBudget]) -> list[DisruptionBudget]:
        pod = self._cluster_state.pod(holder.pod) if budgets else None
        return [b for b in budgets if pod is not None and b.protects(pod.namespace, pod.labels)]

    def _is_unwilling(self, holder: Victim) -> bool:
        return self._clock() < self.unwilling.get(holder.pod, 0.0)


def _gone_by(pod: Pod) -> float:
    """When the pod's time is up, in seconds since 1970: so says its deletion timestamp. 0: nobody can read that."""
    said = (pod.metadata and pod.metadata.deletion_timestamp) or ""
    try:
        return datetime.fromisoformat(said).timestamp()
    except ValueError:
        return 0.0
