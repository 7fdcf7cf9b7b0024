"""`gputile audit` on a real cluster: its output and its exit codes."""

import subprocess
import sys
from pathlib import Path

from tests.e2e.api import Kube
from tests.e2e.control_plane import ControlPlane
from tests.e2e.gputile import Replica, rights
from tests.e2e.nodes import gpu_node, join
from tests.e2e.pods import all_bound, tile
from tests.e2e.watching import watch

PROGRAM = Path(sys.executable).with_name("gputile")


def run(kubeconfig: Path) -> tuple[int, str]:
    done = subprocess.run([PROGRAM, "audit", "--kubeconfig", kubeconfig], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_the_audit_reads_the_cluster_of_a_kubeconfig(plane: ControlPlane, kube: Kube) -> None:
    rights(plane)
    space = plane.namespace("audited")
    join(kube, [gpu_node("n1", cards=2, memory=16000, model="Tesla T4")])
    with Replica(plane) as gputile, plane.start_scheduler(config=gputile.config()), watch(kube, "Pod", space) as pods:
        kube.create_many([tile(f"p{n}", 4000) for n in range(3)], space)
        pods.wait_for(all_bound(3), 20, "three pods are bound")
        code, output = run(plane.admin_kubeconfig)
    assert code == 0, output
    assert output.startswith(
        "1 nodes with 2 GPUs, 3 pods on them (37 % of the memory allocated), 0 pending: no GPU is double"
    )


def test_without_the_right_to_list_pods_the_audit_exits_with_2(plane: ControlPlane) -> None:
    code, output = run(plane.kubeconfig_for("default"))
    assert code == 2
    assert "pods and nodes cannot be listed" in output
    assert "forbidden" in output
