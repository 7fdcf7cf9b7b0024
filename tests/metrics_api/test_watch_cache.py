"""The watch cache: its log is bounded, and no watch misses a change."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputile.metrics_api.watch_cache import MARK, Key, ResourceExpired, WatchCache
from tests.effort import examples


def made(history: int = 100, born: int = 1000, mark: int = 7) -> WatchCache:
    return WatchCache(history, born, mark)


def put(collection: WatchCache, name: str, value: int = 0, uid: str = "") -> bool:
    return collection.put(("", name), uid or name, {"metadata": {"name": name}, "value": value})


@examples(200)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=40), st.integers(1, 10))
def test_a_resumed_watch_ends_with_the_present_objects_or_is_expired(
    steps: list[tuple[str, int]], history: int
) -> None:
    """Value 3 deletes the object. A watch may have stopped after any step."""
    collection = made(history)
    seen: list[tuple[int, dict[Key, object]]] = [(collection.version, {})]
    for name, value in steps:
        if value == 3:
            collection.drop(("", name))
        else:
            put(collection, name, value)
        seen.append((collection.version, {item.key: item.body for item in collection.items()}))
    for version, known in seen:
        try:
            events = collection.since(version)
        except ResourceExpired:
            assert collection.version - version > history
            continue
        for event in events:
            if event.before is not None:
                assert known.pop(event.before.key) == event.before.body
            if event.after is not None:
                known[event.after.key] = event.after.body
        assert known == {item.key: item.body for item in collection.items()}


def test_an_equal_object_is_not_a_change() -> None:
    collection = made()
    assert put(collection, "a")
    assert not put(collection, "a")
    assert collection.version == 1001


def test_another_object_of_the_same_name_is_deleted_and_added() -> None:
    collection = made()
    put(collection, "a", uid="first")
    put(collection, "a", uid="second")
    kinds = [(event.before is not None, event.after is not None) for event in collection.since(1000)]
    assert kinds == [(False, True), (True, False), (False, True)]


def test_a_version_fits_into_63_bits_for_a_long_time() -> None:
    year_2060 = 2_840_000_000_000
    assert int(made(born=year_2060, mark=2**MARK - 1).written(year_2060)) < 2**63


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(made(mark=8).written(1000), id="another-replicas"),
        pytest.param("abc", id="no-number"),
        pytest.param("-5", id="negative"),
        pytest.param("1" * 5000, id="more-digits-than-python-reads"),
        pytest.param("1" * 21, id="more-than-64-bits"),
        pytest.param("٣", id="digits-of-another-script"),
    ],
)
def test_a_foreign_version_is_expired(text: str) -> None:
    with pytest.raises(ResourceExpired):
        made().read(text)


@pytest.mark.parametrize("version", [999, 1002], ids=["before-our-time", "in-the-future"])
def test_a_version_outside_the_log_is_expired(version: int) -> None:
    collection = made()
    put(collection, "a")
    assert collection.read(collection.written(1001)) == 1001
    with pytest.raises(ResourceExpired):
        collection.since(version)


async def test_no_change_is_missed_between_reading_and_waiting() -> None:
    collection = made()
    news = collection.news
    put(collection, "a")
    async with asyncio.timeout(1):
        await news()
    waiting = asyncio.ensure_future(collection.news())
    await asyncio.sleep(0)
    assert not waiting.done()
    collection.close_watches()
    await waiting
