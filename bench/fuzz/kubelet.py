"""Fuzzes the inputs from a kubelet and a container runtime: messages, the checkpoint, the runtime's configuration.

Undecodable bytes must raise `InvalidMessage` or `UnreadableCheckpoint`, and nothing else.
"""

import base64
import json
import random
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from bench.fuzz.mutator import Mutator
from gputile.kubelet import messages as wire
from gputile.kubelet.checkpoint import CHECKPOINT, UnreadableCheckpoint, read_checkpoint, registered
from gputile.kubelet.cri import read_config
from gputile.kubelet.protobuf import InvalidMessage, Message, decode, encode

IDS = ["GPU-0::0", "GPU-1::7"]
GRANTED = wire.ContainerAllocateResponse(
    envs={"A": "1", "NVIDIA_VISIBLE_DEVICES": "void"},
    mounts=[wire.Mount(container_path="/a", host_path="/b", read_only=True)],
    devices=[wire.DeviceSpec(container_path="/dev/nvidia0", host_path="/dev/nvidia0", permissions="rw")],
    annotations={"a/b": "c"},
    cdi_devices=[wire.CDIDevice(name="gputile.io/slot=abc")],
)
MESSAGES: tuple[Message, ...] = (
    wire.DevicePluginOptions(pre_start_required=True),
    wire.PreferredAllocationRequest(
        containers=[wire.ContainerPreferredAllocationRequest(available=IDS, must_include=IDS[:1], size=2)]
    ),
    wire.PreferredAllocationResponse(containers=[wire.DeviceIds(ids=IDS)]),
    wire.AllocateRequest(containers=[wire.DeviceIds(ids=IDS), wire.DeviceIds()]),
    wire.AllocateResponse(containers=[GRANTED]),
    wire.ListAndWatchResponse(
        devices=[
            wire.AdvertisedDevice(id=IDS[0], health="Healthy", topology=wire.TopologyInfo(nodes=[wire.NUMANode(id=-1)]))
        ]
    ),
    wire.StatusResponse(info={"config": '{"enableCDI":true}'}),
    wire.ListContainersResponse(
        containers=[wire.ListedContainer(id="c" * 64, state=1, created_at=2**62, labels={"a": "b"})]
    ),
)
KINDS: dict[str, type[Message]] = {type(message).__name__: type(message) for message in MESSAGES}
ENTRY = {
    "PodUID": "uid",
    "ContainerName": "c0",
    "ResourceName": "gputile.io/gpu",
    "DeviceIDs": {"-1": IDS, "0": None},
    "AllocResp": base64.b64encode(encode(GRANTED)).decode(),
}
DATA = {
    "PodDeviceEntries": [ENTRY, {**ENTRY, "DeviceIDs": IDS}],
    "RegisteredDevices": {"gputile.io/gpu": IDS, "b": None},
}
CONFIG = {"enableCDI": True, "cdiSpecDirs": ["/etc/cdi", "/var/run/cdi"], "containerd": {"runtimes": {"runc": {}}}}


class KubeletTarget:
    """A folder with a checkpoint, and the decoders."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._encoded = {type(message).__name__: encode(message) for message in MESSAGES}
        self._texts = {"checkpoint": json.dumps({"Data": DATA, "Checksum": 1}).encode()}
        self._texts["configuration"] = json.dumps(CONFIG).encode()

    def sample(self, rng: random.Random) -> tuple[str, bytes]:
        mutator = Mutator(rng, [*self._encoded.values(), *self._texts.values()])
        path = rng.choice([*self._encoded, *["checkpoint"] * 4, *["configuration"] * 2])
        body = self._encoded.get(path) or self._texts[path]
        for _ in range(mutator.times()):
            body = mutator.mutate_bytes(body) if path in KINDS else mutator.mutate(body)
        return path, body

    async def problem(self, path: str, body: bytes) -> str:
        if path == "checkpoint":
            return self._read(body)
        if path == "configuration":
            read_config(body.decode("utf-8", "surrogateescape"), "/var/run/cdi")
            return ""
        with suppress(InvalidMessage):
            decoded = decode(KINDS[path], body)
            if decode(KINDS[path], encode(decoded)) != decoded:
                return f"the message changes when it is encoded again: {decoded}"
        return ""

    def _read(self, body: bytes) -> str:
        (self._folder / CHECKPOINT).write_bytes(body)
        with suppress(UnreadableCheckpoint):
            for entry in read_checkpoint(self._folder):
                if not all(isinstance(name, str) for name in entry.ids):
                    return f"a device ID that is not a string: {entry}"
            registered(self._folder, "gputile.io/gpu")
        return ""

    async def audit(self) -> str:
        (self._folder / CHECKPOINT).write_bytes(self._texts["checkpoint"])
        entries = read_checkpoint(self._folder)
        return "" if [len(entry.ids) for entry in entries] == [2, 2] else f"a valid checkpoint is read as {entries}"


@asynccontextmanager
async def target() -> AsyncIterator[KubeletTarget]:
    with tempfile.TemporaryDirectory() as folder:
        yield KubeletTarget(Path(folder))
