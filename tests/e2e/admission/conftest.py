"""Fixtures: every admission policy in force, a pod `p`, and two nodes."""

from collections.abc import Iterator

import pytest

from tests.e2e import agents
from tests.e2e.admission.writers import AWAY, HOME, ZONES, Writers, wait_until_in_force
from tests.e2e.api import Kube
from tests.e2e.control_plane import ControlPlane
from tests.e2e.gputile import rights
from tests.e2e.nodes import gpu_node, join
from tests.e2e.pods import tile

KUBELET_STATUS = {
    "daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}},
    "images": [{"names": ["busybox"], "sizeBytes": 1}],
    "volumesInUse": ["v1"],
    "volumesAttached": [{"name": "v1", "devicePath": "/dev/x"}],
    "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}],
}


@pytest.fixture
def writers(plane: ControlPlane, kube: Kube) -> Iterator[Writers]:
    """Clients with every policy in force, a pod `p`, and two nodes in their initial state."""
    rights(plane)
    agents.rights(plane)
    join(kube, [gpu_node(name, labels=ZONES) for name in (HOME, AWAY)])
    kube.patch("Node", HOME, {"status": KUBELET_STATUS}, subresource="status")
    clients = Writers(plane)
    kube.create(tile("p", 1000, schedulerName="nobody"))
    wait_until_in_force(clients)
    yield clients
    for name in ("scheduler", "agent", "agent without a node"):
        clients[name].close()
