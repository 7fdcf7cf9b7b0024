"""The auditor: proves from API objects alone that no card is sold beyond its size. Shares no code with gputile's book.

Room:  pods and nodes as dicts in, findings as sentences out.
Door:  `audit(kube)` asserts; `grant(pod)` reads a pod's grant.
"""

import json
from collections import defaultdict
from typing import Any

from tests.e2e.api import Kube, Manifest

GRANT, INVENTORY = "gputile.io/grant", "gputile.io/inventory"


def grant(pod: Manifest) -> dict[str, Any] | None:
    said = pod["metadata"].get("annotations", {}).get(GRANT)
    return json.loads(said) if said else None


def tiles(pod: Manifest) -> list[dict[str, Any]]:
    """Every tile of the pod, with the name of its container."""
    held = grant(pod)
    return [{**tile, "container": c["name"]} for c in (held["containers"] if held else []) for tile in c["tiles"]]


def audit(kube: Kube, namespace: str | None = None) -> dict[str, int]:
    """Every live pod with a node and a grant counts. Returns the MiB sold by card; fails with all findings."""
    pods = [pod for pod in kube.list("Pod", namespace) if is_live(pod)]
    cards = {card["uuid"]: card for node in kube.list("Node") for card in inventory(node)}
    findings = [f for pod in pods for f in strays(pod)]
    memory: dict[str, int] = defaultdict(int)
    cores: dict[str, int] = defaultdict(int)
    slots: dict[str, int] = defaultdict(int)
    for pod in pods:
        for tile in together(pod).values():
            memory[tile["uuid"]] += tile["memory"]
            cores[tile["uuid"]] += tile["cores"]
            slots[tile["uuid"]] += 1
    for uuid, sold in memory.items():
        card = cards.get(uuid)
        if card is None:
            findings.append(f"card {uuid} is granted and no node has it")
        elif sold > card["memory"] or cores[uuid] > 100 or slots[uuid] > card.get("slots", 10):
            findings.append(f"card {uuid} is sold twice: {sold} of {card['memory']} MiB, {cores[uuid]} %")
    assert not findings, "\n".join(findings)
    return dict(memory)


def inventory(node: Manifest) -> list[dict[str, Any]]:
    said = node["metadata"].get("annotations", {}).get(INVENTORY)
    return json.loads(said)["cards"] if said else []


def is_live(pod: Manifest) -> bool:
    return bool(pod["spec"].get("nodeName")) and pod["status"].get("phase") not in ("Succeeded", "Failed")


def strays(pod: Manifest) -> list[str]:
    """A grant that is not this pod's."""
    held, name = grant(pod), pod["metadata"]["name"]
    if held is None:
        return []
    right = (pod["metadata"]["uid"], pod["spec"]["nodeName"])
    return [] if (held["pod"], held["node"]) == right else [f"the grant of {name} names another pod or node"]


def together(pod: Manifest) -> dict[str, dict[str, Any]]:
    """By card, what the pod's app containers hold at once; init containers run before them on the same cards."""
    found: dict[str, dict[str, Any]] = {}
    for held in (grant(pod) or {"containers": []})["containers"]:
        if held.get("role", "app") == "init":
            continue
        for tile in held["tiles"]:
            before = found.get(tile["uuid"], {"uuid": tile["uuid"], "memory": 0, "cores": 0})
            memory, cores = before["memory"] + tile["memory"], before["cores"] + tile["cores"]
            found[tile["uuid"]] = {"uuid": tile["uuid"], "memory": memory, "cores": cores}
    return found
