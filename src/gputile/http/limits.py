"""Classes of callers, and what each class may have: connections, unfinished bodies, answers nobody has fetched.

Room:  counting, and choosing who has to go when there is too much. No sockets, no clock.
Door:  `CallerClass` is one class. `enter`, `leave`; `keep` for bodies that grow; `begin`, `end` for answers being sent.

Whoever comes always gets a place, so nobody can lock others out by staying: another has to go instead. It is one of
the address that has the most places, and there the one that has done nothing useful for the longest time. One host
that opens connections without end therefore takes places from itself, not from the kubelet or kube-scheduler.
"""

from collections import Counter
from typing import Protocol

import msgspec

MIB = 2**20


class CallerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What all connections of one class may have together, and what a single one may do."""

    connections: int
    head: int  # bytes of a request's head
    bodies: int = 0  # bytes of bodies that are not whole, of all of them; 0: no body is read, one request at a time
    answers: int  # bytes of answers that are not fetched yet, of all of them; each is counted once
    idle: float  # seconds between two requests
    slow: float  # seconds for a whole request, and without progress in an answer
    answer: float = float("inf")  # seconds for a whole answer


class LimitedConnection(Protocol):
    """A connection, as its class sees it."""

    address: str  # of the other side
    since: float  # when the last thing happened that counts
    kept: int  # bytes of bodies that are not whole

    @property
    def is_served(self) -> bool:
        """Whether we are the ones who have something to do."""

    def cut(self) -> None:
        """End it at once; whatever was not sent is lost."""


class SharedResponse(msgspec.Struct):
    """An answer that is on its way to some."""

    size: int
    readers: Counter[LimitedConnection]


class CallerClass:
    """See the module's text."""

    def __init__(self, limits: CallerLimits) -> None:
        self.limits = limits
        self._guests: dict[LimitedConnection, None] = {}  # in the order in which they came
        self._crowds: Counter[str] = Counter()  # by address
        self._sent: dict[int, SharedResponse] = {}  # by the identity of the bytes
        self.kept = 0  # bytes of bodies
        self.unsent = 0  # bytes of answers
        self.evicted = 0  # since somebody last looked

    def __len__(self) -> int:
        return len(self._guests)

    def __contains__(self, guest: LimitedConnection) -> bool:
        return guest in self._guests

    # ---- connections ------------------------------------------------------------------------------------------------

    def enter(self, guest: LimitedConnection) -> None:
        self._guests[guest] = None
        self._crowds[guest.address] += 1
        if len(self._guests) > self.limits.connections:
            self._evict(self._worst(guest))

    def leave(self, guest: LimitedConnection) -> None:
        if guest not in self._guests:
            return
        del self._guests[guest]
        self._crowds[guest.address] -= 1
        if not self._crowds[guest.address]:
            del self._crowds[guest.address]
        self.kept -= guest.kept
        guest.kept = 0
        for key in [key for key, shared in self._sent.items() if guest in shared.readers]:
            self._drop(key, guest, self._sent[key].readers[guest])

    def _worst(self, newcomer: LimitedConnection) -> LimitedConnection:
        """Where all others are being served, the newcomer."""
        most = max(self._crowds.values())
        crowd = [one for one in self._guests if self._crowds[one.address] == most and one is not newcomer]
        others = crowd or [one for one in self._guests if one is not newcomer]
        waiting = [one for one in others if not one.is_served] or [newcomer]
        return min(waiting, key=_patience)

    def _evict(self, guest: LimitedConnection) -> None:
        self.evicted += 1
        self.leave(guest)
        guest.cut()

    # ---- bodies that are not whole ----------------------------------------------------------------------------------

    def keep(self, guest: LimitedConnection, size: int) -> None:
        """So many bytes of its bodies are kept now. Where that is too much in all, the slowest other body goes."""
        if guest not in self._guests:
            return
        self.kept += size - guest.kept
        guest.kept = size
        while self.kept > self.limits.bodies:
            others = [one for one in self._guests if one.kept and one is not guest]
            if not others:
                return  # one body is bounded by itself
            self._evict(min(others, key=_patience))

    # ---- answers that are not fetched -------------------------------------------------------------------------------

    def begin(self, guest: LimitedConnection, body: bytes) -> None:
        """It is being sent this. Where too much is on its way, the slowest of those who read something else goes."""
        if guest not in self._guests:
            return
        shared = self._sent.get(id(body))
        if shared is None:
            shared = self._sent[id(body)] = SharedResponse(len(body), Counter())
            self.unsent += len(body)
        shared.readers[guest] += 1
        while self.unsent > self.limits.answers:
            others = {one for found in self._sent.values() if found is not shared for one in found.readers} - {guest}
            if not others:
                return  # one answer is always sent, however large
            self._evict(min(others, key=_patience))

    def end(self, guest: LimitedConnection, body: bytes) -> None:
        """It has this, or wants it no more. What has left this class is forgotten already."""
        shared = self._sent.get(id(body))
        if shared is not None and guest in shared.readers:
            self._drop(id(body), guest, 1)

    def _drop(self, key: int, guest: LimitedConnection, times: int) -> None:
        shared = self._sent[key]
        shared.readers[guest] -= times
        if shared.readers[guest] <= 0:
            del shared.readers[guest]
        if not shared.readers:
            del self._sent[key]
            self.unsent -= shared.size


def _patience(guest: LimitedConnection) -> float:
    return guest.since
