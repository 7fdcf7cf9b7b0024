"""The pods of this node, as the API server shows them, and what they were granted.

Room:  no I/O. The first grant that a pod shows is the one that counts: a later edit changes nothing, and is reported.
Door:  `listed`, `changed`; `grant_of`, `wait_for`, `expected`.
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
    """A pod that is on this node and not over."""

    pod: Pod
    grant: Grant | None
    fault: str = ""  # why its grant is not believed
    at: int = 0  # when it was granted, in nanoseconds since 1970; read once, for lists are sorted by it every second

    @property
    def order(self) -> tuple[int, str]:
        """Who was granted first."""
        return self.at, self.pod.uid


class NodePods:
    """See the module's text."""

    def __init__(self, settings: DialectSettings) -> None:
        self._settings = settings
        self._node = Node(name="", agent=gputile.NAME)
        self._known: dict[str, NodePod] = {}
        self._news = asyncio.Condition()
        self._is_listed = asyncio.Event()

    # ---- what is seen -----------------------------------------------------------------------------------------------

    async def listed(self, pods: Iterable[Pod]) -> None:
        alive = {pod.uid: pod for pod in pods if not pod.is_terminal}
        self._known = {uid: self._isolated(pod, self._seen) for uid, pod in alive.items()}
        self._is_listed.set()
        await self._tell()

    async def changed(self, pod: Pod, *, deleted: bool) -> None:
        if deleted or pod.is_terminal:
            self._known.pop(pod.uid, None)
        else:
            self._known[pod.uid] = self._isolated(pod, self._seen)
        await self._tell()

    async def serves(self, cards: tuple[Card, ...], since: str) -> None:
        """What the node has, and since when an agent of ours serves it: records of other systems count only for pods
        that started before, and mean something only when the cards are known."""
        if (cards, since) != (self._node.cards, self._node.since):
            self._node = Node(name="", cards=cards, agent=gputile.NAME, since=since)
            settled = {uid: one for uid, one in self._known.items() if _is_settled(one)}
            self._known = {
                uid: settled.get(uid) or self._isolated(one.pod, self._read) for uid, one in self._known.items()
            }
            await self._tell()

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()

    def _isolated(self, pod: Pod, read: Callable[[Pod], NodePod]) -> NodePod:
        """One pod that nobody thought of costs itself its start, and no other pod anything."""
        try:
            return read(pod)
        except Exception as bug:
            log.exception("a pod cannot be read", extra=fields(pod=pod.key))
            known = self._known.get(pod.uid)
            why = f"gputile's agent failed to read the pod: {type(bug).__name__}"
            return NodePod(pod, None, why) if known is None else NodePod(pod, known.grant, why, known.at)

    def _seen(self, pod: Pod) -> NodePod:
        known = self._known.get(pod.uid)
        found = self._read(pod)
        if known is None or known.grant is None or found.grant == known.grant:
            return found
        why = "its grant was changed after it was made; the first one counts"
        return NodePod(pod, known.grant, why, known.at)

    def _read(self, pod: Pod) -> NodePod:
        found = records.read_grant(pod, self._node, self._settings)
        if isinstance(found, BadRequest):
            return NodePod(pod, None, found.message)
        fault = gputile.beyond_its_cards(found, self._by_uuid()) if found is not None else ""
        if fault:
            return NodePod(pod, None, fault)
        return NodePod(pod, found, at=gputile.granted_at(pod) if found is not None else 0)

    def _by_uuid(self) -> dict[str, Card]:
        return {card.uuid: card for card in self._node.cards}

    # ---- what is asked ----------------------------------------------------------------------------------------------

    @property
    def is_listed(self) -> bool:
        return self._is_listed.is_set()

    async def wait_listed(self) -> None:
        await self._is_listed.wait()

    def get(self, uid: str) -> NodePod | None:
        return self._known.get(uid)

    def all(self) -> list[NodePod]:
        """Those who were granted first come first."""
        return sorted(self._known.values(), key=lambda one: one.order)

    async def wait_for(self, uid: str, seconds: float) -> NodePod | None:
        """The pod once it shows a grant; without one, as it is when the time is over."""
        await self.wait_until(lambda: (found := self.get(uid)) is not None and found.grant is not None, seconds)
        return self.get(uid)

    async def wait_until(self, holds: Callable[[], bool], seconds: float) -> None:
        """Until something is seen after which it holds, or the time is over."""
        try:
            async with asyncio.timeout(seconds), self._news:
                await self._news.wait_for(holds)
        except TimeoutError:
            pass

    def earlier(self, than: NodePod) -> list[Grant]:
        """The grants that came before."""
        return [one.grant for one in self.all() if one.grant is not None and one.order < than.order]

    def expected(self, resource: str, served: Collection[tuple[str, str]]) -> list[ExpectedContainer]:
        """Containers that will ask for this resource and that the kubelet has not `served` yet, first granted first."""
        found = []
        for one in self.all():
            if one.grant is not None:
                containers = {container.name: container for _, container in one.pod.containers()}
                for held in one.grant.containers:
                    if (one.pod.uid, held.container) not in served:
                        size = self._size(containers.get(held.container), resource)
                        found.append(ExpectedContainer(one.pod.uid, held, size))
        return [one for one in found if one.size]

    @staticmethod
    def _size(container: Container | None, resource: str) -> int:
        """How many devices of the resource the container asks for."""
        try:
            return amount(container, resource) if container is not None else 0
        except UnreadableValue:
            return 0

    def env_of(self, one: NodePod, held: ContainerGrant) -> dict[str, str]:
        """The environment that the pod's dialect promises this container; its cards in any case."""
        asked = registry.read_pod(one.pod, self._settings)
        if one.grant is None or not isinstance(asked, PodRequest) or one.grant.dialect != asked.dialect:
            return visible_devices(held)
        at, settings = gputile.granted_at(one.pod), self._settings
        award = GrantContext(
            grant=one.grant, pod=one.pod, asked=asked, cards=self._node.cards, at=at, settings=settings
        )
        return visible_devices(held) | registry.write_grant(award).env.get(held.container, {})


def _is_settled(one: NodePod) -> bool:
    """Whether it has a grant of ours, which names cards by UUID, whatever cards are there; and the first one counts."""
    return one.grant is not None and gputile.GRANT in one.pod.annotations
