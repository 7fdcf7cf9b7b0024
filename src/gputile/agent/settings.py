"""Settings of the agent process."""

from typing import Literal

import msgspec

from gputile.dialects.device_resources import SERVED
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
    """Where things are, as the agent sees them."""

    plugins: str = "/var/lib/kubelet/device-plugins"
    """The kubelet's folder of device plugins."""

    cdi: str = "/var/run/cdi"
    """Where the runtime looks for CDI specs and we may write ours."""

    nvidia_cdi: tuple[str, ...] = ("/etc/cdi", "/var/run/cdi")
    """Where NVIDIA's own CDI specs are, for the isolation `cdi`."""

    dev: str = "/dev"
    """Where the cards' device nodes are, for the isolation `devices`."""

    driver: str = "/usr/local/nvidia"
    """The driver's libraries and tools on the host, for the isolation `devices`; mounted at the same place."""

    mps: str = "/tmp/nvidia-mps"
    """The pipe folder of the MPS control daemon on the host, for the isolation `mps`."""

    preload: str = "/usr/local/vgpu/libvgpu.so"
    """A library that limits memory and cores, installed on the host by its own project, for the isolation `preload`."""


class HeartbeatSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Lease that says that the agent lives."""

    namespace: str = "gputile-agents"
    """Where the Leases are, one per node."""

    renew: float = 3.0
    """Seconds between renewals."""

    duration: float = 9.0
    """Seconds without a renewal after which the scheduler uses the node no more."""


class AgentTlsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS of /healthz, /readyz and /metrics."""

    certificate: str = ""
    """File with our certificate (PEM), read again when it changes. Empty: plain HTTP."""

    key: str = ""
    """File with its key."""


class HealthSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a card is out of use."""

    probation: float = 300.0
    """Seconds that a card must be without a new fault before it is used again."""

    ignore_xids: tuple[int, ...] = ()
    """XID numbers that never mark a card, besides those that applications cause."""

    fatal_xids: tuple[int, ...] = ()
    """XID numbers that mark a card, besides those that hardware causes."""


API = ClientSettings(connections=10, watch_timeout=20, watch_idle_timeout=24)
"""A watch that has fallen silent must be noticed before the scheduler takes our silence for an answer: see
docs/decisions/0014-force-deleted-pods.md."""


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    node: str = ""
    """The node's name. In the DaemonSet it is NODE_NAME of the downward API."""

    serve: tuple[str, ...] = ("gputile",)
    """Dialects whose resources the node offers: gputile, gpushare, nano, vcuda, nvidia, hami, vgpu."""

    isolation: Isolation = "none"
    """How a container is kept to its card, unless the pod says otherwise: see docs/agent.md."""

    pods_choose_isolation: bool = False
    """Whether a pod may choose any isolation by its annotation `gputile.io/isolation`, also a weaker one. A stronger
    one is always its to choose; docs/agent.md has the order."""

    cdi: Literal["auto", "yes", "no"] = "auto"
    """Whether the runtime obeys CDI. auto: ask it at `runtime`; where it cannot be asked, the answer is no."""

    runtime: str = "/run/containerd/containerd.sock"
    """The runtime's CRI socket, asked for `cdi: auto`, and which containers run. The agent mounts this socket alone."""

    grant_timeout: float = 10.0
    """Seconds that a container's start waits for its pod's grant, before the kubelet is told to try again."""

    poll_interval: float = 5.0
    """Seconds between two looks at the cards."""

    report_use: bool = False
    """Ask the driver what each container's processes use of the cards, say it on the Lease and in /metrics, and tell
    pods that take more than they were granted. Needs the host's process numbers (hostPID)."""

    hami_metrics: bool = False
    """Show what `report_use` finds under HAMi's names too, for dashboards made for HAMi."""

    listen: str = "127.0.0.1:12346"
    """Address and port of /healthz, /readyz and /metrics."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """From which level on log lines are written."""

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
    """What types cannot say."""
    host, _, port = settings.listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InputError(f"setting `listen` is {settings.listen!r}; write HOST:PORT, such as 0.0.0.0:12346")
    if bool(settings.tls.certificate) != bool(settings.tls.key):
        raise InputError("settings `tls.certificate` and `tls.key` go together")
    if settings.grant_timeout > LONGEST_GRANT_TIMEOUT:
        raise InputError(
            f"setting `grant_timeout` is at most {LONGEST_GRANT_TIMEOUT:g}: a kubelet waits 30 seconds for a start"
        )
    strange = [name for name in settings.serve if name not in SERVED]
    if strange or not settings.serve:
        raise InputError(f"setting `serve` names {', '.join(strange) or 'nothing'}; write some of {', '.join(SERVED)}")
    if settings.heartbeat.duration < 2 * settings.heartbeat.renew:
        raise InputError("setting `heartbeat.duration` is at least twice `heartbeat.renew`, else a node comes and goes")
    return settings
