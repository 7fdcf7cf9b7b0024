"""Fuzzes the agent's port over real connections: bytes that are not HTTP, and unusual HTTP.

The response has a status below 500 (or one for an unsupported request), the connection closes when the client
is done, and a probe is answered afterwards.
"""

import asyncio
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from bench.fuzz.mutator import Mutator
from gputile.agent.server import AgentServer
from gputile.agent.settings import AgentSettings
from gputile.telemetry.agent_metrics import AgentMetrics

EXPECTED = (501, 503, 505)  # unsupported requests; 503 is /readyz
TIMEOUT = 3.0  # seconds after the client's last byte
STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([1-5]\d\d) ")
GOOD = [
    b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: a\r\nAccept: text/plain\r\nConnection: close\r\n\r\n",
    b"GET /readyz HTTP/1.0\r\n\r\n",
    b"POST /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello",
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"GET http://a/healthz?b=c HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x64",
]
LINES = [
    *(b"Host: a\r\n", b"Host:\r\n", b"TE: \x0bchunked\r\n", b"Transfer-Encoding: \r\n", b"Content-Length: -1\r\n"),
    *(b"Content-Length: 9999999999999999999\r\n", b" folded\r\n", b"X: " + b"a" * 9000 + b"\r\n", b"\x00: b\r\n"),
]


class AgentPortTarget:
    """A running server of the agent."""

    def __init__(self, server: AgentServer) -> None:
        self._server = server

    def sample(self, rng: random.Random) -> tuple[str, bytes]:
        request = b"".join(rng.choices(GOOD, k=rng.choice((1, 1, 1, 2, 5))))
        if rng.random() < 0.4:
            before, line, after = request.partition(b"\r\n")
            request = before + line + rng.choice(LINES) + after
        mutator = Mutator(rng, [*GOOD, *LINES])
        for _ in range(mutator.times()):
            request = mutator.mutate_bytes(request)
        return "agent port", request

    async def problem(self, path: str, body: bytes) -> str:
        response = await self._send(body)
        statuses = [int(status) for status in STATUS_LINE.findall(response)]
        bad = [status for status in statuses if status >= 500 and status not in EXPECTED]
        if bad or (response and not STATUS_LINE.match(response)):
            return f"answered {response[:300]!r}"
        return ""

    async def _send(self, request: bytes) -> bytes:
        """The response until the server closes the connection; TimeoutError if it does not."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        try:
            async with asyncio.timeout(TIMEOUT):
                with suppress(OSError):  # the server may close early
                    writer.write(request)
                    writer.write_eof()
                    return await reader.read()
                return b""
        finally:
            writer.close()

    async def audit(self) -> str:
        response = await self._send(GOOD[0])
        return "" if response.startswith(b"HTTP/1.1 200 ") else f"/healthz is answered with {response[:200]!r}"


@asynccontextmanager
async def target() -> AsyncIterator[AgentPortTarget]:
    server = AgentServer(AgentSettings(node="n1", listen="127.0.0.1:0"), AgentMetrics().text, lambda: "")
    errors: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(str(context.get("message"))))
    await server.start()
    try:
        yield AgentPortTarget(server)
    finally:
        await server.stop()
    if errors:
        raise RuntimeError(f"unhandled exceptions in the event loop: {errors[:3]}")
