"""Restores the identity of cards that stopped answering, by comparison with the previous snapshot. Pure functions.

A card that fails often cannot report its UUID any more. It is identified as the card that is missing.
"""

from collections.abc import Mapping, Sequence, Set

import msgspec

from gputile.nvml.driver import DriverGpu

Gpus = tuple[DriverGpu, ...]

HIDDEN = "still bound to the driver, which no longer lists it; see `dmesg`"


def complete(
    answering: Sequence[DriverGpu], failed: Mapping[int, str], before: Sequence[DriverGpu], bound: Set[str]
) -> tuple[Gpus, tuple[str, ...]]:
    """All cards, those of `before` that stopped answering included, and a message for each unidentified card.

    `failed` has the fault of each index whose UUID could not be read. `bound` are the PCI addresses that the kernel
    shows as bound to the driver: a card that the driver stopped listing is broken if it is bound, and removed if not.
    """
    here = {gpu.uuid for gpu in answering}
    missing = [gpu for gpu in before if gpu.uuid not in here]
    gpus, unidentified = list(answering), []
    for index, fault in failed.items():
        gpu = _identify(index, missing, alone=len(failed) == 1)
        if gpu is None:
            unidentified.append(f"GPU {index}: {fault}")
        else:
            missing.remove(gpu)
            gpus.append(msgspec.structs.replace(gpu, index=index, fault=fault))
    for gpu in missing:
        if gpu.pci in bound:
            index = _free_index(gpu.index, gpus)
            gpus.append(msgspec.structs.replace(gpu, index=index, fault=gpu.fault or HIDDEN))
    return tuple(sorted(gpus, key=lambda gpu: gpu.index)), tuple(unidentified)


def _identify(index: int, missing: Sequence[DriverGpu], *, alone: bool) -> DriverGpu | None:
    candidates = [gpu for gpu in missing if gpu.index == index]
    if not candidates and alone and len(missing) == 1:
        candidates = list(missing)  # the driver has renumbered its cards, and only one is missing
    return candidates[0] if candidates else None


def _free_index(preferred: int, gpus: Sequence[DriverGpu]) -> int:
    """The driver may have given the card's number to another card; two cards with one number would be confused."""
    taken = {gpu.index for gpu in gpus}
    return preferred if preferred not in taken else max(taken) + 1
