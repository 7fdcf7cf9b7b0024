"""Settings of the scheduler process. Every room keeps its own settings and their meaning; here they are together."""

from difflib import get_close_matches
from typing import Literal

import msgspec

from gputile.dialects.settings import DialectSettings
from gputile.engine.fleet.fleet import KEEP
from gputile.engine.policies.table import DEFAULT_POLICY, POLICIES
from gputile.http.server import host_and_port
from gputile.kube.client import ClientSettings
from gputile.kube.leader_election import LeaseSettings
from gputile.ledger.ledger import LedgerSettings
from gputile.metrics_api.settings import MetricsApiSettings
from gputile.model.errors import InputError
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
    keep: int = KEEP
    """How many equally good nodes kube-scheduler may choose among."""

    slack: float = 0.0
    """How much worse than the best a node's score may be and still count as equally good."""

    narrow: bool = True
    """Name the best nodes only. false: all that fit, for kube-scheduler's own scores to choose among, to which
    `prioritizeVerb` adds ours. Slower (docs/performance.md), and its scores spread, so cards are packed less well."""


class BindSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    timeout: float = 4.0
    """Seconds for a whole bind, retries included. Keep it below kube-scheduler's `httpTimeout` (5 s by default)."""

    attempt: float = 2.0
    """Seconds for one attempt."""


class TlsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    certificate: str = ""
    """File with our certificate (PEM). Empty: plain HTTP, for trusted networks and tests only."""

    key: str = ""
    """File with its key."""

    client_ca: str = ""
    """File with the CA that signs kube-scheduler's client certificate. Empty: any client may ask."""

    client_names: tuple[str, ...] = ()
    """Names of client certificates that may call the verbs: the common name, or an alternative name of any kind. Empty:
    every certificate that `client_ca` signed. Name kube-scheduler here if that CA signs others too."""


class TellSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    per_second: float = 5.0
    """Events about waiting pods that are written per second, over all pods."""

    every: float = 60.0
    """Seconds between two such events about one pod; and only if there is something new to say."""

    nudge: bool = True
    """Touch a waiting pod that fits again, if kube-scheduler has not tried it within half a second by itself."""


class MetricsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What /metrics shows of the cluster: see docs/metrics.md."""

    cards: int = 10_000
    """Up to so many cards in the cluster each has series of its own; with more, only nodes and models do. 0: none."""

    pods: int = 10_000
    """Up to so many pods with cards each has series of its own, and each of its containers. 0: none."""

    pods_to: Literal["certified", "anyone"] = "certified"
    """Who sees names of pods and namespaces. certified: only who sends a client certificate, where `tls.client_ca` asks
    for one."""

    hami: bool = False
    """Show cards and pods under HAMi's names too, for dashboards made for HAMi."""


class PreemptSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    own: bool = True
    """Evict less important pods also where kube-scheduler, which knows only sums, finds nobody to evict: where a node
    has enough in sum and no single card fits. Off: only answer when kube-scheduler asks."""

    patience: float = 1.0
    """Seconds after a no that kube-scheduler has to find victims by itself."""

    margin: float = 10.0
    """Seconds beyond the longest grace period of the evicted pods for which the room they leave is kept."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    listen: str = "127.0.0.1:12345"
    """Address and port of the verbs, /healthz, /readyz and /metrics."""

    policy: str = DEFAULT_POLICY
    """How nodes and cards are chosen, unless a pod says otherwise: see docs/packing.md."""

    other_agents: Literal["one-at-a-time", "refuse"] = "one-at-a-time"
    """On nodes run by the agents of gpushare, vcuda, HAMi or vgpu-manager, which guess whose card they hand out: bind
    one pod at a time until it has started, or none at all."""

    steer_cpu_pods: bool = False
    """Lead pods that ask for no GPU to nodes where they strand no card. Needs a second stanza in kube-scheduler's
    configuration: see docs/scheduler.md."""

    evict_overlaps: bool = True
    """When two pods with our grants hold the same part of a card (a leader that was frozen may still be heard), evict
    the one that came last and tell it, budgets respected. False: only say so, in the log."""

    body_limit: int = 64
    """MiB; a larger request is refused. 5,000 whole nodes (`nodeCacheCapable: false`) are about 50."""

    audit: float = 60.0
    """Seconds between two proofs that the book adds up."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """From which level on log lines are written."""

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
    """What types cannot say."""
    _check_address("listen", settings.listen)
    if settings.metrics_api.listen:
        _check_address("metrics_api.listen", settings.metrics_api.listen)
    if bool(settings.metrics_api.certificate) != bool(settings.metrics_api.key):
        raise InputError("settings `metrics_api.certificate` and `metrics_api.key` go together")
    if settings.policy not in POLICIES:
        near = get_close_matches(settings.policy, POLICIES, n=1, cutoff=0)[0]
        raise InputError(f"setting `policy` is {settings.policy!r}; did you mean {near}? One of: {', '.join(POLICIES)}")
    if bool(settings.tls.certificate) != bool(settings.tls.key) or (settings.tls.client_ca and not settings.tls.key):
        raise InputError("settings `tls.certificate` and `tls.key` go together, and `tls.client_ca` needs both")
    if settings.tls.client_names and not settings.tls.client_ca:
        raise InputError("setting `tls.client_names` needs `tls.client_ca`: without it no certificate is asked for")
    if not 0 <= settings.filter.slack < float("inf"):
        raise InputError(f"setting `filter.slack` is {settings.filter.slack}; write 0 or more")
    if settings.leadership.duration < 2 * settings.leadership.renew:
        raise InputError("setting `leadership.duration` is at least twice `leadership.renew`, else the lease is lost")
    return settings


def _check_address(name: str, said: str) -> None:
    host, _, port = said.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InputError(f"setting `{name}` is {said!r}; write HOST:PORT, such as 0.0.0.0:12345")
