"""Quota on a real API server and kube-scheduler: races, live edits, slips of the hand, preemption.

What was bound is read from the API objects, event by event: a pod too many for a moment is a pod too many.
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
OURS, OLD = "gputile-quota", "gpuquota"


@pytest.fixture
def cluster(plane: ControlPlane, kube: Kube) -> Iterator[ControlPlane]:
    """With our rights, and without quotas, before and after."""
    rights(plane)
    yield plane
    for name in (OURS, OLD):
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
    """Our ConfigMap, whether it is there or not."""
    kube.apply(config_map(OURS, "quota.yaml", text), NAMESPACE)


def quota(kube: Kube, **namespaces: Any) -> None:
    write(kube, yaml.safe_dump({"namespaces": namespaces}))


def cards(number: float, *pools: str) -> dict[str, Any]:
    return {"limits": [{"model": "T4", "cards": number}], "pools": list(pools)}


def bound(pods: Watch) -> set[str]:
    return {name for (_, name), found in pods.objects.items() if node_of(found)}


def is_gone(space: str, name: str) -> Any:
    return lambda pods: (space, name) not in pods


def most_at_once(pods: Watch) -> int:
    """How many were bound at a time, at most, in all that the watch has shown."""
    now: set[str] = set()
    most = 0
    for event in pods.events:
        name = event.object["metadata"]["name"]
        there = event.type != "DELETED" and node_of(event.object)
        (now.add if there else now.discard)(name)
        most = max(most, len(now))
    return most


def told(kube: Kube, space: str, names: list[str]) -> list[str]:
    """What waiting pods were told by us."""
    return [event["message"] for name in names for event in events_of(kube, space, name, "NoFittingGPU")]


# ---- races ----------------------------------------------------------------------------------------------------------


def test_two_namespaces_race_for_the_last_card_of_a_shared_pool(cluster: ControlPlane, kube: Kube) -> None:
    one, other = cluster.namespace("race-a"), cluster.namespace("race-b")
    shared = {"gputile.io/pool": "shared"}
    join(kube, [gpu_node("n1", 1, CARD, T4, labels=shared), gpu_node("n2", 8, CARD, T4)])
    quota(kube, **{one: cards(2, "shared"), other: cards(2, "shared")})
    with (
        Replica(cluster) as gputile,
        cluster.start_scheduler(config=gputile.config()),
        FakeKubelets(kube),
        watch(kube, "Pod", one) as ones,
        watch(kube, "Pod", other) as others,
    ):
        wishes = [(space, tile(f"p{n}", CARD)) for n in range(5) for space in (one, other)]
        for space, wish in wishes:
            kube.create(wish, space)
        wait_until(lambda: len(bound(ones)) + len(bound(others)) == 1, 30, "one has the card")
        wait_until(lambda: gputile.count("gputile_refusals_total", code="PoolNotAllowed") > 0, 20, "the rest has not")
        for _ in range(3):  # whoever has it gives it back: exactly one of the others gets it
            space, pods = (one, ones) if bound(ones) else (other, others)
            [has] = bound(pods)
            kube.delete("Pod", has, space, grace=0)
            pods.wait_for(is_gone(space, has), 10, f"{has} gone")
            wait_until(lambda: len(bound(ones)) + len(bound(others)) == 1, 10, "another has the card")
        assert {node_of(pod) for pods in (ones, others) for pod in pods.objects.values()} == {"n1", None}
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
        pods.wait_for(all_bound(50), 60, "fifty bound")
        others.wait_for(all_bound(60), 60, "nobody else waits for them")
        said = wait_until(partial(told, kube, space, sorted(set(names(pods)) - bound(pods))[:20]), 30, "some are told")
        assert f"{space} holds 5 of 5 T4; this pod needs 0.1 more" in said[0]
        assert "ConfigMap kube-system/gputile-quota" in said[0]
        assert gputile.count("gputile_quota_used", namespace=space, model="T4", kind="cards") == 5
        assert gputile.count("gputile_quota_limit", namespace=space, model="T4", kind="cards") == 5
        for goes in sorted(bound(pods))[:10]:
            kube.delete("Pod", goes, space, grace=0)
            pods.wait_for(is_gone(space, goes), 10, f"{goes} gone")
            pods.wait_for(all_bound(50), 10, "another is let in as soon as quota frees")
        assert most_at_once(pods) == 50
        assert_the_command_shows_it(cluster, space)
        held = [held for pod in kube.list("Pod", space) for held in tiles(pod)]
        assert sum(one["memory"] for one in held) == 50 * (CARD // 10)
        audit(kube)


def assert_the_command_shows_it(plane: ControlPlane, space: str) -> None:
    """`gputile quota`, as the admin; and as a user of that namespace with the rights of docs/quota.md."""
    rules = [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]},
        {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": [OURS, OLD], "verbs": ["get"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
    ]
    subject = {"kind": "ServiceAccount", "name": "default", "namespace": space}
    for kind, home, some in (
        ("ClusterRole", None, rules[:1]),
        ("Role", NAMESPACE, rules[1:2]),
        ("Role", space, rules[2:]),
    ):
        group, meta = "rbac.authorization.k8s.io", {"name": "sees-quota", **({"namespace": home} if home else {})}
        made = {"apiVersion": f"{group}/v1", "metadata": meta}
        plane.kube.apply({**made, "kind": kind, "rules": some}, home)
        role = {"apiGroup": group, "kind": kind, "name": "sees-quota"}
        plane.kube.apply({**made, "kind": f"{kind}Binding", "roleRef": role, "subjects": [subject]}, home)
    for kubeconfig in (plane.admin_kubeconfig, plane.kubeconfig_for("default", space)):
        words: list[str | Path] = [PROGRAM, "quota", space, "-o", "json", "--kubeconfig", kubeconfig]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
        [row] = json.loads(done.stdout)["quotas"]
        assert (row["cards"], row["pods"], row["waiting"]) == ({"used": 5.0, "limit": 5.0}, 50, 140)


def names(pods: Watch) -> list[str]:
    return [name for _, name in pods.objects]


# ---- edits ----------------------------------------------------------------------------------------------------------


def test_edits_are_followed_live_and_a_slip_keeps_the_last_good_also_over_a_restart(
    cluster: ControlPlane, kube: Kube
) -> None:
    space = cluster.namespace("edited")
    join(kube, [gpu_node("n1", 8, CARD, T4)])
    with FakeKubelets(kube), watch(kube, "Pod", space) as pods:
        with Replica(cluster) as gputile, cluster.start_scheduler(config=gputile.config()):
            quota(kube, **{space: cards(1)})
            wait_until(lambda: gputile.count("gputile_quota_limit", namespace=space) == 1, 10, "the quota is known")
            kube.create_many([tile(f"p{n}", CARD) for n in range(6)], space)
            pods.wait_for(all_bound(1), 20, "one bound")
            quota(kube, **{space: cards(3)})
            pods.wait_for(all_bound(3), 10, "two more, without anything else happening")
            write(kube, f"namespaces: {{{space}: {{limits: [{{model: T4, crads: 6}}]}}}}")
            [event] = wait_until(lambda: events_of(kube, NAMESPACE, OURS, "QuotaInvalid"), 10, "an event says so")
            assert event["involvedObject"]["kind"] == "ConfigMap"
            assert f"namespace `{space}`: `limits[0]`: the field `crads` does not exist" in event["message"]
            assert "stays in force: quotas of 1 namespaces" in event["message"]
            assert gputile.count("gputile_quota_invalid", configmap="kube-system/gputile-quota") == 1
            assert gputile.count("gputile_quota_limit", namespace=space) == 3
            kube.create(tile("late", CARD), space)
            wait_until(partial(told, kube, space, ["late"]), 20, "it is told to wait")
        with Replica(cluster, "gputile-1") as later, cluster.start_scheduler(config=later.config()):
            assert later.count("gputile_quota_limit", namespace=space) == 3, "known from the ConfigMap's annotation"
            assert later.count("gputile_quota_invalid", configmap="kube-system/gputile-quota") == 1
            kube.delete("Pod", sorted(bound(pods))[0], space, grace=0)
            pods.wait_for(all_bound(3), 20, "one in its place")
            quota(kube, **{space: cards(4)})
            pods.wait_for(all_bound(4), 10, "mended")
            wait_until(lambda: later.count("gputile_quota_invalid") == 0, 10, "and said to be")
            kube.delete("ConfigMap", OURS, NAMESPACE)
            pods.wait_for(all_bound(6), 10, "no quota, no limit")
        assert most_at_once(pods) == 6
        audit(kube)


def test_the_old_config_map_counts_where_ours_does_not(cluster: ControlPlane, kube: Kube) -> None:
    old, both = cluster.namespace("old-a"), cluster.namespace("old-b")
    pool = {"tkestack.io/gpu-pool": "blue"}
    join(kube, [gpu_node("n1", 8, CARD, T4, labels=pool), gpu_node("n2", 8, CARD, T4)])
    said = {old: {"quota": {"T4": 2}, "pool": ["blue"]}, both: {"quota": {"T4": 8}}}
    kube.apply(config_map(OLD, "gpu_quota", json.dumps(said)), NAMESPACE)
    quota(kube, **{both: cards(1)})
    with (
        Replica(cluster) as gputile,
        cluster.start_scheduler(config=gputile.config()),
        FakeKubelets(kube),
        watch(kube, "Pod", old) as olds,
        watch(kube, "Pod", both) as boths,
    ):
        for space in (old, both):
            kube.create_many([tile(f"p{n}", CARD) for n in range(4)], space)
        olds.wait_for(all_bound(2), 20, "two, by the old quota")
        boths.wait_for(all_bound(1), 20, "one, by ours")
        waiting = sorted(set(names(olds)) - bound(olds))
        [why, *_] = wait_until(partial(told, kube, old, waiting), 20, "the others are told")
        assert "old-a holds 2 of 2 T4" in why
        assert {node_of(found) for found in olds.objects.values()} == {"n1", None}
        assert (most_at_once(olds), most_at_once(boths)) == (2, 1)


# ---- preemption -----------------------------------------------------------------------------------------------------


def test_preemption_frees_the_quota_of_its_own_namespace_only(cluster: ControlPlane, kube: Kube) -> None:
    mine, theirs = cluster.namespace("preempt-a"), cluster.namespace("preempt-b")
    for name, value in {"low": 5, "high": 1000}.items():
        kind = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass"}
        kube.apply({**kind, "metadata": {"name": name}, "value": value})
    join(kube, [gpu_node("n1", 2, CARD, T4), gpu_node("n2", 2, CARD, T4)])
    quota(kube, **{mine: cards(1)})
    low: dict[str, Any] = {"priorityClassName": "low"}
    high: dict[str, Any] = {"priorityClassName": "high"}
    with (
        Replica(cluster) as gputile,
        cluster.start_scheduler(config=gputile.config()),
        FakeKubelets(kube, stop_after=1.0),
        watch(kube, "Pod", mine) as pods,
        watch(kube, "Pod", theirs) as others,
    ):
        kube.create(tile("old", CARD, **low), mine)
        pods.wait_for(all_bound(1), 20, "its quota is used up")
        kube.create_many([tile(f"p{n}", CARD, **low) for n in range(3)], theirs)
        others.wait_for(all_bound(3), 20, "all cards are taken")
        kube.create(tile("wanted", CARD, **high), mine)
        pods.wait_for(lambda them: node_of(them.get((mine, "wanted"))), 40, "bound in the place of its own")
        # Its containers have ended before its object is gone; the GPU is free from the first of the two on.
        wait_until(lambda: pods.get(mine, "old") is None, 10, "the evicted pod is gone")
        kube.create(tile("more", CARD, **high), mine)  # nobody of its own is less important now
        wait_until(partial(told, kube, mine, ["more"]), 20, "it is told")
        wait_until(lambda: gputile.count("gputile_refusals_total", code="QuotaExceeded") > 0, 20, "refused by quota")
        with pytest.raises(TookTooLong):
            wait_until(lambda: len(bound(others)) < 3 or node_of(pods.get(mine, "more")), 6, "nothing comes of it")
        assert [e for e in others.events if e.object["metadata"].get("deletionTimestamp")] == []
        audit(kube)
