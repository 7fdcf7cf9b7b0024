"""Which pods a PodDisruptionBudget selects, and how many evictions it allows."""

from typing import Any

import msgspec
import pytest

from gputile.kube.disruption_budgets import DisruptionBudget


def budget(selector: Any = None, **status: int) -> DisruptionBudget:
    manifest = {
        "metadata": {"name": "b", "namespace": "ns", "generation": 2},
        "spec": {"selector": selector, "minAvailable": 1},
        "status": {"observedGeneration": 2, "currentHealthy": 3, **status},
    }
    return msgspec.convert(manifest, DisruptionBudget)


def rule(operator: str, *values: str) -> dict[str, Any]:
    return {"matchExpressions": [{"key": "app", "operator": operator, "values": list(values)}]}


@pytest.mark.parametrize(
    ("selector", "protected"),
    [
        pytest.param({}, {"db", "web", "bare"}, id="an-empty-selector-protects-all"),
        pytest.param(None, set(), id="without-a-selector-none"),
        pytest.param({"matchLabels": {"app": "db"}}, {"db"}, id="by-label"),
        pytest.param({"matchLabels": {"app": "db", "tier": "1"}}, set(), id="all-labels-must-match"),
        pytest.param(rule("In", "db", "x"), {"db"}, id="in"),
        pytest.param(rule("NotIn", "db"), {"web", "bare"}, id="not-in-holds-without-the-label-too"),
        pytest.param(rule("Exists"), {"db", "web"}, id="exists"),
        pytest.param(rule("DoesNotExist"), {"bare"}, id="does-not-exist"),
        pytest.param(rule("Gt", "3"), {"db", "web", "bare"}, id="an-unknown-operator-protects"),
    ],
)
def test_the_pods_that_a_budget_protects(selector: Any, protected: set[str]) -> None:
    pods: dict[str, dict[str, str]] = {"db": {"app": "db"}, "web": {"app": "web"}, "bare": {}}
    selected = budget(selector)
    assert {name for name, labels in pods.items() if selected.protects("ns", labels)} == protected
    assert not any(selected.protects("other", labels) for labels in pods.values())


@pytest.mark.parametrize(
    ("status", "allowed"),
    [
        pytest.param({"disruptionsAllowed": 2}, 2, id="as-its-controller-computed"),
        pytest.param({}, 0, id="none-without-a-status"),
        pytest.param({"disruptionsAllowed": 2, "observedGeneration": 1}, 0, id="none-while-the-status-is-stale"),
    ],
)
def test_the_number_of_allowed_evictions(status: dict[str, int], allowed: int) -> None:
    assert budget({}, **status).allowed == allowed
    assert budget({}, **status).key == "ns/b"
