"""HTTP/2 over real TLS and a real socket, with somebody else's client, on both event loops."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
import uvloop
from h2.settings import SettingCodes

from gputile.http.h2_frames import H2ErrorCode
from gputile.http.h2_server import MOST_NOISE
from gputile.http.messages import Request, Response
from gputile.http.server import ALPN, Listener
from tests.http.h2_client import connected, trusting
from tests.http.wire import Echo
from tests.kube.certificates import Authority

Run = Callable[[Coroutine[Any, Any, None]], None]
LIMIT = 2**20


class Place:
    """A listener over TLS that echoes."""

    def __init__(self) -> None:
        self.authority = Authority()
        self.echo = Echo(LIMIT)
        self.spoken: list[str] = []
        self.listener = Listener(self.echo.reply, LIMIT, self.spoken.append)
        self.port = 0

    async def __aenter__(self) -> "Place":
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.authority.issue("localhost").load_into(tls)
        tls.set_alpn_protocols(ALPN)
        self.port = await self.listener.start("127.0.0.1", 0, tls)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.echo.gate.set()
        await self.listener.stop()

    def trusted(self, *protocols: str) -> ssl.SSLContext:
        return trusting(self.authority.pem, *protocols)


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """The test in a loop of this kind."""
    made: Run = request.param
    return made


def test_a_hundred_questions_at_once_on_one_connection(run: Run) -> None:
    async def story() -> None:
        async with Place() as place, connected(place.port, place.trusted("h2")) as client:
            slow = [await client.post("/wait", b"bind %d" % n) for n in range(100)]
            quick = [await client.post("/a", b"%d" % n * 13_000) for n in range(100)]
            await client.until(*quick)
            assert [client.bodies[number] for number in quick] == [b"%d" % n * 13_000 for n in range(100)]
            assert not client.bodies.keys() & set(slow)
            place.echo.gate.set()
            await client.until(*slow)
            assert [client.bodies[number] for number in slow] == [b"bind %d" % n for n in range(100)]
            assert place.spoken == ["h2"]

    run(story())


def test_large_answers_through_small_windows(run: Run) -> None:
    async def story() -> None:
        small = {SettingCodes.INITIAL_WINDOW_SIZE: 1000}
        async with Place() as place, connected(place.port, place.trusted("h2", "http/1.1"), small) as client:
            sent = [bytes([n]) * 300_000 for n in range(5)]
            numbers = [await client.post("/a", body) for body in sent]
            await client.until(*numbers)
            assert [client.bodies[number] for number in numbers] == sent

    run(story())


def test_questions_that_are_taken_back_are_done_all_the_same(run: Run) -> None:
    async def story() -> None:
        async with Place() as place, connected(place.port, place.trusted("h2")) as client:
            numbers = [await client.post("/wait", b"bind %d" % n) for n in range(60)]
            for number in numbers[::2]:
                await client.take_back(number)
            assert await client.ask("/a", b"filter") == b"filter"
            place.echo.gate.set()
            await client.until(*numbers[1::2])
            assert len(place.echo.finished) == 60
            assert not client.bodies.keys() & set(numbers[::2])

    run(story())


def test_who_is_let_go_has_his_answer_and_hears_the_last_stream(run: Run) -> None:
    """This client can hear nothing behind a farewell; that streams go on behind it is in `test_h2_limits`."""

    async def story() -> None:
        async with Place() as place, connected(place.port, place.trusted("h2")) as client:
            assert await client.ask("/close", b"filter") == b"filter"
            await client.until_farewell()
            assert client.farewell is not None
            assert (client.farewell.last_stream_id, client.farewell.error_code) == (1, H2ErrorCode.NO_ERROR)

    run(story())


def test_stopping_says_goodbye_and_hangs_up(run: Run) -> None:
    async def story() -> None:
        async with Place() as place, connected(place.port, place.trusted("h2")) as client:
            assert await client.ask("/a", b"x") == b"x"
            await place.listener.stop()
            await client.until_farewell()
            with pytest.raises(ConnectionError, match="hung up"):
                await client.listen()

    run(story())


def test_a_flood_ends_in_a_farewell_with_its_reason(run: Run) -> None:
    async def story() -> None:
        async with Place() as place, connected(place.port, place.trusted("h2")) as client:
            while client.farewell is None:
                await client.ping()
            assert client.pings >= MOST_NOISE - 10
            assert client.farewell.error_code == H2ErrorCode.ENHANCE_YOUR_CALM
            assert client.farewell.additional_data == b"too many control frames"

    run(story())


@pytest.mark.parametrize("offered", [(), ("http/1.1",), ("spdy/3",)], ids=["nothing", "http-1", "something-else"])
def test_who_does_not_offer_it_speaks_http_1(run: Run, offered: tuple[str, ...]) -> None:
    async def story() -> None:
        async with Place() as place:
            tls = place.trusted(*offered)
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", place.port, ssl=tls, server_hostname="localhost"
            )
            writer.write(b"POST /a HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi")
            assert (await reader.read()).endswith(b"\r\n\r\nhi")
            writer.close()
            assert place.spoken == ["http/1.1"]

    run(story())


def test_who_stops_reading_holds_up_only_himself(run: Run) -> None:
    """Far more than sockets hold, with windows that would let it all out."""

    def large(request: Request) -> Response | Awaitable[Response]:
        return Response(b"x" * 4 * 2**20)

    async def story() -> None:
        wide = {SettingCodes.INITIAL_WINDOW_SIZE: 2**31 - 1}
        async with Place() as place, connected(place.port, place.trusted("h2"), wide) as deaf:
            place.listener.answer = large
            deaf.widen(2**30)
            numbers = [await deaf.post("/a", b"x") for _ in range(20)]
            async with connected(place.port, place.trusted("h2")) as other:
                assert len(await other.ask("/a", b"x")) == 4 * 2**20
            await deaf.until(*numbers)
            assert set(deaf.resets.values()) <= {H2ErrorCode.REFUSED_STREAM}
            assert {len(body) for body in deaf.bodies.values()} == {4 * 2**20}
            assert len(deaf.bodies) >= 4

    run(story())
