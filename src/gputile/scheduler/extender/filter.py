"""filter and prioritize: decided from the book, at once, without a word to the API server.

Room:  decisions and pencils; no I/O. What they cost is kube-scheduler's speed: it asks for one pod at a time and waits.
Door:  `FilterService.filter`, `.dry_run`, `.prioritize`.

filter answers with the best node and those as good as it, not with all that fit: kube-scheduler chooses among what it
is given by its own scores, which spread, and would undo binpack and tiling. It pencils the pod in on the best one, for
kube-scheduler filters the next pod before it binds this one; while another pencil is open the answer is that one node,
so that pencil and choice agree.
"""

from collections.abc import Callable

import msgspec
import numpy as np

from gputile.dialects import registry
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
from gputile.scheduler.state.allocations import SECONDS, STEPS, allocation_of, seed_of
from gputile.scheduler.state.cluster_state import GUESSING, ClusterState
from gputile.scheduler.state.node_availability import NodeAvailability
from gputile.scheduler.state.pod_requests import PodRequests
from gputile.scheduler.state.unschedulable import UnschedulablePod
from gputile.telemetry.metrics import Metrics

TRIES = 16  # nodes that are looked at where quota makes the best ones too dear
IMAGINED_STEPS, IMAGINED_SECONDS = 200_000, 1.0  # of searching on nodes that a dry run brings with it
TOP_SCORE = 10
"""What kube-scheduler expects of an extender at most."""

ANY_SCORE = 1e300
"""Slack that every node has which fits; those that do not are at minus infinity."""


class FilterService:
    """See the module's text."""

    def __init__(
        self,
        cluster_state: ClusterState,
        requests: PodRequests,
        availability: NodeAvailability,
        *,
        settings: Settings,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._cluster_state, self._ledger, self._settings = cluster_state, cluster_state.ledger, settings
        self.requests, self._availability = requests, availability
        self._metrics, self._clock = metrics, clock
        self._refusal_cache = RefusalCache(cluster_state.ledger.fleet)
        self.on_unschedulable: Callable[[UnschedulablePod], None] = lambda no: None

    # ---- filter -----------------------------------------------------------------------------------------------------

    def filter(self, args: FilterArgs) -> FilterAnswer:
        asked = self.requests.of(args.pod)
        if asked is None:
            return FilterAnswer(names=args.names)
        if isinstance(asked, BadRequest):
            return self._bad(args, asked)
        return self._bound_already(args) or self._choose(args, asked)

    def _bad(self, args: FilterArgs, bad: BadRequest) -> FilterAnswer:
        self._metrics.bad_requests.labels(bad.code).inc()
        self.on_unschedulable(UnschedulablePod(pod=args.pod, asked=bad, names=args.names))
        return FilterAnswer(unresolvable=dict.fromkeys(args.names, bad.message))

    def _bound_already(self, args: FilterArgs) -> FilterAnswer | None:
        """A bind whose answer was lost, or that kube-scheduler has not seen: only the node where it went will do."""
        entry = self._ledger.entry(args.pod.uid)
        if entry is None or entry.state is AllocationState.RESERVED:
            return None
        if entry.allocation.node in args.names:
            return FilterAnswer(names=[entry.allocation.node])
        return FilterAnswer(error=f"the pod is being bound to node {entry.allocation.node}; try again")

    def _budget(self) -> SearchBudget:
        """Of one call, for all that it has to find out."""
        return SearchBudget(STEPS, SECONDS, self._clock)

    def _choose(self, args: FilterArgs, asked: PodRequest) -> FilterAnswer:
        pod, budget = args.pod, self._budget()
        names = self._open_to(args.names, pod.uid)
        self._offered_in_vain(pod.uid)
        quota_usage, space = self._ledger.quota_usage, pod.namespace
        remembers = self._may_remember(args, names)
        refused_before = self._refusal_cache.again(quota_usage.allowed(space, asked), args) if remembers else None
        if refused_before is not None:
            self._metrics.remembered.inc()
            return self._refused(args, asked, refused_before)
        dear: list[str] = []  # nodes whose free cards would cost more than quota leaves
        while True:
            others = [name for name in names if name not in dear] if dear else names
            may, best, where = self._placed(pod, asked, others, budget)
            if where is None or not quota_usage.quotas or len(dear) == TRIES:
                break
            if not self._ledger.beyond_quota(allocation_of(pod, asked, where.grant(pod.uid, asked.dialect))):
                break
            dear.append(best[0])
        if where is None or len(dear) == TRIES:
            said = self._nothing(args, asked, budget)
            if not best and not dear and self._may_remember(args, names):
                self._refusal_cache.keep(may, args, said)
            return self._refused(args, asked, _with_dear(said, dear))
        others_open = self._ledger.reservations() > 0
        reserved = self._reserve(pod, asked, where)
        alone = reserved and others_open and self._settings.filter.narrow
        return FilterAnswer(names=best[:1] if alone else best)

    def _placed(
        self, pod: Pod, asked: PodRequest, names: list[str], budget: SearchBudget
    ) -> tuple[PodRequest, list[str], Placement | None]:
        """What the pod may ask for, the best nodes for that, and where it would be on the first of them."""
        with self._ledger.without_claims_of(pod.uid, pod.priority) as fleet:
            may = self._ledger.quota_usage.allowed(pod.namespace, asked)  # not kept for others, and left by quota
            half = budget.half()  # the other half is for the cards, or for why not
            best = self._nominated(fleet, may, names, pod.uid, half) or self._best(fleet, may, names, pod.uid, half)
            where = fleet.place(may, best[0], self._settings.policy, seed_of(pod.uid), budget) if best else None
        return may, best, where if isinstance(where, Placement) else None

    def _nominated(
        self, fleet: Fleet, asked: PodRequest, names: list[str], uid: str, budget: SearchBudget
    ) -> list[str]:
        """The node where room was made for this pod, as soon as it is there."""
        nominated = self._ledger.nomination(uid)
        if nominated is None or nominated.allocation.node not in names:
            return []
        return fleet.best(asked, self._settings.policy, among=[nominated.allocation.node], keep=1, budget=budget)

    def _best(self, fleet: Fleet, asked: PodRequest, names: list[str], uid: str, budget: SearchBudget) -> list[str]:
        """The best nodes; those that came to nothing for this pod only if there are no others."""
        keep, slack = self._settings.filter.keep, self._settings.filter.slack
        if not self._settings.filter.narrow:
            keep, slack = len(names), ANY_SCORE
        deprioritized = self._availability.deprioritized(uid)
        fresh = [name for name in names if name not in deprioritized] if deprioritized else names
        for among in (fresh, names) if deprioritized else (names,):
            best = fleet.best(
                asked, self._settings.policy, seed=seed_of(uid), among=among, keep=keep, slack=slack, budget=budget
            )
            if best:
                if among is names:
                    self._availability.reset(uid)
                return best
        return []

    def _reserve(self, pod: Pod, asked: PodRequest, where: Placement) -> bool:
        """Hold the place until bind comes. Only for pods that our watch knows: others could never be rubbed out."""
        if pod.uid not in self._cluster_state.waiting:
            self.requests.remember(pod)
            return False
        allocation = allocation_of(pod, asked, where.grant(pod.uid, asked.dialect))
        done = self._ledger.handle(Reserved(allocation, self._clock()))
        return not any(isinstance(instruction, Denied) for instruction in done)

    def _offered_in_vain(self, uid: str) -> None:
        """A new filter call for a pod that is pencilled: its node was offered and did not become its home."""
        entry = self._ledger.entry(uid)
        if entry is not None and entry.state is AllocationState.RESERVED:
            self._availability.deprioritize(uid, entry.allocation.node)
            self._ledger.handle(Unreserved(uid))
            self._metrics.reservations.labels("replaced").inc()

    def _open_to(self, names: list[str], uid: str) -> list[str]:
        blocked = self._availability.blocked(names, uid)
        return [name for name in names if name not in blocked] if blocked else names

    # ---- why not ----------------------------------------------------------------------------------------------------

    def _may_remember(self, args: FilterArgs, names: list[str]) -> bool:
        """Whether the answer is the same for every pod that asks the same: no node is closed, no room is its own."""
        pod = args.pod
        own = any(
            p.allocation.pod == pod.uid or p.allocation.priority < pod.priority for p in self._ledger.nominations()
        )
        return names is args.names and not own

    def _nothing(self, args: FilterArgs, asked: PodRequest, budget: SearchBudget) -> CachedRejection:
        with self._ledger.without_claims_of(args.pod.uid, args.pod.priority) as fleet:
            refusals = self._refusals(fleet, asked, args, budget)
        answer = FilterAnswer(
            failed={r.node: r.sentence for r in refusals if r.resolvable},
            unresolvable={r.node: r.sentence for r in refusals if not r.resolvable},
        )
        return CachedRejection(answer, _counted(refusals))

    def _refused(self, args: FilterArgs, asked: PodRequest, said: CachedRejection) -> FilterAnswer:
        self.on_unschedulable(UnschedulablePod(pod=args.pod, asked=asked, names=args.names))
        if args.pod.uid in self._cluster_state.waiting and said.reasons:
            self._cluster_state.main_reasons[args.pod.uid] = said.main_reason
        for code, count in said.reasons.items():
            self._metrics.refusals.labels(code).inc(count)
        return said.answer

    def _refusals(self, fleet: Fleet, asked: PodRequest, args: FilterArgs, budget: SearchBudget) -> list[Refusal]:
        asked = self._ledger.quota_usage.allowed(args.pod.namespace, asked)
        blocked = self._availability.blocked(args.names, args.pod.uid)
        nominated = self._ledger.nomination(args.pod.uid)
        if nominated is not None:  # else kube-scheduler would look for victims elsewhere too
            blocked |= {name: NodeReason.NOMINATED for name in args.names if name != nominated.allocation.node}
        return [
            *(Refusal(name, code, 1, 0, False) for name, code in blocked.items()),
            *fleet.refusals(asked, [name for name in args.names if name not in blocked], budget),
        ]

    # ---- the other verbs --------------------------------------------------------------------------------------------

    def dry_run(self, args: FilterArgs) -> FilterAnswer:
        """All nodes that fit and why the others do not; nothing is held, nothing is told. For autoscalers.

        A node that is not in the cluster (yet) is taken as it was sent, with nobody on it.
        """
        return run_to_end(self.dry_run_in_turns(args))

    def dry_run_in_turns(self, args: FilterArgs) -> Cooperative[FilterAnswer]:
        """The same for those who have other things to do in between: autoscalers send nodes by the thousand."""
        budget = self._budget()
        asked = registry.read_pod(args.pod, self._cluster_state.settings)
        if asked is None:
            return FilterAnswer(names=args.names)
        if isinstance(asked, BadRequest):
            return FilterAnswer(unresolvable=dict.fromkeys(args.names, asked.message))
        imagined = {name: node for name in args.names if name not in self._ledger.fleet and (node := args.node(name))}
        with self._ledger.without_claims_of(args.pod.uid) as fleet:
            known = [name for name in args.names if name not in imagined]
            refusals = self._refusals(fleet, asked, msgspec.structs.replace(args, names=known), budget)
        whole = SearchBudget(IMAGINED_STEPS, IMAGINED_SECONDS, self._clock)
        for node in imagined.values():
            yield
            no = self._imagined(args.pod, asked, node, whole.part(STEPS, SECONDS))
            refusals += [no] if no is not None else []
        refused = {refusal.node for refusal in refusals}
        return FilterAnswer(
            names=[name for name in args.names if name not in refused],
            failed={r.node: r.sentence for r in refusals if r.resolvable},
            unresolvable={r.node: r.sentence for r in refusals if not r.resolvable},
        )

    def _imagined(self, pod: Pod, asked: PodRequest, sent: NodeObject, budget: SearchBudget) -> Refusal | None:
        """Why the node would not take the pod even with nobody on it."""
        node = registry.read_node(sent, self._cluster_state.settings)
        if isinstance(node, BadRequest):
            return Refusal(sent.name, NodeReason.UNKNOWN_NODE, 1, 0, False)
        if node.agent in GUESSING and self._settings.other_agents == "refuse":
            return Refusal(sent.name, NodeReason.OTHER_AGENT, 1, 0, False)
        answer = place(asked, NodeView.empty(node), self._settings.policy, budget=budget)
        if isinstance(answer, Refusal):
            return answer
        over = self._ledger.quota_usage.objection(allocation_of(pod, asked, answer.grant(pod.uid, asked.dialect)), node)
        return Refusal(sent.name, NodeReason.QUOTA, 1, 0, False) if over else None

    def prioritize(self, args: FilterArgs) -> dict[str, int]:
        """The policy's score of each node, stretched over 0 to 10."""
        asked = self.requests.of(args.pod)
        if not isinstance(asked, PodRequest):
            return dict.fromkeys(args.names, 0)
        with self._ledger.without_claims_of(args.pod.uid) as fleet:
            may = self._ledger.quota_usage.allowed(args.pod.namespace, asked)
            scores = fleet.scores_of(args.names, may, self._settings.policy, seed_of(args.pod.uid), self._budget())
        return dict(zip(args.names, _stretched(scores), strict=True))


def _with_dear(said: CachedRejection, dear: list[str]) -> CachedRejection:
    """Also these nodes, where the cards that are free now would cost more than others of their make: pieces of a pod on
    cards apart."""
    if not dear:
        return said
    failed = said.answer.failed | dict.fromkeys(dear, SENTENCE[NodeReason.QUOTA])
    answer = FilterAnswer(failed=failed, unresolvable=said.answer.unresolvable)
    return CachedRejection(
        answer, {**said.reasons, NodeReason.QUOTA: said.reasons.get(NodeReason.QUOTA, 0) + len(dear)}
    )


def _counted(refusals: list[Refusal]) -> dict[NodeReason, int]:
    found: dict[NodeReason, int] = {}
    for refusal in refusals:
        found[refusal.code] = found.get(refusal.code, 0) + 1
    return found


def _stretched(scores: Scores) -> list[int]:
    """The best is 10, the worst that fits and all that do not are 0."""
    real = scores[np.isfinite(scores)]
    if not len(real):
        return [0] * len(scores)
    low, high = float(real.min()), float(real.max())
    share = (scores - low) / (high - low) if high > low else np.where(np.isfinite(scores), 1.0, 0.0)
    return [int(one) for one in np.rint(np.clip(share, 0.0, 1.0) * TOP_SCORE)]
