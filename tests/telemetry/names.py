"""Every metric with its labels: the names that docs and dashboards may use."""

from prometheus_client import Histogram
from prometheus_client.metrics import MetricWrapperBase

from gputile.telemetry.agent_metrics import AgentMetrics
from gputile.telemetry.exposition import AGENT_FAMILIES, FAMILIES
from gputile.telemetry.hami_metrics import HAMI_AGENT_FAMILIES, HAMI_FAMILIES
from gputile.telemetry.metrics import LabelledCounter, Metrics

Names = dict[str, tuple[str, ...]]


def scheduler() -> Names:
    return {**counted(Metrics()), **{family.name: family.labels for family in FAMILIES}}


def agent() -> Names:
    return {**counted(AgentMetrics()), **{family.name: family.labels for family in AGENT_FAMILIES}}


def hami() -> Names:
    return {family.name: family.labels for family in (*HAMI_FAMILIES, *HAMI_AGENT_FAMILIES)}


def counted(metrics: Metrics | AgentMetrics) -> Names:
    """The metrics of a registry by their Prometheus names, a histogram by its family's name."""
    names: Names = {}
    for value in vars(metrics).values():
        metric = value._counter if isinstance(value, LabelledCounter) else value
        if isinstance(metric, MetricWrapperBase):
            total = "_total" if metric._type == "counter" else ""
            names[f"{metric._name}{total}"] = metric._labelnames
    for family in metrics.registry.collect():
        if family.type == "histogram":
            names[family.name] = getattr(family, "_labelnames", ())
    assert not any(isinstance(value, Histogram) for value in vars(metrics).values())
    return names


def samples(names: Names) -> Names:
    """Also with the names of a histogram's samples."""
    buckets = {
        f"{name}{end}": (*labels, *(("le",) if end == "_bucket" else ()))
        for name, labels in names.items()
        if name.endswith("_seconds")
        for end in ("_bucket", "_sum", "_count")
    }
    return {**names, **buckets}
