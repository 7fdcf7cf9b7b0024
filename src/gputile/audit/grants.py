"""Our own grant compared with its pod and node: names that do not exist there, and differences from the request."""

from collections.abc import Iterator

from gputile.audit.fields import shown
from gputile.audit.objects import AuditedPod
from gputile.audit.records.gputile import GrantRecord
from gputile.audit.requests import AuditedRequest
from gputile.audit.sizes import NodeGpus

NAMED = 3  # UUIDs that a sentence lists


def unknown_containers(pod: AuditedPod, grant: GrantRecord) -> list[str]:
    """Sentences about containers that the pod does not have, or that run at another time than the grant says."""
    roles = {container.name: container.role for container in pod.containers}
    unknown = [container for container in grant.containers if roles.get(container.name) != container.role]
    return [
        f"its grant names a container `{shown(container.name)}` ({container.role}), which the pod does not have"
        for container in unknown
    ]


def unknown_gpus(grant: GrantRecord, gpus: NodeGpus) -> list[str]:
    unknown = {tile.uuid for container in grant.containers for tile in container.tiles if tile.uuid not in gpus.by_uuid}
    named = ", ".join(shown(uuid) for uuid in sorted(unknown)[:NAMED])
    more = f" and {len(unknown) - NAMED} more" if len(unknown) > NAMED else ""
    return [f"its grant names GPUs that node {gpus.node} does not have: {named}{more}"] if unknown else []


def differences(pod: AuditedPod, request: AuditedRequest | None, grant: GrantRecord) -> Iterator[str]:
    """Where the grant differs from the request of the pod."""
    granted_tiles = {
        container.name: [(tile.memory, tile.cores) for tile in container.tiles] for container in grant.containers
    }
    for ask in request.asks if request is not None and request.is_readable else ():
        name = pod.containers[ask.container].name
        tiles = granted_tiles.get(name, [])
        if len(tiles) != ask.gpus:
            yield f"container `{shown(name)}` requests {ask.gpus} GPUs and was granted {len(tiles)}"
        elif ask.memory is not None and (
            other := next((tile for tile in tiles if tile != (ask.memory, ask.cores)), None)
        ):
            granted = f"{other[0]} MiB, {other[1]} %"
            yield f"container `{shown(name)}` requests {ask.memory} MiB, {ask.cores} %, and was granted {granted}"
