"""CPU-only pods: steered to the best node if the setting is on, never rejected, reserved until the watch shows them."""

from typing import Any

import pytest

from gputile.ledger.events import Tick
from gputile.ledger.ledger import AllocationState
from gputile.testing.builders import node
from tests.scheduler.rig import Rig, tile

CPU = {"cpu": "4", "memory": "1Gi"}


def rig(*nodes: Any, **settings: Any) -> Rig:
    """n1 has 8 CPUs and cards; n2 has cards and more CPU; n3 has no cards."""
    builders = nodes or (
        node("n1", cpu="8").cards(2, size=16),
        node("n2", cpu="64").cards(2, size=16),
        node("n3", cpu="32"),
    )
    return Rig(*builders, **{"steer_cpu_pods": True, **settings})


def test_it_is_steered_to_the_best_node_of_the_policy() -> None:
    r = rig(node("n1", cpu="8"), node("n2", cpu="64"), policy="binpack")
    r.arrive(CPU)
    assert r.steer() == ["n1"]


def test_it_keeps_the_cpu_that_cards_need() -> None:
    """Tiling: the node without cards has nothing to strand."""
    r = rig(policy="tiling")
    r.arrive(CPU)
    assert r.steer() == ["n3"]


def test_only_candidate_nodes_are_returned() -> None:
    r = rig(policy="tiling")
    r.arrive(CPU)
    assert r.steer(nodes=["n1", "n2"]) in (["n1"], ["n2"])


def test_the_next_pod_sees_the_reserved_cpu() -> None:
    """kube-scheduler filters it before the first is bound."""
    r = rig(node("n1", cpu="6"), node("n2", cpu="64"))
    r.arrive(CPU, name="a")
    r.arrive(CPU, name="b")
    assert (r.steer("a"), r.steer("b")) == (["n1"], ["n2"])
    assert r.state("a") is AllocationState.RESERVED
    assert r.ledger.fleet.view("n1").cpu == 2000


def test_a_pod_with_gpus_sees_that_cpu_too() -> None:
    r = rig(node("n1", cpu="6").cards(1, size=16), node("n2", cpu="64").cards(1, size=16))
    r.arrive(CPU, name="plain")
    r.arrive(tile(8, cpu="4"), name="gpu")
    assert r.steer("plain") == ["n1"]
    assert r.filter("gpu").names == ["n2"]


def test_the_reservation_is_confirmed_when_kube_scheduler_has_bound_the_pod() -> None:
    r = rig(node("n1", cpu="6"), node("n2", cpu="64"))
    r.arrive(CPU)
    r.steer()
    r.change("web-0", spec={"nodeName": "n1"})
    r.catch_up()
    assert r.state() is AllocationState.CONFIRMED
    assert r.ledger.fleet.view("n1").cpu == 2000


def test_kube_scheduler_may_choose_another_node() -> None:
    """It may choose another of the equally good nodes."""
    r = rig(node("n1", cpu="8"), node("n2", cpu="8"))
    r.arrive(CPU)
    assert r.steer() == ["n1", "n2"]
    r.change("web-0", spec={"nodeName": "n2"})
    r.catch_up()
    assert [r.ledger.fleet.view(name).cpu for name in ("n1", "n2")] == [8000, 4000]


def test_while_another_reservation_is_open_one_node_is_returned() -> None:
    r = rig(node("n1", cpu="8"), node("n2", cpu="8"), node("n3", cpu="8"))
    r.arrive(CPU, name="a")
    r.arrive({"cpu": "6"}, name="b")
    assert r.steer("a") == ["n1", "n2", "n3"]
    assert r.steer("b") == ["n2"]


def test_a_deleted_pod_is_unreserved() -> None:
    r = rig()
    r.arrive(CPU)
    r.steer()
    r.api.delete_pod("default/web-0")
    r.catch_up()
    assert r.state() is None
    assert not r.cluster_state.cpu_pods


def test_a_pod_that_was_deleted_while_our_watch_was_broken_is_forgotten() -> None:
    r = rig()
    r.arrive(CPU)
    r.api.delete_pod("default/web-0")
    r.relist()
    assert not r.cluster_state.cpu_pods


@pytest.mark.parametrize(
    ("containers", "settings"),
    [
        pytest.param((CPU,), {"steer_cpu_pods": False}, id="the-setting-is-off"),
        pytest.param((tile(8, cpu="4"),), {}, id="it-requests-a-gpu"),
        pytest.param(({"gputile.io/memory": 8},), {}, id="its-gpu-request-is-invalid"),
        pytest.param(({},), {}, id="it-requests-nothing"),
        pytest.param(({"cpu": "100"},), {}, id="it-fits-nowhere-in-our-view"),
    ],
)
def test_other_pods_pass_with_all_their_nodes(containers: tuple[Any, ...], settings: dict[str, Any]) -> None:
    r = rig(**settings)
    r.arrive(*containers)
    assert r.steer() == ["n1", "n2", "n3"]
    assert r.state() is None


def test_a_replica_that_is_not_the_leader_passes_all_pods() -> None:
    r = rig()
    r.arrive(CPU)
    r.leading = False
    assert r.steer() == ["n1", "n2", "n3"]
    assert r.state() is None


def test_unknown_nodes_pass() -> None:
    r = rig()
    r.arrive(CPU)
    assert r.steer(nodes=["new-1", "new-2"]) == ["new-1", "new-2"]


def test_a_pod_that_is_filtered_again_may_go_anywhere() -> None:
    """It could not run on the node, and we do not know why."""
    r = rig(policy="tiling")
    r.arrive(CPU)
    assert r.steer() == ["n3"]
    assert r.steer() == ["n1", "n2", "n3"]
    r.ledger.handle(Tick(r.clock.now + 60))
    assert r.state() is None, "its reservation has expired"
    assert r.steer() == ["n1", "n2", "n3"]


def test_a_deleted_pod_is_forgotten() -> None:
    r = rig(policy="tiling")
    r.arrive(CPU)
    r.steer()
    r.change("web-0", spec={"nodeName": "n3"})
    r.catch_up()
    r.steering.prune()
    assert not r.steering._steered


def test_a_pod_that_our_watch_has_not_shown_is_steered_but_not_reserved() -> None:
    r = rig(policy="tiling")
    r.arrive(CPU, seen=False)
    assert r.steer() == ["n3"]
    assert r.state() is None


def test_pods_without_gpus_are_learnt_once_each() -> None:
    r = rig()
    r.arrive(CPU)
    r.change("web-0", status={"phase": "Pending"})
    r.catch_up()
    r.change("web-0", spec={"nodeName": "n1"})
    r.catch_up()
    r.change("web-0", status={"phase": "Running"})
    r.catch_up()
    assert [(request.cpu, request.memory, request.asks) for request in r.cluster_state.take_arrivals()] == [
        (4000, 1024, ())
    ]


def test_a_restarted_process_learns_the_bound_pods() -> None:
    before = rig()
    before.arrive(CPU)
    before.change("web-0", spec={"nodeName": "n1"})
    after = rig(steer_cpu_pods=True)
    after.cluster_state.take_arrivals()
    after.api.add_pod(before.live())
    after.relist()
    assert [request.cpu for request in after.cluster_state.take_arrivals()] == [4000]
    after.relist()
    assert after.cluster_state.take_arrivals() == []


def test_with_the_setting_off_they_are_ignored() -> None:
    r = rig(steer_cpu_pods=False)
    r.arrive(CPU)
    assert (r.cluster_state.cpu_pods, r.cluster_state.take_arrivals()) == ({}, [])
