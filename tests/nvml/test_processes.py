"""`RealDriver.processes`: the processes on a card."""

from copy import deepcopy

import pytest

from gputile.nvml.driver import GpuProcess, NoDriver
from tests.nvml.conftest import NOW, Hardware
from tests.nvml.stub import LOST, NOT_LOADED, NOT_SUPPORTED, UNKNOWN, StubCard, StubCards

UUID = "GPU-1"
INSUFFICIENT_SIZE = 7


def card() -> StubCard:
    return StubCard(UUID)


def used(hardware: Hardware, stub: StubCard) -> tuple[GpuProcess, ...]:
    hardware.put(StubCards([stub]))
    processes = hardware.driver.processes(UUID)
    assert processes is not None
    return processes


@pytest.mark.parametrize(
    ("stub", "expected"),
    [
        pytest.param(card(), [], id="no process"),
        pytest.param(card().process(7, 512), [GpuProcess(pid=7, memory=512)], id="a compute process"),
        pytest.param(card().process(7, 512, "graphics"), [GpuProcess(pid=7, memory=512)], id="a graphics process"),
        pytest.param(
            card().process(7, 512, "mps"), [GpuProcess(pid=7, memory=512)], id="a compute process through MPS"
        ),
        pytest.param(card().process(7), [GpuProcess(pid=7)], id="memory that the driver does not report is unknown"),
        pytest.param(
            card().process(9, 1).process(7, 2),
            [GpuProcess(pid=7, memory=2), GpuProcess(pid=9, memory=1)],
            id="sorted by PID",
        ),
        pytest.param(
            card().process(7, 512).process(7, 512, "graphics"),
            [GpuProcess(pid=7, memory=512)],
            id="a process in two lists is returned once, with its memory once",
        ),
        pytest.param(
            card().process(7).process(7, 64, "graphics"),
            [GpuProcess(pid=7, memory=64)],
            id="only one list has the memory",
        ),
        pytest.param(
            card().process(7, 100, instance=1).process(7, 50, instance=2),
            [GpuProcess(pid=7, memory=150)],
            id="the memory on two MIG instances adds up",
        ),
        pytest.param(
            card().process(7, 100, instance=1).process(7, instance=2),
            [GpuProcess(pid=7, memory=100)],
            id="the memory of one of two instances is unknown",
        ),
    ],
)
def test_processes(hardware: Hardware, stub: StubCard, expected: list[GpuProcess]) -> None:
    assert list(used(hardware, stub)) == expected


def test_many_processes_are_all_listed(hardware: Hardware) -> None:
    """The binding queries the number first, and then the list with spare capacity."""
    stub = card()
    for pid in range(1, 31):
        stub.process(pid, pid)
    assert [process.pid for process in used(hardware, stub)] == list(range(1, 31))


@pytest.mark.parametrize(
    ("stub", "cores"),
    [
        pytest.param(card(), None, id="a card that does not measure"),
        pytest.param(StubCard(UUID, measures=True), 0, id="no samples: idle"),
        pytest.param(card().busy_with(7, 40, NOW - 1), 40, id="busy"),
        pytest.param(card().busy_with(7, 40, NOW - 1).busy_with(7, 30, NOW - 2), 40, id="the newest sample counts"),
        pytest.param(card().busy_with(7, 40, NOW - 60), 0, id="busy long ago"),
        pytest.param(card().busy_with(8, 40, NOW - 1), 0, id="another process was busy"),
        pytest.param(card().busy_with(7, 4_000_000_000, NOW - 1), None, id="more than 100 percent is unknown"),
    ],
)
def test_how_busy_a_process_keeps_its_card(hardware: Hardware, stub: StubCard, cores: int | None) -> None:
    assert used(hardware, deepcopy(stub).process(7, 1)) == (GpuProcess(pid=7, memory=1, cores=cores),)


def test_a_busy_process_that_holds_no_memory_is_not_listed(hardware: Hardware) -> None:
    assert used(hardware, card().busy_with(7, 40, NOW)) == ()


@pytest.mark.parametrize("code", [LOST, UNKNOWN])
@pytest.mark.parametrize("function", ["*", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetComputeRunningProcesses_v3"])
def test_the_processes_of_a_card_that_does_not_answer_are_unknown(hardware: Hardware, function: str, code: int) -> None:
    hardware.put(StubCards([card().process(7, 1)]).fail(0, code, function))
    assert hardware.driver.processes(UUID) is None


@pytest.mark.parametrize("code", [LOST, UNKNOWN, NOT_SUPPORTED, INSUFFICIENT_SIZE])
def test_a_failed_measurement_leaves_only_the_cores_unknown(hardware: Hardware, code: int) -> None:
    """The list of samples may grow between the two calls that fetch it."""
    machine = StubCards([card().process(7, 1).busy_with(7, 40, NOW)])
    hardware.put(machine.fail(0, code, "nvmlDeviceGetProcessUtilization"))
    assert hardware.driver.processes(UUID) == (GpuProcess(pid=7, memory=1),)


def test_the_processes_of_a_removed_card_are_unknown(hardware: Hardware) -> None:
    hardware.put(StubCards.of(1))
    assert hardware.driver.processes(UUID) is None


def test_without_any_list_the_processes_are_unknown(hardware: Hardware) -> None:
    machine = StubCards([card().process(7, 1)])
    for version in (2, 3):
        machine.fail(0, NOT_SUPPORTED, f"nvmlDeviceGetComputeRunningProcesses_v{version}")
    hardware.put(machine)
    assert hardware.driver.processes(UUID) is None


def test_a_list_that_is_not_supported_is_empty(hardware: Hardware) -> None:
    machine = StubCards([card().process(7, 1)]).fail(0, NOT_SUPPORTED, "nvmlDeviceGetGraphicsRunningProcesses_v3")
    hardware.put(machine)
    assert hardware.driver.processes(UUID) == (GpuProcess(pid=7, memory=1),)


@pytest.mark.parametrize(
    "function",
    [
        "nvmlDeviceGetHandleByUUID",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetProcessUtilization",
    ],
)
def test_a_missing_driver_is_an_error_and_no_empty_card(hardware: Hardware, function: str) -> None:
    machine = StubCards([card().process(7, 1)])
    hardware.put(machine.fail_driver(NOT_LOADED, function))
    with pytest.raises(NoDriver):
        hardware.driver.processes(UUID)
    hardware.put(machine.heal_driver())
    assert hardware.driver.processes(UUID) == (GpuProcess(pid=7, memory=1),)
