"""What a grant holds of each card: the most at one time, as its containers start and end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputile.model.cards import Card, Use
from gputile.model.grants import ContainerGrant, Grant, Tile, take
from gputile.model.requests import Role, phases
from gputile.testing.builders import ask

APP, SIDECAR, INIT = Role.APP, Role.SIDECAR, Role.INIT


def grant(*containers: tuple[Role, list[Tile]], slots: int = 1) -> Grant:
    made = tuple(ContainerGrant(f"c{n}", tuple(tiles), role) for n, (role, tiles) in enumerate(containers))
    return Grant(pod="uid-1", node="n1", dialect="", containers=made, slots=slots)


def a(memory: int, cores: int = 0) -> Tile:
    return Tile("a", 0, memory, cores)


def b(memory: int, cores: int = 0) -> Tile:
    return Tile("b", 1, memory, cores)


@pytest.mark.parametrize(
    ("given", "uses"),
    [
        pytest.param(grant(), {}, id="nothing-held"),
        pytest.param(grant((APP, [a(5, 30)])), {"a": Use(5, 30, 1)}, id="one-tile"),
        pytest.param(
            grant((APP, [a(5), b(6)])), {"a": Use(5, 0, 1), "b": Use(6, 0, 1)}, id="a-tile-of-each-of-two-cards"
        ),
        pytest.param(
            grant((APP, [a(5, 30)]), (APP, [a(6, 20)])), {"a": Use(11, 50, 2)}, id="app-containers-add-up-on-one-card"
        ),
        pytest.param(
            grant((APP, [a(5)]), (APP, [b(6)])), {"a": Use(5, 0, 1), "b": Use(6, 0, 1)}, id="and-not-across-cards"
        ),
        pytest.param(
            grant((INIT, [a(9, 10)]), (INIT, [a(7, 40)]), (APP, [a(5, 30)])),
            {"a": Use(9, 40, 1)},
            id="init-containers-run-alone-and-the-largest-counts",
        ),
        pytest.param(
            grant((INIT, [a(3)]), (APP, [a(5)])), {"a": Use(5, 0, 1)}, id="an-init-container-fits-into-what-comes-later"
        ),
        pytest.param(
            grant((SIDECAR, [a(2, 5)]), (INIT, [a(9)]), (APP, [a(5)])),
            {"a": Use(11, 5, 2)},
            id="a-sidecar-is-added-to-later-init-containers",
        ),
        pytest.param(
            grant((INIT, [a(9)]), (SIDECAR, [a(2)]), (APP, [a(5)])),
            {"a": Use(9, 0, 2)},
            id="and-not-to-earlier-ones-but-to-the-main-phase",
        ),
        pytest.param(
            grant((INIT, [b(9)]), (APP, [a(5)])),
            {"a": Use(5, 0, 1), "b": Use(9, 0, 1)},
            id="an-init-container-on-a-card-of-its-own-holds-it",
        ),
        pytest.param(grant((INIT, [a(9)])), {"a": Use(9, 0, 1)}, id="an-init-container-alone"),
        pytest.param(
            grant((APP, [a(5), a(6)])), {"a": Use(11, 0, 2)}, id="two-tiles-of-one-card-in-one-container-add-up"
        ),
        pytest.param(
            grant((APP, [a(5), a(6)]), (APP, [b(1)])),
            {"a": Use(11, 0, 2), "b": Use(1, 0, 1)},
            id="also-beside-another-container",
        ),
    ],
)
def test_uses(given: Grant, uses: dict[str, Use]) -> None:
    assert given.uses() == uses


@pytest.mark.parametrize("slots", [pytest.param(1, id="a-tile-takes-a-slot"), pytest.param(0, id="a-tile-takes-none")])
def test_slots_of_a_grant(slots: int) -> None:
    assert grant((APP, [a(5)]), slots=slots).uses() == {"a": Use(5, 0, slots)}
    two = grant((APP, [a(5)]), (APP, [a(5)]), slots=slots)
    assert two.uses() == {"a": Use(10, 0, 2 * slots)}


def test_a_tile_is_cut_out_of_the_card_it_is_taken_from() -> None:
    card = Card(index=3, uuid="a", memory=15109)
    assert take(ask(percent=50, cores=20), card) == Tile("a", 3, 7554, 20)
    assert take(ask(whole=True), card) == Tile("a", 3, 15109, 100)
    assert take(ask("3Gi"), card) == Tile("a", 3, 3072, 0)


TILES = st.lists(st.builds(Tile, st.sampled_from("ab"), st.just(0), st.integers(0, 5), st.integers(0, 5)), max_size=3)


@given(st.lists(st.tuples(st.sampled_from(Role), TILES), max_size=7))
def test_what_is_held_is_what_the_phases_define(containers: list[tuple[Role, list[Tile]]]) -> None:
    """In one pass: a pod may have thousands of sidecars before thousands of init containers."""
    granted = grant(*containers)
    alive = phases([role for role, _ in containers])
    held: dict[str, list[tuple[int, int, int]]] = {}
    for phase in range(len(containers) + 1):
        there = [tile for (_, tiles), mine in zip(containers, alive, strict=True) if phase in mine for tile in tiles]
        for uuid in {tile.uuid for tile in there}:
            mine = [tile for tile in there if tile.uuid == uuid]
            sums = sum(tile.memory for tile in mine), sum(tile.cores for tile in mine), len(mine)
            held.setdefault(uuid, []).append(sums)
    assert granted.uses() == {uuid: Use(*map(max, zip(*sums, strict=True))) for uuid, sums in held.items()}
