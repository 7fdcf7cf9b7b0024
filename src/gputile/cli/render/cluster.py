"""A `ClusterSummary` of the cluster as lines for a person.

Room:  pure but for colours; the width comes in with the paper. A node takes one line however many cards it has, so that
       a cluster of 500 nodes is still a list that can be read.
Door:  `cluster_lines`, `node_lines`.
"""

from collections import Counter
from collections.abc import Callable
from datetime import datetime

from msgspec import UNSET

from gputile.cli.cluster_summary import CardSummary, CardTenant, ClusterSummary, NodeSummary, SummaryTotals
from gputile.cli.output import style
from gputile.cli.render.terminal import (
    TAIL,
    Terminal,
    bar,
    level,
    percent,
    plural,
    shortened,
    since,
    size,
    table,
    wrapped,
)

UNKNOWN = "unknown"
BAR = 10
MAKER = "NVIDIA "
WAITING_SHOWN = 3
INDENT = " " * 7


def short_model(model: str) -> str:
    """Everybody here knows who made it."""
    return model.removeprefix(MAKER) or UNKNOWN


# ---- the cluster ----------------------------------------------------------------------------------------------------


def cluster_lines(found: ClusterSummary, sheet: Terminal, order: str, *, wide: bool) -> list[str]:
    if not found.nodes:
        return _nothing(found, sheet)
    lines = [*_head(found, sheet), ""]
    if len(found.models) > 1:
        lines += [*_models(found, sheet), ""]
    lines += _nodes(found, sheet, order, wide)
    return lines + _waiting(found, sheet)


def _nothing(found: ClusterSummary, sheet: Terminal) -> list[str]:
    lines = [f"No GPUs: none of {plural(found.nodes_without_cards, 'node')} says that it has cards."]
    lines.append("A node says so by gputile's agent, or that of HAMi, gpushare, nano, vcuda, vgpu-manager or NVIDIA.")
    lines.append("If it should: `gputile doctor` looks for the reason.")
    return [*lines, *_waiting(found, sheet)]


def _head(found: ClusterSummary, sheet: Terminal) -> list[str]:
    total = found.cluster
    bare = f", {found.nodes_without_cards:,} more without" if found.nodes_without_cards else ""
    pods = f"{plural(total.pods, 'pod')} on them"
    lines = [f"{plural(total.nodes, 'node')} with {plural(total.cards, 'card')}{bare}; {pods}"]
    wide = 40 if not sheet.columns else max(10, min(40, sheet.columns - 40))
    memory = f"{size(total.memory_held)} of {size(total.memory)}"
    cores = f"{total.cores_held / 100:g} of {total.cores / 100:g} cards"
    for name, held, whole, text in (
        ("memory", total.memory_held, total.memory, memory),
        ("cores", total.cores_held, total.cores, cores),
    ):
        drawn = bar(held / whole if whole else 0.0, wide, sheet.blocks)
        lines.append(f"  {name:<7}{drawn} {percent(held, whole):>5}  {text}")
    lines.append(f"  {'cards':<7}{_kinds(total)}")
    if found.findings:
        lines.append(style(f"  {plural(found.findings, 'thing')} wrong: see `gputile audit`", fg="red"))
    return lines


def _kinds(total: SummaryTotals) -> str:
    parts = [f"{total.idle:,} idle", f"{total.shared:,} in part", f"{total.full:,} full"]
    if total.out_of_use:
        parts.append(style(f"{total.out_of_use:,} out of use", fg="red"))
    return ", ".join(parts)


def _models(found: ClusterSummary, sheet: Terminal) -> list[str]:
    rows = [
        [
            short_model(model),
            f"{total.cards:,}",
            f"{total.idle:,}",
            f"{bar(total.memory_held / total.memory if total.memory else 0, BAR, sheet.blocks)} "
            f"{percent(total.memory_held, total.memory):>5}",
            size(total.memory - total.memory_held),
        ]
        for model, total in found.models.items()
    ]
    header = ["MODEL", "CARDS", "IDLE", "MEMORY", "FREE"]
    return table(header, rows, right=(1, 2, 4), shrink={0: 0}, columns=sheet.columns)


def _nodes(found: ClusterSummary, sheet: Terminal, order: str, wide: bool) -> list[str]:
    nodes = sorted(found.nodes, key=ORDER[order])
    header = ["NODE", "MODEL", "CARDS", "MEMORY", "FREE", "CORES", "PODS"]
    rows = [_row(node, sheet) for node in nodes]
    if wide:
        header += ["ADDRESS", "AGENT", "POOL"]
        rows = [
            [*row, node.address, node.agent or "-", node.pool or "-"] for row, node in zip(rows, nodes, strict=True)
        ]
    remarks = [_remark(node) for node in nodes]
    if any(remarks):
        header.append("REMARK")
        rows = [[*row, remark] for row, remark in zip(rows, remarks, strict=True)]
    return table(header, rows, right=(4, 5, 6), shrink={1: 0, 0: TAIL}, columns=0 if wide else sheet.columns)


# Smaller comes first; the name makes the order of equals repeatable.
ORDER: dict[str, Callable[[NodeSummary], tuple[float, str]]] = {
    "name": lambda node: (0.0, node.name),
    "free": lambda node: (_held(node)[0] - _held(node)[1], node.name),
    "used": lambda node: (-_share(node), node.name),
    "pods": lambda node: (-len(node.pods), node.name),
}


def _held(node: NodeSummary) -> tuple[int, int]:
    return sum(card.memory_held for card in node.cards), sum(card.memory for card in node.cards)


def _share(node: NodeSummary) -> float:
    held, whole = _held(node)
    return held / whole if whole else 0.0


def _row(node: NodeSummary, sheet: Terminal) -> list[str]:
    held, whole = _held(node)
    cores, cores_held = sum(card.cores for card in node.cards), sum(card.cores_held for card in node.cards)
    return [
        node.name,
        models(node),
        _signs(node, sheet),
        f"{bar(_share(node), BAR, sheet.blocks)} {percent(held, whole):>5}" if node.cards else "",
        size(max(0, whole - held)) if node.cards else "",
        percent(cores_held, cores),
        str(len(node.pods)),
    ]


def models(node: NodeSummary) -> str:
    kinds = Counter(short_model(card.model) for card in node.cards)
    return " + ".join(f"{count} x {model}" for model, count in kinds.items()) or "-"


def _signs(node: NodeSummary, sheet: Terminal) -> str:
    return "".join(_sign(node, card, sheet) for card in node.cards)


def _sign(node: NodeSummary, card: CardSummary, sheet: Terminal) -> str:
    if card.state != "ok" or node.fault:
        return style("!", fg="red", bold=True)
    return level(card.share, sheet.blocks)


def _remark(node: NodeSummary) -> str:
    said = [node.fault] if node.fault else []
    out = Counter(card.state for card in node.cards if card.state != "ok")
    said += [f"{count} {state}" for state, count in out.items()]
    said += ["oversold"] * any(card.share > 1 for card in node.cards)
    said += ["cordoned"] * node.cordoned
    return style(", ".join(said), fg="red") if said else ""


def _waiting(found: ClusterSummary, sheet: Terminal) -> list[str]:
    if not found.waiting:
        return []
    first, more = found.waiting[:WAITING_SHOWN], len(found.waiting) - WAITING_SHOWN
    wide = (sheet.columns or 200) - 8
    names = [shortened(f"  {one.pod}{': ' * bool(one.refused)}{one.refused}", wide) for one in first]
    namespace, _, name = found.waiting[0].pod.partition("/")
    return [
        "",
        style(f"{_how_many(found)}{', the oldest' * (more > 0)}:", fg="yellow"),
        *names,
        *([f"  and {more:,} more"] if more > 0 else []),
        f"why: gputile explain {name} -n {namespace}",
    ]


def _how_many(found: ClusterSummary) -> str:
    """Those whose request itself is wrong wait for nothing; `audit` and `quota` count the others alone."""
    refused = sum(bool(one.refused) for one in found.waiting)
    waiting = len(found.waiting) - refused
    if not waiting:
        return f"{plural(refused, 'pod')} refused"
    return f"{plural(waiting, 'pod')} waiting for cards" + (f", {refused} refused" if refused else "")


# ---- one node -------------------------------------------------------------------------------------------------------


def node_lines(node: NodeSummary, sheet: Terminal, now: float, *, wide: bool) -> list[str]:
    """A bar per card, and under it who holds what of it."""
    agent = f"cards by {node.agent}'s agent" if node.agent else "no agent speaks for its cards"
    lines = [f"{style(node.name, bold=True)}  {node.address}  {models(node)}  ({agent})"]
    if node.fault or node.cordoned:
        said = ", ".join(part for part in (node.fault, "cordoned" if node.cordoned else "") if part)
        lines.append(style(f"out of use: {said}", fg="red"))
    heads, rows = _pod_rows(node, sheet, now)
    lines += ["", heads] if node.pods else [""]
    for number, card in enumerate(node.cards):
        if number and (card.pods or node.cards[number - 1].pods):
            lines.append("")
        lines += [*_card_lines(card, sheet, wide), *rows[card.uuid]]
    return lines


def _card_lines(card: CardSummary, sheet: Terminal, wide: bool) -> list[str]:
    long = 20 if not sheet.columns or sheet.columns >= 100 else 10
    memory = bar(card.memory_held / card.memory if card.memory else 0.0, long, sheet.blocks)
    held = f"{size(card.memory_held)} of {size(card.memory)}"
    head = f"GPU {card.index:<2} {memory} {percent(card.memory_held, card.memory):>5}  {held:<18}"
    lines = [f"{head}{card.cores_held:>3} % cores  {short_model(card.model)}"]
    if card.state != "ok":
        said = f"{card.state}: {card.reason}" if card.reason else card.state
        lines += [INDENT + style(line, fg="red") for line in wrapped(said, (sheet.columns or 120) - len(INDENT))]
    if wide:
        lines.append(f"{INDENT}{card.uuid}, {card.slots_held} of {card.slots} slots")
    return lines


def _pod_rows(node: NodeSummary, sheet: Terminal, now: float) -> tuple[str, dict[str, list[str]]]:
    """The header, and by card the lines of its pods; aligned over the whole node."""
    everyone = [(card.uuid, tenant) for card in node.cards for tenant in card.pods]
    header = ["POD", "MEMORY", "CORES", "AGE", "STATE", "BY"]
    rows = [_tenant(tenant, now) for _, tenant in everyone]
    if any(tenant.used_memory is not UNSET for _, tenant in everyone):
        header.append("USED")
        rows = [[*row, _used(tenant)] for row, (_, tenant) in zip(rows, everyone, strict=True)]
    first, *drawn = table(header, rows, right=(1, 2, 3), shrink={0: TAIL}, columns=sheet.columns, indent=len(INDENT))
    by_card: dict[str, list[str]] = {card.uuid: [] for card in node.cards}
    for (uuid, _), line in zip(everyone, drawn, strict=True):
        by_card[uuid].append(line)
    return first, by_card


def _tenant(tenant: CardTenant, now: float) -> list[str]:
    return [
        tenant.pod,
        size(tenant.memory),
        f"{tenant.cores} %" if tenant.cores else "-",
        age(tenant.since, now),
        "leaving" if tenant.going else tenant.phase or "-",
        tenant.by,
    ]


def _used(tenant: CardTenant) -> str:
    """What is not known is not zero."""
    memory = "?" if tenant.used_memory is UNSET else size(tenant.used_memory)
    return memory if tenant.utilisation is UNSET else f"{memory}, {tenant.utilisation} %"


def age(said: str, now: float) -> str:
    """Since then, as kubectl shows ages; `-` when nobody says."""
    try:
        return since(now - datetime.fromisoformat(said).timestamp())
    except ValueError:
        return "-"
