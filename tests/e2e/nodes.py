"""Fake GPU nodes: Node objects with capacities and a Ready condition, and no machine behind them.

Manifests are pure; only `join` and `leave` call the API server. kube-scheduler checks sums itself, so a node counts
every resource name that a dialect requests.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import yaml

from gputile.testing import builders
from tests.e2e.api import Kube, Manifest

EXAMPLES = Path(__file__).parents[2] / "examples"
INVENTORY = "gputile.io/inventory"
SLOTS = 10  # tiles on one card, the default of gputile, hami and vgpu-manager
PODS = 500  # a kubelet has 110; with more, a small test cluster runs out of tiles before it runs out of pods
UNITS = {"gib": 1024, "quarter": 256, "mib": 1}

# What each dialect counts: `card` once per card, `slot` per tile, `percent` 100 per card, else memory in that unit.
COUNTED: Mapping[str, str] = {
    "gputile.io/gpu": "slot",
    "gputile.io/memory": "mib",
    "gputile.io/cores": "percent",
    "aliyun.com/gpu-mem": "gib",
    "aliyun.com/gpu-count": "card",
    "nano-gpu.io/gpu-core": "percent",
    "nano-gpu.io/gpu-memory": "gib",
    "nano-gpu/gpu-percent": "percent",
    "elasticgpu.io/gpu-core": "percent",
    "elasticgpu.io/gpu-memory": "gib",
    "tencent.com/vcuda-core": "percent",
    "tencent.com/vcuda-memory": "quarter",
    "nvidia.com/vcuda-core": "percent",
    "nvidia.com/vcuda-memory": "mib",
    "nvidia.com/gpu": "slot",
    "nvidia.com/gpumem": "mib",
    "nvidia.com/gpumem-percentage": "percent",
    "nvidia.com/gpucores": "percent",
    "nvidia.com/vgpu-number": "slot",
    "nvidia.com/vgpu-cores": "percent",
    "nvidia.com/vgpu-memory": "mib",
}


def gpu_node(
    name: str,
    cards: int = 8,
    memory: int = 81920,
    model: str = "NVIDIA A100-SXM4-80GB",
    *,
    cpu: str = "64",
    host: str = "512Gi",
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    resources: Mapping[str, Any] | None = None,
    **facts: Any,
) -> Manifest:
    """A node with equal cards of `memory` MiB. `facts` are those of a card: `slots=`, `numa=`, `healthy=`.

    `resources` replaces all GPU resources, for a node that serves one dialect only; cpu, memory and pods stay.
    """
    manifest = builders.node(name, cpu, host).cards(cards, model, memory, **facts).manifest()
    return from_manifest(manifest, labels=labels, annotations=annotations, resources=resources)


def plain_node(
    name: str,
    resources: Mapping[str, Any] | None = None,
    *,
    cpu: str = "64",
    host: str = "512Gi",
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
) -> Manifest:
    """A node without an inventory of gputile: without GPUs, or with another agent's resources."""
    bare = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
    bare["status"] = {"allocatable": {"cpu": cpu, "memory": host}}
    return from_manifest(bare, labels=labels, annotations=annotations, resources=resources or {})


def example_nodes(path: Path = EXAMPLES / "cluster.yaml") -> list[Manifest]:
    """The nodes of the demo's cluster, with the resources of every dialect."""
    return [from_manifest(it) for it in yaml.safe_load_all(path.read_text()) if it["kind"] == "Node"]


def from_manifest(
    manifest: Manifest,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    resources: Mapping[str, Any] | None = None,
) -> Manifest:
    """Complete a Node manifest: every dialect's resources by its inventory, pods, a Ready condition."""
    metadata, status = manifest["metadata"], manifest.get("status", {})
    all_annotations = {**metadata.get("annotations", {}), **(annotations or {})}
    allocatable = status.get("allocatable", {})
    if resources is None:
        amounts = {**counted(all_annotations.get(INVENTORY, "")), **allocatable}
    else:
        amounts = {**{name: allocatable[name] for name in ("cpu", "memory") if name in allocatable}, **resources}
    names = {"kubernetes.io/hostname": metadata["name"], "kubernetes.io/os": "linux"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": metadata["name"],
            "labels": {**names, **metadata.get("labels", {}), **(labels or {})},
            "annotations": all_annotations,
        },
        "spec": dict(manifest.get("spec", {})),
        "status": {**_amounts(amounts), "conditions": [READY], "addresses": status.get("addresses", [])},
    }


READY = {
    "type": "Ready",
    "status": "True",
    "reason": "KubeletReady",
    "message": "a fake node of the end-to-end tests",
    "lastHeartbeatTime": "2026-01-01T00:00:00Z",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
}


def counted(inventory: str) -> dict[str, int]:
    """The amount of every dialect's resources on a node with these cards; none without an inventory."""
    cards = msgspec.json.decode(inventory)["cards"] if inventory else []
    return {name: sum(_amount(card, unit) for card in cards) for name, unit in COUNTED.items() if cards}


def _amount(card: Mapping[str, Any], unit: str) -> int:
    by_card = {"card": 1, "slot": card.get("slots", SLOTS), "percent": 100}
    return int(by_card[unit] if unit in by_card else card["memory"] // UNITS[unit])


def _amounts(amounts: Mapping[str, Any]) -> Manifest:
    whole = {"pods": str(PODS), **{name: str(amount) for name, amount in amounts.items()}}
    return {"capacity": whole, "allocatable": whole}


def join(kube: Kube, manifests: Iterable[Manifest], threads: int = 4) -> Sequence[str]:
    """Create the nodes, Ready and without the not-ready taint; return their names."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda manifest: _join(kube, manifest), manifests))


def _join(kube: Kube, manifest: Manifest) -> str:
    name: str = manifest["metadata"]["name"]
    kube.create(manifest)
    kube.patch("Node", name, {"status": manifest["status"]}, subresource="status", how="strategic")
    # Admission adds the not-ready taint to every new node; the controller that removes it does not run.
    kube.patch("Node", name, {"spec": {"taints": manifest["spec"].get("taints")}})
    return name


def leave(kube: Kube, names: Iterable[str]) -> None:
    for name in names:
        kube.delete("Node", name)
