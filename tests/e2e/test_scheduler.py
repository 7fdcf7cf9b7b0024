"""gputile with a real kube-scheduler: nodes and grants of bound pods, and events of pending pods."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.api import Kube, Manifest
from tests.e2e.audit import audit, grant, tiles
from tests.e2e.control_plane import ControlPlane
from tests.e2e.gputile import Replica, rights
from tests.e2e.kubelets import FakeKubelets
from tests.e2e.nodes import EXAMPLES, example_nodes, gpu_node, join, plain_node
from tests.e2e.pods import all_bound, container, events_of, first_with_node, node_of, pod, tile
from tests.e2e.processes import wait_until
from tests.e2e.watching import watch

A100, T4, V100 = "NVIDIA A100-SXM4-80GB", "Tesla T4", "Tesla V100-SXM2-32GB"


@pytest.fixture
def gputile(plane: ControlPlane) -> Iterator[Replica]:
    """The scheduler with the RBAC of deploy/, and the default kube-scheduler with the stanza of deploy/."""
    rights(plane)
    with Replica(plane) as replica, plane.start_scheduler(config=replica.config()):
        yield replica


# --- every dialect's examples

EXPECTED: dict[
    str, tuple[set[str], str, set[str]]
] = {  # pod: possible nodes (empty: any), dialect, keys of that dialect
    "by-model": ({"mixed-1"}, "nvidia", set()),
    "two-containers": (
        {"mixed-1"},
        "vcuda",
        {"nvidia.com/predicate-gpu-idx-0", "nvidia.com/predicate-gpu-idx-1", "nvidia.com/predicate-node"},
    ),
    "split-over-four": ({"a30-8", "a100-1", "a100-2"}, "gpushare", {"scheduler.framework.gpushare.allocation"}),
    "binpack-0": (set(), "gpushare", {"ALIYUN_COM_GPU_MEM_IDX", "ALIYUN_COM_GPU_MEM_ASSUME_TIME"}),
    "cuda-test": (set(), "nano", {"nano-gpu.io/gpu", "nano-gpu.io/gpu-main"}),
    "two-tiles": ({"a100-1", "a100-2"}, "hami", {"hami.io/vgpu-devices-allocated", "hami.io/bind-phase"}),
    "vgpu-pod": (set(), "vgpu", {"nvidia.com/pre-allocated", "nvidia.com/predicate-node"}),
    "four-tiles": ({"a30-8", "a100-1", "a100-2"}, "gputile", set()),
}


def test_the_examples_of_every_dialect_are_bound_with_grant_and_node_in_one_write(
    plane: ControlPlane, kube: Kube, gputile: Replica
) -> None:
    join(kube, example_nodes())
    space = plane.namespace("examples")
    controllers = plane.start_controllers()
    try:
        with watch(kube, "Pod", space) as pods, FakeKubelets(kube):
            for manifest in sorted(EXAMPLES.glob("*/*.yaml")):
                kube.apply(manifest, space)
            pods.wait_for(all_bound(12), 60, "all but six-a100 are bound")
            for name, (nodes, dialect, keys) in EXPECTED.items():
                full = next(pod_name for _, pod_name in pods.objects if pod_name.startswith(name))
                shown = first_with_node(pods, full)
                held = grant(shown)
                assert held is not None, f"{full} had its node before its grant"
                assert (held["pod"], held["node"]) == (shown["metadata"]["uid"], node_of(shown))
                assert held["dialect"] == dialect
                assert not nodes or held["node"] in nodes
                assert keys <= set(shown["metadata"]["annotations"])
            assert node_of(pods.get(space, "six-a100")) is None
        audit(kube)
        assert len(gputile.logged("bound")) == 12
    finally:
        controllers.stop()
        for kind in ("Deployment", "StatefulSet", "ReplicaSet"):
            kube.delete_all(kind, space)


def test_labels_of_a_dialect_are_in_the_same_write(plane: ControlPlane, kube: Kube, gputile: Replica) -> None:
    join(kube, [gpu_node("n1")])
    space = plane.namespace("labels")
    with watch(kube, "Pod", space) as pods:
        kube.create(pod("elastic", {"elasticgpu.io/gpu-core": 20, "elasticgpu.io/gpu-memory": 10}), space)
        pods.wait_for(all_bound(1), 20, "the pod is bound")
        assert first_with_node(pods, "elastic")["metadata"]["labels"]["elasticgpu.io/assumed"] == "true"


# --- policies


@pytest.mark.parametrize(
    ("policy", "count", "is_expected"),
    [
        pytest.param("binpack", 4, lambda nodes, cards: len(nodes) == len(cards) == 1, id="binpack-fills-one-card"),
        pytest.param("spread", 4, lambda nodes, cards: len(nodes) == len(cards) == 4, id="spread-uses-every-node"),
        # 16 random choices out of four nodes are all equal with a probability of one in a thousand million.
        pytest.param("random", 16, lambda nodes, cards: len(nodes) > 1, id="random-is-neither"),
    ],
)
def test_policies_choose_different_nodes(
    plane: ControlPlane, kube: Kube, policy: str, count: int, is_expected: Any
) -> None:
    rights(plane)
    join(kube, [gpu_node(f"n{n}", cards=2, memory=16384, model=T4) for n in range(4)])
    space = plane.namespace(f"policy-{policy}")
    with Replica(plane, policy=policy) as replica, plane.start_scheduler(config=replica.config()):
        bound = bind_in_order(kube, space, [tile(f"p{n}", 4000) for n in range(count)])
    nodes, cards = {node_of(p) for p in bound}, {t["uuid"] for p in bound for t in tiles(p)}
    assert is_expected(nodes, cards)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        pytest.param("binpack", "n1", id="binpack-takes-the-fullest-card"),
        pytest.param("spread", "n3", id="spread-takes-the-emptiest-card"),
        pytest.param("tiling", "n2", id="tiling-takes-the-share-that-fits-no-other-pod"),
    ],
)
def test_each_policy_chooses_its_card_of_three(plane: ControlPlane, kube: Kube, policy: str, expected: str) -> None:
    """Pending pods request 65, 50 and 35 %. n1 has 35 % free, n2 60 %, n3 is idle; then a pod requests 10 %."""
    rights(plane)
    space = plane.namespace(f"three-{policy}")
    join(kube, [gpu_node(f"n{n}", cards=1, memory=16384, model=T4) for n in (1, 2, 3)])
    others = [share(f"m{n}", (65, 50, 35)[n % 3], schedulerName="nobody") for n in range(150)]
    kube.create_many(others, space)
    first = [share("a", 65, nodeSelector=host("n1")), share("b", 40, nodeSelector=host("n2"))]
    with Replica(plane, policy=policy) as replica, plane.start_scheduler(config=replica.config()):
        *_, bound = bind_in_order(kube, space, [*first, share("new", 10)])
    assert node_of(bound) == expected


def share(name: str, percent: int, **spec: Any) -> Manifest:
    return pod(name, {"gputile.io/gpu": 1, "gputile.io/memory": 100, "gputile.io/cores": percent}, **spec)


def host(name: str) -> dict[str, str]:
    return {"kubernetes.io/hostname": name}


def test_a_pod_may_choose_its_own_policy(plane: ControlPlane, kube: Kube, gputile: Replica) -> None:
    join(kube, [gpu_node(f"n{n}", cards=2, memory=16384, model=T4) for n in range(4)])
    space = plane.namespace("own-policy")
    annotations = {"gputile.io/policy": "spread"}
    bound = bind_in_order(kube, space, [tile(f"p{n}", 4000, annotations=annotations) for n in range(4)])
    assert len({node_of(p) for p in bound}) == 4


def bind_in_order(kube: Kube, space: str, pods: list[Manifest]) -> list[Manifest]:
    """Create each pod when the last is bound; return the bound pods."""
    with watch(kube, "Pod", space) as seen:
        for number, manifest in enumerate(pods, start=1):
            kube.create(manifest, space)
            seen.wait_for(all_bound(number), 20, f"{manifest['metadata']['name']} is bound")
        return [bound for it in pods if (bound := seen.get(space, it["metadata"]["name"])) is not None]


# --- models, several cards, several containers


def test_a_pod_gets_a_card_of_its_model_on_a_mixed_node(plane: ControlPlane, kube: Kube, gputile: Replica) -> None:
    join(kube, [mixed_node("mixed")])
    space = plane.namespace("models")
    expected = {"t4": T4, "v100": V100}
    manifests = [
        pod("t4", {"nvidia.com/gpu": 1}, annotations={"nvidia.com/gpu.model": T4}),
        pod("v100", {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 1000}, annotations={"nvidia.com/use-gputype": "V100"}),
    ]
    bound = bind_in_order(kube, space, manifests)
    models = {c["uuid"]: c["model"] for c in cards_of(kube, "mixed")}
    assert {p["metadata"]["name"]: models[tiles(p)[0]["uuid"]] for p in bound} == expected


def mixed_node(name: str) -> Manifest:
    from gputile.testing import builders
    from tests.e2e.nodes import from_manifest

    return from_manifest(builders.node(name, "64", "512Gi").cards(2, T4, 15360).cards(2, V100, 32768).manifest())


def cards_of(kube: Kube, node: str) -> list[dict[str, Any]]:
    inventory: list[dict[str, Any]] = json.loads(
        kube.get("Node", node)["metadata"]["annotations"]["gputile.io/inventory"]
    )["cards"]
    return inventory


def test_a_pod_that_requests_several_cards_gets_different_cards(
    plane: ControlPlane, kube: Kube, gputile: Replica
) -> None:
    join(kube, [gpu_node("n1", cards=4, memory=16384, model=T4)])
    space = plane.namespace("several")
    (bound,) = bind_in_order(kube, space, [tile("three", 6000, cards=3)])
    assert len({t["uuid"] for t in tiles(bound)}) == 3
    assert {t["memory"] for t in tiles(bound)} == {6000}


def test_every_container_gets_its_own_tile_init_containers_and_sidecars_included(
    plane: ControlPlane, kube: Kube, gputile: Replica
) -> None:
    join(kube, [gpu_node("n1", cards=2, memory=16384, model=T4)])
    space = plane.namespace("containers")
    limits = {"gputile.io/gpu": 1, "gputile.io/memory": 5000}
    manifest = pod(
        "many",
        {},
        initContainers=[container("prepare", limits), container("helper", limits, restartPolicy="Always")],
        containers=[container("a", limits), container("b", limits), container("plain")],
    )
    (bound,) = bind_in_order(kube, space, [manifest])
    by_container = Counter(t["container"] for t in tiles(bound))
    assert by_container == {"prepare": 1, "helper": 1, "a": 1, "b": 1}
    init = next(t for t in tiles(bound) if t["container"] == "prepare")
    assert init["uuid"] in {t["uuid"] for t in tiles(bound) if t["container"] != "prepare"}
    audit(kube)


# --- pending pods, and pods without GPUs


def test_a_pod_too_large_for_any_card_has_an_event_with_the_reason_and_a_fix(
    plane: ControlPlane, kube: Kube, gputile: Replica
) -> None:
    join(kube, [gpu_node("n1", cards=2, memory=16384, model=T4), plain_node("cpu")])
    space = plane.namespace("big")
    kube.create(tile("huge", 20000), space)
    events = wait_until(lambda: events_of(kube, space, "huge", "NoFittingGPU"), 20, "gputile's event")
    assert "20000 MiB" in events[0]["message"]
    assert "would fit" in events[0]["message"]
    failed = wait_until(lambda: events_of(kube, space, "huge", "FailedScheduling"), 20, "kube-scheduler's event")
    assert "GPUs smaller than requested" in failed[0]["message"]


def test_an_invalid_request_has_an_event_with_a_fix(plane: ControlPlane, kube: Kube, gputile: Replica) -> None:
    join(kube, [gpu_node("n1", cards=2, memory=16384, model=T4)])
    space = plane.namespace("bad")
    kube.create(pod("alone", {"gputile.io/memory": 1000}), space)
    failed = wait_until(lambda: events_of(kube, space, "alone", "FailedScheduling"), 20, "kube-scheduler's event")
    assert "add `gputile.io/gpu: 1` to its limits" in failed[0]["message"]


def test_a_pod_without_gpus_is_not_sent_to_the_extender(plane: ControlPlane, kube: Kube, gputile: Replica) -> None:
    join(kube, [gpu_node("n1"), plain_node("cpu")])
    space = plane.namespace("plain")
    before = gputile.count("gputile_verbs_total")
    (bound,) = bind_in_order(kube, space, [pod("plain", {"cpu": "1"})])
    assert gputile.count("gputile_verbs_total") == before
    assert grant(bound) is None
