"""What callers see while a bench runs, each caller in a process of its own: its latencies are not those of the bench.

Door:  `Caller(work, ...)` starts `work(ends, *args)` in a process and `results()` is what it returns; `probes` asks
       /healthz as a kubelet does, `pods` plays kube-scheduler for good pods.
"""

import http.client
import itertools
import json
import multiprocessing
import os
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from tests.e2e.api import ApiError, Kube

from bench.stage import one_tile, quantile

PATIENCE = 10.0  # seconds; an answer that takes longer is a failure and counts as long as this
AGAIN, GRACE = 0.25, 10.0  # seconds between two tries of a pod; and after the end, for those that are not bound yet
ELSEWHERE = -10  # these callers have machines of their own, where this is real: what they wait for a CPU is not ours
_SPAWN = multiprocessing.get_context("spawn")


class Address(msgspec.Struct, frozen=True):
    """Where the scheduler is, and who asks; without `client` a stranger."""

    port: int
    ca: str
    client: tuple[str, str] | None = None  # certificate, key

    def trust(self) -> ssl.SSLContext:
        trust = ssl.create_default_context(cafile=self.ca)
        if self.client is not None:
            trust.load_cert_chain(*self.client)
        return trust

    def connection(self, trust: ssl.SSLContext | None = None) -> http.client.HTTPSConnection:
        trust = trust or self.trust()
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=PATIENCE, context=trust)


class Cluster(msgspec.Struct, frozen=True):
    """Where the API server is."""

    server: str
    ca: str
    token: str

    def kube(self) -> Kube:
        return Kube(self.server, Path(self.ca), self.token)


def _as_if_elsewhere() -> None:
    with suppress(PermissionError):  # only root may; without it the callers' own waiting is part of what they measure
        os.nice(ELSEWHERE)


class Caller:
    """A process that calls until `results` is asked for, or its time is over."""

    def __init__(self, work: Callable[..., Any], *args: Any) -> None:
        self._mine, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_run, args=(work, theirs, args), daemon=True)
        self._process.start()
        self._mine.recv()  # it is ready

    def go(self) -> None:
        self._mine.send("go")

    def results(self, seconds: float) -> Any:
        """Wait at most so long for what it found."""
        if not self._mine.poll(seconds):
            self._process.kill()
            raise TimeoutError(f"{self._process.name} has no results after {seconds:g} s")
        found = self._mine.recv()
        self._process.join(10)
        if isinstance(found, Exception):
            raise found
        return found


def _run(work: Callable[..., Any], pipe: Any, args: tuple[Any, ...]) -> None:
    pipe.send("ready")
    pipe.recv()
    try:
        pipe.send(work(*args))
    except Exception as wrong:
        pipe.send(RuntimeError(f"{work.__name__}: {type(wrong).__name__}: {wrong}"))


class Latencies(msgspec.Struct, frozen=True):
    """Milliseconds of each call, and the calls that failed or took longer than anybody waits."""

    took: tuple[float, ...]
    failed: tuple[str, ...] = ()

    def part(self, share: float) -> float:
        return quantile(self.took, share) if self.took else 0.0

    @property
    def worst(self) -> float:
        return max(self.took, default=0.0)

    def with_(self, other: "Latencies") -> "Latencies":
        return Latencies(self.took + other.took, self.failed + other.failed)


# ---- a kubelet ------------------------------------------------------------------------------------------------------


def probes(address: Address, seconds: float, every: float) -> Latencies:
    """/healthz over a new connection each time, without a certificate, as a kubelet asks."""
    _as_if_elsewhere()
    took, failed, begun, trust = list[float](), list[str](), time.monotonic(), address.trust()
    for number in itertools.count():
        due = begun + number * every
        if due > begun + seconds:
            return Latencies(tuple(took), tuple(failed))
        time.sleep(max(0.0, due - time.monotonic()))
        start = time.perf_counter()
        said = _probe(address, trust)
        took.append(1000 * (time.perf_counter() - start))
        if said:
            failed.append(said)
    raise AssertionError


def _probe(address: Address, trust: ssl.SSLContext) -> str:
    connection = address.connection(trust)
    try:
        connection.request("GET", "/healthz")
        status = connection.getresponse().status
        return "" if status == 200 else f"HTTP {status}"
    except (OSError, http.client.HTTPException) as wrong:
        return f"{type(wrong).__name__}: {wrong}"
    finally:
        connection.close()


# ---- kube-scheduler, for good pods ----------------------------------------------------------------------------------


class Good(msgspec.Struct, frozen=True):
    """What became of the good pods."""

    filters: Latencies
    binds: Latencies
    creates: Latencies  # by the API server: how busy it is
    bound: int
    unbound: int
    named: dict[str, float]  # milliseconds of the last bind, by pod

    @property
    def verbs(self) -> Latencies:
        return self.filters.with_(self.binds)


class Asker(threading.Thread):
    """One connection of kube-scheduler."""

    def __init__(
        self, number: int, address: Address, cluster: Cluster, space: str, nodes: bytes, due: list[float]
    ) -> None:
        super().__init__(daemon=True)
        self._number, self._kube, self._space, self._nodes, self._due = number, cluster.kube(), space, nodes, due
        self._end = due[-1] + GRACE if due else 0.0
        self._connection = address.connection()
        self.filters, self.binds, self.creates = list[float](), list[float](), list[float]()
        self.failed, self.named = list[str](), dict[str, float]()
        self.bound = self.unbound = 0

    def run(self) -> None:
        for number, at in enumerate(self._due):
            time.sleep(max(0.0, at - time.monotonic()))
            if time.monotonic() > self._end:
                self.unbound += len(self._due) - number
                break
            try:
                self._pod(f"good-{self._number}-{number}")
            except (ApiError, OSError) as wrong:
                self.failed.append(f"{type(wrong).__name__}: {wrong}")
                self.unbound += 1
        self._connection.close()

    def _pod(self, name: str) -> None:
        start = time.perf_counter()
        made = self._kube.create(one_tile(name), self._space)
        self.creates.append(1000 * (time.perf_counter() - start))
        body = b'{"Pod":' + msgspec.json.encode(made) + b',"Nodes":null,"NodeNames":' + self._nodes + b"}"
        while time.monotonic() < self._end:
            names = (self._ask("filter", body, self.filters) or {}).get("NodeNames")
            if names and self._bind(made, names[0]):
                self.bound += 1
                return
            time.sleep(AGAIN)
        self.unbound += 1

    def _bind(self, made: dict[str, Any], node: str) -> bool:
        metadata = made["metadata"]
        named = {"PodName": metadata["name"], "PodNamespace": metadata["namespace"], "PodUID": metadata["uid"]}
        said = self._ask("bind", json.dumps({**named, "Node": node}).encode(), self.binds)
        self.named[metadata["name"]] = self.binds[-1]
        return said is not None and said.get("Error") == ""

    def _ask(self, verb: str, body: bytes, took: list[float]) -> dict[str, Any] | None:
        start = time.perf_counter()
        try:
            self._connection.request("POST", f"/gputile/{verb}", body, {"Content-Type": "application/json"})
            answer = self._connection.getresponse()
            said = answer.read()
            if answer.status != 200:
                raise OSError(f"HTTP {answer.status}")
            found: dict[str, Any] = json.loads(said)
            return found
        except (OSError, http.client.HTTPException, ValueError) as wrong:
            self.failed.append(f"{verb}: {type(wrong).__name__}: {wrong}")
            self._connection.close()
            return None
        finally:
            took.append(1000 * (time.perf_counter() - start))


def pods(address: Address, cluster: Cluster, space: str, nodes: list[str], seconds: float, rate: float) -> Good:
    """Pods at this rate, each created, filtered and bound, as kube-scheduler would."""
    _as_if_elsewhere()
    names, begun, threads = msgspec.json.encode(nodes), time.monotonic() + 0.5, 12
    due = [begun + number / rate for number in range(int(seconds * rate))]
    askers = [Asker(n, address, cluster, space, names, due[n::threads]) for n in range(threads)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(seconds + GRACE + 3 * PATIENCE)
    return Good(
        Latencies(tuple(t for one in askers for t in one.filters), tuple(f for one in askers for f in one.failed)),
        Latencies(tuple(t for one in askers for t in one.binds)),
        Latencies(tuple(t for one in askers for t in one.creates)),
        sum(one.bound for one in askers),
        sum(one.unbound for one in askers),
        {name: took for one in askers for name, took in one.named.items()},
    )
