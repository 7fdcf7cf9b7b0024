"""How close the cards of a machine are to each other: one whole number per pair, larger is closer, 0 is no link.

The scheduler adds these weights up over a set of cards (`engine/placement/topology.py`); they have no other meaning.

         10 x n   n active NVLinks between the two, or from both to an NVSwitch (the lesser of the two counts)
              5   two GPUs of one board
              4   one PCIe switch between them
              3   several PCIe switches
              2   the host bridge
              1   the same NUMA node
              0   the path leads from one NUMA node to another: every pair has that, so it is no link
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gputile.nvml.card_query import pci_of
from gputile.nvml.driver import DriverGpu
from gputile.nvml.errors import DRIVER_IS_GONE, Nvml

NVLINK = 10

ANCESTOR = {0: 5, 10: 4, 20: 3, 30: 2, 40: 1, 50: 0}
"""By NVML's level of the common ancestor: internal, one switch, several switches, host bridge, node, system."""

SWITCH = "an NVSwitch"

Links = tuple[tuple[int, ...], ...]


def links(nvml: Nvml, gpus: Sequence[DriverGpu], handles: Mapping[str, Any]) -> Links:
    """The weights by position; () when the driver reports none of the pairs. A card without a handle has no links."""
    nvlinks = {uuid: _nvlinks(nvml, handle) for uuid, handle in handles.items()}
    weights: dict[tuple[int, int], int] = {}
    for row, gpu in enumerate(gpus):
        for column, other in enumerate(gpus[:row]):
            if gpu.uuid in handles and other.uuid in handles:
                weight = _nvlink_weight(gpu, other, nvlinks) or _ancestor(nvml, handles[gpu.uuid], handles[other.uuid])
                if weight is not None:
                    weights[row, column] = weights[column, row] = weight
    positions = range(len(gpus))
    return tuple(tuple(weights.get((row, column), 0) for column in positions) for row in positions) if weights else ()


def _nvlink_weight(gpu: DriverGpu, other: DriverGpu, nvlinks: Mapping[str, Counter[str]]) -> int:
    """Both sides are queried, because a driver may know the remote end from one side only."""
    direct = max(nvlinks[gpu.uuid][other.pci], nvlinks[other.uuid][gpu.pci]) if gpu.pci and other.pci else 0
    return NVLINK * (direct + min(nvlinks[gpu.uuid][SWITCH], nvlinks[other.uuid][SWITCH]))


def _nvlinks(nvml: Nvml, handle: Any) -> Counter[str]:
    """The number of active NVLinks by remote end: the PCI address of a card, or `SWITCH`."""
    ends: Counter[str] = Counter()
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        state = _query(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link)
        if state == nvml.NVML_FEATURE_ENABLED and (end := _remote_end(nvml, handle, link)):
            ends[end] += 1
    return ends


def _remote_end(nvml: Nvml, handle: Any, link: int) -> str:
    kind = _query(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
    if kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
        return SWITCH
    return pci_of(_query(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link))


def _ancestor(nvml: Nvml, handle: Any, other: Any) -> int | None:
    level = _query(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, handle, other)
    return None if level is None else ANCESTOR.get(int(level), 0)


def _query(nvml: Nvml, function: Any, *arguments: Any) -> Any:
    """None on any failure except the whole driver's: a failing link query is no fault of the card."""
    try:
        return function(*arguments)
    except nvml.NVMLError as error:
        if error.value in DRIVER_IS_GONE:
            raise
        return None
