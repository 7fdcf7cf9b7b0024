"""Many pods at once: exactly what fits is bound, nothing is sold twice, and who waits is bound when room appears."""

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
WISHES: list[Callable[[str], Manifest]] = [  # each a tenth of a card, in one dialect after the other
    lambda name: tile(name, 1600),
    lambda name: pod(name, {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 1600, "nvidia.com/gpucores": 10}),
    lambda name: pod(name, {"nvidia.com/vgpu-number": 1, "nvidia.com/vgpu-memory": 1600, "nvidia.com/vgpu-cores": 10}),
    lambda name: pod(name, {"nvidia.com/vcuda-core": 10, "nvidia.com/vcuda-memory": 1600}),
    lambda name: pod(name, {"elasticgpu.io/gpu-core": 10, "elasticgpu.io/gpu-memory": 1600}),
]


def test_a_thousand_pods_for_nine_hundred_tiles(plane: ControlPlane, kube: Kube) -> None:
    rights(plane)
    space = plane.namespace("crowd")
    join(kube, [gpu_node(f"n{n:02}", CARDS, 16000, "Tesla T4") for n in range(NODES)])
    wishes = [WISHES[n % len(WISHES)](f"p{n:04}") for n in range(1000)]
    with (
        Replica(plane) as gputile,
        plane.start_scheduler(config=gputile.config()),
        FakeKubelets(kube),
        watch(kube, "Pod", space) as pods,
    ):
        began = time.monotonic()
        kube.create_many(wishes, space)
        pods.wait_for(all_bound(900), 120, "900 pods bound")
        took = time.monotonic() - began
        wait_until(lambda: len(refused(pods)) == 100, 60, "the other 100 have their reason")
        assert len(bound(pods)) == 900
        sold = audit(kube)
        assert set(sold.values()) == {16000}, "every card is full"
        conflicts = gputile.count("gputile_binds_total", outcome="conflict")
        binds = gputile.count("gputile_binds_total", outcome="bound")
        print(f"1000 pods created and 900 bound in {took:.1f} s; {conflicts:.0f} conflicts in {binds:.0f} binds")
        assert binds == 900
        assert conflicts < 0.01 * binds
        assert 1 <= gputile.count("gputile_connections_total", protocol="h2") <= 0.1 * binds, "connections are kept"
        assert_reasons(kube, space, refused(pods))
        for goes in sorted(bound(pods))[:20]:
            assert_room_is_taken(kube, space, pods, goes)
        audit(kube)


def bound(pods: Watch) -> set[str]:
    return {name for (_, name), found in pods.objects.items() if node_of(found)}


def refused(pods: Watch) -> set[str]:
    """Pods that kube-scheduler has called unschedulable, with why."""
    found = set()
    for (_, name), it in pods.objects.items():
        said = [c for c in it["status"].get("conditions", []) if c["type"] == "PodScheduled"]
        if not node_of(it) and said and said[0].get("reason") == "Unschedulable" and "GPU" in said[0]["message"]:
            found.add(name)
    return found


def assert_reasons(kube: Kube, space: str, waiting: set[str]) -> None:
    """kube-scheduler shows short sentences; one event of ours has the figures, for a few pods per second."""
    told = wait_until(
        lambda: [e for name in sorted(waiting)[:5] for e in events_of(kube, space, name, "NoFittingGPU")], 30, "events"
    )
    assert "15/15" not in told[0]["message"]
    assert "0/15 nodes are available" in told[0]["message"]


def assert_room_is_taken(kube: Kube, space: str, pods: Watch, goes: str) -> None:
    """Delete a pod; when its containers are gone, a waiting one is bound within two seconds."""
    before = len(bound(pods))
    kube.delete("Pod", goes, space, grace=0)
    pods.wait_for(lambda them: (space, goes) not in them, 10, f"{goes} gone")
    freed = time.monotonic()
    pods.wait_for(all_bound(before), 10, "another pod bound in its place")
    took = time.monotonic() - freed
    assert took < 2.0, f"it took {took:.2f} s"
