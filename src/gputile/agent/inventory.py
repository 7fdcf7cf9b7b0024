"""From what the driver shows to what the node says: cards, labels, sums. Pure."""

import re
from collections.abc import Collection, Mapping

from gputile.dialects.kube_objects import NodeInventory
from gputile.model.cards import Card
from gputile.nvml.driver import DriverGpu, DriverSnapshot


def inventory(
    sight: DriverSnapshot,
    faults: Mapping[str, str],
    slots: int,
    cordoned: Collection[str] = (),
    *,
    one_at_a_time: bool = False,
    since: str = "",
) -> NodeInventory:
    """The node's cards; `faults` says by UUID why one is out of use. `one_at_a_time`: pods must start so here. `since`:
    when an agent of ours first served the node."""
    cards = [_card(gpu, faults.get(gpu.uuid, "") or gpu.fault, slots, gpu.uuid in cordoned) for gpu in sight.gpus]
    return NodeInventory(tuple(cards), sight.links, sight.driver, sight.cuda, one_at_a_time, since)


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


def labels(sight: DriverSnapshot, isolation: str) -> dict[str, str | None]:
    """For people and node selectors; a label that has nothing to say is removed."""
    models = {gpu.model for gpu in sight.gpus}
    sizes = {gpu.memory for gpu in sight.gpus}
    return {
        "gputile.io/gpus": str(len(sight.gpus)) if sight.gpus else None,
        "gputile.io/gpu-model": label_value(models.pop() if len(models) == 1 else "mixed" if models else ""),
        "gputile.io/gpu-memory": str(sizes.pop()) if len(sizes) == 1 else None,
        "gputile.io/driver": label_value(sight.driver),
        "gputile.io/cuda": label_value(sight.cuda),
        "gputile.io/isolation": isolation if sight.gpus else None,
    }


def label_value(text: str) -> str | None:
    """As a label may have it: at most 63 letters, digits, dots, dashes and underscores, none of these at its ends."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:63].strip("-._") or None
