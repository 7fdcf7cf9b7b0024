"""The registry of dialects: it lists them, finds the dialect of a pod or node, and reads and writes it.

Nothing here raises on bad input: a pod is a request, a pod without GPUs, or a `BadRequest`.
"""

from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from typing import Any

import msgspec

from gputile.dialects import gpushare, gputile, hami, nano, nvidia, selectors, vcuda, vgpu
from gputile.dialects.device_resources import DeviceResource
from gputile.dialects.dialect import Dialect
from gputile.dialects.kube_objects import Amounts, GrantContext, NodeInventory, NodeObject, Pod, PodRecord
from gputile.dialects.parsing import UnreadableValue, convert_node, convert_pod, resource_value, shortened
from gputile.dialects.settings import DEFAULTS, DialectSettings
from gputile.model.cards import Card, Node
from gputile.model.grants import Grant
from gputile.model.refusals import BadRequest, NodeReason, RequestError
from gputile.model.requests import PodRequest
from gputile.model.units import LARGEST_CARD, Quantity, host_mebibytes, millicores

# By how exactly the agents describe their nodes: registers of single cards first, then averages, then labels.
DIALECTS: tuple[Dialect, ...] = (gputile, hami, vgpu, vcuda, gpushare, nano, nvidia)

NOTHING: tuple[Quantity, ...] = (0, "0", None)
"""Amounts that request nothing."""

MOST_CONTAINERS = 64
"""Containers of one pod that may request GPUs."""


# ---- the table ------------------------------------------------------------------------------------------------------


def named(name: str) -> Dialect | None:
    """None for a dialect that this gputile does not know."""
    return _by_name(DIALECTS).get(name)


@lru_cache(maxsize=4)
def _by_name(dialects: tuple[Dialect, ...]) -> dict[str, Dialect]:
    return {dialect.NAME: dialect for dialect in dialects}


def names() -> tuple[str, ...]:
    return tuple(dialect.NAME for dialect in DIALECTS)


def slots_of(name: str) -> int:
    """The slots that a tile of this dialect takes of its card."""
    dialect = named(name)
    return dialect.SLOTS_PER_TILE if dialect is not None else 0


def agent_guesses(agent: str) -> bool:
    """Whether the agent of this dialect guesses the pod of an allocation."""
    dialect = named(agent)
    return dialect is not None and dialect.AGENT_GUESSES


def extender_paths() -> frozenset[str]:
    """The paths of all dialects' extenders."""
    return frozenset(path for dialect in DIALECTS for path in dialect.EXTENDER_PATHS)


def all_resources(settings: DialectSettings) -> frozenset[str]:
    """The resources of all dialects."""
    return frozenset().union(*_resources(DIALECTS, settings))


@lru_cache(maxsize=4)
def _resources(dialects: tuple[Dialect, ...], settings: DialectSettings) -> tuple[frozenset[str], ...]:
    """The resources of each dialect. Cached, because every pod is read with the same settings."""
    return tuple(dialect.resources(settings) for dialect in dialects)


# ---- pods -----------------------------------------------------------------------------------------------------------


def read_pod(pod: Pod | Any, settings: DialectSettings = DEFAULTS) -> PodRequest | BadRequest | None:
    """What the pod requests; None when it requests no GPU, and gputile ignores it."""
    if not isinstance(pod, Pod):
        pod = convert_pod(pod)
    if isinstance(pod, BadRequest):
        return pod
    try:
        return _read_pod(pod, settings)
    except UnreadableValue as error:
        return error.bad


def _read_pod(pod: Pod, settings: DialectSettings) -> PodRequest | None:
    _reject_too_many_containers(pod, settings)
    gputile.check_resources(pod)
    used = _dialects_of(pod, settings)
    _reject_resources_in_annotations(pod, settings)
    if not used:
        return None
    if len(used) > 1:
        listing = ", ".join(f"`{resource}` of {name}" for name, resource in used.items())
        raise UnreadableValue(
            RequestError.MIXED_DIALECTS, f"pod: it mixes {len(used)} dialects ({listing}); use the resources of one"
        )
    dialect = _by_name(DIALECTS)[next(iter(used))]
    request = dialect.read_pod(pod, settings)
    if request is None:
        return None
    return msgspec.structs.replace(
        request,
        constraints=selectors.merge(request.constraints, selectors.by_gputile_keys(pod)),
        slots=dialect.SLOTS_PER_TILE,
    )


def notes(pod: Pod | Any, asked: PodRequest) -> tuple[str, ...]:
    """Warnings for the author of the pod. Only for commands that print them: to find the nearest known annotation is
    too slow for a filter call or the agent."""
    if not isinstance(pod, Pod):
        pod = convert_pod(pod)
    return asked.warnings if isinstance(pod, BadRequest) else (*asked.warnings, *gputile.unknown_annotations(pod))


def _reject_too_many_containers(pod: Pod, settings: DialectSettings) -> None:
    """Each container makes placement more expensive, and the author of the pod decides how many there are. This comes
    before anything else: to read a thousand containers takes 40 ms, to count them 4 ms."""
    containers = [container.resources for _, container in pod.containers() if container.resources]
    if len(containers) <= MOST_CONTAINERS:
        return
    known = all_resources(settings)
    count = sum(_requests_any(named.limits, known) or _requests_any(named.requests, known) for named in containers)
    if count > MOST_CONTAINERS:
        raise UnreadableValue(
            RequestError.TOO_MANY_CONTAINERS,
            f"pod: {count} of its containers request GPUs, and at most {MOST_CONTAINERS} of one pod may; split it into "
            "several pods, or request GPUs in fewer containers",
        )


def _requests_any(amounts: Amounts | None, names: frozenset[str]) -> bool:
    """Whether any amount of one of these resources is requested."""
    return amounts is not None and any(amounts[name] not in NOTHING for name in names & amounts.keys())


def _dialects_of(pod: Pod, settings: DialectSettings) -> dict[str, str]:
    """The dialects in which the pod requests something, each with the first resource that shows it."""
    amounts = list(_amounts(pod))
    requested = [resource for resource, value in amounts if value not in NOTHING]
    used: dict[str, str] = {}
    for dialect, resources in zip(DIALECTS, _resources(DIALECTS, settings), strict=True):
        first = next((resource for resource in requested if resource in resources), None)
        if first is not None:
            used[dialect.NAME] = first
    for dialect in DIALECTS:
        if dialect.EXTENDS in used:  # a share beside `nvidia.com/gpu`, even of 0, makes the pod a hami pod
            known = dialect.resources(settings)
            share = next((resource for resource, _ in amounts if resource in known), None)
            if share is not None:
                del used[dialect.EXTENDS]
                used[dialect.NAME] = share
    return used


def _amounts(pod: Pod) -> Iterator[tuple[str, Quantity]]:
    """Every resource that a container names, with its amount as written."""
    for _, container in pod.containers():
        named = container.resources
        for resource in {**((named and named.limits) or {}), **((named and named.requests) or {})}:
            yield resource, resource_value(container, resource)


def _reject_resources_in_annotations(pod: Pod, settings: DialectSettings) -> None:
    """Other schedulers silently ignore `nvidia.com/gpumem` as an annotation, and the pod gets a whole GPU."""
    named = {resource for resource, _ in _amounts(pod)}
    for resources in _resources(DIALECTS, settings):
        for key in sorted((resources & pod.annotations.keys()) - {gpushare.COUNT}):
            if key not in named:
                raise UnreadableValue(
                    RequestError.RESOURCE_IN_ANNOTATION,
                    f"annotation `{key}`: a resource has no effect as an annotation; write "
                    f"`{key}: {shortened(str(pod.annotations[key]))}` under `resources.limits` of the container",
                )


# ---- grants ---------------------------------------------------------------------------------------------------------


def write_grant(context: GrantContext) -> PodRecord:
    """Our grant and the record of the pod's own dialect, to be written together."""
    ours = gputile.write_grant(context)
    family = named(context.grant.dialect)  # None: written by a newer gputile with more dialects, or forged
    if family is None or family.NAME == gputile.NAME:
        return ours
    record = family.write_grant(context)
    return PodRecord(annotations=record.annotations | ours.annotations, labels=record.labels, env=record.env)


def read_orphaned_pods(node: NodeObject, cards: tuple[Card, ...]) -> tuple[Grant, ...] | BadRequest:
    """The grants of deleted pods whose containers still run, as the node's agent reports them."""
    try:
        return tuple(checked_grant(grant) for grant in gputile.read_orphaned_pods(node, cards))
    except UnreadableValue as error:
        return error.bad


def read_nomination(pod: Pod) -> gputile.Nomination | None:
    """The nomination of this very pod; None when it has none, or an unreadable one."""
    nomination = gputile.read_nomination(pod)
    return nomination and msgspec.structs.replace(nomination, grant=with_slots(nomination.grant))


def with_slots(grant: Grant) -> Grant:
    """The grant with the slots of its dialect; no annotation names them."""
    slots = slots_of(grant.dialect)
    return grant if grant.slots == slots else msgspec.structs.replace(grant, slots=slots)


def checked_grant(grant: Grant) -> Grant:
    """The grant with its slots, unless it holds more of a card than any card has."""
    tiles = [tile for held in grant.containers for tile in held.tiles]
    if any(tile.memory > LARGEST_CARD or tile.cores > 2**15 for tile in tiles):
        raise UnreadableValue(
            RequestError.BAD_ANNOTATION, "allocation record: it holds more than any GPU has; remove it"
        )
    return with_slots(grant)


# ---- devices --------------------------------------------------------------------------------------------------------


def device_resources(serve: Collection[str], cards: Iterable[Card], settings: DialectSettings) -> list[DeviceResource]:
    """The device plugins of these dialects. A device resource of two of them is that of the dialect which extends the
    other: `nvidia.com/gpu` counts whole cards unless hami shares them."""
    dialects, usable = _served(serve), [card for card in cards if not card.in_mig_mode]
    extended = {dialect.EXTENDS for dialect in dialects}
    return [
        resource
        for dialect in dialects
        if dialect.NAME not in extended
        for resource in dialect.device_resources(usable, settings)
    ]


def status_resources(serve: Collection[str], cards: Iterable[Card], settings: DialectSettings) -> dict[str, int]:
    """The other resources in the node's status: sums without devices, for kube-scheduler and `kubectl describe`."""
    healthy = [card for card in cards if card.healthy and not card.in_mig_mode]
    return {
        name: amount
        for dialect in _served(serve)
        for name, amount in dialect.status_resources(healthy, settings).items()
    }


def _served(serve: Collection[str]) -> list[Dialect]:
    return [_by_name(DIALECTS)[name] for name in serve]


# ---- nodes ----------------------------------------------------------------------------------------------------------


def read_node(node: NodeObject | Any, settings: DialectSettings = DEFAULTS) -> Node | BadRequest:
    """A node with its cards, from the agent that publishes them. A broken inventory, or a kubelet without our device
    plugin, puts the node out of use."""
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
        cpu=_capped(millicores(node.allocatable.get("cpu"))),
        memory=_capped(host_mebibytes(node.allocatable.get("memory"))),
        agent=agent,
        one_at_a_time=inventory.one_at_a_time,
        since=inventory.since,
        gpushare_unit=inventory.gpushare_unit,
        pool=next((str(node.labels[key]) for key in (gputile.POOL, *vcuda.POOL_LABELS) if node.labels.get(key)), ""),
        card_policy=_placement_label(node),
        fault=fault,
    )


def _inventory(node: NodeObject, settings: DialectSettings) -> tuple[str, NodeInventory]:
    """The first dialect whose agent describes the node's cards, and its inventory."""
    for dialect in DIALECTS:
        inventory = dialect.read_cards(node, settings)
        if inventory is not None:
            return dialect.NAME, _checked_inventory(inventory)
    return "", NodeInventory(())


def _checked_inventory(inventory: NodeInventory) -> NodeInventory:
    """Two cards with the same UUID, or a card of an impossible size, would lead to double allocations."""
    uuids = [card.uuid for card in inventory.cards]
    sizes_are_valid = all(
        0 <= card.memory < 2**31
        and max(card.cores, card.slots, card.index, card.numa) < 2**15
        and min(card.cores, card.slots, card.index, card.numa + 1) >= 0
        and card.uuid
        for card in inventory.cards
    )
    if len(set(uuids)) != len(uuids) or len({c.index for c in inventory.cards}) != len(uuids) or not sizes_are_valid:
        raise UnreadableValue(
            RequestError.MALFORMED,
            "node: two GPUs share a UUID or index, or a GPU has an impossible size; restart its agent",
        )
    return inventory


def _capped(amount: int | None) -> int:
    return min(max(amount or 0, 0), 2**48)


def _placement_label(node: NodeObject) -> str:
    policy = str(node.labels.get("ack.node.gpu.placement") or "")
    return policy if policy in ("binpack", "spread") else ""
