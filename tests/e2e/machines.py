"""A real node on this machine: a kubelet with its own containerd, its own disk and its own namespaces.

Room:  each machine has a process 1 (spaces.py). When that ends, however it ends, the kernel ends all that ran there,
       containers and shims too, and takes mounts, bridges and network namespaces along. containerd and the pods have
       a network of their own; the kubelet and what `run` starts use the host's, to reach the API server on 127.0.0.1.
Door:  `with Machine(plane, "node-a") as machine:`; then `run`, `logs`, `containers`, `inside`, `restart_kubelet`,
       `kill_kubelet`, `stop_containerd`, `reboot`, and `machine.disk` for its files. Pods: see `pods.real`.
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

SPACES = (sys.executable, "-ISs", str(Path(__file__).with_name("spaces.py")))
HOST_NETWORK, OWN_NETWORK = "uts,pid,mnt", "net,uts,pid,mnt"
NOT_READY = "node.kubernetes.io/not-ready"
_numbers = itertools.count(1)


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """A container that runs, and what its runtime was told."""

    id: str
    pid: int  # inside the machine
    namespace: str
    pod: str
    pod_uid: str
    name: str
    env: dict[str, str]
    spec: Manifest  # of the OCI runtime: mounts, devices, hooks


class Machine:
    """
    off --boot--> on --shut_down--> off         reboot() is both; `with` boots, and shuts down at its end
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
        with ExitStack() as stack:  # what fails or is interrupted half-way is undone
            stack.callback(self._remove_disk)
            stack.callback(self._leave_cluster)
            stack.callback(self.shut_down)
            self._install()
            self.boot()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stack.close()
        if kind is None:  # else a report is about to show the ends of their logs
            self.plane.forget(self._children.values())

    # --- power

    def boot(self, kubelet: bool = True) -> None:
        """Process 1, containerd and, unless told otherwise, kubelet; returns when the node has said Ready."""
        self.disk.start_boot()
        cgroups.make(self._cgroup)
        argv = ["new", self.name, *self.disk.binds()]
        self._begin("machine", [*SPACES, *argv], ready=(self.disk.run / "booted").exists)
        self.start_containerd()
        if kubelet:
            self.start_kubelet()

    def shut_down(self) -> None:
        """Programs and kubelet are asked to stop, in that order; the rest is cut off, as the end of a machine does."""
        for name in [name for name in reversed(self._children) if name not in ("machine", "containerd")]:
            self._children[name].stop(grace=5)
        for name in ("containerd", "machine"):  # process 1 ends when all others of the machine are gone
            if name in self._children:
                self._children[name].stop(grace=5)
        cgroups.remove(self._cgroup)

    def reboot(self) -> None:
        """All containers gone, /run empty; what `run` started is stopped and stays so."""
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
        """Start any program on this machine, with the host's network; see `ControlPlane.run`.

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
        """Returns when it has reported the node Ready."""
        began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.run("kubelet", self._kubelet_argv)
        wait_until(lambda: self._ready_since(began), READY, f"{self.name} Ready", [self.kubelet])
        self._admit()

    def kill_kubelet(self) -> None:
        """kill -9; the containers go on."""
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
        """The containers go on: their shims hold them."""
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

    def _entering(self, argv: Sequence[str | Path], spaces: str = HOST_NETWORK) -> list[str | Path]:
        """The command that runs `argv` on this machine."""
        return [*SPACES, "enter", str(self._children["machine"].pid), spaces, *argv]

    def _containerd_listens(self) -> bool:
        """Asked through /proc: the path of a socket may have 107 letters, and that of a run's folder may be longer."""
        with socket.socket(socket.AF_UNIX) as door:
            door.connect(f"/proc/{self._children['machine'].pid}/root{SOCKET}")
        return True

    # --- what it runs

    def containers(self) -> list[Container]:
        """Those that run now, without the pods' sandboxes."""
        rows = [line.split() for line in self.ctr("tasks", "list").splitlines()[1:]]
        found = [self._container(row[0], int(row[1])) for row in rows if row[2] == "RUNNING"]
        return [container for container in found if container is not None]

    def _container(self, task: str, pid: int) -> Container | None:
        """None for a sandbox, and for one that went while we looked."""
        try:
            spec = json.loads((self.disk.bundles / task / "config.json").read_bytes())
        except FileNotFoundError:
            return None
        notes = {key.rpartition("cri.")[2]: value for key, value in spec.get("annotations", {}).items()}
        if notes.get("container-type") != "container":
            return None
        return Container(
            id=task,
            pid=pid,
            namespace=notes["sandbox-namespace"],
            pod=notes["sandbox-name"],
            pod_uid=notes["sandbox-uid"],
            name=notes["container-name"],
            env=dict(pair.split("=", 1) for pair in spec["process"]["env"]),
            spec=spec,
        )

    def inside(self, pod: str, container: str, *argv: str, namespace: str = "default") -> str:
        """What a command prints that is run inside a container."""
        wanted = (namespace, pod, container)
        running = self.containers()
        found = [it.id for it in running if (it.namespace, it.pod, it.name) == wanted]
        if not found:
            there = ", ".join(f"{it.namespace}/{it.pod}/{it.name}" for it in running) or "none"
            raise AssertionError(f"no container {'/'.join(wanted)} runs on {self.name}; there are: {there}")
        return self.ctr("tasks", "exec", "--exec-id", secrets.token_hex(8), found[0], *argv)

    def logs(self, pod: str, container: str = "main", namespace: str = "default") -> str:
        """What a container printed since it last started; empty if there is no such container (yet)."""
        files = self.disk.pod_logs.glob(f"{namespace}_{pod}_*/{container}/*.log")
        newest = max(files, key=lambda file: file.stat().st_mtime_ns, default=None)
        lines = newest.read_text(errors="replace").splitlines() if newest else []
        return "".join(_printed(line) for line in lines)

    def ctr(self, *words: str) -> str:
        """What containerd's own command prints."""
        argv = self._entering([self._programs.ctr, "--namespace", "k8s.io", *words])
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            said = f"{done.stderr.strip()} {done.stdout.strip()}"
            raise AssertionError(f"`ctr {' '.join(words)}` on {self.name} failed ({done.returncode}): {said}")
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
        """Whether the kubelet said Ready after this second."""
        node = self.plane.kube.find("Node", self.name) or {"status": {}}
        said = [it for it in node["status"].get("conditions", []) if it["type"] == "Ready"]
        return any(it["status"] == "True" and it["lastHeartbeatTime"] > moment for it in said)

    def _admit(self) -> None:
        """Admission taints every new node; the controller that would take the taint away may not run."""
        taints = self.plane.kube.get("Node", self.name)["spec"].get("taints") or []
        left = [taint for taint in taints if taint["key"] != NOT_READY]
        if left != taints:
            self.plane.kube.patch("Node", self.name, {"spec": {"taints": left or None}})

    def _leave_cluster(self) -> None:
        """Its pods, without grace, and its Node: nobody is left to end them."""
        kube = self.plane.kube
        with suppress(OSError, HTTPException):  # no API server: nothing to leave
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
