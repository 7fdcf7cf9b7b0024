"""The commands for the terminal as plugins of the real kubectl, for a user with read-only rights."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gputile.cli.checks.control import POLICIES
from tests.e2e.api import ApiError, Kube, Manifest
from tests.e2e.control_plane import ControlPlane
from tests.e2e.gputile import DEPLOY, Replica, rights
from tests.e2e.nodes import gpu_node, join, plain_node
from tests.e2e.pods import all_bound, events_of, pod, tile
from tests.e2e.processes import wait_until
from tests.e2e.watching import watch

PROGRAMS = Path(sys.executable).parent
BINDING = "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicyBinding"
GOLDEN = Path(__file__).parents[1] / "cli" / "golden"


class Reader:
    """A user with the rights of deploy/reader.yaml, who runs kubectl in a terminal."""

    def __init__(self, plane: ControlPlane, kubeconfig: Path) -> None:
        self._plane, self.kubeconfig = plane, kubeconfig

    def run(self, *words: str, columns: int = 0) -> tuple[int, str, str]:
        env = {
            "KUBECONFIG": str(self.kubeconfig),
            "HOME": str(self._plane.folder),
            "PATH": f"{PROGRAMS}:{os.environ['PATH']}",
            **({"COLUMNS": str(columns)} if columns else {}),
        }
        argv = [str(self._plane.programs.kubectl), *words]
        done = subprocess.run(argv, env=env, cwd=self._plane.folder, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout, done.stderr


@pytest.fixture
def reader(plane: ControlPlane) -> Iterator[Reader]:
    plane.kube.apply(DEPLOY / "reader.yaml")
    binding: Manifest = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "the-reader"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "gputile-reader"},
        "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": plane.namespace("readers")}],
    }
    plane.kube.apply(binding)
    yield Reader(plane, plane.kubeconfig_for("default", "readers"))
    plane.kube.delete("ClusterRoleBinding", "the-reader")


def remove_policies(kube: Kube) -> None:
    """Remove the admission policies of another test, as on a cluster without gputile."""
    for name in POLICIES:
        if kube.find(BINDING, name):
            kube.delete(BINDING, name)


def create_foreign_pod(kube: Kube, manifest: Manifest, space: str) -> None:
    """Create a pod with another system's record; policies that were just removed may reject it for a moment."""

    def created() -> bool:
        try:
            kube.create(manifest, space)
        except ApiError as error:
            if error.status != 403:
                raise
            return False
        return True

    wait_until(created, 10, "a pod of another system is created")


def shared(name: str, memory: int, count: int, address: str) -> Manifest:
    manifest = plain_node(name, {"aliyun.com/gpu-mem": memory, "aliyun.com/gpu-count": count})
    manifest["status"]["addresses"] = [{"type": "InternalIP", "address": address}]
    return manifest


def gpushare_pod(name: str, memory: int, node: str, index: int | None) -> Manifest:
    annotations = {} if index is None else {"ALIYUN_COM_GPU_MEM_IDX": str(index)}
    return pod(name, {"aliyun.com/gpu-mem": memory}, annotations=annotations, nodeName=node)


def test_kubectl_inspect_gpushare_prints_the_same_as_the_original(
    plane: ControlPlane, kube: Kube, reader: Reader
) -> None:
    join(kube, [shared("node-b", 23, 1, "10.0.0.12"), shared("node-a", 30, 2, "10.0.0.11")])
    for space in ("default", "ml", "prod"):
        plane.namespace(space)
    remove_policies(kube)
    create_foreign_pod(kube, gpushare_pod("web-0", 4, "node-a", 0), "default")
    create_foreign_pod(kube, gpushare_pod("web-1", 2, "node-a", 0), "default")
    create_foreign_pod(kube, gpushare_pod("api-7c", 3, "node-b", 0), "prod")
    code, output, _ = reader.run("inspect", "gpushare")
    assert (code, output) == (0, (GOLDEN / "gpushare-summary.txt").read_text())

    kube.create(gpushare_pod("job-x", 3, "node-a", None), "ml")
    for words in (("-d",), ("-d", "node-a"), ("node-a", "-d")):
        code, output, _ = reader.run("inspect", "gpushare", *words)
        assert code == 0
        whole = (GOLDEN / "gpushare-details.txt").read_text()
        assert output == whole if len(words) == 1 else output.startswith(whole.partition("\nNAME:       node-b")[0])

    code, output, _ = reader.run("inspect", "gpushare", "-o", "json")
    assert (code, json.loads(output)["usedGPU"]) == (0, 12)
    code, output, _ = reader.run("inspect", "gpushare", "node-z")
    assert (code, output) == (1, 'Failed due to nodes "node-z" not found')


def test_top_and_explain_work_without_a_gputile_server(plane: ControlPlane, kube: Kube, reader: Reader) -> None:
    """A pod is pending because a GPU is full; `explain` has the reason although no gputile runs in the cluster."""
    space = plane.namespace("terminal")
    join(kube, [gpu_node("n1", cards=1, memory=16000, model="Tesla T4"), plain_node("n2")])
    held = {"hami.io/vgpu-devices-allocated": "GPU-n1-0,NVIDIA,12000,50:;", "hami.io/vgpu-node": "n1"}
    remove_policies(kube)
    first = pod("first", {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 12000}, annotations=held, nodeName="n1")
    create_foreign_pod(kube, first, space)
    kube.create(tile("second", 9000, schedulerName="nobody"), space)

    code, output, _ = reader.run("gputile", "top", columns=80)
    assert code == 0
    assert "1 node with 1 GPU, 1 more without; 1 pod on them" in output
    assert f"  {space}/second" in output
    assert max(map(len, output.splitlines())) <= 80

    code, output, errors = reader.run("gputile", "inspect", "n1")
    assert (code, f"{space}/first" in output) == (0, True)
    assert "not what they use" in errors, "the missing source is named"

    code, output, _ = reader.run("gputile", "explain", "second", "-n", space)
    assert code == 1
    assert "0/2 nodes are available" in output
    assert "n1: 9000 MiB requested on one GPU, the freest has 4000 MiB" in output
    assert "at most 4000 MiB per GPU instead of 9000 MiB, on n1" in output
    assert f"as it is, once {space}/first ends on n1" in output

    code, output, _ = reader.run("gputile", "explain", "first", "-n", space, "-o", "json")
    explanation = json.loads(output)
    assert (code, explanation["state"], explanation["node"], explanation["by"]) == (0, "placed", "n1", "hami")
    assert explanation["tiles"][0]["memory"] == 12000


def test_explain_gives_a_pending_pod_the_same_reason_as_the_schedulers_event(
    plane: ControlPlane, kube: Kube, reader: Reader
) -> None:
    rights(plane)
    space = plane.namespace("pending")
    join(kube, [gpu_node(f"n{n}", cards=2, memory=16000, model="Tesla T4") for n in (1, 2)])
    with Replica(plane) as gputile, plane.start_scheduler(config=gputile.config()), watch(kube, "Pod", space) as pods:
        kube.create_many([tile(f"p{n}", 12000) for n in range(4)], space)
        pods.wait_for(all_bound(4), 20, "four pods are bound")
        kube.create(tile("late", 8000), space)
        wait_until(lambda: events_of(kube, space, "late", "NoFittingGPU"), 20, "the scheduler's event")
        code, output, _ = reader.run("gputile", "explain", "late", "-n", space)
        (event, *_) = events_of(kube, space, "late", "NoFittingGPU")
        placed = reader.run("gputile", "explain", "p0", "-n", space)
        doctor = reader.run("gputile", "doctor", "-o", "json")
    assert code == 1
    assert "2 node(s) have too little free memory on a single GPU (all would fit if empty)" in output
    for sentence in (
        "8000 MiB requested on one GPU, the freest has 4000 MiB",
        "at most 4000 MiB per GPU instead of 8000 MiB",
    ):
        assert sentence in output
        assert sentence in event["message"]
    assert "NoFittingGPU (gputile-scheduler" in output
    assert placed[0] == 0
    assert "granted      by gputile" in placed[1]
    findings = {it["check"]: it for it in json.loads(doctor[1])["findings"]}
    assert findings["admission"]["state"] == "ok"
    assert findings["leader"] == {"check": "leader", "state": "ok", "text": "gputile-0 is the leader", "fix": ""}
    assert findings["pods"]["text"] == "4 pods with a grant, none was bound by another scheduler"


def test_without_any_rights_the_error_names_the_role_to_request(plane: ControlPlane) -> None:
    stranger = Reader(plane, plane.kubeconfig_for("default"))
    for words in (("gputile", "top"), ("gputile", "explain", "x"), ("gputile", "doctor"), ("gputile", "audit")):
        code, output, errors = stranger.run(*words)
        assert (code, output) == (2, "")
        assert "forbidden" in errors
        assert "deploy/reader.yaml" in errors
        assert "Traceback" not in errors
    code, output, errors = stranger.run("inspect", "gpushare")
    assert (code, output.startswith("Failed due to pods and nodes cannot be listed")) == (1, True)


def test_missing_rights_are_reported_and_the_rest_is_shown(plane: ControlPlane, kube: Kube, reader: Reader) -> None:
    """The role is reduced to nodes and pods, which are enough."""
    role = kube.get("ClusterRole", "gputile-reader")
    kube.apply({**role, "rules": role["rules"][:1], "metadata": {"name": "gputile-reader"}})
    space = plane.namespace("terminal")
    join(kube, [gpu_node("n1", cards=1, memory=16000)])
    kube.create(tile("alone", 20000, schedulerName="nobody"), space)
    code, output, errors = reader.run("gputile", "explain", "alone", "-n", space)
    assert code == 1
    assert "GPUs smaller than requested" in output
    assert "every agent counts as alive" in errors
    assert "events cannot be read" in errors
    code, output, _ = reader.run("gputile", "doctor", "-o", "json")
    states = {it["check"]: it["state"] for it in json.loads(output)["findings"]}
    assert (states["scheduler"], states["admission"], states["inventory"]) == ("unknown", "unknown", "ok")


def test_kubectl_completes_commands_and_names(plane: ControlPlane, kube: Kube, reader: Reader) -> None:
    join(kube, [gpu_node("n1", cards=1, memory=16000), gpu_node("n2", cards=1, memory=16000)])
    _, output, _ = reader.run("__complete", "gputile", "ex")
    assert output.splitlines()[0].startswith("explain")
    _, output, _ = reader.run("__complete", "gputile", "top", "n")
    assert output.splitlines()[:3] == ["n1", "n2", ":4"]


def test_top_with_watch_shows_changes_of_the_cluster(plane: ControlPlane, kube: Kube, reader: Reader) -> None:
    space = plane.namespace("terminal")
    join(kube, [gpu_node("n1", cards=1, memory=16000)])
    env = {"KUBECONFIG": str(reader.kubeconfig)}
    child = plane.run("top", [str(PROGRAMS / "gputile"), "top", "-w"], env)
    log = plane.folder / "top.log"
    try:
        wait_until(lambda: "0 pods on them" in log.read_text(), 20, "the first output", [child])
        kube.create(tile("later", 9000, schedulerName="nobody"), space)
        wait_until(lambda: f"{space}/later" in log.read_text(), 20, "output with the new pod", [child])
    finally:
        child.stop()
    assert "Traceback" not in log.read_text()
