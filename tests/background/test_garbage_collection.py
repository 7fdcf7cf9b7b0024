"""Full garbage collections: when they run, and that Python's thresholds are restored."""

import gc
from collections.abc import Iterator

import pytest

from gputile.background import garbage_collection


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


class Over(Exception):
    pass


class Node:
    other: "Node"


async def test_cycles_are_freed_though_python_itself_never_starts_a_full_collection() -> None:
    before, left = gc.get_threshold(), list[int]()

    async def pause(seconds: float) -> None:
        left.append(sum(isinstance(instance, Node) for instance in gc.get_objects()))
        if len(left) == 3:
            raise Over
        assert gc.get_threshold() == (*before[:2], garbage_collection.NEVER)
        first, second = Node(), Node()
        first.other, second.other = second, first

    with pytest.raises(Over):
        await garbage_collection.collect_periodically(pause)
    assert left == [0, 0, 0]
    assert gc.get_threshold() == before


async def test_survivors_are_scanned_again_once_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage_collection, "UNFREEZE_EVERY", 3)
    did: list[str] = []
    for name in ("unfreeze", "collect", "freeze"):
        monkeypatch.setattr(gc, name, lambda name=name: did.append(name))

    async def pause(seconds: float) -> None:
        if did.count("collect") == 4:
            raise Over

    with pytest.raises(Over):
        await garbage_collection.collect_periodically(pause)
    assert did == [*("collect", "freeze") * 2, "unfreeze", "collect", "freeze", "collect", "freeze"]
