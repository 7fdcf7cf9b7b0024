"""Callers of the scheduler, each in a process of its own, so that the bench does not distort their latencies.

`Caller(work, ...)` starts `work(*args)` in a process and `results()` returns its result; `probes` requests
/healthz as a kubelet does, `pods` calls the extender for good pods as kube-scheduler does.
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

PATIENCE = 10.0  # seconds; a response that takes longer is a failure and counts with this time
AGAIN, GRACE = 0.25, 10.0  # seconds between two tries of a pod; and after the end, for pods that are not bound yet
ELSEWHERE = -10  # in reality these callers run on other machines: their wait for a CPU is not ours
_SPAWN = multiprocessing.get_context("spawn")


class Address(msgspec.Struct, frozen=True):
    """The scheduler's address and the caller's certificate; without `client` an untrusted caller."""

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
    """The API server's address and a token."""

    server: str
    ca: str
    token: str

    def kube(self) -> Kube:
        return Kube(self.server, Path(self.ca), self.token)


def _as_if_elsewhere() -> None:
    with suppress(PermissionError):  # needs root; otherwise the callers' own wait for a CPU is part of their latencies
        os.nice(ELSEWHERE)


class Caller:
    """A process that runs one caller; `go` starts it and `results` waits for its result."""

    def __init__(self, work: Callable[..., Any], *args: Any) -> None:
        self._mine, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_run, args=(work, theirs, args), daemon=True)
        self._process.start()
        self._mine.recv()  # it is ready

    def go(self) -> None:
        self._mine.send("go")

    def results(self, seconds: float) -> Any:
        """Wait at most `seconds` for its result."""
        if not self._mine.poll(seconds):
            self._process.kill()
            raise TimeoutError(f"{self._process.name} has no results after {seconds:g} s")
        result = self._mine.recv()
        self._process.join(10)
        if isinstance(result, Exception):
            raise result
        return result


def _run(work: Callable[..., Any], pipe: Any, args: tuple[Any, ...]) -> None:
    pipe.send("ready")
    pipe.recv()
    try:
        pipe.send(work(*args))
    except Exception as error:
        pipe.send(RuntimeError(f"{work.__name__}: {type(error).__name__}: {error}"))


class Latencies(msgspec.Struct, frozen=True):
    """Milliseconds of each call, and the calls that failed or timed out."""

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
    """Request /healthz over a new connection each time, without a certificate, as a kubelet does."""
    _as_if_elsewhere()
    took, failed, begun, trust = list[float](), list[str](), time.monotonic(), address.trust()
    for number in itertools.count():
        due = begun + number * every
        if due > begun + seconds:
            return Latencies(tuple(took), tuple(failed))
        time.sleep(max(0.0, due - time.monotonic()))
        start = time.perf_counter()
        failure = _probe(address, trust)
        took.append(1000 * (time.perf_counter() - start))
        if failure:
            failed.append(failure)
    raise AssertionError


def _probe(address: Address, trust: ssl.SSLContext) -> str:
    connection = address.connection(trust)
    try:
        connection.request("GET", "/healthz")
        status = connection.getresponse().status
        return "" if status == 200 else f"HTTP {status}"
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        connection.close()


# ---- kube-scheduler, for good pods ----------------------------------------------------------------------------------


class Good(msgspec.Struct, frozen=True):
    """The results for the good pods."""

    filters: Latencies
    binds: Latencies
    creates: Latencies  # of the API server: how busy it is
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
            except (ApiError, OSError) as error:
                self.failed.append(f"{type(error).__name__}: {error}")
                self.unbound += 1
        self._connection.close()

    def _pod(self, name: str) -> None:
        start = time.perf_counter()
        pod = self._kube.create(one_tile(name), self._space)
        self.creates.append(1000 * (time.perf_counter() - start))
        body = b'{"Pod":' + msgspec.json.encode(pod) + b',"Nodes":null,"NodeNames":' + self._nodes + b"}"
        while time.monotonic() < self._end:
            names = (self._ask("filter", body, self.filters) or {}).get("NodeNames")
            if names and self._bind(pod, names[0]):
                self.bound += 1
                return
            time.sleep(AGAIN)
        self.unbound += 1

    def _bind(self, pod: dict[str, Any], node: str) -> bool:
        metadata = pod["metadata"]
        named = {"PodName": metadata["name"], "PodNamespace": metadata["namespace"], "PodUID": metadata["uid"]}
        result = self._ask("bind", json.dumps({**named, "Node": node}).encode(), self.binds)
        self.named[metadata["name"]] = self.binds[-1]
        return result is not None and result.get("Error") == ""

    def _ask(self, verb: str, body: bytes, took: list[float]) -> dict[str, Any] | None:
        start = time.perf_counter()
        try:
            self._connection.request("POST", f"/gputile/{verb}", body, {"Content-Type": "application/json"})
            answer = self._connection.getresponse()
            content = answer.read()
            if answer.status != 200:
                raise OSError(f"HTTP {answer.status}")
            result: dict[str, Any] = json.loads(content)
            return result
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.failed.append(f"{verb}: {type(error).__name__}: {error}")
            self._connection.close()
            return None
        finally:
            took.append(1000 * (time.perf_counter() - start))


def pods(address: Address, cluster: Cluster, space: str, nodes: list[str], seconds: float, rate: float) -> Good:
    """Create, filter and bind pods at this rate, as kube-scheduler would."""
    _as_if_elsewhere()
    names, begun, threads = msgspec.json.encode(nodes), time.monotonic() + 0.5, 12
    due = [begun + number / rate for number in range(int(seconds * rate))]
    askers = [Asker(n, address, cluster, space, names, due[n::threads]) for n in range(threads)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(seconds + GRACE + 3 * PATIENCE)
    return Good(
        Latencies(
            tuple(t for asker in askers for t in asker.filters), tuple(f for asker in askers for f in asker.failed)
        ),
        Latencies(tuple(t for asker in askers for t in asker.binds)),
        Latencies(tuple(t for asker in askers for t in asker.creates)),
        sum(asker.bound for asker in askers),
        sum(asker.unbound for asker in askers),
        {name: took for asker in askers for name, took in asker.named.items()},
    )
