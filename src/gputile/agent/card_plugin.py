"""The device plugin of one resource: gives a container the cards of its grant when it starts.

The kubelet's Allocate does not name the pod, so nothing is decided there. The response names a slot: a CDI device that
does not exist yet. Before the container is created the kubelet calls PreStartContainer; by then its checkpoint has the
pod and container that own the slot, and the CDI spec of the slot is written from their grant. An init container may
pass its devices on to the container that follows: then two containers own the same devices with a slot each, and both
specs are written. So nothing is ever guessed.

On a node whose runtime does not support CDI the environment must be in the response of Allocate. There the devices are
those of the granted card (GetPreferredAllocation steers the kubelet, and the scheduler binds one pod at a time), and
PreStartContainer verifies it.
"""

import logging
from collections.abc import Iterable
from pathlib import Path

from gputile.agent.cdi_specs import CdiSpecStore, device_name, new_slot, slots_of
from gputile.agent.isolation import IsolationHost, IsolationUnavailable, Json, choose, edits
from gputile.agent.node_pods import NodePod, NodePods
from gputile.agent.overlap import CardAllocations, overlap
from gputile.agent.preferred_allocation import ExpectedContainer, preferred_devices
from gputile.dialects.device_resources import DeviceResource
from gputile.dialects.gputile import ISOLATION
from gputile.kubelet.checkpoint import CheckpointEntry, UnreadableCheckpoint, read_checkpoint
from gputile.kubelet.device_plugin import Device, PluginError
from gputile.kubelet.messages import CDIDevice, ContainerAllocateResponse
from gputile.model.cards import Card
from gputile.model.decode_errors import file_problem
from gputile.model.grants import ContainerGrant, Grant
from gputile.telemetry.agent_metrics import AgentMetrics
from gputile.telemetry.logs import fields

log = logging.getLogger(__name__)

NO_CARD = {"NVIDIA_VISIBLE_DEVICES": "void"}
"""For a runtime that ignores CDI: no card, where the image's default may be `all`."""

STEER_TIMEOUT = 0.5  # seconds that GetPreferredAllocation waits for the pod; the kubelet's watch may be ahead of ours


class NodeContext:
    """What the plugins of all resources of the node share."""

    def __init__(
        self,
        node_pods: NodePods,
        cdi_specs: CdiSpecStore,
        host: IsolationHost,
        plugins: Path,
        *,
        isolation: str,
        pods_choose: bool,
        grant_timeout: float,
        has_cdi: bool,
    ) -> None:
        self.node_pods, self.cdi_specs, self.host = node_pods, cdi_specs, host
        self.isolation, self.pods_choose = isolation, pods_choose
        self.grant_timeout, self.has_cdi = grant_timeout, has_cdi
        self.cards: dict[str, Card] = {}
        self.orphans: tuple[Grant, ...] = ()  # grants of deleted pods whose containers still run
        self._plugins = plugins

    def checkpoint(self) -> tuple[CheckpointEntry, ...]:
        """Raises `PluginError`."""
        try:
            return read_checkpoint(self._plugins)
        except UnreadableCheckpoint as error:
            raise PluginError(f"cannot determine which container owns the allocated devices: {error}") from error

    def checkpoint_or_none(self) -> tuple[CheckpointEntry, ...] | None:
        try:
            return self.checkpoint()
        except PluginError:
            return None

    def is_usable(self, uuid: str) -> bool:
        card = self.cards.get(uuid)
        return card is not None and card.healthy and not card.cordoned


class CardPlugin:
    """The `DevicePlugin` of one resource whose devices stand for parts of cards."""

    def __init__(self, device_resource: DeviceResource, context: NodeContext, metrics: AgentMetrics) -> None:
        self.resource, self.device_resource = device_resource.resource, device_resource
        self._context, self._metrics = context, metrics
        self._advertised: set[str] = set()  # all device IDs that this plugin ever had

    # ---- devices ----------------------------------------------------------------------------------------------------

    def devices(self) -> tuple[Device, ...]:
        context, devices = self._context, self.device_resource.devices
        usable = {uuid: context.is_usable(uuid) for uuid in {uuid for _, uuid in devices}}
        numa = {uuid: card.numa for uuid, card in context.cards.items()}
        self._advertised.update(device_id for device_id, _ in devices)
        return tuple(Device(device_id, usable[uuid], numa.get(uuid, -1)) for device_id, uuid in devices)

    def foreign_devices(self, registered: frozenset[str]) -> frozenset[str]:
        """Of the device IDs that the kubelet has for our resource, those that another plugin advertised."""
        return registered - self._advertised - {device_id for device_id, _ in self.device_resource.devices}

    async def get_preferred_allocation(self, available: list[str], must_include: list[str], size: int) -> list[str]:
        """Without CDI the devices decide, so the pod is waited for; with CDI they are a hint, and the wait is short."""
        limit = self._context.grant_timeout
        timeout = min(STEER_TIMEOUT, limit) if self._context.has_cdi else limit
        await self._context.node_pods.wait_until(lambda: bool(self._expected(size)), timeout)
        card_of = dict(self.device_resource.devices)
        return preferred_devices(available, must_include, size, self._expected(size), card_of)

    def _expected(self, size: int) -> list[ExpectedContainer]:
        """Containers that have a grant, request as many devices, and have none allocated yet."""
        try:
            entries = self._context.checkpoint()
        except PluginError:
            entries = ()
        served = {(entry.pod, entry.container) for entry in entries if entry.resource == self.resource}
        expected = self._context.node_pods.expected(self.resource, served)
        return [container for container in expected if container.size == size]

    # ---- allocation -------------------------------------------------------------------------------------------------

    async def allocate(self, ids: list[str]) -> ContainerAllocateResponse:
        self._metrics.allocations.labels(self.resource).inc()
        if not self._context.has_cdi:
            return await self._allocate_without_cdi(ids)
        return ContainerAllocateResponse(envs=NO_CARD, cdi_devices=[CDIDevice(name=device_name(new_slot()))])

    async def _allocate_without_cdi(self, ids: list[str]) -> ContainerAllocateResponse:
        """The environment must be in the response, so the container is identified by the cards of its devices."""
        cards = self._cards_of(ids)

        def owner() -> ExpectedContainer | None:
            for container in self._expected(len(ids)):
                if {tile.uuid for tile in container.grant.tiles} == cards:
                    return container
            return None

        await self._context.node_pods.wait_until(lambda: owner() is not None, self._context.grant_timeout)
        container = owner()
        node_pod = self._context.node_pods.get(container.pod) if container is not None else None
        if container is None or node_pod is None:
            raise PluginError(
                "none of the pods starting on this node was granted the GPUs behind the allocated device IDs"
            )
        isolation = self._isolation(node_pod)
        if isolation != "none":
            raise PluginError(
                f"isolation `{isolation}` needs CDI, which the container runtime of this node does not support; "
                "enable CDI there, or use isolation `none`"
            )
        return ContainerAllocateResponse(envs=self._context.node_pods.env_of(node_pod, container.grant))

    def _cards_of(self, ids: Iterable[str]) -> set[str]:
        card_of = dict(self.device_resource.devices)
        return {card_of.get(device_id, "") for device_id in ids}

    # ---- the start of a container -----------------------------------------------------------------------------------

    async def pre_start_container(self, ids: list[str]) -> None:
        try:
            for owner in self._owners(ids):
                await self._prepare(owner)
        except PluginError as error:
            self._metrics.starts.labels("rejected").inc()
            log.warning("container start rejected", extra=fields(resource=self.resource, why=str(error)))
            raise
        self._metrics.starts.labels("served").inc()

    def _owners(self, ids: list[str]) -> list[CheckpointEntry]:
        """All containers with exactly these devices; several only when init containers of one pod passed them on."""
        wanted = frozenset(ids)
        entries = self._context.checkpoint()
        owners = [entry for entry in entries if entry.resource == self.resource and entry.ids == wanted]
        if not owners:
            raise PluginError("the kubelet's checkpoint does not have the owner of the allocated devices yet")
        return owners

    async def _prepare(self, owner: CheckpointEntry) -> None:
        node_pod = await self._granted_pod(owner)
        grant = self._container_grant(node_pod, owner.container)
        slots = slots_of(owner.cdi)
        self._check_overlap(node_pod)
        if not slots and not self._context.has_cdi:
            self._check_devices(grant, owner)
            return
        if not slots:
            raise PluginError(
                "the devices of this container were allocated before CDI was enabled on this node; delete the pod"
            )
        container_edits = self._edits(node_pod, grant)
        for slot in slots:
            self._write_spec(owner.pod, slot, container_edits)
        cards = [tile.index for tile in grant.tiles]
        extra = fields(pod=node_pod.pod.key, container=owner.container, gpus=cards, slots=slots)
        log.info("container start prepared", extra=extra)

    def _write_spec(self, pod: str, slot: str, container_edits: Json) -> None:
        try:
            self._context.cdi_specs.write(pod, slot, container_edits)
        except (OSError, IsolationUnavailable) as error:
            raise PluginError(f"cannot write the CDI spec of this container: {file_problem(error)}") from error

    async def _granted_pod(self, owner: CheckpointEntry) -> NodePod:
        """The pod with its grant. The leader grants a pod that another scheduler bound within about a second, so the
        start is held until then."""
        node_pod = await self._context.node_pods.wait_for_grant(owner.pod, self._context.grant_timeout)
        if node_pod is None:
            raise PluginError(f"the agent has not seen the pod {owner.pod} on the API server yet")
        if node_pod.grant is None:
            why = node_pod.fault or "check that the gputile scheduler is running"
            raise PluginError(f"the pod has no GPU grant yet: {why}")
        return node_pod

    @staticmethod
    def _container_grant(node_pod: NodePod, name: str) -> ContainerGrant:
        for grant in node_pod.grant.containers if node_pod.grant else ():
            if grant.container == name:
                return grant
        raise PluginError(f"the pod's grant has no GPU for its container `{name}`")

    def _check_overlap(self, node_pod: NodePod) -> None:
        assert node_pod.grant is not None
        orphans = [grant for grant in self._context.orphans if grant.pod != node_pod.grant.pod]
        earlier = CardAllocations([*orphans, *self._context.node_pods.earlier(node_pod)])
        why = overlap(node_pod.grant.uses(), earlier, self._context.cards)
        if why:
            raise PluginError(why)

    def _check_devices(self, grant: ContainerGrant, owner: CheckpointEntry) -> None:
        if self._cards_of(owner.ids) != {tile.uuid for tile in grant.tiles}:
            raise PluginError(
                "the kubelet allocated devices of another GPU than granted, and the container runtime of this node "
                "does not support CDI; delete the pod, or enable CDI"
            )

    def _isolation(self, node_pod: NodePod) -> str:
        requested = str(node_pod.pod.annotations.get(ISOLATION) or "")
        try:
            return choose(self._context.isolation, requested, any_allowed=self._context.pods_choose)
        except IsolationUnavailable as error:
            raise PluginError(f"annotation `{ISOLATION}`: {error}") from error

    def _edits(self, node_pod: NodePod, grant: ContainerGrant) -> Json:
        env = self._context.node_pods.env_of(node_pod, grant)
        try:
            return edits(self._isolation(node_pod), grant, env, self._context.host)
        except IsolationUnavailable as error:
            raise PluginError(str(error)) from error
