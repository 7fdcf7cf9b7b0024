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

from bench import harness
from bench.harness import one_tile

PATIENCE = 10.0  # seconds; a response that takes longer is a failure and counts with this time
RETRY, GRACE = 0.25, 10.0  # seconds between two tries of a pod; and after the end, for pods that are not bound yet
NICE = -10  # in reality the callers run on other machines; here they run before the measured processes
_SPAWN = multiprocessing.get_context("spawn")


class Address(msgspec.Struct, frozen=True):
    """The scheduler's address and the caller's certificate; without `client` an untrusted caller."""

    port: int
    ca: str
    client: tuple[str, str] | None = None  # certificate, key

    def tls(self) -> ssl.SSLContext:
        tls = ssl.create_default_context(cafile=self.ca)
        if self.client is not None:
            tls.load_cert_chain(*self.client)
        return tls

    def connection(self, tls: ssl.SSLContext | None = None) -> http.client.HTTPSConnection:
        tls = tls or self.tls()
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=PATIENCE, context=tls)


class Cluster(msgspec.Struct, frozen=True):
    """The API server's address and a token."""

    server: str
    ca: str
    token: str

    def kube(self) -> Kube:
        return Kube(self.server, Path(self.ca), self.token)


def _raise_priority() -> None:
    with suppress(PermissionError):  # needs root; without it the callers' wait for a CPU is part of their latencies
        os.nice(NICE)


class Caller:
    """A process that runs one caller; `go` starts it and `results` waits for its result."""

    def __init__(self, work: Callable[..., Any], *args: Any) -> None:
        self._pipe, child_pipe = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_run, args=(work, child_pipe, args), daemon=True)
        self._process.start()
        self._pipe.recv()  # it is ready

    def go(self) -> None:
        self._pipe.send("go")

    def results(self, seconds: float) -> Any:
        """Wait at most `seconds` for its result."""
        if not self._pipe.poll(seconds):
            self._process.kill()
            raise TimeoutError(f"{self._process.name} has no results after {seconds:g} s")
        result = self._pipe.recv()
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

    def quantile(self, share: float) -> float:
        return harness.quantile(self.took, share) if self.took else 0.0

    @property
    def worst(self) -> float:
        return max(self.took, default=0.0)

    def merged_with(self, other: "Latencies") -> "Latencies":
        return Latencies(self.took + other.took, self.failed + other.failed)


# ---- a kubelet ------------------------------------------------------------------------------------------------------


def probes(address: Address, seconds: float, every: float) -> Latencies:
    """Request /healthz over a new connection each time, without a certificate, as a kubelet does."""
    _raise_priority()
    took, failed, start_time, tls = list[float](), list[str](), time.monotonic(), address.tls()
    for number in itertools.count():
        due = start_time + number * every
        if due > start_time + seconds:
            return Latencies(tuple(took), tuple(failed))
        time.sleep(max(0.0, due - time.monotonic()))
        start = time.perf_counter()
        failure = _probe(address, tls)
        took.append(1000 * (time.perf_counter() - start))
        if failure:
            failed.append(failure)
    raise AssertionError


def _probe(address: Address, tls: ssl.SSLContext) -> str:
    connection = address.connection(tls)
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
    bind_times: dict[str, float]  # milliseconds of the last bind, by pod

    @property
    def verbs(self) -> Latencies:
        return self.filters.merged_with(self.binds)


class PodScheduler(threading.Thread):
    """One connection of kube-scheduler."""

    def __init__(
        self, number: int, address: Address, cluster: Cluster, namespace: str, nodes: bytes, due: list[float]
    ) -> None:
        super().__init__(daemon=True)
        self._number, self._due = number, due
        self._kube, self._namespace, self._nodes = cluster.kube(), namespace, nodes
        self._end = due[-1] + GRACE if due else 0.0
        self._connection = address.connection()
        self.filters, self.binds, self.creates = list[float](), list[float](), list[float]()
        self.failed, self.bind_times = list[str](), dict[str, float]()
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
        pod = self._kube.create(one_tile(name), self._namespace)
        self.creates.append(1000 * (time.perf_counter() - start))
        body = b'{"Pod":' + msgspec.json.encode(pod) + b',"Nodes":null,"NodeNames":' + self._nodes + b"}"
        while time.monotonic() < self._end:
            names = (self._call("filter", body, self.filters) or {}).get("NodeNames")
            if names and self._bind(pod, names[0]):
                self.bound += 1
                return
            time.sleep(RETRY)
        self.unbound += 1

    def _bind(self, pod: dict[str, Any], node: str) -> bool:
        metadata = pod["metadata"]
        target = {"PodName": metadata["name"], "PodNamespace": metadata["namespace"], "PodUID": metadata["uid"]}
        result = self._call("bind", json.dumps({**target, "Node": node}).encode(), self.binds)
        self.bind_times[metadata["name"]] = self.binds[-1]
        return result is not None and result.get("Error") == ""

    def _call(self, verb: str, body: bytes, took: list[float]) -> dict[str, Any] | None:
        start = time.perf_counter()
        try:
            self._connection.request("POST", f"/gputile/{verb}", body, {"Content-Type": "application/json"})
            response = self._connection.getresponse()
            content = response.read()
            if response.status != 200:
                raise OSError(f"HTTP {response.status}")
            result: dict[str, Any] = json.loads(content)
            return result
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.failed.append(f"{verb}: {type(error).__name__}: {error}")
            self._connection.close()
            return None
        finally:
            took.append(1000 * (time.perf_counter() - start))


def pods(address: Address, cluster: Cluster, namespace: str, nodes: list[str], seconds: float, rate: float) -> Good:
    """Create, filter and bind pods at this rate, as kube-scheduler would."""
    _raise_priority()
    names, start_time, threads = msgspec.json.encode(nodes), time.monotonic() + 0.5, 12
    due = [start_time + number / rate for number in range(int(seconds * rate))]
    schedulers = [PodScheduler(n, address, cluster, namespace, names, due[n::threads]) for n in range(threads)]
    for scheduler in schedulers:
        scheduler.start()
    for scheduler in schedulers:
        scheduler.join(seconds + GRACE + 3 * PATIENCE)
    return Good(
        Latencies(
            tuple(t for scheduler in schedulers for t in scheduler.filters),
            tuple(f for scheduler in schedulers for f in scheduler.failed),
        ),
        Latencies(tuple(t for scheduler in schedulers for t in scheduler.binds)),
        Latencies(tuple(t for scheduler in schedulers for t in scheduler.creates)),
        sum(scheduler.bound for scheduler in schedulers),
        sum(scheduler.unbound for scheduler in schedulers),
        {name: took for scheduler in schedulers for name, took in scheduler.bind_times.items()},
    )
