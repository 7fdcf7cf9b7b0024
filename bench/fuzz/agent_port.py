"""The agent's port, over real connections: bytes that are no HTTP, or HTTP that nobody sends.

What is answered is a status below 500 (or one that says what is not understood), the connection ends when the client
is done, and a probe is answered afterwards.
"""

import asyncio
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from bench.fuzz.spoiling import Spoiler
from gputile.agent.server import AgentServer
from gputile.agent.settings import AgentSettings
from gputile.telemetry.agent_metrics import AgentMetrics

HONEST = (501, 503, 505)  # what is not understood is said so; 503 is /readyz
PATIENCE = 3.0  # seconds after the client's last byte
ANSWER = re.compile(rb"HTTP/1\.[01] ([1-5]\d\d) ")
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

    def sample(self, dice: random.Random) -> tuple[str, bytes]:
        said = b"".join(dice.choices(GOOD, k=dice.choice((1, 1, 1, 2, 5))))
        if dice.random() < 0.4:
            before, line, after = said.partition(b"\r\n")
            said = before + line + dice.choice(LINES) + after
        spoiler = Spoiler(dice, [*GOOD, *LINES])
        for _ in range(spoiler.times()):
            said = spoiler.spoil_bytes(said)
        return "the port", said

    async def wrong(self, path: str, body: bytes) -> str:
        answer = await self._talk(body)
        found = [int(status) for status in ANSWER.findall(answer)]
        bad = [status for status in found if status >= 500 and status not in HONEST]
        if bad or (answer and not ANSWER.match(answer)):
            return f"answered {answer[:300]!r}"
        return ""

    async def _talk(self, said: bytes) -> bytes:
        """All that is answered until the server hangs up; a server that does not is a TimeoutError."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        try:
            async with asyncio.timeout(PATIENCE):
                with suppress(OSError):  # the server need not read on
                    writer.write(said)
                    writer.write_eof()
                    return await reader.read()
                return b""
        finally:
            writer.close()

    async def audit(self) -> str:
        answer = await self._talk(GOOD[0])
        return "" if answer.startswith(b"HTTP/1.1 200 ") else f"/healthz is answered with {answer[:200]!r}"


@asynccontextmanager
async def target() -> AsyncIterator[AgentPortTarget]:
    server = AgentServer(AgentSettings(node="n1", listen="127.0.0.1:0"), AgentMetrics(), lambda: "")
    wrong: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: wrong.append(str(context.get("message"))))
    await server.start()
    try:
        yield AgentPortTarget(server)
    finally:
        await server.stop()
    if wrong:
        raise RuntimeError(f"the loop caught what nobody else did: {wrong[:3]}")
