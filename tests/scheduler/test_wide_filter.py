"""`filter.narrow: false`: filter returns every feasible node, as most extenders do, and prioritize scores them."""

from gputile.scheduler.settings import FilterSettings
from gputile.testing.builders import node
from tests.scheduler.rig import Rig, tile


def rig(*, narrow: bool) -> Rig:
    """n1 has a pod that uses CPU, so it is the best node under binpack; n3 is too small."""
    wide = Rig(
        node("n1").cards(1, size=16),
        node("n2").cards(1, size=16),
        node("n3").cards(1, size=4),
        filter=FilterSettings(narrow=narrow, keep=1),
    )
    wide.arrive({"cpu": "8"}, name="tenant", on="n1")
    return wide


def test_narrow_returns_the_best_node() -> None:
    r = rig(narrow=True)
    r.arrive(tile(8))
    assert r.filter().names == ["n1"]


def test_wide_returns_all_feasible_nodes_whatever_their_score() -> None:
    r = rig(narrow=False)
    r.arrive(tile(8))
    assert r.filter().names == ["n1", "n2"]


def test_wide_does_so_while_another_reservation_is_open() -> None:
    r = rig(narrow=False)
    r.arrive(tile(8), name="a")
    r.arrive(tile(8), name="b")
    r.filter("a")
    assert sorted(r.filter("b").names) == ["n1", "n2"]


async def test_a_bind_to_another_node_than_the_reserved_one_is_placed_there() -> None:
    r = rig(narrow=False)
    r.arrive(tile(8))
    r.filter()
    assert r.node_of() == "n1"
    assert await r.bind(node="n2") == ""
    assert r.node_of() == "n2"
