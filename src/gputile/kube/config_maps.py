"""ConfigMaps, as far as quotas are read from them: those of a cluster that we follow, and those that a person names.

Room:  one object at a time; its text to values is `dialects.quotas`, but for YAML, which the core does not load.
Door:  `ConfigMap`, `read_quotas`.
"""

from typing import Any

import msgspec

from gputile.dialects.quotas import OLD_KEY, OUR_KEY, read_old, read_ours
from gputile.model.errors import YAML_SLIPS, InputError
from gputile.model.quotas import Quotas

DEEPEST = 10  # lists and mappings inside each other; the loader, which is C, would crash on very many
LAST_GOOD = "gputile.io/last-good-quota"
"""Annotation with the text that was last understood: a process that starts after a slip must know it too."""


class ConfigMapMeta(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    annotations: dict[str, str] | None = None


class ConfigMap(msgspec.Struct, frozen=True):
    """A v1 ConfigMap."""

    metadata: ConfigMapMeta = ConfigMapMeta()
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
    import yaml  # slow to load, and most clusters have no such ConfigMap

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        depth = 0
        for event in yaml.parse(text, loader):  # piece by piece, before anything is built of it
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise InputError(f"{title}: `{OUR_KEY}` is nested too deeply; see docs/quota.md")
            if isinstance(event, yaml.AliasEvent):
                raise InputError(f"{title}: `{OUR_KEY}` refers to itself with `*name`; write it out")
        _refuse_twins(yaml.compose(text, loader), title)
        return yaml.load(text, loader)
    except (yaml.YAMLError, *YAML_SLIPS) as wrong:
        said = " ".join(str(wrong).split())
        raise InputError(f"{title}: `{OUR_KEY}` is not the YAML that it should be: {said}") from wrong


def _refuse_twins(node: Any, title: str) -> None:
    if node is None or isinstance(node.value, str):
        return
    seen: set[str] = set()
    for key in [key for key, _ in node.value if isinstance(key.value, str)] if node.id == "mapping" else ():
        if key.value in seen:
            raise InputError(f"{title}: `{key.value}` stands there twice (line {key.start_mark.line + 1}); keep one")
        seen.add(key.value)
    for child in node.value:
        _refuse_twins(child[1] if isinstance(child, tuple) else child, title)
