"""Compares the kubelet's checkpoint, the grants and the cards, and reports where they differ. It repairs nothing."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from gputile.agent.cdi_specs import slots_of
from gputile.agent.node_pods import NodePod
from gputile.agent.overlap import CardAllocations, overlap
from gputile.dialects import gputile
from gputile.kubelet.checkpoint import CheckpointEntry
from gputile.model.cards import Card

KINDS = ("ungranted", "unnamed", "edited", "overlap", "unknown-card", "stolen-name", "not-served", "checkpoint")


class Inconsistencies(msgspec.Struct, frozen=True):
    """The result of one comparison: messages by kind, and how many containers have device IDs of another card."""

    by_kind: dict[str, list[str]]
    elsewhere: int


def compare(
    node_pods: Sequence[NodePod],
    entries: Iterable[CheckpointEntry] | None,
    devices: Mapping[str, Mapping[str, str]],
    cards: Mapping[str, Card],
    *,
    has_cdi: bool = True,
) -> Inconsistencies:
    """`entries`: of the kubelet's checkpoint; None when it is unreadable. `devices`: the card of each device, by
    resource that we serve. With `has_cdi` every container has a slot, so one without was served by another plugin."""
    by_kind: dict[str, list[str]] = {kind: [] for kind in KINDS}
    if entries is None:
        by_kind["checkpoint"].append("the kubelet's device checkpoint is unreadable")
    by_uid = {node_pod.pod.uid: node_pod for node_pod in node_pods}
    elsewhere = 0
    for entry in entries or ():
        node_pod = by_uid.get(entry.pod)
        if node_pod is None or entry.resource not in devices:
            continue  # the pod has ended, or the resource is not ours
        key = node_pod.pod.key
        if has_cdi and not slots_of(entry.cdi) and gputile.GRANT in node_pod.pod.annotations:
            by_kind["not-served"].append(f"{key}: another device plugin allocated its {entry.resource}")
        if node_pod.grant is None:
            by_kind["ungranted"].append(f"{key}: holds {entry.resource} without a grant")
            continue
        grant = next((part for part in node_pod.grant.containers if part.container == entry.container), None)
        if grant is None:
            by_kind["unnamed"].append(f"{key}: its grant has no GPU for its container {entry.container}")
            continue
        allocated = {devices[entry.resource].get(device_id, "") for device_id in entry.ids}
        elsewhere += allocated != {tile.uuid for tile in grant.tiles}
    _compare_grants(node_pods, cards, by_kind)
    return Inconsistencies(by_kind, elsewhere)


def _compare_grants(node_pods: Sequence[NodePod], cards: Mapping[str, Card], by_kind: dict[str, list[str]]) -> None:
    earlier = CardAllocations()
    for node_pod in node_pods:
        if node_pod.fault and node_pod.grant is not None:
            by_kind["edited"].append(f"{node_pod.pod.key}: {node_pod.fault}")
        if node_pod.grant is None:
            continue
        uses = node_pod.grant.uses()
        if not set(uses) <= set(cards):
            by_kind["unknown-card"].append(f"{node_pod.pod.key}: its grant has a GPU that is not on this node")
        else:
            why = overlap(uses, earlier, cards)
            if why:
                by_kind["overlap"].append(f"{node_pod.pod.key}: {why}")
        earlier.add(uses)
