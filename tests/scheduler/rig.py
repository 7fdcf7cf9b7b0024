"""A scheduler without a process: its rooms on a scripted cluster in memory, with time that passes only when told to.

The watch is not run. What the cluster would tell is kept in `api.events`, and `Rig.catch_up` delivers it, so that a
test decides what our watch knows and when.
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
    """The limits of a container that wants this much of a card."""
    return {GPU: cards, MEMORY: memory, CORES: cores, **rest}


class Clock:
    """Seconds that pass only when told to; `pause` is a sleep that takes no time and is written down."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


class Lands(msgspec.Struct, frozen=True):
    """The write works, and its answer gets lost."""

    error: Exception = OutcomeUnknown("connection reset")


T = TypeVar("T")
Step = Exception | Lands | Callable[[], Any] | None


class ScriptedApi(MemoryApi):
    """The cluster in memory, where a call can be told to fail, to fail after it was written, or to wait.

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
        self.delays: list[int] = []  # how long (in turns of the loop) each call and each answer is under way
        super().__init__(nodes, pods)

    async def pod(self, namespace: str, name: str) -> Pod | None:
        lands = await self._play("pod")
        found = await super().pod(namespace, name)
        return await self._answer(found, lands)

    async def list_pods(self) -> tuple[Pod, ...]:
        found = await super().list_pods()
        return await self._answer(found, await self._play("list_pods"))

    async def bind(self, binding: Binding, timeout: float) -> None:
        self.bindings.append(binding)
        self.timeouts.append(timeout)
        lands = await self._play("bind")
        await super().bind(binding, timeout)
        await self._answer(None, lands)

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
        lands = await self._play("patch_pod")
        await super().patch_pod(
            namespace, name, uid, annotations, labels, version=version, nominate=nominate, timeout=timeout
        )
        await self._answer(None, lands)

    async def evict(self, namespace: str, name: str, uid: str, *, timeout: float | None = None) -> None:
        """The pod is asked to go; with `at_once` its containers are gone too, else when the test says so."""
        lands = await self._play("evict")
        found = self._get_pod(namespace, name, uid)
        self.evicted.append(f"{namespace}/{name}")
        if self.at_once:
            await super().evict(namespace, name, uid)
        else:
            found["metadata"]["deletionTimestamp"] = "2023-11-14T22:13:50Z"  # the rig's time and a grace period
            self._notify("Pod", "MODIFIED", found)
        await self._answer(None, lands)

    async def budgets(self) -> tuple[DisruptionBudget, ...]:
        lands = await self._play("budgets")
        return await self._answer(msgspec.convert(self.guards, tuple[DisruptionBudget, ...]), lands)

    async def note(self, note: KubeEvent) -> None:
        lands = await self._play("note")
        await super().note(note)
        await self._answer(None, lands)

    async def _play(self, call: str) -> Lands | None:
        self.calls.append(call)
        if call in self.gates:
            await self.gates[call].wait()
        await self._travel()
        steps = self.script.get(call) or [None]
        step = steps.pop(0)
        if isinstance(step, Exception):
            raise step
        if step is None or isinstance(step, Lands):
            return step
        step()
        return None

    async def _answer(self, found: T, lands: Lands | None) -> T:
        await self._travel()
        if lands is not None:
            raise lands.error
        return found

    async def _travel(self) -> None:
        for _ in range(self.delays.pop() if self.delays else 0):
            await asyncio.sleep(0)

    def _notify(self, kind: str, event: str, item: Json) -> None:
        super()._notify(kind, event, item)
        self.events.append((kind, event, msgspec.json.decode(msgspec.json.encode(item))))


class Rig:
    """All rooms of the scheduler, as the process puts them together."""

    def __init__(self, *nodes: NodeBuilder | Json, pods: Iterable[Json] = (), **settings: Any) -> None:
        made = [one.manifest() if isinstance(one, NodeBuilder) else one for one in nodes]
        self.api = ScriptedApi(made, pods)
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
            self.cluster_state, *shared, settings=self.settings, metrics=self.metrics, clock=self.clock
        )
        self.binder = Binder(self.api, *shared, self.cluster_state, self.settings, self.metrics, **common)
        self.reconciler = Reconciler(self.api, self.cluster_state, self.settings, self.metrics, **common)
        self.pending_pods = PendingPods(self.api, self.cluster_state, self.settings, self.metrics, **common)
        self.preemptor = Preemptor(
            self.api, *shared, self.cluster_state, self.settings, self.metrics, on_freed=self.apply, **common
        )
        self.steering = CpuPodSteering(self.cluster_state, self.settings, leads=lambda: self.leading, clock=self.clock)
        self.filter_service.on_unschedulable = self._refused
        self.binder.on_freed = self.apply
        self.binder.look_up, self.binder.on_bound = self.reconciler.look_up, self.reconciler.landed.add
        self.reconciler.is_busy = self.binder.is_busy
        self.cluster_state.nodes_listed(msgspec.convert(one, NodeObject) for one in made)
        self.apply(self.cluster_state.pods_listed(msgspec.convert(one, Pod) for one in self.api.pods.values()))
        self.api.events.clear()

    def _refused(self, no: UnschedulablePod) -> None:
        self.pending_pods.refused(no)
        self.preemptor.refused(no)

    # ---- the cluster ------------------------------------------------------------------------------------------------

    def arrive(self, *containers: Json, name: str = "web-0", seen: bool = True, **rest: Any) -> Pod:
        """A new pod, which our watch shows at once unless told otherwise."""
        made = self.api.add_pod(pod(*containers, name=name, uid=f"uid-{name}", **rest))
        if seen:
            self.catch_up()
        return made

    def change(self, name: str, **status: Any) -> None:
        """The pod's status, spec or metadata, changed by somebody; the watch has not shown it yet."""
        found = self.api.pods[f"default/{name}"]
        for part, fields in status.items():
            found[part] = {**(found.get(part) or {}), **fields}
        self.api.add_pod(found)

    def catch_up(self, count: int | None = None) -> list[Instruction]:
        """Our watch delivers what it has not told yet."""
        count = len(self.api.events) if count is None else count
        told, self.api.events[:count] = self.api.events[:count], []
        done: list[Instruction] = []
        for of, kind, item in told:
            if of == "Pod":
                found = msgspec.convert(item, Pod)
                done += self.cluster_state.pod_changed(found, deleted=kind == "DELETED")
                self.preemptor.pod_seen(found)
            elif of == "Lease":
                lease = msgspec.convert(item, AgentLease)
                done += self.cluster_state.agents_changed(
                    self.cluster_state.agents.changed(lease, deleted=kind == "DELETED")
                )
            else:
                done += self.cluster_state.node_changed(msgspec.convert(item, NodeObject), deleted=kind == "DELETED")
        self.apply(done)
        return done

    def wait(self, seconds: float, *, blind: bool = False) -> list[Instruction]:
        """Time passes, as the process lets it pass: looking at agents and deleted pods again and again."""
        done: list[Instruction] = []
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now = min(end, self.clock.now + 1.0)
            done += self.cluster_state.agents_changed(self.cluster_state.agents.look())
            done += self.cluster_state.orphans.tick(blind=blind)
        self.apply(done)
        return done

    def relist(self) -> None:
        self.api.events.clear()
        self.apply(self.cluster_state.pods_listed(msgspec.convert(one, Pod) for one in self.api.pods.values()))
        self.preemptor.listed()

    def apply(self, done: Iterable[Instruction]) -> None:
        done = list(done)
        if any(type(one).__name__ == "Freed" for one in done):
            self.pending_pods.room_appeared()
        self.reconciler.apply(done)

    # ---- kube-scheduler ---------------------------------------------------------------------------------------------

    def args(self, name: str = "web-0", nodes: Iterable[str] | None = None, *, whole: bool = False) -> FilterArgs:
        return read_filter(self.body(name, nodes, whole=whole))

    def body(self, name: str = "web-0", nodes: Iterable[str] | None = None, *, whole: bool = False) -> bytes:
        names = list(self.api.nodes) if nodes is None else list(nodes)
        items = [self.api.nodes[one] for one in names] if whole else None
        said: Json = {
            "Pod": self.api.pods[f"default/{name}"],
            "Nodes": {"metadata": {}, "items": items} if whole else None,
            "NodeNames": None if whole else names,
        }
        return msgspec.json.encode(said)

    def filter(self, name: str = "web-0", nodes: Iterable[str] | None = None) -> FilterAnswer:
        return self.filter_service.filter(self.args(name, nodes))

    def steer(self, name: str = "web-0", nodes: Iterable[str] | None = None) -> list[str]:
        return self.steering.filter(self.args(name, nodes)).names

    async def bind(self, name: str = "web-0", node: str = "n1", *, uid: str | None = None) -> str:
        return await self.binder.bind(bind_args(name, node, uid=uid))

    # ---- looking ----------------------------------------------------------------------------------------------------

    def state(self, name: str = "web-0") -> AllocationState | None:
        entry = self.ledger.entry(f"uid-{name}")
        return entry.state if entry is not None else None

    def node_of(self, name: str = "web-0") -> str | None:
        entry = self.ledger.entry(f"uid-{name}")
        return entry.allocation.node if entry is not None else None

    def free(self, node: str = "n1") -> list[int]:
        """Free memory by card."""
        return [room.memory for room in self.ledger.fleet.view(node).free_by_card]

    def live(self, name: str = "web-0") -> Json:
        return self.api.pods[f"default/{name}"]

    def written(self, name: str = "web-0") -> Json | None:
        """The grant that the pod carries in the cluster."""
        said = self.live(name)["metadata"]["annotations"].get(GRANT)
        found: Json | None = None if said is None else msgspec.json.decode(said)
        return found

    def count(self, name: str, **labels: str) -> float:
        """A number that a scrape would show; 0 when it is not there (yet)."""
        return sum(sample.value for sample in self._samples(name) if labels.items() <= sample.labels.items())

    def _samples(self, name: str) -> Iterable[Sample]:
        for family in self.metrics.registry.collect():
            yield from (sample for sample in family.samples if sample.name == f"gputile_{name}")


def bind_args(name: str = "web-0", node: str = "n1", *, uid: str | None = None) -> BindArgs:
    return BindArgs(namespace="default", name=name, uid=f"uid-{name}" if uid is None else uid, node=node)


def refused(status: int, retry_after: float | None = None) -> ApiRejected:
    return ApiRejected(status, "Reason", f"the server said {status}", retry_after=retry_after)
