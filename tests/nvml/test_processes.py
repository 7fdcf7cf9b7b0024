"""Who uses a card, as `RealDriver.processes` tells it."""

from copy import deepcopy

import pytest

from gputile.nvml.driver import GpuProcess, NoDriver
from tests.nvml.conftest import NOW, Hardware
from tests.nvml.stub import LOST, NOT_LOADED, NOT_SUPPORTED, UNKNOWN, StubCard, StubCards

UUID = "GPU-1"
INSUFFICIENT_SIZE = 7


def card() -> StubCard:
    return StubCard(UUID)


def used(hardware: Hardware, one: StubCard) -> tuple[GpuProcess, ...]:
    hardware.put(StubCards([one]))
    found = hardware.driver.processes(UUID)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("one", "wanted"),
    [
        pytest.param(card(), [], id="nobody"),
        pytest.param(card().process(7, 512), [GpuProcess(pid=7, memory=512)], id="one that computes"),
        pytest.param(card().process(7, 512, "graphics"), [GpuProcess(pid=7, memory=512)], id="one that draws"),
        pytest.param(
            card().process(7, 512, "mps"), [GpuProcess(pid=7, memory=512)], id="one that computes through MPS"
        ),
        pytest.param(card().process(7), [GpuProcess(pid=7)], id="memory that the driver does not know is none we know"),
        pytest.param(
            card().process(9, 1).process(7, 2),
            [GpuProcess(pid=7, memory=2), GpuProcess(pid=9, memory=1)],
            id="by number",
        ),
        pytest.param(
            card().process(7, 512).process(7, 512, "graphics"),
            [GpuProcess(pid=7, memory=512)],
            id="one that computes and draws stands once, with its memory once",
        ),
        pytest.param(
            card().process(7).process(7, 64, "graphics"),
            [GpuProcess(pid=7, memory=64)],
            id="only one list knows the memory",
        ),
        pytest.param(
            card().process(7, 100, instance=1).process(7, 50, instance=2),
            [GpuProcess(pid=7, memory=150)],
            id="the parts on two MIG instances add up",
        ),
        pytest.param(
            card().process(7, 100, instance=1).process(7, instance=2),
            [GpuProcess(pid=7, memory=100)],
            id="of two instances the driver knows one",
        ),
    ],
)
def test_processes(hardware: Hardware, one: StubCard, wanted: list[GpuProcess]) -> None:
    assert list(used(hardware, one)) == wanted


def test_many_processes_are_all_listed(hardware: Hardware) -> None:
    """The binding asks for the number first, and then with room for more."""
    one = card()
    for pid in range(1, 31):
        one.process(pid, pid)
    assert [process.pid for process in used(hardware, one)] == list(range(1, 31))


@pytest.mark.parametrize(
    ("one", "cores"),
    [
        pytest.param(card(), None, id="a card that does not measure"),
        pytest.param(StubCard(UUID, measures=True), 0, id="no samples: idle"),
        pytest.param(card().busy_with(7, 40, NOW - 1), 40, id="busy"),
        pytest.param(card().busy_with(7, 40, NOW - 1).busy_with(7, 30, NOW - 2), 40, id="the newest sample counts"),
        pytest.param(card().busy_with(7, 40, NOW - 60), 0, id="busy long ago"),
        pytest.param(card().busy_with(8, 40, NOW - 1), 0, id="another was busy"),
        pytest.param(card().busy_with(7, 4_000_000_000, NOW - 1), None, id="nonsense is not believed"),
    ],
)
def test_how_busy_a_process_keeps_its_card(hardware: Hardware, one: StubCard, cores: int | None) -> None:
    assert used(hardware, deepcopy(one).process(7, 1)) == (GpuProcess(pid=7, memory=1, cores=cores),)


def test_who_is_busy_and_holds_nothing_is_not_listed(hardware: Hardware) -> None:
    assert used(hardware, card().busy_with(7, 40, NOW)) == ()


@pytest.mark.parametrize("code", [LOST, UNKNOWN])
@pytest.mark.parametrize("function", ["*", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetComputeRunningProcesses_v3"])
def test_of_a_card_that_does_not_answer_nobody_knows(hardware: Hardware, function: str, code: int) -> None:
    hardware.put(StubCards([card().process(7, 1)]).fail(0, code, function))
    assert hardware.driver.processes(UUID) is None


@pytest.mark.parametrize("code", [LOST, UNKNOWN, NOT_SUPPORTED, INSUFFICIENT_SIZE])
def test_a_measure_that_fails_costs_only_the_measure(hardware: Hardware, code: int) -> None:
    """The list of samples may grow between the two calls that fetch it."""
    machine = StubCards([card().process(7, 1).busy_with(7, 40, NOW)])
    hardware.put(machine.fail(0, code, "nvmlDeviceGetProcessUtilization"))
    assert hardware.driver.processes(UUID) == (GpuProcess(pid=7, memory=1),)


def test_of_a_card_that_is_gone_nobody_knows(hardware: Hardware) -> None:
    hardware.put(StubCards.of(1))
    assert hardware.driver.processes(UUID) is None


def test_a_card_that_lists_no_process_at_all_is_not_idle(hardware: Hardware) -> None:
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
def test_a_driver_that_is_gone_is_no_empty_card(hardware: Hardware, function: str) -> None:
    machine = StubCards([card().process(7, 1)])
    hardware.put(machine.fail_driver(NOT_LOADED, function))
    with pytest.raises(NoDriver):
        hardware.driver.processes(UUID)
    hardware.put(machine.heal_driver())
    assert hardware.driver.processes(UUID) == (GpuProcess(pid=7, memory=1),)
