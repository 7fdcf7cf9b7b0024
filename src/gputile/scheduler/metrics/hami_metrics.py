"""The metrics of cards and pods under HAMi's names, in HAMi's units: bytes, and percent for its "ratio" of cores."""

from collections import Counter
from collections.abc import Iterable

from gputile.model.cards import NodeView
from gputile.model.grants import Grant
from gputile.scheduler.state.cluster_state import ClusterState
from gputile.telemetry import hami_metrics as to
from gputile.telemetry.exposition import MIB, ExpositionPage, labelled


class HamiMetrics:
    """Adds HAMi's metrics of one node to a page."""

    def __init__(self, page: ExpositionPage, cluster_state: ClusterState, view: NodeView) -> None:
        self._page, self._cluster_state, self._view = page, cluster_state, view

    def add_cards(self, grants: Iterable[Grant]) -> None:
        containers = (container for grant in grants for container in grant.containers)
        shared = Counter(uuid for container in containers for uuid in {tile.uuid for tile in container.tiles})
        page, node = self._page, self._view.node.name
        for card, free in zip(self._view.node.cards, self._view.free_by_card, strict=True):
            names = (to.ZONE, node, card.uuid, str(card.index))
            kind, cores, allocated = to.device_type(card.model), str(card.cores), (card.memory - free.memory) * MIB
            labels = labelled(to.GPU, *names, kind)
            page.add(to.GPU_MEMORY_LIMIT, labels, card.memory * MIB)
            page.add(to.GPU_CORE_LIMIT, labels, card.cores)
            page.add(to.GPU_CORE_ALLOCATED, labels, card.cores - free.cores)
            page.add(to.GPU_SHARED, labels, shared[card.uuid])
            page.add(to.GPU_MEMORY_ALLOCATED, labelled(to.WITH_CORES, *names, cores, kind), allocated)
            page.add(to.NODE_OVERVIEW, labelled(to.OVERVIEW, *names, cores, str(card.memory), kind), allocated)
            if card.memory:
                page.add(to.NODE_MEMORY_RATIO, labelled(to.RATIO, *names), allocated / (card.memory * MIB))

    def add_pods(self, granted: Iterable[tuple[str, Grant]]) -> None:
        """HAMi's series have no UID: two pods of one name (one of them terminating) are added up."""
        memory: Counter[str] = Counter()
        cores: Counter[str] = Counter()
        for name, grant in granted:
            namespace, _, pod = name.partition("/")
            indices = self._container_indices(grant)
            for container in grant.containers:
                for tile in container.tiles:
                    names = (to.ZONE, namespace, grant.node, pod, str(indices[container.container]), tile.uuid)
                    labels = labelled(to.HELD, *names)
                    memory[labels] += tile.memory
                    cores[labels] += tile.cores
        for labels in memory:
            self._page.add(to.VGPU_MEMORY_ALLOCATED, labels, memory[labels] * MIB)
            self._page.add(to.VGPU_CORE_ALLOCATED, labels, cores[labels])

    def _container_indices(self, grant: Grant) -> dict[str, int]:
        """By container: its index in the pod; for a deleted pod, its index among the containers with cards."""
        pod = self._cluster_state.pod(grant.pod)
        names = [container.name for _, container in pod.containers()] if pod is not None else []
        return {container.container: index for index, container in enumerate(grant.containers)} | {
            name: index for index, name in enumerate(names)
        }
