"""`gputile doctor`: checks an installation for known mistakes, and names the fix of each."""

import time
from pathlib import Path
from typing import Any

import click
import msgspec

from gputile.cli.checks import control, nodes
from gputile.cli.checks.facts import FAIL, NAME, OK, UNKNOWN, WARN, Check, ClusterFacts, Finding, unknown
from gputile.cli.checks.scheduler import kube_scheduler_calls_gputile
from gputile.cli.output import say, style
from gputile.cli.render.terminal import PROGRAMS, Terminal, emit, output_option, terminal, wrapped
from gputile.cli.source import ClusterSnapshot, ClusterSource, UnreadableKind, cluster_options, unit_option
from gputile.dialects import gpushare
from gputile.dialects.settings import DialectSettings
from gputile.model.errors import InputError

EPILOG = """\b
Examples:
  gputile doctor                     every check, with the fix of each problem
  gputile doctor -o json | jq '.findings[] | select(.state == "fail")'
  gputile doctor --scheduler-config /etc/kubernetes/gputile/scheduler.yaml

\b
It changes nothing, reads no Secrets, and reports `unknown` for what it may not read.
Exit codes: 0 no check failed, 1 a check failed, 2 nodes or pods could not be read (docs/cli.md).
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
    control.scheduler_is_ready,
    control.images_are_pulled,
    control.leader_is_elected,
    kube_scheduler_calls_gputile,
    control.admission_policies_are_bound,
    control.webhooks_have_endpoints,
    control.metrics_api_is_served,
    nodes.agents_are_alive,
    nodes.inventories_are_published,
    nodes.runtimes_support_cdi,
    nodes.no_other_gpu_system,
    nodes.pods_have_grants,
    nodes.no_leftover_annotations,
)
NOT_IN_FILE = UnreadableKind("the file has none of that kind", "add them to the file, or run doctor on the cluster")
NOT_A_CLUSTER = UnreadableKind("it is not in a file", "run doctor on the cluster")
SIGNS = {OK: ("ok", "green"), WARN: ("warn", "yellow"), FAIL: ("FAIL", "red"), UNKNOWN: ("?", "cyan")}


@click.command("doctor", epilog=EPILOG)
@output_option()
@click.option(
    "--scheduler-config",
    metavar="FILE",
    help="KubeSchedulerConfiguration to check: on a control plane it is a file that no API shows.",
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
    """Check the installation for known mistakes, and name the fix of each.

    Checks the scheduler and its leader, kube-scheduler's extender configuration, admission policies, webhooks, agents,
    inventories, container runtimes, other systems that allocate the same GPUs, and annotations of earlier builds.
    """
    config = _text(scheduler_config) if scheduler_config else None
    source = ClusterSource(kubeconfig=kubeconfig, context=context, files=files)
    snapshot = source.snapshot()
    facts = _facts(source, snapshot, gpushare.resolved(DialectSettings(gpushare_unit=gpushare_unit), snapshot.nodes))
    facts.objects = {**facts.objects, "scheduler config": config}
    findings = [finding for check in CHECKS for finding in _run_check(check, facts)]
    if output in PROGRAMS:
        emit({"healthy": _code(findings) == 0, "findings": findings}, output)
    else:
        say(*lines_of(findings, terminal()))
    raise SystemExit(_code(findings))


def _run_check(check: Check, facts: ClusterFacts) -> list[Finding]:
    """Objects in a file may have any shape. An object that a check does not understand fails this check alone."""
    try:
        return list(check(facts))
    except (AttributeError, TypeError, ValueError, LookupError, RecursionError, OverflowError) as error:
        name = check.__name__.replace("_", "-")
        text = f"this check failed on an object that kubectl would not print ({type(error).__name__})"
        return [unknown(name, text, "compare the file with `kubectl get ... -o json`")]


def _code(findings: list[Finding]) -> int:
    return int(any(finding.state == FAIL for finding in findings))


def _text(name: str) -> str:
    from gputile.model.decode_errors import file_problem
    from gputile.text.documents import SETTINGS, NotYaml, content

    try:
        with Path(name).open("rb") as file:
            return content(file, SETTINGS).decode()
    except (OSError, UnicodeDecodeError, NotYaml) as error:
        problem = f"{name}: cannot be read: {file_problem(error)}"
        raise InputError(f"--scheduler-config {problem}; name a KubeSchedulerConfiguration") from error


# ---- reading the cluster --------------------------------------------------------------------------------------------


def _facts(source: ClusterSource, snapshot: ClusterSnapshot, settings: DialectSettings) -> ClusterFacts:
    if source.files:
        return ClusterFacts(snapshot=snapshot, now=time.time(), settings=settings, objects=_in_file(snapshot))
    answers = source.get({**PATHS, "metrics": METRICS})
    metrics = answers.pop("metrics")
    answers["webhooks"] = _joined(answers.pop("mutating webhooks"), answers.pop("validating webhooks"))
    known = metrics if isinstance(metrics, bytes | UnreadableKind) else None
    return ClusterFacts(snapshot=snapshot, now=time.time(), settings=settings, objects=answers, metrics=known)


def _joined(mutating: Any, validating: Any) -> Any:
    for answer in (mutating, validating):
        if isinstance(answer, UnreadableKind):
            return answer
    kinds = (("MutatingWebhookConfiguration", mutating), ("ValidatingWebhookConfiguration", validating))
    return {"items": [{**item, "kind": kind} for kind, answer in kinds for item in (answer or {}).get("items") or ()]}


def _in_file(snapshot: ClusterSnapshot) -> dict[str, Any]:
    """The objects of a file. A kind that is not in it at all counts as unreadable."""
    by_kind: dict[str, list[Any]] = {}
    for kind, raw in snapshot.others:
        by_kind.setdefault(kind, []).append(msgspec.json.decode(raw))

    def several(*kinds: str, namespace: str = "") -> Any:
        selected = [
            item for kind in kinds for item in by_kind.get(kind, ()) if not namespace or _is_in(item, namespace)
        ]
        return {"items": selected} if any(kind in by_kind for kind in kinds) else NOT_IN_FILE

    def single(kind: str, namespace: str, name: str) -> Any:
        if kind not in by_kind:
            return NOT_IN_FILE
        named = [item for item in by_kind[kind] if _is_in(item, namespace) and item["metadata"].get("name") == name]
        return named[0] if named else None

    return {
        "scheduler": single("Deployment", "kube-system", NAME),
        "agent": single("DaemonSet", "kube-system", "gputile-agent"),
        "leader": single("Lease", "kube-system", NAME),
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
        "second scheduler": single("ConfigMap", "kube-system", "gpu-scheduler"),
        "second deployment": single("Deployment", "kube-system", "gpu-scheduler"),
    }


def _is_in(item: Any, namespace: str) -> bool:
    return (item.get("metadata") or {}).get("namespace") == namespace


# ---- printing -------------------------------------------------------------------------------------------------------


def lines_of(findings: list[Finding], sheet: Terminal) -> list[str]:
    """All findings in the order of the checks, each with its fix below."""
    margin = 6 + max(len(finding.check) for finding in findings) + 2
    width = max(40, min(sheet.columns or 120, 120) - margin)
    lines = []
    for finding in findings:
        sign, colour = SIGNS[finding.state]
        text = wrapped(finding.text, width) or [""]
        lines.append(f"{style(f'{sign:<6}', fg=colour)}{finding.check:<{margin - 6}}{text[0]}")
        lines += [" " * margin + line for line in text[1:]]
        if finding.fix:
            lines += [" " * margin + line for line in wrapped(f"fix: {finding.fix}", width)]
    counts = {state: sum(finding.state == state for finding in findings) for state in SIGNS}
    totals = [
        f"{counts[OK]} ok",
        f"{counts[WARN]} warnings",
        f"{counts[FAIL]} failed",
        f"{counts[UNKNOWN]} unknown",
    ]
    return [*lines, "", ", ".join(totals)]
