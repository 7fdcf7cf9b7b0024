"""Pods of many containers: tenants choose how many, so no code may recurse or take quadratic time.

Deliberate bugs that it caught: with the recursive `_search` and `_pick` (RecursionError), with `phases` instead of
`most_at_once` in `Grant.uses` and `host_needs` (millions of steps), with sidecars left out of `most_at_once`, with
`_pick` refilled from the list that gives instead of the one behind it.
"""

import sys
from itertools import combinations
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputile.dialects import registry
from gputile.dialects.kube_objects import Pod
from gputile.dialects.parsing import host_needs
from gputile.dialects.registry import MOST_CONTAINERS
from gputile.engine.fleet.fleet import Fleet
from gputile.engine.placement.place import Placement, _pick, place
from gputile.engine.placement.topology import largest_linked
from gputile.ledger.events import Confirmed
from gputile.ledger.ledger import Ledger
from gputile.model.allocations import Allocation
from gputile.model.cards import Use
from gputile.model.grants import ContainerGrant, Grant, Tile
from gputile.model.refusals import BadRequest, RequestError
from gputile.model.requests import Role, most_at_once, phases
from gputile.testing.builders import ask, node, pod, wants
from tests.effort import examples

DEEP = 3 * sys.getrecursionlimit()


def convert(manifest: dict[str, Any]) -> Pod:
    return msgspec.convert(manifest, Pod)


ROLES = st.sampled_from([Role.SIDECAR, Role.INIT, Role.INIT, Role.APP])


@examples(200)
@given(st.lists(st.tuples(ROLES, st.tuples(st.integers(0, 9), st.integers(0, 9))), max_size=9))
def test_one_walk_finds_the_most_that_any_phase_has(parts: list[tuple[Role, tuple[int, ...]]]) -> None:
    parts.sort(key=lambda part: part[0] is Role.APP)  # as in a pod: containers come after init containers
    alive = phases([role for role, _ in parts])
    most = [0, 0]
    for phase in {phase for mine in alive for phase in mine}:
        there = [amounts for (_, amounts), mine in zip(parts, alive, strict=True) if phase in mine]
        most = [max(amount, sum(amounts[kind] for amounts in there)) for kind, amount in enumerate(most)]
    assert most_at_once(parts, 2) == tuple(most)


@examples(200)
@given(st.lists(st.integers(1, 4), max_size=5), st.integers(0, 6))
def test_every_way_to_pick_comes_once_and_the_first_lists_are_used_up_first(sizes: list[int], wanted: int) -> None:
    cards = iter(range(100))
    kinds = [[next(cards) for _ in range(size)] for size in sizes]
    kind_of = {card: number for number, kind in enumerate(kinds) for card in kind}
    picked = [tuple(kind_of[card] for card in cards) for cards in _pick(kinds, wanted)]
    every = {tuple(sorted(kind_of[card] for card in cards)) for cards in combinations(kind_of, wanted)}
    assert picked == sorted(every)


def test_a_pod_of_thousands_of_containers_is_placed_without_recursion() -> None:
    many = wants(*(ask(1, name=f"i{n}", role=Role.INIT) for n in range(DEEP)), ask(1), dialect="vcuda")
    where = place(many, node().cards(2, size=16).view())
    assert isinstance(where, Placement)
    assert len(where.containers) == DEEP + 1
    assert where.grant("u", many).uses() == {"GPU-n1-0": Use(1, 0, 0)}


def test_a_node_of_thousands_of_cards_is_searched_without_recursion() -> None:
    view = node().cards(DEEP, size=16)
    for index in range(DEEP):
        view.taken(index, index % 9)
    where = place(wants(ask(1, cards=DEEP - 1, name="a"), ask(8, name="b")), view.view())
    assert isinstance(where, Placement)
    assert largest_linked(range(DEEP), DEEP, lambda one, other: 1) == DEEP


@pytest.mark.parametrize(
    ("sidecars", "inits"),
    [
        pytest.param(0, DEEP, id="many-init-containers"),
        pytest.param(DEEP, 0, id="many-sidecars"),
        pytest.param(DEEP, DEEP, id="many-of-both-which-are-millions-of-pairs"),
    ],
)
def test_a_bound_pod_of_thousands_of_containers_is_confirmed(sidecars: int, inits: int) -> None:
    """9 million pairs of sidecar and init container would take minutes; the test's time-out is its bound."""
    held = [ContainerGrant(f"s{n}", (Tile("GPU-n1-0", 0, 1, 0),), Role.SIDECAR) for n in range(sidecars)]
    held += [ContainerGrant(f"i{n}", (Tile("GPU-n1-0", 0, 2, 0),), Role.INIT) for n in range(inits)]
    grant = Grant(pod="u", node="n1", dialect="gputile", containers=tuple(held))
    ledger = Ledger()
    ledger.fleet.set_node(node().cards(1, size="80Gi", slots=10_000).node())
    ledger.handle(Confirmed(Allocation(pod="u", node="n1", name="default/u", grant=grant)))
    assert ledger.fleet.view("n1").free_by_card[0].memory == 80 * 1024 - sidecars - (2 if inits else 0)
    ledger.check()
    for _ in range(100):
        ledger.holders("n1")


def test_the_hosts_share_of_thousands_of_containers_is_summed_in_one_walk() -> None:
    both: list[dict[str, Any]] = [{"sidecar": True, "cpu": "1m"}, {"cpu": "10m"}]
    assert host_needs(convert(pod({"cpu": "5m"}, init=tuple(both * DEEP)))) == (DEEP + 10, 0)


# ---- the bound on containers that ask -------------------------------------------------------------------------------

GPUSHARE, OURS = {"aliyun.com/gpu-mem": 1}, {"gputile.io/gpu": 1, "gputile.io/memory": 1}


@pytest.mark.parametrize("limits", [pytest.param(GPUSHARE, id="gpushare"), pytest.param(OURS, id="gputile")])
@pytest.mark.parametrize(
    ("asking", "idle"),
    [
        pytest.param(MOST_CONTAINERS, 500, id="64-ask-and-500-do-not"),
        pytest.param(MOST_CONTAINERS + 1, 0, id="65-ask"),
        pytest.param(1300, 0, id="1300-ask"),
    ],
)
def test_at_most_64_containers_of_a_pending_pod_may_ask(limits: Any, asking: int, idle: int) -> None:
    request = registry.read_pod(convert(pod({"cpu": 1}, init=(*[limits] * asking, *[{"cpu": 1}] * idle))))
    if asking <= MOST_CONTAINERS:
        assert not isinstance(request, BadRequest)
        return
    assert request == BadRequest(
        RequestError.TOO_MANY_CONTAINERS,
        f"pod: {asking} of its containers request GPUs, and at most 64 of one pod may; split it into several pods, or "
        "request GPUs in fewer containers",
    )


def test_what_containers_without_cards_do_not_take_changes_no_answer() -> None:
    """An init container without cards has a phase of its own, in which no pod holds more than in another."""
    fleet = Fleet()
    fleet.set_node(node().cards(2, size=16).node())
    asks = (ask(9, name="s", role=Role.SIDECAR), ask(9, name="i", role=Role.INIT), ask(9))
    bare = [ask(cards=0, name=f"b{n}", role=Role.INIT) for n in range(9)]
    for request in (
        wants(*asks),
        wants(asks[0], *bare, *asks[1:]),
        wants(*bare, *asks),
        wants(*asks[:2], *bare, asks[2]),
    ):
        assert fleet.best(request) == ["n1"]
        assert isinstance(place(request, fleet.view("n1")), Placement)
