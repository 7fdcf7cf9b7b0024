"""Resolves double allocations: where pods hold more of a card than it has, the newer pod gets an Event and is evicted.

Nodes with a conflict are examined again until it is resolved, so that a new leader, a PodDisruptionBudget or a lost
answer only delays it. Only the leader acts. `OverlapResolver.add` records a conflict of the ledger;
`OverlapResolver.round` resolves what it can.

A double allocation happens when the Binding of a frozen leader is written after its successor has allocated the same
tile. Evicting the wrong pod is worse than waiting. So a pod is evicted only if every pod on the card carries our grant,
the card did not shrink, the last grant is recent, and a live lookup of all of them shows the same
(docs/decisions/0009-evict-the-newer-pod.md).
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
from gputile.model.cards import NOTHING, Card, Use
from gputile.scheduler.settings import Settings
from gputile.scheduler.state.cluster_state import ClusterState
from gputile.telemetry.logs import fields
from gputile.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

REASON = "GPUDoubleAllocated"
RECENT = 600 * 10**9  # nanoseconds: an older grant is not the result of a failover
RETRY = 5.0  # seconds until an eviction that failed, or that the watch has not shown, is retried


class OverlappingPod(msgspec.Struct, frozen=True):
    """A pod on a double-allocated card."""

    pod: Pod
    use: Use
    granted: int  # nanoseconds since 1970
    ours: bool = True  # carries a valid grant of ours

    @property
    def order(self) -> tuple[bool, str, int, str]:
        """Sort key, oldest first: started pods before others, then by time."""
        started = (self.pod.status and self.pod.status.start_time) or ""
        return not self.pod.is_admitted, started, self.granted, self.pod.uid


class OverlapResolver:
    """Double allocations that are not resolved yet, and the evictions that resolve them."""

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
        self._shrunk: set[str] = set()  # cards that became smaller in the inventory of their node
        self._chosen: set[str] = set()  # UIDs of pods that were chosen while the card's last grant was recent
        self._notified: set[str] = set()  # UIDs of pods with an Event
        self._logged: dict[str, str] = {}  # by card: why no pod is evicted, as last logged
        self._not_before: dict[str, float] = {}  # by UID

    def add(self, conflict: Conflict) -> None:
        self._nodes.add(conflict.node)
        if conflict.shrunk:
            self._shrunk.update(conflict.cards)
        extra = fields(pod=conflict.pod, node=conflict.node, gpus=list(conflict.cards), shrunk=conflict.shrunk)
        log.error("GPU overcommitted", extra=extra)

    async def round(self) -> None:
        for name in sorted(self._nodes):
            await self._isolation.attempt("double allocations", name, partial(self._resolve_node, name))
        if not self._nodes:
            for state in (self._shrunk, self._chosen, self._notified, self._logged, self._not_before):
                state.clear()

    async def _resolve_node(self, name: str) -> None:
        leaving: set[str] = set()
        for card in self._overcommitted(name):
            await self._resolve_card(name, card, leaving)

    def _overcommitted(self, name: str) -> list[Card]:
        """The overcommitted cards of the node; a node without any is resolved."""
        node = self._ledger.fleet.node(name)
        cards = node.cards if node is not None else ()
        over = [card for card in cards if _overcommitted_resources(card, self._pods_on(name, card))]
        self._shrunk -= {card.uuid for card in cards if card not in over}
        if not over:
            self._nodes.discard(name)
        return over

    def _pods_on(self, name: str, card: Card) -> list[OverlappingPod]:
        """The bound pods that hold a part of the card."""
        pods = []
        for entry in self._ledger.on_node(name):
            use = entry.allocation.uses().get(card.uuid)
            if use is not None and entry.state is AllocationState.CONFIRMED:
                pod = self._cluster_state.pod(entry.allocation.pod) or Pod()
                ours = GRANT in pod.annotations and self._cluster_state.is_granted(pod.uid)
                pods.append(OverlappingPod(pod, use, granted_at(pod), ours))
        return pods

    # ---- one card ---------------------------------------------------------------------------------------------------

    async def _resolve_card(self, node: str, card: Card, leaving: set[str]) -> None:
        """Evict the newest pods until the others fit. `leaving`: pods that were chosen because of another card."""
        pods = self._pods_on(node, card)
        reason = self._why_not(card, pods)
        if reason:
            self._log_unresolved(node, card, reason)
            return
        staying = [held for held in pods if not held.pod.is_terminating and held.pod.uid not in leaving]
        for victim in pods_to_evict(card, staying):
            leaving.add(victim.pod.uid)
            self._chosen.add(victim.pod.uid)
            await self._attempt(victim, node, card, pods)

    def _why_not(self, card: Card, pods: list[OverlappingPod]) -> str:
        if not self._settings.evict_overlaps:
            return "setting `evict_overlaps` is false"
        if not all(held.ours for held in pods):
            return "not every pod on the GPU carries a grant of gputile"
        if card.uuid in self._shrunk:
            return "the GPU became smaller while pods were on it"
        is_recent = self._wall() - max((held.granted for held in pods), default=0) < RECENT
        if not is_recent and not any(held.pod.uid in self._chosen for held in pods):
            return "all grants on the GPU are old, so the GPU has probably become smaller"
        return ""

    def _log_unresolved(self, node: str, card: Card, reason: str) -> None:
        if self._logged.get(card.uuid) != reason:
            self._logged[card.uuid] = reason
            log.error("GPU overcommitted; no pod is evicted", extra=fields(node=node, gpu=card.uuid, why=reason))

    # ---- one pod ----------------------------------------------------------------------------------------------------

    async def _attempt(self, victim: OverlappingPod, node: str, card: Card, pods: list[OverlappingPod]) -> None:
        uid = victim.pod.uid
        if self._clock() < self._not_before.get(uid, 0.0):
            return
        self._not_before[uid] = self._clock() + RETRY
        try:
            async with asyncio.timeout(self._settings.bind.attempt + 1.0):
                await self._evict(victim, node, card, pods)
        except (ApiRejected, OutcomeUnknown, TimeoutError) as error:
            wait = getattr(error, "retry_after", None) or RETRY
            self._not_before[uid] = self._clock() + wait
            extra = fields(pod=victim.pod.key, node=node, gpu=card.uuid, why=str(error))
            log.warning("eviction after a double allocation failed; retrying", extra=extra)

    async def _evict(self, victim: OverlappingPod, node: str, card: Card, pods: list[OverlappingPod]) -> None:
        for held in pods:
            if not await self._is_live(held.pod):
                return  # the watch is late, and will show the change
        pod, others = victim.pod, [held for held in pods if held.pod.uid != victim.pod.uid]
        if pod.uid not in self._notified and self._leads():
            await self._api.note(
                KubeEvent(
                    namespace=pod.namespace,
                    pod=pod.name,
                    uid=pod.uid,
                    reason=REASON,
                    message=event_message(card, others),
                )
            )
            self._notified.add(pod.uid)
        if not self._leads():
            return
        await self._api.evict(pod.namespace, pod.name, pod.uid)
        self._metrics.evicted.inc()
        extra = fields(pod=pod.key, node=node, gpu=card.uuid, others=[held.pod.key for held in others])
        log.warning("pod evicted after a double allocation", extra=extra)

    async def _is_live(self, pod: Pod) -> bool:
        """Whether a live lookup shows the pod as our watch does."""
        live = await self._api.pod(pod.namespace, pod.name)
        if live is None or live.is_terminal:
            return False
        shown = (pod.uid, pod.node_name, pod.annotations.get(GRANT), pod.is_terminating)
        return (live.uid, live.node_name, live.annotations.get(GRANT), live.is_terminating) == shown


# ---- deciding -------------------------------------------------------------------------------------------------------


def pods_to_evict(card: Card, pods: list[OverlappingPod]) -> list[OverlappingPod]:
    """The pods to evict so that the others fit: the newest first, and only pods that hold what is overcommitted."""
    staying = sorted(pods, key=lambda held: held.order)
    victims = []
    for held in reversed(staying.copy()):
        if any(getattr(held.use, resource) for resource in _overcommitted_resources(card, staying)):
            staying.remove(held)
            victims.append(held)
    return victims


def _overcommitted_resources(card: Card, pods: list[OverlappingPod]) -> list[str]:
    """The resources of which the pods hold more than the card has."""
    total = sum((held.use for held in pods), start=NOTHING)
    return [name for name in ("memory", "cores", "slots") if getattr(total, name) > getattr(card, name)]


def event_message(card: Card, others: list[OverlappingPod]) -> str:
    first = ", ".join(f"{held.pod.key} ({held.use.memory} MiB, {held.use.cores} %)" for held in others)
    return (
        f"GPU {card.uuid} ({card.memory} MiB) was allocated twice during a leader failover. {first} was first, so this "
        "pod is evicted. Its controller will recreate it; a bare pod must be recreated by hand."
    )
