"""A small HTTP/1.1 client: requests to one server, over connections that are kept.

Room:  a limited pool of connections to one origin, straight or through a proxy. It knows nothing of what is asked.
Door:  `ConnectionPool(url, ...)`, made inside the running loop; `request` for a whole answer, `open` for one that
       comes in pieces; `close` it. Errors: `NotSent`, `ConnectionBroken`, and TimeoutError once the request has left.

Ours, because a general client (a task's worth of timers, streams and header objects for each request) cost a bind more
than the bind's own work. A request that is repeated is a second request: only what asks and changes nothing is tried
again, once, when a kept connection turns out to be dead. Redirects, cookies and compression are not spoken.
"""

import asyncio
import base64
import os
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import Self
from urllib.parse import SplitResult, unquote, urlsplit

from gputile.http.connection import ClientConnection, ConnectionBroken, HttpAnswer, NotSent
from gputile.http.h1_response import ResponseHead
from gputile.http.messages import READ_BUFFER

__all__ = ["ConnectionBroken", "ConnectionPool", "HttpAnswer", "NotSent", "ResponseStream", "header"]

IDLE = 30.0  # seconds; servers keep them for longer, so that we rarely choose one that they are about to close
HARMLESS = ("GET", "HEAD")
PORTS = {"http": 80, "https": 443}


def header(name: str, value: str) -> bytes:
    """One line of a head. What would break out of it is never sent."""
    if not (value.isascii() and value.isprintable()):
        raise NotSent(f"the value of {name} cannot be written into a header")
    return f"{name}: {value}\r\n".encode("ascii")


class ResponseStream:
    """An answer whose body comes in pieces: `async for piece in stream`. `close` it, read or not."""

    def __init__(self, connection: ClientConnection, head: ResponseHead) -> None:
        self.status, self.headers = head.status, head.headers
        self._connection = connection
        self._is_over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        piece = b"" if self._is_over else await self._connection.piece()
        if not piece:
            self._is_over = True
            raise StopAsyncIteration
        return piece

    async def read(self) -> bytes:
        """All the rest."""
        return b"".join([piece async for piece in self])

    def close(self) -> None:
        """Where the end has not come yet, the connection goes with it."""
        if not self._is_over:
            self._is_over = True
            self._connection.close()


class ConnectionPool:
    """Connections to one origin. Of those that are idle the newest is chosen, so that the others can be let go."""

    def __init__(
        self,
        url: str,
        *,
        connections: int = 100,
        server_name: str | None = None,
        proxy: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`server_name`: whom to expect in the certificate, where it is not the URL's host."""
        self._loop = asyncio.get_running_loop()
        self._origin, self._proxy = urlsplit(url), urlsplit(proxy) if proxy else None
        self._server_name = server_name or self._origin.hostname
        self._limit, self._clock = connections, clock
        self._idle: list[ClientConnection] = []  # the newest last
        self._all: set[ClientConnection] = set()
        self._taken = 0  # places: connections that are there, or being made
        self._waiting: deque[asyncio.Future[ClientConnection | None]] = deque()
        self._sweeper: asyncio.TimerHandle | None = None
        self._is_closed = False
        self.read_buffer = memoryview(bytearray(READ_BUFFER))
        authority = self._origin.netloc.rpartition("@")[2]
        self._prefix = self._origin.path.rstrip("/")
        self._common = header("Host", authority)
        if self._proxy is not None and self._origin.scheme == "http":
            self._prefix = f"http://{authority}{self._prefix}"
            self._common += _introduction(self._proxy)

    async def close(self) -> None:
        self._is_closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        there = list(self._all)
        for connection in there:
            connection.close()
        if there:
            await asyncio.wait([connection.gone for connection in there])

    @property
    def open_now(self) -> int:
        """Connections that are there."""
        return len(self._all)

    # ---- asking -----------------------------------------------------------------------------------------------------

    async def request(
        self, method: str, target: str, headers: bytes = b"", body: bytes = b"", *, tls: ssl.SSLContext | None = None,
        timeout: float,
    ) -> HttpAnswer:  # fmt: skip
        """A whole answer. `headers`: lines made by `header`. `tls` must be given for https, and may change."""
        deadline = self._loop.time() + timeout
        sent = self._written(method, target, headers, body)
        connection = self._kept(tls) or await self._joined(tls, deadline)
        try:
            return await connection.ask(method, sent, deadline)
        except ConnectionBroken as broken:
            if not broken.is_stale or method not in HARMLESS:
                raise
        return await (await self._joined(tls, deadline)).ask(method, sent, deadline)

    async def open(
        self, target: str, headers: bytes = b"", *, tls: ssl.SSLContext | None = None,
        connect: float, silence: float, timeout: float,
    ) -> ResponseStream:  # fmt: skip
        """GET an answer that comes in pieces. Seconds: for a connection; without a byte; for all of it."""
        now = self._loop.time()
        sent = self._written("GET", target, headers, b"")
        connection = self._kept(tls) or await self._joined(tls, now + connect)
        try:
            return ResponseStream(connection, await connection.begin("GET", sent, now + timeout, silence))
        except ConnectionBroken as broken:
            if not broken.is_stale:
                raise
        connection = await self._joined(tls, self._loop.time() + connect)
        return ResponseStream(connection, await connection.begin("GET", sent, now + timeout, silence))

    def _written(self, method: str, target: str, headers: bytes, body: bytes) -> bytes:
        """All of it, so that it leaves in one piece."""
        if not (target.isascii() and target.isprintable()) or " " in target:
            raise NotSent(f"{target!r} cannot be asked for: it is no address")
        line = f"{method} {self._prefix}{target} HTTP/1.1\r\n".encode("ascii")
        if not body and method in HARMLESS:
            return b"%b%b%b\r\n" % (line, self._common, headers)
        return b"%b%b%bContent-Length: %d\r\n\r\n%b" % (line, self._common, headers, len(body), body)

    # ---- places -----------------------------------------------------------------------------------------------------

    def _kept(self, tls: ssl.SSLContext | None) -> ClientConnection | None:
        """An idle connection. One that was made with other credentials, or slept too long, is let go instead."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable and connection.tls is tls and self._clock() - connection.idle_since < IDLE:
                return connection
            connection.close()
        return None

    async def _joined(self, tls: ssl.SSLContext | None, deadline: float) -> ClientConnection:
        """A new connection, or where there are too many the first that comes back."""
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    if self._taken < self._limit:
                        self._taken += 1
                        return await self._connected(tls, deadline)
                    if (kept := self._kept(tls)) is not None:
                        return kept
                    given = await self._place()
                    if given is None:
                        return await self._connected(tls, deadline)
                    if given.is_usable and given.tls is tls:
                        return given
                    given.close()
        except TimeoutError as wrong:
            raise NotSent("no connection in time") from wrong

    async def _place(self) -> ClientConnection | None:
        """Wait for a connection that comes back, or (None) for the place of one that has gone."""
        waiter: asyncio.Future[ClientConnection | None] = self._loop.create_future()
        self._waiting.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():
                self._pass_on(waiter.result())
            elif waiter in self._waiting:
                self._waiting.remove(waiter)
            raise

    def _pass_on(self, connection: ClientConnection | None) -> None:
        """To the next who waits. Nobody: it is idle, or its place is free."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(connection)
                return
        if connection is None:
            self._taken -= 1
            return
        connection.idle_since = self._clock()
        self._idle.append(connection)
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(IDLE, self.sweep)

    def give_back(self, connection: ClientConnection) -> None:
        self._pass_on(connection)

    def lost(self, connection: ClientConnection) -> None:
        if connection in self._all:
            self._all.remove(connection)
            if connection in self._idle:
                self._idle.remove(connection)
            self._pass_on(None)

    def sweep(self) -> None:
        """Let go of those that were idle for too long."""
        now = self._clock()
        while self._idle and now - self._idle[0].idle_since >= IDLE:
            self._idle.pop(0).close()
        wait = IDLE - (now - self._idle[0].idle_since) if self._idle else None
        self._sweeper = None if wait is None else self._loop.call_later(wait, self.sweep)

    # ---- connecting -------------------------------------------------------------------------------------------------

    async def _connected(self, tls: ssl.SSLContext | None, deadline: float) -> ClientConnection:
        """In a place that was taken for it, and is given up if nothing comes of it."""
        connection = ClientConnection(self, self._loop, tls)
        try:
            if not self._is_closed:
                await self._connect(connection, deadline)
            if self._is_closed:
                raise NotSent("we are closing")
            if not connection.is_usable:
                raise NotSent("the connection was closed as soon as it was there")
            self._all.add(connection)
        except (OSError, ValueError) as wrong:
            raise NotSent(_why(wrong)) from wrong
        finally:
            if connection not in self._all:
                connection.close()
                self._pass_on(None)
        return connection

    async def _connect(self, connection: ClientConnection, deadline: float) -> None:
        is_secret = self._origin.scheme == "https"
        if is_secret and connection.tls is None:
            raise NotSent("https needs to know whom to trust")
        if self._proxy is not None:
            await self._connect_to(connection, self._proxy, connection.tls or True, None)
            if is_secret and connection.tls is not None:
                await self._tunnel(connection, self._proxy, connection.tls, deadline)
        else:
            await self._connect_to(connection, self._origin, connection.tls, self._server_name)

    async def _connect_to(
        self, connection: ClientConnection, url: SplitResult, tls: ssl.SSLContext | bool | None, name: str | None
    ) -> None:
        host, port = _address(url)
        if url.scheme == "https":
            await self._loop.create_connection(lambda: connection, host, port, ssl=tls, server_hostname=name or host)
        else:
            await self._loop.create_connection(lambda: connection, host, port)

    async def _tunnel(
        self, connection: ClientConnection, proxy: SplitResult, tls: ssl.SSLContext, deadline: float
    ) -> None:
        """Through the proxy, which sees no more than where we go."""
        host, port = _address(self._origin)
        to = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        sent = f"CONNECT {to} HTTP/1.1\r\n".encode("ascii") + header("Host", to) + _introduction(proxy) + b"\r\n"
        try:
            status = await connection.tunnel(sent, deadline)
        except ConnectionBroken as broken:
            raise NotSent(f"the proxy gave no answer: {broken}") from broken
        if status >= 300:
            raise NotSent(f"the proxy says HTTP {status}")
        inner = await self._loop.start_tls(connection.transport, connection, tls, server_hostname=self._server_name)
        if inner is None:
            raise NotSent("the connection was closed as soon as it was there")
        connection.connection_made(inner)


def _address(url: SplitResult) -> tuple[str, int]:
    if url.scheme not in PORTS or not url.hostname:
        raise NotSent(f"{url.scheme}://{url.hostname or ''} is no http address")
    return url.hostname, url.port or PORTS[url.scheme]


def _introduction(proxy: SplitResult) -> bytes:
    """Who we are to the proxy, where its URL says so."""
    if proxy.username is None:
        return b""
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return header("Proxy-Authorization", f"Basic {base64.b64encode(pair.encode()).decode()}")


def _why(wrong: Exception) -> str:
    number = getattr(wrong, "errno", None)
    if number and number > 0 and not isinstance(wrong, ssl.SSLError):
        return os.strerror(number)
    return str(wrong) or type(wrong).__name__
