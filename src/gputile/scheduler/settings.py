"""Settings of the scheduler process: one YAML file, then the environment, then flags; the later wins.

Every room keeps its own settings and their meaning; here they are put together. Unknown keys are refused with the
nearest right name, because a setting that is silently ignored is found out in production.
"""

import ast
import inspect
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Literal, get_type_hints

import msgspec

from gputile.book.ledger import BookSettings
from gputile.dialects.settings import DialectSettings
from gputile.engine.fleet import KEEP
from gputile.engine.policies import DEFAULT_POLICY, POLICIES
from gputile.kube.client import ClientSettings
from gputile.kube.lease import LeaseSettings
from gputile.model.errors import InputError

ABOVE_ZERO = (
    "filter.keep",
    "body_limit",
    "audit",
    "bind.timeout",
    "bind.attempt",
    "book.pencil_ttl",
    "book.assume_ttl",
    "tell.per_second",
    "tell.every",
    "preempt.patience",
    "preempt.margin",
    "leadership.duration",
    "leadership.renew",
    "leadership.retry",
    "api.connections",
    "api.request_timeout",
    "api.page",
    "api.watch_timeout",
    "api.silence",
)
PREFIX = "GPUTILE_"
SERVICE_LINKS = ("_SERVICE_HOST", "_SERVICE_PORT", "_PORT")
"""Kubernetes puts `<SERVICE>_PORT...` into every pod; a Service named gputile-... must not look like a setting."""


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


class TellSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    per_second: float = 5.0
    """Events about waiting pods that are written per second, over all pods."""

    every: float = 60.0
    """Seconds between two such events about one pod; and only if there is something new to say."""

    nudge: bool = True
    """Touch a waiting pod that fits again, if kube-scheduler has not tried it within half a second by itself."""


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
    preempt: PreemptSettings = msgspec.field(default_factory=PreemptSettings)
    tls: TlsSettings = msgspec.field(default_factory=TlsSettings)
    leadership: LeaseSettings = msgspec.field(default_factory=LeaseSettings)
    book: BookSettings = msgspec.field(default_factory=BookSettings)
    dialects: DialectSettings = msgspec.field(default_factory=DialectSettings)
    api: ClientSettings = msgspec.field(default_factory=ClientSettings)

    @property
    def host_and_port(self) -> tuple[str, int]:
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port)


# ---- putting them together ------------------------------------------------------------------------------------------


def compose(document: Any, environment: Mapping[str, str], flags: Mapping[str, str], source: str) -> Settings:
    """Defaults, then the file, then GPUTILE_..., then flags (`filter.keep=4`). `source` is how errors name the file."""
    tree = document if document is not None else {}
    if not isinstance(tree, dict):
        raise InputError(f"{source}: settings are a YAML mapping such as `policy: tiling`, not {type(tree).__name__}")
    _refuse_unknown(tree, Settings, source, "")
    for name, value in _from_environment(environment).items():
        tree = _set(tree, name, value)
    for name, value in flags.items():
        tree = _set(tree, _known(name, "--set"), value)
    try:
        return checked(msgspec.convert(tree, Settings, strict=False))
    except msgspec.ValidationError as wrong:
        raise InputError(f"{source}: {wrong}; see `gputile scheduler --show-settings`") from wrong


def checked(settings: Settings) -> Settings:
    """What types cannot say."""
    host, _, port = settings.listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InputError(f"setting `listen` is {settings.listen!r}; write HOST:PORT, such as 0.0.0.0:12345")
    if settings.policy not in POLICIES:
        near = _nearest(settings.policy, list(POLICIES))
        raise InputError(f"setting `policy` is {settings.policy!r}; did you mean {near}? One of: {', '.join(POLICIES)}")
    if bool(settings.tls.certificate) != bool(settings.tls.key) or (settings.tls.client_ca and not settings.tls.key):
        raise InputError("settings `tls.certificate` and `tls.key` go together, and `tls.client_ca` needs both")
    for name in ABOVE_ZERO:
        if not 0 < _get(settings, name) < float("inf"):
            raise InputError(f"setting `{name}` is {_get(settings, name)}; write a number above 0")
    if not 0 <= settings.filter.slack < float("inf"):
        raise InputError(f"setting `filter.slack` is {settings.filter.slack}; write 0 or more")
    if settings.leadership.duration < 2 * settings.leadership.renew:
        raise InputError("setting `leadership.duration` is at least twice `leadership.renew`, else the lease is lost")
    return settings


def names(of: type[msgspec.Struct] = Settings, before: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting by its dotted name, with its default."""
    for field in msgspec.structs.fields(of):
        inner = _inner(of, field.name)
        if inner is not None:
            yield from names(inner, f"{before}{field.name}.")
        else:
            yield f"{before}{field.name}", field.default


def explained(settings: Settings) -> str:
    """The settings in force as YAML, each under its meaning."""
    return "\n".join(_explained(settings, "")) + "\n"


def _explained(settings: msgspec.Struct, indent: str) -> Iterator[str]:
    meanings = _meanings(type(settings))
    for field in msgspec.structs.fields(settings):
        value = getattr(settings, field.name)
        yield from (f"{indent}# {line.strip()}" for line in meanings.get(field.name, "").splitlines())
        if isinstance(value, msgspec.Struct):
            yield f"{indent}{field.name}:"
            yield from _explained(value, indent + "  ")
        else:
            yield f"{indent}{field.name}: {msgspec.json.encode(value).decode()}"


def _meanings(of: type[msgspec.Struct]) -> dict[str, str]:
    """The text under each field, which the classes carry for readers; here it is for users."""
    body = ast.parse(inspect.getsource(of)).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            found[field.target.id] = str(ast.literal_eval(text.value))
    return found


def changed(settings: Settings) -> dict[str, Any]:
    """The settings that are not at their defaults, by their dotted names."""
    usual = Settings()
    return {name: _get(settings, name) for name, _ in names() if _get(settings, name) != _get(usual, name)}


def _inner(of: type[msgspec.Struct], name: str) -> type[msgspec.Struct] | None:
    hint = get_type_hints(of)[name]
    return hint if isinstance(hint, type) and issubclass(hint, msgspec.Struct) else None


def _refuse_unknown(tree: dict[Any, Any], of: type[msgspec.Struct], source: str, before: str) -> None:
    known = [field.name for field in msgspec.structs.fields(of)]
    for key, value in tree.items():
        if key not in known:
            near = _nearest(f"{before}{key}", [name for name, _ in names()] + [f"{before}{name}" for name in known])
            raise InputError(f"{source}: there is no setting `{before}{key}`; did you mean `{near}`?")
        inner = _inner(of, key)
        if inner is not None and isinstance(value, dict):
            _refuse_unknown(value, inner, source, f"{before}{key}.")


def _from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`GPUTILE_FILTER_KEEP` is `filter.keep`."""
    by_variable = {PREFIX + name.upper().replace(".", "_"): name for name, _ in names()}
    found = {}
    for variable, value in environment.items():
        if variable in by_variable:
            found[by_variable[variable]] = value
        elif variable.startswith(PREFIX) and not _is_service_link(variable):
            near = _nearest(variable, list(by_variable))
            raise InputError(
                f"there is no setting for the variable {variable}; did you mean {near}? "
                f"`gputile scheduler --show-settings` has them all"
            )
    return found


def _is_service_link(variable: str) -> bool:
    return any(part in variable for part in SERVICE_LINKS)


def _known(name: str, where: str) -> str:
    every = [known for known, _ in names()]
    if name not in every:
        raise InputError(f"{where}: there is no setting `{name}`; did you mean `{_nearest(name, every)}`?")
    return name


def _nearest(word: str, known: list[str]) -> str:
    """The right name for a wrong one; a forgotten section (`keep` for `filter.keep`) is the likeliest slip."""
    same_end = [name for name in known if name.rpartition(".")[2] == word.rpartition(".")[2]]
    return (same_end or get_close_matches(word, known, n=1, cutoff=0))[0]


def _set(tree: dict[Any, Any], name: str, value: str) -> dict[Any, Any]:
    head, _, rest = name.partition(".")
    if not rest:
        return {**tree, head: value}
    inner = tree.get(head)
    return {**tree, head: _set(inner if isinstance(inner, dict) else {}, rest, value)}


def _get(settings: msgspec.Struct, name: str) -> Any:
    found: Any = settings
    for part in name.split("."):
        found = getattr(found, part)
    return found
