"""A small HTTP server: what kube-scheduler, probes and curl send, and no more.

Room:  a socket, all who came, and what each class of them may have. It knows nothing of verbs; `h1` and `h2` have the
       bytes, `callers` the bounds.
Door:  `Listener(answer, ...)`, then `start`, `stop`. `answer` returns a `Response`, a `Streamed`, or something to
       wait for.

Ours, because what a general server does for every request (a task, streams, header objects) cost as much as deciding,
and kube-scheduler waits for each answer before it goes on.

    arriving --certificate that is trusted--> known
       +--------first head: a probe---------> probing
       +--------first head: anything else---> strangers

Each class has places of its own: those who read /metrics slowly, or never say what they want, take nothing from the
kubelet's probes, and neither takes anything from callers with a trusted certificate.
"""

import asyncio
import logging
import os
import ssl
from collections.abc import Callable, Iterable

import msgspec

from gputile.http.acceptor import Acceptor
from gputile.http.h1_server import H1Connection
from gputile.http.h2_server import MOST_BODIES, H2Connection
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

ALPN = ("h2", "http/1.1")  # what is spoken over TLS, the better first
SWEEP = 10.0  # seconds between two looks for connections that are too slow
GOODBYE = 5.0  # seconds that requests have to end when we stop

__all__ = ["ALPN", "H1Connection", "Listener", "ListenerLimits"]


class ListenerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How many connections each class may have, and bytes of answers on their way."""

    arriving: int = 128
    probing: int = 32
    strangers: int = 64
    known: int = 512  # also where nobody is told apart by a certificate
    answers: int = 32 * MIB  # to strangers
    known_answers: int = 256 * MIB
    head: int = LONGEST_HEAD  # bytes, of known callers


class TlsProtocolSelector(asyncio.BufferedProtocol):
    """Opened by a TLS handshake, which has chosen what is spoken behind it (RFC 7301)."""

    def __init__(self, listener: "Listener", opened: Callable[[], None]) -> None:
        self._listener, self._opened = listener, opened

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._opened()
        chosen = transport.get_extra_info("ssl_object").selected_alpn_protocol()
        behind = H2Connection(self._listener) if chosen == "h2" else H1Connection(self._listener)
        transport.set_protocol(behind)
        behind.connection_made(transport)


class Listener:
    """See the module's text."""

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
        """`limit`: the longest body, in bytes. `came` hears of every connection what it speaks. `setting`: the name of
        that which says where to listen, for people. `probes`: paths with places of their own. `trusts`: whether a
        client's certificate (None: it sent none) makes it a known caller; others then get no body read, and one
        request at a time. Without it nobody is told apart, and the bounds of known callers hold for everybody."""
        self.answer, self.limit, self._came, self._setting = answer, limit, came, setting
        self._probes, self._trusts = frozenset(probes), trusts
        self._class(bounds or ListenerLimits())
        self.connections: set[ServerConnection] = set()
        self.is_stopping = False
        self._working: set[asyncio.Task[None]] = set()
        self.read_buffer = memoryview(bytearray(READ_BUFFER))
        """Where bytes arrive, whoever sent them: they are taken from here before the loop reads again."""
        self._acceptor = Acceptor(self.arriving, self._protocol)
        self._sweeper: asyncio.Task[None] | None = None

    def _class(self, bounds: ListenerLimits) -> None:
        """The classes. Where nobody is told apart, strangers are everybody who asks for more than a probe."""
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

    # ---- what connections ask ---------------------------------------------------------------------------------------

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def trusts(self, certificate: Certificate) -> bool:
        return self._trusts is None or self._trusts(certificate)

    def register(self, guest: ServerConnection, protocol: str, *, trusted: bool) -> CallerClass:
        self.connections.add(guest)
        self._came(protocol)
        return self.known if trusted and self._trusts is not None else self.arriving

    def classed(self, guest: ServerConnection, was: CallerClass, path: str) -> CallerClass:
        if was is self.known:
            return was
        callers = self.probing if path in self._probes else self.strangers
        if callers is not was:
            kept = guest.kept
            was.leave(guest)
            callers.enter(guest)
            callers.keep(guest, kept)
        return callers

    def forget(self, guest: ServerConnection) -> None:
        self.connections.discard(guest)

    def work(self, answering: asyncio.Task[None]) -> None:
        """Kept here, for a client may go before it has its answer."""
        self._working.add(answering)
        answering.add_done_callback(self._working.discard)

    # ---- life -------------------------------------------------------------------------------------------------------

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None) -> int:
        """Listen; the port, which matters if 0 was asked for. `InputError` where that cannot be."""
        self._acceptor.tls = tls
        try:
            found = await self._acceptor.start(host, port)
        except OSError as wrong:
            why = os.strerror(wrong.errno) if wrong.errno and wrong.errno > 0 else str(wrong)
            raise InputError(f"cannot listen on {host}:{port}: {why}; set another `{self._setting}`") from wrong
        self._sweeper = asyncio.create_task(self._sweep())
        return found

    def renew(self, tls: ssl.SSLContext | None) -> None:
        """The certificate and CA of today, for new connections."""
        self._acceptor.tls = tls

    def _protocol(self, opened: Callable[[], None]) -> asyncio.BaseProtocol:
        if self._acceptor.tls is not None:
            return TlsProtocolSelector(self, opened)
        opened()
        return H1Connection(self)

    def drain(self) -> None:
        """Whoever is connected is to ask its next question over another connection."""
        for connection in list(self.connections):
            connection.drain()

    async def stop(self) -> None:
        """Answer what is being asked, then close."""
        self.is_stopping = True
        if self._sweeper is None:
            return
        self._sweeper.cancel()
        self.drain()
        await self._acceptor.stop()
        if self._working:
            await asyncio.wait(self._working, timeout=GOODBYE)
        for connection in list(self.connections):
            connection.close()
        await asyncio.gather(self._sweeper, return_exceptions=True)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP)
            self.sweep()

    def sweep(self) -> None:
        """Let go of those who take too long, and say how many had to go for others."""
        for connection in list(self.connections):
            connection.sweep(self.now())
        classes = {"arriving": self.arriving, "probes": self.probing, "others": self.strangers, "known": self.known}
        found = ", ".join(f"{callers.evicted} {name}" for name, callers in classes.items() if callers.evicted)
        if found:
            log.warning("connections were closed because too many are open, or too much is unread: %s", found)
        for callers in classes.values():
            callers.evicted = 0


def host_and_port(listen: str) -> tuple[str, int]:
    """HOST:PORT as a setting has it."""
    host, _, port = listen.rpartition(":")
    return host.strip("[]"), int(port)
