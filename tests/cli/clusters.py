"""Small clusters as files, for the commands that read one."""

import json
from pathlib import Path
from typing import Any

from gputile.sim.cluster import MemoryCluster
from gputile.sim.manifests import Workload
from gputile.testing.builders import NodeBuilder, pod

CREATED = "2026-11-16T09:00:00Z"


class Cluster:
    """Nodes, and pods that the production core placed or refused."""

    def __init__(self, *nodes: NodeBuilder) -> None:
        self._memory = MemoryCluster("binpack")
        self._others: list[dict[str, Any]] = []
        for number, built in enumerate(nodes, start=1):
            self._memory.add_node(built.manifest(f"10.0.0.{number}"))

    def add(self, name: str, limits: dict[str, Any], namespace: str = "team", **more: Any) -> "Cluster":
        manifest = pod(limits, name=name, namespace=namespace, **more)
        self._memory.submit(Workload(kind="Pod", name=name, namespace=namespace, replicas=1, pod=manifest))
        placed = self._memory.pods[f"{namespace}/{name}"]
        placed["metadata"]["creationTimestamp"] = CREATED
        placed["status"] = {"phase": "Running" if placed["spec"].get("nodeName") else "Pending"}
        return self

    def beside(self, *objects: dict[str, Any]) -> "Cluster":
        self._others += objects
        return self

    def pod(self, name: str, namespace: str = "team") -> dict[str, Any]:
        return self._memory.pods[f"{namespace}/{name}"]

    def objects(self) -> list[dict[str, Any]]:
        nodes = [{**manifest, "kind": "Node"} for manifest in self._memory.nodes.values()]
        return [*nodes, *self._memory.pods.values(), *self._others]

    def write(self, folder: Path) -> str:
        path = folder / "cluster.json"
        path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": self.objects()}))
        return str(path)


def tile(memory: int, cores: int = 0, cards: int = 1) -> dict[str, Any]:
    return {"gputile.io/gpu": cards, "gputile.io/memory": memory} | ({"gputile.io/cores": cores} if cores else {})
