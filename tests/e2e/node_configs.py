"""The configurations of the kubelet, containerd and the network plugin of one machine, as values.

Pure; paths are those inside the machine, where everything is at its usual place.
"""

from pathlib import Path

from tests.e2e.api import Manifest
from tests.e2e.images import IMAGE

SOCKET = "/run/containerd/containerd.sock"
NEVER_EVICT = ("memory.available", "nodefs.available", "nodefs.inodesFree", "imagefs.available", "imagefs.inodesFree")


def kubelet_config(client_ca: Path, cgroup: str, port: int, health_port: int) -> Manifest:
    """A KubeletConfiguration v1beta1 for a small shared host: quick to report; it never evicts nor removes images."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": "127.0.0.1",
        "port": port,
        "healthzPort": health_port,
        "readOnlyPort": 0,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": False},
            "x509": {"clientCAFile": str(client_ca)},
        },
        "authorization": {"mode": "AlwaysAllow"},
        "containerRuntimeEndpoint": f"unix://{SOCKET}",
        # Without cgroupsPerQOS the groups of containers would be in /k8s.io, regardless of cgroupRoot.
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": True,
        "cgroupRoot": f"/{cgroup}",
        "enforceNodeAllocatable": [],
        "failCgroupV1": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,  # below that needs CAP_SYS_RESOURCE
        "localStorageCapacityIsolation": False,
        "makeIPTablesUtilChains": False,
        "resolvConf": "",
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",  # else below /usr/libexec
        "maxPods": 250,
        "kubeAPIQPS": 500,
        "kubeAPIBurst": 1000,
        "eventRecordQPS": 500,  # 0 should mean no limit, and is five per second: Events of forty pods take a minute
        "eventBurst": 1000,
        "nodeStatusUpdateFrequency": "1s",  # a device plugin's capacity is seen that soon; the default is 10 s
        "nodeStatusReportFrequency": "10s",
        "crashLoopBackOff": {"maxContainerRestartPeriod": "2s"},  # and not 10 s at once and 300 s later
        "evictionHard": dict.fromkeys(NEVER_EVICT, "0%"),
        "imageGCHighThresholdPercent": 100,  # off
        "shutdownGracePeriod": "0s",
    }


def containerd_config(runc: Path, plugins: Path, networks: Path) -> str:
    """TOML, version 3. The `native` snapshotter copies: slower than overlayfs, and works on every file system."""
    cri = "plugins.'io.containerd.cri.v1"
    return f"""\
version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.nri.v1.nri"]

[grpc]
address = "{SOCKET}"

[{cri}.images']
snapshotter = "native"

[{cri}.images'.pinned_images]
sandbox = "{IMAGE}"

[{cri}.runtime']
enable_cdi = true
cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
restrict_oom_score_adj = true

[{cri}.runtime'.cni]
bin_dirs = ["{plugins}"]
conf_dir = "{networks}"

[{cri}.runtime'.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[{cri}.runtime'.containerd.runtimes.runc.options]
BinaryName = "{runc}"
SystemdCgroup = false
"""


def network_config(number: int) -> Manifest:
    """A bridge in the machine's own network namespace; each machine has its address range, reset at a reboot."""
    addresses = {
        "type": "host-local",
        "dataDir": "/run/cni",
        "ranges": [[{"subnet": f"10.244.{number % 256}.0/24"}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "ipMasq": False, "ipam": addresses}
    return {"cniVersion": "1.0.0", "name": "e2e", "plugins": [bridge]}
