"""Measures the filter latency by the number of nodes, and memory and time to ready in a large cluster."""

import time
from collections.abc import Sequence
from functools import partial

import msgspec
from tests.e2e.control_plane import ControlPlane
from tests.e2e.gputile import rights
from tests.e2e.nodes import gpu_node, join
from tests.e2e.processes import wait_until

from bench.bound_pods import BoundPod, bind_all
from bench.harness import CARDS, TILE, Cost, MeasuredReplica, delete_pods, one_tile, progress, quantile
from bench.pending_pods import FilterClient
from bench.rates import wait_until_pending

NAMESPACE = "sizes"
MEMORY_GOAL, READY_GOAL, GROWTH_GOAL = 300.0, 15.0, 4.0  # MiB, seconds, times


# ---- latency --------------------------------------------------------------------------------------------------------


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds per filter call over HTTPS, seen by the caller; CPU of the process per call."""

    nodes: int
    calls: int
    p50: float
    p99: float
    cpu: float


def latencies(plane: ControlPlane, sizes: Sequence[int], calls: int = 1_000) -> list[Latency]:
    """The cluster grows from size to size. Its nodes are empty and equal, so filter chooses among all of them."""
    measured: list[Latency] = []
    plane.namespace(NAMESPACE)
    rights(plane)
    for size in sorted(sizes):
        existing = measured[-1].nodes if measured else 0
        progress(f"{size:,} nodes")
        join(plane.kube, [gpu_node(f"node-{n:05}", CARDS) for n in range(existing, size)], 8)
        measured.append(_latency(plane, [f"node-{n:05}" for n in range(size)], calls))
    return measured


def _latency(plane: ControlPlane, nodes: list[str], calls: int) -> Latency:
    plane.kube.create_many([one_tile(f"p{n:05}") for n in range(calls)], NAMESPACE, threads=8)
    with MeasuredReplica(plane, ledger__reserve_ttl="0.05", log_level="warning") as replica:
        wait_until_pending(replica, calls)
        client = FilterClient(replica, nodes)
        bodies = [client.body(manifest) for manifest in plane.kube.list("Pod", NAMESPACE)]
        before, took = Cost.of(replica.child).cpu, []
        for body in bodies:
            start_time = time.perf_counter()
            client.send(body)
            took.append(1000 * (time.perf_counter() - start_time))
        cpu = 1000 * (Cost.of(replica.child).cpu - before) / calls
        client.close()
    delete_pods(plane.kube, NAMESPACE)
    return Latency(nodes=len(nodes), calls=calls, p50=quantile(took, 0.5), p99=quantile(took, 0.99), cpu=cpu)


def latency_lines(measured: Sequence[Latency]) -> list[str]:
    lines = [f"{'nodes':>7}{'p50 ms':>9}{'p99 ms':>9}{'CPU ms':>9}   filter over HTTPS, one connection, one at a time"]
    lines += [f"{latency.nodes:>7,}{latency.p50:>9.2f}{latency.p99:>9.2f}{latency.cpu:>9.2f}" for latency in measured]
    by_size = {latency.nodes: latency for latency in measured}
    if {1_000, 5_000} <= set(by_size):
        growth = by_size[5_000].p50 / by_size[1_000].p50
        verdict = "ok   " if growth <= GROWTH_GOAL else "OVER "
        lines.append(f"{verdict} {growth:.1f}  (at most {GROWTH_GOAL:g})  p50 at 5,000 nodes, times that at 1,000")
    return lines


# ---- a large cluster ------------------------------------------------------------------------------------------------


class Large(msgspec.Struct, frozen=True, kw_only=True):
    """Memory and time to ready in a large cluster."""

    nodes: int
    pods: int
    rss: tuple[float, ...]  # MiB, once ready and the leader, by start
    ready: tuple[float, ...]  # seconds from the start of the program to /readyz

    def lines(self) -> list[str]:
        most, slowest = max(self.rss), max(self.ready)
        at = f"at {self.nodes:,} nodes and {self.pods:,} bound pods, worst of {len(self.rss)}"
        return [
            f"{'ok   ' if most < MEMORY_GOAL else 'OVER '} {most:.0f}  (below {MEMORY_GOAL:g})  MiB of memory {at}",
            f"{'ok   ' if slowest < READY_GOAL else 'OVER '} {slowest:.1f}  (below {READY_GOAL:g})  "
            f"seconds from start to ready {at}",
        ]


def large(plane: ControlPlane, nodes: list[str], pods: int, starts: int = 3) -> Large:
    """Readiness is measured on a new process; memory after it became the leader and ran for a while."""
    plane.namespace(NAMESPACE)
    progress(f"binding {pods:,} pods, each with a tile")
    bind_all(plane.kube, NAMESPACE, (_bound_pod(n, nodes) for n in range(pods)))
    rights(plane)
    rss, ready = [], []
    for _ in range(starts):
        replica = TimedReplica(plane)
        with replica:
            wait_until(partial(_has_confirmed, replica, pods), 60, "all pods are in the ledger")
            time.sleep(3)
            rss.append(Cost.of(replica.child).rss)
            ready.append(replica.took)
            progress(f"ready after {ready[-1]:.1f} s, {rss[-1]:.0f} MiB")
    return Large(nodes=len(nodes), pods=pods, rss=tuple(rss), ready=tuple(ready))


def _has_confirmed(replica: MeasuredReplica, pods: int) -> bool:
    return replica.count("gputile_ledger_pods", state="confirmed") >= pods


class TimedReplica(MeasuredReplica):
    """A replica that records how long it took to be ready."""

    took = 0.0

    def is_ready(self) -> bool:
        self._began = getattr(self, "_began", None) or time.monotonic()
        is_ready = super().is_ready()
        if is_ready and not self.took:
            self.took = time.monotonic() - self._began
        return is_ready


def _bound_pod(number: int, nodes: list[str]) -> BoundPod:
    """About six pods per node, spread over its GPUs."""
    node, turn = nodes[number % len(nodes)], number // len(nodes)
    return BoundPod(one_tile(f"p{number:05}"), node, (turn % CARDS,), TILE)
