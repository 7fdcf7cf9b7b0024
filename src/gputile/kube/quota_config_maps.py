"""ConfigMaps, as far as quotas are read from them: those of a cluster that we follow, and those that a person names.

Room:  one object at a time; its text to values is `dialects.quotas`, but for YAML, which the core does not load.
Door:  `QuotaConfigMap`, `read_quotas`.
"""

from typing import Any

import msgspec

from gputile.model.errors import InputError
from gputile.model.quotas import Quotas
from gputile.quota.documents import OLD_KEY, OUR_KEY, read_old, read_ours
from gputile.text.documents import DocumentLimits, NotYaml, read_one

QUOTA = DocumentLimits(
    depth=10, from_aliases=0, unique=True
)  # an alias in it would be harder to read than what it spares
LAST_GOOD = "gputile.io/last-good-quota"
"""Annotation with the text that was last understood: a process that starts after a slip must know it too."""


class QuotaConfigMapMetadata(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    annotations: dict[str, str] | None = None


class QuotaConfigMap(msgspec.Struct, frozen=True):
    """A v1 ConfigMap."""

    metadata: QuotaConfigMapMetadata = QuotaConfigMapMetadata()
    data: dict[str, str] | None = None

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def title(self) -> str:
        """As people speak of it."""
        return f"ConfigMap {self.metadata.namespace}/{self.metadata.name}"

    def text(self, key: str) -> str | None:
        return (self.data or {}).get(key)

    @property
    def last_good(self) -> str | None:
        return (self.metadata.annotations or {}).get(LAST_GOOD)


def read_quotas(text: str | None, key: str, title: str) -> Quotas:
    """What a ConfigMap says under our key or gpu-admission's. Raises `InputError` where it cannot be used."""
    if text is None:
        raise InputError(f"{title}: there is no key `{key}` in it; delete it if nobody is to have a quota")
    return read_old(text, title) if key == OLD_KEY else read_ours(_yaml(text, title), title)


def _yaml(text: str, title: str) -> Any:
    """A namespace that stands there twice is a slip of the hand, which YAML itself would pass over."""
    try:
        return read_one(text, QUOTA)
    except NotYaml as wrong:
        line = f" (line {wrong.line})" if wrong.line else ""
        raise InputError(f"{title}: `{OUR_KEY}` is not the YAML that it should be: {wrong.problem}{line}") from wrong
