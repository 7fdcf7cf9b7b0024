"""Errors as they happen: `RealDriver.wait`, alone and while another thread looks."""

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

LONG = 50.0  # no test waits it out


@pytest.fixture
def thread_pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as thread:
        yield thread


@pytest.fixture
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that who waits for the end of a slice need not wait a second."""
    monkeypatch.setattr(xid_events, "SLICE", 0.02)


def listening_to(hardware: Hardware, machine: StubCards) -> None:
    hardware.put(machine)
    hardware.driver.snapshot()
    assert hardware.driver.wait(0) is None


def all_errors(hardware: Hardware) -> list[XidError]:
    errors: list[XidError] = []
    while error := hardware.driver.wait(0):
        errors.append(error)
    return errors


# ---- one thread ------------------------------------------------------------------------------------------------------


def test_each_error_is_told_once_in_its_order_and_with_its_card(hardware: Hardware) -> None:
    machine = StubCards.of(2)
    listening_to(hardware, machine)
    hardware.put(machine.event(79, 1).event(31, 0).event(31, 1))
    assert all_errors(hardware) == [XidError(79, "GPU-stub-1"), XidError(31, "GPU-stub-0"), XidError(31, "GPU-stub-1")]
    hardware.put(machine.event(48, 0))
    assert all_errors(hardware) == [XidError(48, "GPU-stub-0")]


def test_an_error_of_no_card_is_told_without_one(hardware: Hardware) -> None:
    machine = StubCards.of(1)
    listening_to(hardware, machine)
    hardware.put(machine.event(79))
    assert all_errors(hardware) == [XidError(79)]


def test_a_card_that_fell_off_is_named_though_it_no_longer_says_its_name(hardware: Hardware) -> None:
    machine = StubCards.of(2)
    listening_to(hardware, machine)
    hardware.put(machine.lose(1).event(79, 1))
    assert all_errors(hardware) == [XidError(79, "GPU-stub-1")]


def test_an_error_is_not_lost_when_the_cards_change_at_the_same_time(hardware: Hardware) -> None:
    """The look marks the set of events as out of date before the error was fetched from it."""
    machine = StubCards.of(2)
    listening_to(hardware, machine)
    hardware.put(machine.event(79, 1))
    machine.lose(1)
    hardware.put(machine)
    hardware.driver.snapshot()
    assert all_errors(hardware) == [XidError(79, "GPU-stub-1")]


def test_a_new_card_is_listened_to_from_the_next_look_on(hardware: Hardware) -> None:
    machine = StubCards.of(1)
    listening_to(hardware, machine)
    machine.cards.append(StubCard("GPU-new"))
    hardware.put(machine.event(79, "GPU-new"))
    assert all_errors(hardware) == []
    hardware.driver.snapshot()
    assert all_errors(hardware) == [XidError(79, "GPU-new")]


def test_a_card_that_is_back_is_listened_to_again(hardware: Hardware) -> None:
    machine = StubCards.of(2).lose(1)
    listening_to(hardware, machine)
    hardware.put(machine.heal(1).event(31, 1))
    hardware.driver.snapshot()
    assert all_errors(hardware) == [XidError(31, "GPU-stub-1")]


def test_a_card_that_could_not_be_registered_is_tried_again(hardware: Hardware) -> None:
    machine = StubCards.of(2).fail(1, UNKNOWN, "nvmlDeviceRegisterEvents")
    listening_to(hardware, machine)
    hardware.put(machine.heal(1).event(31, 1))
    assert all_errors(hardware) == [XidError(31, "GPU-stub-1")]


def test_a_card_that_cannot_report_does_not_keep_others_from_it(hardware: Hardware) -> None:
    machine = StubCards.of(2).fail(0, NOT_SUPPORTED, "nvmlDeviceRegisterEvents")
    listening_to(hardware, machine)
    hardware.put(machine.event(31, 0).event(32, 1))
    assert all_errors(hardware) == [XidError(32, "GPU-stub-1")]


@pytest.mark.parametrize("machine", [StubCards(), StubCards.of(1).fail(0, NOT_SUPPORTED, "nvmlDeviceRegisterEvents")])
def test_where_nobody_can_report_nothing_comes(hardware: Hardware, machine: StubCards) -> None:
    hardware.put(machine)
    assert hardware.driver.wait(0.001) is None


@pytest.mark.parametrize("seconds", [0, -1])
def test_no_time_to_wait_is_a_look_at_what_is_there(hardware: Hardware, seconds: float) -> None:
    machine = StubCards.of(1)
    listening_to(hardware, machine)
    assert hardware.driver.wait(seconds) is None
    hardware.put(machine.event(31, 0))
    assert hardware.driver.wait(seconds) == XidError(31, "GPU-stub-0")


def test_a_set_that_fails_is_made_anew(hardware: Hardware) -> None:
    machine = StubCards.of(2)
    listening_to(hardware, machine)
    hardware.put(machine.fail_driver(LOST, "nvmlEventSetWait_v2"))
    assert hardware.driver.wait(0) is None
    hardware.put(machine.heal_driver().event(31, 1))
    assert all_errors(hardware) == [XidError(31, "GPU-stub-1")]


def test_a_set_that_fails_at_once_still_takes_its_time(hardware: Hardware, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whoever calls `wait` in a loop would keep a core busy while a card is off the bus."""
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
def test_a_driver_that_is_gone_is_told_and_tried_again(hardware: Hardware, function: str) -> None:
    machine = StubCards.of(1)
    hardware.put(machine.fail_driver(NOT_LOADED, function))
    for _ in range(2):
        with pytest.raises(NoDriver):
            hardware.driver.wait(0)
    hardware.put(machine.heal_driver().event(31, 0))
    assert all_errors(hardware) == [XidError(31, "GPU-stub-0")]


def test_a_driver_that_goes_while_we_listen_is_told_and_tried_again(hardware: Hardware) -> None:
    machine = StubCards.of(1)
    listening_to(hardware, machine)
    hardware.put(machine.fail_driver(NOT_LOADED))
    with pytest.raises(NoDriver):
        hardware.driver.wait(0)
    hardware.put(machine.heal_driver().event(31, 0))
    assert all_errors(hardware) == [XidError(31, "GPU-stub-0")]


# ---- two threads -----------------------------------------------------------------------------------------------------


def begun(hardware: Hardware, thread_pool: ThreadPoolExecutor, machine: StubCards) -> "Future[XidError | None]":
    """Another thread waits, and has asked the driver already."""
    hardware.put(machine)
    hardware.driver.snapshot()
    future = thread_pool.submit(hardware.driver.wait, LONG)
    listener: XidListener = hardware.driver._xid_listener
    while not listener._session.is_open:
        assert not future.done()
    return future


def test_an_error_wakes_who_waits(hardware: Hardware, thread_pool: ThreadPoolExecutor) -> None:
    machine = StubCards.of(1)
    future = begun(hardware, thread_pool, machine)
    hardware.put(machine.event(79, 0))
    assert future.result(LONG) == XidError(79, "GPU-stub-0")


@pytest.mark.usefixtures("short_slices")
def test_looking_and_waiting_do_not_disturb_each_other(
    hardware: Hardware, thread_pool: ThreadPoolExecutor
) -> None:
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
def test_cards_are_counted_anew_though_somebody_waits(
    hardware: Hardware, thread_pool: ThreadPoolExecutor
) -> None:
    """NVML counts at the first init; as long as the waiter holds on to it, there is no other first."""
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
def test_a_driver_that_look_finds_gone_is_gone_for_who_waits(
    hardware: Hardware, thread_pool: ThreadPoolExecutor
) -> None:
    machine = StubCards.of(1)
    future = begun(hardware, thread_pool, machine)
    hardware.put(machine.fail_driver(NOT_LOADED))
    with pytest.raises(NoDriver):
        hardware.driver.snapshot()
    assert isinstance(future.exception(LONG), NoDriver)
