"""Our own dialect: cards, memory per card in MiB, cores per card in percent.

    gputile.io/gpu: 2          two cards (this resource carries the devices)
    gputile.io/memory: 3072    of each 3072 MiB; left out: all its memory
    gputile.io/cores: 30       of each 30 % of the cores; left out: none reserved, or all if memory is left out too

The grant (`gputile.io/grant` on the pod) and the inventory (`gputile.io/inventory` on the node) are JSON with a
version; both are written for pods and nodes of every dialect, and are the truth when others disagree. So is what the
agent says of pods that are gone while their containers still run (`gputile.io/orphaned` on the node).
"""

from collections.abc import Iterable, Mapping
from sys import intern
from typing import Annotated

import msgspec

from gputile.dialects.kube_objects import (
    LARGEST_NODE,
    SHOWN,
    Container,
    GrantContext,
    NodeInventory,
    NodeObject,
    Pod,
    PodRecord,
    UnreadableValue,
    Weight,
    amount,
    card_memory,
    decode,
    decode_or_none,
    no_device,
    request,
    shortened,
    unnamed,
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
GRANT, PROMISE, INVENTORY = "gputile.io/grant", "gputile.io/nomination", "gputile.io/inventory"
POOL = "gputile.io/pool"  # a label of nodes, for quota
NUDGED = "gputile.io/nudged"  # touched, so that kube-scheduler tries the pod again
CORDON = "gputile.io/cordon"
LINGERING = "gputile.io/orphaned"
SELECTIONS = tuple(
    f"gputile.io/{word}" for word in ("model", "not-model", "uuid", "not-uuid", "policy", "numa", "links", "isolation")
)
ISOLATION = "gputile.io/isolation"
KNOWN = frozenset((*SELECTIONS, GRANT, PROMISE, NUDGED, GPU, MEMORY, CORES))
HINTS = 3  # annotations that are none of ours for which the nearest name is shown
VERSION = 1


def resources(settings: DialectSettings) -> frozenset[str]:
    return frozenset({GPU, MEMORY, CORES})


# ---- read a pod ---------------------------------------------------------------------------------------------------


def read_pod(pod: Pod, settings: DialectSettings) -> PodRequest | None:
    return request(NAME, pod, tuple(_ask(role, container) for role, container in pod.containers()))


def _ask(role: Role, container: Container) -> ContainerRequest:
    cards, cores = amount(container, GPU), amount(container, CORES)
    memory = card_memory(container, MEMORY, 1)
    if cores > ALL:
        raise UnreadableValue(
            RequestError.OUT_OF_RANGE,
            f"`{CORES}` of container `{container.shown}` is {cores}, percent of each card; write at most 100, and "
            f"more cards with `{GPU}`",
        )
    if not cards and (memory or cores):
        raise no_device(container, MEMORY if memory else CORES, GPU, f"{GPU}: 1")
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
    """Reject resources that look like ours and are not."""
    for _, container in pod.containers():
        found = container.resources
        for resource in {**((found and found.limits) or {}), **((found and found.requests) or {})}:
            if resource.startswith("gputile.io/") and resource not in (GPU, MEMORY, CORES):
                raise UnreadableValue(
                    RequestError.UNKNOWN_NAME,
                    f"container `{container.shown}` asks for `{shortened(resource)}`, which does not exist; write "
                    f"`{_nearest(resource, (GPU, MEMORY, CORES))}`",
                )


def strange_annotations(pod: Pod) -> list[str]:
    """A sentence for each annotation that looks like ours and is not; for the first few of them, as difflib is slow."""
    strange = [key for key in pod.annotations if key.startswith("gputile.io/") and key not in KNOWN]
    hints = [
        f"annotation `{shortened(key)}` means nothing to gputile; did you mean `{_nearest(key, SELECTIONS)}`?"
        for key in strange[:HINTS]
    ]
    more = len(strange) - len(hints)
    return [*hints, f"{more} more annotations under `gputile.io/` mean nothing to gputile"] if more else hints


def _nearest(word: str, known: tuple[str, ...]) -> str:
    from difflib import get_close_matches  # slow to load, and most pods are written well

    return get_close_matches(word[:SHOWN], known, n=1, cutoff=0)[0]


# ---- grants ---------------------------------------------------------------------------------------------------------


Amount = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Moment = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class _Tile(msgspec.Struct):
    uuid: str
    index: Amount
    memory: Amount
    cores: Amount


class _Container(msgspec.Struct):
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


def write_grant(award: GrantContext) -> PodRecord:
    grant = award.grant
    record = _record(grant, award.at)
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
    """The grant on the pod. One that names another UID or node was copied, and raises; so does one that our scheduler
    cannot have written, for a pod may carry whatever its author likes where no admission policy forbids it."""
    said = pod.annotations.get(GRANT)
    if said is None:
        return None
    record = decode(_GRANTS, said, GRANT)
    if record.version != VERSION:
        raise _no_grant(f"has version {record.version}, which is unknown here; update gputile, or remove it")
    if (record.pod, record.node) != (pod.uid, pod.node_name):
        theirs = f"pod {shortened(record.pod)} on node {shortened(record.node)}"
        raise _no_grant(f"belongs to {theirs}, not to this pod; remove it")
    return _possible(_granted(record, pod.uid, pod.node_name, _true_names(record.node, cards)), cards)


def _no_grant(why: str) -> UnreadableValue:
    return UnreadableValue(RequestError.BAD_ANNOTATION, f"annotation `{GRANT}` {why}")


def _possible(grant: Grant, cards: tuple[Card, ...]) -> Grant:
    """What our scheduler may have written: every container has GPUs, and every tile is something."""
    tiles = [tile for held in grant.containers for tile in held.tiles]
    if not grant.containers or not all(held.tiles for held in grant.containers):
        raise _no_grant("grants a container no GPU at all; remove it")
    if len({held.container for held in grant.containers}) != len(grant.containers):
        raise _no_grant("names a container twice; remove it")
    sizeless = {card.uuid for card in cards if not card.memory}  # their agent does not say how much memory they have
    if not all(tile.memory or tile.cores or tile.uuid in sizeless for tile in tiles):
        raise _no_grant("has a tile of no memory and no cores; remove it")
    return grant


def beyond_its_cards(grant: Grant, cards: Mapping[str, Card]) -> str:
    """Why no container may start by this grant: it holds more of a card than the card has; "" when it does not. What is
    held is counted all the same: the card may have become smaller under the pod."""
    for uuid, use in grant.uses().items():
        card = cards.get(uuid)
        if card is not None and (use.memory > card.memory or use.cores > card.cores):
            held, size = f"{use.memory} MiB and {use.cores} %", f"{card.memory} MiB and {card.cores} %"
            return f"annotation `{GRANT}` holds {held} of GPU {card.index}, which has {size}"
    return ""


def _granted(record: _Grant, pod: str, node: str, names: dict[str, str]) -> Grant:
    """Of strings that are there already: a cluster has many grants."""
    return Grant(
        pod=pod,
        node=node,
        dialect=intern(record.dialect),
        containers=tuple(
            ContainerGrant(
                c.name,
                tuple(Tile(names.get(t.uuid, t.uuid), t.index, t.memory, t.cores) for t in c.tiles),
                c.role,
            )
            for c in record.containers
        ),
    )


def granted_at(pod: Pod) -> int:
    """When the grant on the pod was made, in nanoseconds since 1970; 0 when it carries none that can be read."""
    record = decode_or_none(_GRANTS, pod.annotations.get(GRANT))
    return record.at if record is not None else 0


def _true_names(node: str, cards: tuple[Card, ...]) -> dict[str, str]:
    """From the names that we made up while an agent only counted cards, to those that a better agent gives."""
    return {unnamed(node, card.index): card.uuid for card in cards} | {card.uuid: card.uuid for card in cards}


# ---- promises -------------------------------------------------------------------------------------------------------


class Nomination(msgspec.Struct, frozen=True):
    """Room that is being made for a pod that waits: what it will hold, until when it is kept, and who has to go."""

    grant: Grant
    until: int  # nanoseconds since 1970
    victims: tuple[str, ...]  # UIDs


class _Promise(msgspec.Struct):
    """`gputile.io/nomination`, version 1. Keys are only ever added."""

    version: int
    grant: _Grant
    until: Moment
    victims: list[str] = msgspec.field(default_factory=list)


_PROMISES = msgspec.json.Decoder(_Promise)


def write_nomination(nomination: Nomination, at: int) -> str:
    """The value of the pod annotation `gputile.io/nomination`."""
    record = _Promise(VERSION, _record(nomination.grant, at), nomination.until, list(nomination.victims))
    return msgspec.json.encode(record).decode()


def read_nomination(pod: Pod) -> Nomination | None:
    """What was promised to this very pod; None when nothing was, or when nobody can read it: it would end anyway."""
    said = pod.annotations.get(PROMISE)
    if said is None:
        return None
    try:
        record = decode(_PROMISES, said, PROMISE)
    except UnreadableValue:
        return None
    if record.version != VERSION or record.grant.pod != pod.uid:
        return None
    return Nomination(_granted(record.grant, pod.uid, record.grant.node, {}), record.until, tuple(record.victims))


# ---- grants of pods that are gone -----------------------------------------------------------------------------------


class _Lingering(msgspec.Struct):
    """`gputile.io/orphaned`, version 1. Keys are only ever added."""

    version: int
    grants: list[_Grant]


_LINGERING = msgspec.json.Decoder(_Lingering)


def write_orphaned_pods(grants: Iterable[Grant]) -> str:
    """The value of the node annotation `gputile.io/orphaned`: what pods hold that the API server no longer shows,
    because their containers still run."""
    return msgspec.json.encode(_Lingering(VERSION, [_record(grant, 0) for grant in grants])).decode()


def read_orphaned_pods(node: NodeObject, cards: tuple[Card, ...]) -> tuple[Grant, ...]:
    """One grant per pod, all of them on this node; anything else was not written by the node's agent, and raises."""
    said = node.annotations.get(LINGERING)
    if said is None:
        return ()
    record = decode(_LINGERING, said, LINGERING)
    if record.version != VERSION:
        raise UnreadableValue(
            RequestError.BAD_ANNOTATION,
            f"annotation `{LINGERING}` has version {record.version}; update gputile to read it",
        )
    pods = {grant.pod for grant in record.grants}
    if "" in pods or len(pods) != len(record.grants) or any(grant.node != node.name for grant in record.grants):
        raise UnreadableValue(
            RequestError.BAD_ANNOTATION,
            f"annotation `{LINGERING}` names a pod twice, one without a UID, or one of another node; restart the agent",
        )
    names = _true_names(node.name, cards)
    return tuple(_granted(grant, grant.pod, node.name, names) for grant in record.grants)


# ---- inventory ------------------------------------------------------------------------------------------------------


class _Card(msgspec.Struct, omit_defaults=True):
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
    since: str = ""  # when an agent of ours first served the node; written once


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
    said = _Inventory(VERSION, cards, inventory.driver, inventory.cuda, inventory.one_at_a_time, inventory.since)
    return msgspec.json.encode(said).decode()


def read_cards(node: NodeObject, settings: DialectSettings) -> NodeInventory | None:
    said = node.annotations.get(INVENTORY)
    if said is None:
        return None
    found = decode(_INVENTORIES, said, INVENTORY)
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
        for c in found.cards
    )
    has_links = any(c.links for c in found.cards)
    links = tuple(tuple(c.links.get(str(peer.index), 0) for peer in cards) for c in found.cards) if has_links else ()
    return NodeInventory(cards, links, found.driver, found.cuda, found.one_at_a_time, found.since)


def has_lost_its_plugin(node: NodeObject, cards: tuple[Card, ...]) -> bool:
    """Whether the kubelet has nothing to hand out where there are cards to hand out: it would fail the pod for good.

    A node that does not name the resource at all was described by somebody else, and is taken at its word.
    """
    in_use = any(card.healthy and not card.cordoned and not card.in_mig_mode for card in cards)
    return in_use and quantity(node.allocatable.get(GPU)) == 0
