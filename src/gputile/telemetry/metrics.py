"""Counters, gauges and histograms of the scheduler process, for Prometheus.

Names and labels are a contract: they may be added, never renamed or removed. Cluster metrics are in `exposition`.
"""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

disable_created_metrics()  # type: ignore[no-untyped-call]  # a `_created` series beside every counter, which is not used

STAGES = (0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.008, 0.015, 0.03, 0.06, 0.125, 0.25, 0.5, 1.0, 2.0, 5.0)
"""Buckets in seconds: a filter call should end in the first half, a bind in the second."""


class StageTimer:
    """The durations of one stage of one verb. Every call of kube-scheduler is measured several times, by one thread:
    so there is no lock, and the bucket is found by bisection."""

    def __init__(self) -> None:
        self.counts, self.total = [0] * (len(STAGES) + 1), 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(STAGES, seconds)] += 1
        self.total += seconds


class StageHistogram(Collector):
    """All stage timers, exported as one histogram."""

    def __init__(self) -> None:
        self._timers: dict[tuple[str, str], StageTimer] = {}

    def stage(self, verb: str, stage: str) -> StageTimer:
        timer = self._timers.get((verb, stage))
        if timer is None:
            timer = self._timers[verb, stage] = StageTimer()
        return timer

    def collect(self) -> Iterator[HistogramMetricFamily]:
        text = "Time per verb and stage: read (request body), decide, api (API server), write (response)."
        family = HistogramMetricFamily("gputile_verb_seconds", text, labels=("verb", "stage"))
        for labels, timer in self._timers.items():
            edges = (*(str(edge) for edge in STAGES), "+Inf")
            family.add_metric(labels, list(zip(edges, accumulate(timer.counts), strict=True)), timer.total)
        yield family


class LabelledCounter:
    """A counter with labels that caches its series, because looking a series up costs more than counting."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._series: dict[tuple[str, ...], Counter] = {}

    def labels(self, *values: str) -> Counter:
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = self._counter.labels(*values)
        return series


class Metrics:
    """The metrics of one scheduler process, in a registry of their own, so that tests can have several."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.verbs = self._tally("verbs_total", "Extender calls answered, by verb and result.", "verb", "result")
        self.connections = self._tally("connections_total", "Client connections accepted, by protocol.", "protocol")
        self._stages = StageHistogram()
        self.registry.register(self._stages)
        self.refusals = self._tally("refusals_total", "Nodes rejected for pods that fit on no node, by reason.", "code")
        self.remembered = self._counter("cached_rejections_total", "Rejections answered from the refusal cache.")
        self.bad_requests = self._tally("bad_requests_total", "Pods with an invalid GPU request, by reason.", "code")
        self.reservations = self._tally(
            "reservations_total",
            "Reservations between filter and bind, by outcome: bound, expired, replaced.",
            "outcome",
        )
        self.binds = self._tally("binds_total", "Binds by outcome: bound, conflict, rejected, unknown.", "outcome")
        self.expired = self._counter(
            "assumed_expired_total", "Binds whose outcome had to be looked up at the API server."
        )
        self.conflicts = self._counter("overcommits_total", "Times a GPU was found overcommitted.")
        self.evicted = self._counter("overlap_evictions_total", "Pods evicted because their GPU was allocated twice.")
        self.undecodable = self._counter(
            "undecodable_objects_total", "Objects of the API server that cannot be decoded."
        )
        self.copied = self._counter(
            "copied_grants_total", "Grants found on another pod or node than they were written for."
        )
        self.adopted = self._counter("adopted_pods_total", "Pods bound by another scheduler that were granted GPUs.")
        self.admission_failures = self._counter("admission_failures_total", "Bound pods that the kubelet rejected.")
        self.nudges = self._counter("nudges_total", "Pending pods that were requeued at kube-scheduler by a nudge.")
        self.preemptions = self._tally(
            "preemptions_total", "Preemptions started by gputile, by outcome: bound, expired, withdrawn.", "outcome"
        )
        self.evictions = self._counter("evictions_total", "Pods evicted by preemption.")
        self.nominations = self._gauge(
            "nominations", "Pending pods with a nominated node on which capacity is kept for them."
        )
        self.cut_short = self._tally(
            "searches_truncated_total", "Searches that ended at their step or time limit, by search.", "search"
        )
        self.failures = self._tally(
            "internal_errors_total", "Unexpected errors by loop; each ends the work on one object only.", "loop"
        )
        self.watch_failures = self._tally("watch_failures_total", "Failures of a watch, by kind of object.", "kind")
        self.lag = self._gauge(
            "watch_age_seconds", "Time since the last message of a watch, by kind of object.", "kind"
        )
        self.ledger_pods = self._gauge(
            "ledger_pods", "Pods in the ledger, by state; pending pods hold nothing.", "state"
        )
        self.cards = self._gauge("gpus", "GPUs of all nodes.")
        self.nodes = self._gauge("nodes", "Nodes, including those without GPUs.")
        self.agents = self._gauge("agents", "Leases of node agents, by state: alive, stale.", "state")
        self.orphans = self._gauge(
            "orphaned_pods", "Deleted pods whose GPU shares are still held, because their containers may run."
        )
        self.api_requests = self._tally(
            "metrics_api_requests_total", "Requests to the metrics API.", "resource", "verb", "code"
        )
        self.quota_invalid = self._gauge("quota_invalid", "1 while the quota ConfigMap is invalid.", "configmap")
        self.quota_edits = self._tally(
            "quota_edits_total", "Edits of quota ConfigMaps, by result: taken, refused.", "configmap", "result"
        )
        self.leads = self._gauge("leader", "1 while this replica is the leader.")
        self.synced = self._gauge("synced", "1 once all nodes, pods and quotas have been listed.")

    def stage(self, verb: str, stage: str) -> StageTimer:
        return self._stages.stage(verb, stage)

    def _tally(self, name: str, text: str, *labels: str) -> LabelledCounter:
        return LabelledCounter(Counter(f"gputile_{name}", text, labels, registry=self.registry))

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"gputile_{name}", text, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"gputile_{name}", text, labels, registry=self.registry)

    def text(self) -> bytes:
        """The metrics in the text format of Prometheus."""
        return generate_latest(self.registry)
