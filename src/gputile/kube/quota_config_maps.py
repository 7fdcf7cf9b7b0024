"""ConfigMaps with quotas: those that the scheduler watches, and those in files.

This module loads the YAML; `quota.documents` turns it into values, because the core must not load YAML.
"""

from typing import Any

import msgspec

from gputile.model.errors import InputError
from gputile.quota.documents import OLD_KEY, OUR_KEY, read_old, read_ours
from gputile.quota.limits import Quotas
from gputile.text.documents import DocumentLimits, NotYaml, read_one

QUOTA = DocumentLimits(depth=10, from_aliases=0, unique=True)  # no YAML aliases: they make a quota harder to read
LAST_GOOD = "gputile.io/last-good-quota"
"""Annotation with the last valid text: a replica that starts after an invalid edit needs it too."""


class QuotaConfigMapMetadata(msgspec.Struct, frozen=True, rename="camel"):
    """The `metadata` of a quota ConfigMap, as far as gputile reads it."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    annotations: dict[str, str] | None = None


class QuotaConfigMap(msgspec.Struct, frozen=True):
    """A v1 ConfigMap with quotas."""

    metadata: QuotaConfigMapMetadata = QuotaConfigMapMetadata()
    data: dict[str, str] | None = None

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def title(self) -> str:
        """The ConfigMap's name in messages."""
        return f"ConfigMap {self.metadata.namespace}/{self.metadata.name}"

    def text(self, key: str) -> str | None:
        return (self.data or {}).get(key)

    @property
    def last_good(self) -> str | None:
        return (self.metadata.annotations or {}).get(LAST_GOOD)


def read_quotas(text: str | None, key: str, title: str) -> Quotas:
    """The quotas under gputile's key or gpu-admission's. Raises `InputError` for an invalid text."""
    if text is None:
        raise InputError(f"{title}: the key `{key}` is missing; add it, or delete the ConfigMap to remove all quotas")
    return read_old(text, title) if key == OLD_KEY else read_ours(_yaml(text, title), title)


def _yaml(text: str, title: str) -> Any:
    """A repeated namespace is an error here; YAML itself would silently use the last one."""
    try:
        return read_one(text, QUOTA)
    except NotYaml as error:
        line = f" (line {error.line})" if error.line else ""
        raise InputError(f"{title}: `{OUR_KEY}` is invalid YAML: {error.problem}{line}") from error
