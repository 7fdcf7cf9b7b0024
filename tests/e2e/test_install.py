"""`pip install gputile` and its extras in fresh virtual environments: each has what its commands need, and no more."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")
NEVER_IN_THE_CLI = ("grpc", "pynvml", "prometheus_client", "uvloop")
MANIFEST = str(ROOT / "examples" / "cluster.yaml")


class Environment:
    """One virtual environment with the wheel and one extra."""

    def __init__(self, folder: Path, wheel: Path, extra: str) -> None:
        self._bin = folder / "bin"
        self._run(sys.executable, "-m", "venv", str(folder))
        named = f"gputile{extra} @ {wheel.as_uri()}"
        self._run(str(self._bin / "python"), *PIP, "install", "--constraint", str(_pins(folder)), named)

    def gputile(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        # GPUTILE_* variables are settings of the processes; those of this test run are removed.
        env = {name: value for name, value in os.environ.items() if not name.startswith("GPUTILE_")}
        argv = [str(self._bin / "gputile"), *arguments]
        return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)

    def has(self, module: str) -> bool:
        return subprocess.run([self._bin / "python", "-c", f"import {module}"], capture_output=True).returncode == 0

    def _run(self, *argv: str) -> None:
        subprocess.run(argv, check=True)


def _pins(folder: Path) -> Path:
    """The versions of requirements.lock as constraints, so that every run tests the same packages."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [line.rstrip("\\ ") for line in lines if line[:1].isalnum() and "==" in line]
    file = folder / "constraints.txt"
    file.write_text("\n".join(pins))
    return file


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture(scope="module")
def wheel(folder: Path) -> Path:
    build = [sys.executable, *PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(build, check=True)
    (file,) = folder.glob("gputile-*.whl")
    return file


def test_the_package_without_extras_has_the_cli_and_names_the_missing_extras(folder: Path, wheel: Path) -> None:
    cli = Environment(folder / "cli", wheel, "")
    assert [module for module in NEVER_IN_THE_CLI if cli.has(module)] == []
    for words in (["version", "--client"], ["demo"], ["top", "-f", MANIFEST], ["audit", "-f", MANIFEST]):
        done = cli.gputile(*words)
        assert (done.returncode, done.stderr) == (0, ""), words
    for process, package in (("scheduler", "prometheus_client"), ("agent", "grpc")):
        done = cli.gputile(process, "--show-settings")
        assert done.returncode == 2
        want = f"gputile: `gputile {process}` needs the Python package {package}; run: pip install 'gputile[{process}]'"
        assert done.stderr.strip() == want


@pytest.mark.parametrize(("process", "lacks"), [("scheduler", "grpc"), ("agent", "uvloop")])
def test_an_extra_runs_its_process_without_packages_of_the_other(
    folder: Path, wheel: Path, process: str, lacks: str
) -> None:
    environment = Environment(folder / process, wheel, f"[{process}]")
    done = environment.gputile(process, "--show-settings")
    assert (done.returncode, done.stderr) == (0, "")
    assert "listen" in done.stdout
    assert not environment.has(lacks)
