"""Cards that the cluster shows sold twice: the pod that came last is told, and evicted.

Room:  nodes on which more is held of a card than it has. Looked at again and again until it is settled, so that a new
       leader, a budget or a lost answer changes nothing. Only the leader acts.
Door:  `OverlapResolver.found` takes a conflict of the book; `OverlapResolver.round` settles what it can.

It happens when a Binding that a frozen leader sent lands after its successor has sold the tile. To evict the wrong pod
is worse than to wait, so nobody goes unless every pod on the card carries our grant, the card did not shrink, the last
grant is young, and a live look at all of them shows the same (docs/decisions/0009-evict-the-newer-pod.md).
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

import msgspec

from gputile.background.failure_isolation import FailureIsolation
from gputile.dialects.gputile import GRANT, granted_at
from gputile.dialects.kube_objects import Pod
from gputile.kube.api import Api, ApiRejected, KubeEvent, OutcomeUnknown
from gputile.ledger.events import Conflict
from gputile.ledger.ledger import AllocationState
from gputile.model.cards import Card
from gputile.model.grants import Use
from gputile.scheduler.settings import Settings
from gputile.scheduler.state.cluster_state import ClusterState
from gputile.telemetry.logs import fields
from gputile.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

REASON = "GPUDoubleAllocated"
YOUNG = 600 * 10**9  # nanoseconds: an older grant was no accident of a failover
AGAIN = 5.0  # seconds until an eviction that failed, or that the watch has not shown, is tried again


class OverlappingPod(msgspec.Struct, frozen=True):
    """A pod that the cluster shows on a card."""

    pod: Pod
    use: Use
    granted: int  # nanoseconds since 1970
    ours: bool = True  # carries a grant of ours that is believed

    @property
    def came(self) -> tuple[bool, str, int, str]:
        """Sorts by who came first: one that has started before one that has not; then by when."""
        started = (self.pod.status and self.pod.status.start_time) or ""
        return not self.pod.is_admitted, started, self.granted, self.pod.uid


class OverlapResolver:
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
        isolation: FailureIsolation | None = None,
    ) -> None:
        self._isolation = isolation or FailureIsolation(metrics, clock)
        self._api, self._cluster_state, self._ledger = api, cluster_state, cluster_state.ledger
        self._settings, self._metrics = settings, metrics
        self._leads, self._clock, self._wall = leads, clock, wall
        self._nodes: set[str] = set()
        self._shrunk: set[str] = set()  # cards that are too small since their node said so
        self._open: set[str] = set()  # UIDs of pods that were chosen to go while their card's last grant was young
        self._told: set[str] = set()
        self._said: dict[str, str] = {}  # by card: why nobody is evicted, as last logged
        self._not_before: dict[str, float] = {}  # by UID

    def found(self, conflict: Conflict) -> None:
        self._nodes.add(conflict.node)
        if conflict.shrunk:
            self._shrunk.update(conflict.cards)
        extra = fields(pod=conflict.pod, node=conflict.node, cards=list(conflict.cards), shrunk=conflict.shrunk)
        log.error("more on a card than it has", extra=extra)

    async def round(self) -> None:
        for name in sorted(self._nodes):
            await self._isolation.attempt("double allocations", name, partial(self._settle_node, name))
        if not self._nodes:
            for memory in (self._shrunk, self._open, self._told, self._said, self._not_before):
                memory.clear()

    async def _settle_node(self, name: str) -> None:
        leaving: set[str] = set()
        for card in self._overcommitted(name):
            await self._settle(name, card, leaving)

    def _overcommitted(self, name: str) -> list[Card]:
        """The cards of the node of which its pods hold too much; a node without such is settled."""
        node = self._ledger.fleet.node(name)
        cards = node.cards if node is not None else ()
        over = [card for card in cards if _short(card, self._tenants(name, card))]
        self._shrunk -= {card.uuid for card in cards if card not in over}
        if not over:
            self._nodes.discard(name)
        return over

    def _tenants(self, name: str, card: Card) -> list[OverlappingPod]:
        """Who is bound and holds of the card."""
        found = []
        for entry in self._ledger.on_node(name):
            use = entry.allocation.uses().get(card.uuid)
            if use is not None and entry.state is AllocationState.CONFIRMED:
                pod = self._cluster_state.pod(entry.allocation.pod) or Pod()
                ours = GRANT in pod.annotations and self._cluster_state.is_granted(pod.uid)
                found.append(OverlappingPod(pod, use, granted_at(pod), ours))
        return found

    # ---- one card ---------------------------------------------------------------------------------------------------

    async def _settle(self, node: str, card: Card, leaving: set[str]) -> None:
        """Let those go who came last. `leaving`: who is chosen already, because of another card."""
        tenants = self._tenants(node, card)
        why = self._why_not(card, tenants)
        if why:
            self._say(node, card, why)
            return
        staying = [one for one in tenants if not one.pod.is_terminating and one.pod.uid not in leaving]
        for tenant in losers(card, staying):
            leaving.add(tenant.pod.uid)
            self._open.add(tenant.pod.uid)
            await self._attempt(tenant, node, card, tenants)

    def _why_not(self, card: Card, tenants: list[OverlappingPod]) -> str:
        if not self._settings.evict_overlaps:
            return "setting `evict_overlaps` is false"
        if not all(one.ours for one in tenants):
            return "not every pod on it carries a grant of ours"
        if card.uuid in self._shrunk:
            return "the card became smaller under its pods"
        young = self._wall() - max((one.granted for one in tenants), default=0) < YOUNG
        if not young and not any(one.pod.uid in self._open for one in tenants):
            return "all grants on it are old, so the card is likelier to have become smaller"
        return ""

    def _say(self, node: str, card: Card, why: str) -> None:
        if self._said.get(card.uuid) != why:
            self._said[card.uuid] = why
            log.error("a card is oversold and nobody is evicted", extra=fields(node=node, card=card.uuid, why=why))

    # ---- one pod ----------------------------------------------------------------------------------------------------

    async def _attempt(self, tenant: OverlappingPod, node: str, card: Card, tenants: list[OverlappingPod]) -> None:
        uid = tenant.pod.uid
        if self._clock() < self._not_before.get(uid, 0.0):
            return
        self._not_before[uid] = self._clock() + AGAIN
        try:
            async with asyncio.timeout(self._settings.bind.attempt + 1.0):
                await self._evict(tenant, node, card, tenants)
        except (ApiRejected, OutcomeUnknown, TimeoutError) as wrong:
            wait = getattr(wrong, "retry_after", None) or AGAIN
            self._not_before[uid] = self._clock() + wait
            extra = fields(pod=tenant.pod.key, node=node, card=card.uuid, why=str(wrong))
            log.warning("a pod that was sold a taken card is not evicted yet", extra=extra)

    async def _evict(self, tenant: OverlappingPod, node: str, card: Card, tenants: list[OverlappingPod]) -> None:
        for one in tenants:
            if not await self._is_live(one.pod):
                return  # the watch is about to tell us more
        pod, others = tenant.pod, [one for one in tenants if one.pod.uid != tenant.pod.uid]
        if pod.uid not in self._told and self._leads():
            await self._api.note(
                KubeEvent(
                    namespace=pod.namespace,
                    pod=pod.name,
                    uid=pod.uid,
                    reason=REASON,
                    message=event_message(card, others),
                )
            )
            self._told.add(pod.uid)
        if not self._leads():
            return
        await self._api.evict(pod.namespace, pod.name, pod.uid)
        self._metrics.evicted.inc()
        extra = fields(pod=pod.key, node=node, card=card.uuid, others=[one.pod.key for one in others])
        log.warning("evicted, because its card was sold twice", extra=extra)

    async def _is_live(self, pod: Pod) -> bool:
        """Whether the API server's store says what our watch says."""
        live = await self._api.pod(pod.namespace, pod.name)
        if live is None or live.is_terminal:
            return False
        same = (live.uid, live.node_name, live.annotations.get(GRANT))
        return (
            same == (pod.uid, pod.node_name, pod.annotations.get(GRANT)) and live.is_terminating == pod.is_terminating
        )


# ---- deciding -------------------------------------------------------------------------------------------------------


def losers(card: Card, tenants: list[OverlappingPod]) -> list[OverlappingPod]:
    """Who must go so that the others fit: the last who came first, and only if they hold of what is short."""
    staying = sorted(tenants, key=lambda tenant: tenant.came)
    going = []
    for tenant in reversed(staying.copy()):
        if any(getattr(tenant.use, what) for what in _short(card, staying)):
            staying.remove(tenant)
            going.append(tenant)
    return going


def _short(card: Card, tenants: list[OverlappingPod]) -> list[str]:
    """What there is too little of on the card."""
    return [
        what
        for what in ("memory", "cores", "slots")
        if sum(getattr(tenant.use, what) for tenant in tenants) > getattr(card, what)
    ]


def event_message(card: Card, others: list[OverlappingPod]) -> str:
    held = ", ".join(f"{one.pod.key} ({one.use.memory} MiB, {one.use.cores} %)" for one in others)
    return (
        f"card {card.uuid} ({card.memory} MiB) was sold twice while gputile's leader changed: {held} came first, so "
        "this pod is evicted; its controller makes a new one, and a pod without a controller has to be created again"
    )
