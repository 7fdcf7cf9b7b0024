"""One client connection, byte by byte and second by second, without a socket and with a fake clock."""

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputile.http.connection import HIGH_WATER, ClientConnection, ConnectionBroken, HttpAnswer
from gputile.http.messages import READ_BUFFER
from tests.effort import examples

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


class Loop:
    """The part of an event loop that a connection needs; the test moves its time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, Callable[[], None], asyncio.TimerHandle]] = []

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.get_running_loop().create_future()

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, call, (), asyncio.get_running_loop())
        self._due.append((when, call, handle))
        return handle

    @property
    def timers(self) -> int:
        return sum(not handle.cancelled() for _, _, handle in self._due)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        due, self._due = self._due, []
        for when, call, handle in due:
            if handle.cancelled():
                continue
            if when <= self.now:
                call()
            else:
                self._due.append((when, call, handle))


class Wire(asyncio.Transport):
    """A transport that records what is written, and whether reading is paused."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.closed, self.paused = b"", False, False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += bytes(data)

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


class Owner:
    """The owner of one connection, which counts what comes back."""

    def __init__(self) -> None:
        self.read_buffer = memoryview(bytearray(READ_BUFFER))
        self.loop, self.wire = Loop(), Wire()
        self.back = self.gone = 0
        self.connection = ClientConnection(self, cast(asyncio.AbstractEventLoop, self.loop), None)
        self.connection.connection_made(self.wire)

    def give_back(self, connection: ClientConnection) -> None:
        self.back += 1

    def lost(self, connection: ClientConnection) -> None:
        self.gone += 1

    def is_closed(self) -> bool:
        return self.wire.closed

    def is_paused(self) -> bool:
        return self.wire.paused

    def receive(self, sent: bytes) -> None:
        """Deliver bytes as the event loop does."""
        while sent and not self.wire.closed:
            read_buffer = self.connection.get_buffer(-1)
            piece, sent = sent[: len(read_buffer)], sent[len(read_buffer) :]
            read_buffer[: len(piece)] = piece
            self.connection.buffer_updated(len(piece))

    async def asks(self, method: str = "GET") -> "asyncio.Task[HttpAnswer]":
        task = asyncio.ensure_future(self.connection.ask(method, b"?", self.loop.now + 10.0))
        await asyncio.sleep(0)
        return task

    async def begins(self, head: bytes = CHUNKED, silence: float = 5.0) -> None:
        task = asyncio.ensure_future(self.connection.begin("GET", b"?", self.loop.now + 60.0, silence))
        await asyncio.sleep(0)
        self.receive(head)
        await task


# ---- bytes ----------------------------------------------------------------------------------------------------------

ANSWERS = [
    (HEAD + b"Content-Length: 3\r\n\r\none", b"one"),
    (b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED + b"2;a=b\r\ntw\r\n1\r\no\r\n0\r\nA: b\r\n\r\n", b"two"),
    (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    (CHUNKED + b"0\r\n\r\n", b""),
]


def cut(whole: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(whole), *(cut % len(whole) for cut in cuts)})
    return [whole[start:end] for start, end in pairwise(edges)]


@examples(50)
@given(st.lists(st.integers(0, 200), max_size=12))
async def test_responses_in_any_pieces_are_assembled(cuts: list[int]) -> None:
    owner = Owner()
    for whole, body in ANSWERS:
        task = await owner.asks()
        for piece in cut(whole, cuts):
            assert not task.done()
            owner.receive(piece)
        assert (await task).body == body
    assert (owner.back, owner.wire.closed, owner.loop.timers) == (len(ANSWERS), False, 0)


@examples(50)
@given(st.lists(st.integers(0, 200), max_size=12))
async def test_streams_in_any_pieces_lose_nothing(cuts: list[int]) -> None:
    owner = Owner()
    for whole, body in ANSWERS:
        task = asyncio.ensure_future(owner.connection.begin("GET", b"?", 60.0, 5.0))
        await asyncio.sleep(0)
        for piece in cut(whole, cuts):
            owner.receive(piece)
        await task
        received = b""
        while piece := await owner.connection.piece():
            received += piece
        assert received == body
    assert (owner.back, owner.wire.closed, owner.loop.timers) == (len(ANSWERS), False, 0)


@examples(50)
@given(st.binary(max_size=60), st.sampled_from([whole for whole, _ in ANSWERS]), st.integers(0, 60))
async def test_random_bytes_are_a_response_or_connection_broken(noise: bytes, whole: bytes, at: int) -> None:
    owner = Owner()
    task = await owner.asks()
    owner.receive(whole[:at] + noise + whole[at:])
    owner.connection.connection_lost(None)
    (result,) = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(result, HttpAnswer | ConnectionBroken)
    assert owner.loop.timers == 0


async def test_a_slow_reader_pauses_reading() -> None:
    owner = Owner()
    await owner.begins(HEAD + b"Content-Length: 10000000\r\n\r\n")
    owner.receive(b"x" * HIGH_WATER)
    assert not owner.is_paused()
    owner.receive(b"x")
    assert owner.is_paused()
    assert len(await owner.connection.piece()) == HIGH_WATER + 1
    assert not owner.is_paused()


async def test_a_stream_that_ends_while_paused_leaves_a_connection_that_reads() -> None:
    owner = Owner()
    await owner.begins(HEAD + b"Content-Length: %d\r\n\r\n" % (HIGH_WATER + 1))
    owner.receive(b"x" * (HIGH_WATER + 1))
    assert owner.is_paused()
    assert len(await owner.connection.piece()) == HIGH_WATER + 1
    assert await owner.connection.piece() == b""
    assert (owner.wire.paused, owner.back) == (False, 1)


async def test_unsolicited_bytes_close_the_connection() -> None:
    owner = Owner()
    owner.receive(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
    assert owner.is_closed()
    assert not owner.connection.is_usable


async def test_bytes_after_a_close_are_ignored() -> None:
    owner = Owner()
    await owner.begins()
    owner.connection.close()
    owner.connection.buffer_updated(5)
    owner.connection.connection_lost(None)
    assert (owner.gone, owner.back, owner.loop.timers) == (1, 0, 0)


# ---- seconds --------------------------------------------------------------------------------------------------------


async def test_a_request_times_out_at_its_deadline() -> None:
    owner = Owner()
    task = await owner.asks()
    owner.loop.wait(9.9)
    assert not owner.is_closed()
    owner.loop.wait(0.2)
    assert owner.is_closed()
    with pytest.raises(TimeoutError):
        await task


async def test_each_byte_of_a_stream_restarts_the_silence_timeout_until_the_deadline() -> None:
    owner = Owner()
    await owner.begins()
    for _ in range(13):
        owner.loop.wait(4.5)
        owner.receive(b"1\r\na\r\n")
    assert not owner.is_closed()
    owner.loop.wait(2.0)
    assert owner.is_closed()
    assert await owner.connection.piece() == b"a" * 13
    with pytest.raises(TimeoutError):
        await owner.connection.piece()


async def test_an_open_tunnel_has_no_timer() -> None:
    owner = Owner()
    task = asyncio.ensure_future(owner.connection.tunnel(b"CONNECT", 10.0))
    await asyncio.sleep(0)
    assert owner.loop.timers == 1
    owner.receive(HEAD + b"\r\n")
    assert await task == 200
    assert (owner.loop.timers, owner.back, owner.is_closed()) == (0, 0, False)


async def test_a_silent_stream_times_out() -> None:
    owner = Owner()
    await owner.begins()
    owner.loop.wait(4.0)
    owner.receive(b"1\r\na\r\n")
    owner.loop.wait(4.0)
    assert not owner.is_closed()
    owner.loop.wait(1.1)
    assert owner.is_closed()


async def test_paused_reading_does_not_count_as_silence_of_the_server() -> None:
    owner = Owner()
    await owner.begins(HEAD + b"Content-Length: 10000000\r\n\r\n")
    owner.receive(b"x" * (HIGH_WATER + 1))
    owner.loop.wait(9.0)
    owner.loop.wait(9.0)
    assert not owner.is_closed()
    await owner.connection.piece()
    owner.loop.wait(4.0)
    assert not owner.is_closed()
    owner.loop.wait(1.1)
    assert owner.is_closed()
