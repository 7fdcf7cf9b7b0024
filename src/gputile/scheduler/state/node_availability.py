"""Nodes that take no pod now, or that rank last for one pod, for reasons other than their free capacity."""

from collections.abc import Collection, Iterable

from gputile.model.refusals import NodeReason
from gputile.scheduler.state.cluster_state import GUESSING, ClusterState


class NodeAvailability:
    """Nodes closed to a pod, and nodes that were offered to it and came to nothing."""

    def __init__(self, cluster_state: ClusterState, other_agents: str) -> None:
        self._cluster_state, self._ledger, self._other_agents = cluster_state, cluster_state.ledger, other_agents
        self._deprioritized: dict[str, set[str]] = {}  # by pod: nodes that were offered to it and came to nothing

    def blocked(self, names: Iterable[str], uid: str) -> dict[str, NodeReason]:
        """Which of these nodes take nobody now, and why: their agent guesses whose card it hands out, or there is a pod
        of which we do not know what it holds."""
        guessing = self._cluster_state.guessing
        mine = [name for name in names if name in guessing] if guessing else []
        others: dict[str, NodeReason] = {}
        if self._other_agents == "refuse":
            others = {name: NodeReason.OTHER_AGENT for name in mine if self._is_others(name)}
        busy = {e.allocation.node for e in self._ledger.in_flight() if e.allocation.pod != uid} if mine else set()
        busy_ones = [name for name in mine if name in busy or self._cluster_state.starting(name, but=uid) is not None]
        uncounted = set(self._cluster_state.uncounted.values()) if self._cluster_state.uncounted else ()
        in_doubt = (
            dict.fromkeys((name for name in names if name in uncounted), NodeReason.UNCOUNTED) if uncounted else {}
        )
        return dict.fromkeys(busy_ones, NodeReason.AGENT_BUSY) | others | in_doubt

    def _is_others(self, name: str) -> bool:
        node = self._ledger.fleet.node(name)
        return node is not None and node.agent in GUESSING

    def deprioritize(self, uid: str, node: str) -> None:
        """Let the node rank last for this pod from now on."""
        self._deprioritized.setdefault(uid, set()).add(node)

    def deprioritized(self, uid: str) -> Collection[str]:
        """The nodes that rank last for this pod."""
        return self._deprioritized.get(uid, ())

    def reset(self, uid: str) -> None:
        """All have had their chance."""
        self._deprioritized.pop(uid, None)

    def prune(self) -> None:
        """Drop what is remembered of pods that wait no more."""
        for uid in [uid for uid in self._deprioritized if uid not in self._cluster_state.waiting]:
            del self._deprioritized[uid]
