"""Who holds which devices, as the kubelet says it.

Room:  the device manager's checkpoint is the only place that names init containers, pods by their UID, and what
       Allocate had answered. It is read anew each time: a file of some kilobytes. An entry that cannot be read is left
       out: its own container cannot start, and all others can.
Door:  `read_checkpoint`, `registered`.
"""

import base64
import binascii
from pathlib import Path

import msgspec

from gputile.kubelet import messages as wire
from gputile.kubelet.protobuf import InvalidMessage, decode
from gputile.model.errors import GputileError

CHECKPOINT = "kubelet_internal_checkpoint"
LARGEST = 64 * 2**20  # bytes of a checkpoint; one of 100,000 devices has five million


class UnreadableCheckpoint(GputileError):
    """The kubelet's word is not there, or is none that we understand."""


class CheckpointEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The devices of one resource that one container holds."""

    pod: str  # UID
    container: str
    resource: str
    ids: frozenset[str]
    cdi: tuple[str, ...] = ()  # the CDI devices that Allocate named


class PodDeviceEntry(msgspec.Struct, rename="pascal"):
    pod_uid: str = msgspec.field(name="PodUID")
    container_name: str
    resource_name: str
    device_ids: dict[str, list[str] | None] | list[str] | None = msgspec.field(name="DeviceIDs", default=None)
    alloc_resp: str | None = None  # base64 of the answer


class CheckpointData(msgspec.Struct, rename="pascal"):
    pod_device_entries: list[msgspec.Raw] | None = None
    registered_devices: dict[str, list[str] | None] | None = None


class Checkpoint(msgspec.Struct, rename="pascal"):
    data: CheckpointData


CHECKPOINTS = msgspec.json.Decoder(Checkpoint)
ENTRIES = msgspec.json.Decoder(PodDeviceEntry)
UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


def read_checkpoint(folder: Path) -> tuple[CheckpointEntry, ...]:
    """All that the kubelet's device manager has given out; also to pods that ended since its last allocation."""
    entries = map(_entry, _read(folder).pod_device_entries or ())
    return tuple(_held(entry) for entry in entries if entry is not None)


def registered(folder: Path, resource: str) -> frozenset[str]:
    """The devices that the kubelet last heard of for a resource, from whichever plugin."""
    return frozenset((_read(folder).registered_devices or {}).get(resource) or ())


def _read(folder: Path) -> CheckpointData:
    path = folder / CHECKPOINT
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise UnreadableCheckpoint(f"{path} cannot be read: it has more than {LARGEST} bytes")
        return CHECKPOINTS.decode(content).data
    except FileNotFoundError:
        return CheckpointData()  # a kubelet that has never heard of a device
    except (OSError, *UNREADABLE) as wrong:
        raise UnreadableCheckpoint(f"{path} cannot be read: {str(wrong)[:200]}") from wrong


def _entry(raw: msgspec.Raw) -> PodDeviceEntry | None:
    try:
        return ENTRIES.decode(raw)
    except UNREADABLE:
        return None


def _held(entry: PodDeviceEntry) -> CheckpointEntry:
    return CheckpointEntry(
        pod=entry.pod_uid,
        container=entry.container_name,
        resource=entry.resource_name,
        ids=frozenset(_ids(entry)),
        cdi=_cdi_devices(entry.alloc_resp or ""),
    )


def _ids(entry: PodDeviceEntry) -> list[str]:
    """Since 1.20 they are sorted by NUMA node."""
    if isinstance(entry.device_ids, dict):
        return [one for ids in entry.device_ids.values() for one in ids or ()]
    return entry.device_ids or []


def _cdi_devices(answer: str) -> tuple[str, ...]:
    """An answer that is none of ours, or none at all, names none."""
    try:
        said = decode(wire.ContainerAllocateResponse, base64.b64decode(answer))
    except (binascii.Error, ValueError, InvalidMessage):
        return ()
    return tuple(device.name for device in said.cdi_devices)
