"""Queries NVML for the processes that use one card.

NVML has three lists (compute, graphics, and compute through MPS); they are merged, with each process once. PIDs are
those of the host: they mean nothing to a program outside the host's PID namespace.
"""

from collections.abc import Iterable
from typing import Any

from gputile.model.units import ALL, MiB
from gputile.nvml.card_query import MIB
from gputile.nvml.driver import GpuProcess
from gputile.nvml.errors import DRIVER_IS_GONE, Nvml, NvmlCode, query

BUSY_WINDOW = 10.0
"""Seconds over which a process counts as busy. Samples come about every second; older ones are of other work."""


def processes(nvml: Nvml, handle: Any, now: float) -> tuple[GpuProcess, ...] | None:
    """None when the list of compute processes is not available; a card need not support the other lists."""
    memory_of: dict[int, MiB | None] = {}
    for kind in ("Compute", "Graphics", "MPSCompute"):
        listed = _running(nvml, handle, kind)
        if listed is None and kind == "Compute":
            return None
        for pid, memory in _sums(listed or ()).items():
            memory_of[pid] = _larger(memory_of.get(pid), memory)
    busy = _busy(nvml, handle, now)
    return tuple(
        GpuProcess(pid=pid, memory=memory, cores=None if busy is None else busy.get(pid, 0))
        for pid, memory in sorted(memory_of.items())
    )


def _running(nvml: Nvml, handle: Any, kind: str) -> list[Any] | None:
    """Drivers before 510 have only version 2 of the function. (Both results have the fields that are read here.)"""
    for version in (3, 2):
        listed = query(nvml, getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses_v{version}"), handle)
        if listed is not None:
            return list(listed)
    return None


def _sums(listed: Iterable[Any]) -> dict[int, MiB | None]:
    """A process is listed once per MIG instance that it uses, so its entries are added up. Bytes become MiB at the end,
    rounded up."""
    bytes_of: dict[int, int | None] = {}
    for entry in listed:
        pid, more = int(entry.pid), entry.usedGpuMemory
        before = bytes_of.get(pid)
        bytes_of[pid] = before if more is None else (before or 0) + int(more)
    return {pid: None if size is None else -(-size // MIB) for pid, size in bytes_of.items()}


def _larger(first: MiB | None, second: MiB | None) -> MiB | None:
    """A process with compute and graphics contexts is in two lists, with the same memory."""
    return max((size for size in (first, second) if size is not None), default=None)


def _busy(nvml: Nvml, handle: Any, now: float) -> dict[int, int | None] | None:
    """Percent by PID, of the newest sample; a process without one was idle. None: this driver or card does not
    measure."""
    since = int(max(now - BUSY_WINDOW, 0) * 1_000_000)
    try:
        samples = nvml.nvmlDeviceGetProcessUtilization(handle, since)
    except nvml.NVMLError as error:
        if error.value in DRIVER_IS_GONE:
            raise
        # pynvml raises NVML_SUCCESS as an error when there are no samples
        return {} if error.value in (nvml.NVML_SUCCESS, NvmlCode.NOT_FOUND) else None
    newest_last = sorted(samples, key=lambda sample: int(sample.timeStamp))
    return {int(sample.pid): _percent(int(sample.smUtil)) for sample in newest_last}


def _percent(value: int) -> int | None:
    """Some drivers return arbitrary numbers for what they did not measure."""
    return value if 0 <= value <= ALL else None
