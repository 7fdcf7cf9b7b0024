"""Settings of the scheduler process, collected from the packages that own them, and the checks that types cannot do."""

from difflib import get_close_matches
from typing import Literal

import msgspec

from gputile.dialects.settings import DialectSettings
from gputile.engine.fleet.fleet import KEEP
from gputile.engine.policies.table import POLICIES
from gputile.http.server import host_and_port
from gputile.kube.client import ClientSettings
from gputile.kube.leader_election import LeaseSettings
from gputile.ledger.ledger import LedgerSettings
from gputile.metrics_api.settings import MetricsApiSettings
from gputile.model.errors import InputError
from gputile.model.policies import DEFAULT_POLICY
from gputile.scheduler.quota_watcher import QuotaSettings
from gputile.scheduler.state.agent_liveness import AgentLivenessSettings

ABOVE_ZERO = (
    "filter.keep",
    "body_limit",
    "audit",
    "bind.timeout",
    "bind.attempt",
    "ledger.reserve_ttl",
    "ledger.assume_ttl",
    "tell.per_second",
    "tell.every",
    "preempt.patience",
    "preempt.margin",
    "agents.orphan_grace",
    "leadership.duration",
    "leadership.renew",
    "leadership.retry",
    "api.connections",
    "api.request_timeout",
    "api.page",
    "api.watch_timeout",
    "api.watch_idle_timeout",
    "metrics_api.days",
    "metrics_api.history",
    "metrics_api.authorization_ttl",
)


class FilterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which of the feasible nodes filter returns."""

    keep: int = KEEP
    """How many equally good nodes filter returns at most; kube-scheduler chooses one of them."""

    slack: float = 0.0
    """A node counts as equally good if its score is at most this much below the best score."""

    narrow: bool = True
    """true: return only the best nodes. false: return all feasible nodes; kube-scheduler's own scores choose, and
    `prioritizeVerb` adds ours. That is slower (docs/performance.md), and GPUs are packed less well, because
    kube-scheduler's scores spread pods."""


class BindSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time limits of the bind verb."""

    timeout: float = 4.0
    """Seconds for one bind, including retries. Keep it below kube-scheduler's `httpTimeout` (5 s by default)."""

    attempt: float = 2.0
    """Seconds for one API call of a bind."""


class TlsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Certificates of the extender endpoint."""

    certificate: str = ""
    """File with the server certificate (PEM). Empty: plain HTTP, for trusted networks and tests only."""

    key: str = ""
    """File with the key of the server certificate."""

    client_ca: str = ""
    """File with the CA that signs kube-scheduler's client certificate. Empty: every client may call the verbs."""

    client_names: tuple[str, ...] = ()
    """Names of client certificates that may call the verbs: the common name, or any subject alternative name. Empty:
    every certificate signed by `client_ca`. Name kube-scheduler here if that CA also signs other certificates."""


class TellSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Events about pending pods, and the nudges that requeue them."""

    per_second: float = 5.0
    """Events about pending pods per second, over all pods."""

    every: float = 60.0
    """Minimum seconds between two such Events about one pod; a repeated reason is not written again."""

    nudge: bool = True
    """Requeue a pending pod that fits again by touching it, if kube-scheduler has not retried it within half a
    second."""


class MetricsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which series of the cluster /metrics has: see docs/metrics.md."""

    cards: int = 10_000
    """Largest number of GPUs in the cluster for which /metrics has series per GPU; above it, only per node and per
    model. 0: never per GPU."""

    pods: int = 10_000
    """Largest number of pods with GPUs for which /metrics has series per pod and per container. 0: never per pod."""

    pods_to: Literal["certified", "anyone"] = "certified"
    """Which clients see names of pods and namespaces. certified: only clients with a certificate, if `tls.client_ca`
    is set."""

    hami: bool = False
    """Also export GPUs and pods under HAMi's metric names, for dashboards made for HAMi."""


class PreemptSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When gputile evicts pods of lower priority."""

    own: bool = True
    """Also preempt where kube-scheduler finds no victims: it counts GPUs per node, and a node may have enough in sum
    while the pod fits on no single GPU. false: only answer kube-scheduler's preempt calls."""

    patience: float = 1.0
    """Seconds that kube-scheduler has after a rejection to find victims by itself."""

    margin: float = 10.0
    """Seconds for which a nomination is kept beyond the longest grace period of the evicted pods."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of the scheduler process."""

    listen: str = "127.0.0.1:12345"
    """Address and port of the extender verbs, /healthz, /readyz and /metrics."""

    policy: str = DEFAULT_POLICY
    """How nodes and GPUs are chosen for pods that name no policy: see docs/packing.md."""

    other_agents: Literal["one-at-a-time", "refuse"] = "one-at-a-time"
    """On nodes whose agent is that of gpushare, vcuda, HAMi or vgpu-manager, which guess the pod that an allocation is
    for: bind one pod at a time and wait until it has started, or reject every pod."""

    steer_cpu_pods: bool = False
    """Steer CPU-only pods to nodes where they leave the fewest GPUs without CPU and memory. Needs a second extender in
    kube-scheduler's configuration: see docs/scheduler.md."""

    evict_overlaps: bool = True
    """On a double allocation (possible when a frozen leader's bind arrives late), evict the newer pod and record an
    Event on it; PodDisruptionBudgets are respected. false: only log it."""

    body_limit: int = 64
    """Largest request body in MiB. 5,000 node objects (`nodeCacheCapable: false`) are about 50 MiB."""

    audit: float = 60.0
    """Seconds between two consistency checks of the ledger."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level of log lines that are written."""

    filter: FilterSettings = msgspec.field(default_factory=FilterSettings)
    bind: BindSettings = msgspec.field(default_factory=BindSettings)
    tell: TellSettings = msgspec.field(default_factory=TellSettings)
    metrics: MetricsSettings = msgspec.field(default_factory=MetricsSettings)
    preempt: PreemptSettings = msgspec.field(default_factory=PreemptSettings)
    quota: QuotaSettings = msgspec.field(default_factory=QuotaSettings)
    agents: AgentLivenessSettings = msgspec.field(default_factory=AgentLivenessSettings)
    tls: TlsSettings = msgspec.field(default_factory=TlsSettings)
    leadership: LeaseSettings = msgspec.field(default_factory=LeaseSettings)
    ledger: LedgerSettings = msgspec.field(default_factory=LedgerSettings)
    dialects: DialectSettings = msgspec.field(default_factory=DialectSettings)
    api: ClientSettings = msgspec.field(default_factory=ClientSettings)
    metrics_api: MetricsApiSettings = msgspec.field(default_factory=MetricsApiSettings)

    @property
    def host_and_port(self) -> tuple[str, int]:
        return host_and_port(self.listen)


def checked(settings: Settings) -> Settings:
    """Check what types cannot express; the first violation is raised."""
    _check_address("listen", settings.listen)
    if settings.metrics_api.listen:
        _check_address("metrics_api.listen", settings.metrics_api.listen)
    if bool(settings.metrics_api.certificate) != bool(settings.metrics_api.key):
        raise InputError("settings `metrics_api.certificate` and `metrics_api.key` go together; set both or neither")
    if settings.policy not in POLICIES:
        closest = get_close_matches(settings.policy, POLICIES, n=1, cutoff=0)[0]
        known = ", ".join(POLICIES)
        raise InputError(f"setting `policy` is {settings.policy!r}; did you mean {closest}? One of: {known}")
    if bool(settings.tls.certificate) != bool(settings.tls.key) or (settings.tls.client_ca and not settings.tls.key):
        raise InputError("settings `tls.certificate` and `tls.key` go together, and `tls.client_ca` needs both")
    if settings.tls.client_names and not settings.tls.client_ca:
        raise InputError("setting `tls.client_names` needs `tls.client_ca`: without it no certificate is requested")
    if not 0 <= settings.filter.slack < float("inf"):
        raise InputError(f"setting `filter.slack` is {settings.filter.slack}; write 0 or more")
    if settings.leadership.duration < 2 * settings.leadership.renew:
        raise InputError("`leadership.duration` must be at least twice `leadership.renew`; otherwise the lease is lost")
    return settings


def _check_address(name: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InputError(f"setting `{name}` is {address!r}; write HOST:PORT, such as 0.0.0.0:12345")
