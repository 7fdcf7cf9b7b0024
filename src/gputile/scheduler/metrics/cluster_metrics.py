"""Metrics of the cluster: GPUs, allocations, usage, health, fragmentation and pending pods.

They are computed from the ledger and the cluster state at the scrape, some nodes at a time, so that extender calls are
answered in between; the hot path counts nothing for them. Names and help texts are in `telemetry.exposition`.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from gputile.dialects.usage_annotation import ReportedUsage
from gputile.engine.placement.shares import CARD as WHOLE
from gputile.ledger.ledger import AllocationState
from gputile.model.cards import Card, FreeCapacity, NodeView
from gputile.model.grants import ContainerGrant, Grant
from gputile.model.refusals import BadRequest
from gputile.model.units import ALL
from gputile.model.usage import CardUsage, Usage, together
from gputile.scheduler.metrics.hami_metrics import HamiMetrics
from gputile.scheduler.metrics.quota_metrics import add_quotas
from gputile.scheduler.settings import MetricsSettings
from gputile.scheduler.state.cluster_state import ClusterState, UnboundPod
from gputile.scheduler.state.usage import used_on
from gputile.telemetry import exposition as to
from gputile.telemetry.exposition import MIB, ExpositionPage, labelled
from gputile.telemetry.hami_metrics import HAMI_FAMILIES

AT_ONCE = 10  # nodes per time slice: about two milliseconds
NOT_TRIED = "NotTriedYet"  # no filter call for the pod yet, or none since it changed


class MetricsScope(msgspec.Struct, frozen=True):
    """Whether single cards and single pods have series of their own."""

    cards: bool
    pods: bool


class ModelTotals(msgspec.Struct):
    """The sums over the cards of one model, or of one node."""

    memory: int = 0
    allocated: int = 0
    cores: int = 0
    cores_allocated: int = 0
    idle: int = 0


class ClusterMetrics:
    """Writes the cluster's metrics in the text format of Prometheus; simultaneous scrapes share one computation."""

    def __init__(self, cluster_state: ClusterState, settings: MetricsSettings) -> None:
        self._cluster_state, self._ledger, self._settings = cluster_state, cluster_state.ledger, settings
        self._writing: dict[bool, asyncio.Future[bytes]] = {}  # by `names_pods`: the computation in progress

    async def text(self, *, names_pods: bool = True) -> bytes:
        """The metrics as text. `names_pods`: whether the client may see pods and namespaces."""
        writing = self._writing.get(names_pods)
        if writing is None:
            writing = self._writing[names_pods] = asyncio.ensure_future(self._render(names_pods=names_pods))
            writing.add_done_callback(lambda _: self._writing.pop(names_pods, None))
        return await asyncio.shield(writing)  # a cancelled scrape does not cancel it for the others

    async def _render(self, *, names_pods: bool) -> bytes:
        cards, pods = self._ledger.fleet.card_count(), len(self._cluster_state.bound())
        shown = MetricsScope(cards <= self._settings.cards, names_pods and pods <= self._settings.pods)
        page = ExpositionPage((*to.FAMILIES, *(HAMI_FAMILIES if self._settings.hami else ())))
        page.add(to.SERIES_OMITTED, labelled(to.SERIES_OMITTED.labels, "cards"), 0 if shown.cards else cards)
        page.add(to.SERIES_OMITTED, labelled(to.SERIES_OMITTED.labels, "pods"), 0 if shown.pods else pods)
        self._add_pending(page, names_pods=names_pods)
        if names_pods:
            add_quotas(page, self._ledger.quota_usage)
        await self._add_nodes(page, shown)
        parts = []
        for part in page.parts():
            parts.append(part)
            await asyncio.sleep(0)
        return b"".join(parts)

    def _add_pending(self, page: ExpositionPage, *, names_pods: bool) -> None:
        counts = Counter(
            (unbound.pod.namespace if names_pods else "", self._reason(uid, unbound))
            for uid, unbound in self._cluster_state.pending.items()
        )
        for labels, count in sorted(counts.items()):
            page.add(to.PENDING_PODS, labelled(to.PENDING_PODS.labels, *labels), count)

    def _reason(self, uid: str, unbound: UnboundPod) -> str:
        if isinstance(unbound.request, BadRequest):
            return unbound.request.code
        return self._cluster_state.main_reasons.get(uid, NOT_TRIED)

    # ---- nodes ------------------------------------------------------------------------------------------------------

    async def _add_nodes(self, page: ExpositionPage, shown: MetricsScope) -> None:
        fleet, names = self._ledger.fleet, self._ledger.fleet.names()
        sums: dict[str, ModelTotals] = {}
        states: Counter[tuple[str, str]] = Counter()
        free = fragmented = 0.0
        for start in range(0, len(names), AT_ONCE):
            present = [name for name in names[start : start + AT_ONCE] if name in fleet]
            shares = fleet.free_shares_of(present)
            for name, share, fragment in zip(present, shares, fleet.fragments(present), strict=True):
                view = fleet.view(name)
                self._add_health(page, view)
                if not view.node.cards:
                    continue
                free, fragmented = free + share / WHOLE, fragmented + fragment
                labels = labelled(to.NODE, name)
                page.add(to.NODE_FREE_CARDS, labels, share / WHOLE)
                page.add(to.NODE_FRAGMENTED_CARDS, labels, round(fragment, 6))
                states += self._add_node(page, view, labels, sums, shown)
            await asyncio.sleep(0)
        page.add(to.FREE_CARDS, "", free)
        page.add(to.FRAGMENTED_CARDS, "", round(fragmented, 6))
        for (model, state), count in sorted(states.items()):
            page.add(to.MODEL_CARDS, labelled(to.MODEL_CARDS.labels, model, state), count)
        for model, totals in sorted(sums.items()):
            _add_model(page, labelled(to.MODEL, model), totals)

    def _add_health(self, page: ExpositionPage, view: NodeView) -> None:
        node, agents = view.node, self._cluster_state.agents
        if node.fault:
            page.add(to.NODE_FAULT, labelled(to.NODE_FAULT.labels, node.name, node.fault), 1)
        if node.name in agents:
            page.add(to.NODE_AGENT_ALIVE, labelled(to.NODE, node.name), int(not agents.is_stale(node.name)))

    def _add_node(
        self, page: ExpositionPage, view: NodeView, labels: str, sums: dict[str, ModelTotals], shown: MetricsScope
    ) -> Counter[tuple[str, str]]:
        """The node, its cards and its pods; returns the count of its cards by model and state."""
        node, usage = view.node, used_on(self._cluster_state.agents, view.node.name)
        node_totals, states = ModelTotals(), Counter[tuple[str, str]]()
        by_card = _by_card(usage) if usage is not None else {}
        for card, free in zip(node.cards, view.free_by_card, strict=True):
            state = _state(card, node.fault)
            states[card.model, state] += 1
            for totals in (node_totals, sums.setdefault(card.model, ModelTotals())):
                _count(totals, card, free, idle=state == "usable" and not free.tenants)
            if shown.cards:
                _add_card(page, node.name, card, free, usable=state == "usable", used=by_card.get(card.uuid))
        for (model, state), count in states.items():
            page.add(to.NODE_CARDS, labelled(to.NODE_CARDS.labels, node.name, model, state), count)
        page.add(to.NODE_IDLE_CARDS, labels, node_totals.idle)
        page.add(to.NODE_MEMORY, labels, node_totals.memory * MIB)
        page.add(to.NODE_MEMORY_ALLOCATED, labels, node_totals.allocated * MIB)
        page.add(to.NODE_CORES_ALLOCATED, labels, _ratio(node_totals.cores_allocated, node_totals.cores))
        if len(by_card) == len(node.cards) and (used := together(by_card.values()).memory) is not None:
            page.add(to.NODE_MEMORY_USED, labels, used * MIB)
        page.add(to.NODE_PODS, labels, self._add_pods(page, view, usage.pods if usage is not None else {}, shown))
        return states

    # ---- pods -------------------------------------------------------------------------------------------------------

    def _add_pods(self, page: ExpositionPage, view: NodeView, usage: Usage, shown: MetricsScope) -> int:
        """Returns how many pods hold cards of the node. A reservation between filter and bind does not count yet."""
        entries = self._ledger.on_node(view.node.name)
        allocations = [entry.allocation for entry in entries if entry.state is not AllocationState.RESERVED]
        granted = [(allocation.name, allocation.grant) for allocation in allocations if allocation.grant is not None]
        if shown.pods:
            for name, grant in granted:
                _add_pod(page, name, grant, usage.get(grant.pod, {}))
        if self._settings.hami:
            hami = HamiMetrics(page, self._cluster_state, view)
            if shown.cards:
                hami.add_cards(grant for _, grant in granted)
            if shown.pods:
                hami.add_pods(granted)
        return len(granted)


def _add_model(page: ExpositionPage, labels: str, totals: ModelTotals) -> None:
    page.add(to.MODEL_IDLE_CARDS, labels, totals.idle)
    page.add(to.MODEL_MEMORY, labels, totals.memory * MIB)
    page.add(to.MODEL_MEMORY_ALLOCATED, labels, totals.allocated * MIB)
    page.add(to.MODEL_CORES_ALLOCATED, labels, _ratio(totals.cores_allocated, totals.cores))


def _state(card: Card, fault: str) -> str:
    """The state of a card, as a label value; a fault of the card itself counts before one of its node."""
    if not card.healthy:
        return "unhealthy"
    if card.cordoned:
        return "cordoned"
    if card.in_mig_mode:
        return "mig"
    return "node out of use" if fault else "usable"


def _count(totals: ModelTotals, card: Card, free: FreeCapacity, *, idle: bool) -> None:
    totals.memory += card.memory
    totals.allocated += card.memory - free.memory
    totals.cores += card.cores
    totals.cores_allocated += card.cores - free.cores
    totals.idle += idle


def _by_card(usage: ReportedUsage) -> dict[str, CardUsage]:
    """Usage by card, for the cards whose usage is completely known."""
    parts: dict[str, list[CardUsage]] = {uuid: [] for uuid in usage.cards}
    for containers in usage.pods.values():
        for cards in containers.values():
            for uuid in cards.keys() & parts.keys():
                parts[uuid].append(cards[uuid])
    return {uuid: together(usages) for uuid, usages in parts.items()}


def _add_card(
    page: ExpositionPage, node: str, card: Card, free: FreeCapacity, *, usable: bool, used: CardUsage | None
) -> None:
    labels = labelled(to.CARD, node, card.uuid, str(card.index), card.model)
    page.add(to.CARD_USABLE, labels, int(usable))
    page.add(to.CARD_PODS, labels, free.tenants)
    page.add(to.CARD_MEMORY, labels, card.memory * MIB)
    page.add(to.CARD_MEMORY_ALLOCATED, labels, (card.memory - free.memory) * MIB)
    page.add(to.CARD_CORES_ALLOCATED, labels, _ratio(card.cores - free.cores, card.cores))
    if used is not None:
        page.add_use(to.CARD_MEMORY_USED, to.CARD_CORES_USED, labels, used)


def _add_pod(page: ExpositionPage, name: str, grant: Grant, usage: Mapping[str, Mapping[str, CardUsage]]) -> None:
    namespace, _, pod = name.partition("/")
    for uuid, use in grant.uses().items():
        labels = labelled(to.POD, namespace, pod, grant.pod, grant.node, uuid)
        page.add(to.POD_MEMORY_ALLOCATED, labels, use.memory * MIB)
        page.add(to.POD_CORES_ALLOCATED, labels, use.cores / ALL)
    grants = {container.container: _granted(container) for container in grant.containers}
    for container in [*grants, *(name for name in usage if name not in grants)]:
        granted, used = grants.get(container, {}), usage.get(container, {})
        for uuid in _distinct(granted, used):
            labels = labelled(to.CONTAINER, namespace, pod, grant.pod, container, grant.node, uuid)
            if uuid in granted:
                memory, cores = granted[uuid]
                page.add(to.CONTAINER_MEMORY_ALLOCATED, labels, memory * MIB)
                page.add(to.CONTAINER_CORES_ALLOCATED, labels, cores / ALL)
            if uuid in used:
                page.add_use(to.CONTAINER_MEMORY_USED, to.CONTAINER_CORES_USED, labels, used[uuid])


def _granted(container: ContainerGrant) -> dict[str, tuple[int, int]]:
    """By card: memory and cores; several tiles of one card are one series."""
    granted: dict[str, tuple[int, int]] = {}
    for tile in container.tiles:
        memory, cores = granted.get(tile.uuid, (0, 0))
        granted[tile.uuid] = memory + tile.memory, cores + tile.cores
    return granted


def _distinct(*lists: Iterable[str]) -> list[str]:
    """Every name once, in order."""
    return list(dict.fromkeys(name for names in lists for name in names))


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
