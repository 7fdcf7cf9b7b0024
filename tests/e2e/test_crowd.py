"""Many pods at once: all that fit are bound, no tile is double-allocated, and freed capacity goes to pending pods."""

import time
from collections.abc import Callable

from tests.e2e.api import Kube, Manifest
from tests.e2e.audit import audit
from tests.e2e.control_plane import ControlPlane
from tests.e2e.gputile import Replica, rights
from tests.e2e.kubelets import FakeKubelets
from tests.e2e.nodes import gpu_node, join
from tests.e2e.pods import all_bound, events_of, node_of, pod, tile
from tests.e2e.processes import wait_until
from tests.e2e.watching import Watch, watch

NODES, CARDS, PER_CARD = 15, 6, 10  # 900 tiles
MAKERS: list[Callable[[str], Manifest]] = [  # each makes a pod with a tenth of a card, in five dialects
    lambda name: tile(name, 1600),
    lambda name: pod(name, {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 1600, "nvidia.com/gpucores": 10}),
    lambda name: pod(name, {"nvidia.com/vgpu-number": 1, "nvidia.com/vgpu-memory": 1600, "nvidia.com/vgpu-cores": 10}),
    lambda name: pod(name, {"nvidia.com/vcuda-core": 10, "nvidia.com/vcuda-memory": 1600}),
    lambda name: pod(name, {"elasticgpu.io/gpu-core": 10, "elasticgpu.io/gpu-memory": 1600}),
]


def test_of_a_thousand_pods_for_nine_hundred_tiles_exactly_900_are_bound(plane: ControlPlane, kube: Kube) -> None:
    rights(plane)
    space = plane.namespace("crowd")
    join(kube, [gpu_node(f"n{n:02}", CARDS, 16000, "Tesla T4") for n in range(NODES)])
    manifests = [MAKERS[n % len(MAKERS)](f"p{n:04}") for n in range(1000)]
    with (
        Replica(plane) as gputile,
        plane.start_scheduler(config=gputile.config()),
        FakeKubelets(kube),
        watch(kube, "Pod", space) as pods,
    ):
        began = time.monotonic()
        kube.create_many(manifests, space)
        pods.wait_for(all_bound(900), 120, "900 pods are bound")
        took = time.monotonic() - began
        wait_until(lambda: len(unschedulable(pods)) == 100, 60, "the other 100 are unschedulable")
        assert len(bound(pods)) == 900
        allocated = audit(kube)
        assert set(allocated.values()) == {16000}, "every GPU is fully allocated"
        conflicts = gputile.count("gputile_binds_total", outcome="conflict")
        binds = gputile.count("gputile_binds_total", outcome="bound")
        print(f"1000 pods created and 900 bound in {took:.1f} s; {conflicts:.0f} conflicts in {binds:.0f} binds")
        assert binds == 900
        assert conflicts < 0.01 * binds
        connections = gputile.count("gputile_connections_total", protocol="http/1.1")
        print(f"{connections:.0f} connections: kube-scheduler keeps two, and binds of a burst need more at a time")
        assert 1 <= connections <= 0.5 * (1000 + binds), "at least every other call is on a kept connection"
        assert_reasons(kube, space, unschedulable(pods))
        for name in sorted(bound(pods))[:20]:
            assert_freed_capacity_is_used(kube, space, pods, name)
        audit(kube)


def bound(pods: Watch) -> set[str]:
    return {name for (_, name), pod in pods.objects.items() if node_of(pod)}


def unschedulable(pods: Watch) -> set[str]:
    """Pods that kube-scheduler has marked unschedulable, with gputile's reason."""
    names = set()
    for (_, name), it in pods.objects.items():
        shown = [c for c in it["status"].get("conditions", []) if c["type"] == "PodScheduled"]
        if not node_of(it) and shown and shown[0].get("reason") == "Unschedulable" and "GPU" in shown[0]["message"]:
            names.add(name)
    return names


def assert_reasons(kube: Kube, space: str, pending: set[str]) -> None:
    """kube-scheduler's events have short reasons; gputile's own event has the amounts, for a few pods per second."""
    events = wait_until(
        lambda: [e for name in sorted(pending)[:5] for e in events_of(kube, space, name, "NoFittingGPU")], 30, "events"
    )
    assert "15/15" not in events[0]["message"]
    assert "0/15 nodes are available" in events[0]["message"]


def assert_freed_capacity_is_used(kube: Kube, space: str, pods: Watch, name: str) -> None:
    """Delete a pod; a pending pod is bound within two seconds after its object is gone."""
    before = len(bound(pods))
    kube.delete("Pod", name, space, grace=0)
    pods.wait_for(lambda them: (space, name) not in them, 10, f"{name} is gone")
    freed = time.monotonic()
    pods.wait_for(all_bound(before), 10, "another pod is bound in its place")
    took = time.monotonic() - freed
    assert took < 2.0, f"it took {took:.2f} s"
