"""`gputile explain`: why a pod is pending and what would help, or why it is on its node."""

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
    namespace_option,
    unit_option,
    warn_fallback,
)
from gputile.dialects.kube_objects import Pod
from gputile.dialects.settings import DialectSettings
from gputile.model.errors import InputError
from gputile.model.policies import DEFAULT_POLICY

if TYPE_CHECKING:
    from gputile.cli.explain_model import PodExplanation

AGENTS = "gputile-agents"  # the default of the scheduler's setting agents.namespace

EPILOG = """\b
Examples:
  gputile explain web-0                      in the namespace of your context
  gputile explain web-0 -n team-a            or team-a/web-0
  gputile explain web-0 -o wide              with more nodes that nearly fit
  gputile explain web-0 -o json | jq .changes
  kubectl get nodes,pods,events,leases,configmaps -A -o json > all.json && gputile explain web-0 -f all.json

\b
The scheduling core runs in this command, on the nodes and pods of now; the running scheduler is not contacted.
Exit codes: 0 it has its GPUs, or requests none; 1 it is pending, or refused; 2 it could not be found or read.
"""


@click.command("explain", epilog=EPILOG)
@click.argument("pod", shell_complete=complete_pod)
@namespace_option
@output_option()
@click.option(
    "--policy", default=DEFAULT_POLICY, show_default=True, help="Policy of the scheduler, to rank the nodes by."
)
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
    """Explain why POD is pending and what would help, or why it is on its node.

    Shows each reason with the number of nodes it rules out, the nodes that nearly fit with numbers, the smallest change
    that would fit, and the pods in the way. Needs the right to list nodes and pods; Leases, Events and the ConfigMaps
    of quotas add to the answer where they may be read.
    """
    source = ClusterSource(kubeconfig=kubeconfig, context=context, namespace_flag=namespace, files=files)
    snapshot = source.snapshot()
    subject = pod_named(pod, source.namespace if "/" not in pod.removeprefix("pod/") else "", snapshot.pods)
    extra, now = _extra_objects(source, snapshot, subject), time.time()
    explanation = _explain(subject, snapshot, DialectSettings(gpushare_unit=gpushare_unit), policy, extra, now)
    if output in PROGRAMS:
        emit(explanation, output)
    else:
        from gputile.cli.render.explain import lines_of

        for line in lines_of(explanation, terminal(), now, wide=output == "wide"):
            say(line)
    raise SystemExit(_code(explanation))


def _explain(
    pod: Any, snapshot: ClusterSnapshot, settings: DialectSettings, policy: str, extra: "ExplainContext", now: float
) -> "PodExplanation":
    """The engine and its arrays are imported only here: `--help` needs neither."""
    from gputile.cli.explain_model import explain_pod
    from gputile.cli.offline_ledger import build_ledger
    from gputile.engine.policies.table import POLICIES

    if policy not in POLICIES:
        raise InputError(f"--policy {policy}: there is no such policy; write one of {', '.join(sorted(POLICIES))}")
    cluster_state = build_ledger(snapshot, settings, extra.leases, extra.quotas, now)
    return explain_pod(pod, cluster_state, extra.events, policy)


def _code(explanation: "PodExplanation") -> int:
    return 1 if explanation.state in ("unschedulable", "refused", "fits") else 0


def _extra_objects(source: ClusterSource, snapshot: ClusterSnapshot, pod: Pod) -> "ExplainContext":
    """Leases of the agents, quotas, and events of the pod; what may not be read is reported and left out."""
    from gputile.kube.api import AgentLease

    objects = _in_file(snapshot) if source.files else _in_cluster(source, pod)
    return ExplainContext(
        leases=_readable(objects["leases"], AgentLease, "a Lease"),
        events=[event for event in objects["events"] if _is_about(event, pod)],
        quotas=_quotas(objects["quotas"]),
    )


class ExplainContext(msgspec.Struct, frozen=True):
    """The objects that an explanation uses besides nodes and pods."""

    leases: list[Any]
    events: list[Any]
    quotas: dict[str, Any]  # by namespace


T = TypeVar("T")
KINDS = {"leases": "Lease", "events": "Event", "quotas": "ConfigMap"}
WITHOUT = {
    "leases": f"Leases in {AGENTS} cannot be read, so every agent counts as alive",
    "events": "events cannot be read, so the scheduler's messages are missing",
    "quotas": "the ConfigMap of quotas cannot be read, so quota is ignored here",
    "old quotas": "the old ConfigMap of quotas cannot be read, so its quotas are ignored here",
}


def _in_file(snapshot: ClusterSnapshot) -> dict[str, list[Any]]:
    kinds = {kind for kind, _ in snapshot.others}
    missing = [f"{kind}s" for kind in KINDS.values() if kind not in kinds]
    if missing:
        names = ", ".join(missing)
        warn_fallback(f"the file has no {names}: answered as if there were none; `{ALL_LISTED_BY}` lists them")
    return {
        name: [msgspec.json.decode(raw) for other, raw in snapshot.others if other == kind]
        for name, kind in KINDS.items()
    }


def _in_cluster(source: ClusterSource, pod: Pod) -> dict[str, list[Any]]:
    from gputile.cli.commands.quota import OLD, OURS

    paths = {
        "leases": f"/apis/coordination.k8s.io/v1/namespaces/{AGENTS}/leases",
        "events": f"/api/v1/namespaces/{pod.namespace}/events?fieldSelector=involvedObject.name%3D{pod.name}",
        "quotas": "/api/v1/namespaces/{}/configmaps/{}".format(*OURS.split("/")),
        "old quotas": "/api/v1/namespaces/{}/configmaps/{}".format(*OLD.split("/")),
    }
    answers = source.get(paths)
    for name, answer in answers.items():
        if isinstance(answer, UnreadableKind):
            warn_fallback(f"{WITHOUT[name]} ({answer.why})")
    known = {name: answer if isinstance(answer, dict) else {} for name, answer in answers.items()}
    maps = [known[name] for name in ("quotas", "old quotas") if known[name]]
    return {"leases": known["leases"].get("items") or [], "events": known["events"].get("items") or [], "quotas": maps}


def _quotas(maps: list[Any]) -> dict[str, Any]:
    """The quotas that the scheduler would have in force."""
    from gputile.cli.commands.quota import in_force
    from gputile.kube.quota_config_maps import QuotaConfigMap

    config_maps = _readable(maps, QuotaConfigMap, "a ConfigMap")
    quotas, unusable = in_force({f"{item.metadata.namespace}/{item.name}": item for item in config_maps})
    for item in unusable:
        fallback = (
            "its last valid content counts" if item.has_last else "it keeps no valid content, and counts as empty"
        )
        warn_fallback(f"{item.why}; {fallback}")
    return dict(quotas)


class EventSubject(msgspec.Struct, frozen=True):
    """The `involvedObject` of an Event."""

    name: str = ""
    uid: str | None = None


class EventSource(msgspec.Struct, frozen=True):
    """The `source` of an Event."""

    component: str | None = None


class EventSeries(msgspec.Struct, frozen=True):
    """The `series` of an Event."""

    count: int | None = None


class ReadableEvent(msgspec.Struct, frozen=True, rename="camel"):
    """An Event as far as it is shown; an Event of another shape is ignored."""

    involved_object: EventSubject
    source: EventSource | None = None
    series: EventSeries | None = None
    count: int | None = None


def _readable(objects: list[Any], kind: type[T], noun: str) -> list[T]:
    """The objects as values; an object of another shape is reported and left out."""
    from gputile.model.decode_errors import decode_problem

    converted = []
    for item in objects:
        try:
            converted.append(msgspec.convert(item, kind))
        except msgspec.ValidationError as error:
            warn_fallback(f"{noun} is left out, it cannot be read: {decode_problem(error)}")
    return converted


def _is_about(event: Any, pod: Pod) -> bool:
    """An earlier pod of the same name has events too."""
    try:
        subject = msgspec.convert(event, ReadableEvent).involved_object
    except msgspec.ValidationError:
        return False
    return subject.name == pod.name and subject.uid in (pod.uid, "", None)
