"""CPU shares for the programs of a benchmark: a cgroup for each, as the kubelet makes one for each pod.

Without them the scheduler of the kernel treats every thread alike, and a program with one busy thread gets less of a
full machine than its pod would get on a node. Needs root and a writable cpu controller (cgroup v1 or v2).
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.e2e.cgroups import ROOT

PREFIX = "gputile-bench."


class Unavailable(Exception):
    """This machine has no writable cpu controller."""


@contextmanager
def cpu_shares(requests: dict[str, tuple[list[int], int]]) -> Iterator[None]:
    """Give each group its processes and its CPU request in millicores; processes that they start later inherit it."""
    with ExitStack() as stack:
        for name, (pids, millicores) in requests.items():
            group = _create_group(f"{PREFIX}{os.getpid()}.{name}", millicores)
            stack.callback(_remove_group, group)
            for pid in pids:
                (group / "cgroup.procs").write_text(str(pid))
        yield


def _create_group(name: str, millicores: int) -> Path:
    v1 = (ROOT / "cpu" / "cpu.shares").exists()
    group = (ROOT / "cpu" if v1 else ROOT) / name
    try:
        group.mkdir()
        # The kubelet's own conversions: MilliCPUToShares, and from shares to the weight of cgroup v2.
        shares = max(2, millicores * 1024 // 1000)
        weight = 1 + (shares - 2) * 9999 // 262142
        (group / ("cpu.shares" if v1 else "cpu.weight")).write_text(str(shares if v1 else weight))
    except OSError as error:
        raise Unavailable(f"{group}: {error.strerror}") from error
    return group


def _remove_group(group: Path) -> None:
    """Move the remaining processes to the root group; a group with processes cannot be removed."""
    for pid in (group / "cgroup.procs").read_text().split():
        with suppress(OSError):
            (group.parent / "cgroup.procs").write_text(pid)
    group.rmdir()
