"""`gputile audit` on the objects of the API server, and helpers that read grants.

It must not use the scheduler's arithmetic: the audit shares no code with it.
"""

import json
import time
from typing import Any

from gputile.audit import audit as checking
from gputile.audit.advice import finding_lines
from gputile.audit.report import AuditReport
from tests.e2e.api import Kube, Manifest

GRANT = "gputile.io/grant"


def grant(pod: Manifest) -> dict[str, Any] | None:
    annotation = pod["metadata"].get("annotations", {}).get(GRANT)
    return json.loads(annotation) if annotation else None


def tiles(pod: Manifest) -> list[dict[str, Any]]:
    """Every tile of the pod, with the name of its container."""
    pod_grant = grant(pod)
    return [
        {**tile, "container": c["name"]} for c in (pod_grant["containers"] if pod_grant else []) for tile in c["tiles"]
    ]


def report(kube: Kube) -> AuditReport:
    """The audit report of the whole cluster."""
    return checking.audit(kube.list("Node"), kube.list("Pod"), now=time.time())


def audit(kube: Kube) -> dict[str, int]:
    """Assert that the audit has no findings; return the allocated MiB by GPU UUID."""
    audit_report = report(kube)
    assert audit_report.is_right, "\n".join(finding_lines(audit_report.findings))
    return {uuid: sum(holder.memory for holder in holders) for uuid, holders in audit_report.holders.items()}
