"""Slow clients without a certificate, and their cost for the server.

    python -m bench.slow_clients [NODES]        the memory they use, and the responses to other callers meanwhile

`half_heads`, `half_bodies`, `unread_pages` and `silent` open connections that are slow on purpose, and return a
function that closes them. They block: if the server is in the same process, call them in a thread.
"""

import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from threading import Thread

import click
import msgspec
from tests.kube.certificates import Authority

from bench import in_memory_scheduler

CONNECT = 5.0  # seconds
HOST = "Host: localhost\r\n"
MIB = 2**20
PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")

Closer = Callable[[], None]


# ---- connections that are slow on purpose ---------------------------------------------------------------------------


def silent(port: int, count: int, tls: ssl.SSLContext | None = None) -> Closer:
    """Connections that send nothing: with TLS not even a ClientHello."""
    return _opened(port, count, b"", None)


def half_heads(port: int, count: int, tls: ssl.SSLContext | None = None) -> Closer:
    """Connections that send half of a request's head."""
    return _opened(port, count, f"GET /metrics HTTP/1.1\r\n{HOST}Accept: te".encode(), tls)


def half_bodies(port: int, count: int, tls: ssl.SSLContext | None = None, path: str = "/gputile/filter") -> Closer:
    """Connections that send a head and the beginning of a body."""
    head = f"POST {path} HTTP/1.1\r\n{HOST}Content-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"
    return _opened(port, count, head.encode() + b'{"Pod": ', tls)


def unread_pages(port: int, count: int, tls: ssl.SSLContext | None = None, path: str = "/metrics") -> Closer:
    """Connections that request the page and never read it."""
    return _opened(port, count, f"GET {path} HTTP/1.1\r\n{HOST}\r\n".encode(), tls)


def _opened(port: int, count: int, sent: bytes, tls: ssl.SSLContext | None) -> Closer:
    stack = ExitStack()
    for _ in range(count):
        with suppress(OSError):  # the server may reject the connection
            stack.enter_context(connected(port, tls, sent))
    return stack.close


@contextmanager
def connected(port: int, tls: ssl.SSLContext | None, sent: bytes = b"") -> Iterator[socket.socket]:
    with socket.socket() as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.settimeout(CONNECT)
        plain.connect(("127.0.0.1", port))
        connection = tls.wrap_socket(plain, server_hostname="localhost") if tls is not None else plain
        with connection:
            connection.sendall(sent)
            yield connection


# ---- the scheduler --------------------------------------------------------------------------------------------------


class Target(msgspec.Struct, frozen=True):
    """A scheduler on an in-memory cluster, in a process of its own."""

    pid: int
    port: int
    untrusted: ssl.SSLContext | None = None  # None: plain HTTP
    certified: ssl.SSLContext | None = None

    @property
    def rss(self) -> float:
        """MiB in memory now."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * PAGE / MIB

    @property
    def cpu(self) -> float:
        """Seconds so far."""
        stat = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(stat[11]) + int(stat[12])) / TICKS

    def request(
        self, method: str, path: str, body: bytes | None = None, *, certified: bool = False
    ) -> tuple[int, float]:
        """The status (0: no response) over a new connection, and the seconds it took."""
        tls, start_time = self.certified if certified else self.untrusted, time.perf_counter()
        connection = self.connection(tls)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            response.read()
        except OSError:
            return 0, time.perf_counter() - start_time
        finally:
            connection.close()
        return response.status, time.perf_counter() - start_time

    def connection(self, tls: ssl.SSLContext | None) -> HTTPConnection:
        if tls is None:
            return HTTPConnection("localhost", self.port, timeout=30)
        return HTTPSConnection("localhost", self.port, timeout=30, context=tls)


@contextmanager
def target(nodes: int, *, tls: bool = True) -> Iterator[Target]:
    with tempfile.TemporaryDirectory(prefix="gputile-bench-") as folder:
        authority = Authority()
        if tls:
            ours = authority.issue("localhost")
            for name, content in (("tls.crt", ours.certificate), ("tls.key", ours.key), ("ca.crt", authority.pem)):
                Path(folder, name).write_bytes(content)
        command = [sys.executable, "-m", "bench.in_memory_scheduler", str(nodes), folder if tls else ""]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            assert child.stdout is not None
            port = int(child.stdout.readline())
            untrusted = ssl.create_default_context(cadata=authority.pem.decode()) if tls else None
            certified = ssl.create_default_context(cadata=authority.pem.decode()) if tls else None
            if certified is not None:
                authority.issue("kube-scheduler").load_into(certified)
            yield Target(child.pid, port, untrusted, certified)
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()


@contextmanager
def peak(scheduler: Target, every: float = 0.02) -> Iterator[list[float]]:
    """A list of one number: the peak memory of the scheduler so far, MiB."""
    peak_memory, is_running = [scheduler.rss], True

    def sample() -> None:
        while is_running:
            peak_memory[0] = max(peak_memory[0], scheduler.rss)
            time.sleep(every)

    sampler = Thread(target=sample)
    sampler.start()
    try:
        yield peak_memory
    finally:
        is_running = False
        sampler.join()


# ---- their cost -----------------------------------------------------------------------------------------------------


def large_bodies(
    scheduler: Target, count: int = 12, size: int = 64 * MIB, seconds: float = 10.0
) -> tuple[float, float]:
    """MiB before, and the peak while `count` untrusted clients each send a chunked body of `size`, as fast as they
    can."""
    before = scheduler.rss
    with peak(scheduler) as peak_memory:
        senders = [Thread(target=_send_chunks, args=(scheduler, size, seconds)) for _ in range(count)]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
    return before, peak_memory[0]


def _send_chunks(scheduler: Target, size: int, seconds: float) -> None:
    """Send up to just below the limit, then wait: the server has to keep these bytes."""
    piece = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    head = f"POST /gputile/filter HTTP/1.1\r\n{HOST}Transfer-Encoding: chunked\r\n\r\n"
    with suppress(OSError), connected(scheduler.port, scheduler.untrusted, head.encode()) as connection:
        for _ in range(size // 65536 - 1):
            connection.sendall(piece)
        time.sleep(seconds)


def unread_responses(scheduler: Target, count: int = 20, seconds: float = 20.0) -> tuple[float, float]:
    """MiB before, and the peak while `count` untrusted clients request /metrics one after the other and read
    nothing."""
    before, closers = scheduler.rss, list[Closer]()
    with peak(scheduler) as peak_memory:
        for _ in range(count):
            closers.append(unread_pages(scheduler.port, 1, scheduler.untrusted))
            time.sleep(seconds / count)
        time.sleep(2.0)
    for close in closers:
        close()
    return before, peak_memory[0]


def responses_beside_slow_clients(
    scheduler: Target, slow_clients: int = 200, rounds: int = 50
) -> dict[str, tuple[int, float]]:
    """By path: how many of `rounds` were answered 200 beside slow clients, and the slowest of them in ms."""
    quarter = slow_clients // 4
    openers = (silent, half_heads, half_bodies, unread_pages)
    closers = [opener(scheduler.port, quarter, scheduler.untrusted) for opener in openers]
    body = in_memory_scheduler.filter_body(0)
    requests: dict[str, Callable[[], tuple[int, float]]] = {
        "/healthz": lambda: scheduler.request("GET", "/healthz"),
        "/readyz": lambda: scheduler.request("GET", "/readyz"),
        "filter": lambda: scheduler.request("POST", "/gputile/filter", body, certified=True),
    }
    results: dict[str, tuple[int, float]] = {}
    for name, send in requests.items():
        responses = [send() for _ in range(rounds)]
        good = [took for status, took in responses if status == 200]
        results[name] = len(good), max(good, default=0.0) * 1000
    for close in closers:
        close()
    return results


def filter_cost(scheduler: Target, calls: int = 3000) -> float:
    """Milliseconds of CPU per call of filter, over one connection."""
    connection = scheduler.connection(scheduler.certified)
    bodies = [in_memory_scheduler.filter_body(number) for number in range(calls + 200)]
    for number, body in enumerate(bodies):
        if number == 200:
            before = scheduler.cpu
        connection.request("POST", "/gputile/filter", body)
        connection.getresponse().read()
    return (scheduler.cpu - before) / calls * 1000


@click.command()
@click.argument("nodes", default=in_memory_scheduler.NODES)
def main(nodes: int) -> None:
    """Measure the memory that slow clients use, and the responses to other callers meanwhile."""
    for tls in (True, False):
        transport = "TLS with client_ca" if tls else "plain HTTP"
        with target(nodes, tls=tls) as scheduler:
            print(f"{transport}, {nodes:,} nodes, memory {scheduler.rss:.0f} MiB")
            costs = [filter_cost(scheduler) for _ in range(3)]
            print("  filter: " + ", ".join(f"{cost:.3f}" for cost in costs) + " ms of CPU per call")
            before, most = large_bodies(scheduler)
            print(f"  12 bodies of 64 MiB from untrusted clients: {before:.0f} -> {most:.0f} MiB")
        with target(nodes, tls=tls) as scheduler:
            before, most = unread_responses(scheduler)
            print(f"  20 unread responses of /metrics: {before:.0f} -> {most:.0f} MiB")
        with target(nodes, tls=tls) as scheduler:
            for name, (good, worst) in responses_beside_slow_clients(scheduler).items():
                print(f"  {name} beside 200 slow clients: {good} of 50 answered, the slowest in {worst:.0f} ms")


if __name__ == "__main__":
    main()
