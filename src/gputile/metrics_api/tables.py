"""Tables, as kubectl prints them: the server chooses the columns (meta.k8s.io/v1 Table).

Room:  pure: an object and the time in, a row of cells out.
Door:  `table(of, bodies, now, ...)`.
"""

from collections.abc import Callable
from datetime import datetime
from typing import Any, Literal

import msgspec

Json = dict[str, Any]
Include = Literal["None", "Metadata", "Object"]

SHORT = ((60.0, 1, "s"), (3600.0, 60, "m"), (86400.0, 3600, "h"))
TWO_UNITS = 120  # seconds up to which kubectl counts seconds


class Column(msgspec.Struct, frozen=True):
    name: str
    cell: Callable[[Json, float], object]
    meaning: str
    type: str = "string"
    wide: bool = False

    def definition(self) -> Json:
        return {
            "name": self.name,
            "type": self.type,
            "format": "name" if self.name == "Name" else "",
            "description": self.meaning,
            "priority": int(self.wide),
        }


def table(of: str, bodies: list[Json], now: float, *, version: str, metadata: Json, include: Include) -> Json:
    """`version`: of meta.k8s.io. `metadata`: that of the list."""
    columns = COLUMNS[of]
    rows = [
        {"cells": [column.cell(body, now) for column in columns], **_object(body, version, include)} for body in bodies
    ]
    return {
        "kind": "Table",
        "apiVersion": f"meta.k8s.io/{version}",
        "metadata": metadata,
        "columnDefinitions": [column.definition() for column in columns],
        "rows": rows,
    }


def _object(body: Json, version: str, include: Include) -> Json:
    if include == "None":
        return {}
    return {"object": body if include == "Object" else partial(body, version)}


def partial(body: Json, version: str) -> Json:
    return {
        "kind": "PartialObjectMetadata",
        "apiVersion": f"meta.k8s.io/{version}",
        "metadata": body["metadata"],
    }


# ---- cells ----------------------------------------------------------------------------------------------------------


def age(since: str | None, now: float) -> str:
    """As kubectl writes it: 42s, 5m, 3h, 12d."""
    try:
        seconds = now - datetime.fromisoformat(since or "").timestamp()
    except ValueError:
        return "<unknown>"
    if seconds < TWO_UNITS:
        return f"{max(int(seconds), 0)}s"
    for limit, unit, sign in SHORT:
        if seconds < limit:
            return f"{int(seconds / unit)}{sign}"
    return f"{int(seconds / 86400)}d"


def _age(body: Json, now: float) -> str:
    return age(body["metadata"].get("creationTimestamp"), now)


def _cards(body: Json, now: float) -> int:
    return len(body["status"]["cards"])


def _busy(body: Json, now: float) -> int:
    return len(body["spec"]["device_busy"])


def _held(body: Json, now: float) -> str:
    memory = [card["memory"] for card in body["status"]["cards"]]
    return f"{sum(one['held'] for one in memory)}/{sum(one['total'] for one in memory)}Mi"


def _sick(body: Json, now: float) -> int:
    return sum(not card["healthy"] for card in body["status"]["cards"])


def _models(body: Json, now: float) -> str:
    counts: dict[str, int] = {}
    for card in body["status"]["cards"]:
        counts[card["model"] or "unknown"] = counts.get(card["model"] or "unknown", 0) + 1
    return ", ".join(f"{count}x {model}" for model, count in counts.items())


def _health(body: Json, now: float) -> str:
    fault, health = body["status"].get("fault", ""), body["status"]["node_health"]
    return f"{health} ({fault})" if fault else str(health)


def _heartbeat(body: Json, now: float) -> str:
    return age(body["status"].get("node_last_health_time"), now)


def _tiles(body: Json) -> list[Json]:
    """Of the containers that run on: an init container gives its cards back."""
    held = [one for one in body["spec"]["containers_device"] if one.get("role") != "init"]
    return [tile for one in held or body["spec"]["containers_device"] for tile in one["device_info"]]


def _card_indices(body: Json, now: float) -> str:
    return ",".join(str(index) for index in sorted({tile["index"] for tile in _tiles(body)}))


def _memory(body: Json, now: float) -> str:
    return f"{sum(tile['memory'] for tile in _tiles(body))}Mi"


def _cores(body: Json, now: float) -> str:
    cores = sum(tile["cores"] for tile in _tiles(body))
    return f"{cores}%" if cores else "shared"


def _used(body: Json, now: float) -> str:
    """Where it is known of every tile: a part of it would look like the whole."""
    used = [tile.get("use", {}).get("memory") for tile in _tiles(body)]
    return f"{sum(used)}Mi" if used and None not in used else ""


def _uuids(body: Json, now: float) -> str:
    return ",".join(sorted({tile["device_id"] for tile in _tiles(body)}))


def _card_models(body: Json, now: float) -> str:
    return ",".join(sorted({tile["device_model"] for tile in _tiles(body) if "device_model" in tile}))


NAME = Column("Name", lambda body, now: body["metadata"]["name"], "The object's name.")
AGE = Column("Age", _age, "How long the node or pod has been there.")
COLUMNS = {
    "nodes": (
        NAME,
        Column("Cards", _cards, "GPUs of the node.", "integer"),
        Column("Busy", _busy, "GPUs of which somebody holds a part.", "integer"),
        Column("Memory", _held, "Memory of all cards: held / there, in MiB."),
        Column("Sick", _sick, "GPUs that are out of use.", "integer"),
        Column("Health", _health, "Whether the node's agent lives and the node is in use."),
        Column("Heartbeat", _heartbeat, "How long ago the agent last renewed its Lease."),
        Column("Models", _models, "What cards they are."),
        AGE,
    ),
    "pods": (
        NAME,
        Column("Node", lambda body, now: body["spec"]["node_name"], "The node that it runs on."),
        Column("Phase", lambda body, now: body["status"]["phase"], "The pod's phase."),
        Column("Cards", _card_indices, "The indices of its GPUs."),
        Column("Memory", _memory, "Memory that it holds of them, in MiB."),
        Column("Cores", _cores, "Cores that it holds, in percent of one card."),
        Column("Used", _used, "Memory that its processes use, where the agent tells."),
        AGE,
        Column("Models", _card_models, "What cards they are.", wide=True),
        Column("UUIDs", _uuids, "The cards themselves.", wide=True),
    ),
}
