"""Settings of the agent process."""

from typing import Literal

import msgspec

from gputile.dialects import registry
from gputile.dialects.settings import DialectSettings
from gputile.http.server import host_and_port
from gputile.kube.client import ClientSettings
from gputile.model.errors import InputError

ABOVE_ZERO = (
    "poll_interval",
    "grant_timeout",
    "heartbeat.renew",
    "heartbeat.duration",
    "health.probation",
    "api.request_timeout",
    "api.watch_timeout",
    "api.watch_idle_timeout",
)
LONGEST_GRANT_TIMEOUT = 25.0  # seconds
Isolation = Literal["none", "devices", "cdi", "mps", "preload"]
ISOLATIONS: tuple[Isolation, ...] = ("none", "devices", "cdi", "mps", "preload")


class FolderSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Paths, as the agent sees them."""

    plugins: str = "/var/lib/kubelet/device-plugins"
    """The kubelet's folder of device-plugin sockets."""

    cdi: str = "/var/run/cdi"
    """A folder from which the container runtime reads CDI specs; the agent writes its specs there."""

    nvidia_cdi: tuple[str, ...] = ("/etc/cdi", "/var/run/cdi")
    """Folders of NVIDIA's own CDI specs, for the isolation `cdi`."""

    dev: str = "/dev"
    """Folder of the GPUs' device nodes, for the isolation `devices`."""

    driver: str = "/usr/local/nvidia"
    """Folder of the driver's libraries and tools on the host, for the isolation `devices`; mounted at the same path."""

    mps: str = "/tmp/nvidia-mps"
    """The pipe folder of the MPS control daemon on the host, for the isolation `mps`."""

    preload: str = "/usr/local/vgpu/libvgpu.so"
    """A library that limits memory and cores, installed on the host by its own project, for the isolation `preload`."""


class HeartbeatSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Lease that the agent renews as its heartbeat."""

    namespace: str = "gputile-agents"
    """Namespace of the Leases, one per node."""

    renew: float = 3.0
    """Seconds between renewals."""

    duration: float = 9.0
    """Seconds without a renewal after which the scheduler stops using the node."""


class AgentTlsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS of /healthz, /readyz and /metrics."""

    certificate: str = ""
    """File with the certificate (PEM), read again when it changes. Empty: plain HTTP."""

    key: str = ""
    """File with its key."""


class HealthSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a GPU counts as unhealthy."""

    probation: float = 300.0
    """Seconds without a new fault after which an unhealthy GPU is used again."""

    ignore_xids: tuple[int, ...] = ()
    """XID numbers that never make a GPU unhealthy, besides those that applications cause."""

    fatal_xids: tuple[int, ...] = ()
    """XID numbers that make a GPU unhealthy, besides those that hardware causes."""


API = ClientSettings(connections=10, watch_timeout=20, watch_idle_timeout=24)
"""A stale watch must be noticed before the scheduler takes a missing orphan for an ended one: see
docs/decisions/0014-force-deleted-pods.md."""


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of the agent process."""

    node: str = ""
    """Name of the node. In the DaemonSet it is NODE_NAME of the downward API."""

    serve: tuple[str, ...] = ("gputile",)
    """Dialects whose resources the agent registers, by their names in docs/dialects.md."""

    isolation: Isolation = "none"
    """How containers are limited to their GPUs, unless the pod chooses another isolation: see docs/agent.md."""

    pods_choose_isolation: bool = False
    """Whether a pod may choose any isolation by its annotation `gputile.io/isolation`, also a weaker one. A pod may
    always choose a stronger one; docs/agent.md has the order."""

    cdi: Literal["auto", "yes", "no"] = "auto"
    """Whether the container runtime supports CDI. auto: query it at `runtime`; if it does not answer, no."""

    runtime: str = "/run/containerd/containerd.sock"
    """CRI socket of the container runtime, queried for `cdi: auto` and for the running containers. The agent mounts
    only this socket."""

    grant_timeout: float = 10.0
    """Seconds that the start of a container waits for its pod's grant; then the kubelet retries."""

    poll_interval: float = 5.0
    """Seconds between two polls of the GPU driver."""

    report_use: bool = False
    """Query the driver for what containers use of the GPUs, publish it on the Lease and in /metrics, and write an Event
    on pods that use more than granted. Needs the host's PIDs (hostPID)."""

    hami_metrics: bool = False
    """Also publish the metrics of `report_use` under HAMi's names, for dashboards made for HAMi."""

    listen: str = "127.0.0.1:12346"
    """Address and port of /healthz, /readyz and /metrics."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The lowest level of log lines that are written."""

    folders: FolderSettings = msgspec.field(default_factory=FolderSettings)
    heartbeat: HeartbeatSettings = msgspec.field(default_factory=HeartbeatSettings)
    health: HealthSettings = msgspec.field(default_factory=HealthSettings)
    tls: AgentTlsSettings = msgspec.field(default_factory=AgentTlsSettings)
    dialects: DialectSettings = msgspec.field(default_factory=DialectSettings)
    api: ClientSettings = API

    @property
    def host_and_port(self) -> tuple[str, int]:
        return host_and_port(self.listen)


def checked(settings: AgentSettings) -> AgentSettings:
    """The settings, after the checks that types cannot express. Raises `InputError`."""
    host, _, port = settings.listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InputError(f"setting `listen`: invalid address {settings.listen!r}; use HOST:PORT, such as 0.0.0.0:12346")
    if bool(settings.tls.certificate) != bool(settings.tls.key):
        raise InputError("settings `tls.certificate` and `tls.key`: only one is set; set both or neither")
    if settings.grant_timeout > LONGEST_GRANT_TIMEOUT:
        raise InputError(
            f"setting `grant_timeout`: {settings.grant_timeout:g} is too long; use at most {LONGEST_GRANT_TIMEOUT:g}, "
            "because a kubelet waits 30 seconds for PreStartContainer"
        )
    known = registry.names()
    unknown = [dialect for dialect in settings.serve if dialect not in known]
    if unknown:
        raise InputError(f"setting `serve`: unknown dialect {', '.join(unknown)}; use some of {', '.join(known)}")
    if not settings.serve:
        raise InputError(f"setting `serve`: the list is empty; use some of {', '.join(known)}")
    if settings.heartbeat.duration < 2 * settings.heartbeat.renew:
        raise InputError(
            "setting `heartbeat.duration`: must be at least twice `heartbeat.renew`; otherwise the node flaps"
        )
    return settings
