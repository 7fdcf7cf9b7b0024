"""The driver in processes of their own, which find the library as a service does: by the loader's path."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from gputile.nvml.driver import DriverGpu, GpuProcess
from tests.nvml.stub import StubCard, StubCards, build, environment

SNAPSHOT = """
import msgspec
from gputile.nvml.real import RealDriver
driver = RealDriver()
print(msgspec.json.encode([driver.snapshot().gpus[0], driver.processes("GPU-1")]).decode())
"""


def run(folder: Path, file: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **environment(folder, file)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cards"


def test_the_table(library: Path, file: Path) -> None:
    machine = StubCards.of(2, "Tesla T4", 15360).lose(1)
    machine.cards[0].process(4711, 2048)
    machine.write(file)
    result = run(library, file, "-m", "gputile.nvml")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "driver 550.54.15, CUDA 12.4, 1 GPUs",
        "GPU  UUID        MODEL     MEMORY  NUMA  PCI           DEVICE        USED BY        HEALTH",
        "0    GPU-stub-0  Tesla T4  15 GiB  -     fffe:10:00.0  /dev/nvidia0  4711 2 GiB 0%  healthy",
        "GPU 1: fell off the bus; reset it or reboot the machine",
    ]


def test_the_table_of_a_machine_with_links(library: Path, file: Path) -> None:
    StubCards.of(3).write(file)
    result = run(library, file, "-m", "gputile.nvml")
    assert result.stdout.splitlines()[-4:] == ["LINKS  0  1  2", "0      0  2  2", "1      2  0  2", "2      2  2  0"]


def test_a_library_that_cannot_be_loaded(tmp_path: Path, file: Path) -> None:
    """It counts as missing. (A missing library cannot be tested on a machine that has one.)"""
    (tmp_path / "libnvidia-ml.so.1").write_text("no library")
    result = run(tmp_path, file, "-m", "gputile.nvml")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("no NVIDIA driver: libnvidia-ml.so.1 is not found; install the driver")


def test_a_library_that_is_installed_later_is_found(library: Path, tmp_path: Path, file: Path) -> None:
    """The driver may be installed later. The loader's path is fixed at the start, the content of its folders is not."""
    StubCards.of(1).write(file)
    script = """
import pathlib, sys
from gputile.nvml.real import RealDriver
from gputile.nvml.driver import NoDriver
driver = RealDriver()
try:
    driver.snapshot()
except NoDriver as error:
    print(error)
library, folder = map(pathlib.Path, sys.argv[1:])
(folder / "libnvidia-ml.so.1").unlink()
(folder / "libnvidia-ml.so.1").symlink_to(library / "libnvidia-ml.so.1")
print(driver.snapshot().gpus[0].uuid)
"""
    (tmp_path / "libnvidia-ml.so.1").write_text("no library")
    result = run(tmp_path, file, "-c", script, str(library), str(tmp_path))
    first, second = result.stdout.splitlines()
    assert first.startswith("no NVIDIA driver: libnvidia-ml.so.1 is not found")
    assert second == "GPU-stub-0"


def test_an_older_driver_without_newer_functions_lists_its_cards(tmp_path: Path, file: Path) -> None:
    folder = build(tmp_path / "old", old=True)
    StubCards([StubCard("GPU-1", minor=0, mig=True, unmappable=True, nodes=1).process(7, 512)]).write(file)
    result = run(folder, file, "-c", SNAPSHOT)
    gpu = DriverGpu(index=0, uuid="GPU-1", model="NVIDIA A100-SXM4-80GB", memory=81920, minor=0)
    assert msgspec.json.decode(result.stdout, type=tuple[DriverGpu, tuple[GpuProcess, ...]]) == (
        gpu,
        (GpuProcess(pid=7, memory=512),),
    )


def test_importing_the_package_does_not_import_the_binding(library: Path, file: Path) -> None:
    imports = "import sys, gputile.nvml.real, gputile.nvml.fake, gputile.nvml.null; print('pynvml' in sys.modules)"
    assert run(library, file, "-c", imports).stdout == "False\n"


def test_without_a_compiler_the_error_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(RuntimeError, match="needs a C compiler"):
        build(tmp_path)
