"""The server side of one HTTP/1.1 connection: requests one after the other, responses in the same order.

It parses requests, passes them to the server, and writes the responses. It must not know the content of requests.

A response that is ready at once is written in the same turn of the loop that read the last byte of its request. A large
response is written in slices as the client reads it, so that it is in memory once, however many clients receive it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from functools import lru_cache, partial
from http import HTTPStatus
from typing import cast

import msgspec

from gputile.http.h1_body import Body
from gputile.http.h1_head import Malformed
from gputile.http.h1_request import RequestHead, check_begun, read_head
from gputile.http.limits import CallerClass
from gputile.http.messages import (
    Reply,
    Request,
    Response,
    ServerHooks,
    Streamed,
    common_name,
    internal_error,
    peer,
    respond,
)

SLICE = 65536  # bytes of a large response in one write
AT_ONCE = 8  # slices in one turn of the loop
DISCARD_SECONDS = (
    1.0  # seconds for which an unwanted body is discarded before the close, so that the client reads the response
)
CLOSE = "Connection: close\r\n"
QUIET = 0.1  # seconds without a request, after which a draining connection is closed


class LargeResponse(msgspec.Struct):
    """A large response that is being sent."""

    response: Response
    at: int  # bytes that were written
    close: bool  # the connection closes after it


class H1Connection(asyncio.BufferedProtocol):
    """One HTTP/1.1 connection of the server; its requests are answered in their order."""

    def __init__(self, listener: ServerHooks, opened: Callable[[], None] = lambda: None) -> None:
        """`opened` is called when the connection is made, over TLS after the handshake."""
        self._listener, self._opened = listener, opened
        self._buffer = bytearray()
        self._head: RequestHead | None = None
        self._body: Body | None = None
        self._transport: asyncio.Transport | None = None
        self._callers: CallerClass
        self._is_known, self._is_trusted, self._caller = False, False, ""
        self._is_held = False  # the transport's write buffer is full: the client does not read
        self._is_draining = self._is_over = False  # the next response is the last; the last response was written
        self._is_unread = False  # bytes were left unread: an unwanted body, or the next request
        self._streaming = False  # the task produces a response piece by piece
        self._sending: LargeResponse | None = None
        self._writable: asyncio.Future[None] | None = None  # what the task waits for while writing is held
        self._asked_at = self.since = listener.now()  # time of the last head; time of the last progress
        self.address, self.kept = "", 0
        self.task: asyncio.Task[None] | None = None
        self._awaited: Reply | Awaitable[Reply] | None = None  # what the task waits for

    # ---- asyncio.BufferedProtocol -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._opened()
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport does not subclass it
        certificate = transport.get_extra_info("peercert")
        self._is_known, self._caller = bool(certificate), common_name(certificate)
        self._is_trusted = self._listener.trusts(certificate)
        self.address = peer(transport)
        self._transport.set_write_buffer_limits(SLICE)
        self._callers = self._listener.register(self, "http/1.1", trusted=self._is_trusted)
        self._callers.enter(self)

    def connection_lost(self, error: Exception | None) -> None:
        """A bind under way continues, although its client is disconnected."""
        self._transport = None
        self._release()
        self._listener.forget(self)

    def get_buffer(self, hint: int) -> memoryview:
        return self._listener.read_buffer

    def buffer_updated(self, count: int) -> None:
        if self._is_over:
            return  # the rest of an unwanted body
        if not self._callers.limits.bodies and self._is_answering():
            self._is_unread = True  # one request at a time: this response is the last
            return
        self._buffer += self._listener.read_buffer[:count]
        if not self._is_answering():
            self._work()
        elif len(self._buffer) > self._callers.limits.head and self._transport is not None:
            self._transport.pause_reading()  # a client that pipelines requests waits for the responses before

    def pause_writing(self) -> None:
        """Read no further request of a client that does not read its responses."""
        self._is_held = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._is_held = False
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        if self._sending is not None:
            self._push()
        if not self._is_answering():
            self._go_on()

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _is_answering(self) -> bool:
        return self.task is not None or self._sending is not None

    @property
    def is_served(self) -> bool:
        """True while a POST is being answered: a bind is not cut off. A GET can be retried."""
        return self.task is not None and self._head is not None and self._head.method == "POST"

    def _work(self) -> None:
        """Answer the buffered requests, until a response is not ready at once."""
        try:
            while self._is_free() and (request := self._next_request()) is not None:
                answer = respond(self._listener, request)
                if isinstance(answer, Response):
                    self._send(answer)
                else:
                    later = self._stream(answer) if isinstance(answer, Streamed) else self._wait_for(request, answer)
                    self.task, self._awaited = asyncio.ensure_future(later), answer
                    self._listener.work(self.task)
        except Malformed as error:
            self._head = self._head or RequestHead("GET", "/", 0, True, False)
            self._send(Response(str(error).encode(), error.status, "text/plain", close=True))

    def _is_free(self) -> bool:
        return self._transport is not None and not self._is_answering() and not self._is_held and not self._is_over

    def _next_request(self) -> Request | None:
        """The next complete request; None before its last byte was received."""
        if self._head is None and not self._read_head():
            return None
        assert self._head is not None
        assert self._body is not None
        if self._callers.limits.bodies and not self._read_body(self._body):
            return None
        head, body = self._head, self._body
        return Request(
            head.method,
            head.path,
            body.content(),
            body.is_too_large,
            self._is_known,
            head.query,
            head.fields,
            self._caller,
            self._is_trusted,
        )

    def _read_head(self) -> bool:
        """Whether the head is complete."""
        buffer = self._buffer
        if not buffer:
            return False
        while buffer.startswith(b"\r\n"):  # some clients send an extra CR LF after a body
            del buffer[:2]
        end = buffer.find(b"\r\n\r\n")
        if (end if end >= 0 else len(buffer)) > self._callers.limits.head:
            raise Malformed(431, f"request header section exceeds {self._callers.limits.head} bytes")
        if end < 0:
            check_begun(buffer)
            return False
        self._asked_at = self.since = self._listener.now()
        self._head = head = read_head(bytes(buffer[: end + 4]))
        del buffer[: end + 4]
        self._body = Body(head.length, self._listener.limit)
        self._callers = self._listener.classed(self, self._callers, head.path)
        self._accept_body(head)
        return self._transport is not None  # the new class may have evicted this connection

    def _accept_body(self, head: RequestHead) -> None:
        """Send 100 Continue if the client waits for it. The body of an untrusted caller is not read."""
        if not self._callers.limits.bodies:
            self._is_unread = head.has_body or bool(self._buffer)
            self._buffer.clear()
        elif head.asks_first and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _read_body(self, body: Body) -> bool:
        """Whether the body is complete. Only an incomplete body counts against the limit."""
        is_whole = body.take(self._buffer)
        if not is_whole or self.kept:
            self._callers.keep(self, 0 if is_whole else body.held)
        return is_whole

    async def _wait_for(self, request: Request, answer: Awaitable[Reply]) -> None:
        response: Reply | None = None
        try:
            response = await answer
        except Exception:
            response = internal_error(request)
        finally:
            if not isinstance(response, Streamed):
                self.task = None
            if response is None:  # cancelled: the server is stopping, or the client is disconnected
                self.close()
        if isinstance(response, Streamed):
            await self._stream(response)
            return
        self._send(response)
        self._go_on()

    async def _stream(self, streamed: Streamed) -> None:
        """Send piece by piece, the next when the client has read this one, until the generator or the client ends."""
        head, is_whole, self._streaming = self._head, False, True
        knows_chunks = head is not None and head.knows_chunks
        try:
            async with aclosing(streamed.pieces) as pieces:
                if self._transport is None:  # the client disconnected while the response was prepared
                    return
                self._write_stream_head(streamed, knows_chunks=knows_chunks)
                async for piece in pieces:
                    self._write(b"%x\r\n%b\r\n" % (len(piece), piece) if knows_chunks and piece else piece)
                    if self._is_held:
                        await self._wait_until_read(piece)
            is_whole = True
        finally:
            self.task, self._streaming = None, False
            self._head = self._body = None
            if is_whole and knows_chunks:
                self._write(b"0\r\n\r\n")
            if not is_whole or not knows_chunks or head is None or head.closes or self._is_last():
                self.close()
        self._go_on()

    def _write_stream_head(self, streamed: Streamed, *, knows_chunks: bool) -> None:
        """For HTTP/1.0, which has no chunks, the response ends with the connection."""
        coding = "Transfer-Encoding: chunked\r\n" if knows_chunks else CLOSE
        self._write(f"{_status_and_type(streamed.status, streamed.content_type)}{coding}\r\n".encode())

    def _write(self, part: bytes) -> None:
        self.since = self._listener.now()
        if self._transport is not None:
            self._transport.write(part)

    async def _wait_until_read(self, piece: bytes) -> None:
        callers = self._callers
        callers.begin(self, piece)
        try:
            while self._is_held:
                self._writable = asyncio.get_running_loop().create_future()
                await self._writable
        finally:
            callers.end(self, piece)

    def _go_on(self) -> None:
        if self._transport is not None and not self._is_held:
            self._transport.resume_reading()
        self._work()

    # ---- responses --------------------------------------------------------------------------------------------------

    def _send(self, response: Response) -> None:
        head, self._head, self._body = self._head, None, None
        self.since = self._listener.now()
        if self._transport is None or head is None:
            return
        close = response.close or head.closes or self._is_unread or self._is_last()
        body = response.body if head.method != "HEAD" else b""
        if len(body) <= SLICE:
            self._transport.write(_response_head(response, close=close) + body)
            if close:
                self._close_after_response()
            return
        self._transport.write(_response_head(response, close=close))
        self._sending = LargeResponse(response, 0, close)
        self._callers.begin(self, response.body)
        self._push()

    def _push(self) -> None:
        """Write as much as the client reads; other connections get their turn in between. Slices are copied: a slice
        in the write buffer must not keep the whole response in memory."""
        sending = self._sending
        for _ in range(AT_ONCE):
            if sending is None or sending is not self._sending or self._is_held or self._transport is None:
                return
            piece = sending.response.body[sending.at : sending.at + SLICE]
            sending.at += len(piece)
            self._write(piece)
            if sending.at >= len(sending.response.body) and sending is self._sending:
                self._sent(sending)
        asyncio.get_running_loop().call_soon(self._push_on)

    def _push_on(self) -> None:
        if self._sending is not None:
            self._push()
            if not self._is_answering():
                self._go_on()

    def _sent(self, sending: LargeResponse) -> None:
        self._sending = None
        self._callers.end(self, sending.response.body)
        if sending.close or self._is_unread or self._is_last():
            self._close_after_response()

    # ---- closing ----------------------------------------------------------------------------------------------------

    def sweep(self, now: float) -> None:
        """Close a connection that is idle, or too slow to send its request or to read its response."""
        limits = self._callers.limits
        is_half = self._head is not None or self._buffer or self._is_held or self._sending is not None or self._is_over
        is_late = now - self.since > (limits.slow if is_half else limits.idle)
        if self._sending is not None:
            is_late = is_late or now - self._asked_at > limits.answer
        if is_late and (self.task is None or (self._streaming and self._is_held)):
            (self.cut if self._is_over else self.close)()

    def drain(self) -> None:
        """The next response has `Connection: close`: HTTP/1.1 has no earlier signal. An idle connection is closed once
        it is quiet: after a response the next request may be on its way, and Go repeats no POST that meets a close."""
        if not self._is_draining:
            self._is_draining = True
            self._close_when_quiet()

    def _close_when_quiet(self) -> None:
        is_idle = not self._is_answering() and self._head is None and not self._buffer
        if self._transport is None or self._is_over or not is_idle:
            return  # the response has `Connection: close`
        wait = self.since + QUIET - self._listener.now()
        if wait > 0:
            asyncio.get_running_loop().call_later(wait, self._close_when_quiet)
            return
        self._is_over = True
        self._transport.close()

    def _is_last(self) -> bool:
        return self._is_draining or self._listener.is_stopping

    def _close_after_response(self) -> None:
        """The last response is written. A client that is still sending would lose it after an immediate close (RFC
        9112, section 9.6): the bytes it sends are discarded for `DISCARD_SECONDS` seconds."""
        self._is_over = True
        if self._transport is None:
            return
        if self._is_unread:
            asyncio.get_running_loop().call_later(DISCARD_SECONDS, self.close)
        else:
            self._transport.close()

    def close(self) -> None:
        if self._transport is not None:
            is_stuck = self._is_held or self._sending is not None
            (self._transport.abort if is_stuck else self._transport.close)()

    def cut(self) -> None:
        transport, self._transport = self._transport, None
        self._release()
        if transport is not None:
            transport.abort()

    def _release(self) -> None:
        """The client is disconnected. Binds of trusted callers continue; other work is cancelled."""
        self._callers.leave(self)
        self._sending = None
        self._buffer.clear()
        if self.task is not None and (self._streaming or not self._is_trusted):
            self.task.add_done_callback(partial(_dispose, self._awaited))
            self.task.cancel()


def _dispose(awaited: Reply | Awaitable[Reply] | None, task: "asyncio.Task[None]") -> None:
    """Close a coroutine whose task was cancelled before it started to await it."""
    if isinstance(awaited, Coroutine):
        awaited.close()


def _response_head(response: Response, *, close: bool) -> bytes:
    start = _status_and_type(response.status, response.content_type)
    return f"{start}Content-Length: {len(response.body)}\r\n{CLOSE if close else ''}\r\n".encode()


@lru_cache(64)
def _status_and_type(status: int, content_type: str) -> str:
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {content_type}\r\n"
