"""The numbers of the scheduler process, for Prometheus. Names and labels are a contract: they are only ever added."""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

disable_created_metrics()  # type: ignore[no-untyped-call]  # a time stamp beside every series, which nobody reads

STAGES = (0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.008, 0.015, 0.03, 0.06, 0.125, 0.25, 0.5, 1.0, 2.0, 5.0)
"""Buckets in seconds: a filter call should end in the first half, a bind in the second."""


class StageTimer:
    """How long one stage of one verb takes. Every call of kube-scheduler is measured several times, by one thread:
    so no lock, and no walk through the buckets."""

    def __init__(self) -> None:
        self.counts, self.total = [0] * (len(STAGES) + 1), 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(STAGES, seconds)] += 1
        self.total += seconds


class StageHistogram(Collector):
    """All clocks, as one histogram."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], StageTimer] = {}

    def stage(self, verb: str, stage: str) -> StageTimer:
        found = self._known.get((verb, stage))
        if found is None:
            found = self._known[verb, stage] = StageTimer()
        return found

    def collect(self) -> Iterator[HistogramMetricFamily]:
        text = "Time per verb and stage: read (the body), decide, api (the API server), write (the answer)."
        found = HistogramMetricFamily("gputile_verb_seconds", text, labels=("verb", "stage"))
        for labels, clock in self._known.items():
            edges = (*(str(edge) for edge in STAGES), "+Inf")
            found.add_metric(labels, list(zip(edges, accumulate(clock.counts), strict=True)), clock.total)
        yield found


class LabelledCounter:
    """A counter with labels, whose series are remembered: to look one up costs more than to count."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._known: dict[tuple[str, ...], Counter] = {}

    def labels(self, *values: str) -> Counter:
        found = self._known.get(values)
        if found is None:
            found = self._known[values] = self._counter.labels(*values)
        return found


class Metrics:
    """One registry per process, so that tests can have several."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.verbs = self._tally("verbs_total", "Verbs answered.", "verb", "result")
        self.connections = self._tally("connections_total", "Connections by what they speak.", "protocol")
        self._clocks = StageHistogram()
        self.registry.register(self._clocks)
        self.refusals = self._tally("refusals_total", "Nodes refused when nothing fitted, by reason.", "code")
        self.remembered = self._counter("cached_rejections_total", "Answers no that were given again without a look.")
        self.bad_requests = self._tally("bad_requests_total", "Pods that no node can serve, by reason.", "code")
        self.reservations = self._tally(
            "reservations_total", "Pencils by how they ended: bound, expired, replaced.", "outcome"
        )
        self.binds = self._tally(
            "binds_total", "Binds by how they ended: bound, conflict, rejected, unknown.", "outcome"
        )
        self.expired = self._counter("assumed_expired_total", "Binds whose outcome had to be looked up.")
        self.conflicts = self._counter("overcommits_total", "Times the cluster showed more on a card than it has.")
        self.evicted = self._counter("overlap_evictions_total", "Pods evicted because their card was sold twice.")
        self.spoilt = self._counter("undecodable_objects_total", "Objects of the API server that cannot be read.")
        self.copied = self._counter("copied_grants_total", "Grants found on a pod or node they were not made for.")
        self.around = self._counter("adopted_pods_total", "Pods bound by somebody else that we granted cards.")
        self.turned_away = self._counter("admission_failures_total", "Pods bound to a node whose kubelet failed them.")
        self.nudges = self._counter("nudges_total", "Waiting pods that kube-scheduler was made to try again.")
        self.preemptions = self._tally(
            "preemptions_total", "Own preemptions by how they ended: bound, expired, withdrawn.", "outcome"
        )
        self.evictions = self._counter("evictions_total", "Pods evicted to make room.")
        self.nominations = self._gauge("nominations", "Pods for which room is being kept.")
        self.cut_short = self._tally(
            "searches_truncated_total", "Questions of which the answer is that nobody searched further.", "search"
        )
        self.failures = self._tally(
            "internal_errors_total", "Unexpected errors by loop; they end the work on one object only.", "loop"
        )
        self.troubles = self._tally("watch_failures_total", "Times a watch broke.", "kind")
        self.lag = self._gauge("watch_age_seconds", "Time since the API server last said anything.", "kind")
        self.book = self._gauge("ledger_pods", "Pods in the book, by state; waiting pods hold nothing.", "state")
        self.cards = self._gauge("gpus", "Cards in the fleet.")
        self.nodes = self._gauge("nodes", "Nodes in the fleet, those without cards too.")
        self.agents = self._gauge("agents", "Leases of node agents, by state: alive, silent.", "state")
        self.orphans = self._gauge("orphaned_pods", "Pods that are gone, and whose tiles are still held.")
        self.api_requests = self._tally("metrics_api_requests_total", "Asked of it.", "resource", "verb", "code")
        self.quota_broken = self._gauge("quota_invalid", "1 while a ConfigMap of quotas cannot be used.", "configmap")
        self.quota_edits = self._tally(
            "quota_edits_total", "Edits of quotas by what became of them: taken, refused.", "configmap", "result"
        )
        self.leads = self._gauge("leader", "1 while this replica leads.")
        self.synced = self._gauge("synced", "1 while the book shows the cluster.")

    def stage(self, verb: str, stage: str) -> StageTimer:
        return self._clocks.stage(verb, stage)

    def _tally(self, name: str, text: str, *labels: str) -> LabelledCounter:
        return LabelledCounter(Counter(f"gputile_{name}", text, labels, registry=self.registry))

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"gputile_{name}", text, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"gputile_{name}", text, labels, registry=self.registry)

    def text(self) -> bytes:
        """What a scrape gets."""
        return generate_latest(self.registry)
