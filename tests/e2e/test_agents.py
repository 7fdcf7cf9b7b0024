"""What node agents say, on a real control plane: Leases, kubelets without a plugin, pods that were turned away or
deleted by force. The nodes are fake, so the test itself is the agent and the kubelet."""

import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Self

import pytest

from gputile.dialects import gputile as dialect
from gputile.model.grants import ContainerGrant, Grant, Tile
from tests.e2e.api import Kube, Manifest
from tests.e2e.audit import audit, grant
from tests.e2e.control_plane import ControlPlane
from tests.e2e.gputile import Replica, rights
from tests.e2e.nodes import gpu_node, join
from tests.e2e.pods import events_of, node_of, pod, tile
from tests.e2e.processes import wait_until

NO_ROOM = "too little free memory on a single GPU"
AGENTS, NODE, SIZE = "gputile-agents", "agent-1", 16000
LASTS = 3  # seconds that a Lease holds
LINGER = 2  # seconds
QUICK = 2.0  # seconds within which a pod that waits is bound when its node is in use again


class Agent:
    """The agent of one node, as far as the scheduler sees it. In a `with` it renews its Lease, twice a second."""

    def __init__(self, kube: Kube, node: str = NODE, lasts: int = LASTS) -> None:
        self._kube, self._node, self._lasts = kube, node, lasts
        self._over = threading.Event()

    def __enter__(self) -> Self:
        self._over.clear()
        self.renew()
        self._thread = threading.Thread(target=self._live, name="agent", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10)

    def _live(self) -> None:
        while not self._over.wait(0.5):
            self.renew()

    def renew(self, holder: str | None = None) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {"holderIdentity": self._node if holder is None else holder, "renewTime": now}
        if self._kube.find("Lease", self._node, AGENTS):
            self._kube.patch("Lease", self._node, {"spec": spec}, AGENTS)
        else:
            made = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": self._node}}
            self._kube.create({**made, "spec": {**spec, "leaseDurationSeconds": self._lasts}}, AGENTS)

    def stop(self) -> None:
        self.renew(holder="")

    def names(self, *held: Grant) -> None:
        """Pods that are gone while their containers run."""
        text = dialect.write_orphaned_pods(held) if held else None
        self._kube.patch("Node", self._node, {"metadata": {"annotations": {dialect.ORPHANED: text}}})


@pytest.fixture
def agent(plane: ControlPlane, kube: Kube) -> Iterator[Agent]:
    rights(plane)
    join(kube, [gpu_node(NODE, cards=1, memory=SIZE, model="Tesla T4")])
    yield Agent(kube)
    kube.delete_all("Lease", AGENTS)


@pytest.fixture
def gputile(plane: ControlPlane, agent: Agent) -> Iterator[Replica]:
    with Replica(plane, agents__orphan_grace=LINGER) as replica, plane.start_scheduler(config=replica.config()):
        yield replica


def refused(kube: Kube, space: str, name: str, words: str) -> list[Manifest]:
    """kube-scheduler's events about a pod that say this."""
    return [event for event in events_of(kube, space, name, "FailedScheduling") if words in event["message"]]


def bound_within(kube: Kube, space: str, name: str, seconds: float) -> float:
    began = time.monotonic()
    wait_until(lambda: node_of(kube.get("Pod", name, space)), seconds, f"{name} bound")
    return time.monotonic() - began


def test_a_silent_agents_node_is_refused_and_in_use_again_with_the_next_renewal(
    plane: ControlPlane, kube: Kube, gputile: Replica, agent: Agent
) -> None:
    space = plane.namespace("silent")
    agent.renew()
    wait_until(lambda: gputile.count("gputile_agents", state="alive") == 1, 10, "the Lease seen")
    wait_until(lambda: gputile.count("gputile_agents", state="stale") == 1, LASTS + 5, "the agent silent")
    kube.create(tile("waits", 8000), space)
    wait_until(
        lambda: refused(kube, space, "waits", "a GPU agent whose Lease has expired"), 20, "kube-scheduler's event"
    )
    told = wait_until(lambda: events_of(kube, space, "waits", "NoFittingGPU"), 20, "our event")
    assert "a GPU agent whose Lease has expired" in told[0]["message"]
    assert node_of(kube.get("Pod", "waits", space)) is None
    agent.renew()
    assert bound_within(kube, space, "waits", 10) < QUICK
    audit(kube)


def test_a_stopping_agents_node_is_refused_at_once(
    plane: ControlPlane, kube: Kube, gputile: Replica, agent: Agent
) -> None:
    space = plane.namespace("stopping")
    agent.renew()
    agent.stop()
    wait_until(lambda: gputile.count("gputile_agents", state="stale") == 1, 2, "the agent gone")
    kube.create(tile("waits", 8000), space)
    wait_until(
        lambda: refused(kube, space, "waits", "a GPU agent whose Lease has expired"), 20, "kube-scheduler's event"
    )
    agent.renew()
    assert bound_within(kube, space, "waits", 10) < QUICK


def test_a_node_without_a_lease_is_judged_as_ever(plane: ControlPlane, kube: Kube, gputile: Replica) -> None:
    space = plane.namespace("leaseless")
    kube.create(tile("goes", 8000), space)
    bound_within(kube, space, "goes", 20)


def test_a_kubelet_that_lost_the_plugin_gets_no_pods(plane: ControlPlane, kube: Kube, gputile: Replica) -> None:
    """kube-scheduler counts `gputile.io/gpu` itself; a pod of a dialect whose carrier is there comes to us."""
    space = plane.namespace("plugin")
    before = kube.get("Node", NODE)["status"]["allocatable"]["gputile.io/gpu"]
    has(kube, "0")
    kube.create(pod("waits", {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 8000}), space)
    wait_until(
        lambda: refused(kube, space, "waits", "no gputile device plugin registered with the kubelet"), 20, "the reason"
    )
    has(kube, before)
    bound_within(kube, space, "waits", 20)


def has(kube: Kube, devices: str) -> None:
    amounts = {"gputile.io/gpu": devices}
    kube.patch("Node", NODE, {"status": {"allocatable": amounts}}, subresource="status", how="strategic")


def test_a_pod_that_its_kubelet_turned_away_is_freed_and_told(
    plane: ControlPlane, kube: Kube, gputile: Replica, agent: Agent
) -> None:
    space = plane.namespace("turned-away")
    with agent:
        kube.create(tile("first", SIZE), space)
        bound_within(kube, space, "first", 20)
        kube.create(tile("second", SIZE), space)
        wait_until(lambda: refused(kube, space, "second", NO_ROOM), 20, "no room for the second")
        said = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "Allocate failed due to no devices"}
        kube.patch("Pod", "first", {"status": said}, space, subresource="status")
        (event,) = wait_until(lambda: events_of(kube, space, "first", "AdmissionFailed"), 10, "our event")
        assert "Allocate failed due to no devices" in event["message"]
        assert NODE in event["message"]
        bound_within(kube, space, "second", 20)
        assert gputile.count("gputile_admission_failures_total") == 1
        audit(kube)


def test_the_tile_of_a_pod_deleted_by_force_is_not_sold_while_its_container_lives(
    plane: ControlPlane, kube: Kube, gputile: Replica, agent: Agent
) -> None:
    space = plane.namespace("forced")
    with agent:
        kube.create(tile("first", SIZE), space)
        bound_within(kube, space, "first", 20)
        first = granted(kube.get("Pod", "first", space))
        kube.delete("Pod", "first", space, grace=0)
        kube.create(tile("second", SIZE), space)
        wait_until(lambda: refused(kube, space, "second", NO_ROOM), 20, "no room for the second")
        agent.names(first)
        time.sleep(2 * LINGER + 2)  # long enough for a tile that nobody names to be free
        assert gputile.count("gputile_orphaned_pods") == 1
        assert node_of(kube.get("Pod", "second", space)) is None
        audit(kube)
        agent.names()
        assert bound_within(kube, space, "second", 10) < QUICK
        wait_until(lambda: gputile.count("gputile_orphaned_pods") == 0, 5, "nothing lingers")
        audit(kube)


def test_the_tile_of_a_pod_deleted_by_force_is_free_when_its_agent_had_its_say(
    plane: ControlPlane, kube: Kube, gputile: Replica, agent: Agent
) -> None:
    space = plane.namespace("forced-ended")
    with agent:
        kube.create(tile("first", SIZE), space)
        bound_within(kube, space, "first", 20)
        kube.delete("Pod", "first", space, grace=0)
        kube.create(tile("second", SIZE), space)
        assert bound_within(kube, space, "second", 30) > LINGER


def granted(found: Manifest) -> Grant:
    held = grant(found)
    assert held is not None
    containers = tuple(
        ContainerGrant(c["name"], tuple(Tile(t["uuid"], t["index"], t["memory"], t["cores"]) for t in c["tiles"]))
        for c in held["containers"]
    )
    return Grant(pod=held["pod"], node=held["node"], dialect=held["dialect"], containers=containers)
