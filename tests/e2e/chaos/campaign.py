"""Runs a storm in rounds, one fault in each, and checks the invariants after each round.

It has its own control plane, two replicas behind fault proxies, and a kube-scheduler in front of their Service. The
seed decides the pods, the faults, their order, and after how many actions each begins. A violation must raise.
"""

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import msgspec

from gputile.audit.advice import finding_lines
from tests.e2e.api import Manifest
from tests.e2e.chaos import truth
from tests.e2e.chaos.faults import FAILOVER, FAULTS, LONG, OVERLAPS
from tests.e2e.chaos.proxy import FaultProxy
from tests.e2e.chaos.readiness import Readiness
from tests.e2e.chaos.storm import Storm, plan, retry
from tests.e2e.control_plane import ControlPlane, Scheduler
from tests.e2e.gputile import NAMESPACE, Replica, rights
from tests.e2e.kubelets import FakeKubelets
from tests.e2e.nodes import gpu_node, join
from tests.e2e.processes import wait_until
from tests.e2e.programs import Programs
from tests.e2e.service import Service

SPACE = "storm"
RECOVERY = 90.0  # seconds to recover from a fault: kube-scheduler's watches back off up to 60
Report = Callable[[str], None]


class Round(msgspec.Struct, frozen=True):
    """One fault, and when it begins."""

    number: int
    fault: str
    actions: int  # of the storm in this round
    begins: int  # the number of actions before the fault
    seed: int  # of the fault's random numbers


def rounds(seed: int, actions: int, faults: Sequence[str]) -> list[Round]:
    """One round per fault, in the order of the seed; the same seed makes the same rounds."""
    dice = random.Random(seed)
    order = list(faults)
    dice.shuffle(order)
    each, result = actions // len(order), []
    for number, fault in enumerate(order, start=1):
        begins = dice.randint(each // 10, each // 2)
        result.append(
            Round(number, fault, each + (actions % len(order)) * (number == len(order)), begins, dice.getrandbits(32))
        )
    return result


class Summary(msgspec.Struct):
    """The result of a run."""

    seed: int
    rounds: list[str] = []
    created: int = 0
    removed: int = 0
    bound: int = 0
    evicted: int = 0
    double_allocations: int = 0
    failovers: list[tuple[str, float, float]] = []  # how, seconds to the next election, and to the first bind
    counts: Counter[str] = Counter()
    probes: int = 0
    false_readiness: list[str] = []
    audits: int = 0
    seconds: float = 0.0

    def text(self) -> str:
        lines = [f"chaos: seed {self.seed}, {len(self.rounds)} rounds in {self.seconds:.0f} s", *self.rounds]
        lines.append(f"pods: {self.created} created, {self.removed} deleted, {self.bound} bound")
        lines.append(
            f"temporarily double-allocated: {self.double_allocations} GPUs; evicted with an event: {self.evicted} pods"
        )
        for how, elected, bound in self.failovers:
            lines.append(f"failover ({how}): new leader after {elected:.1f} s, first bind after {bound:.1f} s")
        lines.append(
            f"readiness probes: {self.probes}, false readiness: {len(self.false_readiness)}; audits: {self.audits}"
        )
        lines.append("; ".join(f"{what}: {count}" for what, count in sorted(self.counts.items())))
        return "\n".join(lines)


class Scene:
    """The processes of a campaign, and the operations that faults perform on them."""

    def __init__(self, plane: ControlPlane, seed: int) -> None:
        self.plane, self.kube = plane, plane.kube
        self.proxies = {name: FaultProxy(plane, name, seed) for name in ("gputile-a", "gputile-b")}
        self.replicas = {
            name: Replica(plane, name, wait_for_lease=False, server=proxy.server)
            for name, proxy in self.proxies.items()
        }
        self.probes = {name: Readiness(replica, self.proxies[name]) for name, replica in self.replicas.items()}
        self.counts: Counter[str] = Counter()
        self.failovers: list[tuple[str, float, float]] = []
        self._probes = 0
        self._stack = ExitStack()
        self.scheduler: Scheduler
        self.kubelets: FakeKubelets

    def __enter__(self) -> "Scene":
        with ExitStack() as stack:
            rights(self.plane)
            self.plane.namespace(SPACE)
            join(self.kube, machines())
            for name, proxy in self.proxies.items():
                stack.enter_context(proxy)
                stack.enter_context(self.replicas[name])
                stack.enter_context(self.probes[name])
            ports = {name: ("127.0.0.1", replica.port) for name, replica in self.replicas.items()}
            ready = lambda name: self.probes[name].is_ready()  # noqa: E731
            service = stack.enter_context(Service(self.kube, NAMESPACE, ports, is_ready=ready))
            first = next(iter(self.replicas.values()))
            config = first.config(port=service.port)
            self.scheduler = stack.enter_context(self.plane.start_scheduler(config=config))
            self.kubelets = stack.enter_context(FakeKubelets(self.kube))
            wait_until(lambda: self.find_leader() is not None, 30, "a leader is elected")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.replicas:
            self.replicas[name].child.signal(signal.SIGCONT)
        self._stack.close()

    def count(self, what: str, how_often: int = 1) -> None:
        self.counts[what] += how_often

    def finish(self, name: str) -> bool:
        """Let the containers of a running pod exit; False if it does not run."""
        pod = self.kubelets.pods.get(SPACE, name)
        if pod is None or pod["status"].get("phase") != "Running":
            return False
        self.kubelets.finish(name, SPACE)
        return True

    # --- leader election

    def find_leader(self) -> str | None:
        """The only replica that has the leader's label and is ready; None if there is not exactly one."""
        labelled = [name for name, replica in self.replicas.items() if retry(replica.is_leader, "reading labels")]
        ready = [name for name in labelled if self.probes[name].is_ready()]
        return ready[0] if len(ready) == 1 else None

    def leader(self) -> str:
        leader = wait_until(self.find_leader, 40, "one replica is the leader")
        assert leader is not None
        return leader

    @contextmanager
    def failover(self, leader: str, how: str) -> Iterator[None]:
        """The leader is lost in the `with`; the other replica must be elected within 15 s, and then bind a pod."""
        (other,) = (name for name in self.replicas if name != leader)
        wait_until(self.probes[other].is_ready, 30, f"{other} is ready to take over")
        began = time.monotonic()
        yield
        wait_until(self.replicas[other].is_leader, FAILOVER, f"{other} is the leader after {leader} was {how}")
        elected = time.monotonic() - began
        self.bind_probe_pod(20)
        self.failovers.append((how, elected, time.monotonic() - began))

    def bind_probe_pod(self, seconds: float) -> None:
        """Create a small probe pod, wait until it is bound, and delete it."""
        self._probes += 1
        probe = f"probe-{self._probes}"
        manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": probe, "namespace": "default"},
            "spec": {
                "containers": [
                    {
                        "name": "main",
                        "image": "busybox",
                        "resources": {"limits": {"gputile.io/gpu": "1", "gputile.io/memory": "1"}},
                    }
                ],
                "nodeSelector": {"spare": "yes"},
                "tolerations": [{"key": "spare", "operator": "Exists"}],
            },
        }
        retry(lambda: self.kube.create(manifest), f"creating {probe}")
        bound = lambda pods: pods["default", probe]["spec"].get("nodeName")  # noqa: E731
        self.kubelets.pods.wait_for(bound, seconds, f"{probe} is bound")
        retry(lambda: self.kube.delete("Pod", probe, grace=0), f"deleting {probe}")

    # --- operations of the faults

    def kill(self, name: str) -> None:
        self.replicas[name].child.kill()
        self.probes[name].down()

    def start(self, name: str) -> None:
        self.probes[name].started()
        self.replicas[name].child.start()

    def freeze(self, name: str) -> None:
        self.replicas[name].child.signal(signal.SIGSTOP)
        time.sleep(0.05)
        self.probes[name].down()

    def thaw(self, name: str) -> None:
        self.probes[name].thawed()
        self.replicas[name].child.signal(signal.SIGCONT)

    def black_out(self, name: str) -> None:
        self.proxies[name].black_out()
        self.probes[name].dark(time.monotonic())

    def heal(self, name: str) -> None:
        self.probes[name].dark(None)
        self.proxies[name].heal()


def machines() -> list[Manifest]:
    """Nodes with small GPUs, nodes with larger ones, and a node that only the probe pods select."""
    small = [gpu_node(f"small-{n}", 4, 16384, "Tesla T4") for n in range(6)]
    large = [gpu_node(f"large-{n}", 4, 32768, "Tesla V100-SXM2-32GB") for n in range(3)]
    taint = {"key": "spare", "value": "yes", "effect": "NoSchedule"}
    spare = gpu_node("spare", 1, 16, "Tesla P4", labels={"spare": "yes"})
    spare["spec"]["taints"] = [taint]
    return [*small, *large, spare]


class Campaign:
    """One storm with its faults; `run` returns its summary."""

    def __init__(
        self,
        programs: Programs,
        seed: int,
        *,
        pods: int = 1000,
        long: bool = False,
        report: Report = print,
        faults: Sequence[str] = (),
    ) -> None:
        self._programs, self.seed, self._report = programs, seed, report
        self._pods, self._faults = pods, list(faults) or [name for name in FAULTS if long or name not in LONG]
        self.summary = Summary(seed)

    def run(self) -> Summary:
        """One storm on a new control plane, with every fault in it once."""
        began = time.monotonic()
        self._report(f"chaos: seed {self.seed} (replay: `make chaos SEED={self.seed}`)")
        with (
            ControlPlane(self._programs) as plane,
            Scene(plane, self.seed) as scene,
            truth.OverlapWatcher(scene.kubelets.pods, scene.kube.list("Node")) as watcher,
        ):
            actions = plan(self.seed, self._pods)
            storm = Storm(scene.kube, SPACE, actions, scene.finish)
            try:
                for turn in rounds(self.seed, len(actions), self._faults):
                    self._round(scene, storm, watcher, turn)
            finally:
                self._count(scene, storm, watcher)
                self.summary.seconds = time.monotonic() - began
            assert not storm, "the storm is not over"
        return self.summary

    def _round(self, scene: Scene, storm: Storm, watcher: truth.OverlapWatcher, turn: Round) -> None:
        began, evicted = time.monotonic(), len(storm.evicted)
        self._storm_with_fault(scene, storm, turn)
        stormed = time.monotonic() - began
        cluster = self._wait_for_recovery(scene, storm)
        scene.bind_probe_pod(RECOVERY)  # kube-scheduler may have lost its watches unnoticed: no pod needed it
        double_allocated = watcher.take()
        false_readiness = [line for probe in scene.probes.values() for line in probe.false_readiness]
        assert not false_readiness, "\n".join(false_readiness)
        allowed = turn.fault in OVERLAPS
        assert allowed or not double_allocated, "\n".join(finding_lines(double_allocated))
        self.summary.double_allocations += len(double_allocated)
        recovered = time.monotonic() - began - stormed
        line = (
            f"round {turn.number:>2}: {turn.fault} after {turn.begins} of {turn.actions} actions: {stormed:.1f} s, "
            f"recovered after {recovered:.1f} s; {cluster.bound()} bound, {len(cluster.pending())} pending"
        )
        line += f", {len(storm.evicted) - evicted} evicted with an event" if len(storm.evicted) > evicted else ""
        self.summary.rounds.append(line)
        self._report(line)

    def _storm_with_fault(self, scene: Scene, storm: Storm, turn: Round) -> None:
        """The storm continues in its own thread while the fault lasts."""
        errors: list[BaseException] = []
        begins, start = threading.Event(), storm.done

        def execute() -> None:
            try:
                storm.execute(turn.begins)
                begins.set()
                storm.execute(turn.actions - turn.begins)
            except BaseException as error:  # raised in the main thread
                errors.append(error)
            finally:
                begins.set()

        thread = threading.Thread(target=execute, name="storm", daemon=True)
        thread.start()
        begins.wait()
        try:
            if not errors:
                FAULTS[turn.fault](scene, random.Random(turn.seed))
        finally:
            thread.join(300)
        if errors:
            raise errors[0]
        assert storm.done == start + turn.actions, "the storm did not end"

    def _wait_for_recovery(self, scene: Scene, storm: Storm) -> truth.Cluster:
        """Wait until every invariant holds; raise with the violations after `RECOVERY`."""
        began, reports = time.monotonic(), 0
        while True:
            name = scene.find_leader()
            leader = scene.replicas[name] if name else None
            cluster = truth.Cluster(scene.kube, SPACE)
            violations = truth.violations(cluster, scene.kube, SPACE, storm, leader)
            violations += [f"{replica} is not ready" for replica, it in scene.probes.items() if not it.is_ready()]
            if not violations:
                return cluster
            waited = time.monotonic() - began
            if waited > 10 * (reports + 1):
                reports += 1
                self._report(f"  not recovered after {waited:.0f} s: {'; '.join(violations[:3])}")
            if waited > RECOVERY:
                raise AssertionError(f"not recovered {RECOVERY:.0f} s after the fault:\n" + "\n".join(violations[:20]))
            time.sleep(0.3)

    def _count(self, scene: Scene, storm: Storm, watcher: truth.OverlapWatcher) -> None:
        summary = self.summary
        summary.created, summary.removed, summary.evicted = storm.created, storm.removed, len(storm.evicted)
        summary.failovers, summary.counts, summary.audits = scene.failovers, scene.counts, watcher.audits
        for proxy in scene.proxies.values():
            summary.counts.update(proxy.injected)
            summary.counts["requests through the proxies"] += proxy.requests
        summary.probes = sum(probe.samples for probe in scene.probes.values())
        summary.false_readiness = [line for probe in scene.probes.values() for line in probe.false_readiness]
        seen = (event.object for event in scene.kubelets.pods.events)
        bound = {pod["metadata"]["uid"] for pod in seen if pod["spec"].get("nodeName")}
        summary.bound = len(bound)


def total(summaries: Sequence[Summary]) -> str:
    """Several runs in a few lines."""
    slowest = max((elected for summary in summaries for _, elected, _ in summary.failovers), default=0.0)
    return (
        f"chaos: {len(summaries)} storms (seeds {summaries[0].seed} to {summaries[-1].seed}), "
        f"{sum(len(it.rounds) for it in summaries)} rounds in {sum(it.seconds for it in summaries) / 60:.0f} minutes, "
        f"{sum(it.created for it in summaries)} pods, {sum(it.bound for it in summaries)} bound, "
        f"{sum(it.evicted for it in summaries)} evicted with an event; "
        f"{sum(len(it.failovers) for it in summaries)} failovers, the slowest {slowest:.1f} s"
    )
