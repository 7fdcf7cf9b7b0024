"""The cluster in memory decides with the production core and stores objects as Kubernetes does."""

import pytest

from gputile.dialects.parsing import convert_pod
from gputile.dialects.records import read_grant
from gputile.dialects.settings import DialectSettings
from gputile.model.errors import InputError
from gputile.model.refusals import BadRequest, RequestError
from gputile.sim.cluster import MemoryCluster
from gputile.sim.manifests import Workload
from gputile.testing.builders import node, pod


def small_cluster() -> MemoryCluster:
    cluster = MemoryCluster()
    cluster.add_node(node("n1", cpu="8").cards(2, "T4", "16Gi").manifest())
    return cluster


def workload(limits: dict[str, int], replicas: int = 1, kind: str = "StatefulSet") -> Workload:
    return Workload(kind=kind, name="w", namespace="ns", replicas=replicas, pod=pod(limits))


def test_a_bound_pod_carries_its_node_and_grant() -> None:
    cluster = small_cluster()
    (outcome,) = cluster.submit(workload({"aliyun.com/gpu-mem": 3}))
    stored = cluster.pods["ns/w-0"]
    assert stored["spec"]["nodeName"] == "n1"
    assert stored["metadata"]["annotations"]["ALIYUN_COM_GPU_MEM_IDX"] == "0"
    bound = convert_pod(stored)
    assert not isinstance(bound, BadRequest)
    assert read_grant(bound, cluster.ledger.fleet.view("n1").node) == outcome.grant


def test_a_pod_that_does_not_fit_is_explained_and_fits_after_a_delete() -> None:
    cluster = small_cluster()
    outcomes = cluster.submit(workload({"gputile.io/gpu": 1}, replicas=3))
    assert [outcome.grant is not None for outcome in outcomes] == [True, True, False]
    assert outcomes[2].explanation is not None
    assert outcomes[2].explanation.changes[-1].text == "as it is, once ns/w-1 ends on n1"
    cluster.delete("ns/w-1")
    assert cluster.schedule("ns/w-2").grant is not None


def test_a_pod_without_gpus_and_an_invalid_pod_differ() -> None:
    cluster = small_cluster()
    assert cluster.submit(workload({}))[0].asked is None
    (bad,) = small_cluster().submit(workload({"gputile.io/memory": 3}))
    assert isinstance(bad.asked, BadRequest)
    assert bad.asked.code is RequestError.NO_DEVICE_RESOURCE


def test_a_single_pod_keeps_its_name() -> None:
    cluster = small_cluster()
    assert cluster.submit(workload({"gputile.io/gpu": 1}, kind="Pod"))[0].pod == "ns/w"


def test_an_invalid_node_is_rejected_with_a_message() -> None:
    with pytest.raises(InputError, match="not a valid Node"):
        small_cluster().add_node({"metadata": 7})


def test_random_draws_again_for_every_pod() -> None:
    cluster = MemoryCluster("random")
    for name in ("n1", "n2", "n3", "n4"):
        cluster.add_node(node(name, cpu="8").cards(4, "T4", "16Gi").manifest())
    grants = [outcome.grant for outcome in cluster.submit(workload({"aliyun.com/gpu-mem": 1}, replicas=12))]
    assert len({grant.node for grant in grants if grant}) > 1
    assert len({grant.containers[0].tiles[0].index for grant in grants if grant}) > 1


def test_the_gpushare_unit_is_guessed_and_written() -> None:
    cluster = MemoryCluster(settings=DialectSettings(gpushare_unit="auto"))
    capacity = {"aliyun.com/gpu-mem": 30218, "aliyun.com/gpu-count": 2}
    cluster.add_node({"metadata": {"name": "n"}, "status": {"capacity": capacity, "allocatable": capacity}})
    cluster.submit(workload({"aliyun.com/gpu-mem": 500}))
    assert cluster.pods["ns/w-0"]["metadata"]["annotations"]["ALIYUN_COM_GPU_MEM_POD"] == "500"
    assert cluster.ledger.fleet.view("n").free_by_card[0].memory == 15109 - 500


def test_two_pods_of_one_name_are_rejected() -> None:
    cluster = small_cluster()
    cluster.submit(workload({"gputile.io/gpu": 1}))
    with pytest.raises(InputError, match="pod ns/w-0: defined twice"):
        cluster.submit(workload({"gputile.io/gpu": 1}))
