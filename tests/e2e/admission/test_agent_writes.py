"""An agent may write its keys, its condition and its extended resources on its own node, and nothing on others."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.admission.writers import (
    AWAY,
    HOME,
    Writers,
    lease,
    meta,
    rejection,
)
from tests.e2e.api import Kube, Manifest


def node(body: Manifest, name: str = HOME, subresource: str = "", how: str = "merge") -> Callable[[Kube], object]:
    return lambda kube: kube.patch("Node", name, body, subresource=subresource, how=how)


def of_status(how: str = "merge", name: str = HOME, **fields: Any) -> Callable[[Kube], object]:
    return node({"status": fields}, name, "status", how)


def condition(kind: str) -> list[Manifest]:
    return [{"type": kind, "status": "False", "reason": "X", "message": "y"}]


AGENT_MAY = [
    pytest.param(node(meta(annotations={"gputile.io/inventory": "{}"})), id="write its inventory"),
    pytest.param(node(meta(annotations={"gputile.io/inventory": None})), id="remove its inventory"),
    pytest.param(node(meta(labels={"gputile.io/gpus": "4", "gputile.io/driver": "1"})), id="write its labels"),
    pytest.param(of_status("strategic", conditions=condition("GputileAgent")), id="write its condition"),
    pytest.param(
        of_status(
            "strategic",
            capacity={"gputile.io/memory": "5", "nvidia.com/vcuda-memory": "7"},
            allocatable={"gputile.io/memory": "5", "nvidia.com/vcuda-memory": "7"},
        ),
        id="write its extended resources",
    ),
    pytest.param(of_status("strategic", allocatable={"gputile.io/cores": None}), id="remove an extended resource"),
    pytest.param(
        of_status("strategic", allocatable={"gputile.io/stale": None}), id="remove a stale extended resource of gputile"
    ),
]

AGENT_MAY_NOT = [
    pytest.param(node(meta(labels={"a/b": "c"})), id="add another owner's label"),
    pytest.param(node(meta(labels={"topology.kubernetes.io/zone": None})), id="remove another owner's label"),
    pytest.param(node(meta(annotations={"a/b": "c"})), id="add another owner's annotation"),
    pytest.param(node(meta(labels={"gputile.io/pool": "rich"})), id="move itself into another pool"),
    pytest.param(node(meta(annotations={"gputile.io/cordon": None})), id="uncordon a GPU"),
    pytest.param(node(meta(labels={"gputile.io/agent": None})), id="remove the label that selects nodes for agents"),
    pytest.param(
        node(meta(annotations={f"gputile.io/{n}": "x" for n in range(501)})),
        id="write too many keys to be compared",
    ),
    pytest.param(node(meta(finalizers=["a.io/b"])), id="add a finalizer"),
    pytest.param(
        node(meta(ownerReferences=[{"apiVersion": "v1", "kind": "Pod", "name": "x", "uid": "y"}])),
        id="add an owner reference",
    ),
    pytest.param(node({"spec": {"unschedulable": True}}), id="cordon the node"),
    pytest.param(node({"spec": {"taints": [{"key": "a", "effect": "NoSchedule"}]}}), id="taint the node"),
    pytest.param(
        node(meta(annotations={"gputile.io/inventory": "{}"}), AWAY), id="write the inventory of another node"
    ),
    pytest.param(of_status(name=AWAY, capacity={"gputile.io/memory": "1"}), id="write the capacity of another node"),
    pytest.param(of_status(daemonEndpoints={"kubeletEndpoint": {"Port": 1}}), id="change the kubelet's port"),
    pytest.param(of_status(images=[]), id="change the images"),
    pytest.param(of_status(volumesInUse=None), id="remove the volumes in use"),
    pytest.param(of_status(volumesAttached=[]), id="remove the attached volumes"),
    pytest.param(of_status(addresses=[{"type": "InternalIP", "address": "10.6.6.6"}]), id="change the address"),
    pytest.param(of_status(nodeInfo={"kernelVersion": "6"}), id="change the node info"),
    pytest.param(of_status(phase="Terminated"), id="change the phase"),
    pytest.param(of_status(runtimeHandlers=[{"name": "x"}]), id="change the runtime handlers"),
    pytest.param(of_status(features={"supplementalGroupsPolicy": True}), id="change the features"),
    pytest.param(of_status("strategic", conditions=condition("Ready")), id="change the Ready condition"),
    pytest.param(of_status(conditions=[]), id="remove all conditions"),
    pytest.param(of_status("strategic", allocatable={"cpu": "1"}), id="change allocatable CPU"),
    pytest.param(
        of_status("strategic", capacity={"gputile.io/gpu": "99"}), id="change the capacity of a device resource"
    ),
    pytest.param(of_status("strategic", capacity={"nvidia.com/gpu": "99"}), id="change the capacity of another plugin"),
    pytest.param(of_status("strategic", capacity={"example.com/x": "1"}), id="add an unknown resource"),
    pytest.param(of_status("strategic", capacity={"gputile.io/new": "1"}), id="add an unknown resource of gputile"),
    pytest.param(of_status("strategic", allocatable={"gputile.io/gpu": None}), id="remove a device resource"),
    pytest.param(
        of_status("strategic", allocatable={"nvidia.com/gpu": None}), id="remove another plugin's device resource"
    ),
    pytest.param(of_status(capacity=None, allocatable=None), id="remove all resources"),
]


@pytest.fixture
def used(writers: Writers) -> Writers:
    """The node has annotations of users and of an older release."""
    kube = writers["admin"]
    kube.patch("Node", HOME, meta(annotations={"gputile.io/cordon": "GPU-0", "gputile.io/inventory": "x"}))
    kube.patch("Node", HOME, meta(labels={"gputile.io/pool": "poor", "gputile.io/agent": "true"}))
    stale = {"gputile.io/stale": "1"}
    kube.patch("Node", HOME, {"status": {"capacity": stale, "allocatable": stale}}, subresource="status")
    return writers


@pytest.mark.parametrize("write", AGENT_MAY)
def test_an_agent_may(used: Writers, write: Callable[[Kube], object]) -> None:
    write(used["agent"])
    assert "none named in its token" in rejection(lambda: write(used["agent without a node"]))


@pytest.mark.parametrize("write", AGENT_MAY_NOT)
def test_an_agent_may_not(used: Writers, write: Callable[[Kube], object]) -> None:
    assert "gputile-agents" in rejection(lambda: write(used["agent"]))


def test_an_agent_keeps_the_lease_of_its_node_and_no_other(writers: Writers) -> None:
    space = "gputile-agents"
    created = writers["agent"].create(lease(HOME), space)
    path = f"/apis/coordination.k8s.io/v1/namespaces/{space}/leases"
    writers["agent"].request("PUT", f"{path}/{HOME}", {**created, "spec": {"holderIdentity": HOME}})
    assert "may write to that node only" in rejection(lambda: writers["agent"].create(lease(AWAY), space))
    writers["admin"].delete_all("Lease", space)
