"""Runs one plugin server per resource, and detects other device plugins that register the same resource.

A server is started when its resource first has devices, and runs until it is cancelled. When two plugins register one
resource, the kubelet silently uses the last registration.
"""

import asyncio
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from gputile.agent.card_plugin import CardPlugin, NodeContext
from gputile.dialects.device_resources import DeviceResource
from gputile.kubelet.checkpoint import UnreadableCheckpoint, registered
from gputile.kubelet.device_plugin import PluginServer
from gputile.telemetry.agent_metrics import AgentMetrics
from gputile.telemetry.logs import fields

log = logging.getLogger(__name__)


class ReportProblem(Protocol):
    """Logs a problem once per change."""

    def __call__(self, subject: str, message: str) -> None:
        """Log the message, unless it is the last one about this subject."""


class IsOffered(Protocol):
    """Looks a resource up in the node's status."""

    def __call__(self, resource: str) -> bool:
        """Whether the node has allocatable devices of the resource, from any plugin."""


class PluginManager:
    """The plugins of all resources that this node serves, with their servers."""

    def __init__(
        self,
        folder: Path,
        context: NodeContext,
        metrics: AgentMetrics,
        report_problem: ReportProblem,
        is_offered: IsOffered,
    ) -> None:
        self._folder, self._context, self._metrics = folder, context, metrics
        self._report_problem, self._is_offered = report_problem, is_offered
        self._plugins: dict[str, tuple[CardPlugin, PluginServer, asyncio.Task[None]]] = {}

    async def update(self, device_resources: Iterable[DeviceResource]) -> None:
        """Replace the devices of all resources; a resource with its first devices gets a server."""
        for device_resource in device_resources:
            if device_resource.fault:
                self._report_problem(f"{device_resource.resource} is not served", device_resource.fault)
            known = self._plugins.get(device_resource.resource)
            if known is not None:
                known[0].device_resource = device_resource
            elif device_resource.devices:
                self._start(device_resource)
        for _, server, _ in list(self._plugins.values()):
            await server.notify_devices_changed()

    def _start(self, device_resource: DeviceResource) -> None:
        plugin = CardPlugin(device_resource, self._context, self._metrics)
        server = PluginServer(
            plugin,
            self._folder,
            why_not_register=lambda: self._why_not_register(plugin),
            on_state_change=self._log_registration,
        )
        self._plugins[device_resource.resource] = (plugin, server, asyncio.create_task(server.run()))

    def tasks(self) -> set[asyncio.Task[Any]]:
        return {task for _, _, task in self._plugins.values()}

    def devices(self) -> dict[str, dict[str, str]]:
        """The card of each device, by resource."""
        return {resource: dict(plugin.device_resource.devices) for resource, (plugin, _, _) in self._plugins.items()}

    # ---- other plugins with the same resource -----------------------------------------------------------------------

    def _why_not_register(self, plugin: CardPlugin) -> str:
        """While another plugin serves the resource: the kubelet would replace it with ours, and its pods would fail."""
        if self._is_offered(plugin.resource) and self._foreign_devices(plugin):
            return (
                f"another device plugin of this node serves {plugin.resource}; remove it, or remove the dialect from "
                "`serve`"
            )
        return ""

    def stolen(self) -> list[str]:
        """A message for each resource that another plugin registered after us."""
        return [
            f"another device plugin replaced ours for {resource}; remove it and restart the agent"
            for resource, (plugin, server, _) in self._plugins.items()
            if server.is_registered and self._foreign_devices(plugin)
        ]

    def _foreign_devices(self, plugin: CardPlugin) -> frozenset[str]:
        """Devices of another plugin under our resource's name."""
        try:
            return plugin.foreign_devices(registered(self._folder, plugin.resource))
        except UnreadableCheckpoint:
            return frozenset()

    def _log_registration(self, resource: str, why: str) -> None:
        self._metrics.registered.labels(resource).set(int(not why))
        if why:
            log.warning("cannot register with the kubelet; retrying", extra=fields(resource=resource, why=why))
        else:
            log.info("registered with the kubelet", extra=fields(resource=resource))
