"""One connection, byte by byte and second by second: no socket, and a clock of our own."""

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
    """As much of a loop as a connection needs; its time passes when the test says so."""

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


class Home:
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

    def hear(self, sent: bytes) -> None:
        """As the loop does it."""
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
        self.hear(head)
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
async def test_answers_in_any_pieces_are_put_together(cuts: list[int]) -> None:
    home = Home()
    for whole, body in ANSWERS:
        task = await home.asks()
        for piece in cut(whole, cuts):
            assert not task.done()
            home.hear(piece)
        assert (await task).body == body
    assert (home.back, home.wire.closed, home.loop.timers) == (len(ANSWERS), False, 0)


@examples(50)
@given(st.lists(st.integers(0, 200), max_size=12))
async def test_streams_in_any_pieces_lose_nothing(cuts: list[int]) -> None:
    home = Home()
    for whole, body in ANSWERS:
        task = asyncio.ensure_future(home.connection.begin("GET", b"?", 60.0, 5.0))
        await asyncio.sleep(0)
        for piece in cut(whole, cuts):
            home.hear(piece)
        await task
        found = b""
        while piece := await home.connection.piece():
            found += piece
        assert found == body
    assert (home.back, home.wire.closed, home.loop.timers) == (len(ANSWERS), False, 0)


@examples(50)
@given(st.binary(max_size=60), st.sampled_from([whole for whole, _ in ANSWERS]), st.integers(0, 60))
async def test_nonsense_is_broken_or_waits_for_more_and_nothing_else(noise: bytes, whole: bytes, at: int) -> None:
    home = Home()
    task = await home.asks()
    home.hear(whole[:at] + noise + whole[at:])
    home.connection.connection_lost(None)
    (found,) = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(found, HttpAnswer | ConnectionBroken)
    assert home.loop.timers == 0


async def test_who_is_slow_to_read_makes_the_server_wait() -> None:
    home = Home()
    await home.begins(HEAD + b"Content-Length: 10000000\r\n\r\n")
    home.hear(b"x" * HIGH_WATER)
    assert not home.is_paused()
    home.hear(b"x")
    assert home.is_paused()
    assert len(await home.connection.piece()) == HIGH_WATER + 1
    assert not home.is_paused()


async def test_a_stream_that_ends_while_paused_leaves_a_connection_that_reads() -> None:
    home = Home()
    await home.begins(HEAD + b"Content-Length: %d\r\n\r\n" % (HIGH_WATER + 1))
    home.hear(b"x" * (HIGH_WATER + 1))
    assert home.is_paused()
    assert len(await home.connection.piece()) == HIGH_WATER + 1
    assert await home.connection.piece() == b""
    assert (home.wire.paused, home.back) == (False, 1)


async def test_bytes_that_nobody_asked_for_end_the_connection() -> None:
    home = Home()
    home.hear(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
    assert home.is_closed()
    assert not home.connection.is_usable


async def test_whatever_comes_after_we_closed_is_ignored() -> None:
    home = Home()
    await home.begins()
    home.connection.close()
    home.connection.buffer_updated(5)
    home.connection.connection_lost(None)
    assert (home.gone, home.back, home.loop.timers) == (1, 0, 0)


# ---- seconds --------------------------------------------------------------------------------------------------------


async def test_an_answer_may_take_as_long_as_it_may_and_no_longer() -> None:
    home = Home()
    task = await home.asks()
    home.loop.wait(9.9)
    assert not home.is_closed()
    home.loop.wait(0.2)
    assert home.is_closed()
    with pytest.raises(TimeoutError):
        await task


async def test_each_byte_of_a_stream_ends_a_silence_until_its_time_is_over() -> None:
    home = Home()
    await home.begins()
    for _ in range(13):
        home.loop.wait(4.5)
        home.hear(b"1\r\na\r\n")
    assert not home.is_closed()
    home.loop.wait(2.0)
    assert home.is_closed()
    assert await home.connection.piece() == b"a" * 13
    with pytest.raises(TimeoutError):
        await home.connection.piece()


async def test_a_tunnel_once_open_is_not_timed_any_more() -> None:
    home = Home()
    task = asyncio.ensure_future(home.connection.tunnel(b"CONNECT", 10.0))
    await asyncio.sleep(0)
    assert home.loop.timers == 1
    home.hear(HEAD + b"\r\n")
    assert await task == 200
    assert (home.loop.timers, home.back, home.is_closed()) == (0, 0, False)


async def test_silence_ends_a_stream() -> None:
    home = Home()
    await home.begins()
    home.loop.wait(4.0)
    home.hear(b"1\r\na\r\n")
    home.loop.wait(4.0)
    assert not home.is_closed()
    home.loop.wait(1.1)
    assert home.is_closed()


async def test_while_we_do_not_listen_silence_is_not_the_server_s() -> None:
    home = Home()
    await home.begins(HEAD + b"Content-Length: 10000000\r\n\r\n")
    home.hear(b"x" * (HIGH_WATER + 1))
    home.loop.wait(9.0)
    home.loop.wait(9.0)
    assert not home.is_closed()
    await home.connection.piece()
    home.loop.wait(4.0)
    assert not home.is_closed()
    home.loop.wait(1.1)
    assert home.is_closed()
