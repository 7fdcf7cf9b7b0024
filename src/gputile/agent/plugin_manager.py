"""One door to the kubelet per resource: opened when there are devices, and watched for plugins that want the same name.

Room:  tasks that run until they are cancelled. A kubelet lets the last registration of a name win, without a word.
Door:  `show` the carriers whenever cards change; `devices`, `stolen`, `tasks`.
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
    def __call__(self, subject: str, what: str) -> None:
        """Once, until there is something else to say."""


class IsOffered(Protocol):
    def __call__(self, resource: str) -> bool:
        """Whether the node has devices of the resource, of whomever."""


class PluginManager:
    """See the module's text."""

    def __init__(
        self, folder: Path, shared: NodeContext, metrics: AgentMetrics, say: ReportProblem, is_offered: IsOffered
    ) -> None:
        self._folder, self._shared, self._metrics = folder, shared, metrics
        self._say, self._is_offered = say, is_offered
        self._open: dict[str, tuple[CardPlugin, PluginServer, asyncio.Task[None]]] = {}

    async def show(self, carriers: Iterable[DeviceResource]) -> None:
        """These are the devices now."""
        for carrier in carriers:
            if carrier.fault:
                self._say(f"{carrier.resource} is not served", carrier.fault)
            known = self._open.get(carrier.resource)
            if known is not None:
                known[0].carrier = carrier
            elif carrier.devices:
                self._begin(carrier)
        for _, door, _ in list(self._open.values()):
            await door.tell()

    def _begin(self, carrier: DeviceResource) -> None:
        plugin = CardPlugin(carrier, self._shared, self._metrics)
        door = PluginServer(plugin, self._folder, may_register=lambda: self._rival(plugin), on_turn=self._turned)
        self._open[carrier.resource] = (plugin, door, asyncio.create_task(door.run()))

    def tasks(self) -> set[asyncio.Task[Any]]:
        return {task for _, _, task in self._open.values()}

    def devices(self) -> dict[str, dict[str, str]]:
        """By resource, the card of each device."""
        return {resource: dict(plugin.carrier.devices) for resource, (plugin, _, _) in self._open.items()}

    # ---- others who want the same name ------------------------------------------------------------------------------

    def _rival(self, plugin: CardPlugin) -> str:
        """Whether another plugin serves the name now. A kubelet would let us win, and that plugin's pods lose."""
        if self._is_offered(plugin.resource) and self._strangers(plugin):
            return f"another device plugin of this node serves {plugin.resource}; take it away, or out of `serve`"
        return ""

    def stolen(self) -> list[str]:
        """A sentence for each name that was ours."""
        return [
            f"another device plugin took {resource} over; take it away and restart the agent"
            for resource, (plugin, door, _) in self._open.items()
            if door.is_registered and self._strangers(plugin)
        ]

    def _strangers(self, plugin: CardPlugin) -> frozenset[str]:
        """Devices of another plugin under our resource's name."""
        try:
            return plugin.strangers(registered(self._folder, plugin.resource))
        except UnreadableCheckpoint:
            return frozenset()

    def _turned(self, resource: str, why: str) -> None:
        self._metrics.registered.labels(resource).set(int(not why))
        if why:
            log.warning("cannot register with the kubelet; trying again", extra=fields(resource=resource, why=why))
        else:
            log.info("registered with the kubelet", extra=fields(resource=resource))


async def cancelled(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
