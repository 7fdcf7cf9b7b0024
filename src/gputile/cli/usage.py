"""Measured GPU use of pods, from the metrics API of gputile's scheduler.

One list request. Where that API is not served, commands go on without it, and report it on stderr.
"""

from typing import Any

from gputile.cli.cluster_summary import LiveUse
from gputile.cli.source import ClusterSource, UnreadableKind, warn_fallback

PATH = "/apis/metrics.nvidia.com/v1alpha1/podresources"
WITHOUT = "the output shows what pods hold, not what they use"


def live_usage(source: ClusterSource) -> LiveUse:
    """Ask the metrics API; a file has none."""
    if source.files:
        return {}
    answer = source.get({"use": PATH})["use"]
    if isinstance(answer, UnreadableKind):
        warn_fallback(f"the metrics API cannot be read, so {WITHOUT} ({answer.why})")
    elif not isinstance(answer, dict):
        warn_fallback(f"this cluster serves no GPU metrics API, so {WITHOUT}")
    return usage_by_pod_and_card(answer.get("items") or ()) if isinstance(answer, dict) else {}


def usage_by_pod_and_card(items: Any) -> dict[tuple[str, str], dict[str, int]]:
    """Containers of one pod on one card add up; where one of them has no value, the sum is unknown."""
    uses: dict[tuple[str, str], list[dict[str, int]]] = {}
    for item in items:
        spec = item.get("spec") or {}
        pod = f"{spec.get('pod_namespace')}/{spec.get('pod_name')}"
        for container in spec.get("containers_device") or ():
            for tile in container.get("device_info") or ():
                uses.setdefault((pod, str(tile.get("device_id"))), []).append(tile.get("use") or {})
    return {key: _sum(values) for key, values in uses.items()}


def _sum(uses: list[dict[str, int]]) -> dict[str, int]:
    return {name: sum(use[name] for use in uses) for name in ("memory", "cores") if all(name in use for use in uses)}
