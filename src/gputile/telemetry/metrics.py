"""The numbers of the scheduler process, for Prometheus. Names and labels are a contract: they are only ever added."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

disable_created_metrics()  # type: ignore[no-untyped-call]  # a time stamp beside every series, which nobody reads

STAGES = (0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.008, 0.015, 0.03, 0.06, 0.125, 0.25, 0.5, 1.0, 2.0, 5.0)
"""Buckets in seconds: a filter call should end in the first half, a bind in the second."""


class Metrics:
    """One registry per process, so that tests can have several."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.verbs = self._counter("verbs_total", "Verbs answered.", "verb", "result")
        self.connections = self._counter("connections_total", "Connections by what they speak.", "protocol")
        self.seconds = Histogram(
            "gputile_verb_seconds",
            "Time per verb and stage: read (the body), decide, api (the API server), write (the answer).",
            ("verb", "stage"),
            buckets=STAGES,
            registry=self.registry,
        )
        self._stages: dict[tuple[str, str], Histogram] = {}
        self.refusals = self._counter("refusals_total", "Nodes refused when nothing fitted, by reason.", "code")
        self.remembered = self._counter("remembered_nos_total", "Answers no that were given again without a look.")
        self.bad_requests = self._counter("bad_requests_total", "Pods that no node can serve, by reason.", "code")
        self.pencils = self._counter("pencils_total", "Pencils by how they ended: bound, expired, replaced.", "end")
        self.binds = self._counter("binds_total", "Binds by how they ended: bound, conflict, refused, unclear.", "end")
        self.expired = self._counter("assumed_expired_total", "Binds whose outcome had to be looked up.")
        self.conflicts = self._counter("conflicts_total", "Times the cluster showed more on a card than it has.")
        self.evicted = self._counter("overlap_evictions_total", "Pods evicted because their card was sold twice.")
        self.spoilt = self._counter("unreadable_objects_total", "Objects of the API server that cannot be read.")
        self.copied = self._counter("copied_grants_total", "Grants found on a pod or node they were not made for.")
        self.around = self._counter("granted_around_total", "Pods bound by somebody else that we granted cards.")
        self.nudges = self._counter("nudges_total", "Waiting pods that kube-scheduler was made to try again.")
        self.preemptions = self._counter(
            "preemptions_total", "Own preemptions by how they ended: bound, expired, withdrawn.", "end"
        )
        self.evictions = self._counter("evictions_total", "Pods evicted to make room.")
        self.promises = self._gauge("promises", "Pods for which room is being kept.")
        self.troubles = self._counter("watch_troubles_total", "Times a watch broke.", "kind")
        self.lag = self._gauge("watch_silence_seconds", "Time since the API server last said anything.", "kind")
        self.book = self._gauge("book_pods", "Pods in the book, by state; waiting pods hold nothing.", "state")
        self.cards = self._gauge("cards", "Cards in the fleet.")
        self.nodes = self._gauge("nodes", "Nodes in the fleet, those without cards too.")
        self.leads = self._gauge("leads", "1 while this replica leads.")
        self.synced = self._gauge("synced", "1 while the book shows the cluster.")

    def stage(self, verb: str, stage: str) -> Histogram:
        """The clock of one stage; looking it up by its labels costs more than observing, so it is remembered."""
        if (verb, stage) not in self._stages:
            self._stages[verb, stage] = self.seconds.labels(verb, stage)
        return self._stages[verb, stage]

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"gputile_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"gputile_{name}", text, labels, registry=self.registry)

    def text(self) -> bytes:
        """What a scrape gets."""
        return generate_latest(self.registry)
