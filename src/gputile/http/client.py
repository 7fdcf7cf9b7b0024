"""A small HTTP/1.1 client for one server: a limited pool of kept connections, direct or through a proxy.

Make a `ConnectionPool` inside the running loop; `request` returns a whole response, `open` a `ResponseStream`. Errors
are `NotSent`, `ConnectionBroken`, and TimeoutError after the request was sent. This module must not know the content of
requests or responses.

It exists because a general client (timers, streams and header objects for each request) cost a bind more than the
bind's own work. Only a request that changes nothing (GET, HEAD) is retried, once, when a kept connection turns out to
be dead. Redirects, cookies and compression are not supported.
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

IDLE = 30.0  # seconds; servers keep idle connections longer, so the pool rarely picks one that is about to be closed
SAFE_METHODS = ("GET", "HEAD")
PORTS = {"http": 80, "https": 443}


def header(name: str, value: str) -> bytes:
    """One header line. Raises `NotSent` for a value that could inject another header."""
    if not (value.isascii() and value.isprintable()):
        raise NotSent(f"header {name}: the value contains control or non-ASCII characters")
    return f"{name}: {value}\r\n".encode("ascii")


class ResponseStream:
    """A response whose body arrives in pieces: `async for piece in stream`. `close` it, read or not."""

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
        """The rest of the body."""
        return b"".join([piece async for piece in self])

    def close(self) -> None:
        """Before the end of the body, this closes the connection too."""
        if not self._is_over:
            self._is_over = True
            self._connection.close()


class ConnectionPool:
    """Connections to one origin. The newest idle connection is used first, so that the others can expire."""

    def __init__(
        self,
        url: str,
        *,
        connections: int = 100,
        server_name: str | None = None,
        proxy: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`server_name`: the name to expect in the server's certificate, where it is not the URL's host."""
        self._loop = asyncio.get_running_loop()
        self._origin, self._proxy = urlsplit(url), urlsplit(proxy) if proxy else None
        self._server_name = server_name or self._origin.hostname
        self._limit, self._clock = connections, clock
        self._idle: list[ClientConnection] = []  # the newest last
        self._all: set[ClientConnection] = set()
        self._slots_used = 0  # connections that are open or being opened
        self._waiting: deque[asyncio.Future[ClientConnection | None]] = deque()
        self._sweeper: asyncio.TimerHandle | None = None
        self._is_closed = False
        self.read_buffer = memoryview(bytearray(READ_BUFFER))
        authority = self._origin.netloc.rpartition("@")[2]
        self._prefix = self._origin.path.rstrip("/")
        self._common = header("Host", authority)
        if self._proxy is not None and self._origin.scheme == "http":
            self._prefix = f"http://{authority}{self._prefix}"
            self._common += _proxy_authorization(self._proxy)

    async def close(self) -> None:
        self._is_closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        connections = list(self._all)
        for connection in connections:
            connection.close()
        if connections:
            await asyncio.wait([connection.gone for connection in connections])

    @property
    def open_now(self) -> int:
        """The number of open connections."""
        return len(self._all)

    # ---- requests ---------------------------------------------------------------------------------------------------

    async def request(
        self, method: str, target: str, headers: bytes = b"", body: bytes = b"", *, tls: ssl.SSLContext | None = None,
        timeout: float,
    ) -> HttpAnswer:  # fmt: skip
        """Return a whole response. `headers`: lines made by `header`. `tls` is required for https, and may change."""
        deadline = self._loop.time() + timeout
        sent = self._encode(method, target, headers, body)
        connection = self._take_idle(tls) or await self._acquire(tls, deadline)
        try:
            return await connection.ask(method, sent, deadline)
        except ConnectionBroken as error:
            if not error.is_stale or method not in SAFE_METHODS:
                raise
        return await (await self._acquire(tls, deadline)).ask(method, sent, deadline)

    async def open(
        self, target: str, headers: bytes = b"", *, tls: ssl.SSLContext | None = None,
        connect: float, silence: float, timeout: float,
    ) -> ResponseStream:  # fmt: skip
        """GET a response in pieces. Timeouts in seconds: to connect, without a received byte, and in total."""
        now = self._loop.time()
        sent = self._encode("GET", target, headers, b"")
        connection = self._take_idle(tls) or await self._acquire(tls, now + connect)
        try:
            return ResponseStream(connection, await connection.begin("GET", sent, now + timeout, silence))
        except ConnectionBroken as error:
            if not error.is_stale:
                raise
        connection = await self._acquire(tls, self._loop.time() + connect)
        return ResponseStream(connection, await connection.begin("GET", sent, now + timeout, silence))

    def _encode(self, method: str, target: str, headers: bytes, body: bytes) -> bytes:
        """The whole request, so that it leaves in one write."""
        if not (target.isascii() and target.isprintable()) or " " in target:
            raise NotSent(f"{target!r}: invalid request target")
        line = f"{method} {self._prefix}{target} HTTP/1.1\r\n".encode("ascii")
        if not body and method in SAFE_METHODS:
            return b"%b%b%b\r\n" % (line, self._common, headers)
        return b"%b%b%bContent-Length: %d\r\n\r\n%b" % (line, self._common, headers, len(body), body)

    # ---- slots ------------------------------------------------------------------------------------------------------

    def _take_idle(self, tls: ssl.SSLContext | None) -> ClientConnection | None:
        """Return an idle connection. Connections made with other credentials, or idle for too long, are closed."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable and connection.tls is tls and self._clock() - connection.idle_since < IDLE:
                return connection
            connection.close()
        return None

    async def _acquire(self, tls: ssl.SSLContext | None, deadline: float) -> ClientConnection:
        """Return a new connection, or at the limit the first that becomes idle."""
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    if self._slots_used < self._limit:
                        self._slots_used += 1
                        return await self._open_connection(tls, deadline)
                    if (idle := self._take_idle(tls)) is not None:
                        return idle
                    released = await self._wait_for_slot()
                    if released is None:
                        return await self._open_connection(tls, deadline)
                    if released.is_usable and released.tls is tls:
                        return released
                    released.close()
        except TimeoutError as error:
            raise NotSent("timed out waiting for a connection") from error

    async def _wait_for_slot(self) -> ClientConnection | None:
        """Wait for a connection to be given back, or (None) for the slot of one that was closed."""
        waiter: asyncio.Future[ClientConnection | None] = self._loop.create_future()
        self._waiting.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():
                self._release(waiter.result())
            elif waiter in self._waiting:
                self._waiting.remove(waiter)
            raise

    def _release(self, connection: ClientConnection | None) -> None:
        """Pass a connection (None: a slot) to the next waiter. Without a waiter it becomes idle, or the slot free."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(connection)
                return
        if connection is None:
            self._slots_used -= 1
            return
        connection.idle_since = self._clock()
        self._idle.append(connection)
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(IDLE, self.sweep)

    def give_back(self, connection: ClientConnection) -> None:
        self._release(connection)

    def lost(self, connection: ClientConnection) -> None:
        if connection in self._all:
            self._all.remove(connection)
            if connection in self._idle:
                self._idle.remove(connection)
            self._release(None)

    def sweep(self) -> None:
        """Close connections that were idle for too long."""
        now = self._clock()
        while self._idle and now - self._idle[0].idle_since >= IDLE:
            self._idle.pop(0).close()
        wait = IDLE - (now - self._idle[0].idle_since) if self._idle else None
        self._sweeper = None if wait is None else self._loop.call_later(wait, self.sweep)

    # ---- connecting -------------------------------------------------------------------------------------------------

    async def _open_connection(self, tls: ssl.SSLContext | None, deadline: float) -> ClientConnection:
        """Connect, using a slot that was counted for it; the slot is released on failure."""
        connection = ClientConnection(self, self._loop, tls)
        try:
            if not self._is_closed:
                await self._connect(connection, deadline)
            if self._is_closed:
                raise NotSent("the connection pool is closed")
            if not connection.is_usable:
                raise NotSent("the server closed the connection immediately")
            self._all.add(connection)
        except (OSError, ValueError) as error:
            raise NotSent(_reason(error)) from error
        finally:
            if connection not in self._all:
                connection.close()
                self._release(None)
        return connection

    async def _connect(self, connection: ClientConnection, deadline: float) -> None:
        is_https = self._origin.scheme == "https"
        if is_https and connection.tls is None:
            raise NotSent("https: no CA given; pass an SSLContext")
        if self._proxy is not None:
            await self._connect_to(connection, self._proxy, connection.tls or True, None)
            if is_https and connection.tls is not None:
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
        """Open a CONNECT tunnel and speak TLS inside it; the proxy sees only host and port."""
        host, port = _address(self._origin)
        to = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        sent = f"CONNECT {to} HTTP/1.1\r\n".encode("ascii") + header("Host", to) + _proxy_authorization(proxy) + b"\r\n"
        try:
            status = await connection.tunnel(sent, deadline)
        except ConnectionBroken as error:
            raise NotSent(f"the proxy did not respond to CONNECT: {error}") from error
        if status >= 300:
            raise NotSent(f"the proxy rejected CONNECT with HTTP {status}")
        inner = await self._loop.start_tls(connection.transport, connection, tls, server_hostname=self._server_name)
        if inner is None:
            raise NotSent("the server closed the connection immediately")
        connection.connection_made(inner)


def _address(url: SplitResult) -> tuple[str, int]:
    if url.scheme not in PORTS or not url.hostname:
        raise NotSent(f"{url.scheme}://{url.hostname or ''}: not an http:// or https:// URL")
    return url.hostname, url.port or PORTS[url.scheme]


def _proxy_authorization(proxy: SplitResult) -> bytes:
    """The credentials in the proxy's URL as a header; empty without credentials."""
    if proxy.username is None:
        return b""
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return header("Proxy-Authorization", f"Basic {base64.b64encode(pair.encode()).decode()}")


def _reason(error: Exception) -> str:
    number = getattr(error, "errno", None)
    if number and number > 0 and not isinstance(error, ssl.SSLError):
        return os.strerror(number)
    return str(error) or type(error).__name__
