"""The files of the node that isolation needs: device nodes, the driver, NVIDIA's CDI specs, MPS, a preload library.

Files are checked when a container starts, because drivers are installed and removed while the agent runs.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from gputile.agent.cdi_specs import PREFIX
from gputile.agent.isolation import COMMON_NODES, Json
from gputile.agent.settings import FolderSettings
from gputile.nvml.driver import DriverSnapshot
from gputile.text.documents import SETTINGS, NotYaml, content, read_one


class HostFiles:
    """The `IsolationHost` of a real node."""

    def __init__(self, folders: FolderSettings) -> None:
        self._folders = folders
        self._specs: dict[Path, tuple[tuple[int, ...], CdiSpec | None]] = {}
        self.snapshot = DriverSnapshot()

    def device_node(self, uuid: str) -> str:
        minor = next((gpu.minor for gpu in self.snapshot.gpus if gpu.uuid == uuid), -1)
        path = Path(self._folders.dev) / f"nvidia{minor}"
        return str(path) if minor >= 0 and path.exists() else ""

    def common_device_nodes(self) -> list[str]:
        return [str(path) for name in COMMON_NODES if (path := Path(self._folders.dev) / name).exists()]

    def driver(self) -> str:
        return self._folders.driver if Path(self._folders.driver).is_dir() else ""

    def mps(self) -> str:
        """Only where the daemon's control pipe exists: without it CUDA would run without limits."""
        return self._folders.mps if (Path(self._folders.mps) / "control").exists() else ""

    def preload(self) -> str:
        return self._folders.preload if Path(self._folders.preload).is_file() else ""

    def nvidia_edits(self, uuid: str) -> list[Json]:
        """By UUID, else by index, as `nvidia-ctk cdi generate` names devices; first the edits of the whole spec."""
        index = next((gpu.index for gpu in self.snapshot.gpus if gpu.uuid == uuid), None)
        for name in (uuid, str(index)):
            for spec in self._nvidia_specs():
                device = next((device for device in spec.devices if device.name == name), None)
                if device is not None:
                    return [spec.container_edits, device.container_edits]
        return []

    def _nvidia_specs(self) -> Iterator["CdiSpec"]:
        for folder in self._folders.nvidia_cdi:
            for path in sorted(Path(folder).glob("*")):
                if path.suffix in (".json", ".yaml", ".yml") and not path.name.startswith(PREFIX):
                    spec = self._spec(path)
                    if spec is not None and spec.kind == "nvidia.com/gpu":
                        yield spec

    def _spec(self, path: Path) -> "CdiSpec | None":
        """Cached until the file changes: a large spec takes a tenth of a second."""
        try:
            status = path.stat()
        except OSError:
            return None
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        known = self._specs.get(path)
        if known is None or known[0] != stamp:
            known = self._specs[path] = (stamp, _read(path))
        return known[1]


class CdiSpecDevice(msgspec.Struct, rename="camel"):
    """One of the `devices` of a CDI spec."""

    name: str
    container_edits: dict[str, Any] = msgspec.field(default_factory=dict)


class CdiSpec(msgspec.Struct, rename="camel"):
    """A CDI spec, as far as gputile reads it."""

    kind: str
    devices: list[CdiSpecDevice] = msgspec.field(default_factory=list)
    container_edits: dict[str, Any] = msgspec.field(default_factory=dict)


def _read(path: Path) -> CdiSpec | None:
    """None for an unreadable spec: it is another program's file, and the runtime reports it too."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # without O_NONBLOCK a pipe would hang
        with open(descriptor, "rb") as file:
            data = content(file, SETTINGS)
        if path.suffix == ".json":
            return msgspec.json.decode(data, type=CdiSpec)
        return msgspec.convert(read_one(data), CdiSpec)
    except (OSError, TypeError, msgspec.DecodeError, UnicodeDecodeError, RecursionError, NotYaml):
        return None
