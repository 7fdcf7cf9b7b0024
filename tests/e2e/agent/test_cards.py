"""The inventory of a node, and how the agent follows changes of the cards."""

import json
from collections import Counter
from collections.abc import Callable

from tests.e2e.agent.site import ON_A, Site
from tests.e2e.agents import A100, T4, condition, two_models
from tests.e2e.api import Manifest
from tests.e2e.audit import tiles
from tests.e2e.pods import events_of, tile
from tests.e2e.processes import wait_until
from tests.nvml.stub import StubCard


def node_a(site: Site) -> Manifest:
    return site.kube.get("Node", "node-a")


def cards(site: Site) -> list[Manifest]:
    inventory: list[Manifest] = json.loads(node_a(site)["metadata"]["annotations"]["gputile.io/inventory"])["cards"]
    return inventory


def allocatable(site: Site, resource: str) -> str | None:
    amount: str | None = node_a(site)["status"]["allocatable"].get(resource)
    return amount


def test_the_node_has_the_inventory_and_the_resources_of_its_cards(site: Site) -> None:
    counted = ("aliyun.com/gpu-mem", "nvidia.com/gpu", "tencent.com/vcuda-core", "elasticgpu.io/gpu-core")
    wait_until(
        lambda: all(allocatable(site, name) for name in counted), 15, "the kubelet counts every plugin's devices"
    )
    node = node_a(site)
    assert Counter(card["model"] for card in cards(site)) == {A100: 4, T4: 4}
    offered = node["status"]["allocatable"]
    assert (offered["gputile.io/gpu"], offered["gputile.io/cores"]) == ("80", "800")
    assert offered["gputile.io/memory"] == str(4 * 81920 + 4 * 15360)
    assert (offered["aliyun.com/gpu-mem"], offered["nvidia.com/gpu"]) == (str(4 * 80 + 4 * 15), "8")
    assert (offered["tencent.com/vcuda-core"], offered["elasticgpu.io/gpu-core"]) == ("800", "800")
    assert node["metadata"]["labels"]["gputile.io/gpu-model"] == "mixed"
    assert condition(node)["status"] == "True"


def test_a_removed_extended_resource_is_written_again(site: Site) -> None:
    whole = allocatable(site, "gputile.io/memory")
    gone = {"gputile.io/memory": None}
    site.kube.patch("Node", "node-a", {"status": {"capacity": gone, "allocatable": gone}}, subresource="status")
    wait_until(lambda: allocatable(site, "gputile.io/memory") == whole, 15, "the extended resource is back")


def test_the_node_is_not_written_while_nothing_changes(site: Site) -> None:
    def written() -> float:
        return site.a.count("gputile_agent_node_writes_total")

    before, heartbeats = written(), site.a.count("gputile_agent_heartbeats_total")
    wait_until(lambda: site.a.count("gputile_agent_heartbeats_total") >= heartbeats + 2, 15, "two heartbeats")
    assert written() == before


def test_added_removed_and_replaced_cards_are_followed(site: Site) -> None:
    usual = two_models("a")
    more = two_models("a")
    more.cards.append(StubCard("GPU-a-8", "NVIDIA L40S", 46080, minor=8, pci="0000:40:00", mig=False, ecc=0))
    more.cards[0].uuid = "GPU-a-new"  # a card was replaced
    try:
        site.a.hardware(more)
        wait_until(lambda: site.a.offered() == 90, 30, "nine cards are offered")
        wait_until(
            lambda: {"GPU-a-8", "GPU-a-new"} <= {card["uuid"] for card in cards(site)},
            10,
            "both new UUIDs are in the inventory",
        )
        assert "GPU-a-0" not in {card["uuid"] for card in cards(site)}
        wait_until(lambda: allocatable(site, "nvidia.com/gpu") == "9", 15, "the kubelet counts nine")
    finally:
        site.a.hardware(usual)
    wait_until(lambda: site.a.offered() == 80 and len(cards(site)) == 8, 30, "the usual cards are back")


def test_a_cordoned_card_gets_no_new_pods(site: Site, space: str) -> None:
    held = tiles(site.run(tile("tenant", 2048, **ON_A), space=space)["tenant"])[0]["uuid"]
    site.kube.patch("Node", "node-a", {"metadata": {"annotations": {"gputile.io/cordon": held}}})
    try:
        wait_until(lambda: site.a.offered() == 70, 15, "its devices are gone")
        used = _used_by_others(site, space)
        assert held not in used
        assert "tenant" in site.running(space)
    finally:
        site.kube.patch("Node", "node-a", {"metadata": {"annotations": {"gputile.io/cordon": None}}})
    wait_until(lambda: site.a.offered() == 80, 15, "its devices are back")


def test_a_card_hit_by_an_xid_is_unhealthy_until_its_probation_ends(site: Site, space: str) -> None:
    held = tiles(site.run(tile("tenant", 2048, **ON_A), space=space)["tenant"])[0]["uuid"]
    hit_by_xid = _xid_events(site, held)
    hit_by_xid(79)
    wait_until(lambda: site.a.offered() == 70, 30, "the card's devices are gone")
    wait_until(lambda: events_of(site.kube, space, "tenant", "GPUUnhealthy"), 10, "the tenant has an event")
    hit_by_xid(79)  # restarts the probation, so that it lasts for the pods below
    assert held not in _used_by_others(site, space)
    wait_until(lambda: site.a.offered() == 80, 30, "the devices are back after the probation")
    hit_by_xid(31)  # an error of the program, not of the card
    wait_until(lambda: site.a.count("gputile_agent_xids_total", xid="31") == 1, 10, "the XID is counted")
    assert site.a.offered() == 80
    assert "tenant" in site.running(space)


def test_a_card_that_falls_off_the_bus_is_unhealthy_with_a_reason(site: Site) -> None:
    try:
        site.a.hardware(site.a.cards.lose(2))
        wait_until(lambda: site.a.offered() == 70, 30, "the card's devices are gone")
        wait_until(lambda: condition(node_a(site))["reason"] == "CardsOutOfUse", 10, "the node's condition")
        (lost,) = [card for card in cards(site) if not card.get("healthy", True)]
        assert lost["uuid"] == "GPU-a-2"
        assert lost["reason"]
    finally:
        site.a.hardware(site.a.cards.heal(2))
    wait_until(lambda: site.a.offered() == 80, 30, "its devices are back")


def test_without_its_driver_a_node_offers_no_devices_until_the_driver_is_back(site: Site) -> None:
    try:
        site.a.hardware(site.a.cards.fail_driver(9))  # not loaded
        wait_until(lambda: site.a.offered() == 0, 30, "no devices")
        wait_until(lambda: condition(node_a(site))["reason"] == "NoDriver", 10, "the node's condition")
        assert site.a.is_healthy()
    finally:
        site.a.hardware(site.a.cards.heal_driver())
    wait_until(lambda: site.a.offered() == 80, 30, "the devices are back")
    wait_until(lambda: condition(node_a(site))["status"] == "True", 10, "the condition is True")


def _xid_events(site: Site, uuid: str) -> Callable[[int], None]:
    return lambda xid: site.a.hardware(site.a.cards.event(xid, uuid))


def _used_by_others(site: Site, space: str) -> set[str]:
    """The cards of four more pods on node-a."""
    pods = site.run(*(tile(f"other-{n}", 2048, **ON_A) for n in range(4)), space=space)
    return {held["uuid"] for name, pod in pods.items() if name != "tenant" for held in tiles(pod)}
