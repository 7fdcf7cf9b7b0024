"""Converts the driver's snapshot into the node's inventory and labels. Pure."""

import re
from collections.abc import Collection, Mapping

from gputile.dialects.kube_objects import NodeInventory
from gputile.model.cards import Card
from gputile.nvml.driver import DriverGpu, DriverSnapshot


def inventory(
    snapshot: DriverSnapshot,
    faults: Mapping[str, str],
    slots: int,
    cordoned: Collection[str] = (),
    *,
    one_at_a_time: bool = False,
    since: str = "",
) -> NodeInventory:
    """The node's cards; `faults` has the reasons of unhealthy cards by UUID. `one_at_a_time`: whether the scheduler
    must bind one pod at a time here. `since`: when an agent of gputile first served the node."""
    cards = [_card(gpu, faults.get(gpu.uuid, "") or gpu.fault, slots, gpu.uuid in cordoned) for gpu in snapshot.gpus]
    return NodeInventory(tuple(cards), snapshot.links, snapshot.driver, snapshot.cuda, one_at_a_time, since)


def _card(gpu: DriverGpu, fault: str, slots: int, cordoned: bool) -> Card:
    return Card(
        index=gpu.index,
        uuid=gpu.uuid,
        memory=gpu.memory,
        slots=slots,
        model=gpu.model,
        numa=gpu.numa,
        pci=gpu.pci,
        mode="mig" if gpu.is_mig else "",
        healthy=not fault,
        reason=fault,
        cordoned=cordoned,
    )


def labels(snapshot: DriverSnapshot, isolation: str) -> dict[str, str | None]:
    """For people and node selectors; None removes the label."""
    models = {gpu.model for gpu in snapshot.gpus}
    sizes = {gpu.memory for gpu in snapshot.gpus}
    return {
        "gputile.io/gpus": str(len(snapshot.gpus)) if snapshot.gpus else None,
        "gputile.io/gpu-model": label_value(models.pop() if len(models) == 1 else "mixed" if models else ""),
        "gputile.io/gpu-memory": str(sizes.pop()) if len(sizes) == 1 else None,
        "gputile.io/driver": label_value(snapshot.driver),
        "gputile.io/cuda": label_value(snapshot.cuda),
        "gputile.io/isolation": isolation if snapshot.gpus else None,
    }


def label_value(text: str) -> str | None:
    """The text as a label value: at most 63 letters, digits, dots, dashes, underscores, alphanumeric at both ends."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:63].strip("-._") or None
