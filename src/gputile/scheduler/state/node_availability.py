"""Nodes that accept no pod now, or that rank last for a pod, for reasons other than their free capacity."""

from collections.abc import Collection, Iterable

from gputile.dialects import registry
from gputile.model.refusals import NodeReason
from gputile.scheduler.state.cluster_state import ClusterState


class NodeAvailability:
    """The nodes that are blocked for a pod, and those that are deprioritized because an attempt on them failed."""

    def __init__(self, cluster_state: ClusterState, other_agents: str) -> None:
        self._cluster_state, self._ledger, self._other_agents = cluster_state, cluster_state.ledger, other_agents
        self._deprioritized: dict[str, set[str]] = {}  # by pod UID: nodes where an attempt failed

    def blocked(self, names: Iterable[str], uid: str) -> dict[str, NodeReason]:
        """Which of these nodes accept no pod now, and why: their agent guesses the pod of an allocation, or they have a
        pod whose allocation is unknown."""
        guessing_nodes = self._cluster_state.guessing
        guessing = [name for name in names if name in guessing_nodes] if guessing_nodes else []
        other_agents: dict[str, NodeReason] = {}
        if self._other_agents == "refuse":
            other_agents = {name: NodeReason.OTHER_AGENT for name in guessing if self._has_other_agent(name)}
        in_flight = self._ledger.in_flight() if guessing else ()
        binding = {entry.allocation.node for entry in in_flight if entry.allocation.pod != uid}
        starting = self._cluster_state.starting
        busy = [name for name in guessing if name in binding or starting(name, ignoring=uid) is not None]
        unknown = set(self._cluster_state.uncounted.values()) if self._cluster_state.uncounted else ()
        uncounted = dict.fromkeys((name for name in names if name in unknown), NodeReason.UNCOUNTED) if unknown else {}
        return dict.fromkeys(busy, NodeReason.AGENT_BUSY) | other_agents | uncounted

    def _has_other_agent(self, name: str) -> bool:
        node = self._ledger.fleet.node(name)
        return node is not None and registry.agent_guesses(node.agent)

    def deprioritize(self, uid: str, node: str) -> None:
        """Rank the node last for this pod from now on."""
        self._deprioritized.setdefault(uid, set()).add(node)

    def deprioritized(self, uid: str) -> Collection[str]:
        """The nodes that rank last for this pod."""
        return self._deprioritized.get(uid, ())

    def reset(self, uid: str) -> None:
        """Rank all nodes alike again for this pod."""
        self._deprioritized.pop(uid, None)

    def prune(self) -> None:
        """Forget pods that are no longer pending."""
        for uid in [uid for uid in self._deprioritized if uid not in self._cluster_state.pending]:
            del self._deprioritized[uid]
