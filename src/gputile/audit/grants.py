"""Our own grant against its pod and node: what it names that is not there, and where it differs from the request."""

from collections.abc import Iterator

from gputile.audit.fields import shown
from gputile.audit.objects import AuditedPod
from gputile.audit.records.gputile import GrantRecord
from gputile.audit.requests import AuditedRequest
from gputile.audit.sizes import NodeGpus

NAMED = 3  # so many of a kind are named in a sentence


def strange_containers(pod: AuditedPod, grant: GrantRecord) -> list[str]:
    """Sentences about containers that the pod does not have, or that run at another time than the grant says."""
    roles = {container.name: container.role for container in pod.containers}
    strange = [one for one in grant.containers if roles.get(one.name) != one.role]
    return [
        f"its grant names a container `{shown(one.name)}` ({one.role}), which the pod does not have" for one in strange
    ]


def strange_gpus(grant: GrantRecord, gpus: NodeGpus) -> list[str]:
    found = {tile.uuid for container in grant.containers for tile in container.tiles if tile.uuid not in gpus.by_uuid}
    named = ", ".join(shown(uuid) for uuid in sorted(found)[:NAMED])
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return [f"its grant names GPUs that node {gpus.node} does not have: {named}{more}"] if found else []


def differences(pod: AuditedPod, request: AuditedRequest | None, grant: GrantRecord) -> Iterator[str]:
    """Where the grant is not what the pod asks for."""
    given = {one.name: [(tile.memory, tile.cores) for tile in one.tiles] for one in grant.containers}
    for ask in request.asks if request is not None and request.is_readable else ():
        name = pod.containers[ask.container].name
        tiles = given.get(name, [])
        if len(tiles) != ask.gpus:
            yield f"container `{shown(name)}` requests {ask.gpus} GPUs and was granted {len(tiles)}"
        elif ask.memory is not None and (other := next((one for one in tiles if one != (ask.memory, ask.cores)), None)):
            granted = f"{other[0]} MiB, {other[1]} %"
            yield f"container `{shown(name)}` requests {ask.memory} MiB, {ask.cores} %, and was granted {granted}"
