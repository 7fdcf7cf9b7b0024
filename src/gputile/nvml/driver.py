"""What a driver says, as values, and the Protocol that all drivers keep.

A machine without a driver or without a GPU is a normal case: `look` raises `NoDriver`, or sees no card.
"""

from typing import Protocol

import msgspec

from gputile.model.cards import NO_NUMA
from gputile.model.errors import GputileError
from gputile.model.units import MiB


class NoDriver(GputileError):
    """There is no driver to ask, or it does not answer; the sentence says which, and what to do."""


class DriverGpu(msgspec.Struct, frozen=True, kw_only=True):
    """One card as the driver shows it."""

    index: int  # as the driver counts
    uuid: str
    model: str
    memory: MiB
    minor: int = -1  # N of /dev/nvidiaN; -1 when the driver does not say
    numa: int = NO_NUMA
    pci: str = ""  # as in /sys/bus/pci/devices: 0000:3b:00.0
    is_mig: bool = False
    fault: str = ""  # why it cannot be used, as the driver says it now: fallen off the bus, memory errors, ...


class DriverSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All cards at one moment."""

    gpus: tuple[DriverGpu, ...] = ()
    links: tuple[tuple[int, ...], ...] = ()  # by position in `gpus`; larger is closer, 0 is no link; () is unknown
    driver: str = ""  # its version
    cuda: str = ""  # the newest CUDA it serves, "12.4"
    nameless: tuple[str, ...] = ()  # cards that the driver counts and that never said who they are; a sentence each


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that uses a card, by its number on the host."""

    pid: int
    memory: MiB | None = None  # None: the driver does not say
    cores: int | None = None  # percent of the card it kept busy lately; None: the driver does not say


class XidError(msgspec.Struct, frozen=True):
    """The driver reports an error. `docs/agent.md` says which numbers mean what."""

    number: int
    uuid: str = ""  # "" when the driver does not say which card


class Driver(Protocol):
    """Every call blocks, and may raise `NoDriver`; after that the next call tries to reach the driver anew."""

    def look(self) -> DriverSnapshot:
        """The cards as they are now. A card that was there and does not answer is shown with its `fault`."""

    def processes(self, uuid: str) -> tuple[GpuProcess, ...] | None:
        """Who uses the card now; None when nobody can say: the card is gone, or does not answer."""

    def wait(self, seconds: float) -> XidError | None:
        """The next error, or None when none came in that time. Only one thread waits at a time."""

    def close(self) -> None:
        """Let go of the driver."""
