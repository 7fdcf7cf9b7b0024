"""Two machines with agents, gputile's scheduler and kube-scheduler, and what tests observe there."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.e2e import agents
from tests.e2e.agents import NodeAgent, two_models
from tests.e2e.api import Manifest
from tests.e2e.audit import grant
from tests.e2e.control_plane import ControlPlane
from tests.e2e.gputile import Replica, rights
from tests.e2e.machines import Container, Machine
from tests.e2e.pod_resources import Devices, pod_resources
from tests.e2e.pods import node_of, real
from tests.e2e.processes import wait_until
from tests.e2e.programs import Programs

ON_A: dict[str, Any] = {"nodeSelector": {"kubernetes.io/hostname": "node-a"}}
ON_B: dict[str, Any] = {"nodeSelector": {"kubernetes.io/hostname": "node-b"}}
PATIENCE = 60.0  # seconds for a pod to run
SHOW_ENV = "env"
IGNORES_SIGTERM = ["/bin/sh", "-c", "trap '' TERM; while true; do sleep 1; done"]  # ends only when it is killed

# The paths on node-a that isolations need; they exist only where a test creates them.
FOLDERS = {
    "folders__driver": "/var/lib/nvidia",
    "folders__mps": "/var/lib/nvidia-mps",
    "folders__preload": "/var/lib/vgpu/libvgpu.so",
}


class Site:
    """Two machines with agents, both schedulers, and helpers to observe them."""

    def __init__(self, plane: ControlPlane, gputile: Replica, a: NodeAgent, b: NodeAgent) -> None:
        self.plane, self.kube, self.gputile, self.a, self.b = plane, plane.kube, gputile, a, b
        self._spaces = 0

    def space(self) -> str:
        self._spaces += 1
        return self.plane.namespace(f"agents-{self._spaces}")

    def clear(self, space: str) -> None:
        self.kube.delete_all("Pod", space, grace=0)
        wait_until(lambda: not self.containers(space), 30, f"no containers of {space}")

    # --- pods

    def run(self, *pods: Manifest, space: str) -> dict[str, Manifest]:
        """Create the pods all at once, and wait until they run and have printed their environment."""
        names = {pod["metadata"]["name"] for pod in pods}
        self.kube.create_many([real(pod, script=SHOW_ENV) for pod in pods], space)
        wait_until(lambda: names <= self.running(space), PATIENCE, f"{len(pods)} pods run in {space}")
        return {pod["metadata"]["name"]: pod for pod in self.kube.list("Pod", space)}

    def running(self, space: str) -> set[str]:
        """The names of the running pods."""
        pods = self.kube.list("Pod", space)
        return {pod["metadata"]["name"] for pod in pods if pod["status"].get("phase") == "Running"}

    def phase(self, name: str, space: str) -> str:
        return str(self.kube.get("Pod", name, space)["status"].get("phase"))

    def is_bound(self, name: str, space: str) -> bool:
        return node_of(self.kube.get("Pod", name, space)) is not None

    # --- containers

    def machine_of(self, pod: Manifest) -> Machine:
        return {"node-a": self.a, "node-b": self.b}[str(node_of(pod))].machine

    def containers(self, space: str, name: str = "") -> dict[str, Container]:
        """The running containers of the pods of a namespace, or of one pod, by ID."""
        every = [*self.a.machine.containers(), *self.b.machine.containers()]
        return {it.id: it for it in every if it.namespace == space and name in ("", it.pod)}

    def env(self, pod: Manifest, name: str = "main") -> dict[str, str]:
        """The output of the container."""
        meta = pod["metadata"]
        lines = self.machine_of(pod).logs(meta["name"], name, meta["namespace"]).splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def devices(self, space: str) -> Devices:
        """The devices of containers, from the kubelets' podresources sockets."""
        sockets = [agent.machine.disk.pod_resources for agent in (self.a, self.b)]
        devices = pod_resources(sockets[0]) | pod_resources(sockets[1])
        return {key: ids for key, ids in devices.items() if key[0] == space}

    def assert_own_cards(self, space: str) -> None:
        """Assert that every container of every pod sees exactly the GPUs of its grant."""
        pods = self.kube.list("Pod", space)
        assert pods
        for pod in pods:
            pod_grant = grant(pod)
            assert pod_grant is not None, pod["metadata"]["name"]
            for part in pod_grant["containers"]:
                env, tiles = self.env(pod, part["name"]), part["tiles"]
                uuids = ",".join(tile["uuid"] for tile in tiles)
                assert env["NVIDIA_VISIBLE_DEVICES"] == uuids, f"{pod['metadata']['name']}/{part['name']}"
                if pod_grant["dialect"] == "gputile":
                    assert env["GPUTILE_MEMORY_MIB"] == ",".join(str(tile["memory"]) for tile in tiles)


@contextmanager
def site(programs: Programs) -> Iterator[Site]:
    with ControlPlane(programs) as plane:
        rights(plane)
        agents.rights(plane)
        with Machine(plane, "node-a") as a, Machine(plane, "node-b") as b:
            old_words, new_words = "gputile,gpushare,nano,vcuda,nvidia", "gputile,hami,vgpu"
            with (
                Replica(plane) as gputile,
                plane.start_scheduler(config=gputile.config()),
                NodeAgent(
                    a, two_models("a"), serve=old_words, health__probation=2, poll_interval=1, **FOLDERS
                ) as first,
                NodeAgent(b, two_models("b"), serve=new_words, health__probation=2, poll_interval=1) as second,
            ):
                yield Site(plane, gputile, first, second)
