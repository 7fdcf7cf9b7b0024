"""Helpers of the client's tests: scripted responses, a pool with its server, and waiting."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

from gputile.http.client import ConnectionPool, HttpAnswer, ResponseStream
from tests.http.misbehaving import Server, Step

SOON = 0.03  # seconds, if no response will arrive; other timeouts are long, for a busy machine
LATER = 20.0
HEAD = b"HTTP/1.1 200 OK\r\n"
WHOLE: list[Step] = [HEAD + b"Content-Length: 2\r\n\r\nok"]
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def response(body: bytes) -> list[Step]:
    return [HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)]


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def asking(*script: list[Step], **options: Any) -> AsyncGenerator[tuple[ConnectionPool, Server], None]:
    async with Server(*script) as server:
        pool = ConnectionPool(server.url, **options)
        try:
            yield pool, server
        finally:
            await pool.close()


async def ask(
    pool: ConnectionPool, method: str = "GET", target: str = "/", timeout: float = LATER, **more: Any
) -> HttpAnswer:
    return await pool.request(method, target, timeout=timeout, **more)


async def opened(pool: ConnectionPool, silence: float = LATER, timeout: float = LATER) -> ResponseStream:
    return await pool.open("/", connect=LATER, silence=silence, timeout=timeout)


async def until(condition: Callable[[], object]) -> None:
    """Run the loop until the condition is true; the test's own timeout ends it otherwise."""
    while not condition():
        await asyncio.sleep(0.001)
