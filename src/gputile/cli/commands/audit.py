"""`gputile audit`: verify from a cluster's pods and nodes that no GPU is double-allocated, or name the GPU."""

import time
from typing import Any

import click
import msgspec

from gputile.audit.advice import finding_lines
from gputile.audit.audit import audit
from gputile.audit.report import AuditReport
from gputile.cli.output import say, style
from gputile.cli.render.terminal import PROGRAMS, emit, output_option
from gputile.cli.source import ClusterSource, cluster_options, unit_option

EPILOG = """\b
Examples:
  gputile audit                                            the cluster of your kubeconfig
  gputile audit --context prod -o json | jq .findings
  kubectl get nodes,pods -A -o json > all.json
  gputile audit -f all.json                                the same, offline; YAML works too

\b
Exit codes:
  0  no GPU is allocated beyond its size, every grant belongs to its pod
  1  a GPU is double-allocated, or the audit cannot rule it out; every finding is printed
  2  pods or nodes could not be listed: no cluster, no right to list them, a bad file
"""


@click.command("audit", epilog=EPILOG)
@output_option()
@unit_option
@cluster_options
def command(
    files: tuple[str, ...], kubeconfig: str | None, context: str | None, output: str, gpushare_unit: Any
) -> None:
    """Verify that no GPU is double-allocated and every grant belongs to its pod.

    Reads the pods and nodes of a cluster, nothing else, with code of its own that it does not share with the scheduler.
    It changes nothing, and needs the right to list pods and nodes.
    """
    nodes, pods = ClusterSource(kubeconfig=kubeconfig, context=context, files=files).objects()
    report = audit(nodes, pods, gpushare_unit, time.time())
    emit(_document(report), output) if output in PROGRAMS else say(*_lines(report))
    raise SystemExit(0 if report.is_right else 1)


# ---- printing -------------------------------------------------------------------------------------------------------


def _document(report: AuditReport) -> dict[str, Any]:
    """The keys are a contract (docs/audit.md): they are only added."""
    return {"right": report.is_right, **msgspec.to_builtins(report)}


def _lines(report: AuditReport) -> list[str]:
    lines = [line for notice in report.findings for line in _notice_lines(notice, style("wrong", fg="red"))]
    lines += [line for notice in report.remarks for line in _notice_lines(notice, style("note", fg="yellow"))]
    share = 100 * report.memory_allocated // report.memory if report.memory else 0
    totals = (
        f"{report.nodes} nodes with {report.cards} GPUs, {report.pods} pods on them "
        f"({share} % of the memory allocated), {report.pending} pending"
    )
    verdict = "no GPU is double-allocated, every grant belongs to its pod"
    problems = f"{len(report.findings)} problem{'s' if len(report.findings) > 1 else ''} found"
    return [*lines, f"{totals}: {verdict if report.is_right else problems}"]


def _notice_lines(notice: Any, severity: str) -> list[str]:
    first, *more = finding_lines([notice])
    return [f"{severity}: {first}", *more]
