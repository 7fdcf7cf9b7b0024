"""A `PodExplanation` as lines of text: first the answer, then the numbers, then what to do."""

from gputile.cli.explain_model import PodExplanation, ReasonCount, TileShown
from gputile.cli.output import style
from gputile.cli.render.cluster import age, short_model
from gputile.cli.render.terminal import Terminal, plural, size, table, wrapped
from gputile.model.refusals import NodeReason

MISSES, MORE_MISSES = 3, 20
TEXT = 100  # columns of running text, at most


def lines_of(explanation: PodExplanation, sheet: Terminal, now: float, *, wide: bool) -> list[str]:
    """The whole explanation; the middle part depends on the pod's state."""
    lines = [_headline(explanation, now), ""]
    if explanation.asks:
        first, *more = explanation.asks
        lines += _section("requests", [f"{first} ({explanation.dialect})", *more], sheet)
    lines += [line for warning in explanation.warnings for line in _section("note", [warning], sheet)]
    lines += {
        "no-gpu": _without_gpu,
        "refused": _refused,
        "unschedulable": _pending,
        "fits": _fits,
        "placed": _placed,
        "unplaced": _unplaced,
        "ungranted": _ungranted,
        "over": _ended,
    }[explanation.state](explanation, sheet, wide)
    return lines + _events(explanation, sheet, now)


def _headline(explanation: PodExplanation, now: float) -> str:
    name, node = style(explanation.pod, bold=True), explanation.node
    since = age(explanation.created, now)
    pending = style(f"is pending{f' for {since}' if since != '-' else ''}", fg="yellow")
    answers = {
        "no-gpu": "requests no GPU",
        "refused": style("cannot be placed on any node", fg="red") + ": the request itself is invalid",
        "unschedulable": f"{pending}: {_no_node_fits(explanation.nodes)}",
        "fits": f"{pending}, although {plural(explanation.fitting, 'node')} would fit now",
        "placed": style(f"is on {node}", fg="green"),
        "unplaced": style(f"is on {node}", fg="yellow") + f" and holds {plural(explanation.unplaced, 'GPU')} of it",
        "ungranted": style(f"is on {node} without GPUs", fg="red") + ": it has no grant",
        "over": "has ended",
    }
    return f"{name} {answers[explanation.state]}"


def _no_node_fits(nodes: int) -> str:
    """In kube-scheduler's words."""
    return f"0/{nodes} nodes are available" if nodes else "no GPU node is known"


def _section(name: str, texts: list[str], sheet: Terminal) -> list[str]:
    """A word in the margin and text beside it."""
    wide = min(sheet.columns or TEXT, TEXT) - 15
    lines = [line for text in texts for line in wrapped(text, max(wide, 40), "  ")]
    return [f"  {name if number == 0 else '':<13}{line}" for number, line in enumerate(lines)]


# ---- by state -------------------------------------------------------------------------------------------------------


def _without_gpu(explanation: PodExplanation, sheet: Terminal, wide: bool) -> list[str]:
    node = explanation.node
    text = explanation.kube_scheduler or (f"it is on {node}" if node else "kube-scheduler alone places it")
    return _section("status", [text], sheet)


def _refused(explanation: PodExplanation, sheet: Terminal, wide: bool) -> list[str]:
    return _section("error", [explanation.refusal], sheet)


def _pending(explanation: PodExplanation, sheet: Terminal, wide: bool) -> list[str]:
    lines = []
    if explanation.nominated_on:
        text = f"nominated to {explanation.nominated_on}: pods of lower priority are being evicted there"
        lines += _section("preemption", [text], sheet)
    reasons = [f"{reason.nodes} {reason.text}{_if_empty(reason)}" for reason in explanation.reasons]
    lines += _section("reasons", reasons or ["no node is known; add one with GPUs, or start its agent"], sheet)
    near = [miss for miss in explanation.misses if miss.code is not NodeReason.NO_CARDS]
    shown = [f"{miss.node}: {miss.text}" for miss in near[: MORE_MISSES if wide else MISSES]]
    lines += _section("nearest", shown, sheet)
    if explanation.quota:
        lines += _section("quota", list(explanation.quota), sheet)
    if explanation.changes:
        lines += _section("would fit", [f"{change.text}" for change in explanation.changes], sheet)
    elif explanation.nodes and not explanation.quota:
        lines += _section("would fit", ["nothing smaller; add a node that has such GPUs"], sheet)
    return lines + _kube_scheduler(explanation, sheet)


def _if_empty(reason: ReasonCount) -> str:
    """Whether other pods are in the way, or the node itself does not fit."""
    if not reason.would_fit_when_empty:
        return ""
    some = f"{reason.would_fit_when_empty} of them" if reason.would_fit_when_empty < reason.nodes else "all"
    return f" ({some if reason.nodes > 1 else 'it'} would fit if empty)"


def _fits(explanation: PodExplanation, sheet: Terminal, wide: bool) -> list[str]:
    nodes, scheduler = explanation.fitting_on, explanation.scheduler
    others = f" and {explanation.fitting - len(nodes)} more" if explanation.fitting > len(nodes) else ""
    lines = _section("free", [f"the GPUs of {', '.join(nodes)}{others} have enough free capacity"], sheet)
    why = "taints, affinity or another rule of kube-scheduler may forbid these nodes, or it has not tried yet"
    lines += _section("next", [f"{why}; {scheduler} has to schedule the pod. `gputile doctor` checks it"], sheet)
    return lines + _kube_scheduler(explanation, sheet)


def _kube_scheduler(explanation: PodExplanation, sheet: Terminal) -> list[str]:
    message = explanation.kube_scheduler
    return _section("kube-sched.", [message], sheet) if message else []


def _placed(explanation: PodExplanation, sheet: Terminal, wide: bool) -> list[str]:
    header = ["CONTAINER", "GPU", "MODEL", "MEMORY", "CORES", "SHARED WITH"] + ["UUID"] * wide
    rows = [[*_tile(tile, wide), *([tile.uuid] * wide)] for tile in explanation.tiles]
    lines = ["", *table(header, rows, right=(1, 3, 4), shrink={2: 0, 5: 0}, columns=sheet.columns, indent=2), ""]
    when = f", {explanation.at}" if explanation.at else ""
    lines += _section("granted", [f"by {explanation.by}{when}"], sheet)
    if explanation.policy:
        lines += _section("why there", [_why(explanation)], sheet)
    return lines + _section("quota", list(explanation.quota), sheet)


def _tile(tile: TileShown, wide: bool) -> list[str]:
    few = tile.neighbours if wide else tile.neighbours[:2]
    more = f" +{len(tile.neighbours) - len(few)}" if len(tile.neighbours) > len(few) else ""
    return [
        tile.container,
        str(tile.index),
        short_model(tile.model),
        size(tile.memory),
        f"{tile.cores} %" if tile.cores else "-",
        ", ".join(few) + more or "-",
    ]


def _why(explanation: PodExplanation) -> str:
    policy = explanation.policy
    others = f"{plural(explanation.alternatives, 'other node')} would fit now"
    if not explanation.alternatives:
        return f"no other node would fit now{', because of quota' * bool(explanation.quota)}"
    verdict = {
        "best": f"and {policy} ranks this node best",
        "as good as the best": f"and {policy} ranks none of them higher",
        "another": f"and {policy} would choose {explanation.best_now} today; the cluster has changed since",
        "": "but this node itself would not fit as it is now",
    }[explanation.rank]
    return f"{others}, {verdict}"


def _unplaced(explanation: PodExplanation, sheet: Terminal, wide: bool) -> list[str]:
    why = "the pod has no readable record, so which GPUs it holds is unknown; new pods get no more than is left"
    return _section("note", [f"another system's agent serves the node; {why}"], sheet)


def _ungranted(explanation: PodExplanation, sheet: Terminal, wide: bool) -> list[str]:
    advice = "gputile's leader grants GPUs to such pods within a second; see `gputile doctor`"
    return _section("next", [f"it was bound by another scheduler, {explanation.scheduler}; {advice}"], sheet)


def _ended(explanation: PodExplanation, sheet: Terminal, wide: bool) -> list[str]:
    text = explanation.refusal or f"it ended on {explanation.node or 'no node'} and holds no GPU"
    return _section("status", [text], sheet)


def _events(explanation: PodExplanation, sheet: Terminal, now: float) -> list[str]:
    if not explanation.events:
        return []
    lines = ["", style("  events", bold=True)]
    for event in explanation.events:
        count = f", {event.count}x" if event.count > 1 else ""
        head = f"{age(event.at, now):>5}  {event.reason} ({event.by or 'unknown'}{count})"
        wrap = min(sheet.columns or TEXT, TEXT) - 9
        lines += [f"  {head}", *(f"         {line}" for line in wrapped(event.message, max(wrap, 40)))]
    return lines
