"""From a pod to its allocation, as the ledger records it. Only the audit has code of its own for this."""

from gputile.dialects.kube_objects import Pod
from gputile.dialects.parsing import host_needs
from gputile.model.allocations import Allocation
from gputile.model.grants import Grant
from gputile.model.requests import PodRequest
from gputile.model.units import unix_seconds


def allocation_of(pod: Pod, request: PodRequest | None, grant: Grant | None, node: str = "") -> Allocation:
    """What the pod holds: its grant, and the CPU and memory that kube-scheduler counts for it.

    Without `request` CPU and memory are read from the pod. `node` is needed where the grant does not decide the node.
    """
    cpu, memory = host_needs(pod) if request is None else (request.cpu, request.memory)
    return Allocation(
        pod=pod.uid,
        node=node or (grant.node if grant is not None else pod.node_name),
        name=pod.key,
        grant=grant,
        cpu=cpu,
        memory=memory,
        priority=pod.priority,
        started=unix_seconds(pod.metadata.creation_timestamp if pod.metadata else None) or 0.0,
    )


def allocation_of_deleted_pod(grant: Grant) -> Allocation:
    """What containers hold whose pod is deleted: only their grant is known."""
    return Allocation(pod=grant.pod, node=grant.node, name=f"(deleted)/{grant.pod}", grant=grant)
