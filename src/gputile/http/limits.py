"""Classes of callers, and the limits of each class: connections, incomplete bodies, unread responses.

This module only counts, and chooses the connection to evict when a limit is exceeded. It has no sockets and no clock.

A new connection is always accepted, so no caller can lock out others by staying connected: another connection is
evicted instead. The evicted connection belongs to the address with the most connections, and is the one with the
longest time since its last progress. So a host that opens connections without end evicts its own, not those of the
kubelet or kube-scheduler.
"""

from collections import Counter
from typing import Protocol

import msgspec

MIB = 2**20


class CallerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of all connections of one class together, and of a single one."""

    connections: int
    head: int  # bytes of a request's head
    bodies: int = 0  # bytes of incomplete bodies in the class; 0: no body is read, one request at a time
    answers: int  # bytes of unread responses in the class; a response sent to many is counted once
    idle: float  # seconds between two requests
    slow: float  # seconds for a whole request, and without progress in a response
    answer: float = float("inf")  # seconds for a whole response


class LimitedConnection(Protocol):
    """A connection, as its class sees it."""

    address: str  # of the client
    since: float  # time of the last progress
    kept: int  # bytes of incomplete bodies

    @property
    def is_served(self) -> bool:
        """Whether the server is working on a request of this connection."""

    def cut(self) -> None:
        """Abort at once; unsent bytes are lost."""


class SharedResponse(msgspec.Struct):
    """A response body that is being sent to one or more connections."""

    size: int
    readers: Counter[LimitedConnection]


class CallerClass:
    """The connections of one class of callers, counted against the limits of the class."""

    def __init__(self, limits: CallerLimits) -> None:
        self.limits = limits
        self._connections: dict[LimitedConnection, None] = {}  # in the order of arrival
        self._by_address: Counter[str] = Counter()
        self._sending: dict[int, SharedResponse] = {}  # by the identity of the bytes
        self.kept = 0  # bytes of incomplete bodies
        self.unsent = 0  # bytes of unread responses
        self.evicted = 0  # connections since the server last reported them

    def __len__(self) -> int:
        return len(self._connections)

    def __contains__(self, connection: LimitedConnection) -> bool:
        return connection in self._connections

    # ---- connections ------------------------------------------------------------------------------------------------

    def enter(self, connection: LimitedConnection) -> None:
        """Add a connection; above the limit another one is evicted."""
        self._connections[connection] = None
        self._by_address[connection.address] += 1
        if len(self._connections) > self.limits.connections:
            self._evict(self._victim(connection))

    def leave(self, connection: LimitedConnection) -> None:
        if connection not in self._connections:
            return
        del self._connections[connection]
        self._by_address[connection.address] -= 1
        if not self._by_address[connection.address]:
            del self._by_address[connection.address]
        self.kept -= connection.kept
        connection.kept = 0
        for key in [key for key, shared in self._sending.items() if connection in shared.readers]:
            self._drop(key, connection, self._sending[key].readers[connection])

    def _victim(self, newcomer: LimitedConnection) -> LimitedConnection:
        """The connection to evict; the newcomer if all others are being served."""
        most = max(self._by_address.values())
        others = [connection for connection in self._connections if connection is not newcomer]
        crowd = [connection for connection in others if self._by_address[connection.address] == most]
        unserved = [connection for connection in crowd or others if not connection.is_served] or [newcomer]
        return min(unserved, key=_last_progress)

    def _evict(self, connection: LimitedConnection) -> None:
        self.evicted += 1
        self.leave(connection)
        connection.cut()

    # ---- incomplete bodies ------------------------------------------------------------------------------------------

    def keep(self, connection: LimitedConnection, size: int) -> None:
        """Set the bytes of incomplete bodies of a connection. Above the limit, the slowest other body is evicted."""
        if connection not in self._connections:
            return
        self.kept += size - connection.kept
        connection.kept = size
        while self.kept > self.limits.bodies:
            others = [other for other in self._connections if other.kept and other is not connection]
            if not others:
                return  # the size of a single body is limited elsewhere
            self._evict(min(others, key=_last_progress))

    # ---- unread responses -------------------------------------------------------------------------------------------

    def begin(self, connection: LimitedConnection, body: bytes) -> None:
        """Count a response that is being sent. Above the limit, the slowest reader of another response is evicted."""
        if connection not in self._connections:
            return
        shared = self._sending.get(id(body))
        if shared is None:
            shared = self._sending[id(body)] = SharedResponse(len(body), Counter())
            self.unsent += len(body)
        shared.readers[connection] += 1
        while self.unsent > self.limits.answers:
            rest = [response for response in self._sending.values() if response is not shared]
            others = {reader for response in rest for reader in response.readers} - {connection}
            if not others:
                return  # a single response is always sent, however large
            self._evict(min(others, key=_last_progress))

    def end(self, connection: LimitedConnection, body: bytes) -> None:
        """The response was sent, or is no longer wanted. A connection that left the class is not counted any more."""
        shared = self._sending.get(id(body))
        if shared is not None and connection in shared.readers:
            self._drop(id(body), connection, 1)

    def _drop(self, key: int, connection: LimitedConnection, times: int) -> None:
        shared = self._sending[key]
        shared.readers[connection] -= times
        if shared.readers[connection] <= 0:
            del shared.readers[connection]
        if not shared.readers:
            del self._sending[key]
            self.unsent -= shared.size


def _last_progress(connection: LimitedConnection) -> float:
    return connection.since
