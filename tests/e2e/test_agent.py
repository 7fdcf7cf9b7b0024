"""The agent on real kubelets with containerd and real containers: every container holds exactly its card."""

import asyncio
import json
import os
import random
import re
import stat
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from gputile.kubelet.holding import PodDevices, PodResources
from tests.e2e import agents
from tests.e2e.agents import A100, T4, NodeAgent, condition, two_models
from tests.e2e.api import ApiError, Kube, Manifest
from tests.e2e.audit import audit, grant, tiles
from tests.e2e.control_plane import ControlPlane
from tests.e2e.gputile import Replica, rights
from tests.e2e.machines import Machine
from tests.e2e.pods import container, events_of, node_of, pod, real, tile
from tests.e2e.processes import wait_until
from tests.e2e.programs import Programs

SHOW_ENV = "env"
ON_A: dict[str, Any] = {"nodeSelector": {"kubernetes.io/hostname": "node-a"}}
ON_B: dict[str, Any] = {"nodeSelector": {"kubernetes.io/hostname": "node-b"}}
PATIENCE = 60.0  # seconds for a pod to run


class Site:
    """Two machines with agents, our scheduler and kube-scheduler."""

    def __init__(self, plane: ControlPlane, gputile: Replica, agents_: dict[str, NodeAgent]) -> None:
        self.plane, self.kube, self.gputile, self.agents = plane, plane.kube, gputile, agents_
        self._spaces = 0

    def space(self) -> str:
        self._spaces += 1
        return self.plane.namespace(f"agents-{self._spaces}")

    def run(self, *pods: Manifest, space: str) -> dict[str, Manifest]:
        """Create them all at once and wait until they run."""
        self.kube.create_many([real(one, says=SHOW_ENV) for one in pods], space)
        wait_until(lambda: self.running(space) >= len(pods), PATIENCE, f"{len(pods)} pods run in {space}")
        return {found["metadata"]["name"]: found for found in self.kube.list("Pod", space)}

    def running(self, space: str) -> int:
        return sum(found["status"].get("phase") in ("Running", "Succeeded") for found in self.kube.list("Pod", space))

    def env(self, found: Manifest, name: str = "main") -> dict[str, str]:
        """What the container itself printed."""
        meta, machine = found["metadata"], self.agents[str(node_of(found))].machine
        lines = machine.logs(meta["name"], name, meta["namespace"]).splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def containers(self, space: str, name: str = "") -> set[str]:
        """IDs of the containers that run on the machines for the pods of a namespace, or for one of them."""
        every = [one for agent in self.agents.values() for one in agent.machine.containers()]
        return {one.id for one in every if one.namespace == space and name in ("", one.pod)}

    def devices(self) -> PodDevices:
        """What the kubelets say over their podresources sockets."""
        found: PodDevices = {}
        for agent in self.agents.values():
            found |= asyncio.run(PodResources(agent.machine.disk.pod_resources).list())
        return found

    def assert_own_cards(self, space: str) -> None:
        """Every container of every pod sees exactly what its grant says."""
        for found in self.kube.list("Pod", space):
            held = grant(found)
            assert held is not None, found["metadata"]["name"]
            for part in held["containers"]:
                seen = self.env(found, part["name"])
                uuids = ",".join(one["uuid"] for one in part["tiles"])
                assert seen["NVIDIA_VISIBLE_DEVICES"] == uuids, f"{found['metadata']['name']}/{part['name']}"
                if held["dialect"] == "gputile":
                    assert seen["GPUTILE_MEMORY_MIB"] == ",".join(str(one["memory"]) for one in part["tiles"])

    def clear(self, space: str) -> None:
        self.kube.delete_all("Pod", space, grace=0)
        wait_until(lambda: not self.kube.list("Pod", space), 30, f"no pods in {space}")


@pytest.fixture(scope="module")
def site(programs: Programs) -> Iterator[Site]:
    with ControlPlane(programs) as plane:
        rights(plane)
        agents.rights(plane)
        with Machine(plane, "node-a") as a, Machine(plane, "node-b") as b:
            serve = {"node-a": "gputile,gpushare,nano,vcuda,nvidia", "node-b": "gputile,hami,vgpu"}
            with (
                Replica(plane) as gputile,
                plane.start_scheduler(config=gputile.config()),
                NodeAgent(a, two_models("a"), serve=serve["node-a"], health__probation=2) as first,
                NodeAgent(b, two_models("b"), serve=serve["node-b"], health__probation=2) as second,
            ):
                yield Site(plane, gputile, {"node-a": first, "node-b": second})


@pytest.fixture
def space(site: Site) -> Iterator[str]:
    made = site.space()
    yield made
    site.clear(made)


@pytest.fixture
def kube(site: Site) -> Kube:
    return site.kube


# --- what the node says


def test_the_node_shows_its_cards(site: Site) -> None:
    node = site.kube.get("Node", "node-a")
    cards = json.loads(node["metadata"]["annotations"]["gputile.io/inventory"])["cards"]
    assert Counter(card["model"] for card in cards) == {A100: 4, T4: 4}
    offered = node["status"]["allocatable"]
    assert (offered["gputile.io/gpu"], offered["gputile.io/cores"]) == ("80", "800")
    assert offered["gputile.io/memory"] == str(4 * 81920 + 4 * 15360)
    assert (offered["aliyun.com/gpu-mem"], offered["nvidia.com/gpu"]) == (str(4 * 80 + 4 * 15), "8")
    assert (offered["tencent.com/vcuda-core"], offered["elasticgpu.io/gpu-core"]) == ("800", "800")
    assert node["metadata"]["labels"]["gputile.io/gpu-model"] == "mixed"
    assert condition(node)["status"] == "True"


# --- every dialect

DIALECTS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {  # limits; env besides the card
    "gputile": ({"gputile.io/gpu": 1, "gputile.io/memory": 3072, "gputile.io/cores": 30}, {"GPUTILE_CORES": "30"}),
    "gpushare": ({"aliyun.com/gpu-mem": 3}, {"ALIYUN_COM_GPU_MEM_CONTAINER": "3"}),
    "nano": ({"nano-gpu.io/gpu-core": 20, "nano-gpu.io/gpu-memory": 4}, {}),
    "nano-percent": ({"nano-gpu/gpu-percent": 20}, {}),
    "elastic": ({"elasticgpu.io/gpu-core": 20, "elasticgpu.io/gpu-memory": 4096}, {}),
    "vcuda": ({"tencent.com/vcuda-core": 30, "tencent.com/vcuda-memory": 12}, {}),
    "vcuda-fork": ({"nvidia.com/vcuda-core": 30, "nvidia.com/vcuda-memory": 3072}, {}),
    "nvidia": ({"nvidia.com/gpu": 1}, {}),
    "hami": ({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000}, {"CUDA_DEVICE_MEMORY_LIMIT_0": "3000m"}),
    "vgpu": ({"nvidia.com/vgpu-number": 1, "nvidia.com/vgpu-memory": 2048}, {"CUDA_MEM_LIMIT_0": "2048m"}),
}


def test_a_pod_of_every_dialect_prints_its_own_card(site: Site, space: str) -> None:
    nodes = {"hami": "node-b", "vgpu": "node-b", "nvidia": "node-a"}
    pods = [
        pod(name, limits, nodeSelector={"kubernetes.io/hostname": nodes[name]} if name in nodes else {})
        for name, (limits, _) in DIALECTS.items()
    ]
    found = site.run(*pods, space=space)
    site.assert_own_cards(space)
    for name, (_, env) in DIALECTS.items():
        seen = site.env(found[name])
        assert {key: seen.get(key) for key in env} == env, name
    cards = {
        (p, c): {re.split("::|-_-", one)[0] for one in ids}
        for (s, p, c, _), ids in site.devices().items()
        if s == space
    }
    assert cards == {(name, "main"): {one["uuid"] for one in tiles(found[name])} for name in DIALECTS}
    audit(site.kube)


# --- crowds


def test_forty_equal_pods_at_once_each_hold_their_own_card(site: Site, space: str) -> None:
    site.run(*(tile(f"p{n}", 4096) for n in range(40)), space=space)
    site.assert_own_cards(space)
    audit(site.kube)


def test_forty_mixed_pods_at_once(site: Site, space: str) -> None:
    dice = random.Random(7)
    pods = []
    for n in range(40):
        memory = dice.choice([1024, 2048, 4096])
        match n % 4:
            case 0:
                pods.append(tile(f"p{n}", memory, annotations={"gputile.io/model": "A100"}))
            case 1:
                pods.append(tile(f"p{n}", memory, annotations={"gputile.io/model": "T4"}))
            case 2:
                pods.append(tile(f"p{n}", memory, cards=2))
            case _:
                limits = {"gputile.io/gpu": 1, "gputile.io/memory": memory}
                made = pod(f"p{n}", limits)
                made["spec"]["containers"].append(container("second", limits))
                pods.append(made)
    site.run(*pods, space=space)
    site.assert_own_cards(space)
    audit(site.kube)


# --- containers in all their kinds


def test_init_containers_and_sidecars_see_their_cards_too(site: Site, space: str) -> None:
    limits = {"gputile.io/gpu": 1, "gputile.io/memory": 2048}
    first = container("first", limits)
    sidecar = container("beside", limits, restartPolicy="Always")
    found = site.run(pod("p", limits, initContainers=[first, sidecar]), space=space)
    assert {one["container"] for one in tiles(found["p"])} == {"first", "beside", "main"}
    site.assert_own_cards(space)


def test_a_pod_that_asks_for_all_cards_by_env_still_sees_only_its_own(site: Site, space: str) -> None:
    made = tile("greedy", 2048)
    made["spec"]["containers"][0]["env"] = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]
    site.run(made, space=space)
    site.assert_own_cards(space)


def test_a_container_that_restarts_finds_its_card_again(site: Site, space: str) -> None:
    made = tile("again", 2048)
    made["spec"]["containers"][0]["command"] = ["/bin/sh", "-c", "env; test -e /tmp/x; sleep 2; exit 1"]
    site.kube.create(real(made), space)

    def restarted() -> bool:
        statuses = site.kube.get("Pod", "again", space)["status"].get("containerStatuses") or [{}]
        return bool(statuses[0].get("restartCount", 0) >= 1 and "running" in statuses[0]["state"])

    wait_until(restarted, PATIENCE, "the container restarted and runs")
    site.assert_own_cards(space)


def test_a_pod_that_came_around_the_scheduler_is_granted_and_starts(site: Site, space: str) -> None:
    site.kube.create(real(tile("around", 2048), node="node-a", says=SHOW_ENV), space)
    wait_until(lambda: site.running(space) == 1, PATIENCE, "it runs")
    site.assert_own_cards(space)
    assert site.gputile.count("gputile_granted_around_total") >= 1


# --- restarts


def test_a_restarted_kubelet_leaves_containers_alone_and_new_ones_start(site: Site, space: str) -> None:
    before = site.run(tile("old", 2048, **ON_A), space=space)
    agent = site.agents["node-a"]
    ids = site.containers(space)
    agent.machine.restart_kubelet()
    wait_until(agent.serves, PATIENCE, "the agent registered again")
    site.run(tile("new", 2048, **ON_A), space=space)
    assert ids
    assert ids <= site.containers(space)
    assert site.kube.get("Pod", "old", space)["metadata"]["uid"] == before["old"]["metadata"]["uid"]
    site.assert_own_cards(space)
    audit(site.kube)


def test_a_killed_agent_comes_back_to_the_same_truth(site: Site, space: str) -> None:
    site.run(tile("old", 2048, **ON_A), space=space)
    agent = site.agents["node-a"]
    ids = site.containers(space)
    agent.kill()
    agent.start(wait=False)
    wait_until(lambda: agent.count("gputile_agent_registered", resource="gputile.io/gpu") == 1, 30, "registered again")
    wait_until(agent.serves, PATIENCE, "it serves again")
    site.run(tile("new", 2048, **ON_A), space=space)
    assert ids
    assert ids <= site.containers(space)
    site.assert_own_cards(space)
    assert agent.count("gputile_agent_disagreements") == 0
    audit(site.kube)


# --- health


def test_a_card_turns_unhealthy_and_back(site: Site, space: str) -> None:
    agent = site.agents["node-a"]
    found = site.run(tile("tenant", 2048, **ON_A), space=space)
    (card,) = tiles(found["tenant"])
    before = agent.offered()
    agent.hardware(agent.cards.event(79, card["uuid"]))
    wait_until(lambda: agent.offered() == before - 10, 30, "the card's devices are gone")
    wait_until(lambda: events_of(site.kube, space, "tenant", "GPUUnhealthy"), 10, "the tenant is told")
    others = site.run(*(tile(f"avoids-{n}", 2048, **ON_A) for n in range(4)), space=space)
    used = [one["uuid"] for name, other in others.items() if name != "tenant" for one in tiles(other)]
    assert card["uuid"] not in used
    wait_until(lambda: agent.offered() == before, 30, "it is back after its probation")


# --- ends


def test_a_tile_is_free_only_when_the_container_is_gone(site: Site, space: str) -> None:
    made = tile("slow", 80000, **ON_A)
    made["spec"]["terminationGracePeriodSeconds"] = 4
    made["spec"]["containers"][0]["command"] = ["/bin/sh", "-c", "trap '' TERM; while true; do sleep 1; done"]
    slow = real(made)
    slow["spec"]["terminationGracePeriodSeconds"] = 4
    site.kube.create(slow, space)
    wait_until(lambda: site.running(space) == 1, PATIENCE, "it runs")
    card = tiles(site.kube.get("Pod", "slow", space))[0]["uuid"]
    site.kube.delete("Pod", "slow", space)
    next_one = tile("next", 80000, annotations={"gputile.io/uuid": card})
    site.kube.create(real(next_one), space)
    time.sleep(1.5)
    assert node_of(site.kube.get("Pod", "next", space)) is None
    wait_until(lambda: node_of(site.kube.get("Pod", "next", space)), 20, "the next one is bound")
    assert site.containers(space, "slow") == set()


def test_a_pod_deleted_by_force_keeps_its_tile_while_its_container_runs(site: Site, space: str) -> None:
    made = real(tile("stubborn", 80000, **ON_A))
    made["spec"]["terminationGracePeriodSeconds"] = 8
    made["spec"]["containers"][0]["command"] = ["/bin/sh", "-c", "trap '' TERM; while true; do sleep 1; done"]
    site.kube.create(made, space)
    wait_until(lambda: site.running(space) == 1, PATIENCE, "it runs")
    card = tiles(site.kube.get("Pod", "stubborn", space))[0]["uuid"]
    site.kube.delete("Pod", "stubborn", space)  # the kubelet begins to end it, and is held up
    site.kube.delete("Pod", "stubborn", space, grace=0)
    wait_until(lambda: site.kube.find("Pod", "stubborn", space) is None, 5, "its object is gone")
    site.kube.create(real(tile("heir", 80000, annotations={"gputile.io/uuid": card})), space)

    def bound() -> bool:
        if node_of(site.kube.get("Pod", "heir", space)) is None:
            return False
        assert site.containers(space, "stubborn") == set(), "the tile was sold while the container ran"
        return True

    wait_until(bound, 60, "the heir is bound")


# --- the gap


def test_without_its_agent_a_node_takes_no_pods_and_those_in_the_gap_are_told(site: Site, space: str) -> None:
    agent = site.agents["node-b"]
    site.run(tile("before", 2048, **ON_B), space=space)
    ids = site.containers(space)
    agent.kill()
    site.kube.create(real(tile("gap", 2048), node="node-b"), space)  # around every scheduler, in the gap
    site.kube.create(real(tile("waits", 2048, **ON_B)), space)

    def failed() -> bool:
        return bool(site.kube.get("Pod", "gap", space)["status"].get("phase") == "Failed")

    wait_until(failed, 30, "the kubelet turned it away")
    assert site.kube.get("Pod", "gap", space)["status"]["reason"] == "UnexpectedAdmissionError"
    wait_until(lambda: events_of(site.kube, space, "gap", "TurnedAway"), 20, "it is told")
    wait_until(lambda: site.gputile.count("gputile_admission_failures_total") >= 1, 10, "it is counted")
    time.sleep(10)  # past the Lease's 9 seconds
    assert node_of(site.kube.get("Pod", "waits", space)) is None
    assert ids <= site.containers(space)
    agent.start()
    wait_until(lambda: node_of(site.kube.get("Pod", "waits", space)), 30, "the one that waited is bound")
    site.kube.delete("Pod", "gap", space, grace=0)
    wait_until(lambda: site.running(space) == 2, PATIENCE, "both run")
    audit(site.kube)


def test_a_node_that_reboots_leaves_no_leak(site: Site, space: str) -> None:
    agent = site.agents["node-b"]
    site.run(*(tile(f"p{n}", 2048, **ON_B) for n in range(4)), space=space)
    agent.child.stop()
    agent.machine.reboot()
    agent.start()

    def settled() -> bool:
        """Those the kubelet failed before our plugin was there are over; the others run."""
        phases = [found["status"].get("phase") for found in site.kube.list("Pod", space)]
        running = len({c.pod for c in agent.machine.containers() if c.namespace == space})
        return all(phase in ("Running", "Failed") for phase in phases) and running == phases.count("Running")

    wait_until(settled, 90, "every pod runs again or has failed")
    for found in site.kube.list("Pod", space):
        if found["status"]["phase"] == "Failed":
            site.kube.delete("Pod", found["metadata"]["name"], space, grace=0)
    site.run(tile("after", 2048, **ON_B), space=space) if not site.kube.list("Pod", space) else None
    site.kube.create(real(tile("fresh", 2048, **ON_B), says=SHOW_ENV), space)
    wait_until(lambda: "NVIDIA_VISIBLE_DEVICES" in site.env(site.kube.get("Pod", "fresh", space)), PATIENCE, "it runs")
    site.assert_own_cards(space)
    audit(site.kube)


# --- isolation


def test_every_isolation_as_seen_inside_the_container(site: Site, space: str) -> None:
    agent = site.agents["node-a"]
    disk = agent.machine.disk
    for minor in range(8):
        if not (disk.dev / f"nvidia{minor}").exists():
            os.mknod(disk.dev / f"nvidia{minor}", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    if not (disk.dev / "nvidiactl").exists():
        os.mknod(disk.dev / "nvidiactl", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    pods = [tile(mode, 2048, **ON_A, annotations={"gputile.io/isolation": mode}) for mode in ("none", "devices")]
    found = site.run(*pods, space=space)
    (card,) = tiles(found["devices"])
    inside = agent.machine.inside("devices", "main", "/bin/ls", "/dev", namespace=space).split()
    assert {f"nvidia{card['index']}", "nvidiactl"} <= set(inside)
    assert [name for name in inside if name.startswith("nvidia") and name[6:].isdigit()] == [f"nvidia{card['index']}"]
    plain = agent.machine.inside("none", "main", "/bin/ls", "/dev", namespace=space).split()
    assert not [name for name in plain if name.startswith("nvidia")]


def test_an_isolation_that_the_node_cannot_serve_is_refused_with_a_reason_on_the_pod(site: Site, space: str) -> None:
    made = tile("limited", 2048, annotations={"gputile.io/isolation": "mps"})
    site.kube.create(real(made), space)

    def told() -> bool:
        return any("isolation `mps`" in event["message"] for event in events_of(site.kube, space, "limited"))

    wait_until(told, PATIENCE, "the pod's events say why it does not start")
    assert site.containers(space) == set()


# --- rights


def test_an_agent_may_write_to_no_other_node_and_to_no_pod(site: Site, space: str) -> None:
    site.run(tile("p", 2048), space=space)
    bound = {"apiVersion": "v1", "kind": "Node", "name": "node-a"}
    token = site.kube.token_for(agents.ACCOUNT, agents.NAMESPACE, 3600, bound)
    with site.kube.as_token(token) as agent:
        agent.patch("Node", "node-a", {"metadata": {"annotations": {"gputile.io/test": "1"}}})
        for forbidden in (
            lambda: agent.patch("Node", "node-b", {"metadata": {"annotations": {"gputile.io/inventory": "{}"}}}),
            lambda: agent.patch("Pod", "p", {"metadata": {"annotations": {"x": "y"}}}, space),
            lambda: agent.patch("Pod", "p", {"metadata": {"annotations": {"x": "y"}}}, space, "status"),
            lambda: agent.patch("Lease", "node-b", {"spec": {"holderIdentity": "me"}}, "gputile-agents"),
            lambda: agent.delete("Pod", "p", space),
            lambda: agent.list("Secret", "kube-system"),
        ):
            with pytest.raises(ApiError, match=r"403|forbidden|Forbidden"):
                forbidden()
