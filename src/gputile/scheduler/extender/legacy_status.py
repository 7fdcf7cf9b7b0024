"""The status documents of gpushare's `inspect` and nano's `status`, made from our ledger.

Names, keys and units are theirs. For compatibility, rows are sorted by name, and an unknown node is an error text.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson

from gputile.dialects.settings import UNIT, DialectSettings
from gputile.ledger.ledger import AllocationState, Ledger, LedgerEntry
from gputile.model.cards import Card, NodeView

NODES_AT_ONCE = 20


async def inspect(ledger: Ledger, settings: DialectSettings, node: str | None = None) -> dict[str, Any]:
    """gpushare's inspect: GPU memory in its unit, per node, card and pod."""
    if node is not None and node not in ledger.fleet:
        return {"nodes": [], "error": f"node {node} is unknown to gputile"}
    unit = UNIT[settings.gpushare_unit if settings.gpushare_unit != "auto" else "GiB"]
    views = with_cards(ledger, None if node is None else [node])
    return {"nodes": [_node(view, ledger.on_node(view.node.name), unit) async for view in views]}


def _node(view: NodeView, entries: list[LedgerEntry], unit: int) -> dict[str, Any]:
    devices = [_device(card, entries, unit) for card in view.node.cards]
    return {
        "name": view.node.name,
        "totalGPU": sum(device["totalGPU"] for device in devices),
        "usedGPU": sum(device["usedGPU"] for device in devices),
        "devs": devices,
    }


def _device(card: Card, entries: list[LedgerEntry], unit: int) -> dict[str, Any]:
    holders = [(e, e.allocation.uses()[card.uuid].memory) for e in entries if card.uuid in e.allocation.uses()]
    pods = [_pod(entry, memory // unit) for entry, memory in holders if entry.state is not AllocationState.RESERVED]
    return {
        "id": card.index,
        "totalGPU": card.memory // unit,
        "usedGPU": sum(memory for _, memory in holders) // unit,
        "pods": sorted(pods, key=lambda pod: (pod["namespace"], pod["name"])),
    }


def _pod(entry: LedgerEntry, memory: int) -> dict[str, Any]:
    namespace, _, name = entry.allocation.name.partition("/")
    return {"name": name, "namespace": namespace, "usedGPU": memory}


async def percent_status(ledger: Ledger) -> dict[str, Any]:
    """nano's status of generation 2: free and total percent per card."""
    return {
        view.node.name: {
            "Rater": {},
            "Name": view.node.name,
            "GPUs": [
                {"Percent": max(free.cores, 0), "PercentTotal": card.cores}
                for card, free in zip(view.node.cards, view.free_by_card, strict=True)
            ],
            "PlanCache": {},
        }
        async for view in with_cards(ledger)
    }


async def elastic_status(ledger: Ledger) -> dict[str, str]:
    """nano's status of generation 3: under each resource name a string that is JSON itself."""
    nodes = {
        view.node.name: [
            {
                "CoreAvailable": max(free.cores, 0),
                "MemoryAvailable": max(free.memory, 0),
                "CoreTotal": card.cores,
                "MemoryTotal": card.memory,
            }
            for card, free in zip(view.node.cards, view.free_by_card, strict=True)
        ]
        async for view in with_cards(ledger)
    }
    encoded = orjson.dumps(nodes).decode()
    return {"elasticgpu.io/gpu-core": encoded, "elasticgpu.io/gpu-memory": encoded}


async def with_cards(ledger: Ledger, names: list[str] | None = None) -> AsyncIterator[NodeView]:
    """Nodes with cards, sorted by name; yields to the event loop, so that verbs are answered in between."""
    for number, name in enumerate(sorted(names or ledger.fleet.names()), start=1):
        if name in ledger.fleet and (view := ledger.fleet.view(name)).node.cards:
            yield view
        if number % NODES_AT_ONCE == 0:
            await asyncio.sleep(0)
