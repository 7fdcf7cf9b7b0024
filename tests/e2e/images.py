"""The only image of the tests: busybox, as an archive that containerd imports without a registry.

A docker-archive is a tar of three files: a configuration, one layer, and a manifest that names both. It is the sandbox
("pause") image too.
"""

import hashlib
import io
import json
import platform
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

IMAGE = "gputile.io/e2e/busybox:1"
FOLDERS = ("bin", "dev", "etc", "proc", "root", "sys", "tmp", "usr", "usr/local", "usr/local/bin", "var", "var/run")
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
# Process 1 of a container gets only the signals that it handles: a bare `sleep` would outlive its grace period.
IDLE = "trap 'exit 0' TERM INT; while :; do sleep 3600 & wait $!; done"


def write_image(busybox: Path, path: Path) -> Path:
    """With every applet that this busybox has: Debian's lacks some (printenv is one)."""
    applets = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
    layer = _layer(busybox.read_bytes(), applets)
    config = json.dumps(_config(layer)).encode()
    manifest = [{"Config": "config.json", "RepoTags": [IMAGE], "Layers": ["layer.tar"]}]
    files = {"config.json": config, "layer.tar": layer, "manifest.json": json.dumps(manifest).encode()}
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            _add(archive, name, content, 0o644)
    return path


def _layer(busybox: bytes, applets: Sequence[str]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as layer:
        for folder in FOLDERS:
            layer.addfile(_entry(folder, tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755))
        _add(layer, "bin/busybox", busybox, 0o755)
        _add(layer, "etc/passwd", b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/tmp:/bin/sh\n", 0o644)
        for applet in set(applets) - {"busybox"}:
            link = _entry(f"bin/{applet}", tarfile.SYMTYPE, 0o777)
            link.linkname = "busybox"
            layer.addfile(link)
    return packed.getvalue()


def _config(layer: bytes) -> dict[str, Any]:
    machine = platform.machine()
    return {
        "architecture": ARCHITECTURES.get(machine, machine),
        "os": "linux",
        "config": {"Env": ["PATH=/usr/local/bin:/bin"], "Cmd": ["/bin/sh", "-c", IDLE], "WorkingDir": "/"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }


def _add(archive: tarfile.TarFile, name: str, content: bytes, mode: int) -> None:
    entry = _entry(name, tarfile.REGTYPE, mode)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def _entry(name: str, kind: bytes, mode: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = kind, mode
    return entry
