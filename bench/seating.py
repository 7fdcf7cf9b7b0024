"""Pods that are bound before a measurement begins, each with its grant, written as a bind writes it.

Room:  two calls per pod: create, and a Binding with the grant's annotation. For a control plane without the admission
       policies, which let nobody but gputile write a grant: `rights(plane)` comes afterwards.
Door:  `seat(kube, space, wish, node, cards)`, `seat_all`.
"""

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import msgspec
from tests.e2e.api import Kube, Manifest


class Seat(msgspec.Struct, frozen=True):
    """A pod, and where it sits."""

    wish: Manifest
    node: str
    cards: tuple[int, ...]  # by index
    memory: int  # MiB of each


def seat_all(kube: Kube, space: str, seats: Iterable[Seat], threads: int = 8) -> None:
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda one: seat(kube, space, one), seats):
            pass


def seat(kube: Kube, space: str, one: Seat) -> None:
    made = kube.create(one.wish, space)
    name, uid = made["metadata"]["name"], made["metadata"]["uid"]
    tiles = [{"uuid": f"GPU-{one.node}-{card}", "index": card, "memory": one.memory, "cores": 0} for card in one.cards]
    containers = [{"name": made["spec"]["containers"][0]["name"], "tiles": tiles, "role": "app"}]
    grant = {"version": 1, "pod": uid, "node": one.node, "dialect": "gputile", "containers": containers}
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": name, "uid": uid, "annotations": {"gputile.io/grant": json.dumps(grant)}},
        "target": {"apiVersion": "v1", "kind": "Node", "name": one.node},
    }
    kube.create(binding, space, "binding")
