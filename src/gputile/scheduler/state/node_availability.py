"""Nodes that take no pod now, or that rank last for one pod, for reasons other than their free capacity."""

from collections.abc import Collection, Iterable

from gputile.model.refusals import NodeCode
from gputile.scheduler.state.cluster_state import GUESSING, Mirror


class NodeAvailability:
    """Nodes closed to a pod, and nodes that were offered to it and came to nothing."""

    def __init__(self, mirror: Mirror, other_agents: str) -> None:
        self._mirror, self._ledger, self._other_agents = mirror, mirror.ledger, other_agents
        self._shy: dict[str, set[str]] = {}  # by pod: nodes that were offered to it and came to nothing

    def closed(self, names: Iterable[str], uid: str) -> dict[str, NodeCode]:
        """Which of these nodes take nobody now, and why: their agent guesses whose card it hands out, or there is a pod
        of which we do not know what it holds."""
        guessing = self._mirror.guessing
        mine = [name for name in names if name in guessing] if guessing else []
        others: dict[str, NodeCode] = {}
        if self._other_agents == "refuse":
            others = {name: NodeCode.OTHER_AGENT for name in mine if self._is_others(name)}
        busy = {e.holding.node for e in self._ledger.in_flight() if e.holding.pod != uid} if mine else set()
        busy_ones = [name for name in mine if name in busy or self._mirror.starting(name, but=uid) is not None]
        uncounted = set(self._mirror.uncounted.values()) if self._mirror.uncounted else ()
        in_doubt = dict.fromkeys((name for name in names if name in uncounted), NodeCode.UNCOUNTED) if uncounted else {}
        return dict.fromkeys(busy_ones, NodeCode.AGENT_BUSY) | others | in_doubt

    def _is_others(self, name: str) -> bool:
        node = self._ledger.fleet.node(name)
        return node is not None and node.agent in GUESSING

    def shun(self, uid: str, node: str) -> None:
        """Let the node rank last for this pod from now on."""
        self._shy.setdefault(uid, set()).add(node)

    def shy(self, uid: str) -> Collection[str]:
        """The nodes that rank last for this pod."""
        return self._shy.get(uid, ())

    def begin_anew(self, uid: str) -> None:
        """All have had their chance."""
        self._shy.pop(uid, None)

    def forget_strangers(self) -> None:
        """Drop what is remembered of pods that wait no more."""
        for uid in [uid for uid in self._shy if uid not in self._mirror.waiting]:
            del self._shy[uid]
