"""A real node on the host of the tests: a kubelet with its own containerd, disk and Linux namespaces.

Each machine has a process 1 (linux_namespaces.py). When it exits, the kernel kills every process of the machine,
containers and shims included, and removes its mounts, bridges and network namespaces: nothing may outlive it.
containerd and the pods have a network namespace of their own; the kubelet and the programs of `run` use the host's, to
reach the API server on 127.0.0.1.
"""

import itertools
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from http.client import HTTPException
from pathlib import Path

import msgspec

from tests.e2e import cgroups
from tests.e2e.api import Manifest
from tests.e2e.configs import write
from tests.e2e.control_plane import READY, ControlPlane
from tests.e2e.disks import Disk
from tests.e2e.folders import KEEP, owned
from tests.e2e.images import write_image
from tests.e2e.node_configs import SOCKET, containerd_config, kubelet_config, network_config
from tests.e2e.node_programs import node_programs
from tests.e2e.processes import Child, free_port, wait_until

NAMESPACES = (sys.executable, "-ISs", str(Path(__file__).with_name("linux_namespaces.py")))
HOST_NETWORK, OWN_NETWORK = "uts,pid,mnt", "net,uts,pid,mnt"
NOT_READY = "node.kubernetes.io/not-ready"
_numbers = itertools.count(1)


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """A running container, with the OCI spec that its runtime received."""

    id: str
    pid: int  # inside the machine
    namespace: str
    pod: str
    pod_uid: str
    name: str
    env: dict[str, str]
    spec: Manifest  # of the OCI runtime: mounts, devices, hooks


class Machine:
    """A real node: it boots when the `with` begins and shuts down at its end.

    off --boot--> on --shut_down--> off         reboot() is both
    """

    def __init__(
        self,
        plane: ControlPlane,
        name: str,
        *,
        labels: Mapping[str, str] | None = None,
        kubelet: Mapping[str, object] | None = None,
    ) -> None:
        """`labels` of the Node; `kubelet` adds to or replaces fields of its KubeletConfiguration."""
        self.plane, self.name = plane, name
        self.disk = Disk(plane.folder / name)
        self._labels, self._more = dict(labels or {}), dict(kubelet or {})
        self._cgroup = cgroups.group_name(plane.folder.name, name)
        self._children: dict[str, Child] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Machine":
        self._programs = node_programs()
        cgroups.sweep(lambda run: owned(self.plane.folder.parent / run))
        with ExitStack() as stack:  # a failed or interrupted start is undone
            stack.callback(self._remove_disk)
            stack.callback(self._leave_cluster)
            stack.callback(self.shut_down)
            self._install()
            self.boot()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stack.close()
        if kind is None:  # else the failure report shows the ends of their logs
            self.plane.forget(self._children.values())

    # --- power

    def boot(self, kubelet: bool = True) -> None:
        """Start process 1, containerd and, by default, the kubelet; return when the node is Ready."""
        self.disk.start_boot()
        cgroups.make(self._cgroup)
        argv = ["new", self.name, *self.disk.binds()]
        self._begin("machine", [*NAMESPACES, *argv], ready=(self.disk.run / "booted").exists)
        self.start_containerd()
        if kubelet:
            self.start_kubelet()

    def shut_down(self) -> None:
        """Stop the programs and the kubelet, in that order; the end of process 1 kills the rest."""
        for name in [name for name in reversed(self._children) if name not in ("machine", "containerd")]:
            self._children[name].stop(grace=5)
        for name in ("containerd", "machine"):  # process 1 exits when all other processes of the machine are gone
            if name in self._children:
                self._children[name].stop(grace=5)
        cgroups.remove(self._cgroup)

    def reboot(self) -> None:
        """Kill all containers and empty /run; programs of `run` are stopped and not started again."""
        self.shut_down()
        self.boot()

    # --- programs

    def run(
        self,
        name: str,
        argv: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        ready: Callable[[], object] | None = None,
        seconds: float = READY,
    ) -> Child:
        """Start a program on this machine, with the host's network; see `ControlPlane.run`.

        `Child.pid` is of the process that waits for it; `pid_of` gives its own.
        """
        return self._begin(name, self._entering(argv), env, ready, seconds)

    def pid_of(self, child: Child) -> int:
        """The program's own process, as the host numbers it."""
        return int(Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()[0])

    @property
    def kubelet(self) -> Child:
        return self._children["kubelet"]

    @property
    def containerd(self) -> Child:
        return self._children["containerd"]

    def start_kubelet(self) -> None:
        """Start the kubelet, and return when it has reported the node Ready."""
        began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.run("kubelet", self._kubelet_argv)
        wait_until(lambda: self._ready_since(began), READY, f"{self.name} Ready", [self.kubelet])
        self._admit()

    def kill_kubelet(self) -> None:
        """kill -9; the containers keep running."""
        self.kubelet.kill()

    def restart_kubelet(self, kill: bool = False) -> None:
        if kill:
            self.kubelet.kill()
        self.kubelet.stop()
        self.start_kubelet()

    def start_containerd(self) -> None:
        folder = self._programs.containerd.parent
        argv: list[str | Path] = [self._programs.containerd, f"--config={self.disk.folder / 'containerd.toml'}"]
        path = {"PATH": f"{folder}:/usr/sbin:/usr/bin:/sbin:/bin"}
        self._begin("containerd", self._entering(argv, OWN_NETWORK), path, self._containerd_listens)
        if not self.ctr("images", "list", "--quiet").strip():
            archive = write_image(self._programs.busybox, self.disk.folder / "image.tar")
            self.ctr("images", "import", "--local", "--snapshotter", "native", str(archive))

    def stop_containerd(self, kill: bool = False) -> None:
        """Stop containerd; the containers keep running below their shims."""
        if kill:
            self.containerd.kill()
        self.containerd.stop()

    def _begin(
        self,
        name: str,
        argv: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        ready: Callable[[], object] | None = None,
        seconds: float = READY,
    ) -> Child:
        child = self._children[name] = self.plane.run(f"{self.name}-{name}", argv, env)
        if ready:
            wait_until(ready, seconds, f"{child.name} ready", [child])
        return child

    def _entering(self, argv: Sequence[str | Path], namespaces: str = HOST_NETWORK) -> list[str | Path]:
        """The command that runs `argv` on this machine."""
        return [*NAMESPACES, "enter", str(self._children["machine"].pid), namespaces, *argv]

    def _containerd_listens(self) -> bool:
        """Connect through /proc: a socket path has at most 107 characters, and that of a run's folder may be longer."""
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(f"/proc/{self._children['machine'].pid}/root{SOCKET}")
        return True

    # --- containers

    def containers(self) -> list[Container]:
        """The running containers, without the pods' sandboxes."""
        rows = [line.split() for line in self.ctr("tasks", "list").splitlines()[1:]]
        containers = [self._container(row[0], int(row[1])) for row in rows if row[2] == "RUNNING"]
        return [container for container in containers if container is not None]

    def _container(self, task: str, pid: int) -> Container | None:
        """None for a sandbox, and for a container that is already gone."""
        try:
            spec = json.loads((self.disk.bundles / task / "config.json").read_bytes())
        except FileNotFoundError:
            return None
        annotations = {key.rpartition("cri.")[2]: value for key, value in spec.get("annotations", {}).items()}
        if annotations.get("container-type") != "container":
            return None
        return Container(
            id=task,
            pid=pid,
            namespace=annotations["sandbox-namespace"],
            pod=annotations["sandbox-name"],
            pod_uid=annotations["sandbox-uid"],
            name=annotations["container-name"],
            env=dict(pair.split("=", 1) for pair in spec["process"]["env"]),
            spec=spec,
        )

    def inside(self, pod: str, container: str, *argv: str, namespace: str = "default") -> str:
        """The output of a command that runs inside a container."""
        wanted = (namespace, pod, container)
        running = self.containers()
        ids = [it.id for it in running if (it.namespace, it.pod, it.name) == wanted]
        if not ids:
            names = ", ".join(f"{it.namespace}/{it.pod}/{it.name}" for it in running) or "none"
            raise AssertionError(f"no container {'/'.join(wanted)} runs on {self.name}; running: {names}")
        return self.ctr("tasks", "exec", "--exec-id", secrets.token_hex(8), ids[0], *argv)

    def logs(self, pod: str, container: str = "main", namespace: str = "default") -> str:
        """The output of a container since its last start; empty if there is no such container (yet)."""
        files = self.disk.pod_logs.glob(f"{namespace}_{pod}_*/{container}/*.log")
        newest = max(files, key=lambda file: file.stat().st_mtime_ns, default=None)
        lines = newest.read_text(errors="replace").splitlines() if newest else []
        return "".join(_printed(line) for line in lines)

    def ctr(self, *words: str) -> str:
        """The output of `ctr`, containerd's own command."""
        argv = self._entering([self._programs.ctr, "--namespace", "k8s.io", *words])
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            output = f"{done.stderr.strip()} {done.stdout.strip()}"
            raise AssertionError(f"`ctr {' '.join(words)}` on {self.name} failed ({done.returncode}): {output}")
        return done.stdout

    # --- its files, and its place in the cluster

    def _install(self) -> None:
        plane, disk = self.plane, self.disk
        disk.format(self.name)
        networks = disk.folder / "networks"
        networks.mkdir()
        (networks / "e2e.conflist").write_text(json.dumps(network_config(next(_numbers))))
        plugins = self._programs.containerd.parent
        (disk.folder / "containerd.toml").write_text(containerd_config(self._programs.runc, plugins, networks))
        config = kubelet_config(plane.authority.ca, self._cgroup, free_port(), free_port())
        write(disk.folder / "kubelet.yaml", {**config, **self._more})
        client = plane.authority.client(f"system:node:{self.name}", ["system:nodes"])
        labels = ",".join(f"{key}={value}" for key, value in self._labels.items())
        self._kubelet_argv: list[str | Path] = [
            self._programs.kubelet,
            f"--config={disk.folder / 'kubelet.yaml'}",
            f"--kubeconfig={plane.kubeconfig(self.name, client=client)}",
            "--root-dir=/var/lib/kubelet",
            "--cert-dir=/var/lib/kubelet/pki",
            f"--hostname-override={self.name}",
            *([f"--node-labels={labels}"] if labels else []),
            "--v=2",
        ]

    def _ready_since(self, moment: str) -> bool:
        """Whether the kubelet has reported Ready after this second."""
        node = self.plane.kube.find("Node", self.name) or {"status": {}}
        conditions = [it for it in node["status"].get("conditions", []) if it["type"] == "Ready"]
        return any(it["status"] == "True" and it["lastHeartbeatTime"] > moment for it in conditions)

    def _admit(self) -> None:
        """Remove the not-ready taint that admission adds to every new node: its controller may not run."""
        taints = self.plane.kube.get("Node", self.name)["spec"].get("taints") or []
        left = [taint for taint in taints if taint["key"] != NOT_READY]
        if left != taints:
            self.plane.kube.patch("Node", self.name, {"spec": {"taints": left or None}})

    def _leave_cluster(self) -> None:
        """Delete its pods, without grace period, and its Node: no kubelet is left to terminate them."""
        kube = self.plane.kube
        with suppress(OSError, HTTPException):  # the API server may be down already
            for pod in kube.list("Pod", fields=f"spec.nodeName={self.name}"):
                kube.delete("Pod", pod["metadata"]["name"], pod["metadata"]["namespace"], grace=0)
            for kind, namespace in (("Node", "default"), ("Lease", "kube-node-lease")):
                if kube.find(kind, self.name, namespace):
                    kube.delete(kind, self.name, namespace)

    def _remove_disk(self) -> None:
        if os.environ.get(KEEP) != "1":
            shutil.rmtree(self.disk.folder, ignore_errors=True)


def _printed(line: str) -> str:
    """A line of a CRI log is: time, stream, F or P (more of the line follows), text."""
    _, _, whole, text = (*line.split(" ", 3), "")[:4]
    return f"{text}\n" if whole == "F" else text
