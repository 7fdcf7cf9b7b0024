"""What a bound pod holds, and by which record: our grant, else the record of the family whose agent serves the node,
else a record of another family, else the number of GPUs that the pod requests.

Under another system's agent the larger of record and request counts. Under our own agent a pod runs only with a grant,
or because it started before our agent first served the node; then its old record counts, or the number of its GPUs.
"""

import msgspec

from gputile.audit.fields import shown
from gputile.audit.holdings import NONE, Holding, held
from gputile.audit.objects import AuditedPod, UnreadableObject
from gputile.audit.records import gputile, readers, vgpu_manager
from gputile.audit.records.gputile import GRANT, GrantRecord
from gputile.audit.records.record import NO_CONTAINER, InvalidRecord, Record, RecordedTile, validated
from gputile.audit.requests import AuditedRequest, gpu_like, read_request
from gputile.audit.sizes import NodeGpus
from gputile.audit.times import seconds

OURS = "gputile"


class AuditedAllocation(msgspec.Struct, frozen=True, kw_only=True):
    """What one pod holds on one node, as far as its annotations and requests show."""

    holding: Holding
    by: str = ""  # the family of the record that counts; "" when none does
    at: int = 0  # when it was granted, in nanoseconds since 1970; 0 when the record does not say
    request: AuditedRequest | None = None
    grant: GrantRecord | None = None  # ours, if it is this pod's
    copied: str = ""  # why our grant is not this pod's
    broken: str = ""  # why our grant cannot be read
    invalid_records: tuple[InvalidRecord, ...] = ()


def allocate(pod: AuditedPod, gpus: NodeGpus) -> AuditedAllocation:
    request = requested(pod, gpus)
    grant, copied, broken = _grant(pod, gpus)
    invalid_records: list[InvalidRecord] = []
    record = _of_grant(pod, grant, gpus) if grant is not None else _of_family(pod, gpus, invalid_records)
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
        invalid_records=tuple(invalid_records),
    )


def has_record(pod: AuditedPod) -> bool:
    return GRANT in pod.annotations or any(reader.has_record(pod) for reader in readers.READERS)


def requested(pod: AuditedPod, gpus: NodeGpus) -> AuditedRequest | None:
    return read_request(pod, gpus, gpus.domains.union(vgpu_manager.domains(pod)))


def gpu_resources(pod: AuditedPod, gpus: NodeGpus) -> list[str]:
    """The GPU resources that the pod requests, known to gputile or not."""
    return gpu_like(pod, gpus.domains.union(vgpu_manager.domains(pod)))


# ---- which record counts --------------------------------------------------------------------------------------------


def _grant(pod: AuditedPod, gpus: NodeGpus) -> tuple[GrantRecord | None, str, str]:
    """Our grant; else why it is not this pod's, or why it cannot be read."""
    value = pod.annotations.get(GRANT)
    if value is None:
        return None, "", ""
    try:
        grant = gputile.read_grant(value, gpus)
    except UnreadableObject as error:
        return None, "", str(error)
    if (grant.pod, grant.node) != (pod.uid, pod.node):
        owner = f"pod {shown(grant.pod)} on node {shown(grant.node)}"
        return None, f"annotation `{GRANT}` belongs to {owner}, not to this pod", ""
    return grant, "", ""


def _of_grant(pod: AuditedPod, grant: GrantRecord, gpus: NodeGpus) -> Record:
    """The grant as a record of the node's GPUs. A container that the pod lacks counts as one that runs all the time."""
    places = {container.name: at for at, container in enumerate(pod.containers)}
    tiles = tuple(
        RecordedTile(places.get(container.name, NO_CONTAINER), tile.uuid, tile.memory, tile.cores)
        for container in grant.containers
        for tile in container.tiles
        if tile.uuid in gpus.by_uuid
    )
    return Record(family=OURS, tiles=tiles, takes_slots=readers.takes_slots(grant.dialect))


def _of_family(pod: AuditedPod, gpus: NodeGpus, invalid_records: list[InvalidRecord]) -> Record | None:
    """The family of the node's agent first: that agent allocates by its own record."""
    if not _counts_records(pod, gpus):
        return None
    for reader in sorted(readers.READERS, key=lambda reader: gpus.agent != reader.FAMILY):
        record = reader.read(pod, gpus)
        if isinstance(record, Record):
            record = validated(record, pod, gpus)
        if isinstance(record, Record):
            return record
        if record is not None:
            invalid_records.append(record)
    return None


def _counts_records(pod: AuditedPod, gpus: NodeGpus) -> bool:
    """Under our own agent only records of pods that are older than it count; where its age is unknown, all of them."""
    return gpus.agent != OURS or gpus.since is None or _started_before(pod, gpus)


def _started_before(pod: AuditedPod, gpus: NodeGpus) -> bool:
    """Whether another system's agent allocated its GPUs, on a node that our agent serves now."""
    return gpus.since is not None and 0 < seconds(pod.started) < gpus.since
