"""Do the kubelet's books, the grants and the cards tell the same story? Pure; nothing is mended here, all is said."""

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
    """What does not agree, by kind, each as a short sentence; and how many device IDs name another card."""

    disagreements: dict[str, list[str]]
    elsewhere: int


def compare(
    node_pods: Sequence[NodePod],
    held: Iterable[CheckpointEntry] | None,
    devices: Mapping[str, Mapping[str, str]],
    cards: Mapping[str, Card],
    *,
    has_slots: bool = True,
) -> Inconsistencies:
    """`devices`: by resource of ours, the card of each device. `held` is None when the kubelet's word is unreadable.
    `has_slots`: whether containers get theirs by a slot, so that one without was served by another plugin."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    if held is None:
        found["checkpoint"].append("the kubelet's device checkpoint cannot be read")
    by_uid = {one.pod.uid: one for one in node_pods}
    elsewhere = 0
    for entry in held or ():
        one = by_uid.get(entry.pod)
        if one is None or entry.resource not in devices:
            continue  # over, or not ours
        if has_slots and not slots_of(entry.cdi) and gputile.GRANT in one.pod.annotations:
            found["not-served"].append(f"{one.pod.key} got its {entry.resource} from another device plugin")
        if one.grant is None:
            found["ungranted"].append(f"{one.pod.key} holds {entry.resource} and has no grant")
            continue
        mine = next((part for part in one.grant.containers if part.container == entry.container), None)
        if mine is None:
            found["unnamed"].append(f"{one.pod.key} has no card for its container {entry.container}")
            continue
        elsewhere += {devices[entry.resource].get(name, "") for name in entry.ids} != {t.uuid for t in mine.tiles}
    _compare_grants(node_pods, cards, found)
    return Inconsistencies(found, elsewhere)


def _compare_grants(node_pods: Sequence[NodePod], cards: Mapping[str, Card], found: dict[str, list[str]]) -> None:
    earlier = CardAllocations()
    for one in node_pods:
        if one.fault and one.grant is not None:
            found["edited"].append(f"{one.pod.key}: {one.fault}")
        if one.grant is None:
            continue
        uses = one.grant.uses()
        if not set(uses) <= set(cards):
            found["unknown-card"].append(f"{one.pod.key} holds a card that this node has not")
        else:
            why = overlap(uses, earlier, cards)
            if why:
                found["overlap"].append(f"{one.pod.key}: {why}")
        earlier.add(uses)
