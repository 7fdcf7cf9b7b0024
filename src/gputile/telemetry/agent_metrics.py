"""Counters and gauges of the agent process, for Prometheus.

Names and labels are a contract: they may be added, never renamed or removed.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest

disable_created_metrics()  # type: ignore[no-untyped-call]


class AgentMetrics:
    """The metrics of one agent process, in a registry of their own, so that tests can have several."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.cards = self._gauge("gpus", "GPUs of this node, by state.", "state")
        self.has_driver = self._gauge("has_driver", "1 while the GPU driver responds.")
        self.has_cdi = self._gauge(
            "has_cdi", "1 while the container runtime applies CDI specs, as verified on the node."
        )
        self.registered = self._gauge("registered", "1 while the resource is registered with the kubelet.", "resource")
        self.starts = self._counter("starts_total", "PreStartContainer calls by outcome: served, rejected.", "outcome")
        self.allocations = self._counter("allocations_total", "Allocate calls of the kubelet, by resource.", "resource")
        self.xids = self._counter("xids_total", "XID errors reported by the driver.", "xid")
        self.writes = self._counter(
            "node_writes_total", "Writes to the Node object, by part: inventory, status.", "what"
        )
        self.compared = self._counter(
            "consistency_checks_total", "Comparisons of the node with the grants of its pods."
        )
        self.disagreements = self._gauge(
            "inconsistencies",
            "Places where the kubelet, the CDI specs or the processes contradict the grants, by kind.",
            "kind",
        )
        self.elsewhere = self._gauge(
            "device_ids_elsewhere", "Containers whose device IDs name another GPU than their grant."
        )
        self.over_use = self._gauge("memory_overuse", "Pods that use more GPU memory than granted, counted per GPU.")
        self.swept = self._counter("removed_cdi_specs_total", "CDI specs removed after the deletion of their pod.")
        self.loop_failures = self._counter(
            "loop_failures_total", "Failed iterations of a loop; the loop continues.", "loop"
        )
        self.beats = self._counter("heartbeats_total", "Renewals of the Lease, by outcome.", "outcome")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"gputile_agent_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"gputile_agent_{name}", text, labels, registry=self.registry)

    def text(self) -> bytes:
        """The metrics in the text format of Prometheus."""
        return generate_latest(self.registry)
