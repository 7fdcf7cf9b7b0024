"""New connections over real sockets, on both event loops: floods, unfinished handshakes, no file descriptors."""

import asyncio
import errno
import resource
import socket
import ssl
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvloop

from gputile.http import acceptor as accepting
from gputile.http.h1_server import H1Connection
from gputile.http.messages import Request, Response
from gputile.http.server import Listener, ListenerLimits
from gputile.http.tls import server_context
from gputile.model.errors import InputError
from tests.http.requests import until
from tests.kube.certificates import Authority

Run = Callable[[Coroutine[Any, Any, None]], None]
GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
FEW = ListenerLimits(arriving=8, probing=4, strangers=4, known=4)


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a test in this kind of event loop."""
    runner: Run = request.param
    return runner


class EchoServer:
    """A server on a free port that echoes bodies; over TLS it requests client certificates."""

    def __init__(self, *, tls: bool) -> None:
        self.authority = Authority()
        self.requests: list[Request] = []
        self._is_tls, self.port = tls, 0
        self.listener = Listener(self._answer, 2**20, probes=("/healthz",), trusts=bool if tls else None, bounds=FEW)

    def _answer(self, request: Request) -> Response:
        self.requests.append(request)
        is_open = request.is_trusted or request.path == "/healthz"
        return Response(request.body or b"ok") if is_open else Response(b"no", 403)

    async def __aenter__(self) -> "EchoServer":
        self.port = await self.listener.start("127.0.0.1", 0, self.context() if self._is_tls else None)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.listener.stop()

    def context(self) -> ssl.SSLContext:
        context = server_context()
        self.authority.issue("localhost").load_into(context)
        context.load_verify_locations(cadata=self.authority.pem.decode())
        context.verify_mode = ssl.CERT_OPTIONAL
        return context

    def client(self, *, known: bool = False) -> ssl.SSLContext | None:
        if not self._is_tls:
            return None
        context = ssl.create_default_context(cadata=self.authority.pem.decode())
        if known:
            self.authority.issue("kube-scheduler").load_into(context)
        return context

    async def ask(self, request: bytes, *, known: bool = False, source: str = "127.0.0.1") -> bytes:
        """The whole response, until the server closes the connection."""
        tls = self.client(known=known)
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=tls, server_hostname="localhost" if tls else None, local_addr=(source, 0)
        )
        writer.write(request)
        received = await reader.read()
        writer.close()
        return received


@contextmanager
def silent(port: int, count: int, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    """Connections that never complete a request."""
    lines = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    try:
        for line in lines:
            line.sendall(sent)
            line.setblocking(False)
        yield lines
    finally:
        for line in lines:
            line.close()


def is_cut(line: socket.socket) -> bool:
    try:
        return line.recv(100) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize("tls", [True, False], ids=["tls", "plain"])
@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01"], ids=["silent", "half-a-ClientHello"])
def test_connections_without_a_request_are_evicted_for_new_ones(run: Run, tls: bool, sent: bytes) -> None:
    async def scenario() -> None:
        async with EchoServer(tls=tls) as server:
            with silent(server.port, 30, sent) as lines:
                await until(lambda: server.listener.arriving.evicted >= 22)
                await until(lambda: len(server.listener.arriving) == FEW.arriving)
                for known in (True, False):
                    assert (await server.ask(GET, known=known)).endswith(b"\r\n\r\nok")
                await until(lambda: sum(map(is_cut, lines)) >= 22)

    run(scenario())


def test_a_flooding_host_evicts_only_its_own_connections(run: Run) -> None:
    """A slow handshake of another host completes during the flood."""

    async def scenario() -> None:
        async with EchoServer(tls=True) as server:
            with socket.socket() as slow:
                slow.bind(("127.0.0.2", 0))
                slow.connect(("127.0.0.1", server.port))
                await until(lambda: len(server.listener.arriving) == 1)
                with silent(server.port, 50):
                    await until(lambda: server.listener.arriving.evicted >= 43)
                    context = server.client(known=True)
                    assert context is not None
                    reader, writer = await asyncio.open_connection(sock=slow, ssl=context, server_hostname="localhost")
                    writer.write(GET)
                    assert (await reader.read()).endswith(b"\r\n\r\nok")
                    writer.close()

    run(scenario())


@pytest.mark.parametrize("tls", [True, False], ids=["tls", "plain"])
def test_a_failed_handshake_leaves_no_state(run: Run, tls: bool) -> None:
    async def scenario() -> None:
        async with EchoServer(tls=tls) as server:
            with silent(server.port, 5, b"this is no hello\r\n\r\n") as lines:
                await until(lambda: all(is_cut(line) for line in lines))
            await until(lambda: not server.listener.arriving and not server.listener.connections)
            await until(lambda: not server.listener._acceptor._handshakes)

    run(scenario())


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["tls-1.2", "tls-1.3"])
def test_an_untrusted_caller_gets_403_and_its_body_is_dropped(run: Run, version: ssl.TLSVersion) -> None:
    async def scenario() -> None:
        async with EchoServer(tls=True) as server:
            context = server.client()
            assert context is not None
            context.maximum_version = version
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", server.port, ssl=context, server_hostname="localhost"
            )
            writer.write(b"POST /verb HTTP/1.1\r\nHost: x\r\nContent-Length: 50000000\r\n\r\n")
            for _ in range(80):
                writer.write(b"x" * 65536)
                await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 403 ")
            assert await reader.readexactly(2) == b"no"
            (connection,) = server.listener.connections
            assert (connection.kept, server.requests[0].body) == (0, b"")
            writer.close()

    run(scenario())


def test_the_body_of_a_known_caller_is_read_on_the_same_port(run: Run) -> None:
    async def scenario() -> None:
        async with EchoServer(tls=True) as server:
            head = b"POST /verb HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 1000000\r\n\r\n"
            assert (await server.ask(head + b"x" * 10**6, known=True)).endswith(b"x" * 10**6)

    run(scenario())


def test_new_connections_get_the_renewed_certificate(run: Run) -> None:
    async def scenario() -> None:
        async with EchoServer(tls=True) as server:
            assert (await server.ask(GET)).endswith(b"ok")
            server.authority = Authority()
            with pytest.raises(ssl.SSLError):
                await server.ask(GET)
            server.listener.renew(server.context())
            assert (await server.ask(GET)).endswith(b"ok")

    run(scenario())


def test_accepting_resumes_after_a_shortage_of_file_descriptors(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener that gave up, or retried without a pause, would be worse than the shortage."""
    failures = [
        OSError(errno.EMFILE, "too many"),
        OSError(errno.ECONNABORTED, "gone"),
        OSError(errno.ENFILE, "too many"),
    ]
    tried: list[float] = []

    class Scarce(socket.socket):
        def accept(self) -> Any:
            tried.append(time.monotonic())
            if failures:
                raise failures.pop()
            return super().accept()

    monkeypatch.setattr(socket, "socket", Scarce)
    monkeypatch.setattr(accepting, "ACCEPT_PAUSE", 0.05)

    async def scenario() -> None:
        async with EchoServer(tls=False) as server:
            assert (await server.ask(GET)).endswith(b"ok")
            first, second, third, fourth = tried[:4]
            assert second - first >= 0.04, "too many open files in the system"
            assert third - second < fourth - third, "a client that left is no reason to wait"
            assert fourth - third >= 0.04, "too many open files in this process"

    run(scenario())


def test_stopping_during_a_pause_accepts_no_more(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(socket.socket):
        def accept(self) -> Any:
            raise OSError(errno.EMFILE, "too many")

    monkeypatch.setattr(socket, "socket", Full)
    monkeypatch.setattr(accepting, "ACCEPT_PAUSE", 0.01)

    async def scenario() -> None:
        async with EchoServer(tls=False) as server:
            with silent(server.port, 1):
                await until(lambda: server.listener._acceptor._pauses)
                await server.listener.stop()
                await asyncio.sleep(0.03)

    run(scenario())
    assert not caplog.records, "no reader is added for a closed socket"


def test_a_connection_buffers_little_of_an_unread_response(run: Run) -> None:
    """The kernel's default would be megabytes for each slow reader."""

    async def scenario() -> None:
        async with EchoServer(tls=False) as server:
            with silent(server.port, 1):
                await until(lambda: server.listener.connections)
                (connection,) = server.listener.connections
                assert isinstance(connection, H1Connection)
                assert connection._transport is not None
                client = connection._transport.get_extra_info("socket")
                assert 0 < client.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2 * accepting.SEND_BUFFER

    run(scenario())


def test_the_limit_of_open_files_is_raised_as_far_as_permitted() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        accepting.want_descriptors(300)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300
        accepting.want_descriptors(200)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300, "never lowered"
        accepting.want_descriptors(10**9)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 300
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        pytest.param("127.0.0.1", "Address already in use", id="a-port-in-use"),
        pytest.param("192.0.2.1", "Cannot assign requested address", id="an-address-of-another-host"),
    ],
)
def test_a_failed_bind_names_the_reason_and_the_setting(run: Run, host: str, reason: str) -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            listener = Listener(lambda request: Response(b""), 100, setting="metrics_api.listen")
            with pytest.raises(InputError, match=rf"{reason}; set another `metrics_api.listen`"):
                await listener.start(host, taken.getsockname()[1], None)
            await listener.stop()

    run(scenario())


def test_stopping_ends_handshakes_too(run: Run) -> None:
    async def scenario() -> None:
        server = EchoServer(tls=True)
        async with server:
            with silent(server.port, 3):
                await until(lambda: len(server.listener.arriving) == 3)
                await server.listener.stop()
                await until(lambda: not server.listener._acceptor._handshakes)
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", server.port))

    run(scenario())
