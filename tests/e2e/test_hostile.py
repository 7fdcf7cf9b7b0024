"""Hostile pods on a real API server, with two replicas behind their Service and a real kube-scheduler.

After each of them both replicas run and respond, the leader is the same, and a good pod is bound
within seconds. The admission policies of deploy/ are in force, as in every installation.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from bench.attackers import creatable, important

from tests import hostile
from tests.e2e.api import Kube, Manifest
from tests.e2e.control_plane import ControlPlane
from tests.e2e.gputile import NAMESPACE, Replica, rights
from tests.e2e.nodes import gpu_node, join
from tests.e2e.pods import node_of, tile
from tests.e2e.processes import wait_until
from tests.e2e.service import Service
from tests.hostile import MakePod

SPACE, NODE = "hostile", "n0"
SOON = 20.0  # seconds; kube-scheduler's own back-off may be ten of them
SLOTS = 200  # tiles on one GPU, so that 1,300 containers fit kube-scheduler's own sums
EXPOSURE = 3.0  # seconds between a hostile pod and the good pod: every loop has processed it


class Scene:
    """Two replicas, with the processes and the leader that must not change."""

    def __init__(self, plane: ControlPlane, replicas: tuple[Replica, ...]) -> None:
        self.plane, self.kube, self.replicas = plane, plane.kube, replicas
        self._pids = [replica.child.pid for replica in replicas]
        self._leaders = [replica.is_leader() for replica in replicas]
        self._number = 0

    def assert_healthy(self) -> None:
        for replica in self.replicas:
            assert replica.child.alive, replica.child.tail(30)
            assert replica.request("GET", "/healthz") == (200, "ok")
            assert replica.is_ready()
        assert [replica.child.pid for replica in self.replicas] == self._pids
        assert [replica.is_leader() for replica in self.replicas] == self._leaders

    def unused_name(self) -> str:
        """A name for a hostile pod. A late status patch of a deleted pod would delete a new pod of the same name: the
        API server completes the deletion by name, without the UID."""
        return f"bad-after-{self._number}"

    def assert_good_pod_is_bound(self) -> None:
        self._number += 1
        name, began = f"good-{self._number}", time.monotonic()
        self.kube.create(tile(name, 100), SPACE)
        wait_until(lambda: node_of(self.kube.find("Pod", name, SPACE)), SOON, f"{name} is bound")
        print(f"{name} was bound after {time.monotonic() - began:.1f} s")
        self.kube.delete("Pod", name, SPACE, grace=0)


@pytest.fixture(scope="module")
def scene(control_plane: ControlPlane) -> Iterator[Scene]:
    kube = control_plane.kube
    rights(control_plane)
    control_plane.namespace(SPACE)
    important(kube)
    join(kube, [gpu_node(f"n{n}", 8, slots=SLOTS) for n in range(12)])
    with ExitStack() as stack:
        first = stack.enter_context(Replica(control_plane, "gputile-a"))
        second = stack.enter_context(Replica(control_plane, "gputile-b", wait_for_lease=False))
        ports = {replica.name: ("127.0.0.1", replica.port) for replica in (first, second)}
        service = stack.enter_context(Service(kube, NAMESPACE, ports))
        stack.enter_context(control_plane.start_scheduler(config=first.config(port=service.port)))
        scene = Scene(control_plane, (first, second))
        scene.assert_good_pod_is_bound()
        yield scene
    control_plane.clear()


PENDING = (
    *("1,300 containers", "1,300 init containers", "1,300 sidecars", "1,300 containers of HAMi"),
    *("64 containers that fit nowhere", "24 containers that fit nowhere"),
    *("24 containers that fit nowhere, and are important", "24 containers of 4 GPUs each"),
    *("all the GPUs there could be", "17,000 keys of ours", "17,000 keys, and no GPU", "17,000 keys of HAMi"),
    *("45,000 UUIDs", "45,000 models", "45,000 types of HAMi", "45,000 policies"),
    *("terminal escapes everywhere", "the longest names"),
)
BOUND = (
    "1,200 init containers",
    "1,300 sidecars",
    "24 containers of 4 GPUs each",
    "17,000 keys of ours",
    "45,000 UUIDs",
)
ROWS = {
    **{name: hostile.TENANT[name] for name in PENDING},
    **{f"{name}, bound by its creator": hostile.bound(NODE)[name] for name in BOUND},
}


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in ROWS.items()])
def test_a_hostile_pod_does_not_delay_a_good_pod(scene: Scene, make: MakePod) -> None:
    kube = scene.kube
    bad = kube.create(creatable(make(scene.unused_name())), SPACE)
    try:
        time.sleep(EXPOSURE)
        scene.assert_good_pod_is_bound()
        scene.assert_healthy()
    finally:
        kube.delete("Pod", bad["metadata"]["name"], SPACE, grace=0)


def test_all_hostile_pods_at_once_do_not_stop_a_new_leader(scene: Scene) -> None:
    """A pod that crashes one process would crash its successor too."""
    kube = scene.kube
    manifests: list[Manifest] = [creatable(make(f"bad-{n}")) for n, make in enumerate(ROWS.values())]
    kube.create_many([*manifests, *map(creatable, hostile.fractions(30))], SPACE)
    scene.assert_good_pod_is_bound()
    scene.assert_healthy()
    first, second = scene.replicas
    first.child.restart()
    wait_until(first.is_ready, 60, "the restarted replica is ready", [first.child])
    wait_until(lambda: first.is_leader() or second.is_leader(), 30, "a leader is elected")
    scene.assert_good_pod_is_bound()
    _remove_pods(kube)


def _remove_pods(kube: Kube) -> None:
    kube.delete_all("Pod", SPACE, grace=0)
    wait_until(lambda: not kube.list("Pod", SPACE), 60, "all pods are gone")
