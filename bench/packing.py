"""Schedules a published list of pods with a real kube-scheduler and compares it with the simulator.

    make bench-packing LIST=../traces                                        the folder contains the openb lists
    make bench-packing LIST=../traces ARGS="--policies tiling --steer on --first 1000"

The nodes of the list join as Node objects. Its pods are created one after another, in the order in which the simulator
replays them for the same seed (`gputile simulate`), a few at a time: the next is created when a pod in flight is
bound or rejected. A rejected pod is deleted, as the simulator drops it. The result is the share of GPU capacity that is
allocated at the end, read from the grants in the API server. `--steer off` leaves CPU-only pods to kube-scheduler.

The list is read in place; nothing of it is copied. A GPU has 1000 MiB, so that a thousandth of it is 1 MiB.
"""

import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import msgspec
from tests.e2e.api import ApiError, Kube, Manifest
from tests.e2e.audit import audit
from tests.e2e.control_plane import ControlPlane
from tests.e2e.gputile import rights
from tests.e2e.nodes import from_manifest, join
from tests.e2e.pods import node_of, pod
from tests.e2e.processes import TookTooLong
from tests.e2e.programs import Programs, programs
from tests.e2e.watching import Event, watch

from bench.harness import MeasuredReplica, configuration, progress
from gputile.dialects.gputile import INVENTORY, write_inventory
from gputile.dialects.kube_objects import NodeInventory
from gputile.model.cards import Node
from gputile.model.requests import PodRequest
from gputile.sim.replay import ReplayPlan, arrivals, average_card, replay
from gputile.sim.traces import THOUSANDTHS, Job, load_jobs, load_nodes

NAMESPACE = "packing"
SLOTS = 100  # tiles per GPU: the lists have no limit
PODS = 5_000  # on a node
TIMEOUT = 60.0  # seconds for a pod to be bound or rejected
MAX_GAP, MIN_ALLOCATED = 0.3, 95.8  # points


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one run: percent of GPU capacity allocated at the end."""

    policy: str
    steered: bool
    seed: int
    pods: int
    bound: int
    rejected: int
    final: float
    simulated: float
    seconds: float

    def line(self) -> str:
        steered = "on" if self.steered else "off"
        return (
            f"{self.policy:<10}{steered:>6}{self.pods:>8,}{self.bound:>8,}{self.rejected:>9,}{self.final:>9.2f}"
            f"{self.simulated:>11.2f}{self.final - self.simulated:>+8.2f}{self.seconds:>8.0f}"
        )


HEAD = (
    f"{'policy':<10}{'steer':>6}{'pods':>8}{'bound':>8}{'rejected':>9}{'final %':>9}{'simulator':>11}"
    f"{'diff':>8}{'s':>8}"
)


# ---- the list as Kubernetes objects ---------------------------------------------------------------------------------


def node_object(node: Node) -> Manifest:
    cards = tuple(msgspec.structs.replace(card, slots=SLOTS) for card in node.cards)
    manifest: Manifest = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": node.name,
            "annotations": {INVENTORY: write_inventory(NodeInventory(cards))} if cards else {},
        },
        "status": {"allocatable": {"cpu": f"{node.cpu}m", "memory": f"{node.memory}Mi"}},
    }
    return from_manifest(
        manifest, resources={"pods": PODS, **({"gputile.io/gpu": SLOTS * len(cards)} if cards else {})}
    )


def pod_object(number: int, request: PodRequest) -> Manifest:
    limits: dict[str, Any] = {"cpu": f"{request.cpu}m", "memory": f"{request.memory}Mi"}
    for ask in request.asks:
        limits["gputile.io/gpu"] = ask.cards
        if not ask.exclusive:
            limits["gputile.io/memory"] = ask.memory_of(THOUSANDTHS)
    models = [name for rule in request.constraints.models for name in rule.names]
    return pod(f"p{number:06}", limits, annotations={"gputile.io/model": ",".join(models)} if models else {})


# ---- creating the pods ----------------------------------------------------------------------------------------------


class Feeder:
    """Creates pods in order, at most `flight` at a time, and deletes rejected pods."""

    def __init__(self, kube: Kube, flight: int) -> None:
        self.bound, self.rejected = 0, 0
        self._kube, self._slots = kube, threading.Semaphore(flight)
        self._in_flight: set[str] = set()
        self._lock = threading.Lock()
        self._to_delete: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def feed(self, manifests: Sequence[Manifest]) -> None:
        start_time = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            deleting = pool.submit(self._delete_rejected)
            try:
                for number, manifest in enumerate(manifests):
                    self._wait_for_a_slot()
                    with self._lock:
                        self._in_flight.add(manifest["metadata"]["name"])
                    self._kube.create(manifest, NAMESPACE)
                    if number % 1_000 == 999:
                        rate = (number + 1) / (time.monotonic() - start_time)
                        progress(f"{number + 1:,} of {len(manifests):,} pods, {rate:.0f}/s; {self.rejected:,} rejected")
                self._wait_for_the_last()
            finally:
                self._to_delete.put(None)
                deleting.result()

    def _wait_for_a_slot(self) -> None:
        if not self._slots.acquire(timeout=TIMEOUT):
            raise TookTooLong(f"no pod was bound or rejected for {TIMEOUT:g} s; in flight: {sorted(self._in_flight)}")

    def _wait_for_the_last(self) -> None:
        deadline = time.monotonic() + TIMEOUT
        while self._in_flight:
            if time.monotonic() > deadline:
                raise TookTooLong(f"neither bound nor rejected: {sorted(self._in_flight)}")
            time.sleep(0.05)

    def handle(self, event: Event) -> None:
        """Handle an event, in the thread of the watch."""
        name = event.object["metadata"]["name"]
        if event.type == "DELETED" or name not in self._in_flight:
            return
        if node_of(event.object):
            self.bound += 1
        elif _is_rejected(event.object):
            self.rejected += 1
            self._to_delete.put(name)
        else:
            return
        with self._lock:
            self._in_flight.discard(name)
        self._slots.release()

    def _delete_rejected(self) -> None:
        while (name := self._to_delete.get()) is not None:
            try:
                self._kube.delete("Pod", name, NAMESPACE, grace=0)
            except ApiError as error:
                if error.status != 404:
                    raise


def _is_rejected(pod: Manifest) -> bool:
    scheduled = [c for c in pod["status"].get("conditions", []) if c["type"] == "PodScheduled"]
    return bool(scheduled) and scheduled[0]["status"] == "False" and scheduled[0].get("reason") == "Unschedulable"


# ---- runs -----------------------------------------------------------------------------------------------------------


class Lists(msgspec.Struct, frozen=True):
    """The nodes and the jobs of the published lists."""

    nodes: tuple[Node, ...]
    jobs: tuple[Job, ...]

    def order(self, seed: int, ratio: float) -> list[Job]:
        """The pods in the order of the simulator."""
        capacity = sum(len(node.cards) for node in self.nodes)
        return arrivals(self.jobs, ratio * capacity, seed, average_card(self.nodes))


def run(plane: ControlPlane, lists: Lists, plan: ReplayPlan, *, steer: bool, flight: int, first: int | None) -> Result:
    plane.namespace(NAMESPACE)
    order = lists.order(plan.seed, plan.ratio)[:first]
    manifests = [pod_object(number, job.request) for number, job in enumerate(order)]
    start_time = time.monotonic()
    with (
        MeasuredReplica(plane, policy=plan.policy, steer_cpu_pods=str(steer).lower(), log_level="warning") as replica,
        plane.start_scheduler(config=configuration(replica, 100, steers=steer)),
        watch(plane.kube, "Pod", NAMESPACE) as pods,
    ):
        feeder = Feeder(plane.kube, flight)
        pods.each(feeder.handle)
        feeder.feed(manifests)
    seconds = time.monotonic() - start_time
    allocated = sum(audit(plane.kube).values())
    cards = sum(len(node.cards) for node in lists.nodes)
    return Result(
        policy=plan.policy,
        steered=steer,
        seed=plan.seed,
        pods=len(order),
        bound=feeder.bound,
        rejected=feeder.rejected,
        final=100 * allocated / (cards * THOUSANDTHS),
        simulated=simulated(lists, plan) if first is None else float("nan"),
        seconds=seconds,
    )


def simulated(lists: Lists, plan: ReplayPlan) -> float:
    return replay(lists.nodes, lists.jobs, plan, lambda part: None).final


def list_file(folder: Path, name: str) -> Path:
    for path in (folder / f"{name}.csv", folder / f"{name}.csv.gz"):
        if path.exists():
            return path
    raise click.BadParameter(f"{folder}: no {name}.csv or {name}.csv.gz; name another list with --nodes or --pods")


def goals(results: Sequence[Result]) -> list[str]:
    lines = []
    for result in results:
        if result.steered and result.simulated == result.simulated:
            gap = abs(result.final - result.simulated)
            verdict = "ok   " if gap <= MAX_GAP else "OVER "
            lines.append(f"{verdict} {gap:.2f}  (at most {MAX_GAP})  points from the simulator, {result.policy}")
        if result.steered and result.policy == "tiling":
            verdict = "ok   " if result.final >= MIN_ALLOCATED else "UNDER"
            lines.append(f"{verdict} {result.final:.2f}  (at least {MIN_ALLOCATED})  percent allocated, tiling")
    return lines


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--nodes", default="openb_node_list_gpu_node", show_default=True, help="The list of nodes in it.")
@click.option("--pods", default="openb_pod_list_default", show_default=True, help="The list of pods in it.")
@click.option("--policies", default="tiling,binpack", show_default=True)
@click.option("--steer", default="on,off", show_default=True, help="Runs with CPU-only pods steered, and without.")
@click.option("--seed", default=42, show_default=True)
@click.option("--ratio", default=1.3, show_default=True, help="GPU demand that arrives, over capacity.")
@click.option("--flight", default=16, show_default=True, help="Pods in flight.")
@click.option("--first", type=int, help="Only the first N pods, for a quick run.")
@click.option("--save", type=click.Path(path_type=Path, dir_okay=False), help="Write the results as JSON.")
def main(
    folder: Path,
    nodes: str,
    pods: str,
    policies: str,
    steer: str,
    seed: int,
    ratio: float,
    flight: int,
    first: int | None,
    save: Path | None,
) -> None:
    lists = Lists(load_nodes(list_file(folder, nodes)), load_jobs(list_file(folder, pods)))
    built, results = programs(progress), []
    for policy in policies.split(","):
        for steering in steer.split(","):
            plan = ReplayPlan(policy=policy, seed=seed, ratio=ratio)
            results.append(
                run_on_new_control_plane(built, lists, plan, steer=steering == "on", flight=flight, first=first)
            )
            print("\n".join(["", HEAD, *(result.line() for result in results), *goals(results), ""]), flush=True)
            if save:
                save.write_bytes(msgspec.json.format(msgspec.json.encode(results)))


def run_on_new_control_plane(
    built: Programs, lists: Lists, plan: ReplayPlan, *, steer: bool, flight: int, first: int | None
) -> Result:
    """One run, on a control plane of its own."""
    with ControlPlane(built) as plane:
        rights(plane)
        progress(f"joining {len(lists.nodes):,} nodes; {plan.policy}, steering {'on' if steer else 'off'}")
        join(plane.kube, [node_object(node) for node in lists.nodes], 8)
        return run(plane, lists, plan, steer=steer, flight=flight, first=first)


if __name__ == "__main__":
    main()
