"""The doors of the room: which dialect a pod or node speaks, and what it says.

Nothing here raises on bad input: a pod is a request, no request of ours, or a `BadRequest`.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, Protocol

import msgspec

from gputile.dialects import gpushare, gputile, hami, nano, nvidia, selectors, vcuda, vgpu
from gputile.dialects.kube_objects import (
    Amounts,
    GrantContext,
    NodeInventory,
    NodeObject,
    Pod,
    PodRecord,
    UnreadableValue,
    convert_node,
    convert_pod,
    shortened,
    written,
)
from gputile.dialects.settings import DEFAULTS, DialectSettings
from gputile.model.cards import Card, Node
from gputile.model.grants import Grant
from gputile.model.refusals import BadRequest, NodeReason, RequestError
from gputile.model.requests import PodRequest
from gputile.model.units import LARGEST_CARD, Quantity, host_mebibytes, millicores


class Dialect(Protocol):
    """What each family's file offers: its names, the keys of its record, and the four verbs."""

    NAME: str

    def resources(self, settings: DialectSettings) -> frozenset[str]: ...
    def read_pod(self, pod: Pod, settings: DialectSettings) -> PodRequest | None: ...
    def write_grant(self, award: GrantContext) -> PodRecord: ...
    def record_keys(self, settings: DialectSettings) -> Iterable[str]: ...
    def read_grant(self, pod: Pod, cards: tuple[Card, ...], settings: DialectSettings) -> Grant | None: ...
    def read_cards(self, node: NodeObject, settings: DialectSettings) -> NodeInventory | None: ...


# The order is that of trust in what is said of a node: exact registers first, then averages, then labels.
DIALECTS: tuple[Dialect, ...] = (gputile, hami, vgpu, vcuda, gpushare, nano, nvidia)
BY_NAME = {dialect.NAME: dialect for dialect in DIALECTS}

NOTHING: tuple[Quantity, ...] = (0, "0", None)
"""Amounts that ask for nothing."""

MOST_CONTAINERS = 64
"""Containers of one pod that may ask for GPUs."""


# ---- pods -----------------------------------------------------------------------------------------------------------


def read_pod(pod: Pod | Any, settings: DialectSettings = DEFAULTS) -> PodRequest | BadRequest | None:
    """What the pod asks for; None when it asks for no GPU and is none of our business."""
    if not isinstance(pod, Pod):
        pod = convert_pod(pod)
    if isinstance(pod, BadRequest):
        return pod
    try:
        return _read_pod(pod, settings)
    except UnreadableValue as wrong:
        return wrong.bad


def _read_pod(pod: Pod, settings: DialectSettings) -> PodRequest | None:
    _refuse_crowd(pod, settings)
    gputile.check_resources(pod)
    spoken = _spoken(pod, settings)
    _refuse_resources_in_annotations(pod, settings)
    if not spoken:
        return None
    if len(spoken) > 1:
        said = "; ".join(f"{name}: `{resource}`" for name, resource in spoken.items())
        raise UnreadableValue(
            RequestError.MIXED_DIALECTS,
            f"the pod asks in {len(spoken)} dialects ({said}); write it in one of them",
        )
    asked = BY_NAME[next(iter(spoken))].read_pod(pod, settings)
    if asked is None:
        return None
    return msgspec.structs.replace(
        asked,
        constraints=selectors.merge(asked.constraints, selectors.by_gputile_keys(pod)),
    )


def notes(pod: Pod | Any, asked: PodRequest) -> tuple[str, ...]:
    """What the person who wrote the pod should know besides. Only for commands that show it: it looks for the nearest
    names of annotations, and no filter call and no agent waits for that."""
    if not isinstance(pod, Pod):
        pod = convert_pod(pod)
    return asked.warnings if isinstance(pod, BadRequest) else (*asked.warnings, *gputile.strange_annotations(pod))


def _refuse_crowd(pod: Pod, settings: DialectSettings) -> None:
    """To place containers costs more with each of them, and whoever writes the pod decides how many there are. Before
    anything else: to read a thousand containers takes 40 ms, to count them four."""
    containers = [container.resources for _, container in pod.containers() if container.resources]
    if len(containers) <= MOST_CONTAINERS:
        return
    ours = _all_resources(settings)
    asking = sum(_is_among(found.limits, ours) or _is_among(found.requests, ours) for found in containers)
    if asking > MOST_CONTAINERS:
        raise UnreadableValue(
            RequestError.TOO_MANY_CONTAINERS,
            f"{asking} containers of the pod ask for GPUs, and at most {MOST_CONTAINERS} of one pod may; split it into "
            "several pods, or let fewer of its containers ask",
        )


def _is_among(amounts: Amounts | None, names: frozenset[str]) -> bool:
    """Whether one of these resources is asked for."""
    return amounts is not None and any(amounts[name] not in NOTHING for name in names & amounts.keys())


def _spoken(pod: Pod, settings: DialectSettings) -> dict[str, str]:
    """The dialects in which the pod asks for something, each with the first resource that shows it."""
    said = list(_said(pod))
    used = [resource for resource, value in said if value not in NOTHING]
    spoken: dict[str, str] = {}
    for dialect, mine in zip(DIALECTS, _resources(settings), strict=True):
        first = next((resource for resource in used if resource in mine), None)
        if first is not None:
            spoken[dialect.NAME] = first
    if nvidia.NAME in spoken:  # a share beside `nvidia.com/gpu`, be it 0, makes the whole pod a hami one
        share = next((resource for resource, _ in said if resource in hami.resources(settings)), None)
        if share is not None:
            del spoken[nvidia.NAME]
            spoken[hami.NAME] = share
    return spoken


@lru_cache(maxsize=4)
def _resources(settings: DialectSettings) -> tuple[frozenset[str], ...]:
    """By dialect the resources that it asks with; there is one set of settings, and every pod is read with it."""
    return tuple(dialect.resources(settings) for dialect in DIALECTS)


@lru_cache(maxsize=4)
def _all_resources(settings: DialectSettings) -> frozenset[str]:
    return frozenset().union(*_resources(settings))


def _said(pod: Pod) -> Iterator[tuple[str, Quantity]]:
    """Every resource that a container names, and what it says of it."""
    for _, container in pod.containers():
        found = container.resources
        for resource in {**((found and found.limits) or {}), **((found and found.requests) or {})}:
            yield resource, written(container, resource)


def _refuse_resources_in_annotations(pod: Pod, settings: DialectSettings) -> None:
    """`nvidia.com/gpumem` as an annotation is silently ignored elsewhere, and a trap."""
    said = {resource for resource, _ in _said(pod)}
    for resources in _resources(settings):
        for key in sorted((resources & pod.annotations.keys()) - {gpushare.COUNT}):
            if key not in said:
                raise UnreadableValue(
                    RequestError.RESOURCE_IN_ANNOTATION,
                    f"`{key}` is an annotation of the pod, where it has no effect; write "
                    f"`{key}: {shortened(str(pod.annotations[key]))}` under `resources.limits` of the container",
                )


# ---- grants ---------------------------------------------------------------------------------------------------------


def write_grant(award: GrantContext) -> PodRecord:
    """Our grant and the record of the pod's own dialect, to be written together."""
    ours = gputile.write_grant(award)
    family = BY_NAME.get(award.grant.dialect)  # None: of a gputile that knows more dialects, or forged
    if family is None or family.NAME == gputile.NAME:
        return ours
    theirs = family.write_grant(award)
    return PodRecord(annotations=theirs.annotations | ours.annotations, labels=theirs.labels, env=theirs.env)


def read_lingering(node: NodeObject, cards: tuple[Card, ...]) -> tuple[Grant, ...] | BadRequest:
    """What pods still hold that are gone while their containers run, as the node's agent says."""
    try:
        found = gputile.read_orphaned_pods(node, cards)
        for grant in found:
            possible(grant)
        return found
    except UnreadableValue as wrong:
        return wrong.bad


def possible(grant: Grant) -> Grant:
    """A grant that speaks of more than any card has is nonsense, whoever wrote it."""
    tiles = [tile for held in grant.containers for tile in held.tiles]
    if any(tile.memory > LARGEST_CARD or tile.cores > 2**15 for tile in tiles):
        raise UnreadableValue(
            RequestError.BAD_ANNOTATION, "the pod's allocation record speaks of more than any card has"
        )
    return grant


# ---- nodes ----------------------------------------------------------------------------------------------------------


def read_node(node: NodeObject | Any, settings: DialectSettings = DEFAULTS) -> Node | BadRequest:
    """A node's cards, from whichever agent publishes them. A broken inventory, or a kubelet that has lost our agent,
    gives a node that is out of use."""
    if not isinstance(node, NodeObject):
        node = convert_node(node)
    if isinstance(node, BadRequest):
        return node
    fault = agent = ""
    inventory = NodeInventory(())
    try:
        agent, inventory = _inventory(node, settings)
    except UnreadableValue:
        fault = NodeReason.BAD_INVENTORY
    if agent == gputile.NAME and gputile.has_lost_its_plugin(node, inventory.cards):
        fault = NodeReason.PLUGIN_GONE
    return Node(
        name=node.name,
        cards=inventory.cards,
        links=inventory.links,
        cpu=_countable(millicores(node.allocatable.get("cpu"))),
        memory=_countable(host_mebibytes(node.allocatable.get("memory"))),
        agent=agent,
        one_at_a_time=inventory.one_at_a_time,
        since=inventory.since,
        gpushare_unit=inventory.gpushare_unit,
        pool=next((str(node.labels[key]) for key in (gputile.POOL, *vcuda.POOL_LABELS) if node.labels.get(key)), ""),
        card_policy=_placement_label(node),
        fault=fault,
    )


def _inventory(node: NodeObject, settings: DialectSettings) -> tuple[str, NodeInventory]:
    """Whose word we take for the node's cards, and what it is."""
    for dialect in DIALECTS:
        found = dialect.read_cards(node, settings)
        if found is not None:
            return dialect.NAME, _checked(found)
    return "", NodeInventory(())


def _checked(found: NodeInventory) -> NodeInventory:
    """Two cards of one name, or a card of an impossible size, would let a tile be sold twice."""
    uuids = [card.uuid for card in found.cards]
    sizes_hold = all(
        0 <= card.memory < 2**31
        and max(card.cores, card.slots, card.index, card.numa) < 2**15
        and min(card.cores, card.slots, card.index, card.numa + 1) >= 0
        and card.uuid
        for card in found.cards
    )
    if len(set(uuids)) != len(uuids) or len({c.index for c in found.cards}) != len(uuids) or not sizes_hold:
        raise UnreadableValue(
            RequestError.MALFORMED, "two cards share a UUID or index, or a card has an impossible size"
        )
    return found


def _countable(amount: int | None) -> int:
    return min(max(amount or 0, 0), 2**48)


def _placement_label(node: NodeObject) -> str:
    said = str(node.labels.get("ack.node.gpu.placement") or "")
    return said if said in ("binpack", "spread") else ""
