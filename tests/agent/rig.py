"""Pods, grants and a kubelet's checkpoint for the tests of the agent."""

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from gputile.dialects import gputile, registry
from gputile.dialects.kube_objects import GrantContext, Pod
from gputile.kubelet import messages as wire
from gputile.kubelet.checkpoint import CHECKPOINT
from gputile.kubelet.protobuf import encode
from gputile.model.cards import Card
from gputile.model.grants import ContainerGrant, Grant, Tile
from gputile.model.requests import PodRequest
from gputile.testing.builders import pod as manifest

NODE = "n1"
CARDS = tuple(Card(index=n, uuid=f"GPU-{n}", memory=16384, model="T4", slots=10) for n in range(4))


def tile(card: int, memory: int = 4096, cores: int = 0) -> Tile:
    return Tile(CARDS[card].uuid, card, memory, cores)


def granted(
    uid: str, *tiles: Tile, at: int = 1, container: str = "c0", limits: Mapping[str, Any] | None = None, **more: Any
) -> Pod:
    """A pod on the node whose only container was granted these tiles."""
    return several(uid, {container: tiles}, at=at, limits=limits, **more)


def several(
    uid: str,
    tiles_of: Mapping[str, tuple[Tile, ...]],
    at: int = 1,
    limits: Mapping[str, Any] | None = None,
    **more: Any,
) -> Pod:
    """A pod whose containers were granted these tiles; init containers are called init-0, ..."""
    limits = limits or {gputile.GPU: 1, gputile.MEMORY: 4096}
    inits = tuple(limits for name in tiles_of if name.startswith("init"))
    apps = [limits for name in tiles_of if not name.startswith("init")]
    bare = msgspec.convert(manifest(*apps, init=inits, name=uid, uid=uid, on=NODE, **more), Pod)
    request = registry.read_pod(bare)
    assert isinstance(request, PodRequest)
    roles = {ask.container: ask.role for ask in request.asks}
    containers = tuple(ContainerGrant(name, tiles, roles[name]) for name, tiles in tiles_of.items())
    grant = Grant(pod=uid, node=NODE, dialect=request.dialect, containers=containers)
    record = registry.write_grant(GrantContext(grant=grant, pod=bare, asked=request, cards=CARDS, at=at))
    more["annotations"] = {**more.get("annotations", {}), **record.annotations}
    return msgspec.convert(manifest(*apps, init=inits, name=uid, uid=uid, on=NODE, **more), Pod)


def ungranted(uid: str) -> Pod:
    return msgspec.convert(manifest({gputile.GPU: 1, gputile.MEMORY: 4096}, name=uid, uid=uid, on=NODE), Pod)


class Kubelet:
    """The checkpoint file of a kubelet; the test writes its entries."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._entries = folder, list[dict[str, Any]]()

    def record(
        self,
        pod: str,
        container: str,
        ids: list[str],
        response: wire.ContainerAllocateResponse,
        resource: str = gputile.GPU,
    ) -> None:
        self._entries.append(
            {
                "PodUID": pod,
                "ContainerName": container,
                "ResourceName": resource,
                "DeviceIDs": {"-1": ids},
                "AllocResp": base64.b64encode(encode(response)).decode(),
            }
        )
        (self.folder / CHECKPOINT).write_text(json.dumps({"Data": {"PodDeviceEntries": self._entries}, "Checksum": 1}))
