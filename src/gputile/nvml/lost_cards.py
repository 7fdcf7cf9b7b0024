"""Which card it is that no longer says so.

Room:  pure. A card that fails often cannot tell its UUID any more; who else should be there and is not, it must be.
Door:  `complete`.
"""

from collections.abc import Mapping, Sequence, Set

import msgspec

from gputile.nvml.driver import DriverGpu

Gpus = tuple[DriverGpu, ...]

UNSHOWN = "the driver holds it and no longer shows it; see `dmesg`"


def complete(
    seen: Sequence[DriverGpu], silent: Mapping[int, str], before: Sequence[DriverGpu], bound: Set[str]
) -> tuple[Gpus, tuple[str, ...]]:
    """The cards that answered, those of `before` that did not, and a sentence for each that cannot be told.

    `silent` has the fault of each index that did not say who it is. `bound` are the PCI addresses that the kernel says
    the driver holds: a card that the driver stopped showing is broken if it is among them, and else was taken away.
    """
    here = {gpu.uuid for gpu in seen}
    missing = [gpu for gpu in before if gpu.uuid not in here]
    shown, nameless = list(seen), []
    for index, fault in silent.items():
        who = _who(index, missing, alone=len(silent) == 1)
        if who is None:
            nameless.append(f"card {index}: {fault}")
        else:
            missing.remove(who)
            shown.append(msgspec.structs.replace(who, index=index, fault=fault))
    for gpu in missing:
        if gpu.pci in bound:
            index = _free_index(gpu.index, shown)
            shown.append(msgspec.structs.replace(gpu, index=index, fault=gpu.fault or UNSHOWN))
    return tuple(sorted(shown, key=lambda gpu: gpu.index)), tuple(nameless)


def _who(index: int, missing: Sequence[DriverGpu], *, alone: bool) -> DriverGpu | None:
    same = [gpu for gpu in missing if gpu.index == index]
    if not same and alone and len(missing) == 1:
        same = list(missing)  # the driver counts anew, and only one can be meant
    return same[0] if same else None


def _free_index(wanted: int, shown: Sequence[DriverGpu]) -> int:
    """The driver has given its number to another, perhaps; two cards of one number would be taken for each other."""
    taken = {gpu.index for gpu in shown}
    return wanted if wanted not in taken else max(taken) + 1
