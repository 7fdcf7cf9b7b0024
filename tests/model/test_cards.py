"""Arithmetic of what is free on a card and what pods hold of it."""

from functools import reduce
from operator import add, sub

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputile.model.cards import NOTHING, FreeCapacity, Use

AMOUNT = st.integers(-50, 200)
USES = st.lists(st.builds(Use, AMOUNT, AMOUNT, AMOUNT), max_size=5)
FREE = st.builds(FreeCapacity, AMOUNT, AMOUNT, AMOUNT, st.integers(0, 9))


def test_one_more_pod_leaves_less_and_is_counted() -> None:
    assert FreeCapacity(100, 100, 10, 2) - Use(30, 20, 1) == FreeCapacity(70, 80, 9, 3)


def test_a_pod_that_goes_leaves_more_and_is_no_longer_counted() -> None:
    assert FreeCapacity(70, 80, 9, 3) + Use(30, 20, 1) == FreeCapacity(100, 100, 10, 2)


@given(free=FREE, uses=USES)
def test_pods_that_come_and_go_in_any_order_leave_what_was_free(free: FreeCapacity, uses: list[Use]) -> None:
    assert reduce(add, reversed(uses), reduce(sub, uses, free)) == free


@given(uses=USES)
def test_uses_add_up_resource_by_resource(uses: list[Use]) -> None:
    total = sum(uses, start=NOTHING)
    assert (total.memory, total.cores, total.slots) == tuple(
        sum(getattr(use, name) for use in uses) for name in ("memory", "cores", "slots")
    )


@pytest.mark.parametrize(
    ("use", "free", "fits", "beside"),
    [
        pytest.param(Use(5, 10, 1), FreeCapacity(5, 10, 1), True, True, id="exactly-what-is-free-fits"),
        pytest.param(Use(6, 10, 1), FreeCapacity(5, 10, 1), False, False, id="more-memory-than-free-does-not"),
        pytest.param(Use(5, 11, 1), FreeCapacity(5, 10, 1), False, False, id="nor-more-cores"),
        pytest.param(Use(5, 10, 2), FreeCapacity(5, 10, 1), False, False, id="nor-more-slots"),
        pytest.param(Use(5, 10, 0), FreeCapacity(5, 10, -1), True, True, id="without-slots-they-do-not-count"),
        pytest.param(Use(5, 0, 1), FreeCapacity(5, 0, 1), False, True, id="no-cores-left-only-beside-its-own-pod"),
        pytest.param(NOTHING, FreeCapacity(0, 0, -1), False, True, id="nothing-fits-beside-unless-overcommitted"),
        pytest.param(NOTHING, FreeCapacity(-1, 0, 0), False, False, id="an-overcommitted-card-takes-nothing"),
    ],
)
def test_what_fits(use: Use, free: FreeCapacity, fits: bool, beside: bool) -> None:
    assert (use.fits(free), use.fits_beside(free)) == (fits, beside)
