"""The agent's port: three pages, with or without TLS, and its bounds."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gputile.agent.server import BOUNDS, AgentServer
from gputile.agent.settings import AgentSettings, AgentTlsSettings, checked
from gputile.model.errors import InputError
from gputile.telemetry.agent_metrics import AgentMetrics
from tests.http.requests import until
from tests.kube.certificates import Authority


@asynccontextmanager
async def serving(tls: AgentTlsSettings | None = None, why: str = "") -> AsyncIterator[AgentServer]:
    settings = AgentSettings(node="n1", listen="127.0.0.1:0", tls=tls or AgentTlsSettings())
    server = AgentServer(settings, AgentMetrics().text, lambda: why)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def fetch(server: AgentServer, request: bytes, tls: ssl.SSLContext | None = None) -> bytes:
    name = "localhost" if tls else None
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=tls, server_hostname=name)
    writer.write(request)
    response = await reader.read()
    writer.close()
    return response


def get(path: str, more: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: n1\r\nConnection: close\r\n{more}\r\n".encode()


def written(folder: Path, authority: Authority) -> AgentTlsSettings:
    issued = authority.issue("localhost")
    (folder / "tls.crt").write_bytes(issued.certificate)
    (folder / "tls.key").write_bytes(issued.key)
    return AgentTlsSettings(certificate=f"{folder}/tls.crt", key=f"{folder}/tls.key")


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=authority.pem.decode())


@pytest.mark.parametrize(
    ("path", "why", "status", "text"),
    [
        pytest.param("/healthz", "", b"200", b"ok\n", id="alive"),
        pytest.param("/readyz", "", b"200", b"ok\n", id="ready"),
        pytest.param("/readyz", "no driver", b"503", b"no driver\n", id="not-ready"),
        pytest.param("/metrics", "", b"200", b"gputile_agent_", id="metrics"),
        pytest.param("/secret", "", b"404", b"/healthz", id="not-found"),
    ],
)
async def test_the_pages(path: str, why: str, status: bytes, text: bytes) -> None:
    async with serving(why=why) as server:
        response = await fetch(server, get(path))
    assert response[9:12] == status
    assert text in response


@pytest.mark.parametrize(
    ("more", "status"),
    [
        pytest.param(f"X: {'x' * 7000}\r\n", b"200", id="seven-kilobytes"),
        pytest.param(f"X: {'x' * 8192}\r\n", b"431", id="more-than-eight"),
    ],
)
async def test_headers_are_bounded(more: str, status: bytes) -> None:
    async with serving() as server:
        assert (await fetch(server, get("/healthz", more)))[9:12] == status


async def test_no_body_is_read() -> None:
    async with serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /metrics HTTP/1.1\r\nHost: n1\r\nContent-Length: 1000000\r\n\r\n")
        assert b"Connection: close" in await reader.readuntil(b"\r\n\r\n")
        writer.close()


def test_there_are_sixty_four_connections() -> None:
    assert BOUNDS.arriving + BOUNDS.probing + BOUNDS.strangers == 64


@pytest.mark.parametrize(
    "begun", [b"", b"GET /metr", get("/metrics")[:-2]], ids=["no-request", "half-a-request-line", "half-the-headers"]
)
async def test_connections_are_bounded_and_probes_are_answered(begun: bytes) -> None:
    async with serving() as server:
        clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
        try:
            for client in clients:
                client.sendall(begun)
            listener = server._listener
            await until(lambda: listener.arriving.evicted >= 200 - BOUNDS.arriving)
            assert (await fetch(server, get("/healthz"))).endswith(b"ok\n")
            assert len(listener.connections) <= 64
        finally:
            for client in clients:
                client.close()


# ---- TLS ------------------------------------------------------------------------------------------------------------


async def test_with_a_certificate_only_tls_is_served(tmp_path: Path) -> None:
    authority = Authority()
    async with serving(written(tmp_path, authority)) as server:
        assert b"gputile_agent_" in await fetch(server, get("/metrics"), trusting(authority))
        assert b"gputile_agent_" not in await fetch(server, get("/metrics"))


async def test_files_that_change_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = Authority(), Authority()
    async with serving(written(tmp_path, old)) as server:
        with monkeypatch.context() as patched:
            patched.setattr("gputile.agent.server.from_files", None)  # would fail if called
            server.renew_certificate()
        assert (await fetch(server, get("/healthz"), trusting(old))).endswith(b"ok\n")
        written(tmp_path, new)
        server.renew_certificate()
        assert (await fetch(server, get("/healthz"), trusting(new))).endswith(b"ok\n")
        with pytest.raises(ssl.SSLError):
            await fetch(server, get("/healthz"), trusting(old))


@pytest.mark.parametrize("left", ["", "-----BEGIN CERTIFICATE-----\nhalf"], ids=["empty", "half-written"])
async def test_unreadable_files_change_nothing(tmp_path: Path, left: str, caplog: pytest.LogCaptureFixture) -> None:
    authority = Authority()
    async with serving(written(tmp_path, authority)) as server:
        (tmp_path / "tls.crt").write_text(left)
        server.renew_certificate()
        assert (await fetch(server, get("/healthz"), trusting(authority))).endswith(b"ok\n")
        assert "cannot read the TLS certificate" in caplog.text
        (tmp_path / "tls.crt").unlink()
        server.renew_certificate()
        assert (await fetch(server, get("/healthz"), trusting(authority))).endswith(b"ok\n")
        new = Authority()
        written(tmp_path, new)
        server.renew_certificate()
        assert (await fetch(server, get("/healthz"), trusting(new))).endswith(b"ok\n"), (
            "later changes are still noticed"
        )


async def test_missing_files_at_the_start_are_an_error() -> None:
    with pytest.raises(InputError, match=r"TLS cannot be set up from /nowhere/a, /nowhere/b"):
        async with serving(AgentTlsSettings(certificate="/nowhere/a", key="/nowhere/b")):
            pass


def test_certificate_and_key_must_both_be_set() -> None:
    with pytest.raises(InputError, match=r"`tls.certificate` and `tls.key`: only one is set"):
        checked(AgentSettings(node="n1", tls=AgentTlsSettings(certificate="a")))
