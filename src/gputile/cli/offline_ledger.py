"""The scheduler's own book, built here from one look at a cluster: so that an answer does not need our server.

Room:  the production core (mirror, ledger, fleet) fed with lists instead of a watch. What only the running scheduler
       knows is missing: pencils of the last seconds, and how long it has seen an agent silent. An agent is taken to be
       silent here if its Lease says so by this machine's clock.
Door:  `booked(seen, settings, leases, quotas, now)`.
"""

from collections.abc import Iterable

import msgspec

from gputile.cli.lease_age import silent_for
from gputile.cli.source import Seen
from gputile.dialects.gputile import NAME, read_promise
from gputile.dialects.kube_objects import Pod, host_needs
from gputile.dialects.settings import DialectSettings
from gputile.kube.api import Heartbeat
from gputile.ledger.events import NodeSeen, Promised, QuotasSet
from gputile.ledger.ledger import Ledger
from gputile.model.allocations import Holding
from gputile.model.quotas import Quotas
from gputile.model.refusals import NodeCode
from gputile.scheduler.state.cluster_state import Mirror


def booked(seen: Seen, settings: DialectSettings, leases: Iterable[Heartbeat], quotas: Quotas, now: float) -> Mirror:
    """`now` in seconds since 1970."""
    mirror = Mirror(Ledger(), settings)
    mirror.nodes_listed(seen.nodes)
    mirror.pods_listed(seen.pods)
    if quotas:
        mirror.ledger.handle(QuotasSet(quotas))
    for lease in leases:
        if silent_for(lease, now) is not None:
            _put_out_of_use(mirror.ledger, lease.name)
    for pod in seen.pods:
        if not pod.node_name and not pod.is_over:
            _keep_promise(mirror.ledger, pod, now)
    mirror.ledger.fleet.learn_all(mirror.take_arrivals())
    mirror.ledger.fleet.refresh()
    return mirror


def _put_out_of_use(ledger: Ledger, name: str) -> None:
    node = ledger.fleet.node(name)
    if node is not None and node.agent == NAME and not node.fault:
        ledger.handle(NodeSeen(msgspec.structs.replace(node, fault=NodeCode.AGENT_SILENT)))


def _keep_promise(ledger: Ledger, pod: Pod, now: float) -> None:
    promise = read_promise(pod)
    if promise is None or promise.until < now * 1e9:
        return
    cpu, memory = host_needs(pod)
    holding = Holding(
        pod=pod.uid,
        node=promise.grant.node,
        name=pod.key,
        grant=promise.grant,
        cpu=cpu,
        memory=memory,
        priority=pod.priority,
    )
    ledger.handle(Promised(holding, promise.until / 1e9))
