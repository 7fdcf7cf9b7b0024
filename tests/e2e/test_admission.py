"""deploy/admission.yaml on a real API server: who may write what, and what asking costs. Every row was written by hand.

The rights of RBAC are those of deploy/. Where a row says `anybody`, the admin writes: policies hold for admins too.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice, product
from typing import Any

import pytest

from gputile.cli.checks_control import POLICIES
from gputile.dialects import gputile
from tests.deploy.test_admission import prefixes, strings
from tests.e2e import agents
from tests.e2e.api import ApiError, Kube, Manifest
from tests.e2e.control_plane import ControlPlane
from tests.e2e.gputile import ACCOUNT, DEPLOY, NAMESPACE, rights
from tests.e2e.nodes import gpu_node, join
from tests.e2e.pods import container, pod, tile
from tests.e2e.processes import wait_until

BINDING = "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicyBinding"
HOME, AWAY = "home", "away"
ZONES = {"topology.kubernetes.io/zone": "z1", "topology.kubernetes.io/region": "r1"}
GRANT = gputile.GRANT


class Writers(Mapping[str, Kube]):
    """The API as each of those who write, by name, with their own tokens."""

    def __init__(self, plane: ControlPlane) -> None:
        home = {"apiVersion": "v1", "kind": "Node", "name": HOME}
        kube = plane.kube
        self._doors = {
            "anybody": kube,
            "scheduler": kube.as_token(kube.token_for(ACCOUNT, NAMESPACE)),
            "agent": kube.as_token(kube.token_for(agents.ACCOUNT, agents.NAMESPACE, 3600, home)),
            "agent without a node": kube.as_token(kube.token_for(agents.ACCOUNT, agents.NAMESPACE)),
        }

    def __getitem__(self, name: str) -> Kube:
        return self._doors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._doors)

    def __len__(self) -> int:
        return len(self._doors)


@pytest.fixture
def writers(plane: ControlPlane, kube: Kube) -> Iterator[Writers]:
    """With every policy in force; and a pod `p` and two nodes in their first state."""
    rights(plane)
    agents.rights(plane)
    join(kube, [gpu_node(name, labels=ZONES) for name in (HOME, AWAY)])
    kube.patch("Node", HOME, {"status": SAID_BY_THE_KUBELET}, subresource="status")
    doors = Writers(plane)
    kube.create(tile("p", 1000, schedulerName="nobody"))
    in_force(doors)
    yield doors
    for name in ("scheduler", "agent", "agent without a node"):
        doors[name].close()


SAID_BY_THE_KUBELET = {
    "daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}},
    "images": [{"names": ["busybox"], "sizeBytes": 1}],
    "volumesInUse": ["v1"],
    "volumesAttached": [{"name": "v1", "devicePath": "/dev/x"}],
    "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}],
}


def is_rejected(attempt: Callable[[], object]) -> str:
    """The sentence of the no; "" if it was taken. Any other no than a policy's or RBAC's is an error of the test."""
    try:
        attempt()
    except ApiError as no:
        if no.status not in (403, 422):
            raise
        return no.message
    return ""


def in_force(writers: Writers) -> None:
    """One write per policy that it alone rejects. They come into force within about a second."""
    samples: dict[str, Callable[[], object]] = {
        "gputile-records": lambda: annotate(writers["anybody"], "p", {GRANT: "x"}, dry=True),
        "gputile-leader": lambda: label(writers["anybody"], "p", {"gputile.io/leader": "true"}, dry=True),
        "gputile-scheduler": lambda: status(writers["scheduler"], "p", {"metadata": {"labels": {"a": "b"}}}, dry=True),
        "gputile-scheduler-objects": lambda: writers["scheduler"].request(
            "POST", f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases?dryRun=All", lease("other")
        ),
        "gputile-agents": lambda: writers["agent"].request(
            "PATCH", f"/api/v1/nodes/{AWAY}?dryRun=All", {"metadata": {"labels": {"gputile.io/x": "y"}}}, MERGE
        ),
    }
    assert set(samples) == set(POLICIES)
    for policy, attempt in samples.items():
        wait_until(lambda: f"'{policy}'" in is_rejected(attempt), 20, f"{policy} in force")  # noqa: B023


def lifted(kube: Kube) -> None:
    """No policy in force."""
    for name in POLICIES:
        if kube.find(BINDING, name):
            kube.delete(BINDING, name)
    for attempt in (
        lambda: annotate(kube, "p", {GRANT: "x"}, dry=True),
        lambda: label(kube, "p", {"gputile.io/leader": "true"}, dry=True),
    ):
        wait_until(lambda: not is_rejected(attempt), 20, "the policies lifted")  # noqa: B023


# ---- writes ---------------------------------------------------------------------------------------------------------

MERGE = "application/merge-patch+json"


def _patch(kube: Kube, path: str, body: Manifest, dry: bool) -> Any:
    return kube.request("PATCH", f"{path}?dryRun=All" if dry else path, body, MERGE)


def annotate(kube: Kube, name: str, keys: Mapping[str, str | None], *, dry: bool = False) -> Any:
    return _patch(kube, f"/api/v1/namespaces/default/pods/{name}", {"metadata": {"annotations": dict(keys)}}, dry)


def label(kube: Kube, name: str, keys: Mapping[str, str | None], *, dry: bool = False) -> Any:
    return _patch(kube, f"/api/v1/namespaces/default/pods/{name}", {"metadata": {"labels": dict(keys)}}, dry)


def status(kube: Kube, name: str, body: Manifest, *, dry: bool = False) -> Any:
    return _patch(kube, f"/api/v1/namespaces/default/pods/{name}/status", body, dry)


def bind(
    kube: Kube,
    name: str,
    annotations: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    path: str = "pods/{}/binding",
) -> Any:
    meta = {"name": name, "annotations": dict(annotations or {}), "labels": dict(labels or {})}
    target = {"apiVersion": "v1", "kind": "Node", "name": HOME}
    body = {"apiVersion": "v1", "kind": "Binding", "metadata": meta, "target": target}
    return kube.request("POST", f"/api/v1/namespaces/default/{path.format(name)}", body)


def lease(name: str) -> Manifest:
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}, "spec": {}}


def many(count: int, *more: str) -> list[Manifest]:
    return [container(f"c{n}") for n in range(count)] + [container(name) for name in more]


# ---- records --------------------------------------------------------------------------------------------------------


def test_nobody_makes_a_pod_with_a_key_that_says_which_gpu_it_holds(writers: Writers) -> None:
    """Every key, as an annotation and as a label; those with a container's name or number with that of `main`."""
    keys = [
        *strings("gputile-records", "keys"),
        *(f"{prefix}{'0' if prefix.endswith('idx-') else 'main'}" for prefix in prefixes()),
    ]
    for key in keys:
        for where in ("annotations", "labels"):
            said = is_rejected(lambda: writers["anybody"].create(pod("q", {}, **{where: {key: "x"}})))  # noqa: B023
            assert key.rstrip("0") in said, f"{key} in {where}"
            assert "only the gputile scheduler may set, change or remove it, not admin" in said


NUMBERED, NAMED = "tencent.com/predicate-gpu-idx-", "elasticgpu.io/container-"

CONTAINERS = [
    pytest.param({"containers": many(3)}, {f"{NUMBERED}2": "0"}, NUMBERED, id="the third container's number"),
    pytest.param(
        {"initContainers": many(3), "containers": [container("main")]},
        {f"{NUMBERED}3": "0"},
        NUMBERED,
        id="a number beyond the init containers",
    ),
    pytest.param({"containers": many(11)}, {f"{NUMBERED}10": "0"}, NUMBERED, id="the first number with two digits"),
    pytest.param({"containers": many(101)}, {f"{NUMBERED}100": "0"}, NUMBERED, id="the first with three"),
    pytest.param({"containers": many(1001)}, {f"{NUMBERED}1000": "0"}, NUMBERED, id="the first with four"),
    pytest.param({"containers": many(2345)}, {f"{NUMBERED}2344": "0"}, NUMBERED, id="a number of a very large pod"),
    pytest.param(
        {"containers": many(2345)}, {"nvidia.com/predicate-gpu-idx-1999": "0"}, "nvidia.com/", id="the fork's number"
    ),
    pytest.param({"containers": many(2345)}, {f"{NAMED}c2344": "0"}, f"{NAMED}c2344", id="a name of a very large pod"),
    pytest.param(
        {"initContainers": [container("first")], "containers": [container("main")]},
        {"nano-gpu.io/gpu-first": "0"},
        "nano-gpu.io/gpu-first",
        id="an init container's name",
    ),
    pytest.param({"containers": many(2)}, {f"{NUMBERED}10": "0"}, "", id="the number of no container says nothing"),
    pytest.param({"containers": many(2)}, {f"{NAMED}c7": "0"}, "", id="the name of no container says nothing"),
]


@pytest.mark.parametrize(("spec", "annotations", "says"), CONTAINERS)
def test_records_by_container_are_found_whichever_container_it_is(
    writers: Writers, spec: Manifest, annotations: dict[str, str], says: str
) -> None:
    made = {**pod("q", {}, annotations=annotations), "spec": {"schedulerName": "nobody", **spec}}
    said = is_rejected(lambda: writers["anybody"].create(made))
    assert says in said if says else not said


HELD = {GRANT: "{}", "hami.io/vgpu-node": HOME}

UPDATES = [
    pytest.param(lambda kube: annotate(kube, "p", {GRANT: "other"}), GRANT, id="changed"),
    pytest.param(lambda kube: annotate(kube, "p", {GRANT: None}), GRANT, id="taken away"),
    pytest.param(lambda kube: annotate(kube, "p", {"hami.io/bind-time": "1"}), "hami.io/bind-time", id="added"),
    pytest.param(lambda kube: label(kube, "p", {"hami.io/vgpu-node": "x"}), "hami.io/vgpu-node", id="as a label"),
    pytest.param(
        lambda kube: status(kube, "p", {"metadata": {"annotations": {GRANT: "x"}}}), GRANT, id="through the status"
    ),
    pytest.param(lambda kube: annotate(kube, "p", {GRANT: "{}", "a": "b"}), "", id="written again as it is"),
    pytest.param(lambda kube: annotate(kube, "p", {"gputile.io/policy": "spread"}), "", id="what users write"),
    pytest.param(lambda kube: status(kube, "p", {"status": {"phase": "Running"}}), "", id="a kubelet's status"),
]


@pytest.mark.parametrize(("write", "says"), UPDATES)
def test_nobody_changes_a_record_and_everybody_may_carry_it_along(
    writers: Writers, write: Callable[[Kube], object], says: str
) -> None:
    status(writers["scheduler"], "p", {"metadata": {"annotations": HELD}})
    said = is_rejected(lambda: write(writers["anybody"]))
    assert says in said if says else not said


@pytest.mark.parametrize("subresource", ["resize", "ephemeralcontainers"])
def test_other_subresources_of_a_pod_write_no_annotations(writers: Writers, subresource: str) -> None:
    """No policy matches them; the API server drops metadata there."""
    path = f"/api/v1/namespaces/default/pods/p/{subresource}"
    writers["anybody"].request("PATCH", path, {"metadata": {"annotations": {GRANT: "x"}, "labels": {"a": "b"}}}, MERGE)
    found = writers["anybody"].get("Pod", "p")["metadata"]
    assert (found.get("annotations"), found.get("labels")) == (None, None)


BINDINGS = [
    pytest.param({GRANT: "x"}, {}, GRANT, id="a grant"),
    pytest.param({f"{NUMBERED}0": "0"}, {}, f"{NUMBERED}0", id="a record by number"),
    pytest.param({"nano-gpu.io/gpu-main": "0"}, {}, "nano-gpu.io/gpu-main", id="a record by name"),
    pytest.param({}, {"elasticgpu.io/assumed": "true"}, "elasticgpu.io/assumed", id="a label"),
    pytest.param({f"k{n}": "" for n in range(1001)}, {}, "more than 1000 keys", id="more than anybody binds with"),
    pytest.param({"team": "a"}, {"team": "a"}, "", id="somebody's own words"),
    pytest.param({}, {}, "", id="nothing, as kube-scheduler does"),
]


@pytest.mark.parametrize("path", ["pods/{}/binding", "bindings"])
@pytest.mark.parametrize(("annotations", "labels", "says"), BINDINGS)
def test_a_binding_is_no_way_around_it(
    writers: Writers, annotations: dict[str, str], labels: dict[str, str], says: str, path: str
) -> None:
    said = is_rejected(lambda: bind(writers["anybody"], "p", annotations, labels, path))
    assert says in said if says else not said


class Impersonating(Kube):
    """The admin in somebody else's name."""

    def __init__(self, admin: Kube, user: str) -> None:
        super().__init__(admin.server, admin.ca, admin.token)
        self._user = user

    def headers(self, content: str = "application/json") -> dict[str, str]:
        return {**super().headers(content), "Impersonate-User": self._user, "Impersonate-Group": "system:masters"}


OTHERS = [
    pytest.param("gpu-manager", {f"{NUMBERED}0": "0"}, True, id="gpu-manager says which GPU it gave"),
    pytest.param("gpu-manager", {"nvidia.com/gpu-assigned": "true"}, True, id="gpu-manager says that it did"),
    pytest.param("gpu-manager", {"hami.io/bind-phase": "success"}, False, id="gpu-manager writes no word of HAMi's"),
    pytest.param("gpu-manager", {GRANT: "x"}, False, id="gpu-manager writes no grant"),
    pytest.param("nano-gpu-scheduler", {"nano-gpu.io/gpu-main": "0"}, True, id="nano's scheduler writes its record"),
    pytest.param("nano-gpu-scheduler", {f"{NAMED}main": "0"}, False, id="nano's scheduler writes no elastic-gpu's"),
    pytest.param("hami-device-plugin", {"hami.io/bind-phase": "success"}, True, id="HAMi's plugin says success"),
    pytest.param("hami-device-plugin", {"hami.io/vgpu-node": "x"}, False, id="HAMi's plugin moves no pod"),
    pytest.param("gputile-agent", {GRANT: "x"}, False, id="our own agent writes no grant"),
]


@pytest.mark.parametrize(("account", "annotations", "may"), OTHERS)
def test_other_families_write_their_own_records_while_they_run(
    writers: Writers, account: str, annotations: dict[str, str], may: bool
) -> None:
    with Impersonating(writers["anybody"], f"system:serviceaccount:{NAMESPACE}:{account}") as other:
        assert bool(is_rejected(lambda: annotate(other, "p", annotations))) is not may


# ---- the scheduler --------------------------------------------------------------------------------------------------


def meta(**metadata: Any) -> Manifest:
    return {"metadata": metadata}


MAY_PATCH = [
    pytest.param({**meta(annotations={"gputile.io/promise": "{}"}), "status": {"nominatedNodeName": HOME}}, id="room"),
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
    pytest.param({"status": {"containerStatuses": []}}, "status.containerStatuses", id="its containers' state"),
    pytest.param({"status": {"resourceClaimStatuses": [{"name": "c"}]}}, "resourceClaimStatuses", id="its claims"),
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
    if "containerStatuses" in says:
        body = {"status": {"containerStatuses": None}}
    assert says in is_rejected(lambda: status(marked["scheduler"], "p", body))


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
    pytest.param({f"{NAMED}c{n}": "0" for n in range(2000)}, {}, id="the record of a very large pod"),
]
MAY_NOT_BIND = [
    pytest.param({"a": "b"}, {}, "a", id="an annotation of somebody's"),
    pytest.param({}, {"app": "other"}, "app", id="a label that a Service selects"),
    pytest.param({}, {"gputile.io/leader": "true"}, "gputile.io/leader", id="the leader's label"),
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
    assert says in is_rejected(lambda: bind(writers["scheduler"], "p", annotations, labels))


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
    assert "its own only" in is_rejected(lambda: writers["scheduler"].create(lease("kube-scheduler"), NAMESPACE))
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


# ---- agents ---------------------------------------------------------------------------------------------------------


def node(body: Manifest, name: str = HOME, subresource: str = "", how: str = "merge") -> Callable[[Kube], object]:
    return lambda kube: kube.patch("Node", name, body, subresource=subresource, how=how)


def of_status(how: str = "merge", name: str = HOME, **fields: Any) -> Callable[[Kube], object]:
    return node({"status": fields}, name, "status", how)


def condition(kind: str) -> list[Manifest]:
    return [{"type": kind, "status": "False", "reason": "X", "message": "y"}]


AGENT_MAY = [
    pytest.param(node(meta(annotations={"gputile.io/inventory": "{}"})), id="say what GPUs there are"),
    pytest.param(node(meta(annotations={"gputile.io/inventory": None})), id="and that there are none"),
    pytest.param(node(meta(labels={"gputile.io/gpus": "4", "gputile.io/driver": "1"})), id="label them"),
    pytest.param(of_status("strategic", conditions=condition("GputileAgent")), id="say how it is"),
    pytest.param(
        of_status(
            "strategic",
            capacity={"gputile.io/memory": "5", "nvidia.com/vcuda-memory": "7"},
            allocatable={"gputile.io/memory": "5", "nvidia.com/vcuda-memory": "7"},
        ),
        id="say sums",
    ),
    pytest.param(of_status("strategic", allocatable={"gputile.io/cores": None}), id="take a sum away"),
    pytest.param(of_status("strategic", allocatable={"gputile.io/stale": None}), id="take a stale one of ours away"),
]

AGENT_MAY_NOT = [
    pytest.param(node(meta(labels={"a/b": "c"})), id="label others' labels"),
    pytest.param(node(meta(labels={"topology.kubernetes.io/zone": None})), id="take others' labels"),
    pytest.param(node(meta(annotations={"a/b": "c"})), id="annotate others' annotations"),
    pytest.param(node(meta(labels={"gputile.io/pool": "rich"})), id="move itself into another pool"),
    pytest.param(node(meta(annotations={"gputile.io/cordon": None})), id="use a GPU again that a person took out"),
    pytest.param(node(meta(labels={"gputile.io/agent": None})), id="choose where agents run"),
    pytest.param(node(meta(finalizers=["a.io/b"])), id="keep the node for ever"),
    pytest.param(
        node(meta(ownerReferences=[{"apiVersion": "v1", "kind": "Pod", "name": "x", "uid": "y"}])), id="own it"
    ),
    pytest.param(node({"spec": {"unschedulable": True}}), id="cordon the node"),
    pytest.param(node({"spec": {"taints": [{"key": "a", "effect": "NoSchedule"}]}}), id="taint the node"),
    pytest.param(node(meta(annotations={"gputile.io/inventory": "{}"}), AWAY), id="speak for another node"),
    pytest.param(of_status(name=AWAY, capacity={"gputile.io/memory": "1"}), id="count for another node"),
    pytest.param(of_status(daemonEndpoints={"kubeletEndpoint": {"Port": 1}}), id="send the API server elsewhere"),
    pytest.param(of_status(images=[]), id="say which images are there"),
    pytest.param(of_status(volumesInUse=None), id="say that a volume is free"),
    pytest.param(of_status(volumesAttached=[]), id="say that a volume is detached"),
    pytest.param(of_status(addresses=[{"type": "InternalIP", "address": "10.6.6.6"}]), id="move the node"),
    pytest.param(of_status(nodeInfo={"kernelVersion": "6"}), id="say what the machine is"),
    pytest.param(of_status(phase="Terminated"), id="say its phase"),
    pytest.param(of_status(runtimeHandlers=[{"name": "x"}]), id="say what the runtime can"),
    pytest.param(of_status(features={"supplementalGroupsPolicy": True}), id="say what the kubelet can"),
    pytest.param(of_status("strategic", conditions=condition("Ready")), id="say that the kubelet is not ready"),
    pytest.param(of_status(conditions=[]), id="say nothing of others' conditions"),
    pytest.param(of_status("strategic", allocatable={"cpu": "1"}), id="count CPUs"),
    pytest.param(of_status("strategic", capacity={"gputile.io/gpu": "99"}), id="count what carries devices"),
    pytest.param(of_status("strategic", capacity={"nvidia.com/gpu": "99"}), id="count another plugin's"),
    pytest.param(of_status("strategic", capacity={"example.com/x": "1"}), id="count something new"),
    pytest.param(of_status("strategic", capacity={"gputile.io/new": "1"}), id="count something new of ours"),
    pytest.param(of_status("strategic", allocatable={"gputile.io/gpu": None}), id="take devices away"),
    pytest.param(of_status("strategic", allocatable={"nvidia.com/gpu": None}), id="take others' devices away"),
    pytest.param(of_status(allocatable=None), id="take all of them away"),
]


@pytest.fixture
def used(writers: Writers) -> Writers:
    """The node has words of people and of an older release."""
    kube = writers["anybody"]
    kube.patch("Node", HOME, meta(annotations={"gputile.io/cordon": "GPU-0", "gputile.io/inventory": "x"}))
    kube.patch("Node", HOME, meta(labels={"gputile.io/pool": "poor", "gputile.io/agent": "true"}))
    stale = {"gputile.io/stale": "1"}
    kube.patch("Node", HOME, {"status": {"capacity": stale, "allocatable": stale}}, subresource="status")
    return writers


@pytest.mark.parametrize("write", AGENT_MAY)
def test_an_agent_may(used: Writers, write: Callable[[Kube], object]) -> None:
    write(used["agent"])
    assert "none named in its token" in is_rejected(lambda: write(used["agent without a node"]))


@pytest.mark.parametrize("write", AGENT_MAY_NOT)
def test_an_agent_may_not(used: Writers, write: Callable[[Kube], object]) -> None:
    assert "gputile-agents" in is_rejected(lambda: write(used["agent"]))


def test_an_agent_keeps_the_lease_of_its_node_and_no_other(writers: Writers) -> None:
    space = "gputile-agents"
    made = writers["agent"].create(lease(HOME), space)
    path = f"/apis/coordination.k8s.io/v1/namespaces/{space}/leases"
    writers["agent"].request("PUT", f"{path}/{HOME}", {**made, "spec": {"holderIdentity": HOME}})
    assert "may write to that node only" in is_rejected(lambda: writers["agent"].create(lease(AWAY), space))
    writers["anybody"].delete_all("Lease", space)


# ---- what it costs --------------------------------------------------------------------------------------------------


def tiny(count: int) -> dict[str, str]:
    """Keys as short as can be: so many fit into the 256 KiB that annotations may have."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    keys = ("".join(word) for length in (1, 2, 3) for word in product(letters, repeat=length))
    return dict.fromkeys(islice(keys, count), "")


BIG = {
    "10,000 annotations": pod("big", {}, annotations={f"example.com/key-{n}": "x" for n in range(10_000)}),
    "88,000 annotations": pod("big", {}, annotations=tiny(88_000)),
    "40,000 labels": pod("big", {}, labels={f"example.com/key-{n}": "x" for n in range(40_000)}),
    "10,000 unknown keys of ours": pod("big", {}, annotations={f"gputile.io/key-{n}": "x" for n in range(10_000)}),
    "5,000 containers": pod("big", {}, automountServiceAccountToken=False, containers=many(5_000)),
}
TIMES = 3


def seconds(kube: Kube, made: Manifest) -> float:
    """The median of making it. Nobody schedules it."""
    manifest = {**made, "spec": {**made["spec"], "schedulerName": "nobody"}}
    took = []
    for _ in range(TIMES):
        began = time.monotonic()
        kube.create(manifest)
        took.append(time.monotonic() - began)
        kube.delete("Pod", "big", grace=0)
    return sorted(took)[TIMES // 2]


@pytest.mark.timeout(600)
def test_no_pod_is_rejected_or_slow_for_the_number_of_its_keys(writers: Writers, capsys: Any) -> None:
    kube = writers["anybody"]
    guarded = {what: seconds(kube, made) for what, made in BIG.items()}
    lifted(kube)
    free = {what: seconds(kube, made) for what, made in BIG.items()}
    with capsys.disabled():
        for what in BIG:
            print(f"\n  {what}: {guarded[what]:.2f} s with the policies, {free[what]:.2f} s without", end="")
    for what in BIG:
        assert guarded[what] < 3 * free[what] + 0.5, what
