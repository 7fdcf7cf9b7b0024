"""HTTP/2 clients that flood or stall, and the graceful end of a connection."""

import asyncio
from collections.abc import Awaitable, Iterable

import pytest

from gputile.http import h2_frames, h2_server
from gputile.http.h2_frames import ACK, END_HEADERS, END_STREAM, H2ErrorCode, frame
from gputile.http.messages import ARRIVING, IDLE, SLOW, Request, Response
from gputile.http.server import Listener
from tests.http.raw_h2_client import RawH2Client, first_window
from tests.http.wire import Echo, receive

# ---- floods ---------------------------------------------------------------------------------------------------------


def post_and_reset(client: RawH2Client, numbers: Iterable[int]) -> list[bytes]:
    return [client.post(n, b"x", "/wait") + h2_frames.reset(n, H2ErrorCode.CANCEL) for n in numbers]


@pytest.mark.parametrize(
    "noise",
    [
        pytest.param(frame(h2_frames.PING, 0, 0, bytes(8)), id="pings"),
        pytest.param(frame(h2_frames.PING, ACK, 0, bytes(8)), id="unsolicited-PING-ACKs"),
        pytest.param(frame(h2_frames.SETTINGS), id="settings"),
        pytest.param(frame(h2_frames.SETTINGS, ACK), id="SETTINGS-ACKs"),
        pytest.param(frame(h2_frames.PRIORITY, 0, 1, bytes(5)), id="priorities"),
        pytest.param(frame(h2_frames.DATA, 0, 1), id="empty-data"),
        pytest.param(h2_frames.window_update(0, 1), id="windows"),
        pytest.param(frame(0xFA, 0, 0), id="unknown-frames"),
    ],
)
async def test_a_flood_of_control_frames(noise: bytes) -> None:
    client = RawH2Client().send()
    client.send(client.headed(), noise * (h2_server.MOST_NOISE - 10))
    assert client.goaway() is None
    client.connection.sweep(1.0)
    client.send(noise * (h2_server.MOST_NOISE - 10))
    assert client.goaway() is None, "the limit is per sweep"
    client.send(noise * 20)
    assert client.goaway() == (1, H2ErrorCode.ENHANCE_YOUR_CALM)


async def test_a_flood_of_empty_continuations() -> None:
    client = RawH2Client().send(
        frame(h2_frames.HEADERS, 0, 1, b"\x82"), frame(h2_frames.CONTINUATION, 0, 1) * (h2_server.MOST_NOISE + 1)
    )
    assert client.goaway() == (0, H2ErrorCode.ENHANCE_YOUR_CALM)


async def test_an_endless_header_block() -> None:
    client = RawH2Client().send(
        frame(h2_frames.HEADERS, 0, 1, b"\x82"), frame(h2_frames.CONTINUATION, 0, 1, b"x" * 16384) * 3
    )
    assert client.goaway() is None
    client.send(frame(h2_frames.CONTINUATION, 0, 1, b"x" * 16384))
    assert client.goaway() == (0, H2ErrorCode.ENHANCE_YOUR_CALM)


async def test_headers_that_are_too_long_only_when_decoded() -> None:
    client = RawH2Client().send(frame(h2_frames.HEADERS, END_HEADERS, 1, b"\x82" * 2000))
    assert client.goaway() == (0, H2ErrorCode.ENHANCE_YOUR_CALM)


async def test_window_updates_for_large_responses_are_no_flood() -> None:
    client = RawH2Client(Echo(limit=10**6), settings=first_window(10**6)).send(h2_frames.window_update(0, 10**9))
    for number in range(1, 21, 2):
        client.send(client.post(number, b"x" * 300_000), h2_frames.window_update(0, 2000) * 150)
    assert (len(client.ended()), client.goaway()) == (10, None)


async def test_rapid_reset() -> None:
    """Work that was started continues and counts as an open stream: a reset frees no capacity."""
    listener = Echo()
    client = RawH2Client(listener).send()
    client.send(*post_and_reset(client, range(1, 601, 2)))
    assert len(listener.requests) == h2_server.MOST_STREAMS
    assert set(client.resets().values()) == {H2ErrorCode.REFUSED_STREAM}
    assert len(client.resets()) == 50
    client.send(*post_and_reset(client, range(601, 1201, 2)))
    assert client.goaway() is not None
    assert client.goaway()[1] == H2ErrorCode.ENHANCE_YOUR_CALM  # type: ignore[index]
    listener.gate.set()
    await listener.idle()
    assert len(listener.finished) == h2_server.MOST_STREAMS, "a bind that was received is carried out"
    assert client.ended() == []


async def test_work_for_a_reset_stream_frees_capacity_when_it_is_done() -> None:
    listener = Echo()
    client = RawH2Client(listener).send()
    client.send(*post_and_reset(client, range(1, 501, 2)))
    client.send(client.post(501, b"x"))
    assert client.resets() == {501: H2ErrorCode.REFUSED_STREAM}
    listener.gate.set()
    await listener.idle()
    client.send(client.post(503, b"y"))
    assert client.answers() == {503: b"y"}


async def test_requests_that_make_the_server_reset_them() -> None:
    """The same from the other side: each request is started, and then broken so that the server resets it."""
    listener = Echo()
    client = RawH2Client(listener).send()
    client.send(*(client.post(n, b"x", "/wait") + frame(h2_frames.DATA, 0, n, b"more") for n in range(1, 601, 2)))
    assert len(listener.requests) == h2_server.MOST_STREAMS
    client.send(*(frame(h2_frames.HEADERS, END_HEADERS, n, client.raw([(b"a", b"b")])) for n in range(601, 1201, 2)))
    assert client.goaway() is not None
    assert client.goaway()[1] == H2ErrorCode.ENHANCE_YOUR_CALM  # type: ignore[index]
    listener.gate.set()
    await listener.idle()


async def test_more_concurrent_streams_than_allowed() -> None:
    client = RawH2Client().send()
    client.send(*(client.headed(number) for number in range(1, 505, 2)))
    assert client.resets() == {501: H2ErrorCode.REFUSED_STREAM, 503: H2ErrorCode.REFUSED_STREAM}
    client.send(frame(h2_frames.DATA, END_STREAM, 501, b"in flight"), frame(h2_frames.DATA, END_STREAM, 1, b"12345"))
    assert client.answers() == {1: b"12345"}


async def test_incomplete_bodies_are_limited() -> None:
    client = RawH2Client(Echo(limit=100)).send()
    for number in (1, 3, 5, 7):
        client.send(client.headed(number, b"101"), frame(h2_frames.DATA, 0, number, b"x" * 100))
    assert client.resets() == {}
    client.send(client.headed(9), frame(h2_frames.DATA, 0, 9, b"x"))
    assert client.resets() == {9: H2ErrorCode.ENHANCE_YOUR_CALM}
    client.send(frame(h2_frames.DATA, END_STREAM, 1, b"x"), client.post(11, b"x"))
    assert client.answers() == {1: b"", 11: b"x"}


async def test_complete_and_reset_bodies_are_not_counted() -> None:
    client = RawH2Client(Echo(limit=100)).send()
    for number in range(1, 21, 4):
        client.send(client.post(number, b"x" * 100))
        client.send(
            client.headed(number + 2),
            frame(h2_frames.DATA, 0, number + 2, b"abcd"),
            h2_frames.reset(number + 2, H2ErrorCode.CANCEL),
        )
    for number in (21, 23, 25, 27):
        client.send(client.headed(number, b"100"), frame(h2_frames.DATA, 0, number, b"x" * 97))
    for number in (21, 23, 25, 27):
        client.send(frame(h2_frames.DATA, END_STREAM, number, b"abc"))
    assert (client.resets(), len(client.ended())) == ({}, 9)


async def test_unread_responses_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h2_server, "MOST_WAITING", 150)
    client = RawH2Client(settings=first_window(0)).send()
    client.send(*(client.post(number, b"x" * 100) for number in (1, 3, 5)))
    assert client.resets() == {5: H2ErrorCode.REFUSED_STREAM}
    client.send(h2_frames.reset(1, H2ErrorCode.CANCEL), client.post(7, b""))
    assert client.ended() == [7]


# ---- closing --------------------------------------------------------------------------------------------------------


async def test_a_replica_that_is_not_the_leader_sends_goaway_after_the_response() -> None:
    """Go opens another connection, and retries there the streams above the last one."""
    listener = Echo()
    client = RawH2Client(listener).send()
    client.send(client.post(1, b"bind", "/wait"), client.post(3, b"filter", "/close"), client.post(5, b"next"))
    assert client.goaway() == (3, H2ErrorCode.NO_ERROR)
    assert client.answers() == {3: b"filter"}
    assert [request.path for request in listener.requests] == ["/wait", "/close"]
    client.connection.sweep(1.0)
    assert not client.wire.closed, "a stream is still open"
    listener.gate.set()
    await listener.idle()
    assert client.answers() == {3: b"filter", 1: b"bind"}
    client.connection.sweep(2.0)
    assert client.wire.closed


async def test_stopping_sends_goaway_first_and_answers_open_requests() -> None:
    listener = Echo()
    client = RawH2Client(listener).send()
    client.send(client.post(1, b"bind", "/wait"))
    await listener.start("127.0.0.1", 0, None)
    stopping = asyncio.create_task(listener.stop())
    await asyncio.sleep(0)
    assert client.goaway() == (1, H2ErrorCode.NO_ERROR)
    assert not client.wire.closed
    listener.gate.set()
    await stopping
    assert client.answers() == {1: b"bind"}
    assert client.wire.closed


async def test_stopping_waits_for_work_of_a_disconnected_client() -> None:
    listener = Echo()
    client = RawH2Client(listener).send()
    client.send(client.post(1, b"bind", "/wait"))
    client.connection.connection_lost(None)
    await listener.start("127.0.0.1", 0, None)
    stopping = asyncio.create_task(listener.stop())
    await asyncio.sleep(0)
    assert not stopping.done()
    listener.gate.set()
    await stopping
    assert len(listener.finished) == 1


async def test_an_exception_in_a_handler_is_a_500() -> None:
    async def crash() -> Response:
        raise RuntimeError("a bug")

    def at_once() -> Response:
        raise RuntimeError("another")

    def answer(request: Request) -> Response | Awaitable[Response]:
        if request.path == "/bug":
            return crash()
        return at_once() if request.path == "/bug-at-once" else Response(b"fine")

    listener = Listener(answer, 100)
    client = RawH2Client(listener).send()
    client.send(client.post(1, b"x", "/bug"), client.post(3, b"x", "/bug-at-once"), client.post(5, b"x"))
    await asyncio.gather(*listener._working)
    assert sorted(fields[b":status"] for fields in client.heads()) == [b"200", b"500", b"500"]
    assert (client.resets(), client.answers()[5]) == ({}, b"fine")


@pytest.mark.parametrize(
    ("path", "seconds", "stays"),
    [
        pytest.param("/a", IDLE - 1, True, id="idle-for-a-while"),
        pytest.param("/a", IDLE + 1, False, id="idle-for-too-long"),
        pytest.param("/wait", IDLE + 1, True, id="the-server-is-the-slow-one"),
    ],
)
async def test_idle_and_slow_connections_are_closed(path: str, seconds: float, stays: bool) -> None:
    listener = Echo()
    client = RawH2Client(listener).send()
    client.send(client.post(1, b"x", path))
    client.send(frame(h2_frames.PING, 0, 0, bytes(8)))
    client.connection.sweep(seconds)
    assert client.wire.closed is not stays
    assert (client.goaway() is None) is stays
    listener.gate.set()
    await listener.idle()


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"", id="no-preface"),
        pytest.param(h2_frames.PREFACE[:10], id="half-a-preface"),
        pytest.param(h2_frames.PREFACE, id="no-settings"),
        pytest.param(h2_frames.PREFACE + frame(h2_frames.SETTINGS) + b"\0\0\x08", id="half-a-frame"),
        pytest.param(
            h2_frames.PREFACE + frame(h2_frames.SETTINGS) + frame(h2_frames.HEADERS, 0, 1), id="half-the-headers"
        ),
    ],
)
async def test_a_connection_without_a_request_is_closed(sent: bytes) -> None:
    client = RawH2Client()
    receive(client.connection, sent)
    client.connection.sweep(ARRIVING - 1)
    assert not client.wire.closed
    client.connection.sweep(ARRIVING + 1)
    assert client.wire.closed


async def test_only_the_stalled_streams_are_reset() -> None:
    listener = Echo()
    client = RawH2Client(listener, settings=first_window(2)).send()
    client.send(client.headed(1), client.post(3, b"a response that is not read"), client.post(5, b"bind", "/wait"))
    client.connection.sweep(SLOW + 1)
    assert client.resets() == {1: H2ErrorCode.CANCEL, 3: H2ErrorCode.CANCEL}
    assert not client.wire.closed
    listener.gate.set()
    await listener.idle()


async def test_a_drained_connection_may_read_its_response_first() -> None:
    """However slowly: a connection that looks idle may still be sending."""
    listener = Echo()
    client = RawH2Client(listener).send()
    client.send(client.post(1, b"x"))
    client.connection.pause_writing()
    listener.drain()
    client.connection.sweep(SLOW)
    assert (client.wire.closed, client.wire.aborted) == (False, False)
    client.connection.resume_writing()
    client.connection.sweep(SLOW)
    assert client.wire.closed


async def test_a_client_that_does_not_read_goaway_is_aborted() -> None:
    client = RawH2Client().send()
    client.connection.pause_writing()
    client.connection.sweep(IDLE + 1)
    assert client.wire.aborted


async def test_nothing_is_sent_after_goaway_with_an_error() -> None:
    """A response that is ready later, and is larger than the buffer of one write."""
    listener = Echo(limit=10**6)
    client = RawH2Client(listener, settings=first_window(10**6)).send(h2_frames.window_update(0, 10**6))
    client.send(client.post(1, b"x" * 400_000, "/wait"), frame(h2_frames.PUSH_PROMISE, 0, 1))
    writes = client.wire.writes
    listener.gate.set()
    await listener.idle()
    assert (client.goaway(), client.wire.writes) == ((1, H2ErrorCode.PROTOCOL_ERROR), writes)
