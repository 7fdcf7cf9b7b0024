"""The control groups of one machine of the tests: created before its kubelet, removed after its last process.

They are folders of /sys/fs/cgroup, in every hierarchy (version 1) or the only one (version 2). They outlive processes
and namespaces, so each run removes what a killed run left behind.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PREFIX = "gputile-e2e."
SECONDS = 10.0  # for the kernel to release a group whose processes are dead


def group_name(run: str, machine: str) -> str:
    return f"{PREFIX}{run}.{machine}"


def hierarchies() -> list[Path]:
    if (ROOT / "cgroup.controllers").exists():
        return [ROOT]
    return [
        path for path in sorted(ROOT.iterdir()) if path.is_dir() and not path.is_symlink() and os.path.ismount(path)
    ]


def make(name: str) -> None:
    for hierarchy in hierarchies():
        group = hierarchy / name
        group.mkdir(exist_ok=True)
        for file in ("cpuset.cpus", "cpuset.mems"):  # version 1 makes them empty, and then nothing may enter
            if (hierarchy / file).exists():
                (group / file).write_text((hierarchy / file).read_text())


def remove(name: str) -> None:
    """Remove a group and all groups below it; its processes must be dead."""
    deadline = time.monotonic() + SECONDS
    for hierarchy in hierarchies():
        for folder, _, _ in os.walk(hierarchy / name, topdown=False):
            _remove_one(Path(folder), deadline)


def _remove_one(group: Path, deadline: float) -> None:
    while True:
        try:
            return group.rmdir()
        except FileNotFoundError:
            return None
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def sweep(lives: Callable[[str], bool]) -> None:
    """Remove the groups of dead runs; `lives` returns whether a run is still alive."""
    left = {path.name for hierarchy in hierarchies() for path in hierarchy.glob(f"{PREFIX}*")}
    for name in left:
        run = name.removeprefix(PREFIX).partition(".")[0]
        if not lives(run):
            with suppress(OSError):  # still dying, or another run sweeps too
                remove(name)
