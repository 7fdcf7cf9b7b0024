"""`gputile doctor`: the known traps of an installation, each looked for, each with its fix."""

import time
from pathlib import Path
from typing import Any

import click
import msgspec

from gputile.cli.checks import control, nodes
from gputile.cli.checks.facts import FAIL, NAME, OK, UNKNOWN, WARN, Check, ClusterFacts, Finding, unknown
from gputile.cli.checks.scheduler import kube_scheduler_asks
from gputile.cli.output import say, style
from gputile.cli.render.terminal import PROGRAMS, Terminal, emit, output_option, terminal, wrapped
from gputile.cli.source import ClusterSnapshot, ClusterSource, UnreadableKind, cluster_options, unit_option
from gputile.dialects import gpushare
from gputile.dialects.settings import DialectSettings
from gputile.model.errors import InputError

EPILOG = """\b
Examples:
  gputile doctor                     every check, with the fix where something is wrong
  gputile doctor -o json | jq '.findings[] | select(.state == "fail")'
  gputile doctor --scheduler-config /etc/kubernetes/gputile/scheduler.yaml

\b
It changes nothing, reads no Secrets, and says `unknown` where it may not look.
Exit codes: 0 nothing has failed, 1 something has, 2 nodes or pods could not be read (docs/cli.md).
"""

SYSTEM, AGENTS = "/namespaces/kube-system", "/namespaces/gputile-agents"
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
APPS = "/apis/apps/v1"
OURS = f"{NAME}%2Cgputile-agent%2Cgpu-scheduler"
PATHS = {
    "scheduler": f"{APPS}{SYSTEM}/deployments/{NAME}",
    "agent": f"{APPS}{SYSTEM}/daemonsets/gputile-agent",
    "our pods": f"/api/v1{SYSTEM}/pods?labelSelector=app.kubernetes.io%2Fname+in+%28{OURS}%29",
    "leader": f"/apis/coordination.k8s.io/v1{SYSTEM}/leases/{NAME}",
    "agents": f"/apis/coordination.k8s.io/v1{AGENTS}/leases",
    "policies": f"{ADMISSION}/validatingadmissionpolicies",
    "policy bindings": f"{ADMISSION}/validatingadmissionpolicybindings",
    "mutating webhooks": f"{ADMISSION}/mutatingwebhookconfigurations",
    "validating webhooks": f"{ADMISSION}/validatingwebhookconfigurations",
    "endpoint slices": "/apis/discovery.k8s.io/v1/endpointslices",
    "api services": "/apis/apiregistration.k8s.io/v1/apiservices",
    "runtime classes": "/apis/node.k8s.io/v1/runtimeclasses",
    "daemon sets": f"{APPS}/daemonsets",
    "deployments": f"{APPS}/deployments",
    "kube-scheduler pods": f"/api/v1{SYSTEM}/pods?labelSelector=component%3Dkube-scheduler",
    "second scheduler": f"/api/v1{SYSTEM}/configmaps/gpu-scheduler",
    "second deployment": f"{APPS}{SYSTEM}/deployments/gpu-scheduler",
    "version": "/version",
}
METRICS = f"/api/v1{SYSTEM}/services/https:{NAME}:https/proxy/metrics"
CHECKS: tuple[Check, ...] = (
    control.scheduler_runs,
    control.images_come,
    control.somebody_leads,
    kube_scheduler_asks,
    control.policies_are_there,
    control.webhooks_answer,
    control.api_is_served,
    nodes.agents_live,
    nodes.nodes_tell_their_cards,
    nodes.runtimes_obey,
    nodes.nobody_else_hands_out,
    nodes.pods_come_by_us,
)
NOT_IN_FILE = UnreadableKind("the file has none of that kind", "put it into the file, or look at the cluster itself")
NOT_A_CLUSTER = UnreadableKind("a file is looked at, not a cluster", "look at the cluster itself")
SIGNS = {OK: ("ok", "green"), WARN: ("warn", "yellow"), FAIL: ("FAIL", "red"), UNKNOWN: ("?", "cyan")}


@click.command("doctor", epilog=EPILOG)
@output_option()
@click.option(
    "--scheduler-config",
    metavar="FILE",
    help="A KubeSchedulerConfiguration to check: on a control plane it is a file that no API shows.",
)
@unit_option
@cluster_options
def command(
    output: str,
    scheduler_config: str | None,
    gpushare_unit: Any,
    files: tuple[str, ...],
    kubeconfig: str | None,
    context: str | None,
) -> None:
    """Check the installation for known traps, each with its fix.

    Scheduler, leader, admission, webhooks, agents, inventories, runtimes, other systems
    that hand out the same cards, and how kube-scheduler asks.
    """
    config = _text(scheduler_config) if scheduler_config else None
    where = ClusterSource(kubeconfig=kubeconfig, context=context, files=files)
    seen = where.look()
    facts = _facts(where, seen, gpushare.resolved(DialectSettings(gpushare_unit=gpushare_unit), seen.nodes))
    facts.objects = {**facts.objects, "scheduler config": config}
    findings = [finding for check in CHECKS for finding in _found(check, facts)]
    if output in PROGRAMS:
        emit({"healthy": _code(findings) == 0, "findings": findings}, output)
    else:
        say(*lines_of(findings, terminal()))
    raise SystemExit(_code(findings))


def _found(check: Check, facts: ClusterFacts) -> list[Finding]:
    """Objects in a file may be of any shape. One that a check does not understand costs this check, and no other."""
    try:
        return list(check(facts))
    except (AttributeError, TypeError, ValueError, LookupError, RecursionError, OverflowError) as wrong:
        name = check.__name__.replace("_", "-")
        text = f"this check failed on an object that is not what kubectl prints ({type(wrong).__name__})"
        return [unknown(name, text, "compare the file with `kubectl get ... -o json`")]


def _code(findings: list[Finding]) -> int:
    return int(any(finding.state == FAIL for finding in findings))


def _text(name: str) -> str:
    from gputile.text.documents import SETTINGS, NotYaml, content

    try:
        with Path(name).open("rb") as file:
            return content(file, SETTINGS).decode()
    except (OSError, UnicodeDecodeError, NotYaml) as wrong:
        raise InputError(f"--scheduler-config {name}: cannot be read: {wrong}") from wrong


# ---- looking --------------------------------------------------------------------------------------------------------


def _facts(where: ClusterSource, seen: ClusterSnapshot, settings: DialectSettings) -> ClusterFacts:
    if where.files:
        return ClusterFacts(seen=seen, now=time.time(), settings=settings, objects=_in_file(seen))
    answers = where.get({**PATHS, "metrics": METRICS})
    metrics = answers.pop("metrics")
    answers["webhooks"] = _joined(answers.pop("mutating webhooks"), answers.pop("validating webhooks"))
    known = metrics if isinstance(metrics, bytes | UnreadableKind) else None
    return ClusterFacts(seen=seen, now=time.time(), settings=settings, objects=answers, metrics=known)


def _joined(mutating: Any, validating: Any) -> Any:
    for one in (mutating, validating):
        if isinstance(one, UnreadableKind):
            return one
    kinds = (("MutatingWebhookConfiguration", mutating), ("ValidatingWebhookConfiguration", validating))
    return {"items": [{**one, "kind": kind} for kind, found in kinds for one in (found or {}).get("items") or ()]}


def _in_file(seen: ClusterSnapshot) -> dict[str, Any]:
    """A snapshot shows what was put into it; a kind that is not in it at all counts as not seen."""
    by_kind: dict[str, list[Any]] = {}
    for kind, raw in seen.others:
        by_kind.setdefault(kind, []).append(msgspec.json.decode(raw))

    def several(*kinds: str, namespace: str = "") -> Any:
        found = [one for kind in kinds for one in by_kind.get(kind, ()) if not namespace or _is_in(one, namespace)]
        return {"items": found} if any(kind in by_kind for kind in kinds) else NOT_IN_FILE

    def one(kind: str, namespace: str, name: str) -> Any:
        if kind not in by_kind:
            return NOT_IN_FILE
        named = [found for found in by_kind[kind] if _is_in(found, namespace) and found["metadata"].get("name") == name]
        return named[0] if named else None

    return {
        "scheduler": one("Deployment", "kube-system", NAME),
        "agent": one("DaemonSet", "kube-system", "gputile-agent"),
        "leader": one("Lease", "kube-system", NAME),
        "agents": several("Lease", namespace="gputile-agents"),
        "policies": several("ValidatingAdmissionPolicy"),
        "policy bindings": several("ValidatingAdmissionPolicyBinding"),
        "webhooks": several("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"),
        "endpoint slices": several("EndpointSlice"),
        "api services": several("APIService"),
        "runtime classes": several("RuntimeClass"),
        "daemon sets": several("DaemonSet"),
        "deployments": several("Deployment"),
        "our pods": NOT_A_CLUSTER,
        "kube-scheduler pods": NOT_A_CLUSTER,
        "second scheduler": one("ConfigMap", "kube-system", "gpu-scheduler"),
        "second deployment": one("Deployment", "kube-system", "gpu-scheduler"),
    }


def _is_in(found: Any, namespace: str) -> bool:
    return (found.get("metadata") or {}).get("namespace") == namespace


# ---- telling --------------------------------------------------------------------------------------------------------


def lines_of(findings: list[Finding], sheet: Terminal) -> list[str]:
    """All findings in the order of the checks, each with its fix below."""
    margin = 6 + max(len(finding.check) for finding in findings) + 2
    room = max(40, min(sheet.columns or 120, 120) - margin)
    lines = []
    for finding in findings:
        sign, colour = SIGNS[finding.state]
        text = wrapped(finding.text, room) or [""]
        lines.append(f"{style(f'{sign:<6}', fg=colour)}{finding.check:<{margin - 6}}{text[0]}")
        lines += [" " * margin + line for line in text[1:]]
        if finding.fix:
            lines += [" " * margin + line for line in wrapped(f"fix: {finding.fix}", room)]
    counts = {state: sum(finding.state == state for finding in findings) for state in SIGNS}
    words = [
        f"{counts[OK]} in order",
        f"{counts[WARN]} to look at",
        f"{counts[FAIL]} wrong",
        f"{counts[UNKNOWN]} unknown",
    ]
    return [*lines, "", ", ".join(words)]
