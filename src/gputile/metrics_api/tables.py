"""Tables, as kubectl prints them: the server chooses the columns (meta.k8s.io/v1 Table).

Pure functions from an object and the time to a row of cells.
"""

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from gputile.model.units import unix_seconds

Json = dict[str, Any]
Include = Literal["None", "Metadata", "Object"]

SHORT = ((60.0, 1, "s"), (3600.0, 60, "m"), (86400.0, 3600, "h"))
TWO_UNITS = 120  # seconds up to which kubectl counts seconds


class Column(msgspec.Struct, frozen=True):
    """A column of a table: its name, its help text, and the function that fills its cells."""

    name: str
    cell: Callable[[Json, float], object]
    description: str
    type: str = "string"
    wide: bool = False

    def definition(self) -> Json:
        return {
            "name": self.name,
            "type": self.type,
            "format": "name" if self.name == "Name" else "",
            "description": self.description,
            "priority": int(self.wide),
        }


def table(of: str, bodies: list[Json], now: float, *, version: str, metadata: Json, include: Include) -> Json:
    """`version`: the version of meta.k8s.io. `metadata`: the metadata of the list."""
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
    """An age as kubectl prints it: 42s, 5m, 3h, 12d."""
    start = unix_seconds(since)
    if start is None:
        return "<unknown>"
    seconds = now - start
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
    return f"{sum(amount['held'] for amount in memory)}/{sum(amount['total'] for amount in memory)}Mi"


def _unhealthy(body: Json, now: float) -> int:
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
    """Without init containers, which free their cards when they end; with them if there are no others."""
    containers = body["spec"]["containers_device"]
    lasting = [container for container in containers if container.get("role") != "init"]
    return [tile for container in lasting or containers for tile in container["device_info"]]


def _card_indices(body: Json, now: float) -> str:
    return ",".join(str(index) for index in sorted({tile["index"] for tile in _tiles(body)}))


def _memory(body: Json, now: float) -> str:
    return f"{sum(tile['memory'] for tile in _tiles(body))}Mi"


def _cores(body: Json, now: float) -> str:
    cores = sum(tile["cores"] for tile in _tiles(body))
    return f"{cores}%" if cores else "shared"


def _used(body: Json, now: float) -> str:
    """Empty unless it is known for every tile: a partial sum would look complete."""
    used = [tile.get("use", {}).get("memory") for tile in _tiles(body)]
    return f"{sum(used)}Mi" if used and None not in used else ""


def _uuids(body: Json, now: float) -> str:
    return ",".join(sorted({tile["device_id"] for tile in _tiles(body)}))


def _card_models(body: Json, now: float) -> str:
    return ",".join(sorted({tile["device_model"] for tile in _tiles(body) if "device_model" in tile}))


NAME = Column("Name", lambda body, now: body["metadata"]["name"], "The object's name.")
AGE = Column("Age", _age, "Time since the node or pod was created.")
COLUMNS = {
    "nodes": (
        NAME,
        Column("GPUs", _cards, "GPUs of the node.", "integer"),
        Column("Busy", _busy, "GPUs with allocations.", "integer"),
        Column("Memory", _held, "Memory of all GPUs: allocated / total, in MiB."),
        Column("Unhealthy", _unhealthy, "Unhealthy GPUs.", "integer"),
        Column("Health", _health, "Whether the node's agent is alive and the node is in use."),
        Column("Heartbeat", _heartbeat, "Time since the agent last renewed its Lease."),
        Column("Models", _models, "Models of the GPUs."),
        AGE,
    ),
    "pods": (
        NAME,
        Column("Node", lambda body, now: body["spec"]["node_name"], "The node of the pod."),
        Column("Phase", lambda body, now: body["status"]["phase"], "The pod's phase."),
        Column("GPUs", _card_indices, "Indices of its GPUs."),
        Column("Memory", _memory, "GPU memory allocated to it, in MiB."),
        Column("Cores", _cores, "GPU cores allocated to it, in percent of one GPU."),
        Column("Used", _used, "GPU memory used by its processes, where the agent reports it."),
        AGE,
        Column("Models", _card_models, "Models of the GPUs.", wide=True),
        Column("UUIDs", _uuids, "UUIDs of the GPUs.", wide=True),
    ),
}
