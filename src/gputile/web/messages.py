"""What is asked and what is answered, whichever HTTP carried it.

Room:  values, and what a connection and its listener know of each other.
Door:  `Request` in, `Response` out; `Host` and `Guest` are the two sides of the threshold.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

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


class Response(msgspec.Struct, frozen=True):
    body: bytes
    status: int = 200
    content_type: str = "application/json"
    close: bool = False


Answer = Callable[[Request], Response | Awaitable[Response]]


class Guest(Protocol):
    """One client, as the listener sees it."""

    def sweep(self, now: float) -> None:
        """Let go of those who sleep, or take for ever to say what they want."""

    def see_off(self) -> None:
        """We are stopping: take no further question, answer those that were asked."""

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


def path_of(target: str) -> str:
    """Without a query; a proxy may send the whole address."""
    if not target.startswith("/"):
        target = "/" + target.partition("://")[2].partition("/")[2]
    return target.partition("?")[0]
