"""Of pods, Bindings, quotas, Leases and APIServices the scheduler writes what it needs, and nothing else."""

import pytest

from tests.e2e.admission.writers import (
    GRANT,
    HOME,
    MERGE,
    ZONES,
    Writers,
    annotate,
    bind,
    is_rejected,
    label,
    lease,
    meta,
    status,
)
from tests.e2e.api import Manifest
from tests.e2e.gputile import ACCOUNT, DEPLOY, NAMESPACE
from tests.e2e.pods import pod
from tests.e2e.processes import wait_until

NUMBERED, NAMED = "tencent.com/predicate-gpu-idx-", "elasticgpu.io/container-"
MAY_PATCH = [
    pytest.param(
        {**meta(annotations={"gputile.io/nomination": "{}"}), "status": {"nominatedNodeName": HOME}}, id="room"
    ),
    pytest.param(meta(annotations={"gputile.io/nudged": "1.5"}), id="a nudge"),
    pytest.param(meta(annotations={GRANT: "{}"}), id="a grant"),
    pytest.param(meta(annotations={f"{NUMBERED}0": "0", "tencent.com/predicate-node": HOME}), id="a vcuda record"),
    pytest.param(meta(annotations={"nano-gpu.io/gpu-main": "0"}, labels={"nano-gpu.io/gpu": "true"}), id="a nano one"),
    pytest.param(meta(labels={"hami.io/vgpu-node": HOME}), id="a label that a Binding could not bring"),
]

MAY_NOT_PATCH = [
    pytest.param(meta(labels={"app": "other"}), "app", id="a label that a Service selects"),
    pytest.param(meta(labels={"mine": None}), "mine", id="a label taken away"),
    pytest.param(meta(annotations={"mine": "2"}), "mine", id="an annotation of somebody's"),
    pytest.param(meta(annotations={"mine": None}), "mine", id="an annotation taken away"),
    pytest.param(meta(annotations={"gputile.io/policy": "spread"}), "gputile.io/policy", id="what users say to us"),
    pytest.param(meta(finalizers=["a.io/b"]), "metadata.finalizers", id="a finalizer, so that it stays for ever"),
    pytest.param({"status": {"phase": "Failed"}}, "status.phase", id="the phase"),
    pytest.param({"status": {"podIP": "10.0.0.9"}}, "status.podIP", id="its address"),
    pytest.param({"status": {"message": "x"}}, "status.message", id="the kubelet's words"),
    pytest.param(
        {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}, "status.conditions", id="its readiness"
    ),
    pytest.param({"status": {"containerStatuses": None}}, "status.containerStatuses", id="its containers' state"),
    pytest.param(meta(annotations={f"{NAMED}{n}": "0" for n in range(501)}), "too many", id="too much to be compared"),
    pytest.param(meta(labels={"gputile.io/leader": "true"}), "gputile.io/leader", id="another's pod as the leader"),
]


@pytest.fixture
def marked(writers: Writers) -> Writers:
    """The pod `p` has a life of its own."""
    annotate(writers["anybody"], "p", {"mine": "1"})
    label(writers["anybody"], "p", {"mine": "1"})
    said = {"name": "main", "image": "x", "imageID": "x", "ready": True, "restartCount": 0}
    ran = {"phase": "Running", "conditions": [{"type": "Odd", "status": "True"}], "containerStatuses": [said]}
    status(writers["anybody"], "p", {"status": ran})
    return writers


@pytest.mark.parametrize("body", MAY_PATCH)
def test_the_scheduler_may_write_on_any_pod(marked: Writers, body: Manifest) -> None:
    status(marked["scheduler"], "p", body)


@pytest.mark.parametrize(("body", "says"), MAY_NOT_PATCH)
def test_the_scheduler_may_not_write_on_a_pod(marked: Writers, body: Manifest, says: str) -> None:
    said = is_rejected(lambda: status(marked["scheduler"], "p", body))
    assert "'gputile-scheduler'" in said
    assert says in said


@pytest.mark.parametrize("count", [998, 1_000, 1_500, 1_501])
def test_the_scheduler_may_write_on_pods_with_many_keys(writers: Writers, count: int) -> None:
    """Whether they are compared or not; and a pod with up to 1,000 keys of its own always is."""
    kube, keys = writers["anybody"], {f"example.com/{n}": "" for n in range(count)}
    kube.create(pod("q", {}, annotations=keys, labels=keys, schedulerName="nobody"))
    ours = meta(
        annotations={GRANT: "{}"} | {f"{NAMED}{n}": "0" for n in range(490)}, labels={"hami.io/vgpu-node": HOME}
    )
    status(writers["scheduler"], "q", ours)
    for other in (meta(annotations={"example.com/0": "x"}), meta(labels={"example.com/0": None})):
        assert bool(is_rejected(lambda: status(writers["scheduler"], "q", other))) is (count <= 1_000)  # noqa: B023


def test_the_scheduler_labels_its_own_pod_as_leader_and_takes_a_predecessors_off(writers: Writers) -> None:
    for name in ("gputile-0", "gputile-1"):
        mine = pod(name, {}, labels={"app.kubernetes.io/name": ACCOUNT}, schedulerName="nobody")
        writers["anybody"].create(mine, NAMESPACE)
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/status"
        for leads in ("true", None):
            writers["scheduler"].request("PATCH", path, meta(labels={"gputile.io/leader": leads}), MERGE)


MAY_BIND = [
    pytest.param({}, {}, id="nothing, for a pod without GPUs"),
    pytest.param({GRANT: "{}"}, {}, id="a grant"),
    pytest.param({GRANT: "{}", "elasticgpu.io/container-main": "0"}, {"elasticgpu.io/assumed": "true"}, id="a record"),
    pytest.param({f"{NAMED}c{n}": "0" for n in range(490)}, {}, id="the record of a very large pod"),
]
MAY_NOT_BIND = [
    pytest.param({"a": "b"}, {}, "a", id="an annotation of somebody's"),
    pytest.param({}, {"app": "other"}, "app", id="a label that a Service selects"),
    pytest.param({}, {"gputile.io/leader": "true"}, "gputile.io/leader", id="the leader's label"),
    pytest.param(
        {f"{NAMED}c{n}": "0" for n in range(501)}, {}, "too many", id="so much that it cannot be compared later"
    ),
]


@pytest.mark.parametrize(("annotations", "labels"), MAY_BIND)
def test_the_scheduler_may_bind_with(writers: Writers, annotations: dict[str, str], labels: dict[str, str]) -> None:
    """To a node whose zone and region the API server itself writes into the Binding."""
    bind(writers["scheduler"], "p", annotations, labels)
    found = writers["anybody"].get("Pod", "p")
    assert found["spec"]["nodeName"] == HOME
    assert found["metadata"]["labels"] == {**labels, **ZONES}


@pytest.mark.parametrize(("annotations", "labels", "says"), MAY_NOT_BIND)
def test_the_scheduler_may_not_bind_with(
    writers: Writers, annotations: dict[str, str], labels: dict[str, str], says: str
) -> None:
    said = is_rejected(lambda: bind(writers["scheduler"], "p", annotations, labels))
    assert "'gputile-scheduler'" in said
    assert says in said


def test_the_scheduler_may_evict(writers: Writers) -> None:
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "p", "namespace": "default"}}
    writers["scheduler"].create(eviction, subresource="eviction")
    assert writers["anybody"].find("Pod", "p") is None


QUOTA = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "gputile-quota", "namespace": NAMESPACE}}


def test_of_a_quota_the_scheduler_writes_only_the_last_text_that_it_understood(writers: Writers) -> None:
    writers["anybody"].apply({**QUOTA, "data": {"quota.yaml": "{}"}})
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
        said = is_rejected(lambda: writers["scheduler"].request("PATCH", path, body, MERGE))  # noqa: B023
        assert bool(said) is not may, body
    writers["anybody"].delete("ConfigMap", "gputile-quota", NAMESPACE)


def test_the_scheduler_makes_and_renews_its_own_lease_and_no_other(writers: Writers) -> None:
    if writers["anybody"].find("Lease", ACCOUNT, NAMESPACE):
        writers["anybody"].delete("Lease", ACCOUNT, NAMESPACE)
    made = writers["scheduler"].create(lease(ACCOUNT), NAMESPACE)
    path = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
    writers["scheduler"].request("PUT", f"{path}/{ACCOUNT}", {**made, "spec": {"holderIdentity": "me"}})
    assert "only its own Lease" in is_rejected(lambda: writers["scheduler"].create(lease("kube-scheduler"), NAMESPACE))
    writers["anybody"].delete("Lease", ACCOUNT, NAMESPACE)


def test_of_its_api_service_the_scheduler_writes_the_certificate_only(writers: Writers) -> None:
    kube, name = writers["anybody"], "v1alpha1.metrics.nvidia.com"
    kube.apply(DEPLOY / "metrics-api.yaml")
    path, bundle = f"/apis/apiregistration.k8s.io/v1/apiservices/{name}", "LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0tLS0tCg=="
    try:
        wait_until(lambda: not is_rejected(lambda: writers["scheduler"].request("GET", path)), 10, "its rights")
        for body, may in (
            ({"spec": {"caBundle": bundle, "insecureSkipTLSVerify": None}}, True),
            ({"spec": {"caBundle": None, "insecureSkipTLSVerify": True}}, False),
            ({"spec": {"service": {"name": "other", "namespace": "default"}}}, False),
            ({"spec": {"groupPriorityMinimum": 20000}}, False),
            (meta(labels={"a": "b"}), False),
        ):
            said = is_rejected(lambda: writers["scheduler"].request("PATCH", path, body, MERGE))  # noqa: B023
            assert bool(said) is not may, (body, said)
    finally:
        for service in (name, "v1.nvidia-gpu-scheduler"):
            kube.delete("APIService", service)
