"""What `gputile doctor` works with: facts of a cluster in, findings out.

Room:  values, and careful ways to read objects that may lack anything. The checks themselves are in `checks_control`,
       `checks_scheduler` and `checks_nodes`: pure functions from facts to findings. What may not be read is `unknown`,
       and never `ok`.
Door:  `ClusterFacts`, `Finding`, and `ok`, `warn`, `fail`, `unknown` to make one.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from gputile.cli.source import ClusterSnapshot, UnreadableKind
from gputile.dialects.settings import DialectSettings

NAME = "gputile-scheduler"
OK, WARN, FAIL, UNKNOWN = "ok", "warn", "fail", "unknown"
SHOWN = 5


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one check found."""

    check: str
    state: str  # ok, warn, fail, unknown
    text: str
    fix: str = ""


def ok(check: str, text: str) -> Finding:
    return Finding(check=check, state=OK, text=text)


def warn(check: str, text: str, fix: str) -> Finding:
    return Finding(check=check, state=WARN, text=text, fix=fix)


def fail(check: str, text: str, fix: str) -> Finding:
    return Finding(check=check, state=FAIL, text=text, fix=fix)


def unknown(check: str, text: str, fix: str) -> Finding:
    return Finding(check=check, state=UNKNOWN, text=text, fix=fix)


class ClusterFacts(msgspec.Struct, kw_only=True):
    """What was seen. Of the objects by name: JSON, a list of them, None where there is none, `UnreadableKind` where
    it is not to be told."""

    seen: ClusterSnapshot
    now: float  # seconds since 1970
    settings: DialectSettings = DialectSettings()
    objects: Mapping[str, Any] = {}
    metrics: bytes | UnreadableKind | None = None  # of the leading scheduler

    def of(self, name: str) -> Any:
        return self.objects.get(name)


Check = Callable[[ClusterFacts], Iterable[Finding]]


def parsed(text: str) -> dict[str, Any] | None:
    """A YAML document that is a mapping; None when it is none."""
    from gputile.text.documents import NotYaml, read_one

    try:
        found = read_one(text)
    except NotYaml:
        return None
    return found if isinstance(found, dict) else None


def meta(found: Any) -> dict[str, Any]:
    return (found or {}).get("metadata") or {}


def items(found: Any) -> list[Any]:
    return list((found or {}).get("items") or ())


def few(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:SHOWN]) + (f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else "")


def unseen(check: str, what: str, found: UnreadableKind) -> Finding:
    return unknown(check, f"{what} cannot be seen: {found.why}", found.fix)
