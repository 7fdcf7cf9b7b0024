"""Can a tenant or a stranger hold up the others? `make bench-hostile`, docs/performance.md.

    make bench-hostile                                                        about an hour on two cores
    make bench-hostile ARGS="--nodes 100 --pods 3000 --seconds 30 --each 5"   a few minutes

A real `gputile scheduler` (TLS with a client CA, the metrics API too) on a real API server. A driver plays
kube-scheduler for 20 good pods a second, and a prober plays the kubelet: their calls are timed from processes of their
own. First alone; then with 50 hostile pods of each kind, created at once and asked about as kube-scheduler would, 20
slow strangers on each port and a relist of all pods in the middle. There are no admission policies, for they would
keep some of these pods away.
Ends with 1 if /healthz or a verb of a good pod is slower than the bars, a good pod stays unbound or the process ends.
The programs share the CPUs by the requests of their manifests, as pods on a control-plane node do: one cgroup each.
With `--pinned` gputile has a CPU of its own instead.
A bind contains a call to the API server, which shares the machine and is under attack too; it is also shown without.
"""

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import click
import msgspec
from tests.e2e.api import Manifest, manifests_of
from tests.e2e.control_plane import ControlPlane
from tests.e2e.gputile import DEPLOY, RIGHTS
from tests.e2e.processes import Child, free_port, wait_until
from tests.e2e.programs import programs

from bench.attackers import Attack, attack, important
from bench.cpu_shares import shared
from bench.prober import Address, Caller, Cluster, Good, Latencies, pods, probes
from bench.seating import Seat, seat_all
from bench.stage import CARDS, Cost, Tenant, joined, one_tile, removed, say
from gputile.model.units import millicores

SPACE, PRESENT, HOSTILE = "good", "present", "hostile"
TILE = 16_384  # MiB of the pods that are there: four fill four fifths of a GPU
P99, WORST = 100.0, 1000.0  # milliseconds
PROBE = 0.1  # seconds between two probes
OFFERED = 100  # nodes that kube-scheduler offers for preemption
REQUESTS = {"etcd": 100, "kube-apiserver": 250}
"""Millicores that kubeadm's manifests request. Ours are read from deploy/scheduler.yaml."""
CALLERS = 1000  # millicores; the callers have machines of their own where this is real


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for on the command line."""

    nodes: int
    pods: int
    seconds: float
    rate: float
    each: int
    strangers: int
    pinned: bool
    policies: tuple[str, ...]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One stretch of time, with or without harm."""

    policy: str
    harm: bool
    health: Latencies
    good: Good
    ours: Latencies  # of the binds: without the API server's call in them
    attack: Attack | None
    cpu: float  # seconds of our process, per second
    waited: float  # seconds for which it was ready to run and no CPU was free, per second
    rss: float  # MiB at the end
    ended: str = ""  # why the process is no more
    lists: int = 0  # of all pods, meanwhile


# ---- the stage ------------------------------------------------------------------------------------------------------


def rights(plane: ControlPlane) -> None:
    """Those of deploy/, without its admission policies: the process must bear what they would keep away."""
    for file in ("scheduler.yaml", "metrics-api.yaml"):
        for manifest in manifests_of(DEPLOY / file):
            if manifest["kind"] in (*RIGHTS, "Secret"):
                plane.kube.apply(manifest)


def furnish(plane: ControlPlane, nodes: list[str], count: int) -> None:
    """The pods that are there, and a budget that forbids to evict them: every search for victims is in vain."""
    say(f"{count:,} pods are bound")
    plane.namespace(PRESENT)
    step = max(1000, count // 10)
    for start in range(0, count, step):
        seat_all(plane.kube, PRESENT, (_seat(n, nodes) for n in range(start, min(count, start + step))))
        say(f"{min(count, start + step):,} of {count:,}")
    plane.kube.apply(
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": "all", "namespace": PRESENT},
            "spec": {"minAvailable": "100%", "selector": {}},
        }
    )


def _seat(number: int, nodes: list[str]) -> Seat:
    node, turn = nodes[number % len(nodes)], number // len(nodes)
    return Seat(one_tile(f"p{number:05}", TILE, terminationGracePeriodSeconds=0), node, (turn % CARDS,), TILE)


def offers(plane: ControlPlane, nodes: list[str]) -> Manifest:
    """What kube-scheduler would offer with a preempt call: all pods of some nodes."""
    wanted = set(nodes[:OFFERED])
    found: dict[str, list[Manifest]] = {}
    for one in plane.kube.list("Pod", PRESENT):
        if one["spec"].get("nodeName") in wanted:
            found.setdefault(one["spec"]["nodeName"], []).append({"UID": one["metadata"]["uid"]})
    return {name: {"Pods": pods, "NumPDBViolations": len(pods)} for name, pods in found.items()}


def relay(plane: ControlPlane) -> tuple[Child, str]:
    """A way to the API server that can make its client list all pods again."""
    port, tls = free_port(), plane.authority.server("relay")
    upstream = plane.server.rpartition(":")[2]
    argv: list[str | Path] = [
        sys.executable,
        "-m",
        "bench.relay",
        str(port),
        upstream,
        tls.cert,
        tls.key,
        plane.authority.ca,
    ]
    root = str(Path(__file__).parents[1])
    child = plane.run("relay", argv, {"PYTHONPATH": root}, lambda: _accepts(port))
    return child, f"https://127.0.0.1:{port}"


@contextmanager
def on_cpus(plane: ControlPlane, plan: Plan, tenant: Tenant, between: Child) -> Iterator[None]:
    """Share the CPUs by the requests of the manifests, or give our process one of its own."""
    if plan.pinned:
        pin(tenant.child, [child for child in plane.children if child is not tenant.child])
        yield
        return
    callers = [os.getpid(), between.pid or 0]
    requests = {
        name: ([child.pid or 0], REQUESTS[name]) for child in plane.children if (name := child.name) in REQUESTS
    }
    requests |= {"gputile": ([tenant.child.pid or 0], our_request()), "callers": (callers, CALLERS)}
    with shared(requests):
        yield


def our_request() -> int:
    """Millicores that deploy/scheduler.yaml requests."""
    (deployment,) = (one for one in manifests_of(DEPLOY / "scheduler.yaml") if one["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return millicores(container["resources"]["requests"]["cpu"]) or 0


def pin(ours: Child, theirs: list[Child]) -> None:
    """Our process alone on the last CPU; the API server, etcd, the relay and the callers on the rest."""
    *rest, last = range(os.cpu_count() or 1)
    if not rest:
        raise click.UsageError("--pinned needs two CPUs")
    for pid in (os.getpid(), *(child.pid for child in theirs if child.alive)):
        _pin(pid, set(rest))
    _pin(ours.pid, {last})


def _pin(pid: int | None, cpus: set[int]) -> None:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cpus)


def _accepts(port: int) -> bool:
    import socket

    with socket.create_connection(("127.0.0.1", port), 1):
        return True


# ---- runs -----------------------------------------------------------------------------------------------------------


def measured(plane: ControlPlane, plan: Plan, nodes: list[str], policy: str) -> list[Run]:
    """Alone, then with harm, on one and the same process."""
    between, server = relay(plane)
    metrics = free_port()
    victims = offers(plane, nodes)
    with Tenant(plane, policy=policy, server=server, metrics_api__listen=f"127.0.0.1:{metrics}") as tenant:
        say(f"{policy}: ready")
        booked = lambda: tenant.count("gputile_ledger_pods", state="confirmed") >= plan.pods  # noqa: E731
        wait_until(booked, 120, "all pods are booked", [tenant.child], every=1)
        time.sleep(3)
        with on_cpus(plane, plan, tenant, between):
            runs = [one(plane, plan, tenant, policy, nodes, victims, [], between)]
            cleared(plane)
            runs.append(one(plane, plan, tenant, policy, nodes, victims, [tenant.port, metrics], between))
    between.stop()
    plane.forget([between])
    cleared(plane)
    return runs


def one(
    plane: ControlPlane,
    plan: Plan,
    tenant: Tenant,
    policy: str,
    nodes: list[str],
    victims: Manifest,
    ports: list[int],
    between: Child,
) -> Run:
    """With `ports` there is harm: those are where slow strangers sit."""
    ca, client = str(plane.authority.ca), plane.authority.client("kube-scheduler")
    ours = Address(tenant.port, ca, (str(client.cert), str(client.key)))
    cluster = Cluster(plane.server, ca, plane.kube.token)
    callers = [
        Caller(probes, Address(tenant.port, ca), plan.seconds, PROBE),
        Caller(pods, ours, cluster, SPACE, nodes, plan.seconds, plan.rate),
    ]
    if ports:
        args = (ours, cluster, HOSTILE, nodes, victims, plan.each, plan.seconds, ports, plan.strangers)
        callers.append(Caller(attack, *args))
    before, waited, listed = Cost.of(tenant.child), _waited(tenant.child), _lists(tenant)
    say(f"{policy}: {plan.seconds:g} s {'with' if ports else 'without'} harm")
    for caller in callers:
        caller.go()
    time.sleep(plan.seconds / 2)
    if ports:
        between.signal(signal.SIGUSR1)
    patience = plan.seconds + 600
    health, good, *rest = (caller.results(patience) for caller in callers)
    alive = tenant.child.alive
    after = Cost.of(tenant.child) if alive else before
    return Run(
        policy=policy,
        harm=bool(ports),
        health=health,
        good=good,
        ours=_ours(good, between),
        attack=rest[0] if rest else None,
        cpu=(after.cpu - before.cpu) / plan.seconds,
        waited=(_waited(tenant.child) - waited) / plan.seconds if alive else 0.0,
        rss=after.rss,
        ended="" if alive else tenant.child.tail(12),
        lists=_lists(tenant) - listed,
    )


def _ours(good: Good, between: Child) -> Latencies:
    """What of each bind was not the API server's: the relay saw how long that took."""
    words = [line.split() for line in between.log.read_text().splitlines() if line.startswith("bound ")]
    theirs = {name: 1000 * float(seconds) for _, name, seconds in words}
    return Latencies(tuple(took - theirs[name] for name, took in good.named.items() if name in theirs))


def _waited(child: Child) -> float:
    """Seconds for which its main thread was ready to run and did not."""
    return int(Path(f"/proc/{child.pid}/schedstat").read_text().split()[1]) / 1e9


def _lists(tenant: Tenant) -> int:
    return sum(line.get("kind") == "pods" for line in tenant.logged("listed"))


def cleared(plane: ControlPlane) -> None:
    say("pods of this run are removed")
    for space in (SPACE, HOSTILE):
        removed(plane.kube, space)


# ---- what came of it ------------------------------------------------------------------------------------------------


def lines(runs: list[Run]) -> list[str]:
    head = f"{'policy':<10}{'run':<10}{'calls':<12}{'number':>8}{'p50 ms':>9}{'p99 ms':>9}{'worst ms':>10}{'failed':>8}"
    said = [head]
    for run in runs:
        name = "harm" if run.harm else "alone"
        for what, found in (
            ("healthz", run.health),
            ("filter", run.good.filters),
            ("bind", run.good.binds),
            ("bind, ours", run.ours),
            ("create*", run.good.creates),
        ):
            said.append(
                f"{run.policy:<10}{name:<10}{what:<12}{len(found.took):>8,}{found.part(0.5):>9.1f}"
                f"{found.part(0.99):>9.1f}{found.worst:>10.1f}{len(found.failed):>8}"
            )
        said.append(
            f"{'':<20}good pods bound {run.good.bound}, not {run.good.unbound}; CPU {run.cpu:.2f}, waited for a CPU "
            f"{run.waited:.2f} of the time; {run.rss:.0f} MiB; lists of pods {run.lists}"
        )
        said += _harm(run)
    return [
        *said,
        "bind, ours: without the API server's call that is in every bind",
        "create*: of a pod by the API server, without gputile: how busy that is",
    ]


def _harm(run: Run) -> list[str]:
    if run.attack is None:
        return []
    did = run.attack
    said = [
        f"{'':<20}hostile pods created {did.created}, rejected {len(did.rejected)}; asked about {did.asked} times, "
        f"slowest {did.slowest:.2f} s, failed {len(did.failed)}"
    ]
    said += [f"{'':<22}rejected: {why}" for why in sorted(did.rejected)[:3]]
    said += [f"{'':<22}{count} x {why}" for why, count in Counter(did.failed).most_common(3)]
    return said


def verdicts(runs: list[Run]) -> list[str]:
    """Each bar, and the ratio to the same process alone."""
    said = []
    for alone, harm in zip(runs[::2], runs[1::2], strict=True):
        for what, base, found in (
            ("/healthz", alone.health, harm.health),
            ("filter of good pods", alone.good.filters, harm.good.filters),
            ("bind of good pods", alone.good.binds, harm.good.binds),
            ("bind of good pods without the API server's call", alone.ours, harm.ours),
        ):
            for name, value, before, most in (
                ("p99", found.part(0.99), base.part(0.99), P99),
                ("worst", found.worst, base.worst, WORST),
            ):
                ratio = value / before if before else 0.0
                word = "ok   " if value <= most else "OVER "
                said.append(
                    f"{word}{value:9.1f} ms  (at most {most:g})  {what}, {name}, {harm.policy}; {ratio:.1f} times alone"
                )
        lost = len(harm.health.failed) + len(harm.good.verbs.failed) + harm.good.unbound
        said.append(
            f"{'ok   ' if not lost else 'OVER '}{lost:9}     (0)  failed calls and good pods unbound, {harm.policy}"
        )
        if harm.ended:
            said.append(f"OVER  the process ended, {harm.policy}:\n{harm.ended}")
        if not harm.lists:
            said.append(f"OVER  there was no relist, {harm.policy}")
    return said


def policies(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in value.split(",") if word.strip())


@click.command()
@click.option("--nodes", default=1_000, show_default=True, help="Nodes of 8 GPUs.")
@click.option("--pods", default=30_000, show_default=True, help="Pods that are there.")
@click.option("--seconds", default=120.0, show_default=True, help="Of each run.")
@click.option("--rate", default=20.0, show_default=True, help="Good pods per second.")
@click.option("--each", default=50, show_default=True, help="Hostile pods of each kind.")
@click.option("--strangers", default=20, show_default=True, help="Slow connections on each port.")
@click.option("--pinned", is_flag=True, help="Give gputile's process a CPU of its own, and the others to all the rest.")
@click.option("--policies", default="tiling,binpack", show_default=True, callback=policies)
def main(**asked: object) -> None:
    """Time /healthz and the verbs of good pods, alone and among hostile pods and slow strangers."""
    plan = msgspec.convert(asked, Plan)
    built, runs = programs(say), list[Run]()
    with ExitStack() as stack:
        plane = stack.enter_context(ControlPlane(built))
        for space in (SPACE, HOSTILE):
            plane.namespace(space)
        nodes = joined(plane.kube, plan.nodes)
        important(plane.kube)
        furnish(plane, nodes, plan.pods)
        rights(plane)
        for policy in plan.policies:
            runs += measured(plane, plan, nodes, policy)
            print("\n".join(["", *lines(runs[-2:]), ""]), flush=True)
    found = verdicts(runs)
    print("\n".join(found), flush=True)
    sys.exit(1 if any(line.startswith("OVER") for line in found) else 0)


if __name__ == "__main__":
    main()
