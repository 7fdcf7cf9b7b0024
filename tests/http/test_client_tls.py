"""Requests over TLS, and through proxies."""

import asyncio
import gc
import ssl

import pytest

from gputile.http.client import ConnectionPool, NotSent
from tests.http.misbehaving import CLOSE, Proxy, Server
from tests.http.requests import CHUNKED, WHOLE, ask, response, until
from tests.kube.certificates import Authority


async def test_https_without_a_ca_is_never_sent_as_plain_text() -> None:
    async with Server(WHOLE) as server:
        pool = ConnectionPool(server.url.replace("http:", "https:"))
        with pytest.raises(NotSent, match="no CA given"):
            await ask(pool)
        await pool.close()
    assert server.connections == 0


# ---- TLS ------------------------------------------------------------------------------------------------------------


class TlsIdentity:
    """A server's certificate for api.internal, and clients that trust it."""

    def __init__(self) -> None:
        authority = Authority()
        self.server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue("api.internal").load_into(self.server)
        self._pem = authority.pem.decode()

    def client(self) -> ssl.SSLContext:
        return ssl.create_default_context(cadata=self._pem)


async def test_responses_and_kept_connections_over_tls() -> None:
    known = TlsIdentity()
    tls = known.client()
    async with Server(WHOLE, response(b"x" * 1_000_000), [CHUNKED, b"0\r\n\r\n", CLOSE], tls=known.server) as server:
        pool = ConnectionPool(server.url, server_name="api.internal")
        assert (await ask(pool, tls=tls)).body == b"ok"
        assert len((await ask(pool, tls=tls)).body) == 1_000_000
        assert (await ask(pool, tls=tls)).body == b""
        await until(lambda: not pool.open_now)
        await pool.close()
    assert server.connections == 1


async def test_no_request_is_sent_to_a_server_with_another_name() -> None:
    known = TlsIdentity()
    async with Server(WHOLE, tls=known.server) as server:
        pool = ConnectionPool(server.url)
        with pytest.raises(NotSent, match="certificate"):
            await ask(pool, tls=known.client())
        await pool.close()
    assert server.requests == []


async def test_new_credentials_never_use_a_connection_made_with_the_old() -> None:
    known = TlsIdentity()
    old, new = known.client(), known.client()
    async with Server(*[WHOLE] * 5, tls=known.server) as server:
        pool = ConnectionPool(server.url, server_name="api.internal", connections=1)
        for tls in (old, old, new):
            await ask(pool, tls=tls)
        assert server.connections == 2
        await asyncio.gather(ask(pool, tls=new), ask(pool, tls=old))
        assert server.connections == 3, "a connection that is given back is not passed to other credentials either"
        await pool.close()


# ---- proxies --------------------------------------------------------------------------------------------------------

SECRET = b"Proxy-Authorization: Basic bWU6cEBzcw==\r\n"  # me:p@ss


@pytest.mark.parametrize("secret_proxy", [False, True], ids=["an-http-proxy", "an-https-proxy"])
async def test_https_goes_through_a_tunnel(secret_proxy: bool) -> None:
    known, tls = TlsIdentity(), None
    trust = known.client()
    if secret_proxy:
        trust.check_hostname, tls = False, known.server
    async with Proxy(tls=tls) as proxy, Server(WHOLE, WHOLE, tls=known.server) as server:
        scheme = "https" if secret_proxy else "http"
        pool = ConnectionPool(server.url, server_name="api.internal", proxy=f"{scheme}://me:p%40ss@{proxy.address}")
        for _ in range(2):
            assert (await ask(pool, tls=trust)).body == b"ok"
        await pool.close()
    to = b"127.0.0.1:%d" % server.port
    assert proxy.requests == [b"CONNECT %b HTTP/1.1\r\nHost: %b\r\n%b\r\n" % (to, to, SECRET)]
    assert server.connections == 1
    assert SECRET not in server.requests[0], "the proxy's credentials are not sent to the server"


async def test_http_is_carried_by_the_proxy() -> None:
    async with Server(WHOLE) as proxy:
        pool = ConnectionPool("http://api.invalid:81/x", proxy=f"http://me:p%40ss@127.0.0.1:{proxy.port}")
        assert (await ask(pool, target="/a")).body == b"ok"
        await pool.close()
    assert proxy.requests == [b"GET http://api.invalid:81/x/a HTTP/1.1\r\nHost: api.invalid:81\r\n" + SECRET + b"\r\n"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        pytest.param(b"HTTP/1.1 407 Who?\r\nContent-Length: 0\r\n\r\n", "HTTP 407", id="rejects"),
        pytest.param(b"HTTP/1.1 502 Bad\r\n\r\n<html>", "HTTP 502", id="cannot-reach-the-server"),
        pytest.param(b"", "did not respond", id="disconnects"),
        pytest.param(b"hello\r\n\r\n", "did not respond", id="is-not-a-proxy"),
    ],
)
async def test_a_proxy_that_opens_no_tunnel(answer: bytes, reason: str) -> None:
    known = TlsIdentity()
    async with Proxy(answer) as proxy, Server(tls=known.server) as server:
        pool = ConnectionPool(server.url, proxy=f"http://{proxy.address}", connections=1)
        for _ in range(2):  # the slot is freed each time
            with pytest.raises(NotSent, match=reason):
                await ask(pool, "POST", tls=known.client())
        if b" 407 " in answer:
            await proxy.left.wait()
        await pool.close()
    assert server.connections == 0


async def test_the_server_certificate_is_verified_behind_a_proxy_too() -> None:
    known = TlsIdentity()
    async with Proxy() as proxy, Server(tls=known.server) as server:
        pool = ConnectionPool(server.url, proxy=f"http://{proxy.address}")
        with pytest.raises(NotSent, match="certificate"):
            await ask(pool, tls=known.client())
        await pool.close()
    gc.collect()  # an unclosed transport would warn now
