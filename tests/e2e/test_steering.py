"""`steer_cpu_pods`: pods without GPUs leave the CPU that GPUs need, and are bound without gputile too."""

from collections import Counter

from tests.e2e.api import Kube
from tests.e2e.audit import audit
from tests.e2e.control_plane import ControlPlane
from tests.e2e.gputile import Replica, rights
from tests.e2e.nodes import gpu_node, join, plain_node
from tests.e2e.pods import all_bound, node_of, pod, tile
from tests.e2e.watching import Watch, watch

CPU = {"cpu": "4", "memory": "1Gi"}
PLAIN = 12


def nodes_of(pods: Watch) -> Counter[str | None]:
    return Counter(node_of(pod) for pod in pods.objects.values())


def test_pods_without_gpus_are_bound_where_they_strand_no_card(plane: ControlPlane, kube: Kube) -> None:
    rights(plane)
    space = plane.namespace("steered")
    join(kube, [*(gpu_node(f"gpu-{n}", 4, 16000, cpu="16") for n in range(3)), plain_node("plain", cpu="64")])
    with (
        Replica(plane, steer_cpu_pods="true") as gputile,
        plane.start_scheduler(config=gputile.config(steers=True)),
        watch(kube, "Pod", space) as pods,
    ):
        kube.create_many([pod(f"cpu-{n:02}", CPU) for n in range(PLAIN)], space)
        pods.wait_for(all_bound(PLAIN), 30, "all pods are bound")
        assert nodes_of(pods) == {"plain": PLAIN}
        assert gputile.count("gputile_verbs_total", verb="steer", result="accepted") >= PLAIN
        gpus = [tile(f"gpu-{n:02}", 16000) for n in range(12)]
        for manifest in gpus:
            manifest["spec"]["containers"][0]["resources"]["limits"]["cpu"] = "4"
        kube.create_many(gpus, space)
        pods.wait_for(all_bound(PLAIN + 12), 30, "every GPU has its pod: its CPU was free")
        audit(kube)


def test_without_gputile_pods_without_gpus_are_bound_and_gpu_pods_are_pending(plane: ControlPlane, kube: Kube) -> None:
    rights(plane)
    space = plane.namespace("alone")
    join(kube, [gpu_node("gpu-0", 4, 16000, cpu="64")])
    gputile = Replica(plane, steer_cpu_pods="true")
    with gputile, plane.start_scheduler(config=gputile.config(steers=True)), watch(kube, "Pod", space) as pods:
        gputile.child.kill()
        kube.create(tile("gpu", 16000), space)
        kube.create_many([pod(f"cpu-{n:02}", CPU) for n in range(5)], space)
        pods.wait_for(all_bound(5), 30, "the five pods without GPUs are bound")
        assert node_of(pods.get(space, "gpu")) is None
