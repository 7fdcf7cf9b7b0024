"""Real nodes: the properties that other tests rely on, and the clean-up of machines."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import cgroups
from tests.e2e.api import Kube, Manifest
from tests.e2e.control_plane import ControlPlane
from tests.e2e.disks import OWN, TUNED
from tests.e2e.machines import Container, Machine
from tests.e2e.node_programs import PACKAGES, NodePrograms, fetched
from tests.e2e.pods import container, pod, real
from tests.e2e.processes import wait_until
from tests.e2e.programs import Unavailable

ROOT = Path(__file__).parents[2]
Machines = tuple[Machine, Machine]


@pytest.fixture(scope="module")
def machines(control_plane: ControlPlane, node_programs: NodePrograms) -> Iterator[Machines]:
    """Two machines. Tests here must not use the fixture `plane`: it would delete their nodes."""
    with Machine(control_plane, "node-a", labels={"e2e": "a"}) as first, Machine(control_plane, "node-b") as second:
        yield first, second


@pytest.fixture
def kube(control_plane: ControlPlane) -> Kube:
    return control_plane.kube


def running(machine: Machine, name: str, containers: int = 1) -> list[Container]:
    """Wait until a pod is Running, and return its containers."""
    wait_until(lambda: phase(machine.plane.kube, name) == "Running", 30, f"{name} Running", [machine.kubelet])
    pod_containers = [it for it in machine.containers() if it.pod == name]
    assert len(pod_containers) == containers
    return pod_containers


def phase(kube: Kube, name: str) -> str:
    return str(kube.get("Pod", name)["status"]["phase"])


def printed_env(machine: Machine, name: str, container: str = "main") -> dict[str, str]:
    """The environment that a container printed."""
    lines = wait_until(lambda: machine.logs(name, container), 10, f"output of {name}").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


# --- pods


def test_each_of_two_machines_runs_its_own_pod(machines: Machines, kube: Kube) -> None:
    for machine in machines:
        main = container("main", env=[{"name": "WHERE", "value": machine.name}])
        kube.create(real(pod(f"on-{machine.name}", {}, containers=[main]), machine.name, script="env"))
    for machine in machines:
        (running_container,) = running(machine, f"on-{machine.name}")
        assert printed_env(machine, running_container.pod)["WHERE"] == machine.name == running_container.env["WHERE"]
        assert machine.inside(running_container.pod, "main", "sh", "-c", "echo $WHERE") == f"{machine.name}\n"
    assert not {it.id for it in machines[0].containers()} & {it.id for it in machines[1].containers()}
    assert kube.get("Node", "node-a")["metadata"]["labels"]["e2e"] == "a"


def test_kube_scheduler_binds_pods_to_a_machine(control_plane: ControlPlane, machines: Machines, kube: Kube) -> None:
    with control_plane.start_scheduler():
        kube.create(real(pod("anywhere", {"cpu": "100m"}, nodeSelector={"e2e": "a"})))
        running(machines[0], "anywhere")


def test_init_containers_exit_and_sidecars_keep_running(machines: Machines, kube: Kube) -> None:
    inits = [container("first"), container("side", restartPolicy="Always")]
    kube.create(real(pod("stages", {}, initContainers=inits), "node-a", script="echo I=$HOSTNAME"))
    assert {it.name for it in running(machines[0], "stages", 2)} == {"side", "main"}
    assert printed_env(machines[0], "stages", "first") == {"I": "stages"}


def test_a_container_that_exits_is_restarted(machines: Machines, kube: Kube) -> None:
    kube.create(real(pod("again", {}), "node-b", script="echo START=$(cat /proc/sys/kernel/random/uuid)"))
    (before,), first = running(machines[1], "again"), printed_env(machines[1], "again")
    machines[1].ctr("tasks", "kill", "--signal", "SIGKILL", before.id)
    after = wait_until(lambda: started_after(machines[1], before), 20, "the container is restarted")
    assert after
    assert after.env == before.env
    wait_until(lambda: printed_env(machines[1], "again") != first, 10, "output of the new container")


def started_after(machine: Machine, before: Container) -> Container | None:
    containers = [it for it in machine.containers() if (it.pod, it.name) == (before.pod, before.name)]
    return next((it for it in containers if it.id != before.id), None)


def test_a_deleted_pod_is_gone_with_its_containers(machines: Machines, kube: Kube) -> None:
    kube.create(real(pod("short", {}), "node-b"))
    running(machines[1], "short")
    kube.delete("Pod", "short")
    wait_until(lambda: not kube.find("Pod", "short"), 10, "the pod is gone")
    assert not [it for it in machines[1].containers() if it.pod == "short"]


# --- restarts


@pytest.mark.parametrize("kill", [False, True], ids=["kubelet-stopped", "kubelet-killed"])
def test_containers_outlive_the_kubelet(machines: Machines, kube: Kube, kill: bool) -> None:
    name = f"outlives-{kill}".lower()
    kube.create(real(pod(name, {}), "node-a"))
    before = running(machines[0], name)
    machines[0].restart_kubelet(kill)
    assert running(machines[0], name) == before


def test_containers_outlive_containerd(machines: Machines, kube: Kube) -> None:
    kube.create(real(pod("held", {}), "node-a"))
    before = running(machines[0], "held")
    machines[0].stop_containerd()
    assert not machines[0].disk.containerd_socket.exists()
    machines[0].start_containerd()
    assert running(machines[0], "held") == before
    assert machines[0].inside("held", "main", "echo", "hello") == "hello\n"


def test_a_program_runs_on_the_machine_and_handles_sigterm(machines: Machines) -> None:
    disk, log = machines[1].disk, machines[1].plane.folder / "node-b-visitor.log"
    script = (
        "trap 'sleep 0.3; echo bye; exit 3' TERM; mkdir -p /var/run/cdi; hostname > /var/run/cdi/here.txt; "
        "ls /var/lib/kubelet; cat /etc/cdi/there.txt; ls -l /dev/gpu0; echo up; while :; do sleep 0.1; done"
    )
    os.mknod(disk.dev / "gpu0", stat.S_IFCHR | 0o600, os.makedev(195, 0))
    (disk.static_cdi / "there.txt").write_text("seen\n")
    child = machines[1].run("visitor", ["sh", "-c", script], ready=lambda: "up" in log.read_text())
    assert (disk.cdi / "here.txt").read_text() == "node-b\n"
    assert Path(f"/proc/{machines[1].pid_of(child)}/comm").read_text() == "sh\n"
    child.stop()
    assert child.status == 3
    words = log.read_text().split()
    assert {"device-plugins", "pod-resources", "seen", "crw-------", "/dev/gpu0"} <= set(words)
    assert not Path("/dev/gpu0").exists()
    assert words[-1] == "bye"


def test_a_reboot_kills_every_container_and_the_kubelet_restarts_them(machines: Machines, kube: Kube) -> None:
    machine = machines[1]
    kube.create(real(pod("back", {}), "node-b", script="echo START=$(cat /proc/sys/kernel/random/uuid)"))
    (before,), first, boot = running(machine, "back"), printed_env(machine, "back"), boot_id(kube, "node-b")
    visitor = machine.run("sleeper", ["sleep", "1000"])
    machine.disk.cdi.mkdir(exist_ok=True)
    for file in (machine.disk.cdi / "a.json", machine.disk.checkpoint, machine.disk.device_plugins / "x.sock"):
        file.touch()
    machine.shut_down()
    assert not visitor.alive
    assert machine.disk.checkpoint.exists()
    machine.boot()
    assert not machine.disk.cdi.exists()
    assert not (machine.disk.device_plugins / "x.sock").exists()
    wait_until(lambda: started_after(machine, before), 30, "the container is restarted", [machine.kubelet])
    assert printed_env(machine, "back") != first
    assert boot_id(kube, "node-b") != boot
    wait_until(lambda: restarts(kube, "back") == 1, 10, "the restart is counted")


def boot_id(kube: Kube, node: str) -> str:
    return str(kube.get("Node", node)["status"]["nodeInfo"]["bootID"])


def restarts(kube: Kube, name: str) -> int:
    manifest: Manifest = kube.get("Pod", name)
    return int(manifest["status"]["containerStatuses"][0]["restartCount"])


# --- nothing is left behind


def traces(machine: str = "") -> dict[str, object]:
    """The state of the host that a machine could change."""
    places = [*OWN.values(), *(place for place in ("/run/netns", "/opt", "/usr/libexec") if Path(place).is_dir())]
    groups = (path for hierarchy in cgroups.hierarchies() for path in hierarchy.glob(f"*{machine}*"))
    return {
        "mounts": Path("/proc/self/mountinfo").read_text(),
        "links": sorted(os.listdir("/sys/class/net")),
        "files": {place: sorted(os.listdir(place)) for place in places},
        "kernel": {file: Path("/proc", file).read_text() for file in TUNED},
        "cgroups": sorted(str(path) for path in groups),
    }


def family(pids: list[int]) -> list[int]:
    """These processes and all their descendants."""
    children = [file for pid in pids for file in Path(f"/proc/{pid}/task").glob("*/children")]  # a list per thread
    below = [int(word) for file in children for word in file.read_text().split()]
    return [*pids, *family(below)] if below else pids


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_nothing_is_left_of_a_machine(control_plane: ControlPlane, node_programs: NodePrograms, kube: Kube) -> None:
    before, children = traces("node-c"), len(control_plane.children)
    with Machine(control_plane, "node-c") as machine:
        machine.run("sleeper", ["sleep", "1000"])
        kube.create(real(pod("left", {}), "node-c"))
        (left,) = running(machine, "left")
        pids = family([child.pid for child in control_plane.children[children:] if child.pid])
        commands = {Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids}
        assert {"kubelet", "containerd", "containerd-shim", "sh", "sleep"} <= commands
        assert traces("node-c")["cgroups"] != before["cgroups"]
        assert (machine.disk.bundles / left.id).is_dir()
    assert not [pid for pid in pids if alive(pid)]
    assert traces("node-c") == before
    assert not machine.disk.folder.exists()
    assert not kube.find("Node", "node-c")
    assert not kube.find("Pod", "left")
    assert len(control_plane.children) == children


HOLDER = """
import time
from tests.e2e.control_plane import ControlPlane
from tests.e2e.machines import Machine
from tests.e2e.pods import pod, real
from tests.e2e.processes import wait_until
from tests.e2e.programs import programs
with ControlPlane(programs()) as plane, Machine(plane, "node-k") as machine:
    plane.kube.create(real(pod("left", {}), "node-k"))
    wait_until(machine.containers, 30, "a container")
    print(plane.folder.name, flush=True)
    time.sleep(300)
"""


def test_the_machines_of_a_killed_run_are_removed(control_plane: ControlPlane, node_programs: NodePrograms) -> None:
    before = traces("node-k")
    with subprocess.Popen([sys.executable, "-c", HOLDER], cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout
        group = cgroups.group_name(run.stdout.readline().strip(), "node-k")
        pids = family([run.pid])
        run.kill()
    assert len(pids) > 10  # programs of the control plane, of the machine and of its container
    wait_until(lambda: not [pid for pid in pids if alive(pid)], 10, "its processes are gone")
    left = {key: value for key, value in traces("node-k").items() if key != "cgroups"}
    assert left == {key: value for key, value in before.items() if key != "cgroups"}
    assert any((hierarchy / group).exists() for hierarchy in cgroups.hierarchies())
    cgroups.sweep(lambda name: name not in group)  # as the next machine does
    assert traces("node-k") == before


# --- Debian's packages


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        pytest.param("", "`apt-get` is not installed", id="no-apt"),
        pytest.param("echo 'E: no such package' >&2; exit 100", "`apt-get` failed.*no such package", id="no-network"),
    ],
)
def test_packages_that_cannot_be_fetched_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    tools, kept = tmp_path / "bin", tmp_path / "cache"
    tools.mkdir()
    if script:
        (tools / "apt-get").write_text(f"#!/bin/sh\n{script}\n")
        (tools / "apt-get").chmod(0o755)
    monkeypatch.setenv("GPUTILE_E2E_CACHE", str(kept))
    monkeypatch.setenv("PATH", str(tools))
    reports: list[str] = []
    with pytest.raises(Unavailable, match=reason):
        fetched(reports.append, PACKAGES)
    assert all(package in reports[0] for package in PACKAGES)
    assert [it.name for it in kept.iterdir()] == ["build.lock"]
