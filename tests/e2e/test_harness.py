"""Tests of the harness itself: the properties that the other tests rely on."""

import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import programs as building
from tests.e2e.api import ApiError, Kube, Manifest
from tests.e2e.certificates import Pair
from tests.e2e.configs import ClientTls, Extender
from tests.e2e.control_plane import ControlPlane
from tests.e2e.folders import cache
from tests.e2e.kubelets import FakeKubelets
from tests.e2e.nodes import EXAMPLES, example_nodes, gpu_node, join, plain_node
from tests.e2e.processes import Child, TookTooLong, wait_until
from tests.e2e.programs import ETCD, KUBERNETES, BuildFailed, Programs, Source, Unavailable
from tests.e2e.service import Service
from tests.e2e.watching import watch

ROOT = Path(__file__).parents[2]


def pod(name: str, node: str | None = None, limits: Manifest | None = None) -> Manifest:
    container = {"name": "main", "image": "busybox", "resources": {"limits": limits or {}}}
    spec: Manifest = {"containers": [container], **({"nodeName": node} if node else {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def ready(manifest: Manifest) -> bool:
    statuses = {c["type"]: c["status"] for c in manifest["status"].get("conditions", [])}
    return statuses.get("Ready") == "True"


# --- the control plane


def test_the_api_server_has_the_pinned_version_and_accepts_kubectl(plane: ControlPlane) -> None:
    assert plane.kube.request("GET", "/version")["gitVersion"] == plane.programs.kubernetes == KUBERNETES.version
    assert "Server Version: " + KUBERNETES.version in plane.kubectl("version")


def test_a_pod_is_bound_runs_finishes_and_is_deleted(plane: ControlPlane, kube: Kube) -> None:
    join(kube, [plain_node(f"n{n}") for n in range(3)])
    assert [ready(node) for node in kube.list("Node")] == [True] * 3
    assert not any(node["spec"].get("taints") for node in kube.list("Node"))
    with plane.start_scheduler() as scheduler, FakeKubelets(kube) as kubelets:
        kube.create(pod("web"))
        kubelets.pods.wait_for(lambda pods: ready(pods["default", "web"]), 10, "the pod Running and Ready")
        assert kube.get("Pod", "web")["spec"]["nodeName"] in ("n0", "n1", "n2")
        assert scheduler.count("scheduler_schedule_attempts_total", result="scheduled") == 1
        kubelets.finish("web")
        assert kube.get("Pod", "web")["status"]["phase"] == "Succeeded"
        kube.delete("Pod", "web")
        kubelets.pods.wait_for(lambda pods: not pods, 10, "the pod is gone")


def test_a_deleted_pod_stays_until_its_containers_are_gone(kube: Kube) -> None:
    join(kube, [plain_node("n1")])
    with FakeKubelets(kube, stop_after=0.5) as kubelets:
        kubelets.hold("stuck")
        kube.create_many([pod("slow", node="n1"), pod("stuck", node="n1")])
        kubelets.pods.wait_for(lambda pods: ready(pods["default", "slow"]), 10, "the first pod Ready")
        assert kube.get("Pod", "stuck")["status"]["phase"] == "Pending"
        began = time.monotonic()
        kube.delete_all("Pod")
        kubelets.pods.wait_for(lambda pods: list(pods) == [("default", "stuck")], 10, "one of two pods is gone")
        assert time.monotonic() - began >= 0.5
        steps = [e.object["status"]["phase"] for e in kubelets.pods.events if e.object["metadata"]["name"] == "slow"]
        assert steps[-1] == "Failed"  # the end of the containers was reported before the object was deleted
        kubelets.release("stuck")
        kubelets.pods.wait_for(lambda pods: not pods, 10, "the second pod is gone")


def test_the_api_server_can_be_killed_and_started_again(plane: ControlPlane, kube: Kube) -> None:
    join(kube, [plain_node("n1")])
    with watch(kube, "Pod") as pods, plane.start_scheduler():
        kube.create(pod("before"))
        pods.wait_for(lambda them: them["default", "before"]["spec"].get("nodeName"), 10, "the first pod is bound")
        killed = plane.api_server.pid
        plane.restart_api_server(kill=True)
        assert plane.api_server.pid != killed
        assert kube.get("Pod", "before")["spec"]["nodeName"] == "n1"
        kube.create(pod("after"))
        pods.wait_for(lambda them: ("default", "after") in them, 10, "the watch continues")
        pods.wait_for(lambda them: them["default", "after"]["spec"].get("nodeName"), 30, "the second pod is bound")
        added = [e.object["metadata"]["name"] for e in pods.events if e.type == "ADDED"]
        assert added == ["before", "after"]


def test_a_dead_program_is_reported_with_its_log(plane: ControlPlane) -> None:
    with pytest.raises(TookTooLong, match=r"(?s)badly exited while waiting for: badly ready.*exit code 3.*the reason"):
        plane.run("badly", ["sh", "-c", "echo the reason; exit 3"], ready=lambda: False)


def test_controllers_create_the_pods_of_a_deployment_and_the_feature_gate_is_off(programs: Programs) -> None:
    with ControlPlane(programs, feature_gates={"PodTopologyLabelsAdmission": False}) as plane:
        kube = plane.kube
        join(kube, [plain_node("n1", labels={"topology.kubernetes.io/zone": "z1"})])
        plane.start_controllers()
        plane.start_scheduler()
        space = plane.namespace("team")
        with FakeKubelets(kube) as kubelets:
            kube.apply(deployment("web", 2), space)
            kubelets.pods.wait_for(lambda pods: sum(map(ready, pods.values())) == 2, 30, "two pods Ready")
        bound = kube.list("Pod", space)[0]
        assert "topology.kubernetes.io/zone" not in bound["metadata"]["labels"]
        wait_until(lambda: kube.get("Deployment", "web", space)["status"].get("readyReplicas") == 2, 10, "status")


def deployment(name: str, replicas: int) -> Manifest:
    template = {"metadata": {"labels": {"app": name}}, "spec": {"containers": [{"name": "main", "image": "busybox"}]}}
    spec = {"replicas": replicas, "selector": {"matchLabels": {"app": name}}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}


# --- nothing is left behind


def test_no_process_and_no_file_is_left_after_the_end(programs: Programs) -> None:
    with ControlPlane(programs) as plane:
        plane.start_scheduler()
        stubborn = "trap '' TERM; sleep 300 & echo started; wait"  # its child ignores SIGTERM as well
        sleeper = plane.run(
            "stubborn", ["sh", "-c", stubborn], ready=lambda: (plane.folder / "stubborn.log").read_text()
        )
        assert len(group_of(sleeper.pid)) == 2
        pids, folder = [child.pid for child in plane.children], plane.folder
        assert len(pids) == 4
        assert folder.is_dir()
    assert not folder.exists()
    assert not any(alive(pid) for pid in pids if pid)
    assert not group_of(sleeper.pid)


HOLDER = """
import sys, time
from tests.e2e.programs import programs
from tests.e2e.control_plane import ControlPlane
with ControlPlane(programs()) as plane:
    plane.start_scheduler()
    print(plane.folder, *(child.pid for child in plane.children), flush=True)
    time.sleep(300)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL], ids=lambda n: n.name)
def test_no_process_and_no_file_is_left_after_a_signal(programs: Programs, number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], cwd=ROOT, stdout=subprocess.PIPE, text=True, stderr=-1
    ) as run:
        assert run.stdout
        folder, *pids = run.stdout.readline().split()
        assert len(pids) == 3
        run.send_signal(number)
        run.communicate(timeout=30)
    wait_until(lambda: not any(alive(int(pid)) for pid in pids), 5, "the programs are gone")
    if number is signal.SIGKILL:  # the next run removes it
        assert Path(folder).is_relative_to(cache())
        with ControlPlane(programs):
            pass
    assert not Path(folder).exists()


def test_a_child_handles_signals_that_the_shell_of_the_tests_ignores(tmp_path: Path) -> None:
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in `sh -c "make e2e &"`
    try:
        child = Child("sleeper", ["sleep", "300"], tmp_path / "log", os.environ, tmp_path).start()
    finally:
        signal.signal(signal.SIGINT, former)
    wait_until(lambda: Path(f"/proc/{child.pid}/comm").read_text() == "sleep\n", 10, "the child has become sleep")
    child.signal(signal.SIGINT)
    wait_until(lambda: not child.alive, 5, "SIGINT ends the child")


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # dead and not yet reaped


def group_of(leader: int | None) -> list[int]:
    """The running processes of a process group."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == leader and fields[0] != "Z":
            pids.append(int(stat.parent.name))
    return pids


# --- users


def test_a_service_account_may_do_what_its_role_says_and_no_more(plane: ControlPlane, kube: Kube) -> None:
    space = plane.namespace("rbac")
    kube.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "robot"}}, space)
    rbac = "rbac.authorization.k8s.io"
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
    role = {"apiVersion": f"{rbac}/v1", "kind": "ClusterRole", "metadata": {"name": "reads-pods"}, "rules": [rule]}
    subject = {"kind": "ServiceAccount", "name": "robot", "namespace": space}
    reference = {"apiGroup": rbac, "kind": "ClusterRole", "name": "reads-pods"}
    meta = {"apiVersion": f"{rbac}/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "robot-reads-pods"}}
    kube.apply(role)
    kube.apply({**meta, "roleRef": reference, "subjects": [subject]})
    config = plane.kubeconfig_for("robot", space)
    wait_until(
        lambda: "yes" in plane.kubectl("auth", "can-i", "list", "pods", kubeconfig=config), 10, "the role is in force"
    )
    with kube.as_token(kube.token_for("robot", space)) as robot:
        assert robot.request("GET", "/api/v1/pods")["items"] == []
        with pytest.raises(ApiError) as error:
            robot.request("GET", "/api/v1/nodes")
    assert (error.value.status, error.value.reason) == (403, "Forbidden")


def test_a_client_certificate_names_user_and_groups(plane: ControlPlane) -> None:
    pair = plane.authority.client("alice", ["team-a"])
    output = plane.kubectl("auth", "whoami", "-o", "json", kubeconfig=plane.kubeconfig("alice", client=pair))
    user = json.loads(output)["status"]["userInfo"]
    assert user["username"] == "alice"
    assert "team-a" in user["groups"]


# --- nodes, and kube-scheduler with an extender


def test_example_nodes_have_the_resources_that_every_example_pod_requests(plane: ControlPlane, kube: Kube) -> None:
    """kube-scheduler alone, which checks only the sums of resources: it binds every example pod."""
    join(kube, example_nodes())
    space = plane.namespace("examples")
    for manifest in sorted(EXAMPLES.glob("*/*.yaml")):
        kube.apply(manifest, space)
    for template in [*kube.list("Deployment", space), *kube.list("StatefulSet", space)]:  # no controllers here
        pod_template = template["spec"]["template"]
        kube.create(
            {"apiVersion": "v1", "kind": "Pod", **pod_template, "metadata": {"name": template["metadata"]["name"]}},
            space,
        )
    count = len(kube.list("Pod", space))
    assert count >= 9
    with watch(kube, "Pod", space) as pods, plane.start_scheduler():
        pods.wait_for(
            lambda them: all(decided(it) for it in them.values()), 20, "every pod has a PodScheduled condition"
        )
        left = [name for (_, name), it in pods.objects.items() if not it["spec"].get("nodeName")]
    assert left == []  # `cannot-fit` requests no sum that a node lacks: only gputile rejects it


def decided(manifest: Manifest) -> bool:
    statuses = {c["type"]: c["status"] for c in manifest["status"].get("conditions", [])}
    return "PodScheduled" in statuses


def test_a_gpu_node_has_all_dialects_resources_unless_they_are_given(kube: Kube) -> None:
    join(kube, [gpu_node("all", 2, 16384, "T4"), gpu_node("one", 2, 16384, resources={"aliyun.com/gpu-mem": 32})])
    every, given = (kube.get("Node", name)["status"]["allocatable"] for name in ("all", "one"))
    assert every["gputile.io/gpu"] == "20"
    assert every["aliyun.com/gpu-mem"] == "32"
    assert every["tencent.com/vcuda-memory"] == "128"
    assert {name for name in given if "/" in name} == {"aliyun.com/gpu-mem"}


@pytest.mark.parametrize("cached", [True, False], ids=["node-names", "whole-nodes"])
def test_kube_scheduler_calls_the_extender_over_mtls(plane: ControlPlane, kube: Kube, cached: bool) -> None:
    join(kube, [gpu_node("n1"), gpu_node("n2")])
    authority = plane.authority
    with answering(echo, tls=authority.server("extender"), ca=authority.ca) as (port, calls):
        trust = ClientTls(authority.ca, authority.client("kube-scheduler"))
        extender = Extender(
            url=f"https://127.0.0.1:{port}/gputile",
            managed={"gputile.io/gpu": False},
            node_cache_capable=cached,
            bind="",
            tls=trust,
        )
        with plane.start_scheduler(extender), watch(kube, "Pod") as pods:
            kube.create_many([pod("plain"), pod("tiled", limits={"gputile.io/gpu": 1})])
            pods.wait_for(
                lambda them: sum("nodeName" in it["spec"] for it in them.values()) == 2, 10, "both pods are bound"
            )
    assert [(path, body["Pod"]["metadata"]["name"]) for path, body in calls] == [("/gputile/filter", "tiled")]
    assert bool(calls[0][1].get("NodeNames")) == cached
    assert bool(calls[0][1].get("Nodes")) == (not cached)


def echo(path: str, body: Manifest) -> Manifest:
    return {key: body[key] for key in ("NodeNames", "Nodes") if body.get(key)}


@contextmanager
def answering(answer: Any, tls: Pair | None = None, ca: Path | None = None) -> Iterator[tuple[int, list[Any]]]:
    """A small HTTP server that records each POST and responds with `answer(path, body)`."""
    calls: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            calls.append((self.path, body))
            response = json.dumps(answer(self.path, body)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(response)))
            self.end_headers()
            self.wfile.write(response)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=ca)
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_cert_chain(tls.cert, tls.key)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server.server_address[1], calls
        server.shutdown()


def test_a_thousand_pods_are_created_in_seconds(
    plane: ControlPlane, kube: Kube, capsys: pytest.CaptureFixture[str]
) -> None:
    space = plane.namespace("thousand")
    began = time.monotonic()
    kube.create_many([pod(f"p{n}") for n in range(1000)], space)
    took = time.monotonic() - began
    with capsys.disabled():
        print(f" [1000 pods created in {took:.1f} s] ", end="")
    assert len(kube.list("Pod", space)) == 1000
    assert took < 30


# --- the Service


def test_the_service_follows_the_label(plane: ControlPlane, kube: Kube) -> None:
    kube.create_many([pod("a"), pod("b")])
    with (
        answering(lambda path, body: {"name": "a"}) as (port_a, _),
        answering(lambda path, body: {"name": "b"}) as (port_b, _),
        Service(kube, "default", {"a": ("127.0.0.1", port_a), "b": ("127.0.0.1", port_b)}, "chosen=true") as service,
    ):
        with pytest.raises(ConnectionError):
            responder(service)
        set_label(kube, "a", True)
        assert wait_until(lambda: responder(service), 5, "a response") == "a"
        with closing(HTTPConnection(service.address, timeout=5)) as kept:
            assert responder(service, kept) == "a"
            set_label(kube, "a", False)
            set_label(kube, "b", True)
            wait_until(lambda: service.chosen() == "b", 5, "the label is seen")
            assert responder(service) == "b"
            assert responder(service, kept) == "a"  # an open connection stays with its pod
            service.drop()
            with pytest.raises(ConnectionError):
                responder(service, kept)
        assert responder(service) == "b"


def test_the_service_can_be_cut_paused_and_slowed(plane: ControlPlane, kube: Kube) -> None:
    kube.create(pod("a"))
    set_label(kube, "a", True)
    with (
        answering(lambda path, body: {"name": "a"}) as (port, calls),
        Service(kube, "default", {"a": ("127.0.0.1", port)}, "chosen=true") as service,
    ):
        service.cut()
        with pytest.raises(ConnectionError):
            responder(service)
        service.restore()
        assert responder(service) == "a"
        received = len(calls)
        service.pause()
        with pytest.raises(TimeoutError), closing(HTTPConnection(service.address, timeout=0.3)) as hanging:
            responder(service, hanging)
        assert len(calls) == received
        service.resume()
        service.delay = 0.2
        began = time.monotonic()
        assert responder(service) == "a"
        assert time.monotonic() - began >= 0.4


def set_label(kube: Kube, name: str, chosen: bool) -> None:
    kube.patch("Pod", name, {"metadata": {"labels": {"chosen": "true" if chosen else None}}})


def responder(service: Service, connection: HTTPConnection | None = None) -> str:
    """The name of the backend that responds; over `connection`, or a new one."""
    used = connection or HTTPConnection(service.address, timeout=5)
    try:
        used.request("POST", "/", b"{}", {"Content-Type": "application/json"})
        return str(json.loads(used.getresponse().read())["name"])
    finally:
        if connection is None:
            used.close()


# --- the programs


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUTILE_E2E_CACHE", str(tmp_path))
    return tmp_path


def test_a_missing_go_is_reported(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(empty_cache))
    with pytest.raises(Unavailable, match="Go is not installed"):
        building.programs(lambda line: None)


def test_an_old_go_is_reported(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = empty_cache / "go"
    old.write_text(
        "#!/bin/sh\necho 'go: go.mod requires go >= 1.26.0 (running go 1.19; GOTOOLCHAIN=local)' >&2; exit 1\n"
    )
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(empty_cache))
    with pytest.raises(Unavailable, match=r"requires go >= 1\.26\.0 \(running go 1\.19.*install a newer one"):
        building.programs(lambda line: None)


def test_an_unreachable_module_proxy_is_reported(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = "http://127.0.0.1:9"  # the discard port of this machine: refuses at once
    monkeypatch.setenv("GOPROXY", proxy)
    monkeypatch.setenv("GOMODCACHE", str(empty_cache / "modules"))
    monkeypatch.setenv("GOFLAGS", "-modcacherw")
    with pytest.raises(Unavailable, match=f"cannot be fetched .*is GOPROXY={re.escape(proxy)} reachable"):
        building.programs(lambda line: None)


def test_a_failed_build_leaves_only_its_log(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = empty_cache / "bin" / "go"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\n[ "$1" != build ] || { echo some/package; echo no space left; exit 1; }\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    for _ in range(2):
        with pytest.raises(BuildFailed, match="no space left"):
            building.programs(lambda line: None)
    assert sorted(it.name for it in empty_cache.iterdir()) == ["bin", "build.lock", f"{ETCD.key}.log"]


def test_the_cache_key_changes_with_the_lock_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "TOOLS", tmp_path)
    (tmp_path / "thing").mkdir()
    (tmp_path / "thing" / "go.mod").write_text("require example.com/thing v1.2.3\n")
    source, keys = Source(name="thing", module="example.com/thing"), set()
    for lock in ("first", "second"):
        (tmp_path / "thing" / "go.sum").write_text(lock)
        keys.add(source.key)
    assert len(keys) == 2
    assert all(key.startswith("thing-v1.2.3-") for key in keys)
