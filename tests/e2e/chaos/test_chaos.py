"""The short chaos run: one storm of 1,000 pods with every fault, one failover in a quiet cluster, one forced overlap.

The seed is printed. `GPUTILE_CHAOS_SEED` chooses it; `make chaos SEED=...` replays it with the long faults too.
"""

import os
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.api import Manifest
from tests.e2e.audit import audit, report, tiles
from tests.e2e.chaos.campaign import Campaign, Scene, rounds
from tests.e2e.chaos.faults import FAULTS, LONG
from tests.e2e.chaos.proxy import FaultProxy, Rule
from tests.e2e.chaos.storm import KINDS, plan
from tests.e2e.control_plane import ControlPlane
from tests.e2e.nodes import gpu_node, join
from tests.e2e.pods import events_of, node_of, pod, tile
from tests.e2e.processes import wait_until
from tests.e2e.programs import Programs

SOON = 5.0  # seconds: one failed attempt, and kube-scheduler's back-off after it
SEED = int(os.environ.get("GPUTILE_CHAOS_SEED") or random.SystemRandom().randrange(10**6))


@pytest.mark.timeout(600, func_only=True)
def test_a_storm_with_every_fault_loses_no_pod_and_allocates_no_tile_twice(
    programs: Programs, capsys: pytest.CaptureFixture[str]
) -> None:
    def report(line: str) -> None:
        with capsys.disabled():
            print(f"\n{line}", end="", flush=True)

    summary = Campaign(programs, SEED, pods=1000, report=report).run()
    report(summary.text() + "\n")
    assert summary.created == 1000
    assert summary.bound > 700
    assert len(summary.failovers) == 3
    assert all(elected < 15.0 and bound < elected + SOON for _, elected, bound in summary.failovers)


# --- one failover in a quiet cluster


def test_after_a_quiet_failover_kube_scheduler_does_not_retry_the_old_leader_on_each_connection(scene: Scene) -> None:
    """kube-scheduler has several connections to the old leader, and uses none until it has a pod to schedule."""
    names = [f"early-{number}" for number in range(8)]
    for name in names:
        scene.kube.create(tile(name, 1000))
    scene.kubelets.pods.wait_for(
        lambda pods: all(node_of(pods["default", name]) for name in names), 20, "all pods are bound"
    )
    leader = scene.leader()
    with scene.failover(leader, "cut off"):
        scene.black_out(leader)
    ((_, elected, bound),) = scene.failovers
    assert bound < elected + SOON
    scene.heal(leader)


# --- one overlap, forced


@pytest.fixture
def scene(programs: Programs) -> Iterator[Scene]:
    with ControlPlane(programs) as plane, Scene(plane, SEED) as scene:
        join(plane.kube, [gpu_node("one-card", 1, 16000, "Tesla T4", labels={"only": "this"})])
        yield scene


def test_a_frozen_leaders_late_bind_double_allocates_a_tile_and_its_pod_is_evicted_with_an_event(scene: Scene) -> None:
    """The old leader's Binding is held in the network until the new leader has allocated the tile.

    kube-scheduler would retry the pod, so the test calls filter and bind itself for this pod.
    """
    kube, old = scene.kube, scene.leader()
    (new,) = (name for name in scene.replicas if name != old)
    only: dict[str, Any] = {"nodeSelector": {"only": "this"}}
    early = kube.create(tile("early", 9000, schedulerName="the-test", **only))
    ask: dict[str, Any] = {"Pod": early, "NodeNames": ["one-card"]}
    wait_until(lambda: '"one-card"' in scene.replicas[old].request("POST", "/gputile/filter", ask)[1], 5, "it fits")
    scene.proxies[old].hold(r"pods/early/binding$")
    binding = {"PodName": "early", "PodNamespace": "default", "PodUID": early["metadata"]["uid"], "Node": "one-card"}
    calls = threading.Thread(target=lambda: bind_and_ignore(scene, old, binding), daemon=True)
    calls.start()
    wait_until(lambda: scene.proxies[old].held_binds > 0, 10, "its bind is held")
    with scene.failover(old, "frozen"):
        scene.freeze(old)
    kube.create(tile("late", 9000, **only))
    pods = scene.kubelets.pods
    pods.wait_for(lambda them: them["default", "late"]["status"]["phase"] == "Running", 20, "the tile is allocated")
    assert scene.replicas[new].count("gputile_overcommits_total") == 0
    wait_for_next_second(kube.get("Pod", "late")["status"]["startTime"])
    scene.proxies[old].release()
    pods.wait_for(lambda them: node_of(them["default", "early"]), 10, "the old leader's bind was executed")
    bound = next(e.object for e in pods.events if e.object["metadata"]["name"] == "early" and node_of(e.object))
    assert {t["uuid"] for t in tiles(bound)} == {t["uuid"] for t in tiles(kube.get("Pod", "late"))}, "no overlap"
    pods.wait_for(lambda them: ("default", "early") not in them, 20, "the newer pod is evicted")
    (event,) = events_of(kube, "default", "early", "GPUDoubleAllocated")
    assert event["involvedObject"]["uid"] == early["metadata"]["uid"]
    assert "default/late (9000 MiB, 0 %)" in event["message"]
    assert tiles(bound)[0]["uuid"] in event["message"]
    scene.thaw(old)
    calls.join(20)
    assert audit(kube)
    assert kube.get("Pod", "late")["status"]["phase"] == "Running"
    assert scene.replicas[new].count("gputile_overlap_evictions_total") == 1
    assert scene.leader() == new
    assert scene.replicas[old].count("gputile_overlap_evictions_total") == 0


def bind_and_ignore(scene: Scene, name: str, binding: Manifest) -> None:
    """Call bind; its response does not matter, because the process is frozen before it."""
    try:
        scene.replicas[name].request("POST", "/gputile/bind", binding)
    except OSError:
        return


def wait_for_next_second(moment: str) -> None:
    """Wait until a timestamp of Kubernetes, which has whole seconds, is later than this one."""
    wait_until(lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()) > moment, 5, "the next second")


# --- the harness itself


def test_the_same_seed_makes_the_same_storm_and_the_same_faults() -> None:
    names = [name for name in FAULTS if name not in LONG]
    assert plan(7, 300) == plan(7, 300)
    assert plan(7, 300) != plan(8, 300)
    assert rounds(7, 2000, names) == rounds(7, 2000, names)
    assert rounds(7, 2000, names) != rounds(8, 2000, names)
    planned = rounds(7, 2003, names)
    assert sorted(it.fault for it in planned) == sorted(names)
    assert sum(it.actions for it in planned) == 2003


def test_a_storm_has_pods_of_every_dialect() -> None:
    requested = {key for action in plan(7, 1000) if action.manifest for key in resources(action.manifest)}
    families = {"gputile.io/gpu", "aliyun.com/gpu-mem", "nano-gpu.io/gpu-core", "nano-gpu/gpu-percent"}
    families |= {"elasticgpu.io/gpu-core", "tencent.com/vcuda-core", "nvidia.com/vcuda-core", "nvidia.com/gpu"}
    assert families | {"nvidia.com/gpumem", "nvidia.com/vgpu-number"} <= requested
    assert len({kind.__name__ for kind in KINDS}) == 16


def resources(manifest: Manifest) -> set[str]:
    spec = manifest["spec"]
    return {name for c in (*spec["containers"], *spec.get("initContainers", [])) for name in c["resources"]["limits"]}


def test_the_proxy_breaks_requests_before_and_after_the_api_server_executes_them(plane: ControlPlane) -> None:
    from tests.e2e.api import ApiError, Kube

    with FaultProxy(plane, "broken") as proxy, Kube(proxy.server, plane.authority.ca, plane.kube.token) as through:
        through.create(pod("healthy", {}))
        for number, rule in enumerate(
            (
                Rule(what="answer", status=500, match="^POST"),
                Rule(what="answer", status=429, match="^POST"),
                Rule(what="lose", status=500, match="^POST"),
                Rule(what="reset", match="^POST"),
            )
        ):
            proxy.inject(rule)
            with pytest.raises((ApiError, OSError)):
                through.create(pod(f"p{number}", {}))
            assert through.get("Pod", "healthy"), "other requests pass"
            executed = plane.kube.find("Pod", f"p{number}") is not None
            assert executed is (rule.what != "answer")
        proxy.heal()
        assert proxy.injected == {"answer 500": 1, "answer 429": 1, "lose 500": 1, "reset": 1}
        proxy.hold("pods$")
        sender = threading.Thread(target=lambda: through.create(pod("held", {})), daemon=True)
        sender.start()
        wait_until(lambda: proxy.held_binds == 1, 5, "the request is held")
        assert plane.kube.find("Pod", "held") is None
        proxy.release()
        sender.join(10)
        assert plane.kube.find("Pod", "held")
        proxy.black_out()
        with pytest.raises(OSError):  # noqa: PT011  # the way of the disconnect does not matter
            through.get("Pod", "held")
        proxy.heal()
        assert report(plane.kube).is_right
