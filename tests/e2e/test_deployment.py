"""Ways to deploy: node names or whole nodes in requests, a second scheduler, older paths, replicas, and RBAC."""

import json
import time
from typing import Any

import pytest

from tests.e2e.api import ApiError, Kube
from tests.e2e.audit import audit, grant
from tests.e2e.control_plane import ControlPlane
from tests.e2e.gputile import ACCOUNT, NAMESPACE, Replica, rights
from tests.e2e.nodes import gpu_node, join
from tests.e2e.pods import all_bound, events_of, first_with_node, node_of, pod, tile
from tests.e2e.processes import wait_until
from tests.e2e.programs import Programs
from tests.e2e.service import Service
from tests.e2e.watching import watch


@pytest.mark.parametrize("names_only", [True, False], ids=["node-names", "whole-nodes"])
def test_pods_are_bound_with_node_names_and_with_whole_nodes_in_requests(
    plane: ControlPlane, kube: Kube, names_only: bool
) -> None:
    rights(plane)
    space = plane.namespace(f"form-{str(names_only).lower()}")
    join(kube, [gpu_node(f"n{n}", 2, 16000, "Tesla T4") for n in range(3)])
    with Replica(plane) as gputile:
        config = gputile.config(nodeCacheCapable=names_only)
        with plane.start_scheduler(config=config), watch(kube, "Pod", space) as pods:
            kube.create_many([tile(f"p{n}", 7000) for n in range(10)], space)
            pods.wait_for(all_bound(10), 30, "all pods are bound")
    audit(kube)


# The URL prefix and verbs of each family, as its own documentation configures kube-scheduler.
STANZAS = [
    pytest.param("gpushare-scheduler", {"filterVerb": "filter", "bindVerb": "bind"}, {}, id="gpushare"),
    pytest.param(
        "scheduler", {"filterVerb": "filter", "prioritizeVerb": "priorities", "bindVerb": "bind"}, {}, id="nano"
    ),
    pytest.param("scheduler", {"filterVerb": "predicates"}, {"nodeCacheCapable": False}, id="gpu-admission"),
    pytest.param(
        "apis/metrics.nvidia.com/v1alpha1/schedule",
        {"filterVerb": "filter", "prioritizeVerb": "prioritize", "preemptVerb": "preempt"},
        {"ignorable": True},
        id="nvidia-gpu-scheduler",
    ),
    pytest.param(
        "scheduler", {"filterVerb": "filter", "bindVerb": "bind", "preemptVerb": "preempt"}, {}, id="vgpu-manager"
    ),
]


@pytest.mark.parametrize(("prefix", "verbs", "more"), STANZAS)
def test_an_older_systems_stanza_works_unchanged(
    plane: ControlPlane, kube: Kube, prefix: str, verbs: dict[str, str], more: dict[str, Any], request: Any
) -> None:
    """Without a bindVerb kube-scheduler binds the pod itself, and gputile grants it on that node."""
    rights(plane)
    space = plane.namespace(f"old-{request.node.callspec.id}")
    join(kube, [gpu_node(f"n{n}", 2, 16000, "Tesla T4") for n in range(3)])
    with Replica(plane) as gputile:
        config = gputile.config(**more)
        stanza = config["extenders"][0]
        for verb in ("filterVerb", "prioritizeVerb", "bindVerb", "preemptVerb"):
            stanza.pop(verb, None)
        stanza |= {**verbs, "weight": 1, "urlPrefix": f"https://127.0.0.1:{gputile.port}/{prefix}"}
        with plane.start_scheduler(config=config), watch(kube, "Pod", space) as pods:
            kube.create_many([tile(f"p{n}", 7000) for n in range(4)], space)
            pods.wait_for(all_bound(4), 30, "all pods are bound")
            pods.wait_for(
                lambda them: sum(grant(p) is not None for p in them.values()) == 4, 10, "all pods have a grant"
            )
    audit(kube)


def test_a_second_scheduler_serves_only_its_own_pods(plane: ControlPlane, kube: Kube) -> None:
    rights(plane)
    space = plane.namespace("second")
    join(kube, [gpu_node("n1", 2, 16000, "Tesla T4")])
    with (
        Replica(plane) as gputile,
        plane.start_scheduler(),
        plane.start_scheduler(name="gpu-scheduler", config=gputile.config("second-scheduler.yaml")),
        watch(kube, "Pod", space) as pods,
    ):
        kube.create(tile("gpu-pod", 7000, schedulerName="gpu-scheduler"), space)
        kube.create(pod("cpu-pod", {"cpu": "1"}), space)
        pods.wait_for(all_bound(2), 20, "both pods are bound")
        events = wait_until(lambda: events_of(kube, space, "cpu-pod"), 10, "an event names the scheduler")
        assert {event["reportingComponent"] for event in events} == {"default-scheduler"}
        assert grant(first_with_node(pods, "gpu-pod")) is not None
        wait_until(lambda: f"{space}/gpu-pod" in bound_pods(gputile), 10, "the bind is logged")
        assert [name for name in bound_pods(gputile) if name.startswith(space)] == [f"{space}/gpu-pod"]


def bound_pods(gputile: Replica) -> list[str]:
    return [line["pod"] for line in gputile.logged("bound")]


# --- RBAC

ALLOWED = {
    ("", "pods", "list,watch"),
    ("", "pods", "get"),
    ("", "nodes", "list,watch"),
    ("", "pods/binding", "create"),
    ("", "pods/status", "patch"),
    ("", "pods/eviction", "create"),
    ("policy", "poddisruptionbudgets", "list"),
    ("", "events", "create"),
}


def test_the_scheduler_has_the_rights_of_deploy_and_no_others(plane: ControlPlane, kube: Kube) -> None:
    rights(plane)
    with kube.as_token(kube.token_for(ACCOUNT, NAMESPACE)) as client:
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectRulesReview",
            "spec": {"namespace": "default"},
        }
        response = client.request("POST", "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", review)
    rules = {
        (group, resource, ",".join(sorted(rule["verbs"])))
        for rule in response["status"]["resourceRules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        if not group.endswith((".k8s.io",))  # reviews that every user may request for itself
    }
    assert rules == ALLOWED


def test_requests_beyond_the_schedulers_rights_are_forbidden(plane: ControlPlane, kube: Kube) -> None:
    rights(plane)
    space = plane.namespace("rights")
    kube.create(tile("tenant", 1000, schedulerName="nobody"), space)
    with kube.as_token(kube.token_for(ACCOUNT, NAMESPACE)) as client:
        for attempt in (
            lambda: client.patch("Pod", "tenant", {"spec": {"containers": [{"name": "main", "image": "x"}]}}, space),
            lambda: client.delete("Pod", "tenant", space),
            lambda: client.list("Secret", space),
            lambda: client.create(tile("mine", 1), space),
        ):
            with pytest.raises(ApiError) as error:
                attempt()
            assert error.value.status == 403


# --- labels


def test_labels_that_the_api_server_drops_from_a_binding_are_written_after_it(programs: Programs) -> None:
    """As with Kubernetes before 1.35."""
    with ControlPlane(programs, {"PodTopologyLabelsAdmission": False}) as plane:
        rights(plane)
        join(plane.kube, [gpu_node("n1", 2, 16000, "Tesla T4")])
        manifest = pod("elastic", {"elasticgpu.io/gpu-core": 20, "elasticgpu.io/gpu-memory": 10})
        with (
            Replica(plane) as gputile,
            plane.start_scheduler(config=gputile.config()),
            watch(plane.kube, "Pod", "default") as pods,
        ):
            plane.kube.create(manifest)
            pods.wait_for(all_bound(1), 20, "the pod is bound")
            shown = first_with_node(pods, "elastic")["metadata"]
            assert "elasticgpu.io/assumed" not in shown.get("labels", {}), (
                "this API server copies labels from a Binding"
            )
            assert grant({"metadata": shown}) is not None
            pods.wait_for(
                lambda them: them["default", "elastic"]["metadata"]["labels"]["elasticgpu.io/assumed"] == "true",
                5,
                "the label",
            )


# --- replicas


def test_a_standby_replica_takes_over_and_the_service_follows_the_leader(plane: ControlPlane, kube: Kube) -> None:
    """A rolling update: both replicas are ready; the leader stops, the other is elected, and pods are bound soon."""
    rights(plane)
    space = plane.namespace("replicas")
    join(kube, [gpu_node(f"n{n}", 4, 16000, "Tesla T4") for n in range(4)])
    with Replica(plane, "gputile-a") as first, Replica(plane, "gputile-b", wait_for_lease=False) as second:
        ports = {replica.name: ("127.0.0.1", replica.port) for replica in (first, second)}
        with (
            Service(kube, NAMESPACE, ports) as service,
            plane.start_scheduler(config=first.config(port=int(service.address.rpartition(":")[2]))),
            watch(kube, "Pod", space) as pods,
        ):
            assert first.is_ready()
            assert second.is_ready()
            assert not second.is_leader()
            kube.create_many([tile(f"before-{n}", 3000) for n in range(10)], space)
            pods.wait_for(all_bound(10), 20, "ten pods are bound by the first replica")
            assert "not the leader" in second.request("POST", "/gputile/filter", filter_arguments("p"))[1]
            first.child.stop()
            kube.create_many([tile(f"after-{n}", 3000) for n in range(10)], space)
            began = time.monotonic()
            pods.wait_for(all_bound(20), 30, "ten more are bound by the second")
            print(f"failover in {time.monotonic() - began:.1f} s")
            assert second.is_leader()
            audit(kube)


def test_after_a_killed_leader_another_is_elected_within_15_seconds(plane: ControlPlane, kube: Kube) -> None:
    rights(plane)
    space = plane.namespace("vanished")
    join(kube, [gpu_node(f"n{n}", 4, 16000, "Tesla T4") for n in range(2)])
    with Replica(plane, "gputile-a") as first, Replica(plane, "gputile-b", wait_for_lease=False) as second:
        ports = {replica.name: ("127.0.0.1", replica.port) for replica in (first, second)}
        with (
            Service(kube, NAMESPACE, ports) as service,
            plane.start_scheduler(config=first.config(port=int(service.address.rpartition(":")[2]))),
            watch(kube, "Pod", space) as pods,
        ):
            kube.create(tile("before", 3000), space)
            pods.wait_for(all_bound(1), 20, "bound by the first replica")
            first.child.kill()
            kube.delete("Pod", first.name, NAMESPACE, grace=0)  # as with a node that failed
            kube.create(tile("after", 3000), space)
            wait_until(second.is_leader, 15, "the second is the leader")
            pods.wait_for(all_bound(2), 20, "bound by the second replica")
            audit(kube)


def filter_arguments(name: str) -> dict[str, Any]:
    manifest = tile(name, 1000)
    manifest["metadata"]["uid"] = "unknown"
    return {"Pod": manifest, "Nodes": None, "NodeNames": ["n0"]}


# --- probes and client certificates


def test_probes_need_no_certificate_and_verbs_do(plane: ControlPlane) -> None:
    rights(plane)
    with Replica(plane) as gputile, Kube(f"https://127.0.0.1:{gputile.port}", plane.authority.ca) as anonymous:
        for path in ("/healthz", "/readyz", "/metrics", "/version"):
            assert anonymous.raw("GET", path)[0] == 200
        assert anonymous.raw("POST", "/gputile/filter", filter_arguments("p"))[0] == 403
        assert json.loads(gputile.request("POST", "/gputile/filter", filter_arguments("p"))[1])["Error"] == ""


def test_a_stopping_leader_releases_its_lease_and_its_label(plane: ControlPlane, kube: Kube) -> None:
    rights(plane)
    with Replica(plane) as gputile:
        assert gputile.is_leader()
        gputile.child.stop()
        assert gputile.child.status == 0
        lease = kube.get("Lease", ACCOUNT, NAMESPACE)
        assert not lease["spec"].get("holderIdentity")
        assert not gputile.is_leader()
        assert node_of(kube.get("Pod", gputile.name, NAMESPACE)) is None


def test_the_scheduler_survives_a_restart_of_the_api_server(plane: ControlPlane, kube: Kube) -> None:
    rights(plane)
    space = plane.namespace("restart")
    join(kube, [gpu_node("n1", 2, 16000, "Tesla T4")])
    with Replica(plane) as gputile, plane.start_scheduler(config=gputile.config()):
        kube.create(tile("before", 3000), space)
        wait_until(lambda: node_of(kube.get("Pod", "before", space)), 20, "the first pod is bound")
        plane.restart_api_server(kill=True)
        kube.create(tile("after", 3000), space)
        wait_until(lambda: node_of(kube.get("Pod", "after", space)), 60, "the second pod is bound")
        assert gputile.is_ready()
        assert gputile.child.alive
        audit(kube)
