"""What a remainder of a card is worth.

The simplex is checked by duality: prices that no pattern beats, and as many cards bought with them as the packing uses,
prove each other best.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputile.engine.policies.cutting_stock import prices, solve, values
from tests.effort import examples


@pytest.mark.parametrize(
    ("demand", "want"),
    [
        pytest.param({50: 1.0}, {50: 1 / 2}, id="halves-are-worth-a-half"),
        pytest.param({51: 1.0}, {51: 1.0}, id="a-bit-more-than-a-half-wastes-the-rest"),
        pytest.param({65: 1.0, 32: 1.0}, {65: 2 / 3, 32: 1 / 3}, id="two-that-fit-together-share-the-card"),
        pytest.param({81: 1.0, 19: 9.0}, {81: 0.8, 19: 1 / 5}, id="small-ones-that-are-plenty-count-by-fives"),
        pytest.param({}, {}, id="nothing-asked-for"),
        pytest.param({100: 1.0, 0: 3.0}, {100: 1.0}, id="whole-cards-are-whole"),
    ],
)
def test_prices(demand: dict[int, float], want: dict[int, float]) -> None:
    actual = prices(demand)
    assert actual.keys() == want.keys()
    if len(want) == 1:
        assert actual == pytest.approx(want)
    value = sum(actual[size] * wanted for size, wanted in demand.items() if size in actual)
    assert value == pytest.approx(sum(want[size] * wanted for size, wanted in demand.items() if size in want), rel=1e-3)


def test_what_is_left_is_worth_what_fits_into_it() -> None:
    table = values({81: 1.0, 65: 2 / 3, 47: 1 / 2, 32: 1 / 3, 23: 1 / 4})
    assert [round(float(table[r]), 3) for r in (0, 22, 23, 32, 46, 47, 65, 80, 81, 100)] == [
        0, 0, 0.25, 0.333, 0.5, 0.5, 0.667, 0.833, 1, 1,
    ]  # fmt: skip


def test_with_nothing_known_a_remainder_is_worth_its_size() -> None:
    assert values({})[37] == pytest.approx(0.37)


@examples(60)
@given(st.dictionaries(st.integers(1, 100), st.integers(1, 50), min_size=1, max_size=12))
def test_prices_and_packing_prove_each_other(demand: dict[int, int]) -> None:
    sizes = np.array(sorted(demand))
    wanted = np.array([float(demand[size]) for size in sorted(demand)]) + 1e-6 * np.arange(1, len(sizes) + 1)
    duals, cards = solve(sizes, wanted)
    assert float(duals @ wanted) == pytest.approx(cards)
    table = values({int(size): max(0.0, float(price)) for size, price in zip(sizes, duals, strict=True)})
    worth = np.zeros(101)
    for space in range(1, 101):
        options = [worth[space - s] + d for s, d in zip(sizes.tolist(), duals.tolist(), strict=True) if s <= space]
        worth[space] = max([worth[space - 1], *options])
    assert worth[100] <= 1 + 1e-6, "a pattern that pays better than a card was missed"
    assert (np.diff(table) >= -1e-12).all()
