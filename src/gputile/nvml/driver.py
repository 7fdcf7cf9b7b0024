"""The `Driver` interface, and the values that a driver reports.

A machine without a driver or without a GPU is a normal case: `snapshot` raises `NoDriver`, or has no cards.
"""

from typing import Protocol

import msgspec

from gputile.model.cards import NO_NUMA
from gputile.model.errors import GputileError
from gputile.model.units import MiB


class NoDriver(GputileError):
    """There is no driver, or it does not answer; the message says which, and what to do."""


class DriverGpu(msgspec.Struct, frozen=True, kw_only=True):
    """One card as the driver reports it."""

    index: int  # the driver's number
    uuid: str
    model: str
    memory: MiB
    minor: int = -1  # N of /dev/nvidiaN; -1: unknown
    numa: int = NO_NUMA
    pci: str = ""  # as in /sys/bus/pci/devices: 0000:3b:00.0
    is_mig: bool = False
    fault: str = ""  # why it is unusable now, as the driver reports it: fallen off the bus, memory errors, ...


class DriverSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All cards at one moment."""

    gpus: tuple[DriverGpu, ...] = ()
    links: tuple[tuple[int, ...], ...] = ()  # by position in `gpus`; larger is closer, 0 is no link; () is unknown
    driver: str = ""  # its version
    cuda: str = ""  # the newest CUDA version that it supports, "12.4"
    unidentified: tuple[str, ...] = ()  # a message for each card that the driver counts and whose UUID was never read


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that uses a card, by its PID on the host."""

    pid: int
    memory: MiB | None = None  # None: unknown
    cores: int | None = None  # percent of the card that it kept busy lately; None: unknown


class XidError(msgspec.Struct, frozen=True):
    """An error that the driver reports. `docs/agent.md` has the meaning of the numbers."""

    number: int
    uuid: str = ""  # "" when the driver does not report the card


class Driver(Protocol):
    """The GPU driver of one machine. Every call blocks and may raise `NoDriver`; the next call then reconnects."""

    def snapshot(self) -> DriverSnapshot:
        """The cards now. A card that was there and does not answer is included with its `fault`."""

    def processes(self, uuid: str) -> tuple[GpuProcess, ...] | None:
        """The processes on the card now; None means unknown: the card is gone or does not answer."""

    def wait(self, seconds: float) -> XidError | None:
        """The next XID error, or None when there was none in that time. Only one thread may wait at a time."""

    def close(self) -> None:
        """Disconnect from the driver."""
