"""HTTP/2 over real TLS and a real socket, with another implementation's client, on both event loops."""

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


class EchoServer:
    """A server over TLS that echoes bodies."""

    def __init__(self) -> None:
        self.authority = Authority()
        self.echo = Echo(LIMIT)
        self.protocols: list[str] = []
        self.listener = Listener(self.echo.reply, LIMIT, self.protocols.append)
        self.port = 0

    async def __aenter__(self) -> "EchoServer":
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
    """Runs a test in this kind of event loop."""
    runner: Run = request.param
    return runner


def test_a_hundred_concurrent_requests_on_one_connection(run: Run) -> None:
    async def scenario() -> None:
        async with EchoServer() as server, connected(server.port, server.trusted("h2")) as client:
            slow = [await client.post("/wait", b"bind %d" % n) for n in range(100)]
            quick = [await client.post("/a", b"%d" % n * 13_000) for n in range(100)]
            await client.until(*quick)
            assert [client.bodies[number] for number in quick] == [b"%d" % n * 13_000 for n in range(100)]
            assert not client.bodies.keys() & set(slow)
            server.echo.gate.set()
            await client.until(*slow)
            assert [client.bodies[number] for number in slow] == [b"bind %d" % n for n in range(100)]
            assert server.protocols == ["h2"]

    run(scenario())


def test_large_responses_through_small_windows(run: Run) -> None:
    async def scenario() -> None:
        small = {SettingCodes.INITIAL_WINDOW_SIZE: 1000}
        async with EchoServer() as server, connected(server.port, server.trusted("h2", "http/1.1"), small) as client:
            sent = [bytes([n]) * 300_000 for n in range(5)]
            numbers = [await client.post("/a", body) for body in sent]
            await client.until(*numbers)
            assert [client.bodies[number] for number in numbers] == sent

    run(scenario())


def test_requests_whose_stream_is_reset_are_carried_out(run: Run) -> None:
    async def scenario() -> None:
        async with EchoServer() as server, connected(server.port, server.trusted("h2")) as client:
            numbers = [await client.post("/wait", b"bind %d" % n) for n in range(60)]
            for number in numbers[::2]:
                await client.reset(number)
            assert await client.ask("/a", b"filter") == b"filter"
            server.echo.gate.set()
            await client.until(*numbers[1::2])
            assert len(server.echo.finished) == 60
            assert not client.bodies.keys() & set(numbers[::2])

    run(scenario())


def test_a_closing_response_is_followed_by_goaway_with_the_last_stream(run: Run) -> None:
    """This client reads nothing after GOAWAY; `test_h2_limits` tests that open streams continue after it."""

    async def scenario() -> None:
        async with EchoServer() as server, connected(server.port, server.trusted("h2")) as client:
            assert await client.ask("/close", b"filter") == b"filter"
            await client.until_goaway()
            assert client.goaway is not None
            assert (client.goaway.last_stream_id, client.goaway.error_code) == (1, H2ErrorCode.NO_ERROR)

    run(scenario())


def test_stopping_sends_goaway_and_closes(run: Run) -> None:
    async def scenario() -> None:
        async with EchoServer() as server, connected(server.port, server.trusted("h2")) as client:
            assert await client.ask("/a", b"x") == b"x"
            await server.listener.stop()
            await client.until_goaway()
            with pytest.raises(ConnectionError, match="closed the connection"):
                await client.listen()

    run(scenario())


def test_a_flood_ends_in_goaway_with_a_reason(run: Run) -> None:
    async def scenario() -> None:
        async with EchoServer() as server, connected(server.port, server.trusted("h2")) as client:
            while client.goaway is None:
                await client.ping()
            assert client.pings >= MOST_NOISE - 10
            assert client.goaway.error_code == H2ErrorCode.ENHANCE_YOUR_CALM
            assert client.goaway.additional_data == b"too many control frames"

    run(scenario())


@pytest.mark.parametrize("offered", [(), ("http/1.1",), ("spdy/3",)], ids=["no-ALPN", "http-1", "another-protocol"])
def test_a_client_that_does_not_offer_h2_uses_http_1(run: Run, offered: tuple[str, ...]) -> None:
    async def scenario() -> None:
        async with EchoServer() as server:
            tls = server.trusted(*offered)
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", server.port, ssl=tls, server_hostname="localhost"
            )
            writer.write(b"POST /a HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi")
            assert (await reader.read()).endswith(b"\r\n\r\nhi")
            writer.close()
            assert server.protocols == ["http/1.1"]

    run(scenario())


def test_a_client_that_stops_reading_delays_only_itself(run: Run) -> None:
    """Far more bytes than socket buffers hold, with windows that allow to send them all."""

    def large(request: Request) -> Response | Awaitable[Response]:
        return Response(b"x" * 4 * 2**20)

    async def scenario() -> None:
        wide = {SettingCodes.INITIAL_WINDOW_SIZE: 2**31 - 1}
        async with EchoServer() as server, connected(server.port, server.trusted("h2"), wide) as stalled:
            server.listener.answer = large
            stalled.widen(2**30)
            numbers = [await stalled.post("/a", b"x") for _ in range(20)]
            async with connected(server.port, server.trusted("h2")) as other:
                assert len(await other.ask("/a", b"x")) == 4 * 2**20
            await stalled.until(*numbers)
            assert set(stalled.resets.values()) <= {H2ErrorCode.REFUSED_STREAM}
            assert {len(body) for body in stalled.bodies.values()} == {4 * 2**20}
            assert len(stalled.bodies) >= 4

    run(scenario())
