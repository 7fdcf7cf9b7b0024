"""NVIDIA's driver, through NVML (package `nvidia-ml-py`).

`snapshot` and `processes` share one session and a lock; `wait` has its own (`xid_events`) and may run in another
thread all the time. NVML may count cards at init only, so when the kernel binds other cards to the driver both sessions
end, and the next init counts anew.
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from gputile.nvml import processes as process_query
from gputile.nvml.card_query import card_at
from gputile.nvml.driver import DriverGpu, DriverSnapshot, GpuProcess, NoDriver, XidError
from gputile.nvml.errors import DRIVER_IS_GONE, NO_SUCH_CARD, Nvml, fault_of, query
from gputile.nvml.lost_cards import complete
from gputile.nvml.session import NvmlSession
from gputile.nvml.topology import links
from gputile.nvml.xid_events import XidListener

_PCI = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


class RealDriver:
    """The `Driver` of NVIDIA's GPUs. Creating it is free; the first query loads the library."""

    def __init__(self, sys: Path = Path("/sys"), now: Callable[[], float] = time.time) -> None:
        self._sys, self._now = sys, now
        self._session, self._lock = NvmlSession(), Lock()
        self._xid_listener = XidListener()
        self._before: tuple[DriverGpu, ...] = ()
        self._bound: frozenset[str] = frozenset()  # PCI addresses when the session began

    def snapshot(self) -> DriverSnapshot:
        with self._lock:
            self._reconnect_if_rebound()
            with self._connected() as nvml:
                snapshot = self._query_all(nvml)
            if _registrable(snapshot.gpus) != _registrable(self._before):
                self._xid_listener.refresh()
            self._before = snapshot.gpus
            return snapshot

    def processes(self, uuid: str) -> tuple[GpuProcess, ...] | None:
        with self._lock, self._connected() as nvml:
            try:
                return process_query.processes(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid), self._now())
            except nvml.NVMLError as error:
                if error.value in DRIVER_IS_GONE:
                    raise
                return None

    def wait(self, seconds: float) -> XidError | None:
        return self._xid_listener.wait(seconds)

    def close(self) -> None:
        self._xid_listener.close()
        with self._lock:
            self._session.close()

    @contextmanager
    def _connected(self) -> Iterator[Nvml]:
        try:
            with self._session.connected() as nvml:
                yield nvml
        except NoDriver:
            self._xid_listener.refresh()  # its session may be dead too, without an error yet
            raise

    def _reconnect_if_rebound(self) -> None:
        bound = _bound(self._sys)
        if self._session.is_open and bound != self._bound:
            self._session.close()
            self._xid_listener.disconnect()
        self._bound = bound

    def _query_all(self, nvml: Nvml) -> DriverSnapshot:
        answering: list[DriverGpu] = []
        handles: dict[str, Any] = {}
        failed: dict[int, str] = {}
        known = {gpu.uuid: gpu for gpu in self._before}
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                gpu, handle = card_at(nvml, index, known, self._sys)
            except nvml.NVMLError as error:
                if error.value in DRIVER_IS_GONE:
                    raise
                if error.value not in NO_SUCH_CARD:  # otherwise it was removed after the count
                    failed[index] = fault_of(error)
            else:
                answering.append(gpu)
                handles[gpu.uuid] = handle
        gpus, unidentified = complete(answering, failed, self._before, self._bound)
        return DriverSnapshot(
            gpus=gpus,
            links=links(nvml, gpus, handles),
            driver=query(nvml, nvml.nvmlSystemGetDriverVersion) or "",
            cuda=_cuda(query(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2)),
            unidentified=unidentified,
        )


def _registrable(gpus: tuple[DriverGpu, ...]) -> tuple[tuple[int, str, bool], ...]:
    """What the XID listener depends on: which cards there are, under which number, and whether they answer."""
    return tuple((gpu.index, gpu.uuid, not gpu.fault) for gpu in gpus)


def _bound(sys: Path) -> frozenset[str]:
    """The PCI addresses of the cards that the kernel has bound to the driver; empty where /sys does not show them."""
    try:
        return frozenset(
            entry.name for entry in (sys / "bus/pci/drivers/nvidia").iterdir() if _PCI.fullmatch(entry.name)
        )
    except OSError:
        return frozenset()


def _cuda(version: int | None) -> str:
    """12040 is 12.4."""
    return "" if not version else f"{version // 1000}.{version % 1000 // 10}"
