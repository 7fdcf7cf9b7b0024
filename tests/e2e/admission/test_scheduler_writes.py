"""The scheduler may write its own fields of pods, Bindings, quotas, Leases and APIServices, and nothing else."""

import pytest

from tests.e2e.admission.writers import (
    GRANT,
    HOME,
    MERGE,
    ZONES,
    Writers,
    annotate,
    bind,
    label,
    lease,
    meta,
    rejection,
    status,
)
from tests.e2e.api import Manifest
from tests.e2e.gputile import ACCOUNT, DEPLOY, NAMESPACE
from tests.e2e.pods import pod
from tests.e2e.processes import wait_until

NUMBERED, NAMED = "tencent.com/predicate-gpu-idx-", "elasticgpu.io/container-"
MAY_PATCH = [
    pytest.param(
        {**meta(annotations={"gputile.io/nomination": "{}"}), "status": {"nominatedNodeName": HOME}}, id="a nomination"
    ),
    pytest.param(meta(annotations={"gputile.io/nudged": "1.5"}), id="a nudge"),
    pytest.param(meta(annotations={GRANT: "{}"}), id="a grant"),
    pytest.param(meta(annotations={f"{NUMBERED}0": "0", "tencent.com/predicate-node": HOME}), id="a vcuda record"),
    pytest.param(
        meta(annotations={"nano-gpu.io/gpu-main": "0"}, labels={"nano-gpu.io/gpu": "true"}), id="a nano record"
    ),
    pytest.param(meta(labels={"hami.io/vgpu-node": HOME}), id="a label that a Binding cannot carry"),
]

MAY_NOT_PATCH = [
    pytest.param(meta(labels={"app": "other"}), "app", id="a label that a Service selects"),
    pytest.param(meta(labels={"mine": None}), "mine", id="a user's label removed"),
    pytest.param(meta(annotations={"mine": "2"}), "mine", id="a user's annotation"),
    pytest.param(meta(annotations={"mine": None}), "mine", id="a user's annotation removed"),
    pytest.param(
        meta(annotations={"gputile.io/policy": "spread"}),
        "gputile.io/policy",
        id="an annotation by which users choose a policy",
    ),
    pytest.param(meta(finalizers=["a.io/b"]), "metadata.finalizers", id="a finalizer"),
    pytest.param({"status": {"phase": "Failed"}}, "status.phase", id="the phase"),
    pytest.param({"status": {"podIP": "10.0.0.9"}}, "status.podIP", id="the pod's address"),
    pytest.param({"status": {"message": "x"}}, "status.message", id="the kubelet's message"),
    pytest.param(
        {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}, "status.conditions", id="the pod's readiness"
    ),
    pytest.param({"status": {"containerStatuses": None}}, "status.containerStatuses", id="the states of containers"),
    pytest.param(
        meta(annotations={f"{NAMED}{n}": "0" for n in range(501)}), "too many", id="too many keys to be compared"
    ),
    pytest.param(
        meta(labels={"gputile.io/leader": "true"}), "gputile.io/leader", id="the leader's label on a user's pod"
    ),
]


@pytest.fixture
def marked(writers: Writers) -> Writers:
    """The pod `p` has a user's keys, and a status of the kubelet."""
    annotate(writers["admin"], "p", {"mine": "1"})
    label(writers["admin"], "p", {"mine": "1"})
    container = {"name": "main", "image": "x", "imageID": "x", "ready": True, "restartCount": 0}
    running = {"phase": "Running", "conditions": [{"type": "Odd", "status": "True"}], "containerStatuses": [container]}
    status(writers["admin"], "p", {"status": running})
    return writers


@pytest.mark.parametrize("body", MAY_PATCH)
def test_the_scheduler_may_write_on_any_pod(marked: Writers, body: Manifest) -> None:
    status(marked["scheduler"], "p", body)


@pytest.mark.parametrize(("body", "named"), MAY_NOT_PATCH)
def test_the_scheduler_may_not_write_on_a_pod(marked: Writers, body: Manifest, named: str) -> None:
    message = rejection(lambda: status(marked["scheduler"], "p", body))
    assert "'gputile-scheduler'" in message
    assert named in message


@pytest.mark.parametrize("count", [998, 1_000, 1_500, 1_501])
def test_the_scheduler_may_write_on_pods_with_many_keys(writers: Writers, count: int) -> None:
    """The keys of a pod with up to 1,000 of them are compared; larger pods are accepted without comparison."""
    kube, keys = writers["admin"], {f"example.com/{n}": "" for n in range(count)}
    kube.create(pod("q", {}, annotations=keys, labels=keys, schedulerName="nobody"))
    records = meta(
        annotations={GRANT: "{}"} | {f"{NAMED}{n}": "0" for n in range(490)}, labels={"hami.io/vgpu-node": HOME}
    )
    status(writers["scheduler"], "q", records)
    for other in (meta(annotations={"example.com/0": "x"}), meta(labels={"example.com/0": None})):
        assert bool(rejection(lambda: status(writers["scheduler"], "q", other))) is (count <= 1_000)  # noqa: B023


def test_the_scheduler_adds_the_leaders_label_to_its_own_pod_and_removes_a_predecessors(writers: Writers) -> None:
    for name in ("gputile-0", "gputile-1"):
        manifest = pod(name, {}, labels={"app.kubernetes.io/name": ACCOUNT}, schedulerName="nobody")
        writers["admin"].create(manifest, NAMESPACE)
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/status"
        for value in ("true", None):
            writers["scheduler"].request("PATCH", path, meta(labels={"gputile.io/leader": value}), MERGE)


MAY_BIND = [
    pytest.param({}, {}, id="nothing, for a pod without GPUs"),
    pytest.param({GRANT: "{}"}, {}, id="a grant"),
    pytest.param({GRANT: "{}", "elasticgpu.io/container-main": "0"}, {"elasticgpu.io/assumed": "true"}, id="a record"),
    pytest.param({f"{NAMED}c{n}": "0" for n in range(490)}, {}, id="the record of a very large pod"),
]
MAY_NOT_BIND = [
    pytest.param({"a": "b"}, {}, "a", id="a user's annotation"),
    pytest.param({}, {"app": "other"}, "app", id="a label that a Service selects"),
    pytest.param({}, {"gputile.io/leader": "true"}, "gputile.io/leader", id="the leader's label"),
    pytest.param({f"{NAMED}c{n}": "0" for n in range(501)}, {}, "too many", id="too many keys to be compared later"),
]


@pytest.mark.parametrize(("annotations", "labels"), MAY_BIND)
def test_the_scheduler_may_bind_with(writers: Writers, annotations: dict[str, str], labels: dict[str, str]) -> None:
    """The API server itself adds the node's zone and region to the Binding."""
    bind(writers["scheduler"], "p", annotations, labels)
    bound = writers["admin"].get("Pod", "p")
    assert bound["spec"]["nodeName"] == HOME
    assert bound["metadata"]["labels"] == {**labels, **ZONES}


@pytest.mark.parametrize(("annotations", "labels", "named"), MAY_NOT_BIND)
def test_the_scheduler_may_not_bind_with(
    writers: Writers, annotations: dict[str, str], labels: dict[str, str], named: str
) -> None:
    message = rejection(lambda: bind(writers["scheduler"], "p", annotations, labels))
    assert "'gputile-scheduler'" in message
    assert named in message


def test_the_scheduler_may_evict(writers: Writers) -> None:
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "p", "namespace": "default"}}
    writers["scheduler"].create(eviction, subresource="eviction")
    assert writers["admin"].find("Pod", "p") is None


QUOTA = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "gputile-quota", "namespace": NAMESPACE}}


def test_the_scheduler_writes_only_the_last_good_text_of_a_quota(writers: Writers) -> None:
    writers["admin"].apply({**QUOTA, "data": {"quota.yaml": "{}"}})
    path = f"/api/v1/namespaces/{NAMESPACE}/configmaps/gputile-quota"
    for body, may in (
        (meta(annotations={"gputile.io/last-good-quota": "{}"}), True),
        ({"data": {"quota.yaml": "{team-a: {}}"}}, False),
        ({"data": {"more": "x"}}, False),
        ({"immutable": True}, False),
        (meta(annotations={"a": "b"}), False),
        (meta(labels={"a": "b"}), False),
        (meta(finalizers=["a.io/b"]), False),
    ):
        message = rejection(lambda: writers["scheduler"].request("PATCH", path, body, MERGE))  # noqa: B023
        assert bool(message) is not may, body
    writers["admin"].delete("ConfigMap", "gputile-quota", NAMESPACE)


def test_the_scheduler_creates_and_renews_its_own_lease_and_no_other(writers: Writers) -> None:
    if writers["admin"].find("Lease", ACCOUNT, NAMESPACE):
        writers["admin"].delete("Lease", ACCOUNT, NAMESPACE)
    created = writers["scheduler"].create(lease(ACCOUNT), NAMESPACE)
    path = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
    writers["scheduler"].request("PUT", f"{path}/{ACCOUNT}", {**created, "spec": {"holderIdentity": "me"}})
    assert "only its own Lease" in rejection(lambda: writers["scheduler"].create(lease("kube-scheduler"), NAMESPACE))
    writers["admin"].delete("Lease", ACCOUNT, NAMESPACE)


def test_the_scheduler_writes_only_the_certificate_of_its_api_service(writers: Writers) -> None:
    kube, name = writers["admin"], "v1alpha1.metrics.nvidia.com"
    kube.apply(DEPLOY / "metrics-api.yaml")
    path, bundle = f"/apis/apiregistration.k8s.io/v1/apiservices/{name}", "LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0tLS0tCg=="
    try:
        wait_until(lambda: not rejection(lambda: writers["scheduler"].request("GET", path)), 10, "its RBAC is in force")
        for body, may in (
            ({"spec": {"caBundle": bundle, "insecureSkipTLSVerify": None}}, True),
            ({"spec": {"caBundle": None, "insecureSkipTLSVerify": True}}, False),
            ({"spec": {"service": {"name": "other", "namespace": "default"}}}, False),
            ({"spec": {"groupPriorityMinimum": 20000}}, False),
            (meta(labels={"a": "b"}), False),
        ):
            message = rejection(lambda: writers["scheduler"].request("PATCH", path, body, MERGE))  # noqa: B023
            assert bool(message) is not may, (body, message)
    finally:
        for service in (name, "v1.nvidia-gpu-scheduler"):
            kube.delete("APIService", service)
