"""The metrics of the scheduler: their names are a contract."""

import pytest

from gputile.telemetry.metrics import STAGES, Metrics

NAMES = {
    "gputile_verbs_total": ("verb", "result"),
    "gputile_connections_total": ("protocol",),
    "gputile_refusals_total": ("code",),
    "gputile_bad_requests_total": ("code",),
    "gputile_reservations_total": ("outcome",),
    "gputile_binds_total": ("outcome",),
    "gputile_assumed_expired_total": (),
    "gputile_overcommits_total": (),
    "gputile_undecodable_objects_total": (),
    "gputile_copied_grants_total": (),
    "gputile_adopted_pods_total": (),
    "gputile_nudges_total": (),
    "gputile_watch_failures_total": ("kind",),
    "gputile_watch_age_seconds": ("kind",),
    "gputile_ledger_pods": ("state",),
    "gputile_gpus": (),
    "gputile_nodes": (),
    "gputile_leader": (),
    "gputile_synced": (),
    "gputile_verb_seconds_count": ("verb", "stage"),
}


def test_every_name_is_there_and_stays() -> None:
    metrics = Metrics()
    metrics.stage("x", "x").observe(0.1)
    for named in vars(metrics).values():
        metric = getattr(named, "_counter", named)
        if hasattr(metric, "labels") and metric._labelnames:
            metric.labels(*("x" for _ in metric._labelnames))
    samples = {sample.name: set(sample.labels) for family in metrics.registry.collect() for sample in family.samples}
    for name, labels in NAMES.items():
        assert samples[name] == set(labels), name


def test_two_processes_in_one_have_a_registry_each() -> None:
    first, second = Metrics(), Metrics()
    first.nudges.inc()
    assert second.registry.get_sample_value("gputile_nudges_total") == 0


@pytest.mark.parametrize(
    ("seconds", "le"),
    [
        pytest.param(0.0001, "0.0002", id="below-the-first-edge"),
        pytest.param(0.001, "0.001", id="on-an-edge"),
        pytest.param(7.0, "+Inf", id="beyond-all-edges"),
    ],
)
def test_a_stage_is_a_histogram(seconds: float, le: str) -> None:
    metrics = Metrics()
    metrics.stage("filter", "read").observe(seconds)
    labels = {"verb": "filter", "stage": "read"}
    value = metrics.registry.get_sample_value
    assert value("gputile_verb_seconds_count", labels) == 1
    assert value("gputile_verb_seconds_sum", labels) == seconds
    edges = [*map(str, STAGES), "+Inf"]
    counts = {edge: value("gputile_verb_seconds_bucket", {**labels, "le": edge}) for edge in edges}
    assert [edge for edge in edges if counts[edge] == 1] == edges[edges.index(le) :]


def test_the_verbs_of_one_process_are_one_histogram() -> None:
    metrics = Metrics()
    for verb in ("filter", "bind"):
        metrics.stage(verb, "decide").observe(0.001)
        metrics.stage(verb, "decide").observe(0.002)
    text = metrics.text().decode()
    assert text.count("# TYPE gputile_verb_seconds histogram") == 1
    assert 'gputile_verb_seconds_count{stage="decide",verb="bind"} 2.0' in text
