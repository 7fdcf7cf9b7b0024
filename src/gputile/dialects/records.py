"""What a bound pod holds: by our grant, else by the record of the system that bound it, else by number.

A record counts even where gputile would reject the pod's request, because the pod's containers run: a rejected request
must not make its GPU look free. A record is valid when it was written for the pod's node, names cards of that
node, and no tile exceeds its card. The order is: our grant; the record of the family whose agent runs the node; the
records of other families. A family is a system with its dialect, its agent and its records.
"""

from collections.abc import Iterable
from enum import StrEnum
from functools import lru_cache

import msgspec

from gputile.dialects import gpushare, gputile, registry, vcuda
from gputile.dialects.dialect import Dialect
from gputile.dialects.kube_objects import Container, Pod
from gputile.dialects.parsing import UnreadableValue, amount_or_none
from gputile.dialects.registry import checked_grant, named, read_pod, with_slots
from gputile.dialects.settings import DEFAULTS, UNIT, DialectSettings
from gputile.model.cards import Card, Node
from gputile.model.grants import ContainerGrant, Grant, Tile, take
from gputile.model.refusals import BadRequest
from gputile.model.requests import ContainerRequest, PodRequest, Role, most_at_once

LENGTH_OF_A_TIME = len("2026-01-01T00:00:00Z")


class BoundPodHolding(msgspec.Struct, frozen=True):
    """What a bound pod holds, as far as its annotations show."""

    grant: Grant | None = None  # None: no annotation shows it
    bad: BadRequest | None = None  # why our own grant on the pod is invalid


def read_grant(pod: Pod, node: Node | None, settings: DialectSettings = DEFAULTS) -> Grant | BadRequest | None:
    """What the pod holds by grant or record; else why our grant on it is invalid. None: it carries neither."""
    held = read_held(pod, node, settings)
    return held.grant or held.bad


def read_held(pod: Pod, node: Node | None, settings: DialectSettings = DEFAULTS) -> BoundPodHolding:
    """`node` is the pod's own; while it is unknown only our grant can be read, because it names cards by UUID."""
    bad = None
    try:
        ours = gputile.read_grant(pod, node.cards if node is not None else (), settings)
        if ours is not None:
            return BoundPodHolding(checked_grant(ours))
    except UnreadableValue as error:
        bad = error.bad
    return BoundPodHolding(_recorded_grant(pod, node, settings) if node is not None else None, bad)


def carries_record(pod: Pod, settings: DialectSettings = DEFAULTS) -> bool:
    """Whether there is a grant or record on the pod, valid or not."""
    keys = _fixed_keys(registry.DIALECTS, settings)
    if not (pod.annotations.keys().isdisjoint(keys) and pod.labels.keys().isdisjoint(keys)):
        return True
    return bool(pod.annotations) and not vcuda.lacks_record(pod)


@lru_cache(maxsize=4)
def _fixed_keys(dialects: tuple[Dialect, ...], settings: DialectSettings) -> frozenset[str]:
    """The keys of all records except vcuda's numbered ones. Cached, because every pod is compared with them."""
    return frozenset(key for dialect in dialects for key in dialect.record_keys(settings))


def settings_on(node: Node | None, settings: DialectSettings = DEFAULTS) -> DialectSettings:
    """The settings, with gpushare's unit as this node counts it."""
    if node is None or node.gpushare_unit in (0, UNIT.get(settings.gpushare_unit)):
        return settings
    unit = next(name for name, size in UNIT.items() if size == node.gpushare_unit)
    return msgspec.structs.replace(settings, gpushare_unit=unit)


# ---- which record counts --------------------------------------------------------------------------------------------


class GrantedBy(StrEnum):
    """Which agent allocated the GPUs of a running pod."""

    OURS = "ours"
    OTHERS = "others"
    UNKNOWN = "unknown"  # our agent serves the node, and since when is unknown


def served_by(pod: Pod, node: Node) -> GrantedBy:
    """Another system's agent, where it serves the node or served it when the pod started."""
    if node.agent != gputile.NAME:
        return GrantedBy.OTHERS
    if not _is_time(node.since):
        return GrantedBy.UNKNOWN
    started = (pod.status and pod.status.start_time) or ""
    return GrantedBy.OTHERS if _is_time(started) and started < node.since else GrantedBy.OURS


def _is_time(text: str) -> bool:
    """A time as Kubernetes writes it: UTC, whole seconds. Two of these compare as text."""
    return len(text) == LENGTH_OF_A_TIME and text.endswith("Z")


def _recorded_grant(pod: Pod, node: Node, settings: DialectSettings) -> Grant | None:
    if served_by(pod, node) is GrantedBy.OURS or not carries_record(pod, settings):
        return None
    settings = settings_on(node, settings)
    for family in _families(node.agent):
        record = _valid_record(family, pod, node.cards, settings)
        if record is not None:
            return record if node.agent == gputile.NAME else _at_least_requested(record, pod, node.cards, settings)
    return None


def _families(agent: str) -> Iterable[Dialect]:
    """The families that write records, the family of the node's agent first."""
    families = (named(agent), *registry.DIALECTS)
    return [family for family in families if family is not None and family.NAME != gputile.NAME]


def _valid_record(family: Dialect, pod: Pod, cards: tuple[Card, ...], settings: DialectSettings) -> Grant | None:
    try:
        record = family.read_grant(pod, cards, settings)
    except UnreadableValue:
        return None
    if record is None:
        return None
    by_uuid = {card.uuid: card for card in cards}
    tiles = [tile for held in record.containers for tile in held.tiles]
    return with_slots(record) if all(_is_within(tile, by_uuid.get(tile.uuid)) for tile in tiles) else None


def _is_within(tile: Tile, card: Card | None) -> bool:
    """A card whose agent does not publish the memory has 0, which means unknown, not a limit."""
    return card is not None and tile.cores <= card.cores and (tile.memory <= card.memory or not card.memory)


# ---- the larger of record and request -------------------------------------------------------------------------------


def _at_least_requested(record: Grant, pod: Pod, cards: tuple[Card, ...], settings: DialectSettings) -> Grant:
    """The record, raised to what the pod requests of each card. GPUs that the pod requests and the record does not name
    are held, too: only which ones is unknown."""
    request = read_pod(_without_selectors(pod), settings)
    names = {container.name for _, container in pod.containers()}
    if not isinstance(request, PodRequest) or not all(held.container in names for held in record.containers):
        return record
    by_uuid = {card.uuid: card for card in cards}
    recorded = {held.container: held for held in record.containers}
    named = list(dict.fromkeys(tile.uuid for held in record.containers for tile in held.tiles))
    containers, missing = [], {}
    for ask in request.asks:
        held = recorded.pop(ask.container, ContainerGrant(ask.container, (), ask.role))
        tiles = [_raised(tile, ask, by_uuid[tile.uuid]) for tile in held.tiles]
        if ask.role is Role.INIT or request.together:
            # The kubelet passes an init container's devices on, and gpushare's containers share their cards.
            own = {tile.uuid for tile in tiles}
            others = [by_uuid[uuid] for uuid in named if uuid not in own]
            tiles += [take(ask, card) for card in others[: max(0, ask.cards - len(tiles))]]
        missing[ask.container] = ask.cards - len(tiles)
        if tiles:
            containers.append(ContainerGrant(ask.container, tuple(tiles), ask.role))
    return msgspec.structs.replace(record, containers=(*containers, *recorded.values()), unplaced=_peak(pod, missing))


def _without_selectors(pod: Pod) -> Pod:
    """The pod with its amounts alone: an invalid selector does not change how much the pod holds."""
    if pod.metadata is None:
        return pod
    kept = {gpushare.COUNT: pod.annotations[gpushare.COUNT]} if gpushare.COUNT in pod.annotations else {}
    return msgspec.structs.replace(pod, metadata=msgspec.structs.replace(pod.metadata, annotations=kept))


def _raised(tile: Tile, ask: ContainerRequest, card: Card) -> Tile:
    """The hardware partitions a card in MIG mode: a slice of it holds what the record says."""
    if not ask.cards or card.in_mig_mode:
        return tile
    memory = max(tile.memory, min(ask.memory_of(card.memory), card.memory))
    return Tile(tile.uuid, tile.index, memory, max(tile.cores, min(ask.cores, card.cores)))


# ---- by number ------------------------------------------------------------------------------------------------------


def unplaced_grant(pod: Pod, node: Node | None, settings: DialectSettings = DEFAULTS) -> Grant | None:
    """For a pod that another system's agent serves and whose record is unreadable: the number of its GPUs."""
    if node is None or not node.cards or served_by(pod, node) is not GrantedBy.OTHERS:
        return None
    count = requested_gpus(pod, settings)
    return Grant(pod=pod.uid, node=node.name, dialect="", containers=(), unplaced=count) if count else None


ANY_AMOUNT = 2**31
"""Larger than any amount: a resource of this size per GPU is always a share of one."""


def requested_gpus(pod: Pod, settings: DialectSettings = DEFAULTS) -> int:
    """How many GPUs the pod requests at one time, parsed as leniently as possible: a share counts as one GPU."""
    sizes = dict.fromkeys(registry.all_resources(settings), ANY_AMOUNT)
    for dialect in registry.DIALECTS:
        sizes |= dialect.amounts_of_one_gpu(settings)
    return _peak(pod, {container.name: _gpus(container, sizes) for _, container in pod.containers()})


def _gpus(container: Container, sizes: dict[str, int]) -> int:
    """`sizes`: the amount of each resource that is one GPU."""
    resources = container.resources
    amounts = {**((resources and resources.limits) or {}), **((resources and resources.requests) or {})}
    return max((_gpus_of(container, name, sizes[name]) for name in amounts.keys() & sizes.keys()), default=0)


def _gpus_of(container: Container, name: str, size: int) -> int:
    amount = amount_or_none(container, name)
    return 1 if amount is None else -(-amount // size)


def _peak(pod: Pod, gpus: dict[str, int]) -> int:
    """The most GPUs that containers running at the same time hold together."""
    parts = ((role, (max(0, gpus.get(container.name, 0)),)) for role, container in pod.containers())
    return most_at_once(parts, 1)[0]
