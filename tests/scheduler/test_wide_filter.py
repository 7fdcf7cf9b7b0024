"""`filter.narrow: false`: every node that fits is named, as most extenders do, and prioritize says which is best."""

from gputile.scheduler.settings import FilterSettings
from gputile.testing.builders import node
from tests.scheduler.rig import Rig, tile


def rig(*, narrow: bool) -> Rig:
    """n1 has a tenant that takes of its CPU, so it is the best under binpack; n3 is too small."""
    made = Rig(
        node("n1").cards(1, size=16),
        node("n2").cards(1, size=16),
        node("n3").cards(1, size=4),
        filter=FilterSettings(narrow=narrow, keep=1),
    )
    made.arrive({"cpu": "8"}, name="tenant", on="n1")
    return made


def test_narrow_names_the_best() -> None:
    r = rig(narrow=True)
    r.arrive(tile(8))
    assert r.filter().names == ["n1"]


def test_wide_names_all_that_fit_whatever_their_score() -> None:
    r = rig(narrow=False)
    r.arrive(tile(8))
    assert r.filter().names == ["n1", "n2"]


def test_wide_does_so_while_another_pod_is_on_its_way() -> None:
    r = rig(narrow=False)
    r.arrive(tile(8), name="a")
    r.arrive(tile(8), name="b")
    r.filter("a")
    assert sorted(r.filter("b").names) == ["n1", "n2"]


async def test_a_bind_elsewhere_than_pencilled_is_placed_there() -> None:
    r = rig(narrow=False)
    r.arrive(tile(8))
    r.filter()
    assert r.node_of() == "n1"
    assert await r.bind(node="n2") == ""
    assert r.node_of() == "n2"
