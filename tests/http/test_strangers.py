"""Callers without a trusted certificate, byte by byte: their responses, and the limits of what they can use."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable

import pytest

from gputile.http.h1_server import SLICE, H1Connection
from gputile.http.messages import ARRIVING, IDLE, SHORT_HEAD, SLOW, Reply, Request, Response, Streamed
from gputile.http.server import Listener, ListenerLimits
from tests.http.wire import Wire, receive

LARGE = b"p" * (5 * SLICE)
HUGE = b"h" * (30 * SLICE)
HOST = b"Host: x\r\n"


class Server(Listener):
    """A server with verbs for known callers and pages for all; `/wait` waits for the test."""

    def __init__(self, *, distinguishes: bool = True, bounds: ListenerLimits | None = None) -> None:
        trusts = (lambda certificate: bool(certificate)) if distinguishes else None
        super().__init__(self.reply, 1000, probes=("/healthz",), trusts=trusts, bounds=bounds)
        self.requests: list[Request] = []
        self.gate = asyncio.Event()
        self.page = Response(LARGE, content_type="text/plain")
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def reply(self, request: Request) -> Reply | Awaitable[Reply]:
        self.requests.append(request)
        match request.path:
            case "/wait":
                return self._later()
            case "/metrics":
                return self.page
            case "/watch":
                return Streamed(self._stream())
            case "/verb" if not request.is_trusted:
                return Response(b"no", 403)
        return Response(request.body or b"ok")

    async def _later(self) -> Reply:
        await self.gate.wait()
        return Response(b"done")

    async def _stream(self) -> AsyncGenerator[bytes, None]:
        for _ in range(3):
            yield LARGE

    async def idle(self) -> None:
        await asyncio.gather(*self._working)


class Link(Wire):
    """A transport that pauses writing when the client has not read enough, as the event loop's does."""

    def __init__(
        self, connection: H1Connection, *, known: bool = False, window: int = 10**9, address: str = ""
    ) -> None:
        super().__init__(known=known, address=address)
        self._connection, self._window, self.is_held = connection, window, False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        super().write(data)
        self._window -= len(data)
        if self._window < 0 and not self.is_held:
            self.is_held = True
            self._connection.pause_writing()

    def read(self, count: int) -> None:
        self._window += count
        if self.is_held and self._window >= 0:
            self.is_held = False
            self._connection.resume_writing()


def connected(
    server: Server, *, known: bool = False, window: int = 10**9, address: str = ""
) -> tuple[H1Connection, Link]:
    connection = H1Connection(server)
    link = Link(connection, known=known, window=window, address=address)
    connection.connection_made(link)
    return connection, link


def get(path: str) -> bytes:
    return b"GET %b HTTP/1.1\r\n%b\r\n" % (path.encode(), HOST)


def post(path: str, body: bytes, more: bytes = b"") -> bytes:
    return b"POST %b HTTP/1.1\r\n%bContent-Length: %d\r\n%b\r\n%b" % (path.encode(), HOST, len(body), more, body)


# ---- bodies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(post("/verb", b"x" * 900), id="a-complete-body"),
        pytest.param(b"POST /verb HTTP/1.1\r\n%bContent-Length: 999999999\r\n\r\n" % HOST, id="a-body-that-follows"),
        pytest.param(b"POST /verb HTTP/1.1\r\n%bTransfer-Encoding: chunked\r\n\r\n" % HOST, id="chunks-that-follow"),
        pytest.param(
            b"POST /verb HTTP/1.1\r\n%bContent-Length: 9\r\nExpect: 100-continue\r\n\r\n" % HOST,
            id="expect-100-continue",
        ),
    ],
)
async def test_an_untrusted_caller_is_answered_from_its_head_and_its_body_is_discarded(head: bytes) -> None:
    server = Server()
    connection, link = connected(server)
    receive(connection, head)
    (request,) = server.requests
    assert (request.body, request.is_trusted) == (b"", False)
    assert link.sent.startswith(b"HTTP/1.1 403 Forbidden\r\n")
    assert b"Connection: close\r\n" in link.sent
    for _ in range(50):
        receive(connection, b"x" * 60_000)
    assert (len(connection._buffer), connection.kept, len(server.requests)) == (0, 0, 1)
    assert not link.paused, "its body is read and discarded; otherwise the client would not read the response"


async def test_then_the_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gputile.http.h1_server.DISCARD_SECONDS", 0.0)
    connection, link = connected(Server())
    receive(connection, post("/verb", b"x" * 900))
    assert not link.closed
    while not link.closed:
        await asyncio.sleep(0)


async def test_the_body_of_a_trusted_caller_is_read() -> None:
    server = Server()
    connection, link = connected(server, known=True)
    receive(connection, post("/verb", b"x" * 900))
    assert (server.requests[0].body, server.requests[0].is_trusted) == (b"x" * 900, True)
    assert (connection in server.known, link.closed) == (True, False)


async def test_without_trusts_every_body_is_read() -> None:
    server = Server(distinguishes=False)
    connection, _ = connected(server)
    receive(connection, post("/verb", b"x" * 900))
    assert (server.requests[0].body, server.requests[0].is_trusted) == (b"x" * 900, True)
    assert connection in server.strangers


@pytest.mark.parametrize("distinguishes", [True, False], ids=["of-trusted-callers", "of-all-callers"])
async def test_incomplete_bodies_are_limited(distinguishes: bool) -> None:
    server = Server(distinguishes=distinguishes)
    clients = [connected(server, known=True) for _ in range(6)]
    for number, (connection, _) in enumerate(clients):
        server.time = float(number)
        receive(connection, post("/verb", b"x" * 1000)[:-1])
    cut = [number for number, (_, link) in enumerate(clients) if link.aborted]
    assert cut == [0, 1], "four times the largest body; the oldest are evicted"
    for connection, link in clients[2:]:
        receive(connection, b"x")
        assert link.sent.startswith(b"HTTP/1.1 200")
    assert (server.known.kept, server.strangers.kept) == (0, 0)


# ---- one request at a time ------------------------------------------------------------------------------------------


async def test_an_untrusted_caller_that_pipelines_gets_one_response() -> None:
    server = Server()
    connection, link = connected(server)
    receive(connection, get("/a") + get("/b") * 500)
    assert [request.path for request in server.requests] == ["/a"]
    assert link.sent.count(b"HTTP/1.1 ") == 1
    assert b"Connection: close\r\n" in link.sent
    assert not connection._buffer


async def test_an_untrusted_caller_that_sends_during_a_request_gets_that_response_only() -> None:
    server = Server()
    connection, link = connected(server)
    receive(connection, get("/wait"))
    receive(connection, get("/b") * 5000)
    assert not connection._buffer
    server.gate.set()
    await server.idle()
    assert [request.path for request in server.requests] == ["/wait"]
    assert b"Connection: close\r\n" in link.sent


async def test_an_untrusted_caller_may_send_another_request_after_its_response() -> None:
    server = Server()
    connection, link = connected(server)
    for _ in range(3):
        receive(connection, get("/a"))
    assert (len(server.requests), link.closed, link.sent.count(b"200 OK")) == (3, False, 3)


@pytest.mark.parametrize(
    ("distinguishes", "length", "status"),
    [
        pytest.param(True, SHORT_HEAD - 200, b"200", id="of-an-untrusted-caller"),
        pytest.param(True, SHORT_HEAD + 1, b"431", id="too-long-for-an-untrusted-caller"),
        pytest.param(False, SHORT_HEAD + 1, b"200", id="without-trusts"),
    ],
)
async def test_the_limit_of_a_head(distinguishes: bool, length: int, status: bytes) -> None:
    connection, link = connected(Server(distinguishes=distinguishes))
    receive(connection, b"GET /a HTTP/1.1\r\n%bX: %b\r\n\r\n" % (HOST, b"x" * length))
    assert link.sent[9:12] == status


# ---- large responses ------------------------------------------------------------------------------------------------


async def test_a_large_response_is_written_in_slices_as_it_is_read() -> None:
    server = Server()
    connection, link = connected(server, window=SLICE)
    receive(connection, get("/metrics"))
    assert len(link.sent) < 3 * SLICE, "no more is written than is read"
    assert (server.strangers.unsent, connection in server.strangers) == (len(LARGE), True)
    while link.is_held:
        link.read(SLICE)
    assert link.sent.partition(b"\r\n\r\n")[2] == LARGE
    assert server.strangers.unsent == 0
    receive(connection, get("/a"))
    assert link.sent.endswith(b"ok"), "and the connection is kept"


async def test_a_huge_response_gives_other_requests_their_turn() -> None:
    server = Server()
    server.page = Response(HUGE)
    connection, link = connected(server, known=True)
    receive(connection, get("/metrics") + post("/verb", b"next"))
    assert len(link.sent) < 10 * SLICE
    turns = 0
    while not link.sent.endswith(b"next"):
        await asyncio.sleep(0)
        turns += 1
    assert 3 <= turns < 20
    assert HUGE in link.sent


async def test_a_large_response_is_in_memory_once_for_all_its_readers() -> None:
    server = Server()
    links = []
    for _ in range(20):
        connection, link = connected(server, window=0)
        receive(connection, get("/metrics"))
        links.append(link)
    assert server.strangers.unsent == len(LARGE)
    assert sum(len(link.sent) for link in links) <= 20 * 2 * SLICE


async def test_unread_responses_of_a_class_are_limited() -> None:
    """Each caller gets another page, as pages change with time."""
    server = Server(bounds=ListenerLimits(answers=2 * len(LARGE)))
    links = []
    for number in range(6):
        server.time, server.page = float(number), Response(bytes(LARGE) + b"%d" % number)
        connection, link = connected(server, window=0)
        receive(connection, get("/metrics"))
        links.append(link)
    assert [link.aborted for link in links] == [True, True, True, True, True, False]
    assert server.strangers.unsent == len(LARGE) + 1


async def test_an_untrusted_caller_that_reads_slowly_has_a_minute_in_total() -> None:
    server = Server()
    connection, link = connected(server, window=0)
    receive(connection, get("/metrics"))
    for seconds in range(5, int(SLOW) + 1, 5):
        server.time = float(seconds)
        link.read(SLICE // 100)
        connection.since = server.time  # as if that had been a slice
        connection.sweep(server.time)
    assert not link.aborted
    connection.sweep(SLOW + 1)
    assert link.aborted


async def test_unread_pieces_of_a_stream_count_too() -> None:
    server = Server()
    connection, link = connected(server, known=True, window=0)
    receive(connection, get("/watch"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert server.known.unsent == len(LARGE)
    link.read(10**9)
    await server.idle()
    assert server.known.unsent == 0
    assert link.sent.endswith(b"0\r\n\r\n")


# ---- classes --------------------------------------------------------------------------------------------------------

FEW = ListenerLimits(arriving=4, probing=2, strangers=3, known=3)


async def test_slow_readers_evict_neither_probes_nor_known_callers() -> None:
    server = Server(bounds=FEW)
    slow = []
    for _ in range(10):
        connection, link = connected(server, window=0)
        receive(connection, get("/metrics"))
        slow.append(link)
    assert [len(server.strangers), sum(link.aborted for link in slow)] == [3, 7]
    half = [connected(server) for _ in range(10)]
    for connection, _ in half:
        receive(connection, b"GET /metr")
    assert [len(server.arriving), sum(link.aborted for _, link in half)] == [4, 6]
    known, answered = connected(server, known=True)
    receive(known, post("/verb", b"bind"))
    assert answered.sent.endswith(b"bind")
    probe, healthy = connected(server)
    receive(probe, get("/healthz"))
    assert healthy.sent.endswith(b"ok")
    assert (probe in server.probing, known in server.known) == (True, True)
    assert sum(link.aborted for link in slow) == 7, "neither evicted one of them"


async def test_the_log_has_the_number_of_evicted_connections_once_per_sweep(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(bounds=FEW)
    for _ in range(10):
        connected(server)
    for _ in range(2):
        server.sweep()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith(": 6 arriving")


async def test_idle_probes_evict_only_one_another() -> None:
    server = Server(bounds=FEW)
    probes = []
    for number in range(5):
        server.time = float(number)
        probes.append(connected(server))
        receive(probes[-1][0], get("/healthz"))
    assert [link.aborted for _, link in probes] == [True, True, True, False, False]
    assert all(link.sent.endswith(b"ok") for _, link in probes), "each had its response"


async def test_a_probe_that_requests_another_path_changes_its_class() -> None:
    server = Server(bounds=FEW)
    connection, _ = connected(server, window=SLICE)
    receive(connection, get("/healthz"))
    receive(connection, get("/metrics"))
    assert (connection in server.probing, connection in server.strangers) == (False, True)


async def test_the_kubelet_is_served_while_another_host_floods() -> None:
    server = Server(bounds=FEW)
    probe, healthy = connected(server, address="10.0.0.2")
    flood = [connected(server, address="10.6.6.6") for _ in range(100)]
    receive(probe, get("/healthz"))
    assert healthy.sent.endswith(b"ok")
    assert sum(link.aborted for _, link in flood) == 97


async def test_if_all_known_callers_are_being_served_a_new_one_is_evicted() -> None:
    server = Server(bounds=FEW)
    clients = [connected(server, known=True) for _ in range(3)]
    for connection, _ in clients:
        receive(connection, post("/wait", b"bind"))
    connection, link = connected(server, known=True)
    receive(connection, post("/verb", b"x"))
    assert (link.aborted, link.sent) == (True, b"")
    server.gate.set()
    await server.idle()
    assert all(other.sent.endswith(b"done") for _, other in clients)


async def test_a_closed_connection_leaves_no_counts() -> None:
    server = Server(distinguishes=False)
    for begun in (b"", b"GET", get("/a"), get("/healthz"), get("/metrics"), post("/a", b"x" * 900)[:-1], get("/wait")):
        connection, _ = connected(server, window=0)
        receive(connection, begun)
        connection.connection_lost(None)
    classes = (server.arriving, server.probing, server.strangers, server.known)
    assert [len(callers) for callers in classes] == [0, 0, 0, 0]
    assert [(callers.kept, callers.unsent) for callers in classes] == [(0, 0)] * 4
    assert not server.connections


async def test_the_work_for_an_untrusted_caller_is_cancelled_when_it_disconnects() -> None:
    server = Server()
    connection, _ = connected(server)
    receive(connection, get("/wait"))
    connection.connection_lost(None)
    await asyncio.gather(*server._working, return_exceptions=True)
    assert not server._working


@pytest.mark.parametrize(
    ("known", "sent", "seconds", "stays"),
    [
        pytest.param(False, b"", ARRIVING - 1, True, id="a-new-untrusted-caller"),
        pytest.param(False, b"", ARRIVING + 1, False, id="an-untrusted-caller-without-a-request"),
        pytest.param(False, b"GET /heal", ARRIVING + 1, False, id="an-untrusted-caller-with-half-a-head"),
        pytest.param(False, get("/a"), SLOW - 1, True, id="an-untrusted-caller-between-two-requests"),
        pytest.param(False, get("/a"), SLOW + 1, False, id="an-idle-untrusted-caller"),
        pytest.param(False, get("/a") + b"G", ARRIVING + 1, False, id="an-untrusted-caller-with-half-a-second-request"),
        pytest.param(True, b"", IDLE - 1, True, id="an-idle-known-caller"),
        pytest.param(True, post("/a", b"xy")[:-1], SLOW - 1, True, id="a-known-caller-with-half-a-body"),
        pytest.param(True, post("/a", b"xy")[:-1], SLOW + 1, False, id="a-known-caller-with-half-a-body-for-too-long"),
    ],
)
async def test_timeouts_of_each_class(known: bool, sent: bytes, seconds: float, stays: bool) -> None:
    server = Server()
    connection, link = connected(server, known=known)
    receive(connection, sent)
    server.time = seconds
    connection.sweep(seconds)
    assert (link.closed or link.aborted) is not stays
