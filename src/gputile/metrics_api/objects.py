"""Nodes with cards and pods on cards, as the objects of `metrics.nvidia.com/v1alpha1`.

Pure functions from the ledger's values to JSON. The keys in snake case are those of nvidia-gpu-scheduler v0.1, all of
them; further keys are gputile's. Unknown values are absent, never zero. `with_heartbeat` and `with_use` add the values
that change all the time.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from gputile.dialects.kube_objects import Pod
from gputile.ledger.ledger import LedgerEntry
from gputile.model.cards import Card, Node, Use
from gputile.model.grants import Grant, Tile
from gputile.model.usage import CardUsage, PodUsage

GROUP, VERSION = "metrics.nvidia.com", "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
UNKNOWN = "UnKnow"  # as v0.1 spells it

Json = dict[str, Any]


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata of the Node object that is shown with its cards."""

    uid: str = ""
    created: str | None = None
    labels: dict[str, str] = msgspec.field(default_factory=dict)


# The first that the model's name contains. The names are NVML's; the agent does not report the brand itself.
BRANDS = {
    "quadro rtx": "BRAND_QUADRO_RTX",
    "quadro": "BRAND_QUADRO",
    "geforce rtx": "BRAND_GEFORCE_RTX",
    "geforce": "BRAND_GEFORCE",
    "titan rtx": "BRAND_TITAN_RTX",
    "titan": "BRAND_TITAN",
    "tesla": "BRAND_TESLA",
    "grid": "BRAND_GRID",
    "nvs": "BRAND_NVS",
    "nvidia rtx": "BRAND_NVIDIA_RTX",
    "nvidia": "BRAND_NVIDIA",
}


def brand(model: str) -> str:
    lower = model.lower()
    return next((name for part, name in BRANDS.items() if part in lower), "BRAND_UNKNOWN")


def device(card: Card, node: str) -> Json:
    """A card with the keys of v0.1, which leaves empty values out."""
    values = {
        "device_id": card.uuid,
        "device_brand": brand(card.model),
        "device_model": card.model,
        "device_busid": card.pci,
        "device_node": node,
    }
    return {name: value for name, value in values.items() if value}


# ---- nodes ----------------------------------------------------------------------------------------------------------


def gpu_info(node: Node, entries: list[LedgerEntry], facts: NodeFacts, *, health: str) -> Json:
    """The object of one node. It names no pods: users who may read nodes may not read the pods of every namespace."""
    models: dict[str, list[str]] = {}
    for card in node.cards:
        models.setdefault(card.model.strip().lower(), []).append(card.uuid)
    held: dict[str, list[Use]] = {}
    for entry in entries:
        for uuid, use in entry.allocation.uses().items():
            held.setdefault(uuid, []).append(use)
    cards = [_card(card, held.get(card.uuid, [])) for card in node.cards]
    return {
        "kind": "GpuInfo",
        "apiVersion": API_VERSION,
        "metadata": _metadata(node.name, None, facts.uid, facts.created, facts.labels),
        "spec": {
            "device_node": node.name,
            "device_infos": {card.uuid: device(card, node.name) for card in node.cards},
            "device_models": models,
            "device_busy": [card.uuid for card in node.cards if card.uuid in held],
        },
        "status": {"node_health": health, **_fault(node), "cards": cards},
    }


def _fault(node: Node) -> Json:
    values = {"agent": node.agent, "fault": str(node.fault), "pool": node.pool}
    return {name: value for name, value in values.items() if value}


def _card(card: Card, uses: list[Use]) -> Json:
    """Memory in MiB, cores in percent of the card."""
    body: Json = {
        "index": card.index,
        "uuid": card.uuid,
        "model": card.model,
        "memory": {"total": card.memory, "held": sum(use.memory for use in uses)},
        "cores": {"total": card.cores, "held": sum(use.cores for use in uses)},
        "tenants": len(uses),
        "healthy": card.healthy,
    }
    if card.reason:
        body["reason"] = card.reason
    if card.cordoned:
        body["cordoned"] = True
    return body


def with_heartbeat(body: Json, renewed: str | None) -> Json:
    """Add when the agent last renewed its Lease, by the agent's clock."""
    return {**body, "status": {**body["status"], "node_last_health_time": renewed or UNKNOWN}}


# ---- pods -----------------------------------------------------------------------------------------------------------


def pod_resource(pod: Pod, grant: Grant, node: Node | None) -> Json:
    cards = {card.uuid: card for card in node.cards} if node is not None else {}
    containers = [
        {
            "container_name": held.container,
            "role": str(held.role),
            "device_info": [_tile(tile, cards.get(tile.uuid), grant.node) for tile in held.tiles],
        }
        for held in grant.containers
    ]
    labels = {key: str(value) for key, value in pod.labels.items()}
    created = pod.metadata.creation_timestamp if pod.metadata else None
    return {
        "kind": "PodResource",
        "apiVersion": API_VERSION,
        "metadata": _metadata(pod.name, pod.namespace, pod.uid, created, labels),
        "spec": {
            "pod_name": pod.name,
            "pod_namespace": pod.namespace,
            "node_name": grant.node,
            "dialect": grant.dialect,
            "containers_device": containers,
        },
        "status": {
            "phase": (pod.status and pod.status.phase) or "Pending",
            **({"ending": True} if pod.is_terminating else {}),
        },
    }


def _tile(tile: Tile, card: Card | None, node: str) -> Json:
    """Memory in MiB, cores in percent of the card; 0 cores: none are reserved."""
    body = device(card, node) if card is not None else {"device_id": tile.uuid, "device_node": node}
    return {**body, "index": tile.index, "memory": tile.memory, "cores": tile.cores}


def with_use(body: Json, use: PodUsage | None) -> Json:
    """Add the usage of the containers, where their node's agent reports it."""
    if not use:
        return body
    containers = [_with_use(held, use.get(held["container_name"], {})) for held in body["spec"]["containers_device"]]
    return {**body, "spec": {**body["spec"], "containers_device": containers}}


def _with_use(held: Json, use: Mapping[str, CardUsage]) -> Json:
    """Unknown values are absent, never zero."""
    tiles = [
        {**tile, "use": values} if (values := _known_values(use.get(tile["device_id"]))) else tile
        for tile in held["device_info"]
    ]
    return {**held, "device_info": tiles}


def _known_values(used: CardUsage | None) -> Json:
    values = msgspec.structs.asdict(used) if used is not None else {}
    return {key: value for key, value in values.items() if value is not None}


def _metadata(name: str, namespace: str | None, uid: str, created: str | None, labels: Mapping[str, str]) -> Json:
    metadata: Json = {
        "name": name,
        "namespace": namespace,
        "uid": uid,
        "creationTimestamp": created,
        "labels": dict(labels),
    }
    return {key: value for key, value in metadata.items() if value or key == "creationTimestamp"}
