"""NVIDIA's driver, through NVML (package `nvidia-ml-py`).

Room:  `look` and `processes` share one session and take turns; `wait` has its own (`listening.py`) and may run in
       another thread all the time. NVML may count cards at init only, so when the kernel binds other cards to the
       driver both sessions end, and the next begins with a new count.
Door:  `RealDriver`.
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from gputile.nvml import processes as using
from gputile.nvml.card_query import card_at
from gputile.nvml.driver import DriverGpu, DriverSnapshot, GpuProcess, NoDriver, XidError
from gputile.nvml.errors import DRIVER_IS_GONE, NO_SUCH_CARD, Nvml, ask, fault
from gputile.nvml.lost_cards import complete
from gputile.nvml.session import NvmlSession
from gputile.nvml.topology import links
from gputile.nvml.xid_events import XidListener

_PCI = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


class RealDriver:
    """Keeps `values.Driver`. Importing and making it costs nothing; the first question loads the library."""

    def __init__(self, sys: Path = Path("/sys"), now: Callable[[], float] = time.time) -> None:
        self._sys, self._now = sys, now
        self._session, self._turn = NvmlSession(), Lock()
        self._ears = XidListener()
        self._before: tuple[DriverGpu, ...] = ()
        self._bound: frozenset[str] = frozenset()  # when the session began

    def look(self) -> DriverSnapshot:
        with self._turn:
            self._begin_anew_if_rewired()
            with self._asking() as nvml:
                sight = self._sight(nvml)
            if _answering(sight.gpus) != _answering(self._before):
                self._ears.refresh()
            self._before = sight.gpus
            return sight

    def processes(self, uuid: str) -> tuple[GpuProcess, ...] | None:
        with self._turn, self._asking() as nvml:
            try:
                return using.processes(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid), self._now())
            except nvml.NVMLError as failed:
                if failed.value in DRIVER_IS_GONE:
                    raise
                return None

    def wait(self, seconds: float) -> XidError | None:
        return self._ears.wait(seconds)

    def close(self) -> None:
        self._ears.close()
        with self._turn:
            self._session.close()

    @contextmanager
    def _asking(self) -> Iterator[Nvml]:
        try:
            with self._session.asking() as nvml:
                yield nvml
        except NoDriver:
            self._ears.refresh()  # its session may be as dead, and not have noticed
            raise

    def _begin_anew_if_rewired(self) -> None:
        bound = _bound(self._sys)
        if self._session.is_open and bound != self._bound:
            self._session.close()
            self._ears.let_go()
        self._bound = bound

    def _sight(self, nvml: Nvml) -> DriverSnapshot:
        seen: list[DriverGpu] = []
        handles: dict[str, Any] = {}
        silent: dict[int, str] = {}
        known = {gpu.uuid: gpu for gpu in self._before}
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                gpu, handle = card_at(nvml, index, known, self._sys)
            except nvml.NVMLError as failed:
                if failed.value in DRIVER_IS_GONE:
                    raise
                if failed.value not in NO_SUCH_CARD:  # else it was taken away between count and question
                    silent[index] = fault(failed)
            else:
                seen.append(gpu)
                handles[gpu.uuid] = handle
        gpus, nameless = complete(seen, silent, self._before, self._bound)
        return DriverSnapshot(
            gpus=gpus,
            links=links(nvml, gpus, handles),
            driver=ask(nvml, nvml.nvmlSystemGetDriverVersion) or "",
            cuda=_cuda(ask(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2)),
            nameless=nameless,
        )


def _answering(gpus: tuple[DriverGpu, ...]) -> tuple[tuple[int, str, bool], ...]:
    """What the ears must know: who is there, under which number, and whether it is well."""
    return tuple((gpu.index, gpu.uuid, not gpu.fault) for gpu in gpus)


def _bound(sys: Path) -> frozenset[str]:
    """The PCI addresses of the cards that the kernel says the driver holds; none where /sys does not tell."""
    try:
        return frozenset(
            entry.name for entry in (sys / "bus/pci/drivers/nvidia").iterdir() if _PCI.fullmatch(entry.name)
        )
    except OSError:
        return frozenset()


def _cuda(version: int | None) -> str:
    """12040 is 12.4."""
    return "" if not version else f"{version // 1000}.{version % 1000 // 10}"
