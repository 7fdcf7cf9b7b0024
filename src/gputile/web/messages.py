"""What is asked and what is answered, whichever HTTP carried it.

Room:  values, and what a connection and its listener know of each other.
Door:  `Request` in, `Response` (or, piece by piece, `Streamed`) out; `Host` and `Guest` are the two sides of the
       threshold.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

LONGEST_HEAD = 65536  # bytes, of a question or of an answer
LANDING = 65536  # bytes that are read at once
IDLE = 300.0  # seconds; kube-scheduler drops idle connections after 90
SLOW = 60.0  # seconds for a whole request


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

    def header(self, name: str) -> str:
        """The first of this name (in lower case); "" where there is none."""
        return next(iter(self.headers(name)), "")

    def headers(self, name: str) -> list[str]:
        wanted = name.encode()
        return [value.decode("latin-1") for found, value in self.fields if found == wanted]


class Response(msgspec.Struct, frozen=True):
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


class Guest(Protocol):
    """One client, as the listener sees it."""

    def sweep(self, now: float) -> None:
        """Let go of those who sleep, or take for ever to say what they want."""

    def see_off(self) -> None:
        """Take no further question, answer those that were asked."""

    def close(self) -> None: ...


class Host(Protocol):
    """The listener, as its connections see it."""

    answer: Answer
    limit: int  # bytes of a body
    landing: memoryview
    is_stopping: bool

    def now(self) -> float: ...

    def welcome(self, guest: Guest, protocol: str) -> None: ...

    def forget(self, guest: Guest) -> None: ...

    def work(self, answering: asyncio.Task[None]) -> None:
        """Something is being answered that takes time, and we stop only after it."""


def parted(target: str) -> tuple[str, str]:
    """Path and query; a proxy may send the whole address."""
    if not target.startswith("/"):
        target = "/" + target.partition("://")[2].partition("/")[2]
    path, _, query = target.partition("?")
    return path, query


def common_name(certificate: Mapping[str, Any] | None) -> str:
    """Of the subject of a certificate, as `ssl` shows it."""
    parts = [pair for part in (certificate or {}).get("subject", ()) for pair in part]
    return next((str(value) for name, value in parts if name == "commonName"), "")
