"""What the checks of `gputile doctor` work with: facts of a cluster in, findings out.

Values, and careful ways to read objects that may lack any field. The checks themselves are in `control`, `scheduler`
and `nodes`: pure functions from facts to findings. What may not be read is `unknown`, and never `ok`.
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
    """The result of one check: its state, a sentence, and the fix."""

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
    """The cluster as the checks see it. An object by name is JSON, a list of objects, None where there is none, or
    `UnreadableKind` where it cannot be read."""

    snapshot: ClusterSnapshot
    now: float  # seconds since 1970
    settings: DialectSettings = DialectSettings()
    objects: Mapping[str, Any] = {}
    metrics: bytes | UnreadableKind | None = None  # of the leading scheduler

    def of(self, name: str) -> Any:
        return self.objects.get(name)


Check = Callable[[ClusterFacts], Iterable[Finding]]


def parsed(text: str) -> dict[str, Any] | None:
    """A YAML document that is a mapping; None for anything else."""
    from gputile.text.documents import NotYaml, read_one

    try:
        document = read_one(text)
    except NotYaml:
        return None
    return document if isinstance(document, dict) else None


def meta(item: Any) -> dict[str, Any]:
    return (item or {}).get("metadata") or {}


def items(answer: Any) -> list[Any]:
    return list((answer or {}).get("items") or ())


def few(names: Iterable[str]) -> str:
    """The first names in order, and the number of the others."""
    ordered = sorted(names)
    return ", ".join(ordered[:SHOWN]) + (f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else "")


def unseen(check: str, subject: str, unreadable: UnreadableKind) -> Finding:
    return unknown(check, f"{subject} cannot be read: {unreadable.why}", unreadable.fix)
