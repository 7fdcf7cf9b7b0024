"""The same cards and pods under HAMi's names.

Room:  what HAMi shows, in its units: bytes, and percent for what it calls a ratio of cores.
Door:  `HamiMetrics(page, mirror, view)` for one node; `add_cards`, `add_pods`.
"""

from collections import Counter
from collections.abc import Iterable

from gputile.model.cards import NodeView
from gputile.model.grants import Grant
from gputile.scheduler.state.cluster_state import ClusterState
from gputile.telemetry import hami_metrics as to
from gputile.telemetry.exposition import MIB, ExpositionPage, labelled


class HamiMetrics:
    """One node."""

    def __init__(self, page: ExpositionPage, cluster_state: ClusterState, view: NodeView) -> None:
        self._page, self._cluster_state, self._view = page, cluster_state, view

    def add_cards(self, grants: Iterable[Grant]) -> None:
        shared = Counter(uuid for g in grants for held in g.containers for uuid in {tile.uuid for tile in held.tiles})
        page, node = self._page, self._view.node.name
        for card, room in zip(self._view.node.cards, self._view.free_by_card, strict=True):
            names = (to.ZONE, node, card.uuid, str(card.index))
            kind, cores, held = to.device_type(card.model), str(card.cores), (card.memory - room.memory) * MIB
            labels = labelled(to.GPU, *names, kind)
            page.add(to.GPU_MEMORY_LIMIT, labels, card.memory * MIB)
            page.add(to.GPU_CORE_LIMIT, labels, card.cores)
            page.add(to.GPU_CORE_ALLOCATED, labels, card.cores - room.cores)
            page.add(to.GPU_SHARED, labels, shared[card.uuid])
            page.add(to.GPU_MEMORY_ALLOCATED, labelled(to.WITH_CORES, *names, cores, kind), held)
            page.add(to.NODE_OVERVIEW, labelled(to.OVERVIEW, *names, cores, str(card.memory), kind), held)
            if card.memory:
                page.add(to.NODE_MEMORY_RATIO, labelled(to.RATIO, *names), held / (card.memory * MIB))

    def add_pods(self, granted: Iterable[tuple[str, Grant]]) -> None:
        """HAMi has no UIDs: of two pods of one name, one gone and not yet over, the sum is shown."""
        memory: Counter[str] = Counter()
        cores: Counter[str] = Counter()
        for name, grant in granted:
            namespace, _, pod = name.partition("/")
            places = self._places(grant)
            for held in grant.containers:
                for tile in held.tiles:
                    names = (to.ZONE, namespace, grant.node, pod, str(places[held.container]), tile.uuid)
                    labels = labelled(to.HELD, *names)
                    memory[labels] += tile.memory
                    cores[labels] += tile.cores
        for labels in memory:
            self._page.add(to.VGPU_MEMORY_ALLOCATED, labels, memory[labels] * MIB)
            self._page.add(to.VGPU_CORE_ALLOCATED, labels, cores[labels])

    def _places(self, grant: Grant) -> dict[str, int]:
        """By container: its number in the pod; of a pod that is gone, among those that hold cards."""
        pod = self._cluster_state.pod(grant.pod)
        names = [one.name for _, one in pod.containers()] if pod is not None else []
        return {held.container: place for place, held in enumerate(grant.containers)} | {
            name: place for place, name in enumerate(names)
        }
