"""NVML's return codes, and what each means for gputile.

There are three kinds of failure. The driver or the card does not support the query: normal, the value is unknown. The
card does not answer: a fault of the card, in a short message. The driver does not answer: `NoDriver`, with what to do.
"""

from collections.abc import Callable
from enum import IntEnum
from types import ModuleType
from typing import Any, TypeAlias

from gputile.nvml.driver import NoDriver

Nvml: TypeAlias = ModuleType
"""The module `pynvml`, imported at the first call of a driver. It has no type annotations."""


class NvmlCode(IntEnum):
    """The return codes of NVML that gputile distinguishes."""

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


NOT_AVAILABLE = frozenset(
    {
        NvmlCode.INVALID_ARGUMENT,  # this driver does not know the query; a card that is gone fails earlier, by handle
        NvmlCode.NOT_SUPPORTED,
        NvmlCode.NO_PERMISSION,
        NvmlCode.NOT_FOUND,
        NvmlCode.FUNCTION_NOT_FOUND,
        NvmlCode.CORRUPTED_INFOROM,  # the board's infoROM is unreadable; the card computes as before
        NvmlCode.NO_DATA,
        NvmlCode.VGPU_ECC_NOT_SUPPORTED,
        NvmlCode.ARGUMENT_VERSION_MISMATCH,
        NvmlCode.DEPRECATED,
        NvmlCode.NOT_READY,
    }
)
"""The value is not available from this driver, card or caller. The card may still be healthy."""

NO_SUCH_CARD = frozenset({NvmlCode.INVALID_ARGUMENT, NvmlCode.NOT_FOUND})
"""The result for an index or UUID that does not exist (any more)."""

DRIVER_IS_GONE = frozenset(
    {NvmlCode.UNINITIALIZED, NvmlCode.DRIVER_NOT_LOADED, NvmlCode.LIBRARY_NOT_FOUND, NvmlCode.LIB_RM_VERSION_MISMATCH}
)
"""The whole driver failed, whatever was queried; this is no fault of the card."""

_FAULT = {
    NvmlCode.NO_PERMISSION: "permission denied; give the agent the GPU's device file",
    NvmlCode.INSUFFICIENT_POWER: "its power cables are not connected",
    NvmlCode.IRQ_ISSUE: "its interrupts do not arrive",
    NvmlCode.GPU_IS_LOST: "fell off the bus; reset it or reboot the machine",
    NvmlCode.RESET_REQUIRED: "needs a reset",
    NvmlCode.UNKNOWN: "does not answer; the driver does not know why",
}

_NO_DRIVER = {
    NvmlCode.LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 is not found; install the driver, or give the container access to it"
    " (NVIDIA's container runtime, or a mount of the driver's libraries)",
    NvmlCode.DRIVER_NOT_LOADED: "the kernel module is not loaded or not accessible; load it (modprobe nvidia),"
    " or give the container /dev/nvidiactl",
    NvmlCode.LIB_RM_VERSION_MISMATCH: "its library and its kernel module have different versions, as after an update;"
    " reload the module or reboot, then start this program again",
    NvmlCode.NO_PERMISSION: "permission denied; run as root, or give the container /dev/nvidiactl",
    NvmlCode.UNINITIALIZED: "it was shut down; the next query connects again",
    NvmlCode.UNKNOWN: "it fails without a reason; see `dmesg` and `nvidia-smi`",
}


def query(nvml: Nvml, function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of an NVML function, or None when it is not available. Other failures are raised."""
    try:
        return function(*arguments)
    except nvml.NVMLError as error:
        if error.value in NOT_AVAILABLE:
            return None
        raise


def fault_of(error: Any) -> str:
    """The fault of the card whose query failed with this `NVMLError`."""
    return _FAULT.get(error.value) or f"does not answer: {_description(error)}"


def no_driver(error: Any) -> NoDriver:
    """This `NVMLError` as a failure of the whole driver."""
    return NoDriver(f"no NVIDIA driver: {_NO_DRIVER.get(error.value) or f'it answers {_description(error)!r}'}")


def _description(error: Any) -> str:
    return str(error).rstrip(".")
