"""One resource of the kubelet's: devices out, and before a container starts exactly its card.

Room:  Allocate is asked without a word about the pod, so it decides nothing: it answers with a slot, a CDI device that
       does not exist yet. When the container is about to be made the kubelet's checkpoint names the pod and container
       that own the slot; their grant fills it. Init containers may lend their devices to the container that follows:
       then two containers own the same devices, each its own slot, and both are filled. So nothing is ever guessed.

       On a node whose runtime does not obey CDI, `early`, the environment must be given at Allocate: the devices are
       those of the booked card (we steer, and the scheduler binds one pod at a time), and the start compares.
Door:  `CardPlugin`, one per resource; `NodeContext` is what they have in common.
"""

import logging
from collections.abc import Iterable
from pathlib import Path

from gputile.agent.cdi_specs import CdiSpecStore, device_name, new_slot, slots_of
from gputile.agent.isolation import IsolationHost, IsolationUnavailable, Json, chosen, edits
from gputile.agent.node_pods import NodePod, NodePods
from gputile.agent.overlap import CardAllocations, overlap
from gputile.agent.preferred_allocation import ExpectedContainer, prefer
from gputile.dialects.device_resources import DeviceResource
from gputile.dialects.gputile import ISOLATION
from gputile.kubelet.checkpoint import CheckpointEntry, UnreadableCheckpoint, read_checkpoint
from gputile.kubelet.device_plugin import Device, PluginError
from gputile.kubelet.messages import CDIDevice, ContainerAllocateResponse
from gputile.model.cards import Card
from gputile.model.grants import ContainerGrant, Grant
from gputile.telemetry.agent_metrics import AgentMetrics
from gputile.telemetry.logs import fields

log = logging.getLogger(__name__)

NO_CARD = {"NVIDIA_VISIBLE_DEVICES": "void"}
"""For a runtime that ignores CDI: no card, where an image's own default might say all."""


STEER = 0.5  # seconds


class NodeContext:
    """What all resources of the node have in common."""

    def __init__(
        self,
        node_pods: NodePods,
        slots: CdiSpecStore,
        host: IsolationHost,
        plugins: Path,
        *,
        isolation: str,
        pods_choose: bool,
        hold: float,
        early: bool,
    ) -> None:
        self.node_pods, self.slots, self.host = node_pods, slots, host
        self.isolation, self.pods_choose, self.hold, self.early = isolation, pods_choose, hold, early
        self.cards: dict[str, Card] = {}
        self.orphans: tuple[Grant, ...] = ()  # what runs on of pods that are gone
        self._plugins = plugins

    def held(self) -> tuple[CheckpointEntry, ...]:
        try:
            return read_checkpoint(self._plugins)
        except UnreadableCheckpoint as no:
            raise PluginError(f"gputile cannot tell whose devices these are: {no}") from no

    def held_or_none(self) -> tuple[CheckpointEntry, ...] | None:
        """For those who only look."""
        try:
            return self.held()
        except PluginError:
            return None

    def is_usable(self, uuid: str) -> bool:
        card = self.cards.get(uuid)
        return card is not None and card.healthy and not card.cordoned


class CardPlugin:
    """The `Plugin` of one carrier."""

    def __init__(self, carrier: DeviceResource, shared: NodeContext, metrics: AgentMetrics) -> None:
        self.resource, self.carrier, self._shared, self._metrics = carrier.resource, carrier, shared, metrics
        self._offered: set[str] = set()

    # ---- devices ----------------------------------------------------------------------------------------------------

    def devices(self) -> tuple[Device, ...]:
        shared = self._shared
        usable = {uuid: shared.is_usable(uuid) for uuid in {uuid for _, uuid in self.carrier.devices}}
        numa = {uuid: card.numa for uuid, card in shared.cards.items()}
        self._offered.update(name for name, _ in self.carrier.devices)
        return tuple(Device(name, usable[uuid], numa.get(uuid, -1)) for name, uuid in self.carrier.devices)

    def strangers(self, registered: frozenset[str]) -> frozenset[str]:
        """Of the devices that the kubelet knows for our resource, those that were never ours: another plugin's."""
        return registered - self._offered - {name for name, _ in self.carrier.devices}

    async def prefer(self, available: list[str], must_include: list[str], size: int) -> list[str]:
        """Where it decides, the one who asks is waited for; else a moment: the kubelet's watch may be before ours."""
        patience = self._shared.hold if self._shared.early else min(STEER, self._shared.hold)
        await self._shared.node_pods.wait_until(lambda: bool(self._expected(size)), patience)
        return prefer(available, must_include, size, self._expected(size), dict(self.carrier.devices))

    def _expected(self, size: int) -> list[ExpectedContainer]:
        """Containers that were granted cards, will ask for as many devices, and have not got them yet."""
        try:
            served = {(one.pod, one.container) for one in self._shared.held() if one.resource == self.resource}
        except PluginError:
            served = set()
        return [one for one in self._shared.node_pods.expected(self.resource, served) if one.size == size]

    # ---- allocation -------------------------------------------------------------------------------------------------

    async def allocate(self, ids: list[str]) -> ContainerAllocateResponse:
        self._metrics.allocations.labels(self.resource).inc()
        if self._shared.early:
            return await self._allocate_early(ids)
        return ContainerAllocateResponse(envs=NO_CARD, cdi_devices=[CDIDevice(name=device_name(new_slot()))])

    async def _allocate_early(self, ids: list[str]) -> ContainerAllocateResponse:
        """Without CDI the kubelet must be told now, by the devices it took."""
        cards = self._cards_of(ids)

        def owner() -> ExpectedContainer | None:
            waiting = self._expected(len(ids))
            return next((one for one in waiting if {tile.uuid for tile in one.held.tiles} == cards), None)

        await self._shared.node_pods.wait_until(lambda: owner() is not None, self._shared.hold)
        found = owner()
        one = self._shared.node_pods.get(found.pod) if found is not None else None
        if found is None or one is None:
            raise PluginError(
                "no pod of this node that waits for its devices was granted the cards of those it is to get"
            )
        if self._isolation(one) != "none":
            raise PluginError(f"isolation `{self._isolation(one)}` needs CDI, which this node's runtime does not obey")
        return ContainerAllocateResponse(envs=self._shared.node_pods.env_of(one, found.held))

    def _cards_of(self, ids: Iterable[str]) -> set[str]:
        card_of = dict(self.carrier.devices)
        return {card_of.get(name, "") for name in ids}

    # ---- the start of a container -----------------------------------------------------------------------------------

    async def start(self, ids: list[str]) -> None:
        try:
            owners = self._owners(ids)
            for owner in owners:
                await self._start(owner)
        except PluginError as no:
            self._metrics.starts.labels("rejected").inc()
            log.warning("a container may not start", extra=fields(resource=self.resource, why=str(no)))
            raise
        self._metrics.starts.labels("served").inc()

    def _owners(self, ids: list[str]) -> list[CheckpointEntry]:
        """All containers of exactly these devices; several only when one pod's init containers lent them on."""
        wanted = frozenset(ids)
        owners = [one for one in self._shared.held() if one.resource == self.resource and one.ids == wanted]
        if not owners:
            raise PluginError("the kubelet's checkpoint does not say yet which container has these devices")
        return owners

    async def _start(self, owner: CheckpointEntry) -> None:
        one = await self._granted(owner)
        held = self._container(one, owner.container)
        found = slots_of(owner.cdi)
        self._check(one)
        if not found and self._shared.early:
            self._compare(held, owner)
            return
        if not found:
            raise PluginError("these devices were given out before gputile's agent served CDI; delete the pod")
        container_edits = self._edits(one, held)
        for slot in found:
            self._fill(owner.pod, slot, container_edits)
        said = fields(
            pod=one.pod.key, container=owner.container, cards=[tile.index for tile in held.tiles], slots=found
        )
        log.info("a container may start", extra=said)

    def _fill(self, pod: str, slot: str, container_edits: Json) -> None:
        try:
            self._shared.slots.fill(pod, slot, container_edits)
        except (OSError, IsolationUnavailable) as no:
            raise PluginError(f"the CDI spec of this container cannot be written: {no}") from no

    async def _granted(self, owner: CheckpointEntry) -> NodePod:
        """The pod with its grant. A pod that came around us is granted by the leader in a moment; we wait for that."""
        one = await self._shared.node_pods.wait_for(owner.pod, self._shared.hold)
        if one is None:
            raise PluginError(f"gputile's agent has not heard of the pod {owner.pod} yet")
        if one.grant is None:
            why = one.fault or "is the gputile scheduler running?"
            raise PluginError(f"the pod has no grant of a card yet ({why})")
        return one

    @staticmethod
    def _container(one: NodePod, name: str) -> ContainerGrant:
        found = next((held for held in (one.grant.containers if one.grant else ()) if held.container == name), None)
        if found is None:
            raise PluginError(f"the pod's grant names no card for its container `{name}`")
        return found

    def _check(self, one: NodePod) -> None:
        assert one.grant is not None
        others = [grant for grant in self._shared.orphans if grant.pod != one.grant.pod]
        earlier = CardAllocations([*others, *self._shared.node_pods.earlier(one)])
        why = overlap(one.grant.uses(), earlier, self._shared.cards)
        if why:
            raise PluginError(why)

    def _compare(self, held: ContainerGrant, owner: CheckpointEntry) -> None:
        if self._cards_of(owner.ids) != {tile.uuid for tile in held.tiles}:
            raise PluginError(
                "the kubelet took devices of another card than was booked, and this node's runtime knows no CDI"
            )

    def _isolation(self, one: NodePod) -> str:
        wanted = str(one.pod.annotations.get(ISOLATION) or "")
        try:
            return chosen(self._shared.isolation, wanted, free=self._shared.pods_choose)
        except IsolationUnavailable as no:
            raise PluginError(f"annotation `{ISOLATION}`: {no}") from no

    def _edits(self, one: NodePod, held: ContainerGrant) -> Json:
        env = self._shared.node_pods.env_of(one, held)
        try:
            return edits(self._isolation(one), held, env, self._shared.host)
        except IsolationUnavailable as no:
            raise PluginError(str(no)) from no
