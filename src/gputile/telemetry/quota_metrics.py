"""What namespaces hold of their quotas, for Prometheus; read from the book at each scrape, so what is gone is gone."""

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gputile.book.spending import Spending
from gputile.engine.quota import KINDS, total
from gputile.model.quotas import Amount, Limit
from gputile.model.units import ALL

LABELS = ("namespace", "model", "kind")
SCALE = {"cards": 1 / ALL, "memory": 1024.0**2, "cores": 1.0}
"""Cards, bytes, percent of one card's cores."""


class QuotaCollector(Collector):
    """`gputile_quota_used` and `gputile_quota_limit`, a series for each limit that is set."""

    def __init__(self, spending: Spending) -> None:
        self._spending = spending

    def collect(self) -> Iterator[GaugeMetricFamily]:
        units = "kind is cards, memory (bytes) or cores (percent of one card)"
        used = GaugeMetricFamily("gputile_quota_used", f"Held of what a quota counts; {units}.", labels=LABELS)
        most = GaugeMetricFamily("gputile_quota_limit", f"What a quota allows at most; {units}.", labels=LABELS)
        for namespace in self._spending.namespaces():
            quota = self._spending.quota(namespace)
            for limit in quota.limits if quota else ():
                for kind, held, allowed in _lines(limit, total(self._spending.held(namespace), limit)):
                    labels = (namespace, limit.model, kind)
                    used.add_metric(labels, held)
                    most.add_metric(labels, allowed)
        yield used
        yield most


def _lines(limit: Limit, held: Amount) -> Iterator[tuple[str, float, float]]:
    for kind in KINDS:
        allowed = getattr(limit, kind)
        if allowed is not None:
            yield kind, getattr(held, kind) * SCALE[kind], allowed * SCALE[kind]
