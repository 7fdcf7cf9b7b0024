"""How close the cards of a machine are to each other.

Room:  one whole number per pair, larger is closer, 0 is no link. The scheduler adds them up over a set of cards
       (`engine/placement/topology.py`) and gives them no other meaning.

         10 x n   n active NVLinks from one to the other, or from both to an NVSwitch (the lesser of the two counts)
              5   two GPUs of one board
              4   one PCIe switch between them
              3   several PCIe switches
              2   the host bridge
              1   the same NUMA node
              0   the way leads from one NUMA node to another: every pair has that, so it is no link to ask for

Door:  `links`.
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
    """By position; () when the driver says nothing about any pair. A card without a handle has no links."""
    wires = {uuid: _nvlinks(nvml, handle) for uuid, handle in handles.items()}
    said: dict[tuple[int, int], int] = {}
    for row, one in enumerate(gpus):
        for column, other in enumerate(gpus[:row]):
            if one.uuid in handles and other.uuid in handles:
                weight = _nvlink_weight(one, other, wires) or _ancestor(nvml, handles[one.uuid], handles[other.uuid])
                if weight is not None:
                    said[row, column] = said[column, row] = weight
    positions = range(len(gpus))
    return tuple(tuple(said.get((row, column), 0) for column in positions) for row in positions) if said else ()


def _nvlink_weight(one: DriverGpu, other: DriverGpu, wires: Mapping[str, Counter[str]]) -> int:
    """Each side is asked, because a driver may know the far end from one side only."""
    direct = max(wires[one.uuid][other.pci], wires[other.uuid][one.pci]) if one.pci and other.pci else 0
    return NVLINK * (direct + min(wires[one.uuid][SWITCH], wires[other.uuid][SWITCH]))


def _nvlinks(nvml: Nvml, handle: Any) -> Counter[str]:
    """How many active NVLinks lead where: to a card, by its PCI address, or to `SWITCH`."""
    ends: Counter[str] = Counter()
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        state = _said(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link)
        if state == nvml.NVML_FEATURE_ENABLED and (end := _far_end(nvml, handle, link)):
            ends[end] += 1
    return ends


def _far_end(nvml: Nvml, handle: Any, link: int) -> str:
    kind = _said(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
    if kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
        return SWITCH
    return pci_of(_said(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link))


def _ancestor(nvml: Nvml, one: Any, other: Any) -> int | None:
    level = _said(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, one, other)
    return None if level is None else ANCESTOR.get(int(level), 0)


def _said(nvml: Nvml, question: Any, *about: Any) -> Any:
    """None on any failure that is not the whole driver's: `look` says how the card is, links only say how close."""
    try:
        return question(*about)
    except nvml.NVMLError as failed:
        if failed.value in DRIVER_IS_GONE:
            raise
        return None
