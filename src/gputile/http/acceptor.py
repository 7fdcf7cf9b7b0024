"""Accepts new connections from the listening sockets and completes their TLS handshakes.

The number of pending handshakes and their duration are bounded: a client that is too slow, or that exceeds the limit,
is closed before any state is kept for it. This module must not know the protocol that is spoken after the handshake.

asyncio's own `create_server` reports a connection only after its handshake. By then a thousand clients that never send
a ClientHello may have used up the file descriptors.
"""

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from gputile.http.limits import CallerClass
from gputile.http.messages import ARRIVING

BACKLOG = 1024
ACCEPT_PAUSE = 0.1  # seconds without accepting, when there are no file descriptors left
SHUTDOWN = 5.0  # seconds for the TLS close_notify of the client
SEND_BUFFER = 2**18  # bytes of an unread response that the kernel buffers; its default would be megabytes
DESCRIPTORS = 8192  # files and sockets that this process wants to be able to open
CLIENT_LEFT = (errno.ECONNABORTED, errno.EAGAIN, errno.EINTR)  # the client disconnected before the accept

Protocol = Callable[[Callable[[], None]], asyncio.BaseProtocol]
"""Makes the protocol that is spoken after the handshake; the protocol calls its argument when the handshake is done."""


class PendingHandshake:
    """A connection whose TLS handshake is not done."""

    def __init__(self, client: socket.socket, address: str, since: float) -> None:
        self._client, self.address, self.since, self.kept = client, address, since, 0
        self.is_served = False

    def cut(self) -> None:
        """Shut the socket down; the handshake fails by that and closes it."""
        with suppress(OSError):
            self._client.shutdown(socket.SHUT_RDWR)


class Acceptor:
    """The listening sockets of one server, and the connections whose handshake is pending."""

    def __init__(self, arriving: CallerClass, protocol: Protocol) -> None:
        """`arriving`: the class of connections whose handshake is not done. A new `tls` is used by the next
        handshake."""
        self._arriving, self._protocol = arriving, protocol
        self._sockets: list[socket.socket] = []
        self._handshakes: set[asyncio.Task[None]] = set()
        self._pauses: set[asyncio.TimerHandle] = set()
        self.tls: ssl.SSLContext | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen on all addresses of `host` and return the port, which matters if 0 was given. Raises `OSError`."""
        loop = asyncio.get_running_loop()
        want_descriptors(DESCRIPTORS)
        addresses = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, kind, number, _, address in dict.fromkeys(addresses):
                self._sockets.append(_listening(family, kind, number, address))
        except OSError:
            self._close()
            raise
        for listening in self._sockets:
            loop.add_reader(listening, self._accept, loop, listening)
        return int(self._sockets[0].getsockname()[1])

    async def stop(self) -> None:
        self._close()
        handshakes = list(self._handshakes)
        for task in handshakes:
            task.cancel()
        await asyncio.gather(*handshakes, return_exceptions=True)

    def _close(self) -> None:
        loop = asyncio.get_running_loop()
        for pause in self._pauses:
            pause.cancel()
        for listening in self._sockets:
            loop.remove_reader(listening)
            listening.close()
        self._sockets = []

    def _accept(self, loop: asyncio.AbstractEventLoop, listening: socket.socket) -> None:
        """Accept one connection per turn of the loop. An error with one connection never stops the next."""
        try:
            client, address = listening.accept()
        except OSError as error:
            if error.errno not in CLIENT_LEFT:
                self._pause(loop, listening)
            return
        task = loop.create_task(self._handshake(loop, client, str(address[0])))
        self._handshakes.add(task)
        task.add_done_callback(partial(self._handshake_done, client))

    def _pause(self, loop: asyncio.AbstractEventLoop, listening: socket.socket) -> None:
        """Without free file descriptors, clients stay in the backlog; to accept again at once would be a busy loop."""
        loop.remove_reader(listening)
        pause = loop.call_later(ACCEPT_PAUSE, loop.add_reader, listening, self._accept, loop, listening)
        self._pauses = {pause for pause in self._pauses if pause.when() > loop.time()} | {pause}

    def _handshake_done(self, client: socket.socket, task: "asyncio.Task[None]") -> None:
        self._handshakes.discard(task)
        if task.cancelled():  # the server is stopping; the task may not even have started
            client.close()

    async def _handshake(self, loop: asyncio.AbstractEventLoop, client: socket.socket, address: str) -> None:
        pending = PendingHandshake(client, address, loop.time())
        self._arriving.enter(pending)
        timeouts = {"ssl_handshake_timeout": ARRIVING, "ssl_shutdown_timeout": SHUTDOWN} if self.tls is not None else {}

        def protocol() -> asyncio.BaseProtocol:
            return self._protocol(lambda: self._arriving.leave(pending))

        try:
            await loop.connect_accepted_socket(protocol, client, ssl=self.tls, **timeouts)
        except (OSError, TimeoutError):  # the handshake failed or timed out; ssl.SSLError is an OSError
            client.close()
        finally:
            self._arriving.leave(pending)


def _listening(family: int, kind: int, number: int, address: tuple[str | int | bytes, ...]) -> socket.socket:
    listening = socket.socket(family, kind, number)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # accepted sockets inherit it
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        raise OSError(error.errno, os.strerror(error.errno or 0)) from error
    return listening


def want_descriptors(count: int) -> None:
    """Raise the soft limit of open files to `count`, as far as permitted: every connection of every class needs one."""
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
