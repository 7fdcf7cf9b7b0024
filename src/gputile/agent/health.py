"""Decides whether a card is healthy, from the driver's faults and XID errors. Pure; the caller passes the time.

            fault                     no fault for `probation` seconds
  healthy --------> unhealthy ------------------------------------------> healthy
                      ^  |
                      +--+ another fault: probation starts again

An application can cause XID errors too (a wild pointer, an out-of-bounds access). Then the card is sound and its other
pods must not suffer, so only errors of hardware or driver make it unhealthy.
"""

from collections.abc import Collection, Iterable, Mapping

import msgspec

from gputile.nvml.driver import DriverSnapshot, XidError

APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
"""Errors that a program causes: illegal access, MMU fault, stopped or preempted channel, video decoder, slow context
switch."""

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
"""Errors of the card, with a description. A number in neither list is counted and does not make the card unhealthy."""

XID = "XID "  # how the reason of a mark begins that an XID error caused


class FaultMark(msgspec.Struct, frozen=True):
    """The mark of an unhealthy card: the reason, and the time of its last fault."""

    reason: str
    last: float  # seconds on the caller's clock


class CardHealth:
    """The marks of unhealthy cards, and the probation after which each mark is removed."""

    def __init__(self, probation: float, ignored: Collection[int] = (), fatal: Collection[int] = ()) -> None:
        self._probation = probation
        self._ignored = APPLICATION_XIDS.difference(fatal).union(ignored)
        self._fatal = {
            **HARDWARE_XIDS,
            **{number: "listed in `health.fatal_xids`" for number in fatal if number not in HARDWARE_XIDS},
        }
        self._marks: dict[str, FaultMark] = {}

    def restore(self, faults: Mapping[str, str], now: float) -> None:
        """Take over the marks of an earlier agent. The driver reports its faults again; XID errors it does not."""
        for uuid, reason in faults.items():
            if reason.startswith(XID):
                self._marks.setdefault(uuid, FaultMark(reason, now))

    def seen(self, snapshot: DriverSnapshot, now: float) -> list[str]:
        """Apply the driver's faults; a fault that is still there extends the probation. Returns the cards that became
        unhealthy, or are for another reason now."""
        changed = [gpu.uuid for gpu in snapshot.gpus if gpu.fault and self._mark(gpu.uuid, gpu.fault, now)]
        for uuid, mark in list(self._marks.items()):
            if now - mark.last >= self._probation:
                del self._marks[uuid]
        return changed

    def _mark(self, uuid: str, reason: str, now: float) -> bool:
        """Returns whether the card was healthy, or had another reason."""
        before, self._marks[uuid] = self._marks.get(uuid), FaultMark(reason, now)
        return before is None or before.reason != reason

    def record_xid(self, xid: XidError, uuids: Iterable[str], now: float) -> list[str]:
        """Apply an XID error to its card, or to all `uuids` when the driver does not report the card. Returns the cards
        that became unhealthy, or are for another reason now. On a card that has the mark already probation restarts."""
        if xid.number in self._ignored or xid.number not in self._fatal:
            return []
        affected = [xid.uuid] if xid.uuid else list(uuids)
        return [uuid for uuid in affected if self._mark(uuid, f"{XID}{xid.number}: {self._fatal[xid.number]}", now)]

    def faults(self) -> dict[str, str]:
        """The reasons of unhealthy cards, by UUID."""
        return {uuid: mark.reason for uuid, mark in self._marks.items()}
