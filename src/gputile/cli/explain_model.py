"""One pod's story as a value: what it asks for, what it got or why it waits, and what was said about it.

Room:  pure; decides with the engine, on a book that was made for this question. Keys are a contract (docs/cli.md).
Door:  `account(pod, mirror, events, policy)`.
"""

from datetime import UTC, datetime
from typing import Any

import msgspec

from gputile.cli.pod_conditions import SeenPod
from gputile.cli.render.describe import constraint_lines, describe
from gputile.dialects.gputile import GRANT, granted_at
from gputile.dialects.registry import notes, read_pod
from gputile.engine.explanation import Change, Explanation, Miss, explain
from gputile.engine.fleet.fleet import Fleet
from gputile.ledger.events import Gone
from gputile.ledger.holders import Holders
from gputile.model.grants import Grant
from gputile.model.refusals import BadRequest
from gputile.model.requests import PodRequest
from gputile.model.units import MiB, Percent
from gputile.scheduler.state.cluster_state import Mirror

EVENTS_SHOWN = 6


class ReasonTold(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    text: str
    nodes: int
    would_fit_when_empty: int  # of them


class TileTold(msgspec.Struct, frozen=True, kw_only=True):
    container: str
    index: int
    uuid: str
    model: str
    memory: MiB
    cores: Percent
    neighbours: tuple[str, ...]  # other pods on that card


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """An Event."""

    at: str
    by: str
    reason: str
    message: str
    count: int


class Account(msgspec.Struct, frozen=True, kw_only=True):
    pod: str
    state: str  # "no-gpu", "refused", "waits", "fits" (and waits nevertheless), "placed", "unplaced" (holds GPUs
    # of its node, which ones is unknown), "ungranted", "over"
    dialect: str = ""
    asks: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    scheduler: str = ""
    priority: int = 0
    created: str = ""
    refusal: str = ""  # what is wrong with the request, and what to write instead
    # of one that waits
    nodes: int = 0
    fitting: int = 0
    fitting_on: tuple[str, ...] = ()
    reasons: tuple[ReasonTold, ...] = ()
    misses: tuple[Miss, ...] = ()  # nearest first
    changes: tuple[Change, ...] = ()  # each would let it fit
    quota: tuple[
        str, ...
    ] = ()  # which line of the namespace's quota stands in its way, and what to do; also of a placed
    # one, if other nodes would take it but for quota
    promised_on: str = ""  # where room is being made for it
    kube_scheduler: str = ""  # its own word, from the pod's status
    # of one that has its cards
    node: str = ""
    by: str = ""  # whose record says so: "gputile", or a dialect
    at: str = ""
    tiles: tuple[TileTold, ...] = ()
    unplaced: int = 0  # GPUs that it holds besides; which of its node's is unknown
    policy: str = ""
    alternatives: int = 0  # other nodes that would take it now
    rank: str = ""  # "best", "as good as the best", "another", or "" when it cannot be said
    best_now: str = ""
    events: tuple[Said, ...] = ()


def account(pod: SeenPod, mirror: Mirror, events: list[Any], policy: str) -> Account:
    asked = read_pod(pod, mirror.settings)
    base = Account(
        pod=pod.key,
        state="no-gpu",
        scheduler=(pod.spec and pod.spec.scheduler_name) or "default-scheduler",
        priority=pod.priority,
        created=(pod.metadata and pod.metadata.creation_timestamp) or "",
        kube_scheduler=_condition(pod),
        events=_told(events),
    )
    if isinstance(asked, PodRequest):
        wishes = [f"{ask.container}: {describe(ask)}" for ask in asked.asks if ask.cards]
        wishes += constraint_lines(asked.constraints)
        base = _with(base, dialect=asked.dialect, asks=tuple(wishes), warnings=notes(pod, asked))
    if pod.is_over:
        return _with(base, state="over", node=pod.node_name, refusal=(pod.status and pod.status.message) or "")
    if isinstance(asked, BadRequest) and not pod.node_name:
        return _with(base, state="refused", refusal=asked.message)
    if pod.node_name:
        return _placed(base, pod, asked if isinstance(asked, PodRequest) else None, mirror, policy)
    return base if asked is None or isinstance(asked, BadRequest) else _waiting(base, pod, asked, mirror)


def _with(told: Account, **more: Any) -> Account:
    return msgspec.structs.replace(told, **more)


# ---- waiting --------------------------------------------------------------------------------------------------------


def _waiting(base: Account, pod: SeenPod, asked: PodRequest, mirror: Mirror) -> Account:
    promised = mirror.ledger.promise(pod.uid)
    spending = mirror.ledger.spending
    with mirror.ledger.aside(pod.uid, pod.priority) as fleet:
        purse = spending.purse(pod.namespace, asked)
        after = lambda gone: purse([one.pod for one in gone])  # noqa: E731
        found = explain(purse(()), fleet, Holders(mirror.ledger), after=after)
        best = fleet.best(purse(())) if found.fitting else []
    return _with(
        base,
        state="fits" if found.fitting else "waits",
        nodes=found.nodes,
        fitting=found.fitting,
        fitting_on=tuple(best[:3]),
        reasons=_reasons(found),
        misses=found.misses,
        changes=found.changes,
        quota=tuple(spending.objections(pod.namespace, asked)),
        promised_on=promised.holding.node if promised is not None else "",
    )


def _reasons(found: Explanation) -> tuple[ReasonTold, ...]:
    return tuple(
        ReasonTold(code=one.code, text=one.sentence, nodes=one.nodes, would_fit_when_empty=one.curable)
        for one in found.reasons
    )


# ---- placed ---------------------------------------------------------------------------------------------------------


def _placed(base: Account, pod: SeenPod, asked: PodRequest | None, mirror: Mirror, policy: str) -> Account:
    entry = mirror.ledger.entry(pod.uid)
    grant = entry.holding.grant if entry is not None else None
    if asked is None and grant is None:
        return _with(base, node=pod.node_name)
    if grant is None:
        return _with(base, state="ungranted", node=pod.node_name)
    told = _with(
        base,
        state="placed" if grant.containers else "unplaced",
        unplaced=grant.unplaced,
        node=pod.node_name,
        by="gputile" if GRANT in pod.annotations else grant.dialect,
        at=_moment(pod),
        tiles=_tiles(pod, grant, mirror),
    )
    return told if asked is None else _compared(told, pod, asked, mirror, policy)


def _tiles(pod: SeenPod, grant: Grant, mirror: Mirror) -> tuple[TileTold, ...]:
    node = mirror.ledger.fleet.node(pod.node_name)
    models = {card.uuid: card.model for card in node.cards} if node is not None else {}
    others = [holder for holder in mirror.ledger.holders(pod.node_name) if holder.pod != pod.uid]
    return tuple(
        TileTold(
            container=held.container,
            index=tile.index,
            uuid=tile.uuid,
            model=models.get(tile.uuid, ""),
            memory=tile.memory,
            cores=tile.cores,
            neighbours=tuple(sorted(holder.name for holder in others if tile.uuid in holder.uses)),
        )
        for held in grant.containers
        for tile in held.tiles
    )


def _compared(told: Account, pod: SeenPod, asked: PodRequest, mirror: Mirror, policy: str) -> Account:
    """How the choice stands today: the pod is taken out of the (private) book, and the question is put again."""
    name = asked.constraints.node_policy or policy
    mirror.ledger.handle(Gone(pod.uid))
    fleet: Fleet = mirror.ledger.fleet
    may = mirror.ledger.spending.allowed(pod.namespace, asked)
    best = fleet.best(may, policy, keep=len(fleet))
    others, but_for_quota = (_other_nodes(fleet, wish, pod.node_name) for wish in (may, asked))
    rank = ""
    if best:
        first = len(best) == 1 and best[0] == pod.node_name
        rank = "best" if first else "as good as the best" if pod.node_name in best else "another"
    return _with(
        told,
        policy=name,
        alternatives=others,
        quota=tuple(mirror.ledger.spending.objections(pod.namespace, asked)) if but_for_quota > others else (),
        rank=rank,
        best_now=best[0] if rank == "another" else "",
    )


def _other_nodes(fleet: Fleet, asked: PodRequest, here: str) -> int:
    return int(fleet.fits(asked).sum()) - (not fleet.refusals(asked, [here]))


# ---- what was said --------------------------------------------------------------------------------------------------


def _moment(pod: SeenPod) -> str:
    at = granted_at(pod)
    return datetime.fromtimestamp(at / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if at > 0 else pod.bound_at


def _condition(pod: SeenPod) -> str:
    said = (pod.status and pod.status.conditions) or ()
    return next((one.message or "" for one in said if one.type == "PodScheduled" and one.status == "False"), "")


def _told(events: list[Any]) -> tuple[Said, ...]:
    found = [
        Said(
            at=str(event.get("lastTimestamp") or event.get("eventTime") or ""),
            by=str(event.get("reportingComponent") or (event.get("source") or {}).get("component") or ""),
            reason=str(event.get("reason") or ""),
            message=str(event.get("message") or ""),
            count=int(event.get("count") or (event.get("series") or {}).get("count") or 1),
        )
        for event in events
    ]
    return tuple(sorted(found, key=lambda said: said.at)[-EVENTS_SHOWN:])
