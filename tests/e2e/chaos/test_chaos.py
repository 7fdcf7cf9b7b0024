"""Chaos, the short way: one storm of 1,000 pods with every fault in it, one quiet failover, and one forced overlap.

The seed is printed. `GPUTILE_CHAOS_SEED` chooses it; `make chaos SEED=...` replays it, and goes on for longer.
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

SOON = 5.0  # seconds: one try in vain, and kube-scheduler's pause after it
SEED = int(os.environ.get("GPUTILE_CHAOS_SEED") or random.SystemRandom().randrange(10**6))


@pytest.mark.timeout(600, func_only=True)
def test_a_storm_with_every_fault_in_it(programs: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    def say(line: str) -> None:
        with capsys.disabled():
            print(f"\n{line}", end="", flush=True)

    summary = Campaign(programs, SEED, pods=1000, say=say).run()
    say(summary.text() + "\n")
    assert summary.created == 1000
    assert summary.bound > 700
    assert len(summary.failovers) == 3
    assert all(led < 15.0 and bound < led + SOON for _, led, bound in summary.failovers)


# --- one failover that nobody notices


def test_a_leader_cut_off_in_a_quiet_cluster_is_not_asked_again_on_each_connection(scene: Scene) -> None:
    """kube-scheduler has opened several to it, and hears on none that another leads until it has a pod to place."""
    names = [f"early-{number}" for number in range(8)]
    for name in names:
        scene.kube.create(tile(name, 1000))
    scene.kubelets.pods.wait_for(
        lambda pods: all(node_of(pods["default", name]) for name in names), 20, "all are bound"
    )
    leader = scene.leader()
    with scene.failover(leader, "cut off"):
        scene.black_out(leader)
    ((_, led, bound),) = scene.failovers
    assert bound < led + SOON
    scene.heal(leader)


# --- one overlap, forced


@pytest.fixture
def scene(programs: Programs) -> Iterator[Scene]:
    with ControlPlane(programs) as plane, Scene(plane, SEED) as made:
        join(plane.kube, [gpu_node("one-card", 1, 16000, "Tesla T4", labels={"only": "this"})])
        yield made


def test_a_frozen_leaders_bind_lands_on_a_sold_tile_and_its_pod_is_evicted_and_told(scene: Scene) -> None:
    """The old leader's Binding hangs in the network until the new leader has sold the tile; then it lands.

    kube-scheduler would try the pod again by itself, so the test plays its part for this one pod.
    """
    kube, old = scene.kube, scene.leader()
    (new,) = (name for name in scene.replicas if name != old)
    only: dict[str, Any] = {"nodeSelector": {"only": "this"}}
    early = kube.create(tile("early", 9000, schedulerName="the-test", **only))
    ask: dict[str, Any] = {"Pod": early, "NodeNames": ["one-card"]}
    wait_until(lambda: '"one-card"' in scene.replicas[old].request("POST", "/gputile/filter", ask)[1], 5, "it fits")
    scene.proxies[old].hold(r"pods/early/binding$")
    binding = {"PodName": "early", "PodNamespace": "default", "PodUID": early["metadata"]["uid"], "Node": "one-card"}
    calls = threading.Thread(target=lambda: ignore(scene, old, binding), daemon=True)
    calls.start()
    wait_until(lambda: scene.proxies[old].allocation > 0, 10, "its bind is on its way")
    with scene.failover(old, "frozen"):
        scene.freeze(old)
    kube.create(tile("late", 9000, **only))
    runs = scene.kubelets.pods
    runs.wait_for(lambda them: them["default", "late"]["status"]["phase"] == "Running", 20, "the new leader sold it")
    assert scene.replicas[new].count("gputile_overcommits_total") == 0
    second(kube.get("Pod", "late")["status"]["startTime"])
    scene.proxies[old].release()
    runs.wait_for(lambda them: node_of(them["default", "early"]), 10, "the old bind landed")
    landed = next(e.object for e in runs.events if e.object["metadata"]["name"] == "early" and node_of(e.object))
    assert {t["uuid"] for t in tiles(landed)} == {t["uuid"] for t in tiles(kube.get("Pod", "late"))}, "no overlap"
    runs.wait_for(lambda them: ("default", "early") not in them, 20, "the pod that came last is gone")
    (told,) = events_of(kube, "default", "early", "GPUDoubleAllocated")
    assert told["involvedObject"]["uid"] == early["metadata"]["uid"]
    assert "default/late (9000 MiB, 0 %)" in told["message"]
    assert tiles(landed)[0]["uuid"] in told["message"]
    scene.thaw(old)
    calls.join(20)
    assert audit(kube)
    assert kube.get("Pod", "late")["status"]["phase"] == "Running"
    assert scene.replicas[new].count("gputile_overlap_evictions_total") == 1
    assert scene.leader() == new
    assert scene.replicas[old].count("gputile_overlap_evictions_total") == 0


def ignore(scene: Scene, name: str, binding: Manifest) -> None:
    """The answer is of no interest; the process is frozen before it comes."""
    try:
        scene.replicas[name].request("POST", "/gputile/bind", binding)
    except OSError:
        return


def second(moment: str) -> None:
    """Wait until the clock of Kubernetes, which counts whole seconds, has gone on."""
    wait_until(lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()) > moment, 5, "the next second")


# --- the harness itself


def test_a_seed_makes_the_same_storm_and_the_same_faults() -> None:
    names = [name for name in FAULTS if name not in LONG]
    assert plan(7, 300) == plan(7, 300)
    assert plan(7, 300) != plan(8, 300)
    assert rounds(7, 2000, names) == rounds(7, 2000, names)
    assert rounds(7, 2000, names) != rounds(8, 2000, names)
    made = rounds(7, 2003, names)
    assert sorted(one.fault for one in made) == sorted(names)
    assert sum(one.actions for one in made) == 2003


def test_a_storm_has_every_dialect_in_it() -> None:
    asked = {key for action in plan(7, 1000) if action.manifest for key in resources(action.manifest)}
    families = {"gputile.io/gpu", "aliyun.com/gpu-mem", "nano-gpu.io/gpu-core", "nano-gpu/gpu-percent"}
    families |= {"elasticgpu.io/gpu-core", "tencent.com/vcuda-core", "nvidia.com/vcuda-core", "nvidia.com/gpu"}
    assert families | {"nvidia.com/gpumem", "nvidia.com/vgpu-number"} <= asked
    assert len({kind.__name__ for kind in KINDS}) == 16


def resources(manifest: Manifest) -> set[str]:
    spec = manifest["spec"]
    return {name for c in (*spec["containers"], *spec.get("initContainers", [])) for name in c["resources"]["limits"]}


def test_the_proxy_breaks_requests_before_and_after_the_api_server_saw_them(plane: ControlPlane) -> None:
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
            landed = plane.kube.find("Pod", f"p{number}") is not None
            assert landed is (rule.what != "answer")
        proxy.heal()
        assert proxy.injected == {"answer 500": 1, "answer 429": 1, "lose 500": 1, "reset": 1}
        proxy.hold("pods$")
        sender = threading.Thread(target=lambda: through.create(pod("held", {})), daemon=True)
        sender.start()
        wait_until(lambda: proxy.allocation == 1, 5, "it is held")
        assert plane.kube.find("Pod", "held") is None
        proxy.release()
        sender.join(10)
        assert plane.kube.find("Pod", "held")
        proxy.black_out()
        with pytest.raises(OSError):  # noqa: PT011  # however it is torn off
            through.get("Pod", "held")
        proxy.heal()
        assert report(plane.kube).is_right
