"""Who holds which part of which card, as one value to draw from: for `top` and `inspect`, and for programs.

Room:  pure. What pods hold is summed up by the auditor, who needs nothing but nodes and pods; so this works on any
       cluster, with or without our scheduler. Keys of these values are a contract (docs/cli.md): they are only added.
Door:  `summarize(seen, settings, now)`.
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
"""In place of a family: how many cards the pod holds is known, and not which."""


class CardTenant(msgspec.Struct, frozen=True, kw_only=True):
    """What one pod holds of one card."""

    pod: str  # namespace/name
    memory: MiB
    cores: Percent
    by: str  # whose record says so; BY_NUMBER: none does, and it may be another card of the node
    since: str = ""
    phase: str = ""
    going: bool = False
    used_memory: MiB | UnsetType = UNSET  # what its processes use, where the metrics API tells
    utilisation: Percent | UnsetType = UNSET


class CardSummary(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    uuid: str
    model: str  # "" when nobody says
    memory: MiB
    memory_held: MiB
    cores: Percent
    cores_held: Percent
    slots: int
    slots_held: int
    state: str  # "ok", or why nobody new may come: "unhealthy", "cordoned", "mig"
    reason: str
    pods: tuple[CardTenant, ...]

    @property
    def share(self) -> float:
        """How much of it is taken: of memory and cores the larger part."""
        memory = self.memory_held / self.memory if self.memory else 0.0
        return max(memory, self.cores_held / self.cores if self.cores else 0.0)


class NodeSummary(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    address: str
    agent: str  # the dialect whose agent says what cards it has
    pool: str
    cordoned: bool
    fault: str  # why it is out of use, in words; "" when it is not
    cards: tuple[CardSummary, ...]

    @property
    def pods(self) -> set[str]:
        return {tenant.pod for card in self.cards for tenant in card.pods}


class SummaryTotals(msgspec.Struct, frozen=True, kw_only=True):
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
    pod: str
    since: str
    refused: str  # what is wrong with the request itself; "" when it only waits


class ClusterSummary(msgspec.Struct, frozen=True, kw_only=True):
    cluster: SummaryTotals
    models: dict[str, SummaryTotals]
    nodes: tuple[NodeSummary, ...]  # those with cards, or that should have some; by name
    nodes_without_cards: int
    waiting: tuple[PendingPodSummary, ...]  # oldest first
    findings: int  # things that `gputile audit` calls wrong


LiveUse = Mapping[tuple[str, str], Mapping[str, int]]
"""By pod (namespace/name) and card: `memory` in MiB and `cores` in percent of the card, as far as they are known."""


def summarize(
    seen: ClusterSnapshot, settings: DialectSettings, now: float, use: LiveUse | None = None
) -> ClusterSummary:
    """`now` in seconds since 1970."""
    settings = gpushare.resolved(settings, seen.nodes)
    report = audit(
        map(msgspec.to_builtins, seen.nodes), map(msgspec.to_builtins, seen.pods), settings.gpushare_unit, now
    )
    sold = report.sold
    somewhere: dict[str, list[UnplacedGpus]] = {}
    for one in report.unplaced:
        somewhere.setdefault(one.node, []).append(one)
    everyone = [
        _node(found, settings, sold, somewhere.get(found.name, []), use or {})
        for found in sorted(seen.nodes, key=lambda one: one.name)
    ]
    nodes = tuple(node for node in everyone if node.cards or node.fault)
    return ClusterSummary(
        cluster=_sums(nodes),
        models={model: _sums(nodes, model) for model in sorted({card.model for node in nodes for card in node.cards})},
        nodes=nodes,
        nodes_without_cards=len(everyone) - len(nodes),
        waiting=_waiting(seen, settings),
        findings=len(report.findings),
    )


def _node(
    found: ShownNode,
    settings: DialectSettings,
    sold: Mapping[str, tuple[GpuHolder, ...]],
    somewhere: list[UnplacedGpus],
    use: LiveUse,
) -> NodeSummary:
    read = read_node(found, settings)
    node = read if isinstance(read, Node) else Node(name=found.name, fault=NodeReason.BAD_INVENTORY)
    held = {card.uuid: [*sold.get(card.uuid, ())] for card in node.cards}
    for unplaced in somewhere:
        _show_somewhere(unplaced, node, held)
    return NodeSummary(
        name=found.name,
        address=found.address,
        agent=node.agent,
        pool=node.pool,
        cordoned=found.is_cordoned,
        fault=about_one_node(NodeReason(node.fault)) if node.fault else "",
        cards=tuple(_card(card, held[card.uuid], use) for card in node.cards),
    )


def _show_somewhere(unplaced: UnplacedGpus, node: Node, held: dict[str, list[GpuHolder]]) -> None:
    """Which cards the pod holds is unknown, how many is not: whole ones are shown on those that hold least. Where a
    share is, nobody can say, and it is not drawn; `gputile audit` lists it."""
    emptiest = sorted(node.cards, key=lambda card: (len(held[card.uuid]), card.index))
    for card in emptiest[: unplaced.gpus]:
        held[card.uuid].append(GpuHolder(unplaced.pod, unplaced.uid, card.memory, card.cores, 1, by=BY_NUMBER))


def _card(card: Card, held: list[GpuHolder], use: LiveUse) -> CardSummary:
    return CardSummary(
        index=card.index,
        uuid=card.uuid,
        model=card.model,
        memory=card.memory,
        memory_held=sum(one.memory for one in held),
        cores=card.cores,
        cores_held=sum(one.cores for one in held),
        slots=card.slots,
        slots_held=sum(one.slots for one in held),
        state=_state(card),
        reason=card.reason,
        pods=tuple(_tenant(one, use.get((one.pod, card.uuid), {})) for one in sorted(held, key=lambda one: one.pod)),
    )


def _state(card: Card) -> str:
    return "unhealthy" if not card.healthy else "cordoned" if card.cordoned else "mig" if card.in_mig_mode else "ok"


def _tenant(held: GpuHolder, use: Mapping[str, int]) -> CardTenant:
    return CardTenant(
        pod=held.pod,
        memory=held.memory,
        cores=held.cores,
        by=held.by,
        since=held.bound or held.granted,
        phase=held.phase,
        going=held.going,
        used_memory=use.get("memory", UNSET),
        utilisation=use.get("cores", UNSET),
    )


def _sums(nodes: tuple[NodeSummary, ...], model: str | None = None) -> SummaryTotals:
    mine = [(node, card) for node in nodes for card in node.cards if model in (None, card.model)]
    cards = [card for _, card in mine]
    in_use = [card for node, card in mine if card.state == "ok" and not node.fault]
    return SummaryTotals(
        nodes=len({node.name for node, _ in mine}),
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


def _waiting(seen: ClusterSnapshot, settings: DialectSettings) -> tuple[PendingPodSummary, ...]:
    found = []
    for pod in seen.pods:
        if pod.node_name or pod.is_terminal or pod.is_terminating:
            continue
        asked = read_pod(pod, settings)
        if asked is not None:
            made = (pod.metadata and pod.metadata.creation_timestamp) or ""
            refused = asked.message if isinstance(asked, BadRequest) else ""
            found.append(PendingPodSummary(pod=pod.key, since=made, refused=refused))
    return tuple(sorted(found, key=lambda one: (one.since, one.pod)))
