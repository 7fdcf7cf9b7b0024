"""The auditor in the tests: `gputile audit` on what the witness sees, which shares no code with gputile's book.

Door:  `audit(kube)` asserts; `grant(pod)` and `tiles(pod)` read what a pod was given.
"""

import json
import time
from typing import Any

import msgspec

from gputile.audit import checking
from gputile.audit.report import Report, SeenPod
from gputile.dialects.wire import NodeObject
from tests.e2e.api import Kube, Manifest

GRANT = "gputile.io/grant"


def grant(pod: Manifest) -> dict[str, Any] | None:
    said = pod["metadata"].get("annotations", {}).get(GRANT)
    return json.loads(said) if said else None


def tiles(pod: Manifest) -> list[dict[str, Any]]:
    """Every tile of the pod, with the name of its container."""
    held = grant(pod)
    return [{**tile, "container": c["name"]} for c in (held["containers"] if held else []) for tile in c["tiles"]]


def report(kube: Kube) -> Report:
    """What the auditor says of the whole cluster."""
    pods = [msgspec.convert(pod, SeenPod) for pod in kube.list("Pod")]
    nodes = [msgspec.convert(node, NodeObject) for node in kube.list("Node")]
    return checking.audit(nodes, pods, now=time.time())


def audit(kube: Kube) -> dict[str, int]:
    """Returns the MiB sold by card; fails with every story there is to tell."""
    found = report(kube)
    assert found.is_right, "\n".join(checking.stories(found.findings))
    return {uuid: sum(held.memory for held in holders) for uuid, holders in found.sold.items()}
