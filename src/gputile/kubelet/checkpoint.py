"""Reads the checkpoint file of the kubelet's device manager: which container holds which devices.

The checkpoint is the only source that has init containers, pods by UID, and the responses of Allocate. It is read anew
on every call (it has some kilobytes). An undecodable entry is skipped, so that only its own container cannot start.
"""

import base64
import binascii
from pathlib import Path

import msgspec

from gputile.kubelet import messages as wire
from gputile.kubelet.protobuf import InvalidMessage, decode
from gputile.model.decode_errors import decode_problem
from gputile.model.errors import GputileError

CHECKPOINT = "kubelet_internal_checkpoint"
LARGEST = 64 * 2**20  # bytes of a checkpoint; 100,000 devices take five million


class UnreadableCheckpoint(GputileError):
    """The kubelet's checkpoint file cannot be read or decoded."""


class CheckpointEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The devices of one resource that one container holds."""

    pod: str  # UID
    container: str
    resource: str
    ids: frozenset[str]
    cdi: tuple[str, ...] = ()  # the CDI devices in the response of Allocate


class PodDeviceEntry(msgspec.Struct, rename="pascal"):
    """One element of `PodDeviceEntries`, as the kubelet writes it."""

    pod_uid: str = msgspec.field(name="PodUID")
    container_name: str
    resource_name: str
    device_ids: dict[str, list[str] | None] | list[str] | None = msgspec.field(name="DeviceIDs", default=None)
    alloc_resp: str | None = None  # base64 of a ContainerAllocateResponse


class CheckpointData(msgspec.Struct, rename="pascal"):
    """The `Data` of the checkpoint; entries stay raw, so that each is decoded on its own."""

    pod_device_entries: list[msgspec.Raw] | None = None
    registered_devices: dict[str, list[str] | None] | None = None


class Checkpoint(msgspec.Struct, rename="pascal"):
    """The checkpoint file as a whole; its checksum is not read."""

    data: CheckpointData


CHECKPOINTS = msgspec.json.Decoder(Checkpoint)
ENTRIES = msgspec.json.Decoder(PodDeviceEntry)
UNDECODABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


def read_checkpoint(folder: Path) -> tuple[CheckpointEntry, ...]:
    """All devices that the kubelet has allocated; also those of pods that ended since its last allocation."""
    entries = map(_decode_entry, _read(folder).pod_device_entries or ())
    return tuple(_checkpoint_entry(entry) for entry in entries if entry is not None)


def registered(folder: Path, resource: str) -> frozenset[str]:
    """The device IDs that the kubelet last received for a resource, from whichever plugin."""
    return frozenset((_read(folder).registered_devices or {}).get(resource) or ())


def _read(folder: Path) -> CheckpointData:
    path = folder / CHECKPOINT
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise UnreadableCheckpoint(f"{path}: cannot be read: it has more than {LARGEST} bytes")
        return CHECKPOINTS.decode(content).data
    except FileNotFoundError:
        return CheckpointData()  # this kubelet has never had a device plugin
    except OSError as error:
        raise UnreadableCheckpoint(f"{path}: cannot be read: {error.strerror or type(error).__name__}") from error
    except UNDECODABLE as error:
        raise UnreadableCheckpoint(
            f"{path}: is not a checkpoint of the kubelet's device manager: {decode_problem(error)}"
        ) from error


def _decode_entry(raw: msgspec.Raw) -> PodDeviceEntry | None:
    try:
        return ENTRIES.decode(raw)
    except UNDECODABLE:
        return None


def _checkpoint_entry(entry: PodDeviceEntry) -> CheckpointEntry:
    return CheckpointEntry(
        pod=entry.pod_uid,
        container=entry.container_name,
        resource=entry.resource_name,
        ids=frozenset(_ids(entry)),
        cdi=_cdi_devices(entry.alloc_resp or ""),
    )


def _ids(entry: PodDeviceEntry) -> list[str]:
    """Since Kubernetes 1.20 device IDs are grouped by NUMA node."""
    if isinstance(entry.device_ids, dict):
        return [device_id for ids in entry.device_ids.values() for device_id in ids or ()]
    return entry.device_ids or []


def _cdi_devices(encoded: str) -> tuple[str, ...]:
    """Of a response in base64; () for an empty or undecodable response, such as another plugin's."""
    try:
        response = decode(wire.ContainerAllocateResponse, base64.b64decode(encoded))
    except (binascii.Error, ValueError, InvalidMessage):
        return ()
    return tuple(device.name for device in response.cdi_devices)
