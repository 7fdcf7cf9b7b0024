"""Quota on a real API server and kube-scheduler: races, live edits, invalid edits, preemption.

Bound pods are counted in every event of the watch: the quota must not be exceeded for a moment.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.api import Kube, Manifest
from tests.e2e.audit import audit, tiles
from tests.e2e.control_plane import ControlPlane
from tests.e2e.gputile import NAMESPACE, Replica, rights
from tests.e2e.kubelets import FakeKubelets
from tests.e2e.nodes import gpu_node, join
from tests.e2e.pods import all_bound, events_of, node_of, tile
from tests.e2e.processes import TookTooLong, wait_until
from tests.e2e.watching import Watch, watch

T4, CARD = "Tesla T4", 16000
PROGRAM = Path(sys.executable).with_name("gputile")
CONFIG_MAP, OLD_CONFIG_MAP = "gputile-quota", "gpuquota"


@pytest.fixture
def cluster(plane: ControlPlane, kube: Kube) -> Iterator[ControlPlane]:
    """The control plane with gputile's RBAC; ConfigMaps with quotas are deleted after the test."""
    rights(plane)
    yield plane
    for name in (CONFIG_MAP, OLD_CONFIG_MAP):
        if kube.find("ConfigMap", name, NAMESPACE):
            kube.delete("ConfigMap", name, NAMESPACE)


def config_map(name: str, key: str, text: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "data": {key: text},
    }


def write(kube: Kube, text: str) -> None:
    """Create or replace gputile's ConfigMap."""
    kube.apply(config_map(CONFIG_MAP, "quota.yaml", text), NAMESPACE)


def quota(kube: Kube, **namespaces: Any) -> None:
    write(kube, yaml.safe_dump({"namespaces": namespaces}))


def cards(number: float, *pools: str) -> dict[str, Any]:
    return {"limits": [{"model": "T4", "cards": number}], "pools": list(pools)}


def bound(pods: Watch) -> set[str]:
    return {name for (_, name), pod in pods.objects.items() if node_of(pod)}


def is_gone(space: str, name: str) -> Any:
    return lambda pods: (space, name) not in pods


def most_at_once(pods: Watch) -> int:
    """The highest number of pods that were bound at one time, over all events of the watch."""
    bound_now: set[str] = set()
    most = 0
    for event in pods.events:
        name = event.object["metadata"]["name"]
        is_bound = event.type != "DELETED" and node_of(event.object)
        (bound_now.add if is_bound else bound_now.discard)(name)
        most = max(most, len(bound_now))
    return most


def event_messages(kube: Kube, space: str, names: list[str]) -> list[str]:
    """The messages of gputile's events on pending pods."""
    return [event["message"] for name in names for event in events_of(kube, space, name, "NoFittingGPU")]


# ---- races ----------------------------------------------------------------------------------------------------------


def test_two_namespaces_race_for_the_last_card_of_a_shared_pool(cluster: ControlPlane, kube: Kube) -> None:
    first, second = cluster.namespace("race-a"), cluster.namespace("race-b")
    shared = {"gputile.io/pool": "shared"}
    join(kube, [gpu_node("n1", 1, CARD, T4, labels=shared), gpu_node("n2", 8, CARD, T4)])
    quota(kube, **{first: cards(2, "shared"), second: cards(2, "shared")})
    with (
        Replica(cluster) as gputile,
        cluster.start_scheduler(config=gputile.config()),
        FakeKubelets(kube),
        watch(kube, "Pod", first) as first_pods,
        watch(kube, "Pod", second) as second_pods,
    ):
        manifests = [(space, tile(f"p{n}", CARD)) for n in range(5) for space in (first, second)]
        for space, manifest in manifests:
            kube.create(manifest, space)
        wait_until(lambda: len(bound(first_pods)) + len(bound(second_pods)) == 1, 30, "one pod is bound")
        wait_until(
            lambda: gputile.count("gputile_refusals_total", code="PoolNotAllowed") > 0, 20, "the others are rejected"
        )
        for _ in range(3):  # delete the bound pod: exactly one of the others is bound
            space, pods = (first, first_pods) if bound(first_pods) else (second, second_pods)
            [name] = bound(pods)
            kube.delete("Pod", name, space, grace=0)
            pods.wait_for(is_gone(space, name), 10, f"{name} is gone")
            wait_until(lambda: len(bound(first_pods)) + len(bound(second_pods)) == 1, 10, "another pod is bound")
        assert {node_of(pod) for pods in (first_pods, second_pods) for pod in pods.objects.values()} == {"n1", None}
        assert audit(kube) == {"GPU-n1-0": CARD}


def test_two_hundred_pods_of_one_namespace_race_for_a_quota_of_fifty(cluster: ControlPlane, kube: Kube) -> None:
    space, free = cluster.namespace("crowd-a"), cluster.namespace("crowd-b")
    join(kube, [gpu_node(f"n{n}", 8, CARD, T4) for n in range(5)])
    quota(kube, **{space: cards(5)})  # fifty tenths
    with (
        Replica(cluster) as gputile,
        cluster.start_scheduler(config=gputile.config()),
        FakeKubelets(kube),
        watch(kube, "Pod", space) as pods,
        watch(kube, "Pod", free) as others,
    ):
        kube.create_many([tile(f"p{n:03}", CARD // 10) for n in range(200)], space)
        kube.create_many([tile(f"p{n:03}", CARD // 10) for n in range(60)], free)
        pods.wait_for(all_bound(50), 60, "fifty pods are bound")
        others.wait_for(all_bound(60), 60, "the other namespace is not limited")
        messages = wait_until(
            partial(event_messages, kube, space, sorted(set(names(pods)) - bound(pods))[:20]), 30, "events"
        )
        assert f"{space} holds 5 of 5 T4; this pod needs 0.1 more" in messages[0]
        assert "ConfigMap kube-system/gputile-quota" in messages[0]
        assert gputile.count("gputile_quota_used", namespace=space, model="T4", kind="cards") == 5
        assert gputile.count("gputile_quota_limit", namespace=space, model="T4", kind="cards") == 5
        for name in sorted(bound(pods))[:10]:
            kube.delete("Pod", name, space, grace=0)
            pods.wait_for(is_gone(space, name), 10, f"{name} is gone")
            pods.wait_for(all_bound(50), 10, "another pod is bound as soon as the quota allows it")
        assert most_at_once(pods) == 50
        assert_command_shows_the_quota(cluster, space)
        allocated = [held for pod in kube.list("Pod", space) for held in tiles(pod)]
        assert sum(held["memory"] for held in allocated) == 50 * (CARD // 10)
        audit(kube)


def assert_command_shows_the_quota(plane: ControlPlane, space: str) -> None:
    """`gputile quota`, as the admin; and as a user of that namespace with the rights of docs/quota.md."""
    rules = [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]},
        {
            "apiGroups": [""],
            "resources": ["configmaps"],
            "resourceNames": [CONFIG_MAP, OLD_CONFIG_MAP],
            "verbs": ["get"],
        },
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
    ]
    subject = {"kind": "ServiceAccount", "name": "default", "namespace": space}
    for kind, namespace, some in (
        ("ClusterRole", None, rules[:1]),
        ("Role", NAMESPACE, rules[1:2]),
        ("Role", space, rules[2:]),
    ):
        group, meta = (
            "rbac.authorization.k8s.io",
            {"name": "sees-quota", **({"namespace": namespace} if namespace else {})},
        )
        manifest = {"apiVersion": f"{group}/v1", "metadata": meta}
        plane.kube.apply({**manifest, "kind": kind, "rules": some}, namespace)
        role = {"apiGroup": group, "kind": kind, "name": "sees-quota"}
        plane.kube.apply({**manifest, "kind": f"{kind}Binding", "roleRef": role, "subjects": [subject]}, namespace)
    for kubeconfig in (plane.admin_kubeconfig, plane.kubeconfig_for("default", space)):
        words: list[str | Path] = [PROGRAM, "quota", space, "-o", "json", "--kubeconfig", kubeconfig]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
        [row] = json.loads(done.stdout)["quotas"]
        assert (row["cards"], row["pods"], row["waiting"]) == ({"used": 5.0, "limit": 5.0}, 50, 140)


def names(pods: Watch) -> list[str]:
    return [name for _, name in pods.objects]


# ---- edits ----------------------------------------------------------------------------------------------------------


def test_edits_take_effect_live_and_an_invalid_edit_keeps_the_last_good_quota_over_a_restart(
    cluster: ControlPlane, kube: Kube
) -> None:
    space = cluster.namespace("edited")
    join(kube, [gpu_node("n1", 8, CARD, T4)])
    with FakeKubelets(kube), watch(kube, "Pod", space) as pods:
        with Replica(cluster) as gputile, cluster.start_scheduler(config=gputile.config()):
            quota(kube, **{space: cards(1)})
            wait_until(lambda: gputile.count("gputile_quota_limit", namespace=space) == 1, 10, "the quota is read")
            kube.create_many([tile(f"p{n}", CARD) for n in range(6)], space)
            pods.wait_for(all_bound(1), 20, "one pod is bound")
            quota(kube, **{space: cards(3)})
            pods.wait_for(all_bound(3), 10, "two more pods are bound, without another change")
            write(kube, f"namespaces: {{{space}: {{limits: [{{model: T4, crads: 6}}]}}}}")
            [event] = wait_until(
                lambda: events_of(kube, NAMESPACE, CONFIG_MAP, "QuotaInvalid"), 10, "an event on the ConfigMap"
            )
            assert event["involvedObject"]["kind"] == "ConfigMap"
            assert f"namespace `{space}`: `limits[0]`: the field `crads` does not exist" in event["message"]
            assert "stays in force: quotas of 1 namespaces" in event["message"]
            assert gputile.count("gputile_quota_invalid", configmap="kube-system/gputile-quota") == 1
            assert gputile.count("gputile_quota_limit", namespace=space) == 3
            kube.create(tile("late", CARD), space)
            wait_until(partial(event_messages, kube, space, ["late"]), 20, "an event on the pending pod")
        with Replica(cluster, "gputile-1") as later, cluster.start_scheduler(config=later.config()):
            assert later.count("gputile_quota_limit", namespace=space) == 3, "read from the ConfigMap's annotation"
            assert later.count("gputile_quota_invalid", configmap="kube-system/gputile-quota") == 1
            kube.delete("Pod", sorted(bound(pods))[0], space, grace=0)
            pods.wait_for(all_bound(3), 20, "another pod is bound in its place")
            quota(kube, **{space: cards(4)})
            pods.wait_for(all_bound(4), 10, "the valid quota is in force")
            wait_until(lambda: later.count("gputile_quota_invalid") == 0, 10, "the metric is reset")
            kube.delete("ConfigMap", CONFIG_MAP, NAMESPACE)
            pods.wait_for(all_bound(6), 10, "all pods are bound without a quota")
        assert most_at_once(pods) == 6
        audit(kube)


def test_the_old_config_map_applies_to_namespaces_that_gputiles_does_not_name(
    cluster: ControlPlane, kube: Kube
) -> None:
    old, both = cluster.namespace("old-a"), cluster.namespace("old-b")
    pool = {"tkestack.io/gpu-pool": "blue"}
    join(kube, [gpu_node("n1", 8, CARD, T4, labels=pool), gpu_node("n2", 8, CARD, T4)])
    quotas = {old: {"quota": {"T4": 2}, "pool": ["blue"]}, both: {"quota": {"T4": 8}}}
    kube.apply(config_map(OLD_CONFIG_MAP, "gpu_quota", json.dumps(quotas)), NAMESPACE)
    quota(kube, **{both: cards(1)})
    with (
        Replica(cluster) as gputile,
        cluster.start_scheduler(config=gputile.config()),
        FakeKubelets(kube),
        watch(kube, "Pod", old) as old_pods,
        watch(kube, "Pod", both) as both_pods,
    ):
        for space in (old, both):
            kube.create_many([tile(f"p{n}", CARD) for n in range(4)], space)
        old_pods.wait_for(all_bound(2), 20, "two pods are bound, by the old quota")
        both_pods.wait_for(all_bound(1), 20, "one pod is bound, by gputile's quota")
        pending = sorted(set(names(old_pods)) - bound(old_pods))
        [message, *_] = wait_until(partial(event_messages, kube, old, pending), 20, "events on the others")
        assert "old-a holds 2 of 2 T4" in message
        assert {node_of(pod) for pod in old_pods.objects.values()} == {"n1", None}
        assert (most_at_once(old_pods), most_at_once(both_pods)) == (2, 1)


# ---- preemption -----------------------------------------------------------------------------------------------------


def test_for_quota_only_pods_of_the_same_namespace_are_preempted(cluster: ControlPlane, kube: Kube) -> None:
    limited, unlimited = cluster.namespace("preempt-a"), cluster.namespace("preempt-b")
    for name, value in {"low": 5, "high": 1000}.items():
        kind = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass"}
        kube.apply({**kind, "metadata": {"name": name}, "value": value})
    join(kube, [gpu_node("n1", 2, CARD, T4), gpu_node("n2", 2, CARD, T4)])
    quota(kube, **{limited: cards(1)})
    low: dict[str, Any] = {"priorityClassName": "low"}
    high: dict[str, Any] = {"priorityClassName": "high"}
    with (
        Replica(cluster) as gputile,
        cluster.start_scheduler(config=gputile.config()),
        FakeKubelets(kube, stop_after=1.0),
        watch(kube, "Pod", limited) as pods,
        watch(kube, "Pod", unlimited) as others,
    ):
        kube.create(tile("old", CARD, **low), limited)
        pods.wait_for(all_bound(1), 20, "its quota is used up")
        kube.create_many([tile(f"p{n}", CARD, **low) for n in range(3)], unlimited)
        others.wait_for(all_bound(3), 20, "all GPUs are allocated")
        kube.create(tile("wanted", CARD, **high), limited)
        pods.wait_for(lambda them: node_of(them.get((limited, "wanted"))), 40, "the preemptor is bound")
        # The GPU is free when the containers have terminated, before the object is gone.
        wait_until(lambda: pods.get(limited, "old") is None, 10, "the evicted pod is gone")
        kube.create(tile("more", CARD, **high), limited)  # its namespace has no pod of lower priority now
        wait_until(partial(event_messages, kube, limited, ["more"]), 20, "an event on the pod")
        wait_until(lambda: gputile.count("gputile_refusals_total", code="QuotaExceeded") > 0, 20, "rejected by quota")
        with pytest.raises(TookTooLong):
            wait_until(lambda: len(bound(others)) < 3 or node_of(pods.get(limited, "more")), 6, "an eviction or a bind")
        assert [e for e in others.events if e.object["metadata"].get("deletionTimestamp")] == []
        audit(kube)
