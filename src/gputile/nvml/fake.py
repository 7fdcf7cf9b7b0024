"""A driver for tests, without hardware: `FakeDriver(cards(8))`, then `fail`, `heal`, `use`, `report`, `vanish`,
`come_back`. It may be changed from another thread than the one that queries it or waits.
"""

from collections.abc import Sequence
from queue import Empty, SimpleQueue

import msgspec

from gputile.model.units import MiB
from gputile.nvml.driver import DriverGpu, DriverSnapshot, GpuProcess, NoDriver, XidError


def cards(
    count: int, model: str = "NVIDIA A100-SXM4-80GB", memory: MiB = 81920, machine: str = "fake"
) -> tuple[DriverGpu, ...]:
    """Cards of one model, half of them on each of two NUMA nodes."""
    return tuple(
        DriverGpu(
            index=index,
            uuid=f"GPU-{machine}-{index}",
            model=model,
            memory=memory,
            minor=index,
            numa=2 * index // count,
            pci=f"0000:{16 * (index + 1):02x}:00.0",
        )
        for index in range(count)
    )


class FakeDriver:
    """A `Driver` whose cards, processes and errors are set by a test."""

    def __init__(self, gpus: Sequence[DriverGpu] = (), links: tuple[tuple[int, ...], ...] = ()) -> None:
        self._snapshot = DriverSnapshot(gpus=tuple(gpus), links=links, driver="550.54.15", cuda="12.4")
        self.used: dict[str, tuple[GpuProcess, ...]] = {}
        self.is_closed = False
        self._failure = ""
        self._errors: SimpleQueue[XidError | None] = SimpleQueue()  # None only wakes the waiting thread

    # ---- for tests ---------------------------------------------------------------------------------------------------

    def put(self, *gpus: DriverGpu, links: tuple[tuple[int, ...], ...] = ()) -> None:
        """Replace the cards."""
        self._snapshot = msgspec.structs.replace(self._snapshot, gpus=gpus, links=links)

    def fail(self, uuid: str, fault: str = "fell off the bus") -> None:
        self._set_fault(uuid, fault)

    def heal(self, uuid: str) -> None:
        self._set_fault(uuid, "")

    def use(self, uuid: str, *processes: GpuProcess) -> None:
        """Replace the processes of the card."""
        self.used[uuid] = processes

    def report(self, number: int, uuid: str = "") -> None:
        """Report an XID error."""
        self._errors.put(XidError(number, uuid))

    def vanish(self, why: str = "no NVIDIA driver: the kernel module is not loaded") -> None:
        """Unload the driver; a waiting thread gets `NoDriver` at once."""
        self._failure = why
        self._errors.put(None)

    def come_back(self) -> None:
        self._failure = ""

    # ---- the Driver interface ----------------------------------------------------------------------------------------

    def snapshot(self) -> DriverSnapshot:
        self._check()
        return self._snapshot

    def processes(self, uuid: str) -> tuple[GpuProcess, ...] | None:
        self._check()
        return self.used.get(uuid, ()) if any(gpu.uuid == uuid for gpu in self._snapshot.gpus) else None

    def wait(self, seconds: float) -> XidError | None:
        self._check()
        try:
            error = None if self.is_closed else self._errors.get(timeout=seconds)
        except Empty:
            return None
        self._check()
        return error

    def close(self) -> None:
        self.is_closed = True
        self._errors.put(None)

    def _check(self) -> None:
        if self._failure:
            raise NoDriver(self._failure)

    def _set_fault(self, uuid: str, fault: str) -> None:
        if uuid not in {gpu.uuid for gpu in self._snapshot.gpus}:
            raise KeyError(uuid)
        self.put(
            *(msgspec.structs.replace(gpu, fault=fault) if gpu.uuid == uuid else gpu for gpu in self._snapshot.gpus),
            links=self._snapshot.links,
        )
