"""The stub of the driver's library, loaded once into the test process by NVIDIA's own binding."""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from gputile.nvml.real import RealDriver
from tests.nvml.stub import LIBRARY, VARIABLE, StubCards, build

NOW = 1_000_000.0


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the library. The binding loads it by name, and gets the one that is loaded already."""
    folder = build(tmp_path_factory.mktemp("driver"))
    ctypes.CDLL(str(folder / LIBRARY))
    return folder


class Hardware:
    """A machine whose cards are a file and whose /sys is a folder, with a driver for it."""

    def __init__(self, folder: Path) -> None:
        self.file, self.sys = folder / "cards", folder / "sys"
        self.driver = RealDriver(self.sys, lambda: NOW)

    def put(self, machine: StubCards) -> None:
        machine.write(self.file)

    def numa(self, pci: str, node: str) -> None:
        slot = self.sys / "bus/pci/devices" / pci
        slot.mkdir(parents=True, exist_ok=True)
        (slot / "numa_node").write_text(f"{node}\n")

    def bind(self, *pcis: str) -> None:
        """Bind exactly these PCI addresses to the driver."""
        folder = self.sys / "bus/pci/drivers/nvidia"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "new_id").touch()
        for entry in folder.glob("*:*"):
            entry.unlink()
        for pci in pcis:
            (folder / pci).touch()


@pytest.fixture
def hardware(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hardware]:
    machine = Hardware(tmp_path)
    monkeypatch.setenv(VARIABLE, str(machine.file))
    yield machine
    machine.driver.close()
    machine.put(StubCards())
    with pytest.raises(pynvml.NVMLError_Uninitialized):  # there were as many shutdowns as inits
        pynvml.nvmlDeviceGetCount()
    assert os.environ[VARIABLE] == str(machine.file)
