"""Waits for the XID errors that the driver reports.

There is one NVML event set, registered with every card that supports events. It is created anew when a snapshot shows
other cards, when a card that could not be registered may have recovered, and after any failure; events that are left in
the old set are returned first. A wait of NVML cannot be interrupted, so it is cut into slices of a second: other
threads wait at most that long.
"""

import ctypes
from contextlib import suppress
from threading import Event, Lock
from typing import Any

from gputile.nvml.driver import XidError
from gputile.nvml.errors import DRIVER_IS_GONE, NOT_AVAILABLE, Nvml, NvmlCode
from gputile.nvml.session import NvmlSession

SLICE = 1.0
"""Seconds of one wait of NVML."""


class XidListener:
    """The registration for XID errors, with an NVML session of its own.

    disconnected --wait--> registered --refresh--> stale --wait--> registered
                               |                     |
                               +-disconnect, failure-+--> disconnected
    """

    def __init__(self) -> None:
        self._session = NvmlSession()
        self._set: Any = None
        self._uuids: dict[int, str] = {}  # by handle: a card that fell off the bus does not report its UUID any more
        self._stale = False
        self._incomplete = False  # a card that supports events could not be registered
        self._lock = Lock()  # held while NVML is called
        self._gate = Lock()  # held while waiting for the lock, so that the next slice queues behind
        self._closing = Event()

    def wait(self, seconds: float) -> XidError | None:
        if self._incomplete:
            self._stale = True
        left = max(seconds, 0.0)
        while not self._closing.is_set():
            slice_ = min(left, SLICE)
            with self._gate:
                self._lock.acquire()
            try:
                xid = self._listen(slice_)
            finally:
                self._lock.release()
            left -= slice_
            if xid is not None or left <= 0:
                return xid
        return None

    def refresh(self) -> None:
        """Register again at the next slice: the cards have changed."""
        self._stale = True

    def disconnect(self) -> None:
        """End the session, within one slice. A thread that waits opens a new one."""
        with self._gate, self._lock:
            self._end()

    def close(self) -> None:
        self._closing.set()
        self.disconnect()

    def _listen(self, seconds: float) -> XidError | None:
        try:
            with self._session.connected() as nvml:
                if self._set is not None and self._stale and (xid := self._next(nvml, 0)):
                    return xid
                if self._set is None or self._stale:
                    self._register(nvml)
                if self._uuids:
                    return self._next(nvml, seconds)
        finally:
            if not self._session.is_open:
                self._end()
        self._closing.wait(seconds)  # no card supports events
        return None

    def _next(self, nvml: Nvml, seconds: float) -> XidError | None:
        try:
            event = nvml.nvmlEventSetWait_v2(self._set, int(seconds * 1000))
        except nvml.NVMLError as error:
            if error.value in DRIVER_IS_GONE:
                raise
            if error.value != NvmlCode.TIMEOUT:  # usually a card fell off the bus: continue with the others
                self._stale = True
                self._closing.wait(seconds)  # a failure returns at once; without a pause the caller would spin
            return None
        return XidError(int(event.eventData), self._uuid(nvml, event.device))

    def _uuid(self, nvml: Nvml, handle: Any) -> str:
        if not handle:
            return ""
        with suppress(nvml.NVMLError):
            return self._uuids.get(_address(handle)) or str(nvml.nvmlDeviceGetUUID(handle))
        return ""

    def _register(self, nvml: Nvml) -> None:
        self._free(nvml)
        self._stale = self._incomplete = False  # before the cards are read: a later change makes it stale again
        self._set = nvml.nvmlEventSetCreate()
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = str(nvml.nvmlDeviceGetUUID(handle))
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._set)
            except nvml.NVMLError as error:
                if error.value in DRIVER_IS_GONE:
                    raise
                self._incomplete |= error.value not in NOT_AVAILABLE
            else:
                self._uuids[_address(handle)] = uuid

    def _free(self, nvml: Nvml) -> None:
        old, self._set, self._uuids = self._set, None, {}
        if old is not None:
            with suppress(nvml.NVMLError):
                nvml.nvmlEventSetFree(old)

    def _end(self) -> None:
        if self._session.is_open:
            self._free(self._session.open())
        self._set, self._uuids = None, {}
        self._session.close()


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
