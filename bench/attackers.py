"""Hostile tenants and slow clients without a certificate, in a process of their own.

`attack(...)` runs in a `bench.prober.Caller`: it creates hostile pods all at once, calls the extender again and
again for pending pods as kube-scheduler does, and keeps slow connections open on every port.
"""

import heapq
import http.client
import json
import os
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Thread
from typing import Any

import msgspec
from tests.e2e.api import ApiError, Kube, Manifest

from bench.prober import Address, Cluster
from bench.strangers import half_bodies, half_heads, unread_pages
from gputile.testing import hostile
from gputile.testing.hostile import MakePod

PRIORITY = "hostile"  # the PriorityClass of the important pods
FIRST, LONGEST = 1.0, 10.0  # seconds of kube-scheduler's backoff
AFRESH = 8.0  # seconds after which slow clients reconnect
CREATING, ASKING = 3, 2  # threads
NICE = 10  # in reality the attackers run on other machines; here they leave the CPU to the measured processes


def kinds(node: str) -> dict[str, MakePod]:
    """The hostile pods of issue 15, by their problem; bound pods are bound to the node."""
    tenant, bound = hostile.TENANT, hostile.bound(node)
    waits = (
        "1,300 containers",
        "1,300 init containers",
        "1,300 sidecars",
        "64 containers that fit nowhere",
        "24 containers that fit nowhere",
        "24 containers that fit nowhere, and are important",
        "24 containers of 4 GPUs each",
        "17,000 keys of ours",
        "17,000 keys, and no GPU",
        "45,000 UUIDs",
        "45,000 UUIDs that are not wanted",
        "45,000 models",
        "a deep nomination",
        "terminal escapes everywhere",
    )
    sits = (
        "1,200 init containers",
        "17,000 keys of ours",
        "a deep grant",
        "a copied grant",
        "hami record: deep objects",
    )
    return {
        **{name: tenant[name] for name in waits},
        # Six GPUs have 16 GiB free and two have 32: eleven of these need one more GPU, until a pod is evicted.
        "24 containers that need evictions": lambda name: hostile.uneven(name, 11_000, 11, 8, 24),
        "24 important containers that need evictions": lambda name: hostile.uneven(
            name, 11_000, 11, 8, 24, priority=hostile.IMPORTANT
        ),
        **{f"{name}, bound": bound[name] for name in sits},
    }


def creatable(manifest: Manifest) -> Manifest:
    """The pod as a tenant would create it, in any namespace: no UID, and a priority by its class."""
    metadata = {key: value for key, value in manifest["metadata"].items() if key not in ("uid", "namespace")}
    spec = {key: value for key, value in manifest["spec"].items() if value is not None and key != "priority"}
    spec |= {"priorityClassName": PRIORITY} if manifest["spec"].get("priority") else {}
    return {**manifest, "metadata": metadata, "spec": spec}


def crowd(each: int, nodes: list[str], wanted: tuple[str, ...] = ()) -> Iterator[Manifest]:
    """`each` pods of every kind, mixed, bound pods on different nodes; and a hundred fractions."""
    for number in range(each):
        for position, (kind, make) in enumerate(kinds(nodes[number % len(nodes)]).items()):
            if not wanted or kind in wanted:
                yield creatable(make(f"bad-{position:02}-{number:02}"))
    yield from map(creatable, hostile.fractions(100 if each else 0))


class Attack(msgspec.Struct, frozen=True):
    created: int
    rejected: tuple[str, ...]  # by the API server, and why
    asked: int  # extender calls for hostile pods
    slowest: float  # seconds
    failed: tuple[str, ...]


class Attacker:
    """kube-scheduler's queue of hostile pods."""

    def __init__(self, address: Address, cluster: Cluster, space: str, nodes: list[str], victims: Manifest) -> None:
        self._address, self._kube, self._space = address, cluster.kube(), space
        self._nodes, self._victims = msgspec.json.encode(nodes), json.dumps(victims).encode()
        self.created = self.asked = 0
        self.slowest = 0.0
        self.rejected, self.failed = list[str](), list[str]()
        self._queue: list[tuple[float, int, float, bytes, Manifest]] = []

    def create(self, manifest: Manifest) -> None:
        try:
            pod = self._kube.create(manifest, self._space)
        except (ApiError, OSError) as error:
            self.rejected.append(f"{manifest['metadata']['name']}: {str(error)[:200]}")
            return
        self.created += 1
        if not pod["spec"].get("nodeName"):
            heapq.heappush(self._queue, (time.monotonic(), self.created, FIRST, msgspec.json.encode(pod), pod))

    def ask_until(self, end: float, connection: http.client.HTTPSConnection) -> None:
        while time.monotonic() < end:
            try:
                due, number, wait, encoded, pod = heapq.heappop(self._queue)
            except IndexError:
                time.sleep(0.02)
                continue
            time.sleep(max(0.0, min(due, end) - time.monotonic()))
            if not self._try(connection, encoded, pod):
                again = time.monotonic() + wait
                heapq.heappush(self._queue, (again, number, min(2 * wait, LONGEST), encoded, pod))

    def _try(self, connection: http.client.HTTPSConnection, encoded: bytes, pod: Manifest) -> bool:
        """Filter; bind the pod if it fits, else preempt if it has a priority."""
        result = self._send(connection, "filter", b'{"Pod":%b,"Nodes":null,"NodeNames":%b}' % (encoded, self._nodes))
        names = (result or {}).get("NodeNames")
        if names:
            metadata = pod["metadata"]
            named = {"PodName": metadata["name"], "PodNamespace": metadata["namespace"], "PodUID": metadata["uid"]}
            bound = self._send(connection, "bind", json.dumps({**named, "Node": names[0]}).encode())
            return bound is not None and bound.get("Error") == ""
        if pod["spec"].get("priority"):
            body = b'{"Pod":%b,"NodeNameToVictims":null,"NodeNameToMetaVictims":%b}' % (encoded, self._victims)
            self._send(connection, "preempt", body)
        return False

    def _send(self, connection: http.client.HTTPSConnection, verb: str, body: bytes) -> dict[str, Any] | None:
        begun = time.perf_counter()
        try:
            connection.request("POST", f"/gputile/{verb}", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            result = json.loads(answer.read())
            return result if isinstance(result, dict) else None
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.failed.append(f"{verb}: {type(error).__name__}: {str(error)[:100]}")
            connection.close()
            return None
        finally:
            self.asked += 1
            self.slowest = max(self.slowest, time.perf_counter() - begun)


def attack(
    address: Address,
    cluster: Cluster,
    space: str,
    nodes: list[str],
    victims: Manifest,
    each: int,
    seconds: float,
    ports: list[int],
    strangers: int,
) -> Attack:
    os.nice(NICE)
    end = time.monotonic() + seconds
    attacker = Attacker(address, cluster, space, nodes, victims)
    slow = Thread(target=sit, args=(ports, strangers, end), daemon=True)
    slow.start()
    with ThreadPoolExecutor(CREATING + ASKING) as pool:
        asking: list[Future[None]] = [pool.submit(attacker.ask_until, end, address.connection()) for _ in range(ASKING)]
        for manifest in crowd(each, nodes):
            pool.submit(_unless_over, attacker.create, manifest, end)
        for future in asking:
            future.result()
    slow.join(AFRESH + 5)
    return Attack(attacker.created, tuple(attacker.rejected), attacker.asked, attacker.slowest, tuple(attacker.failed))


def _unless_over(create: Callable[[Manifest], None], manifest: Manifest, end: float) -> None:
    if time.monotonic() < end:
        create(manifest)


def sit(ports: list[int], count: int, end: float) -> None:
    """`count` slow clients on each port: a third each with half a head, half a body, and an unread page."""
    trust = ssl.create_default_context()
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
    while time.monotonic() < end:
        closers = []
        for port in ports:
            for number, come in enumerate((half_heads, half_bodies, unread_pages)):
                with suppress(OSError):
                    closers.append(come(port, (count + number) // 3, trust))
        time.sleep(max(0.0, min(AFRESH, end - time.monotonic())))
        for close in closers:
            with suppress(OSError):
                close()


def important(kube: Kube) -> None:
    """Create the PriorityClass of the important pods; tenants may use the classes of their cluster."""
    kube.apply(
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": PRIORITY},
            "value": hostile.IMPORTANT,
        }
    )
