"""The usage that an agent reports, written and read."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputile.dialects.usage_annotation import LARGEST_ANNOTATION, ReportedUsage, read_usage, write_usage
from gputile.model.usage import CardUsage, Usage

NAMES = st.text(max_size=8)
USED = st.builds(CardUsage, st.none() | st.integers(0, 200_000), st.none() | st.integers(0, 100))
USAGE = st.dictionaries(
    NAMES,
    st.dictionaries(NAMES, st.dictionaries(NAMES, USED, min_size=1, max_size=3), min_size=1, max_size=3),
    max_size=4,
)


def cards_of(usage: Usage) -> set[str]:
    return {card for pod in usage.values() for cards in pod.values() for card in cards}


@given(USAGE)
def test_what_is_written_is_read(usage: Usage) -> None:
    assert read_usage(write_usage(usage, cards_of(usage))) == ReportedUsage(usage, frozenset(cards_of(usage)))


def test_the_format() -> None:
    value = write_usage(
        {"uid": {"main": {"GPU-0": CardUsage(3000, 40)}, "side": {"GPU-0": CardUsage(5)}}}, ["GPU-0", "GPU-1"]
    )
    assert value == '{"version":1,"cards":{"GPU-0":{"uid":{"main":[3000,40],"side":[5,null]}},"GPU-1":{}}}'


def test_the_size_is_limited_and_the_smallest_users_are_left_out() -> None:
    many: Usage = {f"{n:036}": {"main": {f"GPU-{n % 8}": CardUsage(n, 1)}} for n in range(2000)}
    value = write_usage(many, cards_of(many))
    assert LARGEST_ANNOTATION // 2 < len(value) <= LARGEST_ANNOTATION
    read = read_usage(value)
    assert read is not None
    left = 2000 - len(read.pods)
    assert min(int(pod) for pod in read.pods) == left == json.loads(value)["left_out"]
    assert read.cards == frozenset()  # of no card all is known


@pytest.mark.parametrize(
    "value",
    [
        pytest.param("", id="nothing"),
        pytest.param("{", id="no-json"),
        pytest.param("\ud800", id="no-text"),
        pytest.param('{"cards":{}}', id="no-version"),
        pytest.param('{"version":1,"cards":{},"x":' + "[" * 3000 + "]" * 3000 + "}", id="very-deep"),
        pytest.param('{"version":1,"cards":{"GPU-0":{"uid":{"main":[-1,0]}}}}', id="less-than-nothing"),
        pytest.param('{"version":1,"cards":{"GPU-0":{"uid":{"main":[1,101]}}}}', id="busier-than-a-card-can-be"),
        pytest.param('{"version":1,"cards":{"GPU-0":{"uid":{"main":"3000"}}}}', id="another-shape"),
    ],
)
def test_an_unreadable_annotation_is_none(value: str) -> None:
    assert read_usage(value) is None


def test_additions_of_a_newer_agent_are_ignored() -> None:
    value = '{"version":2,"new":1,"cards":{"GPU-0":{"uid":{"main":[3000,40,"energy"]}}}}'
    assert read_usage(value) == ReportedUsage({"uid": {"main": {"GPU-0": CardUsage(3000, 40)}}}, frozenset({"GPU-0"}))
