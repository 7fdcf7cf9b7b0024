"""Slow clients without a certificate, and their cost for the server.

    python -m bench.strangers        the memory they use, and the responses to other callers meanwhile

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

import msgspec
from tests.kube.certificates import Authority

from bench import serving

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
    return _opened(port, count, f"GET /metrics HTTP/1.1\r\n{HOST}Accept: te".encode(), tls)


def half_bodies(port: int, count: int, tls: ssl.SSLContext | None = None, path: str = "/gputile/filter") -> Closer:
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
        line = tls.wrap_socket(plain, server_hostname="localhost") if tls is not None else plain
        with line:
            line.sendall(sent)
            yield line


# ---- the scheduler --------------------------------------------------------------------------------------------------


class Target(msgspec.Struct, frozen=True):
    """A scheduler on an in-memory cluster, in a process of its own."""

    pid: int
    port: int
    stranger: ssl.SSLContext | None = None  # None: plain HTTP
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

    def ask(self, method: str, path: str, body: bytes | None = None, *, certified: bool = False) -> tuple[int, float]:
        """The status (0: no response) over a new connection, and the seconds it took."""
        tls, begun = self.certified if certified else self.stranger, time.perf_counter()
        line = self.line(tls)
        try:
            line.request(method, path, body)
            answer = line.getresponse()
            answer.read()
        except OSError:
            return 0, time.perf_counter() - begun
        finally:
            line.close()
        return answer.status, time.perf_counter() - begun

    def line(self, tls: ssl.SSLContext | None) -> HTTPConnection:
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
        command = [sys.executable, "-m", "bench.serving", str(nodes), folder if tls else ""]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            assert child.stdout is not None
            port = int(child.stdout.readline())
            stranger = ssl.create_default_context(cadata=authority.pem.decode()) if tls else None
            certified = ssl.create_default_context(cadata=authority.pem.decode()) if tls else None
            if certified is not None:
                authority.issue("kube-scheduler").load_into(certified)
            yield Target(child.pid, port, stranger, certified)
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()


@contextmanager
def peak(of: Target, every: float = 0.02) -> Iterator[list[float]]:
    """One number: its peak memory meanwhile, MiB."""
    highest, going = [of.rss], True

    def look() -> None:
        while going:
            highest[0] = max(highest[0], of.rss)
            time.sleep(every)

    looking = Thread(target=look)
    looking.start()
    try:
        yield highest
    finally:
        going = False
        looking.join()


# ---- their cost -----------------------------------------------------------------------------------------------------


def large_bodies(of: Target, count: int = 12, size: int = 64 * MIB, seconds: float = 10.0) -> tuple[float, float]:
    """MiB before, and the peak while `count` untrusted clients each send a chunked body of `size`, as fast as they
    can."""
    before = of.rss
    with peak(of) as highest:
        senders = [Thread(target=_send_chunks, args=(of, size, seconds)) for _ in range(count)]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
    return before, highest[0]


def _send_chunks(of: Target, size: int, seconds: float) -> None:
    """Send up to just below the limit, then wait: the server has to keep these bytes."""
    piece = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    head = f"POST /gputile/filter HTTP/1.1\r\n{HOST}Transfer-Encoding: chunked\r\n\r\n"
    with suppress(OSError), connected(of.port, of.stranger, head.encode()) as line:
        for _ in range(size // 65536 - 1):
            line.sendall(piece)
        time.sleep(seconds)


def unread(of: Target, count: int = 20, seconds: float = 20.0) -> tuple[float, float]:
    """MiB before, and the peak while `count` untrusted clients request /metrics one after the other and read
    nothing."""
    before, closers = of.rss, list[Closer]()
    with peak(of) as highest:
        for _ in range(count):
            closers.append(unread_pages(of.port, 1, of.stranger))
            time.sleep(seconds / count)
        time.sleep(2.0)
    for close in closers:
        close()
    return before, highest[0]


def answers_beside(of: Target, strangers: int = 200, rounds: int = 50) -> dict[str, tuple[int, float]]:
    """By path: how many of `rounds` were answered 200 beside slow clients, and the slowest of them in ms."""
    quarter = strangers // 4
    openers = (silent, half_heads, half_bodies, unread_pages)
    closers = [opener(of.port, quarter, of.stranger) for opener in openers]
    body = serving.filter_body(0)
    asked: dict[str, Callable[[], tuple[int, float]]] = {
        "/healthz": lambda: of.ask("GET", "/healthz"),
        "/readyz": lambda: of.ask("GET", "/readyz"),
        "filter": lambda: of.ask("POST", "/gputile/filter", body, certified=True),
    }
    results: dict[str, tuple[int, float]] = {}
    for name, ask in asked.items():
        answers = [ask() for _ in range(rounds)]
        good = [took for status, took in answers if status == 200]
        results[name] = len(good), max(good, default=0.0) * 1000
    for close in closers:
        close()
    return results


def price_of_filter(of: Target, calls: int = 3000) -> float:
    """Milliseconds of CPU per call of filter, over one connection."""
    line = of.line(of.certified)
    bodies = [serving.filter_body(number) for number in range(calls + 200)]
    for number, body in enumerate(bodies):
        if number == 200:
            before = of.cpu
        line.request("POST", "/gputile/filter", body)
        line.getresponse().read()
    return (of.cpu - before) / calls * 1000


def main() -> None:
    nodes = int(sys.argv[1]) if len(sys.argv) > 1 else serving.NODES
    for tls in (True, False):
        how = "TLS with client_ca" if tls else "plain HTTP"
        with target(nodes, tls=tls) as of:
            print(f"{how}, {nodes:,} nodes, memory {of.rss:.0f} MiB")
            prices = [price_of_filter(of) for _ in range(3)]
            print("  filter: " + ", ".join(f"{price:.3f}" for price in prices) + " ms of CPU per call")
            before, most = large_bodies(of)
            print(f"  12 bodies of 64 MiB from untrusted clients: {before:.0f} -> {most:.0f} MiB")
        with target(nodes, tls=tls) as of:
            before, most = unread(of)
            print(f"  20 unread responses of /metrics: {before:.0f} -> {most:.0f} MiB")
        with target(nodes, tls=tls) as of:
            for name, (good, worst) in answers_beside(of).items():
                print(f"  {name} beside 200 slow clients: {good} of 50 answered, the slowest in {worst:.0f} ms")


if __name__ == "__main__":
    main()
