"""What the containers of this node use, looked at again and again.

Room:  the last look, and how old it is. One that is too old is worth nothing: a driver may hang for minutes, and what
       is not known is not said.
Door:  `UsageMeter.look`; then `said` for the Lease, `page` for /metrics, `over_use` for those who take too much.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from gputile.agent import process_usage
from gputile.agent.node_pods import NodePods
from gputile.agent.process_usage import MemoryOveruse, ProcessShare
from gputile.dialects.usage_annotation import write_usage
from gputile.kubelet.cri import RunningContainer
from gputile.model.cards import Card
from gputile.model.grants import ContainerGrant
from gputile.model.units import MiB
from gputile.model.usage import CardUsage, together
from gputile.nvml.driver import Driver, NoDriver
from gputile.telemetry import exposition, hami_metrics
from gputile.telemetry.exposition import MIB, ExpositionPage, labelled

ALLOWANCE: MiB = 512
"""Of a card that a process may take beyond its grant: what the driver needs for itself."""


class UsageMeter:
    """See the module's text."""

    def __init__(
        self,
        driver: Driver,
        node_pods: NodePods,
        *,
        lasts: float,
        clock: Callable[[], float],
        hami: bool = False,
        proc: Path = process_usage.PROC,
    ) -> None:
        """`lasts`: seconds for which a look is believed."""
        self._driver, self._node_pods, self._lasts, self._clock = driver, node_pods, lasts, clock
        self._hami, self._proc = hami, proc
        self._cards: tuple[Card, ...] = ()
        self._seen: dict[str, list[ProcessShare]] = {}  # by card that answered
        self._at = -math.inf  # when that was
        self._told: dict[str, set[str]] = {}  # by pod: the cards about whose over-use it was told

    async def look(self, cards: Iterable[Card], containers: Mapping[str, RunningContainer]) -> None:
        """`containers`: those that run, by their ID. A driver that is gone leaves nothing known."""
        cards, began = tuple(cards), self._clock()
        pods = {one.pod.uid for one in self._node_pods.all()}
        uuids = [card.uuid for card in cards]
        try:
            seen = await asyncio.to_thread(process_usage.look, self._driver, uuids, containers, pods, self._proc)
        except NoDriver:
            self._at = -math.inf
            return
        self._cards, self._seen, self._at = cards, seen, began

    def _fresh(self) -> dict[str, list[ProcessShare]]:
        """By card that answered lately."""
        return self._seen if self._clock() - self._at <= self._lasts else {}

    def said(self) -> str:
        """For the Lease; "" when nothing is known."""
        seen = self._fresh()
        return write_usage(process_usage.usage(_all(seen)), seen) if seen else ""

    def over_use(self) -> list[MemoryOveruse]:
        """Those who take more of a card than granted, now."""
        return process_usage.over_use(self._node_pods.all(), process_usage.by_pod(_all(self._fresh())), ALLOWANCE)

    def untold(self, found: Iterable[MemoryOveruse]) -> list[MemoryOveruse]:
        """Those of them that were not told yet; a pod hears of a card once."""
        self._told = {uid: cards for uid, cards in self._told.items() if self._node_pods.get(uid) is not None}
        new = [one for one in found if one.card not in self._told.get(one.pod.pod.uid, ())]
        for one in new:
            self._told.setdefault(one.pod.pod.uid, set()).add(one.card)
        return new

    # ---- figures ----------------------------------------------------------------------------------------------------

    def page(self) -> bytes:
        """For /metrics."""
        page = ExpositionPage((*exposition.AGENT_FAMILIES, *(hami_metrics.HAMI_AGENT_FAMILIES if self._hami else ())))
        seen = self._fresh()
        usage = process_usage.usage(_all(seen))
        for card in self._cards:
            if card.uuid in seen:
                self._add_card(page, card, [part.used for part in seen[card.uuid]])
        for one in self._node_pods.all():
            pod = one.pod
            for container, cards in sorted(usage.get(pod.uid, {}).items()):
                for uuid, used in sorted(cards.items()):
                    labels = labelled(exposition.AGENT_CONTAINER, pod.namespace, pod.name, pod.uid, container, uuid)
                    page.add_use(
                        exposition.AGENT_CONTAINER_MEMORY_USED, exposition.AGENT_CONTAINER_CORES_USED, labels, used
                    )
            if self._hami and one.grant is not None:
                for held in one.grant.containers:
                    _add_hami(page, (pod.namespace, pod.name), held, usage.get(pod.uid, {}))
        return page.text()

    @staticmethod
    def _add_card(page: ExpositionPage, card: Card, used: list[CardUsage]) -> None:
        labels = labelled(exposition.AGENT_CARD, card.uuid, str(card.index), card.model)
        page.add(exposition.AGENT_CARD_PROCESSES, labels, len(used))
        page.add_use(exposition.AGENT_CARD_MEMORY_USED, exposition.AGENT_CARD_CORES_USED, labels, together(used))


def _all(seen: Mapping[str, list[ProcessShare]]) -> list[ProcessShare]:
    return [part for parts in seen.values() for part in parts]


def _add_hami(
    page: ExpositionPage, pod: tuple[str, str], held: ContainerGrant, usage: Mapping[str, Mapping[str, CardUsage]]
) -> None:
    for position, tile in enumerate(held.tiles):
        labels = labelled(hami_metrics.USED, hami_metrics.ZONE, *pod, held.container, str(position), tile.uuid)
        used = usage.get(held.container, {}).get(tile.uuid, CardUsage())
        page.add(hami_metrics.VGPU_MEMORY_LIMIT, labels, tile.memory * MIB)
        if used.memory is not None:
            page.add(hami_metrics.VGPU_MEMORY_USED, labels, used.memory * MIB)
            page.add(hami_metrics.CONTAINER_MEMORY, labels, used.memory * MIB)
        if used.cores is not None:
            page.add(hami_metrics.CONTAINER_UTILIZATION, labels, used.cores)
