"""Binds pods before a measurement, each with its grant, as the scheduler writes it.

Two calls per pod: create, and a Binding with the grant's annotation. For a control plane without the admission
policies, which allow only gputile to write a grant: call `rights(plane)` afterwards.
"""

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import msgspec
from tests.e2e.api import Kube, Manifest


class BoundPod(msgspec.Struct, frozen=True):
    """A pod to create, its node and its GPUs."""

    manifest: Manifest
    node: str
    cards: tuple[int, ...]  # by index
    memory: int  # MiB of each


def bind_all(kube: Kube, namespace: str, bound_pods: Iterable[BoundPod], threads: int = 8) -> None:
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda bound_pod: bind(kube, namespace, bound_pod), bound_pods):
            pass


def bind(kube: Kube, namespace: str, bound_pod: BoundPod) -> None:
    pod = kube.create(bound_pod.manifest, namespace)
    name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
    tiles = [
        {"uuid": f"GPU-{bound_pod.node}-{card}", "index": card, "memory": bound_pod.memory, "cores": 0}
        for card in bound_pod.cards
    ]
    containers = [{"name": pod["spec"]["containers"][0]["name"], "tiles": tiles, "role": "app"}]
    grant = {"version": 1, "pod": uid, "node": bound_pod.node, "dialect": "gputile", "containers": containers}
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": name, "uid": uid, "annotations": {"gputile.io/grant": json.dumps(grant)}},
        "target": {"apiVersion": "v1", "kind": "Node", "name": bound_pod.node},
    }
    kube.create(binding, namespace, "binding")
