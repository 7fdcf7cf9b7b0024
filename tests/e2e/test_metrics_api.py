"""The aggregated metrics API behind a real API server's aggregation layer: kubectl, users, watches, certificates."""

import base64
import json
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPSConnection
from typing import Any

import pytest

from gputile.agent.settings import HeartbeatSettings
from tests.e2e.api import ApiError, Kube, Manifest, kind_of, manifests_of, namespace_of
from tests.e2e.audit import tiles
from tests.e2e.certificates import Pair
from tests.e2e.control_plane import ControlPlane
from tests.e2e.gputile import DEPLOY, Replica, rights
from tests.e2e.nodes import gpu_node, join
from tests.e2e.pods import node_of, tile
from tests.e2e.processes import free_port, wait_until
from tests.e2e.test_agents import AGENTS, Agent
from tests.e2e.watching import Watch, watch

HOME, SERVICE, SECRET = "kube-system", "gputile-metrics", "gputile-metrics-tls"
GPU_INFO, POD_RESOURCE = "metrics.nvidia.com/v1alpha1/GpuInfo", "metrics.nvidia.com/v1alpha1/PodResource"
ROOT, OLD_ROOT = "/apis/metrics.nvidia.com/v1alpha1", "/apis/nvidia-gpu-scheduler/v1"
API_SERVICES = ("v1alpha1.metrics.nvidia.com", "v1.nvidia-gpu-scheduler")
NODE, SIZE = "gpu-1", 16000
NAMESPACES = ("default", "team-a", "team-b")
SECOND = 1.0  # the API's guarantee: a created or deleted pod is seen within it


class Served:
    """A replica that serves the metrics API, and the API server in front of it."""

    def __init__(self, plane: ControlPlane, replica: Replica, port: int) -> None:
        self.plane, self.replica, self.port = plane, replica, port

    def is_available(self) -> bool:
        """The API server forwards requests a moment after it has written the condition."""
        services = [self.plane.kube.get("APIService", name) for name in API_SERVICES]
        conditions = [it for service in services for it in service.get("status", {}).get("conditions", [])]
        available = [it["status"] for it in conditions if it["type"] == "Available"]
        return available == ["True", "True"] and all(
            self.plane.kube.raw("GET", it)[0] == 200 for it in (ROOT, OLD_ROOT)
        )

    def direct(
        self, client: Pair | None = None, path: str = f"{ROOT}/gpuinfos", **headers: str
    ) -> tuple[int, Manifest]:
        """A request that bypasses the API server."""
        trust = ssl.create_default_context()
        trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
        if client is not None:
            trust.load_cert_chain(client.cert, client.key)
        connection = HTTPSConnection("127.0.0.1", self.port, timeout=10, context=trust)
        try:
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def certificate(self) -> bytes:
        return ssl.get_server_certificate(("127.0.0.1", self.port), timeout=10).encode()


def deploy(plane: ControlPlane, port: int) -> None:
    """Apply deploy/metrics-api.yaml; only the Service is changed, to point at a process on this machine."""
    rights(plane)
    for manifest in manifests_of(DEPLOY / "metrics-api.yaml"):
        if manifest["kind"] == "Service":
            manifest = {**manifest, "spec": {"type": "ExternalName", "externalName": "localhost"}}
        if manifest["kind"] == "APIService":
            manifest["spec"]["service"]["port"] = port
        plane.kube.apply(manifest)


def remove(plane: ControlPlane) -> None:
    """Delete deploy/metrics-api.yaml: other tests run without its rights and API groups."""
    for manifest in reversed(manifests_of(DEPLOY / "metrics-api.yaml")):
        plane.kube.delete(kind_of(manifest), manifest["metadata"]["name"], namespace_of(manifest))


@contextmanager
def serving(plane: ControlPlane) -> Iterator[Served]:
    """Run the only replica, with the metrics API enabled."""
    port = free_port()
    deploy(plane, port)
    with Replica(plane, metrics_api__listen=f"127.0.0.1:{port}") as replica:
        served = Served(plane, replica, port)
        wait_until(served.is_available, 60, "the APIServices are available", [replica.child])
        yield served


@pytest.fixture(scope="module")
def deployed(control_plane: ControlPlane) -> Iterator[Served]:
    join(control_plane.kube, [gpu_node(NODE, 2, SIZE, "Tesla T4", labels={"pool": "small"}), gpu_node("gpu-2")])
    with serving(control_plane) as served:
        yield served
    remove(control_plane)
    control_plane.clear()


@pytest.fixture
def served(deployed: Served) -> Iterator[Served]:
    """The same replica for all tests; the pods of each test are deleted after it."""
    yield deployed
    for namespace in NAMESPACES:
        deployed.plane.kube.delete_all("Pod", namespace, grace=0)


@pytest.fixture
def kube(deployed: Served) -> Kube:
    return deployed.plane.kube


def user(plane: ControlPlane, name: str, namespace: str, role: str = "") -> Kube:
    """A client of a ServiceAccount, which gets `role` in its namespace."""
    plane.kube.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": namespace}})
    if role:
        binding: Manifest = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": {"name": name, "namespace": namespace},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
        }
        plane.kube.apply(binding)
    return plane.kube.as_token(plane.kube.token_for(name, namespace))


def on_card(kube: Kube, name: str, namespace: str = "default", memory: int = 4000, **more: Any) -> None:
    """Create a pod and bind it without the scheduler: the leader grants it a card."""
    kube.create({**tile(name, memory, **more)}, namespace)
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}}
    kube.create({**binding, "target": {"kind": "Node", "name": NODE}}, namespace, "binding")


def until_shown(pods: Watch, name: str, namespace: str = "default", seconds: float = SECOND) -> float:
    return pods.wait_for(lambda objects: objects[namespace, name], seconds, f"{name} is shown")


# ---- kubectl --------------------------------------------------------------------------------------------------------


def columns(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_kubectl_prints_useful_columns(served: Served, kube: Kube) -> None:
    plane = served.plane
    with watch(kube, POD_RESOURCE) as pods:
        on_card(kube, "train", memory=6000)
        until_shown(pods, "train", seconds=5)
    header, *rows = columns(plane.kubectl("get", "gpuinfos"))
    assert header == ["NAME", "GPUS", "BUSY", "MEMORY", "UNHEALTHY", "HEALTH", "HEARTBEAT", "MODELS", "AGE"]
    assert rows[0][:6] == [NODE, "2", "1", "6000/32000Mi", "0", "UnKnow"]
    header, *rows = columns(plane.kubectl("get", "podresources", "-A"))
    assert header == ["NAMESPACE", "NAME", "NODE", "PHASE", "GPUS", "MEMORY", "CORES", "USED", "AGE"]
    assert rows[0][:4] == ["default", "train", NODE, "Pending"]
    assert rows[0][5] == "6000Mi"
    wide = plane.kubectl("get", "podresources", "-o", "wide")
    assert "Tesla T4" in wide
    assert "GPU-gpu-1-" in wide
    whole = json.loads(plane.kubectl("get", "podresource", "train", "-o", "json"))
    assert whole["apiVersion"] == "metrics.nvidia.com/v1alpha1"
    (held,) = whole["spec"]["containers_device"]
    assert held["device_info"][0]["memory"] == 6000
    assert plane.kubectl("get", "gpuinfos", "-l", "pool=small", "-o", "name").split() == [
        f"gpuinfo.metrics.nvidia.com/{NODE}"
    ]
    named = plane.kubectl("get", "podresources", "-A", "--field-selector", f"spec.nodeName={NODE}", "-o", "name")
    assert named.split() == ["podresource.metrics.nvidia.com/train"]
    raw = json.loads(plane.kubectl("get", "--raw", f"{OLD_ROOT}/gpupods"))
    assert [item["metadata"]["name"] for item in raw["items"]] == ["default-train"]
    assert columns(plane.kubectl("get", "gpunodes"))[1][0] == NODE


def test_kubectl_watches(served: Served, kube: Kube) -> None:
    plane = served.plane
    command = [str(plane.programs.kubectl), "get", "podresources", "-A", "-w"]
    env = {"KUBECONFIG": str(plane.admin_kubeconfig), "HOME": str(plane.folder), "PATH": "/usr/bin:/bin"}
    lines: list[str] = []
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        assert child.stdout is not None
        reader = threading.Thread(target=lambda: lines.extend(child.stdout or ()), daemon=True)
        reader.start()
        try:
            time.sleep(1)
            on_card(kube, "watched")
            wait_until(lambda: any("watched" in line for line in lines), 5, f"kubectl shows the pod: {lines}")
        finally:
            child.terminate()
    assert lines[0].split()[:3] == ["NAMESPACE", "NAME", "NODE"]


# ---- authorization --------------------------------------------------------------------------------------------------


def test_a_user_sees_the_namespaces_that_rbac_allows(served: Served, kube: Kube) -> None:
    plane = served.plane
    for namespace in ("team-a", "team-b"):
        plane.namespace(namespace)
    with watch(kube, POD_RESOURCE) as pods:
        for namespace in ("team-a", "team-b"):
            on_card(kube, "work", namespace)
            until_shown(pods, "work", namespace, seconds=5)
    viewer, stranger = user(plane, "viewer", "team-a", "gputile-metrics-view"), user(plane, "nobody", "team-a")
    with viewer, stranger:
        assert [it["metadata"]["namespace"] for it in viewer.list(POD_RESOURCE, "team-a")] == ["team-a"]
        for client, path in (
            (viewer, f"{ROOT}/podresources"),
            (viewer, f"{ROOT}/namespaces/team-b/podresources"),
            (viewer, f"{ROOT}/gpuinfos"),
            (stranger, f"{ROOT}/namespaces/team-a/podresources"),
            (stranger, f"{ROOT}/namespaces/team-a/podresources?watch=true"),
            (stranger, f"{ROOT}/namespaces/team-a/podresources/work"),
        ):
            with pytest.raises(ApiError) as error:
                client.request("GET", path)
            assert (error.value.status, error.value.reason) == (403, "Forbidden"), path


def test_the_role_for_viewers_is_aggregated_to_view(served: Served, kube: Kube) -> None:
    """The controller that aggregates roles does not run here; it selects roles by this label."""
    role = kube.get("ClusterRole", "gputile-metrics-view")
    assert role["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    assert {"metrics.nvidia.com"} < {group for rule in role["rules"] for group in rule["apiGroups"]}


def test_only_the_front_proxy_is_trusted(served: Served) -> None:
    plane = served.plane
    headers = {"X-Remote-User": "admin", "X-Remote-Group": "system:masters"}
    status, body = served.direct(None, **headers)
    assert (status, body["kind"], body["reason"]) == (401, "Status", "Unauthorized")
    stranger = plane.front_authority.client("another-client")  # of the right CA
    assert served.direct(stranger, **headers)[0] == 401
    with pytest.raises((ssl.SSLError, ConnectionError)):
        served.direct(plane.authority.client("front-proxy-client"), **headers)  # of another CA
    assert served.direct(plane.front_proxy)[0] == 401  # without a user
    assert served.direct(plane.front_proxy, **headers)[0] == 200
    status, body = served.direct(plane.front_proxy, **{"X-Remote-User": "mallory"})
    assert (status, body["reason"]) == (403, "Forbidden")
    assert "mallory" in body["message"]


# ---- verbs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", [ROOT, OLD_ROOT])
def test_extender_verbs_work_through_the_api_server(served: Served, kube: Kube, root: str) -> None:
    pod = kube.create(tile("requester", 4000))
    args = {"Pod": pod, "Nodes": None, "NodeNames": [NODE, "gpu-2"]}
    wait_until(lambda: served.replica.count("gputile_ledger_pods", state="pending") == 1, 5, "the pod is in the ledger")
    with served.plane.kube_as("system:kube-scheduler") as scheduler:
        response = scheduler.request("POST", f"{root}/schedule/filter", args)
        assert response["NodeNames"] == [NODE]
        assert response["Error"] == ""
        scores = scheduler.request("POST", f"{root}/schedule/prioritize", args)
        assert {score["Host"] for score in scores} == {NODE, "gpu-2"}
        with user(served.plane, "nobody", "default") as stranger, pytest.raises(ApiError) as error:
            stranger.request("POST", f"{root}/schedule/filter", args)
        assert error.value.status == 403
        bind = {"PodName": "requester", "PodNamespace": "default", "PodUID": pod["metadata"]["uid"], "Node": NODE}
        assert scheduler.request("POST", f"{root}/schedule/bind", bind) == {"Error": ""}
    (held,) = tiles(kube.get("Pod", "requester"))
    assert (node_of(kube.get("Pod", "requester")), held["memory"]) == (NODE, 4000)


# ---- watches --------------------------------------------------------------------------------------------------------


def test_a_created_or_deleted_pod_is_seen_within_a_second(served: Served, kube: Kube) -> None:
    with watch(kube, POD_RESOURCE) as pods, watch(kube, GPU_INFO) as nodes:
        for number in range(5):
            on_card(kube, f"quick-{number}", memory=2000)
            assert until_shown(pods, f"quick-{number}") < SECOND
        nodes.wait_for(lambda objects: len(objects["", NODE]["spec"]["device_busy"]) >= 1, SECOND, "a card is busy")
        for number in range(5):
            kube.delete("Pod", f"quick-{number}", grace=0)
        pods.wait_for(lambda objects: not objects, SECOND, "all pods are gone")
        nodes.wait_for(lambda objects: objects["", NODE]["spec"]["device_busy"] == [], SECOND, "no card is busy")


def test_the_death_and_the_return_of_an_agent_are_seen(served: Served, kube: Kube) -> None:
    with watch(kube, GPU_INFO) as nodes:

        def health(wanted: str) -> Any:
            return lambda objects: objects["", NODE]["status"]["node_health"] == wanted

        with Agent(kube, NODE, lease_duration=round(HeartbeatSettings().duration)):
            nodes.wait_for(health("True"), SECOND + 0.5, "the agent is alive")
        assert nodes.wait_for(health("False"), 10, "the agent is dead") < 10
        with Agent(kube, NODE):
            nodes.wait_for(health("True"), SECOND + 0.5, "the agent is back")
    kube.delete_all("Lease", AGENTS)


@contextmanager
def old_stream(kube: Kube, path: str) -> Iterator[list[Manifest]]:
    """The lines of a watch as an old client reads them."""
    connection = kube.connections.new(timeout=60)
    connection.request("GET", path, headers=kube.headers())
    response = connection.getresponse()
    assert response.status == 200
    lines: list[Manifest] = []

    def read() -> None:
        try:
            while line := response.readline():
                lines.append(json.loads(line))
        except (OSError, ValueError, AttributeError):  # closed while reading
            return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    sock: socket.socket = connection.sock
    try:
        yield lines
    finally:
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # bypasses SSL's shutdown, which would wait for the reader
        reader.join(10)
        connection.close()


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        pytest.param(f"{ROOT}/podresources?watch=true&events=v0.1", "Object", id="v0.1"),
        pytest.param(f"{OLD_ROOT}/gpupods?watch=true", "GpuPod", id="v0.2"),
    ],
)
def test_old_clients_get_events_in_their_old_form(served: Served, kube: Kube, path: str, shape: str) -> None:
    with watch(kube, POD_RESOURCE) as pods:
        on_card(kube, "before")
        until_shown(pods, "before", seconds=5)
    with old_stream(kube, path) as lines:
        wait_until(lambda: lines, 5, "the list is replayed")
        assert (lines[0]["Type"], lines[0][shape]["spec"]["pod_name"]) == ("SYNCED", "before")
        kube.delete("Pod", "before", grace=0)
        wait_until(lambda: any(line["Type"] == "DELETED" for line in lines), 5, "the deletion is sent")
        assert lines[-1][shape]["spec"]["pod_namespace"] == "default"


def test_a_watch_continues_over_restarts_of_both_sides(served: Served, kube: Kube) -> None:
    plane, replica = served.plane, served.replica
    with watch(kube, POD_RESOURCE) as pods:
        on_card(kube, "first")
        until_shown(pods, "first", seconds=5)
        replica.child.kill()
        replica.child.restart()
        wait_until(replica.is_ready, 30, "the replica is ready", [replica.child])
        wait_until(replica.is_leader, 30, "the replica is the leader", [replica.child])
        wait_until(served.is_available, 60, "the APIServices are available", [replica.child])
        on_card(kube, "second")
        until_shown(pods, "second", seconds=10)
        kube.delete("Pod", "first", grace=0)
        pods.wait_for(lambda objects: set(objects) == {("default", "second")}, 5, "the first pod is gone")
        plane.restart_api_server()
        wait_until(served.is_available, 60, "the APIServices are available again", [replica.child])
        on_card(kube, "third")
        until_shown(pods, "third", seconds=10)
        on_card(kube, "fourth")
        assert until_shown(pods, "fourth") < SECOND
        kube.delete("Pod", "second", grace=0)
        pods.wait_for(lambda objects: ("default", "second") not in objects, SECOND, "the second pod is gone")


# ---- certificates ---------------------------------------------------------------------------------------------------


def bundle(kube: Kube, service: str) -> bytes:
    return base64.b64decode(kube.get("APIService", service)["spec"].get("caBundle", ""))


def test_a_certificate_is_renewed_without_a_failed_request(served: Served, kube: Kube) -> None:
    before = served.certificate()
    failures: list[str] = []
    done = threading.Event()

    def poll() -> None:
        with Kube(kube.server, kube.ca, kube.token) as client:
            while not done.wait(0.05):
                status, body = client.raw("GET", f"{ROOT}/gpuinfos")
                if status != 200:
                    failures.append(body.decode())

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        kube.patch("Secret", SECRET, {"data": None}, HOME)
        wait_until(lambda: served.certificate() != before, 30, "another certificate is served")
        time.sleep(1)
    finally:
        done.set()
        thread.join(10)
    assert failures == []
    for service in API_SERVICES:
        assert bundle(kube, service).startswith(served.certificate().strip())
        assert before.strip() in bundle(kube, service)
    kube.patch("APIService", API_SERVICES[0], {"spec": {"caBundle": None, "insecureSkipTLSVerify": True}})
    wait_until(lambda: bundle(kube, API_SERVICES[0]), 30, "the caBundle is restored")


def test_a_second_replica_serves_the_same_certificate_and_answers_reads(served: Served, kube: Kube) -> None:
    port = free_port()
    with Replica(served.plane, "gputile-1", wait_for_lease=False, metrics_api__listen=f"127.0.0.1:{port}") as other:
        second = Served(served.plane, other, port)
        wait_until(
            lambda: other.logged("the metrics API is listening"), 30, "the metrics API is listening", [other.child]
        )
        assert second.certificate() == served.certificate()
        headers = {"X-Remote-User": "admin", "X-Remote-Group": "system:masters"}
        status, body = second.direct(served.plane.front_proxy, **headers)
        assert (status, len(body["items"])) == (200, 2)
        version = served.direct(served.plane.front_proxy, **headers)[1]["metadata"]["resourceVersion"]
        path = f"{ROOT}/gpuinfos?watch=true&resourceVersion={version}"
        status, body = second.direct(served.plane.front_proxy, path, **headers)
        assert (status, body["reason"]) == (410, "Expired")


def test_kubectl_explains_the_fields(served: Served, kube: Kube) -> None:
    """The last test: the API server fetches the OpenAPI at its own intervals, and first before the replica listened."""
    for name in API_SERVICES:
        kube.patch("APIService", name, {"metadata": {"annotations": {"e2e": "refresh"}}})
    wait_until(
        lambda: f"apis/{ROOT[6:]}" in kube.request("GET", "/openapi/v3")["paths"], 90, "the API server has the OpenAPI"
    )
    assert "device_busy" in served.plane.kubectl("explain", "gpuinfos.spec")
    assert "MiB allocated to the container" in served.plane.kubectl(
        "explain", "podresources", "--recursive=false"
    ) + str(kube.request("GET", f"/openapi/v3{ROOT}"))
