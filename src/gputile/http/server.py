"""A small HTTP server for kube-scheduler, probes, Prometheus and curl.

It owns the listening socket, all connections and the limits of each class of callers. `h1_server` speaks HTTP/1.1,
`limits` counts. This module must not know the content of requests.

It exists because a general server (a task, streams and header objects for each request) cost as much as the scheduling
decision, and kube-scheduler waits for each response before it continues.

    arriving --trusted certificate----------> known
       +-------first request: a probe-------> probing
       +-------first request: anything else-> strangers (callers without a trusted certificate)

Each class has its own limits: slow readers of /metrics, and clients that never send a request, cannot use up the
connections of the kubelet's probes; neither can use up those of callers with a trusted certificate.
"""

import asyncio
import logging
import os
import ssl
from collections.abc import Callable, Iterable

import msgspec

from gputile.http.acceptor import Acceptor
from gputile.http.h1_server import H1Connection
from gputile.http.limits import MIB, CallerClass, CallerLimits
from gputile.http.messages import (
    ARRIVING,
    IDLE,
    LONGEST_HEAD,
    READ_BUFFER,
    SHORT_HEAD,
    SLOW,
    Answer,
    Certificate,
    ServerConnection,
)
from gputile.model.errors import InputError

log = logging.getLogger(__name__)

MOST_BODIES = 4  # times the limit of one body, for all incomplete bodies of a class
SWEEP = 10.0  # seconds between two checks for slow connections
GRACE = 5.0  # seconds that requests have to finish when the server stops

__all__ = ["H1Connection", "Listener", "ListenerLimits"]


class ListenerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of each class: connections, and bytes of unread responses."""

    arriving: int = 128
    probing: int = 32
    strangers: int = 64
    known: int = 512  # also if callers are not distinguished by a certificate
    answers: int = 32 * MIB  # to strangers
    known_answers: int = 256 * MIB
    head: int = LONGEST_HEAD  # bytes, of known callers


class Listener:
    """The server: `start` listens, `answer` is called for each request, `stop` finishes requests and closes."""

    def __init__(
        self,
        answer: Answer,
        limit: int,
        came: Callable[[str], None] = lambda protocol: None,
        *,
        setting: str = "listen",
        probes: Iterable[str] = (),
        trusts: Callable[[Certificate], bool] | None = None,
        bounds: ListenerLimits | None = None,
    ) -> None:
        """`limit`: bytes of the longest body. `came` is called with the protocol of each new connection. `setting`: the
        name of the setting with the address, for error messages. `probes`: paths with connections of their own.
        `trusts`: whether a client's certificate (None: it sent none) makes it a known caller; other callers then have
        one request at a time, without a body. Without `trusts` the limits of known callers hold for all callers."""
        self.answer, self.limit, self._on_connection, self._setting = answer, limit, came, setting
        self._probes, self._trusts = frozenset(probes), trusts
        self._make_classes(bounds or ListenerLimits())
        self.connections: set[ServerConnection] = set()
        self.is_stopping = False
        self._working: set[asyncio.Task[None]] = set()
        self.read_buffer = memoryview(bytearray(READ_BUFFER))
        """The buffer that all connections read into: each copies its bytes before the loop reads again."""
        self._acceptor = Acceptor(self.arriving, self._protocol)
        self._sweeper: asyncio.Task[None] | None = None

    def _make_classes(self, bounds: ListenerLimits) -> None:
        """Without `trusts`, all callers other than probes are in the class `strangers`."""
        is_open, most = self._trusts is None, MOST_BODIES * self.limit
        known = CallerLimits(
            connections=bounds.known, head=bounds.head, bodies=most, answers=bounds.known_answers, idle=IDLE, slow=SLOW
        )
        strange = CallerLimits(
            connections=bounds.strangers,
            head=min(SHORT_HEAD, bounds.head),
            answers=bounds.answers,
            idle=SLOW,
            slow=ARRIVING,
            answer=SLOW,
        )
        few = known if is_open else strange
        first = msgspec.structs.replace(few, connections=bounds.arriving, idle=ARRIVING, slow=ARRIVING)
        self.known = CallerClass(known)
        self.strangers = CallerClass(msgspec.structs.replace(known, answers=bounds.answers) if is_open else strange)
        self.probing = CallerClass(msgspec.structs.replace(few, connections=bounds.probing))
        self.arriving = CallerClass(first)

    # ---- ServerHooks ------------------------------------------------------------------------------------------------

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def trusts(self, certificate: Certificate) -> bool:
        return self._trusts is None or self._trusts(certificate)

    def register(self, connection: ServerConnection, protocol: str, *, trusted: bool) -> CallerClass:
        self.connections.add(connection)
        self._on_connection(protocol)
        return self.known if trusted and self._trusts is not None else self.arriving

    def classed(self, connection: ServerConnection, was: CallerClass, path: str) -> CallerClass:
        if was is self.known:
            return was
        callers = self.probing if path in self._probes else self.strangers
        if callers is not was:
            kept = connection.kept
            was.leave(connection)
            callers.enter(connection)
            callers.keep(connection, kept)
        return callers

    def forget(self, connection: ServerConnection) -> None:
        self.connections.discard(connection)

    def work(self, answering: asyncio.Task[None]) -> None:
        """The task is kept here because the client may disconnect before its response is ready."""
        self._working.add(answering)
        answering.add_done_callback(self._working.discard)

    # ---- life -------------------------------------------------------------------------------------------------------

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None) -> int:
        """Listen and return the port, which matters if 0 was given. Raises `InputError`."""
        self._acceptor.tls = tls
        try:
            bound_port = await self._acceptor.start(host, port)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise InputError(f"cannot listen on {host}:{port}: {reason}; set another `{self._setting}`") from error
        self._sweeper = asyncio.create_task(self._sweep())
        return bound_port

    def renew(self, tls: ssl.SSLContext | None) -> None:
        """Use a rotated certificate and CA for new connections."""
        self._acceptor.tls = tls

    def _protocol(self, opened: Callable[[], None]) -> asyncio.BaseProtocol:
        return H1Connection(self, opened)

    def drain(self) -> None:
        """Make every client open another connection for its next request."""
        for connection in list(self.connections):
            connection.drain()

    async def stop(self) -> None:
        """Finish the requests under way, then close all connections."""
        self.is_stopping = True
        if self._sweeper is None:
            return
        self._sweeper.cancel()
        self.drain()
        await self._acceptor.stop()
        if self._working:
            await asyncio.wait(self._working, timeout=GRACE)
        for connection in list(self.connections):
            connection.close()
        await asyncio.gather(self._sweeper, return_exceptions=True)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP)
            self.sweep()

    def sweep(self) -> None:
        """Close slow and idle connections, and log how many were evicted because of a limit."""
        for connection in list(self.connections):
            connection.sweep(self.now())
        classes = {"arriving": self.arriving, "probes": self.probing, "others": self.strangers, "known": self.known}
        evicted = ", ".join(f"{callers.evicted} {name}" for name, callers in classes.items() if callers.evicted)
        if evicted:
            log.warning("connections evicted: too many are open, or too much is unread: %s", evicted)
        for callers in classes.values():
            callers.evicted = 0


def host_and_port(listen: str) -> tuple[str, int]:
    """Split the HOST:PORT of a setting."""
    host, _, port = listen.rpartition(":")
    return host.strip("[]"), int(port)
