"""One kept connection to a server: a question goes out in one write, its answer is put together as it comes.

Room:  one exchange after the other, never two at once; one future for whoever waits, one timer for its patience.
Door:  `ask` for a whole answer, or `begin` and then `piece` by piece. Whoever is cancelled while it waits closes the
       connection: the answer may still come, and must not be taken for that of the next question.

  idle --ask--> asked --head--> answering --end of the body--> idle
    |             |                 |
    +-------------+-----------------+--lost, malformed, out of time, cancelled--> closed
"""

import asyncio
import math
import ssl
from typing import Protocol, TypeAlias, cast

import msgspec

from gputile.http.h1_body import Body, Malformed
from gputile.http.h1_response import UNTIL_CLOSE, ResponseHead, read_head
from gputile.http.messages import LONGEST_HEAD

PLENTY = 262144  # bytes that wait for whoever reads a stream; no more are read before it comes for them
NO_LIMIT = UNTIL_CLOSE


class NotSent(Exception):
    """Not one byte of the request has left."""


class ConnectionBroken(Exception):
    """The request may have arrived, and no answer came that can be understood."""

    def __init__(self, why: str, *, is_stale: bool = False) -> None:
        super().__init__(why)
        self.is_stale = is_stale  # a kept connection ended without one byte of an answer


class HttpAnswer(msgspec.Struct, frozen=True):
    """A whole answer."""

    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes


class ConnectionOwner(Protocol):
    """Where a connection comes from and goes back to."""

    read_buffer: memoryview
    """Where bytes arrive, whoever sent them: they are taken from here before the loop reads again."""

    def give_back(self, connection: "ClientConnection") -> None: ...

    def lost(self, connection: "ClientConnection") -> None: ...


Waiter: TypeAlias = "asyncio.Future[HttpAnswer | None]"


class ClientConnection(asyncio.BufferedProtocol):
    def __init__(self, home: ConnectionOwner, loop: asyncio.AbstractEventLoop, tls: ssl.SSLContext | None) -> None:
        self._home, self._loop, self.tls = home, loop, tls
        self.idle_since = 0.0
        self.gone = loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._has_served = self._has_heard = self._is_over = self._is_paused = False
        self._buffer = bytearray()
        # ---- of the exchange under way
        self._method: str | None = None
        self._streams = self._is_whole = False
        self._head: ResponseHead | None = None
        self._body: Body | None = None
        self._waiter: Waiter | None = None
        self._wrong: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = self._silence = math.inf
        self._heard_at = 0.0

    @property
    def transport(self) -> asyncio.Transport:
        assert self._transport is not None
        return self._transport

    @property
    def is_usable(self) -> bool:
        return not (self._is_over or self._transport is None or self._transport.is_closing())

    # ---- asking -----------------------------------------------------------------------------------------------------

    async def ask(self, method: str, sent: bytes, deadline: float) -> HttpAnswer:
        """`sent`: all of the request. `deadline`: by the loop's clock."""
        self._send(method, sent, deadline, math.inf, streams=False)
        answer = await self._wait()
        assert answer is not None
        return answer

    async def begin(self, method: str, sent: bytes, deadline: float, silence: float) -> ResponseHead:
        """The head of an answer; `piece` gets the rest. `silence`: seconds without one byte that we accept."""
        self._send(method, sent, deadline, silence, streams=True)
        while self._head is None:
            await self._wait()
        return self._head

    async def piece(self) -> bytes:
        """What has come; empty at the end."""
        assert self._body is not None
        while True:
            if found := self._body.pieces():
                self._read_on()
                return found
            if self._is_whole:
                self._end()
                return b""
            if self._wrong is not None:
                raise self._wrong
            await self._wait()

    async def tunnel(self, sent: bytes, deadline: float) -> int:
        """The status with which a proxy opens a way through; whoever asked then puts TLS between it and us."""
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
        self._has_heard = False
        self._deadline, self._silence = deadline, silence
        self._heard_at = self._loop.time()
        self._timer = self._loop.call_at(min(deadline, self._heard_at + silence), self._look_at_clock)
        self.transport.write(sent)

    def _look_at_clock(self) -> None:
        """Who does not come for what is here makes us deaf; that is not the server's silence."""
        now = self._loop.time()
        if self._is_paused:
            self._heard_at = now
        due = min(self._deadline, self._heard_at + self._silence)
        if now >= due:
            self._fail(TimeoutError())
        else:
            self._timer = self._loop.call_at(due, self._look_at_clock)

    # ---- what the loop calls ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name

    def get_buffer(self, hint: int) -> memoryview:
        return self._home.read_buffer

    def buffer_updated(self, count: int) -> None:
        if self._method is None or self._is_whole:  # nobody asked: whatever it is, it answers no later question
            self._is_over = True
            self.transport.abort()
            return
        self._buffer += self._home.read_buffer[:count]
        self._has_heard = True
        try:
            self._take()
        except Malformed as wrong:
            self._fail(ConnectionBroken(str(wrong)))

    def eof_received(self) -> None:
        self._is_over = True  # the loop closes it, and tells us in its next turn

    def connection_lost(self, wrong: Exception | None) -> None:
        self._is_over = True
        if self._body is not None and self._head is not None and self._head.length == UNTIL_CLOSE and wrong is None:
            self._is_whole = True
            self._tell()
        elif self._method is not None and not self._is_whole:
            why = str(wrong or "") or "the server closed the connection"
            self._fail(ConnectionBroken(why, is_stale=self._has_served and not self._has_heard))
        self._home.lost(self)
        if not self.gone.done():
            self.gone.set_result(None)

    # ---- an answer, as it comes -------------------------------------------------------------------------------------

    def _take(self) -> None:
        if self._head is None and not self._begin():
            return
        assert self._body is not None
        self._is_whole = self._body.take(self._buffer)
        if self._streams:
            self._heard_at = self._loop.time()
            if self._body.held > PLENTY and not self._is_paused and not self.transport.is_closing():
                self._is_paused = True
                self.transport.pause_reading()
        if self._is_whole or self._streams:
            self._tell()

    def _begin(self) -> bool:
        """Whether the head is here. Those of 1xx answers only say that another one follows."""
        assert self._method is not None
        while True:
            end = self._buffer.find(b"\r\n\r\n")
            if max(end, len(self._buffer) if end < 0 else 0) > LONGEST_HEAD:
                raise Malformed(502, "the answer's head is too long")
            if end < 0:
                return False
            head = read_head(bytes(self._buffer[:end]), self._method)
            del self._buffer[: end + 4]
            if head.status == 101:
                raise Malformed(502, "the server wants to speak another protocol")
            if head.status >= 200:
                self._head, self._body = head, Body(head.length, NO_LIMIT)
                return True

    def _tell(self) -> None:
        """Wake whoever waits. A whole answer frees the connection before its reader even runs."""
        waiter, self._waiter = self._waiter, None
        answer = None
        if not self._streams:
            assert self._head is not None
            assert self._body is not None
            answer = HttpAnswer(self._head.status, self._head.headers, self._body.content())
            self._end()
        if waiter is not None and not waiter.done():
            waiter.set_result(answer)

    def _read_on(self) -> None:
        if self._is_paused:
            self._is_paused, self._heard_at = False, self._loop.time()
            if self.is_usable:
                self.transport.resume_reading()

    # ---- ends -------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """The answer is whole and read."""
        assert self._head is not None
        stays = not self._head.closes and not self._buffer and self.is_usable
        self._stop_timer()
        self._read_on()
        self._method = self._head = self._body = None
        self._has_served = True
        if stays:
            self._home.give_back(self)
        else:
            self.close()

    def _fail(self, wrong: Exception) -> None:
        self._wrong = wrong
        waiter, self._waiter = self._waiter, None
        self.close()
        if waiter is not None and not waiter.done():
            waiter.set_exception(wrong)

    def close(self) -> None:
        """At once; what was not sent or read yet is lost."""
        self._is_over = True
        self._stop_timer()
        if self._transport is not None:
            self._transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
