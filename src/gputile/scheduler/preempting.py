"""Preemption, in two halves, because kube-scheduler knows only sums.

Room:  (a) When kube-scheduler asks: the fewest pods whose leaving really makes room on cards. (b) When it does not ask,
       because a node has enough in sum and no single card fits: we make room ourselves. Only the leader does.
Door:  `Preemptor.answer` is the verb; `refused` and `pod_seen` hear what happens; `run` works until it is cancelled.

The walk of (b), one open plan per pod:

    no --patience, nobody preempted--> planned --one write: nomination and promise--> announced --evictions--> bound
                                                                                          |
                                       withdrawn <-- a budget forbids the first eviction -+-- time is up --> expired

From the moment it is planned the room is kept in the book, so that nobody of lower priority takes it meanwhile. The
promise stands on the pod as well: a new leader finds it there, and goes on. Eviction is asked for through the Eviction
API, so budgets hold; both sides are told by events.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable

import msgspec

from gputile.book.events import Promised, Withdrawn
from gputile.dialects.gputile import PROMISE, Promise, read_promise, write_promise
from gputile.dialects.wire import Pod
from gputile.kube.values import Api, Note, Refused, Unclear
from gputile.model.refusals import BadRequest
from gputile.model.requests import PodRequest
from gputile.scheduler.evicting import Evicting, Forbidden, Plan
from gputile.scheduler.mirror import Mirror
from gputile.scheduler.settings import Settings
from gputile.scheduler.verbs import Extender, No, holding_of
from gputile.scheduler.wire import Offer, PreemptArgs
from gputile.telemetry.logs import fields
from gputile.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

ROUND = 0.25  # seconds
WISHES = 100  # pods that could preempt and are remembered, with the nodes that they were refused on
ENOUGH = 20  # nodes with a plan, of which the cheapest is taken
NODES_AT_ONCE = 5  # looked at before the verbs have their turn
AGAIN = 5.0  # seconds until a pod for which nothing could be done is looked at again
THEIRS = 10.0  # seconds for which a preemption of kube-scheduler is waited for
REST = 30.0  # seconds after a preemption that came to nothing; doubled each time
LONGEST_REST = 1800.0
LONGEST_PROMISE = 3600.0  # seconds; what a pod's annotation may claim at most
BUDGETS_AGE = 5.0  # seconds


class Wish(msgspec.Struct):
    """A pod that was refused and may preempt."""

    pod: Pod
    asked: PodRequest
    names: list[str]  # the nodes of its last filter call: they passed taints and affinity
    since: float
    not_before: float = 0.0
    failures: int = 0
    told: str = ""


class Opened(msgspec.Struct):
    """A plan that is being carried out."""

    pod: Pod
    promise: Promise
    left: dict[str, str]  # victims that are still to be evicted: UID and namespace/name
    announced: bool = False
    evicted: int = 0
    not_before: float = 0.0
    blocked: str = ""


class Preemptor:
    """See the module's text."""

    def __init__(
        self,
        api: Api,
        extender: Extender,
        mirror: Mirror,
        settings: Settings,
        metrics: Metrics,
        *,
        leads: Callable[[], bool],
        clock: Callable[[], float],
        wall: Callable[[], int],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._api, self._extender, self._mirror, self._ledger = api, extender, mirror, mirror.ledger
        self._settings, self._attempt, self._metrics = settings.preempt, settings.bind.attempt, metrics
        self._leads, self._clock, self._wall, self._pause = leads, clock, wall, pause
        self._evicting = Evicting(mirror, settings, wall)
        self._wishes: OrderedDict[str, Wish] = OrderedDict()
        self._open: dict[str, Opened] = {}
        self._offered: dict[str, tuple[float, dict[str, Plan]]] = {}  # by pod: what kube-scheduler was answered, when
        self._budgets_at = -BUDGETS_AGE

    # ---- (a): kube-scheduler asks -----------------------------------------------------------------------------------

    def answer(self, args: PreemptArgs) -> dict[str, Offer]:
        """Per node that kube-scheduler offers: the fewest pods whose leaving really makes room on its cards.

        None while room is being made already: kube-scheduler does not count evictions that are not its own.
        """
        asked = self._extender.asked(args.pod)
        if asked is None:
            return args.offers
        if isinstance(asked, BadRequest) or self._ledger.promise(args.pod.uid) is not None:
            return {}
        closed = self._extender.closed(args.offers, args.pod.uid)
        plans = {name: self._evicting.plan(args.pod, asked, name) for name in args.offers if name not in closed}
        found = {name: plan for name, plan in plans.items() if plan is not None}
        if found:
            self._offered[args.pod.uid] = (self._clock(), found)
        return {name: self._offer(plan, args.offers[name]) for name, plan in found.items()}

    def _offer(self, plan: Plan, offered: Offer) -> Offer:
        """Where the cards have room already, whatever kube-scheduler needs (CPU, ports) is its own affair."""
        if not plan.victims:
            return offered
        violations = self._evicting.violations(plan.victims) if self._evicting.budgets else offered.violations
        return Offer(tuple(holder.pod for holder in plan.victims), violations)

    def pod_seen(self, pod: Pod) -> None:
        """kube-scheduler has chosen one of our answers: keep that room for the pod while its victims leave."""
        _, plans = self._offered.get(pod.uid, (0.0, {}))
        plan = plans.get(pod.nominated)
        waiting = self._mirror.waiting.get(pod.uid)
        if plan is None or waiting is None or not isinstance(waiting.asked, PodRequest) or not plan.victims:
            return
        if self._ledger.promise(pod.uid) is None and self._ledger.entry(pod.uid) is None:
            self._promise(pod, waiting.asked, plan)
            del self._offered[pod.uid]

    # ---- (b): nobody asks -------------------------------------------------------------------------------------------

    def refused(self, no: No) -> None:
        """A pod fitted nowhere. Called on the hot path: only takes note of those who might preempt."""
        pod = no.pod
        if not self._settings.own or not isinstance(no.asked, PodRequest) or pod.uid not in self._mirror.waiting:
            return
        lowest = self._ledger.lowest_priority()
        if lowest is None or pod.priority <= lowest:
            return
        if pod.spec is not None and pod.spec.preemption_policy == "Never":
            return
        wish = self._wishes.get(pod.uid)
        if wish is None:
            self._wishes[pod.uid] = Wish(pod, no.asked, no.names, self._clock())
            if len(self._wishes) > WISHES:
                self._wishes.pop(min(self._wishes, key=lambda uid: self._wishes[uid].pod.priority))
        else:
            wish.pod, wish.asked = pod, no.asked
            if no.names != [pod.nominated]:  # asked about the nominated node alone: the others are not out of question
                wish.names = no.names

    async def run(self) -> None:
        while True:
            await self.round()
            await self._pause(ROUND)

    async def round(self) -> None:
        """Everything that is due, once. What fails is tried again later, and holds nothing else up."""
        self._forget_strangers()
        if not self._leads():
            return
        for uid in list(self._open):
            await self._attend(uid)
        for uid, wish in sorted(self._wishes.items(), key=lambda item: (-item[1].pod.priority, item[1].since)):
            if self._is_due(uid, wish):
                await self._make_room(uid, wish)

    def new_term(self) -> None:
        """We lead (again): what is promised is what pods carry."""
        self._open.clear()
        self.recall()

    def recall(self) -> None:
        """After a list: keep what an earlier leader promised, and finish it."""
        for uid, waiting in self._mirror.waiting.items():
            promise = read_promise(waiting.pod)
            if promise is None or uid in self._open or not isinstance(waiting.asked, PodRequest):
                continue
            seconds = min((promise.until - self._wall()) / 1e9, LONGEST_PROMISE)
            if seconds <= 0 or self._ledger.entry(uid) is not None:
                continue
            holding = holding_of(waiting.pod, waiting.asked, promise.grant)
            self._ledger.handle(Promised(holding, self._clock() + seconds))
            there = {e.holding.pod: e.holding.name for e in self._ledger.on_node(promise.grant.node)}
            left = {one: there[one] for one in promise.victims if one in there and not self._evicting.is_going(one)}
            self._open[uid] = Opened(waiting.pod, promise, left, announced=True)

    def _forget_strangers(self) -> None:
        for memory in (self._wishes, self._offered):
            for uid in [uid for uid in memory if uid not in self._mirror.waiting]:
                del memory[uid]
        self._evicting.asked_to_go &= {uid for uid in self._evicting.asked_to_go if self._ledger.entry(uid) is not None}
        self._metrics.promises.set(len(self._ledger.promises()))

    def _is_due(self, uid: str, wish: Wish) -> bool:
        now = self._clock()
        if now < max(wish.since + self._settings.patience, wish.not_before) or wish.pod.is_going:
            return False
        is_theirs = _is_nominated(self._mirror.waiting[uid].pod) or now < self._offered_at(uid) + THEIRS
        return not is_theirs and self._ledger.promise(uid) is None and self._ledger.entry(uid) is None

    def _offered_at(self, uid: str) -> float:
        return self._offered[uid][0] if uid in self._offered else -THEIRS

    async def _make_room(self, uid: str, wish: Wish) -> None:
        """Look for the cheapest node; promise, at once; the rest is for `_attend`."""
        wish.not_before = self._clock() + AGAIN
        try:
            await self._read_budgets()
        except (Refused, Unclear) as wrong:
            await self._tell_wish(wish, f"no pod is evicted for it, because disruption budgets cannot be read: {wrong}")
            return
        best, forbidden = await self._search(wish)
        if best is None:
            if forbidden is not None:
                await self._tell_wish(wish, _forbidden(forbidden))
            return
        plan = self._evicting.lawful_plan(wish.pod, wish.asked, best.node)  # the book may have changed meanwhile
        if isinstance(plan, Plan) and plan.to_evict and self._is_waiting(uid, wish) and self._leads():
            self._open[uid] = self._promise(wish.pod, wish.asked, plan)
            await self._attend(uid)

    def _is_waiting(self, uid: str, wish: Wish) -> bool:
        return uid in self._mirror.waiting and self._ledger.entry(uid) is None and wish is self._wishes.get(uid)

    async def _search(self, wish: Wish) -> tuple[Plan | None, Forbidden | None]:
        """The cheapest plan; or, where only budgets stand against one, the first of those."""
        found: list[Plan] = []
        forbidden: Forbidden | None = None
        for number, name in enumerate(self._curable(wish), start=1):
            plan = self._evicting.lawful_plan(wish.pod, wish.asked, name)
            if isinstance(plan, Plan):
                if not plan.to_evict:
                    return None, None  # it has, or gets, room without us
                found.append(plan)
            forbidden = forbidden or (plan if isinstance(plan, Forbidden) else None)
            if len(found) >= ENOUGH:
                break
            if number % NODES_AT_ONCE == 0:
                await self._pause(0)
        return min(found, key=lambda plan: plan.cost, default=None), forbidden

    def _curable(self, wish: Wish) -> list[str]:
        """Nodes where eviction could help; none if some node has room by now."""
        known = [name for name in wish.names if name in self._ledger.fleet]
        closed = self._extender.closed(known, wish.pod.uid)
        open_to_it = [name for name in known if name not in closed]
        with self._ledger.aside(wish.pod.uid, wish.pod.priority) as fleet:
            refusals = fleet.refusals(wish.asked, open_to_it)
        return [refusal.node for refusal in refusals if refusal.curable] if len(refusals) == len(open_to_it) else []

    def _promise(self, pod: Pod, asked: PodRequest, plan: Plan) -> Opened:
        grace = max((found.grace for h in plan.victims if (found := self._mirror.pod(h.pod)) is not None), default=0)
        seconds = grace + self._settings.margin
        holding = holding_of(pod, asked, plan.where.grant(pod.uid, asked.dialect))
        self._ledger.handle(Promised(holding, self._clock() + seconds))
        assert holding.grant is not None
        uids = tuple(holder.pod for holder in plan.to_evict)
        promise = Promise(holding.grant, self._wall() + int(seconds * 1e9), uids)
        log.info("room promised", extra=fields(pod=pod.key, node=plan.node, seconds=seconds))
        guarded_first = sorted(plan.to_evict, key=lambda h: not self._evicting.is_protected(h.pod))
        return Opened(pod, promise, {holder.pod: holder.name for holder in guarded_first})

    async def _read_budgets(self) -> None:
        if self._clock() - self._budgets_at >= BUDGETS_AGE:
            self._evicting.budgets = await self._api.budgets()
            self._budgets_at = self._clock()

    # ---- carrying it out --------------------------------------------------------------------------------------------

    async def _attend(self, uid: str) -> None:
        """The next step of a plan."""
        opened = self._open[uid]
        if self._clock() < opened.not_before:
            return
        if uid not in self._mirror.waiting:
            self._close(uid, "bound" if self._ledger.entry(uid) is not None else "withdrawn")
            return
        try:
            if self._ledger.promise(uid) is None:
                await self._expire(uid)
            elif not opened.announced:
                await self._announce(uid)
            if opened.announced:
                for victim in list(opened.left):
                    await self._evict(uid, victim)
        except (Refused, Unclear) as wrong:
            opened.not_before = self._clock() + AGAIN
            log.warning("preemption is tried again", extra=fields(pod=opened.pod.key, why=str(wrong)))

    async def _announce(self, uid: str) -> None:
        """One write: where the pod is to go, and what is kept for it there. Before anybody is evicted."""
        opened = self._open[uid]
        self._must_lead()
        said = write_promise(opened.promise, self._wall())
        await self._patch(opened.pod, said, opened.promise.grant.node)
        opened.announced = True
        names = ", ".join(opened.left.values())
        node, seconds = opened.promise.grant.node, (opened.promise.until - self._wall()) // 10**9
        await self._note(
            opened.pod,
            "Preempting",
            f"room is made on node {node} by evicting {names}; it is kept for this pod for {seconds} s at most",
            warn=False,
        )

    async def _evict(self, uid: str, victim: str) -> None:
        opened = self._open.get(uid)
        if opened is None or victim not in opened.left or self._ledger.promise(uid) is None:
            return
        self._must_lead()
        namespace, _, name = opened.left[victim].partition("/")
        try:
            await self._api.evict(namespace, name, victim)
        except Refused as no:
            if no.status in (404, 409):  # gone by itself, or replaced by another of the same name
                del opened.left[victim]
                return
            if no.status != 429 or opened.evicted:
                await self._say_blocked(opened, f"{namespace}/{name} cannot be evicted yet: {no}")
                raise
            await self._withdraw(uid, f"{namespace}/{name} may not be evicted: {no}")
            return
        del opened.left[victim]
        opened.evicted += 1
        self._evicting.asked_to_go.add(victim)
        self._metrics.evictions.inc()
        log.info("evicted", extra=fields(pod=f"{namespace}/{name}", to_make_room_for=opened.pod.key))
        said = f"evicted to make room for {opened.pod.key} (priority {opened.pod.priority}) on node "
        gone = Note(
            namespace=namespace, pod=name, uid=victim, reason="Preempted", message=said + opened.promise.grant.node
        )
        await self._api.note(gone)

    async def _say_blocked(self, opened: Opened, why: str) -> None:
        if opened.blocked != why:
            opened.blocked = why
            await self._note(opened.pod, "PreemptionBlocked", why)

    async def _withdraw(self, uid: str, why: str) -> None:
        """Nobody has gone yet, and nobody may: give the room back."""
        opened = self._open[uid]
        self._ledger.handle(Withdrawn(uid))
        self._close(uid, "withdrawn")
        await self._note(opened.pod, "PreemptionBlocked", why)
        await self._patch(opened.pod, None, "")

    async def _expire(self, uid: str) -> None:
        opened = self._open[uid]
        if opened.announced:
            await self._patch(opened.pod, None, "")
        self._close(uid, "expired")
        why = f"room on node {opened.promise.grant.node} was kept for this pod for as long as it may be, and not taken"
        await self._note(opened.pod, "PromiseExpired", why)

    def _close(self, uid: str, end: str) -> None:
        """The plan is over; a pod that got nothing of it waits longer each time before others are evicted for it."""
        del self._open[uid]
        self._metrics.preemptions.labels(end).inc()
        wish = self._wishes.get(uid)
        if wish is not None and end != "bound":
            wish.not_before = self._clock() + min(REST * 2**wish.failures, LONGEST_REST)
            wish.failures += 1

    # ---- words ------------------------------------------------------------------------------------------------------

    def _must_lead(self) -> None:
        if not self._leads():
            raise Refused(0, "NotLeading", "this replica leads no more")

    async def _patch(self, pod: Pod, promise: str | None, node: str) -> None:
        self._must_lead()
        await self._api.patch_pod(
            pod.namespace, pod.name, pod.uid, {PROMISE: promise}, {}, nominate=node, timeout=self._attempt
        )

    async def _note(self, pod: Pod, reason: str, message: str, *, warn: bool = True) -> None:
        self._must_lead()
        kind = "Warning" if warn else "Normal"
        said = Note(namespace=pod.namespace, pod=pod.name, uid=pod.uid, reason=reason, message=message, kind=kind)  # type: ignore[arg-type]
        await self._api.note(said)

    async def _tell_wish(self, wish: Wish, why: str) -> None:
        """Once, as long as there is nothing new to say."""
        if wish.told == why or not self._leads():
            return
        wish.told = why
        try:
            await self._note(wish.pod, "PreemptionBlocked", why)
        except (Refused, Unclear) as wrong:
            wish.told = ""
            log.warning("a pod could not be told", extra=fields(pod=wish.pod.key, why=str(wrong)))


def _is_nominated(pod: Pod) -> bool:
    """By kube-scheduler; a nomination of ours may outlive its promise."""
    ours = read_promise(pod)
    return bool(pod.nominated) and (ours is None or ours.grant.node != pod.nominated)


def _forbidden(found: Forbidden) -> str:
    budgets = " and ".join(f"PodDisruptionBudget {name}" for name in found.budgets)
    return f"evicting less important pods on node {found.node} would make room, but {budgets} forbids it now"
