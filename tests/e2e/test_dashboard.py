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
NOTHING_WRONG = (
    # What these show did not happen on this cluster: faults, pending pods, quotas, preemption, GPU errors, busy cores.
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
    """With a container that uses memory of its GPU, and two scrapes, which rates need."""
    card = site.use("side", 3000)
    with prometheus(site.plane, site.gputile, site.agent) as server:
        used = f'gputile_container_memory_used_bytes{{uuid="{card}"}}'
        wait_until(lambda: server.query(used), PATIENCE, "the use is scraped")
        wait_until(lambda: server.query("min_over_time(count_over_time(up[5m])[1m:]) >= 3"), PATIENCE, "some scrapes")
        yield server


@pytest.mark.parametrize("expression", QUERIES)
def test_every_query_is_accepted_and_shows_what_is_there(scraped: Prometheus, expression: str) -> None:
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    series = scraped.query(expression)
    assert series or any(words in expression for words in NOTHING_WRONG)


def test_its_variables_have_values(scraped: Prometheus) -> None:
    assert {one["metric"]["node"] for one in scraped.query("gputile_node_memory_bytes")} == {"node-a"}
    assert scraped.query("group by (namespace) (gputile_pod_memory_allocated_bytes)")
