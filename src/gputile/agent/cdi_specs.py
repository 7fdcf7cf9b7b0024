"""The CDI specs of slots. A slot is a CDI device name that Allocate returns before the container is known.

The name of a slot is used once. A spec is written to a draft in the same folder and renamed, because the rename is what
the runtime's file watcher reacts to. The file name has the pod's UID: the runtime needs a spec only while it creates
the container, and the spec is removed when the pod is gone.
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
    """The full CDI device name of a slot."""
    return f"{KIND}={slot}"


def slots_of(devices: Iterable[str]) -> list[str]:
    """The slots among full CDI device names."""
    return [name.partition("=")[2] for name in devices if name.startswith(f"{KIND}=")]


class CdiSpecStore:
    """The CDI specs of slots in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, pod: str, slot: str, container_edits: Json) -> None:
        """Raises OSError, or `IsolationUnavailable` for a pod or slot that cannot be part of a file name."""
        name = f"{PREFIX}{pod}_{slot}.json"
        if FILE.fullmatch(name) is None:
            raise IsolationUnavailable("the kubelet's checkpoint has an invalid pod UID or slot")
        self._folder.mkdir(parents=True, exist_ok=True)
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._replace(folder, name, spec(slot, container_edits))
        finally:
            os.close(folder)

    def _replace(self, folder: int, name: str, content: bytes) -> None:
        """Into a new draft (O_EXCL), never through an existing file or link. A rename follows no link either."""
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

    def remove_stale(self, alive: Collection[str]) -> int:
        """Remove the specs of all pods except these UIDs, and abandoned drafts; returns the number of specs."""
        stale = [path for path in self._folder.glob(f"{PREFIX}*.json") if not _belongs_to(path, alive)]
        drafts = self._folder.glob(f".{PREFIX}*")
        for path in (*stale, *drafts):
            with suppress(OSError):  # the next cleanup tries again
                path.unlink()
        return len(stale)


def _belongs_to(path: Path, pods: Collection[str]) -> bool:
    match = FILE.fullmatch(path.name)
    return match is None or match["pod"] in pods
