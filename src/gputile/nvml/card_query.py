"""Queries NVML for the facts of one card.

A query that this card or driver does not support leaves the field's default. Any other failure becomes the card's
fault.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from gputile.model.cards import NO_NUMA
from gputile.nvml.driver import DriverGpu
from gputile.nvml.errors import DRIVER_IS_GONE, Nvml, fault_of, query

MIB = 1024 * 1024
NODE_WORDS = 16  # words of 64 NUMA nodes each: Linux has at most 1024 nodes


def card_at(nvml: Nvml, index: int, known: Mapping[str, DriverGpu], sys: Path) -> tuple[DriverGpu, Any]:
    """The card and its handle. Raises an `NVMLError` when even its UUID cannot be queried."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    uuid = str(nvml.nvmlDeviceGetUUID(handle))
    try:
        return _facts(nvml, handle, index, uuid, sys), handle
    except nvml.NVMLError as error:
        if error.value in DRIVER_IS_GONE:
            raise
        last = known.get(uuid) or DriverGpu(index=index, uuid=uuid, model="", memory=0)
        return msgspec.structs.replace(last, index=index, fault=fault_of(error)), handle


def _facts(nvml: Nvml, handle: Any, index: int, uuid: str, sys: Path) -> DriverGpu:
    memory = query(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    minor = query(nvml, nvml.nvmlDeviceGetMinorNumber, handle)
    mig = query(nvml, nvml.nvmlDeviceGetMigMode, handle)
    pci = pci_of(query(nvml, nvml.nvmlDeviceGetPciInfo, handle))
    return DriverGpu(
        index=index,
        uuid=uuid,
        model=query(nvml, nvml.nvmlDeviceGetName, handle) or "",
        memory=int(memory.total) // MIB if memory is not None else 0,
        minor=-1 if minor is None else int(minor),
        numa=_numa(nvml, handle, pci, sys),
        pci=pci,
        is_mig=mig is not None and mig[0] == nvml.NVML_DEVICE_MIG_ENABLE,
        fault=_memory_fault(nvml, handle),
    )


def pci_of(info: Any) -> str:
    """NVML's `00000000:3B:00.0` as /sys spells it: `0000:3b:00.0`."""
    return "" if info is None else f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"


def _numa(nvml: Nvml, handle: Any, pci: str, sys: Path) -> int:
    """The NUMA node of the card's PCI slot; NVML is queried only where /sys does not have the card."""
    try:
        return max(int((sys / "bus/pci/devices" / pci / "numa_node").read_text()), NO_NUMA)
    except (OSError, ValueError):
        pass
    words = query(nvml, nvml.nvmlDeviceGetMemoryAffinity, handle, NODE_WORDS, nvml.NVML_AFFINITY_SCOPE_NODE)
    mask = sum(int(word) << 64 * position for position, word in enumerate(words or ()))
    return mask.bit_length() - 1 if mask.bit_count() == 1 else NO_NUMA  # several nodes at the same distance: none


def _memory_fault(nvml: Nvml, handle: Any) -> str:
    for check in (_uncorrected_errors, _pages_pending, _remapping_failed):
        if fault := check(nvml, handle):
            return fault
    return ""


def _uncorrected_errors(nvml: Nvml, handle: Any) -> str:
    kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    errors = query(nvml, nvml.nvmlDeviceGetTotalEccErrors, handle, kind, since)
    return f"{errors} uncorrectable memory errors since the driver was loaded; reset the GPU" if errors else ""


def _pages_pending(nvml: Nvml, handle: Any) -> str:
    pending = query(nvml, nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
    return "bad memory pages are pending retirement; reset the GPU" if pending == nvml.NVML_FEATURE_ENABLED else ""


def _remapping_failed(nvml: Nvml, handle: Any) -> str:
    rows = query(nvml, nvml.nvmlDeviceGetRemappedRows, handle)
    return "row remapping of bad memory failed; replace the GPU" if rows is not None and rows[3] else ""
