"""Tracks orphaned pods: pods that are gone from the API server while their containers still run. No I/O.

The scheduler keeps their tiles allocated for as long as the node's annotation lists them (docs/decisions/0014). A pod
is dropped only when its containers are gone.
"""

from collections.abc import Collection, Iterable

from gputile.agent.node_pods import NodePod
from gputile.model.grants import Grant


class OrphanContainers:
    """The grants of all pods seen on this node whose containers may still run."""

    def __init__(self) -> None:
        self._grants: dict[str, Grant] = {}  # by pod UID

    def restore(self, grants: Iterable[Grant]) -> None:
        """Take over the orphaned pods of an earlier agent."""
        for grant in grants:
            self._grants.setdefault(grant.pod, grant)

    def unlisted(self, node_pods: Iterable[NodePod]) -> tuple[Grant, ...]:
        """The grants of pods that the API server does not list. Without a runtime that lists containers, all of them
        count as orphaned."""
        listed = {node_pod.pod.uid for node_pod in node_pods}
        return tuple(grant for uid, grant in sorted(self._grants.items()) if uid not in listed)

    def update(self, node_pods: Iterable[NodePod], running: Collection[str]) -> tuple[Grant, ...]:
        """Returns the grants of orphaned pods. `running`: the UIDs of pods with running containers."""
        listed = {node_pod.pod.uid: node_pod for node_pod in node_pods}
        self._grants |= {uid: node_pod.grant for uid, node_pod in listed.items() if node_pod.grant is not None}
        self._grants = {uid: grant for uid, grant in self._grants.items() if uid in listed or uid in running}
        return self.unlisted(listed.values())
