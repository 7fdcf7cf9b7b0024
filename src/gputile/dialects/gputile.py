"""Our own dialect: cards, memory per card in MiB, cores per card in percent.

    gputile.io/gpu: 2          two cards (this resource carries the devices)
    gputile.io/memory: 3072    of each 3072 MiB; left out: all its memory
    gputile.io/cores: 30       of each 30 % of the cores; left out: none reserved, or all if memory is left out too

The grant (`gputile.io/grant` on the pod) and the inventory (`gputile.io/inventory` on the node) are JSON with a
version; both are written for pods and nodes of every dialect, and win over the records of other systems. So does the
agent's list of orphaned pods (`gputile.io/orphaned` on the node): pods that are deleted while their containers run.
"""

from collections.abc import Iterable, Mapping
from sys import intern
from typing import Annotated

import msgspec

from gputile.dialects.device_resources import DeviceResource, by_count
from gputile.dialects.kube_objects import Container, GrantContext, NodeInventory, NodeObject, Pod, PodRecord, Weight
from gputile.dialects.parsing import (
    LARGEST_NODE,
    SHOWN,
    UnreadableValue,
    amount,
    build_request,
    card_memory,
    container_label,
    decode,
    decode_or_none,
    missing_device_resource,
    placeholder_uuid,
    shortened,
    visible_devices,
)
from gputile.dialects.settings import DialectSettings
from gputile.model.cards import DEFAULT_SLOTS, NO_NUMA, Card
from gputile.model.grants import ContainerGrant, Grant, Tile
from gputile.model.refusals import RequestError
from gputile.model.requests import ContainerRequest, PodRequest, Role
from gputile.model.units import ALL, MiB, Percent, quantity

NAME = "gputile"
GPU, MEMORY, CORES = "gputile.io/gpu", "gputile.io/memory", "gputile.io/cores"
GRANT, NOMINATION, INVENTORY = "gputile.io/grant", "gputile.io/nomination", "gputile.io/inventory"
POOL = "gputile.io/pool"  # a label of nodes, for quota
NUDGED = "gputile.io/nudged"  # touched to requeue the pod in kube-scheduler
CORDON = "gputile.io/cordon"
ORPHANED = "gputile.io/orphaned"
SELECTIONS = tuple(
    f"gputile.io/{name}" for name in ("model", "not-model", "uuid", "not-uuid", "policy", "numa", "links", "isolation")
)
ISOLATION = "gputile.io/isolation"
KNOWN = frozenset((*SELECTIONS, GRANT, NOMINATION, NUDGED, GPU, MEMORY, CORES))
HINTS = 3  # unknown annotations for which the nearest known name is shown
VERSION = 1
EXTENDS = ""
SLOTS_PER_TILE = 1
AGENT_GUESSES = False
EXTENDER_PATHS: tuple[str, ...] = tuple(
    f"/gputile/{verb}" for verb in ("filter", "prioritize", "bind", "preempt", "filter-dryrun", "steer")
)
EXAMPLES: tuple[Mapping[str, int], ...] = ({GPU: 2, MEMORY: 3072, CORES: 30},)


def resources(settings: DialectSettings) -> frozenset[str]:
    return frozenset({GPU, MEMORY, CORES})


def amounts_of_one_gpu(settings: DialectSettings) -> Mapping[str, int]:
    return {GPU: 1}


def device_resources(cards: list[Card], settings: DialectSettings) -> list[DeviceResource]:
    return [by_count(GPU, NAME, cards)]


def status_resources(cards: list[Card], settings: DialectSettings) -> dict[str, int]:
    return {MEMORY: sum(card.memory for card in cards), CORES: sum(card.cores for card in cards)}


# ---- read a pod ---------------------------------------------------------------------------------------------------


def read_pod(pod: Pod, settings: DialectSettings) -> PodRequest | None:
    return build_request(NAME, pod, tuple(_container_request(role, container) for role, container in pod.containers()))


def _container_request(role: Role, container: Container) -> ContainerRequest:
    cards, cores = amount(container, GPU), amount(container, CORES)
    memory = card_memory(container, MEMORY, 1)
    if cores > ALL:
        raise UnreadableValue(
            RequestError.OUT_OF_RANGE,
            f"{container_label(container)}: `{CORES}` is {cores}, more than 100 percent of a GPU; write at most 100, "
            f"and request more GPUs with `{GPU}`",
        )
    if not cards and (memory or cores):
        raise missing_device_resource(container, MEMORY if memory else CORES, GPU, f"{GPU}: 1")
    if cards and not memory and not cores:
        return ContainerRequest.whole(container.name, role, cards)
    return ContainerRequest(
        container=container.name,
        role=role,
        cards=cards,
        memory=memory or None,
        memory_percent=ALL if cards and not memory else None,
        cores=cores,
    )


def check_resources(pod: Pod) -> None:
    """Reject resources under `gputile.io/` that do not exist."""
    for _, container in pod.containers():
        named = container.resources
        for resource in {**((named and named.limits) or {}), **((named and named.requests) or {})}:
            if resource.startswith("gputile.io/") and resource not in (GPU, MEMORY, CORES):
                raise UnreadableValue(
                    RequestError.UNKNOWN_NAME,
                    f"{container_label(container)}: the resource `{shortened(resource)}` does not exist; write "
                    f"`{_nearest(resource, (GPU, MEMORY, CORES))}`",
                )


def unknown_annotations(pod: Pod) -> list[str]:
    """A warning for each unknown annotation under `gputile.io/`; a hint for the first few, as difflib is slow."""
    unknown = [key for key in pod.annotations if key.startswith("gputile.io/") and key not in KNOWN]
    hints = [
        f"annotation `{shortened(key)}`: unknown to gputile and ignored; did you mean `{_nearest(key, SELECTIONS)}`?"
        for key in unknown[:HINTS]
    ]
    more = len(unknown) - len(hints)
    return (
        [*hints, f"{more} more annotations under `gputile.io/` are unknown to gputile and ignored"] if more else hints
    )


def _nearest(name: str, known: tuple[str, ...]) -> str:
    from difflib import get_close_matches  # slow to load, and few pods need it

    return get_close_matches(name[:SHOWN], known, n=1, cutoff=0)[0]


# ---- grants ---------------------------------------------------------------------------------------------------------


Amount = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Moment = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class _Tile(msgspec.Struct):
    """A tile in a grant."""

    uuid: str
    index: Amount
    memory: Amount
    cores: Amount


class _Container(msgspec.Struct):
    """The tiles of one container in a grant."""

    name: str
    tiles: list[_Tile]
    role: Role = Role.APP


class _Grant(msgspec.Struct):
    """`gputile.io/grant`, version 1. Keys are only ever added."""

    version: int
    pod: str
    node: str
    dialect: str
    containers: list[_Container]
    at: Moment = 0  # nanoseconds since 1970
    phase: str = "granted"


_GRANTS = msgspec.json.Decoder(_Grant)


def _record(grant: Grant, at: int) -> _Grant:
    containers = [
        _Container(c.container, [_Tile(t.uuid, t.index, t.memory, t.cores) for t in c.tiles], c.role)
        for c in grant.containers
    ]
    return _Grant(VERSION, grant.pod, grant.node, grant.dialect, containers, at)


def write_grant(context: GrantContext) -> PodRecord:
    grant = context.grant
    record = _record(grant, context.at)
    env = {c.container: visible_devices(c) for c in grant.containers}
    if grant.dialect == NAME:
        for held in grant.containers:
            env[held.container] |= {
                "GPUTILE_MEMORY_MIB": ",".join(str(tile.memory) for tile in held.tiles),
                "GPUTILE_CORES": ",".join(str(tile.cores) for tile in held.tiles),
            }
    return PodRecord(annotations={GRANT: msgspec.json.encode(record).decode()}, env=env)


def record_keys(settings: DialectSettings) -> Iterable[str]:
    return (GRANT,)


def read_grant(pod: Pod, cards: tuple[Card, ...], settings: DialectSettings) -> Grant | None:
    """The grant on the pod. A grant that names another UID or node was copied, and raises; so does a grant that our
    scheduler cannot have written: where no admission policy forbids it, a pod's author may write any annotation."""
    value = pod.annotations.get(GRANT)
    if value is None:
        return None
    record = decode(_GRANTS, value, GRANT)
    if record.version != VERSION:
        raise _bad_grant(
            f"version {record.version} is unknown to this gputile; update gputile, or remove the annotation"
        )
    if (record.pod, record.node) != (pod.uid, pod.node_name):
        owner = f"pod {shortened(record.pod)} on node {shortened(record.node)}"
        raise _bad_grant(f"it belongs to {owner}, not to this pod; remove it")
    return _plausible(_grant(record, pod.uid, pod.node_name, _current_uuids(record.node, cards)), cards)


def _bad_grant(problem: str) -> UnreadableValue:
    return UnreadableValue(RequestError.BAD_ANNOTATION, f"annotation `{GRANT}`: {problem}")


def _plausible(grant: Grant, cards: tuple[Card, ...]) -> Grant:
    """The grant, if our scheduler may have written it: every container has cards, and every tile has an amount."""
    tiles = [tile for held in grant.containers for tile in held.tiles]
    if not grant.containers or not all(held.tiles for held in grant.containers):
        raise _bad_grant("it grants no GPU to a container; remove it")
    if len({held.container for held in grant.containers}) != len(grant.containers):
        raise _bad_grant("it names a container twice; remove it")
    sizeless = {card.uuid for card in cards if not card.memory}  # their agent does not publish their memory
    if not all(tile.memory or tile.cores or tile.uuid in sizeless for tile in tiles):
        raise _bad_grant("it grants a GPU share of no memory and no cores; remove it")
    return grant


def beyond_its_cards(grant: Grant, cards: Mapping[str, Card]) -> str:
    """Why no container may start with this grant: it holds more of a card than the card has; "" when it does not. The
    grant counts all the same: the card may have become smaller under the pod."""
    for uuid, use in grant.uses().items():
        card = cards.get(uuid)
        if card is not None and (use.memory > card.memory or use.cores > card.cores):
            held, size = f"{use.memory} MiB and {use.cores} %", f"{card.memory} MiB and {card.cores} %"
            return f"annotation `{GRANT}`: it grants {held} of GPU {card.index}, which has {size}"
    return ""


def _grant(record: _Grant, pod: str, node: str, uuids: dict[str, str]) -> Grant:
    """Reuses strings that exist already: a cluster has many grants."""
    return Grant(
        pod=pod,
        node=node,
        dialect=intern(record.dialect),
        containers=tuple(
            ContainerGrant(
                c.name,
                tuple(Tile(uuids.get(t.uuid, t.uuid), t.index, t.memory, t.cores) for t in c.tiles),
                c.role,
            )
            for c in record.containers
        ),
    )


def granted_at(pod: Pod) -> int:
    """When the grant on the pod was made, in nanoseconds since 1970; 0 when the pod has no readable grant."""
    record = decode_or_none(_GRANTS, pod.annotations.get(GRANT))
    return record.at if record is not None else 0


def _current_uuids(node: str, cards: tuple[Card, ...]) -> dict[str, str]:
    """From placeholder UUIDs of grants written while an agent only counted cards, to the UUIDs published now."""
    return {placeholder_uuid(node, card.index): card.uuid for card in cards} | {card.uuid: card.uuid for card in cards}


# ---- nominations ----------------------------------------------------------------------------------------------------


class Nomination(msgspec.Struct, frozen=True):
    """Capacity kept for a preemptor: what it will hold, until when it is kept, and the victims."""

    grant: Grant
    until: int  # nanoseconds since 1970
    victims: tuple[str, ...]  # UIDs


class _Nomination(msgspec.Struct):
    """`gputile.io/nomination`, version 1. Keys are only ever added."""

    version: int
    grant: _Grant
    until: Moment
    victims: list[str] = msgspec.field(default_factory=list)


_NOMINATIONS = msgspec.json.Decoder(_Nomination)


def write_nomination(nomination: Nomination, at: int) -> str:
    """The value of the pod annotation `gputile.io/nomination`."""
    record = _Nomination(VERSION, _record(nomination.grant, at), nomination.until, list(nomination.victims))
    return msgspec.json.encode(record).decode()


def read_nomination(pod: Pod) -> Nomination | None:
    """The nomination of this very pod; None when it has none, or an unreadable one: a nomination expires anyway."""
    value = pod.annotations.get(NOMINATION)
    if value is None:
        return None
    try:
        record = decode(_NOMINATIONS, value, NOMINATION)
    except UnreadableValue:
        return None
    if record.version != VERSION or record.grant.pod != pod.uid:
        return None
    return Nomination(_grant(record.grant, pod.uid, record.grant.node, {}), record.until, tuple(record.victims))


# ---- grants of orphaned pods ----------------------------------------------------------------------------------------


class _OrphanedPods(msgspec.Struct):
    """`gputile.io/orphaned`, version 1. Keys are only ever added."""

    version: int
    grants: list[_Grant]


_ORPHANED_PODS = msgspec.json.Decoder(_OrphanedPods)


def write_orphaned_pods(grants: Iterable[Grant]) -> str:
    """The value of the node annotation `gputile.io/orphaned`: the grants of pods that are deleted from the API server
    while their containers still run."""
    return msgspec.json.encode(_OrphanedPods(VERSION, [_record(grant, 0) for grant in grants])).decode()


def read_orphaned_pods(node: NodeObject, cards: tuple[Card, ...]) -> tuple[Grant, ...]:
    """One grant per pod, all of them on this node; anything else was not written by the node's agent, and raises."""
    value = node.annotations.get(ORPHANED)
    if value is None:
        return ()
    record = decode(_ORPHANED_PODS, value, ORPHANED)
    if record.version != VERSION:
        raise UnreadableValue(
            RequestError.BAD_ANNOTATION,
            f"annotation `{ORPHANED}`: version {record.version} is unknown to this gputile; update gputile",
        )
    pods = {grant.pod for grant in record.grants}
    if "" in pods or len(pods) != len(record.grants) or any(grant.node != node.name for grant in record.grants):
        raise UnreadableValue(
            RequestError.BAD_ANNOTATION,
            f"annotation `{ORPHANED}`: it names a pod twice, without a UID, or of another node; restart the agent",
        )
    uuids = _current_uuids(node.name, cards)
    return tuple(_grant(grant, grant.pod, node.name, uuids) for grant in record.grants)


# ---- inventory ------------------------------------------------------------------------------------------------------


class _Card(msgspec.Struct, omit_defaults=True):
    """A card in the inventory."""

    index: int
    uuid: str
    memory: MiB
    model: str = ""
    cores: Percent = ALL
    slots: int = DEFAULT_SLOTS
    numa: int = NO_NUMA
    pci: str = ""
    mode: str = ""
    healthy: bool = True
    reason: str = ""
    links: dict[str, Weight] = msgspec.field(default_factory=dict)  # by the other card's index; larger is closer


class _Inventory(msgspec.Struct, omit_defaults=True):
    """`gputile.io/inventory`, version 1. Keys are only ever added."""

    version: int
    cards: Annotated[list[_Card], msgspec.Meta(max_length=LARGEST_NODE)]
    driver: str = ""
    cuda: str = ""
    one_at_a_time: bool = False
    since: str = ""  # when gputile's agent first served the node; written once


_INVENTORIES = msgspec.json.Decoder(_Inventory)


def write_inventory(inventory: NodeInventory) -> str:
    """The value of the node annotation `gputile.io/inventory`."""
    cards = []
    for position, card in enumerate(inventory.cards):
        links = inventory.links[position] if inventory.links else ()
        near = {str(inventory.cards[peer].index): weight for peer, weight in enumerate(links) if weight}
        cards.append(
            _Card(
                index=card.index,
                uuid=card.uuid,
                memory=card.memory,
                model=card.model,
                cores=card.cores,
                slots=card.slots,
                numa=card.numa,
                pci=card.pci,
                mode=card.mode,
                healthy=card.healthy,
                reason=card.reason,
                links=near,
            )
        )
    record = _Inventory(VERSION, cards, inventory.driver, inventory.cuda, inventory.one_at_a_time, inventory.since)
    return msgspec.json.encode(record).decode()


def read_cards(node: NodeObject, settings: DialectSettings) -> NodeInventory | None:
    value = node.annotations.get(INVENTORY)
    if value is None:
        return None
    record = decode(_INVENTORIES, value, INVENTORY)
    cordoned = {part.strip() for part in str(node.annotations.get(CORDON) or "").split(",")}
    cards = tuple(
        Card(
            index=c.index,
            uuid=c.uuid,
            memory=c.memory,
            model=c.model,
            cores=c.cores,
            slots=c.slots,
            numa=c.numa,
            pci=c.pci,
            mode=c.mode,
            healthy=c.healthy,
            reason=c.reason,
            cordoned=c.uuid in cordoned,
        )
        for c in record.cards
    )
    has_links = any(c.links for c in record.cards)
    links = tuple(tuple(c.links.get(str(peer.index), 0) for peer in cards) for c in record.cards) if has_links else ()
    return NodeInventory(cards, links, record.driver, record.cuda, record.one_at_a_time, record.since)


def has_lost_its_plugin(node: NodeObject, cards: tuple[Card, ...]) -> bool:
    """Whether the kubelet has no device to allocate although the node has cards: it would fail the pod for good.

    A node that does not name the resource at all has no gputile device plugin, so its inventory counts as it is.
    """
    in_use = any(card.healthy and not card.cordoned and not card.in_mig_mode for card in cards)
    return in_use and quantity(node.allocatable.get(GPU)) == 0
