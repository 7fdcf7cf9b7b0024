"""New connections: taken from the listening sockets, and brought through their handshake.

Room:  sockets and handshakes, both bounded: whoever takes too long, or is one too many, is gone before anything of it
       is kept. What is spoken behind the handshake is not known here.
Door:  `Acceptor.start`, `stop`. `tls` may change; the next handshake is made with it.

The loop's own `create_server` does not say that somebody is there until the handshake is done, and by then a thousand
others that never say hello may have used up our file descriptors.
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
BREATH = 0.1  # seconds without new connections, when there are no file descriptors left
SHUTDOWN = 5.0  # seconds for the other side to say goodbye in TLS
SEND_BUFFER = 2**18  # bytes that the kernel keeps of an answer that is not read; by itself it would take megabytes
DESCRIPTORS = 8192  # files and sockets that we want to be able to have open
GONE = (errno.ECONNABORTED, errno.EAGAIN, errno.EINTR)  # the other side did not wait

Protocol = Callable[[Callable[[], None]], asyncio.BaseProtocol]
"""What is spoken behind the handshake; to be told by it that the handshake is done."""


class PendingHandshake:
    """Somebody whose handshake is not done."""

    def __init__(self, line: socket.socket, address: str, since: float) -> None:
        self._line, self.address, self.since, self.kept = line, address, since, 0
        self.is_served = False

    def cut(self) -> None:
        """Its handshake ends by this, and closes what there is to close."""
        with suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)


class Acceptor:
    """See the module's text."""

    def __init__(self, arriving: CallerClass, protocol: Protocol) -> None:
        """`arriving`: the class of those whose handshake is not done."""
        self._arriving, self._protocol = arriving, protocol
        self._sockets: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._greeting: set[asyncio.Task[None]] = set()
        self.tls: ssl.SSLContext | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen on all addresses of `host`; the port, which matters if 0 was asked for. `OSError`."""
        loop = asyncio.get_running_loop()
        want_descriptors(DESCRIPTORS)
        found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, kind, number, _, address in dict.fromkeys(found):
                self._sockets.append(_listening(family, kind, number, address))
        except OSError:
            self._close()
            raise
        self._accepting = [asyncio.create_task(self._accept(one)) for one in self._sockets]
        return int(self._sockets[0].getsockname()[1])

    async def stop(self) -> None:
        tasks = [*self._accepting, *self._greeting]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._close()

    def _close(self) -> None:
        for one in self._sockets:
            one.close()
        self._sockets = []

    async def _accept(self, listening: socket.socket) -> None:
        """One in each turn of the loop. Whatever is wrong with one of them, the next is taken."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                line, address = await loop.sock_accept(listening)
            except OSError as wrong:
                await self._rest(wrong)
                continue
            task = asyncio.ensure_future(self._greet(line, str(address[0])))
            self._greeting.add(task)
            task.add_done_callback(partial(self._greeted, line))

    async def _rest(self, wrong: OSError) -> None:
        """Where there are no files left, whoever waits outside goes on waiting; to ask at once would be a busy loop."""
        await asyncio.sleep(0.0 if wrong.errno in GONE else BREATH)

    def _greeted(self, line: socket.socket, task: "asyncio.Task[None]") -> None:
        self._greeting.discard(task)
        if task.cancelled():  # we are stopping; it may not even have begun
            line.close()

    async def _greet(self, line: socket.socket, address: str) -> None:
        loop = asyncio.get_running_loop()
        arrival = PendingHandshake(line, address, loop.time())
        self._arriving.enter(arrival)
        times = {"ssl_handshake_timeout": ARRIVING, "ssl_shutdown_timeout": SHUTDOWN} if self.tls is not None else {}

        def made() -> asyncio.BaseProtocol:
            return self._protocol(lambda: self._arriving.leave(arrival))

        try:
            line.setblocking(False)
            line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            await loop.connect_accepted_socket(made, line, ssl=self.tls, **times)
        except (OSError, TimeoutError):  # no handshake, or one that failed; ssl.SSLError is an OSError
            line.close()
        finally:
            self._arriving.leave(arrival)


def _listening(family: int, kind: int, number: int, address: tuple[str | int | bytes, ...]) -> socket.socket:
    made = socket.socket(family, kind, number)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
        made.listen(BACKLOG)
        made.setblocking(False)
    except OSError as wrong:
        made.close()
        raise OSError(wrong.errno, os.strerror(wrong.errno or 0)) from wrong
    return made


def want_descriptors(count: int) -> None:
    """Raise our own limit as far as we may, up to so many: every place of every class has to have one."""
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
