"""The node's cards: the driver's snapshot and the cards' health, as the kubelet and the API server need them.

No I/O and no await; the caller passes the time.
"""

from collections.abc import Collection

from gputile.agent.health import CardHealth
from gputile.agent.inventory import inventory, labels
from gputile.agent.node_reporter import DesiredNodeStatus
from gputile.agent.settings import AgentSettings
from gputile.dialects import gputile, registry
from gputile.dialects.device_resources import DeviceResource
from gputile.dialects.kube_objects import NodeInventory
from gputile.kubelet.cri import CdiSupport
from gputile.model.cards import Card
from gputile.nvml.driver import DriverSnapshot, XidError
from gputile.telemetry.agent_metrics import AgentMetrics


class CardInventory:
    """The cards of the node with their health, and the node status that follows from them."""

    def __init__(self, settings: AgentSettings, metrics: AgentMetrics) -> None:
        self._settings, self._metrics = settings, metrics
        health = settings.health
        self._health = CardHealth(health.probation, health.ignore_xids, health.fatal_xids)
        self._snapshot = DriverSnapshot()
        self._no_driver = ""
        self._had_cards = False  # then the inventory stays on the node, with its `since`, while the driver is gone
        self.since = ""  # when an agent of gputile first served this node; "" until the node was seen

    def restore(self, before: NodeInventory | None, now: float, wall: str) -> None:
        """Continue from the inventory that an earlier agent wrote. `since` is written once: it separates pods that
        another system served from ours, and must survive restarts and upgrades."""
        known = before.cards if before is not None else ()
        self._health.restore({card.uuid: card.reason for card in known if not card.healthy}, now)
        self.since = (before.since if before is not None else "") or wall
        self._had_cards = bool(known) or bool(before is not None and before.since)

    def seen(self, snapshot: DriverSnapshot, now: float) -> list[str]:
        """Returns the cards that became unhealthy."""
        self._snapshot, self._no_driver = snapshot, ""
        return self._health.seen(snapshot, now)

    def no_driver(self, why: str) -> None:
        """The driver does not answer: all known cards are unhealthy until it does."""
        self._no_driver = why

    def record_xid(self, xid: XidError, now: float) -> list[str]:
        """Returns the cards that became unhealthy."""
        return self._health.record_xid(xid, [gpu.uuid for gpu in self._snapshot.gpus], now)

    def faults(self) -> dict[str, str]:
        """The reasons of unhealthy cards, by UUID."""
        if self._no_driver:
            return {gpu.uuid: self._no_driver for gpu in self._snapshot.gpus}
        return self._health.faults()

    def current(self, cordoned: Collection[str] = ()) -> tuple[Card, ...]:
        slots = self._settings.dialects.slots_per_card
        return inventory(self._snapshot, self.faults(), slots, cordoned).cards

    def device_resources(self) -> list[DeviceResource]:
        """The resources to register with the kubelet."""
        return registry.device_resources(self._settings.serve, self.current(), self._settings.dialects)

    def desired_status(self, cordoned: Collection[str], cdi: CdiSupport) -> DesiredNodeStatus:
        """What the node object should have. A cordon is an administrator's annotation, not part of the inventory."""
        cards = self.current()
        in_use = sum(card.healthy and card.uuid not in cordoned for card in cards)
        self._metrics.cards.labels("in use").set(in_use)
        self._metrics.cards.labels("out of use").set(len(cards) - in_use)
        resources = registry.status_resources(self._settings.serve, cards, self._settings.dialects)
        reason, message = self._condition(cards, cdi)
        self._had_cards |= bool(cards)
        annotation = self._inventory_annotation(one_at_a_time=not cdi.works) if self._had_cards else None
        return DesiredNodeStatus(
            annotations={gputile.INVENTORY: annotation},
            labels=labels(self._snapshot, self._settings.isolation),
            resources=resources if cards else {},
            is_well=reason == "Serving",
            reason=reason,
            message=message,
        )

    def _inventory_annotation(self, *, one_at_a_time: bool) -> str:
        slots = self._settings.dialects.slots_per_card
        return gputile.write_inventory(
            inventory(self._snapshot, self.faults(), slots, one_at_a_time=one_at_a_time, since=self.since)
        )

    def _condition(self, cards: tuple[Card, ...], cdi: CdiSupport) -> tuple[str, str]:
        """Reason and message of the node condition."""
        if self._no_driver:
            return "NoDriver", self._no_driver
        if not cards:
            return "NoGPU", "the driver reports no GPU"
        if not cdi.works:
            return "NoCDI", f"pods start one at a time, because the container runtime does not support CDI: {cdi.why}"
        unhealthy = [f"GPU {card.index}: {card.reason}" for card in cards if not card.healthy]
        if unhealthy:
            return "CardsOutOfUse", "; ".join(unhealthy)
        return "Serving", f"{len(cards)} GPUs, isolation {self._settings.isolation}"
