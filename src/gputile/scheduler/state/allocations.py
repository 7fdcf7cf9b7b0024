"""The allocation of a pod with a grant, the seed of its random choices, and the search budget of one call."""

from zlib import crc32

from gputile.dialects.kube_objects import Pod
from gputile.model.allocations import Allocation
from gputile.model.grants import Grant
from gputile.model.requests import PodRequest
from gputile.scheduler.state.cluster_state import created

STEPS, SECONDS = 4000, 0.01  # search budget of one call: kube-scheduler and all other requests wait for it


def allocation_of(pod: Pod, request: PodRequest, grant: Grant) -> Allocation:
    """The allocation of the pod with this grant."""
    return Allocation(
        pod=pod.uid,
        node=grant.node,
        name=pod.key,
        grant=grant,
        cpu=request.cpu,
        memory=request.memory,
        priority=pod.priority,
        started=created(pod),
    )


def seed_of(uid: str) -> int:
    """A seed per pod, so that a replay makes the same random choices."""
    return crc32(uid.encode("utf-8", "replace"))
