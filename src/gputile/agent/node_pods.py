"""The pods of this node with their grants, from the watch on the API server. No I/O.

The first grant that is seen on a pod is the one that counts: a later edit changes nothing, and is reported.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable

import msgspec

from gputile.agent.preferred_allocation import ExpectedContainer
from gputile.dialects import gputile, records, registry
from gputile.dialects.kube_objects import Container, GrantContext, Pod
from gputile.dialects.parsing import UnreadableValue, amount, visible_devices
from gputile.dialects.settings import DialectSettings
from gputile.model.cards import Card, Node
from gputile.model.grants import ContainerGrant, Grant
from gputile.model.refusals import BadRequest
from gputile.model.requests import PodRequest
from gputile.telemetry.logs import fields

log = logging.getLogger(__name__)


class NodePod(msgspec.Struct, frozen=True):
    """A pod on this node that has not ended, with its grant."""

    pod: Pod
    grant: Grant | None
    fault: str = ""  # why its grant is rejected, or which edit of it is ignored
    at: int = 0  # when it was granted, in nanoseconds since 1970; parsed once, because pods are sorted every second

    @property
    def order(self) -> tuple[int, str]:
        """Earlier grants first."""
        return self.at, self.pod.uid


class NodePods:
    """All pods of this node that have not ended, by UID."""

    def __init__(self, settings: DialectSettings) -> None:
        self._settings = settings
        self._node = Node(name="", agent=gputile.NAME)
        self._pods: dict[str, NodePod] = {}
        self._changed = asyncio.Condition()

    # ---- updates ----------------------------------------------------------------------------------------------------

    async def listed(self, pods: Iterable[Pod]) -> None:
        alive = {pod.uid: pod for pod in pods if not pod.is_terminal}
        self._pods = {uid: self._parse_safely(pod, self._parse_update) for uid, pod in alive.items()}
        await self._notify()

    async def changed(self, pod: Pod, *, deleted: bool) -> None:
        if deleted or pod.is_terminal:
            self._pods.pop(pod.uid, None)
        else:
            self._pods[pod.uid] = self._parse_safely(pod, self._parse_update)
        await self._notify()

    async def set_cards(self, cards: tuple[Card, ...], since: str) -> None:
        """The node's cards, and since when an agent of gputile serves it. Other systems' records depend on both: they
        count only for pods that started before `since`, and cannot be resolved without the cards."""
        if (cards, since) != (self._node.cards, self._node.since):
            self._node = Node(name="", cards=cards, agent=gputile.NAME, since=since)
            self._pods = {
                uid: node_pod if _has_own_grant(node_pod) else self._parse_safely(node_pod.pod, self._parse)
                for uid, node_pod in self._pods.items()
            }
            await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _parse_safely(self, pod: Pod, parse: Callable[[Pod], NodePod]) -> NodePod:
        """A pod that causes an unexpected error cannot start; other pods are unaffected."""
        try:
            return parse(pod)
        except Exception as error:
            log.exception("unexpected error while parsing a pod", extra=fields(pod=pod.key))
            known = self._pods.get(pod.uid)
            why = f"the agent failed to parse the pod: {type(error).__name__}; see the agent's log"
            return NodePod(pod, None, why) if known is None else NodePod(pod, known.grant, why, known.at)

    def _parse_update(self, pod: Pod) -> NodePod:
        known = self._pods.get(pod.uid)
        node_pod = self._parse(pod)
        if known is None or known.grant is None or node_pod.grant == known.grant:
            return node_pod
        why = "its grant was edited; the first grant counts"
        return NodePod(pod, known.grant, why, known.at)

    def _parse(self, pod: Pod) -> NodePod:
        grant = records.read_grant(pod, self._node, self._settings)
        if isinstance(grant, BadRequest):
            return NodePod(pod, None, grant.message)
        fault = gputile.beyond_its_cards(grant, self._by_uuid()) if grant is not None else ""
        if fault:
            return NodePod(pod, None, fault)
        return NodePod(pod, grant, at=gputile.granted_at(pod) if grant is not None else 0)

    def _by_uuid(self) -> dict[str, Card]:
        return {card.uuid: card for card in self._node.cards}

    # ---- queries ----------------------------------------------------------------------------------------------------

    def get(self, uid: str) -> NodePod | None:
        return self._pods.get(uid)

    def all(self) -> list[NodePod]:
        """Pods with earlier grants first."""
        return sorted(self._pods.values(), key=lambda node_pod: node_pod.order)

    async def wait_for_grant(self, uid: str, seconds: float) -> NodePod | None:
        """The pod as soon as it has a grant; otherwise as it is after the timeout."""
        await self.wait_until(lambda: (pod := self.get(uid)) is not None and pod.grant is not None, seconds)
        return self.get(uid)

    async def wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Until an update makes the condition true, or the timeout is over."""
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            pass

    def earlier(self, than: NodePod) -> list[Grant]:
        """The grants that are older than this pod's."""
        return [node_pod.grant for node_pod in self.all() if node_pod.grant is not None and node_pod.order < than.order]

    def expected(self, resource: str, served: Collection[tuple[str, str]]) -> list[ExpectedContainer]:
        """Containers that request this resource and are not `served` by the kubelet yet, earlier grants first."""
        expected = []
        for node_pod in self.all():
            if node_pod.grant is not None:
                containers = {container.name: container for _, container in node_pod.pod.containers()}
                for grant in node_pod.grant.containers:
                    if (node_pod.pod.uid, grant.container) not in served:
                        size = self._size(containers.get(grant.container), resource)
                        expected.append(ExpectedContainer(node_pod.pod.uid, grant, size))
        return [container for container in expected if container.size]

    @staticmethod
    def _size(container: Container | None, resource: str) -> int:
        """How many devices of the resource the container requests."""
        try:
            return amount(container, resource) if container is not None else 0
        except UnreadableValue:
            return 0

    def env_of(self, node_pod: NodePod, grant: ContainerGrant) -> dict[str, str]:
        """The environment of this container as the pod's dialect defines it; its cards in any case."""
        request = registry.read_pod(node_pod.pod, self._settings)
        if node_pod.grant is None or not isinstance(request, PodRequest) or node_pod.grant.dialect != request.dialect:
            return visible_devices(grant)
        context = GrantContext(
            grant=node_pod.grant,
            pod=node_pod.pod,
            asked=request,
            cards=self._node.cards,
            at=gputile.granted_at(node_pod.pod),
            settings=self._settings,
        )
        return visible_devices(grant) | registry.write_grant(context).env.get(grant.container, {})


def _has_own_grant(node_pod: NodePod) -> bool:
    """Whether its grant is gputile's own: it names cards by UUID and so does not depend on the node's cards."""
    return node_pod.grant is not None and gputile.GRANT in node_pod.pod.annotations
