"""What a container sees of its cards, as edits of a CDI spec.

Room:  one function per isolation, from the tiles to the edits; the files that they need are looked at by whoever calls.
       An isolation that the node cannot serve raises `IsolationUnavailable`: no container starts with less than was
       asked for.
Door:  `chosen(usual, wanted)` for the pod's isolation, then `edits(isolation, held, env, host)`.
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
"""What keeps a container to its GPU: nothing; what it sees; a library that it could unset; a server of the driver's."""


class IsolationUnavailable(GputileError):
    """This node cannot give the container what it asks for; the sentence says why."""


class IsolationHost(Protocol):
    """What the node has."""

    def node_of(self, uuid: str) -> str:
        """The card's device node, "" when it has none."""

    def common_nodes(self) -> list[str]:
        """Those of `COMMON_NODES` that there are, with their folder."""

    def driver(self) -> str:
        """The folder of the driver's libraries, "" when there is none."""

    def nvidia_edits(self, uuid: str) -> list[Json]:
        """The edits that NVIDIA's own CDI specs have for the card; empty when they do not name it."""

    def mps(self) -> str:
        """The pipe folder of MPS, "" when no daemon is there."""

    def preload(self) -> str:
        """The library that limits, "" when it is not installed."""


def chosen(usual: str, wanted: str, *, free: bool) -> str:
    """The isolation of a pod that asks for `wanted` ("": it does not ask) where the node's is `usual`. A stronger one
    is always the pod's to choose; a weaker or an equal one only where the node leaves pods free to."""
    if wanted in ("", usual):
        return usual
    if wanted not in STRENGTH:
        raise IsolationUnavailable(f"isolation {wanted[:60]!r} is not known; write one of {', '.join(STRENGTH)}")
    if free or STRENGTH[wanted] > STRENGTH[usual]:
        return wanted
    stronger = [name for name, strength in STRENGTH.items() if strength > STRENGTH[usual]]
    instead = f"choose {' or '.join(f'`{name}`' for name in stronger)}, or " if stronger else ""
    raise IsolationUnavailable(
        f"isolation `{wanted}` is not stronger than `{usual}`, which is this node's; {instead}remove the annotation "
        f"(the node's administrator may set `pods_choose_isolation: true`)"
    )


def edits(isolation: str, held: ContainerGrant, env: Mapping[str, str], host: IsolationHost) -> Json:
    """CDI containerEdits: the dialect's environment, and what the isolation adds."""
    make = MAKERS.get(isolation)
    if make is None:
        raise IsolationUnavailable(f"isolation {isolation[:60]!r} is not known; write one of {', '.join(MAKERS)}")
    return _merged([{"env": [f"{key}={value}" for key, value in env.items()]}, *make(held, host)])


def _none(held: ContainerGrant, host: IsolationHost) -> list[Json]:
    return []


def _devices(held: ContainerGrant, host: IsolationHost) -> list[Json]:
    nodes = []
    for uuid in _cards(held):
        path = host.node_of(uuid)
        if not path:
            raise IsolationUnavailable(f"isolation `devices`: there is no device node of card {uuid} on this node")
        nodes.append(path)
    added: Json = {"deviceNodes": [{"path": path} for path in (*nodes, *host.common_nodes())]}
    driver = host.driver()
    if driver:
        added |= {"mounts": [_mount(driver)], "env": [f"LD_LIBRARY_PATH={driver}/lib64:{driver}/lib"]}
    return [added]


def _cdi(held: ContainerGrant, host: IsolationHost) -> list[Json]:
    found = []
    for uuid in _cards(held):
        mine = host.nvidia_edits(uuid)
        if not mine:
            raise IsolationUnavailable(
                f"isolation `cdi`: no CDI spec of this node names the card {uuid}; make one with "
                f"`nvidia-ctk cdi generate`"
            )
        found += [one for one in mine if one not in found]
    return found


def _mps(held: ContainerGrant, host: IsolationHost) -> list[Json]:
    pipes = host.mps()
    if not pipes:
        raise IsolationUnavailable(
            "isolation `mps`: there is no control pipe of an MPS daemon on this node; start the daemon"
        )
    limits = ",".join(f"{position}={memory}M" for position, memory in _memories(held))
    env = [f"CUDA_MPS_PIPE_DIRECTORY={pipes}", *([f"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT={limits}"] if limits else [])]
    cores = min((tile.cores for tile in held.tiles if tile.cores), default=ALL)
    return [{"env": [*env, f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={cores}"], "mounts": [_mount(pipes, read_only=False)]}]


def _preload(held: ContainerGrant, host: IsolationHost) -> list[Json]:
    library = host.preload()
    if not library:
        raise IsolationUnavailable("isolation `preload`: the limiting library is not installed on this node")
    env = [f"CUDA_DEVICE_MEMORY_LIMIT_{position}={memory}m" for position, memory in _memories(held)]
    cores = min((tile.cores for tile in held.tiles if tile.cores), default=0)
    env += [f"CUDA_DEVICE_SM_LIMIT={cores}"] if cores else []
    return [{"env": [*env, f"LD_PRELOAD={library}"], "mounts": [_mount(library)]}]


MAKERS: dict[str, Callable[[ContainerGrant, IsolationHost], list[Json]]] = {
    "none": _none,
    "devices": _devices,
    "cdi": _cdi,
    "mps": _mps,
    "preload": _preload,
}


def _cards(held: ContainerGrant) -> list[str]:
    """Each once, in the order of the tiles."""
    return list(dict.fromkeys(tile.uuid for tile in held.tiles))


def _memories(held: ContainerGrant) -> list[tuple[int, MiB]]:
    """By the card's position in the container, which is that on the bus: a card is there once, with all its tiles."""
    found: dict[int, MiB] = {}
    for tile in held.tiles:
        found[tile.index] = found.get(tile.index, 0) + tile.memory
    return [(position, found[index]) for position, index in enumerate(sorted(found)) if found[index]]


def _mount(path: str, *, read_only: bool = True) -> Json:
    options = ["ro" if read_only else "rw", "nosuid", "nodev", "bind"]
    return {"hostPath": path, "containerPath": path, "options": options}


def _merged(many: list[Json]) -> Json:
    """CDI edits are lists; what is said twice is kept once, and of an environment variable the last word."""
    found: Json = {}
    for one in many:
        for key, items in one.items():
            if isinstance(items, list):
                found[key] = [*found.get(key, []), *(item for item in items if item not in found.get(key, []))]
            else:
                found[key] = items
    if "env" in found:
        found["env"] = list({line.partition("=")[0]: line for line in found["env"]}.values())
    return found


# ---- the spec -------------------------------------------------------------------------------------------------------

KIND = "gputile.io/slot"
CDI_VERSION = "0.5.0"  # the oldest that has all we say ourselves
SINCE = {"netDevices": "1.1.0", "additionalGids": "0.7.0", "intelRdt": "0.7.0"}
"""What NVIDIA's specs may say besides, and in which version; newest first."""


def spec(slot: str, container_edits: Json) -> bytes:
    """A CDI spec with this one device. A runtime passes over one that says more than its version knows."""
    device = {"name": slot, "containerEdits": container_edits}
    version = next((since for key, since in SINCE.items() if key in container_edits), CDI_VERSION)
    return msgspec.json.encode({"cdiVersion": version, "kind": KIND, "devices": [device]})
