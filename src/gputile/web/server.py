"""A small HTTP server: what kube-scheduler, probes and curl send, and no more.

Room:  bytes in, one request at a time per connection, bytes out. It knows nothing of verbs. HTTP/2 is next door (`h2`).
Door:  `Listener(answer, ...)`, then `start`, `stop`. `answer` returns a `Response`, a `Streamed`, or something to
       wait for.

Ours, because what a general server does for every request (a task, streams, header objects) cost as much as deciding,
and kube-scheduler waits for each answer before it goes on. An answer that needs no waiting is written in the same turn
of the loop in which the last byte of its question came. Whatever is not plain HTTP/1.1 is refused, not guessed.
"""

import asyncio
import os
import ssl
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from http import HTTPStatus
from typing import cast

import msgspec

from gputile.model.errors import InputError
from gputile.web.bodies import Body, Malformed
from gputile.web.h2 import H2Connection
from gputile.web.messages import (
    IDLE,
    LANDING,
    LONGEST_HEAD,
    SLOW,
    Answer,
    Guest,
    Host,
    Reply,
    Request,
    Response,
    Streamed,
    common_name,
    parted,
)

ALPN = ("h2", "http/1.1")  # what is spoken over TLS, the better first
SWEEP = 10.0  # seconds between two looks for connections that are too slow
GOODBYE = 5.0  # seconds that requests have to end when we stop


class Head(msgspec.Struct, frozen=True):
    """A request without its body."""

    method: str
    path: str
    length: int | None  # of the body; None where it comes in chunks
    closes: bool  # after the answer
    asks_first: bool  # Expect: 100-continue
    query: str = ""
    fields: list[tuple[bytes, bytes]] = []
    knows_chunks: bool = True  # HTTP/1.0 does not


def read_head(head: bytes) -> Head:
    """The request line and those headers that matter here."""
    line, *lines = head.split(b"\r\n")
    parts = line.split(b" ")
    if len(parts) != 3 or not parts[2].startswith(b"HTTP/1."):
        raise Malformed(400, "this is no HTTP/1.1 request")
    found: dict[bytes, bytes] = {}
    fields: list[tuple[bytes, bytes]] = []
    for one in lines:
        name, colon, value = one.partition(b":")
        if not colon or not name or name != name.strip() or ((name := name.lower()) in found and name in SINGLE):
            raise Malformed(400, "a header cannot be understood")
        found[name] = value = value.strip()
        fields.append((name, value))
    path, query = parted(parts[1].decode("latin-1"))
    return Head(
        method=parts[0].decode("latin-1"),
        path=path,
        length=None if _is_chunked(found) else _length(found),
        closes=_closes(parts[2], found.get(b"connection", b"").lower()),
        asks_first=found.get(b"expect", b"").lower() == b"100-continue",
        query=query,
        fields=fields,
        knows_chunks=parts[2] != b"HTTP/1.0",
    )


SINGLE = (b"content-length", b"transfer-encoding")


def _length(found: dict[bytes, bytes]) -> int:
    said = found.get(b"content-length", b"0")
    if not (said.isdigit() and len(said) < 16):
        raise Malformed(400, "Content-Length is no number")
    return int(said)


def _is_chunked(found: dict[bytes, bytes]) -> bool:
    said = found.get(b"transfer-encoding", b"").lower()
    if said and (said != b"chunked" or b"content-length" in found):
        raise Malformed(400, "only a body of known length or in plain chunks is understood")
    return bool(said)


def _closes(version: bytes, connection: bytes) -> bool:
    return b"close" in connection or (version == b"HTTP/1.0" and b"keep-alive" not in connection)


class Connection(asyncio.BufferedProtocol):
    """One client. Its requests are answered in their order."""

    def __init__(self, listener: Host) -> None:
        self._listener = listener
        self._buffer = bytearray()
        self._head: Head | None = None
        self._body: Body | None = None
        self._transport: asyncio.Transport | None = None
        self._is_known, self._caller = False, ""
        self._is_held = False  # the loop has more to send than the client fetches
        self._is_leaving = self._is_over = False  # the next answer is the last; that was the last
        self._pouring = False  # the task brings an answer piece by piece
        self._room: asyncio.Future[None] | None = None  # what it waits for while we are held
        self.since = listener.now()  # when the last thing happened that counts
        self.task: asyncio.Task[None] | None = None

    # ---- what the loop calls ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        certificate = transport.get_extra_info("peercert")
        self._is_known, self._caller = bool(certificate), common_name(certificate)
        self._listener.welcome(self, "http/1.1")

    def connection_lost(self, wrong: Exception | None) -> None:
        """What is being worked on goes on: a bind that was asked for is a bind. Nobody needs to be told any more."""
        self._transport = None
        if self._pouring and self.task is not None:
            self.task.cancel()
        self._listener.forget(self)

    def get_buffer(self, hint: int) -> memoryview:
        return self._listener.landing

    def buffer_updated(self, count: int) -> None:
        self._buffer += self._listener.landing[:count]
        if self.task is None:
            self._work()
        elif len(self._buffer) > LONGEST_HEAD and self._transport is not None:
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
        if self._transport is not None:
            self._transport.resume_reading()
            if self.task is None:
                self._work()

    # ---- one request after the other --------------------------------------------------------------------------------

    def _work(self) -> None:
        """Answer all that is here, until something has to be waited for."""
        try:
            while self._is_free() and (request := self._next()) is not None:
                answer = self._listener.answer(request)
                if isinstance(answer, Response):
                    self._send(answer)
                else:
                    later = self._pour(answer) if isinstance(answer, Streamed) else self._wait_for(answer)
                    self.task = asyncio.ensure_future(later)
                    self._listener.work(self.task)
        except Malformed as wrong:
            self._head = self._head or Head("GET", "/", 0, True, False)
            self._send(Response(str(wrong).encode(), wrong.status, "text/plain", close=True))

    def _is_free(self) -> bool:
        return self._transport is not None and self.task is None and not self._is_held and not self._is_over

    def _next(self) -> Request | None:
        """The next whole request."""
        if self._head is None and not self._begin():
            return None
        assert self._head is not None
        assert self._body is not None
        if not self._body.take(self._buffer):
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
        )

    def _begin(self) -> bool:
        while self._buffer.startswith(b"\r\n"):  # some clients end a body with one too many
            del self._buffer[:2]
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > LONGEST_HEAD:
                raise Malformed(431, "the request's head is too long")
            return False
        self.since = self._listener.now()
        self._head = read_head(bytes(self._buffer[:end]))
        del self._buffer[: end + 4]
        self._body = Body(self._head.length, self._listener.limit)
        if self._head.asks_first and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return True

    async def _wait_for(self, answer: Awaitable[Reply]) -> None:
        response: Reply | None = None
        try:
            response = await answer
        finally:
            if not isinstance(response, Streamed):
                self.task = None
            if response is None:  # a bug, or we are stopping
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
                    await self._fetched()
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

    async def _fetched(self) -> None:
        while self._is_held:
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    def _go_on(self) -> None:
        if self._transport is not None and not self._is_held:
            self._transport.resume_reading()
        self._work()

    def _send(self, response: Response) -> None:
        head, self._head, self._body = self._head, None, None
        self.since = self._listener.now()
        if self._transport is None or head is None:
            return
        close = response.close or head.closes or self._is_last()
        self._transport.write(_written(response, close=close, with_body=head.method != "HEAD"))
        if close:
            self._is_over = True
            self._transport.close()

    # ---- ends -------------------------------------------------------------------------------------------------------

    def sweep(self, now: float) -> None:
        """Let go of those who sleep, or take for ever to say what they want."""
        patience = SLOW if self._head is not None or self._buffer or self._is_held else IDLE
        if (self.task is None or (self._pouring and self._is_held)) and now - self.since > patience:
            self.close()

    def see_off(self) -> None:
        """There is no word for it before an answer, which says `Connection: close`. Who asks nothing is closed, after
        all that was answered has gone; a question that was on its way by then has to be asked again."""
        self._is_leaving = True
        if self._transport is not None and self.task is None and self._head is None and not self._buffer:
            self._transport.close()

    def _is_last(self) -> bool:
        return self._is_leaving or self._listener.is_stopping

    def close(self) -> None:
        if self._transport is not None:
            (self._transport.abort if self._is_held else self._transport.close)()


def _written(response: Response, *, close: bool, with_body: bool) -> bytes:
    begun = _begun(response.status, response.content_type)
    head = f"{begun}Content-Length: {len(response.body)}\r\n{CLOSE if close else ''}\r\n"
    return head.encode() + response.body if with_body else head.encode()


def _begun(status: int, content_type: str) -> str:
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {content_type}\r\n"


CLOSE = "Connection: close\r\n"


class Door(asyncio.BufferedProtocol):
    """Opened by a TLS handshake, which has chosen what is spoken behind it (RFC 7301)."""

    def __init__(self, listener: "Listener") -> None:
        self._listener = listener

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        chosen = transport.get_extra_info("ssl_object").selected_alpn_protocol()
        behind = H2Connection(self._listener) if chosen == "h2" else Connection(self._listener)
        transport.set_protocol(behind)
        behind.connection_made(transport)


class Listener:
    """A socket, and all who came."""

    def __init__(
        self,
        answer: Answer,
        limit: int,
        came: Callable[[str], None] = lambda protocol: None,
        *,
        setting: str = "listen",
    ) -> None:
        """`limit`: the longest body, in bytes. `came` hears of every connection what it speaks. `setting`: the name of
        that which says where to listen, for people."""
        self.answer, self.limit, self._came, self._setting = answer, limit, came, setting
        self.connections: set[Guest] = set()
        self.is_stopping = False
        self._working: set[asyncio.Task[None]] = set()
        self.landing = memoryview(bytearray(LANDING))
        """Where bytes arrive, whoever sent them: they are taken from here before the loop reads again."""
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def welcome(self, guest: Guest, protocol: str) -> None:
        self.connections.add(guest)
        self._came(protocol)

    def forget(self, guest: Guest) -> None:
        self.connections.discard(guest)

    def work(self, answering: asyncio.Task[None]) -> None:
        """Kept here, for a client may go before it has its answer."""
        self._working.add(answering)
        answering.add_done_callback(self._working.discard)

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None) -> int:
        """Listen; the port, which matters if 0 was asked for. `InputError` where that cannot be."""
        loop = asyncio.get_running_loop()
        first: Callable[[], asyncio.BaseProtocol] = (lambda: Connection(self)) if tls is None else (lambda: Door(self))
        try:
            self._server = await loop.create_server(first, host, port, ssl=tls, backlog=1024)
        except OSError as wrong:
            why = os.strerror(wrong.errno) if wrong.errno else str(wrong)
            raise InputError(f"cannot listen on {host}:{port}: {why}; set another `{self._setting}`") from wrong
        self._sweeper = asyncio.create_task(self._sweep())
        return int(self._server.sockets[0].getsockname()[1])

    def see_off(self) -> None:
        """Whoever is connected is to ask its next question over another connection."""
        for connection in list(self.connections):
            connection.see_off()

    async def stop(self) -> None:
        """Answer what is being asked, then close."""
        self.is_stopping = True
        if self._server is None or self._sweeper is None:
            return
        self._server.close()
        self._sweeper.cancel()
        self.see_off()
        if self._working:
            await asyncio.wait(self._working, timeout=GOODBYE)
        for connection in list(self.connections):
            connection.close()
        await asyncio.gather(self._sweeper, return_exceptions=True)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP)
            for connection in list(self.connections):
                connection.sweep(self.now())
