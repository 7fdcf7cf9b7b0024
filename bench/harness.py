"""Helpers of the scheduler's benches on a real control plane: nodes, pods, gputile's process, kube-scheduler.

They adapt tests/e2e to measurements: any number of nodes, a gputile process over HTTPS or HTTP and optionally
profiled, the CPU and memory of each program from /proc, and the times of bindings.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import msgspec
from tests.e2e.api import Kube, Manifest
from tests.e2e.control_plane import ControlPlane
from tests.e2e.gputile import Replica
from tests.e2e.nodes import gpu_node, join
from tests.e2e.pods import pod
from tests.e2e.processes import Child, TookTooLong
from tests.e2e.watching import Event, watch

from bench import profiler

CARDS, CARD = 8, 81920  # per node, MiB
TILE = 8192  # MiB; a tenth of a GPU
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024
TICKS = os.sysconf("SC_CLK_TCK")
_began = time.monotonic()


def progress(line: str) -> None:
    """A line of progress, with the seconds since the start."""
    print(f"[{time.monotonic() - _began:7.1f}] {line}", flush=True)


# ---- CPU and memory of a process ------------------------------------------------------------------------------------


class Cost(msgspec.Struct, frozen=True):
    """CPU seconds of a process so far, user and system, and its resident memory, MiB."""

    cpu: float
    rss: float

    @classmethod
    def of(cls, child: Child) -> "Cost":
        stat = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        pages = int(Path(f"/proc/{child.pid}/statm").read_text().split()[1])
        return cls((int(stat[11]) + int(stat[12])) / TICKS, pages * PAGE_KIB / 1024)


# ---- nodes and pods -------------------------------------------------------------------------------------------------


def join_nodes(kube: Kube, count: int, threads: int = 8) -> list[str]:
    """Join `count` equal nodes of 8 GPUs, as gputile's agent would publish them."""
    progress(f"joining {count:,} nodes x {CARDS} GPUs")
    width = len(str(count - 1))
    return list(join(kube, [gpu_node(f"node-{n:0{width}}", CARDS, CARD) for n in range(count)], threads))


def one_tile(name: str, memory: int = TILE, **more: Any) -> Manifest:
    """A pod with a tile of a GPU and half a CPU, so that kube-scheduler has its usual work too."""
    limits = {"gputile.io/gpu": 1, "gputile.io/memory": memory, "cpu": "500m", "memory": "256Mi"}
    return pod(name, limits, **more)


def delete_pods(kube: Kube, namespace: str) -> None:
    """Delete all pods and events of a namespace and wait. On a busy machine that takes longer than one request."""
    for kind, plural in (("Pod", "pods"), ("Event", "events")):
        while kube.request("GET", f"/api/v1/namespaces/{namespace}/{plural}?limit=1")["items"]:
            with suppress(TimeoutError):
                kube.delete_all(kind, namespace, grace=0)


# ---- gputile's process ----------------------------------------------------------------------------------------------


class MeasuredReplica(Replica):
    """A replica of gputile; `plain` uses HTTP instead of the TLS of deploy/, `profile` profiles it."""

    patience = 180.0  # a slow start is a result, not a failure

    def __init__(self, plane: ControlPlane, *, plain: bool = False, profile: Path | None = None, **sets: Any) -> None:
        without = {"tls__certificate": "", "tls__key": "", "tls__client_ca": ""} if plain else {}
        super().__init__(plane, **{**sets, **without})
        self._plain, self._profile = plain, profile

    def _argv(self) -> list[str | Path]:
        argv = super()._argv()
        if self._profile is None:
            return argv
        return [sys.executable, Path(profiler.__file__).resolve(), self._profile, *argv]

    def connection(self) -> HTTPConnection:
        """A connection to keep open for many calls."""
        return HTTPConnection("127.0.0.1", self.port, timeout=10) if self._plain else super().connection()

    def config(
        self, file: str = "default-scheduler.yaml", port: int | None = None, *, steers: bool = False, **changes: Any
    ) -> Manifest:
        config = super().config(file, port, steers=steers, **changes)
        for stanza in config["extenders"] if self._plain else ():
            stanza["urlPrefix"] = stanza["urlPrefix"].replace("https://", "http://")
            stanza["enableHTTPS"] = False
            del stanza["tlsConfig"]
        return config


def configuration(replica: MeasuredReplica | None, percentage: int, **changes: Any) -> Manifest:
    """The configuration of kube-scheduler from deploy/; without a replica the same without an extender."""
    qps = {"qps": 5000, "burst": 5000}  # its client must not be the limit in any variant
    plain = {"apiVersion": "kubescheduler.config.k8s.io/v1", "kind": "KubeSchedulerConfiguration"}
    config = replica.config(**changes) if replica else plain
    leader_election = {"leaderElect": False}
    return {
        **config,
        "leaderElection": leader_election,
        "clientConnection": qps,
        "percentageOfNodesToScore": percentage,
    }


# ---- the times of bindings ------------------------------------------------------------------------------------------


class Bindings:
    """The time at which the API server showed each pod of a namespace with a node, and the cost of programs then.

    The watch selects pods with a node, so each binding is one event and the bench costs little itself.
    """

    def __init__(self, plane: ControlPlane, wanted: int) -> None:
        self.at: list[float] = []
        self.names: list[str] = []
        self.costs: dict[int, dict[str, Cost]] = {}  # after so many bindings, by program
        self._plane, self._wanted = plane, wanted
        self._bound: set[str] = set()
        self._all = threading.Event()

    def record(self, event: Event) -> None:
        name = event.object["metadata"]["name"]
        if event.type == "DELETED" or name in self._bound:
            return
        self._bound.add(name)
        self.at.append(event.at)
        self.names.append(name)
        if len(self.at) in (1, self._wanted):
            self.costs[len(self.at)] = {child.name: Cost.of(child) for child in self._plane.children if child.alive}
        if len(self.at) >= self._wanted:
            self._all.set()

    def wait(self, seconds: float) -> None:
        if not self._all.wait(seconds):
            raise TookTooLong(f"{len(self.at)} of {self._wanted} pods were bound within {seconds:g} s")

    @property
    def rate(self) -> float:
        """Pods per second, from the first binding to the last that was wanted."""
        return (self._wanted - 1) / (self.at[self._wanted - 1] - self.at[0])

    def spent(self, program: str) -> float:
        """CPU milliseconds per pod, between the same two moments; 0 if it did not run."""
        first, last = self.costs[1], self.costs[self._wanted]
        return 1000 * (last[program].cpu - first[program].cpu) / (self._wanted - 1) if program in last else 0.0


@contextmanager
def bindings(plane: ControlPlane, namespace: str, wanted: int, labels: str = "") -> Iterator[Bindings]:
    recorded = Bindings(plane, wanted)
    with watch(plane.kube, "Pod", namespace, labels, fields="spec.nodeName!=") as bound:
        bound.each(recorded.record)
        yield recorded


def quantile(samples: Sequence[float], part: float) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
