"""What a container sees of its cards, as the `containerEdits` of a CDI spec.

There is one function per isolation, from the container's grant to the edits; the files that it needs come from an
`IsolationHost`. An isolation that the node cannot serve raises `IsolationUnavailable`: no container starts with a
weaker isolation than requested.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import msgspec

from gputile.model.errors import GputileError
from gputile.model.grants import ContainerGrant
from gputile.model.units import ALL, MiB

Json: TypeAlias = dict[str, Any]

COMMON_NODES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
"""Device nodes that all cards share."""

STRENGTH = {"none": 0, "devices": 1, "cdi": 1, "preload": 2, "mps": 3}
"""What limits a container to its GPU: nothing; the visible devices; a library that it could unset; the driver's MPS
server."""


class IsolationUnavailable(GputileError):
    """This node cannot serve the isolation; the message says why."""


class IsolationHost(Protocol):
    """The files of the node that isolations need."""

    def device_node(self, uuid: str) -> str:
        """The path of the card's device node, "" when there is none."""

    def common_device_nodes(self) -> list[str]:
        """The paths of those of `COMMON_NODES` that exist."""

    def driver(self) -> str:
        """The folder of the driver's libraries, "" when there is none."""

    def nvidia_edits(self, uuid: str) -> list[Json]:
        """The edits that NVIDIA's own CDI specs have for the card; empty when it is in none of them."""

    def mps(self) -> str:
        """The pipe folder of MPS, "" when no daemon runs."""

    def preload(self) -> str:
        """The path of the limiting library, "" when it is not installed."""


def choose(default: str, requested: str, *, any_allowed: bool) -> str:
    """The isolation of a pod that requests `requested` ("": none) on a node with the isolation `default`. A pod may
    always choose a stronger one; a weaker or an equal one only where the node allows any."""
    if requested in ("", default):
        return default
    if requested not in STRENGTH:
        raise IsolationUnavailable(f"unknown isolation {requested[:60]!r}; use one of {', '.join(STRENGTH)}")
    if any_allowed or STRENGTH[requested] > STRENGTH[default]:
        return requested
    stronger = [name for name, strength in STRENGTH.items() if strength > STRENGTH[default]]
    instead = f"choose {' or '.join(f'`{name}`' for name in stronger)}, or " if stronger else ""
    raise IsolationUnavailable(
        f"isolation `{requested}` is not stronger than `{default}`, the isolation of this node; {instead}remove the "
        f"annotation (an administrator can allow any with `pods_choose_isolation: true`)"
    )


def edits(isolation: str, grant: ContainerGrant, env: Mapping[str, str], host: IsolationHost) -> Json:
    """CDI containerEdits: the environment of the dialect, and the edits of the isolation."""
    make = MAKERS.get(isolation)
    if make is None:
        raise IsolationUnavailable(f"unknown isolation {isolation[:60]!r}; use one of {', '.join(MAKERS)}")
    return _merged([{"env": [f"{key}={value}" for key, value in env.items()]}, *make(grant, host)])


def _none(grant: ContainerGrant, host: IsolationHost) -> list[Json]:
    return []


def _devices(grant: ContainerGrant, host: IsolationHost) -> list[Json]:
    nodes = []
    for uuid in _cards(grant):
        path = host.device_node(uuid)
        if not path:
            raise IsolationUnavailable(f"isolation `devices`: this node has no device node of GPU {uuid}")
        nodes.append(path)
    added: Json = {"deviceNodes": [{"path": path} for path in (*nodes, *host.common_device_nodes())]}
    driver = host.driver()
    if driver:
        added |= {"mounts": [_mount(driver)], "env": [f"LD_LIBRARY_PATH={driver}/lib64:{driver}/lib"]}
    return [added]


def _cdi(grant: ContainerGrant, host: IsolationHost) -> list[Json]:
    all_edits: list[Json] = []
    for uuid in _cards(grant):
        card_edits = host.nvidia_edits(uuid)
        if not card_edits:
            raise IsolationUnavailable(
                f"isolation `cdi`: no CDI spec of this node has the GPU {uuid}; create one with "
                f"`nvidia-ctk cdi generate`"
            )
        all_edits += [edit for edit in card_edits if edit not in all_edits]
    return all_edits


def _mps(grant: ContainerGrant, host: IsolationHost) -> list[Json]:
    pipes = host.mps()
    if not pipes:
        raise IsolationUnavailable("isolation `mps`: this node has no control pipe of an MPS daemon; start the daemon")
    limits = ",".join(f"{position}={memory}M" for position, memory in _memories(grant))
    env = [f"CUDA_MPS_PIPE_DIRECTORY={pipes}", *([f"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT={limits}"] if limits else [])]
    cores = min((tile.cores for tile in grant.tiles if tile.cores), default=ALL)
    return [{"env": [*env, f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={cores}"], "mounts": [_mount(pipes, read_only=False)]}]


def _preload(grant: ContainerGrant, host: IsolationHost) -> list[Json]:
    library = host.preload()
    if not library:
        raise IsolationUnavailable(
            "isolation `preload`: this node does not have the limiting library; install it, or set `folders.preload`"
        )
    env = [f"CUDA_DEVICE_MEMORY_LIMIT_{position}={memory}m" for position, memory in _memories(grant)]
    cores = min((tile.cores for tile in grant.tiles if tile.cores), default=0)
    env += [f"CUDA_DEVICE_SM_LIMIT={cores}"] if cores else []
    return [{"env": [*env, f"LD_PRELOAD={library}"], "mounts": [_mount(library)]}]


MAKERS: dict[str, Callable[[ContainerGrant, IsolationHost], list[Json]]] = {
    "none": _none,
    "devices": _devices,
    "cdi": _cdi,
    "mps": _mps,
    "preload": _preload,
}


def _cards(grant: ContainerGrant) -> list[str]:
    """UUIDs, each once, in the order of the tiles."""
    return list(dict.fromkeys(tile.uuid for tile in grant.tiles))


def _memories(grant: ContainerGrant) -> list[tuple[int, MiB]]:
    """Memory by the card's ordinal in the container. CUDA counts cards in bus order; the tiles of a card add up."""
    by_index: dict[int, MiB] = {}
    for tile in grant.tiles:
        by_index[tile.index] = by_index.get(tile.index, 0) + tile.memory
    return [(position, by_index[index]) for position, index in enumerate(sorted(by_index)) if by_index[index]]


def _mount(path: str, *, read_only: bool = True) -> Json:
    options = ["ro" if read_only else "rw", "nosuid", "nodev", "bind"]
    return {"hostPath": path, "containerPath": path, "options": options}


def _merged(parts: list[Json]) -> Json:
    """CDI edits are lists; duplicates are dropped, and the last value of an environment variable wins."""
    merged: Json = {}
    for part in parts:
        for key, items in part.items():
            if isinstance(items, list):
                merged[key] = [*merged.get(key, []), *(item for item in items if item not in merged.get(key, []))]
            else:
                merged[key] = items
    if "env" in merged:
        merged["env"] = list({line.partition("=")[0]: line for line in merged["env"]}.values())
    return merged


# ---- the spec -------------------------------------------------------------------------------------------------------

KIND = "gputile.io/slot"
CDI_VERSION = "0.5.0"  # the oldest version with all fields that gputile writes
SINCE = {"netDevices": "1.1.0", "additionalGids": "0.7.0", "intelRdt": "0.7.0"}
"""Fields that NVIDIA's specs may have besides, and the CDI version of each; newest first."""


def spec(slot: str, container_edits: Json) -> bytes:
    """A CDI spec with this one device. A runtime ignores a spec with fields that its `cdiVersion` does not have."""
    device = {"name": slot, "containerEdits": container_edits}
    version = next((since for key, since in SINCE.items() if key in container_edits), CDI_VERSION)
    return msgspec.json.encode({"cdiVersion": version, "kind": KIND, "devices": [device]})
