"""A summary of a cluster's GPUs and of the pods that hold them: what `top` and `inspect` render, and print as JSON.

Pure functions. The audit adds up what pods hold, from nodes and pods alone, so this works on any cluster, with or
without gputile's scheduler. Field names are the JSON keys of docs/cli.md: they are only ever added.
"""

from collections.abc import Mapping

import msgspec
from msgspec import UNSET, UnsetType

from gputile.audit.audit import audit
from gputile.audit.report import GpuHolder, UnplacedGpus
from gputile.cli.source import ClusterSnapshot, ShownNode
from gputile.dialects import gpushare
from gputile.dialects.registry import read_node, read_pod
from gputile.dialects.settings import DialectSettings
from gputile.model.cards import Card, Node
from gputile.model.refusals import BadRequest, NodeReason, about_one_node
from gputile.model.units import ALL, MiB, Percent

BY_NUMBER = "number"
"""In place of a dialect: the number of cards that the pod holds is known, their identity is not."""


class CardTenant(msgspec.Struct, frozen=True, kw_only=True):
    """What one pod holds of one card."""

    pod: str  # namespace/name
    memory: MiB
    cores: Percent
    by: str  # the dialect of the record; BY_NUMBER: there is none, and it may be another card of the node
    since: str = ""
    phase: str = ""
    going: bool = False
    used_memory: MiB | UnsetType = UNSET  # what its processes use, where the metrics API is served
    utilisation: Percent | UnsetType = UNSET


class CardSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One card: its size, what is allocated of it, and to which pods."""

    index: int
    uuid: str
    model: str  # "" when unknown
    memory: MiB
    memory_held: MiB
    cores: Percent
    cores_held: Percent
    slots: int
    slots_held: int
    state: str  # "ok", or why it takes no new pods: "unhealthy", "cordoned", "mig"
    reason: str
    pods: tuple[CardTenant, ...]

    @property
    def share(self) -> float:
        """The allocated part, 0 to 1: the larger one of memory and cores; above 1 it is overcommitted."""
        memory = self.memory_held / self.memory if self.memory else 0.0
        return max(memory, self.cores_held / self.cores if self.cores else 0.0)


class NodeSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One node with its cards."""

    name: str
    address: str
    agent: str  # the dialect whose agent published its cards
    pool: str
    cordoned: bool
    fault: str  # why it is out of use, as a sentence; "" when it is in use
    cards: tuple[CardSummary, ...]

    @property
    def pods(self) -> set[str]:
        return {tenant.pod for card in self.cards for tenant in card.pods}


class SummaryTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the cards of a cluster, or of one model."""

    nodes: int
    cards: int
    idle: int
    shared: int
    full: int
    out_of_use: int
    memory: MiB
    memory_held: MiB
    cores: Percent
    cores_held: Percent
    pods: int


class PendingPodSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A pod that requests GPUs and has no node."""

    pod: str
    since: str
    refused: str  # what is wrong with the request itself; "" when the request is valid


class ClusterSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All GPU nodes of a cluster, their sums, and the pending pods."""

    cluster: SummaryTotals
    models: dict[str, SummaryTotals]
    nodes: tuple[NodeSummary, ...]  # those with cards, or with a fault; by name
    nodes_without_cards: int
    waiting: tuple[PendingPodSummary, ...]  # oldest first
    findings: int  # the number of problems that `gputile audit` finds


LiveUse = Mapping[tuple[str, str], Mapping[str, int]]
"""By pod (namespace/name) and card: `memory` in MiB and `cores` in percent of the card, as far as they are known."""


def summarize(
    snapshot: ClusterSnapshot, settings: DialectSettings, now: float, use: LiveUse | None = None
) -> ClusterSummary:
    """`now` in seconds since 1970."""
    settings = gpushare.resolved(settings, snapshot.nodes)
    report = audit(
        map(msgspec.to_builtins, snapshot.nodes), map(msgspec.to_builtins, snapshot.pods), settings.gpushare_unit, now
    )
    unplaced: dict[str, list[UnplacedGpus]] = {}
    for entry in report.unplaced:
        unplaced.setdefault(entry.node, []).append(entry)
    all_nodes = [
        _node(node, settings, report.holders, unplaced.get(node.name, []), use or {})
        for node in sorted(snapshot.nodes, key=lambda node: node.name)
    ]
    nodes = tuple(node for node in all_nodes if node.cards or node.fault)
    return ClusterSummary(
        cluster=_totals(nodes),
        models={model: _totals(nodes, model) for model in sorted({card.model for n in nodes for card in n.cards})},
        nodes=nodes,
        nodes_without_cards=len(all_nodes) - len(nodes),
        waiting=_pending(snapshot, settings),
        findings=len(report.findings),
    )


def _node(
    shown: ShownNode,
    settings: DialectSettings,
    holders: Mapping[str, tuple[GpuHolder, ...]],
    unplaced: list[UnplacedGpus],
    use: LiveUse,
) -> NodeSummary:
    read = read_node(shown, settings)
    node = read if isinstance(read, Node) else Node(name=shown.name, fault=NodeReason.BAD_INVENTORY)
    by_card = {card.uuid: [*holders.get(card.uuid, ())] for card in node.cards}
    for entry in unplaced:
        _assign_unplaced(entry, node, by_card)
    return NodeSummary(
        name=shown.name,
        address=shown.address,
        agent=node.agent,
        pool=node.pool,
        cordoned=shown.is_cordoned,
        fault=about_one_node(NodeReason(node.fault)) if node.fault else "",
        cards=tuple(_card(card, by_card[card.uuid], use) for card in node.cards),
    )


def _assign_unplaced(entry: UnplacedGpus, node: Node, by_card: dict[str, list[GpuHolder]]) -> None:
    """The pod holds a known number of unknown cards: whole ones are shown on the cards with the fewest holders. The
    card of a share cannot be guessed, so a share is not drawn; `gputile audit` lists it."""
    emptiest = sorted(node.cards, key=lambda card: (len(by_card[card.uuid]), card.index))
    for card in emptiest[: entry.gpus]:
        by_card[card.uuid].append(GpuHolder(entry.pod, entry.uid, card.memory, card.cores, 1, by=BY_NUMBER))


def _card(card: Card, holders: list[GpuHolder], use: LiveUse) -> CardSummary:
    return CardSummary(
        index=card.index,
        uuid=card.uuid,
        model=card.model,
        memory=card.memory,
        memory_held=sum(holder.memory for holder in holders),
        cores=card.cores,
        cores_held=sum(holder.cores for holder in holders),
        slots=card.slots,
        slots_held=sum(holder.slots for holder in holders),
        state=_state(card),
        reason=card.reason,
        pods=tuple(
            _tenant(holder, use.get((holder.pod, card.uuid), {}))
            for holder in sorted(holders, key=lambda holder: holder.pod)
        ),
    )


def _state(card: Card) -> str:
    return "unhealthy" if not card.healthy else "cordoned" if card.cordoned else "mig" if card.in_mig_mode else "ok"


def _tenant(holder: GpuHolder, use: Mapping[str, int]) -> CardTenant:
    return CardTenant(
        pod=holder.pod,
        memory=holder.memory,
        cores=holder.cores,
        by=holder.by,
        since=holder.bound or holder.granted,
        phase=holder.phase,
        going=holder.going,
        used_memory=use.get("memory", UNSET),
        utilisation=use.get("cores", UNSET),
    )


def _totals(nodes: tuple[NodeSummary, ...], model: str | None = None) -> SummaryTotals:
    """Over all cards, or those of one model."""
    selected = [(node, card) for node in nodes for card in node.cards if model in (None, card.model)]
    cards = [card for _, card in selected]
    in_use = [card for node, card in selected if card.state == "ok" and not node.fault]
    return SummaryTotals(
        nodes=len({node.name for node, _ in selected}),
        cards=len(cards),
        idle=sum(not card.pods for card in in_use),
        shared=sum(bool(card.pods) and card.share < 1 for card in in_use),
        full=sum(bool(card.pods) and card.share >= 1 for card in in_use),
        out_of_use=len(cards) - len(in_use),
        memory=sum(card.memory for card in cards),
        memory_held=sum(card.memory_held for card in cards),
        cores=sum(card.cores for card in cards),
        cores_held=sum(min(card.cores_held, ALL) for card in cards),
        pods=len({tenant.pod for card in cards for tenant in card.pods}),
    )


def _pending(snapshot: ClusterSnapshot, settings: DialectSettings) -> tuple[PendingPodSummary, ...]:
    """Pods that request GPUs and have no node, oldest first."""
    pending = []
    for pod in snapshot.pods:
        if pod.node_name or pod.is_terminal or pod.is_terminating:
            continue
        request = read_pod(pod, settings)
        if request is not None:
            created = (pod.metadata and pod.metadata.creation_timestamp) or ""
            refused = request.message if isinstance(request, BadRequest) else ""
            pending.append(PendingPodSummary(pod=pod.key, since=created, refused=refused))
    return tuple(sorted(pending, key=lambda pod: (pod.since, pod.pod)))
