"""Which card it is that no longer says so: a table, and the promise that no card and no number is shown twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputile.nvml.driver import DriverGpu
from gputile.nvml.lost_cards import HIDDEN, complete
from tests.effort import examples


def gpu(letter: str, index: int, fault: str = "") -> DriverGpu:
    return DriverGpu(index=index, uuid=f"GPU-{letter}", model="T4", memory=1, pci=f"pci-{letter}", fault=fault)


A0, B1, C2 = gpu("a", 0), gpu("b", 1), gpu("c", 2)
BEFORE = (A0, B1, C2)


@pytest.mark.parametrize(
    ("seen", "silent", "bound", "wanted", "nameless"),
    [
        pytest.param([A0, B1, C2], {}, [], [A0, B1, C2], [], id="all answer"),
        pytest.param([A0, C2], {1: "lost"}, [], [A0, gpu("b", 1, "lost"), C2], [], id="the same number"),
        pytest.param(
            [gpu("b", 0), gpu("c", 1)],
            {2: "lost"},
            [],
            [gpu("b", 0), gpu("c", 1), gpu("a", 2, "lost")],
            [],
            id="another number, but only one is missing",
        ),
        pytest.param(
            [gpu("c", 0)], {3: "lost"}, [], [gpu("c", 0)], ["card 3: lost"], id="two are missing: it could be either"
        ),
        pytest.param(
            [A0],
            {1: "lost", 3: "lost too"},
            [],
            [A0, gpu("b", 1, "lost")],
            ["card 3: lost too"],
            id="two fail, and one has the number of one that is missing",
        ),
        pytest.param([A0, B1, C2], {3: "lost"}, [], [A0, B1, C2], ["card 3: lost"], id="nobody is missing"),
        pytest.param([A0, B1], {}, [], [A0, B1], [], id="taken away"),
        pytest.param([A0, B1], {}, ["pci-c"], [A0, B1, gpu("c", 2, HIDDEN)], [], id="still bound: not taken away"),
        pytest.param(
            [gpu("b", 0), gpu("c", 1)],
            {},
            ["pci-a"],
            [gpu("b", 0), gpu("c", 1), gpu("a", 2, HIDDEN)],
            [],
            id="its number is another's now",
        ),
    ],
)
def test_who_is_there(
    seen: list[DriverGpu], silent: dict[int, str], bound: list[str], wanted: list[DriverGpu], nameless: list[str]
) -> None:
    assert complete(seen, silent, BEFORE, set(bound)) == (tuple(wanted), tuple(nameless))


def test_a_card_that_is_not_shown_keeps_the_fault_it_had() -> None:
    shown, _ = complete([A0], {}, [A0, gpu("b", 1, "fell off the bus")], {"pci-b"})
    assert shown[1].fault == "fell off the bus"


@st.composite
def machines(draw: st.DrawFn) -> tuple[list[DriverGpu], dict[int, str], list[DriverGpu], set[str]]:
    """What was seen before, and what is now: cards come and go, fail and change their numbers."""
    letters = "abcdef"
    before = [gpu(letter, n) for n, letter in enumerate(draw(st.lists(st.sampled_from(letters), unique=True)))]
    now = draw(st.lists(st.sampled_from(letters), unique=True))
    failing = draw(st.sets(st.integers(0, 5)))
    seen = [gpu(letter, n) for n, letter in enumerate(now) if n not in failing]
    silent = {n: "lost" for n in range(len(now)) if n in failing}
    return seen, silent, before, {f"pci-{letter}" for letter in draw(st.sets(st.sampled_from(letters)))}


@given(machines())
@examples(150)
def test_no_card_is_shown_twice_and_no_number_either(
    machine: tuple[list[DriverGpu], dict[int, str], list[DriverGpu], set[str]],
) -> None:
    """Seen to fail without `_free_index` (two cards of one number), and without `missing.remove` (one card twice)."""
    seen, silent, before, bound = machine
    shown, nameless = complete(seen, silent, before, bound)
    assert len({one.uuid for one in shown}) == len({one.index for one in shown}) == len(shown)
    assert set(map(repr, seen)) <= set(map(repr, shown))
    assert {one.index for one in shown} | set(silent) >= set(range(len(seen) + len(silent)))
    others = [one for one in shown if one not in seen]
    assert all(one.fault for one in others)
    assert len(silent) == len(nameless) + sum(one.index in silent and one.fault == "lost" for one in others)
