"""Preemption, in two halves, because kube-scheduler knows only sums.

Room:  (a) When kube-scheduler asks: the fewest pods whose leaving really makes room on cards. (b) When it does not ask,
       because a node has enough in sum and no single card fits: we make room ourselves. Only the leader does. Here is
       who may, when, and where; `promising` carries it out.
Door:  `Preemptor.answer` is the verb; `refused` and `pod_seen` hear what happens; `run` works until it is cancelled.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec

from gputile.background.failure_isolation import FailureIsolation
from gputile.background.time_slices import SearchLane, TimeSlices
from gputile.dialects.gputile import read_nomination
from gputile.dialects.kube_objects import Pod
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
WISHES = 1000  # pods that could preempt and are remembered, with the nodes that they were refused on
ENOUGH = 20  # nodes with a plan, of which the cheapest is taken
ANSWER = 0.1  # seconds for an answer to kube-scheduler, which waits; more only until the first node is found
LOOK_STEPS, LOOK_SECONDS = 4000, 0.01  # of it for which nodes are worth a closer look
STEPS, SECONDS = 100_000, 2.0  # of searching for one pod, on all nodes
ANSWER_STEPS, ANSWER_SECONDS = 40_000, 0.5  # the same while kube-scheduler waits, and all pods that it schedules
BRIEF = 0.05  # seconds of it for pods of a namespace whose searches were cut short and have had their share
SHARE = 0.1  # of the time that may be spent on looking
AGAIN, LONGEST_AGAIN = 5.0, 60.0  # seconds until a pod for which nothing could be done is looked at again; doubled
OLD = 360.0  # seconds; kube-scheduler tries every pod again within five minutes, if it is still its business
THEIRS = 10.0  # seconds for which a preemption of kube-scheduler is waited for
FRESH, STALE = 0.2, 30.0  # seconds: how old budgets may be when we act; how often they are read for the verb
SAY_AGAIN = 60.0  # seconds between two events to one pod about budgets


TOO_LONG = (
    f"no pod is evicted for it: {NOT_SEARCHED_FURTHER} for pods that would have to go, because there are too many ways "
    "to place its containers; let fewer of them ask for GPUs"
)


class PreemptionCandidate(msgspec.Struct):
    """A pod that was refused and may preempt."""

    pod: Pod
    asked: PodRequest
    names: Sequence[str]  # the nodes of its last filter call: they passed taints and affinity
    since: float
    heard: float
    not_before: float = 0.0
    looks: int = 0
    told: str = ""
    told_at: float = -SAY_AGAIN

    @property
    def turn(self) -> tuple[int, int, float]:
        """Those who had the fewest looks first, else a hopeless pod would stand in the way of all others."""
        return self.looks, -self.pod.priority, self.since


class Preemptor:
    """See the module's text."""

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
        self._wishes: dict[str, PreemptionCandidate] = {}
        self._offered: dict[
            str, tuple[float, dict[str, PreemptionPlan]]
        ] = {}  # by pod: what kube-scheduler was answered, when
        self._brief_until: dict[str, float] = {}  # by namespace
        self._budgets_at = -STALE
        self._quiet_until = 0.0

    # ---- (a): kube-scheduler asks -----------------------------------------------------------------------------------

    def answer(self, args: PreemptArgs) -> dict[str, OfferedVictims]:
        """Per node that kube-scheduler offers: the fewest pods whose leaving really makes room on its cards.

        None while room is being made already: kube-scheduler does not count evictions that are not its own.
        """
        return run_to_end(self._answering(args))

    async def answer_in_slices(self, args: PreemptArgs) -> dict[str, OfferedVictims]:
        """The same, and meanwhile other questions are answered."""
        return await TimeSlices(self._clock, self._pause, self._lane).run(self._answering(args))

    def _answering(self, args: PreemptArgs) -> Cooperative[dict[str, OfferedVictims]]:
        asked = self._requests.of(args.pod)
        if asked is None:
            return args.offers
        if isinstance(asked, BadRequest) or self._ledger.nomination(args.pod.uid) is not None:
            return {}
        if self._clock() > self._budgets_at + 2 * STALE:
            self._victim_selector.budgets = None  # whatever was read is no longer true
        plans = yield from self._plans(args, asked)
        if plans:
            self._offered[args.pod.uid] = (self._clock(), plans)
        found = {name: self._offer(plan, args, name) for name, plan in plans.items()}
        return {name: offer for name, offer in found.items() if offer is not None}

    def _plans(self, args: PreemptArgs, asked: PodRequest) -> Cooperative[dict[str, PreemptionPlan]]:
        blocked = self._availability.blocked(args.offers, args.pod.uid)
        found: dict[str, PreemptionPlan] = {}
        began, namespace = self._clock(), args.pod.namespace
        seconds = BRIEF if began < self._brief_until.get(namespace, 0.0) else ANSWER_SECONDS
        budget = SearchBudget(ANSWER_STEPS, seconds, self._clock)
        for name in args.offers:
            yield
            plan = None if name in blocked else self._victim_selector.plan(args.pod, asked, name, budget)
            if plan is not None:
                found[name] = plan
            if len(found) >= ENOUGH or budget.is_spent or (found and self._clock() - began > ANSWER):
                break
        if budget.ran_out or budget.is_spent:
            until = self._clock() + (self._clock() - began) / SHARE
            self._brief_until[namespace] = max(until, self._brief_until.get(namespace, 0.0))
            self._metrics.cut_short.labels("preempt").inc()
            log.info(f"preempt: {NOT_SEARCHED_FURTHER}", extra=fields(pod=args.pod.key, nodes_found=len(found)))
        return found

    def _offer(self, plan: PreemptionPlan, args: PreemptArgs, name: str) -> OfferedVictims | None:
        """Where the cards have room already, whatever kube-scheduler needs (CPU, ports) is its own affair.

        Those who leave anyway are named where nobody else has to go: kube-scheduler wants at least one victim.
        """
        if not plan.victims and not plan.leaving:
            return args.offers[name]
        gone = plan.victims or tuple(h for h in plan.leaving if h.priority < args.pod.priority)
        unknown = self._victim_selector.budgets is None
        violations = args.offers[name].violations if unknown else self._victim_selector.violations(plan.victims)
        return OfferedVictims(tuple(holder.pod for holder in gone), violations) if gone else None

    def pod_seen(self, pod: Pod) -> None:
        """kube-scheduler has chosen one of our answers: keep that room for the pod while its victims leave."""
        if not pod.nominated or pod.uid not in self._offered:
            return
        at, plans = self._offered[pod.uid]
        offered, waiting = plans.get(pod.nominated), self._cluster_state.pending.get(pod.uid)
        if offered is None or waiting is None or self._clock() > at + THEIRS or not self._is_free(pod.uid):
            return
        assert isinstance(waiting.request, PodRequest)
        now = self._victim_selector.plan(
            pod, waiting.request, pod.nominated
        )  # another may have been promised the same room
        del self._offered[pod.uid]
        if now is not None and {h.pod for h in now.victims} <= {h.pod for h in offered.victims}:
            self._executor.keep(
                pod, waiting.request, msgspec.structs.replace(now, leaving=offered.victims + now.leaving)
            )

    # ---- (b): nobody asks -------------------------------------------------------------------------------------------

    def refused(self, no: UnschedulablePod) -> None:
        """A pod fitted nowhere. Called on the hot path: only takes note of those who might preempt."""
        pod = no.pod
        if (
            not self._settings.own
            or not isinstance(no.request, PodRequest)
            or pod.uid not in self._cluster_state.pending
        ):
            return
        lowest = self._ledger.lowest_priority()
        if lowest is None or pod.priority <= lowest:
            return
        if pod.spec is not None and pod.spec.preemption_policy == "Never":
            return
        now, wish = self._clock(), self._wishes.get(pod.uid)
        if wish is None:
            self._wishes[pod.uid] = PreemptionCandidate(pod, no.request, no.names, now, now)
            if len(self._wishes) > WISHES:  # the newest of the least important
                del self._wishes[
                    min(self._wishes, key=lambda uid: (self._wishes[uid].pod.priority, -self._wishes[uid].since))
                ]
            return
        wish.pod, wish.asked, wish.heard = pod, no.request, now
        if no.names != [pod.nominated]:  # asked about the nominated node alone: the others are not out of question
            wish.names = no.names

    async def run(self) -> None:
        while True:
            await self._isolation.attempt(LOOP, "", self.round, always=True)
            await self._pause(ROUND)

    async def round(self) -> None:
        """Everything that is due, once. What fails is tried again later, and holds nothing else up."""
        self._prune()
        self._metrics.nominations.set(len(self._ledger.nominations()))
        if not self._leads():
            return
        await self._executor.round()
        await self._try_to_read_budgets(STALE)
        hopeless: set[tuple[PodRequest, int, str]] = set()
        for uid in sorted(self._wishes, key=lambda uid: self._wishes[uid].turn):
            wish = self._wishes.get(uid)
            if wish is None or not self._is_due(uid, wish) or self._clock() < self._quiet_until:
                continue
            kind = (wish.asked, wish.pod.priority, wish.pod.namespace if self._ledger.quota_usage.quotas else "")
            if kind in hopeless:  # one like it was just looked at in vain
                self._wait(wish)
            else:
                work = partial(self._make_room, uid, wish)
                if await self._isolation.attempt(LOOP, wish.pod.key, work, wish.pod) is False:
                    hopeless.add(kind)

    def on_elected(self) -> None:
        """We lead (again): what is promised is what pods carry."""
        self._executor.on_elected()

    def listed(self) -> None:
        """After a list: keep what an earlier leader promised, and what kube-scheduler chose meanwhile."""
        self._executor.restore()
        for waiting in list(self._cluster_state.pending.values()):
            self._isolation.step(LOOP, waiting.pod.key, partial(self.pod_seen, waiting.pod), waiting.pod)

    def _prune(self) -> None:
        now, waiting = self._clock(), self._cluster_state.pending
        self._wishes = {uid: wish for uid, wish in self._wishes.items() if uid in waiting and now < wish.heard + OLD}
        self._offered = {uid: it for uid, it in self._offered.items() if uid in waiting}
        self._brief_until = {namespace: until for namespace, until in self._brief_until.items() if now < until}
        self._executor.prune()
        for wish in self._wishes.values():
            self._share_names(wish)

    def _share_names(self, wish: PreemptionCandidate) -> None:
        """Once per list, as it came: let the book's own strings stand for those of the request, which are thousands."""
        if isinstance(wish.names, list):
            nodes = (self._ledger.fleet.node(name) for name in wish.names)
            wish.names = tuple(node.name for node in nodes if node is not None)

    def _is_free(self, uid: str) -> bool:
        return (
            self._ledger.nomination(uid) is None
            and self._ledger.entry(uid) is None
            and not self._executor.is_at_work(uid)
        )

    def _is_due(self, uid: str, wish: PreemptionCandidate) -> bool:
        now, waiting = self._clock(), self._cluster_state.pending.get(uid)
        if waiting is None or waiting.pod.is_terminating or not self._is_free(uid):
            return False
        if now < max(wish.since + self._settings.patience, wish.not_before, self._executor.rests_until(uid)):
            return False
        offered_at, _ = self._offered.get(uid, (-THEIRS, {}))
        return not _is_nominated(waiting.pod) and now >= offered_at + THEIRS

    async def _make_room(self, uid: str, wish: PreemptionCandidate) -> bool:
        """Look for the cheapest node and promise, at once; whether anything could be done for the pod."""
        self._wait(wish)
        if not await self._try_to_read_budgets(FRESH):
            await self._tell(wish, "no pod is evicted for it, because disruption budgets cannot be read")
            return False
        began, budget = self._clock(), SearchBudget(STEPS, SECONDS, self._clock)
        best, forbidden = await self._search(wish, budget)
        self._quiet_until = self._clock() + (self._clock() - began) * (1 / SHARE - 1)
        if best is None:
            if budget.ran_out:
                self._metrics.cut_short.labels("own preemption").inc()
                await self._tell(wish, TOO_LONG)
            elif forbidden is not None:
                await self._tell(wish, _forbidden(forbidden))
            return False
        wish.not_before = 0.0
        plan = self._victim_selector.lawful_plan(
            wish.pod, wish.asked, best.node
        )  # all of this may have changed meanwhile
        if (
            isinstance(plan, PreemptionPlan)
            and (plan.victims or plan.leaving)
            and self._is_due(uid, wish)
            and self._leads()
        ):
            wish.looks = 0
            await self._executor.begin(wish.pod, wish.asked, plan)
            self._budgets_at = min(self._budgets_at, self._clock() - FRESH)  # what we evicted was charged to them
        return True

    def _wait(self, wish: PreemptionCandidate) -> None:
        wish.not_before = self._clock() + min(AGAIN * 2 ** min(wish.looks, 10), LONGEST_AGAIN)
        wish.looks += 1

    async def _search(
        self, wish: PreemptionCandidate, budget: SearchBudget
    ) -> tuple[PreemptionPlan | None, BlockedByBudgets | None]:
        """The cheapest plan; or, where only budgets stand against one, the first of those."""
        found: list[PreemptionPlan] = []
        forbidden: list[BlockedByBudgets] = []
        slices = TimeSlices(self._clock, self._pause, self._lane)
        for name in self._resolvable(wish, budget):
            await slices.turn()
            plan = self._victim_selector.lawful_plan(wish.pod, wish.asked, name, budget)
            if isinstance(plan, PreemptionPlan):
                if not plan.victims and not plan.leaving:
                    return None, None  # it has room by now
                found.append(plan)
            elif plan is not None:
                forbidden.append(plan)
            if len(found) >= ENOUGH or budget.is_spent:
                break
        if budget.is_spent:
            budget.cut_short()
        return min(found, key=lambda plan: plan.cost, default=None), min(forbidden, key=lambda f: f.node, default=None)

    def _resolvable(self, wish: PreemptionCandidate, budget: SearchBudget) -> list[str]:
        """Nodes where eviction could help; none if some node has room by now."""
        known = [name for name in wish.names if name in self._ledger.fleet]
        blocked = self._availability.blocked(known, wish.pod.uid)
        open_to_it = [name for name in known if name not in blocked]
        with self._ledger.without_claims_of(wish.pod.uid, wish.pod.priority) as fleet:
            may = self._ledger.quota_usage.allowed(wish.pod.namespace, wish.asked)
            refusals = fleet.refusals(may, open_to_it, budget.part(LOOK_STEPS, LOOK_SECONDS))
        return [refusal.node for refusal in refusals if refusal.resolvable] if len(refusals) == len(open_to_it) else []

    async def _try_to_read_budgets(self, age: float) -> bool:
        """Whether they are known, and no older than this."""
        if self._clock() - self._budgets_at < age:
            return True
        try:
            self._victim_selector.budgets = await self._api.budgets()
        except (ApiRejected, OutcomeUnknown) as wrong:
            log.warning("disruption budgets cannot be read", extra=fields(why=str(wrong)))
            return False
        self._budgets_at = self._clock()
        return True

    async def _tell(self, wish: PreemptionCandidate, why: str) -> None:
        """Once, as long as there is nothing new to say; and not too often."""
        if wish.told != why and self._clock() >= wish.told_at + SAY_AGAIN:
            wish.told, wish.told_at = why, self._clock()
            await self._executor.note(wish.pod, "PreemptionBlocked", why)


def _is_nominated(pod: Pod) -> bool:
    """By kube-scheduler; a nomination of ours may outlive its promise."""
    ours = read_nomination(pod)
    return bool(pod.nominated) and (ours is None or ours.grant.node != pod.nominated)


def _forbidden(found: BlockedByBudgets) -> str:
    budgets = " and ".join(f"PodDisruptionBudget {name}" for name in found.budgets)
    return f"evicting less important pods on node {found.node} would make room, but {budgets} forbids it now"
