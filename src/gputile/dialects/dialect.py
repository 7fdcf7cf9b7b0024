"""What a dialect is: everything that gputile asks of one, in one interface. A dialect is a module that has it all."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from gputile.dialects.device_resources import DeviceResource
from gputile.dialects.kube_objects import GrantContext, NodeInventory, NodeObject, Pod, PodRecord
from gputile.dialects.settings import DialectSettings
from gputile.model.cards import Card
from gputile.model.grants import Grant
from gputile.model.requests import PodRequest


class Dialect(Protocol):
    """The interface of a dialect's module."""

    NAME: str

    EXTENDS: str
    """The dialect whose device resource this one uses too, with resources of its own beside it; "" for none."""

    SLOTS_PER_TILE: int
    """1 if a device is a slot of a card, of which a tile takes one; 0 if the devices are amounts."""

    AGENT_GUESSES: bool
    """Whether its own agent guesses the pod that a device request of the kubelet belongs to."""

    EXTENDER_PATHS: tuple[str, ...]
    """The paths of its own scheduler extender that gputile serves; the last part of a path is the verb."""

    EXAMPLES: tuple[Mapping[str, int], ...]
    """The limits of a container that requests a share of a GPU, once for each set of resource names."""

    def resources(self, settings: DialectSettings) -> frozenset[str]:
        """The resources that make a pod one of this dialect."""

    def amounts_of_one_gpu(self, settings: DialectSettings) -> Mapping[str, int]:
        """How much of a resource is one GPU; of a resource that is not named here, any amount is a share of one."""

    def device_resources(self, cards: list[Card], settings: DialectSettings) -> list[DeviceResource]:
        """The resources that carry devices, and the devices of these cards."""

    def status_resources(self, cards: list[Card], settings: DialectSettings) -> dict[str, int]:
        """The other resources in the node's status: sums over these cards."""

    def read_pod(self, pod: Pod, settings: DialectSettings) -> PodRequest | None:
        """What the pod requests; None when no container requests a card. Raises `UnreadableValue`."""

    def write_grant(self, context: GrantContext) -> PodRecord:
        """The record that the dialect's own scheduler would write, and the environment of the containers."""

    def record_keys(self, settings: DialectSettings) -> Iterable[str]:
        """The annotations or labels that show a record, as far as their number is fixed."""

    def read_grant(self, pod: Pod, cards: tuple[Card, ...], settings: DialectSettings) -> Grant | None:
        """The record on a bound pod. Raises `UnreadableValue`."""

    def read_cards(self, node: NodeObject, settings: DialectSettings) -> NodeInventory | None:
        """The cards, as the dialect's own agent describes them; None when it does not serve the node."""
