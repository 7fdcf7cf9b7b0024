"""Learning is bounded, whatever kinds of pods tenants create; and it runs beside the fleet.

Deliberate bugs that it caught: without the bounds in `heaviest`, `_popular` and `model_prices`; with folded weights
dropped; with the nearest kept kind looked for by CPU first; with a lesson that keeps the learner's own counts.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputile.engine.fleet.fleet import Fleet
from gputile.engine.policies.workload_model import (
    MOST_FRACTIONS,
    MOST_MODEL_SETS,
    MOST_POPULAR,
    PodKind,
    Supply,
    heaviest,
    model_prices,
    tables,
)
from gputile.model.requests import ModelRule
from gputile.testing.builders import ask, node, wants
from tests.effort import examples

SUPPLY = Supply(models=("A100", "T4"), free=(8.0, 2.0), free_cpu=64_000.0, cpu_per_card=8000.0)


@examples(100)
@given(st.dictionaries(st.integers(1, 99), st.floats(0.5, 100), max_size=99))
def test_fractions_are_few_and_none_of_the_demand_is_lost(demand: dict[int, float]) -> None:
    kept = heaviest(demand)
    assert len(kept) == min(len(demand), MOST_FRACTIONS)
    assert sum(kept.values()) == pytest.approx(sum(demand.values()))
    if len(demand) <= MOST_FRACTIONS:
        assert kept == demand


def test_a_rare_fraction_counts_as_the_next_larger_one() -> None:
    heavy = dict.fromkeys(range(2, 2 + 2 * MOST_FRACTIONS, 2), 100.0)
    assert heaviest(heavy | {3: 1.0, 5: 1.0, 99: 0.5}) == heavy | {4: 101.0, 6: 101.0, 64: 100.0, 2: 100.0} | {
        max(heavy): 100.5
    }


def test_kinds_of_pods_are_few_and_the_rare_count_as_the_nearest() -> None:
    usual = {PodKind(1000 * n, 1, 10): 50.0 for n in range(1, MOST_POPULAR + 1)}
    rare = {PodKind(1000 * n + 1, 1, 10): 25.0 for n in range(1, MOST_POPULAR + 1)}
    learnt = tables(usual | rare, SUPPLY)
    assert len(learnt.weight) == MOST_POPULAR
    assert learnt.weight.sum() == pytest.approx(1.0)
    weights = {int(cpu): float(weight) for cpu, weight in zip(learnt.cpu, learnt.weight, strict=True)}
    assert max(weights.values()) <= 1.6 * min(weights.values()), "each rare one counts as its own neighbour"


def test_a_rare_kind_counts_as_one_of_as_many_cards_however_far_its_cpu_is() -> None:
    usual = {PodKind(n, 1, 10): 50.0 for n in range(MOST_POPULAR - 1)} | {PodKind(100_000, 8, 100): 50.0}
    learnt = tables(usual | {PodKind(1, 8, 100): 49.0} | {PodKind(n, 1, 20): 49.0 for n in range(9)}, SUPPLY)
    eight = learnt.weight[learnt.cards == 8]
    assert eight.sum() == pytest.approx(99 / (50 * MOST_POPULAR + 49 * 10), rel=0.2)


def test_required_sets_of_models_are_few() -> None:
    calls = []

    class Rule(ModelRule, frozen=True):
        def accepts(self, model: str) -> bool:
            calls.append(model)
            return super().accepts(model)

    counts = {PodKind(1000, 1, 100, (Rule((f"model-{n}",)),)): 1.0 for n in range(1000)}
    model_prices(counts, SUPPLY)
    assert len(calls) == MOST_MODEL_SETS * len(SUPPLY.models)


# ---- beside the fleet -----------------------------------------------------------------------------------------------


def some_fleet() -> Fleet:
    fleet = Fleet()
    fleet.set_node(node("n1").cards(8, "A100", "80Gi").node())
    return fleet


def test_learning_in_a_thread_gives_the_same_tables() -> None:
    requests = [wants(ask(1000 * (n % 7 + 1)), cpu=1000) for n in range(300)]
    at_once, beside = some_fleet(), some_fleet()
    beside.scorer.refresh()
    for request in requests:
        at_once.scorer.observe(request)
        beside.scorer.observe(request)
    at_once.scorer.refresh()
    assert beside.scorer.is_due()
    lesson = beside.scorer.lesson()
    assert not beside.scorer.is_due(), "it is being studied"
    for _ in range(300):
        beside.scorer.observe(wants(ask(77_000), cpu=77_000))  # which the lesson does not know of
    beside.scorer.adopt(lesson.study())
    np.testing.assert_array_equal(at_once.scorer.tables().value, beside.scorer.tables().value)
    np.testing.assert_array_equal(at_once.scorer.tables().weight, beside.scorer.tables().weight)


def test_a_new_model_needs_no_new_linear_programme(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes with a node, on the hot path; what remainders are worth does not change by it."""
    fleet = some_fleet()
    fleet.scorer.relearn([wants(ask(1000), models=(ModelRule(("A100",)),)) for _ in range(200)])
    fleet.best(wants(ask(1000)), "tiling")
    monkeypatch.setattr(
        "gputile.engine.policies.workload_model.prices", lambda demand: pytest.fail("the linear programme was solved")
    )
    fleet.set_node(node("n2").cards(8, "H100", "80Gi").node())
    assert fleet.best(wants(ask(1000)), "tiling")
