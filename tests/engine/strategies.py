"""Small clusters and requests that compete: cards of few sizes, tiles that barely fit, every constraint sometimes."""

from typing import TypeVar

from hypothesis import strategies as st

from gputile.model.cards import Card, FreeCapacity, Node, NodeView
from gputile.model.requests import (
    Constraints,
    ContainerRequest,
    Match,
    ModelRule,
    PodRequest,
    QuotaAllowance,
    Role,
    Strength,
)

SIZES = st.sampled_from([4, 8, 8, 16])
T = TypeVar("T")
MODELS = st.sampled_from(["A10", "A100", "T4"])


def seldom(usual: T, *others: T) -> st.SearchStrategy[T]:
    """Mostly usual values: a request in which everything is odd is rejected for the first oddity and tests nothing
    else."""
    return st.sampled_from([usual] * 9 * len(others) + list(others))


@st.composite
def cards(draw: st.DrawFn, index: int) -> Card:
    return Card(
        index=index,
        uuid=f"u{index}",
        memory=draw(SIZES),
        model=draw(MODELS),
        slots=draw(st.sampled_from([1, 2, 10, 10])),
        numa=draw(st.integers(0, 1)),
        mode=draw(seldom("", "hami-core", "mig")),
        healthy=draw(seldom(True, False)),
        cordoned=draw(seldom(False, True)),
    )


@st.composite
def nodes(draw: st.DrawFn, name: str = "n", most: int = 4) -> Node:
    node_cards = tuple(draw(cards(index)) for index in range(draw(st.integers(0, most))))
    table = draw(st.lists(st.integers(0, 2), min_size=len(node_cards) ** 2, max_size=len(node_cards) ** 2))
    links = tuple(
        tuple(table[min(a, b) * len(node_cards) + max(a, b)] for b in range(len(node_cards)))
        for a in range(len(node_cards))
    )
    return Node(
        name=name,
        cards=node_cards,
        cpu=draw(st.sampled_from([4000, 8000])),
        memory=1000,
        links=draw(st.sampled_from([(), links])),
        pool=draw(seldom("", "blue")),
        fault=draw(seldom("", "AgentStale")),
    )


@st.composite
def views(draw: st.DrawFn, name: str = "n", most: int = 4) -> NodeView:
    node = draw(nodes(name, most))
    free_by_card = []
    for card in node.cards:
        tenants = draw(st.sampled_from([0, 1, 2]))
        free_by_card.append(
            FreeCapacity(
                card.memory - (draw(st.integers(0, card.memory)) if tenants else 0),
                card.cores - (draw(st.sampled_from([0, 0, 30, 50, 100])) if tenants else 0),
                card.slots - min(tenants, card.slots),
                tenants,
            )
        )
    return NodeView(node=node, free_by_card=tuple(free_by_card), cpu=node.cpu - draw(seldom(0, 3000)), memory=1000)


@st.composite
def asks(draw: st.DrawFn, name: str, role: Role, most_cards: int = 3) -> ContainerRequest:
    count = draw(st.sampled_from([1, 1, 1, *range(2, most_cards + 1)]))
    kind = draw(st.sampled_from(["whole", "memory", "memory", "memory", "percent", "cores"]))
    if kind == "whole":
        return ContainerRequest.whole(name, role, count)
    cores = draw(st.sampled_from([0, 0, 20, 50, 100]))
    if kind == "percent":
        percent = draw(st.sampled_from([10, 50, 100]))
        return ContainerRequest(container=name, role=role, cards=count, memory_percent=percent, cores=cores)
    size = draw(st.integers(1, 8)) if kind == "memory" else 0
    alone = cores == 100 and draw(st.booleans())  # as HAMi's pods with all cores and some memory
    return ContainerRequest(container=name, role=role, cards=count, memory=size, cores=cores, exclusive=alone)


MAKES = st.frozensets(st.tuples(MODELS, st.sampled_from([4, 8, 16])), min_size=4)


@st.composite
def allowances(draw: st.DrawFn) -> QuotaAllowance:
    """`affordable` is a subset of `possible`, and that of `listed`."""
    listed, possible, affordable = draw(MAKES), draw(MAKES), draw(MAKES)
    pools = draw(seldom(frozenset[str](), frozenset({"blue"}), frozenset({"", "blue"})))
    return QuotaAllowance(pools, listed, listed & possible, listed & possible & affordable)


@st.composite
def constraints(draw: st.DrawFn) -> Constraints:
    if draw(seldom(True, False)):
        return Constraints(allowance=draw(st.one_of(st.none(), st.none(), allowances())))
    rule = st.builds(ModelRule, st.lists(MODELS, min_size=1, max_size=2).map(tuple), st.sampled_from(list(Match)))
    uuids = st.sets(st.sampled_from(["u0", "u1", "u2"]), max_size=2).map(frozenset)
    return Constraints(
        models=draw(st.one_of(st.just(()), rule.map(lambda r: (r,)))),
        not_models=draw(st.one_of(st.just(()), st.just(()), rule.map(lambda r: (r,)))),
        uuids=draw(st.one_of(st.just(frozenset()), uuids)),
        not_uuids=draw(st.one_of(st.just(frozenset()), st.just(frozenset()), uuids)),
        modes=draw(st.sampled_from([frozenset[str](), frozenset({"hami-core"}), frozenset({"mps"})])),
        numa=draw(st.sampled_from(list(Strength))),
        links=draw(st.sampled_from(list(Strength))),
        idle=draw(st.sampled_from([False, False, True])),
        allowance=draw(st.one_of(st.none(), st.none(), allowances())),
    )


@st.composite
def requests(draw: st.DrawFn, most: int = 3) -> PodRequest:
    together = draw(st.sampled_from([False, False, False, True]))
    roles = draw(st.lists(st.sampled_from([Role.APP, Role.APP, Role.INIT, Role.SIDECAR]), min_size=1, max_size=most))
    roles.sort(key=lambda role: role is Role.APP)  # init containers and sidecars come first, in any order
    count = draw(st.integers(1, 2))
    containers = []
    for n, role in enumerate(roles):
        ask = draw(asks(f"c{n}", role))
        if together:
            ask = ContainerRequest(container=ask.container, role=role, cards=count, memory=draw(st.integers(1, 6)))
        containers.append(ask)
    return PodRequest(
        dialect=draw(st.sampled_from(["gputile", "vcuda"])),
        asks=tuple(containers),
        together=together,
        constraints=draw(constraints()),
        cpu=draw(seldom(0, 2000, 6000)),
        memory=draw(seldom(0, 2000)),
    )


@st.composite
def tight_views(draw: st.DrawFn, name: str = "n") -> NodeView:
    """Two or three plain cards with little free capacity: several containers compete and a greedy choice fails."""
    node_cards = tuple(Card(index=n, uuid=f"u{n}", memory=8) for n in range(draw(st.integers(2, 3))))
    free = [draw(st.sampled_from([*range(1, 9), 8, 8])) for _ in node_cards]
    free_by_card = tuple(FreeCapacity(memory, 100, 10, int(memory < 8)) for memory in free)
    return NodeView(node=Node(name=name, cards=node_cards), free_by_card=free_by_card, cpu=0, memory=0)


ROLES = st.sampled_from(
    [
        (Role.APP, Role.APP),
        (Role.APP, Role.APP, Role.APP),
        (Role.APP, Role.APP, Role.APP, Role.APP),
        (Role.SIDECAR, Role.INIT, Role.APP),
        (Role.INIT, Role.SIDECAR, Role.APP),
    ]
)


@st.composite
def crowded_requests(draw: st.DrawFn) -> PodRequest:
    """Several containers with one card each."""
    containers = []
    for n, role in enumerate(draw(ROLES)):
        if draw(seldom(False, True)):
            alone = ContainerRequest(container=f"c{n}", role=role, cards=1, memory=3, cores=100, exclusive=True)
            containers.append(draw(st.sampled_from([ContainerRequest.whole(f"c{n}", role, 1), alone])))
        else:
            containers.append(
                ContainerRequest(container=f"c{n}", role=role, cards=1, memory=draw(st.integers(1, 6)), cores=0)
            )
    return PodRequest(dialect="gputile", asks=tuple(containers))
