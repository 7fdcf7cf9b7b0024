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

from bench.stage import Tenant, configuration, say
from gputile.dialects.gputile import INVENTORY, write_inventory
from gputile.dialects.kube_objects import NodeInventory
from gputile.model.cards import Node
from gputile.model.requests import PodRequest
from gputile.sim.replay import ReplayPlan, arrivals, average_card, replay
from gputile.sim.traces import THOUSANDTHS, Job, load_jobs, load_nodes

SPACE = "packing"
SLOTS = 100  # tiles per GPU: the lists have no limit
PODS = 5_000  # on a node
PATIENCE = 60.0  # seconds for one pod to be bound or rejected
NEAR, LEAST = 0.3, 95.8  # points


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one run: percent of GPU capacity allocated at the end."""

    policy: str
    steered: bool
    seed: int
    pods: int
    bound: int
    refused: int
    final: float
    simulated: float
    seconds: float

    def line(self) -> str:
        steered = "on" if self.steered else "off"
        return (
            f"{self.policy:<10}{steered:>6}{self.pods:>8,}{self.bound:>8,}{self.refused:>9,}{self.final:>9.2f}"
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
        self.bound, self.refused = 0, 0
        self._kube, self._free = kube, threading.Semaphore(flight)
        self._open: set[str] = set()
        self._lock = threading.Lock()
        self._drops: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def feed(self, wishes: Sequence[Manifest]) -> None:
        began = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            dropping = pool.submit(self._drop_all)
            try:
                for number, wish in enumerate(wishes):
                    self._take_turn()
                    with self._lock:
                        self._open.add(wish["metadata"]["name"])
                    self._kube.create(wish, SPACE)
                    if number % 1_000 == 999:
                        rate = (number + 1) / (time.monotonic() - began)
                        say(f"{number + 1:,} of {len(wishes):,} pods, {rate:.0f}/s; {self.refused:,} rejected so far")
                self._wait_for_the_last()
            finally:
                self._drops.put(None)
                dropping.result()

    def _take_turn(self) -> None:
        if not self._free.acquire(timeout=PATIENCE):
            raise TookTooLong(f"no pod was bound or rejected for {PATIENCE:g} s; in flight: {sorted(self._open)}")

    def _wait_for_the_last(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while self._open:
            if time.monotonic() > deadline:
                raise TookTooLong(f"neither bound nor rejected: {sorted(self._open)}")
            time.sleep(0.05)

    def hear(self, event: Event) -> None:
        """Handle an event, in the thread of the watch."""
        name = event.object["metadata"]["name"]
        if event.type == "DELETED" or name not in self._open:
            return
        if node_of(event.object):
            self.bound += 1
        elif _is_refused(event.object):
            self.refused += 1
            self._drops.put(name)
        else:
            return
        with self._lock:
            self._open.discard(name)
        self._free.release()

    def _drop_all(self) -> None:
        while (name := self._drops.get()) is not None:
            try:
                self._kube.delete("Pod", name, SPACE, grace=0)
            except ApiError as error:
                if error.status != 404:
                    raise


def _is_refused(pod: Manifest) -> bool:
    scheduled = [c for c in pod["status"].get("conditions", []) if c["type"] == "PodScheduled"]
    return bool(scheduled) and scheduled[0]["status"] == "False" and scheduled[0].get("reason") == "Unschedulable"


# ---- one run --------------------------------------------------------------------------------------------------------


class Lists(msgspec.Struct, frozen=True):
    nodes: tuple[Node, ...]
    jobs: tuple[Job, ...]

    def order(self, seed: int, ratio: float) -> list[Job]:
        """The pods in the order of the simulator."""
        capacity = sum(len(node.cards) for node in self.nodes)
        return arrivals(self.jobs, ratio * capacity, seed, average_card(self.nodes))


def run(plane: ControlPlane, lists: Lists, plan: ReplayPlan, *, steer: bool, flight: int, first: int | None) -> Result:
    plane.namespace(SPACE)
    order = lists.order(plan.seed, plan.ratio)[:first]
    wishes = [pod_object(number, job.request) for number, job in enumerate(order)]
    began = time.monotonic()
    with (
        Tenant(plane, policy=plan.policy, steer_cpu_pods=str(steer).lower(), log_level="warning") as tenant,
        plane.start_scheduler(config=configuration(tenant, 100, steers=steer)),
        watch(plane.kube, "Pod", SPACE) as pods,
    ):
        feeder = Feeder(plane.kube, flight)
        pods.each(feeder.hear)
        feeder.feed(wishes)
    seconds = time.monotonic() - began
    allocated = sum(audit(plane.kube).values())
    cards = sum(len(node.cards) for node in lists.nodes)
    return Result(
        policy=plan.policy,
        steered=steer,
        seed=plan.seed,
        pods=len(order),
        bound=feeder.bound,
        refused=feeder.refused,
        final=100 * allocated / (cards * THOUSANDTHS),
        simulated=simulated(lists, plan) if first is None else float("nan"),
        seconds=seconds,
    )


def simulated(lists: Lists, plan: ReplayPlan) -> float:
    return replay(lists.nodes, lists.jobs, plan, lambda part: None).final


def found_in(folder: Path, name: str) -> Path:
    for path in (folder / f"{name}.csv", folder / f"{name}.csv.gz"):
        if path.exists():
            return path
    raise click.BadParameter(f"{folder}: no {name}.csv or {name}.csv.gz; name another list with --nodes or --pods")


def goals(results: Sequence[Result]) -> list[str]:
    lines = []
    for it in results:
        if it.steered and it.simulated == it.simulated:
            gap = abs(it.final - it.simulated)
            verdict = "ok   " if gap <= NEAR else "OVER "
            lines.append(f"{verdict} {gap:.2f}  (at most {NEAR})  points from the simulator, {it.policy}")
        if it.steered and it.policy == "tiling":
            verdict = "ok   " if it.final >= LEAST else "UNDER"
            lines.append(f"{verdict} {it.final:.2f}  (at least {LEAST})  percent allocated, tiling")
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
    lists = Lists(load_nodes(found_in(folder, nodes)), load_jobs(found_in(folder, pods)))
    built, results = programs(say), []
    for policy in policies.split(","):
        for how in steer.split(","):
            plan = ReplayPlan(policy=policy, seed=seed, ratio=ratio)
            results.append(one(built, lists, plan, steer=how == "on", flight=flight, first=first))
            print("\n".join(["", HEAD, *(it.line() for it in results), *goals(results), ""]), flush=True)
            if save:
                save.write_bytes(msgspec.json.format(msgspec.json.encode(results)))


def one(built: Programs, lists: Lists, plan: ReplayPlan, *, steer: bool, flight: int, first: int | None) -> Result:
    """One run, on a control plane of its own."""
    with ControlPlane(built) as plane:
        rights(plane)
        say(f"joining {len(lists.nodes):,} nodes; {plan.policy}, steering {'on' if steer else 'off'}")
        join(plane.kube, [node_object(node) for node in lists.nodes], 8)
        return run(plane, lists, plan, steer=steer, flight=flight, first=first)


if __name__ == "__main__":
    main()
