"""Hostile pods on a real API server, with two replicas behind their Service and a real kube-scheduler.

After each of them neither replica has restarted or stopped answering, the same one leads, and a good pod is bound
within seconds. The admission policies of deploy/ are in force, as in every installation.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from bench.attackers import creatable, important

from gputile.testing import hostile
from gputile.testing.hostile import MakePod
from tests.e2e.api import Kube, Manifest
from tests.e2e.control_plane import ControlPlane
from tests.e2e.gputile import NAMESPACE, Replica, rights
from tests.e2e.nodes import gpu_node, join
from tests.e2e.pods import node_of, tile
from tests.e2e.processes import wait_until
from tests.e2e.service import Service

SPACE, NODE = "hostile", "n0"
SOON = 20.0  # seconds; kube-scheduler itself may wait for ten of them
SLOTS = 200  # tiles on one GPU, so that kube-scheduler's own sums let 1,300 containers pass
LINGERS = 3.0  # seconds that a hostile pod is there before the good one comes: every loop has met it


class Scene:
    """Two replicas, and what must not change about them."""

    def __init__(self, plane: ControlPlane, replicas: tuple[Replica, ...]) -> None:
        self.plane, self.kube, self.replicas = plane, plane.kube, replicas
        self._pids = [replica.child.pid for replica in replicas]
        self._leads = [replica.leads() for replica in replicas]
        self._number = 0

    def assert_well(self) -> None:
        for replica in self.replicas:
            assert replica.child.alive, replica.child.tail(30)
            assert replica.request("GET", "/healthz") == (200, "ok")
            assert replica.is_ready()
        assert [replica.child.pid for replica in self.replicas] == self._pids
        assert [replica.leads() for replica in self.replicas] == self._leads

    def unused_name(self) -> str:
        """For a hostile pod. A status patch of a deleted pod that is still under way deletes a new pod of its name: the
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
        second = stack.enter_context(Replica(control_plane, "gputile-b", leads=False))
        ports = {replica.name: ("127.0.0.1", replica.port) for replica in (first, second)}
        service = stack.enter_context(Service(kube, NAMESPACE, ports))
        stack.enter_context(control_plane.start_scheduler(config=first.config(port=service.port)))
        found = Scene(control_plane, (first, second))
        found.assert_good_pod_is_bound()
        yield found
    control_plane.clear()


WAITING = (
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
    **{name: hostile.TENANT[name] for name in WAITING},
    **{f"{name}, bound by its creator": hostile.bound(NODE)[name] for name in BOUND},
}


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in ROWS.items()])
def test_a_hostile_pod_holds_up_nobody(scene: Scene, make: MakePod) -> None:
    kube = scene.kube
    made = kube.create(creatable(make(scene.unused_name())), SPACE)
    try:
        time.sleep(LINGERS)
        scene.assert_good_pod_is_bound()
        scene.assert_well()
    finally:
        kube.delete("Pod", made["metadata"]["name"], SPACE, grace=0)


def test_all_of_them_at_once_and_a_new_leader_among_them(scene: Scene) -> None:
    """What could end one process waits for its successor."""
    kube = scene.kube
    crowd: list[Manifest] = [creatable(make(f"bad-{n}")) for n, make in enumerate(ROWS.values())]
    kube.create_many([*crowd, *map(creatable, hostile.fractions(30))], SPACE)
    scene.assert_good_pod_is_bound()
    scene.assert_well()
    first, second = scene.replicas
    first.child.restart()
    wait_until(first.is_ready, 60, "the restarted replica is ready", [first.child])
    wait_until(lambda: first.leads() or second.leads(), 30, "one of them leads")
    scene.assert_good_pod_is_bound()
    _removed(kube)


def _removed(kube: Kube) -> None:
    kube.delete_all("Pod", SPACE, grace=0)
    wait_until(lambda: not kube.list("Pod", SPACE), 60, "all are gone")
