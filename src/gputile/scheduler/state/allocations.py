"""What a pod would hold with a grant, the seed of its random choices, and how long one call may search for them."""

from zlib import crc32

from gputile.dialects.kube_objects import Pod
from gputile.model.allocations import Allocation
from gputile.model.grants import Grant
from gputile.model.requests import PodRequest
from gputile.scheduler.state.cluster_state import created

STEPS, SECONDS = 4000, 0.01  # of searching for one call: kube-scheduler waits, and so does everybody else


def allocation_of(pod: Pod, asked: PodRequest, grant: Grant) -> Allocation:
    """What the pod would hold."""
    return Allocation(
        pod=pod.uid,
        node=grant.node,
        name=pod.key,
        grant=grant,
        cpu=asked.cpu,
        memory=asked.memory,
        priority=pod.priority,
        started=created(pod),
    )


def seed_of(uid: str) -> int:
    """Dice of a pod's own, so that a replay gives the same answer."""
    return crc32(uid.encode("utf-8", "replace"))
