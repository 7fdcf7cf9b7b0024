"""A scheduler without a process: its modules on a scripted cluster in memory, with a clock that the test moves.

The watch does not run. Its events are kept in `api.events`, and `Rig.catch_up` delivers them, so that a
test decides what our watch shows and when.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
from prometheus_client.core import Sample

from gputile.dialects.gputile import GRANT
from gputile.dialects.kube_objects import NodeObject, Pod
from gputile.kube.api import AgentLease, ApiRejected, Binding, Json, KubeEvent, OutcomeUnknown
from gputile.kube.disruption_budgets import DisruptionBudget
from gputile.kube.fake import MemoryApi
from gputile.ledger.events import Instruction
from gputile.ledger.ledger import AllocationState, Ledger
from gputile.scheduler.binding.binder import Binder
from gputile.scheduler.binding.open_binds import OpenBinds
from gputile.scheduler.binding.reconciler import Reconciler
from gputile.scheduler.extender.cpu_pods import CpuPodSteering
from gputile.scheduler.extender.filter import FilterService
from gputile.scheduler.extender_api import BindArgs, FilterAnswer, FilterArgs, read_filter
from gputile.scheduler.pending.pending_pods import PendingPods
from gputile.scheduler.preemption.preemptor import Preemptor
from gputile.scheduler.settings import Settings
from gputile.scheduler.state.cluster_state import ClusterState
from gputile.scheduler.state.node_availability import NodeAvailability
from gputile.scheduler.state.pod_requests import PodRequests
from gputile.scheduler.state.unschedulable import UnschedulablePod
from gputile.telemetry.metrics import Metrics
from gputile.testing.builders import NodeBuilder, pod

GPU, MEMORY, CORES = "gputile.io/gpu", "gputile.io/memory", "gputile.io/cores"


def tile(memory: int, cores: int = 0, cards: int = 1, **rest: Any) -> Json:
    """The limits of a container that requests this much of a card."""
    return {GPU: cards, MEMORY: memory, CORES: cores, **rest}


class Clock:
    """A clock that the test moves; `pause` is a sleep that takes no time and is recorded."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


class LostResponse(msgspec.Struct, frozen=True):
    """A step of the script: the write succeeds, and its answer gets lost."""

    error: Exception = OutcomeUnknown("connection reset")


T = TypeVar("T")
Step = Exception | LostResponse | Callable[[], Any] | None


class ScriptedApi(MemoryApi):
    """The cluster in memory, where a call can fail, fail after it was written, or wait, as the script says.

    `script["bind"]` is what happens to the next calls of `bind`, in order; None and an empty script: it works.
    """

    def __init__(self, nodes: Iterable[Json] = (), pods: Iterable[Json] = ()) -> None:
        self.script: dict[str, list[Step]] = {}
        self.calls: list[str] = []
        self.bindings: list[Binding] = []
        self.timeouts: list[float] = []
        self.patches: list[tuple[str, dict[str, str | None], dict[str, str | None]]] = []
        self.events: list[tuple[str, str, Json]] = []
        self.evicted: list[str] = []
        self.at_once = False  # whether evicted pods are gone at once
        self.guards: list[Json] = []  # PodDisruptionBudgets
        self.gates: dict[str, asyncio.Event] = {}  # by call: what it waits for before it does anything
        self.delays: list[int] = []  # how many turns of the loop each call and each answer takes
        super().__init__(nodes, pods)

    async def pod(self, namespace: str, name: str) -> Pod | None:
        lost = await self._play("pod")
        live = await super().pod(namespace, name)
        return await self._answer(live, lost)

    async def list_pods(self) -> tuple[Pod, ...]:
        pods = await super().list_pods()
        return await self._answer(pods, await self._play("list_pods"))

    async def bind(self, binding: Binding, timeout: float) -> None:
        self.bindings.append(binding)
        self.timeouts.append(timeout)
        lost = await self._play("bind")
        await super().bind(binding, timeout)
        await self._answer(None, lost)

    async def patch_pod(
        self,
        namespace: str,
        name: str,
        uid: str,
        annotations: dict[str, str | None],
        labels: dict[str, str | None],
        *,
        version: str | None = None,
        nominate: str | None = None,
        timeout: float | None = None,
    ) -> None:
        self.patches.append((f"{namespace}/{name}", annotations, labels))
        lost = await self._play("patch_pod")
        await super().patch_pod(
            namespace, name, uid, annotations, labels, version=version, nominate=nominate, timeout=timeout
        )
        await self._answer(None, lost)

    async def evict(self, namespace: str, name: str, uid: str, *, timeout: float | None = None) -> None:
        """The pod becomes terminating; with `at_once` it is gone too, otherwise when the test deletes it."""
        lost = await self._play("evict")
        evicted = self._get_pod(namespace, name, uid)
        self.evicted.append(f"{namespace}/{name}")
        if self.at_once:
            await super().evict(namespace, name, uid)
        else:
            evicted["metadata"]["deletionTimestamp"] = "2023-11-14T22:13:50Z"  # the rig's time and a grace period
            self._notify("Pod", "MODIFIED", evicted)
        await self._answer(None, lost)

    async def budgets(self) -> tuple[DisruptionBudget, ...]:
        lost = await self._play("budgets")
        return await self._answer(msgspec.convert(self.guards, tuple[DisruptionBudget, ...]), lost)

    async def note(self, note: KubeEvent) -> None:
        lost = await self._play("note")
        await super().note(note)
        await self._answer(None, lost)

    async def _play(self, call: str) -> LostResponse | None:
        self.calls.append(call)
        if call in self.gates:
            await self.gates[call].wait()
        await self._travel()
        steps = self.script.get(call) or [None]
        step = steps.pop(0)
        if isinstance(step, Exception):
            raise step
        if step is None or isinstance(step, LostResponse):
            return step
        step()
        return None

    async def _answer(self, answer: T, lost: LostResponse | None) -> T:
        await self._travel()
        if lost is not None:
            raise lost.error
        return answer

    async def _travel(self) -> None:
        for _ in range(self.delays.pop() if self.delays else 0):
            await asyncio.sleep(0)

    def _notify(self, kind: str, event: str, item: Json) -> None:
        super()._notify(kind, event, item)
        self.events.append((kind, event, msgspec.json.decode(msgspec.json.encode(item))))


class Rig:
    """All modules of the scheduler, connected as `SchedulerApp` connects them."""

    def __init__(self, *nodes: NodeBuilder | Json, pods: Iterable[Json] = (), **settings: Any) -> None:
        manifests = [node.manifest() if isinstance(node, NodeBuilder) else node for node in nodes]
        self.api = ScriptedApi(manifests, pods)
        self.settings = Settings(**{"policy": "binpack", **settings})
        self.clock, self.metrics = Clock(), Metrics()
        self.leading = True
        self.cluster_state = ClusterState(
            Ledger(self.settings.ledger), self.settings.dialects, self.settings.agents, self.clock
        )
        self.ledger = self.cluster_state.ledger
        ticks = itertools.count(1_700_000_000_000_000_000)
        common: Any = {
            "leads": lambda: self.leading,
            "clock": self.clock,
            "wall": lambda: next(ticks),
            "pause": self.clock.pause,
        }
        self.requests = PodRequests(self.cluster_state)
        self.availability = NodeAvailability(self.cluster_state, self.settings.other_agents)
        shared = self.requests, self.availability
        self.filter_service = FilterService(
            self.cluster_state,
            *shared,
            settings=self.settings,
            metrics=self.metrics,
            clock=self.clock,
            on_unschedulable=self._refused,
        )
        self.unschedulable: list[UnschedulablePod] = []  # as filter reported them
        self.binds = OpenBinds()
        self.binder = Binder(
            self.api,
            *shared,
            self.cluster_state,
            self.settings,
            self.metrics,
            self.binds,
            on_freed=self.apply,
            **common,
        )
        self.reconciler = Reconciler(self.api, self.cluster_state, self.settings, self.metrics, self.binds, **common)
        self.pending_pods = PendingPods(self.api, self.cluster_state, self.settings, self.metrics, **common)
        self.preemptor = Preemptor(
            self.api, *shared, self.cluster_state, self.settings, self.metrics, on_freed=self.apply, **common
        )
        self.steering = CpuPodSteering(self.cluster_state, self.settings, leads=lambda: self.leading, clock=self.clock)
        self.cluster_state.nodes_listed(msgspec.convert(node, NodeObject) for node in manifests)
        self.apply(self.cluster_state.pods_listed(msgspec.convert(item, Pod) for item in self.api.pods.values()))
        self.api.events.clear()

    def _refused(self, pod: UnschedulablePod) -> None:
        self.unschedulable.append(pod)
        self.pending_pods.refused(pod)
        self.preemptor.refused(pod)

    # ---- the cluster ------------------------------------------------------------------------------------------------

    def arrive(self, *containers: Json, name: str = "web-0", seen: bool = True, **rest: Any) -> Pod:
        """A new pod, which our watch shows at once unless `seen` is false."""
        added = self.api.add_pod(pod(*containers, name=name, uid=f"uid-{name}", **rest))
        if seen:
            self.catch_up()
        return added

    def change(self, name: str, **status: Any) -> None:
        """Change the pod's status, spec or metadata; the watch has not shown it yet."""
        manifest = self.api.pods[f"default/{name}"]
        for part, fields in status.items():
            manifest[part] = {**(manifest.get(part) or {}), **fields}
        self.api.add_pod(manifest)

    def catch_up(self, count: int | None = None) -> list[Instruction]:
        """Our watch delivers the events that it has not shown yet."""
        count = len(self.api.events) if count is None else count
        events, self.api.events[:count] = self.api.events[:count], []
        done: list[Instruction] = []
        for of, kind, item in events:
            if of == "Pod":
                changed = msgspec.convert(item, Pod)
                done += self.cluster_state.pod_changed(changed, deleted=kind == "DELETED")
                self.preemptor.pod_seen(changed)
            elif of == "Lease":
                lease = msgspec.convert(item, AgentLease)
                done += self.cluster_state.agents_changed(
                    self.cluster_state.agents.changed(lease, deleted=kind == "DELETED")
                )
            else:
                done += self.cluster_state.node_changed(msgspec.convert(item, NodeObject), deleted=kind == "DELETED")
        self.apply(done)
        return done

    def wait(self, seconds: float, *, is_disconnected: bool = False) -> list[Instruction]:
        """Time passes, with the checks of agents and deleted pods that the process makes meanwhile."""
        done: list[Instruction] = []
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now = min(end, self.clock.now + 1.0)
            done += self.cluster_state.agents_changed(self.cluster_state.agents.check())
            done += self.cluster_state.orphans.tick(is_disconnected=is_disconnected)
        self.apply(done)
        return done

    def relist(self) -> None:
        self.api.events.clear()
        self.apply(self.cluster_state.pods_listed(msgspec.convert(item, Pod) for item in self.api.pods.values()))
        self.preemptor.listed()

    def apply(self, done: Iterable[Instruction]) -> None:
        done = list(done)
        if any(type(instruction).__name__ == "Freed" for instruction in done):
            self.pending_pods.capacity_freed()
        self.reconciler.apply(done)

    # ---- kube-scheduler ---------------------------------------------------------------------------------------------

    def args(self, name: str = "web-0", nodes: Iterable[str] | None = None, *, whole: bool = False) -> FilterArgs:
        return read_filter(self.body(name, nodes, whole=whole))

    def body(self, name: str = "web-0", nodes: Iterable[str] | None = None, *, whole: bool = False) -> bytes:
        names = list(self.api.nodes) if nodes is None else list(nodes)
        items = [self.api.nodes[node] for node in names] if whole else None
        args: Json = {
            "Pod": self.api.pods[f"default/{name}"],
            "Nodes": {"metadata": {}, "items": items} if whole else None,
            "NodeNames": None if whole else names,
        }
        return msgspec.json.encode(args)

    def filter(self, name: str = "web-0", nodes: Iterable[str] | None = None) -> FilterAnswer:
        return self.filter_service.filter(self.args(name, nodes))

    def steer(self, name: str = "web-0", nodes: Iterable[str] | None = None) -> list[str]:
        return self.steering.filter(self.args(name, nodes)).names

    async def bind(self, name: str = "web-0", node: str = "n1", *, uid: str | None = None) -> str:
        return await self.binder.bind(bind_args(name, node, uid=uid))

    # ---- assertions -------------------------------------------------------------------------------------------------

    def state(self, name: str = "web-0") -> AllocationState | None:
        entry = self.ledger.entry(f"uid-{name}")
        return entry.state if entry is not None else None

    def node_of(self, name: str = "web-0") -> str | None:
        entry = self.ledger.entry(f"uid-{name}")
        return entry.allocation.node if entry is not None else None

    def free(self, node: str = "n1") -> list[int]:
        """Free memory by card."""
        return [card.memory for card in self.ledger.fleet.view(node).free_by_card]

    def live(self, name: str = "web-0") -> Json:
        return self.api.pods[f"default/{name}"]

    def written(self, name: str = "web-0") -> Json | None:
        """The grant that the pod carries in the cluster."""
        text = self.live(name)["metadata"]["annotations"].get(GRANT)
        grant: Json | None = None if text is None else msgspec.json.decode(text)
        return grant

    def count(self, name: str, **labels: str) -> float:
        """A number that a scrape would show; 0 when it is not there (yet)."""
        return sum(sample.value for sample in self._samples(name) if labels.items() <= sample.labels.items())

    def _samples(self, name: str) -> Iterable[Sample]:
        for family in self.metrics.registry.collect():
            yield from (sample for sample in family.samples if sample.name == f"gputile_{name}")


def bind_args(name: str = "web-0", node: str = "n1", *, uid: str | None = None) -> BindArgs:
    return BindArgs(namespace="default", name=name, uid=f"uid-{name}" if uid is None else uid, node=node)


def refused(status: int, retry_after: float | None = None) -> ApiRejected:
    return ApiRejected(status, "Reason", f"the server returned {status}", retry_after=retry_after)
