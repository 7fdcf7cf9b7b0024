"""A server that sends scripted bytes and records the requests.

async with Server([b"HTTP/1.1 200 OK\r\n", b"Content-Length: 0\r\n\r\n"], [HANG]) as server: ...
"""

import asyncio
import ssl
from enum import Enum
from typing import Self, TypeAlias


class Action(Enum):
    """What a script may do besides sending bytes."""

    CLOSE = "close"
    HALF_CLOSE = "keep reading, and never send again"
    RESET = "reset"
    HANG = "hang until the client disconnects"


CLOSE, HALF_CLOSE, RESET, HANG = Action
Step: TypeAlias = bytes | Action


class Server:
    """A server with one list of steps per request, on any connection. Each piece is sent on its own."""

    def __init__(self, *script: list[Step], tls: ssl.SSLContext | None = None) -> None:
        self._script, self._tls = list(script), tls
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self.requests: list[bytes] = []
        self.connections = 0
        self.left = asyncio.Event()  # a client disconnected: during a HANG, or by a reset
        self.url, self.port = "", 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._open.values():
            writer.transport.abort()
        if self._open:
            await asyncio.wait(list(self._open))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = writer
        self.connections += 1
        try:
            while self._script:
                await self._read_request(reader)
                for step in self._script.pop(0):
                    await self._do(step, reader, writer)
            await reader.read()  # until the client disconnects
        except OSError:  # the client reset the connection, maybe before the script reached its HANG
            self.left.set()
        except EOFError:
            pass
        finally:
            del self._open[task]
            writer.transport.abort()

    async def _read_request(self, reader: asyncio.StreamReader) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        self.requests.append(head + await reader.readexactly(int(length or 0)))

    async def _do(self, step: Step, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        match step:
            case bytes():
                writer.write(step)
                await writer.drain()
                await asyncio.sleep(0)  # so that each piece is sent on its own
            case Action.CLOSE:
                writer.close()
                raise EOFError
            case Action.HALF_CLOSE:
                writer.write_eof()
            case Action.RESET:
                writer.transport.abort()
                raise EOFError
            case Action.HANG:
                await reader.read()
                self.left.set()
                raise EOFError


class Proxy:
    """A proxy that tunnels CONNECT requests and records them."""

    def __init__(self, answer: bytes = b"HTTP/1.1 200 Connection established\r\n\r\n", *,
                 tls: ssl.SSLContext | None = None) -> None:  # fmt: skip
        self._answer, self._tls = answer, tls
        self._tasks: set[asyncio.Task[None]] = set()
        self.requests: list[bytes] = []
        self.left = asyncio.Event()  # a client disconnected after a rejection
        self.address = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(head)
            writer.write(self._answer)
            if self._answer.startswith(b"HTTP/1.1 407 "):
                await reader.read()
                self.left.set()
            if self._answer.startswith(b"HTTP/1.1 200 "):
                host, _, port = head.split()[1].decode().rpartition(":")
                reader_there, writer_there = await asyncio.open_connection(host, int(port))
                try:
                    await asyncio.gather(_copy(reader, writer_there), _copy(reader_there, writer))
                finally:
                    writer_there.transport.abort()
        except (OSError, EOFError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(65536):
        writer.write(piece)
    writer.transport.abort()
