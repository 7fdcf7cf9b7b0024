"""Rounds of a storm, each with a fault in it, and the truth after each.

Room:  a control plane of its own, two replicas behind bad networks, a kube-scheduler in front of their Service, and
       what was counted. The seed decides pods, faults, their order, and the moment in the storm when each begins.
Door:  `Campaign(programs, seed, ...).run()` returns a `Summary`; it raises on the first thing that does not hold.
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
from tests.e2e.chaos.storm import Storm, patient, plan
from tests.e2e.control_plane import ControlPlane, Scheduler
from tests.e2e.gputile import NAMESPACE, Replica, rights
from tests.e2e.kubelets import FakeKubelets
from tests.e2e.nodes import gpu_node, join
from tests.e2e.processes import wait_until
from tests.e2e.programs import Programs
from tests.e2e.service import Service

SPACE = "storm"
QUIET = 90.0  # seconds for everything to be well again after a fault: kube-scheduler's watches rest up to 60
Say = Callable[[str], None]


class Round(msgspec.Struct, frozen=True):
    """One fault, and when it begins."""

    number: int
    fault: str
    actions: int  # of the storm in this round
    begins: int  # after so many of them
    seed: int  # of the fault's own dice


def rounds(seed: int, actions: int, faults: Sequence[str]) -> list[Round]:
    """The same for the same seed: every fault once before any comes again."""
    dice = random.Random(seed)
    order = list(faults)
    dice.shuffle(order)
    each, made = actions // len(order), []
    for number, fault in enumerate(order, start=1):
        begins = dice.randint(each // 10, each // 2)
        made.append(
            Round(number, fault, each + (actions % len(order)) * (number == len(order)), begins, dice.getrandbits(32))
        )
    return made


class Summary(msgspec.Struct):
    """What a run came to."""

    seed: int
    rounds: list[str] = []
    created: int = 0
    removed: int = 0
    bound: int = 0
    evicted: int = 0
    conflicts: int = 0
    failovers: list[tuple[str, float, float]] = []  # how, seconds until another led, and until it had bound a pod
    counts: Counter[str] = Counter()
    probes: int = 0
    lies: list[str] = []
    looks: int = 0
    seconds: float = 0.0

    def text(self) -> str:
        lines = [f"chaos: seed {self.seed}, {len(self.rounds)} rounds in {self.seconds:.0f} s", *self.rounds]
        lines.append(f"pods: {self.created} created, {self.removed} let go, {self.bound} bound")
        lines.append(f"sold twice for a moment: {self.conflicts} cards; evicted and told: {self.evicted} pods")
        for how, led, bound in self.failovers:
            lines.append(f"failover ({how}): another led after {led:.1f} s, and bound a pod after {bound:.1f} s")
        lines.append(f"readiness asked {self.probes} times, {len(self.lies)} lies; cards looked at {self.looks} times")
        lines.append("; ".join(f"{what}: {count}" for what, count in sorted(self.counts.items())))
        return "\n".join(lines)


class Scene:
    """All that runs, and what faults do to it."""

    def __init__(self, plane: ControlPlane, seed: int) -> None:
        self.plane, self.kube = plane, plane.kube
        self.proxies = {name: FaultProxy(plane, name, seed) for name in ("gputile-a", "gputile-b")}
        self.replicas = {
            name: Replica(plane, name, leads=False, server=proxy.server) for name, proxy in self.proxies.items()
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
            wait_until(lambda: self.leads() is not None, 30, "somebody leads")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.replicas:
            self.replicas[name].child.signal(signal.SIGCONT)
        self._stack.close()

    def count(self, what: str, how_often: int = 1) -> None:
        self.counts[what] += how_often

    def finish(self, name: str) -> bool:
        """Let a pod end by itself, if it runs."""
        pod = self.kubelets.pods.get(SPACE, name)
        if pod is None or pod["status"].get("phase") != "Running":
            return False
        self.kubelets.finish(name, SPACE)
        return True

    # --- who leads

    def leads(self) -> str | None:
        """The one replica that is labelled as the leader and is ready."""
        labelled = [name for name, replica in self.replicas.items() if patient(replica.leads, "reading labels")]
        found = [name for name in labelled if self.probes[name].is_ready()]
        return found[0] if len(found) == 1 else None

    def leader(self) -> str:
        found = wait_until(self.leads, 40, "one replica leads")
        assert found is not None
        return found

    @contextmanager
    def failover(self, leader: str, how: str) -> Iterator[None]:
        """Inside, the leader is lost; then the other must lead within 15 s. Measures that, and the next bind."""
        (other,) = (name for name in self.replicas if name != leader)
        wait_until(self.probes[other].is_ready, 30, f"{other} is ready to take over")
        began = time.monotonic()
        yield
        wait_until(self.replicas[other].leads, FAILOVER, f"{other} leads after {leader} was {how}")
        led = time.monotonic() - began
        self.bind_one(20)
        self.failovers.append((how, led, time.monotonic() - began))

    def bind_one(self, seconds: float) -> None:
        """A pod of our own asks for little, so that there is a bind to wait for."""
        self._probes += 1
        probe = f"probe-{self._probes}"
        wish = {
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
        patient(lambda: self.kube.create(wish), f"creating {probe}")
        bound = lambda pods: pods["default", probe]["spec"].get("nodeName")  # noqa: E731
        self.kubelets.pods.wait_for(bound, seconds, f"{probe} is bound")
        patient(lambda: self.kube.delete("Pod", probe, grace=0), f"deleting {probe}")

    # --- breaking

    def kill(self, name: str) -> None:
        self.replicas[name].child.kill()
        self.probes[name].down()

    def start(self, name: str) -> None:
        self.probes[name].born()
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
    """Small cards, larger ones, and a node that only the probes of failovers ask for."""
    small = [gpu_node(f"small-{n}", 4, 16384, "Tesla T4") for n in range(6)]
    large = [gpu_node(f"large-{n}", 4, 32768, "Tesla V100-SXM2-32GB") for n in range(3)]
    taint = {"key": "spare", "value": "yes", "effect": "NoSchedule"}
    spare = gpu_node("spare", 1, 16, "Tesla P4", labels={"spare": "yes"})
    spare["spec"]["taints"] = [taint]
    return [*small, *large, spare]


class Campaign:
    """See the module's text."""

    def __init__(
        self,
        programs: Programs,
        seed: int,
        *,
        pods: int = 1000,
        long: bool = False,
        say: Say = print,
        faults: Sequence[str] = (),
    ) -> None:
        self._programs, self.seed, self._say = programs, seed, say
        self._pods, self._faults = pods, list(faults) or [name for name in FAULTS if long or name not in LONG]
        self.summary = Summary(seed)

    def run(self) -> Summary:
        """One storm on a new control plane, with every fault in it once."""
        began = time.monotonic()
        self._say(f"chaos: seed {self.seed} (replay it with `make chaos SEED={self.seed}`)")
        with (
            ControlPlane(self._programs) as plane,
            Scene(plane, self.seed) as scene,
            truth.Watchman(scene.kubelets.pods, scene.kube.list("Node")) as watchman,
        ):
            actions = plan(self.seed, self._pods)
            storm = Storm(scene.kube, SPACE, actions, scene.finish)
            try:
                for one in rounds(self.seed, len(actions), self._faults):
                    self._round(scene, storm, watchman, one)
            finally:
                self._count(scene, storm, watchman)
                self.summary.seconds = time.monotonic() - began
            assert not storm, "the storm is not over"
        return self.summary

    def _round(self, scene: Scene, storm: Storm, watchman: truth.Watchman, one: Round) -> None:
        began, evicted = time.monotonic(), len(storm.evicted)
        self._blow(scene, storm, one)
        stormed = time.monotonic() - began
        cluster = self._settle(scene, storm)
        scene.bind_one(QUIET)  # kube-scheduler may have been deaf, and all well only because nobody needed it
        overcommitted = watchman.take()
        lies = [lie for probe in scene.probes.values() for lie in probe.lies]
        assert not lies, "\n".join(lies)
        allowed = one.fault in OVERLAPS
        assert allowed or not overcommitted, "\n".join(finding_lines(overcommitted))
        self.summary.conflicts += len(overcommitted)
        quiet = time.monotonic() - began - stormed
        line = (
            f"round {one.number:>2}: {one.fault} after {one.begins} of {one.actions} actions: {stormed:.1f} s, "
            f"well again after {quiet:.1f} s; {cluster.bound()} bound, {len(cluster.waiting())} wait"
        )
        line += f", {len(storm.evicted) - evicted} evicted and told" if len(storm.evicted) > evicted else ""
        self.summary.rounds.append(line)
        self._say(line)

    def _blow(self, scene: Scene, storm: Storm, one: Round) -> None:
        """The storm goes on in its own thread while the fault lasts."""
        errors: list[BaseException] = []
        begins, start = threading.Event(), storm.done

        def blow() -> None:
            try:
                storm.blow(one.begins)
                begins.set()
                storm.blow(one.actions - one.begins)
            except BaseException as wrong:  # told by the main thread
                errors.append(wrong)
            finally:
                begins.set()

        thread = threading.Thread(target=blow, name="storm", daemon=True)
        thread.start()
        begins.wait()
        try:
            if not errors:
                FAULTS[one.fault](scene, random.Random(one.seed))
        finally:
            thread.join(300)
        if errors:
            raise errors[0]
        assert storm.done == start + one.actions, "the storm did not end"

    def _settle(self, scene: Scene, storm: Storm) -> truth.Cluster:
        """Until all is well, or what is not after `QUIET`."""
        began, told = time.monotonic(), 0
        while True:
            name = scene.leads()
            leader = scene.replicas[name] if name else None
            cluster = truth.Cluster(scene.kube, SPACE)
            wrong = truth.wrongs(cluster, scene.kube, SPACE, storm, leader)
            wrong += [f"{one} is not ready" for one, probe in scene.probes.items() if not probe.is_ready()]
            if not wrong:
                return cluster
            waited = time.monotonic() - began
            if waited > 10 * (told + 1):
                told += 1
                self._say(f"  not well after {waited:.0f} s: {'; '.join(wrong[:3])}")
            if waited > QUIET:
                raise AssertionError(f"not well {QUIET:.0f} s after the fault:\n" + "\n".join(wrong[:20]))
            time.sleep(0.3)

    def _count(self, scene: Scene, storm: Storm, watchman: truth.Watchman) -> None:
        summary = self.summary
        summary.created, summary.removed, summary.evicted = storm.created, storm.removed, len(storm.evicted)
        summary.failovers, summary.counts, summary.looks = scene.failovers, scene.counts, watchman.looks
        for proxy in scene.proxies.values():
            summary.counts.update(proxy.injected)
            summary.counts["requests through the proxies"] += proxy.requests
        summary.probes = sum(probe.samples for probe in scene.probes.values())
        summary.lies = [lie for probe in scene.probes.values() for lie in probe.lies]
        shown = (event.object for event in scene.kubelets.pods.events)
        bound = {pod["metadata"]["uid"] for pod in shown if pod["spec"].get("nodeName")}
        summary.bound = len(bound)


def total(done: Sequence[Summary]) -> str:
    """Several runs in a few lines."""
    slowest = max((led for one in done for _, led, _ in one.failovers), default=0.0)
    return (
        f"chaos: {len(done)} storms (seeds {done[0].seed} to {done[-1].seed}), {sum(len(one.rounds) for one in done)} "
        f"rounds in {sum(one.seconds for one in done) / 60:.0f} minutes, {sum(one.created for one in done)} pods, "
        f"{sum(one.bound for one in done)} bound, {sum(one.evicted for one in done)} evicted and told; "
        f"{sum(len(one.failovers) for one in done)} failovers, the slowest {slowest:.1f} s"
    )
