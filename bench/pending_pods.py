"""Measures the binding of pods that fit beside a thousand that fit nowhere, and the cost of a repeated rejection.

Every GPU of the cluster has an allocation of 30 of its 80 GiB; the pending pods request 60 GiB of one GPU. In sum
each node has enough, so kube-scheduler calls filter with all nodes each time, and again on every change it sees.
Call `bind_existing_pods` first; `rate_beside_pending` measures the rates, `filter_cost` the CPU of a rejected
and of an accepted pod.
"""

import signal
import statistics
from contextlib import ExitStack

import msgspec
from tests.e2e.api import Manifest
from tests.e2e.control_plane import ControlPlane
from tests.e2e.pods import pod
from tests.e2e.processes import wait_until

from bench.bound_pods import BoundPod, bind_all
from bench.harness import CARDS, Cost, MeasuredReplica, bindings, configuration, delete_pods, one_tile, progress
from bench.rates import wait_until_pending

NAMESPACE, EXISTING = "pending", "existing"
ALLOCATED, TOO_MUCH = 30 * 1024, 60 * 1024  # MiB
LEAST, MOST = 0.6, 0.5


class RateBesidePending(msgspec.Struct, frozen=True, kw_only=True):
    """The rate with pending pods against the rate without."""

    pending: int
    alone: tuple[float, ...]
    with_pending: tuple[float, ...]
    ratio: float
    rejections: float  # rejecting filter calls, per bound pod
    gputile_ms: tuple[float, float]  # CPU per pod bound, alone and with pending pods

    def lines(self) -> list[str]:
        ratios = [b / a for a, b in zip(self.alone, self.with_pending, strict=True)]
        return [
            f"alone {statistics.median(self.alone):.0f} pods/s, beside {self.pending:,} pending pods "
            f"{statistics.median(self.with_pending):.0f}; {self.rejections:.2f} rejections per bound pod; "
            f"CPU of gputile per bound pod {self.gputile_ms[0]:.2f} and {self.gputile_ms[1]:.2f} ms",
            f"{'ok   ' if self.ratio >= LEAST else 'UNDER'} {self.ratio:.2f}  (at least {LEAST})  rate beside pending "
            f"pods against the rate without, {min(ratios):.2f}..{max(ratios):.2f}",
        ]


def bind_existing_pods(plane: ControlPlane, nodes: list[str]) -> None:
    """An allocation on every GPU: one pod per node, with a tile of each of its GPUs."""
    progress(f"binding {len(nodes):,} pods, each with a tile of all {CARDS} GPUs of its node")
    plane.namespace(EXISTING)
    manifests = (pod(f"t-{node}", {"gputile.io/gpu": CARDS, "gputile.io/memory": ALLOCATED}) for node in nodes)
    bound_pods = (
        BoundPod(manifest, node, tuple(range(CARDS)), ALLOCATED)
        for manifest, node in zip(manifests, nodes, strict=True)
    )
    bind_all(plane.kube, EXISTING, bound_pods)


def rate_beside_pending(plane: ControlPlane, pending: int, pods: int, rounds: int) -> RateBesidePending:
    plane.namespace(NAMESPACE)
    turns_by_count: dict[int, list[tuple[float, float, float]]] = {0: [], pending: []}
    for number in range(rounds):
        for count in (0, pending) if number % 2 == 0 else (pending, 0):
            turns_by_count[count].append(_turn(plane, count, pods))
        results = ", ".join(f"{count} pending {turns[-1][0]:.0f}/s" for count, turns in turns_by_count.items())
        progress(f"round {number + 1} of {rounds}: {results}")
    alone, turns_with_pending = turns_by_count[0], turns_by_count[pending]
    return RateBesidePending(
        pending=pending,
        alone=tuple(rate for rate, _, _ in alone),
        with_pending=tuple(rate for rate, _, _ in turns_with_pending),
        ratio=statistics.median(rate for rate, _, _ in turns_with_pending)
        / statistics.median(rate for rate, _, _ in alone),
        rejections=statistics.median(rejections for _, rejections, _ in turns_with_pending),
        gputile_ms=(
            statistics.median(ms for _, _, ms in alone),
            statistics.median(ms for _, _, ms in turns_with_pending),
        ),
    )


def _turn(plane: ControlPlane, pending: int, pods: int) -> tuple[float, float, float]:
    """Pods per second, rejections per bound pod, CPU of gputile per bound pod.

    First every pending pod is rejected once. Then kube-scheduler is stopped while the pods that fit are created, and
    continued: from the first binding to the last it handles both, pods that fit and pods that it retries.
    """
    with ExitStack() as stack:
        replica = stack.enter_context(MeasuredReplica(plane))
        plane.kube.create_many([_unschedulable(n) for n in range(pending)], NAMESPACE, threads=8)
        wait_until_pending(replica, pending)
        scheduler = stack.enter_context(plane.start_scheduler(config=configuration(replica, 100)))
        wait_until(lambda: _rejections(replica) >= pending, 300, f"{pending} pods rejected", every=0.5)
        recorded = stack.enter_context(bindings(plane, NAMESPACE, pods))
        scheduler.child.signal(signal.SIGSTOP)
        stack.callback(scheduler.child.signal, signal.SIGCONT)
        plane.kube.create_many([one_tile(f"p{n:05}") for n in range(pods)], NAMESPACE, threads=8)
        wait_until_pending(replica, pending + pods)
        before = _rejections(replica)
        scheduler.child.signal(signal.SIGCONT)
        recorded.wait(900)
        rejections, gputile_ms = _rejections(replica) - before, recorded.spent(replica.name)
    delete_pods(plane.kube, NAMESPACE)
    return recorded.rate, rejections / pods, gputile_ms


def _rejections(replica: MeasuredReplica) -> float:
    return replica.count("gputile_verbs_total", verb="filter", result="rejected")


def _unschedulable(number: int) -> Manifest:
    return one_tile(f"a{number:05}", TOO_MUCH)


def share_lines(cost: "FilterCost", rate: RateBesidePending) -> list[str]:
    """The cost of a rejection against all that a bound pod costs: filter, bind, and its watch events."""
    ratio = cost.rejected / rate.gputile_ms[0]
    return [
        f"{'ok   ' if ratio <= MOST else 'OVER '} {ratio:.2f}  (at most {MOST})  CPU of a repeated rejection, "
        "of a bound pod"
    ]


# ---- the cost of a rejection ----------------------------------------------------------------------------------------


class FilterCost(msgspec.Struct, frozen=True, kw_only=True):
    """CPU milliseconds of gputile's process per filter call, HTTP included."""

    nodes: int
    rejected: float  # of a pod like those rejected before
    accepted: float
    rejected_samples: tuple[float, ...]
    accepted_samples: tuple[float, ...]

    def lines(self) -> list[str]:
        ratio = self.rejected / self.accepted
        return [
            f"a rejection {self.rejected:.3f} ms of CPU, an accepted pod {self.accepted:.3f} ms, "
            f"at {self.nodes:,} nodes",
            f"{'ok   ' if ratio <= MOST else 'OVER '} {ratio:.2f}  (at most {MOST})  CPU of a repeated rejection, "
            "of an accepted pod",
        ]


def filter_cost(plane: ControlPlane, nodes: list[str], calls: int = 600, rounds: int = 5) -> FilterCost:
    """In turns; every accepted pod is a new one, and its reservation soon expires, as if it had been bound."""
    plane.namespace(NAMESPACE)
    kube = plane.kube
    with MeasuredReplica(plane, ledger__reserve_ttl="0.05", log_level="warning") as replica:
        kube.create_many([_unschedulable(n) for n in range(200)], NAMESPACE, threads=8)
        kube.create_many([one_tile(f"p{n:05}") for n in range(calls * rounds)], NAMESPACE, threads=8)
        wait_until_pending(replica, 200 + calls * rounds)
        pods = kube.list("Pod", NAMESPACE)
        too_large = [pod for pod in pods if pod["metadata"]["name"].startswith("a")]
        fitting = [pod for pod in pods if pod["metadata"]["name"].startswith("p")]
        client = FilterClient(replica, nodes)
        client.send_all(too_large)  # the first rejection of its kind
        rejected, accepted = [], []
        for number in range(rounds):
            rejected.append(client.cost([too_large[n % len(too_large)] for n in range(calls)], fits=False))
            accepted.append(client.cost(fitting[number * calls : (number + 1) * calls], fits=True))
        client.close()
    delete_pods(kube, NAMESPACE)
    return FilterCost(
        nodes=len(nodes),
        rejected=statistics.median(rejected),
        accepted=statistics.median(accepted),
        rejected_samples=tuple(rejected),
        accepted_samples=tuple(accepted),
    )


class FilterClient:
    """Sends filter calls as kube-scheduler does: one kept connection, the names of all nodes, one pod at a time."""

    def __init__(self, replica: MeasuredReplica, nodes: list[str]) -> None:
        self._replica, self._connection = replica, replica.connection()
        self._names = msgspec.json.encode(nodes)

    def body(self, pod: Manifest) -> bytes:
        return b'{"Pod":' + msgspec.json.encode(pod) + b',"Nodes":null,"NodeNames":' + self._names + b"}"

    def send(self, body: bytes) -> bytes:
        self._connection.request("POST", "/gputile/filter", body, {"Content-Type": "application/json"})
        return self._connection.getresponse().read()

    def send_all(self, pods: list[Manifest]) -> list[bytes]:
        return [self.send(self.body(pod)) for pod in pods]

    def cost(self, pods: list[Manifest], *, fits: bool) -> float:
        """CPU milliseconds of the process per call."""
        bodies = [self.body(pod) for pod in pods]
        before = Cost.of(self._replica.child).cpu
        responses = [self.send(body) for body in bodies]
        spent = Cost.of(self._replica.child).cpu - before
        for response in responses:
            assert bool(msgspec.json.decode(response)["NodeNames"]) is fits, response[:300]
        return 1000 * spent / len(bodies)

    def close(self) -> None:
        self._connection.close()
