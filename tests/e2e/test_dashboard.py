"""The Grafana dashboard's queries on a real Prometheus that scrapes a real scheduler and agent."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.processes import wait_until
from tests.e2e.prometheus import Prometheus, prometheus
from tests.e2e.test_use import PATIENCE, Site, site

__all__ = ["site"]  # the fixture

BOARD = json.loads((Path(__file__).parents[2] / "deploy/grafana/gputile.json").read_text())
QUERIES = [target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", [])]
VARIABLES = {"$node": ".+", "$namespace": ".+"}
EMPTY_ON_A_HEALTHY_CLUSTER = (
    # Not on this cluster: faults, pending pods, quotas, preemption, GPU errors, busy cores.
    "fault",
    "pending_pods",
    'state!="usable"',
    "quota_",
    "preemptions",
    "refusals_total",
    "bad_requests_total",
    "_xids_",
    "cores_used_ratio",
    "== 0",
)


@pytest.fixture(scope="module")
def scraped(site: Site) -> Iterator[Prometheus]:
    """A Prometheus with the usage of one container, and with the three scrapes that rates need."""
    card = site.use("side", 3000)
    with prometheus(site.plane, site.gputile, site.agent) as server:
        used = f'gputile_container_memory_used_bytes{{uuid="{card}"}}'
        wait_until(lambda: server.query(used), PATIENCE, "the usage is scraped")
        wait_until(lambda: server.query("min_over_time(count_over_time(up[5m])[1m:]) >= 3"), PATIENCE, "three scrapes")
        yield server


@pytest.mark.parametrize("expression", QUERIES)
def test_every_query_is_accepted_and_returns_the_series_of_the_cluster(scraped: Prometheus, expression: str) -> None:
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    series = scraped.query(expression)
    assert series or any(words in expression for words in EMPTY_ON_A_HEALTHY_CLUSTER)


def test_the_dashboards_variables_have_values(scraped: Prometheus) -> None:
    assert {series["metric"]["node"] for series in scraped.query("gputile_node_memory_bytes")} == {"node-a"}
    assert scraped.query("group by (namespace) (gputile_pod_memory_allocated_bytes)")
