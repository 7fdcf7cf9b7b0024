"""A `ClusterSummary` as lines of text, for `top` and `inspect`.

Pure but for colours; the width comes with the terminal. A node takes one line however many GPUs it has, so that a
cluster of 500 nodes is still a readable list.
"""

from collections import Counter
from collections.abc import Callable

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
from gputile.model.units import unix_seconds

UNKNOWN = "unknown"
BAR = 10
MAKER = "NVIDIA "
PENDING_SHOWN = 3
INDENT = " " * 7


def short_model(model: str) -> str:
    """The model without the maker's name."""
    return model.removeprefix(MAKER) or UNKNOWN


# ---- the cluster ----------------------------------------------------------------------------------------------------


def cluster_lines(summary: ClusterSummary, sheet: Terminal, order: str, *, wide: bool) -> list[str]:
    """Sums, models, nodes and pending pods."""
    if not summary.nodes:
        return _without_gpus(summary, sheet)
    lines = [*_head(summary, sheet), ""]
    if len(summary.models) > 1:
        lines += [*_models(summary, sheet), ""]
    lines += _nodes(summary, sheet, order, wide)
    return lines + _pending(summary, sheet)


def _without_gpus(summary: ClusterSummary, sheet: Terminal) -> list[str]:
    lines = [f"No GPUs: none of {plural(summary.nodes_without_cards, 'node')} publishes any."]
    lines.append("GPUs are published by the agent of gputile, HAMi, gpushare, nano, vcuda, vgpu-manager or NVIDIA.")
    lines.append("If there should be some: `gputile doctor` looks for the reason.")
    return [*lines, *_pending(summary, sheet)]


def _head(summary: ClusterSummary, sheet: Terminal) -> list[str]:
    total = summary.cluster
    others = f", {summary.nodes_without_cards:,} more without" if summary.nodes_without_cards else ""
    pods = f"{plural(total.pods, 'pod')} on them"
    lines = [f"{plural(total.nodes, 'node')} with {plural(total.cards, 'GPU')}{others}; {pods}"]
    wide = 40 if not sheet.columns else max(10, min(40, sheet.columns - 40))
    memory = f"{size(total.memory_held)} of {size(total.memory)}"
    cores = f"{total.cores_held / 100:g} of {total.cores / 100:g} GPUs"
    for name, held, whole, text in (
        ("memory", total.memory_held, total.memory, memory),
        ("cores", total.cores_held, total.cores, cores),
    ):
        drawn = bar(held / whole if whole else 0.0, wide, sheet.blocks)
        lines.append(f"  {name:<7}{drawn} {percent(held, whole):>5}  {text}")
    lines.append(f"  {'GPUs':<7}{_kinds(total)}")
    if summary.findings:
        lines.append(style(f"  {plural(summary.findings, 'problem')} found: see `gputile audit`", fg="red"))
    return lines


def _kinds(total: SummaryTotals) -> str:
    parts = [f"{total.idle:,} idle", f"{total.shared:,} partly allocated", f"{total.full:,} full"]
    if total.out_of_use:
        parts.append(style(f"{total.out_of_use:,} out of use", fg="red"))
    return ", ".join(parts)


def _models(summary: ClusterSummary, sheet: Terminal) -> list[str]:
    rows = [
        [
            short_model(model),
            f"{total.cards:,}",
            f"{total.idle:,}",
            f"{bar(total.memory_held / total.memory if total.memory else 0, BAR, sheet.blocks)} "
            f"{percent(total.memory_held, total.memory):>5}",
            size(total.memory - total.memory_held),
        ]
        for model, total in summary.models.items()
    ]
    header = ["MODEL", "GPUS", "IDLE", "MEMORY", "FREE"]
    return table(header, rows, right=(1, 2, 4), shrink={0: 0}, columns=sheet.columns)


def _nodes(summary: ClusterSummary, sheet: Terminal, order: str, wide: bool) -> list[str]:
    nodes = sorted(summary.nodes, key=ORDER[order])
    header = ["NODE", "MODEL", "GPUS", "MEMORY", "FREE", "CORES", "PODS"]
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
    remarks = [node.fault] if node.fault else []
    out_of_use = Counter(card.state for card in node.cards if card.state != "ok")
    remarks += [f"{count} {state}" for state, count in out_of_use.items()]
    remarks += ["overcommitted"] * any(card.share > 1 for card in node.cards)
    remarks += ["cordoned"] * node.cordoned
    return style(", ".join(remarks), fg="red") if remarks else ""


def _pending(summary: ClusterSummary, sheet: Terminal) -> list[str]:
    if not summary.waiting:
        return []
    first, more = summary.waiting[:PENDING_SHOWN], len(summary.waiting) - PENDING_SHOWN
    wide = (sheet.columns or 200) - 8
    names = [shortened(f"  {pod.pod}{': ' * bool(pod.refused)}{pod.refused}", wide) for pod in first]
    namespace, _, name = summary.waiting[0].pod.partition("/")
    return [
        "",
        style(f"{_pending_count(summary)}{', the oldest' * (more > 0)}:", fg="yellow"),
        *names,
        *([f"  and {more:,} more"] if more > 0 else []),
        f"why: gputile explain {name} -n {namespace}",
    ]


def _pending_count(summary: ClusterSummary) -> str:
    """A pod whose request is invalid is counted as refused; `audit` and `quota` count the pending ones alone."""
    refused = sum(bool(pod.refused) for pod in summary.waiting)
    pending = len(summary.waiting) - refused
    if not pending:
        return f"{plural(refused, 'pod')} refused"
    return f"{plural(pending, 'pod')} pending" + (f", {refused} refused" if refused else "")


# ---- one node -------------------------------------------------------------------------------------------------------


def node_lines(node: NodeSummary, sheet: Terminal, now: float, *, wide: bool) -> list[str]:
    """A bar per GPU, and under it the pods that hold a share of it."""
    agent = f"GPUs published by {node.agent}'s agent" if node.agent else "no agent publishes GPUs"
    lines = [f"{style(node.name, bold=True)}  {node.address}  {models(node)}  ({agent})"]
    if node.fault or node.cordoned:
        reasons = ", ".join(part for part in (node.fault, "cordoned" if node.cordoned else "") if part)
        lines.append(style(f"out of use: {reasons}", fg="red"))
    header, rows = _pod_rows(node, sheet, now)
    lines += ["", header] if node.pods else [""]
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
        text = f"{card.state}: {card.reason}" if card.reason else card.state
        lines += [INDENT + style(line, fg="red") for line in wrapped(text, (sheet.columns or 120) - len(INDENT))]
    if wide:
        lines.append(f"{INDENT}{card.uuid}, {card.slots_held} of {card.slots} slots")
    return lines


def _pod_rows(node: NodeSummary, sheet: Terminal, now: float) -> tuple[str, dict[str, list[str]]]:
    """The header, and by card the lines of its pods; aligned over the whole node."""
    tenants = [(card.uuid, tenant) for card in node.cards for tenant in card.pods]
    header = ["POD", "MEMORY", "CORES", "AGE", "STATE", "BY"]
    rows = [_tenant(tenant, now) for _, tenant in tenants]
    if any(tenant.used_memory is not UNSET for _, tenant in tenants):
        header.append("USED")
        rows = [[*row, _used(tenant)] for row, (_, tenant) in zip(rows, tenants, strict=True)]
    first, *drawn = table(header, rows, right=(1, 2, 3), shrink={0: TAIL}, columns=sheet.columns, indent=len(INDENT))
    by_card: dict[str, list[str]] = {card.uuid: [] for card in node.cards}
    for (uuid, _), line in zip(tenants, drawn, strict=True):
        by_card[uuid].append(line)
    return first, by_card


def _tenant(tenant: CardTenant, now: float) -> list[str]:
    return [
        tenant.pod,
        size(tenant.memory),
        f"{tenant.cores} %" if tenant.cores else "-",
        age(tenant.since, now),
        "terminating" if tenant.going else tenant.phase or "-",
        tenant.by,
    ]


def _used(tenant: CardTenant) -> str:
    """An unknown value is shown as `?`, never as zero."""
    memory = "?" if tenant.used_memory is UNSET else size(tenant.used_memory)
    return memory if tenant.utilisation is UNSET else f"{memory}, {tenant.utilisation} %"


def age(timestamp: str, now: float) -> str:
    """The time since then, as kubectl shows ages; `-` when unknown."""
    then = unix_seconds(timestamp)
    return "-" if then is None else since(now - then)
