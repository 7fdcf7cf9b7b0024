"""What a bound pod holds, and whose word that is: our grant, else the record of the family whose agent runs the node,
else a record of another family, else the number of GPUs that it asks for.

Under another system's agent the larger of record and request counts. Under our own agent a pod runs only by its grant,
or because it started before our agent first served the node; then its old record counts, or the number of its GPUs.
"""

import msgspec

from gputile.audit.fields import shown
from gputile.audit.holdings import NONE, Holding, held
from gputile.audit.objects import AuditedPod, UnreadableObject
from gputile.audit.records import gpushare, gputile, hami, nano, vcuda, vgpu_manager
from gputile.audit.records.gputile import GRANT, GrantRecord
from gputile.audit.records.record import NO_CONTAINER, InvalidRecord, Record, RecordedTile, believed
from gputile.audit.requests import AuditedRequest, gpu_like, read_request
from gputile.audit.sizes import NodeGpus
from gputile.audit.times import seconds

OURS = "gputile"
FAMILIES = (hami, vgpu_manager, vcuda, gpushare, nano)


class AuditedAllocation(msgspec.Struct, frozen=True, kw_only=True):
    """One pod on one node, as far as its annotations and requests tell."""

    holding: Holding
    by: str = ""  # whose record says so; "" when none does
    at: int = 0  # when it was granted, in nanoseconds since 1970; 0 when the record does not say
    request: AuditedRequest | None = None
    grant: GrantRecord | None = None  # ours, if it is this pod's
    copied: str = ""  # why our grant is not this pod's
    broken: str = ""  # why our grant cannot be read
    disbeliefs: tuple[InvalidRecord, ...] = ()


def allocate(pod: AuditedPod, gpus: NodeGpus) -> AuditedAllocation:
    request = requested(pod, gpus)
    grant, copied, broken = _grant(pod, gpus)
    disbeliefs: list[InvalidRecord] = []
    record = _of_grant(pod, grant, gpus) if grant is not None else _of_family(pod, gpus, disbeliefs)
    larger = gpus.agent != OURS or (record is None and _started_before(pod, gpus))
    if record is None and not larger:
        holding: Holding = {}
    else:
        holding = held(pod, gpus, request, record, larger=larger)
    return AuditedAllocation(
        holding={gpu: amounts for gpu, amounts in holding.items() if amounts != NONE},
        by=record.family if record else "",
        at=grant.at if grant else 0,
        request=request,
        grant=grant,
        copied=copied,
        broken=broken,
        disbeliefs=tuple(disbeliefs),
    )


def has_record(pod: AuditedPod) -> bool:
    return GRANT in pod.annotations or any(family.has_record(pod) for family in FAMILIES)


def requested(pod: AuditedPod, gpus: NodeGpus) -> AuditedRequest | None:
    return read_request(pod, gpus, gpus.domains.union(vgpu_manager.domains(pod)))


def gpu_resources(pod: AuditedPod, gpus: NodeGpus) -> list[str]:
    """The resources of the pod that have to do with GPUs, known or not."""
    return gpu_like(pod, gpus.domains.union(vgpu_manager.domains(pod)))


# ---- whose word -----------------------------------------------------------------------------------------------------


def _grant(pod: AuditedPod, gpus: NodeGpus) -> tuple[GrantRecord | None, str, str]:
    """Our grant; else why it is not this pod's, or why it cannot be read."""
    said = pod.annotations.get(GRANT)
    if said is None:
        return None, "", ""
    try:
        found = gputile.read_grant(said, gpus)
    except UnreadableObject as wrong:
        return None, "", str(wrong)
    if (found.pod, found.node) != (pod.uid, pod.node):
        whose = f"pod {shown(found.pod)} on node {shown(found.node)}"
        return None, f"annotation `{GRANT}` belongs to {whose}, not to this pod", ""
    return found, "", ""


def _of_grant(pod: AuditedPod, grant: GrantRecord, gpus: NodeGpus) -> Record:
    """Of the GPUs that the node has. A container that the pod lacks counts as one that runs all the time."""
    places = {container.name: at for at, container in enumerate(pod.containers)}
    tiles = tuple(
        RecordedTile(places.get(container.name, NO_CONTAINER), tile.uuid, tile.memory, tile.cores)
        for container in grant.containers
        for tile in container.tiles
        if tile.uuid in gpus.by_uuid
    )
    return Record(family=OURS, tiles=tiles, takes_slots=grant.takes_slots)


def _of_family(pod: AuditedPod, gpus: NodeGpus, disbeliefs: list[InvalidRecord]) -> Record | None:
    """The node's own family first: its agent goes by that record."""
    if not _counts_records(pod, gpus):
        return None
    for family in sorted(FAMILIES, key=lambda one: gpus.agent != one.FAMILY):
        found = family.read(pod, gpus)
        if isinstance(found, Record):
            found = believed(found, pod, gpus)
        if isinstance(found, Record):
            return found
        if found is not None:
            disbeliefs.append(found)
    return None


def _counts_records(pod: AuditedPod, gpus: NodeGpus) -> bool:
    """Under our own agent: only of pods that were there before it. Where nobody knows since when, all of them."""
    return gpus.agent != OURS or gpus.since is None or _started_before(pod, gpus)


def _started_before(pod: AuditedPod, gpus: NodeGpus) -> bool:
    """Whether another system's agent gave it its GPUs, on a node that ours serves now."""
    return gpus.since is not None and 0 < seconds(pod.started) < gpus.since
