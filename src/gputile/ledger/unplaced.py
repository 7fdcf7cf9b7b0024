"""Unplaced allocations: GPUs that pods hold where it is unknown which GPUs of the node they are.

Pods of other systems may run without a readable record. The number of GPUs they hold is known, so as many GPUs of the
node are withheld from new pods: idle GPUs first, then what is left of shared ones. The choice is repeated whenever
something else on the node changes; only the number matters.
"""

from collections.abc import KeysView

from gputile.engine.fleet.fleet import Fleet
from gputile.model.cards import FreeCapacity, NodeView, Use


class UnplacedAllocations:
    """By node and pod the number of unplaced GPUs, and the capacity that is withheld for them."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._counts: dict[str, dict[str, int]] = {}  # by node and pod
        self._kept: dict[str, dict[str, Use]] = {}  # by node: held in the fleet in addition to the known allocations

    def nodes(self) -> KeysView[str]:
        """The nodes with unplaced allocations."""
        return self._counts.keys()

    def kept(self, node: str) -> dict[str, Use]:
        return self._kept.get(node, {})

    def set(self, node: str, pod: str, count: int) -> None:
        """Set how many unplaced GPUs the pod holds; call `keep` once everything else is in the fleet."""
        if count:
            self._counts.setdefault(node, {})[pod] = count
        elif pod in self._counts.get(node, ()):
            del self._counts[node][pod]
            if not self._counts[node]:
                del self._counts[node]

    def drop(self, node: str) -> None:
        """Release the withheld capacity until the next `keep`."""
        self._fleet.release(node, self._kept.pop(node, {}))

    def keep(self, node: str) -> None:
        """Withhold as many GPUs of the node as pods hold unplaced.

        Precondition: nothing is withheld there, because of `drop` or because the node was replaced in the fleet.
        """
        if node in self._counts and node in self._fleet:
            self._kept[node] = self._choice(self._fleet.view(node))
            self._fleet.hold(node, self._kept[node])

    def keep_others(self, part: Fleet, node: str, pod: str) -> None:
        """In a copy of the node, choose again without the unplaced GPUs of one pod, which is being placed."""
        part.release(node, self.kept(node))
        part.hold(node, self._choice(part.view(node), ignoring=pod))

    def _choice(self, view: NodeView, ignoring: str = "") -> dict[str, Use]:
        count = sum(count for pod, count in self._counts[view.node.name].items() if pod != ignoring)
        free_by_card = {card.uuid: free for card, free in zip(view.node.cards, view.free_by_card, strict=True)}
        emptiest = sorted(free_by_card, key=lambda uuid: (free_by_card[uuid].tenants > 0, -free_by_card[uuid].memory))
        return {uuid: _rest(free_by_card[uuid]) for uuid in emptiest[:count]}


def _rest(free: FreeCapacity) -> Use:
    return Use(max(0, free.memory), max(0, free.cores), max(0, free.slots))
