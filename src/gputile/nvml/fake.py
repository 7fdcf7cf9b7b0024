"""Cards that a test makes up: `FakeDriver(cards(8))`, then `fail`, `heal`, `use`, `report`, `vanish`, `come_back`.

Room:  keeps what it was told, and may be told from another thread than the one that asks or waits.
Door:  `FakeDriver`, `cards`.
"""

from collections.abc import Sequence
from queue import Empty, SimpleQueue

import msgspec

from gputile.model.units import MiB
from gputile.nvml.driver import DriverGpu, DriverSnapshot, GpuProcess, NoDriver, XidError


def cards(
    count: int, model: str = "NVIDIA A100-SXM4-80GB", memory: MiB = 81920, machine: str = "fake"
) -> tuple[DriverGpu, ...]:
    """Cards of one kind, half of them on each of two NUMA nodes."""
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
    """Keeps `values.Driver`."""

    def __init__(self, gpus: Sequence[DriverGpu] = (), links: tuple[tuple[int, ...], ...] = ()) -> None:
        self.sight = DriverSnapshot(gpus=tuple(gpus), links=links, driver="550.54.15", cuda="12.4")
        self.used: dict[str, tuple[GpuProcess, ...]] = {}
        self.is_closed = False
        self._trouble = ""
        self._news: SimpleQueue[XidError | None] = SimpleQueue()  # None only wakes whoever waits

    # ---- what a test does --------------------------------------------------------------------------------------------

    def put(self, *gpus: DriverGpu, links: tuple[tuple[int, ...], ...] = ()) -> None:
        """From now on these are the cards."""
        self.sight = msgspec.structs.replace(self.sight, gpus=gpus, links=links)

    def fail(self, uuid: str, fault: str = "fell off the bus") -> None:
        self._set_fault(uuid, fault)

    def heal(self, uuid: str) -> None:
        self._set_fault(uuid, "")

    def use(self, uuid: str, *processes: GpuProcess) -> None:
        """From now on these are the card's processes."""
        self.used[uuid] = processes

    def report(self, number: int, uuid: str = "") -> None:
        """The driver reports an error."""
        self._news.put(XidError(number, uuid))

    def vanish(self, why: str = "no NVIDIA driver: the kernel module is not loaded") -> None:
        """The driver goes away; whoever waits learns it at once."""
        self._trouble = why
        self._news.put(None)

    def come_back(self) -> None:
        self._trouble = ""

    # ---- what a driver does ------------------------------------------------------------------------------------------

    def look(self) -> DriverSnapshot:
        self._check()
        return self.sight

    def processes(self, uuid: str) -> tuple[GpuProcess, ...] | None:
        self._check()
        return self.used.get(uuid, ()) if any(gpu.uuid == uuid for gpu in self.sight.gpus) else None

    def wait(self, seconds: float) -> XidError | None:
        self._check()
        try:
            news = None if self.is_closed else self._news.get(timeout=seconds)
        except Empty:
            return None
        self._check()
        return news

    def close(self) -> None:
        self.is_closed = True
        self._news.put(None)

    def _check(self) -> None:
        if self._trouble:
            raise NoDriver(self._trouble)

    def _set_fault(self, uuid: str, fault: str) -> None:
        if uuid not in {gpu.uuid for gpu in self.sight.gpus}:
            raise KeyError(uuid)
        self.put(
            *(msgspec.structs.replace(gpu, fault=fault) if gpu.uuid == uuid else gpu for gpu in self.sight.gpus),
            links=self.sight.links,
        )
