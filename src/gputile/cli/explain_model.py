"""The explanation of one pod as a value: what it requests, where it is or why it is pending, and its events.

Pure functions; the engine decides, on a ledger that was built for this question alone. Field names are the JSON keys of
docs/cli.md: they are only ever added.
"""

from datetime import UTC, datetime
from typing import Any

import msgspec

from gputile.cli.pod_conditions import PodWithConditions
from gputile.cli.render.describe import constraint_lines, describe
from gputile.dialects.gputile import GRANT, granted_at
from gputile.dialects.registry import notes, read_pod
from gputile.engine.cooperative import run_to_end
from gputile.engine.explanation import Explanation, NearMiss, SuggestedChange
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
    """A reason, and the number of nodes that it rules out."""

    code: str
    text: str
    nodes: int
    would_fit_when_empty: int  # of them


class TileShown(msgspec.Struct, frozen=True, kw_only=True):
    """What one container of the pod holds of one card."""

    container: str
    index: int
    uuid: str
    model: str
    memory: MiB
    cores: Percent
    neighbours: tuple[str, ...]  # other pods on that card


class PodEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An Event of the pod, as far as it is shown."""

    at: str
    by: str
    reason: str
    message: str
    count: int


class PodExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `gputile explain` shows of a pod."""

    pod: str
    state: str  # "no-gpu", "refused", "unschedulable" (pending, no node fits), "fits" (pending, though a node fits),
    # "placed", "unplaced" (holds GPUs of its node, which ones is unknown), "ungranted", "over"
    dialect: str = ""
    asks: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    scheduler: str = ""
    priority: int = 0
    created: str = ""
    refusal: str = ""  # what is wrong with the request, and what to write instead
    # of a pending pod
    nodes: int = 0
    fitting: int = 0
    fitting_on: tuple[str, ...] = ()
    reasons: tuple[ReasonCount, ...] = ()
    misses: tuple[NearMiss, ...] = ()  # nearest first
    changes: tuple[SuggestedChange, ...] = ()  # each would make it fit
    quota: tuple[str, ...] = ()  # the limits of the namespace's quota that reject it, and what to do; also of a placed
    # pod, if other nodes fit but for quota
    nominated_on: str = ""  # the node where pods are evicted for it
    kube_scheduler: str = ""  # kube-scheduler's own message, from the pod's status
    # of a placed pod
    node: str = ""
    by: str = ""  # the record that names its cards: "gputile", or a dialect
    at: str = ""
    tiles: tuple[TileShown, ...] = ()
    unplaced: int = 0  # further GPUs that it holds; which of its node's is unknown
    policy: str = ""
    alternatives: int = 0  # other nodes that fit now
    rank: str = ""  # "best", "as good as the best", "another", or "" when unknown
    best_now: str = ""
    events: tuple[PodEvent, ...] = ()


def explain_pod(pod: PodWithConditions, cluster_state: ClusterState, events: list[Any], policy: str) -> PodExplanation:
    """Explain the pod by the cluster state as it is now, under the given node policy."""
    request = read_pod(pod, cluster_state.settings)
    base = PodExplanation(
        pod=pod.key,
        state="no-gpu",
        scheduler=(pod.spec and pod.spec.scheduler_name) or "default-scheduler",
        priority=pod.priority,
        created=(pod.metadata and pod.metadata.creation_timestamp) or "",
        kube_scheduler=_unschedulable_message(pod),
        events=_pod_events(events),
    )
    if isinstance(request, PodRequest):
        asks = [f"{ask.container}: {describe(ask)}" for ask in request.asks if ask.cards]
        asks += constraint_lines(request.constraints)
        base = _with(base, dialect=request.dialect, asks=tuple(asks), warnings=notes(pod, request))
    if pod.is_terminal:
        return _with(base, state="over", node=pod.node_name, refusal=(pod.status and pod.status.message) or "")
    if isinstance(request, BadRequest) and not pod.node_name:
        return _with(base, state="refused", refusal=request.message)
    if pod.node_name:
        return _explain_placed(base, pod, request if isinstance(request, PodRequest) else None, cluster_state, policy)
    if request is None or isinstance(request, BadRequest):
        return base
    return _explain_pending(base, pod, request, cluster_state)


def _with(explanation: PodExplanation, **fields: Any) -> PodExplanation:
    return msgspec.structs.replace(explanation, **fields)


# ---- pending --------------------------------------------------------------------------------------------------------


def _explain_pending(
    base: PodExplanation, pod: PodWithConditions, request: PodRequest, cluster_state: ClusterState
) -> PodExplanation:
    ledger, quota_usage = cluster_state.ledger, cluster_state.ledger.quota_usage
    nominated, fleet = ledger.nomination(pod.uid), ledger.fleet_for(pod.uid, pod.priority)
    ignored = ledger.ignored_by(pod.uid, pod.priority)
    explanation = run_to_end(
        quota_usage.explain(pod.namespace, request, fleet, NodeAllocations(ledger), ignoring=ignored)
    )
    best = fleet.best(quota_usage.allowed(pod.namespace, request, ignored)) if explanation.fitting else []
    return _with(
        base,
        state="fits" if explanation.fitting else "unschedulable",
        nodes=explanation.nodes,
        fitting=explanation.fitting,
        fitting_on=tuple(best[:3]),
        reasons=_reasons(explanation),
        misses=explanation.misses,
        changes=explanation.changes,
        quota=tuple(quota_usage.objections(pod.namespace, request)),
        nominated_on=nominated.allocation.node if nominated is not None else "",
    )


def _reasons(explanation: Explanation) -> tuple[ReasonCount, ...]:
    return tuple(
        ReasonCount(code=reason.code, text=reason.sentence, nodes=reason.nodes, would_fit_when_empty=reason.resolvable)
        for reason in explanation.reasons
    )


# ---- placed ---------------------------------------------------------------------------------------------------------


def _explain_placed(
    base: PodExplanation, pod: PodWithConditions, request: PodRequest | None, cluster_state: ClusterState, policy: str
) -> PodExplanation:
    entry = cluster_state.ledger.entry(pod.uid)
    grant = entry.allocation.grant if entry is not None else None
    if request is None and grant is None:
        return _with(base, node=pod.node_name)
    if grant is None:
        return _with(base, state="ungranted", node=pod.node_name)
    explanation = _with(
        base,
        state="placed" if grant.containers else "unplaced",
        unplaced=grant.unplaced,
        node=pod.node_name,
        by="gputile" if GRANT in pod.annotations else grant.dialect,
        at=_granted_at(pod),
        tiles=_tiles(pod, grant, cluster_state),
    )
    return explanation if request is None else _compare_nodes(explanation, pod, request, cluster_state, policy)


def _tiles(pod: PodWithConditions, grant: Grant, cluster_state: ClusterState) -> tuple[TileShown, ...]:
    node = cluster_state.ledger.fleet.node(pod.node_name)
    models = {card.uuid: card.model for card in node.cards} if node is not None else {}
    others = [holder for holder in cluster_state.ledger.holders(pod.node_name) if holder.pod != pod.uid]
    return tuple(
        TileShown(
            container=container.container,
            index=tile.index,
            uuid=tile.uuid,
            model=models.get(tile.uuid, ""),
            memory=tile.memory,
            cores=tile.cores,
            neighbours=tuple(sorted(holder.name for holder in others if tile.uuid in holder.uses)),
        )
        for container in grant.containers
        for tile in container.tiles
    )


def _compare_nodes(
    explanation: PodExplanation,
    pod: PodWithConditions,
    request: PodRequest,
    cluster_state: ClusterState,
    policy: str,
) -> PodExplanation:
    """Rank the pod's node among all nodes today: the pod is removed from this private ledger, and placed again."""
    name = request.constraints.node_policy or policy
    cluster_state.ledger.handle(PodGone(pod.uid))
    fleet: Fleet = cluster_state.ledger.fleet
    allowed = cluster_state.ledger.quota_usage.allowed(pod.namespace, request)
    best = fleet.best(allowed, policy, keep=len(fleet))
    others, but_for_quota = (_count_other_nodes(fleet, wanted, pod.node_name) for wanted in (allowed, request))
    rank = ""
    if best:
        only = len(best) == 1 and best[0] == pod.node_name
        rank = "best" if only else "as good as the best" if pod.node_name in best else "another"
    return _with(
        explanation,
        policy=name,
        alternatives=others,
        quota=tuple(cluster_state.ledger.quota_usage.objections(pod.namespace, request))
        if but_for_quota > others
        else (),
        rank=rank,
        best_now=best[0] if rank == "another" else "",
    )


def _count_other_nodes(fleet: Fleet, request: PodRequest, own_node: str) -> int:
    return int(fleet.fits(request).sum()) - (not fleet.refusals(request, [own_node]))


# ---- times, conditions and events -----------------------------------------------------------------------------------


def _granted_at(pod: PodWithConditions) -> str:
    at = granted_at(pod)
    return datetime.fromtimestamp(at / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if at > 0 else pod.bound_at


def _unschedulable_message(pod: PodWithConditions) -> str:
    """What kube-scheduler wrote into the pod's condition; "" when it is scheduled."""
    conditions = (pod.status and pod.status.conditions) or ()
    return next((c.message or "" for c in conditions if c.type == "PodScheduled" and c.status == "False"), "")


def _pod_events(events: list[Any]) -> tuple[PodEvent, ...]:
    """The latest events, oldest first."""
    pod_events = [
        PodEvent(
            at=str(event.get("lastTimestamp") or event.get("eventTime") or ""),
            by=str(event.get("reportingComponent") or (event.get("source") or {}).get("component") or ""),
            reason=str(event.get("reason") or ""),
            message=str(event.get("message") or ""),
            count=int(event.get("count") or (event.get("series") or {}).get("count") or 1),
        )
        for event in events
    ]
    return tuple(sorted(pod_events, key=lambda event: event.at)[-EVENTS_SHOWN:])
