"""`gputile audit`: prove from a cluster's pods and nodes that no card is sold twice, or tell the story."""

import time
from typing import Any

import click
import msgspec

from gputile.audit.checking import audit, stories
from gputile.audit.report import Report
from gputile.cli.cluster import Where, cluster_options, unit_option
from gputile.cli.output import say, style
from gputile.cli.showing import PROGRAMS, emit, output_option
from gputile.dialects.settings import DialectSettings

EPILOG = """\b
Examples:
  gputile audit                                            the cluster of your kubeconfig
  gputile audit --context prod -o json | jq .findings
  kubectl get nodes,pods -A -o json > all.json
  gputile audit -f all.json                                the same, offline; YAML works too

\b
Exit codes:
  0  every card holds at most what it has, every grant belongs to its pod
  1  something is sold twice or wrong; the story is printed
  2  pods or nodes could not be read: no cluster, no right to list them, a bad file
"""


@click.command("audit", epilog=EPILOG)
@output_option()
@unit_option
@cluster_options
def command(
    files: tuple[str, ...], kubeconfig: str | None, context: str | None, output: str, gpushare_unit: Any
) -> None:
    """Prove that no card is sold twice and every grant belongs to its pod.

    Looks at the pods and nodes of a cluster, nothing else, and does its own sums: it shares no code with the
    scheduler's book. It changes nothing, and needs the right to list pods and nodes.
    """
    seen = Where(kubeconfig=kubeconfig, context=context, files=files).look(complete=True)
    report = audit(seen.nodes, seen.pods, DialectSettings(gpushare_unit=gpushare_unit), time.time())
    emit(_document(report), output) if output in PROGRAMS else say(*_lines(report))
    raise SystemExit(0 if report.is_right else 1)


# ---- telling --------------------------------------------------------------------------------------------------------


def _document(report: Report) -> dict[str, Any]:
    """All but who holds which card, which is in the findings where it matters (docs/audit.md)."""
    told = {key: value for key, value in msgspec.to_builtins(report).items() if key != "sold"}
    return {"right": report.is_right, **told}


def _lines(report: Report) -> list[str]:
    lines = [line for notice in report.findings for line in _told(notice, style("wrong", fg="red"))]
    lines += [line for notice in report.remarks for line in _told(notice, style("note", fg="yellow"))]
    share = 100 * report.memory_sold // report.memory if report.memory else 0
    seen = (
        f"{report.nodes} nodes with {report.cards} cards, {report.pods} pods on them "
        f"({share} % of the memory sold), {report.waiting} waiting"
    )
    verdict = "nothing is sold twice, every grant belongs to its pod"
    wrong = f"{len(report.findings)} thing{'s are' if len(report.findings) > 1 else ' is'} wrong"
    return [*lines, f"{seen}: {verdict if report.is_right else wrong}"]


def _told(notice: Any, word: str) -> list[str]:
    first, *more = stories([notice])
    return [f"{word}: {first}", *more]
