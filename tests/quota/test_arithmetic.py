"""Namespace x model x cards, memory, cores; pools."""

import pytest

from gputile.model.cards import Use
from gputile.quota.arithmetic import Overrun, add, cost, overrun, subtract
from gputile.quota.limits import Amount, Limit, Quota
from gputile.testing.builders import node

MIXED = node("n").cards(2, "NVIDIA A100-SXM4-80GB", 1000).card("Tesla T4", 100).node()
A100, T4 = "NVIDIA A100-SXM4-80GB", "Tesla T4"


@pytest.mark.parametrize(
    ("uses", "want"),
    [
        pytest.param({"GPU-n-0": Use(1000, 100, 1)}, {A100: Amount(100, 1000, 100)}, id="a-whole-card-is-one"),
        pytest.param({"GPU-n-0": Use(500, 10, 1)}, {A100: Amount(50, 500, 10)}, id="memory-is-the-larger-share"),
        pytest.param({"GPU-n-0": Use(100, 60, 1)}, {A100: Amount(60, 100, 60)}, id="cores-are-the-larger-share"),
        pytest.param({"GPU-n-0": Use(1, 0, 1)}, {A100: Amount(1, 1, 0)}, id="a-sliver-is-not-free"),
        pytest.param({"GPU-n-0": Use(500, 0, 1), "GPU-n-1": Use(500, 0, 1), "GPU-n-2": Use(50, 0, 1)},
                     {A100: Amount(100, 1000, 0), T4: Amount(50, 50, 0)}, id="models-are-counted-apart"),
        pytest.param({"elsewhere": Use(5, 5, 1)}, {}, id="cards-of-other-nodes-cost-nothing-here"),
    ],
)  # fmt: skip
def test_what_tiles_cost(uses: dict[str, Use], want: dict[str, Amount]) -> None:
    assert cost(uses, MIXED.cards) == want


def quota(*limits: Limit) -> Quota:
    return Quota(limits)


FOUR_A100 = quota(Limit(model="A100", cards=400))


@pytest.mark.parametrize(
    ("limits", "held", "more", "want"),
    [
        pytest.param(None, {}, {A100: Amount(9999)}, None, id="no-quota-is-no-limit"),
        pytest.param(FOUR_A100, {A100: Amount(300)}, {A100: Amount(100)}, None, id="up-to-the-limit"),
        pytest.param(FOUR_A100, {A100: Amount(350)}, {A100: Amount(100)}, Overrun("A100", "cards", 350, 100, 400),
                     id="not-beyond"),
        pytest.param(FOUR_A100, {}, {T4: Amount(1)}, Overrun(T4, "", 0, 1, 0), id="a-model-that-is-not-listed"),
        pytest.param(quota(), {}, {T4: Amount(1)}, Overrun(T4, "", 0, 1, 0), id="an-empty-quota-allows-nothing"),
        pytest.param(quota(Limit(model="*", memory=100)), {T4: Amount(0, 60)}, {A100: Amount(0, 60)},
                     Overrun("*", "memory", 60, 60, 100), id="any-model-counts-all-models-together"),
        pytest.param(quota(Limit(model="*", cards=800), Limit(model="T4", cores=50)), {}, {T4: Amount(60, 0, 60)},
                     Overrun("T4", "cores", 0, 60, 50), id="every-limit-that-covers-a-model-holds"),
        pytest.param(quota(Limit(model="A10", cards=100)), {}, {A100: Amount(1)}, Overrun(A100, "", 0, 1, 0),
                     id="A10-is-not-A100"),
    ],
)  # fmt: skip
def test_what_a_namespace_may_hold(
    limits: Quota | None, held: dict[str, Amount], more: dict[str, Amount], want: Overrun | None
) -> None:
    assert overrun(limits, held, more) == want


def test_the_sentence_names_the_namespace_and_what_it_holds() -> None:
    assert Overrun("A100", "cards", 400, 50, 400).sentence("team-a") == (
        "team-a holds 4 of 4 A100; this pod needs 0.5 more"
    )
    assert Overrun("T4", "", 0, 1, 0).sentence("team-a") == "team-a has no quota for T4"
    assert Overrun("T4", "memory", 3, 2, 4).sentence("a") == "a holds 3 of 4 MiB of T4; this pod needs 2 more"


def test_pools_name_the_nodes_a_namespace_may_use() -> None:
    blue = node("n").facts(pool="blue").node()
    assert Quota(pools=("blue",)).admits_pool(blue.pool)
    assert not Quota(pools=("red",)).admits_pool(blue.pool)
    assert Quota().admits_pool(blue.pool)


def test_what_is_added_can_be_taken_away() -> None:
    one, other = {A100: Amount(10, 20, 30)}, {A100: Amount(1, 2, 3), T4: Amount(4, 5, 6)}
    assert add(one, other) == {A100: Amount(11, 22, 33), T4: Amount(4, 5, 6)}
    assert subtract(add(one, other), other) == one
    assert subtract(one, one) == {}
