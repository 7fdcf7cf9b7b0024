"""The tables of `kubectl inspect gpushare`, byte for byte, but with rows sorted by name.

The original divides a node's memory evenly over its cards. Where an inventory is published, a card shows its true
size, and tiles of every dialect count, not only gpushare's. A pod that holds shares of several cards is one row.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from gputile.cli.source import ShownNode
from gputile.dialects import gpushare, records, registry
from gputile.dialects.kube_objects import Pod
from gputile.dialects.parsing import count_of
from gputile.dialects.settings import UNIT, DialectSettings
from gputile.model.cards import Card, Node
from gputile.model.grants import Grant
from gputile.model.refusals import BadRequest
from gputile.model.requests import PodRequest
from gputile.model.units import MiB
from gputile.text.terminal import one_line


class GpusharePodRow(msgspec.Struct, frozen=True):
    """One pod on its node, in units of the table."""

    name: str
    namespace: str
    cards: tuple[int, ...]  # what it holds of each, by position
    pending: int  # what it requests, on an unknown card

    @property
    def used(self) -> int:
        return sum(self.cards) + self.pending


class GpushareNodeRow(msgspec.Struct, frozen=True):
    """One node, in units of the table."""

    name: str
    address: str
    cards: tuple[tuple[int, int], ...]  # used and total, by position
    pods: tuple[GpusharePodRow, ...]

    @property
    def pending(self) -> int:
        return sum(pod.pending for pod in self.pods)

    @property
    def used(self) -> int:
        return sum(used for used, _ in self.cards) + self.pending

    @property
    def total(self) -> int:
        return sum(total for _, total in self.cards)


class GpushareTable(msgspec.Struct, frozen=True):
    """All nodes that share GPU memory, and the unit of their memory; "" where there are none."""

    rows: tuple[GpushareNodeRow, ...]
    unit: str

    @property
    def used(self) -> int:
        return sum(row.used for row in self.rows)

    @property
    def total(self) -> int:
        return sum(row.total for row in self.rows)


def gpushare_table(nodes: Iterable[ShownNode], pods: Iterable[Pod], unit: str | None = None) -> GpushareTable:
    """The content of the tables. `unit`: as its plugin is configured; else guessed, as the original does."""
    sharing = sorted((node for node in nodes if count_of(node.allocatable, gpushare.MEM)), key=lambda node: node.name)
    unit = unit or (gpushare.guess_unit(sharing) if sharing else "")
    settings = DialectSettings(gpushare_unit="MiB" if unit == "MiB" else "GiB")
    by_node: dict[str, list[Pod]] = {node.name: [] for node in sharing}
    for pod in pods:
        if not pod.is_terminal and pod.node_name in by_node:
            by_node[pod.node_name].append(pod)
    return GpushareTable(tuple(_row(node, by_node[node.name], settings) for node in sharing), unit)


def _row(shown: ShownNode, pods: list[Pod], settings: DialectSettings) -> GpushareNodeRow:
    read = registry.read_node(shown, settings)
    node = read if isinstance(read, Node) else None
    cards = node.cards if node is not None else ()
    settings = records.settings_on(node, settings)
    size = UNIT[settings.gpushare_unit]
    grants = [(pod, records.read_grant(pod, node, settings)) for pod in pods]
    held = [grant.uses() for _, grant in grants if isinstance(grant, Grant)]
    used = [sum(uses[card.uuid].memory for uses in held if card.uuid in uses) for card in cards]
    rows = [row for pod, grant in grants if (row := _pod(pod, grant, cards, settings)).used]
    return GpushareNodeRow(
        shown.name,
        shown.address,
        tuple(
            (_units(memory, card.memory, size), card.memory // size) for memory, card in zip(used, cards, strict=True)
        ),
        tuple(sorted(rows, key=lambda row: (not sum(row.cards), row.namespace, row.name))),
    )


def _pod(
    pod: Pod, grant: Grant | BadRequest | None, cards: Sequence[Card], settings: DialectSettings
) -> GpusharePodRow:
    size = UNIT[settings.gpushare_unit]
    if not isinstance(grant, Grant):
        return GpusharePodRow(pod.name, pod.namespace, (0,) * len(cards), _requested(pod, settings) // size)
    uses = grant.uses()
    held = tuple(_units(uses[card.uuid].memory, card.memory, size) if card.uuid in uses else 0 for card in cards)
    return GpusharePodRow(pod.name, pod.namespace, held, 0)


def _requested(pod: Pod, settings: DialectSettings) -> MiB:
    request = registry.read_pod(pod, settings)
    return sum((ask.memory or 0) * ask.cards for ask in request.asks) if isinstance(request, PodRequest) else 0


def _units(memory: MiB, of: MiB, size: MiB) -> int:
    """Rounded up to whole units, but a card that is not overcommitted never shows more than it has."""
    return min(-(-memory // size), of // size) if memory <= of else -(-memory // size)


# ---- print as Go's tabwriter does -----------------------------------------------------------------------------------


def summary(table: GpushareTable) -> str:
    """One line per node."""
    widest = max((len(row.cards) for row in table.rows), default=0)
    pending = any(row.pending for row in table.rows)
    header = ["NAME", "IPADDRESS", *(f"GPU{n}(Allocated/Total)" for n in range(widest))]
    header += ["PENDING(Allocated)"] * pending + [f"GPU Memory({table.unit})"]
    lines = [header, *(_cells(row, widest, pending) for row in table.rows)]
    dashes = len("\t".join(lines[1])) + 1 + 20 if table.rows else 0
    total = ["Allocated/Total GPU Memory In Cluster:", f"{_total(table.used, table.total)}  ", ""]
    return "\n".join([*_aligned(lines), "-" * dashes, *total])


def details(table: GpushareTable) -> str:
    """A table of pods for each node."""
    lines: list[str] = []
    dashes = 0
    for row in table.rows:
        pods = [_pod_cells(pod, bool(row.pending)) for pod in row.pods]
        dashes = dashes or sum(len("\t".join(cells)) + 2 for cells in pods) + 10
        lines += ["", *_aligned([["NAME:", one_line(row.name)], ["IPADDRESS:", one_line(row.address)]]), ""]
        lines += [*_pod_table(row, pods), "-" * dashes]
    total = f"Allocated/Total GPU Memory In Cluster:  {_total(table.used, table.total)}  "
    return "\n".join([*lines, "", "", total, ""])


def _pod_table(row: GpushareNodeRow, pods: list[list[str]]) -> list[str]:
    """Every cell ends with a tab, so the last is padded too; the two sums stand in the first columns."""
    header = ["NAME", "NAMESPACE", *(f"GPU{n}(Allocated)" for n in range(len(row.cards)))]
    header += ["Pending(Allocated)"] * bool(row.pending)
    percent = row.used * 100 // row.total if row.total else 0
    sums = [["Allocated :", f"{row.used} ({percent}%)"], ["Total :", f"{row.total}"]]
    lines = [header, *pods, *sums]
    widths = [max(len(line[n]) for line in lines if n < len(line)) + 2 for n in range(len(header))]
    return ["".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)) for line in lines]


def _pod_cells(pod: GpusharePodRow, pending: bool) -> list[str]:
    return [one_line(pod.name), one_line(pod.namespace), *map(str, pod.cards), *([str(pod.pending)] * pending)]


def _total(used: int, total: int) -> str:
    return f"{used}/{total} ({used * 100 // total if total else 0}%)"


def _cells(row: GpushareNodeRow, widest: int, pending: bool) -> list[str]:
    cards = [f"{used}/{total}" for used, total in row.cards] + ["0/0"] * (widest - len(row.cards))
    pending_cell = [str(row.pending) if row.pending else ""] * pending
    return [one_line(row.name), one_line(row.address), *cards, *pending_cell, f"{row.used}/{row.total}"]


def _aligned(lines: list[list[str]]) -> list[str]:
    """Every cell but the last is as wide as its column and two spaces."""
    widths = [max(len(line[n]) for line in lines) + 2 for n in range(len(lines[0]) - 1)]
    return ["".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)) + line[-1] for line in lines]


# ---- for programs ---------------------------------------------------------------------------------------------------


def document(table: GpushareTable) -> dict[str, Any]:
    """The JSON of gpushare's own extender (`/gpushare-scheduler/inspect`), with the unit and pods without a card."""
    return {
        "unit": table.unit,
        "totalGPU": table.total,
        "usedGPU": table.used,
        "nodes": [
            {
                "name": row.name,
                "address": row.address,
                "totalGPU": row.total,
                "usedGPU": row.used,
                "devs": [_device(row, number) for number in range(len(row.cards))],
                "pending": [_holder(pod, pod.pending) for pod in row.pods if pod.pending],
            }
            for row in table.rows
        ],
    }


def _device(row: GpushareNodeRow, number: int) -> dict[str, Any]:
    used, total = row.cards[number]
    pods = [_holder(pod, pod.cards[number]) for pod in row.pods if pod.cards[number]]
    return {"id": number, "totalGPU": total, "usedGPU": used, "pods": pods}


def _holder(pod: GpusharePodRow, used: int) -> dict[str, Any]:
    return {"name": pod.name, "namespace": pod.namespace, "usedGPU": used}
