"""The Grafana dashboard: every metric and label that it names exists."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gputile.telemetry.exposition import FAMILIES, MetricFamily
from tests.telemetry.names import Names, agent, samples, scheduler

FILE = Path(__file__).parents[2] / "deploy/grafana/gputile.json"
BOARD = json.loads(FILE.read_text())
PANELS: list[Any] = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
KNOWN = samples({**scheduler(), **agent()})
FROM_PROMETHEUS = {"instance", "job"}  # labels that every series gets when it is scraped

# PromQL, as far as the dashboard uses it.
TEXT = re.compile(r'"[^"]*"')
SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\s*(\{[^}]*\})?")
GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
FUNCTIONS = {"sum", "count", "max", "min", "topk", "bottomk", "rate", "increase", "histogram_quantile", "vector"}
OPERATORS = {"or", "and", "unless", "bool"}


def errors_in(expression: str, legend: str = "", known: Names = KNOWN) -> list[str]:
    """The metrics and labels of the expression or its legend that do not exist."""
    errors, grouped = [], GROUPING.findall(expression)
    bare = re.sub(r"\[\w+\]", "", GROUPING.sub("", expression))
    labels: set[str] = set(FROM_PROMETHEUS)
    for name, braces in SELECTOR.findall(re.sub(r"(?<![\w:])[\d.]+", "", bare)):
        if name in FUNCTIONS | OPERATORS:
            continue
        if name not in known:
            errors.append(f"no metric {name}")
            continue
        labels |= set(known[name])
        matched = [part.split("=")[0].rstrip("!") for part in TEXT.sub("", braces or "{}")[1:-1].split(",") if part]
        errors += [f"no label {label.strip()} on {name}" for label in matched if label.strip() not in known[name]]
    kept = {label.strip() for names in grouped for label in names.split(",")}
    errors += [f"no label {label} to group by" for label in sorted(kept - labels)]
    left = kept if grouped else labels
    return errors + [
        f"no label {label} for the legend" for label in re.findall(r"\{\{(\w+)\}\}", legend) if label not in left
    ]


def questions() -> Iterator[Any]:
    for panel in PANELS:
        for target in panel["targets"]:
            yield pytest.param(target["expr"], target.get("legendFormat", ""), id=f"{panel['title']}-{target['refId']}")


@pytest.mark.parametrize(("expression", "legend"), list(questions()))
def test_it_queries_only_metrics_and_labels_that_exist(expression: str, legend: str) -> None:
    assert errors_in(expression, legend) == []


def test_its_variables_too() -> None:
    queries = [variable["query"]["query"] for variable in BOARD["templating"]["list"] if variable["type"] == "query"]
    assert queries
    for query in queries:
        match = re.fullmatch(r"label_values\((\w+), (\w+)\)", query)
        assert match is not None, query
        assert match[2] in KNOWN[match[1]]


@pytest.mark.parametrize(
    ("expression", "legend", "error"),
    [
        pytest.param("sum(gputile_node_memory_byte)", "", "no metric gputile_node_memory_byte", id="a-name"),
        pytest.param(
            'gputile_node_pods{nod=~"$node"}', "", "no label nod on gputile_node_pods", id="a-label-that-is-matched"
        ),
        pytest.param(
            'gputile_node_pods{node="a", stat!="b,c=d"}',
            "",
            "no label stat on gputile_node_pods",
            id="the-second-label-that-is-matched",
        ),
        pytest.param(
            "sum by (stage, verbs) (rate(gputile_verb_seconds_bucket[5m]))",
            "",
            "no label verbs to group by",
            id="a-label-to-group-by",
        ),
        pytest.param("gputile_node_pods", "{{nodes}}", "no label nodes for the legend", id="a-label-in-the-legend"),
        pytest.param(
            "sum by (code) (gputile_node_fault)", "{{node}}", "no label node for the legend", id="a-label-summed-away"
        ),
        pytest.param("summ(gputile_node_pods)", "", "no metric summ", id="a-function"),
        pytest.param("topk(10, gputile_free_gpus) or gputile_x", "", "no metric gputile_x", id="after-an-operator"),
    ],
)
def test_a_typo_is_found(expression: str, legend: str, error: str) -> None:
    assert errors_in(expression, legend) == [error]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_cluster_metric_is_on_it(family: MetricFamily) -> None:
    assert re.search(rf"\b{family.name}\b", FILE.read_text())


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    places = [
        (x, y)
        for at in (panel["gridPos"] for panel in BOARD["panels"])
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(places)) == len(places)
    assert max(x for x, _ in places) == 23


def test_it_is_tidy() -> None:
    assert FILE.read_text() == json.dumps(BOARD, indent=2, ensure_ascii=False) + "\n"
