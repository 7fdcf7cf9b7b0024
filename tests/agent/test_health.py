"""When a card becomes unhealthy, and when it is healthy again."""

import pytest

from gputile.agent.health import APPLICATION_XIDS, HARDWARE_XIDS, CardHealth
from gputile.nvml.driver import DriverGpu, DriverSnapshot, XidError


def snapshot(**faults: str) -> DriverSnapshot:
    cards = ("a", "b")
    return DriverSnapshot(
        gpus=tuple(
            DriverGpu(index=n, uuid=u, model="T4", memory=1, fault=faults.get(u, "")) for n, u in enumerate(cards)
        )
    )


@pytest.mark.parametrize(
    ("xid", "marked"),
    [
        pytest.param(XidError(31, "a"), [], id="a-page-fault-of-a-program-is-ignored"),
        pytest.param(XidError(43, "a"), [], id="a-stopped-channel-is-ignored"),
        pytest.param(XidError(48, "a"), ["a"], id="a-double-bit-error"),
        pytest.param(XidError(79, "b"), ["b"], id="fallen-off-the-bus"),
        pytest.param(XidError(79), ["a", "b"], id="without-a-card-all-are-marked"),
        pytest.param(XidError(999, "a"), [], id="an-unknown-number-is-ignored"),
    ],
)
def test_which_errors_mark_a_card(xid: XidError, marked: list[str]) -> None:
    health = CardHealth(300)
    assert health.record_xid(xid, ["a", "b"], 0) == marked
    assert set(health.faults()) == set(marked)


def test_no_number_is_in_both_lists() -> None:
    assert not APPLICATION_XIDS & set(HARDWARE_XIDS)


def test_settings_move_numbers_from_one_list_to_the_other() -> None:
    health = CardHealth(300, ignored=[48], fatal=[31, 999])
    assert [health.record_xid(XidError(number, "a"), ["a"], 0) for number in (48, 31, 999)] == [[], ["a"], ["a"]]


@pytest.mark.parametrize(
    ("events", "at", "is_healthy"),
    [
        pytest.param([(0, "xid")], 299, False, id="on-probation"),
        pytest.param([(0, "xid")], 300, True, id="probation-is-over"),
        pytest.param([(0, "xid"), (200, "xid")], 300, False, id="another-error-restarts-it"),
        pytest.param([(0, "xid"), (200, "xid")], 500, True, id="the-restarted-probation-is-over"),
        pytest.param([(0, "fault"), (250, "fault")], 300, False, id="a-fault-that-lasts"),
        pytest.param([(0, "fault")], 300, True, id="a-fault-that-is-gone"),
    ],
)
def test_probation(events: list[tuple[float, str]], at: float, is_healthy: bool) -> None:
    health = CardHealth(300)
    for when, kind in events:
        if kind == "xid":
            health.record_xid(XidError(79, "a"), ["a", "b"], when)
        else:
            health.seen(snapshot(a="lost"), when)
    health.seen(snapshot(), at)
    assert ("a" not in health.faults()) is is_healthy
    assert "b" not in health.faults()


def test_the_reason_has_a_description() -> None:
    health = CardHealth(300)
    health.record_xid(XidError(79, "a"), ["a"], 0)
    assert health.faults() == {"a": "XID 79: fallen off the bus"}


def test_only_changes_are_returned() -> None:
    health = CardHealth(300)
    assert health.record_xid(XidError(79, "a"), ["a"], 0) == ["a"]
    assert health.record_xid(XidError(79, "a"), ["a"], 1) == []  # its probation restarts
    assert health.record_xid(XidError(48, "a"), ["a"], 2) == ["a"]
    assert health.seen(snapshot(b="lost"), 3) == ["b"]
    assert health.seen(snapshot(b="lost"), 4) == []


def test_marks_survive_a_restart_and_restart_their_probation() -> None:
    health = CardHealth(300)
    health.restore({"a": "XID 74: NVLink error", "b": "no driver"}, 100)
    health.seen(snapshot(), 101)
    assert health.faults() == {"a": "XID 74: NVLink error"}  # the driver reports its own faults again
    health.seen(snapshot(), 400)
    assert health.faults() == {}
