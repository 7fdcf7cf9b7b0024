"""Whether a card may be used: faults that last, faults that pass, and probation after them. Pure; time is told.

        fault                      no fault for `probation` seconds
  fit --------> out of use --------------------------------------> fit
                    ^ |
                    +-+ another fault: probation begins anew

An application can make the driver report an error (a wild pointer, an out-of-bounds access): the card is not to blame,
and its other tenants must not suffer. Only errors that hardware or driver cause mark it.
"""

from collections.abc import Collection, Iterable, Mapping

import msgspec

from gputile.nvml.driver import DriverSnapshot, XidError

APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
"""Faults of a program: illegal access, MMU fault, stopped or preempted channel, video decoder, slow context switch."""

HARDWARE_XIDS = {
    48: "double-bit memory error",
    54: "auxiliary power is missing",
    56: "display engine error",
    62: "halt of its internal controller",
    63: "memory page or row being retired",
    64: "memory page or row could not be retired",
    74: "NVLink error",
    79: "fallen off the bus",
    92: "many single-bit memory errors",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "its system processor does not answer",
    120: "error of its system processor",
    140: "unrecovered memory error",
    154: "the driver wants it reset",
}
"""Faults of the card, with words for people. What stands in neither list is counted and does not mark the card."""


XID = "XID "  # how the reason of such a mark begins


class FaultMark(msgspec.Struct, frozen=True):
    """A card out of use: why, and since when nothing more has happened to it."""

    reason: str
    last: float  # seconds on the clock of whoever tells


class CardHealth:
    """See the module's text."""

    def __init__(self, probation: float, ignored: Collection[int] = (), fatal: Collection[int] = ()) -> None:
        self._probation = probation
        self._ignored = APPLICATION_XIDS.difference(fatal).union(ignored)
        self._fatal = {**HARDWARE_XIDS, **{number: "as set" for number in fatal if number not in HARDWARE_XIDS}}
        self._marks: dict[str, FaultMark] = {}

    def restore(self, faults: Mapping[str, str], now: float) -> None:
        """What an agent before us had marked. Faults that the driver shows by itself will be seen again; XIDs not."""
        for uuid, reason in faults.items():
            if reason.startswith(XID):
                self._marks.setdefault(uuid, FaultMark(reason, now))

    def seen(self, sight: DriverSnapshot, now: float) -> list[str]:
        """What the driver says of each card at the moment; a fault that is still there keeps probation from passing.
        Returns the cards that are newly out of use, or for another reason."""
        hit = [gpu.uuid for gpu in sight.gpus if gpu.fault and self._mark(gpu.uuid, gpu.fault, now)]
        for uuid, mark in list(self._marks.items()):
            if now - mark.last >= self._probation:
                del self._marks[uuid]
        return hit

    def _mark(self, uuid: str, reason: str, now: float) -> bool:
        """Whether that is news."""
        before, self._marks[uuid] = self._marks.get(uuid), FaultMark(reason, now)
        return before is None or before.reason != reason

    def record_xid(self, xid: XidError, uuids: Iterable[str], now: float) -> list[str]:
        """The cards that an error takes out of use, or for another reason: its own, or all when the driver does not say
        which. One that is out of use for that already is no news, and its probation begins anew."""
        if xid.number in self._ignored or xid.number not in self._fatal:
            return []
        hit = [xid.uuid] if xid.uuid else list(uuids)
        return [uuid for uuid in hit if self._mark(uuid, f"{XID}{xid.number}: {self._fatal[xid.number]}", now)]

    def faults(self) -> dict[str, str]:
        """By UUID, why a card is out of use."""
        return {uuid: mark.reason for uuid, mark in self._marks.items()}
