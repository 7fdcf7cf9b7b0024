"""What pods really use, from the metrics API of gputile's scheduler; nothing where it is not served.

Room:  one list. It is asked for by those who show it, and missing it is told on stderr, not an error.
Door:  `live_usage(where)`.
"""

from typing import Any

from gputile.cli.cluster_summary import LiveUse
from gputile.cli.source import ClusterSource, UnreadableKind, fell_back

PATH = "/apis/metrics.nvidia.com/v1alpha1/podresources"
WITHOUT = "what pods hold is shown, and not what they use"


def live_usage(where: ClusterSource) -> LiveUse:
    if where.files:
        return {}
    answer = where.get({"use": PATH})["use"]
    if isinstance(answer, UnreadableKind):
        fell_back(f"the metrics API cannot be read, so {WITHOUT} ({answer.why})")
    elif not isinstance(answer, dict):
        fell_back(f"no metrics API is served here, so {WITHOUT}")
    return used(answer.get("items") or ()) if isinstance(answer, dict) else {}


def used(items: Any) -> dict[tuple[str, str], dict[str, int]]:
    """Containers of one pod on one card add up; what one of them does not tell is not known of the sum."""
    found: dict[tuple[str, str], list[dict[str, int]]] = {}
    for item in items:
        spec = item.get("spec") or {}
        pod = f"{spec.get('pod_namespace')}/{spec.get('pod_name')}"
        for held in spec.get("containers_device") or ():
            for tile in held.get("device_info") or ():
                found.setdefault((pod, str(tile.get("device_id"))), []).append(tile.get("use") or {})
    return {key: _sum(uses) for key, uses in found.items()}


def _sum(uses: list[dict[str, int]]) -> dict[str, int]:
    return {what: sum(use[what] for use in uses) for what in ("memory", "cores") if all(what in use for use in uses)}
