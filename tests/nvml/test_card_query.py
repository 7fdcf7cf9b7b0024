"""`RealDriver.snapshot` on a stub of NVML, with NVIDIA's own binding."""

import ctypes
from collections.abc import Callable
from typing import Any

import msgspec
import pynvml
import pytest

from gputile.model.cards import NO_NUMA
from gputile.nvml.driver import Driver, DriverGpu, DriverSnapshot, NoDriver
from gputile.nvml.errors import NvmlCode
from gputile.nvml.topology import ANCESTOR
from tests.nvml.conftest import Hardware
from tests.nvml.stub import LOST, NOT_LOADED, NOT_SUPPORTED, UNKNOWN, StubCard, StubCards

FELL_OFF = "fell off the bus; reset it or reboot the machine"


def snapshot_of(hardware: Hardware, machine: StubCards) -> DriverSnapshot:
    hardware.put(machine)
    return hardware.driver.snapshot()


def faults(snapshot: DriverSnapshot) -> dict[str, str]:
    return {gpu.uuid: gpu.fault for gpu in snapshot.gpus if gpu.fault}


def uuids(snapshot: DriverSnapshot) -> dict[int, str]:
    return {gpu.index: gpu.uuid for gpu in snapshot.gpus}


# ---- facts -----------------------------------------------------------------------------------------------------------


def test_it_is_a_driver(hardware: Hardware) -> None:
    driver: Driver = hardware.driver
    hardware.put(StubCards())
    assert driver.snapshot() == DriverSnapshot(driver="550.54.15", cuda="12.4")


def test_a_card_has_all_its_facts(hardware: Hardware) -> None:
    hardware.numa("0000:3b:00.0", "1")
    card = StubCard("GPU-1", "Tesla T4", 15360, minor=7, pci="0000:3b:00", mig=False, ecc=0)
    assert snapshot_of(hardware, StubCards([card])).gpus == (
        DriverGpu(index=0, uuid="GPU-1", model="Tesla T4", memory=15360, minor=7, numa=1, pci="0000:3b:00.0"),
    )


def test_a_card_with_only_a_uuid_is_healthy(hardware: Hardware) -> None:
    machine = StubCards([StubCard("GPU-1", name=None, memory=None)], driver=None, cuda=None)
    assert snapshot_of(hardware, machine) == DriverSnapshot(
        gpus=(DriverGpu(index=0, uuid="GPU-1", model="", memory=0),)
    )


@pytest.mark.parametrize(
    ("reported", "slot", "expected"),
    [
        pytest.param("0000:3b:00", "0000:3b:00.0", "0000:3b:00.0", id="lower case, four digits of domain"),
        pytest.param("0000:AF:1F", "0000:af:1f.0", "0000:af:1f.0", id="upper case in, lower case out"),
        pytest.param("10000:01:00", "10000:01:00.0", "10000:01:00.0", id="a domain beyond four digits keeps all"),
    ],
)
def test_the_pci_address_is_spelt_as_in_sys(hardware: Hardware, reported: str, slot: str, expected: str) -> None:
    hardware.numa(slot, "3")
    (gpu,) = snapshot_of(hardware, StubCards([StubCard("GPU-1", pci=reported)])).gpus
    assert (gpu.pci, gpu.numa) == (expected, 3)


@pytest.mark.parametrize(
    ("sys", "nodes", "expected"),
    [
        pytest.param("1", 0b1, 1, id="the slot's node counts, not NVML's"),
        pytest.param("0", None, 0, id="node 0 is a node"),
        pytest.param("-1", 0b100, NO_NUMA, id="a slot without a node"),
        pytest.param("-5", None, NO_NUMA, id="a negative node is none"),
        pytest.param(None, 0b100, 2, id="without /sys NVML is queried"),
        pytest.param(None, 0b110, NO_NUMA, id="close to two nodes is no node"),
        pytest.param(None, None, NO_NUMA, id="unknown"),
        pytest.param("many", 0b1, 0, id="an unreadable slot is skipped"),
    ],
)
def test_numa(hardware: Hardware, sys: str | None, nodes: int | None, expected: int) -> None:
    if sys is not None:
        hardware.numa("0000:3b:00.0", sys)
    (gpu,) = snapshot_of(hardware, StubCards([StubCard("GPU-1", pci="0000:3b:00", nodes=nodes)])).gpus
    assert gpu.numa == expected


@pytest.mark.parametrize(("mode", "expected"), [(True, True), (False, False), (None, False)])
def test_mig(hardware: Hardware, mode: bool | None, expected: bool) -> None:
    (gpu,) = snapshot_of(hardware, StubCards([StubCard("GPU-1", mig=mode)])).gpus
    assert gpu.is_mig is expected


# ---- faults ----------------------------------------------------------------------------------------------------------


def broken(**facts: Any) -> Callable[[StubCards], StubCards]:
    def change(machine: StubCards) -> StubCards:
        for key, fact in facts.items():
            assert hasattr(machine.cards[1], key)
            setattr(machine.cards[1], key, fact)
        return machine

    return change


def failing(code: int, function: str = "*") -> Callable[[StubCards], StubCards]:
    return lambda machine: machine.fail(1, code, function)


NO_ANSWER = "does not answer; the driver does not know why"


@pytest.mark.parametrize(
    ("breaks", "fault"),
    [
        pytest.param(failing(LOST), FELL_OFF, id="every call fails: lost"),
        pytest.param(failing(LOST, "nvmlDeviceGetHandleByIndex_v2"), FELL_OFF, id="no handle: lost"),
        pytest.param(failing(UNKNOWN, "nvmlDeviceGetHandleByIndex_v2"), NO_ANSWER, id="no handle: unknown"),
        pytest.param(failing(UNKNOWN, "nvmlDeviceGetUUID"), NO_ANSWER, id="a handle, but no UUID"),
        pytest.param(failing(LOST, "nvmlDeviceGetMemoryInfo"), FELL_OFF, id="a UUID, but no memory"),
        pytest.param(failing(LOST, "nvmlDeviceGetTotalEccErrors"), FELL_OFF, id="lost at the last query"),
        pytest.param(failing(16), "needs a reset", id="a reset is due"),
        pytest.param(failing(11), "its interrupts do not arrive", id="interrupts"),
        pytest.param(failing(8), "its power cables are not connected", id="power"),
        pytest.param(failing(17), "does not answer: The operating system", id="a code without a message of ours"),
        pytest.param(
            failing(4, "nvmlDeviceGetHandleByIndex_v2"),
            "permission denied; give the agent the GPU's device file",
            id="a card without permission",
        ),
        pytest.param(
            broken(ecc=3),
            "3 uncorrectable memory errors since the driver was loaded; reset the GPU",
            id="double-bit errors",
        ),
        pytest.param(
            broken(pending=True), "bad memory pages are pending retirement; reset the GPU", id="pages to be retired"
        ),
        pytest.param(
            broken(unmappable=True), "row remapping of bad memory failed; replace the GPU", id="no spare rows"
        ),
    ],
)
def test_a_fault_affects_one_card_only(
    hardware: Hardware, breaks: Callable[[StubCards], StubCards], fault: str
) -> None:
    """The card keeps its identity, and is as before once the fault is gone."""
    healthy = snapshot_of(hardware, StubCards.of(3))
    faulty = snapshot_of(hardware, breaks(StubCards.of(3)))
    assert [gpu.fault.startswith(fault) if n == 1 else gpu.fault for n, gpu in enumerate(faulty.gpus)] == ["", True, ""]
    assert tuple(msgspec.structs.replace(gpu, fault="") for gpu in faulty.gpus) == healthy.gpus
    assert snapshot_of(hardware, StubCards.of(3)) == healthy


@pytest.mark.parametrize("code", [2, 3, 4, 6, 13, 14, 21, 22, 25, 26, 27])
@pytest.mark.parametrize(
    "function",
    [
        "nvmlDeviceGetMinorNumber",
        "nvmlDeviceGetPciInfo_v3",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetRetiredPagesPendingStatus",
        "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetMemoryAffinity",
        "nvmlDeviceGetName",
        "nvmlDeviceGetMemoryInfo",
    ],
)
def test_an_unsupported_query_is_no_fault(hardware: Hardware, function: str, code: int) -> None:
    assert not faults(snapshot_of(hardware, StubCards.of(2).fail(1, code, function)))


def test_a_card_that_fails_before_the_first_snapshot_is_unidentified(hardware: Hardware) -> None:
    snapshot = snapshot_of(hardware, StubCards.of(3).lose(1))
    assert uuids(snapshot) == {0: "GPU-stub-0", 2: "GPU-stub-2"}
    assert snapshot.unidentified == (f"GPU 1: {FELL_OFF}",)


def test_a_card_that_fails_before_the_first_snapshot_is_included_if_its_uuid_is_readable(hardware: Hardware) -> None:
    snapshot = snapshot_of(hardware, StubCards.of(2).fail(1, LOST, "nvmlDeviceGetName"))
    assert snapshot.gpus[1] == DriverGpu(index=1, uuid="GPU-stub-1", model="", memory=0, fault=FELL_OFF)


# ---- added and removed cards -----------------------------------------------------------------------------------------


def test_a_lost_card_recovers(hardware: Hardware) -> None:
    healthy = snapshot_of(hardware, StubCards.of(4))
    for _ in range(3):
        assert faults(snapshot_of(hardware, StubCards.of(4).lose(3))) == {"GPU-stub-3": FELL_OFF}
    assert snapshot_of(hardware, StubCards.of(4)) == healthy


def test_cards_added_removed_and_renumbered(hardware: Hardware) -> None:
    machine = StubCards.of(3)
    assert uuids(snapshot_of(hardware, machine)) == {0: "GPU-stub-0", 1: "GPU-stub-1", 2: "GPU-stub-2"}
    machine.cards.append(StubCard("GPU-new"))
    assert uuids(snapshot_of(hardware, machine))[3] == "GPU-new"
    del machine.cards[0]
    assert uuids(snapshot_of(hardware, machine)) == {0: "GPU-stub-1", 1: "GPU-stub-2", 2: "GPU-new"}
    machine.cards.reverse()
    assert uuids(snapshot_of(hardware, machine)) == {0: "GPU-new", 1: "GPU-stub-2", 2: "GPU-stub-1"}


def test_cards_counted_at_init_are_counted_anew_when_the_kernel_binds_others(hardware: Hardware) -> None:
    machine = StubCards.of(2)
    machine.counts_at_init = True
    hardware.bind("fffe:10:00.0", "fffe:11:00.0")
    snapshot_of(hardware, machine)
    machine.cards.append(StubCard("GPU-new", pci="fffe:12:00"))
    assert len(snapshot_of(hardware, machine).gpus) == 2  # as NVML does: it was not initialised again
    hardware.bind("fffe:10:00.0", "fffe:11:00.0", "fffe:12:00.0")
    assert uuids(snapshot_of(hardware, machine))[2] == "GPU-new"


def test_a_bound_card_that_nvml_no_longer_lists_is_faulty(hardware: Hardware) -> None:
    hardware.bind("fffe:10:00.0", "fffe:11:00.0", "fffe:12:00.0")
    snapshot_of(hardware, StubCards.of(3))
    machine = StubCards.of(3)
    del machine.cards[1]
    snapshot = snapshot_of(hardware, machine)
    assert uuids(snapshot) == {0: "GPU-stub-0", 1: "GPU-stub-2", 2: "GPU-stub-1"}  # its number is another's now
    assert faults(snapshot) == {"GPU-stub-1": "still bound to the driver, which no longer lists it; see `dmesg`"}
    hardware.bind("fffe:10:00.0", "fffe:12:00.0")
    assert uuids(snapshot_of(hardware, machine)) == {0: "GPU-stub-0", 1: "GPU-stub-2"}


# ---- the driver ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "message"),
    [
        pytest.param(9, "the kernel module is not loaded", id="module not loaded"),
        pytest.param(18, "its library and its kernel module have different versions", id="updated while running"),
        pytest.param(4, "permission denied", id="no permission"),
        pytest.param(1, "it was shut down", id="uninitialised"),
        pytest.param(999, "it fails without a reason", id="unknown"),
        pytest.param(
            17, "it answers 'The operating system has blocked the request'", id="a code without a message of ours"
        ),
    ],
)
@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetCount_v2"])
def test_a_driver_that_fails_and_recovers(hardware: Hardware, function: str, code: int, message: str) -> None:
    failing_machine = StubCards.of(2).fail_driver(code, function)
    for _ in range(2):
        if function == "nvmlInit":
            hardware.driver.close()  # else it is connected already
        hardware.put(failing_machine)
        with pytest.raises(NoDriver, match=f"no NVIDIA driver: {message}"):
            hardware.driver.snapshot()
        assert len(snapshot_of(hardware, StubCards.of(2)).gpus) == 2


@pytest.mark.parametrize(
    "function",
    ["nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID", "nvmlDeviceGetMigMode", "nvmlDeviceGetNvLinkState"],
)
def test_a_driver_that_fails_during_a_snapshot_is_no_fault_of_a_card(hardware: Hardware, function: str) -> None:
    healthy = snapshot_of(hardware, StubCards.of(2))
    hardware.put(StubCards.of(2).fail_driver(NOT_LOADED, function))
    with pytest.raises(NoDriver):
        hardware.driver.snapshot()
    assert snapshot_of(hardware, StubCards.of(2)) == healthy


def test_without_a_file_of_hardware_the_driver_is_not_loaded(hardware: Hardware) -> None:
    with pytest.raises(NoDriver, match="modprobe nvidia"):
        hardware.driver.snapshot()


# ---- links -----------------------------------------------------------------------------------------------------------


def pair(level: int | None = 50) -> StubCards:
    machine = StubCards([StubCard("GPU-a", pci="0000:0a:00"), StubCard("GPU-b", pci="0000:0b:00")])
    if level is not None:
        machine.cards[0].near["GPU-b"] = machine.cards[1].near["GPU-a"] = level
    return machine


def wired(first: int, second: int, kind: str = "gpu", active: bool = True, level: int = 50) -> StubCards:
    """Two cards with so many NVLinks, as each side reports."""
    machine = pair(level)
    for _ in range(first):
        machine.cards[0].nvlink("0000:0b:00", kind=kind, active=active)
    for _ in range(second):
        machine.cards[1].nvlink("0000:0a:00", kind=kind, active=active)
    return machine


@pytest.mark.parametrize(
    ("machine", "weight"),
    [
        pytest.param(pair(0), 5, id="two GPUs of one board"),
        pytest.param(pair(10), 4, id="one PCIe switch"),
        pytest.param(pair(20), 3, id="several PCIe switches"),
        pytest.param(pair(30), 2, id="the host bridge"),
        pytest.param(pair(40), 1, id="the same NUMA node"),
        pytest.param(pair(50), 0, id="from one NUMA node to another is no link"),
        pytest.param(pair(45), 0, id="an unknown level is no link"),
        pytest.param(wired(1, 1), 10, id="one NVLink"),
        pytest.param(wired(4, 4, level=10), 40, id="four NVLinks count more than PCIe"),
        pytest.param(wired(2, 0), 20, id="only one side reports them"),
        pytest.param(wired(2, 2, active=False, level=30), 2, id="inactive NVLinks do not count"),
        pytest.param(wired(12, 12, kind="switch"), 120, id="twelve NVLinks of each to an NVSwitch"),
        pytest.param(wired(12, 6, kind="switch"), 60, id="to an NVSwitch the lesser of the two counts"),
        pytest.param(wired(3, 3, kind="unknown"), 30, id="an older driver reports the address and no type"),
    ],
)
def test_how_close_two_cards_are(hardware: Hardware, machine: StubCards, weight: int) -> None:
    assert snapshot_of(hardware, machine).links == ((0, weight), (weight, 0))


@pytest.mark.parametrize(
    "machine",
    [
        pytest.param(StubCards.of(1), id="one card"),
        pytest.param(StubCards(), id="no card"),
        pytest.param(pair(None), id="a driver without topology"),
    ],
)
def test_links_are_unknown_without_topology(hardware: Hardware, machine: StubCards) -> None:
    assert snapshot_of(hardware, machine).links == ()


def test_links_of_a_machine_with_a_lost_card(hardware: Hardware) -> None:
    assert snapshot_of(hardware, StubCards.of(3)).links == ((0, 2, 2), (2, 0, 2), (2, 2, 0))
    assert snapshot_of(hardware, StubCards.of(3).lose(1)).links == ((0, 0, 2), (0, 0, 0), (2, 0, 0))


def test_a_failing_link_is_no_fault_of_the_card(hardware: Hardware) -> None:
    machine = wired(1, 1, level=10).fail(0, UNKNOWN, "nvmlDeviceGetNvLinkState")
    machine.fail(1, NOT_SUPPORTED, "nvmlDeviceGetNvLinkState")
    snapshot = snapshot_of(hardware, machine)
    assert (snapshot.links, faults(snapshot)) == (((0, 4), (4, 0)), {})


# ---- the binding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", list(NvmlCode))
def test_our_codes_are_those_of_nvml(code: NvmlCode) -> None:
    assert getattr(pynvml, f"NVML_ERROR_{code.name}") == code


def test_our_levels_are_those_of_nvml() -> None:
    names = ("INTERNAL", "SINGLE", "MULTIPLE", "HOSTBRIDGE", "NODE", "SYSTEM")
    assert list(ANCESTOR) == [getattr(pynvml, f"NVML_TOPOLOGY_{name}") for name in names]


def test_the_binding_uses_the_stub(hardware: Hardware) -> None:
    hardware.put(StubCards(driver="1.2.3"))
    assert hardware.driver.snapshot().driver == "1.2.3"
    assert isinstance(pynvml.nvmlLib, ctypes.CDLL)
