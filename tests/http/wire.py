"""A transport and a listener without a socket, for tests of bytes."""

import asyncio
from collections.abc import Awaitable

from gputile.http.h1_server import H1Connection
from gputile.http.messages import Request, Response
from gputile.http.server import Listener


class Wire(asyncio.Transport):
    """A transport that records what the server writes, and whether it closed."""

    def __init__(self, *, known: bool = False, address: str = "") -> None:
        super().__init__({"peercert": {"subject": ()} if known else None, "peername": (address, 1)})
        self.sent, self.closed, self.paused, self.aborted = b"", False, False, False
        self.writes = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += bytes(data)
        self.writes += 1

    def close(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def abort(self) -> None:
        self.aborted = True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = high


class Echo(Listener):
    """A server that responds with the request's body; `/wait` waits for the test."""

    def __init__(self, limit: int = 100) -> None:
        super().__init__(self.reply, limit)
        self.requests: list[Request] = []
        self.finished: list[Request] = []  # requests for `/wait`
        self.gate = asyncio.Event()
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def reply(self, request: Request) -> Response | Awaitable[Response]:
        self.requests.append(request)
        if request.path == "/wait":
            return self._later(request)
        return Response(request.body, close=request.path == "/close")

    async def _later(self, request: Request) -> Response:
        await self.gate.wait()
        self.finished.append(request)
        return Response(request.body)

    async def idle(self) -> None:
        """Wait until every request is answered."""
        await asyncio.gather(*self._working)


def receive(connection: H1Connection, sent: bytes) -> None:
    """Deliver bytes as the event loop does."""
    while sent:
        read_buffer = connection.get_buffer(-1)
        piece, sent = sent[: len(read_buffer)], sent[len(read_buffer) :]
        read_buffer[: len(piece)] = piece
        connection.buffer_updated(len(piece))
