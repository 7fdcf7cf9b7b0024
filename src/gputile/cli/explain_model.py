"""One pod's story as a value: what it asks for, what it got or why it waits, and what was said about it.

Room:  pure; decides with the engine, on a book that was made for this question. Keys are a contract (docs/cli.md).
Door:  `explain_pod(pod, mirror, events, policy)`.
"""

from datetime import UTC, datetime
from typing import Any

import msgspec

from gputile.cli.pod_conditions import PodWithConditions
from gputile.cli.render.describe import constraint_lines, describe
from gputile.dialects.gputile import GRANT, granted_at
from gputile.dialects.registry import notes, read_pod
from gputile.engine.explanation import Explanation, NearMiss, SuggestedChange, explain
from gputile.engine.fleet.fleet import Fleet
from gputile.ledger.events import PodGone
from gputile.ledger.holders import NodeAllocations
from gputile.model.grants import Grant
from gputile.model.refusals import BadRequest
from gputile.model.requests import PodRequest
from gputile.model.units import MiB, Percent
from gputile.scheduler.state.cluster_state import ClusterState

EVENTS_SHOWN = 6


class ReasonCount(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    text: str
    nodes: int
    would_fit_when_empty: int  # of them


class TileShown(msgspec.Struct, frozen=True, kw_only=True):
    container: str
    index: int
    uuid: str
    model: str
    memory: MiB
    cores: Percent
    neighbours: tuple[str, ...]  # other pods on that card


class PodEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An Event."""

    at: str
    by: str
    reason: str
    message: str
    count: int


class PodExplanation(msgspec.Struct, frozen=True, kw_only=True):
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
    reasons: tuple[ReasonCount, ...] = ()
    misses: tuple[NearMiss, ...] = ()  # nearest first
    changes: tuple[SuggestedChange, ...] = ()  # each would let it fit
    quota: tuple[
        str, ...
    ] = ()  # which line of the namespace's quota stands in its way, and what to do; also of a placed
    # one, if other nodes would take it but for quota
    nominated_on: str = ""  # where room is being made for it
    kube_scheduler: str = ""  # its own word, from the pod's status
    # of one that has its cards
    node: str = ""
    by: str = ""  # whose record says so: "gputile", or a dialect
    at: str = ""
    tiles: tuple[TileShown, ...] = ()
    unplaced: int = 0  # GPUs that it holds besides; which of its node's is unknown
    policy: str = ""
    alternatives: int = 0  # other nodes that would take it now
    rank: str = ""  # "best", "as good as the best", "another", or "" when it cannot be said
    best_now: str = ""
    events: tuple[PodEvent, ...] = ()


def explain_pod(pod: PodWithConditions, cluster_state: ClusterState, events: list[Any], policy: str) -> PodExplanation:
    asked = read_pod(pod, cluster_state.settings)
    base = PodExplanation(
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
    if pod.is_terminal:
        return _with(base, state="over", node=pod.node_name, refusal=(pod.status and pod.status.message) or "")
    if isinstance(asked, BadRequest) and not pod.node_name:
        return _with(base, state="refused", refusal=asked.message)
    if pod.node_name:
        return _placed(base, pod, asked if isinstance(asked, PodRequest) else None, cluster_state, policy)
    return base if asked is None or isinstance(asked, BadRequest) else _waiting(base, pod, asked, cluster_state)


def _with(told: PodExplanation, **more: Any) -> PodExplanation:
    return msgspec.structs.replace(told, **more)


# ---- waiting --------------------------------------------------------------------------------------------------------


def _waiting(
    base: PodExplanation, pod: PodWithConditions, asked: PodRequest, cluster_state: ClusterState
) -> PodExplanation:
    nominated = cluster_state.ledger.nomination(pod.uid)
    quota_usage = cluster_state.ledger.quota_usage
    with cluster_state.ledger.without_claims_of(pod.uid, pod.priority) as fleet:
        after_eviction = quota_usage.after_eviction(pod.namespace, asked)
        after = lambda gone: after_eviction([one.pod for one in gone])  # noqa: E731
        found = explain(after_eviction(()), fleet, NodeAllocations(cluster_state.ledger), after=after)
        best = fleet.best(after_eviction(())) if found.fitting else []
    return _with(
        base,
        state="fits" if found.fitting else "waits",
        nodes=found.nodes,
        fitting=found.fitting,
        fitting_on=tuple(best[:3]),
        reasons=_reasons(found),
        misses=found.misses,
        changes=found.changes,
        quota=tuple(quota_usage.objections(pod.namespace, asked)),
        nominated_on=nominated.allocation.node if nominated is not None else "",
    )


def _reasons(found: Explanation) -> tuple[ReasonCount, ...]:
    return tuple(
        ReasonCount(code=one.code, text=one.sentence, nodes=one.nodes, would_fit_when_empty=one.resolvable)
        for one in found.reasons
    )


# ---- placed ---------------------------------------------------------------------------------------------------------


def _placed(
    base: PodExplanation, pod: PodWithConditions, asked: PodRequest | None, cluster_state: ClusterState, policy: str
) -> PodExplanation:
    entry = cluster_state.ledger.entry(pod.uid)
    grant = entry.allocation.grant if entry is not None else None
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
        tiles=_tiles(pod, grant, cluster_state),
    )
    return told if asked is None else _compared(told, pod, asked, cluster_state, policy)


def _tiles(pod: PodWithConditions, grant: Grant, cluster_state: ClusterState) -> tuple[TileShown, ...]:
    node = cluster_state.ledger.fleet.node(pod.node_name)
    models = {card.uuid: card.model for card in node.cards} if node is not None else {}
    others = [holder for holder in cluster_state.ledger.holders(pod.node_name) if holder.pod != pod.uid]
    return tuple(
        TileShown(
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


def _compared(
    told: PodExplanation, pod: PodWithConditions, asked: PodRequest, cluster_state: ClusterState, policy: str
) -> PodExplanation:
    """How the choice stands today: the pod is taken out of the (private) book, and the question is put again."""
    name = asked.constraints.node_policy or policy
    cluster_state.ledger.handle(PodGone(pod.uid))
    fleet: Fleet = cluster_state.ledger.fleet
    may = cluster_state.ledger.quota_usage.allowed(pod.namespace, asked)
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
        quota=tuple(cluster_state.ledger.quota_usage.objections(pod.namespace, asked))
        if but_for_quota > others
        else (),
        rank=rank,
        best_now=best[0] if rank == "another" else "",
    )


def _other_nodes(fleet: Fleet, asked: PodRequest, here: str) -> int:
    return int(fleet.fits(asked).sum()) - (not fleet.refusals(asked, [here]))


# ---- what was said --------------------------------------------------------------------------------------------------


def _moment(pod: PodWithConditions) -> str:
    at = granted_at(pod)
    return datetime.fromtimestamp(at / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if at > 0 else pod.bound_at


def _condition(pod: PodWithConditions) -> str:
    said = (pod.status and pod.status.conditions) or ()
    return next((one.message or "" for one in said if one.type == "PodScheduled" and one.status == "False"), "")


def _told(events: list[Any]) -> tuple[PodEvent, ...]:
    found = [
        PodEvent(
            at=str(event.get("lastTimestamp") or event.get("eventTime") or ""),
            by=str(event.get("reportingComponent") or (event.get("source") or {}).get("component") or ""),
            reason=str(event.get("reason") or ""),
            message=str(event.get("message") or ""),
            count=int(event.get("count") or (event.get("series") or {}).get("count") or 1),
        )
        for event in events
    ]
    return tuple(sorted(found, key=lambda said: said.at)[-EVENTS_SHOWN:])
