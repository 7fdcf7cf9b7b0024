"""`gputile explain`: why a pod waits and what would help, or why it is where it is."""

import time
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from gputile.cli.lookup import complete_pod, pod_named
from gputile.cli.output import say
from gputile.cli.render.terminal import PROGRAMS, emit, output_option, terminal
from gputile.cli.source import (
    ALL_LISTED_BY,
    ClusterSnapshot,
    ClusterSource,
    UnreadableKind,
    cluster_options,
    fell_back,
    namespace_option,
    unit_option,
)
from gputile.dialects.kube_objects import Pod
from gputile.dialects.settings import DialectSettings
from gputile.model.errors import InputError

if TYPE_CHECKING:
    from gputile.cli.explain_model import PodExplanation

AGENTS = "gputile-agents"  # the default of the scheduler's setting agents.namespace

EPILOG = """\b
Examples:
  gputile explain web-0                      in the namespace of your context
  gputile explain web-0 -n team-a            or team-a/web-0
  gputile explain web-0 -o wide              with more of the nodes that nearly fit
  gputile explain web-0 -o json | jq .changes
  kubectl get nodes,pods,events,leases,configmaps -A -o json > all.json && gputile explain web-0 -f all.json

\b
The scheduler's own core decides, here, on what nodes and pods say now; the scheduler itself is not asked.
Exit codes: 0 it has its cards, or asks for none; 1 it waits, or is refused; 2 it could not be found or read.
"""


@click.command("explain", epilog=EPILOG)
@click.argument("pod", shell_complete=complete_pod)
@namespace_option
@output_option()
@click.option("--policy", default="tiling", show_default=True, help="The scheduler's setting: what would it choose?")
@unit_option
@cluster_options
def command(
    pod: str,
    namespace: str | None,
    output: str,
    policy: str,
    gpushare_unit: Any,
    files: tuple[str, ...],
    kubeconfig: str | None,
    context: str | None,
) -> None:
    """Why POD waits and what would help, or why it is where it is.

    Per reason the number of nodes, the nearest misses with figures, the smallest change that would fit, and who is in
    the way. Needs the right to list nodes and pods; Leases, Events and the
    ConfigMap of quotas tell more where they may be read.
    """
    where = ClusterSource(kubeconfig=kubeconfig, context=context, namespace_said=namespace, files=files)
    seen = where.look()
    found = pod_named(pod, where.namespace if "/" not in pod.removeprefix("pod/") else "", seen.pods)
    besides, now = _besides(where, seen, found), time.time()
    told = _account(found, seen, DialectSettings(gpushare_unit=gpushare_unit), policy, besides, now)
    if output in PROGRAMS:
        emit(told, output)
    else:
        from gputile.cli.render.explain import lines_of

        for line in lines_of(told, terminal(), now, wide=output == "wide"):
            say(line)
    raise SystemExit(_code(told))


def _account(
    pod: Any, seen: ClusterSnapshot, settings: DialectSettings, policy: str, besides: "ExplainContext", now: float
) -> "PodExplanation":
    """The engine and its arrays are loaded only now: `--help` needs neither."""
    from gputile.cli.explain_model import explain_pod
    from gputile.cli.offline_ledger import build_ledger
    from gputile.engine.policies.table import POLICIES

    if policy not in POLICIES:
        raise InputError(f"--policy {policy}: there is no such policy; write one of {', '.join(sorted(POLICIES))}")
    cluster_state = build_ledger(seen, settings, besides.leases, besides.quotas, now)
    return explain_pod(pod, cluster_state, besides.events, policy)


def _code(told: "PodExplanation") -> int:
    return 1 if told.state in ("waits", "refused", "fits") else 0


def _besides(where: ClusterSource, seen: ClusterSnapshot, pod: Pod) -> "ExplainContext":
    """Leases of the agents, quotas, and events of the pod; without the right to see them it goes on, and says so."""
    from gputile.kube.api import AgentLease

    found = _in_file(seen) if where.files else _in_cluster(where, pod)
    return ExplainContext(
        leases=_readable(found["leases"], AgentLease, "a Lease"),
        events=[event for event in found["events"] if _is_about(event, pod)],
        quotas=_quotas(found["quotas"]),
    )


class ExplainContext(msgspec.Struct, frozen=True):
    """What is known besides nodes and pods."""

    leases: list[Any]
    events: list[Any]
    quotas: dict[str, Any]  # by namespace


T = TypeVar("T")
KINDS = {"leases": "Lease", "events": "Event", "quotas": "ConfigMap"}
WITHOUT = {
    "leases": f"Leases in {AGENTS} cannot be read, so every agent counts as alive",
    "events": "events cannot be read, so what the scheduler said is missing",
    "quotas": "the ConfigMap of quotas cannot be read, so nobody has one here",
    "old quotas": "the old ConfigMap of quotas cannot be read, so nobody has one here",
}


def _in_file(seen: ClusterSnapshot) -> dict[str, list[Any]]:
    there = {kind for kind, _ in seen.others}
    missing = [f"{kind}s" for kind in KINDS.values() if kind not in there]
    if missing:
        fell_back(f"the file has no {', '.join(missing)}: answered as if there were none; `{ALL_LISTED_BY}` has them")
    return {
        name: [msgspec.json.decode(raw) for found, raw in seen.others if found == kind] for name, kind in KINDS.items()
    }


def _in_cluster(where: ClusterSource, pod: Pod) -> dict[str, list[Any]]:
    from gputile.cli.commands.quota import OLD, OURS

    paths = {
        "leases": f"/apis/coordination.k8s.io/v1/namespaces/{AGENTS}/leases",
        "events": f"/api/v1/namespaces/{pod.namespace}/events?fieldSelector=involvedObject.name%3D{pod.name}",
        "quotas": "/api/v1/namespaces/{}/configmaps/{}".format(*OURS.split("/")),
        "old quotas": "/api/v1/namespaces/{}/configmaps/{}".format(*OLD.split("/")),
    }
    answers = where.get(paths)
    for what, answer in answers.items():
        if isinstance(answer, UnreadableKind):
            fell_back(f"{WITHOUT[what]} ({answer.why})")
    known = {what: answer if isinstance(answer, dict) else {} for what, answer in answers.items()}
    maps = [known[what] for what in ("quotas", "old quotas") if known[what]]
    return {"leases": known["leases"].get("items") or [], "events": known["events"].get("items") or [], "quotas": maps}


def _quotas(maps: list[Any]) -> dict[str, Any]:
    """What the scheduler would have in force."""
    from gputile.cli.commands.quota import in_force
    from gputile.kube.quota_config_maps import QuotaConfigMap

    found = _readable(maps, QuotaConfigMap, "a ConfigMap")
    quotas, broken = in_force({f"{one.metadata.namespace}/{one.name}": one for one in found})
    for one in broken:
        kept = "what the scheduler understood last counts"
        fell_back(
            f"{one.why}; {kept if one.has_last else 'what it said before is not kept, so it counts as empty here'}"
        )
    return dict(quotas)


class EventSubject(msgspec.Struct, frozen=True):
    name: str = ""
    uid: str | None = None


class EventSource(msgspec.Struct, frozen=True):
    component: str | None = None


class EventSeries(msgspec.Struct, frozen=True):
    count: int | None = None


class ReadableEvent(msgspec.Struct, frozen=True, rename="camel"):
    """An Event as far as it is shown, so that one of another shape is passed over."""

    involved_object: EventSubject
    source: EventSource | None = None
    series: EventSeries | None = None
    count: int | None = None


def _readable(objects: list[Any], kind: type[T], word: str) -> list[T]:
    """Those that are what kubectl prints; the others are told and left out."""
    found = []
    for one in objects:
        try:
            found.append(msgspec.convert(one, kind))
        except msgspec.ValidationError as wrong:
            fell_back(f"{word} is left out, it cannot be read: {str(wrong)[:200]}")
    return found


def _is_about(event: Any, pod: Pod) -> bool:
    """An earlier pod of the same name has events too."""
    try:
        about = msgspec.convert(event, ReadableEvent).involved_object
    except msgspec.ValidationError:
        return False
    return about.name == pod.name and about.uid in (pod.uid, "", None)
