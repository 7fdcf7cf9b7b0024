"""GPUs that are held, where it is unknown which of the node they are: counted by number.

Pods of other systems may run without a record that can be read. How many GPUs they hold is known, so as many of the
node's are kept from new pods: idle ones first, and what is left of a shared one where no other is idle. Which ones is
derived anew whenever something else on the node changes; nothing depends on the choice but its number.
"""

from collections.abc import KeysView

from gputile.engine.fleet.fleet import Fleet
from gputile.model.cards import FreeCapacity
from gputile.model.grants import Use


class UnplacedAllocations:
    """By node, who holds how many GPUs of unknown place, and what is kept from others for that."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._counts: dict[str, dict[str, int]] = {}  # by node and pod
        self._kept: dict[str, dict[str, Use]] = {}  # by node: held in the fleet besides what pods are known to hold

    def nodes(self) -> KeysView[str]:
        """Those that have any."""
        return self._counts.keys()

    def kept(self, node: str) -> dict[str, Use]:
        return self._kept.get(node, {})

    def set(self, node: str, pod: str, count: int) -> None:
        """What the pod holds of the node this way from now on; call `keep` once all else is in the fleet."""
        if count:
            self._counts.setdefault(node, {})[pod] = count
        elif pod in self._counts.get(node, ()):
            del self._counts[node][pod]
            if not self._counts[node]:
                del self._counts[node]

    def drop(self, node: str) -> None:
        """Let others see what is really free; until `keep`."""
        self._fleet.release(node, self._kept.pop(node, {}))

    def keep(self, node: str, ignoring: str = "") -> None:
        """Keep as many GPUs of the node as pods hold unplaced, but for those of one pod that is being placed. Nothing
        is kept there now: `drop` was called, or the fleet has got the node anew."""
        count = sum(count for pod, count in self._counts.get(node, {}).items() if pod != ignoring)
        if not count or node not in self._fleet:
            return
        view = self._fleet.view(node)
        free_by_card = {card.uuid: room for card, room in zip(view.node.cards, view.free_by_card, strict=True)}
        emptiest = sorted(free_by_card, key=lambda uuid: (free_by_card[uuid].tenants > 0, -free_by_card[uuid].memory))
        kept = {uuid: _rest(free_by_card[uuid]) for uuid in emptiest[:count]}
        self._fleet.hold(node, kept)
        self._kept[node] = kept


def _rest(room: FreeCapacity) -> Use:
    return Use(max(0, room.memory), max(0, room.cores), max(0, room.slots))
