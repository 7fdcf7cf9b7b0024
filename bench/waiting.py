"""Measures the binding of pods that fit beside a thousand that fit nowhere, and the cost of a repeated rejection.

Every GPU of the cluster has an allocation of 30 of its 80 GiB; the pending pods request 60 GiB of one GPU. In sum
each node has enough, so kube-scheduler calls filter with all nodes each time, and again on every change it sees.
Call `furnish` first; `beside` measures the rates, `prices` the cost of a rejected and of an accepted pod.
"""

import signal
import statistics
from contextlib import ExitStack

import msgspec
from tests.e2e.api import Manifest
from tests.e2e.control_plane import ControlPlane
from tests.e2e.pods import pod
from tests.e2e.processes import wait_until

from bench.rates import knows_all
from bench.seating import Seat, seat_all
from bench.stage import CARDS, Cost, Tenant, bindings, configuration, one_tile, removed, say

SPACE, TENANTS = "waiting", "tenants"
TENANT, TOO_MUCH = 30 * 1024, 60 * 1024  # MiB
LEAST, MOST = 0.6, 0.5


class Beside(msgspec.Struct, frozen=True, kw_only=True):
    """The rate with pending pods against the rate without."""

    waiting: int
    alone: tuple[float, ...]
    beside: tuple[float, ...]
    ratio: float
    noes: float  # rejecting filter calls, per bound pod
    ours_ms: tuple[float, float]  # CPU per pod bound, alone and beside

    def lines(self) -> list[str]:
        ratios = [b / a for a, b in zip(self.alone, self.beside, strict=True)]
        return [
            f"alone {statistics.median(self.alone):.0f} pods/s, beside {self.waiting:,} pending pods "
            f"{statistics.median(self.beside):.0f}; {self.noes:.2f} rejections per bound pod; "
            f"CPU of gputile per bound pod {self.ours_ms[0]:.2f} and {self.ours_ms[1]:.2f} ms",
            f"{'ok   ' if self.ratio >= LEAST else 'UNDER'} {self.ratio:.2f}  (at least {LEAST})  rate beside pending "
            f"pods against the rate without, {min(ratios):.2f}..{max(ratios):.2f}",
        ]


def furnish(plane: ControlPlane, nodes: list[str]) -> None:
    """An allocation on every GPU: one pod per node, with a tile of each of its GPUs."""
    say(f"binding {len(nodes):,} pods, each with a tile of all {CARDS} GPUs of its node")
    plane.namespace(TENANTS)
    wishes = (pod(f"t-{node}", {"gputile.io/gpu": CARDS, "gputile.io/memory": TENANT}) for node in nodes)
    seats = (Seat(wish, node, tuple(range(CARDS)), TENANT) for wish, node in zip(wishes, nodes, strict=True))
    seat_all(plane.kube, TENANTS, seats)


def beside(plane: ControlPlane, waiting: int, pods: int, rounds: int) -> Beside:
    plane.namespace(SPACE)
    turns_by_count: dict[int, list[tuple[float, float, float]]] = {0: [], waiting: []}
    for number in range(rounds):
        for count in (0, waiting) if number % 2 == 0 else (waiting, 0):
            turns_by_count[count].append(_turn(plane, count, pods))
        results = ", ".join(f"{count} pending {turns[-1][0]:.0f}/s" for count, turns in turns_by_count.items())
        say(f"round {number + 1} of {rounds}: {results}")
    alone, crowd = turns_by_count[0], turns_by_count[waiting]
    return Beside(
        waiting=waiting,
        alone=tuple(rate for rate, _, _ in alone),
        beside=tuple(rate for rate, _, _ in crowd),
        ratio=statistics.median(rate for rate, _, _ in crowd) / statistics.median(rate for rate, _, _ in alone),
        noes=statistics.median(noes for _, noes, _ in crowd),
        ours_ms=(statistics.median(ms for _, _, ms in alone), statistics.median(ms for _, _, ms in crowd)),
    )


def _turn(plane: ControlPlane, waiting: int, pods: int) -> tuple[float, float, float]:
    """Pods per second, rejections per bound pod, CPU of gputile per bound pod.

    First every pending pod is rejected once. Then kube-scheduler is stopped while the pods that fit are created, and
    continued: from the first binding to the last it handles both, pods that fit and pods that it retries.
    """
    with ExitStack() as stack:
        tenant = stack.enter_context(Tenant(plane))
        plane.kube.create_many([_hopeless(n) for n in range(waiting)], SPACE, threads=8)
        knows_all(tenant, waiting)
        scheduler = stack.enter_context(plane.start_scheduler(config=configuration(tenant, 100)))
        wait_until(lambda: _noes(tenant) >= waiting, 300, f"{waiting} pods rejected", every=0.5)
        seen = stack.enter_context(bindings(plane, SPACE, pods))
        scheduler.child.signal(signal.SIGSTOP)
        stack.callback(scheduler.child.signal, signal.SIGCONT)
        plane.kube.create_many([one_tile(f"p{n:05}") for n in range(pods)], SPACE, threads=8)
        knows_all(tenant, waiting + pods)
        before = _noes(tenant)
        scheduler.child.signal(signal.SIGCONT)
        seen.wait(900)
        noes, ours = _noes(tenant) - before, seen.spent(tenant.name)
    removed(plane.kube, SPACE)
    return seen.rate, noes / pods, ours


def _noes(tenant: Tenant) -> float:
    return tenant.count("gputile_verbs_total", verb="filter", result="rejected")


def _hopeless(number: int) -> Manifest:
    return one_tile(f"a{number:05}", TOO_MUCH)


def whole(priced: "Prices", rate: Beside) -> list[str]:
    """The cost of a rejection against all that a bound pod costs: filter, bind, and its watch events."""
    share = priced.no / rate.ours_ms[0]
    return [
        f"{'ok   ' if share <= MOST else 'OVER '} {share:.2f}  (at most {MOST})  CPU of a repeated rejection, "
        "of a bound pod"
    ]


# ---- the cost of a rejection ----------------------------------------------------------------------------------------


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """CPU milliseconds of gputile's process per filter call, HTTP included."""

    nodes: int
    no: float  # of a pod like the ones rejected before
    yes: float
    no_samples: tuple[float, ...]
    yes_samples: tuple[float, ...]

    def lines(self) -> list[str]:
        ratio = self.no / self.yes
        return [
            f"a rejection {self.no:.3f} ms of CPU, an accepted pod {self.yes:.3f} ms, at {self.nodes:,} nodes",
            f"{'ok   ' if ratio <= MOST else 'OVER '} {ratio:.2f}  (at most {MOST})  CPU of a repeated rejection, "
            "of an accepted pod",
        ]


def prices(plane: ControlPlane, nodes: list[str], calls: int = 600, rounds: int = 5) -> Prices:
    """In turns; every accepted pod is a new one, and its reservation soon expires, as if it had been bound."""
    plane.namespace(SPACE)
    kube = plane.kube
    with Tenant(plane, ledger__reserve_ttl="0.05", log_level="warning") as tenant:
        kube.create_many([_hopeless(n) for n in range(200)], SPACE, threads=8)
        kube.create_many([one_tile(f"p{n:05}") for n in range(calls * rounds)], SPACE, threads=8)
        knows_all(tenant, 200 + calls * rounds)
        pods = kube.list("Pod", SPACE)
        rejected = [it for it in pods if it["metadata"]["name"].startswith("a")]
        accepted = [it for it in pods if it["metadata"]["name"].startswith("p")]
        asker = Asker(tenant, nodes)
        asker.ask(rejected)  # the first rejection of its kind
        no, yes = [], []
        for number in range(rounds):
            no.append(asker.cost([rejected[n % len(rejected)] for n in range(calls)], fits=False))
            yes.append(asker.cost(accepted[number * calls : (number + 1) * calls], fits=True))
        asker.close()
    removed(kube, SPACE)
    return Prices(
        nodes=len(nodes),
        no=statistics.median(no),
        yes=statistics.median(yes),
        no_samples=tuple(no),
        yes_samples=tuple(yes),
    )


class Asker:
    """Sends filter calls as kube-scheduler does: one kept connection, the names of all nodes, one pod at a time."""

    def __init__(self, tenant: Tenant, nodes: list[str]) -> None:
        self._tenant, self._connection = tenant, tenant.connection()
        self._names = msgspec.json.encode(nodes)

    def body(self, pod: Manifest) -> bytes:
        return b'{"Pod":' + msgspec.json.encode(pod) + b',"Nodes":null,"NodeNames":' + self._names + b"}"

    def send(self, body: bytes) -> bytes:
        self._connection.request("POST", "/gputile/filter", body, {"Content-Type": "application/json"})
        return self._connection.getresponse().read()

    def ask(self, pods: list[Manifest]) -> list[bytes]:
        return [self.send(self.body(pod)) for pod in pods]

    def cost(self, pods: list[Manifest], *, fits: bool) -> float:
        """CPU milliseconds of the process per call."""
        bodies = [self.body(pod) for pod in pods]
        before = Cost.of(self._tenant.child).cpu
        answers = [self.send(body) for body in bodies]
        spent = Cost.of(self._tenant.child).cpu - before
        for answer in answers:
            assert bool(msgspec.json.decode(answer)["NodeNames"]) is fits, answer[:300]
        return 1000 * spent / len(bodies)

    def close(self) -> None:
        self._connection.close()
