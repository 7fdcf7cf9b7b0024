"""Errors, the moment the driver reports them.

Room:  one set of events, registered with every card that can report. It is made anew when `look` sees other cards, when
       a card that could not be registered may have recovered, and after any failure; what the old set still holds is
       told first. NVML cannot be woken, so it is asked for a second at a time: others wait no longer than that.
Door:  `XidListener.wait`; `XidListener.refresh` when cards changed; `XidListener.let_go`.
"""

import ctypes
from contextlib import suppress
from threading import Event, Lock
from typing import Any

from gputile.nvml.driver import XidError
from gputile.nvml.errors import DRIVER_IS_GONE, UNSAID, Nvml, NvmlCode
from gputile.nvml.session import NvmlSession

SLICE = 1.0
"""Seconds NVML is asked for at a time."""


class XidListener:
    """
    deaf --wait--> registered --refresh--> stale --wait--> registered
                       |                     |
                       +--let_go, a failure--+--> deaf
    """

    def __init__(self) -> None:
        self._session = NvmlSession()
        self._set: Any = None
        self._uuids: dict[int, str] = {}  # by handle: a card that fell off does not say its UUID any more
        self._stale = False
        self._missed = False  # a card could not be registered, and not because it never can
        self._turn = Lock()  # held while NVML is asked
        self._gate = Lock()  # whoever waits for the turn holds it, so that the next slice queues behind
        self._closing = Event()

    def wait(self, seconds: float) -> XidError | None:
        if self._missed:
            self._stale = True
        left = max(seconds, 0.0)
        while not self._closing.is_set():
            part = min(left, SLICE)
            with self._gate:
                self._turn.acquire()
            try:
                xid = self._listen(part)
            finally:
                self._turn.release()
            left -= part
            if xid is not None or left <= 0:
                return xid
        return None

    def refresh(self) -> None:
        """Register anew, soon: there are other cards."""
        self._stale = True

    def let_go(self) -> None:
        """End the session, at most a slice from now. Whoever waits begins a new one."""
        with self._gate, self._turn:
            self._end()

    def close(self) -> None:
        self._closing.set()
        self.let_go()

    def _listen(self, seconds: float) -> XidError | None:
        try:
            with self._session.asking() as nvml:
                if self._set is not None and self._stale and (xid := self._next(nvml, 0)):
                    return xid
                if self._set is None or self._stale:
                    self._register(nvml)
                if self._uuids:
                    return self._next(nvml, seconds)
        finally:
            if not self._session.is_open:
                self._end()
        self._closing.wait(seconds)  # nobody to listen to
        return None

    def _next(self, nvml: Nvml, seconds: float) -> XidError | None:
        try:
            event = nvml.nvmlEventSetWait_v2(self._set, int(seconds * 1000))
        except nvml.NVMLError as failed:
            if failed.value in DRIVER_IS_GONE:
                raise
            if failed.value != NvmlCode.TIMEOUT:  # a card fell off, as a rule: go on with the others
                self._stale = True
                self._closing.wait(seconds)  # a failure comes at once, and the caller asks again at once
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
        self._stale = self._missed = False  # before the cards are read: a change from now on makes it stale again
        self._set = nvml.nvmlEventSetCreate()
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = str(nvml.nvmlDeviceGetUUID(handle))
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._set)
            except nvml.NVMLError as failed:
                if failed.value in DRIVER_IS_GONE:
                    raise
                self._missed |= failed.value not in UNSAID
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
