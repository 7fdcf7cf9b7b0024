"""Streamed responses: in chunks, no faster than the client reads."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable

import pytest

from gputile.http.h1_server import H1Connection
from gputile.http.messages import IDLE, SLOW, Reply, Request, Streamed, common_name
from gputile.http.server import Listener
from tests.http.wire import Wire, receive


class StreamSource(Listener):
    """A server that streams what the test puts into `pieces`; None is the end."""

    def __init__(self, *, later: bool = False) -> None:
        super().__init__(self.reply, 100)
        self.pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.taken: list[bytes] = []
        self.requests: list[Request] = []
        self.is_closed = False
        self.time = 0.0
        self._is_later = later

    def now(self) -> float:
        return self.time

    def reply(self, request: Request) -> Reply | Awaitable[Reply]:
        self.requests.append(request)
        answer = Streamed(self._stream())
        return self._after_a_turn(answer) if self._is_later else answer

    async def _after_a_turn(self, answer: Reply) -> Reply:
        await asyncio.sleep(0)
        return answer

    async def _stream(self) -> AsyncGenerator[bytes, None]:
        try:
            while (piece := await self.pieces.get()) is not None:
                if piece == b"bug":
                    raise RuntimeError("a bug")
                self.taken.append(piece)
                yield piece
        finally:
            self.is_closed = True

    async def produce(self, *pieces: bytes | None) -> None:
        for piece in pieces:
            self.pieces.put_nowait(piece)
        for _ in range(20):
            await asyncio.sleep(0)

    @property
    def working(self) -> int:
        return len(self._working)


GET = (
    b"GET /watch?watch=true HTTP/1.1\r\nHost: x\r\nX-Remote-User: me\r\nX-Remote-Group: a\r\nx-remote-group: b\r\n\r\n"
)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


def connected(source: StreamSource) -> tuple[H1Connection, Wire]:
    connection, wire = H1Connection(source), Wire()
    connection.connection_made(wire)
    return connection, wire


# ---- HTTP/1.1 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("later", [False, True], ids=["at-once", "after-a-while"])
async def test_pieces_are_sent_as_chunks_and_the_connection_is_kept(later: bool) -> None:
    source = StreamSource(later=later)
    connection, wire = connected(source)
    receive(connection, GET)
    await source.produce()
    assert wire.sent == HEAD, "the head does not wait for the first piece"
    await source.produce(b"one\n")
    assert wire.sent == HEAD + b"4\r\none\n\r\n"
    await source.produce(b"", b"two\n", None)
    assert wire.sent == HEAD + b"4\r\none\n\r\n4\r\ntwo\n\r\n0\r\n\r\n", "an empty chunk would be the end"
    assert (wire.closed, source.working) == (False, 0)
    receive(connection, GET)
    await source.produce(None)
    assert wire.sent.endswith(HEAD + b"0\r\n\r\n")


async def test_nothing_is_streamed_to_a_client_that_disconnected_before_the_start() -> None:
    source = StreamSource(later=True)
    connection, wire = connected(source)
    receive(connection, GET)
    connection.connection_lost(None)
    await source.produce(b"one", b"two")
    assert (source.taken, source.working, wire.sent) == ([], 0, b"")


async def test_a_request_has_its_query_and_headers() -> None:
    source = StreamSource()
    connection, _ = connected(source)
    receive(connection, GET)
    (request,) = source.requests
    assert (request.path, request.query) == ("/watch", "watch=true")
    assert (request.header("x-remote-user"), request.headers("x-remote-group")) == ("me", ["a", "b"])
    assert request.header("x-remote-uid") == ""
    await source.produce(None)


async def test_no_piece_is_requested_before_the_last_was_read() -> None:
    source = StreamSource()
    connection, wire = connected(source)
    receive(connection, GET)
    connection.pause_writing()
    await source.produce(b"one", b"two", b"three")
    assert source.taken == [b"one"], "the first piece is written; the next waits"
    connection.resume_writing()
    await source.produce(None)
    assert wire.sent.count(b"\r\nthree\r\n") == 1


async def test_a_client_that_does_not_read_its_stream_is_aborted() -> None:
    source = StreamSource()
    connection, wire = connected(source)
    receive(connection, GET)
    await source.produce(b"one")
    source.time = IDLE * 10
    connection.sweep(source.now())
    assert not wire.closed, "the server has nothing to send"
    await source.produce(b"two")
    connection.pause_writing()
    source.time += SLOW + 1
    connection.sweep(source.now())
    assert wire.aborted
    connection.connection_lost(None)
    await source.produce()
    assert source.is_closed


async def test_a_disconnect_ends_the_stream() -> None:
    source = StreamSource()
    connection, _ = connected(source)
    receive(connection, GET)
    await source.produce(b"one")
    connection.connection_lost(None)
    await source.produce()
    assert (source.is_closed, source.working) == (True, 0)


async def test_http_1_0_gets_no_chunks() -> None:
    source = StreamSource()
    connection, wire = connected(source)
    receive(connection, GET.replace(b"HTTP/1.1", b"HTTP/1.0"))
    await source.produce(b"one", None)
    assert b"Transfer-Encoding" not in wire.sent
    assert wire.sent.endswith(b"\r\n\r\none")
    assert wire.closed


async def test_an_exception_does_not_look_like_the_end_of_a_stream() -> None:
    source = StreamSource()
    connection, wire = connected(source)
    receive(connection, GET)
    assert connection.task is not None
    task = connection.task
    await source.produce(b"one", b"bug")
    assert not wire.sent.endswith(b"0\r\n\r\n")
    assert wire.closed
    with pytest.raises(RuntimeError, match="a bug"):
        await task


@pytest.mark.parametrize(
    ("certificate", "name"),
    [
        pytest.param(None, "", id="no-certificate"),
        pytest.param({"subject": ()}, "", id="an-empty-subject"),
        pytest.param(
            {"subject": ((("organizationName", "x"),), (("commonName", "front-proxy-client"),))},
            "front-proxy-client",
            id="the-common-name",
        ),
    ],
)
def test_the_common_name_of_a_certificate(certificate: dict[str, object] | None, name: str) -> None:
    assert common_name(certificate) == name
