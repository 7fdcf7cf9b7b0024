"""The scheduler's own book, built here from one look at a cluster: so that an answer does not need our server.

Room:  the production core (mirror, ledger, fleet) fed with lists instead of a watch. What only the running scheduler
       knows is missing: pencils of the last seconds, and how long it has seen an agent silent. An agent is taken to be
       silent here if its Lease says so by this machine's clock.
Door:  `build_ledger(seen, settings, leases, quotas, now)`.
"""

from collections.abc import Iterable

import msgspec

from gputile.cli.lease_age import seconds_expired
from gputile.cli.source import ClusterSnapshot
from gputile.dialects.gputile import NAME, read_nomination
from gputile.dialects.kube_objects import Pod
from gputile.dialects.parsing import host_needs
from gputile.dialects.settings import DialectSettings
from gputile.kube.api import AgentLease
from gputile.ledger.events import NodeSeen, Nominated, QuotasSet
from gputile.ledger.ledger import Ledger
from gputile.model.allocations import Allocation
from gputile.model.quotas import Quotas
from gputile.model.refusals import NodeReason
from gputile.scheduler.state.cluster_state import ClusterState


def build_ledger(
    seen: ClusterSnapshot, settings: DialectSettings, leases: Iterable[AgentLease], quotas: Quotas, now: float
) -> ClusterState:
    """`now` in seconds since 1970."""
    cluster_state = ClusterState(Ledger(), settings)
    cluster_state.nodes_listed(seen.nodes)
    cluster_state.pods_listed(seen.pods)
    if quotas:
        cluster_state.ledger.handle(QuotasSet(quotas))
    for lease in leases:
        if seconds_expired(lease, now) is not None:
            _put_out_of_use(cluster_state.ledger, lease.name)
    for pod in seen.pods:
        if not pod.node_name and not pod.is_terminal:
            _keep_nomination(cluster_state.ledger, pod, now)
    cluster_state.ledger.fleet.learn_all(cluster_state.take_arrivals())
    cluster_state.ledger.fleet.refresh()
    return cluster_state


def _put_out_of_use(ledger: Ledger, name: str) -> None:
    node = ledger.fleet.node(name)
    if node is not None and node.agent == NAME and not node.fault:
        ledger.handle(NodeSeen(msgspec.structs.replace(node, fault=NodeReason.AGENT_SILENT)))


def _keep_nomination(ledger: Ledger, pod: Pod, now: float) -> None:
    nomination = read_nomination(pod)
    if nomination is None or nomination.until < now * 1e9:
        return
    cpu, memory = host_needs(pod)
    allocation = Allocation(
        pod=pod.uid,
        node=nomination.grant.node,
        name=pod.key,
        grant=nomination.grant,
        cpu=cpu,
        memory=memory,
        priority=pod.priority,
    )
    ledger.handle(Nominated(allocation, nomination.until / 1e9))
