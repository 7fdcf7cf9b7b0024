"""How NVML says no, and what that means for us.

Room:  three kinds of failure. The driver or the card does not know the question: normal, and means "not said". The card
       does not answer: its fault, as a short sentence. The driver does not answer: `NoDriver`, with what to do.
Door:  `ask`, `fault`, `no_driver`.
"""

from collections.abc import Callable
from enum import IntEnum
from types import ModuleType
from typing import Any, TypeAlias

from gputile.nvml.driver import NoDriver

Nvml: TypeAlias = ModuleType
"""The module `pynvml`, imported when a driver is first asked. It has no types of its own."""


class NvmlCode(IntEnum):
    """The return codes of NVML that we tell apart."""

    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    INSUFFICIENT_POWER = 8
    DRIVER_NOT_LOADED = 9
    TIMEOUT = 10
    IRQ_ISSUE = 11
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    CORRUPTED_INFOROM = 14
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    LIB_RM_VERSION_MISMATCH = 18
    NO_DATA = 21
    VGPU_ECC_NOT_SUPPORTED = 22
    ARGUMENT_VERSION_MISMATCH = 25
    DEPRECATED = 26
    NOT_READY = 27
    UNKNOWN = 999


UNSAID = frozenset(
    {
        NvmlCode.INVALID_ARGUMENT,  # a question as this driver does not know it; a card that is gone gave no handle
        NvmlCode.NOT_SUPPORTED,
        NvmlCode.NO_PERMISSION,
        NvmlCode.NOT_FOUND,
        NvmlCode.FUNCTION_NOT_FOUND,
        NvmlCode.CORRUPTED_INFOROM,  # a label on the board cannot be read; the card computes as before
        NvmlCode.NO_DATA,
        NvmlCode.VGPU_ECC_NOT_SUPPORTED,
        NvmlCode.ARGUMENT_VERSION_MISMATCH,
        NvmlCode.DEPRECATED,
        NvmlCode.NOT_READY,
    }
)
"""This driver, card or caller gets no answer to this question. The card may be as well as can be."""

NO_SUCH_CARD = frozenset({NvmlCode.INVALID_ARGUMENT, NvmlCode.NOT_FOUND})
"""The answer to an index or UUID that is not there (any more)."""

DRIVER_IS_GONE = frozenset(
    {NvmlCode.UNINITIALIZED, NvmlCode.DRIVER_NOT_LOADED, NvmlCode.LIBRARY_NOT_FOUND, NvmlCode.LIB_RM_VERSION_MISMATCH}
)
"""Whatever was asked, it is not the card's fault."""

_FAULT = {
    NvmlCode.NO_PERMISSION: "the driver lets nobody ask it; give the agent its device file",
    NvmlCode.INSUFFICIENT_POWER: "its power cables are not connected",
    NvmlCode.IRQ_ISSUE: "its interrupts do not arrive",
    NvmlCode.GPU_IS_LOST: "fell off the bus; reset it or reboot the machine",
    NvmlCode.RESET_REQUIRED: "needs a reset",
    NvmlCode.UNKNOWN: "does not answer; the driver does not know why",
}

_NO_DRIVER = {
    NvmlCode.LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 is not found; install the driver, or let the container see it"
    " (NVIDIA's container runtime, or a mount of the driver's libraries)",
    NvmlCode.DRIVER_NOT_LOADED: "the kernel module is not loaded or out of reach; load it (modprobe nvidia),"
    " or give the container /dev/nvidiactl",
    NvmlCode.LIB_RM_VERSION_MISMATCH: "its library and its kernel module are of different versions, as after an update;"
    " reload the module or reboot, then start this program again",
    NvmlCode.NO_PERMISSION: "it lets nobody ask; run as root, or give the container /dev/nvidiactl",
    NvmlCode.UNINITIALIZED: "it was shut down; the next look begins anew",
    NvmlCode.UNKNOWN: "it fails without a reason; `dmesg` and `nvidia-smi` may know more",
}


def ask(nvml: Nvml, question: Callable[..., Any], *about: Any) -> Any:
    """The answer, or None when it is not said. Other failures are the caller's."""
    try:
        return question(*about)
    except nvml.NVMLError as failed:
        if failed.value in UNSAID:
            return None
        raise


def fault(failed: Any) -> str:
    """What an `NVMLError` says about the card that was asked."""
    return _FAULT.get(failed.value) or f"does not answer: {_words(failed)}"


def no_driver(failed: Any) -> NoDriver:
    """What an `NVMLError` says about the driver."""
    return NoDriver(f"no NVIDIA driver: {_NO_DRIVER.get(failed.value) or f'it answers {_words(failed)!r}'}")


def _words(failed: Any) -> str:
    return str(failed).rstrip(".")
