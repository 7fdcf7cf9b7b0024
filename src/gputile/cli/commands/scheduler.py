"""`gputile scheduler`: runs the scheduler extender, on a real cluster or on one in memory."""

import asyncio
import logging
import os
import signal
import socket
from pathlib import Path
from typing import Any

import click
import msgspec

from gputile import __version__
from gputile.cli.commands.demo import examples_folder
from gputile.cli.output import say, say_text
from gputile.cli.settings_loader import SettingsLoader, document, explained
from gputile.dialects.kube_objects import Pod
from gputile.kube.aggregation import Aggregation
from gputile.kube.api import Api, ApiRejected, Json
from gputile.kube.auth import ClusterAccess
from gputile.kube.auth import load as load_access
from gputile.kube.client import Client
from gputile.kube.fake import MemoryApi
from gputile.kube.leader_election import Elector
from gputile.model.errors import InputError
from gputile.scheduler.app import SchedulerApp
from gputile.scheduler.extender_api import FilterArgs
from gputile.scheduler.leadership import LABEL, ElectedReplica, RemoveLabel, SetLabel, log_leadership
from gputile.scheduler.settings import ABOVE_ZERO, Settings, checked
from gputile.sim.manifests import Manifests, load_file
from gputile.telemetry import logs
from gputile.telemetry.metrics import Metrics

log = logging.getLogger("gputile.scheduler")

SETTINGS = SettingsLoader(Settings, checked, ABOVE_ZERO, "gputile scheduler", "filter.keep=4")

EPILOG = """\b
Examples:
  gputile scheduler --cluster memory                       try the extender API with curl, no Kubernetes needed
  kubectl get nodes,pods -A -o yaml > all.yaml
  gputile scheduler --cluster memory --objects all.yaml    the same on a snapshot of your cluster
  gputile scheduler --config settings.yaml                 in a cluster; see docs/install.md
  gputile scheduler --kubeconfig ~/.kube/config --set leadership.enabled=false

\b
Settings come from --config (YAML), then variables such as GPUTILE_FILTER_KEEP, then --set; the later wins.
--show-settings prints them all with their meaning. docs/scheduler.md explains the extender API, probes and metrics.
"""


@click.command("scheduler", epilog=EPILOG)
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="Settings file, as YAML.")
@click.option("--set", "sets", multiple=True, metavar="NAME=VALUE", help="One setting, such as filter.keep=4.")
@click.option(
    "--listen", metavar="HOST:PORT", help="Address to serve on; port 0 picks a free port. Same as --set listen=..."
)
@click.option("--policy", help="How nodes and GPUs are chosen. Same as --set policy=...")
@click.option("--kubeconfig", help="Kubeconfig file. [default: $KUBECONFIG, the pod's service account, ~/.kube/config]")
@click.option("--context", help="Context in the kubeconfig. [default: the current context]")
@click.option(
    "--cluster",
    type=click.Choice(["kubernetes", "memory"]),
    default="kubernetes",
    show_default=True,
    help="A real cluster, or one in memory to try the API on.",
)
@click.option(
    "--objects",
    type=click.Path(path_type=Path, dir_okay=False),
    help="With --cluster memory: nodes and pods, as `kubectl get nodes,pods -A -o yaml` prints them. "
    "[default: the example cluster]",
)
@click.option("--show-settings", is_flag=True, help="Print the settings in force and exit.")
def command(
    config: Path | None,
    sets: tuple[str, ...],
    listen: str | None,
    policy: str | None,
    kubeconfig: str | None,
    context: str | None,
    cluster: str,
    objects: Path | None,
    show_settings: bool,
) -> None:
    """Run the scheduler extender beside kube-scheduler: choose GPUs, and bind pods.

    Serves the extender API of every dialect on one port (/gputile/filter, /scheduler/bind, ...), /healthz, /readyz
    and /metrics, and watches the cluster. Stops on SIGTERM or ^C, after the binds in flight.
    """
    flags = SETTINGS.flags(sets, listen=listen, policy=policy)
    settings = SETTINGS.compose(document(config), os.environ, flags, str(config or "settings"))
    if show_settings:
        say_text(explained(settings), nl=False)
        return
    if objects is not None and cluster != "memory":
        raise InputError("--objects: only the in-memory cluster takes a file; add --cluster memory")
    access = load_access(kubeconfig, context, os.environ) if cluster == "kubernetes" else None
    logs.start(settings.log_level)
    log.info("starting", extra=logs.fields(version=__version__, cluster=cluster, settings=SETTINGS.changed(settings)))
    _run(_main(settings, access, objects))


def _run(main: Any) -> None:
    try:
        import uvloop
    except ImportError:  # Windows
        asyncio.run(main)
    else:
        uvloop.run(main)


async def _main(settings: Settings, access: ClusterAccess | None, objects: Path | None) -> None:
    """On the cluster that `access` leads to, or on one in memory."""
    metrics = Metrics()
    process = _in_cluster(settings, metrics, access) if access else SchedulerApp(_memory(objects), settings, metrics)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    serving = asyncio.create_task(process.run(stop))
    if access is None:
        loop.call_later(0.3, _greet, process)
    await serving


# ---- a real cluster -------------------------------------------------------------------------------------------------


def _in_cluster(settings: Settings, metrics: Metrics, access: ClusterAccess) -> SchedulerApp:
    client = Client(access, settings.api)
    aggregated = Aggregation(client)
    if not settings.leadership.enabled:
        return SchedulerApp(client, settings, metrics, aggregated=aggregated)
    leases = client.leases(settings.leadership.namespace, settings.leadership.name)
    leader = ElectedReplica(
        metrics,
        Elector(leases, _identity(), settings.leadership, on_change=log_leadership),
        resync=lambda: process.resync(),
        wait_out=2 * settings.bind.attempt,  # the leader checks its lease before each attempt, not once per bind
        set_label=_labeller(client),
        remove_label=_taker(client),
    )
    process = SchedulerApp(client, settings, metrics, leader, aggregated)
    return process


def _identity() -> str:
    """Unique per process, also on one host."""
    return f"{os.environ.get('POD_NAME') or socket.gethostname()}_{os.urandom(4).hex()}"


def _labeller(client: Client) -> SetLabel:
    """Labels our own pod, when running in one (POD_NAME and POD_NAMESPACE come from the downward API)."""
    name, namespace = os.environ.get("POD_NAME"), os.environ.get("POD_NAMESPACE")

    async def set_label(leads: bool) -> None:
        if name and namespace:
            await client.label_pod(namespace, name, {LABEL: "true" if leads else None})

    return set_label


def _taker(client: Client) -> RemoveLabel:
    """Removes the label from another replica's pod. A restarted container of our own pod is not another replica."""
    mine, namespace = os.environ.get("POD_NAME"), os.environ.get("POD_NAMESPACE")

    async def remove_label(identity: str) -> None:
        name = identity.rpartition("_")[0]
        if mine and namespace and name and name != mine:
            try:
                await client.label_pod(namespace, name, {LABEL: None})
            except ApiRejected as error:
                if error.status != 404:  # the pod is gone, and its label with it
                    raise

    return remove_label


# ---- a cluster in memory --------------------------------------------------------------------------------------------


def _memory(objects: Path | None) -> Api:
    if objects is not None:
        manifests = load_file(objects)
        if not manifests.nodes:
            raise InputError(f"{objects}: there is no node in it; write it with `kubectl get nodes,pods -A -o yaml`")
        return MemoryApi(manifests.nodes, _pods(manifests))
    folder = examples_folder()
    examples = [load_file(path) for path in sorted(folder.glob("*/*.yaml"))]
    pods = [pod for manifests in examples for pod in _pods(manifests)]
    return MemoryApi(load_file(folder / "cluster.yaml").nodes, pods)


def _pods(manifests: Manifests) -> list[Json]:
    """The pods among the objects, as they are. Controllers create no pods here: a snapshot has them already."""
    pods = []
    for workload in manifests.workloads:
        if workload.kind == "Pod":
            metadata = {**(workload.pod.get("metadata") or {}), "name": workload.name, "namespace": workload.namespace}
            pods.append({**workload.pod, "metadata": metadata})
    return pods


def _greet(process: SchedulerApp) -> None:
    """Print requests that a newcomer may try on standard output; logs go to standard error."""
    pending = [entry.pod for entry in process.cluster_state.pending.values()]
    url = _url(process)
    nodes = len(process.ledger.fleet)
    say(f"A cluster in memory at {url}: {nodes} nodes, {len(process.ledger)} pods on them, ", nl=False)
    say(f"{len(pending)} pending. Try, in another terminal:", "")
    say(f"  curl -s {url}/gputile/filter-dryrun -d @examples/filter.json")
    for line in _bind_bodies(process, pending)[:2]:
        say(f"  curl -s {url}/gputile/bind -d '{line}'")
    say(f"  curl -s {url}/gpushare-scheduler/inspect")
    say(f"  curl -s {url}/metrics")
    say("", "Every decision is logged below. ^C ends the process.")


def _url(process: SchedulerApp) -> str:
    host = process.settings.host_and_port[0]
    reachable = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
    return f"{'https' if process.settings.tls.certificate else 'http'}://{reachable}:{process.server.port}"


def _bind_bodies(process: SchedulerApp, pending: list[Pod]) -> list[str]:
    """Bodies of bind requests, each for a pending pod and a node where it fits."""
    names = process.ledger.fleet.names()
    bodies = []
    for pod in pending:
        fitting = process.filter_service.dry_run(FilterArgs(pod=pod, names=names)).names
        if fitting:
            body = {"PodName": pod.name, "PodNamespace": pod.namespace, "PodUID": pod.uid, "Node": fitting[0]}
            bodies.append(msgspec.json.encode(body).decode())
    return bodies
