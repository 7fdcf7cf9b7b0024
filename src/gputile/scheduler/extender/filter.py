"""The filter and prioritize verbs, decided from the ledger alone: no I/O, because kube-scheduler waits for each answer.

filter returns the best node and the nodes that are as good, not all feasible nodes: kube-scheduler would choose among
them by its own scores, which spread pods and would undo binpack and tiling. filter reserves the pod on the best node,
because kube-scheduler filters the next pod before it binds this one. While another reservation is open it returns only
the reserved node, so that kube-scheduler's choice agrees with the reservation.
"""

from collections.abc import Callable

import msgspec
import numpy as np

from gputile.dialects import registry
from gputile.dialects.allocations import allocation_of
from gputile.dialects.kube_objects import NodeObject, Pod
from gputile.engine.cooperative import Cooperative, run_to_end
from gputile.engine.fleet.fleet import Fleet
from gputile.engine.placement.place import Placement, place
from gputile.engine.policies.table import Scores
from gputile.engine.search_budget import SearchBudget
from gputile.ledger.events import Denied, Reserved, Unreserved
from gputile.ledger.ledger import AllocationState
from gputile.model.cards import NodeView
from gputile.model.refusals import SENTENCE, BadRequest, NodeReason, Refusal
from gputile.model.requests import PodRequest
from gputile.scheduler.extender.refusal_cache import CachedRejection, RefusalCache
from gputile.scheduler.extender_api import FilterAnswer, FilterArgs
from gputile.scheduler.settings import Settings
from gputile.scheduler.state.cluster_state import ClusterState
from gputile.scheduler.state.node_availability import NodeAvailability
from gputile.scheduler.state.pod_requests import CALL_SECONDS, CALL_STEPS, PodRequests, call_budget, seed_of
from gputile.scheduler.state.unschedulable import UnschedulablePod
from gputile.telemetry.metrics import Metrics

TRIES = 16  # nodes that are tried while the placement on the best one exceeds quota
DRY_RUN_STEPS, DRY_RUN_SECONDS = 200_000, 1.0  # search budget for nodes that only exist in a dry-run request
TOP_SCORE = 10
"""MaxExtenderPriority: the highest score that kube-scheduler accepts from an extender."""

ANY_SCORE = 1e300
"""A slack that includes every feasible node; infeasible nodes score minus infinity."""


class FilterService:
    """Answers filter, filter-dryrun and prioritize from the ledger."""

    def __init__(
        self,
        cluster_state: ClusterState,
        requests: PodRequests,
        availability: NodeAvailability,
        *,
        settings: Settings,
        metrics: Metrics,
        clock: Callable[[], float],
        on_unschedulable: Callable[[UnschedulablePod], None] = lambda pod: None,
    ) -> None:
        self._cluster_state, self._ledger, self._settings = cluster_state, cluster_state.ledger, settings
        self.requests, self._availability = requests, availability
        self._metrics, self._clock = metrics, clock
        self._refusal_cache = RefusalCache(cluster_state.ledger.fleet)
        self._on_unschedulable = on_unschedulable

    # ---- filter -----------------------------------------------------------------------------------------------------

    def filter(self, args: FilterArgs) -> FilterAnswer:
        request = self.requests.of(args.pod)
        if request is None:
            return FilterAnswer(names=args.names)
        if isinstance(request, BadRequest):
            return self._reject_bad_request(args, request)
        return self._already_bound(args) or self._choose(args, request)

    def _reject_bad_request(self, args: FilterArgs, bad: BadRequest) -> FilterAnswer:
        self._metrics.bad_requests.labels(bad.code).inc()
        self._on_unschedulable(UnschedulablePod(pod=args.pod, request=bad, names=args.names))
        return FilterAnswer(unresolvable=dict.fromkeys(args.names, bad.message))

    def _already_bound(self, args: FilterArgs) -> FilterAnswer | None:
        """For a bind whose answer was lost, or that kube-scheduler has not seen: only its node is an answer."""
        entry = self._ledger.entry(args.pod.uid)
        if entry is None or entry.state is AllocationState.RESERVED:
            return None
        if entry.allocation.node in args.names:
            return FilterAnswer(names=[entry.allocation.node])
        return FilterAnswer(error=f"the pod is being bound to node {entry.allocation.node}; try again")

    def _choose(self, args: FilterArgs, request: PodRequest) -> FilterAnswer:
        pod, budget = args.pod, call_budget(self._clock)
        # 1. Drop blocked nodes, and the reservation of an earlier attempt.
        names = self._unblocked(args.names, pod.uid)
        self._unreserve_earlier(pod.uid)
        # 2. Ask once what quota allows.
        ignored = self._ledger.ignored_by(pod.uid, pod.priority)
        allowed = self._ledger.quota_usage.allowed(pod.namespace, request, ignored)
        # 3. Answer a repeated request from the cache.
        is_cacheable = self._is_cacheable(args, names)
        cached = self._refusal_cache.get(allowed, args) if is_cacheable else None
        if cached is not None:
            self._metrics.remembered.inc()
            return self._reject(args, request, cached)
        # 4. Reserve the pod on the best node; on the next one if the cards there would cost more than quota allows.
        fleet = self._ledger.fleet_for(pod.uid, pod.priority)
        over_quota: list[str] = []
        best: list[str] = []
        earlier = self._ledger.reservations()
        while len(over_quota) < TRIES:
            others = [name for name in names if name not in over_quota] if over_quota else names
            best, placement = self._place(fleet, pod, allowed, others, budget)
            if placement is None:
                break
            denied = self._reserve(pod, request, placement)
            if denied is None or not denied.beyond_quota:
                only_first = 0 < earlier < self._ledger.reservations() and self._settings.filter.narrow
                return FilterAnswer(names=best[:1] if only_first else best)
            over_quota.append(placement.node)
        # 5. Reject the pod, and cache the rejection if it holds for every pod with this request.
        rejection = self._rejection(fleet, args, allowed, budget)
        if not best and not over_quota and is_cacheable:
            self._refusal_cache.put(allowed, args, rejection)
        return self._reject(args, request, _with_over_quota(rejection, over_quota))

    def _place(
        self, fleet: Fleet, pod: Pod, allowed: PodRequest, names: list[str], budget: SearchBudget
    ) -> tuple[list[str], Placement | None]:
        """The best nodes, and the placement on the first of them."""
        half = budget.half()  # the other half is for the cards, or for the reasons
        best = self._nominated(fleet, allowed, names, pod.uid, half)
        best = best or self._best(fleet, allowed, names, pod.uid, half)
        answer = fleet.place(allowed, best[0], self._settings.policy, seed_of(pod.uid), budget) if best else None
        return best, answer if isinstance(answer, Placement) else None

    def _nominated(
        self, fleet: Fleet, request: PodRequest, names: list[str], uid: str, budget: SearchBudget
    ) -> list[str]:
        """The node for which this pod has a nomination, as soon as the pod fits there."""
        nominated = self._ledger.nomination(uid)
        if nominated is None or nominated.allocation.node not in names:
            return []
        return fleet.best(request, self._settings.policy, among=[nominated.allocation.node], keep=1, budget=budget)

    def _best(self, fleet: Fleet, request: PodRequest, names: list[str], uid: str, budget: SearchBudget) -> list[str]:
        """The best nodes; nodes where this pod failed before only if no other is feasible."""
        keep, slack = self._settings.filter.keep, self._settings.filter.slack
        if not self._settings.filter.narrow:
            keep, slack = len(names), ANY_SCORE
        deprioritized = self._availability.deprioritized(uid)
        preferred = [name for name in names if name not in deprioritized] if deprioritized else names
        for among in (preferred, names) if deprioritized else (names,):
            best = fleet.best(
                request, self._settings.policy, seed=seed_of(uid), among=among, keep=keep, slack=slack, budget=budget
            )
            if best:
                if among is names:
                    self._availability.reset(uid)
                return best
        return []

    def _reserve(self, pod: Pod, request: PodRequest, placement: Placement) -> Denied | None:
        """Reserve the placement until bind; returns why the ledger denies it. A pod that our watch has not shown is
        only checked against quota: the watch would never end its reservation."""
        allocation = allocation_of(pod, request, placement.grant(pod.uid, request))
        if pod.uid in self._cluster_state.pending:
            done = self._ledger.handle(Reserved(allocation, self._clock()))
            return next((instruction for instruction in done if isinstance(instruction, Denied)), None)
        self.requests.remember(pod)
        over_quota = self._ledger.beyond_quota(allocation)
        return Denied(pod.uid, over_quota, beyond_quota=True) if over_quota else None

    def _unreserve_earlier(self, uid: str) -> None:
        """A filter call for a reserved pod: the earlier attempt did not lead to a bind on that node."""
        entry = self._ledger.entry(uid)
        if entry is not None and entry.state is AllocationState.RESERVED:
            self._availability.deprioritize(uid, entry.allocation.node)
            self._ledger.handle(Unreserved(uid))
            self._metrics.reservations.labels("replaced").inc()

    def _unblocked(self, names: list[str], uid: str) -> list[str]:
        blocked = self._availability.blocked(names, uid)
        return [name for name in names if name not in blocked] if blocked else names

    # ---- rejections -------------------------------------------------------------------------------------------------

    def _is_cacheable(self, args: FilterArgs, names: list[str]) -> bool:
        """Whether the answer holds for every pod with the same request: no node is blocked, and the pod may use no
        nomination, neither its own nor one of lower priority."""
        pod = args.pod
        may_use_nomination = any(
            nominated.allocation.pod == pod.uid or nominated.allocation.priority < pod.priority
            for nominated in self._ledger.nominations()
        )
        return names is args.names and not may_use_nomination

    def _rejection(self, fleet: Fleet, args: FilterArgs, allowed: PodRequest, budget: SearchBudget) -> CachedRejection:
        refusals = self._refusals(fleet, allowed, args, budget)
        answer = FilterAnswer(
            failed={refusal.node: refusal.sentence for refusal in refusals if refusal.resolvable},
            unresolvable={refusal.node: refusal.sentence for refusal in refusals if not refusal.resolvable},
        )
        return CachedRejection(answer, _count_reasons(refusals))

    def _reject(self, args: FilterArgs, request: PodRequest, rejection: CachedRejection) -> FilterAnswer:
        self._on_unschedulable(UnschedulablePod(pod=args.pod, request=request, names=args.names))
        if args.pod.uid in self._cluster_state.pending and rejection.reasons:
            self._cluster_state.main_reasons[args.pod.uid] = rejection.main_reason
        for reason, count in rejection.reasons.items():
            self._metrics.refusals.labels(reason).inc(count)
        return rejection.answer

    def _refusals(self, fleet: Fleet, allowed: PodRequest, args: FilterArgs, budget: SearchBudget) -> list[Refusal]:
        blocked = self._availability.blocked(args.names, args.pod.uid)
        nominated = self._ledger.nomination(args.pod.uid)
        if nominated is not None:  # otherwise kube-scheduler would look for victims on other nodes too
            blocked |= {name: NodeReason.NOMINATED for name in args.names if name != nominated.allocation.node}
        return [
            *(Refusal(name, reason, 1, 0, False) for name, reason in blocked.items()),
            *fleet.refusals(allowed, [name for name in args.names if name not in blocked], budget),
        ]

    # ---- the other verbs --------------------------------------------------------------------------------------------

    def dry_run(self, args: FilterArgs) -> FilterAnswer:
        """All feasible nodes, and why the others are not; without side effects. For autoscalers.

        A node that is not in the cluster (yet) is judged as it was sent, without pods.
        """
        return run_to_end(self.dry_run_in_turns(args))

    def dry_run_in_turns(self, args: FilterArgs) -> Cooperative[FilterAnswer]:
        """The same in steps, so that other requests are answered in between: autoscalers send thousands of nodes."""
        budget = call_budget(self._clock)
        request = registry.read_pod(args.pod, self._cluster_state.settings)
        if request is None:
            return FilterAnswer(names=args.names)
        if isinstance(request, BadRequest):
            return FilterAnswer(unresolvable=dict.fromkeys(args.names, request.message))
        new_nodes = {name: node for name in args.names if name not in self._ledger.fleet and (node := args.node(name))}
        known = [name for name in args.names if name not in new_nodes]
        fleet, allowed = self._view(args.pod, request)
        refusals = self._refusals(fleet, allowed, msgspec.structs.replace(args, names=known), budget)
        total_budget = SearchBudget(DRY_RUN_STEPS, DRY_RUN_SECONDS, self._clock)
        for node in new_nodes.values():
            yield
            refusal = self._refusal_of_new_node(args.pod, request, node, total_budget.part(CALL_STEPS, CALL_SECONDS))
            refusals += [refusal] if refusal is not None else []
        refused = {refusal.node for refusal in refusals}
        return FilterAnswer(
            names=[name for name in args.names if name not in refused],
            failed={refusal.node: refusal.sentence for refusal in refusals if refusal.resolvable},
            unresolvable={refusal.node: refusal.sentence for refusal in refusals if not refusal.resolvable},
        )

    def _view(self, pod: Pod, request: PodRequest) -> tuple[Fleet, PodRequest]:
        """The fleet without the pod's own claims, and the request with what quota allows."""
        ignored = self._ledger.ignored_by(pod.uid)
        return self._ledger.fleet_for(pod.uid), self._ledger.quota_usage.allowed(pod.namespace, request, ignored)

    def _refusal_of_new_node(
        self, pod: Pod, request: PodRequest, sent: NodeObject, budget: SearchBudget
    ) -> Refusal | None:
        """Why the pod would not fit on the node even if it were empty."""
        node = registry.read_node(sent, self._cluster_state.settings)
        if isinstance(node, BadRequest):
            return Refusal(sent.name, NodeReason.UNKNOWN_NODE, 1, 0, False)
        if registry.agent_guesses(node.agent) and self._settings.other_agents == "refuse":
            return Refusal(sent.name, NodeReason.OTHER_AGENT, 1, 0, False)
        answer = place(request, NodeView.empty(node), self._settings.policy, budget=budget)
        if isinstance(answer, Refusal):
            return answer
        allocation = allocation_of(pod, request, answer.grant(pod.uid, request))
        over_quota = self._ledger.quota_usage.objection(allocation, node)
        return Refusal(sent.name, NodeReason.QUOTA, 1, 0, False) if over_quota else None

    def prioritize(self, args: FilterArgs) -> dict[str, int]:
        """The policy's score of each node, scaled to 0 to 10."""
        request = self.requests.of(args.pod)
        if not isinstance(request, PodRequest):
            return dict.fromkeys(args.names, 0)
        fleet, allowed = self._view(args.pod, request)
        seed, budget = seed_of(args.pod.uid), call_budget(self._clock)
        scores = fleet.scores_of(args.names, allowed, self._settings.policy, seed, budget)
        return dict(zip(args.names, _scaled(scores), strict=True))


def _with_over_quota(rejection: CachedRejection, over_quota: list[str]) -> CachedRejection:
    """The rejection, and also these nodes: their free cards would cost more quota than other cards of the same model,
    because the containers of the pod would be on separate cards."""
    if not over_quota:
        return rejection
    failed = rejection.answer.failed | dict.fromkeys(over_quota, SENTENCE[NodeReason.QUOTA])
    answer = FilterAnswer(failed=failed, unresolvable=rejection.answer.unresolvable)
    count = rejection.reasons.get(NodeReason.QUOTA, 0) + len(over_quota)
    return CachedRejection(answer, {**rejection.reasons, NodeReason.QUOTA: count})


def _count_reasons(refusals: list[Refusal]) -> dict[NodeReason, int]:
    counts: dict[NodeReason, int] = {}
    for refusal in refusals:
        counts[refusal.code] = counts.get(refusal.code, 0) + 1
    return counts


def _scaled(scores: Scores) -> list[int]:
    """The best node is 10, the worst feasible node and all infeasible nodes are 0."""
    feasible = scores[np.isfinite(scores)]
    if not len(feasible):
        return [0] * len(scores)
    low, high = float(feasible.min()), float(feasible.max())
    share = (scores - low) / (high - low) if high > low else np.where(np.isfinite(scores), 1.0, 0.0)
    return [int(score) for score in np.rint(np.clip(share, 0.0, 1.0) * TOP_SCORE)]
