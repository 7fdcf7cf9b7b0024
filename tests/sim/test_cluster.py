"""The cluster in memory decides with the production core and keeps objects as Kubernetes would."""

import pytest

from gputile.dialects.speaking import read_grant
from gputile.dialects.wire import convert_pod
from gputile.model.errors import InputError
from gputile.model.refusals import BadRequest, RequestCode
from gputile.sim.cluster import MemoryCluster
from gputile.sim.manifests import Workload
from gputile.testing.builders import node, pod


def cluster() -> MemoryCluster:
    made = MemoryCluster()
    made.add_node(node("n1", cpu="8").cards(2, "T4", "16Gi").manifest())
    return made


def workload(limits: dict[str, int], replicas: int = 1, kind: str = "StatefulSet") -> Workload:
    return Workload(kind=kind, name="w", namespace="ns", replicas=replicas, pod=pod(limits))


def test_a_bound_pod_carries_its_node_and_grant() -> None:
    made = cluster()
    (outcome,) = made.submit(workload({"aliyun.com/gpu-mem": 3}))
    stored = made.pods["ns/w-0"]
    assert stored["spec"]["nodeName"] == "n1"
    assert stored["metadata"]["annotations"]["ALIYUN_COM_GPU_MEM_IDX"] == "0"
    bound = convert_pod(stored)
    assert not isinstance(bound, BadRequest)
    assert read_grant(bound, made.ledger.fleet.view("n1").node.cards) == outcome.grant


def test_what_does_not_fit_waits_with_an_explanation_and_fits_after_a_delete() -> None:
    made = cluster()
    outcomes = made.submit(workload({"gputile.io/gpu": 1}, replicas=3))
    assert [outcome.grant is not None for outcome in outcomes] == [True, True, False]
    assert outcomes[2].explanation is not None
    assert outcomes[2].explanation.changes[-1].text == "as it is, once ns/w-1 ends on n1"
    made.delete("ns/w-1")
    assert made.schedule("ns/w-2").grant is not None


def test_a_pod_without_gpus_and_a_bad_one_are_told_apart() -> None:
    made = cluster()
    assert made.submit(workload({}))[0].asked is None
    (bad,) = made.submit(workload({"gputile.io/memory": 3}))
    assert isinstance(bad.asked, BadRequest)
    assert bad.asked.code is RequestCode.NO_DEVICE_RESOURCE


def test_a_single_pod_keeps_its_name() -> None:
    made = cluster()
    assert made.submit(workload({"gputile.io/gpu": 1}, kind="Pod"))[0].pod == "ns/w"


def test_a_node_that_is_none_is_refused_with_a_sentence() -> None:
    with pytest.raises(InputError, match="this is no node"):
        cluster().add_node({"metadata": 7})
