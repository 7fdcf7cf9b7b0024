"""The drivers without hardware behave as the real one."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from gputile.nvml.driver import Driver, DriverSnapshot, GpuProcess, NoDriver, XidError
from gputile.nvml.fake import FakeDriver, cards
from gputile.nvml.null import NullDriver


def test_every_query_of_a_null_driver_raises() -> None:
    driver: Driver = NullDriver("no driver here")
    for query in (driver.snapshot, lambda: driver.processes("GPU-0"), lambda: driver.wait(0)):
        with pytest.raises(NoDriver, match="no driver here"):
            query()
    driver.close()


def test_fake_cards_fail_and_heal() -> None:
    driver = FakeDriver(cards(4), links=((0, 1, 0, 0),) * 4)
    driver.fail("GPU-fake-1", "fell off the bus")
    assert [gpu.fault for gpu in driver.snapshot().gpus] == ["", "fell off the bus", "", ""]
    driver.heal("GPU-fake-1")
    assert driver.snapshot() == DriverSnapshot(
        gpus=cards(4), links=((0, 1, 0, 0),) * 4, driver="550.54.15", cuda="12.4"
    )
    with pytest.raises(KeyError):
        driver.fail("GPU-unknown")


def test_fake_cards_differ_from_each_other() -> None:
    gpus = cards(8)
    for facts in ([g.index for g in gpus], [g.uuid for g in gpus], [g.minor for g in gpus], [g.pci for g in gpus]):
        assert len(set(facts)) == 8
    assert [gpu.numa for gpu in gpus] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_fake_processes_are_removed_with_their_card() -> None:
    driver: Driver = (fake := FakeDriver(cards(2)))
    fake.use("GPU-fake-1", GpuProcess(pid=7, memory=1))
    assert driver.processes("GPU-fake-1") == (GpuProcess(pid=7, memory=1),)
    assert driver.processes("GPU-fake-0") == ()
    fake.put(*cards(1))
    assert driver.processes("GPU-fake-1") is None


def test_fake_errors_are_returned_once_and_in_order() -> None:
    driver = FakeDriver(cards(1))
    driver.report(79, "GPU-fake-0")
    driver.report(31)
    assert [driver.wait(0), driver.wait(0), driver.wait(0)] == [XidError(79, "GPU-fake-0"), XidError(31), None]


def test_a_fake_driver_that_vanishes_ends_the_wait_and_can_come_back() -> None:
    driver = FakeDriver(cards(1))
    with ThreadPoolExecutor(1) as thread_pool:
        future = thread_pool.submit(driver.wait, 50)
        driver.vanish("gone")
        assert isinstance(future.exception(50), NoDriver)
    with pytest.raises(NoDriver, match="gone"):
        driver.snapshot()
    driver.come_back()
    assert driver.snapshot().gpus == cards(1)


def test_closing_a_fake_driver_ends_the_wait() -> None:
    driver = FakeDriver(cards(1))
    with ThreadPoolExecutor(1) as thread_pool:
        future = thread_pool.submit(driver.wait, 50)
        driver.close()
        assert future.result(50) is None
    assert driver.wait(50) is None
