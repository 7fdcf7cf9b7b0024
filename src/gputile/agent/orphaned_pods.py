"""Pods that are gone from the API server while their containers still run, with what they hold.

Room:  no I/O. The scheduler keeps their tiles for as long as our node names them (docs/decisions/0014). A name is
       dropped only when its containers are gone.
Door:  `OrphanContainers.compare`, after each look at what runs; `restore` what an agent before us had named.
"""

from collections.abc import Collection, Iterable

from gputile.agent.node_pods import NodePod
from gputile.model.grants import Grant


class OrphanContainers:
    """See the module's text."""

    def __init__(self) -> None:
        self._granted: dict[str, Grant] = {}  # of all pods seen here whose containers may run

    def restore(self, grants: Iterable[Grant]) -> None:
        for grant in grants:
            self._granted.setdefault(grant.pod, grant)

    def kept(self, node_pods: Iterable[NodePod]) -> tuple[Grant, ...]:
        """Those that nobody shows us any more, when nobody says what runs: none of them is let go."""
        here = {one.pod.uid for one in node_pods}
        return tuple(grant for uid, grant in sorted(self._granted.items()) if uid not in here)

    def compare(self, node_pods: Iterable[NodePod], running: Collection[str]) -> tuple[Grant, ...]:
        """`running`: the UIDs of pods with containers that run. Those of them that nobody shows us any more linger."""
        here = {one.pod.uid: one for one in node_pods}
        self._granted |= {uid: one.grant for uid, one in here.items() if one.grant is not None}
        self._granted = {uid: grant for uid, grant in self._granted.items() if uid in here or uid in running}
        return self.kept(here.values())
