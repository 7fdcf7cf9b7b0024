"""When a card is out of use, and when it is used again."""

import pytest

from gputile.agent.health import APPLICATION_XIDS, HARDWARE_XIDS, CardHealth
from gputile.nvml.driver import DriverGpu, DriverSnapshot, XidError


def sight(**faults: str) -> DriverSnapshot:
    cards = ("a", "b")
    return DriverSnapshot(
        gpus=tuple(
            DriverGpu(index=n, uuid=u, model="T4", memory=1, fault=faults.get(u, "")) for n, u in enumerate(cards)
        )
    )


@pytest.mark.parametrize(
    ("xid", "hit"),
    [
        pytest.param(XidError(31, "a"), [], id="a-programs-page-fault-is-not-the-cards"),
        pytest.param(XidError(43, "a"), [], id="a-stopped-channel-is-not-the-cards"),
        pytest.param(XidError(48, "a"), ["a"], id="a-double-bit-error-is"),
        pytest.param(XidError(79, "b"), ["b"], id="fallen-off-the-bus"),
        pytest.param(XidError(79), ["a", "b"], id="nobody-says-which-so-all"),
        pytest.param(XidError(999, "a"), [], id="an-unknown-number-marks-nobody"),
    ],
)
def test_which_errors_mark_a_card(xid: XidError, hit: list[str]) -> None:
    health = CardHealth(300)
    assert health.record_xid(xid, ["a", "b"], 0) == hit
    assert set(health.faults()) == set(hit)


def test_no_number_is_in_both_lists() -> None:
    assert not APPLICATION_XIDS & set(HARDWARE_XIDS)


def test_settings_move_numbers_from_one_list_to_the_other() -> None:
    health = CardHealth(300, ignored=[48], fatal=[31, 999])
    assert [health.record_xid(XidError(number, "a"), ["a"], 0) for number in (48, 31, 999)] == [[], ["a"], ["a"]]


@pytest.mark.parametrize(
    ("events", "at", "is_fit"),
    [
        pytest.param([(0, "xid")], 299, False, id="on-probation"),
        pytest.param([(0, "xid")], 300, True, id="probation-is-over"),
        pytest.param([(0, "xid"), (200, "xid")], 300, False, id="another-error-begins-it-anew"),
        pytest.param([(0, "xid"), (200, "xid")], 500, True, id="and-it-passes"),
        pytest.param([(0, "fault"), (250, "fault")], 300, False, id="a-fault-that-is-still-there"),
        pytest.param([(0, "fault")], 300, True, id="a-fault-that-went"),
    ],
)
def test_probation(events: list[tuple[float, str]], at: float, is_fit: bool) -> None:
    health = CardHealth(300)
    for when, what in events:
        if what == "xid":
            health.record_xid(XidError(79, "a"), ["a", "b"], when)
        else:
            health.seen(sight(a="lost"), when)
    health.seen(sight(), at)
    assert ("a" not in health.faults()) is is_fit
    assert "b" not in health.faults()


def test_the_reason_is_in_words() -> None:
    health = CardHealth(300)
    health.record_xid(XidError(79, "a"), ["a"], 0)
    assert health.faults() == {"a": "XID 79: fallen off the bus"}


def test_only_news_is_told() -> None:
    health = CardHealth(300)
    assert health.record_xid(XidError(79, "a"), ["a"], 0) == ["a"]
    assert health.record_xid(XidError(79, "a"), ["a"], 1) == []  # its probation begins anew, and nobody need hear of it
    assert health.record_xid(XidError(48, "a"), ["a"], 2) == ["a"]
    assert health.seen(sight(b="lost"), 3) == ["b"]
    assert health.seen(sight(b="lost"), 4) == []


def test_marks_outlive_the_agent_and_begin_their_probation_anew() -> None:
    health = CardHealth(300)
    health.restore({"a": "XID 74: NVLink error", "b": "no driver"}, 100)
    health.seen(sight(), 101)
    assert health.faults() == {"a": "XID 74: NVLink error"}  # what the driver shows by itself is seen again, or over
    health.seen(sight(), 400)
    assert health.faults() == {}
