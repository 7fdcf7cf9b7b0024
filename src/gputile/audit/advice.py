"""What to do about a finding, and findings as lines for a person.

Never to delete a pod because its record cannot be read: it runs, and may be all that somebody has.
"""

from collections.abc import Iterable, Iterator, Sequence

from gputile.audit.report import GpuHolder, Notice

DELETED = "deleted"  # the phase, so to speak, of a pod that is gone
LOOK_AT_RECORD = (
    "compare the annotations of the pod with what it uses (`nvidia-smi` on the node), and see which program wrote them "
    "(`kubectl get pod -o yaml --show-managed-fields`)"
)
LOOK_AT_REQUEST = (
    "see in the pod's events and annotations how it was scheduled, and on the node (`nvidia-smi`) which GPUs it uses"
)


def advice(held: Sequence[GpuHolder]) -> str:
    """What to do about a GPU that is double-allocated."""
    if any(holder.going for holder in held):
        return "a pod on it is being deleted; look again in a moment"
    if any(holder.phase == DELETED for holder in held):
        return "containers of a deleted pod still run on it; end them on the node, or wait until they have ended"
    others = sorted({holder.by for holder in held} - {"gputile"})
    if others:
        names = ", ".join(others)
        return f"the records of {names} are among them; if that system overcommits on purpose, this is by how much"
    namespace, _, name = held[-1].pod.partition("/")
    return (
        "the leader evicts the newer pod when this is fresh (Event GPUDoubleAllocated); if it stays: "
        f"kubectl -n {namespace} delete pod {name}"
    )


def finding_lines(notices: Iterable[Notice]) -> Iterator[str]:
    """Each notice as lines for a person."""
    for notice in notices:
        yield notice.what
        for number, holder in enumerate(notice.holders, start=1):
            since = holder.bound or holder.granted or "(nobody says since when)"
            last = ", came last" if number == len(notice.holders) > 1 else ""
            state = f"{holder.phase or 'no phase'}{', being deleted' if holder.going else ''}"
            amounts = f"{holder.memory:>8} MiB {holder.cores:>4} %"
            yield f"  {amounts}  {holder.pod}, since {since}, {state}, by {holder.by}{last}"
        if notice.todo:
            yield f"  what to do: {notice.todo}"
