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
from tests import hostile
from tests.e2e.api import ApiError, Kube, Manifest
from tests.hostile import MakePod

from bench.prober import Address, Cluster
from bench.slow_clients import half_bodies, half_heads, unread_pages

PRIORITY = "hostile"  # the PriorityClass of the important pods
FIRST, LONGEST = 1.0, 10.0  # seconds of kube-scheduler's backoff
RECONNECT = 8.0  # seconds after which slow clients reconnect
CREATE_THREADS, CALL_THREADS = 3, 2
NICE = 10  # in reality the attackers run on other machines; here they leave the CPU to the measured processes


def kinds(node: str) -> dict[str, MakePod]:
    """The hostile pods of issue 15, by their problem; bound pods are bound to the node."""
    by_tenant, bound = hostile.TENANT, hostile.bound(node)
    pending = (
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
    running = (
        "1,200 init containers",
        "17,000 keys of ours",
        "a deep grant",
        "a copied grant",
        "hami record: deep objects",
    )
    return {
        **{name: by_tenant[name] for name in pending},
        # Six GPUs have 16 GiB free and two have 32: eleven of these need one more GPU, until a pod is evicted.
        "24 containers that need evictions": lambda name: hostile.uneven(name, 11_000, 11, 8, 24),
        "24 important containers that need evictions": lambda name: hostile.uneven(
            name, 11_000, 11, 8, 24, priority=hostile.IMPORTANT
        ),
        **{f"{name}, bound": bound[name] for name in running},
    }


def creatable(manifest: Manifest) -> Manifest:
    """The pod as a tenant would create it, in any namespace: no UID, and a priority by its class."""
    metadata = {key: value for key, value in manifest["metadata"].items() if key not in ("uid", "namespace")}
    spec = {key: value for key, value in manifest["spec"].items() if value is not None and key != "priority"}
    spec |= {"priorityClassName": PRIORITY} if manifest["spec"].get("priority") else {}
    return {**manifest, "metadata": metadata, "spec": spec}


def hostile_pods(each: int, nodes: list[str], selected: tuple[str, ...] = ()) -> Iterator[Manifest]:
    """`each` pods of every kind, mixed, bound pods on different nodes; and a hundred fractions."""
    for number in range(each):
        for position, (kind, make) in enumerate(kinds(nodes[number % len(nodes)]).items()):
            if not selected or kind in selected:
                yield creatable(make(f"hostile-{position:02}-{number:02}"))
    yield from map(creatable, hostile.fractions(100 if each else 0))


class Attack(msgspec.Struct, frozen=True):
    """What the attackers did, and how their calls ended."""

    created: int
    rejected: tuple[str, ...]  # by the API server, and why
    calls: int  # extender calls for hostile pods
    slowest: float  # seconds
    failed: tuple[str, ...]


class Attacker:
    """kube-scheduler's queue of hostile pods."""

    def __init__(self, address: Address, cluster: Cluster, namespace: str, nodes: list[str], victims: Manifest) -> None:
        self._address, self._kube, self._namespace = address, cluster.kube(), namespace
        self._nodes, self._victims = msgspec.json.encode(nodes), json.dumps(victims).encode()
        self.created = self.calls = 0
        self.slowest = 0.0
        self.rejected, self.failed = list[str](), list[str]()
        self._queue: list[tuple[float, int, float, bytes, Manifest]] = []

    def create(self, manifest: Manifest) -> None:
        try:
            pod = self._kube.create(manifest, self._namespace)
        except (ApiError, OSError) as error:
            self.rejected.append(f"{manifest['metadata']['name']}: {str(error)[:200]}")
            return
        self.created += 1
        if not pod["spec"].get("nodeName"):
            heapq.heappush(self._queue, (time.monotonic(), self.created, FIRST, msgspec.json.encode(pod), pod))

    def call_until(self, end: float, connection: http.client.HTTPSConnection) -> None:
        while time.monotonic() < end:
            try:
                due, number, backoff, encoded, pod = heapq.heappop(self._queue)
            except IndexError:
                time.sleep(0.02)
                continue
            time.sleep(max(0.0, min(due, end) - time.monotonic()))
            if not self._try(connection, encoded, pod):
                retry_at = time.monotonic() + backoff
                heapq.heappush(self._queue, (retry_at, number, min(2 * backoff, LONGEST), encoded, pod))

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
        start = time.perf_counter()
        try:
            connection.request("POST", f"/gputile/{verb}", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            result = json.loads(response.read())
            return result if isinstance(result, dict) else None
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.failed.append(f"{verb}: {type(error).__name__}: {str(error)[:100]}")
            connection.close()
            return None
        finally:
            self.calls += 1
            self.slowest = max(self.slowest, time.perf_counter() - start)


def attack(
    address: Address,
    cluster: Cluster,
    namespace: str,
    nodes: list[str],
    victims: Manifest,
    each: int,
    seconds: float,
    ports: list[int],
    slow_clients: int,
) -> Attack:
    os.nice(NICE)
    end = time.monotonic() + seconds
    attacker = Attacker(address, cluster, namespace, nodes, victims)
    slow = Thread(target=hold_slow_connections, args=(ports, slow_clients, end), daemon=True)
    slow.start()
    with ThreadPoolExecutor(CREATE_THREADS + CALL_THREADS) as pool:
        calling: list[Future[None]] = [
            pool.submit(attacker.call_until, end, address.connection()) for _ in range(CALL_THREADS)
        ]
        for manifest in hostile_pods(each, nodes):
            pool.submit(_before_end, attacker.create, manifest, end)
        for future in calling:
            future.result()
    slow.join(RECONNECT + 5)
    return Attack(attacker.created, tuple(attacker.rejected), attacker.calls, attacker.slowest, tuple(attacker.failed))


def _before_end(create: Callable[[Manifest], None], manifest: Manifest, end: float) -> None:
    if time.monotonic() < end:
        create(manifest)


def hold_slow_connections(ports: list[int], count: int, end: float) -> None:
    """`count` slow clients on each port: a third each with half a head, half a body, and an unread page."""
    tls = ssl.create_default_context()
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    while time.monotonic() < end:
        closers = []
        for port in ports:
            for number, open_connections in enumerate((half_heads, half_bodies, unread_pages)):
                with suppress(OSError):
                    closers.append(open_connections(port, (count + number) // 3, tls))
        time.sleep(max(0.0, min(RECONNECT, end - time.monotonic())))
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
