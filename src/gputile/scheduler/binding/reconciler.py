"""What the book wants done, and pods that came around us: looked up, granted, reported.

Room:  slow work beside the verbs: live looks at pods, grants for pods that another scheduler bound, labels that an API
       server did not take over from a Binding. Only the leader writes.
Door:  `Reconciler.apply(instructions)`, and `Reconciler.run`, which ends only when cancelled.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from itertools import islice

from gputile.background.failure_isolation import FailureIsolation
from gputile.dialects import gputile, registry
from gputile.dialects.kube_objects import GrantContext, Pod, PodRecord
from gputile.engine.placement.place import Placement
from gputile.engine.search_budget import SearchBudget
from gputile.kube.api import Api, ApiRejected, KubeEvent, OutcomeUnknown
from gputile.ledger.events import Conflict, Forgotten, Freed, Instruction, VerifyBind
from gputile.ledger.ledger import AllocationState
from gputile.model.grants import Grant
from gputile.model.refusals import Refusal, about_one_node
from gputile.model.requests import PodRequest
from gputile.scheduler.binding.overlap_resolver import OverlapResolver
from gputile.scheduler.settings import Settings
from gputile.scheduler.state.allocations import SECONDS, STEPS, allocation_of, seed_of
from gputile.scheduler.state.cluster_state import ClusterState
from gputile.telemetry.logs import fields
from gputile.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

ROUND = 0.25  # seconds between two looks at what is to be done
AT_ONCE = 200  # pods per round, so that verbs are answered in between
AGAIN = 5.0  # seconds until something that failed is tried again
LOOP = "grants"  # in logs and metrics
PENDING = (None, "", "Pending")  # phases of a pod none of whose containers has started


class Reconciler:
    """See the module's text."""

    def __init__(
        self,
        api: Api,
        cluster_state: ClusterState,
        settings: Settings,
        metrics: Metrics,
        *,
        leads: Callable[[], bool],
        clock: Callable[[], float],
        wall: Callable[[], int],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        isolation: FailureIsolation | None = None,
    ) -> None:
        self._isolation = isolation or FailureIsolation(metrics, clock)
        self._api, self._cluster_state, self._settings, self._metrics = api, cluster_state, settings, metrics
        self._leads, self._clock, self._wall, self._pause = leads, clock, wall, pause
        self._verify: set[str] = set()
        self._overlap_resolver = OverlapResolver(
            api, cluster_state, settings, metrics, leads=leads, clock=clock, wall=wall, isolation=self._isolation
        )
        self._unwritten: dict[str, Grant] = {}  # granted and booked, and not on the pod yet
        self._not_before: dict[str, float] = {}  # by UID: when to try again what failed
        self._no_room_since: dict[str, float] = {}  # by UID: bound around us, and no cards for it
        self._crowded: dict[str, tuple[Pod, str]] = {}  # bound around us where there is no room, and what to say
        self.is_busy: Callable[[str], bool] = lambda uid: False  # whether a bind of this pod is under way
        self.landed: set[str] = set()  # binds that the API server said yes to, and that our watch has not shown yet
        self._reported: dict[str, str] = {}  # by UID: the last thing said about it

    def apply(self, instructions: Iterable[Instruction]) -> None:
        """Take note of what the book wants; `run` does it."""
        for instruction in instructions:
            match instruction:
                case VerifyBind(pod):
                    self._metrics.expired.inc()
                    self.look_up(pod)
                case Conflict():
                    self._metrics.conflicts.inc()
                    self._overlap_resolver.found(instruction)
                case Freed():
                    self._no_room_since.clear()  # those who found none may be granted now

    def look_up(self, uid: str) -> None:
        """Let a live look decide what became of this pod's bind."""
        self._verify.add(uid)

    def on_elected(self) -> None:
        """We lead again, and another may have meanwhile: what we had not written yet is to be decided anew."""
        for uid in list(self._unwritten):
            pod = self._cluster_state.pod(uid)
            if pod is not None and not self._cluster_state.is_granted(uid):
                self._cluster_state.ungranted[uid] = pod
        self._unwritten.clear()
        for entry in self._cluster_state.ledger.in_flight():
            if entry.state is AllocationState.ASSUMED:
                self.look_up(entry.allocation.pod)

    async def run(self) -> None:
        while True:
            await self._isolation.attempt(LOOP, "", self.round, always=True)
            await self._pause(ROUND)

    async def round(self) -> None:
        """Everything that is due, once. What fails is tried again later, and holds nothing else up."""
        for uid in sorted(self._verify):
            await self._attempt(uid, self._look_up)
        if not self._leads():
            self._cluster_state.suspects.clear()
            self._cluster_state.turned_away.clear()
            return
        for uid in list(islice(self._cluster_state.ungranted, AT_ONCE)):
            if self._clock() >= self._no_room_since.get(uid, -AGAIN) + AGAIN and not self._isolation.is_backing_off(
                LOOP, uid
            ):
                self._isolation.step(LOOP, uid, partial(self._grant, uid), self._cluster_state.pod(uid))
        for uid in list(self._unwritten):
            await self._attempt(uid, self._write)
        for uid in list(islice(self._cluster_state.fresh, AT_ONCE)):
            await self._attempt(uid, self._complete_labels)
        for uid in list(self._cluster_state.suspects):
            await self._attempt(uid, self._report_suspect)
        for uid in list(self._crowded):
            await self._attempt(uid, self._report_crowded)
        for uid in list(islice(self._cluster_state.turned_away, AT_ONCE)):
            await self._attempt(uid, self._report_rejected_by_kubelet)
        await self._overlap_resolver.round()
        await self._isolation.write_events(self._api)

    async def _attempt(self, uid: str, work: Callable[[str], Awaitable[None]]) -> None:
        """One piece of work about one pod, unless it failed a moment ago. Whoever writes asks first who leads."""
        if self._clock() < self._not_before.get(uid, 0.0):
            return
        await self._isolation.attempt(LOOP, uid, lambda: self._try(uid, work), self._cluster_state.pod(uid))

    async def _try(self, uid: str, work: Callable[[str], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(self._settings.bind.attempt + 1.0):
                await work(uid)
            self._not_before.pop(uid, None)
        except (ApiRejected, OutcomeUnknown, TimeoutError) as wrong:
            self._not_before[uid] = self._clock() + AGAIN
            log.warning("not done, and tried again", extra=fields(what=work.__name__, pod=uid, why=str(wrong)))

    # ---- binds whose answer got lost --------------------------------------------------------------------------------

    async def _look_up(self, uid: str) -> None:
        entry = self._cluster_state.ledger.entry(uid)
        if entry is None or entry.state is not AllocationState.ASSUMED:
            self._verify.discard(uid)
            return
        namespace, _, name = entry.allocation.name.partition("/")
        live = None if self.is_busy(uid) else await self._api.pod(namespace, name)
        if self.is_busy(uid):
            return  # a bind that is under way will tell, or be looked up in its turn
        self._verify.discard(uid)
        if self._cluster_state.ledger.entry(uid) is not entry:
            return  # the watch, or another bind, was quicker: what we have read is old
        if live is None or live.uid != uid:
            self.apply(self._cluster_state.vanished(uid))
        elif live.node_name:
            self.apply(self._cluster_state.pod_changed(live))
        elif uid not in self.landed:  # else the look was sent before a later try landed
            self.apply(self._cluster_state.ledger.handle(Forgotten(uid)))
        log.info("bind looked up", extra=fields(pod=entry.allocation.name, node=live.node_name if live else None))

    # ---- pods bound around us ---------------------------------------------------------------------------------------

    def _grant(self, uid: str) -> None:
        """Choose cards on the node where the pod is, and book them before anything is written."""
        pod = self._cluster_state.ungranted[uid]
        asked = registry.read_pod(pod, self._cluster_state.settings_on(pod.node_name))
        if not isinstance(asked, PodRequest) or pod.node_name not in self._cluster_state.ledger.fleet:
            self._no_room_since[uid] = self._clock()
            return
        # Cards that the ledger has for it already: reserved by filter before kube-scheduler itself bound it.
        grant = self._cluster_state.booked_grant(uid, pod.node_name)
        if grant is None:
            where = self._place(pod, asked)
            if not isinstance(where, Placement):
                self._no_room_since[uid] = self._clock()
                self._no_room(pod, where)
                return
            grant = where.grant(uid, asked.dialect)
            over = self._beyond_quota(pod, asked, grant)
            if over:
                self._no_room_since[uid] = self._clock()
                self._crowded[uid] = (pod, f"bound to {pod.node_name} by another scheduler, beyond its quota: {over}")
                return
        self.apply(self._cluster_state.granted(pod, grant))
        self._unwritten[uid] = grant
        self._metrics.adopted.inc()
        log.info("granted to a pod bound around us", extra=fields(pod=pod.key, node=pod.node_name))

    def _beyond_quota(self, pod: Pod, asked: PodRequest, grant: Grant) -> str:
        """Our own agents start no container without a grant, so its cards stay free. Whatever runs is booked."""
        node = self._cluster_state.ledger.fleet.node(grant.node)
        waits = node is not None and node.agent == gputile.NAME and (pod.status is None or pod.status.phase in PENDING)
        return self._cluster_state.ledger.beyond_quota(allocation_of(pod, asked, grant)) if waits else ""

    def _place(self, pod: Pod, asked: PodRequest) -> Placement | Refusal:
        may = self._cluster_state.ledger.quota_usage.allowed(
            pod.namespace, asked
        )  # of several makes, one that it can pay
        budget, policy, seed = SearchBudget(STEPS, SECONDS, self._clock), self._settings.policy, seed_of(pod.uid)
        with self._cluster_state.ledger.without_claims_of(pod.uid) as fleet:
            where = fleet.place(may, pod.node_name, policy, seed, budget.half())
            if isinstance(where, Placement):
                return where
            return fleet.place(asked, pod.node_name, policy, seed, budget)

    def _no_room(self, pod: Pod, refusal: Refusal) -> None:
        why = f"the node {about_one_node(refusal.code)}"
        said = f"bound to {pod.node_name} by another scheduler, where gputile has no cards for it: {why}"
        self._crowded[pod.uid] = (pod, said)

    async def _write(self, uid: str) -> None:
        pod, grant = self._cluster_state.pod(uid), self._unwritten[uid]
        if pod is None or pod.node_name != grant.node or self._cluster_state.is_granted(uid):
            del self._unwritten[uid]  # gone, or not where it was, or granted by another leader
            return
        written = self._written(pod, grant)
        if written is not None:
            await self._patch(pod, {**written.annotations}, {**written.labels}, only_if_unchanged=True)
        self._unwritten.pop(uid, None)

    async def _patch(
        self, pod: Pod, annotations: dict[str, str | None], labels: dict[str, str | None], *, only_if_unchanged: bool
    ) -> None:
        """The lease is looked at right before; a write that hangs is given up before a new leader would begin."""
        if not self._leads():
            raise ApiRejected(0, "NotLeading", "this replica leads no more")
        version = pod.metadata.resource_version if only_if_unchanged and pod.metadata else None
        timeout = self._settings.bind.attempt
        await self._api.patch_pod(
            pod.namespace, pod.name, pod.uid, annotations, labels, version=version, timeout=timeout
        )

    def _written(self, pod: Pod, grant: Grant) -> PodRecord | None:
        settings = self._cluster_state.settings_on(grant.node)
        asked = registry.read_pod(pod, settings)
        node = self._cluster_state.ledger.fleet.node(grant.node)
        if not isinstance(asked, PodRequest) or node is None:
            return None
        award = GrantContext(grant=grant, pod=pod, asked=asked, cards=node.cards, at=self._wall(), settings=settings)
        return registry.write_grant(award)

    # ---- labels that the Binding could not bring --------------------------------------------------------------------

    async def _complete_labels(self, uid: str) -> None:
        """API servers before 1.35 take only annotations over from a Binding. A label that is there stays as it is."""
        pod = self._cluster_state.fresh.get(uid)
        if pod is None:
            return  # gone meanwhile
        entry = self._cluster_state.ledger.entry(uid)
        grant = entry.allocation.grant if entry is not None else None
        may_lack = grant is not None and grant.dialect != gputile.NAME and not pod.is_admitted  # ours has no labels
        written = self._written(pod, grant) if grant is not None and may_lack else None
        missing = {key: value for key, value in (written.labels if written else {}).items() if key not in pod.labels}
        try:
            if missing:
                await self._patch(pod, {}, {**missing}, only_if_unchanged=False)
        except ApiRejected as no:
            if no.status in (0, 408, 429):
                raise
            log.warning("labels were refused", extra=fields(pod=pod.key, why=str(no)))
        self._cluster_state.fresh.pop(uid, None)

    # ---- what people should know ------------------------------------------------------------------------------------

    async def _report_suspect(self, uid: str) -> None:
        pod, why = self._cluster_state.suspects.get(uid, (None, ""))
        if pod is not None and await self._tell(pod, "GrantInvalid", why):
            self._metrics.copied.inc()
        self._cluster_state.suspects.pop(uid, None)

    async def _report_crowded(self, uid: str) -> None:
        pod, why = self._crowded[uid]
        await self._tell(pod, "NoFittingGPU", why)
        self._crowded.pop(uid, None)

    async def _report_rejected_by_kubelet(self, uid: str) -> None:
        pod = self._cluster_state.turned_away.get(uid)
        if pod is not None and await self._tell(pod, "AdmissionFailed", _rejected_by_kubelet(pod)):
            self._metrics.admission_failures.inc()
        self._cluster_state.turned_away.pop(uid, None)

    async def _tell(self, pod: Pod, reason: str, why: str) -> bool:
        """Once per pod, as long as there is nothing new to say."""
        if self._reported.get(pod.uid) == why or not self._leads():
            return False
        await self._api.note(KubeEvent(namespace=pod.namespace, pod=pod.name, uid=pod.uid, reason=reason, message=why))
        self._reported[pod.uid] = why
        log.warning("told a pod", extra=fields(reason=reason, pod=pod.key, node=pod.node_name, why=why))
        return True

    def prune(self) -> None:
        """Drop what is remembered of pods that are gone."""
        self.landed &= {entry.allocation.pod for entry in self._cluster_state.ledger.in_flight()}
        for memory in (self._reported, self._not_before, self._no_room_since):
            for uid in [uid for uid in memory if self._cluster_state.pod(uid) is None]:
                del memory[uid]


def _rejected_by_kubelet(pod: Pod) -> str:
    said = [word for word in (pod.status and (pod.status.reason, pod.status.message)) or () if word]
    return (
        f"the kubelet of node {pod.node_name} did not take the pod in ({': '.join(said)}); its tile is free again, and "
        "the pod that its controller makes in its place is placed anew; one without a controller has to be made again"
    )
