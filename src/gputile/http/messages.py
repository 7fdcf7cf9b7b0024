"""What is asked and what is answered, whichever HTTP carried it.

Room:  values, and what a connection and its listener know of each other.
Door:  `Request` in, `Response` (or, piece by piece, `Streamed`) out; `ServerHooks` and `ServerConnection` are the two
       sides of the threshold.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from gputile.http import limits
from gputile.http.limits import CallerClass

log = logging.getLogger(__name__)

LONGEST_HEAD = 65536  # bytes, of a question or of an answer
SHORT_HEAD = 8192  # bytes, of a question of somebody whom we do not know
READ_BUFFER = 65536  # bytes that are read at once
IDLE = 300.0  # seconds; kube-scheduler drops idle connections after 90
SLOW = 60.0  # seconds for a whole request
ARRIVING = 10.0  # seconds until the handshake is done, and then until the first head is here

Certificate = Mapping[str, Any] | None


class Request(msgspec.Struct, frozen=True):
    """One question, whole."""

    method: str
    path: str
    body: bytes
    is_too_large: bool  # the body was longer than allowed, and is not here
    is_known: bool  # came over TLS with a client certificate, which was checked
    query: str = ""
    fields: Sequence[tuple[bytes, bytes]] = ()  # headers as they came, their names in lower case
    caller: str = ""  # the common name in that certificate
    is_trusted: bool = False  # that certificate is one that may do more; or nobody is told apart here

    def header(self, name: str) -> str:
        """The first of this name (in lower case); "" where there is none."""
        return next(iter(self.headers(name)), "")

    def headers(self, name: str) -> list[str]:
        wanted = name.encode()
        return [value.decode("latin-1") for found, value in self.fields if found == wanted]


class Response(msgspec.Struct, frozen=True, weakref=True):
    """A whole answer. Sent to many, it is in memory once; it lives for as long as somebody has not got all of it."""

    body: bytes
    status: int = 200
    content_type: str = "application/json"
    close: bool = False


class Streamed(msgspec.Struct, frozen=True):
    """An answer whose end nobody knows yet. A piece is asked for when the client has taken the one before; the
    generator is closed when the client has gone."""

    pieces: AsyncGenerator[bytes, None]
    status: int = 200
    content_type: str = "application/json"


Reply = Response | Streamed
Answer = Callable[[Request], Reply | Awaitable[Reply]]


class ServerConnection(limits.LimitedConnection, Protocol):
    """One client, as the listener sees it."""

    def sweep(self, now: float) -> None:
        """Let go of those who sleep, or take for ever to say what they want."""

    def drain(self) -> None:
        """Take no further question, answer those that were asked."""

    def close(self) -> None: ...


class ServerHooks(Protocol):
    """The listener, as its connections see it."""

    answer: Answer
    limit: int  # bytes of a body
    read_buffer: memoryview
    is_stopping: bool

    def now(self) -> float: ...

    def trusts(self, certificate: Certificate) -> bool: ...

    def register(self, guest: ServerConnection, protocol: str, *, trusted: bool) -> CallerClass:
        """The class of somebody who has said nothing yet, for it to enter."""

    def classed(self, guest: ServerConnection, was: CallerClass, path: str) -> CallerClass:
        """The class of somebody who has asked for this, and is not told apart by a certificate."""

    def forget(self, guest: ServerConnection) -> None: ...

    def work(self, answering: asyncio.Task[None]) -> None:
        """Something is being answered that takes time, and we stop only after it."""


def asked(host: ServerHooks, request: Request) -> Reply | Awaitable[Reply]:
    """What the listener answers. A bug there is an answer too, and holds up nobody else."""
    try:
        return host.answer(request)
    except Exception:
        return broken(request)


def broken(request: Request) -> Response:
    """To be called where the bug is being handled: its story goes into the log, not to the caller."""
    log.exception("a request could not be answered: %s %s", request.method, request.path[:200])
    return Response(b"internal error; see the log", 500, "text/plain")


def parted(target: str) -> tuple[str, str]:
    """Path and query; a proxy may send the whole address."""
    if not target.startswith("/"):
        target = "/" + target.partition("://")[2].partition("/")[2]
    path, _, query = target.partition("?")
    return path, query


def peer(transport: asyncio.BaseTransport) -> str:
    """The address of the other side, without its port; "" where it has none."""
    found = transport.get_extra_info("peername")
    return str(found[0]) if isinstance(found, tuple) and found else ""


def names_in(certificate: Certificate) -> set[str]:
    """Whom a certificate is made out to: its common name, and its alternative names of any kind."""
    found = {str(value) for _, value in (certificate or {}).get("subjectAltName", ())}
    name = common_name(certificate)
    return found | {name} if name else found


def common_name(certificate: Certificate) -> str:
    """Of the subject of a certificate, as `ssl` shows it."""
    parts = [pair for part in (certificate or {}).get("subject", ()) for pair in part]
    return next((str(value) for name, value in parts if name == "commonName"), "")
