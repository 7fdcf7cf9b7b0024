"""Slots: names that Allocate gives out before anybody knows for whom, and the CDI specs that fill them.

Room:  a name is used once. A spec is written under another name in the same folder and renamed, for that is what wakes
       the runtime's watcher. The pod's UID is part of the file's name: a spec outlives its container's creation by
       nothing, and goes with its pod.
Door:  `new_slot`, `slots_of`, `Slots.fill`, `Slots.sweep`.
"""

import os
import re
import secrets
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from gputile.agent.isolating import KIND, Json, spec

PREFIX = "gputile.io-slot_"
FILE = re.compile(re.escape(PREFIX) + r"(?P<pod>[^_]+)_(?P<slot>[0-9a-f]+)\.json")


def new_slot() -> str:
    return secrets.token_hex(12)


def device_name(slot: str) -> str:
    """As a CDI device."""
    return f"{KIND}={slot}"


def slots_of(devices: Iterable[str]) -> list[str]:
    """Ours among CDI devices."""
    return [name.partition("=")[2] for name in devices if name.startswith(f"{KIND}=")]


class Slots:
    """The specs in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def fill(self, pod: str, slot: str, container_edits: Json) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{PREFIX}{pod}_{slot}.json"
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_bytes(spec(slot, container_edits))
        draft.replace(path)

    def sweep(self, alive: Collection[str]) -> int:
        """Remove the specs of all pods but these, and drafts that nobody finished."""
        gone = [path for path in self._folder.glob(f"{PREFIX}*.json") if not _is_of(path, alive)]
        drafts = [path for path in self._folder.glob(f".{PREFIX}*") if not path.name.endswith(f".{os.getpid()}")]
        for path in (*gone, *drafts):
            with suppress(OSError):  # it is tried again at the next sweep
                path.unlink()
        return len(gone)


def _is_of(path: Path, pods: Collection[str]) -> bool:
    match = FILE.fullmatch(path.name)
    return match is None or match["pod"] in pods
