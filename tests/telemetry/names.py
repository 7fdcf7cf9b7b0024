"""Every metric there is, with its labels: what docs and dashboards may name."""

from prometheus_client import Histogram
from prometheus_client.metrics import MetricWrapperBase

from gputile.telemetry.agent_metrics import AgentMetrics
from gputile.telemetry.exposition import AGENT_FAMILIES, FAMILIES
from gputile.telemetry.hami_metrics import HAMI_AGENT_FAMILIES, HAMI_FAMILIES
from gputile.telemetry.metrics import LabelledCounter, Metrics

Names = dict[str, tuple[str, ...]]


def scheduler() -> Names:
    return {**counted(Metrics()), **{one.name: one.labels for one in FAMILIES}}


def agent() -> Names:
    return {**counted(AgentMetrics()), **{one.name: one.labels for one in AGENT_FAMILIES}}


def hami() -> Names:
    return {one.name: one.labels for one in (*HAMI_FAMILIES, *HAMI_AGENT_FAMILIES)}


def counted(metrics: Metrics | AgentMetrics) -> Names:
    """Those of a registry, as Prometheus calls them, a histogram by the name of the whole."""
    found: Names = {}
    for one in vars(metrics).values():
        metric = one._counter if isinstance(one, LabelledCounter) else one
        if isinstance(metric, MetricWrapperBase):
            total = "_total" if metric._type == "counter" else ""
            found[f"{metric._name}{total}"] = metric._labelnames
    for family in metrics.registry.collect():
        if family.type == "histogram":
            found[family.name] = getattr(family, "_labelnames", ())
    assert not any(isinstance(one, Histogram) for one in vars(metrics).values())
    return found


def samples(names: Names) -> Names:
    """With the names that a histogram's samples have."""
    buckets = {
        f"{name}{end}": (*labels, *(("le",) if end == "_bucket" else ()))
        for name, labels in names.items()
        if name.endswith("_seconds")
        for end in ("_bucket", "_sum", "_count")
    }
    return {**names, **buckets}
