"""Measures whether a hostile tenant or client can delay the others: `make bench-hostile`, docs/performance.md.

    make bench-hostile                                                        about an hour on two cores
    make bench-hostile ARGS="--nodes 100 --pods 3000 --seconds 30 --each 5"   a few minutes

A real `gputile scheduler` (TLS with a client CA, the metrics API too) on a real API server. A driver acts as
kube-scheduler for 20 good pods per second, and a prober as the kubelet: their calls are timed in processes of their
own. First alone; then with 50 hostile pods of each kind, created at once and filtered as kube-scheduler would, 20
slow clients on each port and a relist of all pods in the middle. There are no admission policies, because they would
reject some of these pods.
Exits with 1 if /healthz or a verb of a good pod exceeds a limit, a good pod stays unbound or the process ends.
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
from bench.bound_pods import BoundPod, bind_all
from bench.cpu_shares import cpu_shares
from bench.harness import CARDS, Cost, MeasuredReplica, delete_pods, join_nodes, one_tile, progress
from bench.prober import Address, Caller, Cluster, Good, Latencies, pods, probes
from gputile.model.units import millicores

NAMESPACE, EXISTING, HOSTILE = "good", "existing", "hostile"
TILE = 16_384  # MiB of the existing pods: four fill four fifths of a GPU
P99, WORST = 100.0, 1000.0  # milliseconds
PROBE = 0.1  # seconds between two probes
OFFERED = 100  # nodes that kube-scheduler offers for preemption
REQUESTS = {"etcd": 100, "kube-apiserver": 250}
"""Millicores that kubeadm's manifests request. Those of gputile are read from deploy/scheduler.yaml."""
CALLERS = 1000  # millicores; in reality the callers run on other machines


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the command line."""

    nodes: int
    pods: int
    seconds: float
    rate: float
    each: int
    strangers: int
    pinned: bool
    policies: tuple[str, ...]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one run, with or without attackers."""

    policy: str
    is_attacked: bool
    health: Latencies
    good: Good
    net_binds: Latencies  # without their call to the API server
    attack: Attack | None
    cpu: float  # CPU seconds of gputile per second
    cpu_wait: float  # seconds per second for which gputile was runnable without a CPU
    rss: float  # MiB at the end
    ended: str = ""  # why the process ended
    lists: int = 0  # of all pods, during the run


# ---- set-up ---------------------------------------------------------------------------------------------------------


def rights(plane: ControlPlane) -> None:
    """The RBAC of deploy/, without its admission policies: the process must withstand the pods they would reject."""
    for file in ("scheduler.yaml", "metrics-api.yaml"):
        for manifest in manifests_of(DEPLOY / file):
            if manifest["kind"] in (*RIGHTS, "Secret"):
                plane.kube.apply(manifest)


def bind_existing_pods(plane: ControlPlane, nodes: list[str], count: int) -> None:
    """The existing pods, and a disruption budget that forbids their eviction: every search for victims fails."""
    progress(f"binding {count:,} pods")
    plane.namespace(EXISTING)
    step = max(1000, count // 10)
    for start in range(0, count, step):
        bind_all(plane.kube, EXISTING, (_bound_pod(n, nodes) for n in range(start, min(count, start + step))))
        progress(f"{min(count, start + step):,} of {count:,}")
    plane.kube.apply(
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": "all", "namespace": EXISTING},
            "spec": {"minAvailable": "100%", "selector": {}},
        }
    )


def _bound_pod(number: int, nodes: list[str]) -> BoundPod:
    node, turn = nodes[number % len(nodes)], number // len(nodes)
    return BoundPod(one_tile(f"p{number:05}", TILE, terminationGracePeriodSeconds=0), node, (turn % CARDS,), TILE)


def offered_victims(plane: ControlPlane, nodes: list[str]) -> Manifest:
    """The victims that kube-scheduler would offer in a preempt call: all pods of some nodes."""
    offered = set(nodes[:OFFERED])
    by_node: dict[str, list[Manifest]] = {}
    for pod in plane.kube.list("Pod", EXISTING):
        if pod["spec"].get("nodeName") in offered:
            by_node.setdefault(pod["spec"]["nodeName"], []).append({"UID": pod["metadata"]["uid"]})
    return {name: {"Pods": pods, "NumPDBViolations": len(pods)} for name, pods in by_node.items()}


def start_relay(plane: ControlPlane) -> tuple[Child, str]:
    """Start a relay to the API server that can make its client relist all pods."""
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
def on_cpus(plane: ControlPlane, plan: Plan, replica: MeasuredReplica, relay: Child) -> Iterator[None]:
    """Share the CPUs by the requests of the manifests, or give gputile's process a CPU of its own."""
    if plan.pinned:
        pin(replica.child, [child for child in plane.children if child is not replica.child])
        yield
        return
    callers = [os.getpid(), relay.pid or 0]
    requests = {
        name: ([child.pid or 0], REQUESTS[name]) for child in plane.children if (name := child.name) in REQUESTS
    }
    requests |= {"gputile": ([replica.child.pid or 0], gputile_cpu_request()), "callers": (callers, CALLERS)}
    with cpu_shares(requests):
        yield


def gputile_cpu_request() -> int:
    """Millicores that deploy/scheduler.yaml requests."""
    (deployment,) = (
        manifest for manifest in manifests_of(DEPLOY / "scheduler.yaml") if manifest["kind"] == "Deployment"
    )
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return millicores(container["resources"]["requests"]["cpu"]) or 0


def pin(gputile: Child, programs: list[Child]) -> None:
    """Pin gputile's process to the last CPU; the API server, etcd, the relay and the callers to the others."""
    *rest, last = range(os.cpu_count() or 1)
    if not rest:
        raise click.UsageError("--pinned needs two CPUs")
    for pid in (os.getpid(), *(child.pid for child in programs if child.alive)):
        _pin(pid, set(rest))
    _pin(gputile.pid, {last})


def _pin(pid: int | None, cpus: set[int]) -> None:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cpus)


def _accepts(port: int) -> bool:
    import socket

    with socket.create_connection(("127.0.0.1", port), 1):
        return True


# ---- runs -----------------------------------------------------------------------------------------------------------


def run_policy(plane: ControlPlane, plan: Plan, nodes: list[str], policy: str) -> list[Run]:
    """Run alone, then with attackers, on the same process."""
    relay, server = start_relay(plane)
    metrics = free_port()
    victims = offered_victims(plane, nodes)
    with MeasuredReplica(plane, policy=policy, server=server, metrics_api__listen=f"127.0.0.1:{metrics}") as replica:
        progress(f"{policy}: ready")
        in_ledger = lambda: replica.count("gputile_ledger_pods", state="confirmed") >= plan.pods  # noqa: E731
        wait_until(in_ledger, 120, "all pods are in the ledger", [replica.child], every=1)
        time.sleep(3)
        with on_cpus(plane, plan, replica, relay):
            runs = [run_once(plane, plan, replica, policy, nodes, victims, [], relay)]
            delete_run_pods(plane)
            runs.append(run_once(plane, plan, replica, policy, nodes, victims, [replica.port, metrics], relay))
    relay.stop()
    plane.forget([relay])
    delete_run_pods(plane)
    return runs


def run_once(
    plane: ControlPlane,
    plan: Plan,
    replica: MeasuredReplica,
    policy: str,
    nodes: list[str],
    victims: Manifest,
    ports: list[int],
    relay: Child,
) -> Run:
    """One run; with `ports` there are attackers, and slow clients connect to these ports."""
    ca, client = str(plane.authority.ca), plane.authority.client("kube-scheduler")
    address = Address(replica.port, ca, (str(client.cert), str(client.key)))
    cluster = Cluster(plane.server, ca, plane.kube.token)
    callers = [
        Caller(probes, Address(replica.port, ca), plan.seconds, PROBE),
        Caller(pods, address, cluster, NAMESPACE, nodes, plan.seconds, plan.rate),
    ]
    if ports:
        args = (address, cluster, HOSTILE, nodes, victims, plan.each, plan.seconds, ports, plan.strangers)
        callers.append(Caller(attack, *args))
    before, cpu_wait, lists_before = Cost.of(replica.child), _cpu_wait(replica.child), _pod_lists(replica)
    progress(f"{policy}: {plan.seconds:g} s {'with' if ports else 'without'} attackers")
    for caller in callers:
        caller.go()
    time.sleep(plan.seconds / 2)
    if ports:
        relay.signal(signal.SIGUSR1)
    timeout = plan.seconds + 600
    health, good, *rest = (caller.results(timeout) for caller in callers)
    alive = replica.child.alive
    after = Cost.of(replica.child) if alive else before
    return Run(
        policy=policy,
        is_attacked=bool(ports),
        health=health,
        good=good,
        net_binds=_net_binds(good, relay),
        attack=rest[0] if rest else None,
        cpu=(after.cpu - before.cpu) / plan.seconds,
        cpu_wait=(_cpu_wait(replica.child) - cpu_wait) / plan.seconds if alive else 0.0,
        rss=after.rss,
        ended="" if alive else replica.child.tail(12),
        lists=_pod_lists(replica) - lists_before,
    )


def _net_binds(good: Good, relay: Child) -> Latencies:
    """The time of each bind without the API server's call, which the relay measured."""
    records = [line.split() for line in relay.log.read_text().splitlines() if line.startswith("bound ")]
    api_server = {name: 1000 * float(seconds) for _, name, seconds in records}
    return Latencies(tuple(took - api_server[name] for name, took in good.bind_times.items() if name in api_server))


def _cpu_wait(child: Child) -> float:
    """Seconds for which its main thread was runnable without a CPU."""
    return int(Path(f"/proc/{child.pid}/schedstat").read_text().split()[1]) / 1e9


def _pod_lists(replica: MeasuredReplica) -> int:
    return sum(line.get("kind") == "pods" for line in replica.logged("listed"))


def delete_run_pods(plane: ControlPlane) -> None:
    progress("removing the pods of this run")
    for namespace in (NAMESPACE, HOSTILE):
        delete_pods(plane.kube, namespace)


# ---- results --------------------------------------------------------------------------------------------------------


def lines(runs: list[Run]) -> list[str]:
    head = f"{'policy':<10}{'run':<10}{'calls':<12}{'number':>8}{'p50 ms':>9}{'p99 ms':>9}{'worst ms':>10}{'failed':>8}"
    rendered = [head]
    for run in runs:
        name = "attacked" if run.is_attacked else "alone"
        for call, latencies in (
            ("healthz", run.health),
            ("filter", run.good.filters),
            ("bind", run.good.binds),
            ("bind, net", run.net_binds),
            ("create*", run.good.creates),
        ):
            rendered.append(
                f"{run.policy:<10}{name:<10}{call:<12}{len(latencies.took):>8,}{latencies.quantile(0.5):>9.1f}"
                f"{latencies.quantile(0.99):>9.1f}{latencies.worst:>10.1f}{len(latencies.failed):>8}"
            )
        rendered.append(
            f"{'':<20}good pods bound {run.good.bound}, not {run.good.unbound}; CPU {run.cpu:.2f}, waited for a CPU "
            f"{run.cpu_wait:.2f} of the time; {run.rss:.0f} MiB; lists of pods {run.lists}"
        )
        rendered += _attack_lines(run)
    return [
        *rendered,
        "bind, net: without the API server's call in every bind",
        "create*: of a pod by the API server, without gputile: how busy the API server is",
    ]


def _attack_lines(run: Run) -> list[str]:
    if run.attack is None:
        return []
    result = run.attack
    rendered = [
        f"{'':<20}hostile pods created {result.created}, rejected {len(result.rejected)}; extender calls "
        f"{result.calls}, slowest {result.slowest:.2f} s, failed {len(result.failed)}"
    ]
    rendered += [f"{'':<22}rejected: {reason}" for reason in sorted(result.rejected)[:3]]
    rendered += [f"{'':<22}{count} x {reason}" for reason, count in Counter(result.failed).most_common(3)]
    return rendered


def verdicts(runs: list[Run]) -> list[str]:
    """Each limit, and the ratio to the same process alone."""
    rendered = []
    for alone, attacked in zip(runs[::2], runs[1::2], strict=True):
        for call, base, latencies in (
            ("/healthz", alone.health, attacked.health),
            ("filter of good pods", alone.good.filters, attacked.good.filters),
            ("bind of good pods", alone.good.binds, attacked.good.binds),
            ("bind of good pods without the API server's call", alone.net_binds, attacked.net_binds),
        ):
            for name, value, before, most in (
                ("p99", latencies.quantile(0.99), base.quantile(0.99), P99),
                ("worst", latencies.worst, base.worst, WORST),
            ):
                ratio = value / before if before else 0.0
                verdict = "ok   " if value <= most else "OVER "
                rendered.append(
                    f"{verdict}{value:9.1f} ms  (at most {most:g})  {call}, {name}, {attacked.policy}; "
                    f"{ratio:.1f} times alone"
                )
        lost = len(attacked.health.failed) + len(attacked.good.verbs.failed) + attacked.good.unbound
        rendered.append(
            f"{'ok   ' if not lost else 'OVER '}{lost:9}     (0)  failed calls and good pods unbound, {attacked.policy}"
        )
        if attacked.ended:
            rendered.append(f"OVER  the process ended, {attacked.policy}:\n{attacked.ended}")
        if not attacked.lists:
            rendered.append(f"OVER  there was no relist, {attacked.policy}")
    return rendered


def policies(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in value.split(",") if word.strip())


@click.command()
@click.option("--nodes", default=1_000, show_default=True, help="Nodes of 8 GPUs.")
@click.option("--pods", default=30_000, show_default=True, help="Existing pods.")
@click.option("--seconds", default=120.0, show_default=True, help="Duration of each run.")
@click.option("--rate", default=20.0, show_default=True, help="Good pods per second.")
@click.option("--each", default=50, show_default=True, help="Hostile pods of each kind.")
@click.option("--strangers", default=20, show_default=True, help="Slow connections on each port.")
@click.option("--pinned", is_flag=True, help="Give gputile's process a CPU of its own.")
@click.option("--policies", default="tiling,binpack", show_default=True, callback=policies)
def main(**options: object) -> None:
    """Measure /healthz and the verbs of good pods, alone and with hostile pods and slow clients."""
    plan = msgspec.convert(options, Plan)
    built, runs = programs(progress), list[Run]()
    with ExitStack() as stack:
        plane = stack.enter_context(ControlPlane(built))
        for namespace in (NAMESPACE, HOSTILE):
            plane.namespace(namespace)
        nodes = join_nodes(plane.kube, plan.nodes)
        important(plane.kube)
        bind_existing_pods(plane, nodes, plan.pods)
        rights(plane)
        for policy in plan.policies:
            runs += run_policy(plane, plan, nodes, policy)
            print("\n".join(["", *lines(runs[-2:]), ""]), flush=True)
    results = verdicts(runs)
    print("\n".join(results), flush=True)
    sys.exit(1 if any(line.startswith("OVER") for line in results) else 0)


if __name__ == "__main__":
    main()
