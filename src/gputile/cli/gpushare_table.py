"""The table of `kubectl inspect gpushare`, byte for byte, but with rows sorted by name.

The original divides a node's memory evenly over its cards. Where an inventory says better, a card shows its true size,
and tiles of every dialect count, not only gpushare's.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from gputile.dialects import gpushare, speaking
from gputile.dialects.settings import UNIT, DialectSettings
from gputile.dialects.wire import NodeObject, Pod, convert_node, convert_pod, count_of
from gputile.model.cards import Node
from gputile.model.grants import Grant
from gputile.model.refusals import BadRequest
from gputile.model.requests import PodRequest
from gputile.model.units import MiB


class Row(msgspec.Struct, frozen=True):
    """One node, in units of the table."""

    name: str
    address: str
    cards: tuple[tuple[int, int], ...]  # used and total, by position
    pending: int  # asked for on this node, on a card nobody knows

    @property
    def used(self) -> int:
        return sum(used for used, _ in self.cards) + self.pending

    @property
    def total(self) -> int:
        return sum(total for _, total in self.cards)


def table(nodes: Iterable[Mapping[str, Any]], pods: Iterable[Mapping[str, Any]], unit: str | None = None) -> str:
    """The summary of all nodes that share GPU memory, from objects as the API server gives them."""
    shown = [(obj, found) for obj in nodes if isinstance(found := convert_node(dict(obj)), NodeObject)]
    shared = [(obj, found) for obj, found in shown if count_of(found.allocatable, gpushare.MEM)]
    unit = unit or (gpushare.guess_unit(found for _, found in shared) if shared else "")
    settings = DialectSettings(gpushare_unit="MiB" if unit == "MiB" else "GiB")
    everyone = [pod for obj in pods if _runs(obj) and isinstance(pod := convert_pod(dict(obj)), Pod)]
    rows = [
        _row(found, _address(obj), [pod for pod in everyone if pod.node_name == found.name], settings)
        for obj, found in sorted(shared, key=lambda pair: pair[1].name)
    ]
    return _printed(rows, unit)


def _runs(pod: Mapping[str, Any]) -> bool:
    return (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")


def _address(node: Mapping[str, Any]) -> str:
    addresses = (node.get("status") or {}).get("addresses") or ()
    return next((str(a.get("address")) for a in addresses if a.get("type") == "InternalIP"), "unknown")


def _row(found: NodeObject, address: str, pods: list[Pod], settings: DialectSettings) -> Row:
    node = speaking.read_node(found, settings)
    cards = node.cards if isinstance(node, Node) else ()
    grants = [(pod, speaking.read_grant(pod, cards, settings)) for pod in pods]
    held = [tile for _, grant in grants if isinstance(grant, Grant) for tile in _tiles(grant)]
    pending = sum(_asked(pod, settings) for pod, grant in grants if not isinstance(grant, Grant))
    size = UNIT[settings.gpushare_unit]
    used = {card.uuid: sum(memory for uuid, memory in held if uuid == card.uuid) for card in cards}
    columns = tuple((_units(used[card.uuid], card.memory, size), card.memory // size) for card in cards)
    return Row(found.name, address, columns, pending // size)


def _tiles(grant: Grant) -> list[tuple[str, MiB]]:
    return [(uuid, use.memory) for uuid, use in grant.uses().items()]


def _asked(pod: Pod, settings: DialectSettings) -> MiB:
    asked = speaking.read_pod(pod, settings)
    if isinstance(asked, BadRequest) or not isinstance(asked, PodRequest):
        return 0
    return sum((ask.memory or 0) * ask.cards for ask in asked.asks)


def _units(memory: MiB, of: MiB, size: MiB) -> int:
    """Begun units count, but a card that is not oversold never shows more than it has."""
    return min(-(-memory // size), of // size) if memory <= of else -(-memory // size)


# ---- print as Go's tabwriter does -----------------------------------------------------------------------------------


def _printed(rows: list[Row], unit: str) -> str:
    widest = max((len(row.cards) for row in rows), default=0)
    pending = any(row.pending for row in rows)
    header = ["NAME", "IPADDRESS", *(f"GPU{n}(Allocated/Total)" for n in range(widest))]
    header += ["PENDING(Allocated)"] * pending + [f"GPU Memory({unit})"]
    lines = [header, *(_cells(row, widest, pending) for row in rows)]
    dashes = len("\t".join(lines[1])) + 1 + 20 if rows else 0
    used, total = sum(row.used for row in rows), sum(row.total for row in rows)
    percent = used * 100 // total if total else 0
    return "\n".join(
        [
            *_aligned(lines),
            "-" * dashes,
            "Allocated/Total GPU Memory In Cluster:",
            f"{used}/{total} ({percent}%)  ",
            "",
        ]
    )


def _cells(row: Row, widest: int, pending: bool) -> list[str]:
    cards = [f"{used}/{total}" for used, total in row.cards] + ["0/0"] * (widest - len(row.cards))
    waiting = [str(row.pending) if row.pending else ""] * pending
    return [row.name, row.address, *cards, *waiting, f"{row.used}/{row.total}"]


def _aligned(lines: list[list[str]]) -> list[str]:
    """Every cell but the last is as wide as its column and two spaces."""
    widths = [max(len(line[n]) for line in lines) + 2 for n in range(len(lines[0]) - 1)]
    return ["".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)) + line[-1] for line in lines]
