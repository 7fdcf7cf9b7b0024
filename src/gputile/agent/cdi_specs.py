"""Slots: names that Allocate gives out before anybody knows for whom, and the CDI specs that fill them.

Room:  a name is used once. A spec is written under another name in the same folder and renamed, for that is what wakes
       the runtime's watcher. The pod's UID is part of the file's name: a spec outlives its container's creation by
       nothing, and goes with its pod.
Door:  `new_slot`, `slots_of`, `CdiSpecStore.fill`, `CdiSpecStore.sweep`.
"""

import os
import re
import secrets
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from gputile.agent.isolation import KIND, IsolationUnavailable, Json, spec

PREFIX = "gputile.io-slot_"
FILE = re.compile(re.escape(PREFIX) + r"(?P<pod>[0-9A-Za-z.-]{1,64})_(?P<slot>[0-9a-f]{1,64})\.json")


def new_slot() -> str:
    return secrets.token_hex(12)


def device_name(slot: str) -> str:
    """As a CDI device."""
    return f"{KIND}={slot}"


def slots_of(devices: Iterable[str]) -> list[str]:
    """Ours among CDI devices."""
    return [name.partition("=")[2] for name in devices if name.startswith(f"{KIND}=")]


class CdiSpecStore:
    """The specs in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def fill(self, pod: str, slot: str, container_edits: Json) -> None:
        """Raises OSError, or `IsolationUnavailable` for names that are no part of a file's name."""
        name = f"{PREFIX}{pod}_{slot}.json"
        if FILE.fullmatch(name) is None:
            raise IsolationUnavailable("the kubelet's checkpoint names a pod or a slot that is none")
        self._folder.mkdir(parents=True, exist_ok=True)
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._write(folder, name, spec(slot, container_edits))
        finally:
            os.close(folder)

    def _write(self, folder: int, name: str, content: bytes) -> None:
        """A draft of our own, never a file or link that waits under its name. A rename follows no link either."""
        draft = f".{name}.{secrets.token_hex(4)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(draft, flags, 0o644, dir_fd=folder), "wb") as file:
                file.write(content)
            os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            with suppress(OSError):
                os.unlink(draft, dir_fd=folder)
            raise

    def sweep(self, alive: Collection[str]) -> int:
        """Remove the specs of all pods but these, and drafts that nobody finished."""
        gone = [path for path in self._folder.glob(f"{PREFIX}*.json") if not _is_of(path, alive)]
        drafts = self._folder.glob(f".{PREFIX}*")
        for path in (*gone, *drafts):
            with suppress(OSError):  # it is tried again at the next sweep
                path.unlink()
        return len(gone)


def _is_of(path: Path, pods: Collection[str]) -> bool:
    match = FILE.fullmatch(path.name)
    return match is None or match["pod"] in pods
