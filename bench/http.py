"""Measures what HTTP costs: the server's CPU per filter and bind, and per new TLS connection; the client's per POST.

The server runs in a process of its own on uvloop, with TLS 1.3, client certificates (ECDSA P-256) and no session
tickets, as the scheduler's. `floor` is the least a connection can cost in Python: blocking sockets and OpenSSL, one
read, one write, no HTTP.
"""

import asyncio
import multiprocessing
import socket
import ssl
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import click
import uvloop
from tests.kube.certificates import Authority

from gputile.http.client import ConnectionPool, header
from gputile.http.messages import Reply, Request, Response
from gputile.http.server import Listener
from gputile.http.tls import server_context

FILTER, BIND = b"f" * 4000, b"b" * 500  # bytes of the bodies; a filter call of some 250 nodes
HEAD = (
    b"POST /gputile/%b HTTP/1.1\r\nHost: gputile.kube-system.svc:443\r\nUser-Agent: Go-http-client/1.1\r\n"
    b"Content-Length: %d\r\nContent-Type: application/json\r\nAccept-Encoding: gzip\r\n\r\n"
)
ANSWER = b"a" * 1000
MICROSECONDS = 1e6


class Certificates:
    """A CA, and TLS contexts with certificates of it."""

    def __init__(self) -> None:
        self._authority = Authority()

    def server(self) -> ssl.SSLContext:
        context = server_context()
        self._authority.issue("localhost").load_into(context)
        context.load_verify_locations(cadata=self._authority.pem.decode())
        context.verify_mode = ssl.CERT_OPTIONAL
        return context

    def client(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cadata=self._authority.pem.decode())
        self._authority.issue("kube-scheduler").load_into(context)
        return context


# ---- the servers, each in its own process ---------------------------------------------------------------------------


async def _bound() -> Reply:
    await asyncio.sleep(0)
    return Response(ANSWER)


def _respond(request: Request) -> Any:
    return _bound() if request.path.endswith("bind") else Response(ANSWER)


async def _serve(certificates: Certificates, pipe: Connection) -> None:
    listener = Listener(_respond, 2**20, trusts=bool)
    pipe.send(await listener.start("127.0.0.1", 0, certificates.server()))
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def command() -> None:
        if pipe.recv() == "stop":
            ended.set()
        pipe.send(time.process_time())

    loop.add_reader(pipe.fileno(), command)
    await ended.wait()
    await listener.stop()


def our_server(certificates: Certificates, pipe: Connection) -> None:
    uvloop.run(_serve(certificates, pipe))


def floor_server(certificates: Certificates, pipe: Connection) -> None:
    """Serves one connection after the other; a connection without a byte is the command to report."""
    tls, answer = certificates.server(), b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + ANSWER
    with socket.create_server(("127.0.0.1", 0)) as listening:
        pipe.send(listening.getsockname()[1])
        while True:
            client, _ = listening.accept()
            if pipe.poll():
                pipe.send(time.process_time())
                client.close()
                if pipe.recv() == "stop":
                    return
                continue
            with tls.wrap_socket(client, server_side=True) as stream:
                while stream.recv(65536):
                    stream.sendall(answer)


class ServerProcess:
    """A server in its own process, and its CPU time."""

    def __init__(self, serve: Callable[[Certificates, Connection], None], certificates: Certificates) -> None:
        self._pipe, other = multiprocessing.Pipe()
        self._is_blocking = serve is floor_server
        self._process = multiprocessing.get_context("fork").Process(target=serve, args=(certificates, other))
        self._process.start()
        self.port: int = self._pipe.recv()

    def cpu(self, command: str = "report") -> float:
        """Seconds so far."""
        self._pipe.send(command)
        if self._is_blocking:
            socket.create_connection(("127.0.0.1", self.port)).close()
        return float(self._pipe.recv())

    def stop(self) -> None:
        self.cpu("stop")
        self._process.join()


# ---- measurements, CPU in microseconds ------------------------------------------------------------------------------


def connect(port: int, tls: ssl.SSLContext) -> ssl.SSLSocket:
    client = socket.create_connection(("127.0.0.1", port))
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as Go does
    return tls.wrap_socket(client, server_hostname="localhost")


def post(stream: ssl.SSLSocket, verb: bytes, body: bytes) -> None:
    stream.sendall(HEAD % (verb, len(body)) + body)
    received = b""
    while not received.endswith(ANSWER):
        received += stream.recv(65536)


def pairs(server: ServerProcess, tls: ssl.SSLContext, count: int) -> float:
    """Per filter and bind, one after the other on one connection."""
    with connect(server.port, tls) as stream:
        post(stream, b"filter", FILTER)
        before = server.cpu()
        for _ in range(count):
            post(stream, b"filter", FILTER)
            post(stream, b"bind", BIND)
        return (server.cpu() - before) / count * MICROSECONDS


def connections(server: ServerProcess, tls: ssl.SSLContext, count: int) -> float:
    """Per connection: handshake, one filter, close."""
    before = server.cpu()
    for _ in range(count):
        with connect(server.port, tls) as stream:
            post(stream, b"filter", BIND)
    return (server.cpu() - before) / count * MICROSECONDS


def posts(server: ServerProcess, tls: ssl.SSLContext, count: int) -> float:
    """Per POST of our client, one after the other on one connection."""

    async def run() -> float:
        pool = ConnectionPool(f"https://localhost:{server.port}")
        lines = header("Authorization", "Bearer " + "t" * 900) + header("Content-Type", "application/json")
        await pool.request("POST", "/gputile/filter", lines, BIND, tls=tls, timeout=10.0)
        before = time.process_time()
        for _ in range(count):
            await pool.request("POST", "/gputile/filter", lines, BIND, tls=tls, timeout=10.0)
        spent = time.process_time() - before
        await pool.close()
        return spent / count * MICROSECONDS

    return uvloop.run(run())


@click.command()
@click.option("--rounds", default=5, show_default=True, help="Rounds; the median is printed.")
@click.option("--count", default=1000, show_default=True, help="Pairs, connections and POSTs per round.")
def main(rounds: int, count: int) -> None:
    """Print CPU microseconds: server per pair and per connection, client per POST; medians and the least."""
    certificates = Certificates()
    server, floor = ServerProcess(our_server, certificates), ServerProcess(floor_server, certificates)
    tls = certificates.client()
    rows: dict[str, list[float]] = {}
    for _ in range(rounds):
        rows.setdefault("server, filter and bind on a kept connection", []).append(pairs(server, tls, count))
        rows.setdefault("server, a new TLS connection with one filter", []).append(connections(server, tls, count))
        rows.setdefault("floor, a new TLS connection with one request", []).append(connections(floor, tls, count))
        rows.setdefault("client, a POST", []).append(posts(server, tls, count))
    for name, spent in rows.items():
        print(f"{name:46} {statistics.median(spent):7.0f} us  (least {min(spent):.0f})")
    server.stop()
    floor.stop()


if __name__ == "__main__":
    main()
