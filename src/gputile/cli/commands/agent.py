"""`gputile agent`: runs the node agent on a node with GPUs."""

import asyncio
import logging
import os
import signal
from pathlib import Path

import click

from gputile import __version__
from gputile.agent.app import Agent
from gputile.agent.server import AgentServer
from gputile.agent.settings import ABOVE_ZERO, AgentSettings, checked
from gputile.cli.output import say_text
from gputile.cli.settings_loader import SettingsLoader, document, explained
from gputile.kube.auth import ClusterAccess
from gputile.kube.auth import load as load_access
from gputile.kube.client import Client
from gputile.kube.node_client import NodeClient, NodeLease
from gputile.kubelet.cri import CdiSupport, RuntimeUnavailable, ask
from gputile.model.errors import InputError
from gputile.nvml.driver import Driver
from gputile.nvml.real import RealDriver
from gputile.telemetry import logs
from gputile.telemetry.agent_metrics import AgentMetrics

log = logging.getLogger("gputile.agent")

RETRY_AFTER = (1.0, 2.0, 4.0)  # seconds; a runtime that restarts is back soon
SETTINGS = SettingsLoader(AgentSettings, checked, ABOVE_ZERO, "gputile agent", "isolation=devices")

EPILOG = """\b
Examples:
  gputile agent --node $(hostname)                                on a node, with your own kubeconfig
  gputile agent --config settings.yaml                            in a DaemonSet; see deploy/agent.yaml
  gputile agent --node n1 --serve gputile,gpushare,nvidia         serve the resources of other dialects too
  gputile agent --node n1 --set isolation=devices                 for runtimes without NVIDIA's hook

\b
Settings come from --config (YAML), then variables such as GPUTILE_ISOLATION, then --set; the later wins.
--show-settings prints them all with their meaning. docs/agent.md explains the agent and the rights it needs.
"""


@click.command("agent", epilog=EPILOG)
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="Settings file, as YAML.")
@click.option("--set", "sets", multiple=True, metavar="NAME=VALUE", help="One setting, such as isolation=devices.")
@click.option("--node", help="Name of the node. [default: $NODE_NAME] Same as --set node=...")
@click.option(
    "--serve", metavar="DIALECTS", help="Dialects whose resources to serve, with commas. Same as --set serve=..."
)
@click.option("--kubeconfig", help="Kubeconfig file. [default: $KUBECONFIG, the pod's service account, ~/.kube/config]")
@click.option("--context", help="Context in the kubeconfig. [default: the current context]")
@click.option("--show-settings", is_flag=True, help="Print the settings in force and exit.")
def command(
    config: Path | None,
    sets: tuple[str, ...],
    node: str | None,
    serve: str | None,
    kubeconfig: str | None,
    context: str | None,
    show_settings: bool,
) -> None:
    """Run the node agent on a GPU node: give each container exactly the GPU share that was granted.

    Finds the GPUs (NVML), publishes them on its node, serves the kubelet's device-plugin API, and watches the GPUs'
    health. Writes to its own node only, and to no pod. Stops on SIGTERM or ^C; running containers are not touched.
    """
    flags = SETTINGS.flags(sets, node=node or os.environ.get("NODE_NAME"), serve=serve)
    settings = SETTINGS.compose(document(config), os.environ, flags, str(config or "settings"))
    if show_settings:
        say_text(explained(settings), nl=False)
        return
    if not settings.node:
        raise InputError("the name of the node is missing; write --node NAME, or set the variable NODE_NAME")
    access = load_access(kubeconfig, context, os.environ)
    logs.start(settings.log_level)
    log.info("starting", extra=logs.fields(version=__version__, settings=SETTINGS.changed(settings)))
    asyncio.run(_main(settings, access, RealDriver()))


async def _main(settings: AgentSettings, access: ClusterAccess, driver: Driver) -> None:
    metrics = AgentMetrics()
    client = Client(access, settings.api, component="gputile-agent", instance=settings.node)
    leases = client.leases(settings.heartbeat.namespace, settings.node)
    heartbeat = NodeLease(leases, settings.node, max(1, round(settings.heartbeat.duration)))
    cdi = await _cdi(settings)
    if cdi.works:
        log.info("container runtime supports CDI", extra=logs.fields(folders=cdi.folders))
    else:
        log.warning("container runtime ignores CDI: GPU pods start one at a time", extra=logs.fields(why=cdi.why))
    agent = Agent(NodeClient(client, settings.node), heartbeat, driver, settings, metrics, cdi=cdi)
    server = AgentServer(settings, agent.metrics_page, agent.why_not_ready)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await server.start()
    try:
        await agent.run(stop)
    finally:
        await server.stop()


async def _cdi(settings: AgentSettings) -> CdiSupport:
    """Whether the container runtime supports CDI: as set, else as its CRI status reports."""
    if settings.cdi != "auto":
        return CdiSupport(settings.cdi == "yes", why=f"the setting `cdi` is `{settings.cdi}`")
    for pause in (*RETRY_AFTER, 0.0):
        try:
            return await ask(Path(settings.runtime), settings.folders.cdi)
        except RuntimeUnavailable as error:
            why = str(error)
        await asyncio.sleep(pause)
    return CdiSupport(False, why=why)
