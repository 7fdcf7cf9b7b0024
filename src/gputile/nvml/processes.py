"""Who uses a card.

Room:  three lists (compute, graphics, and compute through MPS) made one, each process once. The driver numbers
       processes as the host does; to whoever does not share the host's PID namespace its numbers mean nothing.
Door:  `processes`.
"""

from collections.abc import Iterable
from typing import Any

from gputile.model.units import ALL, MiB
from gputile.nvml.card_query import MIB
from gputile.nvml.driver import GpuProcess
from gputile.nvml.errors import DRIVER_IS_GONE, Nvml, NvmlCode, ask

LATELY = 10.0
"""Seconds over which a process counts as busy. Samples come about every second; older ones tell of other work."""


def processes(nvml: Nvml, handle: Any, now: float) -> tuple[GpuProcess, ...] | None:
    """None when not even those that compute are said; a card need not know the other lists."""
    held: dict[int, MiB | None] = {}
    for kind in ("Compute", "Graphics", "MPSCompute"):
        listed = _running(nvml, handle, kind)
        if listed is None and kind == "Compute":
            return None
        for pid, memory in _sums(listed or ()).items():
            held[pid] = _larger(held.get(pid), memory)
    busy = _busy(nvml, handle, now)
    return tuple(
        GpuProcess(pid=pid, memory=memory, cores=None if busy is None else busy.get(pid, 0))
        for pid, memory in sorted(held.items())
    )


def _running(nvml: Nvml, handle: Any, kind: str) -> list[Any] | None:
    """Drivers before 510 know only the second version of the question. (Both answers have the fields we read.)"""
    for version in (3, 2):
        listed = ask(nvml, getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses_v{version}"), handle)
        if listed is not None:
            return list(listed)
    return None


def _sums(listed: Iterable[Any]) -> dict[int, MiB | None]:
    """A process stands once per MIG instance it uses: its parts add up. Bytes become MiB at the end, rounded up."""
    held: dict[int, int | None] = {}
    for entry in listed:
        pid, more = int(entry.pid), entry.usedGpuMemory
        before = held.get(pid)
        held[pid] = before if more is None else (before or 0) + int(more)
    return {pid: None if size is None else -(-size // MIB) for pid, size in held.items()}


def _larger(one: MiB | None, other: MiB | None) -> MiB | None:
    """A process that computes and draws is in two lists with the same memory."""
    return max((size for size in (one, other) if size is not None), default=None)


def _busy(nvml: Nvml, handle: Any, now: float) -> dict[int, int | None] | None:
    """Percent by process, of its newest sample; who has none was idle. None: this driver or card does not measure."""
    since = int(max(now - LATELY, 0) * 1_000_000)
    try:
        samples = nvml.nvmlDeviceGetProcessUtilization(handle, since)
    except nvml.NVMLError as failed:
        if failed.value in DRIVER_IS_GONE:
            raise
        return (
            {} if failed.value in (nvml.NVML_SUCCESS, NvmlCode.NOT_FOUND) else None
        )  # the binding raises an empty success
    newest = sorted(samples, key=lambda sample: int(sample.timeStamp))
    return {int(sample.pid): _percent(int(sample.smUtil)) for sample in newest}


def _percent(said: int) -> int | None:
    """Some drivers fill what they did not measure with nonsense."""
    return said if 0 <= said <= ALL else None
