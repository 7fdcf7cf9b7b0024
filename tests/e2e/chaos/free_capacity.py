"""Whether a GPU has enough free capacity for a pod that requests one tile: by arithmetic of the tests' own.

Pure. Pods with several tiles need a search, which is the engine's job; this module does not judge them.
"""

from collections.abc import Mapping, Sequence

import msgspec

from gputile.model.cards import Card
from gputile.model.requests import PodRequest
from gputile.model.units import MiB, Percent


class Free(msgspec.Struct, frozen=True):
    """The free capacity of a GPU."""

    card: Card
    memory: MiB
    cores: Percent
    slots: int
    tenants: int


def fitting_nodes(request: PodRequest, free: Mapping[str, Sequence[Free]]) -> list[str] | None:
    """The nodes with a GPU that fits the pod, regardless of CPU and memory; None: the pod requests several tiles."""
    asks = [ask for ask in request.asks if ask.cards]
    if len(asks) != 1 or asks[0].cards != 1:
        return None
    return [name for name, cards in free.items() if any(_fits(request, card) for card in cards)]


def _fits(request: PodRequest, free: Free) -> bool:
    (ask,) = (ask for ask in request.asks if ask.cards)
    card, constraints = free.card, request.constraints
    if not (card.healthy and not card.cordoned and not card.in_mig_mode):
        return False
    if not (
        constraints.accepts_model(card.model)
        and constraints.accepts_uuid(card.uuid)
        and constraints.accepts_mode(card.mode)
    ):
        return False
    if (ask.exclusive or constraints.idle) and free.tenants:
        return False
    return (
        free.memory >= ask.memory_of(card.memory)
        and free.cores >= max(ask.cores, 1)  # a GPU whose cores are fully allocated takes no pod
        and (not request.slots or free.slots >= 1)
    )
