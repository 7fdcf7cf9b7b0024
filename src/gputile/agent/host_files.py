"""What the node has on its file system for containers: device nodes, the driver, CDI specs, MPS, a preload library.

Door:  `HostFiles`, the real `isolating.Host`. Files are looked at when a container starts: drivers come and go.
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
    """See the module's text."""

    def __init__(self, folders: FolderSettings) -> None:
        self._folders = folders
        self._specs: dict[Path, tuple[tuple[int, ...], CdiSpec | None]] = {}
        self.sight = DriverSnapshot()

    def node_of(self, uuid: str) -> str:
        minor = next((gpu.minor for gpu in self.sight.gpus if gpu.uuid == uuid), -1)
        path = Path(self._folders.dev) / f"nvidia{minor}"
        return str(path) if minor >= 0 and path.exists() else ""

    def common_nodes(self) -> list[str]:
        return [str(path) for name in COMMON_NODES if (path := Path(self._folders.dev) / name).exists()]

    def driver(self) -> str:
        return self._folders.driver if Path(self._folders.driver).is_dir() else ""

    def mps(self) -> str:
        """Served only where the daemon's control pipe is: without it CUDA would run, and be limited by nobody."""
        return self._folders.mps if (Path(self._folders.mps) / "control").exists() else ""

    def preload(self) -> str:
        return self._folders.preload if Path(self._folders.preload).is_file() else ""

    def nvidia_edits(self, uuid: str) -> list[Json]:
        """By UUID, else by index, as `nvidia-ctk cdi generate` names devices; first what all of them share."""
        index = next((gpu.index for gpu in self.sight.gpus if gpu.uuid == uuid), None)
        for wanted in (uuid, str(index)):
            for spec in self._nvidia_specs():
                device = next((one for one in spec.devices if one.name == wanted), None)
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
        """Read once, until it changes: a large one takes a tenth of a second."""
        try:
            found = path.stat()
        except OSError:
            return None
        stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
        known = self._specs.get(path)
        if known is None or known[0] != stamp:
            known = self._specs[path] = (stamp, _read(path))
        return known[1]


class CdiSpecDevice(msgspec.Struct, rename="camel"):
    name: str
    container_edits: dict[str, Any] = msgspec.field(default_factory=dict)


class CdiSpec(msgspec.Struct, rename="camel"):
    kind: str
    devices: list[CdiSpecDevice] = msgspec.field(default_factory=list)
    container_edits: dict[str, Any] = msgspec.field(default_factory=dict)


def _read(path: Path) -> CdiSpec | None:
    """A spec that cannot be read is somebody else's trouble; the runtime says so too."""
    try:
        with open(
            os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb"
        ) as file:  # a pipe would wait for ever
            found = content(file, SETTINGS)
        if path.suffix == ".json":
            return msgspec.json.decode(found, type=CdiSpec)
        return msgspec.convert(read_one(found), CdiSpec)
    except (OSError, TypeError, msgspec.DecodeError, UnicodeDecodeError, RecursionError, NotYaml):
        return None
