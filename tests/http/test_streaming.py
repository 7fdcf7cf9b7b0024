"""Answers that come piece by piece: in chunks over HTTP/1.1, in frames over HTTP/2, no faster than they are fetched."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable

import pytest
from hyperframe.frame import DataFrame

from gputile.http import h2_frames
from gputile.http.h1_server import H1Connection
from gputile.http.h2_frames import H2ErrorCode
from gputile.http.messages import IDLE, SLOW, Reply, Request, Streamed, common_name
from gputile.http.server import Listener
from tests.http.talk import Talk, first_window
from tests.http.wire import Wire, receive


class Spring(Listener):
    """Says what the test puts into `pieces`; None is the end."""

    def __init__(self, *, later: bool = False) -> None:
        super().__init__(self.reply, 100)
        self.pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.taken: list[bytes] = []
        self.asked: list[Request] = []
        self.is_terminal = False
        self.time = 0.0
        self._is_later = later

    def now(self) -> float:
        return self.time

    def reply(self, request: Request) -> Reply | Awaitable[Reply]:
        self.asked.append(request)
        answer = Streamed(self._flow())
        return self._soon(answer) if self._is_later else answer

    async def _soon(self, answer: Reply) -> Reply:
        await asyncio.sleep(0)
        return answer

    async def _flow(self) -> AsyncGenerator[bytes, None]:
        try:
            while (piece := await self.pieces.get()) is not None:
                if piece == b"bug":
                    raise RuntimeError("a bug")
                self.taken.append(piece)
                yield piece
        finally:
            self.is_terminal = True

    async def say(self, *pieces: bytes | None) -> None:
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


def joined(spring: Spring) -> tuple[H1Connection, Wire]:
    connection, wire = H1Connection(spring), Wire()
    connection.connection_made(wire)
    return connection, wire


# ---- HTTP/1.1 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("later", [False, True], ids=["at-once", "after-a-while"])
async def test_pieces_go_as_chunks_and_the_connection_lives_on(later: bool) -> None:
    spring = Spring(later=later)
    connection, wire = joined(spring)
    receive(connection, GET)
    await spring.say()
    assert wire.sent == HEAD, "the head does not wait for the first piece"
    await spring.say(b"one\n")
    assert wire.sent == HEAD + b"4\r\none\n\r\n"
    await spring.say(b"", b"two\n", None)
    assert wire.sent == HEAD + b"4\r\none\n\r\n4\r\ntwo\n\r\n0\r\n\r\n", "an empty piece would have been the end"
    assert (wire.closed, spring.working) == (False, 0)
    receive(connection, GET)
    await spring.say(None)
    assert wire.sent.endswith(HEAD + b"0\r\n\r\n")


async def test_nothing_is_poured_for_a_client_who_left_before_it_began() -> None:
    spring = Spring(later=True)
    connection, wire = joined(spring)
    receive(connection, GET)
    connection.connection_lost(None)
    await spring.say(b"one", b"two")
    assert (spring.taken, spring.working, wire.sent) == ([], 0, b"")


async def test_a_question_comes_with_its_query_and_headers() -> None:
    spring = Spring()
    connection, _ = joined(spring)
    receive(connection, GET)
    (asked,) = spring.asked
    assert (asked.path, asked.query) == ("/watch", "watch=true")
    assert (asked.header("x-remote-user"), asked.headers("x-remote-group")) == ("me", ["a", "b"])
    assert asked.header("x-remote-uid") == ""
    await spring.say(None)


async def test_no_piece_is_asked_for_before_the_last_was_fetched() -> None:
    spring = Spring()
    connection, wire = joined(spring)
    receive(connection, GET)
    connection.pause_writing()
    await spring.say(b"one", b"two", b"three")
    assert spring.taken == [b"one"], "written, and then it waits"
    connection.resume_writing()
    await spring.say(None)
    assert wire.sent.count(b"\r\nthree\r\n") == 1


async def test_whoever_does_not_fetch_is_let_go() -> None:
    spring = Spring()
    connection, wire = joined(spring)
    receive(connection, GET)
    await spring.say(b"one")
    spring.time = IDLE * 10
    connection.sweep(spring.now())
    assert not wire.closed, "we are the one with nothing to say"
    await spring.say(b"two")
    connection.pause_writing()
    spring.time += SLOW + 1
    connection.sweep(spring.now())
    assert wire.aborted
    connection.connection_lost(None)
    await spring.say()
    assert spring.is_terminal


async def test_a_client_that_goes_ends_its_stream() -> None:
    spring = Spring()
    connection, _ = joined(spring)
    receive(connection, GET)
    await spring.say(b"one")
    connection.connection_lost(None)
    await spring.say()
    assert (spring.is_terminal, spring.working) == (True, 0)


async def test_http_1_0_knows_no_chunks() -> None:
    spring = Spring()
    connection, wire = joined(spring)
    receive(connection, GET.replace(b"HTTP/1.1", b"HTTP/1.0"))
    await spring.say(b"one", None)
    assert b"Transfer-Encoding" not in wire.sent
    assert wire.sent.endswith(b"\r\n\r\none")
    assert wire.closed


async def test_a_bug_of_ours_does_not_look_like_an_end() -> None:
    spring = Spring()
    connection, wire = joined(spring)
    receive(connection, GET)
    assert connection.task is not None
    task = connection.task
    await spring.say(b"one", b"bug")
    assert not wire.sent.endswith(b"0\r\n\r\n")
    assert wire.closed
    with pytest.raises(RuntimeError, match="a bug"):
        await task


@pytest.mark.parametrize(
    ("certificate", "name"),
    [
        pytest.param(None, "", id="no-certificate"),
        pytest.param({"subject": ()}, "", id="nobody"),
        pytest.param(
            {"subject": ((("organizationName", "x"),), (("commonName", "front-proxy-client"),))},
            "front-proxy-client",
            id="the-common-name",
        ),
    ],
)
def test_who_a_certificate_names(certificate: dict[str, object] | None, name: str) -> None:
    assert common_name(certificate) == name


# ---- HTTP/2 ---------------------------------------------------------------------------------------------------------


def data(talk: Talk) -> bytes:
    return b"".join(sent.data for sent in talk.frames() if isinstance(sent, DataFrame))


@pytest.mark.parametrize("later", [False, True], ids=["at-once", "after-a-while"])
async def test_pieces_go_as_frames_and_other_questions_are_answered_beside(later: bool) -> None:
    spring = Spring(later=later)
    talk = Talk(spring)
    talk.say(talk.post(1, path="/watch?watch=true", fields=[(b"x-remote-user", b"me")]))
    await spring.say(b"one\n")
    assert data(talk) == b"one\n"
    assert talk.ended() == []
    (asked,) = spring.asked
    assert (asked.path, asked.query, asked.header("x-remote-user")) == ("/watch", "watch=true", "me")
    talk.say(talk.post(3))
    await spring.say(None, None)
    assert sorted(talk.ended()) == [1, 3]
    assert talk.heads()[0][b":status"] == b"200"
    assert spring.working == 0


async def test_a_stream_waits_for_its_window() -> None:
    spring = Spring()
    talk = Talk(spring, settings=first_window(4))
    talk.say(talk.post(1))
    await spring.say(b"one\ntwo\n", b"three\n")
    assert data(talk) == b"one\n"
    assert spring.taken == [b"one\ntwo\n"], "the next piece is not even asked for"
    talk.say(h2_frames.window_update(1, 100))
    await spring.say(None)
    assert data(talk) == b"one\ntwo\nthree\n"
    assert talk.ended() == [1]


async def test_a_stream_that_is_reset_ends_at_its_source() -> None:
    spring = Spring()
    talk = Talk(spring)
    talk.say(talk.post(1))
    await spring.say(b"one")
    talk.say(h2_frames.reset(1, H2ErrorCode.CANCEL))
    await spring.say()
    assert (spring.is_terminal, spring.working, talk.resets()) == (True, 0, {})


async def test_whoever_does_not_widen_the_window_is_reset() -> None:
    spring = Spring()
    talk = Talk(spring, settings=first_window(1))
    talk.say(talk.post(1))
    spring.time = SLOW * 5
    talk.connection.sweep(spring.now())
    await spring.say()
    assert talk.resets() == {}, "we are the one with nothing to say"
    await spring.say(b"one")
    spring.time += SLOW + 1
    talk.connection.sweep(spring.now())
    await spring.say()
    assert talk.resets() == {1: H2ErrorCode.CANCEL}
    assert spring.is_terminal


@pytest.mark.parametrize("how", ["lost", "closed"])
async def test_streams_end_with_their_connection(how: str) -> None:
    spring = Spring()
    talk = Talk(spring)
    talk.say(talk.post(1))
    await spring.say(b"one")
    if how == "lost":
        talk.connection.connection_lost(None)
    else:
        talk.connection.close()
    await spring.say()
    assert (spring.is_terminal, spring.working) == (True, 0)


async def test_a_bug_of_ours_resets_the_stream() -> None:
    spring = Spring()
    talk = Talk(spring)
    talk.say(talk.post(1))
    (task,) = spring._working
    await spring.say(b"one", b"bug")
    assert (talk.resets(), talk.ended()) == ({1: H2ErrorCode.INTERNAL_ERROR}, [])
    with pytest.raises(RuntimeError, match="a bug"):
        await task
