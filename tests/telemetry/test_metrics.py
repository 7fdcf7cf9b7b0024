"""The numbers: their names are a contract."""

from gputile.telemetry.metrics import Metrics

NAMES = {
    "gputile_verbs_total": ("verb", "result"),
    "gputile_connections_total": ("protocol",),
    "gputile_refusals_total": ("code",),
    "gputile_bad_requests_total": ("code",),
    "gputile_pencils_total": ("end",),
    "gputile_binds_total": ("end",),
    "gputile_assumed_expired_total": (),
    "gputile_conflicts_total": (),
    "gputile_unreadable_objects_total": (),
    "gputile_copied_grants_total": (),
    "gputile_granted_around_total": (),
    "gputile_nudges_total": (),
    "gputile_watch_troubles_total": ("kind",),
    "gputile_watch_silence_seconds": ("kind",),
    "gputile_book_pods": ("state",),
    "gputile_cards": (),
    "gputile_nodes": (),
    "gputile_leads": (),
    "gputile_synced": (),
    "gputile_verb_seconds_count": ("verb", "stage"),
}


def test_every_name_is_there_and_stays() -> None:
    metrics = Metrics()
    for one in vars(metrics).values():
        if hasattr(one, "labels") and one._labelnames:
            one.labels(*("x" for _ in one._labelnames))
    samples = {sample.name: set(sample.labels) for family in metrics.registry.collect() for sample in family.samples}
    for name, labels in NAMES.items():
        assert samples[name] == set(labels), name


def test_two_processes_in_one_have_a_registry_each() -> None:
    one, other = Metrics(), Metrics()
    one.nudges.inc()
    assert other.registry.get_sample_value("gputile_nudges_total") == 0


def test_a_stage_is_looked_up_once() -> None:
    metrics = Metrics()
    assert metrics.stage("filter", "read") is metrics.stage("filter", "read")
    metrics.stage("filter", "read").observe(0.001)
    said = metrics.text().decode()
    assert 'gputile_verb_seconds_count{stage="read",verb="filter"} 1.0' in said
    assert 'gputile_verb_seconds_bucket{le="0.001",stage="read",verb="filter"} 1.0' in said
