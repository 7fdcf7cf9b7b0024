"""Preemption, in two ways, because kube-scheduler knows only the sums of a node.

(a) kube-scheduler does not ask, because a node has enough in sum while no single card fits: gputile preempts on its
    own, in the steps of kube-scheduler's `Preempt()`. Read `Preemptor._preempt` first. Only the leader does so.
(b) kube-scheduler calls the extender's preempt verb: it takes the steps itself, but for the victims. The answer is the
    cheapest set of pods whose eviction really frees cards for the pod.

`victim_selection` chooses the victims on one node, `executor` nominates and evicts.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Sequence
from functools import partial

import msgspec

from gputile.background.failure_isolation import FailureIsolation
from gputile.concurrency.time_slices import SearchLane, TimeSlices
from gputile.dialects.kube_objects import Pod
from gputile.dialects.registry import read_nomination
from gputile.engine.cooperative import Cooperative, run_to_end
from gputile.engine.search_budget import NOT_SEARCHED_FURTHER, SearchBudget
from gputile.kube.api import Api, ApiRejected, OutcomeUnknown
from gputile.model.refusals import BadRequest
from gputile.model.requests import PodRequest
from gputile.scheduler.extender_api import OfferedVictims, PreemptArgs
from gputile.scheduler.preemption.executor import OnFreed, PreemptionExecutor
from gputile.scheduler.preemption.victim_selection import BlockedByBudgets, PreemptionPlan, VictimSelector
from gputile.scheduler.settings import Settings
from gputile.scheduler.state.cluster_state import ClusterState
from gputile.scheduler.state.node_availability import NodeAvailability
from gputile.scheduler.state.pod_requests import PodRequests
from gputile.scheduler.state.unschedulable import UnschedulablePod
from gputile.telemetry.logs import fields
from gputile.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

ROUND = 0.25  # seconds
LOOP = "preemption"  # in logs and metrics
MAX_PREEMPTORS = 1000  # pods that may preempt and are remembered, with the nodes that rejected them
ENOUGH = 20  # nodes with a plan, of which the cheapest is used
ANSWER = 0.1  # seconds for an answer while kube-scheduler waits; more only until the first node is found
FEASIBILITY_STEPS, FEASIBILITY_SECONDS = 4000, 0.01  # of it for finding the nodes where eviction may help
STEPS, SECONDS = 100_000, 2.0  # limit of the search for one pod, on all nodes
ANSWER_STEPS, ANSWER_SECONDS = 40_000, 0.5  # the same while kube-scheduler, and every pod in its queue, waits
BRIEF = 0.05  # seconds of it for pods of a namespace whose truncated searches have used up its share
SHARE = 0.1  # of the time may be spent on searching
RETRY, MAX_RETRY = 5.0, 60.0  # seconds until a pod without a plan is searched for again; doubled each time
OLD = 360.0  # seconds; kube-scheduler retries every unschedulable pod within five minutes
KUBE_SCHEDULER = 10.0  # seconds to wait for a preemption by kube-scheduler
FRESH, STALE = 0.2, 30.0  # seconds: maximum age of budgets when evicting; how often they are read for the verb
REPEAT = 60.0  # seconds between two events on one pod about blocked preemption


TOO_LONG = (
    f"no pod is evicted for this pod: {NOT_SEARCHED_FURTHER} for victims, because there are too many ways to place its "
    "containers; request GPUs in fewer containers"
)


class PreemptingPod(msgspec.Struct):
    """The preemptor: an unschedulable pod that may preempt pods of lower priority."""

    pod: Pod
    request: PodRequest
    names: Sequence[str]  # the nodes of its last filter call: they passed taints and affinity
    since: float
    last_refused: float
    not_before: float = 0.0
    searches: int = 0
    reported: str = ""  # the message of the last Event
    reported_at: float = -REPEAT

    @property
    def turn(self) -> tuple[int, int, float]:
        """The pods with the fewest searches first; else a hopeless pod would block all others."""
        return self.searches, -self.pod.priority, self.since


class Preemptor:
    """Answers the preempt verb, and preempts on its own for pods that kube-scheduler cannot help."""

    def __init__(
        self,
        api: Api,
        requests: PodRequests,
        availability: NodeAvailability,
        cluster_state: ClusterState,
        settings: Settings,
        metrics: Metrics,
        *,
        leads: Callable[[], bool],
        clock: Callable[[], float],
        wall: Callable[[], int],
        on_freed: OnFreed,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        isolation: FailureIsolation | None = None,
        lane: SearchLane | None = None,
    ) -> None:
        self._isolation, self._lane = isolation or FailureIsolation(metrics, clock), lane or SearchLane()
        self._api, self._cluster_state, self._ledger = api, cluster_state, cluster_state.ledger
        self._requests, self._availability = requests, availability
        self._settings, self._metrics = settings.preempt, metrics
        self._leads, self._clock, self._pause = leads, clock, pause
        self._victim_selector = VictimSelector(cluster_state, settings, clock, wall)
        self._executor = PreemptionExecutor(
            api,
            cluster_state,
            self._victim_selector,
            settings,
            metrics,
            leads=leads,
            clock=clock,
            wall=wall,
            on_freed=on_freed,
            isolation=self._isolation,
        )
        self._preemptors: dict[str, PreemptingPod] = {}
        self._offered: dict[str, tuple[float, dict[str, PreemptionPlan]]] = {}  # by pod: time and plans of the answer
        self._brief_until: dict[str, float] = {}  # by namespace
        self._budgets_at = -STALE
        self._quiet_until = 0.0

    # ---- (a): preemption by gputile ---------------------------------------------------------------------------------

    async def _preempt(self, uid: str, preemptor: PreemptingPod, hopeless: set[Hashable]) -> None:
        """Preempt for one pod, in the steps of kube-scheduler's `Preempt()`. `hopeless`: the kinds of pods that no
        eviction could help in this round."""
        # 1. Eligibility: the pod is pending, and no other preemption is under way for it. `refused` has checked its
        #    priority and preemptionPolicy.
        if not self._is_eligible(uid):
            return
        self._back_off(preemptor)  # until victims are found
        kind = (preemptor.request, preemptor.pod.priority, self._ledger.quota_usage.scope(preemptor.pod.namespace))
        if kind in hopeless:  # the search for an equal pod just failed
            return
        # 2. Candidates: the nodes where eviction could help. No pod is evicted without knowing the disruption budgets.
        if not await self._refresh_budgets(FRESH):
            hopeless.add(kind)
            await self._report(preemptor, "no pod is evicted for this pod, because disruption budgets cannot be read")
            return
        began, budget = self._clock(), SearchBudget(STEPS, SECONDS, self._clock)
        candidates = self._find_candidates(preemptor, budget)
        # 3. Victims: the cheapest set of pods on each candidate, then the cheapest candidate.
        best, blocked = await self._select_candidate(preemptor, candidates, budget)
        self._quiet_until = self._clock() + (self._clock() - began) * (1 / SHARE - 1)
        if best is None:
            hopeless.add(kind)
            await self._report_no_candidate(preemptor, blocked, budget)
            return
        preemptor.not_before = 0.0
        # 4. Nomination: the ledger keeps the capacity from now on. The victims are selected again, because the search
        #    ran in time slices, and the cluster may have changed meanwhile.
        plan = self._victim_selector.plan_within_budgets(preemptor.pod, preemptor.request, best.node)
        if not isinstance(plan, PreemptionPlan) or plan.fits_already or not self._is_eligible(uid) or not self._leads():
            return
        preemptor.searches = 0
        opened = self._executor.open(preemptor.pod, preemptor.request, plan)
        # 5. Eviction: the nomination is written to the pod, then the victims are evicted one after the other.
        # 6. End: the pod is bound, or the nomination expires or is withdrawn. Until then `round` repeats both steps.
        await self._executor.advance(opened)
        self._budgets_at = min(self._budgets_at, self._clock() - FRESH)  # the evictions count against the budgets

    def _is_eligible(self, uid: str) -> bool:
        waiting = self._cluster_state.pending.get(uid)
        if waiting is None or waiting.pod.is_terminating or not self._is_free(uid) or _is_nominated(waiting.pod):
            return False
        offered_at, _ = self._offered.get(uid, (-KUBE_SCHEDULER, {}))
        return self._clock() >= offered_at + KUBE_SCHEDULER

    def _is_free(self, uid: str) -> bool:
        return (
            self._ledger.nomination(uid) is None
            and self._ledger.entry(uid) is None
            and not self._executor.has_open_plan(uid)
        )

    def _find_candidates(self, preemptor: PreemptingPod, budget: SearchBudget) -> list[str]:
        """Nodes where eviction could help; none if the pod fits on some node by now."""
        pod = preemptor.pod
        known = [name for name in preemptor.names if name in self._ledger.fleet]
        blocked = self._availability.blocked(known, pod.uid)
        available = [name for name in known if name not in blocked]
        fleet, ignored = self._ledger.fleet_for(pod.uid, pod.priority), self._ledger.ignored_by(pod.uid, pod.priority)
        allowed = self._ledger.quota_usage.allowed(pod.namespace, preemptor.request, ignored)
        refusals = fleet.refusals(allowed, available, budget.part(FEASIBILITY_STEPS, FEASIBILITY_SECONDS))
        return [refusal.node for refusal in refusals if refusal.resolvable] if len(refusals) == len(available) else []

    async def _select_candidate(
        self, preemptor: PreemptingPod, candidates: list[str], budget: SearchBudget
    ) -> tuple[PreemptionPlan | None, BlockedByBudgets | None]:
        """The cheapest plan; or, where only disruption budgets forbid one, the first such node."""
        plans: list[PreemptionPlan] = []
        blocked: list[BlockedByBudgets] = []
        slices = TimeSlices(self._clock, self._pause, self._lane)
        for name in candidates:
            await slices.turn()
            plan = self._victim_selector.plan_within_budgets(preemptor.pod, preemptor.request, name, budget)
            if isinstance(plan, PreemptionPlan):
                if plan.fits_already:
                    return None, None
                plans.append(plan)
            elif plan is not None:
                blocked.append(plan)
            if len(plans) >= ENOUGH or budget.is_spent:
                break
        if budget.is_spent:
            budget.cut_short()
        best = min(plans, key=lambda plan: plan.cost, default=None)
        return best, min(blocked, key=lambda blocked_node: blocked_node.node, default=None)

    async def _report_no_candidate(
        self, preemptor: PreemptingPod, blocked: BlockedByBudgets | None, budget: SearchBudget
    ) -> None:
        if budget.ran_out:
            self._metrics.cut_short.labels("own preemption").inc()
            await self._report(preemptor, TOO_LONG)
        elif blocked is not None:
            await self._report(preemptor, _blocked_message(blocked))

    async def _refresh_budgets(self, age: float) -> bool:
        """Read the disruption budgets if they are older than this; returns whether they are known."""
        if self._clock() - self._budgets_at < age:
            return True
        try:
            self._victim_selector.budgets = await self._api.budgets()
        except (ApiRejected, OutcomeUnknown) as error:
            log.warning("disruption budgets cannot be read", extra=fields(why=str(error)))
            return False
        self._budgets_at = self._clock()
        return True

    async def _report(self, preemptor: PreemptingPod, why: str) -> None:
        """Write an Event when the reason changed, at most one per `REPEAT` seconds."""
        if preemptor.reported != why and self._clock() >= preemptor.reported_at + REPEAT:
            preemptor.reported, preemptor.reported_at = why, self._clock()
            await self._executor.record_event(preemptor.pod, "PreemptionBlocked", why)

    # ---- which pods may preempt, and when ---------------------------------------------------------------------------

    def refused(self, unschedulable: UnschedulablePod) -> None:
        """A pod fits on no node. Called on the hot path: it only records pods that may preempt."""
        pod, request = unschedulable.pod, unschedulable.request
        if not self._settings.own or not isinstance(request, PodRequest) or pod.uid not in self._cluster_state.pending:
            return
        lowest = self._ledger.lowest_priority()
        if lowest is None or pod.priority <= lowest:
            return
        if pod.spec is not None and pod.spec.preemption_policy == "Never":
            return
        now, preemptor = self._clock(), self._preemptors.get(pod.uid)
        if preemptor is None:
            self._preemptors[pod.uid] = PreemptingPod(pod, request, unschedulable.names, now, now)
            if len(self._preemptors) > MAX_PREEMPTORS:  # drop the newest of the lowest priority
                del self._preemptors[min(self._preemptors, key=self._drop_order)]
            return
        preemptor.pod, preemptor.request, preemptor.last_refused = pod, request, now
        if unschedulable.names != [pod.nominated]:  # a call about the nominated node alone does not exclude the others
            preemptor.names = unschedulable.names

    def _drop_order(self, uid: str) -> tuple[int, float]:
        return self._preemptors[uid].pod.priority, -self._preemptors[uid].since

    async def run(self) -> None:
        while True:
            await self._isolation.attempt(LOOP, "", self.round, always=True)
            await self._pause(ROUND)

    async def round(self) -> None:
        """All due work, once. A failure is retried later and does not delay the other pods."""
        self._prune()
        self._metrics.nominations.set(len(self._ledger.nominations()))
        if not self._leads():
            return
        await self._executor.round()
        await self._refresh_budgets(STALE)
        hopeless: set[Hashable] = set()
        for uid in sorted(self._preemptors, key=lambda uid: self._preemptors[uid].turn):
            preemptor = self._preemptors.get(uid)
            if preemptor is not None and self._is_due(uid, preemptor):
                work = partial(self._preempt, uid, preemptor, hopeless)
                await self._isolation.attempt(LOOP, preemptor.pod.key, work, preemptor.pod)

    def _is_due(self, uid: str, preemptor: PreemptingPod) -> bool:
        """Whether kube-scheduler has had time to help the pod, and no pause after an earlier attempt is left."""
        now, patient_until = self._clock(), preemptor.since + self._settings.patience
        return now >= max(patient_until, preemptor.not_before, self._executor.backoff_until(uid), self._quiet_until)

    def _back_off(self, preemptor: PreemptingPod) -> None:
        preemptor.not_before = self._clock() + min(RETRY * 2 ** min(preemptor.searches, 10), MAX_RETRY)
        preemptor.searches += 1

    def on_elected(self) -> None:
        """This replica became the leader: the nominations on the pods are the true ones."""
        self._executor.on_elected()

    def listed(self) -> None:
        """After a list: restore nominations of an earlier leader, and new ones of kube-scheduler."""
        self._executor.restore()
        for waiting in list(self._cluster_state.pending.values()):
            self._isolation.step(LOOP, waiting.pod.key, partial(self.pod_seen, waiting.pod), waiting.pod)

    def _prune(self) -> None:
        now, waiting = self._clock(), self._cluster_state.pending
        self._preemptors = {
            uid: preemptor
            for uid, preemptor in self._preemptors.items()
            if uid in waiting and now < preemptor.last_refused + OLD
        }
        self._offered = {uid: answer for uid, answer in self._offered.items() if uid in waiting}
        self._brief_until = {namespace: until for namespace, until in self._brief_until.items() if now < until}
        self._executor.prune()
        for preemptor in self._preemptors.values():
            self._share_names(preemptor)

    def _share_names(self, preemptor: PreemptingPod) -> None:
        """Replace the thousands of node names of a call by the fleet's own strings, once per call, to save memory."""
        if isinstance(preemptor.names, list):
            nodes = (self._ledger.fleet.node(name) for name in preemptor.names)
            preemptor.names = tuple(node.name for node in nodes if node is not None)

    # ---- (b): the preempt verb --------------------------------------------------------------------------------------

    def answer(self, args: PreemptArgs) -> dict[str, OfferedVictims]:
        """Per node that kube-scheduler offers: the cheapest set of pods whose eviction makes the pod fit on its cards.

        Empty while gputile preempts for the pod itself: kube-scheduler does not count evictions that are not its own.
        """
        return run_to_end(self._answer(args))

    async def answer_in_slices(self, args: PreemptArgs) -> dict[str, OfferedVictims]:
        """The same, in time slices, so that other requests are answered in between."""
        return await TimeSlices(self._clock, self._pause, self._lane).run(self._answer(args))

    def _answer(self, args: PreemptArgs) -> Cooperative[dict[str, OfferedVictims]]:
        request = self._requests.of(args.pod)
        if request is None:
            return args.offers
        if isinstance(request, BadRequest) or self._ledger.nomination(args.pod.uid) is not None:
            return {}
        if self._clock() > self._budgets_at + 2 * STALE:
            self._victim_selector.budgets = None  # too old to be used
        plans = yield from self._plans(args, request)
        if plans:
            self._offered[args.pod.uid] = (self._clock(), plans)
        offers = {name: self._offer(plan, args, name) for name, plan in plans.items()}
        return {name: offer for name, offer in offers.items() if offer is not None}

    def _plans(self, args: PreemptArgs, request: PodRequest) -> Cooperative[dict[str, PreemptionPlan]]:
        blocked = self._availability.blocked(args.offers, args.pod.uid)
        plans: dict[str, PreemptionPlan] = {}
        began, namespace = self._clock(), args.pod.namespace
        seconds = BRIEF if began < self._brief_until.get(namespace, 0.0) else ANSWER_SECONDS
        budget = SearchBudget(ANSWER_STEPS, seconds, self._clock)
        for name in args.offers:
            yield
            plan = None if name in blocked else self._victim_selector.plan(args.pod, request, name, budget)
            if plan is not None:
                plans[name] = plan
            if len(plans) >= ENOUGH or budget.is_spent or (plans and self._clock() - began > ANSWER):
                break
        if budget.ran_out or budget.is_spent:
            until = self._clock() + (self._clock() - began) / SHARE
            self._brief_until[namespace] = max(until, self._brief_until.get(namespace, 0.0))
            self._metrics.cut_short.labels("preempt").inc()
            log.info(f"preempt: {NOT_SEARCHED_FURTHER}", extra=fields(pod=args.pod.key, nodes_found=len(plans)))
        return plans

    def _offer(self, plan: PreemptionPlan, args: PreemptArgs, name: str) -> OfferedVictims | None:
        """Where the pod fits on the cards already, kube-scheduler's own victims (for CPU, ports) stand.

        Without victims, terminating pods are named instead: kube-scheduler requires at least one victim.
        """
        if plan.fits_already:
            return args.offers[name]
        gone = plan.victims or tuple(victim for victim in plan.leaving if victim.priority < args.pod.priority)
        unknown = self._victim_selector.budgets is None
        violations = args.offers[name].violations if unknown else self._victim_selector.violations(plan.victims)
        return OfferedVictims(tuple(victim.pod for victim in gone), violations) if gone else None

    def pod_seen(self, pod: Pod) -> None:
        """kube-scheduler nominated a node of our answer: keep that capacity for the pod while the victims terminate."""
        if not pod.nominated or pod.uid not in self._offered:
            return
        at, plans = self._offered[pod.uid]
        offered, waiting = plans.get(pod.nominated), self._cluster_state.pending.get(pod.uid)
        if offered is None or waiting is None or self._clock() > at + KUBE_SCHEDULER or not self._is_free(pod.uid):
            return
        assert isinstance(waiting.request, PodRequest)
        plan = self._victim_selector.plan(
            pod, waiting.request, pod.nominated
        )  # another pod may be nominated there by now
        del self._offered[pod.uid]
        if plan is not None and {victim.pod for victim in plan.victims} <= {victim.pod for victim in offered.victims}:
            leaving = offered.victims + plan.leaving
            self._executor.nominate(pod, waiting.request, msgspec.structs.replace(plan, leaving=leaving))


def _is_nominated(pod: Pod) -> bool:
    """Whether kube-scheduler nominated a node; `nominatedNodeName` of gputile may outlive its nomination."""
    nomination = read_nomination(pod)
    return bool(pod.nominated) and (nomination is None or nomination.grant.node != pod.nominated)


def _blocked_message(blocked: BlockedByBudgets) -> str:
    budgets = " and ".join(f"PodDisruptionBudget {name}" for name in blocked.budgets)
    return f"evicting pods of lower priority from node {blocked.node} would help, but {budgets} forbids it now"
