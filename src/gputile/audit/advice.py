"""What to do about a finding, and findings as lines for the terminal.

The advice is never to delete a pod because its record is unreadable: the pod runs, and its work may exist nowhere else.
"""

from collections.abc import Iterable, Iterator, Sequence

from gputile.audit.report import GpuHolder, Notice

DELETED = "deleted"  # in place of the phase of an orphaned pod
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
        return "a pod on it is being deleted; run the audit again when it is gone"
    if any(holder.phase == DELETED for holder in held):
        return "containers of a deleted pod still run on it; stop them on the node, or wait until they end"
    others = sorted({holder.by for holder in held} - {"gputile"})
    if others:
        names = ", ".join(others)
        return f"records of {names} are among them; if that system overcommits on purpose, this is by how much"
    namespace, _, name = held[-1].pod.partition("/")
    return (
        "the leader evicts the newer pod of a new double allocation (Event GPUDoubleAllocated); if this one persists: "
        f"kubectl -n {namespace} delete pod {name}"
    )


def finding_lines(notices: Iterable[Notice]) -> Iterator[str]:
    """Each notice as lines for the terminal."""
    for notice in notices:
        yield notice.what
        for number, holder in enumerate(notice.holders, start=1):
            since = holder.bound or holder.granted or "(unknown)"
            last = ", newest" if number == len(notice.holders) > 1 else ""
            state = f"{holder.phase or 'no phase'}{', being deleted' if holder.going else ''}"
            amounts = f"{holder.memory:>8} MiB {holder.cores:>4} %"
            yield f"  {amounts}  {holder.pod}, since {since}, {state}, by {holder.by}{last}"
        if notice.todo:
            yield f"  what to do: {notice.todo}"
