"""Callers without a trusted certificate, byte by byte: what they get, and what they cannot make us keep."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable

import pytest
from hyperframe.frame import SettingsFrame

from gputile.http import h2_frames, h2_server
from gputile.http.h1_server import SLICE, H1Connection
from gputile.http.h2_frames import END_HEADERS, END_STREAM, H2ErrorCode, frame
from gputile.http.limits import MIB
from gputile.http.messages import ARRIVING, IDLE, SHORT_HEAD, SLOW, Reply, Request, Response, Streamed
from gputile.http.server import Listener, ListenerLimits
from tests.http.talk import Talk, first_window
from tests.http.wire import Wire, receive

LARGE = b"p" * (5 * SLICE)
HUGE = b"h" * (30 * SLICE)
HOST = b"Host: x\r\n"


class Office(Listener):
    """Verbs for those who are known, pages for everybody; `/wait` waits for the test."""

    def __init__(self, *, tells_apart: bool = True, bounds: ListenerLimits | None = None) -> None:
        trusts = (lambda certificate: bool(certificate)) if tells_apart else None
        super().__init__(self.reply, 1000, probes=("/healthz",), trusts=trusts, bounds=bounds)
        self.asked: list[Request] = []
        self.gate = asyncio.Event()
        self.page = Response(LARGE, content_type="text/plain")
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def reply(self, request: Request) -> Reply | Awaitable[Reply]:
        self.asked.append(request)
        match request.path:
            case "/wait":
                return self._later()
            case "/metrics":
                return self.page
            case "/watch":
                return Streamed(self._flow())
            case "/verb" if not request.is_trusted:
                return Response(b"no", 403)
        return Response(request.body or b"ok")

    async def _later(self) -> Reply:
        await self.gate.wait()
        return Response(b"done")

    async def _flow(self) -> AsyncGenerator[bytes, None]:
        for _ in range(3):
            yield LARGE

    async def idle(self) -> None:
        await asyncio.gather(*self._working)


class Link(Wire):
    """A transport that is held when more is written than its client has read, as the loop's is."""

    def __init__(self, connection: H1Connection, *, known: bool = False, room: int = 10**9, address: str = "") -> None:
        super().__init__(known=known, address=address)
        self._connection, self._room, self.is_held = connection, room, False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        super().write(data)
        self._room -= len(data)
        if self._room < 0 and not self.is_held:
            self.is_held = True
            self._connection.pause_writing()

    def read(self, count: int) -> None:
        self._room += count
        if self.is_held and self._room >= 0:
            self.is_held = False
            self._connection.resume_writing()


def joined(office: Office, *, known: bool = False, room: int = 10**9, address: str = "") -> tuple[H1Connection, Link]:
    connection = H1Connection(office)
    link = Link(connection, known=known, room=room, address=address)
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
        pytest.param(post("/verb", b"x" * 900), id="a-body-that-is-there"),
        pytest.param(b"POST /verb HTTP/1.1\r\n%bContent-Length: 999999999\r\n\r\n" % HOST, id="a-body-yet-to-come"),
        pytest.param(b"POST /verb HTTP/1.1\r\n%bTransfer-Encoding: chunked\r\n\r\n" % HOST, id="chunks-yet-to-come"),
        pytest.param(
            b"POST /verb HTTP/1.1\r\n%bContent-Length: 9\r\nExpect: 100-continue\r\n\r\n" % HOST,
            id="one-that-asks-first",
        ),
    ],
)
async def test_a_stranger_is_answered_by_its_head_and_its_body_is_thrown_away(head: bytes) -> None:
    office = Office()
    connection, link = joined(office)
    receive(connection, head)
    (asked,) = office.asked
    assert (asked.body, asked.is_trusted) == (b"", False)
    assert link.sent.startswith(b"HTTP/1.1 403 Forbidden\r\n")
    assert b"Connection: close\r\n" in link.sent
    for _ in range(50):
        receive(connection, b"x" * 60_000)
    assert (len(connection._buffer), connection.kept, len(office.asked)) == (0, 0, 1)
    assert not link.paused, "what it sends is taken and thrown away, else it would never read our answer"


async def test_then_the_connection_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gputile.http.h1_server.LINGER", 0.0)
    connection, link = joined(Office())
    receive(connection, post("/verb", b"x" * 900))
    assert not link.closed
    while not link.closed:
        await asyncio.sleep(0)


async def test_whoever_is_trusted_has_its_body_read() -> None:
    office = Office()
    connection, link = joined(office, known=True)
    receive(connection, post("/verb", b"x" * 900))
    assert (office.asked[0].body, office.asked[0].is_trusted) == (b"x" * 900, True)
    assert (connection in office.known, link.closed) == (True, False)


async def test_where_nobody_is_told_apart_everybody_has() -> None:
    office = Office(tells_apart=False)
    connection, _ = joined(office)
    receive(connection, post("/verb", b"x" * 900))
    assert (office.asked[0].body, office.asked[0].is_trusted) == (b"x" * 900, True)
    assert connection in office.strangers


@pytest.mark.parametrize("tells_apart", [True, False], ids=["of-trusted-callers", "of-everybody"])
async def test_unfinished_bodies_are_bounded_in_all(tells_apart: bool) -> None:
    office = Office(tells_apart=tells_apart)
    there = [joined(office, known=True) for _ in range(6)]
    for number, (connection, _) in enumerate(there):
        office.time = float(number)
        receive(connection, post("/verb", b"x" * 1000)[:-1])
    cut = [number for number, (_, link) in enumerate(there) if link.aborted]
    assert cut == [0, 1], "four times the largest body; the oldest go"
    for connection, link in there[2:]:
        receive(connection, b"x")
        assert link.sent.startswith(b"HTTP/1.1 200")
    assert (office.known.kept, office.strangers.kept) == (0, 0)


# ---- one request at a time ------------------------------------------------------------------------------------------


async def test_a_stranger_that_asks_two_things_at_once_is_answered_one() -> None:
    office = Office()
    connection, link = joined(office)
    receive(connection, get("/a") + get("/b") * 500)
    assert [request.path for request in office.asked] == ["/a"]
    assert link.sent.count(b"HTTP/1.1 ") == 1
    assert b"Connection: close\r\n" in link.sent
    assert not connection._buffer


async def test_a_stranger_that_goes_on_while_we_work_gets_that_answer_and_no_other() -> None:
    office = Office()
    connection, link = joined(office)
    receive(connection, get("/wait"))
    receive(connection, get("/b") * 5000)
    assert not connection._buffer
    office.gate.set()
    await office.idle()
    assert [request.path for request in office.asked] == ["/wait"]
    assert b"Connection: close\r\n" in link.sent


async def test_a_stranger_may_ask_again_after_its_answer() -> None:
    office = Office()
    connection, link = joined(office)
    for _ in range(3):
        receive(connection, get("/a"))
    assert (len(office.asked), link.closed, link.sent.count(b"200 OK")) == (3, False, 3)


@pytest.mark.parametrize(
    ("tells_apart", "length", "status"),
    [
        pytest.param(True, SHORT_HEAD - 200, b"200", id="of-a-stranger"),
        pytest.param(True, SHORT_HEAD + 1, b"431", id="too-long-for-a-stranger"),
        pytest.param(False, SHORT_HEAD + 1, b"200", id="where-nobody-is-told-apart"),
    ],
)
async def test_how_long_a_head_may_be(tells_apart: bool, length: int, status: bytes) -> None:
    connection, link = joined(Office(tells_apart=tells_apart))
    receive(connection, b"GET /a HTTP/1.1\r\n%bX: %b\r\n\r\n" % (HOST, b"x" * length))
    assert link.sent[9:12] == status


# ---- large answers --------------------------------------------------------------------------------------------------


async def test_a_large_answer_goes_in_slices_as_it_is_fetched() -> None:
    office = Office()
    connection, link = joined(office, room=SLICE)
    receive(connection, get("/metrics"))
    assert len(link.sent) < 3 * SLICE, "no more is handed over than is fetched"
    assert (office.strangers.unsent, connection in office.strangers) == (len(LARGE), True)
    while link.is_held:
        link.read(SLICE)
    assert link.sent.partition(b"\r\n\r\n")[2] == LARGE
    assert office.strangers.unsent == 0
    receive(connection, get("/a"))
    assert link.sent.endswith(b"ok"), "and the connection lives on"


async def test_a_huge_answer_that_is_fetched_at_once_lets_others_be_answered_in_between() -> None:
    office = Office()
    office.page = Response(HUGE)
    connection, link = joined(office, known=True)
    receive(connection, get("/metrics") + post("/verb", b"next"))
    assert len(link.sent) < 10 * SLICE
    turns = 0
    while not link.sent.endswith(b"next"):
        await asyncio.sleep(0)
        turns += 1
    assert 3 <= turns < 20
    assert HUGE in link.sent


async def test_a_large_answer_is_in_memory_once_however_many_do_not_fetch_it() -> None:
    office = Office()
    links = []
    for _ in range(20):
        connection, link = joined(office, room=0)
        receive(connection, get("/metrics"))
        links.append(link)
    assert office.strangers.unsent == len(LARGE)
    assert sum(len(link.sent) for link in links) <= 20 * 2 * SLICE


async def test_unread_responses_are_limited_are_bounded_in_all() -> None:
    """Each of these asks for another page, as pages change with time."""
    office = Office(bounds=ListenerLimits(answers=2 * len(LARGE)))
    links = []
    for number in range(6):
        office.time, office.page = float(number), Response(bytes(LARGE) + b"%d" % number)
        connection, link = joined(office, room=0)
        receive(connection, get("/metrics"))
        links.append(link)
    assert [link.aborted for link in links] == [True, True, True, True, True, False]
    assert office.strangers.unsent == len(LARGE) + 1


async def test_a_stranger_that_fetches_drop_by_drop_has_a_minute_in_all() -> None:
    office = Office()
    connection, link = joined(office, room=0)
    receive(connection, get("/metrics"))
    for seconds in range(5, int(SLOW) + 1, 5):
        office.time = float(seconds)
        link.read(SLICE // 100)
        connection.since = office.time  # as if that had been a slice
        connection.sweep(office.time)
    assert not link.aborted
    connection.sweep(SLOW + 1)
    assert link.aborted


async def test_what_is_poured_and_not_fetched_counts_too() -> None:
    office = Office()
    connection, link = joined(office, known=True, room=0)
    receive(connection, get("/watch"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert office.known.unsent == len(LARGE)
    link.read(10**9)
    await office.idle()
    assert office.known.unsent == 0
    assert link.sent.endswith(b"0\r\n\r\n")


# ---- places ---------------------------------------------------------------------------------------------------------

FEW = ListenerLimits(arriving=4, probing=2, strangers=3, known=3)


async def test_slow_readers_take_no_place_from_probes_and_known_callers() -> None:
    office = Office(bounds=FEW)
    slow = []
    for _ in range(10):
        connection, link = joined(office, room=0)
        receive(connection, get("/metrics"))
        slow.append(link)
    assert [len(office.strangers), sum(link.aborted for link in slow)] == [3, 7]
    half = [joined(office) for _ in range(10)]
    for connection, _ in half:
        receive(connection, b"GET /metr")
    assert [len(office.arriving), sum(link.aborted for _, link in half)] == [4, 6]
    known, answered = joined(office, known=True)
    receive(known, post("/verb", b"bind"))
    assert answered.sent.endswith(b"bind")
    probe, healthy = joined(office)
    receive(probe, get("/healthz"))
    assert healthy.sent.endswith(b"ok")
    assert (probe in office.probing, known in office.known) == (True, True)
    assert sum(link.aborted for link in slow) == 7, "neither took a place of theirs"


async def test_the_log_says_how_many_had_to_go_once_per_sweep(caplog: pytest.LogCaptureFixture) -> None:
    office = Office(bounds=FEW)
    for _ in range(10):
        joined(office)
    for _ in range(2):
        office.sweep()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith(": 6 arriving")


async def test_probes_that_stay_take_places_only_from_one_another() -> None:
    office = Office(bounds=FEW)
    stay = []
    for number in range(5):
        office.time = float(number)
        stay.append(joined(office))
        receive(stay[-1][0], get("/healthz"))
    assert [link.aborted for _, link in stay] == [True, True, True, False, False]
    assert all(link.sent.endswith(b"ok") for _, link in stay), "each had its answer"


async def test_a_probe_that_then_asks_for_more_is_a_stranger_like_others() -> None:
    office = Office(bounds=FEW)
    connection, _ = joined(office, room=SLICE)
    receive(connection, get("/healthz"))
    receive(connection, get("/metrics"))
    assert (connection in office.probing, connection in office.strangers) == (False, True)


async def test_the_kubelet_gets_a_place_though_another_host_opens_connections_without_end() -> None:
    office = Office(bounds=FEW)
    probe, healthy = joined(office, address="10.0.0.2")
    flood = [joined(office, address="10.6.6.6") for _ in range(100)]
    receive(probe, get("/healthz"))
    assert healthy.sent.endswith(b"ok")
    assert sum(link.aborted for _, link in flood) == 97


async def test_where_all_known_callers_wait_for_us_one_more_has_to_try_again() -> None:
    office = Office(bounds=FEW)
    there = [joined(office, known=True) for _ in range(3)]
    for connection, _ in there:
        receive(connection, post("/wait", b"bind"))
    connection, link = joined(office, known=True)
    receive(connection, post("/verb", b"x"))
    assert (link.aborted, link.sent) == (True, b"")
    office.gate.set()
    await office.idle()
    assert all(one.sent.endswith(b"done") for _, one in there)


async def test_nothing_is_kept_of_those_who_go() -> None:
    office = Office(tells_apart=False)
    for begun in (b"", b"GET", get("/a"), get("/healthz"), get("/metrics"), post("/a", b"x" * 900)[:-1], get("/wait")):
        connection, _ = joined(office, room=0)
        receive(connection, begun)
        connection.connection_lost(None)
    classes = (office.arriving, office.probing, office.strangers, office.known)
    assert [len(one) for one in classes] == [0, 0, 0, 0]
    assert [(one.kept, one.unsent) for one in classes] == [(0, 0)] * 4
    assert not office.connections


async def test_a_page_is_not_made_for_a_stranger_that_has_gone() -> None:
    office = Office()
    connection, _ = joined(office)
    receive(connection, get("/wait"))
    connection.connection_lost(None)
    await asyncio.gather(*office._working, return_exceptions=True)
    assert not office._working


@pytest.mark.parametrize(
    ("known", "said", "seconds", "stays"),
    [
        pytest.param(False, b"", ARRIVING - 1, True, id="a-stranger-that-has-just-come"),
        pytest.param(False, b"", ARRIVING + 1, False, id="a-stranger-that-says-nothing"),
        pytest.param(False, b"GET /heal", ARRIVING + 1, False, id="a-stranger-with-half-a-head"),
        pytest.param(False, get("/a"), SLOW - 1, True, id="a-stranger-between-two-requests"),
        pytest.param(False, get("/a"), SLOW + 1, False, id="a-stranger-that-has-its-answer"),
        pytest.param(False, get("/a") + b"G", ARRIVING + 1, False, id="a-stranger-that-has-begun-again"),
        pytest.param(True, b"", IDLE - 1, True, id="a-known-caller-that-keeps-a-connection"),
        pytest.param(True, post("/a", b"xy")[:-1], SLOW - 1, True, id="a-known-caller-with-half-a-body"),
        pytest.param(True, post("/a", b"xy")[:-1], SLOW + 1, False, id="which-takes-too-long"),
    ],
)
async def test_how_long_each_may_take(known: bool, said: bytes, seconds: float, stays: bool) -> None:
    office = Office()
    connection, link = joined(office, known=known)
    receive(connection, said)
    office.time = seconds
    connection.sweep(seconds)
    assert (link.closed or link.aborted) is not stays


# ---- HTTP/2 ---------------------------------------------------------------------------------------------------------


def h2_office(*, known: bool = False) -> tuple[Office, Talk]:
    office = Office()
    return office, Talk(office, known=known).say()


async def test_a_stranger_has_one_stream_at_a_time() -> None:
    office, talk = h2_office()
    talk.say(talk.post(1, path="/wait"), talk.post(3, path="/a"), talk.post(5, path="/a"))
    assert talk.resets() == {3: H2ErrorCode.REFUSED_STREAM, 5: H2ErrorCode.REFUSED_STREAM}
    office.gate.set()
    await office.idle()
    talk.say(talk.post(7, path="/a"))
    assert talk.answers() == {1: b"done", 7: b"ok"}


async def test_a_stranger_over_http_2_is_answered_by_its_headers() -> None:
    office, talk = h2_office()
    begin = frame(h2_frames.HEADERS, END_HEADERS, 1, talk.block("/verb", []))
    talk.say(begin, frame(h2_frames.DATA, 0, 1, b"x" * 16384) * 30)
    (asked,) = office.asked
    assert (asked.body, talk.connection.kept, len(talk.connection._buffer)) == (b"", 0, 0)
    assert (talk.answers(), talk.resets(), talk.goaway()) == ({1: b"no"}, {}, (1, H2ErrorCode.NO_ERROR))


async def test_a_stranger_is_told_to_send_no_body() -> None:
    _, talk = h2_office()
    told = talk.frames()[0]
    assert isinstance(told, SettingsFrame)
    assert told.settings == {3: 1, 4: 0, 5: h2_frames.SMALLEST_FRAME, 6: SHORT_HEAD}


async def test_a_frame_of_a_stranger_is_short() -> None:
    _, talk = h2_office()
    talk.say(h2_frames.head(h2_frames.DATA, 0, 1, h2_frames.SMALLEST_FRAME + 1))
    assert talk.goaway() == (0, H2ErrorCode.FRAME_SIZE_ERROR)


async def test_a_stranger_that_asks_without_end_is_told_to_calm_down() -> None:
    office, talk = h2_office()
    talk.say(*(talk.post(number, path="/a") for number in range(1, 4001, 2)))
    assert talk.goaway() is not None
    assert talk.goaway()[1] == H2ErrorCode.ENHANCE_YOUR_CALM  # type: ignore[index]
    assert len(office.asked) <= h2_server.MOST_NOISE


async def test_a_large_answer_over_http_2_counts_until_it_is_fetched() -> None:
    office = Office()
    talk = Talk(office, settings=first_window(100)).say()
    talk.say(talk.post(1, path="/metrics"))
    assert office.strangers.unsent == len(LARGE)
    talk.say(h2_frames.window_update(1, MIB), h2_frames.window_update(0, MIB))
    assert (office.strangers.unsent, talk.answers()) == (0, {1: LARGE})


@pytest.mark.parametrize("how", ["reset", "lost", "swept"])
async def test_a_large_answer_that_is_not_wanted_any_more_counts_no_longer(how: str) -> None:
    office = Office()
    talk = Talk(office, settings=first_window(100)).say()
    talk.say(talk.post(1, path="/metrics"))
    match how:
        case "reset":
            talk.say(h2_frames.reset(1, H2ErrorCode.CANCEL))
        case "lost":
            talk.connection.connection_lost(None)
        case "swept":
            talk.connection.sweep(SLOW + 1)
    assert office.strangers.unsent == 0


async def test_bodies_over_http_2_count_in_their_class() -> None:
    office, talk = h2_office(known=True)
    talk.say(talk.headed(1, b"900"), frame(h2_frames.DATA, 0, 1, b"x" * 899))
    assert office.known.kept == 899
    talk.say(frame(h2_frames.DATA, END_STREAM, 1, b"x"))
    assert (office.known.kept, len(talk.ended())) == (0, 1)


async def test_bodies_over_http_2_go_on_counting_when_their_connection_changes_its_class() -> None:
    """Where nobody is told apart, a probe may come over the same connection."""
    office = Office(tells_apart=False)
    talk = Talk(office).say()
    talk.say(talk.headed(1, b"900"), frame(h2_frames.DATA, 0, 1, b"x" * 800), talk.post(3, path="/healthz"))
    assert (office.strangers.kept, office.probing.kept) == (0, 800)
    talk.say(talk.headed(5, b"900"), frame(h2_frames.DATA, 0, 5, b"x" * 100))
    assert (office.strangers.kept, office.probing.kept) == (900, 0)
    talk.say(frame(h2_frames.DATA, END_STREAM, 1, b"x" * 100), frame(h2_frames.DATA, END_STREAM, 5, b"x" * 800))
    assert (office.strangers.kept, office.probing.kept, sorted(talk.ended())) == (0, 0, [1, 3, 5])


@pytest.mark.parametrize(
    ("entries", "calm"),
    [
        pytest.param(h2_server.MOST_SETTINGS, True, id="some"),
        pytest.param(21_845, False, id="as-many-as-fit-into-a-frame"),
    ],
)
async def test_a_frame_with_very_many_settings(entries: int, calm: bool) -> None:
    """Each changed the window of every open stream, and sent what then fitted."""
    talk = Talk(Office(), known=True).say()
    talk.say(frame(h2_frames.SETTINGS, payload=first_window(5) * (entries - 1) + first_window(7)))
    assert (talk.goaway() is None) is calm
    if calm:
        assert talk.connection._out.first_window == 7, "the last counts"
