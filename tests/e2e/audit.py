"""The auditor in the tests: `gputile audit` on what the witness sees, which shares no code with gputile's scheduler.

Door:  `audit(kube)` asserts; `grant(pod)` and `tiles(pod)` read what a pod was given.
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
    said = pod["metadata"].get("annotations", {}).get(GRANT)
    return json.loads(said) if said else None


def tiles(pod: Manifest) -> list[dict[str, Any]]:
    """Every tile of the pod, with the name of its container."""
    held = grant(pod)
    return [{**tile, "container": c["name"]} for c in (held["containers"] if held else []) for tile in c["tiles"]]


def report(kube: Kube) -> AuditReport:
    """What the auditor says of the whole cluster."""
    return checking.audit(kube.list("Node"), kube.list("Pod"), now=time.time())


def audit(kube: Kube) -> dict[str, int]:
    """Returns the MiB allocated by GPU; fails with every story there is to tell."""
    found = report(kube)
    assert found.is_right, "\n".join(finding_lines(found.findings))
    return {uuid: sum(held.memory for held in holders) for uuid, holders in found.holders.items()}
