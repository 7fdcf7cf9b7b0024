"""One kept HTTP/1.1 connection to a server: it sends a request in one write and assembles the response as it arrives.

There is one exchange at a time, with one future for the waiting caller and one timer. `ask` returns a whole response;
`begin` and then `piece` return it in pieces. Cancelling a waiting caller closes the connection: the response may still
arrive, and must not be taken for the response to the next request.

  idle --ask--> sent --head--> receiving --end of the body--> idle
    |             |                |
    +-------------+----------------+--lost, malformed, timed out, cancelled--> closed
"""

import asyncio
import math
import ssl
from typing import Protocol, TypeAlias, cast

import msgspec

from gputile.http.h1_body import Body
from gputile.http.h1_head import Malformed
from gputile.http.h1_response import UNTIL_CLOSE, ResponseHead, read_head
from gputile.http.messages import LONGEST_HEAD

HIGH_WATER = 262144  # bytes of a streamed body that are buffered; reading pauses until the caller consumes them
NO_LIMIT = UNTIL_CLOSE


class NotSent(Exception):
    """The request was not sent: not one byte left this process."""


class ConnectionBroken(Exception):
    """The request may have arrived, and no valid response was received."""

    def __init__(self, reason: str, *, is_stale: bool = False) -> None:
        super().__init__(reason)
        self.is_stale = is_stale  # a kept connection was closed without one byte of a response


class HttpAnswer(msgspec.Struct, frozen=True):
    """A whole response."""

    status: int
    headers: dict[bytes, bytes]  # names in lower case
    body: bytes


class ConnectionOwner(Protocol):
    """The pool that a connection belongs to."""

    read_buffer: memoryview
    """The buffer that all connections read into: each copies its bytes before the loop reads again."""

    def give_back(self, connection: "ClientConnection") -> None: ...

    def lost(self, connection: "ClientConnection") -> None: ...


Waiter: TypeAlias = "asyncio.Future[HttpAnswer | None]"


class ClientConnection(asyncio.BufferedProtocol):
    """One connection of the client, with at most one exchange under way."""

    def __init__(self, owner: ConnectionOwner, loop: asyncio.AbstractEventLoop, tls: ssl.SSLContext | None) -> None:
        self._owner, self._loop, self.tls = owner, loop, tls
        self.idle_since = 0.0
        self.gone = loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._has_served = self._has_received = self._is_over = self._is_paused = False
        self._buffer = bytearray()
        # ---- the exchange under way
        self._method: str | None = None
        self._streams = self._is_whole = False
        self._head: ResponseHead | None = None
        self._body: Body | None = None
        self._waiter: Waiter | None = None
        self._error: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = self._silence = math.inf
        self._received_at = 0.0

    @property
    def transport(self) -> asyncio.Transport:
        assert self._transport is not None
        return self._transport

    @property
    def is_usable(self) -> bool:
        return not (self._is_over or self._transport is None or self._transport.is_closing())

    # ---- requests ---------------------------------------------------------------------------------------------------

    async def ask(self, method: str, sent: bytes, deadline: float) -> HttpAnswer:
        """Send a request and return its whole response. `sent`: the encoded request. `deadline`: by the loop's
        clock."""
        self._send(method, sent, deadline, math.inf, streams=False)
        answer = await self._wait()
        assert answer is not None
        return answer

    async def begin(self, method: str, sent: bytes, deadline: float, silence: float) -> ResponseHead:
        """Send a request and return the head; `piece` returns the body. `silence`: the longest gap between bytes."""
        self._send(method, sent, deadline, silence, streams=True)
        while self._head is None:
            await self._wait()
        return self._head

    async def piece(self) -> bytes:
        """The bytes of the body that have arrived; empty at the end."""
        assert self._body is not None
        while True:
            if piece := self._body.pieces():
                self._resume_reading()
                return piece
            if self._is_whole:
                self._finish()
                return b""
            if self._error is not None:
                raise self._error
            await self._wait()

    async def tunnel(self, sent: bytes, deadline: float) -> int:
        """Return the proxy's status for CONNECT; the caller then starts TLS inside the tunnel."""
        head = await self.begin("CONNECT", sent, deadline, math.inf)
        self._stop_timer()
        return head.status

    async def _wait(self) -> HttpAnswer | None:
        waiter: Waiter = self._loop.create_future()
        self._waiter = waiter
        try:
            return await waiter
        finally:
            if waiter.cancelled():
                self.close()

    def _send(self, method: str, sent: bytes, deadline: float, silence: float, *, streams: bool) -> None:
        self._method, self._streams, self._is_whole = method, streams, False
        self._head = self._body = None
        self._has_received = False
        self._deadline, self._silence = deadline, silence
        self._received_at = self._loop.time()
        self._timer = self._loop.call_at(min(deadline, self._received_at + silence), self._check_timeouts)
        self.transport.write(sent)

    def _check_timeouts(self) -> None:
        """While reading is paused because the caller does not consume, the server is not silent."""
        now = self._loop.time()
        if self._is_paused:
            self._received_at = now
        due = min(self._deadline, self._received_at + self._silence)
        if now >= due:
            self._fail(TimeoutError())
        else:
            self._timer = self._loop.call_at(due, self._check_timeouts)

    # ---- what the loop calls ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport does not subclass it

    def get_buffer(self, hint: int) -> memoryview:
        return self._owner.read_buffer

    def buffer_updated(self, count: int) -> None:
        if self._method is None or self._is_whole:  # unsolicited bytes must not become the next response
            self._is_over = True
            self.transport.abort()
            return
        self._buffer += self._owner.read_buffer[:count]
        self._has_received = True
        try:
            self._parse()
        except Malformed as error:
            self._fail(ConnectionBroken(str(error)))

    def eof_received(self) -> None:
        self._is_over = True  # the loop closes the transport and calls `connection_lost` in its next turn

    def connection_lost(self, error: Exception | None) -> None:
        self._is_over = True
        if self._body is not None and self._head is not None and self._head.length == UNTIL_CLOSE and error is None:
            self._is_whole = True
            self._wake()
        elif self._method is not None and not self._is_whole:
            reason = str(error or "") or "the server closed the connection"
            self._fail(ConnectionBroken(reason, is_stale=self._has_served and not self._has_received))
        self._owner.lost(self)
        if not self.gone.done():
            self.gone.set_result(None)

    # ---- receiving a response ---------------------------------------------------------------------------------------

    def _parse(self) -> None:
        if self._head is None and not self._parse_head():
            return
        assert self._body is not None
        self._is_whole = self._body.take(self._buffer)
        if self._streams:
            self._received_at = self._loop.time()
            if self._body.held > HIGH_WATER and not self._is_paused and not self.transport.is_closing():
                self._is_paused = True
                self.transport.pause_reading()
        if self._is_whole or self._streams:
            self._wake()

    def _parse_head(self) -> bool:
        """Whether the head is complete. A 1xx response is skipped: the final response follows it."""
        assert self._method is not None
        while True:
            end = self._buffer.find(b"\r\n\r\n")
            if max(end, len(self._buffer) if end < 0 else 0) > LONGEST_HEAD:
                raise Malformed(502, f"response header section exceeds {LONGEST_HEAD} bytes")
            if end < 0:
                return False
            head = read_head(bytes(self._buffer[: end + 4]), self._method)
            del self._buffer[: end + 4]
            if head.status == 101:
                raise Malformed(502, "unexpected 101 Switching Protocols")
            if head.status >= 200:
                self._head, self._body = head, Body(head.length, NO_LIMIT)
                return True

    def _wake(self) -> None:
        """Wake the waiting caller. A whole response frees the connection before the caller runs."""
        waiter, self._waiter = self._waiter, None
        answer = None
        if not self._streams:
            assert self._head is not None
            assert self._body is not None
            answer = HttpAnswer(self._head.status, self._head.headers, self._body.content())
            self._finish()
        if waiter is not None and not waiter.done():
            waiter.set_result(answer)

    def _resume_reading(self) -> None:
        if self._is_paused:
            self._is_paused, self._received_at = False, self._loop.time()
            if self.is_usable:
                self.transport.resume_reading()

    # ---- end of an exchange, end of the connection ------------------------------------------------------------------

    def _finish(self) -> None:
        """The response is complete and consumed: give the connection back, or close it."""
        assert self._head is not None
        is_reusable = not self._head.closes and not self._buffer and self.is_usable
        self._stop_timer()
        self._resume_reading()
        self._method = self._head = self._body = None
        self._has_served = True
        if is_reusable:
            self._owner.give_back(self)
        else:
            self.close()

    def _fail(self, error: Exception) -> None:
        self._error = error
        waiter, self._waiter = self._waiter, None
        self.close()
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)

    def close(self) -> None:
        """Abort at once; unsent and unread bytes are lost."""
        self._is_over = True
        self._stop_timer()
        if self._transport is not None:
            self._transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
