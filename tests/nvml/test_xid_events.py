"""XID errors: `RealDriver.wait`, alone and while another thread takes snapshots."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

import pynvml
import pytest

from gputile.nvml import xid_events
from gputile.nvml.driver import NoDriver, XidError
from gputile.nvml.xid_events import XidListener
from tests.nvml.conftest import Hardware
from tests.nvml.stub import LOST, NOT_LOADED, NOT_SUPPORTED, UNKNOWN, StubCard, StubCards

LONG = 50.0  # seconds; no test waits that long


@pytest.fixture
def thread_pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as thread:
        yield thread


@pytest.fixture
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a test does not wait a second for the end of a slice."""
    monkeypatch.setattr(xid_events, "SLICE", 0.02)


def registered_with(hardware: Hardware, machine: StubCards) -> None:
    hardware.put(machine)
    hardware.driver.snapshot()
    assert hardware.driver.wait(0) is None


def all_errors(hardware: Hardware) -> list[XidError]:
    errors: list[XidError] = []
    while error := hardware.driver.wait(0):
        errors.append(error)
    return errors


# ---- one thread ------------------------------------------------------------------------------------------------------


def test_each_error_is_returned_once_in_order_and_with_its_card(hardware: Hardware) -> None:
    machine = StubCards.of(2)
    registered_with(hardware, machine)
    hardware.put(machine.event(79, 1).event(31, 0).event(31, 1))
    assert all_errors(hardware) == [XidError(79, "GPU-stub-1"), XidError(31, "GPU-stub-0"), XidError(31, "GPU-stub-1")]
    hardware.put(machine.event(48, 0))
    assert all_errors(hardware) == [XidError(48, "GPU-stub-0")]


def test_an_error_without_a_card(hardware: Hardware) -> None:
    machine = StubCards.of(1)
    registered_with(hardware, machine)
    hardware.put(machine.event(79))
    assert all_errors(hardware) == [XidError(79)]


def test_the_error_of_a_lost_card_has_its_uuid(hardware: Hardware) -> None:
    machine = StubCards.of(2)
    registered_with(hardware, machine)
    hardware.put(machine.lose(1).event(79, 1))
    assert all_errors(hardware) == [XidError(79, "GPU-stub-1")]


def test_an_error_is_not_lost_when_the_cards_change_at_the_same_time(hardware: Hardware) -> None:
    """The snapshot makes the event set stale before the error was read from it."""
    machine = StubCards.of(2)
    registered_with(hardware, machine)
    hardware.put(machine.event(79, 1))
    machine.lose(1)
    hardware.put(machine)
    hardware.driver.snapshot()
    assert all_errors(hardware) == [XidError(79, "GPU-stub-1")]


def test_a_new_card_is_registered_by_the_next_snapshot(hardware: Hardware) -> None:
    machine = StubCards.of(1)
    registered_with(hardware, machine)
    machine.cards.append(StubCard("GPU-new"))
    hardware.put(machine.event(79, "GPU-new"))
    assert all_errors(hardware) == []
    hardware.driver.snapshot()
    assert all_errors(hardware) == [XidError(79, "GPU-new")]


def test_a_recovered_card_is_registered_again(hardware: Hardware) -> None:
    machine = StubCards.of(2).lose(1)
    registered_with(hardware, machine)
    hardware.put(machine.heal(1).event(31, 1))
    hardware.driver.snapshot()
    assert all_errors(hardware) == [XidError(31, "GPU-stub-1")]


def test_a_failed_registration_is_retried(hardware: Hardware) -> None:
    machine = StubCards.of(2).fail(1, UNKNOWN, "nvmlDeviceRegisterEvents")
    registered_with(hardware, machine)
    hardware.put(machine.heal(1).event(31, 1))
    assert all_errors(hardware) == [XidError(31, "GPU-stub-1")]


def test_a_card_without_events_does_not_affect_others(hardware: Hardware) -> None:
    machine = StubCards.of(2).fail(0, NOT_SUPPORTED, "nvmlDeviceRegisterEvents")
    registered_with(hardware, machine)
    hardware.put(machine.event(31, 0).event(32, 1))
    assert all_errors(hardware) == [XidError(32, "GPU-stub-1")]


@pytest.mark.parametrize("machine", [StubCards(), StubCards.of(1).fail(0, NOT_SUPPORTED, "nvmlDeviceRegisterEvents")])
def test_without_cards_that_support_events_nothing_is_returned(hardware: Hardware, machine: StubCards) -> None:
    hardware.put(machine)
    assert hardware.driver.wait(0.001) is None


@pytest.mark.parametrize("seconds", [0, -1])
def test_a_wait_of_no_time_returns_a_pending_error(hardware: Hardware, seconds: float) -> None:
    machine = StubCards.of(1)
    registered_with(hardware, machine)
    assert hardware.driver.wait(seconds) is None
    hardware.put(machine.event(31, 0))
    assert hardware.driver.wait(seconds) == XidError(31, "GPU-stub-0")


def test_an_event_set_that_fails_is_created_anew(hardware: Hardware) -> None:
    machine = StubCards.of(2)
    registered_with(hardware, machine)
    hardware.put(machine.fail_driver(LOST, "nvmlEventSetWait_v2"))
    assert hardware.driver.wait(0) is None
    hardware.put(machine.heal_driver().event(31, 1))
    assert all_errors(hardware) == [XidError(31, "GPU-stub-1")]


def test_an_event_set_that_fails_at_once_still_waits(hardware: Hardware, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a loop of `wait` would keep a core busy while a card is off the bus."""
    paused: list[float | None] = []
    monkeypatch.setattr(Event, "wait", lambda _, seconds=None: paused.append(seconds))
    monkeypatch.setattr(xid_events, "SLICE", 4.0)
    hardware.put(StubCards.of(2).fail_driver(LOST, "nvmlEventSetWait_v2"))
    assert hardware.driver.wait(9) is None
    assert [pause for pause in paused if pause] == [4, 4, 1]


@pytest.mark.parametrize(
    "function",
    ["nvmlInit", "nvmlEventSetCreate", "nvmlDeviceGetCount_v2", "nvmlDeviceGetUUID", "nvmlDeviceRegisterEvents"],
)
def test_a_missing_driver_is_an_error_and_retried(hardware: Hardware, function: str) -> None:
    machine = StubCards.of(1)
    hardware.put(machine.fail_driver(NOT_LOADED, function))
    for _ in range(2):
        with pytest.raises(NoDriver):
            hardware.driver.wait(0)
    hardware.put(machine.heal_driver().event(31, 0))
    assert all_errors(hardware) == [XidError(31, "GPU-stub-0")]


def test_a_driver_that_disappears_while_registered_is_an_error_and_retried(hardware: Hardware) -> None:
    machine = StubCards.of(1)
    registered_with(hardware, machine)
    hardware.put(machine.fail_driver(NOT_LOADED))
    with pytest.raises(NoDriver):
        hardware.driver.wait(0)
    hardware.put(machine.heal_driver().event(31, 0))
    assert all_errors(hardware) == [XidError(31, "GPU-stub-0")]


# ---- two threads -----------------------------------------------------------------------------------------------------


def begun(hardware: Hardware, thread_pool: ThreadPoolExecutor, machine: StubCards) -> "Future[XidError | None]":
    """Another thread waits, and has connected to the driver already."""
    hardware.put(machine)
    hardware.driver.snapshot()
    future = thread_pool.submit(hardware.driver.wait, LONG)
    listener: XidListener = hardware.driver._xid_listener
    while not listener._session.is_open:
        assert not future.done()
    return future


def test_an_error_ends_the_wait(hardware: Hardware, thread_pool: ThreadPoolExecutor) -> None:
    machine = StubCards.of(1)
    future = begun(hardware, thread_pool, machine)
    hardware.put(machine.event(79, 0))
    assert future.result(LONG) == XidError(79, "GPU-stub-0")


@pytest.mark.usefixtures("short_slices")
def test_snapshots_and_waits_do_not_disturb_each_other(hardware: Hardware, thread_pool: ThreadPoolExecutor) -> None:
    machine = StubCards.of(4)
    future = begun(hardware, thread_pool, machine)
    for round_ in range(40):
        machine.lose(round_ % 4) if round_ % 2 else machine.heal(round_ // 2 % 4)
        hardware.put(machine)
        hardware.driver.snapshot()
        hardware.driver.processes("GPU-stub-0")
    assert not future.done()
    machine = StubCards.of(4)
    hardware.put(machine.event(31, 2))
    hardware.driver.snapshot()
    assert future.result(LONG) == XidError(31, "GPU-stub-2")


@pytest.mark.usefixtures("short_slices")
def test_cards_are_counted_anew_while_a_thread_waits(hardware: Hardware, thread_pool: ThreadPoolExecutor) -> None:
    """NVML counts at the first init; as long as the waiting thread is connected, there is no other first init."""
    machine = StubCards.of(1)
    machine.counts_at_init = True
    hardware.bind("fffe:10:00.0")
    future = begun(hardware, thread_pool, machine)
    machine.cards.append(StubCard("GPU-new", pci="fffe:11:00"))
    hardware.put(machine)
    hardware.bind("fffe:10:00.0", "fffe:11:00.0")
    assert [gpu.uuid for gpu in hardware.driver.snapshot().gpus] == ["GPU-stub-0", "GPU-new"]
    hardware.put(machine.event(79, "GPU-new"))
    assert future.result(LONG) == XidError(79, "GPU-new")


@pytest.mark.usefixtures("short_slices")
def test_closing_ends_the_wait(hardware: Hardware, thread_pool: ThreadPoolExecutor) -> None:
    future = begun(hardware, thread_pool, StubCards.of(1))
    hardware.driver.close()
    assert future.result(LONG) is None
    assert hardware.driver.wait(LONG) is None
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()


@pytest.mark.usefixtures("short_slices")
def test_a_driver_that_is_missing_in_a_snapshot_ends_the_wait(
    hardware: Hardware, thread_pool: ThreadPoolExecutor
) -> None:
    machine = StubCards.of(1)
    future = begun(hardware, thread_pool, machine)
    hardware.put(machine.fail_driver(NOT_LOADED))
    with pytest.raises(NoDriver):
        hardware.driver.snapshot()
    assert isinstance(future.exception(LONG), NoDriver)
