"""Binds pods before a measurement, each with its grant, as the scheduler writes it.

Two calls per pod: create, and a Binding with the grant's annotation. For a control plane without the admission
policies, which allow only gputile to write a grant: call `rights(plane)` afterwards.
"""

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import msgspec
from tests.e2e.api import Kube, Manifest


class Seat(msgspec.Struct, frozen=True):
    """A pod, its node and its GPUs."""

    wish: Manifest
    node: str
    cards: tuple[int, ...]  # by index
    memory: int  # MiB of each


def seat_all(kube: Kube, space: str, seats: Iterable[Seat], threads: int = 8) -> None:
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda pod_seat: seat(kube, space, pod_seat), seats):
            pass


def seat(kube: Kube, space: str, place: Seat) -> None:
    pod = kube.create(place.wish, space)
    name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
    tiles = [
        {"uuid": f"GPU-{place.node}-{card}", "index": card, "memory": place.memory, "cores": 0} for card in place.cards
    ]
    containers = [{"name": pod["spec"]["containers"][0]["name"], "tiles": tiles, "role": "app"}]
    grant = {"version": 1, "pod": uid, "node": place.node, "dialect": "gputile", "containers": containers}
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": name, "uid": uid, "annotations": {"gputile.io/grant": json.dumps(grant)}},
        "target": {"apiVersion": "v1", "kind": "Node", "name": place.node},
    }
    kube.create(binding, space, "binding")
