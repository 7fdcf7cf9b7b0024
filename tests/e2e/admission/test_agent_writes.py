"""An agent may write its keys, its condition and its extended resources on its own node, and nothing on others."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.admission.writers import (
    AWAY,
    HOME,
    Writers,
    is_rejected,
    lease,
    meta,
)
from tests.e2e.api import Kube, Manifest


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
    pytest.param(
        node(meta(annotations={f"gputile.io/{n}": "x" for n in range(501)})),
        id="write so much that nothing is compared",
    ),
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
    pytest.param(of_status(capacity=None, allocatable=None), id="take all of them away"),
]


@pytest.fixture
def used(writers: Writers) -> Writers:
    """The node has annotations of users and of an older release."""
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
