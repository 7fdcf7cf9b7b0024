"""HTTP/1.1 with one client: one request after the other, and their answers in the same order.

Room:  bytes in, questions out to the listener, answers back. It knows nothing of verbs. HTTP/2 is next door (`h2`).
Door:  `H1Connection`, to which a listener hands a transport.

An answer that needs no waiting is written in the same turn of the loop in which the last byte of its question came. A
large one goes slice by slice as the client fetches it, so that it is in memory once, whoever is sent it.
"""

import asyncio
from collections.abc import Awaitable, Coroutine
from contextlib import aclosing
from functools import lru_cache, partial
from http import HTTPStatus
from typing import cast

import msgspec

from gputile.http.h1_body import Body, Malformed
from gputile.http.h1_request import RequestHead, check_begun, read_head
from gputile.http.limits import CallerClass
from gputile.http.messages import Reply, Request, Response, ServerHooks, Streamed, asked, broken, common_name, peer

SLICE = 65536  # bytes of a large answer that are handed to the loop together
AT_ONCE = 8  # slices in one turn of the loop
LINGER = 1.0  # seconds for which the rest of a body that nobody wants is thrown away, so that our answer is read
CLOSE = "Connection: close\r\n"


class LargeResponse(msgspec.Struct):
    """A large answer on its way."""

    response: Response
    at: int  # bytes that were handed to the loop
    close: bool  # the connection ends with it


class H1Connection(asyncio.BufferedProtocol):
    """One client. Its requests are answered in their order."""

    def __init__(self, listener: ServerHooks) -> None:
        self._listener = listener
        self._buffer = bytearray()
        self._head: RequestHead | None = None
        self._body: Body | None = None
        self._transport: asyncio.Transport | None = None
        self._callers: CallerClass
        self._is_known, self._is_trusted, self._caller = False, False, ""
        self._is_held = False  # the loop has more to send than the client fetches
        self._is_leaving = self._is_over = False  # the next answer is the last; that was the last
        self._is_unread = False  # more came than we read: a body that nobody wants, or the next request
        self._pouring = False  # the task brings an answer piece by piece
        self._sending: LargeResponse | None = None
        self._room: asyncio.Future[None] | None = None  # what it waits for while we are held
        self._asked_at = self.since = listener.now()  # the last head; when the last thing happened that counts
        self.address, self.kept = "", 0
        self.task: asyncio.Task[None] | None = None
        self._awaited: Reply | Awaitable[Reply] | None = None  # what it waits for

    # ---- what the loop calls ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        certificate = transport.get_extra_info("peercert")
        self._is_known, self._caller = bool(certificate), common_name(certificate)
        self._is_trusted = self._listener.trusts(certificate)
        self.address = peer(transport)
        self._transport.set_write_buffer_limits(SLICE)
        self._callers = self._listener.register(self, "http/1.1", trusted=self._is_trusted)
        self._callers.enter(self)

    def connection_lost(self, wrong: Exception | None) -> None:
        """What is being worked on goes on: a bind that was asked for is a bind. Nobody needs to be told any more."""
        self._transport = None
        self._let_go()
        self._listener.forget(self)

    def get_buffer(self, hint: int) -> memoryview:
        return self._listener.read_buffer

    def buffer_updated(self, count: int) -> None:
        if self._is_over:
            return  # the rest of what nobody wants
        if not self._callers.limits.bodies and self._is_answering():
            self._is_unread = True  # one request at a time: this answer is the last
            return
        self._buffer += self._listener.read_buffer[:count]
        if not self._is_answering():
            self._work()
        elif len(self._buffer) > self._callers.limits.head and self._transport is not None:
            self._transport.pause_reading()  # whoever sends on without hearing our answer has to wait

    def pause_writing(self) -> None:
        """Whoever does not read our answers is asked for no further question."""
        self._is_held = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._is_held = False
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        if self._sending is not None:
            self._push()
        if not self._is_answering():
            self._go_on()

    # ---- one request after the other --------------------------------------------------------------------------------

    def _is_answering(self) -> bool:
        return self.task is not None or self._sending is not None

    @property
    def is_served(self) -> bool:
        """A bind that was asked for is not cut off. Pages can be asked for again."""
        return self.task is not None and self._head is not None and self._head.method == "POST"

    def _work(self) -> None:
        """Answer all that is here, until something has to be waited for."""
        try:
            while self._is_free() and (request := self._next()) is not None:
                answer = asked(self._listener, request)
                if isinstance(answer, Response):
                    self._send(answer)
                else:
                    later = self._pour(answer) if isinstance(answer, Streamed) else self._wait_for(request, answer)
                    self.task, self._awaited = asyncio.ensure_future(later), answer
                    self._listener.work(self.task)
        except Malformed as wrong:
            self._head = self._head or RequestHead("GET", "/", 0, True, False)
            self._send(Response(str(wrong).encode(), wrong.status, "text/plain", close=True))

    def _is_free(self) -> bool:
        return self._transport is not None and not self._is_answering() and not self._is_held and not self._is_over

    def _next(self) -> Request | None:
        """The next whole request."""
        if self._head is None and not self._begin():
            return None
        assert self._head is not None
        assert self._body is not None
        if self._callers.limits.bodies and not self._collect(self._body):
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

    def _begin(self) -> bool:
        """Whether a whole head is here."""
        buffer = self._buffer
        if not buffer:
            return False
        while buffer.startswith(b"\r\n"):  # some clients end a body with one too many
            del buffer[:2]
        end = buffer.find(b"\r\n\r\n")
        if (end if end >= 0 else len(buffer)) > self._callers.limits.head:
            raise Malformed(431, "the request's head is too long")
        if end < 0:
            check_begun(buffer)
            return False
        self._asked_at = self.since = self._listener.now()
        self._head = head = read_head(bytes(buffer[:end]))
        del buffer[: end + 4]
        self._body = Body(head.length, self._listener.limit)
        self._callers = self._listener.classed(self, self._callers, head.path)
        self._invite_body(head)
        return self._transport is not None  # all places may be those of others

    def _invite_body(self, head: RequestHead) -> None:
        """Or take none: what somebody sends whom we do not know is answered by its head alone."""
        if not self._callers.limits.bodies:
            self._is_unread = head.has_body or bool(self._buffer)
            self._buffer.clear()
        elif head.asks_first and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _collect(self, body: Body) -> bool:
        """Whether it is whole. Until then it counts; one that came in one piece never did."""
        is_whole = body.take(self._buffer)
        if not is_whole or self.kept:
            self._callers.keep(self, 0 if is_whole else body.held)
        return is_whole

    async def _wait_for(self, request: Request, answer: Awaitable[Reply]) -> None:
        response: Reply | None = None
        try:
            response = await answer
        except Exception:
            response = broken(request)
        finally:
            if not isinstance(response, Streamed):
                self.task = None
            if response is None:  # we are stopping, or nobody is there any more
                self.close()
        if isinstance(response, Streamed):
            await self._pour(response)
            return
        self._send(response)
        self._go_on()

    async def _pour(self, streamed: Streamed) -> None:
        """Piece by piece, the next when the client has fetched this one; its end ends it, too."""
        head, is_whole, self._pouring = self._head, False, True
        knows_chunks = head is not None and head.knows_chunks
        try:
            async with aclosing(streamed.pieces) as pieces:
                if self._transport is None:  # the client left while it waited for us
                    return
                self._open(streamed, knows_chunks=knows_chunks)
                async for piece in pieces:
                    self._write(b"%x\r\n%b\r\n" % (len(piece), piece) if knows_chunks and piece else piece)
                    if self._is_held:
                        await self._fetched(piece)
            is_whole = True
        finally:
            self.task, self._pouring = None, False
            self._head = self._body = None
            if is_whole and knows_chunks:
                self._write(b"0\r\n\r\n")
            if not is_whole or not knows_chunks or head is None or head.closes or self._is_last():
                self.close()
        self._go_on()

    def _open(self, streamed: Streamed, *, knows_chunks: bool) -> None:
        """The head. Where chunks are not understood, the answer ends with the connection."""
        coding = "Transfer-Encoding: chunked\r\n" if knows_chunks else CLOSE
        self._write(f"{_begun(streamed.status, streamed.content_type)}{coding}\r\n".encode())

    def _write(self, part: bytes) -> None:
        self.since = self._listener.now()
        if self._transport is not None:
            self._transport.write(part)

    async def _fetched(self, piece: bytes) -> None:
        callers = self._callers
        callers.begin(self, piece)
        try:
            while self._is_held:
                self._room = asyncio.get_running_loop().create_future()
                await self._room
        finally:
            callers.end(self, piece)

    def _go_on(self) -> None:
        if self._transport is not None and not self._is_held:
            self._transport.resume_reading()
        self._work()

    # ---- an answer --------------------------------------------------------------------------------------------------

    def _send(self, response: Response) -> None:
        head, self._head, self._body = self._head, None, None
        self.since = self._listener.now()
        if self._transport is None or head is None:
            return
        close = response.close or head.closes or self._is_unread or self._is_last()
        body = response.body if head.method != "HEAD" else b""
        if len(body) <= SLICE:
            self._transport.write(_headed(response, close=close) + body)
            if close:
                self._hang_up()
            return
        self._transport.write(_headed(response, close=close))
        self._sending = LargeResponse(response, 0, close)
        self._callers.begin(self, response.body)
        self._push()

    def _push(self) -> None:
        """As much as the client fetches, and others are answered in between. Slices are copied: one that is stuck must
        not keep all of the answer."""
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
            self._hang_up()

    # ---- ends -------------------------------------------------------------------------------------------------------

    def sweep(self, now: float) -> None:
        """Let go of those who sleep, or take for ever to say what they want or to fetch what they wanted."""
        limits = self._callers.limits
        is_half = self._head is not None or self._buffer or self._is_held or self._sending is not None or self._is_over
        is_late = now - self.since > (limits.slow if is_half else limits.idle)
        if self._sending is not None:
            is_late = is_late or now - self._asked_at > limits.answer
        if is_late and (self.task is None or (self._pouring and self._is_held)):
            (self.cut if self._is_over else self.close)()

    def drain(self) -> None:
        """There is no word for it before an answer, which says `Connection: close`. Who asks nothing is closed, after
        all that was answered has gone; a question that was on its way by then has to be asked again."""
        self._is_leaving = True
        is_idle = not self._is_answering() and self._head is None and not self._buffer
        if self._transport is not None and is_idle:
            self._is_over = True
            self._transport.close()

    def _is_last(self) -> bool:
        return self._is_leaving or self._listener.is_stopping

    def _hang_up(self) -> None:
        """The last answer is written. A client that is still sending would lose it if we closed at once (RFC 9112,
        section 9.6): what it sends is thrown away for a moment."""
        self._is_over = True
        if self._transport is None:
            return
        if self._is_unread:
            asyncio.get_running_loop().call_later(LINGER, self.close)
        else:
            self._transport.close()

    def close(self) -> None:
        if self._transport is not None:
            is_stuck = self._is_held or self._sending is not None
            (self._transport.abort if is_stuck else self._transport.close)()

    def cut(self) -> None:
        transport, self._transport = self._transport, None
        self._let_go()
        if transport is not None:
            transport.abort()

    def _let_go(self) -> None:
        """Nobody is there any more. Binds go on; whatever was only to be read does not."""
        self._callers.leave(self)
        self._sending = None
        self._buffer.clear()
        if self.task is not None and (self._pouring or not self._is_trusted):
            self.task.add_done_callback(partial(_dispose, self._awaited))
            self.task.cancel()


def _dispose(awaited: Reply | Awaitable[Reply] | None, task: "asyncio.Task[None]") -> None:
    """A task that was cancelled before it began has not even looked at what it was to wait for."""
    if isinstance(awaited, Coroutine):
        awaited.close()


def _headed(response: Response, *, close: bool) -> bytes:
    begun = _begun(response.status, response.content_type)
    return f"{begun}Content-Length: {len(response.body)}\r\n{CLOSE if close else ''}\r\n".encode()


@lru_cache(64)
def _begun(status: int, content_type: str) -> str:
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {content_type}\r\n"
