"""The scheduler's view of node agents, on a real control plane: Leases, kubelets without a device plugin, pods that a
kubelet rejected, and force-deleted pods. The nodes are fake, so the test acts as the agent and the kubelet."""

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

DOES_NOT_FIT = "too little free memory on a single GPU"
AGENTS, NODE, SIZE = "gputile-agents", "agent-1", 16000
LEASE_DURATION = 3  # seconds
ORPHAN_GRACE = 2  # seconds
QUICK = 2.0  # seconds within which a pending pod is bound when its node fits again


class Agent:
    """The agent of one node, as the scheduler sees it. In a `with` it renews its Lease twice a second."""

    def __init__(self, kube: Kube, node: str = NODE, lease_duration: int = LEASE_DURATION) -> None:
        self._kube, self._node, self._lease_duration = kube, node, lease_duration
        self._done = threading.Event()

    def __enter__(self) -> Self:
        self._done.clear()
        self.renew()
        self._thread = threading.Thread(target=self._run, name="agent", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._done.wait(0.5):
            self.renew()

    def renew(self, holder: str | None = None) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {"holderIdentity": self._node if holder is None else holder, "renewTime": now}
        if self._kube.find("Lease", self._node, AGENTS):
            self._kube.patch("Lease", self._node, {"spec": spec}, AGENTS)
        else:
            lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": self._node}}
            self._kube.create({**lease, "spec": {**spec, "leaseDurationSeconds": self._lease_duration}}, AGENTS)

    def stop(self) -> None:
        self.renew(holder="")

    def report_orphans(self, *grants: Grant) -> None:
        """Write the annotation with the grants of deleted pods whose containers still run."""
        text = dialect.write_orphaned_pods(grants) if grants else None
        self._kube.patch("Node", self._node, {"metadata": {"annotations": {dialect.ORPHANED: text}}})


@pytest.fixture
def agent(plane: ControlPlane, kube: Kube) -> Iterator[Agent]:
    rights(plane)
    join(kube, [gpu_node(NODE, cards=1, memory=SIZE, model="Tesla T4")])
    yield Agent(kube)
    kube.delete_all("Lease", AGENTS)


@pytest.fixture
def gputile(plane: ControlPlane, agent: Agent) -> Iterator[Replica]:
    with Replica(plane, agents__orphan_grace=ORPHAN_GRACE) as replica, plane.start_scheduler(config=replica.config()):
        yield replica


def rejections(kube: Kube, space: str, name: str, text: str) -> list[Manifest]:
    """kube-scheduler's events on a pod that contain this text."""
    return [event for event in events_of(kube, space, name, "FailedScheduling") if text in event["message"]]


def bound_within(kube: Kube, space: str, name: str, seconds: float) -> float:
    began = time.monotonic()
    wait_until(lambda: node_of(kube.get("Pod", name, space)), seconds, f"{name} bound")
    return time.monotonic() - began


def test_a_node_is_rejected_when_its_agents_lease_expires_and_accepted_after_the_next_renewal(
    plane: ControlPlane, kube: Kube, gputile: Replica, agent: Agent
) -> None:
    space = plane.namespace("silent")
    agent.renew()
    wait_until(lambda: gputile.count("gputile_agents", state="alive") == 1, 10, "the Lease is seen")
    wait_until(lambda: gputile.count("gputile_agents", state="stale") == 1, LEASE_DURATION + 5, "the Lease has expired")
    kube.create(tile("pending", 8000), space)
    wait_until(
        lambda: rejections(kube, space, "pending", "a GPU agent whose Lease has expired"), 20, "kube-scheduler's event"
    )
    events = wait_until(lambda: events_of(kube, space, "pending", "NoFittingGPU"), 20, "gputile's event")
    assert "a GPU agent whose Lease has expired" in events[0]["message"]
    assert node_of(kube.get("Pod", "pending", space)) is None
    agent.renew()
    assert bound_within(kube, space, "pending", 10) < QUICK
    audit(kube)


def test_the_node_of_a_stopping_agent_is_rejected_at_once(
    plane: ControlPlane, kube: Kube, gputile: Replica, agent: Agent
) -> None:
    space = plane.namespace("stopping")
    agent.renew()
    agent.stop()
    wait_until(lambda: gputile.count("gputile_agents", state="stale") == 1, 2, "the agent is stale")
    kube.create(tile("pending", 8000), space)
    wait_until(
        lambda: rejections(kube, space, "pending", "a GPU agent whose Lease has expired"), 20, "kube-scheduler's event"
    )
    agent.renew()
    assert bound_within(kube, space, "pending", 10) < QUICK


def test_a_node_without_a_lease_is_accepted(plane: ControlPlane, kube: Kube, gputile: Replica) -> None:
    space = plane.namespace("leaseless")
    kube.create(tile("new", 8000), space)
    bound_within(kube, space, "new", 20)


def test_a_node_whose_kubelet_lost_the_device_plugin_is_rejected(
    plane: ControlPlane, kube: Kube, gputile: Replica
) -> None:
    """kube-scheduler counts `gputile.io/gpu` itself; a pod of another dialect reaches gputile's filter."""
    space = plane.namespace("plugin")
    before = kube.get("Node", NODE)["status"]["allocatable"]["gputile.io/gpu"]
    set_devices(kube, "0")
    kube.create(pod("pending", {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 8000}), space)
    wait_until(
        lambda: rejections(kube, space, "pending", "no gputile device plugin registered with the kubelet"),
        20,
        "kube-scheduler's event",
    )
    set_devices(kube, before)
    bound_within(kube, space, "pending", 20)


def set_devices(kube: Kube, devices: str) -> None:
    amounts = {"gputile.io/gpu": devices}
    kube.patch("Node", NODE, {"status": {"allocatable": amounts}}, subresource="status", how="strategic")


def test_a_pod_that_its_kubelet_rejected_frees_its_tile_and_has_an_event(
    plane: ControlPlane, kube: Kube, gputile: Replica, agent: Agent
) -> None:
    space = plane.namespace("rejected")
    with agent:
        kube.create(tile("first", SIZE), space)
        bound_within(kube, space, "first", 20)
        kube.create(tile("second", SIZE), space)
        wait_until(lambda: rejections(kube, space, "second", DOES_NOT_FIT), 20, "the second does not fit")
        status = {
            "phase": "Failed",
            "reason": "UnexpectedAdmissionError",
            "message": "Allocate failed due to no devices",
        }
        kube.patch("Pod", "first", {"status": status}, space, subresource="status")
        (event,) = wait_until(lambda: events_of(kube, space, "first", "AdmissionFailed"), 10, "gputile's event")
        assert "Allocate failed due to no devices" in event["message"]
        assert NODE in event["message"]
        bound_within(kube, space, "second", 20)
        assert gputile.count("gputile_admission_failures_total") == 1
        audit(kube)


def test_the_tile_of_a_force_deleted_pod_is_not_allocated_while_its_container_runs(
    plane: ControlPlane, kube: Kube, gputile: Replica, agent: Agent
) -> None:
    space = plane.namespace("forced")
    with agent:
        kube.create(tile("first", SIZE), space)
        bound_within(kube, space, "first", 20)
        first = granted(kube.get("Pod", "first", space))
        kube.delete("Pod", "first", space, grace=0)
        kube.create(tile("second", SIZE), space)
        wait_until(lambda: rejections(kube, space, "second", DOES_NOT_FIT), 20, "the second does not fit")
        agent.report_orphans(first)
        time.sleep(2 * ORPHAN_GRACE + 2)  # a tile that no agent reports would be free by then
        assert gputile.count("gputile_orphaned_pods") == 1
        assert node_of(kube.get("Pod", "second", space)) is None
        audit(kube)
        agent.report_orphans()
        assert bound_within(kube, space, "second", 10) < QUICK
        wait_until(lambda: gputile.count("gputile_orphaned_pods") == 0, 5, "no pod is orphaned")
        audit(kube)


def test_the_tile_of_a_force_deleted_pod_is_free_after_the_grace_period_unless_its_agent_reports_it(
    plane: ControlPlane, kube: Kube, gputile: Replica, agent: Agent
) -> None:
    space = plane.namespace("forced-ended")
    with agent:
        kube.create(tile("first", SIZE), space)
        bound_within(kube, space, "first", 20)
        kube.delete("Pod", "first", space, grace=0)
        kube.create(tile("second", SIZE), space)
        assert bound_within(kube, space, "second", 30) > ORPHAN_GRACE


def granted(pod: Manifest) -> Grant:
    held = grant(pod)
    assert held is not None
    containers = tuple(
        ContainerGrant(c["name"], tuple(Tile(t["uuid"], t["index"], t["memory"], t["cores"]) for t in c["tiles"]))
        for c in held["containers"]
    )
    return Grant(pod=held["pod"], node=held["node"], dialect=held["dialect"], containers=containers)
