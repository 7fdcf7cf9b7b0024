"""Requests to misbehaving servers over local sockets: the result, and which connections are kept."""

import asyncio
from contextlib import closing
from typing import Any

import pytest

from gputile.http.client import IDLE, ConnectionBroken, ConnectionPool, HttpAnswer, NotSent, header
from gputile.http.connection import ClientConnection
from tests.http.misbehaving import CLOSE, HALF_CLOSE, HANG, RESET, Server, Step
from tests.http.requests import CHUNKED, HEAD, SOON, WHOLE, Clock, ask, asking, opened, response, until

# ---- requests -------------------------------------------------------------------------------------------------------


async def test_a_request_is_sent_in_one_write() -> None:
    async with asking(WHOLE, WHOLE, WHOLE) as (pool, server):
        await ask(pool, target="/a?b=c%20d", headers=header("Accept", "x/y"))
        await ask(pool, "POST", "/p", body=b"{}", headers=header("Content-Type", "x/y"))
        await ask(pool, "DELETE", "/p")
    host = f"Host: 127.0.0.1:{server.port}\r\n".encode()
    assert server.requests == [
        b"GET /a?b=c%20d HTTP/1.1\r\n" + host + b"Accept: x/y\r\n\r\n",
        b"POST /p HTTP/1.1\r\n" + host + b"Content-Type: x/y\r\nContent-Length: 2\r\n\r\n{}",
        b"DELETE /p HTTP/1.1\r\n" + host + b"Content-Length: 0\r\n\r\n",
    ]


async def test_the_path_of_the_url_is_a_prefix_of_all_requests() -> None:
    async with Server(WHOLE) as server:
        pool = ConnectionPool(f"{server.url}/k8s/clusters/c1/")
        await ask(pool, target="/api")
        await pool.close()
    assert server.requests[0].startswith(b"GET /k8s/clusters/c1/api HTTP/1.1\r\n")


@pytest.mark.parametrize(
    "target",
    [
        pytest.param("/a HTTP/1.1\r\nX: y", id="a-second-line"),
        pytest.param("/a b", id="a-space"),
        pytest.param("/ä", id="not-ascii"),
        pytest.param("/\x00", id="not-printable"),
    ],
)
async def test_a_target_or_header_that_could_inject_a_line_is_not_sent(target: str) -> None:
    async with asking() as (pool, server):
        with pytest.raises(NotSent):
            await ask(pool, target=target)
        with pytest.raises(NotSent):
            header("Authorization", target.replace("a b", "a\nb"))
    assert server.connections == 0


# ---- responses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "steps", "body", "stays"),
    [
        pytest.param("GET", WHOLE, b"ok", True, id="content-length"),
        pytest.param("GET", [CHUNKED + b"2\r\nok\r\n", b"0\r\n\r\n"], b"ok", True, id="chunked"),
        pytest.param("GET", [CHUNKED, b"1;x=y\r\no\r\n1\r\nk\r\n0\r\nA: b\r\n\r\n"], b"ok", True, id="with-trailers"),
        pytest.param("GET", [CHUNKED + b"0\r\n\r\n"], b"", True, id="chunked-and-empty"),
        pytest.param("GET", [HEAD + b"\r\n", b"o", b"k", CLOSE], b"ok", False, id="until-the-connection-closes"),
        pytest.param("GET", [HEAD + b"Content-Length: 2\r\nConnection: close\r\n\r\nok"], b"ok", False, id="it-closes"),
        pytest.param("HEAD", [HEAD + b"Content-Length: 2\r\n\r\n"], b"", True, id="response-to-HEAD"),
        pytest.param("POST", [b"HTTP/1.1 204 No Content\r\n\r\n"], b"", True, id="204"),
        pytest.param("GET", [b"HTTP/1.1 304 Not Modified\r\nContent-Length: 2\r\n\r\n"], b"", True, id="304"),
        pytest.param("POST", [b"HTTP/1.1 100 Continue\r\n\r\n", *WHOLE], b"ok", True, id="after-100-continue"),
        pytest.param(
            "GET",
            [b"HTTP/1.1 103 Hints\r\nLink: a\r\n\r\nHTTP/1.1 100 C\r\n\r\n", *WHOLE],
            b"ok",
            True,
            id="after-two-1xx-responses",
        ),
        pytest.param(
            "GET", [WHOLE[0], b"HTTP/1.1 408 Too Slow\r\n\r\n"], b"ok", False, id="followed-by-unsolicited-bytes"
        ),
        pytest.param("GET", response(b"x" * 3_000_000), b"x" * 3_000_000, True, id="of-three-megabytes"),
    ],
)
async def test_responses_and_kept_connections(method: str, steps: list[Step], body: bytes, stays: bool) -> None:
    async with asking(steps, WHOLE) as (pool, server):
        answer = await ask(pool, method)
        if not stays:
            await until(lambda: not pool.open_now)
        assert (await ask(pool)).body == b"ok"
    assert answer.body == body
    assert server.connections == (1 if stays else 2)


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([CLOSE], id="nothing"),
        pytest.param([RESET], id="a-reset"),
        pytest.param([HEAD, CLOSE], id="half-a-head"),
        pytest.param([HEAD + b"Content-Length: 9\r\n\r\nok", CLOSE], id="half-a-body"),
        pytest.param([CHUNKED + b"2\r\nok\r\n", CLOSE], id="chunked-without-an-end"),
        pytest.param([CHUNKED + b"x\r\n", HANG], id="an-invalid-chunk-size"),
        pytest.param([b"SSH-2.0-OpenSSH\r\n\r\n", HANG], id="another-protocol"),
        pytest.param([b"HTTP/1.1 101 Switching Protocols\r\n\r\n", HANG], id="101-switching-protocols"),
        pytest.param([HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nok", HANG], id="two-lengths"),
        pytest.param([HEAD + b"A: b\r\n" * 20_000, HANG], id="an-endless-head"),
        pytest.param([HEAD + b"A: b\r\n" * 11_000 + b"\r\n", HANG], id="a-head-that-is-too-long"),
        pytest.param([HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1" * 5000, HANG], id="an-endless-line"),
    ],
)
async def test_an_invalid_response_is_connection_broken_and_not_retried(steps: list[Step]) -> None:
    async with asking(steps, WHOLE) as (pool, server):
        with pytest.raises(ConnectionBroken):
            await ask(pool)
        assert len(server.requests) == 1
        assert (await ask(pool)).body == b"ok"
    assert server.connections == 2


async def test_a_timeout_closes_the_connection() -> None:
    scripts: list[list[Step]] = [[HANG], [HEAD, HANG], [HEAD + b"Content-Length: 9\r\n\r\nok", HANG]]
    for steps in scripts:
        async with asking(steps) as (pool, server):
            with pytest.raises(TimeoutError):
                await ask(pool, "POST", timeout=SOON)
            await server.left.wait()


# ---- kept connections -----------------------------------------------------------------------------------------------


class RecordingPool(ConnectionPool):
    """A pool that records which connections were given back."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self.back: list[ClientConnection] = []

    def give_back(self, connection: ClientConnection) -> None:
        super().give_back(connection)
        self.back.append(connection)


@pytest.mark.parametrize(
    ("method", "requests"),
    [
        pytest.param("GET", 3, id="GET-is-retried"),
        pytest.param("HEAD", 3, id="HEAD-is-retried"),
        pytest.param("POST", 2, id="POST-is-not"),
        pytest.param("PUT", 2, id="PUT-is-not"),
        pytest.param("PATCH", 2, id="PATCH-is-not"),
        pytest.param("DELETE", 2, id="DELETE-is-not"),
    ],
)
async def test_a_kept_connection_that_closes_without_a_response(method: str, requests: int) -> None:
    async with asking(WHOLE, [CLOSE], [HEAD + b"Content-Length: 0\r\n\r\n"]) as (pool, server):
        await ask(pool)
        answer = await asyncio.gather(ask(pool, method), return_exceptions=True)
        assert isinstance(answer[0], HttpAnswer if requests == 3 else ConnectionBroken)
        assert len(server.requests) == requests


async def test_a_get_is_retried_only_once() -> None:
    async with asking(WHOLE, [CLOSE], [CLOSE], WHOLE) as (pool, server):
        await ask(pool)
        with pytest.raises(ConnectionBroken):
            await ask(pool)
        assert len(server.requests) == 3


async def test_a_stream_is_retried_too() -> None:
    async with asking(WHOLE, [CLOSE], response(b"a")) as (pool, server):
        await ask(pool)
        with closing(await opened(pool)) as stream:
            assert await stream.read() == b"a"
        assert len(server.requests) == 3


async def test_a_response_that_started_is_not_retried() -> None:
    async with asking(WHOLE, [b"H", CLOSE], WHOLE) as (pool, server):
        await ask(pool)
        with pytest.raises(ConnectionBroken):
            await ask(pool)
        assert len(server.requests) == 2


@pytest.mark.parametrize("action", [CLOSE, HALF_CLOSE, RESET], ids=["closed", "half-closed", "reset"])
async def test_a_closed_connection_is_never_reused(action: Step) -> None:
    async with asking([*WHOLE, action], WHOLE) as (pool, server):
        await ask(pool)
        await until(lambda: not pool.open_now)
        assert (await ask(pool, "POST")).body == b"ok"
    assert server.connections == 2


async def test_a_connection_is_not_reused_between_eof_and_connection_lost() -> None:
    async with Server(WHOLE, WHOLE) as server:
        pool = RecordingPool(server.url)
        await ask(pool)
        pool.back[-1].eof_received()  # the loop calls it a turn before `connection_lost`
        await ask(pool, "POST")
        await pool.close()
    assert server.connections == 2


async def test_the_newest_idle_connection_is_reused_and_old_ones_are_closed() -> None:
    clock = Clock()
    async with Server(*[WHOLE] * 9) as server:
        pool = RecordingPool(server.url, clock=clock)
        await asyncio.gather(ask(pool), ask(pool))
        clock.now = IDLE - 1
        await ask(pool)
        assert pool.back[2] is pool.back[1]
        clock.now = IDLE + 1
        pool.sweep()
        await until(lambda: pool.open_now == 1)
        await ask(pool)
        assert server.connections == 2, "the connection that was used last is kept"
        clock.now = 3 * IDLE
        await ask(pool)
        assert server.connections == 3, "a connection that was idle for too long is not reused, swept or not"
        await pool.close()


async def test_the_connection_limit_holds_and_waiters_are_served_in_order() -> None:
    async with asking(response(b"1"), response(b"2"), [CLOSE], response(b"4"), connections=1) as (pool, server):
        answers = await asyncio.gather(*(ask(pool, "POST") for _ in range(4)), return_exceptions=True)
        assert pool.open_now == 1
    assert [getattr(answer, "body", None) for answer in answers] == [b"1", b"2", None, b"4"]
    assert server.connections == 2, "the second connection replaces the broken one"


async def test_a_request_that_times_out_waiting_for_a_slot_was_not_sent() -> None:
    async with asking([HANG], connections=1) as (pool, server):
        first = asyncio.ensure_future(ask(pool))
        await until(lambda: server.requests)
        with pytest.raises(NotSent, match="timed out"):
            await ask(pool, "POST", timeout=SOON)
        await cancelled(first)
    assert len(server.requests) == 1


async def cancelled(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_cancelling_closes_the_connection_and_frees_its_slot() -> None:
    async with asking([HANG], WHOLE, connections=1) as (pool, server):
        task = asyncio.ensure_future(ask(pool, "POST"))
        await until(lambda: server.requests)
        await cancelled(task)
        await server.left.wait()
        assert (await ask(pool)).body == b"ok"
    assert server.connections == 2


async def test_cancelling_a_waiter_leaves_the_slot_to_the_next() -> None:
    async with asking([HANG], WHOLE, connections=1) as (pool, server):
        holder = asyncio.ensure_future(ask(pool))
        await until(lambda: server.requests)
        waiting = [asyncio.ensure_future(ask(pool)) for _ in range(3)]
        await asyncio.sleep(0)
        await cancelled(waiting[0])
        assert len(pool._waiting) == 2, "a cancelled waiter is removed"
        holder.cancel()
        waiting[1].cancel()  # the slot may already be assigned to it
        assert (await waiting[2]).body == b"ok"
        await asyncio.wait([holder, waiting[1]])
        assert pool.open_now == 1


@pytest.mark.parametrize("late", [False, True], ids=["just-before", "just-after"])
async def test_cancelling_a_waiter_in_the_turn_of_its_connection_leaves_it_to_the_next(late: bool) -> None:
    class Interrupted(ConnectionPool):
        """Cancels the second waiter in the turn of the loop in which it gets the connection."""

        def give_back(self, connection: ClientConnection) -> None:
            if not late:
                second.cancel()
            super().give_back(connection)
            second.cancel()

    async with Server(WHOLE, WHOLE) as server:
        pool = Interrupted(server.url, connections=1)
        first, second, third = (asyncio.ensure_future(ask(pool)) for _ in range(3))
        assert (await third).body == b"ok"
        await asyncio.wait([first, second])
        await pool.close()
    assert second.cancelled()
    assert server.connections == 1


async def test_closing_the_pool_ends_all_requests_and_rejects_new_ones() -> None:
    async with asking([HANG], connections=1) as (pool, server):
        task = asyncio.ensure_future(ask(pool, "POST"))
        await until(lambda: server.requests)
        waiting = asyncio.ensure_future(ask(pool, "POST"))
        await asyncio.sleep(0)
        await pool.close()
        with pytest.raises(ConnectionBroken):
            await task
        for late in (waiting, asyncio.ensure_future(ask(pool))):
            with pytest.raises(NotSent, match="pool is closed"):
                await late


# ---- streams --------------------------------------------------------------------------------------------------------


async def test_a_stream_yields_pieces_as_they_arrive_and_gives_its_connection_back() -> None:
    async with asking([CHUNKED, b"2\r\nab\r\n", b"1\r\nc\r\n0\r\n\r\n"], WHOLE) as (pool, server):
        with closing(await opened(pool)) as stream:
            assert stream.status == 200
            assert b"".join([piece async for piece in stream]) == b"abc"
            assert await stream.read() == b"", "the end is final"
        await ask(pool)
    assert server.connections == 1


async def test_a_stream_that_is_closed_early_closes_its_connection() -> None:
    async with asking([CHUNKED + b"2\r\nab\r\n", HANG], WHOLE) as (pool, server):
        with closing(await opened(pool)) as stream:
            assert await anext(stream) == b"ab"
        await server.left.wait()


async def test_bytes_received_before_a_stream_broke_are_delivered() -> None:
    async with asking([CHUNKED + b"2\r\nab\r\n", RESET]) as (pool, _):
        with closing(await opened(pool)) as stream:
            await until(lambda: not pool.open_now)
            assert await anext(stream) == b"ab"
            with pytest.raises(ConnectionBroken):
                await anext(stream)


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        pytest.param({"silence": SOON}, [HANG], id="no-head"),
        pytest.param({"silence": SOON}, [CHUNKED, HANG], id="no-body"),
        pytest.param({"timeout": SOON}, [CHUNKED + b"2\r\nab\r\n", HANG], id="no-end-of-the-body"),
    ],
)
async def test_a_stream_times_out(limits: dict[str, float], steps: list[Step]) -> None:
    async with asking(steps) as (pool, server):
        with pytest.raises(TimeoutError):
            await (await opened(pool, **limits)).read()
        await server.left.wait()


async def test_cancelling_a_stream_closes_its_connection() -> None:
    async with asking([CHUNKED, HANG]) as (pool, server):
        with closing(await opened(pool)) as stream:
            task = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            await cancelled(task)
            await server.left.wait()


async def test_a_long_stream_is_complete_however_slowly_it_is_read() -> None:
    body = bytes(range(256)) * 20_000
    async with asking(response(body)) as (pool, _):
        with closing(await opened(pool)) as stream:
            received = bytearray()
            async for piece in stream:
                received += piece
                for _ in range(20):
                    await asyncio.sleep(0)
    assert received == body


# ---- no connection --------------------------------------------------------------------------------------------------


async def test_connection_refused() -> None:
    async with Server() as server:
        pool = ConnectionPool(server.url, connections=1)
    for _ in range(2):  # the slot is freed each time
        with pytest.raises(NotSent, match="Connection refused"):
            await ask(pool, "POST")
    await pool.close()


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "http://", "https://127.0.0.1:1", "http://127.0.0.1:99999"])
async def test_invalid_urls(url: str) -> None:
    pool = ConnectionPool(url)
    with pytest.raises(NotSent):
        await ask(pool)
    await pool.close()
