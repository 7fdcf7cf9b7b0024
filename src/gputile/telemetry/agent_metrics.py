"""The numbers of the agent process, for Prometheus. Names and labels are a contract: they are only ever added."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest

disable_created_metrics()  # type: ignore[no-untyped-call]


class AgentMetrics:
    """One registry per process, so that tests can have several."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.cards = self._gauge("gpus", "Cards of this node, by whether they are in use.", "state")
        self.has_driver = self._gauge("has_driver", "1 while the GPU driver answers.")
        self.has_cdi = self._gauge("has_cdi", "1 while the runtime obeys CDI, as proven on the node.")
        self.registered = self._gauge("registered", "1 while the kubelet knows the resource.", "resource")
        self.starts = self._counter("starts_total", "Containers before their start: served, rejected.", "outcome")
        self.allocations = self._counter("allocations_total", "Calls of Allocate by the kubelet.", "resource")
        self.xids = self._counter("xids_total", "Errors that the driver reported.", "xid")
        self.writes = self._counter("node_writes_total", "Writes to our node by what: inventory, status.", "what")
        self.compared = self._counter("consistency_checks_total", "Rounds of comparing the node with its grants.")
        self.disagreements = self._gauge(
            "inconsistencies", "Where the kubelet, the specs or the processes contradict the grants now.", "kind"
        )
        self.elsewhere = self._gauge(
            "device_ids_elsewhere", "Containers whose device IDs name another card than their grant."
        )
        self.over_use = self._gauge(
            "memory_overuse", "Pods that use more memory of a card than granted, each card counted."
        )
        self.swept = self._counter("removed_cdi_specs_total", "CDI specs removed because their pod is gone.")
        self.loop_failures = self._counter("loop_failures_total", "Turns of a loop that failed; it goes on.", "loop")
        self.page: Callable[[], bytes] = bytes  # figures that are made when somebody asks: see `figures`
        self.beats = self._counter("heartbeats_total", "Renewals of the Lease by how they ended.", "outcome")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"gputile_agent_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"gputile_agent_{name}", text, labels, registry=self.registry)

    def text(self) -> bytes:
        """What a scrape gets."""
        return generate_latest(self.registry) + self.page()
