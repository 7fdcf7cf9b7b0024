"""The scheduler's ledger, built offline from one snapshot of a cluster, so that a command needs no running scheduler.

The production core (cluster state, ledger, fleet) is fed with lists instead of a watch. What only the running scheduler
knows is missing: reservations of the last seconds, and how long it has seen an agent's Lease without renewal. Here an
agent is stale if its Lease has expired by this machine's clock.
"""

from collections.abc import Iterable

import msgspec

from gputile.cli.lease_age import seconds_expired
from gputile.cli.source import ClusterSnapshot
from gputile.dialects.allocations import allocation_of
from gputile.dialects.gputile import NAME
from gputile.dialects.kube_objects import Pod
from gputile.dialects.registry import read_nomination
from gputile.dialects.settings import DialectSettings
from gputile.kube.api import AgentLease
from gputile.ledger.events import NodeSeen, Nominated, QuotasSet
from gputile.ledger.ledger import Ledger
from gputile.model.refusals import NodeReason
from gputile.quota.limits import Quotas
from gputile.scheduler.state.cluster_state import ClusterState


def build_ledger(
    snapshot: ClusterSnapshot, settings: DialectSettings, leases: Iterable[AgentLease], quotas: Quotas, now: float
) -> ClusterState:
    """The cluster state as the leader would have it; `now` in seconds since 1970."""
    cluster_state = ClusterState(Ledger(), settings)
    cluster_state.nodes_listed(snapshot.nodes)
    cluster_state.pods_listed(snapshot.pods)
    if quotas:
        cluster_state.ledger.handle(QuotasSet(quotas))
    for lease in leases:
        if seconds_expired(lease, now) is not None:
            _put_out_of_use(cluster_state.ledger, lease.name)
    for pod in snapshot.pods:
        if not pod.node_name and not pod.is_terminal:
            _keep_nomination(cluster_state.ledger, pod, now)
    cluster_state.ledger.fleet.scorer.learn_all(cluster_state.take_arrivals())
    cluster_state.ledger.fleet.scorer.refresh()
    return cluster_state


def _put_out_of_use(ledger: Ledger, name: str) -> None:
    node = ledger.fleet.node(name)
    if node is not None and node.agent == NAME and not node.fault:
        ledger.handle(NodeSeen(msgspec.structs.replace(node, fault=NodeReason.AGENT_SILENT)))


def _keep_nomination(ledger: Ledger, pod: Pod, now: float) -> None:
    nomination = read_nomination(pod)
    if nomination is None or nomination.until < now * 1e9:
        return
    ledger.handle(Nominated(allocation_of(pod, None, nomination.grant), nomination.until / 1e9))
