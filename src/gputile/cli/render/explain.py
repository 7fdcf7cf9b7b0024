"""A pod's `PodExplanation` as lines for a person: first the answer, then the figures, then what to do."""

from gputile.cli.explain_model import PodExplanation, ReasonCount, TileShown
from gputile.cli.output import style
from gputile.cli.render.cluster import age, short_model
from gputile.cli.render.terminal import Terminal, plural, size, table, wrapped
from gputile.model.refusals import NodeReason

MISSES, MORE_MISSES = 3, 20
TEXT = 100  # columns of running text, at most


def lines_of(told: PodExplanation, sheet: Terminal, now: float, *, wide: bool) -> list[str]:
    lines = [_headline(told, now), ""]
    if told.asks:
        lines += _section("asks", [f"{told.asks[0]} ({told.dialect})", *told.asks[1:]], sheet)
    lines += [line for warning in told.warnings for line in _section("note", [warning], sheet)]
    lines += {
        "no-gpu": _plain,
        "refused": _refused,
        "waits": _waits,
        "fits": _fits,
        "placed": _placed,
        "unplaced": _unplaced,
        "ungranted": _ungranted,
        "over": _over,
    }[told.state](told, sheet, wide)
    return lines + _events(told, sheet, now)


def _headline(told: PodExplanation, now: float) -> str:
    name = style(told.pod, bold=True)
    since = age(told.created, now)
    waits = f" since {since}" if since != "-" else ""
    words = {
        "no-gpu": "asks for no GPU",
        "refused": style("cannot be placed anywhere", fg="red") + ": the request itself is wrong",
        "waits": style(f"waits{waits}", fg="yellow") + f": {_none_fits(told.nodes)}",
        "fits": style(f"waits{waits}", fg="yellow") + f", though {plural(told.fitting, 'node')} would fit now",
        "placed": style(f"is on {told.node}", fg="green"),
        "unplaced": style(f"is on {told.node}", fg="yellow") + f" and holds {plural(told.unplaced, 'GPU')} of it",
        "ungranted": style(f"is on {told.node} without cards", fg="red") + ": nobody has granted it any",
        "over": "is over",
    }
    return f"{name} {words[told.state]}"


def _none_fits(nodes: int) -> str:
    return (
        f"none of {nodes:,} nodes fits" if nodes > 1 else "the only node does not fit" if nodes else "no node is known"
    )


def _section(name: str, texts: list[str], sheet: Terminal) -> list[str]:
    """A word in the margin and text beside it."""
    wide = min(sheet.columns or TEXT, TEXT) - 15
    lines = [line for text in texts for line in wrapped(text, max(wide, 40), "  ")]
    return [f"  {name if number == 0 else '':<13}{line}" for number, line in enumerate(lines)]


# ---- by state -------------------------------------------------------------------------------------------------------


def _plain(told: PodExplanation, sheet: Terminal, wide: bool) -> list[str]:
    said = told.kube_scheduler or (f"it is on {told.node}" if told.node else "kube-scheduler alone places it")
    return _section("so", [said], sheet)


def _refused(told: PodExplanation, sheet: Terminal, wide: bool) -> list[str]:
    return _section("wrong", [told.refusal], sheet)


def _waits(told: PodExplanation, sheet: Terminal, wide: bool) -> list[str]:
    lines = []
    if told.nominated_on:
        lines += _section(
            "soon", [f"room is being made on {told.nominated_on}: less important pods are leaving"], sheet
        )
    reasons = [f"{one.nodes} {one.text}{_if_empty(one)}" for one in told.reasons]
    lines += _section("because", reasons or ["no node is known; add one with GPUs, or see that its agent runs"], sheet)
    near = [miss for miss in told.misses if miss.code is not NodeReason.NO_CARDS]
    shown = [f"{miss.node}: {miss.text}" for miss in near[: MORE_MISSES if wide else MISSES]]
    lines += _section("nearest", shown, sheet)
    if told.quota:
        lines += _section("quota", list(told.quota), sheet)
    if told.changes:
        lines += _section("would fit", [f"{change.text}" for change in told.changes], sheet)
    elif told.nodes and not told.quota:
        lines += _section("would fit", ["nothing smaller; add a node that has such cards"], sheet)
    return lines + _kube_scheduler(told, sheet)


def _if_empty(reason: ReasonCount) -> str:
    """Whether it is others who are in the way, or the node itself."""
    if not reason.would_fit_when_empty:
        return ""
    some = f"{reason.would_fit_when_empty} of them" if reason.would_fit_when_empty < reason.nodes else "all"
    return f" ({some if reason.nodes > 1 else 'it'} would fit if empty)"


def _fits(told: PodExplanation, sheet: Terminal, wide: bool) -> list[str]:
    others = f" and {told.fitting - len(told.fitting_on)} more" if told.fitting > len(told.fitting_on) else ""
    lines = _section("cards", [f"there is room on {', '.join(told.fitting_on)}{others}"], sheet)
    why = "taints, affinity or another of kube-scheduler's own rules may forbid it, or it was not asked yet"
    lines += _section("so", [f"{why}; it is {told.scheduler} that has to try. `gputile doctor` looks at it"], sheet)
    return lines + _kube_scheduler(told, sheet)


def _kube_scheduler(told: PodExplanation, sheet: Terminal) -> list[str]:
    return _section("kube-sched.", [told.kube_scheduler], sheet) if told.kube_scheduler else []


def _placed(told: PodExplanation, sheet: Terminal, wide: bool) -> list[str]:
    header = ["CONTAINER", "GPU", "MODEL", "MEMORY", "CORES", "SHARED WITH"] + ["UUID"] * wide
    rows = [[*_tile(tile, wide), *([tile.uuid] * wide)] for tile in told.tiles]
    lines = ["", *table(header, rows, right=(1, 3, 4), shrink={2: 0, 5: 0}, columns=sheet.columns, indent=2), ""]
    when = f", {told.at}" if told.at else ""
    lines += _section("granted", [f"by {told.by}{when}"], sheet)
    if told.policy:
        lines += _section("why there", [_why(told)], sheet)
    return lines + _section("quota", list(told.quota), sheet)


def _tile(tile: TileShown, wide: bool) -> list[str]:
    few = tile.neighbours if wide else tile.neighbours[:2]
    more = f" +{len(tile.neighbours) - len(few)}" if len(tile.neighbours) > len(few) else ""
    return [
        tile.container,
        str(tile.index),
        short_model(tile.model),
        size(tile.memory),
        f"{tile.cores} %" if tile.cores else "-",
        ", ".join(few) + more or "nobody",
    ]


def _why(told: PodExplanation) -> str:
    others = f"{plural(told.alternatives, 'other node')} would take it now"
    if not told.alternatives:
        return f"no other node would take it now{', for quota stands in the way' * bool(told.quota)}"
    verdict = {
        "best": f"and under {told.policy} it is the best",
        "as good as the best": f"and under {told.policy} none is better",
        "another": f"and today {told.policy} would choose {told.best_now}; when it came the cluster was another",
        "": "but this node itself would not, as it is now",
    }[told.rank]
    return f"{others}, {verdict}"


def _unplaced(told: PodExplanation, sheet: Terminal, wide: bool) -> list[str]:
    why = "no record on the pod can be read, so which GPUs they are is unknown; new pods get no more than is left"
    return _section("so", [f"another system's agent serves the node; {why}"], sheet)


def _ungranted(told: PodExplanation, sheet: Terminal, wide: bool) -> list[str]:
    todo = "the leading gputile scheduler grants cards to such pods within a second; see `gputile doctor`"
    return _section("so", [f"it was bound around gputile, by {told.scheduler}; {todo}"], sheet)


def _over(told: PodExplanation, sheet: Terminal, wide: bool) -> list[str]:
    return _section("so", [told.refusal or f"it ended on {told.node or 'no node'} and holds nothing"], sheet)


def _events(told: PodExplanation, sheet: Terminal, now: float) -> list[str]:
    if not told.events:
        return []
    lines = ["", style("  events", bold=True)]
    for said in told.events:
        often = f", {said.count}x" if said.count > 1 else ""
        head = f"{age(said.at, now):>5}  {said.reason} ({said.by or 'unknown'}{often})"
        wrap = min(sheet.columns or TEXT, TEXT) - 9
        lines += [f"  {head}", *(f"         {line}" for line in wrapped(said.message, max(wrap, 40)))]
    return lines
