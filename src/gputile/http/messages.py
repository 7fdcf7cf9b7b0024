"""Requests and responses, independent of the HTTP version, and the interfaces between the server and its connections.

A server answers a `Request` with a `Response` or a `Streamed`. `ServerHooks` is the server as its connections see it,
`ServerConnection` is a connection as the server sees it. This module must not read or write sockets.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from gputile.http import limits
from gputile.http.limits import CallerClass

log = logging.getLogger(__name__)

LONGEST_HEAD = 65536  # bytes, of a request or of a response
SHORT_HEAD = 8192  # bytes, of a request of an untrusted caller
READ_BUFFER = 65536  # bytes of one read
IDLE = 300.0  # seconds; kube-scheduler closes idle connections after 90
SLOW = 60.0  # seconds for a whole request
ARRIVING = 10.0  # seconds for the handshake, and then for the first head

Certificate = Mapping[str, Any] | None


class Request(msgspec.Struct, frozen=True):
    """One complete request."""

    method: str
    path: str
    body: bytes
    is_too_large: bool  # the body exceeded the limit and was dropped
    is_known: bool  # the client sent a certificate over TLS, and it was verified
    query: str = ""
    fields: Sequence[tuple[bytes, bytes]] = ()  # headers in the order received, names in lower case
    caller: str = ""  # the common name in that certificate
    is_trusted: bool = False  # that certificate makes the caller trusted; or the server trusts every caller

    def header(self, name: str) -> str:
        """The first header of this name (in lower case); "" without one."""
        return next(iter(self.headers(name)), "")

    def headers(self, name: str) -> list[str]:
        """All headers of this name (in lower case)."""
        wanted = name.encode()
        return [value.decode("latin-1") for field, value in self.fields if field == wanted]


class Response(msgspec.Struct, frozen=True, weakref=True):
    """A whole response. Sent to many clients it is in memory once, until the last of them has received all of it."""

    body: bytes
    status: int = 200
    content_type: str = "application/json"
    close: bool = False


class Streamed(msgspec.Struct, frozen=True):
    """A response of unknown length. The next piece is requested when the client has read the one before; the generator
    is closed when the client disconnects."""

    pieces: AsyncGenerator[bytes, None]
    status: int = 200
    content_type: str = "application/json"


Reply = Response | Streamed
Answer = Callable[[Request], Reply | Awaitable[Reply]]


class ServerConnection(limits.LimitedConnection, Protocol):
    """One connection, as the server sees it."""

    def sweep(self, now: float) -> None:
        """Close the connection if it is idle or slow for too long."""

    def drain(self) -> None:
        """Accept no further request; answer those that were received."""

    def close(self) -> None: ...


class ServerHooks(Protocol):
    """The server, as its connections see it."""

    answer: Answer
    limit: int  # bytes of a body
    read_buffer: memoryview
    is_stopping: bool

    def now(self) -> float: ...

    def trusts(self, certificate: Certificate) -> bool: ...

    def register(self, connection: ServerConnection, protocol: str, *, trusted: bool) -> CallerClass:
        """Add a new connection; return the class that it has to enter before its first request."""

    def classed(self, connection: ServerConnection, was: CallerClass, path: str) -> CallerClass:
        """The class of a connection after a request for `path`; connections of trusted callers keep theirs."""

    def forget(self, connection: ServerConnection) -> None: ...

    def work(self, answering: asyncio.Task[None]) -> None:
        """Register a task that answers a request; the server stops only after it."""


def respond(hooks: ServerHooks, request: Request) -> Reply | Awaitable[Reply]:
    """The server's answer. An exception becomes HTTP 500 and affects no other request."""
    try:
        return hooks.answer(request)
    except Exception:
        return internal_error(request)


def internal_error(request: Request) -> Response:
    """Call it in an exception handler: the traceback goes to the log, not to the caller."""
    log.exception("request handler failed: %s %s", request.method, request.path[:200])
    return Response(b"internal error; see the log", 500, "text/plain")


def split_target(target: str) -> tuple[str, str]:
    """Path and query; a proxy may send the absolute form."""
    if not target.startswith("/"):
        target = "/" + target.partition("://")[2].partition("/")[2]
    path, _, query = target.partition("?")
    return path, query


def peer(transport: asyncio.BaseTransport) -> str:
    """The address of the peer, without its port; "" if it has none."""
    address = transport.get_extra_info("peername")
    return str(address[0]) if isinstance(address, tuple) and address else ""


def names_in(certificate: Certificate) -> set[str]:
    """The common name and all subject alternative names of a certificate."""
    names = {str(value) for _, value in (certificate or {}).get("subjectAltName", ())}
    name = common_name(certificate)
    return names | {name} if name else names


def common_name(certificate: Certificate) -> str:
    """The common name in the subject of a certificate, as `ssl` returns it."""
    parts = [pair for part in (certificate or {}).get("subject", ()) for pair in part]
    return next((str(value) for name, value in parts if name == "commonName"), "")
