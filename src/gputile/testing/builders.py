"""Fluent builders: `node("n1").cards(8, "A100", "80Gi").card("T4", "16Gi", healthy=False).node()`."""

from collections.abc import Mapping
from functools import reduce
from operator import sub
from typing import Any

from gputile.dialects import gputile, registry
from gputile.dialects.kube_objects import NodeInventory
from gputile.model.cards import Card, FreeCapacity, Node, NodeView, Use
from gputile.model.requests import Constraints, ContainerRequest, PodRequest, Role
from gputile.model.units import MiB, host_mebibytes, millicores


def memory(size: str | MiB) -> MiB:
    """`"16Gi"` or plain MiB."""
    return size if isinstance(size, int) else host_mebibytes(size) or 0


class NodeBuilder:
    """Collects the cards of a node; `node()`, `view()` and `manifest()` build its three forms."""

    def __init__(self, name: str, cpu: str = "64", host: str = "512Gi") -> None:
        self._name, self._cpu, self._host = name, millicores(cpu) or 0, memory(host)
        self._cards: list[Card] = []
        self._taken: dict[int, list[Use]] = {}
        self._links: tuple[tuple[int, ...], ...] = ()
        self._facts: dict[str, Any] = {}

    def card(self, model: str = "A100", size: str | MiB = "80Gi", **facts: Any) -> "NodeBuilder":
        index = len(self._cards)
        self._cards.append(
            Card(index=index, uuid=f"GPU-{self._name}-{index}", **{"memory": memory(size), "model": model, **facts})
        )
        return self

    def cards(self, count: int, model: str = "A100", size: str | MiB = "80Gi", **facts: Any) -> "NodeBuilder":
        for _ in range(count):
            self.card(model, size, **facts)
        return self

    def taken(self, index: int, size: str | MiB = 0, cores: int = 0, slots: int = 1) -> "NodeBuilder":
        """Add a pod that holds this much of a card."""
        self._taken.setdefault(index, []).append(Use(memory(size), cores, slots))
        return self

    def linked(self, *lines: tuple[int, ...]) -> "NodeBuilder":
        self._links = lines
        return self

    def facts(self, **facts: Any) -> "NodeBuilder":
        self._facts |= facts
        return self

    def node(self) -> Node:
        return Node(
            name=self._name,
            cards=tuple(self._cards),
            cpu=self._cpu,
            memory=self._host,
            links=self._links,
            **{"agent": "gputile", **self._facts},
        )

    def view(self) -> NodeView:
        free_by_card = (reduce(sub, self._taken.get(c.index, []), FreeCapacity.of(c)) for c in self._cards)
        return NodeView(node=self.node(), free_by_card=tuple(free_by_card), cpu=self._cpu, memory=self._host)

    def manifest(self, address: str = "") -> dict[str, Any]:
        """The node as Kubernetes JSON, with our inventory annotation."""
        built = self.node()
        return {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": built.name,
                "annotations": {gputile.INVENTORY: gputile.write_inventory(NodeInventory(built.cards, built.links))},
            },
            "status": {
                "allocatable": {"cpu": f"{built.cpu}m", "memory": f"{built.memory}Mi"},
                "addresses": [{"type": "InternalIP", "address": address}] if address else [],
            },
        }


def node(name: str = "n1", cpu: str = "64", host: str = "512Gi") -> NodeBuilder:
    return NodeBuilder(name, cpu, host)


def ask(
    size: str | MiB | None = None,
    cores: int = 0,
    cards: int = 1,
    *,
    percent: int | None = None,
    whole: bool = False,
    name: str = "main",
    role: Role = Role.APP,
) -> ContainerRequest:
    """The request of one container: `ask("3Gi")`, `ask("3Gi", cards=4)`, `ask(percent=50)`, `ask(whole=True,
    cards=2)`."""
    if whole:
        return ContainerRequest.whole(name, role, cards)
    size = memory(size) if size is not None else None
    return ContainerRequest(container=name, role=role, cards=cards, memory=size, memory_percent=percent, cores=cores)


def wants(*asks: ContainerRequest, dialect: str = "gputile", cpu: int = 0, host: MiB = 0, **rest: Any) -> PodRequest:
    """The request of a pod with these containers; other keywords are fields of `Constraints`."""
    together = rest.pop("together", False)
    return PodRequest(
        dialect=dialect,
        asks=asks,
        cpu=cpu,
        memory=host,
        together=together,
        constraints=Constraints(**rest),
        slots=registry.slots_of(dialect),
    )


def pod(
    *containers: Mapping[str, Any],
    name: str = "web-0",
    namespace: str = "default",
    uid: str = "uid-1",
    init: tuple[Mapping[str, Any], ...] = (),
    annotations: Mapping[str, Any] | None = None,
    labels: Mapping[str, Any] | None = None,
    on: str | None = None,
) -> dict[str, Any]:
    """A pod as Kubernetes JSON; a container is its limits, e.g. `pod({"aliyun.com/gpu-mem": 3})`."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": uid,
            "annotations": dict(annotations or {}),
            "labels": dict(labels or {}),
        },
        "spec": {
            "initContainers": [container(limits, f"init-{n}") for n, limits in enumerate(init)],
            "containers": [container(limits, f"c{n}") for n, limits in enumerate(containers)],
            "nodeName": on,
        },
    }


def container(limits: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A container with these limits; the key `sidecar` makes an init container a sidecar."""
    limits = dict(limits)
    sidecar = limits.pop("sidecar", False)
    manifest: dict[str, Any] = {"name": name, "resources": {"limits": limits}}
    return manifest | {"restartPolicy": "Always"} if sidecar else manifest
