"""`gputile scheduler`: the process beside kube-scheduler, on a real cluster or on one in memory."""

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
from gputile.scheduler.leadership import LABEL, ElectedReplica, RemoveLabel, SetLabel
from gputile.scheduler.settings import ABOVE_ZERO, Settings, checked
from gputile.sim.manifests import Manifests, load_file
from gputile.telemetry import logs
from gputile.telemetry.metrics import Metrics

log = logging.getLogger("gputile.scheduler")

SETTINGS = SettingsLoader(Settings, checked, ABOVE_ZERO, "gputile scheduler", "filter.keep=4")

EPILOG = """\b
Examples:
  gputile scheduler --cluster memory                       try the verbs with curl, no Kubernetes needed
  kubectl get nodes,pods -A -o yaml > all.yaml
  gputile scheduler --cluster memory --objects all.yaml    the same on a snapshot of your cluster
  gputile scheduler --config settings.yaml                 in a cluster; see docs/install.md
  gputile scheduler --kubeconfig ~/.kube/config --set leadership.enabled=false

\b
Settings come from --config (YAML), then variables such as GPUTILE_FILTER_KEEP, then --set; the later wins.
--show-settings prints them all with their meaning. docs/scheduler.md explains the verbs, probes and metrics.
"""


@click.command("scheduler", epilog=EPILOG)
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="Settings, as YAML.")
@click.option("--set", "sets", multiple=True, metavar="NAME=VALUE", help="One setting, such as filter.keep=4.")
@click.option("--listen", metavar="HOST:PORT", help="Where to serve; port 0 takes a free one. Same as --set listen=...")
@click.option("--policy", help="How nodes and cards are chosen. Same as --set policy=...")
@click.option("--kubeconfig", help="A kubeconfig file. [default: $KUBECONFIG, the pod's own account, ~/.kube/config]")
@click.option("--context", help="The context in it. [default: its current one]")
@click.option("--cluster", type=click.Choice(["kubernetes", "memory"]), default="kubernetes", show_default=True)
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
    """The process beside kube-scheduler: chooses cards, and binds.

    Serves the extender verbs of every family on one port (/gputile/filter, /scheduler/bind, ...), /healthz, /readyz
    and /metrics, and follows the cluster. Stops on SIGTERM or ^C, after the binds in flight.
    """
    flags = SETTINGS.flags(sets, listen=listen, policy=policy)
    settings = SETTINGS.compose(document(config), os.environ, flags, str(config or "settings"))
    if show_settings:
        say_text(explained(settings), nl=False)
        return
    if objects is not None and cluster != "memory":
        raise InputError("--objects fills the cluster in memory; add --cluster memory")
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
    """On the cluster that `access` opens, or on one in memory."""
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
    leader = ElectedReplica(
        metrics,
        resync=lambda: process.resync(),
        wait_out=2 * settings.bind.attempt,  # whoever leads looks at the lease before each attempt, not once per bind
        set_label=_labeller(client),
        remove_label=_taker(client),
    )
    process = SchedulerApp(client, settings, metrics, leader, aggregated)
    leases = client.leases(settings.leadership.namespace, settings.leadership.name)
    leader.enter(Elector(leases, _identity(), settings.leadership, on_change=leader.on_change))
    return process


def _identity() -> str:
    """Different for every process, also on one host."""
    return f"{os.environ.get('POD_NAME') or socket.gethostname()}_{os.urandom(4).hex()}"


def _labeller(client: Client) -> SetLabel:
    """Marks our own pod, if we are one (POD_NAME and POD_NAMESPACE come from the downward API)."""
    name, namespace = os.environ.get("POD_NAME"), os.environ.get("POD_NAMESPACE")

    async def set_label(leads: bool) -> None:
        if name and namespace:
            await client.label_pod(namespace, name, {LABEL: "true" if leads else None})

    return set_label


def _taker(client: Client) -> RemoveLabel:
    """Takes the label off another replica's pod. A container that was restarted in our own pod is no other replica."""
    mine, namespace = os.environ.get("POD_NAME"), os.environ.get("POD_NAMESPACE")

    async def remove_label(identity: str) -> None:
        name = identity.rpartition("_")[0]
        if mine and namespace and name and name != mine:
            try:
                await client.label_pod(namespace, name, {LABEL: None})
            except ApiRejected as no:
                if no.status != 404:  # gone with its label
                    raise

    return remove_label


# ---- a cluster in memory --------------------------------------------------------------------------------------------


def _memory(objects: Path | None) -> Api:
    if objects is not None:
        found = load_file(objects)
        if not found.nodes:
            raise InputError(f"{objects}: there is no node in it; write it with `kubectl get nodes,pods -A -o yaml`")
        return MemoryApi(found.nodes, _pods(found))
    folder = examples_folder()
    waiting = [load_file(path) for path in sorted(folder.glob("*/*.yaml"))]
    return MemoryApi(load_file(folder / "cluster.yaml").nodes, [pod for found in waiting for pod in _pods(found)])


def _pods(found: Manifests) -> list[Json]:
    """The pods among the objects, as they are. Controllers make no pods here: a snapshot has them already."""
    pods = []
    for workload in found.workloads:
        if workload.kind == "Pod":
            metadata = {**(workload.pod.get("metadata") or {}), "name": workload.name, "namespace": workload.namespace}
            pods.append({**workload.pod, "metadata": metadata})
    return pods


def _greet(process: SchedulerApp) -> None:
    """What a newcomer may try, on standard output; logs go to standard error."""
    waiting = [one.pod for one in process.cluster_state.pending.values()]
    url = _url(process)
    nodes = len(process.ledger.fleet)
    say(f"A cluster in memory at {url}: {nodes} nodes, {len(process.ledger)} pods on them, ", nl=False)
    say(f"{len(waiting)} waiting. Try, in another terminal:", "")
    say(f"  curl -s {url}/gputile/filter-dryrun -d @examples/filter.json")
    for line in _binds(process, waiting)[:2]:
        say(f"  curl -s {url}/gputile/bind -d '{line}'")
    say(f"  curl -s {url}/gpushare-scheduler/inspect")
    say(f"  curl -s {url}/metrics")
    say("", "What it decides is logged below. ^C ends it.")


def _url(process: SchedulerApp) -> str:
    host = process.settings.host_and_port[0]
    reachable = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
    return f"{'https' if process.settings.tls.certificate else 'http'}://{reachable}:{process.server.port}"


def _binds(process: SchedulerApp, waiting: list[Pod]) -> list[str]:
    """Bodies that would bind a waiting pod to a node where it fits."""
    names = process.ledger.fleet.names()
    found = []
    for pod in waiting:
        fitting = process.filter_service.dry_run(FilterArgs(pod=pod, names=names)).names
        if fitting:
            node = fitting[0]
            body = {"PodName": pod.name, "PodNamespace": pod.namespace, "PodUID": pod.uid, "Node": node}
            found.append(msgspec.json.encode(body).decode())
    return found
