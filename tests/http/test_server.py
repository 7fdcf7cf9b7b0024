"""HTTP/1.1 on the wire: fragments, pipelining, malformed and slow requests."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputile.http.h1_server import QUIET, H1Connection
from gputile.http.messages import IDLE, SLOW, Response
from gputile.http.server import Listener
from tests.effort import examples
from tests.http.wire import Echo, Wire, receive

# ---- a connection ---------------------------------------------------------------------------------------------------


def connected(listener: Echo, *, known: bool = False) -> tuple[H1Connection, Wire]:
    connection, wire = H1Connection(listener), Wire(known=known)
    connection.connection_made(wire)
    return connection, wire


def post(path: str, body: bytes) -> bytes:
    return b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (path.encode(), len(body), body)


def answers(wire: Wire) -> list[bytes]:
    return [part.partition(b"\r\n\r\n")[2] for part in wire.sent.split(b"HTTP/1.1 200 OK\r\n")[1:]]


@examples(50)
@given(st.lists(st.integers(0, 200), max_size=12))
async def test_requests_in_any_pieces_are_answered_in_their_order(cuts: list[int]) -> None:
    chunked = b"POST /b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\ntwo\r\n0\r\n\r\n"
    whole = post("/a", b"one") + chunked + b"\r\n" + post("/c", b"")
    listener = Echo()
    connection, wire = connected(listener)
    edges = sorted({0, len(whole), *(cut % len(whole) for cut in cuts)})
    for start, end in pairwise(edges):
        receive(connection, whole[start:end])
    assert answers(wire) == [b"one", b"two", b""]


@examples(100)
@given(
    st.one_of(st.binary(max_size=60), st.sampled_from([b"\r\n", b"\n", b"\r\n ", b":", b"\r\nHost: y"])),
    st.integers(0, 200),
)
async def test_random_bytes_are_rejected_with_the_last_response_or_not_at_all(noise: bytes, at: int) -> None:
    chunked = b"POST /b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3;a=b\r\ntwo\r\n0\r\nA: b\r\n\r\n"
    whole = post("/a", b"one") + chunked + post("/c", b"three")
    connection, wire = connected(Echo())
    receive(connection, whole[:at] + noise + whole[at:])
    *before, last = re.findall(rb"HTTP/1.1 ([0-9]{3}) ", wire.sent) or [b"200"]
    assert set(before) <= {b"200"}
    assert wire.closed is (last != b"200") is (b"Connection: close" in wire.sent)


async def test_a_slow_response_delays_the_next() -> None:
    listener = Echo()
    connection, wire = connected(listener)
    receive(connection, post("/wait", b"first") + post("/a", b"second"))
    assert wire.sent == b""
    receive(connection, b"x" * 70_000)
    assert wire.paused, "a client that pipelines has to wait"
    listener.gate.set()
    await asyncio.sleep(0.01)
    assert answers(wire)[0] == b"first"
    assert b"second" in wire.sent
    assert not wire.paused


async def test_a_client_that_does_not_read_gets_no_further_response() -> None:
    connection, wire = connected(Echo())
    connection.pause_writing()
    receive(connection, post("/a", b"one") + post("/a", b"two"))
    assert (wire.sent, wire.paused) == (b"", True)
    connection.resume_writing()
    assert (answers(wire), wire.paused) == ([b"one", b"two"], False)


async def test_a_client_that_never_reads_is_aborted() -> None:
    connection, wire = connected(Echo())
    connection.pause_writing()
    connection.sweep(SLOW + 1)
    assert wire.aborted


async def test_work_continues_when_its_client_disconnects() -> None:
    listener = Echo()
    connection, wire = connected(listener)
    receive(connection, post("/wait", b"bind"))
    connection.connection_lost(None)
    listener.gate.set()
    assert connection.task is not None
    await connection.task
    assert wire.sent == b""


async def test_a_malformed_request_line_gets_400_and_a_close() -> None:
    connection, wire = connected(Echo())
    receive(connection, b"SSH-2.0-OpenSSH\r\n\r\n")
    assert wire.sent.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert wire.closed


@pytest.mark.parametrize(
    ("sent", "rest"),
    [
        pytest.param(b"", b"", id="no-request"),
        pytest.param(post("/a", b"one"), b"", id="an-answered-request"),
        pytest.param(post("/a", b"one")[:-1], b"e", id="half-a-body"),
        pytest.param(b"POST /a HT", post("/a", b"one")[10:], id="half-a-request-line"),
        pytest.param(post("/wait", b"one"), b"", id="a-request-under-way"),
    ],
)
async def test_a_drained_connection_answers_its_request_and_closes(sent: bytes, rest: bytes) -> None:
    listener = Echo()
    connection, wire = connected(listener)
    receive(connection, sent)
    await asyncio.sleep(0)
    listener.time += 2 * QUIET
    listener.drain()
    assert wire.closed is (sent in (b"", post("/a", b"one")))
    receive(connection, rest)
    listener.gate.set()
    await listener.idle()
    assert wire.closed
    assert answers(wire) == ([b"one"] if sent else [])
    assert (b"Connection: close" in wire.sent) is (sent not in (b"", post("/a", b"one")))


async def test_a_request_just_after_the_drain_is_answered() -> None:
    """Go does not repeat a POST on a connection that is just being closed."""
    listener = Echo()
    connection, wire = connected(listener)
    receive(connection, post("/a", b"one"))
    listener.drain()
    assert not wire.closed
    receive(connection, post("/a", b"two"))
    assert (answers(wire), wire.closed) == ([b"one", b"two"], True)
    assert wire.sent.count(b"Connection: close") == 1


async def test_without_another_request_a_drained_connection_is_closed_when_it_is_quiet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gputile.http.h1_server.QUIET", 0.001)
    listener = Echo()
    connection, wire = connected(listener)
    receive(connection, post("/a", b"one"))
    listener.drain()
    listener.time = 1.0
    async with asyncio.timeout(5):
        while not wire.closed:
            await asyncio.sleep(0)
    assert b"Connection: close" not in wire.sent


async def test_a_drained_connection_may_read_its_response_first() -> None:
    """However slowly: a connection that looks idle may still be sending."""
    listener = Echo()
    connection, wire = connected(listener)
    receive(connection, post("/a", b"one"))
    connection.pause_writing()
    listener.time += 2 * QUIET
    listener.drain()
    assert (wire.closed, wire.aborted) == (True, False)
    listener.time = SLOW + 1
    connection.sweep(listener.time)
    assert wire.aborted


@pytest.mark.parametrize("how", ["/close", "drain"])
async def test_requests_after_the_last_one_are_not_worked_on(how: str) -> None:
    """Their responses could not be sent."""
    listener = Echo()
    connection, wire = connected(listener)
    receive(connection, post("/close" if how == "/close" else "/wait", b"one") + post("/b", b"two"))
    await asyncio.sleep(0)
    listener.drain()
    listener.gate.set()
    await listener.idle()
    assert answers(wire) == [b"one"]
    assert len(listener.requests) == 1


async def test_an_endless_head() -> None:
    connection, wire = connected(Echo())
    receive(connection, b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 20_000)
    assert wire.sent.startswith(b"HTTP/1.1 431 ")
    assert wire.closed


async def test_the_response_to_head_has_no_body() -> None:
    connection, wire = connected(Echo())
    receive(connection, b"HEAD /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nok")
    assert wire.sent.endswith(b"Content-Length: 2\r\n\r\n")


@pytest.mark.parametrize(
    "body",
    [b"Content-Length: 3\r\n\r\none", b"Transfer-Encoding: chunked\r\n\r\n3\r\none\r\n0\r\n\r\n"],
    ids=["length", "chunks"],
)
async def test_a_request_to_upgrade_the_protocol_is_answered_over_http_1_1(body: bytes) -> None:
    """Its body is a body, not the next request."""
    connection, wire = connected(Echo())
    upgrade = b"POST /a HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
    receive(connection, upgrade + body + post("/b", b"two"))
    assert (answers(wire), wire.closed) == ([b"one", b"two"], False)


async def test_a_caller_with_a_verified_certificate_is_known() -> None:
    listener = Echo()
    for known in (True, False):
        connection, _ = connected(listener, known=known)
        receive(connection, post("/a", b""))
    assert [request.is_known for request in listener.requests] == [True, False]


@pytest.mark.parametrize(
    ("sent", "seconds", "stays"),
    [
        pytest.param(post("/a", b"x"), IDLE - 1, True, id="idle-for-a-while"),
        pytest.param(post("/a", b"x"), IDLE + 1, False, id="idle-for-too-long"),
        pytest.param(
            b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nx", SLOW + 1, False, id="half-a-request"
        ),
        pytest.param(b"POST /a", SLOW + 1, False, id="half-a-head"),
        pytest.param(post("/wait", b"x"), IDLE + 1, True, id="the-server-is-the-slow-one"),
    ],
)
async def test_idle_and_slow_connections_are_closed(sent: bytes, seconds: float, stays: bool) -> None:
    listener = Echo()
    connection, wire = connected(listener)
    receive(connection, sent)
    listener.time = seconds
    connection.sweep(listener.now())
    assert wire.closed is not stays
    if connection.task is not None:
        listener.gate.set()
        await connection.task


async def later() -> Response:
    raise RuntimeError("a bug")


def at_once() -> Response:
    raise RecursionError("a bug")


@pytest.mark.parametrize("crash", [later, at_once], ids=["in-a-coroutine", "at-once"])
async def test_an_exception_in_a_handler_is_a_500_and_the_connection_is_kept(
    crash: Callable[[], Response | Awaitable[Response]], caplog: pytest.LogCaptureFixture
) -> None:
    listener = Listener(lambda request: crash() if request.path == "/bug" else Response(b"fine"), 100)
    connection, wire = H1Connection(listener), Wire()
    connection.connection_made(wire)
    receive(connection, post("/bug", b"x") + post("/a", b""))
    if connection.task is not None:
        await connection.task
    assert wire.sent.startswith(b"HTTP/1.1 500 Internal Server Error\r\n")
    assert answers(wire) == [b"fine"]
    assert "a bug" not in wire.sent.decode(), "the traceback is in the log"
    assert "a bug" in caplog.text
    assert not wire.closed
