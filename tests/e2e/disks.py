"""The disk of one machine of the tests: its /run, /etc, /dev, /var/lib and /var/log, seen from outside.

It is a folder of the run. Inside the machine its parts are bound over the paths that programs use, so the kubelet,
containerd and the agent run as on any node and nothing of the host is written. `format(name)` once, `start_boot()` at
each boot, `binds()` for linux_namespaces.py.
"""

import os
import shutil
import uuid
from pathlib import Path

OWN = {"run": "/run", "etc": "/etc", "dev": "/dev", "lib": "/var/lib", "log": "/var/log"}
OWN_ETC = ("cdi", "hostname", "hosts", "machine-id")
DEVICES = ("console", "full", "fuse", "kmsg", "null", "ptmx", "random", "tty", "urandom", "zero")
DEVICE_LINKS = ("fd", "stdin", "stdout", "stderr")
DEVICE_FOLDERS = ("mqueue", "pts", "shm")
BOOT_ID = "sys/kernel/random/boot_id"
# The kubelet sets these of the kernel, which all machines and the host share: it gets files instead.
TUNED = (
    "sys/kernel/keys/root_maxbytes",
    "sys/kernel/keys/root_maxkeys",
    "sys/kernel/panic",
    "sys/kernel/panic_on_oops",
    "sys/vm/overcommit_memory",
    "sys/vm/panic_on_oom",
)


class Disk:
    """The paths of a machine's disk from outside; the comments have the paths inside."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "run"  # /run and /var/run; empty after a boot
        self.kubelet = folder / "lib" / "kubelet"  # /var/lib/kubelet
        self.device_plugins = self.kubelet / "device-plugins"
        self.checkpoint = self.device_plugins / "kubelet_internal_checkpoint"
        self.pod_resources = self.kubelet / "pod-resources" / "kubelet.sock"
        self.pod_logs = folder / "log" / "pods"  # /var/log/pods
        self.dev = folder / "dev"  # /dev: only the usual ones; a test may make more
        self.cdi = self.run / "cdi"  # /var/run/cdi: missing after a boot, as on any machine
        self.static_cdi = folder / "etc" / "cdi"  # /etc/cdi
        self.containerd_socket = self.run / "containerd" / "containerd.sock"
        self.bundles = self.run / "containerd" / "io.containerd.runtime.v2.task" / "k8s.io"
        self._host_etc, self._proc = folder / "host-etc", folder / "proc"

    def format(self, name: str) -> None:
        for part in (*OWN, "host-etc", "proc", "etc/cdi", "lib/kubelet"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        self._fill_etc(name)
        self._fill_dev()
        for file in TUNED:
            self._kernel(file).write_bytes(Path("/proc", file).read_bytes())

    def _fill_etc(self, name: str) -> None:
        """Link all files of the host (a copy would copy secrets), except a few of its own."""
        etc = self.folder / "etc"
        for entry in os.scandir("/etc"):
            if entry.name not in OWN_ETC:
                target = Path(os.readlink(entry.path)) if entry.is_symlink() else self._host_etc / entry.name
                (etc / entry.name).symlink_to(target)
        (etc / "hostname").write_text(f"{name}\n")
        # The kubelet resolves its own name at each report: with this entry it sends no DNS query.
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n127.0.0.1 {name}\n")
        (etc / "machine-id").write_text(f"{uuid.uuid4().hex}\n")

    def _fill_dev(self) -> None:
        for name in (*DEVICES, *DEVICE_LINKS):
            device = Path("/dev", name)
            if device.is_symlink():
                (self.dev / name).symlink_to(os.readlink(device))
            elif device.exists():
                os.mknod(self.dev / name, device.stat().st_mode, device.stat().st_rdev)
                (self.dev / name).chmod(device.stat().st_mode & 0o777)
        for name in self._device_folders():
            (self.dev / name).mkdir()

    def _device_folders(self) -> list[str]:
        return [name for name in DEVICE_FOLDERS if Path("/dev", name).is_dir()]

    def start_boot(self) -> None:
        """The state at a boot: an empty /run, no sockets, another boot ID; the kubelet's checkpoints stay."""
        shutil.rmtree(self.run)
        self.run.mkdir()
        for socket in self.kubelet.rglob("*.sock"):
            socket.unlink()
        self._kernel(BOOT_ID).write_text(f"{uuid.uuid4()}\n")

    def binds(self) -> list[str]:
        """FROM=TO, in this order."""
        own = [f"{self.folder / part}={place}" for part, place in OWN.items()]
        kernel = [f"{self._kernel(file)}=/proc/{file}" for file in (*TUNED, BOOT_ID)]
        devices = [f"/dev/{name}={self.dev / name}" for name in self._device_folders()]
        return [f"/etc={self._host_etc}=ro", *devices, *own, *kernel]

    def _kernel(self, file: str) -> Path:
        return self._proc / file.replace("/", ".")
