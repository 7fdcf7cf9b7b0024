"""The node's cards: what the driver shows, what health says of it, and what follows for kubelet and API server.

Room:  no I/O, no await; time is told.
Door:  `seen`, `record_xid`, `no_driver`; `now`, `device_resources`, `wanted`.
"""

from collections.abc import Collection

from gputile.agent.health import CardHealth
from gputile.agent.inventory import inventory, labels
from gputile.agent.node_reporter import DesiredNodeStatus
from gputile.agent.settings import AgentSettings
from gputile.dialects import gputile, hami
from gputile.dialects.device_resources import DeviceResource, device_resources, status_resources
from gputile.dialects.kube_objects import NodeInventory
from gputile.kubelet.cri import CdiSupport
from gputile.model.cards import Card
from gputile.nvml.driver import DriverSnapshot, XidError
from gputile.telemetry.agent_metrics import AgentMetrics


class CardInventory:
    """See the module's text."""

    def __init__(self, settings: AgentSettings, metrics: AgentMetrics) -> None:
        self._settings, self._metrics = settings, metrics
        health = settings.health
        self._health = CardHealth(health.probation, health.ignore_xids, health.fatal_xids)
        self._sight = DriverSnapshot()
        self._no_driver = ""
        self._had_cards = (
            False  # ever: then the inventory stays on the node, with its `since`, while the driver is gone
        )
        self.since = ""  # when an agent of ours first served this node; "" until the node was seen

    def restore(self, before: NodeInventory | None, now: float, wall: str) -> None:
        """What the node said of its cards before we came. `since` is written once: it parts pods that another system
        served from ours, and must survive restarts and upgrades."""
        known = before.cards if before is not None else ()
        self._health.restore({card.uuid: card.reason for card in known if not card.healthy}, now)
        self.since = (before.since if before is not None else "") or wall
        self._had_cards = bool(known) or bool(before is not None and before.since)

    def seen(self, sight: DriverSnapshot, now: float) -> list[str]:
        """The cards that are newly out of use."""
        self._sight, self._no_driver = sight, ""
        return self._health.seen(sight, now)

    def no_driver(self, why: str) -> None:
        """The driver does not answer: cards that were there are out of use until it does."""
        self._no_driver = why

    def record_xid(self, xid: XidError, now: float) -> list[str]:
        return self._health.record_xid(xid, [gpu.uuid for gpu in self._sight.gpus], now)

    def faults(self) -> dict[str, str]:
        if self._no_driver:
            return {gpu.uuid: self._no_driver for gpu in self._sight.gpus}
        return self._health.faults()

    def now(self, cordoned: Collection[str] = ()) -> tuple[Card, ...]:
        slots = self._settings.dialects.slots_per_card
        return inventory(self._sight, self.faults(), slots, cordoned).cards

    def carriers(self) -> list[DeviceResource]:
        serve, settings, cards = self._settings.serve, self._settings.dialects, self.now()
        shared = hami.NAME in serve
        return [one for name in serve for one in device_resources(name, cards, settings, shares_nvidia=shared)]

    def wanted(self, cordoned: Collection[str], cdi: CdiSupport) -> DesiredNodeStatus:
        """What the node should say. A cordon is a person's word about the card, not part of the inventory."""
        cards = self.now()
        in_use = sum(card.healthy and card.uuid not in cordoned for card in cards)
        self._metrics.cards.labels("in use").set(in_use)
        self._metrics.cards.labels("out of use").set(len(cards) - in_use)
        resources: dict[str, int] = {}
        for name in self._settings.serve:
            resources |= status_resources(name, cards, self._settings.dialects)
        reason, message = self._condition(cards, cdi)
        self._had_cards |= bool(cards)
        return DesiredNodeStatus(
            annotations={gputile.INVENTORY: self._written(one_at_a_time=not cdi.works) if self._had_cards else None},
            labels=labels(self._sight, self._settings.isolation),
            resources=resources if cards else {},
            is_well=reason == "Serving",
            reason=reason,
            message=message,
        )

    def _written(self, *, one_at_a_time: bool) -> str:
        slots = self._settings.dialects.slots_per_card
        return gputile.write_inventory(
            inventory(self._sight, self.faults(), slots, one_at_a_time=one_at_a_time, since=self.since)
        )

    def _condition(self, cards: tuple[Card, ...], cdi: CdiSupport) -> tuple[str, str]:
        """One word and a sentence."""
        if self._no_driver:
            return "NoDriver", self._no_driver
        if not cards:
            return "NoGPU", "the driver shows no card"
        if not cdi.works:
            return "NoCDI", f"pods are started one at a time, for the runtime does not obey CDI: {cdi.why}"
        out = [f"card {card.index}: {card.reason}" for card in cards if not card.healthy]
        if out:
            return "CardsOutOfUse", "; ".join(out)
        return "Serving", f"{len(cards)} cards, isolation {self._settings.isolation}"
