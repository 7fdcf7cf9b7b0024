"""The exposition page: valid text for Prometheus, and stable names."""

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gputile.telemetry.agent_metrics import AgentMetrics
from gputile.telemetry.exposition import AGENT_FAMILIES, FAMILIES, ExpositionPage, MetricFamily, labelled
from gputile.telemetry.hami_metrics import HAMI_AGENT_FAMILIES, HAMI_FAMILIES, device_type
from gputile.telemetry.metrics import Metrics

EVERY = (*FAMILIES, *AGENT_FAMILIES, *HAMI_FAMILIES, *HAMI_AGENT_FAMILIES)
LENGTH = MetricFamily("x_length_metres", "How long.", ("name",))
COUNT = MetricFamily("x_count", "How many.")


@pytest.mark.parametrize("name", ["plain", 'a "b"', "back\\slash", "two\nlines", "\\n", "", "ünï"])
def test_every_label_is_parsed_as_it_was_written(name: str) -> None:
    page = ExpositionPage((LENGTH, COUNT))
    page.add(COUNT, "", 2)
    page.add(LENGTH, labelled(LENGTH.labels, name), 1.5)
    family, other = text_string_to_metric_families(page.text().decode())
    assert (family.name, family.documentation, family.type) == ("x_length_metres", "How long.", "gauge")
    assert [(s.labels, s.value) for s in family.samples] == [({"name": name}, 1.5)]
    assert [(s.labels, s.value) for s in other.samples] == [({}, 2.0)]


def test_labels_are_as_many_as_the_family_has() -> None:
    with pytest.raises(ValueError, match="argument"):
        labelled(LENGTH.labels, "one", "too many")


def test_no_name_twice_and_none_of_another_registry() -> None:
    counted = {f.name for metrics in (Metrics(), AgentMetrics()) for f in metrics.registry.collect()}
    names = [family.name for family in EVERY]
    assert len(set(names)) == len(names)
    assert not counted & set(names)


@pytest.mark.parametrize("family", [*FAMILIES, *AGENT_FAMILIES], ids=lambda family: family.name)
def test_units_are_prometheus_own(family: MetricFamily) -> None:
    """Bytes, ratios from 0 to 1, or counts; never MiB or percent."""
    assert re.fullmatch(r"gputile(_[a-z]+)+", family.name)
    if "memory" in family.name:
        assert family.name.endswith("_bytes")
    if "cores" in family.name:
        assert family.name.endswith("_ratio")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        pytest.param("Tesla T4", "NVIDIA-Tesla T4", id="as-named-by-the-driver"),
        pytest.param("NVIDIA-Tesla T4", "NVIDIA-Tesla T4", id="as-named-by-hamis-agent"),
    ],
)
def test_hamis_name_of_a_model(model: str, name: str) -> None:
    assert device_type(model) == name
