"""Samples what the containers of this node use of the cards: for the Lease, for /metrics, and for over-use Events.

Only the last sample is kept, and it expires: a driver may hang for minutes, and unknown usage is left out, not zero.
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
"""Memory of a card that a pod may use beyond its grant: the driver's own memory for the process."""


class UsageMeter:
    """The last sample of what containers use, as long as it is fresh."""

    def __init__(
        self,
        driver: Driver,
        node_pods: NodePods,
        *,
        max_age: float,
        clock: Callable[[], float],
        hami: bool = False,
        proc: Path = process_usage.PROC,
    ) -> None:
        """`max_age`: seconds for which a sample counts."""
        self._driver, self._node_pods, self._max_age, self._clock = driver, node_pods, max_age, clock
        self._hami, self._proc = hami, proc
        self._cards: tuple[Card, ...] = ()
        self._sample: dict[str, list[ProcessShare]] = {}  # by card that answered
        self._sampled_at = -math.inf
        self._reported: dict[str, set[str]] = {}  # by pod UID: the cards whose over-use has an Event

    async def sample(self, cards: Iterable[Card], containers: Mapping[str, RunningContainer]) -> None:
        """`containers`: the running ones, by ID. Without a driver all usage is unknown."""
        cards, started = tuple(cards), self._clock()
        pods = {node_pod.pod.uid for node_pod in self._node_pods.all()}
        uuids = [card.uuid for card in cards]
        try:
            sample = await asyncio.to_thread(process_usage.sample, self._driver, uuids, containers, pods, self._proc)
        except NoDriver:
            self._sampled_at = -math.inf
            return
        self._cards, self._sample, self._sampled_at = cards, sample, started

    def _fresh(self) -> dict[str, list[ProcessShare]]:
        """The sample, unless it is too old."""
        return self._sample if self._clock() - self._sampled_at <= self._max_age else {}

    def usage_annotation(self) -> str:
        """For the Lease; "" when usage is unknown."""
        sample = self._fresh()
        return write_usage(process_usage.usage(_all(sample)), sample) if sample else ""

    def over_use(self) -> list[MemoryOveruse]:
        """The pods that use more memory of a card than granted, now."""
        return process_usage.over_use(self._node_pods.all(), process_usage.by_pod(_all(self._fresh())), ALLOWANCE)

    def unreported(self, overuses: Iterable[MemoryOveruse]) -> list[MemoryOveruse]:
        """Those without an Event yet, marked as reported; a pod gets one Event per card."""
        self._reported = {uid: cards for uid, cards in self._reported.items() if self._node_pods.get(uid) is not None}
        new = [overuse for overuse in overuses if overuse.card not in self._reported.get(overuse.pod.pod.uid, ())]
        for overuse in new:
            self._reported.setdefault(overuse.pod.pod.uid, set()).add(overuse.card)
        return new

    # ---- metrics ----------------------------------------------------------------------------------------------------

    def page(self) -> bytes:
        """The usage metrics, in the text format of /metrics."""
        page = ExpositionPage((*exposition.AGENT_FAMILIES, *(hami_metrics.HAMI_AGENT_FAMILIES if self._hami else ())))
        sample = self._fresh()
        usage = process_usage.usage(_all(sample))
        for card in self._cards:
            if card.uuid in sample:
                self._add_card(page, card, [share.used for share in sample[card.uuid]])
        for node_pod in self._node_pods.all():
            pod = node_pod.pod
            for container, cards in sorted(usage.get(pod.uid, {}).items()):
                for uuid, used in sorted(cards.items()):
                    labels = labelled(exposition.AGENT_CONTAINER, pod.namespace, pod.name, pod.uid, container, uuid)
                    page.add_use(
                        exposition.AGENT_CONTAINER_MEMORY_USED, exposition.AGENT_CONTAINER_CORES_USED, labels, used
                    )
            if self._hami and node_pod.grant is not None:
                for grant in node_pod.grant.containers:
                    _add_hami(page, (pod.namespace, pod.name), grant, usage.get(pod.uid, {}))
        return page.text()

    @staticmethod
    def _add_card(page: ExpositionPage, card: Card, used: list[CardUsage]) -> None:
        labels = labelled(exposition.AGENT_CARD, card.uuid, str(card.index), card.model)
        page.add(exposition.AGENT_CARD_PROCESSES, labels, len(used))
        page.add_use(exposition.AGENT_CARD_MEMORY_USED, exposition.AGENT_CARD_CORES_USED, labels, together(used))


def _all(sample: Mapping[str, list[ProcessShare]]) -> list[ProcessShare]:
    return [share for shares in sample.values() for share in shares]


def _add_hami(
    page: ExpositionPage, pod: tuple[str, str], grant: ContainerGrant, usage: Mapping[str, Mapping[str, CardUsage]]
) -> None:
    for position, tile in enumerate(grant.tiles):
        labels = labelled(hami_metrics.USED, hami_metrics.ZONE, *pod, grant.container, str(position), tile.uuid)
        used = usage.get(grant.container, {}).get(tile.uuid, CardUsage())
        page.add(hami_metrics.VGPU_MEMORY_LIMIT, labels, tile.memory * MIB)
        if used.memory is not None:
            page.add(hami_metrics.VGPU_MEMORY_USED, labels, used.memory * MIB)
            page.add(hami_metrics.CONTAINER_MEMORY, labels, used.memory * MIB)
        if used.cores is not None:
            page.add(hami_metrics.CONTAINER_UTILIZATION, labels, used.cores)
